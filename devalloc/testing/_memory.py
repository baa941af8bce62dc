"""Memory that steered programs share: what they changed, how to undo it, and a key of its state.

It tracks aligned words of 8 bytes, wherever they lie. Nothing but the programs writes to them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from ctypes import c_uint64

from devalloc.errors import DevallocError

_from_address = c_uint64.from_address


class WildAccess(DevallocError):
    """A program accessed memory that is neither in the launches' tensors nor declared."""


class Memory:
    """Words written since the start of a run, their first values, and a key of all values.

    ``key`` is equal for equal memory: the exclusive or of random numbers of 128 bits, one for every
    word that differs from its first value and for that value (Zobrist hashing).
    """

    def __init__(self, regions: Iterable[tuple[int, int]]) -> None:
        self.regions = sorted({(start, start + size) for start, size in regions if size})
        self.first: dict[int, int] = {}
        self.now: dict[int, int] = {}
        self.key = 0
        self._marks: dict[tuple[int, int], int] = {}
        self._random = random.Random(0)

    def words(self, pointers: Sequence[int], size: int) -> tuple[int, ...]:
        """The aligned words under elements of ``size`` bytes; raises WildAccess."""
        for pointer in pointers:
            if not any(start <= pointer and pointer + size <= end for start, end in self.regions):
                raise WildAccess(
                    f"access of {size} bytes at {pointer:#x}: outside of the launches' tensors; "
                    "if it is right, name the memory in memory=[(address, bytes)]"
                )
        low = {pointer & ~7 for pointer in pointers}
        return tuple(sorted(low | {(pointer + size - 1) & ~7 for pointer in pointers}))

    def _mark(self, word: int, value: int) -> int:
        if value == self.first[word]:
            return 0
        pair = (word, value)
        mark = self._marks.get(pair)
        if mark is None:
            mark = self._marks[pair] = self._random.getrandbits(128)
        return mark

    def before_write(self, words: Sequence[int]) -> None:
        for word in words:
            if word not in self.first:
                self.first[word] = self.now[word] = _from_address(word).value

    def after_write(self, words: Sequence[int]) -> list[tuple[int, int]]:
        """The words that changed, with their previous values."""
        changed = []
        for word in words:
            old = self.now[word]
            new = _from_address(word).value
            if new != old:
                changed.append((word, old))
                self.now[word] = new
                self.key ^= self._mark(word, old) ^ self._mark(word, new)
        return changed

    def undo(self, changed: Sequence[tuple[int, int]]) -> None:
        for word, old in changed:
            self.key ^= self._mark(word, self.now[word]) ^ self._mark(word, old)
            self.now[word] = old
            _from_address(word).value = old

    def restore(self) -> None:
        """Give every word its first value again."""
        for word, value in self.first.items():
            if self.now[word] != value:
                _from_address(word).value = value
                self.now[word] = value
        self.key = 0

    def forget(self) -> None:
        """Take the present contents of memory as its first values."""
        self.first.clear()
        self.now.clear()
        self.key = 0
