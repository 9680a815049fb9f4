"""The report as an image of the right size that changes with what it shows, and its refusals."""

import json
import struct
import subprocess
import sys

import pytest

from smp_train.errors import ConfigError
from smp_train.telemetry.metrics import MetricsWriter
from smp_train.telemetry.report import main, smooth, write_report
from smp_train.telemetry.run_folder import RunFolder


def write_metrics(folder, steps=60):
    folder.mkdir(exist_ok=True)
    writer = MetricsWriter(folder)
    writer.event("start", step=0)
    for step in range(1, steps + 1):
        writer.step({"step": step, "loss": 8 - step / 20, "tokens_per_sec": 1000.0, "tokens": step * 512})
        if step % 20 == 0:
            writer.event("evaluate", step=step, loss=8 - step / 25)
            writer.event("save", step=step)
    writer.event("stop", step=steps)
    writer.event("resume", step=steps)
    writer.close()


def drawn(folder, monkeypatch):
    """Write the report and return its two panels."""
    from matplotlib.figure import Figure

    kept = []
    original = Figure.savefig

    def savefig(self, *args, **kwargs):
        kept.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    write_report(folder)
    return kept[0].axes


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_command_writes_a_png_of_1200_by_800_and_names_it(tmp_path, capsys):
    write_metrics(tmp_path)
    assert main([str(tmp_path)]) == 0
    path = tmp_path / "report.png"
    assert capsys.readouterr().out == f"{path}\n"
    assert struct.unpack(">II", path.read_bytes()[16:24]) == (1200, 800)
    assert main([str(tmp_path)]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "report.png"]


def test_what_is_drawn_is_what_the_run_said(tmp_path, monkeypatch):
    write_metrics(tmp_path)
    train = tmp_path / "data" / "train"
    train.mkdir(parents=True)
    (tmp_path / "data" / "_manifest.json").write_text(json.dumps({"unigram_entropy_nats": {"train": 6.25}}))
    config = {"run_name": "small", "model_type": "llama_v2", "training_dir": str(train)}
    RunFolder(tmp_path).write_run(config=config, mesh={"world_size": 2})
    losses, speed = drawn(tmp_path, monkeypatch)
    assert labels(losses) == [
        "train: last 5.000", "validation: last 5.600", "unigram entropy: 6.250", "checkpoint saved",
    ]  # fmt: skip
    assert labels(speed) == ["tokens/s, all devices", "median: 1,000"]
    assert [text.get_text() for text in losses.texts] == ["stopped, resumed at 60"]
    title = losses.get_figure().get_suptitle()
    assert title == "small  ·  llama_v2  ·  2 processes  ·  60 steps  ·  30,720 tokens"
    by_label = {line.get_label(): line for line in losses.lines}
    assert list(by_label["validation: last 5.600"].get_xdata()) == [20, 40, 60]
    assert list(by_label["checkpoint saved"].get_xdata()) == [20, 40, 60]
    assert list(by_label["unigram entropy: 6.250"].get_ydata()) == [6.25, 6.25]


def test_a_run_killed_after_one_step_with_no_speed_and_no_loss_still_has_a_report(tmp_path):
    MetricsWriter(tmp_path).step({"step": 1, "loss": float("nan")})
    assert write_report(tmp_path).stat().st_size > 1000


def test_refusals_are_one_line_and_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        write_report(tmp_path)
    MetricsWriter(tmp_path).event("start", step=0)
    with pytest.raises(ConfigError, match="no step"):
        write_report(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[report\]'"):
        write_report(tmp_path)


def test_smoothing_is_the_mean_of_what_lies_around():
    assert smooth([1, 2, 3, 4, 9], 3) == pytest.approx([1.5, 2, 3, 16 / 3, 6.5])
    assert smooth([3.0, 1.0], 1) == [3.0, 1.0]
    assert smooth([2.0] * 7, 5) == [2.0] * 7


def test_the_command_line_can_import_it_without_torch_or_matplotlib():
    code = "import sys, smp_train.telemetry.report; print({'torch', 'matplotlib'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
