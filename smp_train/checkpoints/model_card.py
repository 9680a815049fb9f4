"""The README.md of an exported model: what it is, what it was trained on, how far, and how to run it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

TAG = "tags: [smp-train]"
"""A line of every card."""
_CACHED = re.compile(r"/models--(.+?)/snapshots/")


def model_card(meta: Mapping[str, Any], *, name: str, step: int, tokenizer: bool) -> str:
    """Return the model card, Markdown with the hub's YAML header, of a checkpoint's ``meta.json``.

    Only what the checkpoint knows is stated; secrets were removed from its arguments when it was saved.
    """
    args = meta.get("arguments") or {}
    base = (meta.get("adapter") or {}).get("base") or _base(args)
    base = base and hub_name(str(base))
    data = [str(place) for place in [*(args.get("training_dir") or ()), *(args.get("dataset") or ())] if place]
    data = ["synthetic"] if args.get("use_synthetic_data") else data
    header = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    header += [f"base_model: {json.dumps(base)}"] if base and base.count("/") == 1 and not base.startswith("/") else []
    rows = {
        "run": (meta.get("run") or {}).get("name"),
        "model type": meta.get("model_type"),
        "started from": base or "random initial weights",
        "data": ", ".join(data) or None,
        "steps": step,
        "tokens with a loss": meta.get("tokens"),
        "samples": (meta.get("data") or {}).get("consumed"),
        "sequence length": args.get("max_context_width"),
        "adapters (LoRA)": _adapter(meta.get("adapter")),
        "training loss": _number(meta.get("loss")),
        "validation loss": _number(meta.get("validation_loss")),
    }
    lines = [*header, TAG, "---", "", f"# {name}", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {_cell(value)} |" for key, value in rows.items() if value not in (None, "")]
    versions = meta.get("versions") or {}
    if versions:
        lines += ["", "Trained with smp-train: " + ", ".join(f"{k} {v}" for k, v in versions.items() if v) + "."]
    if tokenizer:
        lines += [
            "", "```python", "from transformers import pipeline", "",
            'print(pipeline("text-generation", model=".")("Once upon a time", max_new_tokens=20)[0]["generated_text"])',
            "```",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def hub_name(location: str) -> str:
    """Return the name on the hub of a model that lies in the hub's cache; any other location as it is."""
    cached = _CACHED.search(location)
    return cached[1].replace("--", "/", 1) if cached else location


def _base(args: Mapping[str, Any]) -> str | None:
    keys = ["hf_pretrained_model_name_or_dir"]
    if args.get("finetune"):
        keys = ["pretrained_model_name", "finetune_checkpoint_load_dir", "pretrained_checkpoint_file", *keys]
    return next((str(args[key]) for key in keys if args.get(key)), None)


def _adapter(of: Mapping[str, Any] | None) -> str | None:
    return None if of is None else f"rank {of['rank']}, alpha {of['alpha']:g}, {' '.join(of['target_modules'])}"


def _number(value: Any) -> str | None:
    return f"{value:.4f}" if isinstance(value, int | float) else None


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
