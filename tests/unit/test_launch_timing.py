"""Whether a run can save before its time is up is said before it is submitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smp_train.arguments import parse
from smp_train.errors import ConfigError
from smp_train.launch import timing
from smp_train.launch.instances import Machines, find

LLAMA_70B = ["--model_type", "llama_v2", "--model_size", "70b"]
HOUR = 3600


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("30:15", 1815), ("2:30:15", 9015), ("1-2", 93600), ("1-2:30", 95400), ("2-00:00:01", 172801),
        ("UNLIMITED", None), ("INVALID", None), ("", None), (None, None),
    ],
)  # fmt: skip
def test_times_as_slurm_writes_them(text: str | None, seconds: int | None) -> None:
    assert timing.slurm_seconds(text) == seconds


def test_limit_without_time_to_train() -> None:
    with pytest.raises(ConfigError, match=r"--time 6: .*6 min.* 5 min"):
        timing.check_limit(360, 300, "--time 6")
    timing.check_limit(361, 300, "--time 6:01")
    timing.check_limit(None, 300, "--time")


def save_warnings(
    tmp_path: Path, *words: str, limit: float | None = 48 * HOUR, margin: float = 300, nodes: int = 8
) -> str:
    resolved = parse([*words, "--run_dir", str(tmp_path)], {})
    return "\n".join(
        timing.save_warnings(
            resolved, Machines(find("p5.48xlarge"), nodes, 8), limit, margin, "--save_before"
        )
    )  # fmt: skip


def test_time_for_the_last_checkpoint(tmp_path: Path) -> None:
    often = [*LLAMA_70B, "--checkpoint_freq=10"]
    assert save_warnings(tmp_path, *often[:3], "7b", "--checkpoint_freq=10") == save_warnings(tmp_path, *often) == ""
    said = save_warnings(tmp_path, *often, margin=60)
    assert "a checkpoint of this model has 828 GB, and there are 60 s to save one" in said
    assert "13.8 GB/s" in said
    assert "raise --save_before" in save_warnings(tmp_path, *often, nodes=1)


def test_interval_against_the_limit(tmp_path: Path) -> None:
    many = [*LLAMA_70B, "--train_batch_size=4", "--max_context_width=4096", "--checkpoint_freq=1000"]
    long = [*many, "--max_steps=100000"]
    # 6 x 69e9 x 64 x 4 x 4096 FLOP at half of 64 x 989e12 FLOP/s: 13.7 s a step.
    said = save_warnings(tmp_path, *long, limit=3 * HOUR)
    assert "--checkpoint_freq 1000: that takes 3.8 h (13.7 s a step, at 50% of the peak of 64 H100)" in said
    assert "--checkpoint_freq 191 would save some four times" in said
    for words, limit in ((long, 8), (long, None), ([*many, "--max_steps=500"], 3), ([*long, "--num_layers=2"], 3)):
        assert save_warnings(tmp_path, *words, limit=limit and limit * HOUR) == "", "enough, or unknown"
    lines = [{"event": "start", "step": 0}, *({"step": step, "step_sec": 20.0} for step in range(1, 6))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{torn\n")
    said = save_warnings(tmp_path, "--hf_model", "some/model", "--checkpoint_freq", "500", "1000", limit=HOUR)
    assert "that takes 2.8 h (20 s a step, as measured in this run folder), and the time limit is 60 min" in said
