"""The store with streams: deferred frees, captures, and history.

C2  A block is reused on another stream only after an event has proved that the work on it is done,
    or if the reuse is ordered behind that work.

``uses``      address -> streams other than the owner's that use a live block
``queues``    stream -> events recorded there when a block was freed, oldest first; a block is
              pending while it has events, and ``waiting`` counts them
``deferred``  blocks freed during a capture, when no event may be recorded or queried, and blocks
              for which recording the events has failed
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from devalloc.cache import ledger as rows
from devalloc.cache.bfc_policy import BfcPolicy
from devalloc.cache.blocks import FREE, PENDING, Block, Segment
from devalloc.cache.each import for_each
from devalloc.cache.finalizers import for_finalizers
from devalloc.cache.history import History
from devalloc.cache.policy import Policy
from devalloc.cache.store import Store
from devalloc.cache.streams import Event, Streams

if TYPE_CHECKING:
    from devalloc.sources import Source


class StreamedStore(Store):
    """A store whose blocks are used by streams."""

    def __init__(self, source: Source, policy: Policy, limit: int | None, streams: Streams) -> None:
        super().__init__(source, policy, limit)
        self.streams = streams
        self.history = History()
        self.uses: dict[int, set[int]] = {}
        self.queues: dict[int, deque[tuple[Event, Block]]] = {}
        self.waiting: dict[int, int] = {}
        self.deferred: list[tuple[Block, set[int]]] = []
        self.captures = 0
        self.closed = False
        self._stamping = policy if isinstance(policy, BfcPolicy) and policy.timestamps else None

    # What the plain store leaves open -------------------------------------------------------------

    def around_source(self) -> AbstractContextManager[None]:
        return self.streams.relaxed_capture() if self.captures else nullcontext()

    def may_release(self) -> bool:
        return not self.captures

    def order(self, stream: int, behind: int) -> None:
        self.streams.wait(stream, self.streams.record(behind))

    def before_release(self, segment: Segment) -> None:
        if self.stream_ordered and self.shared:
            others = {s for pool in self.all_pools() for s in pool.lists} - {segment.stream}
            for stream in sorted(others):
                self.order(segment.stream, stream)

    def segment_changed(self, segment: Segment, action: str) -> None:
        self.history.segment_changed(segment, action)

    # Freeing --------------------------------------------------------------------------------------

    def complete(self, block: Block, code: int) -> None:
        """Make a block free that nothing uses any more, except perhaps its owner's stream."""
        self.history.free_completed(block)
        if self._stamping is not None:
            self._stamping.stamp(self, block)
        block = self.put_back(block, code)
        pools = self.privates.get(block.home.pool.owner)
        if pools is not None and pools.uses == 0:
            self.release_unused(pools)
        elif pools is None and self.closed and self.may_release() and self.unite(block.segment):
            self.release(block.segment)
        elif self.policy.careful:
            self.policy.freed(self, block)

    def defer(self, block: Block) -> None:
        """Make a block free once all streams that use it have done what is queued on them now."""
        streams = self.uses.get(block.address, set())
        # What can fail comes first, so that the block is still live if it does.
        events = [] if self.captures else self._record(streams)
        self.uses.pop(block.address, None)
        self.history.free_requested(block)
        self.ledger.rows.extend((block.size | rows.FREE_REQUESTED | block.home.pool.index, 0))
        block.state = PENDING
        if self.captures:
            self.deferred.append((block, streams))
        else:
            self._enqueue(block, events)
            if self.closed:
                self.wait_for_events()  # there may be no later call that looks at them

    def postpone(self, block: Block) -> None:
        """`defer` a block whose events could not be recorded until recording succeeds."""
        self.history.free_requested(block)
        self.ledger.rows.extend((block.size | rows.FREE_REQUESTED | block.home.pool.index, 0))
        block.state = PENDING
        self.deferred.append((block, self.uses.pop(block.address, set())))

    def _record(self, streams: set[int]) -> list[tuple[int, Event]]:
        return [(stream, self.streams.record(stream)) for stream in sorted(streams)]

    def _enqueue(self, block: Block, events: list[tuple[int, Event]]) -> None:
        self.waiting[block.address] = len(events)
        for stream, event in events:
            self.queues.setdefault(stream, deque()).append((event, block))
        if not events:
            self._finish(block)

    def _finish(self, block: Block) -> None:
        del self.waiting[block.address]
        self.complete(block, rows.FREE_COMPLETED)

    def _count_down(self, block: Block) -> None:
        self.waiting[block.address] -= 1
        if self.waiting[block.address] == 0:
            self._finish(block)

    def give_back(self) -> None:
        """Wait for all events and give back everything idle; does nothing during a capture."""
        steps = () if self.captures else (self._record_deferred, self._drain_all)
        for_each(lambda step: step(), (*steps, self.release_cached))

    def end_capture(self) -> None:
        """Deal with what was freed during captures, once the last capture has ended."""
        if not self.captures:
            try:
                self._record_deferred()
            finally:
                self._release_late()

    def _release_late(self) -> None:
        """Give back the unused memory that a capture kept from going back."""
        if self.closed:
            self.give_back()
        else:
            unused = [pools for pools in self.privates.values() if pools.uses == 0]
            for_each(self.release_unused, unused)

    def _record_deferred(self) -> None:
        """Record the events that a capture forbade; if that fails, it is tried again later."""
        deferred, self.deferred = self.deferred, []

        def enqueue(entry: tuple[Block, set[int]]) -> None:
            block, streams = entry
            try:
                events = self._record(streams)
            except BaseException:
                self.deferred.append(entry)
                raise
            self._enqueue(block, events)

        for_each(enqueue, deferred)

    def process_events(self) -> None:
        """Free the pending blocks whose events have happened, oldest first on each stream."""
        if self.captures:
            return
        for stream in list(self.queues):
            queue = self.queues[stream]
            while queue and queue[0][0].query():
                self._count_down(queue.popleft()[1])
            if not queue:
                del self.queues[stream]

    def wait_for_events(self) -> None:
        """Wait for all events, unless a capture forbids it."""
        if self.captures:
            return
        if self.deferred:
            # An error is not that of this call, which goes on with what there is.
            for_finalizers(StreamedStore._record_deferred, [self])
        self._drain_all()

    def _drain_all(self) -> None:
        if self.queues:
            self.counts["num_sync_all_streams"] += 1
        for stream in list(self.queues):
            self._drain(stream)

    def _drain(self, stream: int) -> None:
        queue = self.queues[stream]
        while queue:
            queue[0][0].synchronize()
            self._count_down(queue.popleft()[1])
        del self.queues[stream]

    def forget_stream(self, stream: int) -> None:
        """Wait for the device and give everything that ``stream`` owns to the default stream."""
        self.streams.synchronize()
        if stream in self.queues:
            self._drain(stream)
        for users in (*self.uses.values(), *(users for _, users in self.deferred)):
            users.discard(stream)
        self.uses = {address: users for address, users in self.uses.items() if users}
        for segment in self.segments.values():
            if segment.stream == stream:
                segment.stream = 0
            for block in segment.blocks():
                if block.home.stream != stream:
                    continue
                home = block.home.pool.list_of(0)
                if block.state == FREE:
                    block.home.remove(block.size, block.address)
                    home.add(block.size, block.address)
                block.home = home
        for pool in self.all_pools():
            if pool.lists.pop(stream, None) is not None:
                for address in [address for _, address in pool.list_of(0)]:
                    if address in self.blocks:
                        self.settle(self.blocks[address], ignore_stamps=False)

    # Reports --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """The ledger's numbers and the counts of events."""
        stats = self.ledger.stats()
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
