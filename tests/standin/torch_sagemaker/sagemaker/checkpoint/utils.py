"""Keeping the newest sub-folders."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def SORT_BY_LAST_INT(name: str) -> int:
    """Return the last number in a name."""
    found = re.findall(r"\d+", name)
    return int(found[-1]) if found else -1


def limit_num_subdirs(
    abs_dir: str, num_kept: int, sort_fn: Callable[[str], Any] = SORT_BY_LAST_INT, regex: Any = None, log: bool = False
) -> None:
    """Delete all but the last ``num_kept`` sub-folders of ``abs_dir``."""
    names = [path.name for path in Path(abs_dir).iterdir() if path.is_dir()]
    names = sorted((name for name in names if regex is None or re.search(regex, name)), key=sort_fn)
    for name in names[: max(0, len(names) - num_kept)]:
        shutil.rmtree(Path(abs_dir, name))
