"""Segments that grow and shrink, for policies with ``expandable_segments``.

Each stream has ranges of addresses in each pool, far larger than what is in use. Memory is mapped
there page by page, at the lowest address where a request fits. A segment is a stretch of a range
that is mapped without gaps, so C1 and C3 hold for it as for any other: its blocks tile it, and
``reserved`` is the sum of the segments. Four things can happen to it:

- it grows: memory is mapped behind it, and is one free block more, merged with a free last one;
- it joins the next one, if the gap between them is filled;
- it shrinks, or is divided: whole handles inside a free block are unmapped;
- it is released, if all of it is free. With its last segment, a range is
  released too.

Before it unmaps anything, the cache waits for the device: kernels of the stream that owns a free
block may still use it. During a capture nothing is unmapped. What PyTorch takes in `Arena.use`, and
memory in regions, does not expand.

Interruptions: as in `devalloc.arena.store.store`. Ranges are primary state, and so is the range
of each segment; nothing else is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from devalloc.arena.store import statistics as rows
from devalloc.arena.store.blocks import FREE, Block, FreeList, Pool, PoolSet, Range, Segment
from devalloc.common.cleanup import call_for_all
from devalloc.errors import DevallocError, InvalidArgument, OutOfMemory
from devalloc.sizes import MIB, round_up
from devalloc.sources.source import granularity_of

if TYPE_CHECKING:
    from devalloc.arena.store.bookkeeping import Bookkeeping
    from devalloc.arena.store.request import Request

PAGE = 2 * MIB
"""Memory is mapped in multiples of this, or of the source's granularity if that is larger."""
LARGEST_HANDLE = 64 * MIB
"""What is mapped as one handle is unmapped as one. Larger handles cost less per byte, but one live
block keeps all of its handle."""
RANGE_BYTES = 64 << 30
"""Addresses of one range; a request that is larger has a range of its own."""


class Place(NamedTuple):
    """``nbytes`` that could be mapped at ``address``, between two segments, if there are such.

    Without a range, a new one is needed.
    """

    range: Range | None
    address: int
    nbytes: int
    before: Segment | None
    after: Segment | None

    @property
    def joins(self) -> Segment | None:
        """The segment behind, if nothing is left of the gap."""
        end = self.address + self.nbytes
        return self.after if self.after is not None and self.after.address == end else None


class Expandable:
    """The segments that grow and shrink of one store.

    ``release`` is the store's function that gives an idle segment back to the source.
    """

    def __init__(self, store: Bookkeeping, release: Callable[[Segment], int]) -> None:
        source = store.source
        if not getattr(getattr(source, "capabilities", None), "mappable", False):
            raise InvalidArgument(
                f"expandable segments need memory that can be mapped into reserved addresses, "
                f'which {source!r} has not; use source="virtual"'
            )
        self._store = store
        self._release = release
        self._source: Any = source
        self._page = max(PAGE, granularity_of(source))

    # Growing --------------------------------------------------------------------------------------

    def needed(self, request: Request, nbytes: int) -> int:
        """Bytes that `grow` would map."""
        return self._place(request, nbytes).nbytes

    def grow(self, request: Request, nbytes: int) -> Block | None:
        """Map so much that the request finds a free block of ``nbytes``, and serve it from there.

        If that is refused, map only what the request itself needs. Returns None if that is refused
        too; see `Store.grow`.
        """
        return self._map(request, nbytes) or (
            self._map(request, request.size) if request.size < nbytes else None
        )

    def _place(self, request: Request, nbytes: int) -> Place:
        """The lowest gap in which the request fits, with what is free on both sides of it.

        As much is to be mapped that ``nbytes`` are free there; or only what is needed, if the rest
        would be less than a page.
        """
        home = request.home
        wanted = nbytes if nbytes >= request.size + self._page else request.size
        for found in home.pool.ranges.values():
            if found.stream != request.stream:
                continue
            before: Segment | None = None
            start = found.address
            for after in (*self._segments_in(found), None):
                end = found.end if after is None else after.address
                if end > start:
                    head = self._free_at(home, None if before is None else before.last)
                    tail = self._free_at(home, None if after is None else after.first)
                    if head + end - start + tail >= request.size:
                        size = round_up(max(wanted - head, 1), self._page)
                        return Place(found, start, min(size, end - start), before, after)
                before, start = after, end + (0 if after is None else after.size)
        return Place(None, 0, round_up(wanted, self._page), None, None)

    def _segments_in(self, found: Range) -> list[Segment]:
        inside = [at for at in self._store.segments.values() if at.range is found]
        return sorted(inside, key=lambda at: at.address)

    def _free_at(self, home: FreeList, block: Block | None) -> int:
        """Bytes of a block that what is mapped beside it would be merged with."""
        if block is None or block.state != FREE or block.home is not home:
            return 0
        return 0 if block.address in self._store.stamps else block.size

    def _reserve(self, request: Request, nbytes: int) -> Range:
        size = max(RANGE_BYTES, nbytes)
        found = Range(0, size, request.stream)
        ranges = request.home.pool.ranges
        given: list[int] = []
        try:
            given.extend(map(self._source.reserve, (size,)))
        finally:
            if given:
                found.address = given[0]
                ranges[found.address] = found
        return found

    def _map(self, request: Request, nbytes: int) -> Block | None:
        store = self._store
        store.failure = None
        place = self._place(request, nbytes)
        request.segment = store.asking = place.nbytes
        home, pool = request.home, request.home.pool
        mapped: list[None] = []
        try:
            if store.limit is not None and store.taken > store.limit:
                return None
            if place.range is None:
                found = self._reserve(request, place.nbytes)
                place = place._replace(range=found, address=found.address)
            _, address, size, before, _ = place
            after = place.joins
            segment = before or Segment(address, 0, request.stream, pool)
            last = segment.last if before else None
            block = Block(address, size, home, segment, last, after.first if after else None)
            if before is None:
                segment.first, segment.range = block, place.range
            beside = [at for at in (last, block.next) if at is not None]
            counted = self._divided(beside)
            grown = size + (after.size if after else 0)
            with store.around_source():
                mapped.extend(map(self._map_part, (place,)))
        except OutOfMemory as error:
            store.failure = error
            return None
        finally:
            # (No call in these lines: an interruption comes before or after all of them.)
            if mapped:
                if last is not None:
                    last.next = block
                if after is not None:
                    block.next.prev = block  # type: ignore[union-attr]
                    del store.segments[after.address]
                segment.size += grown
                store.segments[segment.address] = segment
                store.reserved += size
            store.asking = 0
        store.blocks[address] = block
        home.gained_block()
        pool.nbytes += size
        if after is not None:
            pool.forget(after)
            for moved in after.blocks():
                moved.segment = segment
        segment.last = after.last if after is not None else block
        store.counts["num_device_alloc"] += 1
        self._count_segments(pool, (before, after), (segment,), rows.SEGMENT_IN, size)
        self._count_divided(pool, counted, [*beside, block])
        store.history.segment_changed(segment, "segment_map", address, size)
        pool.touched.add(segment)
        home.add(size, address)
        block = store.settle(block, ignore_stamps=False)
        return store.carve(block, home, request.size, request.nbytes)

    def _map_part(self, place: Place) -> None:
        found = place.range
        assert found is not None  # made before
        offset = place.address - found.address
        self._source.map(found.address, offset, place.nbytes, LARGEST_HANDLE)

    # Shrinking ------------------------------------------------------------------------------------

    def unmap(self, found: Range, address: int, nbytes: int) -> None:
        """Unmap a part of a range, by whole handles, when nothing uses it any more."""
        self._store.streams.synchronize()
        self._give(self._source.unmap, found.address, address - found.address, nbytes)

    def _give(self, call: Callable[..., None], *arguments: int) -> None:
        """Give something to the source; if it fails to take it, the repair does not try again."""
        try:
            call(*arguments)
        except DevallocError:
            raise
        except Exception:
            self._store.refused = True
            raise

    def give_up_ranges(self, pool: Pool) -> None:
        """Release the ranges of a pool in which nothing is mapped."""
        used = {at.range for at in self._store.segments.values()}
        for found in [at for at in pool.ranges.values() if at not in used]:
            gone: list[None] = []
            try:
                gone.extend(map(self._give_up, (found,)))
            finally:
                if gone:
                    del pool.ranges[found.address]

    def _give_up(self, found: Range) -> None:
        self._give(self._source.free, found.address, found.nbytes)

    def trim(self, pools: PoolSet, enough: int | None = None) -> list[tuple[int, FreeList]]:
        """Unmap memory in free blocks, highest addresses first, until it is ``enough``.

        Returns (bytes, home) of each part; whole segments are released.
        """
        store = self._store
        free = [
            store.blocks[address]
            for pool in pools.pools
            for home in pool.lists.values()
            for _, address in home.from_size(self._page)
        ]
        free.sort(key=lambda block: block.address, reverse=True)
        gone: list[tuple[int, FreeList]] = []

        def shrink(block: Block) -> None:
            left = None if enough is None else enough - sum(nbytes for nbytes, _ in gone)
            if block.segment.range is not None and (left is None or left > 0):
                home = block.home
                gone.append((self.shrink(block, left), home))

        call_for_all(shrink, free)
        call_for_all(self.give_up_ranges, pools.pools)  # those that were made for nothing
        return [(nbytes, home) for nbytes, home in gone if nbytes]

    def shrink(self, block: Block, enough: int | None = None) -> int:
        """Unmap the handles that lie inside a free block, from its end on; returns the bytes.

        With ``enough``, only as many as that takes.
        """
        segment = block.segment
        found = segment.range
        assert found is not None
        parts = self._source.parts(found.address, block.address - found.address, block.size)
        if not parts:
            return 0
        end = sum(parts[-1]) + found.address
        start = end
        while parts and (enough is None or end - start < enough):
            start = parts.pop()[0] + found.address
        if segment.idle and (start, end) == (segment.address, segment.address + segment.size):
            return self._release(segment)
        self._take_out(block, start, end)
        return end - start

    def _take_out(self, block: Block, start: int, end: int) -> None:
        """Unmap [start, end) of a free block; its segment becomes shorter, or two."""
        store, segment, home = self._store, block.segment, block.home
        found = segment.range
        assert found is not None
        pool, whole, stamp = home.pool, block.size, store.stamps.get(block.address)
        before, after = block.prev, block.next
        front, rest = start - block.address, block.address + block.size - end
        rear = Block(end, rest, home, segment, None, after) if rest else after
        second: Segment | None = None
        if rear is not None:
            nbytes = segment.address + segment.size - end
            second = Segment(rear.address, nbytes, segment.stream, pool)
            second.first, second.range = rear, found
            second.frames = segment.frames
            second.last = segment.last if segment.last is not block else rear
        last = block if front else before
        beside = [at for at in (before, after) if at is not None]
        counted = self._divided([*beside, block])
        taken: list[None] = []
        try:
            taken.extend(map(self.unmap, (found,), (start,), (end - start,)))
        finally:
            # (No call in these lines either.)
            if taken:
                if last is not None:
                    last.next = None
                    segment.size = start - segment.address
                    block.size = front
                else:
                    del store.segments[segment.address]
                if second is not None:
                    rear.prev = None  # type: ignore[union-attr]
                    store.segments[second.address] = second
                store.reserved -= end - start
        home.remove(whole, block.address)
        pool.nbytes -= end - start
        if last is not None:
            segment.last = last
            pool.touched.add(segment)
        else:
            pool.forget(segment)
        if after is not None:
            after.prev = rear if rest else None
        if second is not None:
            for moved in second.blocks():
                moved.segment = second
            pool.touched.add(second)
        pieces = []
        for piece, size in ((block, front), (rear, rest)):
            if size:
                assert piece is not None
                store.blocks[piece.address] = piece
                home.gained_block()
                home.add(size, piece.address)
                if stamp is not None:
                    store.stamps[piece.address] = stamp
                pieces.append(piece)
        if not front:
            del store.blocks[block.address]
            store.stamps.pop(block.address, None)
        home.lost_block()
        store.counts["num_device_free"] += 1
        left = (segment if last is not None else None, second)
        self._count_segments(pool, (segment,), left, rows.SEGMENT_OUT, end - start)
        self._count_divided(pool, counted, [*beside, *pieces])
        store.history.segment_changed(segment, "segment_unmap", start, end - start)

    # Counting -------------------------------------------------------------------------------------

    @staticmethod
    def _divided(blocks: list[Block]) -> list[int]:
        """The sizes of those that are free in a divided segment."""
        return [
            at.size
            for at in blocks
            if at.state == FREE and (at.prev is not None or at.next is not None)
        ]

    def _count_divided(self, pool: Pool, before: list[int], blocks: list[Block]) -> None:
        """Free blocks in divided segments were ``before``, and are those among ``blocks`` now."""
        log = self._store.statistics.rows
        for size in before:
            log.extend((size | rows.SPLIT_OUT | pool.index, 0))
        for size in self._divided(blocks):
            log.extend((size | rows.SPLIT_IN | pool.index, 0))

    def _count_segments(
        self,
        pool: Pool,
        before: tuple[Segment | None, ...],
        now: tuple[Segment | None, ...],
        code: int,
        nbytes: int,
    ) -> None:
        """Enter ``nbytes`` with ``code``, and rows of 0 bytes for the count of segments."""
        change = sum(at is not None for at in now) - sum(at is not None for at in before)
        change -= 1 if code == rows.SEGMENT_IN else -1
        correction = rows.SEGMENT_IN if change > 0 else rows.SEGMENT_OUT
        entries = [(correction | pool.index, 0)] * abs(change)
        # (What goes goes first, so that no peak is too high.)
        last = len(entries) if code == rows.SEGMENT_IN else 0
        entries.insert(last, (nbytes | code | pool.index, 0))
        for entry in entries:
            self._store.statistics.rows.extend(entry)
