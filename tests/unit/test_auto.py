"""The choice of `--auto`: kept by later starts, or made again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_train.arguments import parse, validate
from smp_train.arguments.program_inputs import ProgramInputs
from smp_train.arguments.tuning import fixed_flags
from smp_train.distributed import Runtime, detect
from smp_train.errors import ConfigError
from smp_train.planning import best
from smp_train.planning import search as searching
from smp_train.run import auto
from smp_train.telemetry.metrics import peak_flops
from smp_train.telemetry.run_folder import RunFolder
from tests.unit.test_planning_search import GIB, LLAMA, pretended, space_of

H100 = "NVIDIA H100 80GB HBM3"
RANKS = Runtime("torchrun", 0, 4, 0, 4, 0, 1, "localhost", 0, "localhost", False)


def asked(*words: str, ranks: Runtime = RANKS, gpu: str = H100, memory: float = 79.2) -> dict[str, Any]:
    resolved = parse([*LLAMA, "--auto", *words], {})
    return auto.question(resolved.args, fixed_flags(resolved), ranks, gpu, int(memory * GIB))


def started(folder: Path, asked: dict[str, Any]) -> RunFolder:
    found = RunFolder(folder)
    found.create()
    found.write_run(config={}, auto={**asked, "flags": {"tensor_parallel_degree": 2}, "rows": 8})
    return found


def test_a_choice_for_another_machine_or_other_flags_is_made_again(tmp_path: Path) -> None:
    assert auto.earlier_choice(RunFolder(tmp_path), asked()) is None
    folder = started(tmp_path, asked())
    machines: list[dict[str, Any]] = [
        {"ranks": dataclasses.replace(RANKS, world_size=2)}, {"ranks": dataclasses.replace(RANKS, local_world_size=2)},
        {"gpu": "NVIDIA A100-SXM4-80GB"}, {"memory": 139.8}, {"gpu": ""},
    ]  # fmt: skip
    flags = ["--train_batch_size=1", "--num_layers=4", "--max_context_width=64", "--bf16=0", "--chunked_loss=0",
             "--lora_rank=4", "--cpu_offload=1"]  # fmt: skip
    questions = [asked(**machine) for machine in machines] + [asked(flag) for flag in flags]
    assert [auto.earlier_choice(folder, question) for question in questions] == [None] * len(questions)


def test_a_choice_is_kept_while_its_question_is_the_same(tmp_path: Path) -> None:
    model = "--hf_pretrained_model_name_or_dir=s3://bucket/model?signature=1"  # run.json has no signature
    folder = started(tmp_path, asked(model))
    unrelated = ("--max_steps=9", "--logging_freq=2", "--training_dir=elsewhere", "--seed=1", "--run_dir=elsewhere")
    choice = auto.earlier_choice(folder, asked(model, *unrelated, memory=79.3))
    assert choice is not None
    assert (choice["kept"], choice["flags"]) == (True, {"tensor_parallel_degree": 2})
    on_cpu = started(tmp_path, asked(gpu="", memory=20))
    assert auto.earlier_choice(on_cpu, asked(gpu="", memory=9)) is not None


def test_a_plan_takes_all_logits_for_a_programs_own_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []

    def seen(args: Any, *_: Any) -> dict[str, Any]:
        found.append(args.chunked_loss)
        return {"flags": {}}

    monkeypatch.setattr(auto, "search", seen)
    for loss in (None, lambda logits, targets: logits.sum()):
        resolved = parse([*LLAMA, "--auto", "--use_synthetic_data"], {})
        resolved = dataclasses.replace(resolved, inputs=ProgramInputs(loss=loss))
        chosen, _ = auto.choose(resolved, detect({}), torch.device("cpu"), RunFolder(tmp_path))
        assert chosen.args.chunked_loss
    assert found == [True, False]


def test_settings_without_a_plan_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--fp8"):
        best.choose(request(parse([*LLAMA, "--fp8", "--auto"], {}), GIB))
    with pytest.raises(ConfigError, match=r"--auto plan.*--backend native"):
        validate(parse([*LLAMA, "--use_synthetic_data", "--backend=smp", "--auto"], {}).args, 4)
    with pytest.raises(ConfigError, match=r"--auto plan.*--model_type"):
        planned(tmp_path, "--use_synthetic_data")
    with pytest.raises(ConfigError, match="--distributed_timeout_minutes"):
        planned(tmp_path, *LLAMA, "--distributed_timeout_minutes=0.0001")


def planned(folder: Path, *words: str) -> dict[str, Any]:
    run = RunFolder(folder)
    run.create()
    return auto.search(parse(["--auto", *words], {}).args, asked(gpu=""), GIB, None, run)


@pytest.mark.slow
def test_the_search_answers_where_trusted_code_is_warned_of(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(ConfigError, match=f"^(?!.*planning failed).*{missing}"):
        planned(tmp_path, "--hf_pretrained_model_name_or_dir", missing, "--trust_remote_code=1")
    assert "--trust_remote_code" in (tmp_path / "logs" / "auto.log").read_text()


def request(resolved: Any, memory: int) -> dict[str, Any]:
    found = {
        "args": dataclasses.asdict(resolved.args), "given": [], "devices": 4, "per_node": 4, "memory": memory,
        "gpu": "", "batch": 16, "host_memory": None,
    }  # fmt: skip
    return json.loads(json.dumps(found))


def test_the_answer_names_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "estimate", pretended)
    resolved = parse([*LLAMA, "--auto"], {})
    found = best.choose(request(resolved, 24 * GIB))
    assert found["rows"] == 16
    assert found["flags"] == found["plan"]["flags"]
    assert "nothing fits" in best.choose(request(resolved, GIB))["error"]


@pytest.mark.parametrize(
    ("gpu", "gib", "peak"),
    [("NVIDIA H100 80GB HBM3", 79, "H100"), ("NVIDIA A100-SXM4-40GB", 39, "A100")],
)
def test_a_gpu_outside_of_ec2_has_the_rates_of_the_same_in_the_table(gpu: str, gib: int, peak: str) -> None:
    one_node = space_of(devices=4, per_node=4).run
    machine = best.machine_with(gpu, gib * GIB, one_node)
    assert machine is not None
    assert (machine.peak, machine.per_node) == (peak_flops(peak), 4)
    assert best.machine_with(gpu, gib * GIB, space_of(devices=16, per_node=8).run) is None  # its network is not known
    assert best.machine_with("NVIDIA T4", 15 * GIB, one_node) is None
