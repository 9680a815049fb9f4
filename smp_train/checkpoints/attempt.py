"""A try at saving one step to one folder: begun, written, committed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from smp_train.checkpoints.collective import gather, on_main
from smp_train.checkpoints.manifest import META, Committed, FileRecord, folder_name
from smp_train.checkpoints.saver import LibrarySaver, Saver
from smp_train.checkpoints.target import Target
from smp_train.distributed.agree import any_rank, here, rank, unless
from smp_train.errors import CheckpointError
from smp_train.storage import wait_for


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, with the seconds from request to commit; ``durable`` unless it is a rank's own part."""

    step: int
    path: str
    seconds: float
    durable: bool = True


class Attempt:
    """One try at saving ``meta``'s step to ``target``; ``began`` is when it was asked for. All of it is collective.

    ``beside`` are small files that rank 0 stores with the state, by name; a node's own part has none.
    """

    def __init__(
        self, target: Target, model_type: str, meta: dict[str, Any], began: float, *,
        back_to: int | None, on_stage: Callable[[str], None], beside: Mapping[str, bytes],
    ) -> None:  # fmt: skip
        self._target, self._folder, self._on_stage = target, target.folder, on_stage
        self._model_type, self._meta, self._began = model_type, meta, began
        self._beside = {} if target.node_local else beside
        name = folder_name(model_type, meta["step"])
        self._what = f"cannot save {os.path.join(self._folder.location, name)}"
        self._staged = on_main(self._what, lambda: target.begin(name, back_to))

    def save(self, saver: Saver, state: dict[str, Any]) -> Saved:
        """Write ``state`` by ``saver`` and commit it."""
        with self._cleared_on_failure():
            if isinstance(saver, LibrarySaver):
                gather(self._what, lambda: saver.prepare(self._folder, self._staged))
            records: dict[str, FileRecord] = {}
            failure: Exception | None = None
            try:
                records = saver.write(state, self._folder, self._staged, self._on_stage)
            except Exception as error:
                if isinstance(error, CheckpointError) and not isinstance(saver, LibrarySaver):
                    raise CheckpointError(f"{self._what}: {error}") from error  # all ranks wrote, all have this
                failure = error  # this rank's alone: the others learn of it as they commit
            return self._commit(lambda: unless(failure, records))

    def begin(self, saver: LibrarySaver, state: dict[str, Any]) -> Elsewhere:
        """Let a backend's library copy ``state`` and write it in the background."""
        with self._cleared_on_failure():
            gather(self._what, lambda: saver.prepare(self._folder, self._staged))
            failure: Exception | None = None
            try:
                saver.begin(state, self._folder, self._staged)
            except Exception as error:
                failure = error
            gather(self._what, lambda: unless(failure, None))
        return Elsewhere(saver, self)

    def end(self, saver: LibrarySaver, failure: Exception | None) -> list[Saved]:
        """Commit what the library has written, unless this rank had a ``failure``."""
        with self._cleared_on_failure():
            listed = gather(self._what, lambda: unless(failure, saver.listed(self._folder, self._staged)))
            files = dict(each for each in listed if each is not None).get(saver.part, {})
            saved = self._commit(lambda: saver.written(self._folder, self._staged, files))
        self._target.retain(saved.step, self._on_stage)
        return [saved]

    @contextlib.contextmanager
    def _cleared_on_failure(self) -> Iterator[None]:
        """Remove what was written when the body raises."""
        try:
            yield
        except BaseException:
            if rank() == 0:
                with contextlib.suppress(OSError, CheckpointError):
                    self._folder.delete(self._staged)
            raise

    def _commit(self, records: Callable[[], dict[str, FileRecord]]) -> Saved:
        """Make what the ranks have written a checkpoint.

        ``records`` returns what this rank wrote, or raises what kept it from that: then nothing is committed.
        """
        shares = gather(self._what, lambda: (here(""), records()))
        step = self._meta["step"]

        def commit() -> str:
            files = self._all_files(shares)
            files |= {name: self._folder.put(self._staged, name, file) for name, file in self._beside.items()}
            files[META] = self._folder.put(self._staged, META, json.dumps(self._meta, indent=1).encode())
            now = self._target.commit_time()
            committed = Committed(step, self._model_type, files, run=self._folder.run, time=now)
            self._on_stage("commit")
            self._on_stage("publish")
            check = self._target.owner.check if self._target.owner is not None else lambda: None
            return os.path.join(self._folder.location, self._folder.publish(self._staged, committed, check))

        path = on_main(self._what, commit)
        return Saved(step, path, time.monotonic() - self._began, not self._target.node_local)

    def _all_files(self, shares: list[tuple[str, dict[str, FileRecord]]]) -> dict[str, FileRecord]:
        """Join what the ranks wrote. Raises `CheckpointError` where rank 0 does not see another rank's files."""
        files = {file: record for _, records in shares for file, record in records.items()}

        def absent() -> list[str]:
            sizes = self._folder.sizes(self._staged)
            return [file for file, record in files.items() if sizes.get(file) != record.size]

        if not wait_for(lambda: not absent()) and (missing := absent()):
            who = next(who for who, records in shares if missing[0] in records)
            raise CheckpointError(
                f"{who}wrote {missing[0]}, which rank 0 does not see: the nodes do not share {self._folder.location}; "
                "give a --checkpoint_dir that they do"
            )
        return files


class Elsewhere:
    """A save that a backend's library writes, with the interface of `Background`.

    What goes wrong in the library on one rank is kept, for all ranks to learn of when the save is ended.
    """

    def __init__(self, saver: LibrarySaver, attempt: Attempt) -> None:
        self._saver, self._attempt = saver, attempt
        self._ended = not saver.writes
        self._failure: Exception | None = None

    def staged(self) -> None:
        """Return at once: the library copied the state before it returned."""

    def running(self) -> bool:
        """Return whether this rank has not seen it end."""
        return not self._ended

    def ended_everywhere(self) -> bool:
        """Return whether every rank that writes is done; collective."""
        self._ask(wait=False)
        return not any_rank(not self._ended)

    def _ask(self, *, wait: bool) -> None:
        if self._ended:
            return
        try:
            self._ended = self._saver.library.ended(wait) or wait
        except Exception as error:
            self._failure, self._ended = error, True

    def result(self) -> list[Saved]:
        """Wait for the end, commit, and return what was saved; collective."""
        self._ask(wait=True)
        return self._attempt.end(self._saver, self._failure)

    def abandon(self, seconds: float) -> None:
        """Abandon it: what it wrote is not committed."""
