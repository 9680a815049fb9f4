"""Parameters of SMP's own (transformed) implementation as blocks of the tensors on the Hugging Face hub.

Names are translated by `smp_train.models.layouts`, or by the user's table. How tensor ranks split a parameter follows
from the shapes of a rank's tensor and of the hub's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from smp_train.errors import CheckpointError, ConfigError, one_line
from smp_train.models.hub_names import canonical_name
from smp_train.models.layouts import LAYOUTS, SMP_LAYERS

table: dict[str, list[str]] = {}
"""The table of --smp_names: for each parameter in SMP, the hub's tensors that it holds, concatenated along rows.

``{layer}`` and ``{expert}`` stand for numbers; an expert's number counts from 0 on each expert rank.
"""
WRAPPERS = frozenset({"module", "lm", "inner"})
"""Path components that wrappers add to names."""
_FOLDER = re.compile(r"tp(?P<tensor>\d+)_ep(?P<expert>\d+)(?:_fsdp(?P<shard>\d+))?")
_EARLIER_FOLDER = re.compile(r"(?:tp(?P<tensors>\d+)-(?P<tensor>\d+))?/?(?:ep(?P<experts>\d+)-(?P<expert>\d+))?")
_LAYER = re.compile(r"(?:^|\.)(?:seq_)?layers\.(\d+)\.(.+)")
_EXPERTS = re.compile(
    r"(?:mlp|block_sparse_moe)\.(?:(?P<router>router(?:\.weight)?|gate\.weight)"
    r"|(?P<inwards>inwards|experts\.gate_up_proj)|(?P<outwards>outwards|experts\.down_proj)"
    r"|experts\.local_experts\.(?P<local>\d+)\.linear_fc(?P<fc>[12])\.weight)"
)
_QKV = re.compile(r"self_attention\.layernorm_qkv\.(query|key|value)_(weight|bias)")
_AROUND = {
    "word_embedding": "embedding", "word_embeddings": "embedding", "embed_tokens": "embedding", "embed_in": "embedding",
    "layernorm": "norm", "final_layernorm": "norm", "norm": "norm", "final_layer_norm": "norm",
    "lm_head": "head", "embed_out": "head",
}  # fmt: skip
"""Fields of `Layout` for modules outside the layers, by the module's own name."""


class Ranks(NamedTuple):
    """The tensor and expert rank that wrote a tree, and the sizes of both groups."""

    tensor: int = 0
    tensors: int = 1
    expert: int = 0
    experts: int = 1

    @property
    def folder(self) -> str:
        """The checkpoint's sub-folder that this rank writes."""
        return f"tp{self.tensor}_ep{self.expert}"

    @classmethod
    def of_folder(cls, folder: str) -> tuple[Ranks, int] | None:
        """Return the ranks in a sub-folder's name, and the shard rank.

        AWS's earlier scripts wrote ``tp<degree>-<rank>/ep<degree>-<rank>``, each part only for a degree above 1.
        """
        match = _FOLDER.fullmatch(folder)
        if match is not None:
            return cls(tensor=int(match["tensor"]), expert=int(match["expert"])), int(match["shard"] or 0)
        match = _EARLIER_FOLDER.fullmatch(folder)
        if match is None:
            return None
        return cls(*(int(match[field] or default) for field, default in cls._field_defaults.items())), 0

    @classmethod
    def of_folders(cls, folders: Iterable[str]) -> dict[str, Ranks]:
        """Return the ranks that wrote one checkpoint, by sub-folder."""
        writers = {folder: ranks_and_shard[0] for folder in folders if (ranks_and_shard := cls.of_folder(folder))}
        tensors = max((max(ranks.tensors, ranks.tensor + 1) for ranks in writers.values()), default=1)
        experts = max((max(ranks.experts, ranks.expert + 1) for ranks in writers.values()), default=1)
        return {folder: ranks._replace(tensors=tensors, experts=experts) for folder, ranks in writers.items()}


@dataclass(frozen=True)
class HubModel:
    """The model's properties that the translation needs."""

    kind: str
    """``model_type`` of transformers."""
    shapes: Mapping[str, Sequence[int]]
    """Shapes of the model's tensors on the hub."""
    heads: int = 1
    experts: int = 0
    tied: bool = False

    @classmethod
    def from_config(cls, config: Any, shapes: Mapping[str, Sequence[int]]) -> HubModel:
        """Return the properties in a transformers configuration."""
        heads, experts = getattr(config, "num_attention_heads", 1), getattr(config, "num_local_experts", 0)
        return cls(config.model_type, shapes, heads, experts, bool(getattr(config, "tie_word_embeddings", False)))


@dataclass(frozen=True)
class Block:
    """A block that a saved tensor has in common with the tensor ``name`` on the hub."""

    name: str
    offset: tuple[int, ...]
    """First index of the block in the hub's tensor, by dimension."""
    start: tuple[int, ...]
    """Offset in the saved tensor, which may have additional leading dimensions."""
    size: tuple[int, ...]
    """Size of the block in the hub's tensor, by dimension."""


def plain(name: str) -> str:
    """Return a parameter's name without the components of wrappers."""
    return ".".join(part for part in canonical_name(name).split(".") if part not in WRAPPERS)


def read_table(path: str | None) -> None:
    """Set `table` from a JSON or YAML file, such as ``smp-train doctor --smp`` writes. Raises `ConfigError`."""
    table.clear()
    if path is None:
        return
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        rows = content.get("names", content)
        for name, names in rows.items():
            numbers = {"expert": 0} | dict.fromkeys(_pattern(name).groupindex, 0)
            if not (names and isinstance(names, list) and all(tensor.format(**numbers) for tensor in names)):
                raise ValueError(f"{name} has no list of names")
    except KeyError as placeholder:
        raise ConfigError(f"--smp_names {path}: {name} has no placeholder {placeholder}, which its list has") from None
    except (OSError, ValueError, TypeError, AttributeError, IndexError, re.error, yaml.YAMLError) as problem:
        raise ConfigError(f"--smp_names {path}: {one_line(problem)}; docs/smp-v2.md has the format") from None
    table.update(rows)


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(layer|expert)\\}", r"(?P<\1>\\d+)", re.escape(name)))


def is_transformed(names: Iterable[str], kind: str) -> bool:
    """Return whether parameters have SMP's names rather than those in transformers."""
    if kind not in SMP_LAYERS:
        return False
    roots = {LAYOUTS[kind].layers.split(".")[0], LAYOUTS[kind].head, "lm_head"}
    return any(canonical_name(name).split(".")[0] not in roots for name in names)


def blocks(name: str, shape: Sequence[int], ranks: Ranks, model: HubModel) -> list[Block] | None:
    """Return the blocks of the hub's tensors in a saved parameter of ``shape``; None for an unknown parameter.

    Raises `CheckpointError` if the shape is not an even split of the hub's.
    """
    name = canonical_name(name)
    for pattern, names in table.items():
        match = _pattern(pattern).fullmatch(name)
        if match is not None:
            numbers = {"expert": 0} | {key: int(value) for key, value in match.groupdict().items()}
            numbers["expert"] += ranks.expert * (model.experts // ranks.experts)
            return _rows([tensor.format(**numbers) for tensor in names], shape, ranks, model)
    name = name if name in model.shapes else plain(name)
    if name in model.shapes:
        return _rows((name,), shape, ranks, model)
    if model.kind not in SMP_LAYERS:
        return None
    layout, in_layer = LAYOUTS[model.kind], _LAYER.search(name)
    if in_layer is None:
        path, _, leaf = name.rpartition(".")
        module = _AROUND.get(path.rpartition(".")[2])
        names = [f"{getattr(layout, module)}.{leaf}"] if module else []
    else:
        prefix, parameter = f"{layout.layers}.{in_layer[1]}.", in_layer[2]
        if model.kind == "mixtral" and (match := _EXPERTS.fullmatch(parameter)):
            return _experts(match, prefix + "block_sparse_moe.", shape, ranks, model)
        if model.kind == "gpt_neox" and (match := _QKV.fullmatch(parameter)):
            return _interleaved_heads(f"{prefix}attention.query_key_value.{match[2]}", match[1], shape, ranks, model)
        names = [prefix + tensor for tensor in SMP_LAYERS[model.kind].get(parameter, ())]
    return _rows(names, shape, ranks, model) if names and set(names) <= set(model.shapes) else None


def _rows(
    names: Sequence[str], shape: Sequence[int], ranks: Ranks, model: HubModel, lead: tuple[int, ...] = ()
) -> list[Block]:
    """Return one block per hub tensor, concatenated along rows at the leading indices ``lead`` of the saved tensor."""
    shares = [model.shapes[name][0] if name in model.shapes and len(names) > 1 else 1 for name in names]
    result, row = [], 0
    for name, share in zip(names, shares, strict=True):
        size = (shape[0] * share // sum(shares), *shape[1:]) if shape else ()
        start = (*lead, row, *[0] * (len(size) - 1)) if shape else lead
        result.append(Block(name, _offset(name, size, ranks, model), start, size))
        row += size[0] if shape else 0
    return result


def _experts(match: re.Match[str], prefix: str, shape: Sequence[int], ranks: Ranks, model: HubModel) -> list[Block]:
    """Return the blocks of the router, of one expert, or of an expert rank's stacked experts."""
    if match["router"]:
        return _rows((prefix + "gate.weight",), shape, ranks, model)
    parts = ("w1", "w3") if match["inwards"] or match["fc"] == "1" else ("w2",)

    def names(expert: int) -> list[str]:
        return [f"{prefix}experts.{expert}.{part}.weight" for part in parts]

    per_rank = model.experts // ranks.experts
    if match["local"]:
        return _rows(names(ranks.expert * per_rank + int(match["local"])), shape, ranks, model)
    stacked = shape[0]
    if stacked not in (model.experts, per_rank):
        raise CheckpointError(f"{prefix}experts: {stacked} on a rank there, {model.experts} in all here")
    first = 0 if stacked == model.experts else ranks.expert * stacked
    return [
        block
        for index in range(stacked)
        for block in _rows(names(first + index), shape[1:], ranks, model, lead=(index,))
    ]


def _interleaved_heads(
    name: str, part: str, shape: Sequence[int], ranks: Ranks, model: HubModel
) -> list[Block]:
    """Return the blocks of GPT-NeoX's fused query-key-value matrix, whose rows the hub interleaves head by head."""
    width = model.shapes[name][0] // (3 * model.heads)
    heads = shape[0] // width
    if heads * width != shape[0] or heads not in (model.heads, model.heads // ranks.tensors):
        raise CheckpointError(f"{name}: {part} is {list(shape)} on a rank there, not a whole number of heads")
    first = 0 if heads == model.heads else ranks.tensor * heads
    row = ("query", "key", "value").index(part)
    columns = [0] * (len(shape) - 1)
    return [
        Block(name, ((3 * (first + head) + row) * width, *columns), (head * width, *columns), (width, *shape[1:]))
        for head in range(heads)
    ]


def _offset(name: str, size: Sequence[int], ranks: Ranks, model: HubModel) -> tuple[int, ...]:
    """Return the offset in the hub's tensor of a rank's part: the whole tensor, or an even split of one dimension."""
    if name not in model.shapes:
        raise CheckpointError(f"{name} is no tensor of this model (another --num_layers or --model_type?)")
    whole = tuple(model.shapes[name])
    if len(size) != len(whole):
        raise CheckpointError(f"{name} is {list(whole)} here and stored as {list(size)}: flat parts are not read")
    split = [dim for dim in range(len(size)) if size[dim] != whole[dim]]
    if not split:
        return (0,) * len(whole)
    if len(split) == 1 and size[split[0]] * ranks.tensors == whole[split[0]]:
        return tuple(ranks.tensor * size[dim] if dim == split[0] else 0 for dim in range(len(whole)))
    raise CheckpointError(
        f"{name} is {list(whole)} here, and {list(size)} on tensor rank {ranks.tensor} of {ranks.tensors} there: trees "
        "of some ranks are missing, or it is of another model (--num_layers, --hidden_width, --vocab_size)"
    )
