"""`smp-train doctor --smp` on stand-ins for `torch.sagemaker`: two are as assumed, the third deviates in one point."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests import harness, smp_trees
from tests.smp import DATA, NATIVE, NEEDS_NATIVE, install, refusal_of, smp
from tests.tiers import core
from tests.training import flags, same

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PLAIN, TENSOR = ["--hybrid_shard_degree=0"], ["--tensor_parallel_degree=2"]
SMALL = ["--hidden_width=64", "--intermediate_size=96", "--vocab_size=256", "--max_context_width=64"]
MIXTRAL = ["--model_type=mixtral", "--moe=1", "--num_local_experts=4", "--expert_parallel_degree=2"]


def examine(folder: str, words: list[str], deviation: str = "") -> int:
    """Run the doctor on this rank, and return its exit code."""
    install()
    if deviation:
        from tests.standin import deviations

        deviations.plant(deviation)
    from smp_train.launch.doctor import smp

    return smp.main(Path(folder), Path(folder) / "report.json", words)


def findings(folder: Path) -> dict[str, tuple[str, str]]:
    """Return by subject the level of each finding of the last case, and the finding."""
    lines = list(json.loads((folder / "report.json").read_text())["findings"].values())[-1]
    return {line[5:].partition(":")[0]: (line[:4].strip(), line) for line in lines}


@pytest.mark.parametrize(
    ("world", "words"),
    [(4, []), (1, []), (2, MIXTRAL), (4, ["--model_type=gpt_neox", "--num_key_value_heads=4", *TENSOR])],
    ids=["4 ranks", "1 rank", "experts", "gpt-neox"],
)
def test_the_assumptions_hold(world: int, words: list[str], tmp_path: Path) -> None:
    assert harness.run(examine, world, str(tmp_path), words) == [0] * world
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["findings"]) == (1 if words else 2)
    for lines in report["findings"].values():
        assert {line[:4].strip() for line in lines} == {"ok"}
        assert {*LOSSES, *NORMS, *NAMES, "export"} <= {line[5:].partition(":")[0] for line in lines}
    assert any("{layer}" in name for name in report["names"])


LOSSES = {f"loss of step {step}": "fail" for step in (1, 2)}
NORMS = {f"grad_norm of step {step}": "fail" for step in (1, 2)}
NAMES = {f"names after step {step}": "warn" for step in (1, 2)}
# By deviation: the ranks, the flags, the findings that are not ok, and a part of one of them.
DEVIATIONS: dict[str, tuple[int, list[str], dict[str, str], str]] = {
    "other names": (2, TENSOR, NAMES, "seq_layers"),
    "split logits": (2, [*TENSOR, *SMALL], {"whole logits": "warn"}, "[1, 64, 128], not [1, 64, 256]"),
    "summed gradients": (2, PLAIN, NORMS, "expected"),
    "weights of rank 0 ignored": (
        2, TENSOR, {**LOSSES, **NORMS, "export": "fail", **dict.fromkeys(NAMES, "fail")}, "lm_head.weight",
    ),
    "one backend in the group": (2, PLAIN, {"process group": "warn"}, "cpu:gloo,cuda:gloo"),
    "export not translated": (2, TENSOR, {"translated export": "warn"}, "lm_head.weight"),
    "no reset": (2, PLAIN, {"run": "fail"}, "reset"),
}  # fmt: skip


@pytest.mark.parametrize("deviation", core(DEVIATIONS, {"split logits"}.__contains__))
def test_a_deviation_is_found(deviation: str, tmp_path: Path) -> None:
    world, words, expected, part = DEVIATIONS[deviation]
    codes = harness.run(examine, world, str(tmp_path), words, deviation)
    found = findings(tmp_path)
    levels = {subject: level for subject, (level, _) in found.items() if level != "ok"}
    assert {**levels, **expected} == levels
    assert levels.keys() - expected.keys() <= {**LOSSES, **NORMS}.keys()  # a deviation may change more numbers
    assert any(part in line for _, line in found.values())
    assert codes[0] == (2 if "fail" in expected.values() else 0)


# --- names by file ----------------------------------------------------------------------------------


def write_other_names(command_line: list[str], folder: str) -> dict[str, torch.Tensor]:
    """Train on this rank of an SMP with other names, and write a checkpoint as the sample does."""
    install()
    from tests.standin import deviations

    deviations.plant("other names")
    return smp_trees.write(command_line, folder)


@pytest.mark.skipif(not NATIVE, reason=NEEDS_NATIVE)
def test_other_names_resume_natively_by_the_report(tmp_path: Path) -> None:
    """Bit for bit: checkpoints of this program, and of AWS's sample."""
    codes = harness.run(examine, 2, str(tmp_path), TENSOR, "other names")
    assert codes == [0, 0]
    report = tmp_path / "report.json"
    shared = {"max_steps": 2, "train_batch_size": 2, "lr_decay_iters": 4}
    line = smp(tmp_path / "theirs", tensor_parallel_degree=2, **shared)
    saved = harness.run(write_other_names, 4, line, str(tmp_path / "aws" / "llama_v2-2steps"))[0]
    for place in (tmp_path / "aws", tmp_path / "theirs" / "checkpoints"):
        resumed = flags(tmp_path / place.parent.name / "native", **DATA, **shared, resume_from_checkpoint=place)
        assert "seq_layers" in harness.run(refusal_of, 1, resumed, False)[0]
        step, _, held = harness.run(smp_trees.take_up, 2, [*resumed, f"--smp_names={report}"])[0]
        assert step == 2
        same(saved, held)
