"""Conversion of a file set to token files, by all ranks together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smp_train.data_next.source import Source

if TYPE_CHECKING:
    from smp_train.distributed import Runtime


def processes_for(asked: int | None, local_ranks: int) -> int:
    """Return the number of processes that each rank converts with: as asked, or its share of the cores."""
    raise NotImplementedError


def open_token_rows(
    files: Any, recipe: Any, *, cache_dir: str | None = None, max_bad: float | None = None,
    ranks: Runtime | None = None, processes: int = 1,
) -> Source:
    """Return the rows of a file set (`files.FileSet`, `rows.Recipe`), converted first where necessary; collective.

    Files of kind ``tokens`` (prepared) are opened as they are. ``max_bad`` is the fraction of bad records that may be
    left out; None tolerates none.
    """
    raise NotImplementedError
