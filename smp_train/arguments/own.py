"""What a Python program gives to a run besides flags: data, a loss, callbacks. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from smp_train.errors import ConfigError, SmpTrainError, one_line

if TYPE_CHECKING:
    from torch import Tensor


class Rows(Protocol):
    """A `smp_train.data.source.Source`, as far as it can be named here."""

    fingerprint: str

    def __len__(self) -> int:
        """Return the number of rows."""

    def row(self, index: int) -> Any:
        """Return a row."""


Callback = Callable[[dict[str, Any]], object]


@dataclass(frozen=True, kw_only=True)
class Own:
    """What a Python program gives to a run besides flags.

    Attributes:
        training_data: rows to train on, in place of --training_dir; the same on every rank.
        validation_data: rows to validate on, in place of --test_dir.
        loss: takes logits, float32 ``[batch, seq, vocab]``, and targets, int64 ``[batch, seq]``, shifted, -100 where a
            token is not counted; returns the sum of the loss over the counted tokens, a scalar.
        on_step: called with the record of each logged step, as in ``metrics.jsonl``, in the process of rank 0.
        on_validation: the same, after each validation.
        on_save: the same, when a checkpoint is complete.
    """

    training_data: Rows | None = None
    validation_data: Rows | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    on_step: Callback | None = None
    on_validation: Callback | None = None
    on_save: Callback | None = None

    def check(self) -> None:
        """Raise `ConfigError` for a callback or a loss that cannot be called."""
        for name in ("loss", "on_step", "on_validation", "on_save"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise ConfigError(f"{name}: {given!r:.80} cannot be called; give a function")

    def names(self) -> dict[str, str]:
        """Return what is given, by the name of its function or class, for ``run.json``."""
        return {each.name: named(given) for each in fields(self) if (given := getattr(self, each.name)) is not None}

    def without_callbacks(self) -> Own:
        """Return the same without callbacks."""
        return replace(self, on_step=None, on_validation=None, on_save=None)

    def call(self, event: str, record: Mapping[str, Any]) -> None:
        """Call the callback of an ``event`` with a copy of the record.

        Raises `SmpTrainError` that names it and the step, whatever it raises.
        """
        callback = getattr(self, event)
        try:
            callback(dict(record))
        except BaseException as failure:  # sys.exit() too: the other ranks would wait for this one
            raise SmpTrainError(
                f"{event}: {named(callback)} failed at step {record['step']}: {type(failure).__name__}: "
                f"{one_line(failure)}; mend it, and resume"
            ) from failure


def named(given: object) -> str:
    """Return the qualified name of a function, or of the class of an object."""
    name = getattr(given, "__qualname__", None) or type(given).__qualname__
    module = getattr(given, "__module__", None) or type(given).__module__
    return str(name) if module in (None, "__main__") else f"{module}.{name}"
