"""Statistics under PyTorch's names, kept as a log.

An allocation changes up to seven quantities, each with a current value and a peak, for its pool
and for all pools together: more work than the allocation itself. So the engine appends two ints
for each event, and NumPy folds thousands of rows at once, when somebody asks or the log is full.
Peaks are exact: they are the maxima of running sums.

A row is (size | code, requested): sizes are multiples of 256, so the low bits hold what happened
(`MALLOC`...) and, in bit 0, the pool.
"""

from __future__ import annotations

import numpy as np

MALLOC = 2
"""A block was handed out."""
FREE = 4
"""A block was freed and is available at once."""
FREE_REQUESTED = 6
"""A block was freed while streams still use it: allocated no longer, but active."""
FREE_COMPLETED = 8
"""The streams are done with it."""
SPLIT_IN = 10
"""A free block in a divided segment more."""
SPLIT_OUT = 12
"""A free block in a divided segment fewer."""
SEGMENT_IN = 14
SEGMENT_OUT = 16

FULL = 16384

# What a row adds: (code, quantity, sign of the count, sign of the bytes, bytes are requested ones)
_COUNTS = ("allocation", "segment", "active", "inactive_split")
_BYTES = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes")
_REQUESTED = "requested_bytes"
_EFFECTS: dict[str, dict[int, int]] = {
    "allocation": {MALLOC: 1, FREE: -1, FREE_REQUESTED: -1},
    "segment": {SEGMENT_IN: 1, SEGMENT_OUT: -1},
    "active": {MALLOC: 1, FREE: -1, FREE_COMPLETED: -1},
    "inactive_split": {SPLIT_IN: 1, SPLIT_OUT: -1},
    "requested_bytes": {MALLOC: 1, FREE: -1, FREE_COMPLETED: -1},
}
QUANTITIES = (*_COUNTS, *_BYTES, _REQUESTED)
POOLS = ("all", "small_pool", "large_pool")
_CODES = 18


def _sign_tables() -> dict[str, np.ndarray]:
    tables = {}
    for name, effects in _EFFECTS.items():
        table = np.zeros(_CODES, dtype=np.int64)
        for code, sign in effects.items():
            table[code] = sign
        tables[name] = table
    return tables


_SIGNS = _sign_tables()


class Ledger:
    """The log of one engine and the sums of what was folded from it.

    ``rows`` is appended to by the engine, which calls `fold` when it has `FULL` entries.
    """

    __slots__ = ("_current", "_gained", "_lost", "_peak", "rows")

    def __init__(self) -> None:
        self.rows: list[int] = []
        shape = (len(QUANTITIES), len(POOLS))
        self._current = np.zeros(shape, dtype=np.int64)
        self._peak = np.zeros(shape, dtype=np.int64)
        self._gained = np.zeros(shape, dtype=np.int64)
        self._lost = np.zeros(shape, dtype=np.int64)

    def fold(self) -> None:
        """Add the rows to the sums and forget them."""
        if not self.rows:
            return
        table = np.array(self.rows, dtype=np.int64).reshape(-1, 2)
        self.rows.clear()
        head, requested = table[:, 0], table[:, 1]
        pool = head & 1
        code = head & 30
        size = head >> 8 << 8
        for at, name in enumerate(_COUNTS):
            signs = _SIGNS[name][code]
            self._add(at, signs, pool)
            self._add(len(_COUNTS) + at, signs * size, pool)
        self._add(len(QUANTITIES) - 1, _SIGNS[_REQUESTED][code] * requested, pool)

    def _add(self, at: int, change: np.ndarray, pool: np.ndarray) -> None:
        for which, part in enumerate((change, change * (pool == 0), change * (pool == 1))):
            running = np.cumsum(part) + self._current[at, which]
            self._peak[at, which] = max(self._peak[at, which], int(running.max()))
            self._current[at, which] = running[-1]
            self._gained[at, which] += part[part > 0].sum()
            self._lost[at, which] -= part[part < 0].sum()

    def stats(self) -> dict[str, int]:
        """Flat names as of ``torch.cuda.memory_stats``: ``allocated_bytes.all.peak``..."""
        self.fold()
        stats = {}
        for at, name in enumerate(QUANTITIES):
            for which, pool in enumerate(POOLS):
                stem = f"{name}.{pool}"
                stats[f"{stem}.current"] = int(self._current[at, which])
                stats[f"{stem}.peak"] = int(self._peak[at, which])
                stats[f"{stem}.allocated"] = int(self._gained[at, which])
                stats[f"{stem}.freed"] = int(self._lost[at, which])
        return stats

    def current(self, name: str) -> int:
        """The present sum over all pools of one quantity."""
        self.fold()
        return int(self._current[QUANTITIES.index(name), 0])

    def reset_peaks(self) -> None:
        """Peaks start again from what is there now."""
        self.fold()
        self._peak[:] = self._current

    def reset_accumulated(self) -> None:
        """The sums of all gains and losses start again from zero."""
        self.fold()
        self._gained[:] = 0
        self._lost[:] = 0
