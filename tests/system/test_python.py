"""Programs that train: the examples and the notebook, as a user runs them, and how a program of several ranks fails."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.harness import as_torchrun, free_port
from tests.system.command import ROOT, Command, warm
from tests.tiers import core

NOTEBOOK = ROOT / "launchers" / "quickstart.ipynb"
SAID = {
    "chat_finetune.py": r"loss 0\.0\d+ per token .* again with --resume_from_checkpoint checkpoints\.$",
    "own_data.py": r"loss 0\.0\d+ on 800 tokens; (9\d|100)% of the words",
    "own_loss.py": r"cross entropy with penalty: 6\.\d+ at first, [45]\.\d+ after 40 steps",
    "callbacks.py": r"stopped at step \d+, validation loss 5\.\d+, .*llama_v2-\d+steps",
}


def test_every_example_is_run_here() -> None:
    tested = {path.name for path in (ROOT / "examples").glob("*.py") if "smp_train import" in path.read_text()}
    assert set(SAID) == tested


@pytest.mark.slow
@pytest.mark.parametrize("name", core(SAID, {"own_loss.py"}.__contains__))
def test_example(name: str, tmp_path: Path) -> None:
    with warm(tmp_path, str(ROOT / "examples" / name)) as example:
        assert example.code() == 0, example.err
        assert re.search(SAID[name], example.out.splitlines()[-1])
    if name == "callbacks.py":
        steps = (tmp_path / "runs/callbacks/steps.csv").read_text().splitlines()
        assert steps[0] == "step,loss,grad_norm,tokens_per_sec"
        assert [int(line.split(",")[0]) for line in steps[1:4]] == [5, 10, 15]
        assert (tmp_path / "runs/callbacks/STOPPED").exists()


@pytest.mark.slow
def test_the_commands_of_the_page_on_finetuning_run_as_they_stand(tmp_path: Path) -> None:
    for folder in ("docs", "data", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs/finetuning.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks if "meta-llama" not in block for line in re.split(r"(?<!\\)\n", block.strip())]
    answers = []
    for line in lines:
        program, *words = shlex.split(line.replace("\\\n", " "))
        assert program == "smp-train"
        with warm(tmp_path, *words) as command:
            assert command.code() == 0, command.err
        answers += [command.out] * (words[0] == "generate")
    assert answers == ["Give the same command again with --resume_from_checkpoint checkpoints.\n"]
    assert {"chat_template.jinja", "config.json"} <= {path.name for path in (tmp_path / "model").iterdir()}


def test_the_notebook_is_stored_as_it_ran() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert "Finished: step 250 of 250" in NOTEBOOK.read_text()


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    program = tmp_path / "notebook.py"
    checks = "\nprint('\\nEND', run.step, evaluate(run.checkpoint, 'data/test').all.loss, losses[0][1])\n"
    program.write_text(code + checks)
    with warm(tmp_path, str(program), environ={"TMPDIR": str(tmp_path)}) as notebook:
        assert notebook.code() == 0, notebook.err
        (end,) = re.findall(r"^END (\d+) (\S+) (\S+)$", notebook.out, flags=re.MULTILINE)
    assert end[0] == "250"
    assert float(end[1]) < float(end[2]) - 1


FAILS = """
import sys, torch
from smp_train import train
TINY = dict(model_type="llama_v2", vocab_size=256, hidden_width=32, num_layers=2, num_heads=4, intermediate_size=48,
            max_context_width=16, bf16=False, use_synthetic_data=True, train_batch_size=1, max_steps=4, run_name="x")
def step(record):
    if record["step"] == 2:
        raise ValueError("no more")
train(**TINY, **(dict(on_step=step) if sys.argv[1] == "callback" else dict(lr=-1.0)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "named", "said"),
    [
        ("callback", 1, "on_step: step failed", [1, 0]),  # on rank 0 alone
        ("flag", 2, "--lr -1", [1, 1]),
    ],
)
def test_what_a_program_of_several_ranks_does_not_catch(
    kind: str, code: int, named: str, said: list[int], tmp_path: Path
) -> None:  # fmt: skip
    """One line and the command's exit code on each rank that failed, and no rank is left behind."""
    (tmp_path / "fails.py").write_text(FAILS)
    words = [sys.executable, "fails.py", kind]  # in interpreters of their own, whose end it is about
    port = free_port()
    with (
        Command(tmp_path, words, as_torchrun(0, 2, port)) as first,
        Command(tmp_path, words, as_torchrun(1, 2, port)) as second,
    ):
        assert [first.code(), second.code()] == [code, code]
        assert [len(each.complaints) for each in (first, second)] == said
        assert named in first.complaints[0]
        assert "Traceback" not in first.err + second.err
