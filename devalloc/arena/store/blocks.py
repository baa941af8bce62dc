"""Blocks, the segments they tile, and the ordered sets that they are found in.

Concurrency: everything here belongs to one cache and is touched under its lock only.

Costs are for n blocks. A size whose last free block was taken stays in its free list, so that a
cached allocation and its free only pop and append. See docs/design/host.md.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

FREE = 0
LIVE = 1
PENDING = 2
TAKEN = 3
"""States of a block: free; handed out; freed by its owner, but still used on some stream; chosen
for a request that is not over yet."""

_LOAD = 512
_FEW = 1024
SPARE_SIZES = 16
WIDE_SHARE = 16
WIDEST_SEGMENT = 256 << 20
_MAX_VACANT = 2  # the fastest with the recorded traces (0, 1, 2, 4, 8 were tried)

T = TypeVar("T", int, tuple[int, ...])


class SortedSet(Generic[T]):
    """Entries in order: sorted lists of at most ``2 * _LOAD`` entries, and the last of each.

    Adding, removing and finding take two bisections and one `memmove` of a short list.
    """

    __slots__ = ("_lists", "_tops")

    def __init__(self, entries: Iterable[T] = ()) -> None:
        ordered = sorted(entries)
        self._lists: list[list[T]] = [
            ordered[at : at + _LOAD] for at in range(0, len(ordered), _LOAD)
        ]
        self._tops: list[T] = [entries[-1] for entries in self._lists]

    def add(self, entry: T) -> None:
        """Add what is not there yet."""
        tops = self._tops
        at = bisect_left(tops, entry)
        if at == len(tops):
            if not tops:
                self._lists.append([entry])
                tops.append(entry)
                return
            at -= 1
            tops[at] = entry
        entries = self._lists[at]
        insort(entries, entry)
        if len(entries) > 2 * _LOAD:
            self._lists.insert(at, entries[:_LOAD])
            tops.insert(at, entries[_LOAD - 1])
            del entries[:_LOAD]

    def remove(self, entry: T) -> None:
        """Remove what is there; KeyError if it is not."""
        at = bisect_left(self._tops, entry)
        entries = self._lists[at] if at < len(self._tops) else []
        place = bisect_left(entries, entry)
        if place == len(entries) or entries[place] != entry:
            raise KeyError(entry)
        self._delete(at, place)

    def _delete(self, at: int, place: int) -> None:
        entries = self._lists[at]
        del entries[place]
        if not entries:
            del self._lists[at], self._tops[at]
        elif place == len(entries):
            self._tops[at] = entries[-1]

    def pop(self, place: int) -> T:
        """Remove and return the first entry; as `list.pop`, but only for place 0."""
        assert place == 0
        first = self._lists[0][0]
        self._delete(0, 0)
        return first

    def first_from(self, entry: T) -> T | None:
        """The smallest entry that is not less than ``entry``."""
        at = bisect_left(self._tops, entry)
        if at == len(self._tops):
            return None
        entries = self._lists[at]
        return entries[bisect_left(entries, entry)]

    def last(self) -> T | None:
        return self._tops[-1] if self._tops else None

    def from_entry(self, entry: T) -> Iterator[T]:
        """The entries from ``entry`` on, ascending. The set must not change meanwhile."""
        at = bisect_left(self._tops, entry)
        if at < len(self._tops):
            entries = self._lists[at]
            yield from entries[bisect_left(entries, entry) :]
            for entries in self._lists[at + 1 :]:
                yield from entries

    def __getitem__(self, place: int) -> T:
        assert place == 0
        return self._lists[0][0]

    def __iter__(self) -> Iterator[T]:
        for entries in self._lists:
            yield from entries

    def __bool__(self) -> bool:
        return bool(self._tops)

    def __len__(self) -> int:
        return sum(map(len, self._lists))


class Segment:
    """One piece of memory from the source: ``size`` bytes at ``address``, taken for ``stream``.

    ``asleep`` says that only its addresses are there, and no memory (see
    `devalloc.arena.cache.private_pools`). ``range`` is where it may grow, if it may (see
    `devalloc.arena.store.expandable`).
    """

    __slots__ = ("address", "asleep", "first", "frames", "last", "pool", "range", "size", "stream")

    def __init__(self, address: int, size: int, stream: int, pool: Pool) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.pool = pool
        self.asleep = False
        self.range: Range | None = None
        self.first: Block
        self.last: Block
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


class Range:
    """Reserved addresses in which segments grow, for one pool and one stream."""

    __slots__ = ("address", "nbytes", "stream")

    def __init__(self, address: int, nbytes: int, stream: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.stream = stream

    @property
    def end(self) -> int:
        return self.address + self.nbytes


class Block:
    """A piece of a segment.

    ``home`` is the free list it returns to, and so gives its pool and the stream that owns it.
    ``requested`` is what the caller asked for, and ``claim`` what it must show to free the block,
    while it is live or pending.
    """

    __slots__ = (
        "address",
        "claim",
        "home",
        "next",
        "prev",
        "requested",
        "segment",
        "size",
        "state",
    )

    def __init__(
        self,
        address: int,
        size: int,
        home: FreeList,
        segment: Segment,
        prev: Block | None = None,
        next: Block | None = None,
    ) -> None:
        self.address = address
        self.size = size
        self.requested = 0
        self.claim = 0
        self.state = FREE
        self.home = home
        self.segment = segment
        self.prev = prev
        self.next = next


class FreeList:
    """The free blocks of one pool that one stream owns, ordered by (size, address).

    ``by_size`` has the addresses for each size: a sorted list, or a `SortedSet` where there are
    many. ``blocks`` counts the blocks, in any state, whose home this is. There are never more
    than ``2 * blocks + 16`` sizes. Without blocks the list leaves its pool.
    """

    __slots__ = ("blocks", "by_size", "pool", "sizes", "stream")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.blocks = 0
        self.sizes: SortedSet[int] = SortedSet()
        self.by_size: dict[int, list[int] | SortedSet[int]] = {}

    def add(self, size: int, address: int) -> None:
        addresses = self.by_size.get(size)
        if addresses is None:
            self.by_size[size] = [address]
            self.sizes.add(size)
            if len(self.by_size) > 2 * self.blocks + SPARE_SIZES:
                self.sweep()
        elif type(addresses) is not list:
            addresses.add(address)  # type: ignore[union-attr]
        elif not addresses:
            addresses.append(address)
        elif len(addresses) < _FEW:
            insort(addresses, address)
        else:
            self.by_size[size] = SortedSet((*addresses, address))

    def remove(self, size: int, address: int) -> None:
        addresses = self.by_size[size]
        if type(addresses) is list:
            del addresses[bisect_left(addresses, address)]
        else:
            addresses.remove(address)

    def find(self, size: int) -> tuple[int, int] | None:
        """(size, address) of the smallest free block of at least ``size`` bytes.

        Of several of that size, the one at the lowest address. If the search meets many sizes
        without blocks, they are forgotten.
        """
        by_size, first_from = self.by_size, self.sizes.first_from
        found = first_from(size)
        vacant: list[int] | None = None
        while found is not None:
            addresses = by_size[found]
            if addresses:
                break
            vacant = [found] if vacant is None else [*vacant, found]
            if len(vacant) > _MAX_VACANT:
                self._forget(vacant)
                vacant = None
            found = first_from(found + 1)
        return None if found is None else (found, by_size[found][0])

    def _forget(self, sizes: list[int]) -> None:
        for size in sizes:
            self.sizes.remove(size)
            del self.by_size[size]

    def sweep(self) -> None:
        """Forget the sizes that no free block has."""
        self.by_size = {size: found for size, found in self.by_size.items() if found}
        self.sizes = SortedSet(self.by_size)

    def refill(self, by_size: dict[int, list[int]], blocks: int) -> None:
        """Have exactly these free blocks, with ascending addresses, and count so many blocks."""
        self.by_size = {
            size: addresses if len(addresses) <= _FEW else SortedSet(addresses)
            for size, addresses in by_size.items()
        }
        self.sizes = SortedSet(by_size)
        self.blocks = blocks

    def gained_block(self) -> None:
        """Count a block more whose home this is."""
        self.blocks += 1
        if self.blocks == 1:
            self.pool.lists[self.stream] = self

    def lost_block(self) -> None:
        """Count a block fewer whose home this is."""
        self.blocks -= 1
        if len(self.by_size) > 2 * self.blocks + SPARE_SIZES:
            self.sweep()
        if self.blocks == 0:
            del self.pool.lists[self.stream]

    def from_size(self, size: int) -> Iterator[tuple[int, int]]:
        """(size, address) of the blocks of at least ``size`` bytes, ascending."""
        for found in self.sizes.from_entry(size):
            for address in self.by_size[found]:
                yield found, address

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self.from_size(0)

    def __len__(self) -> int:
        return sum(map(len, self.by_size.values()))


class Pool:
    """The free lists of one kind of block (small or large), one for each stream that owns some.

    ``owner`` is the identifier in snapshots: (0, 0), or that of a private pool. ``lookups`` counts
    searches; the age of a free block is measured in searches. ``nbytes`` is the sum of the
    segments. ``touched`` has the segments that have become idle, or no longer are, since `idle` was
    asked. ``ranges`` has the addresses that are reserved for segments that grow.
    """

    __slots__ = (
        "_idle",
        "_places",
        "index",
        "lists",
        "lookups",
        "nbytes",
        "owner",
        "ranges",
        "touched",
    )

    def __init__(self, index: int, owner: tuple[int, int]) -> None:
        self.index = index
        self.owner = owner
        self.lists: dict[int, FreeList] = {}
        self.lookups = 0
        self.nbytes = 0
        self.ranges: dict[int, Range] = {}
        self.touched: set[Segment] = set()
        self._idle: SortedSet[tuple[int, ...]] = SortedSet()
        self._places: dict[int, tuple[tuple[int, ...], Segment]] = {}

    def list_of(self, stream: int) -> FreeList:
        """The list of a stream. A new one is in `lists` once it has blocks."""
        found = self.lists.get(stream)
        return FreeList(self, stream) if found is None else found

    # Idle segments --------------------------------------------------------------------------------

    def idle(self) -> SortedSet[tuple[int, ...]]:
        """(size, stream, address) of the idle segments; `idle_at` gives the segment."""
        # (Not `pop`, which searches the whole table of a set that once was large.)
        touched, self.touched = self.touched, set()
        for segment in touched:
            self._forget_idle(segment)
            if segment.idle:
                place = (segment.size, segment.first.home.stream, segment.address)
                self._places[segment.address] = (place, segment)
                self._idle.add(place)
        return self._idle

    def all_idle(self) -> list[Segment]:
        """The idle segments by (stream, size, address), for a caller that releases most of them.

        They count as touched from now on: releasing them removes nothing from an ordered set.
        """
        self.touched.update(segment for _, segment in self._places.values())
        self._idle, self._places = SortedSet(), {}
        idle = [segment for segment in self.touched if segment.idle]
        self.touched = set(idle)
        return sorted(idle, key=lambda at: (at.first.home.stream, at.size, at.address))

    def idle_at(self, address: int) -> Segment:
        return self._places[address][1]

    def released(self, segment: Segment) -> None:
        """Forget a segment that has gone back to the source."""
        self.nbytes -= segment.size
        self.forget(segment)

    def forget(self, segment: Segment) -> None:
        """Forget whether a segment is idle, which exists no longer."""
        self.touched.discard(segment)
        self._forget_idle(segment)

    def _forget_idle(self, segment: Segment) -> None:
        known = self._places.pop(segment.address, None)
        if known is not None:
            self._idle.remove(known[0])

    def clear(self) -> None:
        """Forget what can be computed, to be filled again."""
        self.lists = {}
        self.nbytes = 0
        self.touched = set()
        self._idle = SortedSet()
        self._places = {}


class PoolSet:
    """A small and a large pool: the default ones, or the private ones of graphs.

    ``uses`` counts the graphs that may still read and write the memory. When it is zero, segments
    are given back as soon as they are idle. ``refusal``, if not empty, says why nothing can be
    allocated there now. ``rules`` has what a pause does with some live blocks, by address.
    ``widens`` says that new segments are larger, the more a pool has: see `segment_for`.
    ``of_region`` says that a region has these pools, so that no user has to release them.
    """

    __slots__ = ("of_region", "owner", "pools", "refusal", "rules", "uses", "widens")

    def __init__(self, owner: tuple[int, int]) -> None:
        self.owner = owner
        self.pools = (Pool(0, owner), Pool(1, owner))
        self.uses = 1
        self.refusal = ""
        self.rules: dict[int, str] = {}
        self.widens = False
        self.of_region = False

    @property
    def nbytes(self) -> int:
        return self.pools[0].nbytes + self.pools[1].nbytes

    def segment_for(self, index: int, size: int) -> int:
        """Bytes of a wide segment for blocks of ``size`` bytes; 0 if the policy's own will do.

        A segment costs as much to pause or to resume as tens of MiB do. With a sixteenth of what
        the pool has there are few, and at most a sixteenth more is reserved.
        """
        if not self.widens:
            return 0
        wide = min(self.pools[index].nbytes // WIDE_SHARE, WIDEST_SEGMENT)
        return wide // size * size


class Stamps(dict[int, int]):
    """The time stamps of free blocks by address, and the order in which they become safe."""

    def __init__(self) -> None:
        super().__init__()
        # Also of blocks that have another stamp by now, or none.
        self._queue: list[tuple[int, int]] = []

    def __setitem__(self, address: int, stamp: int) -> None:
        super().__setitem__(address, stamp)
        heappush(self._queue, (stamp, address))
        if len(self._queue) > 2 * len(self) + 64:
            self._queue = [(stamp, address) for address, stamp in self.items()]
            heapify(self._queue)

    def take_before(self, frontier: int) -> list[int]:
        """Take off the stamps that are less than ``frontier``; returns the addresses."""
        taken = []
        while self._queue and self._queue[0][0] < frontier:
            stamp, address = heappop(self._queue)
            if self.get(address) == stamp:
                del self[address]
                taken.append(address)
        return taken
