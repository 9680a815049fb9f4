"""Modules of the families that SMP v2 trains, in order, and their names in SMP's own (transformed) implementation.

The order is that in which transformers 4.31 to 4.44 registers modules. Parameters have the same order in FSDP1's flat
parameter, which stores no names. Newer versions of transformers may have another order.

SMP's source is not public. Its decoder layers are Transformer Engine's and its experts Megatron Core's, whose names are
public, like the names around the layers in SMP v1 (``transformer.seq_layers.N``, ``word_embedding``). That v2 combines
them in this way is an assumption (docs/smp-v2.md). A name outside the table is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from smp_train.errors import CheckpointError


class Layout(NamedTuple):
    """Names of a family's modules on the hub."""

    embedding: str
    layers: str
    layer: tuple[tuple[str, ...], ...]
    """A layer's modules, each followed by the prefixes of its parameters' names in SMP.

    SMP concatenates modules with the same prefix along rows: a rank's rows of the gate projection come first, then its
    rows of the up projection. Modules without a prefix are translated in `smp_train.models.smp_names`.
    """
    norm: str
    head: str = "lm_head"
    positions: str = ""
    transformed: bool = True
    """Whether SMP has its own implementation."""


_QKV, _MLP = "self_attention.layernorm_qkv.", "layernorm_mlp."
_ATTENTION = (
    ("self_attn.q_proj", f"{_QKV}query_"), ("self_attn.k_proj", f"{_QKV}key_"), ("self_attn.v_proj", f"{_QKV}value_"),
    ("self_attn.o_proj", "self_attention.proj."),
)  # fmt: skip
_NORMS = (
    ("input_layernorm", f"{_QKV}layer_norm_"),
    ("post_attention_layernorm", f"{_MLP}layer_norm_", "pre_mlp_layernorm."),
)
_FEED_FORWARD = (("mlp.gate_proj", f"{_MLP}fc1_"), ("mlp.up_proj", f"{_MLP}fc1_"), ("mlp.down_proj", f"{_MLP}fc2_"))
_EXPERTS = (("block_sparse_moe.gate",), ("block_sparse_moe.experts",))
_NEOX = (
    *_NORMS, ("attention.query_key_value",), ("attention.dense", "self_attention.proj."),
    ("mlp.dense_h_to_4h", f"{_MLP}fc1_"), ("mlp.dense_4h_to_h", f"{_MLP}fc2_"),
)  # fmt: skip
_GPT2 = (("ln_1",), ("attn.c_attn",), ("attn.c_proj",), ("ln_2",), ("mlp.c_fc",), ("mlp.c_proj",))
_LLAMA = Layout("model.embed_tokens", "model.layers", (*_ATTENTION, *_FEED_FORWARD, *_NORMS), "model.norm")
LAYOUTS = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA._replace(layer=(*_ATTENTION, *_EXPERTS, *_NORMS)),
    "gpt_neox": Layout("gpt_neox.embed_in", "gpt_neox.layers", _NEOX, "gpt_neox.final_layer_norm", "embed_out"),
    "gpt2": Layout("transformer.wte", "transformer.h", _GPT2, "transformer.ln_f", "lm_head", "transformer.wpe", False),
}
"""The layout of each family, by transformers' ``model_type``."""
SMP_LAYERS: dict[str, dict[str, list[str]]] = {kind: {} for kind, layout in LAYOUTS.items() if layout.transformed}
"""By ``model_type``: a layer's parameters in SMP, and the hub's parameters that each consists of."""
for _kind, _table in SMP_LAYERS.items():
    for _module, *_prefixes in LAYOUTS[_kind].layer:
        for _prefix in _prefixes:
            for _leaf in ("weight", "bias"):
                _table.setdefault(_prefix + _leaf, []).append(f"{_module}.{_leaf}")

_PARAMETER = re.compile(
    r"(?:\w+\.(?:layers|h)\.(?P<layer>\d+)\.)?(?P<module>.+?)(?:\.(?P<expert>\d+)\.(?P<part>w[123]))?\.(?P<leaf>weight|bias)"
)


def flat_order(kind: str, names: Iterable[str]) -> list[str]:
    """Return the parameters ``names`` of a model of transformers' type ``kind`` in the order of the flat parameter.

    Raises `CheckpointError` for an unknown type or parameter.
    """
    if kind not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise CheckpointError(f"its parameters are flat: their order is known for {known}, and not for {kind}")
    layout = LAYOUTS[kind]
    around = {layout.embedding: (0, 0), layout.positions: (0, 1), layout.norm: (2, 0), layout.head: (2, 1)}
    in_layer = {module: (1, index) for index, (module, *_) in enumerate(layout.layer)}

    def position(name: str) -> tuple[int, ...]:
        match = _PARAMETER.fullmatch(name)
        modules = in_layer if match and match["layer"] else around
        if match is None or match["module"] not in modules:
            raise CheckpointError(f"its parameters are flat, and where {name} is in them is not known for {kind}")
        part, index = modules[match["module"]]
        expert = (int(match["expert"]), int(match["part"][1])) if match["expert"] else (0, 0)
        return part, int(match["layer"] or 0), index, *expert, int(match["leaf"] == "bias")

    return sorted(names, key=position)
