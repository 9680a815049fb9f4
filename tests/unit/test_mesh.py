"""From flags to a layout of ranks, and the degrees that are refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig

from smp_train.arguments import Arguments, validate
from smp_train.distributed.degrees import Degrees, advice_for_nodes, plan
from smp_train.errors import ConfigError
from smp_train.models import traits
from smp_train.parallel import context_parallel, tensor_parallel
from tests.releases import need, need_model

TWO_OF_EACH = Degrees(2, 2, 2, 2)


def in_full(given: dict) -> dict:
    kinds = ("tensor", "context", "expert")
    return {f"{name}_parallel_degree" if name in kinds else name: given[name] for name in given}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sharding_strategy": "hybrid_shard", "hybrid_shard_degree": 4}, Degrees(4, 4)),
        ({"sharding_strategy": "full_shard", "hybrid_shard_degree": 1}, Degrees(16, 1)),
        ({"sharding_strategy": "hybrid_shard", "tensor": 4}, Degrees(2, 2, 1, 4)),
        ({"sharding_strategy": "hybrid_shard", "hybrid_shard_degree": 4, "tensor": 2, "context": 2}, TWO_OF_EACH),
        ({"sharding_strategy": "no_shard", "context": 2}, Degrees(8, 1, 2, 1)),
        ({"hybrid_shard_degree": 2, "expert": 4}, Degrees(2, 2, 1, 1, 4)),
        ({"sharding_strategy": "full_shard", "expert": 2, "tensor": 2, "context": 2}, Degrees(1, 2, 2, 2, 2)),
    ],
)
def test_layouts_of_two_nodes(given: dict, expected: Degrees) -> None:
    assert plan(Arguments(**in_full(given)), 16, 8, smp=False) == expected
    assert expected.world_size == 16


@pytest.mark.parametrize(
    ("changes", "native", "smp"),
    [
        ({"sharding_strategy": "hybrid_shard"}, 8, 8),
        ({"sharding_strategy": "full_shard"}, 128, 128),
        ({"sharding_strategy": "no_shard"}, 1, 1),
        # SMP shards over all ranks beside another degree; the native backend over one node.
        ({"sharding_strategy": "hybrid_shard", "tensor_parallel_degree": 4}, 8, 128),
        ({"sharding_strategy": "no_shard", "context_parallel_degree": 4}, 4, 128),
        ({"hybrid_shard_degree": 16, "tensor_parallel_degree": 2}, 32, 32),
    ],
)
def test_ranks_that_share_the_state_on_16_nodes_of_8(changes: dict, native: int, smp: int) -> None:
    args = Arguments(**changes)
    assert plan(args, 128, 8, smp=False).sharing == native
    assert plan(args, 128, 8, smp=True).sharing == smp


def test_little_work_over_a_network_is_pointed_out() -> None:
    nodes, node = Degrees(shard=16), Degrees(replicate=2, shard=8)
    assert "--sharding_strategy hybrid_shard" in advice_for_nodes(nodes, 8, 8192)
    assert "--sharding_strategy hybrid_shard" in advice_for_nodes(Degrees(shard=2, tensor=8), 8, 1024)
    assert advice_for_nodes(node, 8, 8192) == advice_for_nodes(nodes, 8, 16384) == advice_for_nodes(nodes, 16, 1) == ""


@pytest.mark.parametrize(
    ("world", "given", "says"),
    [
        (6, {"hybrid_shard_degree": 4}, r"does not divide the 6 .*; 1, 2, 3, 6 would"),
        (6, {"tensor": 4}, r"--tensor_parallel_degree 4 does not divide the 6 processes of this run; 1, 2, 3, 6 would"),
        (8, {"context": 3}, r"--context_parallel_degree 3 does not divide the 8 processes"),
        (8, {"tensor": 4, "context": 4}, r"does not divide the 2 ranks left by --tensor_parallel_degree 4"),
        (12, {"tensor": 4, "expert": 2}, r"4 and --expert_parallel_degree 2 does not divide the 12 processes"),
        (8, {"hybrid_shard_degree": 2, "context": 4}, r"the shard degree 2 of --hybrid_shard_degree 2; 1, 2 would"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_those_that_do(world: int, given: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(Arguments(**in_full(given)), world, world, smp=False)


@pytest.mark.parametrize("backend", ["native", "smp"])
def test_what_is_accepted_at_start_can_be_laid_out(backend: str) -> None:
    """On 12 ranks of 6 a node: what `validate` lets pass has a layout, or the refusal would come after the start."""
    accepted = 0
    for tensor, split, shard, strategy in itertools.product(
        (1, 2, 3, 4, 8), (1, 2, 3, 4), (None, 0, 1, 2, 3, 4, 8), ("full_shard", "hybrid_shard", "no_shard")
    ):
        args = Arguments(
            backend=backend, use_synthetic_data=True, tensor_parallel_degree=tensor, context_parallel_degree=split,
            hybrid_shard_degree=shard, sharding_strategy=strategy,
        )  # fmt: skip
        try:
            validate(args, 12, 6)
        except ConfigError:
            continue
        accepted += 1
        degrees = plan(args, 12, 6, smp=backend == "smp")
        assert degrees.world_size == 12
        assert (degrees.shard * degrees.context == shard) or not shard
    assert accepted > 60


LLAMA = LlamaConfig(
    vocab_size=512, hidden_size=64, num_attention_heads=8, num_key_value_heads=2, intermediate_size=96
)


LLAMA_OF_8 = {**LLAMA.to_dict(), "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("family", "changes", "degree", "seq_len", "says"),
    [
        ("llama", LLAMA.to_dict(), 4, 32, r"4 does not divide the 2 key-value heads .*; use one of \[1, 2\]"),
        ("llama", LLAMA_OF_8 | {"vocab_size": 510}, 4, 32, r"510 tokens of vocabulary .*; use one of \[1, 2\]"),
        ("llama", LLAMA_OF_8 | {"intermediate_size": 90}, 4, 32, r"90 columns of the feed-forward layer"),
        ("llama", LLAMA_OF_8, 4, 30, r"30 tokens .* of each sequence; change --max_context_width"),
        ("gpt2", {}, 2, 32, r"gpt2.*--hybrid_shard_degree"),
        ("mixtral", {"router_jitter_noise": 0.1}, 2, 32, r"router_jitter_noise 0\.1 .*mixtral"),
        # Families name the number of experts differently.
        (
            "qwen3_moe", {"num_experts": 6, "num_attention_heads": 8, "num_key_value_heads": 8}, 4, 32,
            r"4 .* 6 experts .*\[1, 2\]",
        ),
    ],
)  # fmt: skip
def test_models_that_do_not_split_are_refused(family: str, changes: dict, degree: int, seq_len: int, says: str) -> None:
    need_model(family)
    config = AutoConfig.for_model(family, **{name: value for name, value in changes.items() if name != "model_type"})
    with pytest.raises(ConfigError, match=says):
        tensor_parallel.check(config, degree, seq_len)
    tensor_parallel.check(config, 1, seq_len)


def test_context_needs_pieces_and_sdpa() -> None:
    need("cp")
    with pytest.raises(ConfigError, match=r"30 .* 4 "):
        context_parallel.check(2, 30, "sdpa", LLAMA)
    with pytest.raises(ConfigError, match="flash_attention_2"):
        context_parallel.check(2, 32, "flash_attention_2", LLAMA)
    context_parallel.check(1, 31, "flash_attention_2", LLAMA)


LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "rope_theta": 1e4}
DYNAMIC = {"full_attention": {"rope_type": "dynamic", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}}
OWN_WAYS = ["doge", "falcon", "gpt_oss", "lfm2", "llama4_text", "minimax", "phimoe", "qwen2_moe"]


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        *((family, {}, f"--context_parallel_degree 2: a {family} ") for family in OWN_WAYS),
        ("llama", {"rope_parameters": LONG}, r"llama \(longrope\)"),
        ("llama", {"rope_parameters": DYNAMIC}, r"llama \(dynamic\)"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "gemma3_text"),
        ("gemma2", {}, "attn_logit_softcapping of this gemma2"),
    ],
)
def test_models_whose_sequences_do_not_split_are_refused_by_name(family: str, changes: dict, says: str) -> None:
    need_model(family)
    config = AutoConfig.for_model(family)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=says):
        context_parallel.check(2, 32, "sdpa", config)
    context_parallel.check(1, 32, "sdpa", config)


class OneOf:
    """As much of a mesh as a split asks for."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.ranks = rank, size

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return self.rank


@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_share_the_work_of_a_causal_sequence(degree: int) -> None:
    work = []
    for rank in range(degree):
        split = context_parallel.ContextSplit(OneOf(rank, degree), 8 * degree)  # type: ignore[arg-type]
        assert split.pieces == (rank, 2 * degree - 1 - rank)
        positions = split.positions(torch.device("cpu"))
        assert positions.shape == (1, 8)
        work.append(int(positions.sum()))  # a token attends to as many as come before it
    assert len(set(work)) == 1


@pytest.mark.parametrize("given", [{"s_aux": torch.zeros(4)}, {"attention_mask": torch.ones(1, 1, 8, 8)}])
def test_attention_with_more_than_queries_keys_and_values_is_refused(given: dict) -> None:
    split = context_parallel.ContextSplit(OneOf(0, 2), 16)  # type: ignore[arg-type]
    one = torch.zeros(1, 2, 8, 4)
    with pytest.raises(ConfigError, match=r"s_aux|mask"):
        split.attend(nn.Identity(), one, one, one, **{"attention_mask": None, **given})


def test_mixtures_without_stacked_experts_or_with_another_loss_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traits, "version", lambda package: "5.6.0")
    traits.check_experts(AutoConfig.for_model("mixtral"))
    monkeypatch.setattr(traits, "version", lambda package: "5.5.4")
    traits.check_experts(LLAMA)
    with pytest.raises(ConfigError, match=r"mixtral.*transformers 5\.6"):
        traits.check_experts(AutoConfig.for_model("mixtral"))
    traits.check_loss(AutoConfig.for_model("mixtral"))
    with pytest.raises(ConfigError, match=r"output_router_logits .*mixtral"):
        traits.check_loss(AutoConfig.for_model("mixtral", output_router_logits=True))
