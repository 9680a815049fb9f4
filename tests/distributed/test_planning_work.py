"""What `smp-train plan` counts of a step, against formulas: FLOPs of the model, bytes of collectives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.distributed.test_planning import DEEP, OF
from tests.releases import TRANSFORMERS_5
from tests.tiers import core

NONE = {"activation_checkpointing": "none", "bf16": 1}
TP, CP, HSDP = {"tensor_parallel_degree": 2}, {"context_parallel_degree": 2}, {"hybrid_shard_degree": 2}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (2, NONE),
    "llama tp 2 fsdp 4": (8, {**NONE, **TP}),
    **{name: (2, {**of, **NONE}) for name, of in OF.items() if name != "llama"},
    "llama alone in float32": (1, {**NONE, "bf16": 0}),
    "llama cp 2": (4, {**NONE, **CP}),
    "llama hsdp": (8, {**NONE, **HSDP}),
    "llama accumulated": (4, {**NONE, "gradient_accumulation_steps": 5}),
    "llama all logits": (2, {**NONE, "chunked_loss": 0}),
    "llama recomputed": (2, {"bf16": 1}),
    "mixtral ep 2": (4, {**OF["mixtral"], **NONE, "expert_parallel_degree": 2}),
    "neox tp 2": (4, {**OF["neox"], **NONE, **TP}),
}
CORE = ["llama tp 2 fsdp 4"]


def counted(settings: list[tuple[int, dict[str, Any]]]) -> list[Any]:
    """Return of each setting (FLOPs by class, model FLOPs without and with attention, collectives, parameters)."""
    from smp_train import arguments
    from smp_train.models.flops import count_parameters, flops_per_token
    from smp_train.planning.best import planned_run
    from smp_train.planning.estimate import estimate
    from tests.training import flags

    found: list[Any] = []
    for ranks, changes in settings:
        args = arguments.parse(flags(Path("unused"), **{**DEEP, **changes}), {}).args
        run = planned_run(args, ranks, 4, gpu=True)
        spec, seq_len, work = run.spec, run.seq_len, estimate(run).work
        classes = Counter[str]()
        for (_, kind), cost in work.operations.items():
            classes[kind] += cost.flops
        sent: Counter[Any] = Counter()
        for (_, collective), cost in work.collectives.items():
            sent[collective.dimension, collective.kind, collective.ranks, collective.nodes] += cost.size
        tokens = args.train_batch_size * args.gradient_accumulation_steps * seq_len
        for degree in (args.tensor_parallel_degree, args.context_parallel_degree):
            tokens //= degree
        products, whole = flops_per_token(spec.config, 0) * tokens, flops_per_token(spec.config, seq_len) * tokens
        found.append((classes, products, whole - products, sent, count_parameters(spec.config)))
    return found


LAYERS = 8
REST = 2 * 512 * 64 + 64
"""Parameters outside the layers of `DEEP`: embedding, head and norm."""
HIDDEN = 2 * 64 * 64 * 2
"""Bytes of two rows of hidden states in bfloat16."""
KEYS = 2 * 64 * 2 * 16 * 2
"""The same of their keys, or their values: two heads of 16."""


@pytest.mark.slow
@pytest.mark.parametrize("names", core([CORE, [*SETTINGS]], lambda names: names is CORE))
def test_work_equals_formulas(names: list[str]) -> None:
    for name, found in zip(names, harness.run(counted, 1, [SETTINGS[name] for name in names])[0], strict=True):
        (ranks, changes), (classes, products, attention, sent, parameters) = SETTINGS[name], found
        if name == "llama recomputed":  # a layer's recomputation ends before its last product, which nothing needs
            last, of_layers = 64 * 160, (parameters - REST) // LAYERS - 2 * 64
            products += 2 * LAYERS * (of_layers - last) * 2 * 64
            parts = 18
        else:
            parts = 14
        dtype = "products" if changes["bf16"] else "products in float32"
        assert classes[dtype] == products, name
        if "attention" in classes:
            # Half of the matrix with its diagonal, S (S + 1) / 2; backward, the scores once more: 14 for 12.
            causal = attention * parts * (64 + 1) / (12 * 2 * 64)
            # transformers 4.53 to 4.57 make a dense mask of fake tensors, but none of real tensors.
            assert classes["attention"] in ({causal} if TRANSFORMERS_5 else {causal, attention * parts / 12}), name
        else:  # one head of keys and a mask: no kernel takes both
            assert name == "falcon"
        if ranks == 1:
            continue
        degree = changes.get("tensor_parallel_degree", 1)
        if name.startswith("llama"):
            times, shards = changes.get("gradient_accumulation_steps", 1), changes.get("hybrid_shard_degree")
            norm = 64 * (degree - 1)  # which every tensor rank has whole
            rest = (REST + norm) / degree
            layer = ((parameters - REST) / LAYERS + 2 * norm) / degree
            by_kind = Counter[str]()
            for (dimension, kind, among, _), size in sent.items():
                if dimension.startswith("shard") and size > 100:
                    assert among == (shards or ranks // degree)
                    by_kind[kind] += size
            # Gathered twice in bfloat16, except the last layer and the remaining parameters; reduced once in float32.
            assert by_kind["all-gather"] == 2 * times * ((2 * LAYERS - 1) * layer + rest), name
            assert by_kind["reduce-scatter"] == 4 * times * (LAYERS * layer + rest), name
            if shards:
                assert sent["replicate", "all-reduce", ranks // shards, 2] == 4 * parameters / shards
        if degree > 1:  # both blocks, both ways; the head
            assert sent["tensor", "all-gather", 2, 1] == (4 * LAYERS + 2) * HIDDEN
            assert sent["tensor", "reduce-scatter", 2, 1] == (4 * LAYERS + 1) * HIDDEN
        if "expert_parallel_degree" in changes:  # two experts for each token, there and back; and how many go where
            assert sent["expert", "all-to-all", 2, 1] == pytest.approx(LAYERS * 4 * 2 * HIDDEN, rel=1e-3)
        if "context_parallel_degree" in changes:
            assert sent["context", "all-gather", 2, 1] == sent["context", "reduce-scatter", 2, 1] == 2 * LAYERS * KEYS


def in_chunks() -> list[Any]:
    """Return memory and work of a step whose loss takes four chunks, as planned and with each of them computed."""
    from smp_train import arguments
    from smp_train.planning.best import planned_run
    from smp_train.planning.estimate import estimate
    from smp_train.planning.work import WorkCounter
    from tests.training import flags

    changes = {**DEEP, **NONE, **TP, "vocab_size": 2**19, "train_batch_size": 60, "gradient_accumulation_steps": 3}
    args = arguments.parse(flags(Path("unused"), **changes), {}).args
    found = []
    for chunks in (WorkCounter.sampled_chunks, lambda counter, tokens, chunk: range(0, tokens, chunk)):
        WorkCounter.sampled_chunks = chunks
        memory = estimate(planned_run(args, 4, 4, gpu=True))
        found.append((memory.peaks, dict(memory.work.operations), dict(memory.work.collectives)))
    return found


@pytest.mark.slow
def test_one_chunk_of_the_loss_stands_for_those_between_the_first_and_the_last() -> None:
    """The loss takes 3,840 tokens, 1,024 at a time, with the collectives of a vocabulary that two ranks share."""
    ((planned, every),) = harness.run(in_chunks, 1)
    assert planned[0] == every[0]
    for some, all_of_them in zip(planned[1:], every[1:], strict=True):
        assert some.keys() == all_of_them.keys()
        assert all(cost == pytest.approx(all_of_them[key]) for key, cost in some.items())
