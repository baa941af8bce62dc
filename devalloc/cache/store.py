"""The state of an engine and the steps a policy is made of. Knows no lock, stream or thread.

Invariants
----------
C1  The blocks of a segment tile it; no two free neighbours could be merged (same home, no time
    stamp); every free block is in exactly one free list, that of its home.
C3  ``reserved`` is the sum of the segments.

Every step preserves both even when it raises: the source is called first, and its result is entered
afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from devalloc.cache import ledger as rows
from devalloc.cache.blocks import FREE, LIVE, Block, FreeList, Pool, PoolSet, Segment
from devalloc.cache.each import for_each
from devalloc.cache.outside import Outside
from devalloc.errors import OutOfMemory

if TYPE_CHECKING:
    from devalloc.cache.policy import Policy
    from devalloc.sources import Source


class Request:
    """One allocation under way: requested bytes, rounded bytes, pool, stream.

    ``freed_before``, if not None, is the time up to which frees are known to be done for this
    caller, who does not work in the order of the owner's stream. ``segment`` is the bytes of the
    segment that was last asked for on its behalf, 0 if none was.
    """

    __slots__ = ("freed_before", "index", "nbytes", "pools", "segment", "size", "stream")

    def __init__(
        self,
        nbytes: int,
        size: int,
        index: int,
        stream: int,
        pools: PoolSet,
        freed_before: int | None,
    ) -> None:
        self.nbytes = nbytes
        self.size = size
        self.index = index
        self.stream = stream
        self.pools = pools
        self.freed_before = freed_before
        self.segment = 0

    @property
    def home(self) -> FreeList:
        return self.pools.pools[self.index].list_of(self.stream)


class Store:
    """Segments, blocks and free lists, over one source and under one policy."""

    def __init__(self, source: Source, policy: Policy, limit: int | None) -> None:
        self.source = source
        self.policy = policy
        self.limit = limit
        self.reserved = 0
        self.asking = 0
        """Bytes that the source is being asked for: announced before the limit is looked at."""
        self.outside = Outside(self)
        self.blocks: dict[int, Block] = {}
        self.segments: dict[int, Segment] = {}
        self.default = PoolSet((0, 0))
        self.privates: dict[tuple[int, int], PoolSet] = {}
        self.ledger = rows.Ledger(getattr(policy, "max_split_size", None))
        self.counts: Counter[str] = Counter()
        self.stamps: dict[int, int] = {}
        self.failure: OutOfMemory | None = None
        capabilities = getattr(source, "capabilities", None)
        self.shared = False
        self._best_fit = policy.best_fit
        self.stream_ordered = bool(getattr(capabilities, "stream_ordered", False))

    # What the engine adds: streams, history -------------------------------------------------------

    def around_source(self) -> AbstractContextManager[None]:
        """A context that is entered around every call of the source."""
        return nullcontext()

    def may_release(self) -> bool:
        """Whether memory may go back to the source now: never during a capture."""
        return True

    def order(self, stream: int, behind: int) -> None:
        """Order what is queued on ``stream`` from now on behind all that is on ``behind``."""

    def wait_for_events(self) -> None:
        """Wait for the streams that still use freed blocks, so that these become free."""

    def segment_changed(self, segment: Segment, action: str) -> None:
        """Called after ``segment_alloc`` and ``segment_free``."""

    def before_release(self, segment: Segment) -> None:
        """Called before a segment goes back: order its stream behind all others that used it."""

    # Finding --------------------------------------------------------------------------------------

    def find(
        self, home: FreeList, size: int, nbytes: int, freed_before: int | None = None
    ) -> Block | None:
        """Take a block of ``size`` bytes from a free list, as the policy chooses."""
        home.pool.lookups += 1
        if self._best_fit:
            best = home.find(size)
            found = None if best is None else best[1]
        else:
            found = self.policy.find(self, home, size, freed_before)
        return None if found is None else self.carve(self.blocks[found], home, size, nbytes)

    def find_for(self, request: Request) -> Block | None:
        """Take a block from the free list of the request's stream."""
        return self.find(request.home, request.size, request.nbytes, request.freed_before)

    def carve(self, block: Block, home: FreeList, size: int, nbytes: int) -> Block:
        """Hand out a free block, or the part that the policy cuts off, to the stream of ``home``.

        ``nbytes`` is what the caller asked for.
        """
        owner, whole = block.home, block.size
        index = owner.pool.index
        owner.remove(whole, block.address)
        divided = block.next is not None or block.prev is not None
        log = self.ledger.rows
        if divided:
            log.extend((whole | rows.SPLIT_OUT | index, 0))
        if whole != size and self.policy.splits(index, whole, size):
            rest = whole - size
            block = self._cut(block, rest if self.policy.takes_tail else size)
            log.extend((rest | rows.SPLIT_IN | index, 0, size | rows.MALLOC | index, nbytes))
        else:
            log.extend((whole | rows.MALLOC | index, nbytes))
        if self.stamps:
            self.stamps.pop(block.address, None)
        block.home = home
        block.state = LIVE
        block.requested = nbytes
        if len(log) > rows.FULL:
            self.ledger.fold()
        return block

    def find_elsewhere(self, request: Request) -> Block | None:
        """Take the best block that another stream owns, or else merge all that the others own.

        Work that is queued on the request's stream from now on is ordered behind theirs. Only for
        stores that are `shared`.
        """
        pool = request.home.pool
        best: tuple[int, int] | None = None
        owner: FreeList | None = None
        for other in pool.lists.values():
            found = other.find(request.size) if other.stream != request.stream else None
            if found is not None and (best is None or found < best):
                best, owner = found, other
        if best is not None and owner is not None:
            self.order(request.stream, owner.stream)
            return self.carve(self.blocks[best[1]], request.home, request.size, request.nbytes)
        if self.adopt(pool, request.home):
            return self.find_for(request)
        return None

    def adopt(self, pool: Pool, home: FreeList) -> bool:
        """Move the free blocks of all other streams to ``home`` and merge them.

        The stream of ``home`` is ordered behind the others. Returns whether there were any blocks.
        """
        moved = False
        for other in [at for at in pool.lists.values() if at is not home]:
            addresses = [address for _, address in other]
            if addresses:
                self.order(home.stream, other.stream)
                moved = True
            for address in addresses:
                self._move(self.blocks[address], home)
            for address in addresses:
                if address in self.blocks:
                    # A merged block keeps the later stamp.
                    self.settle(self.blocks[address], ignore_stamps=True)
        return moved

    def unite(self, segment: Segment) -> bool:
        """Make one block of a segment if all of it is free, whichever streams own its blocks.

        The stream of its first block is ordered behind the others. Returns whether all is free.
        """
        if segment.idle:
            return True
        if not self.shared or any(block.state != FREE for block in segment.blocks()):
            return False
        home = segment.first.home
        others = {block.home.stream for block in segment.blocks()} - {home.stream}
        for stream in sorted(others):
            self.order(home.stream, stream)
        for block in segment.blocks():
            self._move(block, home)
        self.settle(segment.first, ignore_stamps=True)
        return True

    def _move(self, block: Block, home: FreeList) -> None:
        """Give a free block to another stream."""
        block.home.remove(block.size, block.address)
        block.home = home
        home.add(block.size, block.address)

    def _cut(self, block: Block, at: int) -> Block:
        """Cut a free block, which is in no list, ``at`` bytes from its start.

        Enters the part that stays free in its list and returns the other.
        """
        after, owner = block.next, block.home
        address = block.address + at
        tail = Block(address, block.size - at, 0, FREE, owner, block.segment, block, after)
        block.size = at
        block.next = tail
        if after is not None:
            after.prev = tail
        self.blocks[address] = tail
        if self.stamps and block.address in self.stamps:
            self.stamps[address] = self.stamps[block.address]
        if self.policy.takes_tail:
            owner.add(at, block.address)
            return tail
        owner.add(tail.size, address)
        return block

    # Freeing --------------------------------------------------------------------------------------

    def put_back(self, block: Block, code: int = rows.FREE) -> Block:
        """Make a block free and merge it with its free neighbours; return the result.

        ``code`` is the ledger's code for what happens.
        """
        index = block.home.pool.index
        log = self.ledger.rows
        log.extend((block.size | code | index, block.requested))
        block.state = FREE
        before, after = block.prev, block.next
        if (before is not None and before.state == FREE) or (
            after is not None and after.state == FREE
        ):
            block = self.merge(block)
        if block.next is not None or block.prev is not None:
            log.extend((block.size | rows.SPLIT_IN | index, 0))
        block.home.add(block.size, block.address)
        if len(log) > rows.FULL:
            self.ledger.fold()
        return block

    def merge(self, block: Block, ignore_stamps: bool = False) -> Block:
        """Join a free block, which is in no list, with the free neighbours of its home."""
        home = block.home
        stamps = self.stamps
        if stamps and block.address in stamps and not ignore_stamps:
            return block
        strict = stamps if not ignore_stamps else ()
        # There may be several on a side that a stamp or another owner kept from being merged.
        before = block.prev
        while (
            before is not None
            and before.state == FREE
            and before.home is home
            and before.address not in strict
        ):
            block = self._join(before, block, before)
            before = block.prev
        after = block.next
        while (
            after is not None
            and after.state == FREE
            and after.home is home
            and after.address not in strict
        ):
            self._join(block, after, after)
            after = block.next
        return block

    def settle(self, block: Block, ignore_stamps: bool) -> Block:
        """Take a free block out of its list, merge it, and enter the result."""
        index = block.home.pool.index
        log = self.ledger.rows
        if block.next is not None or block.prev is not None:
            log.extend((block.size | rows.SPLIT_OUT | index, 0))
        block.home.remove(block.size, block.address)
        block = self.merge(block, ignore_stamps)
        if block.next is not None or block.prev is not None:
            log.extend((block.size | rows.SPLIT_IN | index, 0))
        block.home.add(block.size, block.address)
        return block

    def _join(self, first: Block, second: Block, listed: Block) -> Block:
        """Join two neighbours; ``listed`` is the one that was in a free list."""
        log = self.ledger.rows
        home = listed.home
        home.remove(listed.size, listed.address)
        log.extend((listed.size | rows.SPLIT_OUT | home.pool.index, 0))
        if self.stamps:
            stamp = max(self.stamps.pop(at.address, 0) for at in (first, second))
            if stamp:
                self.stamps[first.address] = stamp
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.prev = first
        del self.blocks[second.address]
        return first

    # Segments -------------------------------------------------------------------------------------

    def room(self) -> int | None:
        """Bytes that the limit still allows to take from the source; None without a limit."""
        return None if self.limit is None else self.limit - self.taken

    @property
    def taken(self) -> int:
        """Bytes that count against the limit: own segments, those of `outside`, those asked for."""
        return self.reserved + self.asking + self.outside.reserved

    def grow(self, request: Request, nbytes: int) -> Block | None:
        """Ask the source for a segment and serve the request from it.

        The limit is checked first. Returns None if the limit or the source refuses; `failure` then
        has the source's error, if there is one, until the request is over.
        """
        self.failure = None
        self.asking = nbytes
        request.segment = nbytes
        try:
            if self.limit is not None and self.taken > self.limit:
                return None
            with self.around_source():
                address = self._ask_source(nbytes, request.stream)
            self.reserved += nbytes
        except OutOfMemory as error:
            self.failure = error
            return None
        finally:
            self.asking = 0
        home = request.home
        segment = Segment(address, nbytes, request.stream, home.pool)
        block = Block(address, nbytes, 0, FREE, home, segment, None, None)
        segment.first = block
        self.segments[address] = segment
        self.blocks[address] = block
        home.add(nbytes, address)
        home.pool.segments += 1
        self.counts["num_device_alloc"] += 1
        self.ledger.rows.extend((nbytes | rows.SEGMENT_IN | request.index, 0))
        self.segment_changed(segment, "segment_alloc")
        return self.carve(block, home, request.size, request.nbytes)

    def _ask_source(self, nbytes: int, stream: int) -> int:
        source: Any = self.source
        return source.allocate(nbytes, stream) if self.stream_ordered else source.allocate(nbytes)

    def release(self, segment: Segment) -> int:
        """Give an idle segment back to the source; returns its bytes."""
        block = segment.first
        home = block.home
        self.before_release(segment)
        source: Any = self.source
        with self.around_source():
            if self.stream_ordered:
                source.free(segment.address, segment.size, segment.stream)
            else:
                source.free(segment.address, segment.size)
        home.remove(block.size, block.address)
        home.pool.segments -= 1
        self.stamps.pop(block.address, None)
        del self.blocks[block.address]
        del self.segments[segment.address]
        self.reserved -= segment.size
        self.counts["num_device_free"] += 1
        self.ledger.rows.extend((segment.size | rows.SEGMENT_OUT | home.pool.index, 0))
        self.segment_changed(segment, "segment_free")
        return segment.size

    def idle_segments(self, pools: PoolSet, index: int) -> list[Segment]:
        """The segments of one pool that are one free block, by (stream, size, address)."""
        lists = pools.pools[index].lists
        blocks = (self.blocks[at] for stream in sorted(lists) for _, at in lists[stream])
        return [block.segment for block in blocks if block.prev is None and block.next is None]

    def release_idle(self, pools: PoolSet) -> None:
        """Give back every idle segment of some pools, large ones first."""
        if self.shared:
            for segment in self.segments.values():
                if segment.pool in pools.pools:
                    self.unite(segment)
        for_each(self.release, [at for index in (1, 0) for at in self.idle_segments(pools, index)])

    def release_unused(self, pools: PoolSet) -> None:
        """Give back idle segments of private pools that no graph uses; drop the pools if empty."""
        if self.may_release():
            self.release_idle(pools)
            if pools.segments == 0:
                del self.privates[pools.owner]

    def release_cached(self) -> int:
        """Give back every idle segment of the default pools and of private pools without graphs.

        Returns the bytes given back; 0 during a capture.
        """
        if not self.may_release():
            return 0
        before = self.reserved
        try:
            self.release_idle(self.default)
        finally:
            unused = [pools for pools in self.privates.values() if pools.uses == 0]
            for_each(self.release_unused, unused)
        return before - self.reserved

    # Looking --------------------------------------------------------------------------------------

    def all_pools(self) -> Iterator[Pool]:
        for pools in (self.default, *self.privates.values()):
            yield from pools.pools

    def free_blocks(self) -> Iterator[Block]:
        for pool in self.all_pools():
            for home in pool.lists.values():
                for _, address in home:
                    yield self.blocks[address]
