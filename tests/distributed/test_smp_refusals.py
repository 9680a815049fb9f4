"""What the SMP backend is configured by, what it refuses, and what it does without in older releases, on a stand-in."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from smp_train import arguments
from smp_train.backends import smp_choices, smp_library
from smp_train.backends.base import Topology
from smp_train.backends.smp import SmpBackend, refuse, refuse_model
from smp_train.data.batch import Batch
from smp_train.errors import ConfigError, SmpTrainError
from smp_train.launch import doctor
from smp_train.launch.doctor import smp as doctor_smp
from smp_train.models import smp_names
from tests import harness, standin
from tests.smp import DATA, MIXTRAL, NATIVE, NEEDS_NATIVE, Journal, install, refusal_of, smp, train_on_smp
from tests.training import flags, train

# --- configuration ----------------------------------------------------------------------------------


LAUNCHED = json.dumps({"hybrid_shard_degree": 2, "random_seed": 7})


def test_configuration_comes_from_the_launcher_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "smp.json"
    file.write_text(json.dumps({"hybrid_shard_degree": 1, "activation_loading_horizon": 4, "allow_empty_shards": True}))
    journals = harness.run(
        train_on_smp, 2, smp(tmp_path, max_steps=1, smp_config=file), SM_HP_MP_PARAMETERS=LAUNCHED
    )
    config = eval(dict(journals[0])["init"]["config"])
    assert (config["hybrid_shard_degree"], config["activation_loading_horizon"]) == (2, 4)
    assert (config["allow_empty_shards"], config["random_seed"]) == (True, 7)
    assert "--allow_empty_shards" not in (tmp_path / "run" / "logs" / "rank-0.log").read_text()


def test_a_launcher_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    asked = flags(tmp_path, backend="auto", **DATA, hybrid_shard_degree=1)
    for said in harness.run(refusal_of, 2, asked, True, SM_HP_MP_PARAMETERS=LAUNCHED):
        assert "SM_HP_MP_PARAMETERS sets hybrid_shard_degree to 2" in said
        assert "make it 1" in said


def test_a_library_that_settles_on_other_degrees_or_does_not_know_one_is_refused() -> None:
    library = SimpleNamespace(state=SimpleNamespace(tensor_parallel_degree=1, hybrid_shard_degree=4))
    known = {"tensor_parallel_degree": 1, "hybrid_shard_degree": 0, "context_parallel_degree": 1}
    smp_library.check_state(library, known)
    for name, message in (("hybrid_shard_degree", "2 .*4"), ("context_parallel_degree", "2")):
        with pytest.raises(ConfigError, match=f"{name} {message}"):
            smp_library.check_state(library, known | {name: 2})


def test_what_fsdp_cuts_is_asked_of_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import ShardingStrategy

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    mesh = {"replicate": 4, "shard": 1}
    backend = object.__new__(SmpBackend)
    backend.shard = 1
    backend.args = SimpleNamespace(expert_parallel_degree=1)  # type: ignore[assignment]
    backend.topology = SimpleNamespace(mesh=mesh, tp_size=2, cp_size=1)  # type: ignore[assignment]
    group = SimpleNamespace(size=lambda: 2)
    backend._root = SimpleNamespace(sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=group)
    assert backend._settle_layout()
    assert mesh == {"replicate": 2, "shard": 2}
    backend._root.sharding_strategy = ShardingStrategy.NO_SHARD
    assert not backend._settle_layout()


@pytest.mark.parametrize(
    ("table", "part"),
    [("{layer}.{layer}.w: [w]", "redefinition"), ("w: ['{layer}.w']", "w has no placeholder 'layer'"),
     ("'{layer}.w': w", "list"), ("w: ['{}']", "index"), ("w: []", "list"), ("w: [1]", "format")],
)  # fmt: skip
def test_a_table_of_names_is_refused_when_it_is_read(table: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "names.yaml").write_text(table.replace("{layer}.{layer}.w", "'{layer}.{layer}.w'"))
    with pytest.raises(ConfigError, match=part):
        smp_names.read_table(str(tmp_path / "names.yaml"))
    assert not smp_names.table


def test_the_doctor_refuses_flags_in_another_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--smp", "--seed", "5"]) == 2
    assert "--seed 5: write flags of train as --name=value" in capsys.readouterr().err


def test_the_doctor_begins_the_next_case_after_a_failed_comparison(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the other ranks do, which compare nothing."""

    def examine(*of_case: Any) -> Any:
        raise ValueError("a comparison")

    monkeypatch.setattr(doctor_smp, "examine", examine)
    assert doctor_smp.main(tmp_path, tmp_path / "report.json", []) == 2
    assert len(json.loads((tmp_path / "report.json").read_text())["findings"]) == 2


# --- where SMP cannot be used ----------------------------------------------------------------------


def train_where_smp_refuses(
    command_line: list[str], torch_needed: str | None = None, failure: type[Exception] = RuntimeError
) -> tuple[int, str]:
    """Train with a `torch.sagemaker` whose init fails; return the exit code and what was logged."""
    from smp_train.distributed import host

    if torch_needed is not None:
        host.OLDEST["torch"] = torch_needed
    for name in [name for name in os.environ if name.startswith("SM_")]:
        del os.environ[name]  # not in a SageMaker job

    def refuse(config: Any) -> None:
        raise failure("this platform is not supported")

    install()
    import torch.sagemaker as tsm

    tsm.init = refuse
    with redirect_stdout(io.StringIO()) as out:
        try:
            return train(command_line), out.getvalue()
        except SmpTrainError as error:
            return error.exit_code, str(error)


def refusal_where_ranks_differ(command_line: list[str], broken: bool) -> str:
    """Train with a `torch.sagemaker` on rank 0 that rank 1 lacks, or cannot import, and return why it stopped."""
    if os.environ["RANK"] == "0" or broken:
        install()
    if os.environ["RANK"] == "1":
        sys.modules["torch.sagemaker"] = None  # type: ignore[assignment]
    return refusal_of(command_line, installed=False)


@pytest.mark.parametrize("broken", [False, True], ids=["missing", "broken"])
@pytest.mark.parametrize("backend", ["auto", "smp"])
def test_a_library_on_some_ranks_only_is_refused_by_all(backend: str, broken: bool, tmp_path: Path) -> None:
    for said in harness.run(refusal_where_ranks_differ, 2, flags(tmp_path, backend=backend), broken, timeout=120):
        assert "on some ranks only" in said
        assert "(rank 1)" in said
        assert "--backend native" in said


@pytest.mark.skipif(not NATIVE, reason=NEEDS_NATIVE)
def test_an_unusable_library_is_named_and_done_without(tmp_path: Path) -> None:
    code, said = harness.run(train_where_smp_refuses, 2, flags(tmp_path, backend="auto"))[0]
    assert code == 0
    assert "SMP is here but cannot be used" in said
    assert "this platform is not supported" in said
    assert "on HyperPod, SMP needs /var/log/aws/clusters" in said
    assert "Backend: native (SMP cannot be used here)" in said


def test_an_unusable_library_stops_who_asks_for_it_or_has_no_other_backend(tmp_path: Path) -> None:
    for code, said in harness.run(train_where_smp_refuses, 2, smp(tmp_path)):
        assert code == 2
        assert "torch.sagemaker.init refuses: this platform is not supported" in said
    asked = flags(tmp_path, backend="auto")
    ((code, said),) = harness.run(train_where_smp_refuses, 1, asked, "9.9", ValueError)
    assert code == 2
    assert "init refuses: this platform is not supported;" in said  # not a failure that a mount explains
    assert "the native backend needs torch 9.9 or newer" in said


GPT2 = {"model_type": "gpt2", "num_key_value_heads": None, "intermediate_size": None}
OWN_FP8 = {"fp8": 1, "bf16": 1, "use_smp_implementation": 1}
REFUSED: dict[str, tuple[str, int, dict[str, Any], str]] = {
    # name: release, ranks, flags, what the refusal says
    "no library": ("", 1, {}, r"this torch has no torch\.sagemaker"),
    "FP8 of a plain model": ("2.8", 1, {"fp8": 1, "bf16": 1}, r"--fp8 1 .* give --use_smp_implementation 1"),
    "FP8 offloaded": ("2.8", 1, {**OWN_FP8, "sm_activation_offloading": 1}, r"do not go together on SMP"),
    "a model that SMP has not": ("2.8", 1, {**GPT2, "use_smp_implementation": 1},
        r"transform refuses gpt2 with --use_smp_implementation 1.*own implementation is there for Llama"),
    "experts of a dense model": ("2.8", 1, {"moe": 1},
        r"transform refuses llama with --moe 1: (?!.*is there for Llama)"),
    "compile": ("2.8", 1, {"use_torch_compile": 1}, r"--use_torch_compile 1 with --backend smp"),
    "per operation": ("2.8", 1, {"activation_checkpointing": "selective:op"}, r"SMP checkpoints whole layers"),
    "offload": ("2.8", 1, {"sm_activation_offloading": 1, "activation_checkpointing": "none"}, r"needs checkpointing"),
    "saving tensor ranks of 2.4": ("2.4", 4, {"tensor_parallel_degree": 2},
        r"needs torch\.sagemaker\.distributed\..* came with SMP 2\.5"),
    "context parallelism of 2.4": ("2.4", 2, {"context_parallel_degree": 2}, r"context_parallel_degree needs SMP 2\.5"),
    "experts of 2.2": ("2.2", 2, MIXTRAL, r"--moe 1 needs torch\.sagemaker\.moe\.moe_config, .* came with SMP 2\.3"),
    "tensor parallelism of Mistral by 2.5": ("2.5", 2, {"model_type": "mistral", "tensor_parallel_degree": 2},
        r"transform refuses .* came with SMP 2\.6"),
    "communication of 2.5": ("2.5", 2, {"context_parallel_degree": 2, "cp_comm_type": "all_gather"},
        r"came with SMP 2\.6, and this release"),
}  # fmt: skip


def refusal_by(command_line: list[str], release: str) -> str:
    if release:
        install(release)
    return refusal_of(command_line, installed=False)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    release, world, changes, message = REFUSED[case]
    for said in harness.run(refusal_by, world, smp(tmp_path, **changes), release):
        assert re.search(message, said), said


def resolved(folder: Path, **changes: Any) -> Any:
    return arguments.parse(smp(folder, **changes)).args


def test_unsharded_tensor_ranks_do_not_go_over_smddp(tmp_path: Path) -> None:
    changes = {"tensor_parallel_degree": 2, "distributed_backend": "smddp"}
    refuse(resolved(tmp_path, **changes))
    with pytest.raises(ConfigError, match="nccl"):
        refuse(resolved(tmp_path, **changes, hybrid_shard_degree=1))


@pytest.mark.parametrize("given", ["fp8", "context_parallel_degree"])
def test_what_smp_has_not_for_a_sliding_window_is_refused(given: str, tmp_path: Path) -> None:
    args = resolved(tmp_path, **{given: 2 if "degree" in given else 1})
    for kind, window, refused in (("mistral", 8, True), ("mistral", None, False), ("llama", None, False)):
        config = SimpleNamespace(model_type=kind, sliding_window=window)
        if not refused:
            refuse_model(config, args)
            continue
        with pytest.raises(ConfigError, match=f" 8 .*--{given}"):
            refuse_model(config, args)


class Logits(torch.nn.Module):
    """Returns logits of a part of the vocabulary."""

    def forward(self, input_ids: torch.Tensor, attention_mask: None = None) -> dict[str, torch.Tensor]:
        return {"logits": torch.zeros(*input_ids.shape, 4)}


def test_logits_of_a_part_of_the_vocabulary_are_not_computed_from() -> None:
    topology = Topology(torch.device("cpu"), dp_rank=0, dp_size=1, tp_rank=0, tp_size=1, cp_rank=0, cp_size=1, mesh={})
    assert smp_choices.whole_logits(Logits(), topology, 16, 4)
    assert not smp_choices.whole_logits(Logits(), topology, 16, 8)
    assert "[1, 16, 4], not [1, 16, 8]" in smp_choices.refusals["whole logits"]
    with pytest.raises(ConfigError, match="--context_parallel_degree 2"):
        smp_choices.whole_logits(Logits(), replace(topology, cp_size=2), 16, 8)


@pytest.mark.parametrize(
    ("values", "differ"),
    [([1.0, 1.0, 1.0, 1.2], True), ([math.nan] * 4, True), ([1.0, 1.0, math.inf, math.inf], True),
     ([1.0, 1.0, 2.0, 2.0], False)],
)  # fmt: skip
def test_logits_of_all_tensor_groups_have_one_verdict(
    values: list[float], differ: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is the same on all ranks: a rank of equal logits does not go on while another group stops."""

    def gathered(what: str, work: Any) -> list[Any]:
        return values if what == "comparing logits" else [work()]

    monkeypatch.setattr(smp_choices.distributed, "gather", gathered)
    topology = Topology(torch.device("cpu"), dp_rank=0, dp_size=2, tp_rank=0, tp_size=2, cp_rank=0, cp_size=1, mesh={})
    if not differ:
        assert smp_choices.whole_logits(Logits(), topology, 16, 4)
        return
    with pytest.raises(ConfigError, match="different logits"):
        smp_choices.whole_logits(Logits(), topology, 16, 4)


def test_a_mean_over_no_token_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own loss, a mean, is NaN where no token is counted."""
    weight = torch.randn(8, 8, requires_grad=True)

    def model(input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: None) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(weight[input_ids[0, :-1]], labels[0, 1:])}

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    backend = object.__new__(SmpBackend)
    backend.topology = SimpleNamespace(cp_size=1, tp_size=1)  # type: ignore[assignment]
    backend.transforms, backend._whole_logits, backend._fp8 = True, False, None
    ids = torch.arange(8)[None]
    for labels, counted in ((torch.full_like(ids, -100), 0), (ids, 7)):
        weight.grad = None
        loss, _ = backend.loss(model, Batch(ids, labels))  # type: ignore[arg-type]
        loss.backward()
        mean = torch.nn.functional.cross_entropy(weight[ids[0, :-1]], ids[0, 1:])
        torch.testing.assert_close(loss, counted * mean)
        assert weight.grad is not None
        assert bool(weight.grad.any()) is bool(counted)
        assert bool(weight.grad.isfinite().all())


def test_rotary_caches_that_are_no_buffers_are_moved() -> None:
    module = torch.nn.Module()
    module.cos_cached, module.inner = torch.ones(2), torch.nn.Linear(1, 1)
    smp_choices.move_rotary_caches(torch.nn.Sequential(module), torch.device("meta"))
    assert module.cos_cached.is_meta
    assert not module.inner.weight.is_meta


def test_router_losses_that_smp_refuses_are_left_at_its_defaults() -> None:
    default = {"moe_aux_loss_coeff": 0.001, "moe_z_loss_coeff": 0.001}
    assert smp_choices.moe_config(lambda smp_moe: smp_moe, {"smp_moe": True}, default)
    with pytest.raises(ConfigError, match="moe_z_loss_coeff"):
        smp_choices.moe_config(lambda smp_moe: smp_moe, {"smp_moe": True}, default | {"moe_z_loss_coeff": 0.1})


@pytest.mark.parametrize("failure", [ValueError, RuntimeError, OSError])
def test_only_a_refusal_leads_to_the_form_of_the_sample(failure: type[Exception]) -> None:
    def ours() -> None:
        raise failure("broken")

    with pytest.raises(failure, match="broken"):
        smp_choices.choose("anything", ours, lambda: None)


@pytest.mark.parametrize(("failure", "refused"), [(AttributeError, True), (OSError, False)])
def test_what_dcp_wraps_counts_as_what_was_raised(failure: type[Exception], refused: bool) -> None:
    def ours() -> str:
        raise CheckpointException("write", {1: (failure("no stage"), StackSummary())})

    if refused:
        assert smp_choices.choose("anything", ours, lambda: "sample") == "sample"
        return
    with pytest.raises(failure, match="no stage"):
        smp_choices.choose("anything", ours, lambda: "sample")


def test_a_failure_of_the_form_of_the_sample_names_the_refusal_before() -> None:
    def fsdp(dtype: torch.dtype) -> None:
        raise TypeError(f"refused {dtype}")

    with pytest.raises(TypeError, match="bfloat16") as failure:
        smp_choices.wrap(fsdp)
    assert "float32" in str(failure.value.__cause__)


# --- sizes that only SMP knows how it splits --------------------------------------------------------


def test_a_vocabulary_that_does_not_divide_is_left_to_smp(tmp_path: Path) -> None:
    """As in AWS's notebook: 50257 tokens and two tensor ranks."""
    line = smp(tmp_path, max_steps=1, num_layers=1, vocab_size=4097, max_context_width=65, tensor_parallel_degree=2)
    harness.run(train_on_smp, 2, line)
    assert (tmp_path / "run" / "DONE").exists()


# --- what a release has, and what is done without it ------------------------------------------------

RELEASES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "2.3, hybrid sharding": ("2.3", 4, {"hybrid_shard_degree": 2}, "torch's own saver; saving through SMP needs"),
    # The norm is taken without the wrapper of offloading.
    "2.4, asynchronous, offloading": (
        "2.4", 2, {"checkpoint_type": "async_sharded", "sm_activation_offloading": 1}, "torch's own saver",
    ),
    "2.5, context parallelism": ("2.5", 2, {"context_parallel_degree": 2}, ""),
    "2.7, experts": ("2.7", 2, {**MIXTRAL, "expert_parallel_degree": 2}, ""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", RELEASES)
def test_older_releases(case: str, tmp_path: Path) -> None:
    release, world, changes, said = RELEASES[case]
    harness.run(train_on_smp, world, smp(tmp_path, max_steps=2, checkpoint_freq=1, **changes), release)
    assert (tmp_path / "run" / "DONE").exists()
    assert said in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    resumed = smp(tmp_path, max_steps=3, resume_from_checkpoint=tmp_path / "checkpoints", **changes)
    harness.run(train_on_smp, world, resumed, release)


def before_context_parallelism(command_line: list[str]) -> Journal:
    """Train by a release that has neither context parallelism nor its key."""
    sys.modules["torch.sagemaker.context_parallel"] = None  # type: ignore[assignment]
    return train_on_smp(command_line, "2.4")


def test_a_release_is_not_given_keys_that_came_later(tmp_path: Path) -> None:
    (journal,) = harness.run(before_context_parallelism, 1, smp(tmp_path, max_steps=1, num_layers=1))
    origin = eval(dict(journal)["init"]["origin"])
    assert {key for key, source in origin.items() if source == "default"} == {"context_parallel_degree"}


def before_experts(command_line: list[str], partly: bool) -> str:
    """Return why a run stops by a release that has no experts, or has ``partly`` the modules for them."""
    install("2.2")
    if partly:
        standin.version = (2, 3)  # so that the package can be imported
    sys.modules["torch.sagemaker.moe.moe_config" if partly else "torch.sagemaker.moe"] = None  # type: ignore[assignment]
    return refusal_of(command_line, installed=False)


@pytest.mark.parametrize("partly", [False, True])
def test_broken_offloading_of_2_2_is_refused(partly: bool, tmp_path: Path) -> None:
    asked = smp(tmp_path, sm_activation_offloading=1, activation_checkpointing="full")
    for said in harness.run(before_experts, 2, asked, partly):
        assert "--sm_activation_offloading 1: " in said


def test_how_context_ranks_communicate_is_said_to_what_takes_it() -> None:
    def named(model: Any, cp_comm_type: str = "p2p") -> None: ...

    def anything(*args: Any, **kwargs: Any) -> None: ...

    def told(transform: Any, wanted: str) -> dict[str, Any]:
        args = SimpleNamespace(cp_comm_type=wanted)
        return smp_library.context_options(SimpleNamespace(transform=transform), args)  # type: ignore[arg-type]

    assert told(named, "p2p") == {"cp_comm_type": "p2p"}
    assert told(anything, "all_gather") == {"cp_comm_type": "all_gather"}
    assert told(anything, "p2p") == {}
