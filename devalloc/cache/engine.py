"""`Cache`: the caching allocator. One engine for all policies.

Concurrency: one lock for everything. A thread that holds it may be interrupted by a garbage
collection whose finalizers free blocks of this same engine: such a free is only noted, and done
when the interrupted call is over (`_inside`).

The short way through `malloc` and `free` is for exact fits when nothing unusual is going on;
`_attention` is set while something is: recorded uses by other streams, pending events, routes to
private pools, history, waiting threads, a policy that wants to see every call.
"""

from __future__ import annotations

import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from devalloc.cache import audit, describe, snapshot
from devalloc.cache import ledger as rows
from devalloc.cache.bfc_policy import BfcPolicy
from devalloc.cache.blocks import FREE, LIVE, Block
from devalloc.cache.graph_pools import PrivatePool, Route
from devalloc.cache.outside import Outside
from devalloc.cache.policies import make_policy
from devalloc.cache.policy import Policy
from devalloc.cache.store import PoolSet, Request
from devalloc.cache.streamed_store import StreamedStore
from devalloc.cache.streams import CudaStreams, HostStreams, Streams
from devalloc.errors import DevallocError, DoubleFree, InvalidArgument, InvalidFree, OutOfMemory
from devalloc.sizes import format_size, parse_size

if TYPE_CHECKING:
    from devalloc.sources import Source

_MAX_PLANS = 1 << 16
_WAIT_SLICE_S = 0.01


def _as_int(nbytes: object) -> int:
    if isinstance(nbytes, bool):
        raise InvalidArgument(f"a size is an int, not {nbytes!r}")
    try:
        return int(operator.index(nbytes))  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(f"a size is an int, not {nbytes!r}") from None


class Cache:
    """A host caching allocator over one source.

    Parameters
    ----------
    source : Source
        Where segments come from. Its granularity must be a multiple of 256 bytes.
    policy : str or Policy
        ``"torch"``, ``"tiny"``, ``"bfc"``, ``"auto_growth"``, or an object with options.
    limit : int or str, optional
        Most bytes reserved from the source. Checked before the source is asked.
    streams : Streams, optional
        Default: torch's CUDA streams if the source's device is one, else none.
    share_streams : bool
        A request that its own stream's free blocks cannot serve takes those of another stream,
        and its stream is made to wait for what is queued on that one.

    Raises
    ------
    InvalidArgument
        For options or a source that cannot work.

    Notes
    -----
    All methods may be called from any thread. A block is owned by the stream it was allocated on:
    it is given out again on that stream at once, on others only as C2 allows. `malloc` and `free`
    never wait for the device, unless the source does or memory runs out.
    """

    def __init__(
        self,
        source: Source,
        policy: str | Policy = "torch",
        *,
        limit: int | str | None = None,
        streams: Streams | None = None,
        share_streams: bool = False,
    ) -> None:
        if source.granularity % 256:
            raise InvalidArgument(
                f"the source's addresses are multiples of {source.granularity} B, the cache needs "
                "a multiple of 256 B"
            )
        if streams is None:
            cuda = source.device.type == "cuda"
            streams = CudaStreams(source.device) if cuda else HostStreams()
        self.source = source
        self.streams = streams
        self.policy = make_policy(policy).bind()
        bound = None if limit is None else parse_size(limit)
        self._store = StreamedStore(source, self.policy, bound, streams)
        self.policy.attach(self._store)
        self._stamps = isinstance(self.policy, BfcPolicy) and self.policy.timestamps
        self._share = share_streams
        self._store.shared = share_streams or self._stamps
        self._store.free_noted = self._free_noted
        self._lock = threading.RLock()
        self._freed = threading.Condition(self._lock)
        self._waiting = 0
        self._inside = False
        self._returned: deque[int] = deque()
        self._routes: list[Route] = []
        self._next_pool = 1
        self._plans: dict[int, tuple[int, int]] = {}
        self._attention = False
        self._watch()

    # The short way --------------------------------------------------------------------------------

    def malloc(self, nbytes: int, stream: int = 0, *, freed_before: int | None = None) -> int:
        """The address of a block of at least ``nbytes`` bytes, owned by ``stream``.

        Parameters
        ----------
        nbytes : int
            Bytes; 0 gives address 0 (a block of its own under the policy "tiny").
        stream : int
            Handle of the stream on which the block will be used.
        freed_before : int, optional
            With time stamps (policy "bfc"): the work is not in the order of ``stream``; only
            chunks freed up to this time may serve.

        Raises
        ------
        OutOfMemory
            If no step of the policy found memory; the cache is as before, less what was given
            back to the source on the way.
        InvalidArgument
            For a negative size, or what is no size.
        """
        with self._lock:
            if self._inside:
                raise DevallocError(
                    "malloc was called from a finalizer that interrupted the same cache; allocate "
                    "outside of finalizers"
                )
            self._inside = True
            try:
                if (
                    self._attention
                    or self._returned
                    or freed_before is not None
                    or type(nbytes) is not int
                ):
                    return self._malloc(_as_int(nbytes), stream, freed_before)
                store = self._store
                plan = self._plans.get(nbytes)
                if plan is None:
                    return self._malloc(nbytes, stream, freed_before)
                size, index = plan
                home = store.default.pools[index].lists.get(stream)
                if home is None:
                    return self._malloc(nbytes, stream, freed_before)
                addresses = home.by_size.get(size)
                if not addresses:
                    block = store.find(home, size, nbytes)
                    return block.address if block else self._malloc(nbytes, stream, None)
                address = addresses.pop(0)
                block = store.blocks[address]
                block.state = LIVE
                block.requested = nbytes
                log = store.ledger.rows
                if block.next is None and block.prev is None:
                    log.extend((size | rows.MALLOC | index, nbytes))
                else:
                    log.extend(
                        (size | rows.SPLIT_OUT | index, 0, size | rows.MALLOC | index, nbytes)
                    )
                if len(log) > rows.FULL:
                    store.ledger.fold()
                return address
            finally:
                self._inside = False

    def free(self, address: int) -> None:
        """Give back what `malloc` gave. Address 0 is ignored.

        Waits for nothing: a block that other streams use (`record_stream`) becomes available when
        they are done.

        Raises
        ------
        DoubleFree, InvalidFree
            If no block lives at ``address``; nothing has changed then.
        """
        with self._lock:
            if self._inside:
                self._returned.append(address)
                return
            self._inside = True
            try:
                store = self._store
                block = store.blocks.get(address)
                if block is None or block.state != LIVE:
                    if address == 0:
                        return
                    raise self._wrong_free(address)
                if self._attention:
                    self._free(block)
                    return
                before, after = block.prev, block.next
                if (before is None or before.state != FREE) and (
                    after is None or after.state != FREE
                ):
                    size, home = block.size, block.home
                    index = home.pool.index
                    block.state = FREE
                    home.add(size, address)
                    log = store.ledger.rows
                    if before is None and after is None:
                        log.extend((size | rows.FREE | index, block.requested))
                    else:
                        log.extend(
                            (size | rows.FREE | index, block.requested,
                             size | rows.SPLIT_IN | index, 0)
                        )  # fmt: skip
                    if len(log) > rows.FULL:
                        store.ledger.fold()
                else:
                    store.put_back(block)
            finally:
                self._inside = False

    # The whole way --------------------------------------------------------------------------------

    @contextmanager
    def _entered(self) -> Iterator[StreamedStore]:
        """Everything but the short way: the lock, noted frees before and after."""
        with self._lock:
            if self._inside:
                raise DevallocError("the cache was used from a finalizer that interrupted it")
            self._inside = True
            try:
                self._free_noted()
                yield self._store
                self._free_noted()
            finally:
                self._inside = False
                self._watch()

    def _watch(self) -> None:
        store = self._store
        self._attention = bool(
            store.uses
            or store.queues
            or store.deferred
            or store.privates
            or store.closed
            or self._routes
            or store.history.recording
            or self._waiting
            or self.policy.careful
        )

    def _free_noted(self) -> None:
        while self._returned:
            address = self._returned.popleft()
            block = self._store.blocks.get(address)
            if block is not None and block.state == LIVE:
                self._free(block)

    def _malloc(self, nbytes: int, stream: int, freed_before: int | None) -> int:
        """Any allocation, under the lock."""
        store = self._store
        self._free_noted()
        if freed_before is not None:
            self._stamping_policy()
        if nbytes == 0 and self.policy.zero_is_null:
            return 0
        plan = self._plans.get(nbytes) or self._plan(nbytes)
        if store.queues:
            store.process_events()
            self._watch()
        pools = self._pools_for(stream)
        size, index = plan
        home = pools.pools[index].list_of(stream)
        block = store.find(home, size, nbytes, freed_before)
        if block is None:
            request = Request(nbytes, size, index, stream, pools, freed_before)
            if self._share and not store.captures:
                block = store.find_elsewhere(request)
            if block is None:
                block = self._miss(request)
        if self._attention:
            store.history.allocated(block)
        return block.address

    def _plan(self, nbytes: int) -> tuple[int, int]:
        if nbytes < 0:
            raise InvalidArgument(f"a size cannot be negative: {nbytes} B")
        if nbytes >= 1 << 62:
            raise InvalidArgument(f"a size of {nbytes} B is beyond every address space")
        size = self.policy.round(nbytes)
        plan = size, self.policy.pool_of(size)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[nbytes] = plan
        return plan

    def _pools_for(self, stream: int) -> PoolSet:
        for route in self._routes:
            if route.accepts(stream):
                return route.pools
        return self._store.default

    def _miss(self, request: Request) -> Block:
        """The policy's steps, then waiting for other threads' frees, then the error."""
        store = self._store
        block = self.policy.miss(store, request)
        deadline = time.monotonic() + self.policy.retry_wait_s
        while block is None and not store.captures:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._await_free(min(left, _WAIT_SLICE_S))
            store.process_events()
            block = store.find_for(request) or self.policy.miss(store, request)
        if block is None:
            store.counts["num_ooms"] += 1
            store.history.out_of_memory(request, store.room())
            raise OutOfMemory(describe.failure(store, request)) from store.failure
        return block

    def _await_free(self, seconds: float) -> None:
        """Let other threads in, until one frees something or the time is over."""
        self._waiting += 1
        self._attention = True
        self._inside = False
        try:
            self._freed.wait(seconds)
        finally:
            # Another thread can be inside only while it holds the lock, which is ours again.
            self._inside = True
            self._waiting -= 1
            self._free_noted()

    def _free(self, block: Block) -> None:
        """Any free, under the lock."""
        store = self._store
        store.history.free_requested(block)
        uses = store.uses.pop(block.address, None)
        foreign = bool(store.captures) and self._pools_for(block.home.stream) is not (
            store.privates.get(block.home.pool.owner, store.default)
        )
        if uses or foreign:
            store.defer(block, uses or set())
        else:
            store.complete(block, rows.FREE)
        if self._waiting:
            self._freed.notify_all()
        self._watch()

    def _wrong_free(self, address: object) -> DevallocError:
        if isinstance(address, bool) or not isinstance(address, int):
            return InvalidArgument(f"an address is an int, not {address!r}")
        block = next(
            (
                block
                for segment in self._store.segments.values()
                if segment.address <= address < segment.address + segment.size
                for block in segment.blocks()
                if block.address <= address < block.address + block.size
            ),
            None,
        )
        if block is None:
            return InvalidFree(
                f"invalid free of {address:#x}: no segment of this cache contains it; free exactly "
                "what malloc of the same cache returned, once"
            )
        if block.state == LIVE:
            return InvalidFree(
                f"invalid free of {address:#x}: it is {address - block.address} B inside the block "
                f"of {format_size(block.size)} at {block.address:#x}; free what malloc returned"
            )
        return DoubleFree(
            f"double free of {address:#x}: no allocation lives there; it was freed before or "
            "never allocated"
        )

    # Streams --------------------------------------------------------------------------------------

    def record_stream(self, address: int, stream: int) -> None:
        """Say that ``stream`` uses the block too.

        A later free waits, without blocking anybody, for what is queued on ``stream`` until then.
        The stream that owns the block is ignored.
        """
        with self._entered() as store:
            block = self._live(address)
            if stream != block.home.stream:
                store.uses.setdefault(address, set()).add(stream)

    def _live(self, address: int) -> Block:
        block = self._store.blocks.get(address)
        if block is None or block.state != LIVE:
            raise InvalidArgument(f"no allocation of this cache lives at {address:#x}")
        return block

    def forget_stream(self, stream: int) -> None:
        """Call before ``stream`` is destroyed: what it owns goes to the default stream.

        Waits for the device.

        Raises
        ------
        InvalidArgument
            For the default stream, and during a capture.
        """
        with self._entered() as store:
            if stream == 0:
                raise InvalidArgument("the default stream cannot be forgotten")
            if store.captures:
                raise InvalidArgument("a stream cannot be forgotten during a capture")
            store.forget_stream(stream)

    def process_events(self) -> None:
        """Make freed blocks available whose streams are done; every malloc does it too."""
        with self._entered() as store:
            store.process_events()

    def set_safe_frontier(self, time: int) -> None:
        """With time stamps: all work up to before the free number ``time`` is done."""
        with self._entered():
            self._stamping_policy().set_safe_frontier(time)

    @property
    def clock(self) -> int:
        """With time stamps: how many frees there were."""
        return self._stamping_policy().clock

    def _stamping_policy(self) -> BfcPolicy:
        if not isinstance(self.policy, BfcPolicy) or not self._stamps:
            raise InvalidArgument("time stamps need the policy BfcPolicy(timestamps=True)")
        return self.policy

    # Graphs ---------------------------------------------------------------------------------------

    def private_pool(self) -> PrivatePool:
        """Pools of their own for one graph, or for several that share memory."""
        with self._entered() as store:
            owner = (0, self._next_pool)
            self._next_pool += 1
            pools = store.privates[owner] = PoolSet(owner)
            return PrivatePool(self, pools)

    @contextmanager
    def route(
        self,
        pool: PrivatePool,
        accepts: Callable[[int], bool] | None = None,
        *,
        capture: bool = False,
    ) -> Iterator[None]:
        """Within the block, allocations go to ``pool``.

        Parameters
        ----------
        accepts : callable, optional
            Called with the stream of each allocation, on its thread: whether it goes to the pool.
            Default: those of this thread.
        capture : bool
            A stream is being captured meanwhile: no event is queried or recorded, nothing is
            waited for, and nothing goes back to the source, until the last capture has ended.
        """
        if accepts is None:
            thread = threading.get_ident()

            def accepts(stream: int) -> bool:
                return threading.get_ident() == thread

        pool.retain()
        route = Route(pool.pools, accepts, capture)
        with self._entered() as store:
            self._routes.insert(0, route)
            store.captures += capture
        try:
            yield
        finally:
            with self._entered() as store:
                self._routes.remove(route)
                store.captures -= capture
                store.end_capture()
            pool.release()

    def change_uses(self, pools: PoolSet, change: int) -> None:
        """One graph more or fewer uses private pools; with none left, idle memory goes back."""
        with self._entered() as store:
            if pools.uses + change < 0 or store.privates.get(pools.owner) is not pools:
                raise InvalidArgument(f"the private pool {pools.owner} has been released before")
            pools.uses += change
            if pools.uses == 0:
                store.release_unused(pools)

    # Upkeep and reports ---------------------------------------------------------------------------

    @property
    def limit(self) -> int | None:
        """Most bytes reserved from the source, or None."""
        return self._store.limit

    def set_limit(self, limit: int | str | None) -> None:
        """Change the limit; idle memory above it goes back to the source.

        Raises
        ------
        InvalidArgument
            If what is in use does not fit into it; the limit is as before then.
        """
        bound = None if limit is None else parse_size(limit)
        with self._entered() as store:
            if bound is not None and store.taken > bound:
                store.wait_for_events()
                store.release_cached()
                if store.taken > bound:
                    raise InvalidArgument(
                        f"a limit of {format_size(bound)} is below the "
                        f"{format_size(store.taken)} that cannot be given back now; free first"
                    )
            before, store.limit = store.limit, bound
            try:
                self.policy.attach(store)
            except InvalidArgument:
                store.limit = before
                raise

    def empty_cache(self) -> int:
        """Give all idle segments back to the source; their bytes.

        Waits for streams that still use freed blocks. Does nothing during a capture.
        """
        with self._entered() as store:
            before = store.reserved
            store.wait_for_events()
            store.release_cached()
            return before - store.reserved

    def close(self) -> None:
        """Give idle segments back now, and every other one when its last block is freed."""
        with self._entered() as store:
            store.closed = True
            store.wait_for_events()
            store.release_cached()

    def on_low_memory(self, callback: Callable[[], object]) -> None:
        """Call ``callback``, which may free blocks, before the source is asked for more.

        It runs on the thread that allocates and must not allocate from this cache.
        """
        with self._entered() as store:
            store.callbacks.append(callback)

    def record_history(
        self, enabled: str | None = "all", *, max_entries: int = 100_000, stacks: bool = True
    ) -> None:
        """Switch history on or off.

        Parameters
        ----------
        enabled : {"all", "state", None}
            Events and where live blocks were allocated; the latter only; nothing.
        max_entries : int
            Events kept; the oldest go first.
        stacks : bool
            With the Python stack of each event.
        """
        with self._entered() as store:
            store.history.configure(enabled, max_entries, stacks)

    def stats(self) -> dict[str, int]:
        """Statistics under the flat names of ``torch.cuda.memory_stats``; bytes and counts."""
        with self._entered() as store:
            return store.stats()

    def reset_peaks(self) -> None:
        """Peaks start again from what is there now."""
        with self._entered() as store:
            store.ledger.reset_peaks()

    def reset_accumulated(self) -> None:
        """The ``allocated`` and ``freed`` sums and the counts start again from zero."""
        with self._entered() as store:
            store.ledger.reset_accumulated()
            store.counts.clear()

    def snapshot(self) -> dict[str, object]:
        """All segments and blocks, and the history, in the format of ``torch.cuda.memory``."""
        with self._entered() as store:
            return snapshot.take(store)

    def report(self) -> str:
        """Bins, the largest free block, fragmentation, and a picture of the occupancy."""
        with self._entered() as store:
            return describe.report(store)

    def audit(self) -> None:
        """Check C1 to C3; raises CorruptionError naming the one that does not hold."""
        with self._entered() as store:
            audit.check(store)

    @property
    def outside(self) -> Outside:
        """Segments that another allocator takes from the source, under this cache's limit."""
        return self._store.outside

    @property
    def reserved(self) -> int:
        """Bytes held from the source."""
        return self._store.reserved

    def size_of(self, address: int) -> int:
        """Usable bytes of the allocation at ``address``."""
        with self._entered():
            return self._live(address).size
