"""A save under way: the checkpoint that is being written, and how what its ranks have written is committed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from smp_train.checkpoints.collective import gather, on_main
from smp_train.checkpoints.commit import CheckpointFolder
from smp_train.checkpoints.manifest import META, Committed, FileRecord
from smp_train.checkpoints.owner import Owner
from smp_train.checkpoints.saver import LibrarySaver
from smp_train.distributed.agree import any_rank, here, rank
from smp_train.errors import CheckpointError
from smp_train.storage import wait_for


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, and the seconds from asking for it until it was; ``durable`` unless a rank's own part."""

    step: int
    path: str
    seconds: float
    durable: bool = True


@dataclass(frozen=True)
class Attempt:
    """A checkpoint that is being written, into ``staged`` of ``storage``."""

    what: str
    """What fails where it fails."""
    storage: CheckpointFolder
    staged: str
    after: float = 0.0
    """Time of the newest commit in the folder: this one counts as later, whatever the clock says."""

    @contextlib.contextmanager
    def cleared_on_failure(self) -> Iterator[None]:
        """Remove what was written when the body raises."""
        try:
            yield
        except BaseException:
            if rank() == 0:
                with contextlib.suppress(OSError, CheckpointError):
                    self.storage.delete(self.staged)
            raise

    def commit(
        self,
        records: Callable[[], dict[str, FileRecord]],
        meta: dict[str, Any],
        *,
        model_type: str,
        owner: Owner | None,
        on_stage: Callable[[str], None],
    ) -> str:
        """Make what the ranks have written a checkpoint, and return where it is; collective.

        ``records`` returns what this rank wrote, or raises what kept it from that: then nothing is committed.
        """
        shares = gather(self.what, lambda: (here(""), records()))

        def commit() -> str:
            files = _all_files(self.storage, self.staged, shares)
            files[META] = self.storage.put(self.staged, META, json.dumps(meta, indent=1).encode())
            now = max(time.time(), self.after + 0.001)
            committed = Committed(meta["step"], model_type, files, run=self.storage.run, time=now)
            on_stage("commit")
            if owner is not None:
                owner.check()
            on_stage("publish")
            name = self.storage.publish(self.staged, committed)
            return os.path.join(self.storage.location, name)

        return on_main(self.what, commit)


class Elsewhere:
    """A save that another library writes; stands where a `Background` does.

    What goes wrong in the library on one rank is kept, for all ranks to learn of when the save is ended.
    """

    def __init__(self, saver: LibrarySaver, end: Callable[[Exception | None], list[Saved]]) -> None:
        self._saver, self._end = saver, end
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
        return self._end(self._failure)

    def abandon(self, seconds: float) -> None:
        """Let it be: what it wrote is no checkpoint."""


def _all_files(
    storage: CheckpointFolder, staged: str, shares: Sequence[tuple[str, dict[str, FileRecord]]]
) -> dict[str, FileRecord]:
    """Join what the ranks wrote. Raises `CheckpointError` where rank 0 does not see another rank's files."""
    files = {file: record for _, records in shares for file, record in records.items()}

    def absent() -> list[str]:
        sizes = storage.sizes(staged)
        return [file for file, record in files.items() if sizes.get(file) != record.size]

    if not wait_for(lambda: not absent()) and (missing := absent()):
        file = missing[0]
        who = next(who for who, records in shares if file in records)
        raise CheckpointError(
            f"{who}wrote {file}, which rank 0 does not see: the nodes do not share {storage.location}; "
            "give a --checkpoint_dir that they do"
        )
    return files
