"""Blocks, the segments they tile, and the ordered lists of free ones.

Concurrency: everything here belongs to one engine and is touched under its lock only.

A free list is ordered by (size, address): a sorted list of the sizes that occur, and for each size
the sorted addresses. In practice there are few distinct sizes, so both are short, and inserting in
a list of plain ints is a `memmove`: about three to five times faster than a balanced container, up
to about a thousand sizes (docs/host.md). A size whose last block was taken stays in the list, so
that a cached allocation and its free only pop and append. When a search meets many such sizes, they
are swept.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

FREE = 0
LIVE = 1
PENDING = 2
"""States of a block: free; handed out; freed by its owner, but still used on some stream."""

_MAX_IDLE_SIZES = 8


class Segment:
    """One piece of memory from the source: ``size`` bytes at ``address``, taken for ``stream``."""

    __slots__ = ("address", "first", "frames", "pool", "size", "stream")

    def __init__(self, address: int, size: int, stream: int, pool: Pool) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.pool = pool
        self.first: Block
        self.frames: list[dict[str, object]] | None = None

    def blocks(self) -> Iterator[Block]:
        """All blocks, by address."""
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.next

    @property
    def idle(self) -> bool:
        """Whether the whole segment is one free block."""
        return self.first.state == FREE and self.first.next is None


class Block:
    """A piece of a segment.

    ``home`` is the free list it returns to, and so gives its pool and the stream that owns it.
    ``requested`` is what the caller asked for, while the block is live or pending.
    """

    __slots__ = ("address", "home", "next", "prev", "requested", "segment", "size", "state")

    def __init__(
        self,
        address: int,
        size: int,
        requested: int,
        state: int,
        home: FreeList,
        segment: Segment,
        prev: Block | None,
        next: Block | None,
    ) -> None:
        self.address = address
        self.size = size
        self.requested = requested
        self.state = state
        self.home = home
        self.segment = segment
        self.prev = prev
        self.next = next


class FreeList:
    """The free blocks of one pool that one stream owns, ordered by (size, address)."""

    __slots__ = ("by_size", "pool", "sizes", "stream")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.sizes: list[int] = []
        self.by_size: dict[int, list[int]] = {}

    def add(self, size: int, address: int) -> None:
        addresses = self.by_size.get(size)
        if addresses is None:
            self.by_size[size] = [address]
            insort(self.sizes, size)
        elif addresses:
            insort(addresses, address)
        else:
            addresses.append(address)

    def remove(self, size: int, address: int) -> None:
        addresses = self.by_size[size]
        if len(addresses) == 1:
            addresses.clear()
        else:
            del addresses[bisect_left(addresses, address)]

    def find(self, size: int) -> tuple[int, int] | None:
        """(size, address) of the smallest free block of at least ``size`` bytes.

        Of several of that size, the one at the lowest address.
        """
        sizes = self.sizes
        by_size = self.by_size
        at = start = bisect_left(sizes, size)
        while at < len(sizes):
            addresses = by_size[sizes[at]]
            if addresses:
                found = sizes[at], addresses[0]
                if at - start > _MAX_IDLE_SIZES:
                    self.sweep()
                return found
            at += 1
        if at - start > _MAX_IDLE_SIZES:
            self.sweep()
        return None

    def sweep(self) -> None:
        """Forget the sizes that no free block has."""
        self.by_size = {size: found for size, found in self.by_size.items() if found}
        self.sizes = sorted(self.by_size)

    def from_size(self, size: int) -> Iterator[tuple[int, int]]:
        """(size, address) of the blocks of at least ``size`` bytes, ascending."""
        for at in range(bisect_left(self.sizes, size), len(self.sizes)):
            for address in self.by_size[self.sizes[at]]:
                yield self.sizes[at], address

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self.from_size(0)

    def __len__(self) -> int:
        return sum(map(len, self.by_size.values()))


class Pool:
    """The free lists of one kind of block (small or large), one for each stream that owns some.

    ``owner`` is the identifier in snapshots: (0, 0), or that of a private pool. ``lookups`` counts
    searches; the age of a free block is measured in searches. ``segments`` counts segments.
    """

    __slots__ = ("index", "lists", "lookups", "owner", "segments")

    def __init__(self, index: int, owner: tuple[int, int]) -> None:
        self.index = index
        self.owner = owner
        self.lists: dict[int, FreeList] = {}
        self.lookups = 0
        self.segments = 0

    def list_of(self, stream: int) -> FreeList:
        found = self.lists.get(stream)
        if found is None:
            found = self.lists[stream] = FreeList(self, stream)
        return found


class PoolSet:
    """A small and a large pool: the default ones, or the private ones of graphs.

    ``uses`` counts the graphs that may still read and write the memory. When it is zero, segments
    are given back as soon as they are idle.
    """

    __slots__ = ("owner", "pools", "uses")

    def __init__(self, owner: tuple[int, int]) -> None:
        self.owner = owner
        self.pools = (Pool(0, owner), Pool(1, owner))
        self.uses = 1

    @property
    def segments(self) -> int:
        return self.pools[0].segments + self.pools[1].segments
