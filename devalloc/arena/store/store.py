"""The state of a cache and the steps that policies are made of. Knows no lock and no thread.

`Bookkeeping` has the blocks and invariants C1 and C3; here are the steps that find blocks, complete
frees, and take segments from the source and give them back.

Every step preserves both even when it raises one of our errors: the source is called first, and its
result is entered afterwards. For exceptions that come in between (Ctrl-C) see docs/design/host.md:
everything that a step does to segments, chains and states is done by stores without a call between
them, and everything else can be computed from these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from devalloc.arena.store import statistics as rows
from devalloc.arena.store.blocks import FREE, Block, FreeList, Pool, PoolSet, Segment
from devalloc.arena.store.bookkeeping import Bookkeeping, SplitRule
from devalloc.arena.store.expandable import Expandable
from devalloc.arena.store.pending import Pending
from devalloc.arena.store.request import Request
from devalloc.common.cleanup import call_for_all
from devalloc.errors import DevallocError, OutOfMemory
from devalloc.sources.source import granularity_of

if TYPE_CHECKING:
    from devalloc.arena.store.streams import Streams
    from devalloc.sources import Source


class StorePolicy(SplitRule, Protocol):
    """What a store asks of its policy; `devalloc.arena.policies.policy.Policy` documents it."""

    name: ClassVar[str]
    expandable_segments: bool

    @property
    def best_fit(self) -> bool: ...

    def find(
        self, store: Store, home: FreeList, size: int, freed_before: int | None
    ) -> int | None: ...

    @property
    def stamps_frees(self) -> bool: ...

    def stamp(self, store: Store, block: Block) -> None: ...

    @property
    def careful(self) -> bool: ...

    def freed(self, store: Store, block: Block) -> None: ...

    def options(self) -> dict[str, object]: ...


class Store(Bookkeeping):
    """Bookkeeping over one source and under one policy, and the steps of both."""

    def __init__(
        self,
        source: Source,
        policy: StorePolicy,
        limit: int | None,
        streams: Streams,
        shared: bool,
    ) -> None:
        statistics = rows.Statistics(getattr(policy, "max_split_size", None))
        super().__init__(source, policy, limit, streams, shared, statistics)
        self.policy = policy
        self.pending = Pending(self, self.complete)
        self._best_fit = policy.best_fit
        capabilities = getattr(source, "capabilities", None)
        self._stream_ordered = bool(getattr(capabilities, "stream_ordered", False))
        self._granularity = granularity_of(source)
        self.expandable = Expandable(self, self.release) if policy.expandable_segments else None

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
                self.move(self.blocks[address], stream)
            for address in addresses:
                if address in self.blocks:
                    # A merged block keeps the later stamp.
                    self.settle(self.blocks[address], ignore_stamps=True)
        return moved

    # Freeing --------------------------------------------------------------------------------------

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

    def put_back_held(self, address: int) -> None:
        """Make a block free whose free is in the statistics already, as FREE or FREE_PART."""
        block = self.blocks[address]
        block.state = FREE
        block.home.add(block.size, block.address)
        self.settle(block, ignore_stamps=False)

    def wait_for_events(self) -> None:
        """Wait for the streams that still use freed blocks, so that these become free."""
        self.pending.wait()

    # Segments -------------------------------------------------------------------------------------

    def room(self) -> int | None:
        """Bytes that the limit still allows to take from the source; None without a limit.

        Whole multiples of the source's granularity.
        """
        return None if self.limit is None else (self.limit - self.taken) & -self._granularity

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

    # Statistics -----------------------------------------------------------------------------------

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
