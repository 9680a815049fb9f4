"""The demo's own machinery, on a trainer of a few lines: what it stops, what it believes, what it deletes."""

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

from smp_train.telemetry.metrics import MetricsWriter
from smp_train.telemetry.run_folder import RunFolder

SCRIPT = Path(__file__).resolve().parents[2] / "launchers" / "local" / "demo.py"

TRAINER = """
import os, signal, sys
from pathlib import Path
from smp_train.telemetry.metrics import MetricsWriter
from smp_train.telemetry.run_folder import RunFolder

folder, mode = Path(sys.argv[1]), sys.argv[2]
run = RunFolder(folder / "run")
run.create()

def stop(*_):
    if "unsaved" not in mode:
        saved = folder / "checkpoints" / "llama-8steps"
        saved.mkdir(parents=True)
        (saved / "COMMITTED").touch()
    if "unmarked" not in mode:
        run.mark_stopped(8)
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
run.write_run(config={})
writer = MetricsWriter(run.path)
for step in range(1, 5 if mode == "short" else 9):
    writer.step({"step": step, "loss": 1.0})
while mode != "short":
    signal.pause()
"""


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trainer(folder, mode):
    return [sys.executable, "-c", TRAINER, str(folder), mode]


def stop(demo, folder, mode):
    command = trainer(folder, mode)
    return demo.stop_half_way(
        RunFolder(folder / "run"), folder / "checkpoints", command, half=8, timeout=240
    )


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_trainer_that_saves_and_stops_is_believed(demo, tmp_path, capfd):
    assert stop(demo, tmp_path, "good") == 8
    shown = capfd.readouterr().out
    assert "kill -TERM" in shown
    assert "llama-8steps" in shown
    assert gone(RunFolder(tmp_path / "run").read_run()["pid"])


@pytest.mark.parametrize(
    ("mode", "message"),
    [("unmarked", "STOPPED"), ("unsaved", "no checkpoint"), ("short", "ended by itself before step 8")],
)
def test_a_trainer_that_does_not_is_not(demo, tmp_path, mode, message):
    with pytest.raises(demo.DemoFailed, match=message):
        stop(demo, tmp_path, mode)


def test_a_trainer_that_hangs_is_killed_when_its_time_is_up(demo, tmp_path):
    run = RunFolder(tmp_path / "run")
    with demo.started(trainer(tmp_path, "good")) as process:
        demo.wait_for_step(process, run, 8, timeout=240)
        with pytest.raises(demo.DemoFailed, match="step 99"):
            demo.wait_for_step(process, run, 99, timeout=0.3)
    assert gone(process.pid)


def test_a_command_that_fails_is_named(demo):
    command = [sys.executable, "-c", "exit(3)"]
    with pytest.raises(demo.DemoFailed, match="exit code 3"), demo.started(command) as process:
        demo.finish(process, 240)


def finished_run(folder, *, last=2.0, steps=20, missing=(), resumed=10, validation=2.5, waits=(0.001, 0.5)):
    run = RunFolder(folder)
    run.create()
    writer = MetricsWriter(folder)
    writer.event("start", step=0)
    for step in range(1, steps + 1):
        if step not in missing:
            speed = {"step_sec": 0.5, "data_wait_sec": 0.5 * waits[step % 5 == 0]}
            writer.step({"step": step, "loss": 8.0 - (8.0 - last) * step / steps, **speed})
        if step == 10:
            writer.event("resume", step=resumed)
    writer.event("evaluate", step=steps, loss=validation)
    run.mark_done(steps)
    return run


def test_a_run_that_holds_every_claim(demo, tmp_path):
    losses = demo.check(finished_run(tmp_path), 6.0, stopped_at=10, steps=20)
    assert losses["first train"] == pytest.approx(7.7)
    assert losses["last train"] == pytest.approx(4.85)
    assert losses["last validation"] == 2.5


@pytest.mark.parametrize(
    ("flaw", "claim"),
    [
        ({"last": 5.9}, "training loss ends"),
        ({"validation": 5.6}, "validation loss ends"),
        ({"missing": {12}}, "none missing"),
        ({"resumed": 8}, "resumed at step 10"),
        ({"steps": 18}, "DONE says step 20"),
        ({"waits": (0.02, 0.0)}, r"waits for its data less than 1%.*waiting for data: 2\.00%"),
    ],
)
def test_a_run_that_misses_one_claim_fails_by_its_name(demo, tmp_path, flaw, claim):
    with pytest.raises(demo.DemoFailed, match=claim):
        demo.check(finished_run(tmp_path, **flaw), 6.0, stopped_at=10, steps=20)


def test_only_a_folder_that_the_demo_made_is_deleted(demo, tmp_path):
    folder = tmp_path / "demo"
    for _ in range(2):
        demo.start_afresh(folder)
        assert [file.name for file in folder.iterdir()] == [demo.MARKER]
        (folder / "old").write_text("")
    (folder / demo.MARKER).unlink()
    with pytest.raises(demo.DemoFailed, match="not made by this demo"):
        demo.start_afresh(folder)
    assert (folder / "old").exists()
    linked = tmp_path / "linked"
    demo.start_afresh(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(demo.DemoFailed, match="not made by this demo"):
        demo.start_afresh(linked)


def test_a_failure_is_exit_code_1_and_one_line(demo, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    here = os.getcwd()
    (tmp_path / "demo").mkdir()
    try:
        assert demo.main() == 1
    finally:
        os.chdir(here)
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err.strip().endswith("move it away first")
