"""The order of parameters within an FSDP1 flat parameter, for models of transformers 4.31 to 4.44.

A flat parameter stores no names. Its parts are concatenated in the order of ``named_parameters()``, the order in which
modules are registered. Later versions of transformers may register them in another order, so it is fixed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from smp_train.errors import CheckpointError

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_LLAMA_LAYER = (*_ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", *_LLAMA_NORMS)
_MIXTRAL_LAYER = (*_ATTENTION, "block_sparse_moe.gate", "block_sparse_moe.experts", *_LLAMA_NORMS)
_NEOX_LAYER = (
    *_LLAMA_NORMS, "attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
)  # fmt: skip
_GPT2_LAYER = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
# Modules before the decoder layers, of one layer, and after the layers.
_MODULES = {
    "llama": (("model.embed_tokens",), _LLAMA_LAYER, ("model.norm", "lm_head")),
    "mistral": (("model.embed_tokens",), _LLAMA_LAYER, ("model.norm", "lm_head")),
    "mixtral": (("model.embed_tokens",), _MIXTRAL_LAYER, ("model.norm", "lm_head")),
    "gpt_neox": (("gpt_neox.embed_in",), _NEOX_LAYER, ("gpt_neox.final_layer_norm", "embed_out")),
    "gpt2": (("transformer.wte", "transformer.wpe"), _GPT2_LAYER, ("transformer.ln_f", "lm_head")),
}
_PARAMETER = re.compile(
    r"(?:\w+\.(?:layers|h)\.(?P<layer>\d+)\.)?(?P<module>.+?)(?:\.(?P<expert>\d+)\.(?P<part>w[123]))?\.(?P<leaf>weight|bias)"
)


def flat_order(kind: str, names: Iterable[str]) -> list[str]:
    """Return the parameters ``names`` of a model of transformers' type ``kind`` in the order of the flat parameter.

    Raises `CheckpointError` for an unknown type or parameter.
    """
    if kind not in _MODULES:
        known = ", ".join(_MODULES)
        raise CheckpointError(f"its parameters are flat: their order is known for {known}, and not for {kind}")
    before, layer, after = _MODULES[kind]
    places = {module: (part, index) for part, group in ((0, before), (2, after)) for index, module in enumerate(group)}

    def place(name: str) -> tuple[int, ...]:
        found = _PARAMETER.fullmatch(name)
        if found is None or found["module"] not in (places if found["layer"] is None else layer):
            raise CheckpointError(f"its parameters are flat, and where {name} is in them is not known for {kind}")
        part, index = places[found["module"]] if found["layer"] is None else (1, layer.index(found["module"]))
        expert = (int(found["expert"]), int(found["part"][1])) if found["expert"] else (0, 0)
        return part, int(found["layer"] or 0), index, *expert, int(found["leaf"] == "bias")

    return sorted(names, key=place)
