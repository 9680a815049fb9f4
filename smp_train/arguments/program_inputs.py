"""The inputs that a Python program gives to a run besides flags: data, a loss, callbacks. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from smp_train.errors import ConfigError, SmpTrainError, one_line

if TYPE_CHECKING:
    from torch import Tensor


class Rows(Protocol):
    """The part of a `smp_train.data.source.Source` that can be named without importing it."""

    fingerprint: str

    def __len__(self) -> int:
        """Return the number of rows."""

    def row(self, index: int) -> Any:
        """Return a row."""


Callback = Callable[[dict[str, Any]], object]


@dataclass(frozen=True, kw_only=True)
class ProgramInputs:
    """The inputs that a Python program gives to a run besides flags.

    Attributes:
        training_data: rows to train on, in place of --training_dir; the same on every rank.
        validation_data: rows to validate on, in place of --test_dir.
        loss: takes logits, float32 ``[batch, seq, vocab]``, and targets, int64 ``[batch, seq]``, shifted, -100 where a
            token is not counted; returns the sum of the loss over the counted tokens, a scalar.
        on_step: called in rank 0's process with the record of each logged step, as in ``metrics.jsonl``.
        on_validation: called with the record of each validation.
        on_save: called with the record of each complete checkpoint.
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
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise ConfigError(f"{name}: {function!r:.80} cannot be called; give a function")

    def names(self) -> dict[str, str]:
        """Return the name of each input's function or class, for ``run.json``."""
        inputs = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: qualified_name(value) for name, value in inputs.items() if value is not None}

    def call(self, event: str, record: Mapping[str, Any]) -> None:
        """Call the callback of an ``event`` with a copy of the record.

        Any exception of the callback becomes a `SmpTrainError` that names the callback and the step.
        """
        callback = getattr(self, event)
        try:
            callback(dict(record))
        except BaseException as failure:  # sys.exit() too: the other ranks would wait for this one
            raise SmpTrainError(
                f"{event}: {qualified_name(callback)} failed at step {record['step']}: {type(failure).__name__}: "
                f"{one_line(failure)}; mend it, and resume"
            ) from failure


def qualified_name(value: object) -> str:
    """Return the qualified name of a function, or of an object's class."""
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(name) if module in (None, "__main__") else f"{module}.{name}"
