"""What a launch is told by the plan of its run."""

from __future__ import annotations

import json

import pytest

from smp_train import cli
from smp_train.arguments import parse
from smp_train.errors import ConfigError
from smp_train.launch import planned
from smp_train.launch.instances import Machines, find
from smp_train.launch.preflight import check

LLAMA = ["--model_type=llama_v2", "--model_size=7b", "--max_context_width=4096"]
NATIVE = "--backend=native"
LARGE = ["--train_batch_size=8", "--activation_checkpointing=none"]


def said(*words: str) -> list[str]:
    run, machines = parse([*LLAMA, *words], {}), Machines(find("p5.48xlarge"), 1, 8)
    check(run, machines)  # the state alone fits
    return planned.check(run, [*LLAMA, *words], machines)


PLACES = {
    "slurm": ["--use_synthetic_data=1"],
    "k8s": ["--use_synthetic_data=1", "--image=i", "--claims=c:/fsx", "--run_dir=/fsx/a"],
    "sagemaker": ["--role=arn:aws:iam::123456789012:role/a", "--train=s3://bucket/a"],
}


@pytest.mark.parametrize("where", PLACES)
def test_a_dry_run_says_that_it_plans_nothing(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [where, *PLACES[where], *LLAMA, "--dry_run", "--instance_type=p5.48xlarge"]
    assert cli.main(["launch", *words]) == 0
    assert "not planned in this dry run; --check does" in capsys.readouterr().err
    assert cli.main(["launch", *words, "--auto"]) == 0
    assert "not searched (--auto) in this dry run; --check does" in capsys.readouterr().err
    assert cli.main(["launch", *words, "--memory_check=0"]) == 0
    assert "--check" not in capsys.readouterr().err, "which would not plan it either"


@pytest.mark.slow
def test_a_run_that_is_planned_not_to_fit_is_warned_of_and_refused_where_nothing_can_help() -> None:
    assert said("--train_batch_size=1") == []
    (line,) = said(NATIVE, *LARGE)  # compiled layers may take less
    assert all(part in line for part in ("does not fit", "each of 8 devices", "--activation_checkpointing full"))
    with pytest.raises(ConfigError, match=r"does not fit.*--memory_check 0"):
        said(NATIVE, "--use_torch_compile=0", *LARGE)


def test_what_has_no_plan_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*command: str, seconds: float) -> tuple[int, str]:
        return 2, "smp-train: error: --fp8 1: needs a GPU that has it, so there is no plan"

    monkeypatch.setattr(planned, "ask", ask)
    assert said(*LARGE) == []
    monkeypatch.setattr(planned, "ask", None)
    for words in (["--memory_check=0"], ["--evaluate_only=1"], ["--trust_remote_code=1"]):
        assert said(*LARGE, *words) == []
    assert planned.check(parse(LARGE, {}), LARGE, Machines(None, 1, 8)) == []
    resumed = ["--resume_from_checkpoint=a"]
    assert planned.check(parse(resumed, {}), resumed, Machines(find("p5.48xlarge"), 1, 8)) == []


def test_with_auto_what_would_be_chosen_is_printed_or_that_nothing_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [
        (0, json.dumps({"best": [{"words": "--hybrid_shard_degree 2"}]})),
        (2, json.dumps({"best": []}) + "\nsmp-train: error: nothing fits 8 devices of 74.51 GiB"),
    ]
    asked: list[str] = []

    def ask(*command: str, seconds: float) -> tuple[int, str]:
        asked.extend(command)
        return answers.pop(0)

    monkeypatch.setattr(planned, "ask", ask)
    assert said("--auto") == []
    assert "--search" in asked
    before, after = capsys.readouterr().err.splitlines()
    assert "searching settings for 8 GPUs (--auto)" in before, "for a minute or two nothing else is said"
    assert "--hybrid_shard_degree 2" in after
    with pytest.raises(ConfigError, match=r"--auto.*nothing fits 8 devices"):
        said("--auto")


def test_with_auto_what_cannot_be_planned_is_refused_and_what_is_not_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = (2, "smp-train: error: --fp8 1: needs a GPU that has it, so there is no plan")
    answers = [refused, (124, "no answer within 600 s")]
    monkeypatch.setattr(planned, "ask", lambda *command, seconds: answers.pop(0))
    with pytest.raises(ConfigError, match=r"--auto: --fp8 1"):
        said("--auto")
    assert "--auto was not planned here (exit code 124)" in said("--auto")[0]
