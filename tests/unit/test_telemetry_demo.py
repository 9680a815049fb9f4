"""The demo: what it stops, what it claims, what it deletes."""

import importlib.util
import sys
from pathlib import Path

import pytest

from smp_train import arguments
from smp_train.data.prepare import options as prepare_flags
from smp_train.inference import generation
from smp_train.telemetry import report
from smp_train.telemetry.run_folder import RunFolder

SCRIPT = Path(__file__).resolve().parents[2] / "launchers" / "local" / "demo.py"


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_torchrun(words):
    """Read torchrun's flags and those of the program that it starts, for the number of processes that it starts."""
    from torch.distributed.run import parse_args

    launcher = parse_args(words)
    processes = int(launcher.nproc_per_node)
    assert (launcher.module, launcher.training_script, launcher.training_script_args[0]) == (True, "smp_train", "train")
    resolved = arguments.parse(launcher.training_script_args[1:])
    arguments.validate(resolved.args, processes, processes)
    assert arguments.ineffective(resolved, "native") == []


READERS = {
    "torchrun": read_torchrun,
    "prepare": prepare_flags.read,
    "generate": lambda words: generation.options().parse_args(words),
    "report": lambda words: report.flags().parse_args(words),
}


def test_its_commands_are_read_by_the_programs_that_it_starts(demo):
    read = []
    for command in (command() for name, command in vars(demo).items() if name.endswith("_command")):
        program, *words = command
        verb = words.pop(0) if Path(program).name == "smp-train" else Path(program).name
        READERS[verb](words)
        read.append(verb)
    assert sorted(read) == sorted(READERS)


@pytest.mark.parametrize(
    ("program", "end"), [("exit(3)", "exit code 3"), ("import time; time.sleep(600)", "runs after 0 s")]
)
def test_a_command_that_fails_or_hangs_ends_the_demo(demo, monkeypatch, program, end):
    monkeypatch.setattr(demo, "TIMEOUT", 240.0 if "exit" in program else 0.0)
    with pytest.raises(SystemExit, match=f"The demo failed: .*{end}"):
        demo.run([sys.executable, "-c", program])


def test_a_training_is_stopped_once(demo, monkeypatch, tmp_path, capfd):
    run = RunFolder(tmp_path)
    run.create()
    monkeypatch.setattr(demo, "RUN", run)
    waits = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); run.write_run(config={}); signal.pause()"
    code = "import signal, sys; from smp_train.telemetry.run_folder import RunFolder; "
    code += f"run = RunFolder({str(tmp_path)!r})"
    demo.run([sys.executable, "-c", f"{code}; {waits}"], stop=(tmp_path / "run.json").exists)
    assert capfd.readouterr().out.count("kill -TERM") == 1


@pytest.mark.parametrize(
    ("flaw", "failed"),
    [
        ({}, ""), ({"validation": 5.6}, "losses end"), ({"missing": 12}, "none missing"),
        ({"resumed": 8}, "resumed at step 10"), ({"wait": 0.01}, "waits for its data less than 1%"),
    ],
)  # fmt: skip
def test_a_claim_that_does_not_hold_is_named(demo, flaw, failed):
    steps = [n for n in range(1, 21) if n != flaw.get("missing")]
    common = {"step_sec": 0.5, "data_wait_sec": flaw.get("wait", 0.0005)}
    records = [{"event": "start", "step": 0}]
    records += [{"step": n, "loss": 8.0 - 0.3 * n, **common} for n in steps]
    records.insert(10, {"event": "resume", "step": flaw.get("resumed", 10)})
    records.append({"event": "evaluate", "step": 20, "loss": flaw.get("validation", 2.5)})
    _, claims = demo.check(records, 6.0, stopped_at=10, steps=20)
    assert [failed in claim for claim, true in claims.items() if not true] == [True] * bool(failed)


def test_only_a_folder_that_the_demo_made_is_deleted(demo, tmp_path):
    folder = tmp_path / "demo"
    for _ in range(2):
        demo.start_afresh(folder)
        assert [file.name for file in folder.iterdir()] == [demo.MARKER]
        (folder / "old").write_text("")
    (tmp_path / "linked").symlink_to(folder)
    with pytest.raises(SystemExit, match="not made by this demo"):
        demo.start_afresh(tmp_path / "linked")
    (folder / demo.MARKER).unlink()
    with pytest.raises(SystemExit, match="not made by this demo"):
        demo.start_afresh(folder)
    assert (folder / "old").exists()
