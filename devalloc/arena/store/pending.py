"""The blocks that wait: freed while streams other than the owner's still use them.

C2  A block is reused on another stream only after an event has proved that the work on it is done,
    or if the reuse is ordered behind that work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from devalloc.arena.store import statistics as rows
from devalloc.arena.store.blocks import PENDING, Block
from devalloc.arena.store.bookkeeping import Bookkeeping
from devalloc.arena.store.streams import Event
from devalloc.common.cleanup import call_for_all, call_for_finalizers


class Pending:
    """The pending blocks of a store, whose function ``complete`` makes a block free.

    Attributes
    ----------
    uses : dict
        By address, the streams other than the owner's that use a block; an entry goes when the
        events of all of them are in the queues.
    queues : dict
        By stream, the events recorded there when a block was freed, oldest first.
    waiting : dict
        By address, how many events a pending block has in the queues.
    deferred : dict
        By address, blocks freed during a capture, when no event may be recorded or queried, and
        blocks for which recording the events has failed.
    """

    __slots__ = ("_complete", "_store", "deferred", "queues", "uses", "waiting")

    def __init__(self, store: Bookkeeping, complete: Callable[[Block, int], None]) -> None:
        self._store = store
        self._complete = complete
        self.uses: dict[int, set[int]] = {}
        self.queues: dict[int, deque[tuple[Event, Block]]] = {}
        self.waiting: dict[int, int] = {}
        self.deferred: dict[int, Block] = {}

    def __bool__(self) -> bool:
        return bool(self.uses or self.queues or self.deferred)

    def defer(self, block: Block) -> None:
        """Free a block once all streams that use it have done what is queued on them now.

        If an event cannot be recorded, the error is raised and the block is live as before.
        """
        store = self._store
        # What can fail comes first, so that the block is still live if it does.
        events = [] if store.captures else self._record(block)
        self._leave(block)
        if store.captures:
            self.deferred[block.address] = block
        else:
            self._enqueue(block, events)
            if store.closed:
                self.wait()  # there may be no later call that looks at them

    def postpone(self, block: Block) -> None:
        """`defer` a block whose events could not be recorded until recording succeeds."""
        self._leave(block)
        self.deferred[block.address] = block

    def _leave(self, block: Block) -> None:
        """The user is done with the block."""
        block.state = PENDING
        store = self._store
        store.history.free_requested(block)
        log = store.statistics.rows
        log.extend((block.size | rows.FREE_REQUESTED | block.home.pool.index, 0))

    def _record(self, block: Block) -> list[tuple[int, Event]]:
        streams = sorted(self.uses.get(block.address, ()))
        return [(stream, self._store.streams.record(stream)) for stream in streams]

    def _enqueue(self, block: Block, events: list[tuple[int, Event]]) -> None:
        self.waiting[block.address] = len(events)
        for stream, event in events:
            self.queues.setdefault(stream, deque()).append((event, block))
        self.uses.pop(block.address, None)
        if not events:
            self._finish(block)

    def _finish(self, block: Block) -> None:
        self.waiting.pop(block.address, None)
        self._complete(block, rows.FREE_COMPLETED)

    def _count_down(self, block: Block) -> None:
        self.waiting[block.address] -= 1
        if self.waiting[block.address] == 0:
            self._finish(block)

    def record_deferred(self) -> None:
        """Record the events that a capture forbade; if that fails, it is tried again later."""

        def enqueue(block: Block) -> None:
            events = self._record(block)
            del self.deferred[block.address]
            self._enqueue(block, events)

        call_for_all(enqueue, list(self.deferred.values()))

    def process_events(self) -> None:
        """Free the pending blocks whose events have happened, oldest first on each stream."""
        if self._store.captures:
            return
        for stream in list(self.queues):
            queue = self.queues[stream]
            while queue and queue[0][0].query():
                self._count_down(queue.popleft()[1])
            if not queue:
                del self.queues[stream]

    def wait(self) -> None:
        """Wait for all events, unless a capture forbids it."""
        if self._store.captures:
            return
        if self.deferred:
            # The error is not from this call, which continues without these blocks.
            call_for_finalizers(Pending.record_deferred, [self])
        self.drain()

    def drain(self) -> None:
        """Wait for all events that were recorded. Not during a capture."""
        if self.queues:
            self._store.counts["num_sync_all_streams"] += 1
        for stream in list(self.queues):
            self._drain(stream)

    def _drain(self, stream: int) -> None:
        queue = self.queues[stream]
        while queue:
            queue[0][0].synchronize()
            self._count_down(queue.popleft()[1])
        del self.queues[stream]

    def forget_stream(self, stream: int) -> None:
        """Drop all uses by a stream whose work is done."""
        if stream in self.queues:
            self._drain(stream)
        for users in self.uses.values():
            users.discard(stream)
        self.uses = {address: users for address, users in self.uses.items() if users}
