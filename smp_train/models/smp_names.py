"""Parameters of SMP's own (transformed) implementation as blocks of the tensors on the Hugging Face hub.

The names are those of `smp_train.models.layouts`. The split over tensor ranks follows from the shapes of the rank's
tensor and the whole one.
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

_FOLDER = re.compile(r"tp(?P<tensor>\d+)_ep(?P<expert>\d+)(?:_fsdp(?P<shard>\d+))?")
_EARLIER = re.compile(r"(?:tp(?P<tensors>\d+)-(?P<tensor>\d+))?/?(?:ep(?P<experts>\d+)-(?P<expert>\d+))?")
table: dict[str, list[str]] = {}
"""Table of --smp_names: for each of SMP's parameters the hub's tensors that it holds, one below the other.

``{layer}`` and ``{expert}`` stand for numbers, an expert's on its rank.
"""
# Path components that wrappers add to names.
WRAPPERS = frozenset({"module", "lm", "inner"})
_LAYER = re.compile(r"(?:^|\.)(?:seq_)?layers\.(\d+)\.(.+)")
_EXPERTS = re.compile(
    r"(?:mlp|block_sparse_moe)\.(?:(?P<router>router(?:\.weight)?|gate\.weight)"
    r"|(?P<inwards>inwards|experts\.gate_up_proj)|(?P<outwards>outwards|experts\.down_proj)"
    r"|experts\.local_experts\.(?P<local>\d+)\.linear_fc(?P<fc>[12])\.weight)"
)
_QKV = re.compile(r"self_attention\.layernorm_qkv\.(query|key|value)_(weight|bias)")
# Modules outside the layers, by the last but one component of the name.
_AROUND = {
    "word_embedding": "embedding", "word_embeddings": "embedding", "embed_tokens": "embedding", "embed_in": "embedding",
    "layernorm": "norm", "final_layernorm": "norm", "norm": "norm", "final_layer_norm": "norm",
    "lm_head": "head", "embed_out": "head",
}  # fmt: skip


class Ranks(NamedTuple):
    """Tensor and expert rank of the writer of a tree, and the sizes of both groups."""

    tensor: int = 0
    tensors: int = 1
    expert: int = 0
    experts: int = 1

    @property
    def folder(self) -> str:
        """Sub-folder of the tree that this rank writes."""
        return f"tp{self.tensor}_ep{self.expert}"

    @classmethod
    def of_folder(cls, folder: str) -> tuple[Ranks, int] | None:
        """Return the ranks that a sub-folder's name gives (with group sizes where it has them) and its shard rank."""
        match = _FOLDER.fullmatch(folder)
        if match is not None:
            return cls(tensor=int(match["tensor"]), expert=int(match["expert"])), int(match["shard"] or 0)
        match = _EARLIER.fullmatch(folder)
        if match is None:
            return None
        return cls(*(int(match[field] or default) for field, default in cls._field_defaults.items())), 0

    @classmethod
    def of_folders(cls, folders: Iterable[str]) -> dict[str, Ranks]:
        """Return the writers of the trees of one checkpoint, by sub-folder."""
        found = {folder: of[0] for folder in folders if (of := cls.of_folder(folder)) is not None}
        tensors = max((max(each.tensors, each.tensor + 1) for each in found.values()), default=1)
        experts = max((max(each.experts, each.expert + 1) for each in found.values()), default=1)
        return {folder: each._replace(tensors=tensors, experts=experts) for folder, each in found.items()}


@dataclass(frozen=True)
class HubModel:
    """A model as the translation needs it: its transformers type, and the shapes of its tensors on the hub."""

    kind: str
    shapes: Mapping[str, Sequence[int]]
    heads: int = 1
    experts: int = 0
    tied: bool = False

    @classmethod
    def of(cls, config: Any, shapes: Mapping[str, Sequence[int]]) -> HubModel:
        """Build it from a transformers configuration."""
        return cls(
            kind=config.model_type,
            shapes=shapes,
            heads=getattr(config, "num_attention_heads", 1),
            experts=getattr(config, "num_local_experts", 0),
            tied=bool(getattr(config, "tie_word_embeddings", False)),
        )


@dataclass(frozen=True)
class Block:
    """A block that a saved tensor and the tensor ``name`` of the hub have in common."""

    name: str
    at: tuple[int, ...]
    """Offset in the hub's tensor."""
    start: tuple[int, ...]
    """Offset in the saved tensor, preceded by indices of its leading dimensions that the hub's does not have."""
    size: tuple[int, ...]
    """In the hub's dimensions."""


def plain(name: str) -> str:
    """Return a parameter's name without the components of wrappers."""
    return ".".join(word for word in canonical_name(name).split(".") if word not in WRAPPERS)


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
            if not (names and isinstance(names, list) and all(each.format(**numbers) for each in names)):
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
    """Return whether parameters have SMP's names rather than those of transformers."""
    if kind not in SMP_LAYERS:
        return False
    roots = {LAYOUTS[kind].layers.split(".")[0], LAYOUTS[kind].head, "lm_head"}
    return any(canonical_name(name).split(".")[0] not in roots for name in names)


def blocks(name: str, shape: Sequence[int], ranks: Ranks, model: HubModel) -> list[Block] | None:
    """Return the blocks of the hub's tensors in a saved parameter of ``shape``; None for an unknown parameter.

    Raises `CheckpointError` where its shape is not that of an even split.
    """
    name = canonical_name(name)
    for known, tensors in table.items():
        numbers = _pattern(known).fullmatch(name)
        if numbers is not None:
            number = {"expert": 0} | {key: int(value) for key, value in numbers.groupdict().items()}
            number["expert"] += ranks.expert * (model.experts // ranks.experts)
            return _stacked([each.format(**number) for each in tensors], shape, ranks, model)
    name = name if name in model.shapes else plain(name)
    if name in model.shapes:
        return _stacked((name,), shape, ranks, model)
    if model.kind not in SMP_LAYERS:
        return None
    layout = LAYOUTS[model.kind]
    layer = _LAYER.search(name)
    if layer is None:
        path, _, leaf = name.rpartition(".")
        around = _AROUND.get(path.rpartition(".")[2])
        hub = f"{getattr(layout, around)}.{leaf}" if around else ""
        return _stacked((hub,), shape, ranks, model) if hub in model.shapes else None
    prefix, rest = f"{layout.layers}.{layer[1]}.", layer[2]
    moe = _EXPERTS.fullmatch(rest) if model.kind == "mixtral" else None
    if moe is not None:
        return _experts(moe, prefix + "block_sparse_moe.", shape, ranks, model)
    qkv = _QKV.fullmatch(rest) if model.kind == "gpt_neox" else None
    if qkv is not None:
        return _by_head(f"{prefix}attention.query_key_value.{qkv[2]}", qkv[1], shape, ranks, model)
    found = [prefix + part for part in SMP_LAYERS[model.kind].get(rest, ())]
    return _stacked(found, shape, ranks, model) if found and set(found) <= set(model.shapes) else None


def _stacked(
    names: Sequence[str], shape: Sequence[int], ranks: Ranks, model: HubModel, lead: tuple[int, ...] = ()
) -> list[Block]:
    """Return the blocks of hub tensors concatenated along rows at the indices ``lead`` of the saved tensor."""
    whole = [model.shapes[name][0] if name in model.shapes and len(names) > 1 else 1 for name in names]
    found, row = [], 0
    for name, share in zip(names, whole, strict=True):
        size = (shape[0] * share // sum(whole), *shape[1:]) if shape else ()
        at = _offset(name, size, ranks, model)
        found.append(Block(name, at, (*lead, row, *[0] * (len(size) - 1)) if shape else lead, size))
        row += size[0] if shape else 0
    return found


def _experts(match: re.Match[str], prefix: str, shape: Sequence[int], ranks: Ranks, model: HubModel) -> list[Block]:
    if match["router"]:
        return _stacked((prefix + "gate.weight",), shape, ranks, model)
    inwards = match["inwards"] or match["fc"] == "1"
    parts = ("w1", "w3") if inwards else ("w2",)

    def names(expert: int) -> list[str]:
        return [f"{prefix}experts.{expert}.{part}.weight" for part in parts]

    if match["local"]:
        own = model.experts // ranks.experts
        return _stacked(names(ranks.expert * own + int(match["local"])), shape, ranks, model)
    own = shape[0]
    if own not in (model.experts, model.experts // ranks.experts):
        raise CheckpointError(f"{prefix}experts: {own} on a rank there, {model.experts} in all here")
    first = 0 if own == model.experts else ranks.expert * own
    return [
        block
        for index in range(own)
        for block in _stacked(names(first + index), shape[1:], ranks, model, lead=(index,))
    ]


def _by_head(name: str, part: str, shape: Sequence[int], ranks: Ranks, model: HubModel) -> list[Block]:
    """Return the blocks of GPT-NeoX's fused query-key-value matrix, whose rows the hub interleaves head by head."""
    width = model.shapes[name][0] // (3 * model.heads)
    heads = shape[0] // width
    if heads * width != shape[0] or heads not in (model.heads, model.heads // ranks.tensors):
        raise CheckpointError(f"{name}: {part} is {list(shape)} on a rank there, not a whole number of heads")
    first = 0 if heads == model.heads else ranks.tensor * heads
    row = ("query", "key", "value").index(part)
    rest = [0] * (len(shape) - 1)
    return [
        Block(name, ((3 * (first + head) + row) * width, *rest), (head * width, *rest), (width, *shape[1:]))
        for head in range(heads)
    ]


def _offset(name: str, size: Sequence[int], ranks: Ranks, model: HubModel) -> tuple[int, ...]:
    """Return the offset of a rank's part, which is the whole tensor or an even split of one dimension."""
    if name not in model.shapes:
        raise CheckpointError(f"{name} is no tensor of this model (another --num_layers or --model_type?)")
    whole = tuple(model.shapes[name])
    differ = [dim for dim in range(len(size)) if len(size) == len(whole) and size[dim] != whole[dim]]
    if len(size) == len(whole) and not differ:
        return (0,) * len(whole)
    if len(differ) == 1 and size[differ[0]] * ranks.tensors == whole[differ[0]]:
        return tuple(ranks.tensor * size[dim] if dim == differ[0] else 0 for dim in range(len(whole)))
    if len(size) != len(whole):
        raise CheckpointError(f"{name} is {list(whole)} here and stored as {list(size)}: flat parts are not read")
    of = f"tensor rank {ranks.tensor} of {ranks.tensors}"
    raise CheckpointError(
        f"{name} is {list(whole)} here, and {list(size)} on {of} there: trees of some ranks are missing, or it is of "
        "another model (--num_layers, --hidden_width, --vocab_size)"
    )
