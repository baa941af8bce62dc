"""Private pools: memory for CUDA graphs and for regions, and which allocations go there.

A captured graph reads and writes fixed addresses whenever it is replayed. Memory that is allocated
during its capture comes from pools of its own, so that nothing else is ever given those addresses
while the graph may run. The pools count the graphs that use them.

There are four combinations. A block that is allocated and freed inside the capture is reused in the
capture. One that is allocated inside and freed outside returns to the private pool. One that is
allocated outside and freed inside is held until the capture has ended, because the captured work
may still refer to it. If both happen outside, the graph is not concerned.

The segments of a region's pools have no memory while the region is paused. While that memory is
being taken away or given back, and while it is away, nothing is allocated there (`PoolSet.refusal`
says why). Frees are bookkeeping, as always. Segments that sleep do not count against the limit
(`Store.asleep`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from devalloc.arena.policies.policy import MIN_BLOCK
from devalloc.arena.store.blocks import FREE, LIVE, Block, PoolSet, Segment
from devalloc.arena.store.store import Store
from devalloc.common.arguments import require_callable
from devalloc.errors import InvalidArgument, OutOfMemory
from devalloc.sizes import format_size, round_up

if TYPE_CHECKING:
    from devalloc.arena.cache.entry import Entry


class PrivatePool:
    """Memory that graphs share, and a count of its uses. Made by `Cache.private_pool`.

    The count begins with one use. Call `retain` for each graph that is captured into the pool, and
    `release` when the graph is destroyed. After the last release idle memory goes back to the
    source at once, and every other segment when the last allocation in it is freed. As a context
    manager the pool releases the use it was made with.

    A pool that is dropped without its last release cannot be released any more: it gives a
    ResourceWarning, and the memory goes back as after the last release.
    """

    def __init__(self, private: PrivatePools, pools: PoolSet) -> None:
        self.private = private
        self.pools = pools

    @property
    def id(self) -> tuple[int, int]:
        """The pool's ``segment_pool_id`` in snapshots."""
        return self.pools.owner

    @property
    def uses(self) -> int:
        return self.pools.uses

    def retain(self) -> None:
        """One graph more; InvalidArgument after the last release."""
        self.private.change_uses(self.pools, 1)

    def release(self) -> None:
        """One graph fewer; InvalidArgument after the last one."""
        self.private.change_uses(self.pools, -1)

    def __enter__(self) -> PrivatePool:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        pools = getattr(self, "pools", None)
        if pools is not None and pools.uses > 0:
            # (A region's is dropped so at exit, if its arena was not closed.)
            if not pools.of_region:
                warnings.warn(
                    f"a private pool was dropped with {pools.uses} uses left; release it once for "
                    "each graph that used it",
                    ResourceWarning,
                    source=self,
                    stacklevel=2,
                )
            self.private.abandon(pools)


class Route:
    """Sends allocations to some pools: those of one thread, or those that a filter accepts.

    It is in use, and counts as a use of the pool, from ``begun`` to ``ended``. Then it accepts
    nothing, and the next call of the cache removes it.
    """

    __slots__ = ("_filter", "_thread", "begun", "capture", "ended", "pools")

    def __init__(
        self, pools: PoolSet, accepts: Callable[[int], bool] | None, capture: bool
    ) -> None:
        self.pools = pools
        self.capture = capture
        self.begun = False
        self.ended = False
        self._filter = accepts
        self._thread = threading.get_ident()

    def accepts(self, stream: int) -> bool:
        """Whether an allocation of this thread on ``stream`` goes to the pool.

        Runs the user's filter, so it must not be called under the lock.
        """
        if self.ended:
            return False
        if self._filter is not None:
            return bool(self._filter(stream))
        return threading.get_ident() == self._thread


class LiveBlock(NamedTuple):
    """What is in use of a live block, and the rule that `set_rule` gave it ("" if none)."""

    address: int
    nbytes: int
    rule: str


def _used(block: Block) -> int:
    """The bytes that a live block's owner may have written.

    Up to a multiple of `MIN_BLOCK`, so that neighbours stay neighbours and are copied as one piece.
    Only the holder of a claim knows the size of the block, and may use all of it.
    """
    return block.size if block.claim else min(round_up(block.requested, MIN_BLOCK), block.size)


class Content(NamedTuple):
    """A segment, its live blocks in the order of addresses, and the streams that may use it."""

    address: int
    nbytes: int
    blocks: list[LiveBlock]
    streams: set[int]


class PrivatePools:
    """The private pools of one cache, and the routes to them.

    What changes anything goes through `Cache.call`, and so is a call of the cache like any other.

    Attributes
    ----------
    routes : tuple of Route
        The newest first. Replaced as a whole, so that it can be read without the lock.
    """

    __slots__ = ("_cache", "_next_pool", "_store", "routes")

    def __init__(self, cache: Entry, store: Store) -> None:
        self.routes: tuple[Route, ...] = ()
        self._cache = cache
        self._store = store
        self._next_pool = 1

    # Which pools an allocation or a free belongs to -----------------------------------------------

    def pools_for(self, stream: int) -> PoolSet:
        """The pools that this thread's allocations on ``stream`` come from. Not under the lock."""
        for route in self.routes:
            if route.accepts(stream):
                return route.pools
        return self._store.default

    def pools_of(self, address: int) -> PoolSet | None:
        """`pools_for` the stream that owns a block, which is live and this thread's to free.

        None if that is not known now: in the middle of a call, where no filter may run.
        """
        block = self._store.blocks.get(address)
        if block is None or self._cache.lock._is_owned():  # type: ignore[attr-defined]
            return None
        return self.pools_for(block.home.stream)

    def pools_here(self) -> PoolSet:
        """The pools that this thread's allocations on the current stream come from."""
        return self.pools_for(self._store.streams.current())

    def pools_at(self, address: int) -> PoolSet | None:
        """The private pools of the block at an address; None if there is none."""
        block = self._store.blocks.get(address)
        return None if block is None else self._store.privates.get(block.segment.pool.owner)

    def still_there(self, pools: PoolSet | None) -> PoolSet:
        """These pools, or the default ones if they have been released since."""
        store = self._store
        if pools is None or store.privates.get(pools.owner) is not pools:
            return store.default
        return pools

    def forget_ended_routes(self) -> None:
        """Under the lock, by every call that sees whether the fast path suffices."""
        routes = tuple(route for route in self.routes if not route.ended)
        captures = sum(route.capture for route in routes)
        self.routes, self._store.captures = routes, captures

    # Captures -------------------------------------------------------------------------------------

    def capturing_here(self) -> bool:
        """Whether this thread's allocations go to a pool for a capture."""
        stream = self._store.streams.current()
        return next((route.capture for route in self.routes if route.accepts(stream)), False)

    @property
    def capturing(self) -> bool:
        """Whether a capture is under way, of any thread."""
        return bool(self._store.captures)

    # Making, using and releasing ------------------------------------------------------------------

    def make(self) -> PrivatePool:
        """See `Cache.private_pool`."""
        return self._cache.call(self._make)

    def _make(self) -> PrivatePool:
        owner = (0, self._next_pool)
        self._next_pool += 1
        pools = PoolSet(owner)
        pool = PrivatePool(self, pools)
        self._store.privates[owner] = pools
        return pool

    @contextmanager
    def route(
        self, pool: PrivatePool | None, accepts: Callable[[int], bool] | None, capture: bool
    ) -> Iterator[None]:
        """See `Cache.route`."""
        if pool is not None and not (isinstance(pool, PrivatePool) and pool.private is self):
            raise InvalidArgument(
                f"a pool is one that this cache's private_pool (or its arena's graph_pool) made, "
                f"not {pool!r}"
            )
        if accepts is not None:
            require_callable("accepts is a function of a stream, or None", accepts)
        route = Route(self._store.default if pool is None else pool.pools, accepts, capture)
        try:
            self._cache.call(self._begin_route, route)
            yield
        finally:
            if route.begun:
                # No call in these lines: an interruption comes before or after all of them.
                route.ended = True
                route.pools.uses -= 1
                self._cache.call(self._end_routes)

    def _begin_route(self, route: Route) -> None:
        pools = route.pools
        if pools is not self._store.default:
            self._require_used(pools)
        routes = (route, *self.routes)
        route.begun = True
        pools.uses += 1
        self.routes = routes

    def _end_routes(self) -> None:
        self.forget_ended_routes()
        store = self._store
        try:
            if not store.captures:
                try:
                    store.pending.record_deferred()
                finally:
                    if store.closed:
                        store.release_everything()
        finally:
            store.release_all_unused()

    def _require_used(self, pools: PoolSet) -> None:
        if pools.uses == 0 or self._store.privates.get(pools.owner) is not pools:
            raise InvalidArgument(f"the private pool {pools.owner} has been released before")

    def change_uses(self, pools: PoolSet, change: int) -> None:
        """Count one graph more or fewer; when none is left, idle memory goes to the source."""
        self._cache.call(self._change_uses, pools, change)

    def _change_uses(self, pools: PoolSet, change: int) -> None:
        self._require_used(pools)
        pools.uses += change
        if pools.uses == 0:
            self._store.release_unused(pools)

    def abandon(self, pools: PoolSet) -> None:
        """For finalizers: the pools can no longer be released or used."""
        pools.uses = 0
        self._cache.free_in_finalizer(0)

    # Regions: pools whose segments have no memory for a while -------------------------------------

    def refusal_at(self, address: int) -> str:
        """Why the memory at an address cannot be used now; empty if it can."""
        pools = self.pools_at(address)
        return "" if pools is None else pools.refusal

    def set_rule(self, address: int, rule: str, claim: int | None = None) -> None:
        """Set what a pause does with a live block of a private pool, until it is freed.

        Raises InvalidArgument if there is no such block.
        """
        self._cache.call(self._set_rule, address, rule, claim)

    def _set_rule(self, address: int, rule: str, claim: int | None) -> None:
        block = self._cache.require_live(address, claim)
        self._store.privates[block.segment.pool.owner].rules[block.address] = rule

    def bytes_of(self, pools: PoolSet) -> int:
        """Bytes of the segments of private pools."""
        return self._cache.call(lambda: pools.nbytes)

    def contents_of(self, pools: PoolSet) -> list[Content]:
        """The live blocks of private pools."""
        return self._cache.call(self._contents, pools)

    def begin_change(self, pools: PoolSet, refusal: str, *, keep_idle: bool) -> list[Content]:
        """Refuse allocations from private pools, with this text, and return the live blocks there.

        Idle segments go back to the source, unless ``keep_idle``: graphs use them when they are
        replayed. Raises InvalidArgument during a capture.
        """
        return self._cache.call(self._begin_change, pools, refusal, keep_idle)

    def _begin_change(self, pools: PoolSet, refusal: str, keep_idle: bool) -> list[Content]:
        store = self._store
        store.pending.process_events()
        if store.captures:
            raise InvalidArgument("no region can be paused or resumed during a capture")
        before, pools.refusal = pools.refusal, refusal
        try:
            if not keep_idle:
                store.release_idle(pools)
            return self._contents(pools)
        except BaseException:
            pools.refusal = before
            raise

    def _segments_of(self, pools: PoolSet) -> list[Segment]:
        return [at for at in self._store.segments.values() if at.pool in pools.pools]

    def _contents(self, pools: PoolSet) -> list[Content]:
        return [self._content(pools, segment) for segment in self._segments_of(pools)]

    def _content(self, pools: PoolSet, segment: Segment) -> Content:
        blocks: list[LiveBlock] = []
        streams = {segment.stream}
        for block in segment.blocks():
            if block.state == FREE:
                continue
            streams.add(block.home.stream)
            streams |= self._store.pending.uses.get(block.address, set())
            if block.state == LIVE:  # or it is freed, and needed only until its streams are done
                rule = pools.rules.get(block.address, "")
                blocks.append(LiveBlock(block.address, _used(block), rule))
        return Content(segment.address, segment.size, blocks, streams)

    def mark_asleep(self, pools: PoolSet, asleep: bool, refusal: str) -> None:
        """Set whether the segments of private pools have memory, and why allocations there fail.

        Raises OutOfMemory if the limit forbids that they have it; nothing has changed then.
        """
        self._cache.call(self._mark_asleep, pools, asleep, refusal)

    def _mark_asleep(self, pools: PoolSet, asleep: bool, refusal: str) -> None:
        store = self._store
        changing = [at for at in self._segments_of(pools) if at.asleep != asleep]
        nbytes = sum(segment.size for segment in changing)
        if not asleep and store.limit is not None and store.taken + nbytes > store.limit:
            raise OutOfMemory(
                f"{format_size(nbytes)} cannot be resumed: {format_size(store.taken)} of a limit "
                f"of {format_size(store.limit)} are taken; free memory and call empty_cache(), or "
                "raise the limit"
            )
        for segment in changing:
            segment.asleep = asleep
        store.asleep = sum(at.size for at in store.segments.values() if at.asleep)
        pools.refusal = refusal
