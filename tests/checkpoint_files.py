"""Where the files of a committed checkpoint are."""

from __future__ import annotations

import json
from pathlib import Path


def tree(checkpoint: Path | str) -> Path:
    """Return the folder of the attempt that COMMITTED names, with the tree and meta.json."""
    folder = Path(checkpoint)
    return folder / json.loads((folder / "COMMITTED").read_text()).get("root", "")


def flat(checkpoint: Path) -> None:
    """Let a checkpoint lie as versions before wrote it in folders: its files beside COMMITTED."""
    from smp_train.checkpoints.manifest import Committed

    attempt = tree(checkpoint)
    marker = checkpoint / "COMMITTED"
    marker.write_bytes(Committed.from_bytes(marker.read_bytes()).at("").to_bytes())
    (attempt / ".run").unlink()
    for path in attempt.iterdir():
        path.rename(checkpoint / path.name)
    attempt.rmdir()
