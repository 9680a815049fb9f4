"""How scales follow from what was seen."""

import enum
from dataclasses import dataclass
from typing import Any


class Format(enum.Enum):
    """Formats forward and backward."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass
class DelayedScaling:
    """See Transformer Engine."""

    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
