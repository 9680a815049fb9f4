"""Tiny checkpoints for tests: saved, changed by hand, resumed, and the files that they consist of.

``place`` is a run's folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import posixpath
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

FILES = (".begun", ".metadata", "COMMITTED", "__0_0.distcp", "index.bin", "meta.json")
"""Files of a checkpoint that `save` writes."""
SWEPT_FILES = {".begun", ".swept"}
"""Files that stay of a swept attempt, so that no other one gets its name."""


class Stop(Exception):
    """Raised where a test interrupts a save."""


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


def split(place: Path | str) -> tuple[str, str]:
    """Return the parent folder and the run's name of a run's folder."""
    parent, name = posixpath.split(str(place))
    return parent, name


def manager(place: Path | str, every: int = 1, keep: int = 2, model_type: str = "llama_v2", **more: Any) -> Any:
    """Return a manager that saves to one run's folder."""
    from smp_train.checkpoints.save import CheckpointManager, Policy

    parent, run_name = split(place)
    return CheckpointManager([Policy(parent, every, keep)], run_name=run_name, model_type=model_type, **more)


def owner(place: Path | str, job: Any = None, **more: Any) -> Any:
    """Return the acquired ownership of a run's folder; ``job`` is by default one that nothing starts again."""
    from smp_train.checkpoints.folder import open_folder
    from smp_train.checkpoints.owner import Ownership
    from smp_train.distributed.job import Job

    ownership = Ownership([open_folder(place)], job or Job())
    ownership.acquire(**more)
    return ownership


@contextlib.contextmanager
def owning(place: Path | str, job: Any = None, force: bool = False, **more: Any) -> Iterator[Any]:
    """Yield a manager that owns the run, as in a start of a training."""
    ownership = owner(place, job, force=force)
    started = manager(place, owner=ownership, generation=ownership.generation, **more)
    try:
        yield started
    finally:
        started.close()


def save(place: Path | str, *steps: int, rows: int = 4, **more: Any) -> None:
    """Save steps, by default keeping all."""
    saver = manager(place, **{"keep": 10, **more})
    for step in steps:
        saver.save(step, state(step, rows), {"tokens": step * 10})


def resumed(place: Path | str, *, strict: bool = False, name: str | None = None) -> Any:
    """Return the checkpoint that a start resumes from, None if there is none; ``name`` is named by the start's flag."""
    from smp_train.checkpoints.folder import open_folder
    from smp_train.run.resume import find_checkpoint
    from smp_train.run.start import Candidate, Start

    folder = open_folder(place)
    candidates = tuple(
        Candidate(each.generation, each.step, folder.location, each.name)
        for each in folder.committed()
        if name in (None, each.name)
    )
    args = SimpleNamespace(
        strict_resume=int(strict), evaluate_only=0, checkpoint_dir=[split(place)[0]], resume_from_checkpoint=str(place)
    )
    start = Start(split(place)[1], True, candidates, went_back=name is not None, is_one_checkpoint=name is not None)
    return find_checkpoint(cast(Any, args), cast(Any, None), start, {})[0]


def loaded(place: Path | str, rows: int = 4, of_step: int | None = None) -> int:
    """Return the step that a start resumes from, having compared every bit of it with what was saved."""
    found = resumed(place)
    check(found, rows if of_step in (None, found.step) else 4)
    return int(found.step)


def check(found: Any, rows: int = 4) -> None:
    """Load a verified checkpoint, and compare every bit with what `save` wrote."""
    import torch

    target = state(-1, rows)
    found.load(target)
    assert all(torch.equal(target["model"][k], v) for k, v in state(found.step, rows)["model"].items())
    assert found.meta["tokens"] == found.step * 10


def names(place: Path | str) -> list[str]:
    """Return the names of a run's attempts, committed or not; not of those of which only the name is left."""
    from smp_train.checkpoints.folder import open_folder

    folder = open_folder(place)
    return [name for name in folder.names() if not folder.sizes(name) or folder.sizes(name).keys() - SWEPT_FILES]


def committed(place: Path | str) -> list[str]:
    """Return the names of a run's committed checkpoints, newest first."""
    from smp_train.checkpoints.folder import open_folder

    return [each.name for each in open_folder(place).committed()]


def listed(folder: Path | str) -> list[str]:
    """Return the names of what lies directly in a folder."""
    return sorted(os.listdir(folder))


def keys(place: Path | str) -> list[str]:
    """Return all files of a run's folder, as if S3 had no sub-folders of a tree.

    Claims of owners are left out, and attempts of which only the name is left.
    """
    from smp_train.checkpoints.folder import open_folder

    every = {key.replace("/0/__", "/__") for key in open_folder(place).storage.files()}
    used = {key.partition("/")[0] for key in every if not key.endswith(("/.begun", "/.swept"))}
    swept = {key.partition("/")[0] for key in every} - used
    return sorted(key for key in every if not key.startswith(".owner-") and key.partition("/")[0] not in swept)


def contents(place: Path | str) -> dict[str, bytes]:
    """Return the content of all files of a run's folder but the claims of its owners."""
    from smp_train.checkpoints.folder import open_folder

    storage = open_folder(place).storage
    return {key: storage.read(key) for key in storage.files() if not key.startswith(".owner-")}


def files(*names: str) -> list[str]:
    """Return what `keys` shows of whole checkpoints."""
    return sorted(f"{name}/{file}" for name in names for file in FILES)


def harm(place: Path | str, name: str, ending: str, change: Callable[[bytes], bytes | None]) -> None:
    """Change the one file of a checkpoint whose name ends so, or remove it."""
    from smp_train.checkpoints.folder import open_folder

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


def with_generation(place: Path | str, name: str, generation: int) -> None:
    """Change the generation in a checkpoint's COMMITTED."""
    from smp_train.checkpoints.folder import open_folder
    from smp_train.checkpoints.format import Marker

    folder = open_folder(place)
    marker = Marker.from_bytes(folder.read(name, "COMMITTED"))
    folder.commit(name, dataclasses.replace(marker, generation=generation))


def age(folder: Path, seconds: float = 60.0) -> None:
    """Make everything in a folder older, by default by a minute."""
    for path in folder.rglob("*"):
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))
