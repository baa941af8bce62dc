"""The leak report of a debug heap: what is live, by owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from devalloc.sizes import format_size


@dataclass(frozen=True)
class LiveBlock:
    """One live block: address, requested bytes, owner's tag (empty: none) and age in seconds."""

    address: int
    size: int
    tag: str
    age: float


@dataclass(frozen=True)
class TagLeaks:
    """The live blocks of one owner.

    ``count`` is how many there are, ``bytes`` the sum of their requested bytes, and ``largest`` the
    requested bytes of the largest. ``oldest`` and ``newest`` are ages in seconds.
    """

    tag: str
    count: int
    bytes: int
    oldest: float
    newest: float
    largest: int


class LeakReport:
    """The live blocks of a debug heap at one moment.

    It prints as a table, most bytes first; its length is the number of live blocks.

    Attributes
    ----------
    rows : tuple of TagLeaks
        One per tag.
    count, bytes : int
        Number of live blocks, and their requested bytes.
    """

    def __init__(
        self,
        addresses: np.ndarray,
        sizes: np.ndarray,
        tags: np.ndarray,
        ages: np.ndarray,
        name: Callable[[int], str],
    ) -> None:
        self._addresses, self._sizes, self._tags, self._ages = addresses, sizes, tags, ages
        self._name = name
        self.count = len(addresses)
        self.bytes = int(sizes.sum())
        rows = [self._row(tag) for tag in np.unique(tags)]
        self.rows = tuple(sorted(rows, key=lambda row: -row.bytes))

    def _row(self, tag: int) -> TagLeaks:
        mine = self._tags == tag
        sizes, ages = self._sizes[mine], self._ages[mine]
        return TagLeaks(
            tag=self._name(int(tag)),
            count=len(sizes),
            bytes=int(sizes.sum()),
            oldest=float(ages.max()),
            newest=float(ages.min()),
            largest=int(sizes.max()),
        )

    def blocks(self, tag: str | None = None) -> Iterator[LiveBlock]:
        """The live blocks, of one owner or of all, oldest first."""
        for i in np.argsort(-self._ages, kind="stable"):
            name = self._name(int(self._tags[i]))
            if tag is None or name == tag:
                yield LiveBlock(
                    int(self._addresses[i]), int(self._sizes[i]), name, float(self._ages[i])
                )

    def __len__(self) -> int:
        return self.count

    def __str__(self) -> str:
        if not self.count:
            return "no live blocks"
        width = max(3, *(len(row.tag) for row in self.rows))
        lines = [f"{'tag':<{width}} {'blocks':>10} {'bytes':>12} {'largest':>12} {'oldest':>10}"]
        for row in self.rows:
            lines.append(
                f"{row.tag or '-':<{width}} {row.count:>10} {format_size(row.bytes):>12} "
                f"{format_size(row.largest):>12} {row.oldest:>8.3g} s"
            )
        plural = "s" * (self.count != 1)
        lines.append(f"{self.count} live block{plural}, {format_size(self.bytes)}")
        return "\n".join(lines)
