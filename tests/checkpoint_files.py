"""Tiny checkpoints for tests: saved, changed by hand, and the files that they consist of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Stop(Exception):
    """What a save is cut short by."""


def stop_at(stage: str) -> Callable[[str], None]:
    """Return an ``on_stage`` that fails at a stage."""

    def on_stage(reached: str) -> None:
        if reached == stage:
            raise Stop(f"at {stage}")

    return on_stage


def state(value: float = 0.0, rows: int = 4) -> dict[str, Any]:
    """Return a state of two dtypes."""
    import torch

    w = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3) + value
    return {"model": {"w": w, "b": torch.full((3,), value, dtype=torch.bfloat16)}}


def manager(place: Path | str, every: int = 1, keep: int = 2, model_type: str = "llama_v2", **more: Any) -> Any:
    """Return a manager that saves to one folder."""
    from smp_train.checkpoints import CheckpointManager, Policy

    return CheckpointManager([Policy(str(place), every, keep)], model_type=model_type, **more)


def save(place: Path | str, *steps: int, rows: int = 4, **more: Any) -> None:
    """Save steps, by default keeping all."""
    saver = manager(place, **{"keep": 10, **more})
    for step in steps:
        saver.save(step, state(step, rows), {"tokens": step * 10})


def loaded(place: Path | str, rows: int = 4, of_step: int | None = None) -> int:
    """Return the step that is found, having compared every bit of it with what was saved."""
    import torch

    from smp_train.checkpoints import find

    found = find(place)
    rows = rows if of_step in (None, found.step) else 4
    target = state(-1, rows)
    found.load(target)
    assert all(torch.equal(target["model"][k], v) for k, v in state(found.step, rows)["model"].items())
    assert found.meta["tokens"] == found.step * 10
    return found.step


def keys(place: Path | str) -> list[str]:
    """Return all files of a folder of checkpoints, attempts shown as *."""
    from smp_train.checkpoints.commit import open_folder

    attempt = re.compile(r"/[0-9a-f]{8}(-\w{8})?/(0/(?=__))?")
    return sorted(attempt.sub("/*/", key) for key in open_folder(place).storage.files())


def files(*names: str) -> list[str]:
    """Return what `keys` shows of whole checkpoints."""
    parts = ("COMMITTED", "*/.metadata", "*/.run", "*/__0_0.distcp", "*/index.bin", "*/meta.json")
    return sorted(f"{name}/{part}" for name in names for part in parts)


def harm(place: Path | str, name: str, ending: str, change: Callable[[bytes], bytes | None]) -> None:
    """Change the one file of a checkpoint whose name ends so, or remove it."""
    from smp_train.checkpoints.commit import open_folder

    folder = open_folder(place)
    (file,) = [file for file in folder.sizes(name) if file.endswith(ending)]
    data = change(folder.read(name, file))
    if data is None:
        folder.storage.delete(f"{name}/{file}")
    else:
        folder.put(name, file, data)


def flipped(data: bytes) -> bytes:
    """Return the data with another last bit."""
    return data[:-1] + bytes([data[-1] ^ 1])


def listed(capsys: Any) -> list[list[str]]:
    """Return what the verb ``ls`` has printed: names and states."""
    return [line.split()[:2] for line in capsys.readouterr().out.splitlines()]


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
