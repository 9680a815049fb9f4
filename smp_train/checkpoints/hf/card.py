"""The README.md of an exported model: its training data, its progress, and how to run it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from smp_train.models.tokenizer import tokenizer_from

CARD_FILE = "README.md"
TAG = "tags: [smp-train]"
"""A line that is in every card of this program."""
_CACHED = re.compile(r"/models--(.+?)/snapshots/")
_EXAMPLE = """
```python
from transformers import pipeline

print(pipeline("text-generation", model=".")(%s, max_new_tokens=20)[0]["generated_text"]%s)
```"""
_TEXT = ('"Once upon a time"', "")
_CHAT = ('[{"role": "user", "content": "Who are you?"}]', '[-1]["content"]')


def is_our_card(data: bytes) -> bool:
    """Return whether a README.md was written by this program."""
    return TAG.encode() in data


def model_card(meta: Mapping[str, Any], *, name: str, step: int, tokenizer: Mapping[str, bytes]) -> str:
    """Return the model card, Markdown with the hub's YAML header, made from a checkpoint's ``meta.json``.

    Its example calls the model with a chat if the ``tokenizer``, its files by name, has a chat template. Secrets were
    removed from the run's arguments when the checkpoint was saved.
    """
    args, adapter = meta.get("arguments") or {}, meta.get("adapter")
    keys = ["pretrained_model_name", "finetune_checkpoint_load_dir", "pretrained_checkpoint_file"]
    keys = [*keys * bool(args.get("finetune")), "hf_pretrained_model_name_or_dir"]
    base = (adapter or {}).get("base") or next((args[key] for key in keys if args.get(key)), None)
    base = base and hub_name(str(base))
    data = ", ".join(str(source) for key in ("training_dir", "dataset") for source in args.get(key) or () if source)
    lora = adapter and f"rank {adapter['rank']}, alpha {adapter['alpha']:g}, {' '.join(adapter['target_modules'])}"
    rows = {
        "run": (meta.get("run") or {}).get("name"),
        "model type": meta.get("model_type"),
        "started from": base or "random initial weights",
        "data": "synthetic" if args.get("use_synthetic_data") else data,
        "steps": step,
        "tokens with a loss": meta.get("tokens"),
        "samples": (meta.get("data") or {}).get("consumed"),
        "sequence length": args.get("max_context_width"),
        "adapters (LoRA)": lora,
        "training loss": _number(meta.get("loss")),
        "validation loss": _number(meta.get("validation_loss")),
    }
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    lines += [f"base_model: {json.dumps(base)}"] if base and base.count("/") == 1 and not base.startswith("/") else []
    lines += [TAG, "---", "", f"# {name}", "", "| | |", "|---|---|"]
    cells = {key: " ".join(str(value).replace("|", "\\|").split()) for key, value in rows.items() if value is not None}
    lines += [f"| {key} | {value} |" for key, value in cells.items() if value]
    versions = ", ".join(f"{package} {version}" for package, version in (meta.get("versions") or {}).items() if version)
    lines += ["", f"Trained with smp-train: {versions}."] if versions else []
    with tokenizer_from(tokenizer) as opened:
        example = _EXAMPLE % (_CHAT if getattr(opened, "chat_template", None) else _TEXT)
    return "\n".join([*lines, *[example] * bool(tokenizer)]) + "\n"


def hub_name(location: str) -> str:
    """Return the hub's name of a model that is in this machine's hub cache, and any other location unchanged."""
    cached = _CACHED.search(location)
    return cached[1].replace("--", "/", 1) if cached else location


def _number(value: Any) -> str | None:
    return f"{value:.4f}" if isinstance(value, int | float) else None
