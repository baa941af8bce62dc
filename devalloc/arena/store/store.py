"""The state of a cache and the steps that policies are made of. Knows no lock and no thread.

Invariants
----------
C1  The blocks of a segment tile it; no two free neighbours could be merged (same home, no time
    stamp); every free block is in exactly one free list, that of its home.
C3  ``reserved`` is the sum of the segments.

Every step preserves both even when it raises one of our errors: the source is called first, and its
result is entered afterwards. For exceptions that come in between (Ctrl-C) see docs/design/host.md:
whatever a step has done to segments, chains and states is done by stores without a call between
them, and everything else can be computed from these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from devalloc.arena.store import statistics as rows
from devalloc.arena.store.blocks import (
    FREE,
    LIVE,
    SPARE_SIZES,
    TAKEN,
    Block,
    FreeList,
    Pool,
    PoolSet,
    Segment,
    Stamps,
)
from devalloc.arena.store.expandable import Expandable
from devalloc.arena.store.external import External
from devalloc.arena.store.history import History
from devalloc.arena.store.streams import Pending
from devalloc.common.cleanup import call_for_all
from devalloc.errors import DevallocError, OutOfMemory
from devalloc.sources.source import granularity_of

if TYPE_CHECKING:
    from devalloc.arena.policies.policy import Policy
    from devalloc.arena.store.streams import Streams
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

    def __init__(
        self, source: Source, policy: Policy, limit: int | None, streams: Streams, shared: bool
    ) -> None:
        self.source = source
        self.policy = policy
        self.limit = limit
        self.streams = streams
        self.shared = shared
        """Whether free blocks of one segment may belong to several streams."""
        self.reserved = 0
        self.asking = 0
        """Bytes that the source is being asked for: announced before the limit is looked at."""
        self.asleep = 0
        """Bytes of segments that have no memory now: reserved, and not taken."""
        self.blocks: dict[int, Block] = {}
        self.segments: dict[int, Segment] = {}
        self.default = PoolSet((0, 0))
        self.privates: dict[tuple[int, int], PoolSet] = {}
        self.stamps = Stamps()
        self.statistics = rows.Statistics(getattr(policy, "max_split_size", None))
        self.counts: Counter[str] = Counter()
        self.history = History()
        self.pending = Pending(self)
        self.external = External(self)
        self.captures = 0
        self.closed = False
        self.failure: OutOfMemory | None = None
        self.refused = False
        """Whether the source failed to take memory back in the call that was torn by that."""
        self._best_fit = policy.best_fit
        capabilities = getattr(source, "capabilities", None)
        self._stream_ordered = bool(getattr(capabilities, "stream_ordered", False))
        self._granularity = granularity_of(source)
        self.expandable = Expandable(self) if policy.expandable_segments else None

    # Streams --------------------------------------------------------------------------------------

    def may_release(self) -> bool:
        """Whether memory may go back to the source now: never during a capture."""
        return not self.captures

    def order(self, stream: int, behind: int) -> None:
        """Order what is queued on ``stream`` from now on behind all that is on ``behind``."""
        self.streams.wait(stream, self.streams.record(behind))

    def wait_for_events(self) -> None:
        """Wait for the streams that still use freed blocks, so that these become free."""
        self.pending.wait()

    def around_source(self) -> AbstractContextManager[None]:
        """What goes around a call of the source."""
        return self.streams.relaxed_capture() if self.captures else nullcontext()

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
        """Take a free block, or the part that the policy cuts off, for the stream of ``home``.

        ``nbytes`` is what the caller asked for. The block is in state TAKEN until `Cache.malloc`
        ends.
        """
        owner, whole = block.home, block.size
        index = owner.pool.index
        owner.remove(whole, block.address)
        divided = block.next is not None or block.prev is not None
        log = self.statistics.rows
        if not divided:
            owner.pool.touched.add(block.segment)
        if whole != size and self.policy.splits(index, whole, size):
            rest = whole - size
            if divided:
                log.extend((whole | rows.SPLIT_OUT | index, 0))
            block = self._cut(block, rest if self.policy.takes_tail else size)
            log.extend((rest | rows.SPLIT_IN | index, 0, size | rows.MALLOC | index, nbytes))
        else:
            code = rows.MALLOC_PART if divided else rows.MALLOC
            log.extend((whole | code | index, nbytes))
        block.requested = nbytes
        block.state = TAKEN
        if self.stamps:
            self.stamps.pop(block.address, None)
        if home is not block.home:
            self._change_home(block, home)
        if len(log) > rows.FULL:
            self.statistics.fold()
        return block

    def find_elsewhere(self, request: Request) -> Block | None:
        """Take the best block that another stream owns, or else merge all that the others own.

        Work that is queued on the request's stream from now on is ordered behind theirs. Only for
        stores that are `shared`.
        """
        pool = request.pools.pools[request.index]
        best: tuple[int, int] | None = None
        owner: FreeList | None = None
        for other in pool.lists.values():
            found = other.find(request.size) if other.stream != request.stream else None
            if found is not None and (best is None or found < best):
                best, owner = found, other
        if best is not None and owner is not None:
            self.order(request.stream, owner.stream)
            return self.carve(self.blocks[best[1]], request.home, request.size, request.nbytes)
        if self._adopt(pool, request.stream):
            return self.find_for(request)
        return None

    def _adopt(self, pool: Pool, stream: int) -> bool:
        """Give the free blocks of all other streams to ``stream`` and merge them.

        It is ordered behind the others. Returns whether there were any blocks.
        """
        moved = False
        for other in [at for at in pool.lists.values() if at.stream != stream]:
            addresses = [address for _, address in other]
            if addresses:
                self.order(stream, other.stream)
                moved = True
            for address in addresses:
                self._move(self.blocks[address], stream)
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
            self._move(block, home.stream)
        self.settle(segment.first, ignore_stamps=True)
        return True

    def give_away(self, stream: int) -> None:
        """Give everything that ``stream`` owns to the default stream, and merge what is free."""
        moved = []
        for segment in self.segments.values():
            if segment.stream == stream:
                segment.stream = 0
                if segment.range is not None:
                    segment.range.stream = 0
            for block in segment.blocks():
                if block.home.stream != stream:
                    continue
                if block.state == FREE:
                    self._move(block, 0)
                    moved.append(block.address)
                else:
                    self._change_home(block, block.home.pool.list_of(0))
        for address in moved:
            if address in self.blocks:
                self.settle(self.blocks[address], ignore_stamps=False)

    def _move(self, block: Block, stream: int) -> None:
        """Give a free block to a stream."""
        block.home.remove(block.size, block.address)
        self._change_home(block, block.home.pool.list_of(stream))
        block.home.add(block.size, block.address)
        if block.prev is None and block.next is None:
            block.home.pool.touched.add(block.segment)

    def _change_home(self, block: Block, home: FreeList) -> None:
        before, block.home = block.home, home
        home.gained_block()
        before.lost_block()

    def _cut(self, block: Block, at: int) -> Block:
        """Cut a free block, which is in no list, ``at`` bytes from its start.

        Enters the part that stays free in its list and returns the other.
        """
        after, owner = block.next, block.home
        address = block.address + at
        tail = Block(address, block.size - at, owner, block.segment, block, after)
        block.size = at
        block.next = tail
        if after is not None:
            after.prev = tail
        else:
            block.segment.last = tail
        self.blocks[address] = tail
        owner.blocks += 1
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

        ``code`` is the code of what happens in the statistics.
        """
        block.state = FREE
        index = block.home.pool.index
        log = self.statistics.rows
        log.extend((block.size | code | index, block.requested))
        before, after = block.prev, block.next
        if (before is not None and before.state == FREE) or (
            after is not None and after.state == FREE
        ):
            block = self._merge(block)
        if block.next is not None or block.prev is not None:
            log.extend((block.size | rows.SPLIT_IN | index, 0))
        else:
            block.home.pool.touched.add(block.segment)
        block.home.add(block.size, block.address)
        if len(log) > rows.FULL:
            self.statistics.fold()
        return block

    def put_back_held(self, address: int) -> None:
        """Make a block free whose free is in the statistics already, as FREE or FREE_PART."""
        block = self.blocks[address]
        block.state = FREE
        block.home.add(block.size, block.address)
        self.settle(block, ignore_stamps=False)

    def complete(self, block: Block, code: int) -> None:
        """Make a block free that nothing uses any more, except perhaps its owner's stream."""
        policy = self.policy
        pools = self.privates.get(block.home.pool.owner)
        if pools is not None:
            pools.rules.pop(block.address, None)
        self.history.free_completed(block)
        if policy.stamps_frees:
            policy.stamp(self, block)
        block = self.put_back(block, code)
        if pools is not None and pools.uses == 0:
            self.release_unused(pools)
        elif pools is None and self.closed and self.may_release():
            if self.unite(block.segment):
                self.release(block.segment)
            elif self.expandable is not None and block.segment.range is not None:
                self.expandable.shrink(block)
        elif policy.careful:
            policy.freed(self, block)

    def settle(self, block: Block, ignore_stamps: bool) -> Block:
        """Take a free block out of its list, merge it, and enter the result."""
        index = block.home.pool.index
        log = self.statistics.rows
        if block.next is not None or block.prev is not None:
            log.extend((block.size | rows.SPLIT_OUT | index, 0))
        block.home.remove(block.size, block.address)
        block = self._merge(block, ignore_stamps)
        if block.next is not None or block.prev is not None:
            log.extend((block.size | rows.SPLIT_IN | index, 0))
        else:
            block.home.pool.touched.add(block.segment)
        block.home.add(block.size, block.address)
        return block

    def _merge(self, block: Block, ignore_stamps: bool = False) -> Block:
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

    def _join(self, first: Block, second: Block, listed: Block) -> Block:
        """Join two neighbours; ``listed`` is the one that was in a free list."""
        home = listed.home
        home.remove(listed.size, listed.address)
        self.statistics.rows.extend((listed.size | rows.SPLIT_OUT | home.pool.index, 0))
        if self.stamps:
            stamp = max(self.stamps.pop(at.address, 0) for at in (first, second))
            if stamp:
                self.stamps[first.address] = stamp
        after = second.next
        first.size += second.size
        first.next = after
        if after is not None:
            after.prev = first
        else:
            first.segment.last = first
        del self.blocks[second.address]
        home.blocks -= 1
        if len(home.by_size) > 2 * home.blocks + SPARE_SIZES:
            home.sweep()
        return first

    # Segments -------------------------------------------------------------------------------------

    def room(self) -> int | None:
        """Bytes that the limit still allows to take from the source; None without a limit.

        Whole multiples of the source's granularity.
        """
        return None if self.limit is None else (self.limit - self.taken) & -self._granularity

    @property
    def taken(self) -> int:
        """Bytes that count against the limit: own segments, `external`, those asked for.

        Segments that sleep do not.
        """
        return self.reserved + self.asking + self.external.reserved - self.asleep

    def grow(self, request: Request, nbytes: int) -> Block | None:
        """Ask the source for a segment of at least ``nbytes`` and serve the request from it.

        In pools whose segments widen, a wider one is asked for first. Of expandable segments one
        grows. A segment has all that the source takes for it: whole multiples of its granularity.
        The limit is checked first. Returns None if the limit or the source refuses; `failure` then
        has the source's error, if there is one, until the request is over.
        """
        if self.expandable is not None and not request.pools.widens:
            return self.expandable.grow(request, nbytes)
        wide = request.pools.segment_for(request.index, request.size)
        block = self._take_segment(request, wide) if wide > nbytes else None
        return block or self._take_segment(request, nbytes)

    def needed(self, request: Request, nbytes: int) -> int:
        """Bytes that `grow` would ask the source for."""
        if self.expandable is None or request.pools.widens:
            return nbytes
        return self.expandable.needed(request, nbytes)

    def _take_segment(self, request: Request, nbytes: int) -> Block | None:
        self.failure = None
        request.segment = nbytes = (nbytes + self._granularity - 1) & -self._granularity
        home = request.home
        segment = Segment(0, nbytes, request.stream, home.pool)
        block = segment.first = segment.last = Block(0, nbytes, home, segment)
        given: list[int] = []
        self.asking = nbytes
        try:
            if self.limit is not None and self.taken > self.limit:
                return None
            with self.around_source():
                # The list gets the address in the C code that gets it from the source: an
                # interruption cannot come in between.
                given.extend(map(self._ask_source, (request,)))
        except OutOfMemory as error:
            self.failure = error
            return None
        finally:
            if given:
                segment.address = block.address = given[0]
                self.segments[segment.address] = segment
                self.reserved += nbytes
            self.asking = 0
        self.blocks[block.address] = block
        home.gained_block()
        home.pool.nbytes += nbytes
        home.add(nbytes, block.address)
        self.counts["num_device_alloc"] += 1
        self.statistics.rows.extend((nbytes | rows.SEGMENT_IN | request.index, 0))
        self.history.segment_changed(segment, "segment_alloc", segment.address, nbytes)
        return self.carve(block, home, request.size, request.nbytes)

    def _ask_source(self, request: Request) -> int:
        source: Any = self.source
        if self._stream_ordered:
            return source.allocate(request.segment, request.stream)
        return source.allocate(request.segment)

    def release(self, segment: Segment) -> int:
        """Give an idle segment back to the source; returns its bytes."""
        block = segment.first
        pool = block.home.pool
        if self._stream_ordered and self.shared:
            others = {s for pool in self.all_pools() for s in pool.lists} - {segment.stream}
            for stream in sorted(others):
                self.order(segment.stream, stream)
        taken: list[None] = []
        try:
            with self.around_source():
                taken.extend(map(self._give_to_source, (segment,)))
        except DevallocError:
            raise
        except BaseException as error:
            self.refused = isinstance(error, Exception)
            # (Not of an expandable segment, whose source has the whole range.)
            has = None if segment.range is not None else getattr(self.source, "has", None)
            if has is not None and not has(segment.address):
                taken.append(None)
            raise
        finally:
            if taken:
                del self.segments[segment.address]
                self.reserved -= segment.size
                self.asleep -= segment.size if segment.asleep else 0
        block.home.remove(block.size, block.address)
        self.stamps.pop(block.address, None)
        del self.blocks[block.address]
        block.home.lost_block()
        pool.released(segment)
        self.counts["num_device_free"] += 1
        self.statistics.rows.extend((segment.size | rows.SEGMENT_OUT | pool.index, 0))
        action = "segment_free"
        if self.expandable is not None and segment.range is not None:
            action = "segment_unmap"
            self.expandable.give_up_ranges(pool)
        self.history.segment_changed(segment, action, segment.address, segment.size)
        return segment.size

    def _give_to_source(self, segment: Segment) -> None:
        source: Any = self.source
        if self.expandable is not None and segment.range is not None:
            self.expandable.unmap(segment.range, segment.address, segment.size)
        elif self._stream_ordered:
            source.free(segment.address, segment.size, segment.stream)
        else:
            source.free(segment.address, segment.size)

    def release_idle(self, pools: PoolSet) -> None:
        """Give back every idle segment of some pools, large ones first."""
        if self.shared:
            for segment in self.segments.values():
                if segment.pool in pools.pools:
                    self.unite(segment)
        small, large = pools.pools
        try:
            call_for_all(self.release, large.all_idle() + small.all_idle())
        finally:
            if self.expandable is not None:
                self.expandable.trim(pools)

    def release_unused(self, pools: PoolSet) -> None:
        """Give back idle segments of private pools that no graph uses; drop the pools if empty."""
        if self.may_release():
            self.release_idle(pools)
            if pools.nbytes == 0:
                self.privates.pop(pools.owner, None)

    def release_all_unused(self) -> None:
        """`release_unused` for all pools that no graph uses."""
        unused = [pools for pools in self.privates.values() if pools.uses == 0]
        call_for_all(self.release_unused, unused)

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
            if self.privates:
                self.release_all_unused()
        return before - self.reserved

    def release_everything(self) -> None:
        """Wait for all events and give back everything idle; does nothing during a capture."""
        steps = () if self.captures else (self.pending.record_deferred, self.pending.drain)
        call_for_all(lambda step: step(), (*steps, self.release_cached))

    # Looking --------------------------------------------------------------------------------------

    def all_pools(self) -> Iterator[Pool]:
        for pools in (self.default, *self.privates.values()):
            yield from pools.pools

    def free_blocks(self) -> Iterator[Block]:
        for pool in self.all_pools():
            for home in pool.lists.values():
                for _, address in home:
                    yield self.blocks[address]

    def live(self, address: int, claim: int | None = None) -> Block | None:
        """The block that lives at an address, under this claim if one is given."""
        block = self.blocks.get(address)
        if block is None or block.state != LIVE or (claim is not None and block.claim != claim):
            return None
        return block

    def stats(self) -> dict[str, int]:
        """The sums of the statistics and the counts of events."""
        stats = self.statistics.stats()
        for name in (
            "num_alloc_retries",
            "num_ooms",
            "num_sync_all_streams",
            "num_device_alloc",
            "num_device_free",
        ):
            stats[name] = self.counts[name]
        limit = getattr(self.policy, "max_split_size", None)
        stats["max_split_size"] = -1 if limit is None else limit
        return stats
