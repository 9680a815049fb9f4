"""The SMP backend's configuration, its refusals, and its calls in the form of AWS's sample, on a stand-in."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smp_train import arguments
from smp_train.backends import smp_choices, smp_library
from smp_train.backends.base import Topology
from smp_train.backends.smp import refuse, refuse_model
from smp_train.errors import ConfigError, SmpTrainError
from smp_train.launch import doctor
from smp_train.models import smp_names
from tests import harness
from tests.smp import DATA, NATIVE, NEEDS_NATIVE, install, refusal_of, smp, train_on_smp
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


def test_a_contradiction_to_the_launcher_is_refused(tmp_path: Path) -> None:
    line = flags(tmp_path, backend="auto", **DATA, hybrid_shard_degree=1)
    for message in harness.run(refusal_of, 2, line, True, SM_HP_MP_PARAMETERS=LAUNCHED):
        assert "SM_HP_MP_PARAMETERS sets hybrid_shard_degree to 2" in message
        assert "make it 1" in message


def test_other_degrees_in_the_state_are_refused() -> None:
    library = SimpleNamespace(state=SimpleNamespace(tensor_parallel_degree=1, hybrid_shard_degree=4))
    config = dict.fromkeys(smp_library.DEGREES, 1) | {"hybrid_shard_degree": 0}
    smp_library.check_state(library, config)
    with pytest.raises(ConfigError, match=r"hybrid_shard_degree 2 .*4"):
        smp_library.check_state(library, config | {"hybrid_shard_degree": 2})


@pytest.mark.parametrize(
    ("table", "part"),
    [("'{layer}.{layer}.w': [w]", "redefinition"), ("w: ['{layer}.w']", "w has no placeholder 'layer'"),
     ("'{layer}.w': w", "list"), ("w: ['{}']", "index"), ("w: []", "list"), ("w: [1]", "format")],
)  # fmt: skip
def test_a_wrong_table_of_names_is_refused(table: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "names.yaml").write_text(table)
    with pytest.raises(ConfigError, match=part):
        smp_names.read_table(str(tmp_path / "names.yaml"))
    assert not smp_names.table


def test_the_doctor_refuses_flags_in_another_form() -> None:
    with pytest.raises(ConfigError, match="--seed 5: write flags of train as --name=value"):
        doctor.main(["--smp", "--seed", "5"])


# --- SMP that cannot be used ------------------------------------------------------------------------


def train_where_init_fails(
    command_line: list[str], torch_needed: str | None = None, failure: type[Exception] = RuntimeError
) -> tuple[int, str]:
    """Train with a `torch.sagemaker` whose init fails; return the exit code and the log or the message."""
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
    """Train with a `torch.sagemaker` on rank 0 that rank 1 lacks, or cannot import, and return the message."""
    if os.environ["RANK"] == "0" or broken:
        install()
    if os.environ["RANK"] == "1":
        sys.modules["torch.sagemaker"] = None  # type: ignore[assignment]
    return refusal_of(command_line, installed=False)


@pytest.mark.parametrize(("backend", "broken"), [("auto", False), ("smp", True)])
def test_a_library_on_some_ranks_only_is_refused_by_all(backend: str, broken: bool, tmp_path: Path) -> None:
    for message in harness.run(refusal_where_ranks_differ, 2, flags(tmp_path, backend=backend), broken, timeout=120):
        assert "on some ranks only" in message
        assert "(rank 1)" in message
        assert "--backend native" in message


@pytest.mark.skipif(not NATIVE, reason=NEEDS_NATIVE)
def test_auto_trains_natively_where_smp_is_unusable(tmp_path: Path) -> None:
    code, log = harness.run(train_where_init_fails, 2, flags(tmp_path, backend="auto"))[0]
    assert code == 0
    assert "SMP is here but cannot be used" in log
    assert "this platform is not supported" in log
    assert "on HyperPod, SMP needs /var/log/aws/clusters" in log
    assert "Backend: native (SMP cannot be used here)" in log


def test_an_unusable_smp_ends_a_run_that_needs_it(tmp_path: Path) -> None:
    for code, message in harness.run(train_where_init_fails, 2, smp(tmp_path)):
        assert code == 2
        assert "torch.sagemaker.init refuses: this platform is not supported" in message
    line = flags(tmp_path, backend="auto")
    ((code, message),) = harness.run(train_where_init_fails, 1, line, "9.9", ValueError)
    assert code == 2
    assert "init refuses: this platform is not supported;" in message  # not a failure that a mount explains
    assert "the native backend needs torch 9.9 or newer" in message


GPT2 = {"model_type": "gpt2", "num_key_value_heads": None, "intermediate_size": None}
FP8 = {"fp8": 1, "bf16": 1, "use_smp_implementation": 1}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "FP8 of a plain model": ({"fp8": 1, "bf16": 1}, r"--fp8 1 .* give --use_smp_implementation 1"),
    "FP8 with offloading": ({**FP8, "sm_activation_offloading": 1}, "do not go together on SMP"),
    "a model that SMP lacks": ({**GPT2, "use_smp_implementation": 1},
        r"transform refuses gpt2 with --use_smp_implementation 1.*own implementation is there for Llama"),
    "experts of a dense model": ({"moe": 1}, r"transform refuses llama with --moe 1: (?!.*is there for Llama)"),
    "compilation": ({"use_torch_compile": 1}, "--use_torch_compile 1 with --backend smp"),
    "selective:op": ({"activation_checkpointing": "selective:op"}, "SMP checkpoints whole layers"),
    "offloading alone": ({"sm_activation_offloading": 1, "activation_checkpointing": "none"}, "needs checkpointing"),
    "no library": ({}, r"no torch\.sagemaker"),
    "old torch": ({}, r"SMP before 2\.6"),
}  # fmt: skip


def refusal_by(command_line: list[str], case: str) -> str:
    if case != "no library":
        install()
    if case == "old torch":
        torch.__version__ = "2.3.1"
    return refusal_of(command_line, installed=False)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_settings(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    (refusal,) = harness.run(refusal_by, 1, smp(tmp_path, **changes), case)
    assert re.search(message, refusal), refusal


def resolved(folder: Path, **changes: Any) -> Any:
    return arguments.parse(smp(folder, **changes)).args


def test_unsharded_tensor_ranks_are_refused_over_smddp(tmp_path: Path) -> None:
    changes = {"tensor_parallel_degree": 2, "distributed_backend": "smddp"}
    refuse(resolved(tmp_path, **changes))
    with pytest.raises(ConfigError, match="nccl"):
        refuse(resolved(tmp_path, **changes, hybrid_shard_degree=1))


@pytest.mark.parametrize(("flag", "value"), [("fp8", 1), ("context_parallel_degree", 2)])
def test_a_sliding_window_is_refused(flag: str, value: int, tmp_path: Path) -> None:
    args = resolved(tmp_path, **{flag: value})
    refuse_model(SimpleNamespace(model_type="mistral", sliding_window=None), args)
    with pytest.raises(ConfigError, match=f" 8 .*--{flag}"):
        refuse_model(SimpleNamespace(model_type="mistral", sliding_window=8), args)


def test_a_vocabulary_that_does_not_divide_is_left_to_smp(tmp_path: Path) -> None:
    """As in AWS's notebook: 50257 tokens and two tensor ranks."""
    line = smp(tmp_path, max_steps=1, num_layers=1, vocab_size=4097, max_context_width=65, tensor_parallel_degree=2)
    harness.run(train_on_smp, 2, line)
    assert (tmp_path / "run" / "DONE").exists()


# --- the form of AWS's sample -----------------------------------------------------------------------


class Logits(torch.nn.Module):
    """Returns logits of a part of the vocabulary."""

    def forward(self, input_ids: torch.Tensor, attention_mask: None = None) -> dict[str, torch.Tensor]:
        return {"logits": torch.zeros(*input_ids.shape, 4)}


def test_logits_of_a_part_of_the_vocabulary_are_refused_with_context_parallelism() -> None:
    topology = Topology(torch.device("cpu"), dp_rank=0, dp_size=1, tp_rank=0, tp_size=1, cp_rank=0, cp_size=2, mesh={})
    with pytest.raises(ConfigError, match="--context_parallel_degree 2"):
        smp_choices.whole_logits(Logits(), topology, 16, 8)


def test_rotary_caches_that_are_no_buffers_are_moved() -> None:
    module = torch.nn.Module()
    module.cos_cached, module.inner = torch.ones(2), torch.nn.Linear(1, 1)
    smp_choices.move_rotary_caches(torch.nn.Sequential(module), torch.device("meta"))
    assert module.cos_cached.is_meta
    assert not module.inner.weight.is_meta


def test_refused_router_losses_are_left_at_smps_defaults() -> None:
    default = {"moe_aux_loss_coeff": 0.001, "moe_z_loss_coeff": 0.001}
    assert smp_choices.moe_config(lambda smp_moe: smp_moe, {"smp_moe": True}, default)
    with pytest.raises(ConfigError, match="moe_z_loss_coeff"):
        smp_choices.moe_config(lambda smp_moe: smp_moe, {"smp_moe": True}, default | {"moe_z_loss_coeff": 0.1})


def test_only_a_refusal_leads_to_the_form_of_the_sample() -> None:
    def fails(failure: Exception) -> Any:
        raise failure

    assert smp_choices.choose("anything", lambda: fails(TypeError("refused")), lambda: "sample") == "sample"
    with pytest.raises(OSError, match="broken"):
        smp_choices.choose("anything", lambda: fails(OSError("broken")), lambda: "sample")
    with pytest.raises(TypeError, match="bfloat16"):
        smp_choices.wrap(lambda dtype: fails(TypeError(f"refused {dtype}")))
    assert "float32" in smp_choices.refusals["float32 gradients"]
