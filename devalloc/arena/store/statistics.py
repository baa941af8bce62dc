"""Statistics under PyTorch's names, kept as a log.

An allocation changes up to seven quantities, each with a current value and a peak, for its pool
and for all pools together. That is more work than the allocation itself. So the cache appends two
ints for each event, and NumPy folds thousands of rows at once, when statistics are asked for or the
log is full. Peaks are exact: they are the maxima of running sums.

A row is (size | code | pool, requested). Sizes are multiples of 256, so the low bits are free for
the code of what happened (`MALLOC`...) and, in bit 0, the pool.
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
MALLOC_PART = 18
"""MALLOC of a whole free block in a divided segment: SPLIT_OUT too."""
FREE_PART = 20
"""FREE of a block in a divided segment, which is not merged: SPLIT_IN too."""

FULL = 16384

# _BYTES has the bytes of each count at the same place; requested bytes stand alone.
_COUNTS = ("allocation", "segment", "active", "inactive_split")
_BYTES = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes")
_REQUESTED = "requested_bytes"
_EFFECTS: dict[str, dict[int, int]] = {
    "allocation": {MALLOC: 1, MALLOC_PART: 1, FREE: -1, FREE_PART: -1, FREE_REQUESTED: -1},
    "segment": {SEGMENT_IN: 1, SEGMENT_OUT: -1},
    "active": {MALLOC: 1, MALLOC_PART: 1, FREE: -1, FREE_PART: -1, FREE_COMPLETED: -1},
    "inactive_split": {SPLIT_IN: 1, SPLIT_OUT: -1, MALLOC_PART: -1, FREE_PART: 1},
    "requested_bytes": {MALLOC: 1, MALLOC_PART: 1, FREE: -1, FREE_PART: -1, FREE_COMPLETED: -1},
}
QUANTITIES = (*_COUNTS, *_BYTES, _REQUESTED)
_KINDS = ("current", "peak", "allocated", "freed")
POOLS = ("all", "small_pool", "large_pool")
_CODES = 22


def _sign_tables() -> dict[str, np.ndarray]:
    tables = {}
    for name, effects in _EFFECTS.items():
        table = np.zeros(_CODES, dtype=np.int64)
        for code, sign in effects.items():
            table[code] = sign
        tables[name] = table
    return tables


_SIGNS = _sign_tables()


class Statistics:
    """The log of one cache and the sums of the rows that were folded.

    The cache appends to ``rows`` and calls `fold` when there are more than `FULL` ints. Blocks and
    segments of ``oversize`` bytes and more are counted separately as well.
    """

    __slots__ = ("_oversize", "_sums", "oversize", "rows")

    def __init__(self, oversize: int | None = None) -> None:
        self.rows: list[int] = []
        self.oversize = oversize
        # For each quantity and pool: current, peak, sum of gains, sum of losses.
        self._sums = np.zeros((len(QUANTITIES), len(POOLS), 4), dtype=np.int64)
        self._oversize = np.zeros((2, 4), dtype=np.int64)

    def fold(self) -> None:
        """Add the rows to the sums and forget them."""
        if not self.rows:
            return
        table = np.array(self.rows, dtype=np.int64)
        self.rows.clear()
        self._enter_rows(table)

    def enter(self, log: bytes) -> None:
        """Add rows that were logged elsewhere (by a front), after those that are here."""
        self.fold()
        self._enter_rows(np.frombuffer(log, dtype=np.int64))

    def _enter_rows(self, words: np.ndarray) -> None:
        table = words.reshape(-1, 2)
        head, requested = table[:, 0], table[:, 1]
        pool = head & 1
        code = head & 30
        size = head >> 8 << 8
        present = [which for which in (0, 1) if (pool == which).any()]
        for at, name in enumerate(_COUNTS):
            signs = _SIGNS[name][code]
            if signs.any():
                self._add(at, signs, pool, present)
                self._add(len(_COUNTS) + at, signs * size, pool, present)
        self._add(len(QUANTITIES) - 1, _SIGNS[_REQUESTED][code] * requested, pool, present)
        if self.oversize is not None:
            large = size >= self.oversize
            for at, name in enumerate(("allocation", "segment")):
                change = _SIGNS[name][code] * large
                self._enter(self._oversize[at], change)

    def _add(self, at: int, change: np.ndarray, pool: np.ndarray, present: list[int]) -> None:
        self._enter(self._sums[at, 0], change)
        for which in present:
            part = change if len(present) == 1 else change * (pool == which)
            self._enter(self._sums[at, 1 + which], part)

    @staticmethod
    def _enter(sums: np.ndarray, change: np.ndarray) -> None:
        """Add successive changes to one row of (current, peak, gained, lost)."""
        running = np.cumsum(change)
        net, total = int(running[-1]), int(np.abs(change).sum())
        sums[1] = max(sums[1], sums[0] + int(running.max()))
        sums[0] += net
        sums[2] += (total + net) // 2
        sums[3] += (total - net) // 2

    def enter_turns(self, size: int, requested: int, pool: int, turns: int) -> None:
        """Count ``turns`` frees of a block that was at once handed out again each time."""
        for name in ("allocation", "active", "allocated_bytes", "active_bytes", _REQUESTED):
            amount = requested if name == _REQUESTED else size if name in _BYTES else 1
            self._sums[QUANTITIES.index(name), (0, 1 + pool), 2:] += amount * turns
        if self.oversize is not None and size >= self.oversize:
            self._oversize[0, 2:] += turns

    def stats(self) -> dict[str, int]:
        """The sums under the names of ``torch.cuda.memory_stats``: ``active.all.peak``..."""
        self.fold()
        stats = {}
        for at, name in enumerate(QUANTITIES):
            for which, pool in enumerate(POOLS):
                for kind, value in zip(_KINDS, self._sums[at, which], strict=True):
                    stats[f"{name}.{pool}.{kind}"] = int(value)
        for at, name in enumerate(("oversize_allocations", "oversize_segments")):
            for kind, value in zip(_KINDS, self._oversize[at], strict=True):
                stats[f"{name}.{kind}"] = int(value)
        return stats

    def correct(self, truth: dict[str, tuple[int, int]]) -> None:
        """Set current values to what was counted: (small pool, large pool) for each quantity.

        For after an interruption, when the log may lack a row or have one too many. What differs
        counts as a gain or as a loss.
        """
        self.fold()
        for at, name in enumerate(QUANTITIES):
            small, large = truth[name]
            for which, value in enumerate((small + large, small, large)):
                sums = self._sums[at, which]
                change = value - int(sums[0])
                sums[0] = value
                sums[1] = max(int(sums[1]), value)
                sums[2 if change > 0 else 3] += abs(change)

    def current(self, name: str) -> int:
        """The current value of one quantity over all pools."""
        self.fold()
        return int(self._sums[QUANTITIES.index(name), 0, 0])

    def reset_peaks(self) -> None:
        """Start peaks again from the current values."""
        self.fold()
        self._sums[..., 1] = self._sums[..., 0]
        self._oversize[..., 1] = self._oversize[..., 0]

    def reset_accumulated(self) -> None:
        """Start the sums of gains and of losses again from zero."""
        self.fold()
        self._sums[..., 2:] = 0
        self._oversize[..., 2:] = 0
