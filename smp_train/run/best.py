"""The validation with the lowest loss of a run: which checkpoint it keeps, and whether the run still gets better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Best:
    """The lowest validation loss so far, in nats per token, its step, and the number of validations since."""

    step: int | None = None
    loss: float = math.inf
    since: int = 0

    def see(self, step: int, loss: float) -> None:
        """Record the loss of a validation; NaN is never the lowest."""
        if loss < self.loss:
            self.step, self.loss, self.since = step, loss, 0
        else:
            self.since += 1

    def to_json(self) -> dict[str, Any]:
        """Return the state for ``meta.json``; the loss is None before the first validation."""
        return {"step": self.step, "loss": None if self.step is None else self.loss, "since": self.since}

    @staticmethod
    def of_meta(meta: Mapping[str, Any]) -> Best:
        """Return the state in a checkpoint's ``meta.json``; a fresh one for an imported checkpoint."""
        saved = meta.get("best") or {}
        if saved.get("step") is None:
            return Best(since=saved.get("since", 0))
        return Best(saved["step"], saved["loss"], saved["since"])
