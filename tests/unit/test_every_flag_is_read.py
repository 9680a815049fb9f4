"""No flag is parsed and ignored: each is read, refused when on, or answered as having no effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smp_train.arguments.groups import flags

PACKAGE = Path(__file__).parents[2] / "smp_train"
# Read where the flags themselves are settled: they shape other flags, or the command line's own behaviour.
SETTLED_AT_PARSING = {"config", "from_scratch", "run_name", "selective_checkpointing", "smp_config"}


def sources() -> str:
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "arguments"]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


READ = [name for name, flag in flags().items() if not (flag.only or flag.idle or name in SETTLED_AT_PARSING)]


@pytest.mark.parametrize("name", READ)
def test_read(name: str) -> None:
    # args.NAME, or NAME as a string where flags are looped over (the model's widths are).
    assert re.search(rf"(?:args|arguments)\.{name}\b|[\"']{name}[\"']", sources()), f"nothing reads --{name}"
