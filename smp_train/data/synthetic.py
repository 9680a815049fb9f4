"""Synthetic rows drawn from a seed, for measuring, and for trying a configuration without data."""

from __future__ import annotations

import numpy as np

from smp_train.data.source import Row, Source

ROWS = 1_000_000


class Synthetic(Source):
    """Uniform random tokens; row i depends on (seed, i) alone, on every machine.

    The bits come from the counter-based Philox (Salmon et al. 2011), keyed by (seed, i). NumPy guarantees the raw
    stream of a bit generator across versions, but not the distributions drawn from it.
    """

    def __init__(self, *, seq_len: int, vocab_size: int, seed: int = 0) -> None:
        self.seq_len, self.vocab_size, self.seed = seq_len, vocab_size, seed
        self.fingerprint = f"synthetic seed={seed} vocab={vocab_size} length={seq_len} rows={ROWS}"

    def __len__(self) -> int:
        return ROWS

    def row(self, index: int) -> Row:
        """Return row ``index``: int64 ids."""
        key = np.array([self.seed & ((1 << 64) - 1), index], dtype=np.uint64)
        raw = np.random.Philox(key=key).random_raw((self.seq_len + 1) // 2)
        draws = raw.astype("<u8").view("<u4")[: self.seq_len].astype(np.uint64)
        # Multiply and shift: 32 random bits onto [0, vocab_size), uneven by less than vocab_size / 2**32.
        return Row(((draws * np.uint64(self.vocab_size)) >> np.uint64(32)).astype(np.int64))

    def name(self, index: int) -> str:
        """Return ``synthetic:<index>``."""
        return f"synthetic:{index}"
