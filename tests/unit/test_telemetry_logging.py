"""Log lines as users and dashboards see them, and that SageMaker's expressions find every number in them."""

import logging
import re
import subprocess
import sys

import pytest

from smp_train.distributed import ALL_RANKS
from smp_train.telemetry.logging_utils import METRIC_DEFINITIONS, batch_line, get_logger, setup_logging, validation_line

RECORD = {
    "step": 12, "loss": 10.461412, "samples_per_sec": 10.1099, "tflops_per_device": 61.2, "lr": 2.5e-5,
    "grad_norm": 1.03118, "tokens_per_sec_per_device": 1234.5, "mfu": 0.4123, "memory_gib": 61.22,
    "step_sec": 2.0, "data_wait_sec": 0.01,
}  # fmt: skip


@pytest.fixture(autouse=True)
def restore_logger():
    logger = get_logger()
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.level, logger.propagate = handlers, level, propagate


def matches(line):
    hits = ((each["Name"], re.search(each["Regex"], line)) for each in METRIC_DEFINITIONS)
    return {name: float(hit[1]) for name, hit in hits if hit}


def test_the_batch_line_is_the_one_dashboards_match():
    assert batch_line(RECORD) == (
        "Batch 12 Loss: 10.46141, Speed: 10.11 samples/sec, Model TFLOPS/GPU: 61.20, lr: 0.000025, "
        "gradnorm: 1.0312, tokens/sec/device: 1234.5, MFU: 41.2%, memory: 61.22 GiB"
    )
    assert len(batch_line(RECORD)) < 200 - len("2026-01-02 03:04:05 I [train_lib] ")
    assert matches("2026-01-02 03:04:05 I [train_lib] " + batch_line(RECORD)) == {
        "train:loss": 10.46141, "train:samples_per_sec": 10.11, "train:tflops_per_gpu": 61.2,
        "train:lr": 2.5e-5, "train:grad_norm": 1.0312, "train:tokens_per_sec_per_device": 1234.5,
        "train:mfu_percent": 41.2, "train:memory_gib": 61.22,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "shown", "numbers"),
    [
        (batch_line({"step": 1, "loss": 2.0, "lr": 1e-4, "grad_norm": 0.5, "mfu": None, "memory_gib": 0.25}),
         "Speed: n/a samples/sec",
         {"train:loss": 2.0, "train:lr": 1e-4, "train:grad_norm": 0.5, "train:memory_gib": 0.25}),
        (validation_line(12, 3.210984), "Batch 12 Validation loss: 3.21098, perplexity: 24.80",
         {"validation:loss": 3.21098, "validation:perplexity": 24.8}),
        (validation_line(12, 165.2), "perplexity: 485165195.41",  # e^20, the most
         {"validation:loss": 165.2, "validation:perplexity": 485165195.41}),
        *((batch_line({"step": 1, "lr": lr}), "lr: ", {"train:lr": lr}) for lr in (0.0, 1e-5, 9.9e-6)),
        *((batch_line({"step": 1, "loss": float(bad)}), f"Loss: {bad},", {}) for bad in ("nan", "inf")),
    ],
)  # fmt: skip
def test_lines_have_what_is_known(line, shown, numbers):
    assert shown in line
    assert matches(line) == pytest.approx(numbers, rel=1e-3)


TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.mark.parametrize(
    ("rank", "out", "err"),
    [(0, rf"({TIME} [IW] \[test_telemetry_logging\] .+\n){{3}}", ""), (3, "", rf"rank 3: {TIME} W .*look here\n")],
)
def test_rank_0_writes_to_stdout_and_other_ranks_only_what_is_wrong_with_them(rank, out, err, capsys):
    setup_logging(rank)
    get_logger().info("hello")
    get_logger().warning("look here")
    get_logger().warning("all ranks log this", extra=ALL_RANKS)
    written = capsys.readouterr()
    assert re.fullmatch(out, written.out)
    assert re.fullmatch(err, written.err)


def test_every_rank_has_a_file_and_a_second_call_replaces_the_first(tmp_path, capsys):
    for word, level in (("first", logging.INFO), ("second", logging.DEBUG)):
        setup_logging(3, log_dir=tmp_path / "logs", level=level)
        get_logger().log(level, word)
    assert re.findall("first|second", (tmp_path / "logs/rank-3.log").read_text()) == ["first", "second"]
    assert capsys.readouterr() == ("", "")


def test_a_full_disk_is_one_warning(tmp_path, capsys):
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    setup_logging(0, log_dir=tmp_path)
    for number in range(100):
        get_logger().info("line %d", number)
    out, err = capsys.readouterr()
    assert (len(out.splitlines()), out.count("log lines are being lost (No space left on device)"), err) == (101, 1, "")


@pytest.mark.parametrize("module", ["logging_utils", "report"])
def test_machines_that_launch_or_report_need_no_torch(module):
    code = f"import sys, smp_train.telemetry.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
