"""`Core`: allocation and free under one lock, one engine for all policies.

Concurrency: one lock for everything. A thread that holds it may be interrupted by a garbage
collection whose finalizers free blocks of this same engine: such a free is only noted, and done
when the interrupted call is over (`_inside`). A call that waits, or runs other people's code, holds
no lock meanwhile, and the engine is in the state that it has between two calls (`_out`).

The short way through `malloc` and `free` is for exact fits when nothing unusual is going on.
`_attention` is set while something is: recorded uses by other streams, pending events, routes to
private pools, history, threads that are `_out`, a policy that wants to see every call. Blocks that
are parked (`devalloc.cache.parking`) are freed before anything else happens.
"""

from __future__ import annotations

import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from devalloc.cache import describe, forks
from devalloc.cache import ledger as rows
from devalloc.cache.bfc_policy import BfcPolicy
from devalloc.cache.blocks import FREE, LIVE, Block, PoolSet
from devalloc.cache.finalizers import for_finalizers
from devalloc.cache.parking import Parking
from devalloc.cache.policies import make_policy
from devalloc.cache.policy import Policy
from devalloc.cache.store import Request
from devalloc.cache.streamed_store import StreamedStore
from devalloc.cache.streams import CudaStreams, HostStreams, Streams
from devalloc.errors import DevallocError, InvalidArgument, OutOfMemory
from devalloc.owner import Owner
from devalloc.sizes import format_size, parse_size, require_count
from devalloc.sources.base import granularity_of

if TYPE_CHECKING:
    from devalloc.sources import Source

_MAX_PLANS = 1 << 16
_WAIT_SLICE_S = 0.01


class Route(NamedTuple):
    """Allocations for which ``accepts(stream)`` is true go to ``pools``."""

    pools: PoolSet
    accepts: Callable[[int], bool]
    capture: bool


def _as_int(nbytes: object) -> int:
    if isinstance(nbytes, bool):
        raise InvalidArgument(f"a size is an int, not {nbytes!r}")
    try:
        return int(operator.index(nbytes))  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(f"a size is an int, not {nbytes!r}") from None


def limit_of(limit: int | str | None) -> int | None:
    """A limit in bytes, of which a float can give a fraction."""
    if limit is None:
        return None
    nbytes = parse_size(limit)
    require_count("a limit in bytes", nbytes, 0)
    return nbytes


class Core(Owner):
    """The part of the engine that gives out addresses and takes them back.

    `Cache` joins it with the parts for graphs and reports, which enter by `_entered` and know the
    store. The options are documented there.
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
        if granularity_of(source) < 256:
            raise InvalidArgument(
                f"the granularity of {source!r} is {source.granularity} B, and a cache needs "
                "256 B or more; put an AlignedAdaptor around the source"
            )
        if streams is None:
            cuda = source.device.type == "cuda"
            streams = CudaStreams(source.device) if cuda else HostStreams()
        self.source = source
        self.streams = streams
        self.policy = make_policy(policy).bind()
        self._store = StreamedStore(source, self.policy, limit_of(limit), streams)
        self.policy.attach(self._store)
        self._stamps = isinstance(self.policy, BfcPolicy) and self.policy.timestamps
        self._share = share_streams
        self._store.shared = share_streams or self._stamps
        self._lock = threading.RLock()
        self._freed = threading.Condition(self._lock)
        self._inside = False
        # Whether noted frees must not wait for another call: a closed cache may never see one.
        self._urgent = False
        self._closing = False
        self._out: set[int] = set()
        self._holders: list[Callable[[], object]] = []
        self._returned: deque[int] = deque()
        self._routes: list[Route] = []
        self._next_pool = 1
        self._plans: dict[int, tuple[int, int]] = {}
        self._attention = False
        self.parking = Parking(self._store, self._settle)
        self._watch()
        forks.watch(self)

    # The short way --------------------------------------------------------------------------------

    def malloc(self, nbytes: int, stream: int = 0, *, freed_before: int | None = None) -> int:
        """The address of a block of at least ``nbytes`` bytes, owned by ``stream``.

        Parameters
        ----------
        nbytes : int
            Bytes; 0 gives address 0 (but under the policy "tiny" a block of its own).
        stream : int
            Handle of the stream on which the block will be used.
        freed_before : int, optional
            With time stamps (policy "bfc"): the work is not in the order of ``stream``, and only
            chunks freed up to this time may serve.

        Raises
        ------
        OutOfMemory
            If no step of the policy found memory. The cache is as before, except for segments that
            were given back to the source on the way.
        InvalidArgument
            For a negative or impossibly large size, or one that is not an int.
        DevallocError
            In a finalizer that interrupted a call of this cache, or in a callback of
            `Cache.on_low_memory` that this cache called.
        """
        with self._lock:
            if self._inside:
                raise DevallocError(
                    "malloc was called from a finalizer that interrupted the same cache; allocate "
                    "outside of finalizers"
                )
            self._inside = True
            try:
                if self.parking.stacks:
                    self._free_noted()
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

        Waits for nothing (unless the cache is closed): a block that other streams use
        (`record_stream`) becomes available when they are done.

        Raises
        ------
        DoubleFree, InvalidFree
            If no block lives at ``address``; nothing has changed then.
        InvalidArgument
            If ``address`` is not an int.
        """
        if type(address) is not int:
            describe.require_address(address)
        with self._lock:
            if self._inside:
                self._returned.append(address)
                self._urgent = self._store.closed
                return
            self._inside = True
            try:
                store = self._store
                block = store.blocks.get(address)
                if block is None or block.state != LIVE:
                    if address == 0:
                        return
                    raise describe.wrong_free(store, address)
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
                if self._urgent:
                    self._settle()

    def free_in_finalizer(self, address: int) -> None:
        """`free` for finalizers: waits for no other thread.

        That thread may be waiting for a lock of this one: the finalizer may have interrupted a call
        of another cache, or a fork.
        """
        if not self._lock.acquire(blocking=False):
            self._returned.append(address)  # for the next call
            if self._store.closed:
                self._settle()
            return
        try:
            self._returned.append(address)
            self._settle()
        finally:
            self._lock.release()

    # The whole way --------------------------------------------------------------------------------

    @contextmanager
    def _entered(self) -> Iterator[StreamedStore]:
        """Around every call but the short way: the lock, with noted frees done before and after."""
        with self._lock:
            if self._inside:
                raise DevallocError("the cache was used from a finalizer that interrupted it")
            self._inside = True
            try:
                self._free_noted()
                yield self._store
            finally:
                try:
                    self._watch()
                    self._free_noted()  # also what was parked before the flag was up
                finally:
                    self._inside = False
                    if self._urgent:
                        self._settle()

    def _settle(self) -> None:
        """Free what is parked or noted. If this thread is inside a call, the next call does it."""
        with self._lock:
            if self._inside:
                self._urgent = self._store.closed
                return
            self._urgent = True
            while self._urgent:  # once more for what finalizers note meanwhile
                self._inside = True
                try:
                    self._free_noted()
                finally:
                    self._inside = False

    def close(self) -> None:
        """Give idle segments back now, and every other segment when its last block is freed.

        May be called again: after a failure of the source it gives back what was left.
        """
        with self._lock:
            self._store.closed = True
            self._attention = self.parking.closed = True
            if self._inside:
                self._urgent = self._closing = True
                return
            with self._entered() as store:
                store.give_back()

    # Forks: see `devalloc.cache.forks` ------------------------------------------------------------

    def hold(self, seconds: float) -> bool:
        """Keep other threads out; whether that succeeded within ``seconds``."""
        return self._lock.acquire(timeout=seconds)

    def let_go(self) -> None:
        self._lock.release()

    def begin_in_child(self, held: bool) -> None:
        """After a fork: threads that were in the middle of a call, or waited, do not exist here."""
        if not held:
            self._lock = threading.RLock()
            self._inside = False
            self._store.asking = 0
        self._freed = threading.Condition(self._lock)
        self._out &= {threading.get_ident()}

    def _watch(self) -> None:
        store = self._store
        self._attention = self.parking.closed = bool(
            store.uses
            or store.queues
            or store.deferred
            or store.privates
            or store.closed
            or self._routes
            or store.history.recording
            or self._out
            or self.policy.careful
        )

    def _free_noted(self) -> None:
        self._urgent = False
        if self._returned:
            for_finalizers(self._free_if_live, self._take_returned())
        if self.parking.stacks:
            for_finalizers(self._free_if_live, self.parking.clear())
        if self._closing:
            self._closing = False
            for_finalizers(StreamedStore.give_back, [self._store])

    def _take_returned(self) -> Iterator[int]:
        while self._returned:
            yield self._returned.popleft()

    def _free_if_live(self, address: int) -> None:
        block = self._store.blocks.get(address)
        if block is not None and block.state == LIVE:
            if self._attention:
                try:
                    self._free(block)
                except BaseException:
                    if block.state == LIVE:
                        self._store.postpone(block)  # nobody is left who could free it again
                    raise
            else:
                self._store.put_back(block)  # that is all when nothing unusual is going on

    def _malloc(self, nbytes: int, stream: int, freed_before: int | None) -> int:
        """Any allocation, under the lock."""
        store = self._store
        if self._out and threading.get_ident() in self._out:
            raise DevallocError(
                "malloc was called from a callback that the same cache had called for want of "
                "memory; such a callback may free, and must not allocate there"
            )
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
            block = self._find_elsewhere(request) or self._miss(request)
        if self._attention:
            store.history.allocated(block)
        return block.address

    def _plan(self, nbytes: int) -> tuple[int, int]:
        if nbytes < 0:
            raise InvalidArgument(f"a size cannot be negative: {format_size(nbytes)}")
        if nbytes >= 1 << 62:
            raise InvalidArgument(f"a size of {format_size(nbytes)} is beyond every address space")
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
        """No free block serves: ask holders of memory, take the policy's steps, wait for events and
        for other threads' frees, and then raise the error."""
        store = self._store
        try:
            block = (
                self._ask_holders(request)
                or self.policy.miss(store, request)
                or self._find_late(request)
                or self._wait_for_frees(request)
            )
            if block is None:
                store.counts["num_ooms"] += 1
                store.history.out_of_memory(request, store.room())
                raise OutOfMemory(describe.failure(store, request)) from store.failure
            return block
        finally:
            store.failure = None  # its traceback refers to everything that the callers have

    def _ask_holders(self, request: Request) -> Block | None:
        """Run the callbacks of `Cache.on_low_memory`, which may free memory, and search again."""
        if not self._holders:
            return None
        with self._let_others_in(request):
            # As `Condition.wait` does: Ctrl-C would end `acquire`, and the call go on unlocked.
            held = self._lock._release_save()  # type: ignore[attr-defined]
            try:
                for callback in tuple(self._holders):
                    callback()
            finally:
                self._lock._acquire_restore(held)  # type: ignore[attr-defined]
        return self._find(request)

    def _wait_for_frees(self, request: Request) -> Block | None:
        """For a policy that waits: take what another thread frees, or repeat the policy's steps."""
        store = self._store
        deadline = time.monotonic() + self.policy.retry_wait_s
        while not store.captures and (left := deadline - time.monotonic()) > 0:
            with self._let_others_in(request):
                self._freed.wait(min(left, _WAIT_SLICE_S))
            store.wait_for_events()
            block = self._find(request) or self.policy.miss(store, request)
            if block is not None:
                return block
        return None

    def _find_late(self, request: Request) -> Block | None:
        """Take what has become free while the policy tried, or becomes free by waiting for events.

        If something did but does not serve as it is, take the policy's steps once more.
        """
        store = self._store
        if store.captures:
            return None
        changed = bool(store.queues or store.deferred or self._returned or self.parking.stacks)
        store.wait_for_events()
        self._free_noted()
        return self._find(request) or (self.policy.miss(store, request) if changed else None)

    def _find(self, request: Request) -> Block | None:
        return self._store.find_for(request) or self._find_elsewhere(request)

    def _find_elsewhere(self, request: Request) -> Block | None:
        """A block of another stream, if streams are shared and stream order is enough."""
        if not self._share or self._store.captures or request.freed_before is not None:
            return None
        return self._store.find_elsewhere(request)

    @contextmanager
    def _let_others_in(self, request: Request) -> Iterator[None]:
        """In the middle of a call, be as between two calls, so that the lock can be released."""
        thread = threading.get_ident()
        self._out.add(thread)
        self._attention = self.parking.closed = True
        try:
            self._free_noted()
            self._inside = False
            yield
        finally:
            # Another thread can be inside only while it holds the lock, and we have it again.
            self._inside = True
            self._out.discard(thread)
        self._free_noted()
        request.pools = self._pools_for(request.stream)  # others may have ended a route

    def _free(self, block: Block) -> None:
        """Any free, under the lock."""
        store = self._store
        foreign = bool(store.captures) and self._pools_for(block.home.stream) is not (
            store.privates.get(block.home.pool.owner, store.default)
        )
        try:
            if foreign or block.address in store.uses:
                store.defer(block)
            else:
                store.history.free_requested(block)
                store.complete(block, rows.FREE)
        finally:
            if self._out:
                self._freed.notify_all()
            self._watch()

    def _live(self, address: int) -> Block:
        describe.require_address(address)
        block = self._store.blocks.get(address)
        if block is None or block.state != LIVE:
            raise InvalidArgument(f"no allocation of this cache lives at {address:#x}")
        return block

    def _stamping_policy(self) -> BfcPolicy:
        if not isinstance(self.policy, BfcPolicy) or not self._stamps:
            raise InvalidArgument("time stamps need the policy BfcPolicy(timestamps=True)")
        return self.policy
