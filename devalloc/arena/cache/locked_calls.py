"""The lock of a cache, malloc and free, and what every entry point does before and after.

Concurrency: one lock for everything. A thread that holds it may be interrupted by a garbage
collection whose finalizers free blocks of this same cache: such a free is only noted, and done when
the interrupted call is over (`_inside`). A call that waits, or runs a user's callback, holds no
lock meanwhile, and the cache is in the state that it has between two calls (`_out`).

Interruptions: an exception that is not one of ours may have come in the middle of a step. It leaves
`_torn` set, and what is derived is computed again before anything else (docs/design/host.md).

The fast path through `malloc` and `free` is for exact fits in the usual state.
`_attention` is set in any other state: recorded uses by other streams, pending events, routes to
private pools, history, a front, threads that are `_out`, a policy that must see every call.
Blocks that wait for reuse (`devalloc.arena.cache.reuse`) are freed before anything else happens.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from devalloc.arena.cache import explain
from devalloc.arena.cache.front import Loan
from devalloc.arena.cache.private_pools import PrivatePools
from devalloc.arena.cache.reuse import Reuse
from devalloc.arena.policies.policy import Policy
from devalloc.arena.store import audit
from devalloc.arena.store import statistics as rows
from devalloc.arena.store.blocks import FREE, LIVE, Block, PoolSet
from devalloc.arena.store.request import Request
from devalloc.arena.store.store import Store
from devalloc.arena.store.streams import Streams
from devalloc.common.cleanup import call_for_finalizers
from devalloc.common.owner import Owner
from devalloc.errors import DevallocError, InvalidArgument, OutOfMemory
from devalloc.sizes import format_size

if TYPE_CHECKING:
    from devalloc.sources import Source

_MAX_PLANS = 1 << 16
_WAIT_SLICE_S = 0.01
_MAX_BYTES = 1 << 62

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound="LockedCalls")

_release_lock = operator.methodcaller("_release_save")

Freed = tuple[int, int, "PoolSet | None"]
"""A free that was noted: address, claim, and the pools to which its thread allocates."""


def _as_int(nbytes: object) -> int:
    if isinstance(nbytes, bool):
        raise InvalidArgument(f"a size is an int, not {nbytes!r}")
    try:
        return int(operator.index(nbytes))  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(f"a size is an int, not {nbytes!r}") from None


def _guarded(
    begin: Callable[[LockedCalls], None], method: Callable[Concatenate[C, P], T]
) -> Callable[Concatenate[C, P], T]:
    """Every call of the cache but `malloc` and `free`: with the lock, ``begin`` before, and what is
    noted meanwhile after."""

    @wraps(method)
    def call(cache: C, *arguments: P.args, **options: P.kwargs) -> T:
        with cache._lock:
            if cache._inside:
                raise DevallocError("the cache was used from a finalizer that interrupted it")
            cache._inside = True
            # Cleared again by `_watch`, if the fast path suffices.
            cache._attention = cache.reuse.closed = True
            try:
                begin(cache)
                return method(cache, *arguments, **options)
            except DevallocError:
                raise
            except BaseException:
                cache._torn = True
                raise
            finally:
                cache._inside = False
                cache._settle(watch=True)

    return call


def _bring_up_to_date(cache: LockedCalls) -> None:
    cache._begin()


def _leave_to_front(cache: LockedCalls) -> None:
    if cache._torn:
        cache._begin()
    cache._free_noted()


def entry_point(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """An entry point: the default pools are the cache's, and what was noted is freed."""
    return _guarded(_bring_up_to_date, method)


def _beside_front(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Leaves the default pools to the front, if it has them and nothing was noted."""
    return _guarded(_leave_to_front, method)


class LockedCalls(Owner):
    """malloc and free of a cache, and how all other calls take its lock."""

    def __init__(
        self,
        source: Source,
        policy: Policy,
        limit: int | None,
        streams: Streams,
        share_streams: bool,
    ) -> None:
        self.source = source
        self.policy = policy
        self._share = share_streams
        shared = share_streams or self.policy.stamps_frees
        self._store = Store(source, self.policy, limit, streams, shared)
        self.policy.attach(self._store)
        self._lock = threading.RLock()
        self._inside = False
        self._torn = False
        # Whether noted frees must not wait for another call: a closed cache may never see one.
        self._urgent = False
        self._closing = False
        self._out: set[int] = set()
        # Locked; unlocked to wake one thread that waits for a free.
        self._wake = threading.Lock()
        self._wake.acquire()
        self._holders: list[Callable[[], object]] = []
        self._returned: deque[Freed] = deque()
        self.private = PrivatePools(self, self._store)
        self._plans: dict[int, tuple[int, int]] = {}
        self._attention = False
        self.loan = Loan(self, self._store)
        self.reuse = Reuse(self._store, self._settle)
        self._watch()

    # The fast path --------------------------------------------------------------------------------

    def malloc(
        self, nbytes: int, stream: int = 0, *, freed_before: int | None = None, claim: int = 0
    ) -> int:
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
        claim : int
            What `free` must be given for this block: a number that is never used twice, or 0.

        Raises
        ------
        OutOfMemory
            If no step of the policy found memory. The cache is as before, except for segments that
            were given back to the source on the way.
        InvalidArgument
            For a negative size, or one that is not an int; and if the cache is closed.
        DevallocError
            In a finalizer that interrupted a call of this cache, or in a callback of
            `Cache.on_low_memory` that this cache called.
        """
        address = 0
        try:
            routed = self.private.pools_for(stream) if self.private.routes else None
            with self._lock:
                if self._inside:
                    raise DevallocError(
                        "malloc was called from a finalizer that interrupted the same cache; "
                        "allocate outside of finalizers"
                    )
                self._inside = True
                try:
                    if self.reuse.stacks:
                        self._free_noted()
                    plan = self._plans.get(nbytes) if type(nbytes) is int else None
                    if self._attention or self._returned or freed_before is not None or not plan:
                        block = self._malloc(nbytes, stream, freed_before, routed)
                    else:
                        store = self._store
                        size, index = plan
                        home = store.default.pools[index].lists.get(stream)
                        addresses = None if home is None else home.by_size.get(size)
                        if home is not None and addresses:
                            block = store.blocks[addresses.pop(0)]
                            block.requested = nbytes
                            log = store.statistics.rows
                            if block.next is None and block.prev is None:
                                home.pool.touched.add(block.segment)
                                log.extend((size | rows.MALLOC | index, nbytes))
                            else:
                                log.extend((size | rows.MALLOC_PART | index, nbytes))
                            if len(log) > rows.FULL:
                                store.statistics.fold()
                        else:
                            found = None if home is None else store.find(home, size, nbytes)
                            block = found or self._malloc(nbytes, stream, None, None)
                    if block is None:
                        return 0
                    # No call from here on: what comes in between comes before or after all of this.
                    block.claim = claim
                    block.state = LIVE
                    address = block.address
                    return address
                except DevallocError:
                    raise
                except BaseException:
                    self._torn = self._attention = True
                    raise
                finally:
                    self._inside = False
                    if self._torn or self._urgent:
                        self._settle()
        except BaseException:
            if address:  # the caller will not receive it
                self._returned.append((address, claim, None))
                self._settle()
            raise

    def free(self, address: int, claim: int = 0) -> None:
        """Give back what `malloc` gave. Address 0 is ignored.

        Waits for nothing (unless the cache is closed): a block that other streams use
        (`record_stream`) becomes available when they are done.

        Raises
        ------
        DoubleFree, InvalidFree
            If there is no live block at ``address`` under this claim; nothing has changed then.
        InvalidArgument
            If ``address`` is not an int.
        """
        if type(address) is not int:
            explain.require_address(address)
        routed = self.private.pools_of(address) if self.private.routes else None
        with self._lock:
            if self._inside:
                self._returned.append((address, claim, routed))
                self._urgent = self._store.closed
                return
            self._inside = True
            try:
                if self._attention:
                    self._begin()
                store = self._store
                block = store.blocks.get(address)
                if block is None or block.state != LIVE or block.claim != claim:
                    if address == 0:
                        return
                    raise explain.wrong_free(store, address, claim)
                if self._attention:
                    self._free(block, routed)
                    return
                before, after = block.prev, block.next
                if (before is None or before.state != FREE) and (
                    after is None or after.state != FREE
                ):
                    size, home = block.size, block.home
                    index = home.pool.index
                    block.state = FREE  # from here on it has happened
                    home.add(size, address)
                    log = store.statistics.rows
                    if before is None and after is None:
                        home.pool.touched.add(block.segment)
                        log.extend((size | rows.FREE | index, block.requested))
                    else:
                        log.extend((size | rows.FREE_PART | index, block.requested))
                    if len(log) > rows.FULL:
                        store.statistics.fold()
                else:
                    store.put_back(block)
            except DevallocError:
                raise
            except BaseException:
                self._torn = self._attention = True
                raise
            finally:
                self._inside = False
                if self._torn or self._urgent:
                    self._settle()

    def free_in_finalizer(self, address: int, claim: int = 0) -> None:
        """`free` for finalizers: waits for no other thread, and ignores what is not a live block.

        That thread may be waiting for a lock of this one: the finalizer may have interrupted a call
        of another cache, or a fork.
        """
        routed = self.private.pools_of(address) if self.private.routes else None
        self._returned.append((address, claim, routed))
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()
        elif self._store.closed:
            self._settle()  # there may be no next call

    # The slow path --------------------------------------------------------------------------------

    def _malloc(
        self, nbytes: object, stream: int, freed_before: int | None, routed: PoolSet | None
    ) -> Block | None:
        """Any allocation, under the lock. None for a null address."""
        store = self._store
        if self._out and threading.get_ident() in self._out:
            raise DevallocError(
                "malloc was called from a callback that the same cache had called because it "
                "had no memory; such a callback may free, and must not allocate there"
            )
        if store.closed:
            raise InvalidArgument("the cache is closed")
        self._begin()
        size = nbytes if type(nbytes) is int else _as_int(nbytes)
        if freed_before is not None and not self.policy.stamps_frees:
            raise InvalidArgument("time stamps need the policy BfcPolicy(timestamps=True)")
        if size == 0 and self.policy.zero_is_null:
            return None
        rounded, index = self._plans.get(size) or self._plan(size)
        if store.pending.queues:
            store.pending.process_events()
            self._watch()
        pools = self.private.still_there(routed)
        if pools.refusal:
            raise InvalidArgument(pools.refusal)
        home = pools.pools[index].list_of(stream)
        block = store.find(home, rounded, size, freed_before)
        if block is None:
            request = Request(size, rounded, index, stream, pools, freed_before)
            block = self._find_elsewhere(request) or self._miss(request)
        store.history.allocated(block)
        return block

    def _plan(self, nbytes: int) -> tuple[int, int]:
        if nbytes < 0:
            raise InvalidArgument(f"a size cannot be negative: {format_size(nbytes)}")
        if nbytes >= _MAX_BYTES:
            self._store.counts["num_ooms"] += 1
            raise OutOfMemory(
                f"alloc of {format_size(nbytes)} failed: that is beyond every address space; ask "
                "for less"
            )
        size = self.policy.round(nbytes)
        plan = size, self.policy.pool_of(size)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[nbytes] = plan
        return plan

    def _miss(self, request: Request) -> Block:
        """No free block serves: ask holders of memory, take the policy's steps, wait for events and
        for other threads' frees, and then raise the error."""
        store = self._store
        waiting = bool(store.pending)
        try:
            block = (
                self._ask_holders(request)
                or self.policy.miss(store, request)
                or self._find_late(request, waiting)
                or self._wait_for_frees(request)
            )
            if block is None:
                store.counts["num_ooms"] += 1
                store.history.out_of_memory(request, store.room())
                raise OutOfMemory(explain.failure(store, request)) from store.failure
            return block
        finally:
            store.failure = None  # its traceback refers to everything that the callers have

    def _ask_holders(self, request: Request) -> Block | None:
        """Run the callbacks of `Cache.on_low_memory`, which may free memory, and search again."""
        if not self._holders:
            return None

        def ask() -> None:
            for callback in tuple(self._holders):
                callback()

        self._without_lock(request, ask)
        return self._find(request)

    def _find_late(self, request: Request, waiting: bool) -> Block | None:
        """Take what has become free while the policy tried, or becomes free by waiting for events.

        ``waiting``: whether there were events to wait for when the policy began. If something
        became free but does not serve as it is, take the policy's steps once more.
        """
        store = self._store
        if store.captures:
            return None
        changed = bool(waiting or store.pending or self._returned or self.reuse.stacks)
        store.wait_for_events()
        self._free_noted()
        if not changed:
            return None
        return self._find(request) or self.policy.miss(store, request)

    def _wait_for_frees(self, request: Request) -> Block | None:
        """For a policy that waits: take what another thread frees, or repeat the policy's steps."""
        store = self._store
        deadline = time.monotonic() + self.policy.retry_wait_s
        while not store.captures and (left := deadline - time.monotonic()) > 0:
            wait_s = min(left, _WAIT_SLICE_S)
            self._without_lock(request, lambda: self._wake.acquire(timeout=wait_s))  # noqa: B023
            store.wait_for_events()
            block = self._find(request) or self.policy.miss(store, request)
            if block is not None:
                return block
        return None

    def _find(self, request: Request) -> Block | None:
        return self._store.find_for(request) or self._find_elsewhere(request)

    def _find_elsewhere(self, request: Request) -> Block | None:
        """A block of another stream, if streams are shared and stream order is enough."""
        if not self._share or self._store.captures or request.freed_before is not None:
            return None
        return self._store.find_elsewhere(request)

    def _without_lock(self, request: Request, action: Callable[[], object]) -> None:
        """In the middle of a call, do something as if it were between two calls."""
        thread = threading.get_ident()
        released: list[Any] = []
        self._attention = self.reuse.closed = True
        try:
            self._out.add(thread)
            self._free_noted()
            self._inside = False
            # The list gets the lock's state in the C code that releases it.
            released.extend(map(_release_lock, (self._lock,)))
            action()
        finally:
            # (Not `acquire`, which Ctrl-C would end, and the call would go on without the lock.)
            if released:
                self._lock._acquire_restore(released[0])  # type: ignore[attr-defined]
            # Another thread can be inside only while it holds the lock, and we have it again.
            self._inside = True
            self._out.discard(thread)
        if self._torn:
            self._repair()
        self._free_noted()
        # Others may have ended a route.
        request.pools = self.private.still_there(request.pools)

    def _free(self, block: Block, routed: PoolSet | None) -> None:
        """Any free, under the lock. ``routed``: the pools that its thread allocates from."""
        store = self._store
        foreign = bool(store.captures) and routed is not store.privates.get(
            block.home.pool.owner, store.default
        )
        try:
            if foreign or block.address in store.pending.uses:
                store.pending.defer(block)
            else:
                store.history.free_requested(block)
                store.complete(block, rows.FREE)
        finally:
            if self._out:
                with contextlib.suppress(RuntimeError):
                    self._wake.release()
            self._watch()

    # Between calls --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """What every call does first, under the lock, except on the fast path."""
        if self._torn:
            self._repair()
        self._take_loan()
        self._free_noted()

    def _take_loan(self) -> None:
        """Have the default pools as they are: take them back if the front has them."""
        if self.loan.out:
            self.loan.take()

    def _settle(self, watch: bool = False) -> None:
        """Repair what is torn, and free what is kept for reuse or noted; with ``watch``, see
        whether the fast path suffices. If this thread is inside a call, the next call does it."""
        with self._lock:
            if self._inside:
                self._urgent = self._store.closed
                return
            self._urgent = True
            while self._urgent:  # once more for what finalizers note meanwhile
                self._inside = True
                try:
                    if self._torn:
                        self._repair()
                    if watch:
                        self._watch()
                    self._free_noted()
                except DevallocError:
                    raise
                except BaseException:
                    self._torn = self._attention = True
                    raise
                finally:
                    self._inside = False

    def _repair(self) -> None:
        """Compute again what an interrupted call has left half done."""
        self._take_loan()
        audit.repair(self._store)
        if not self._store.refused:
            # What the call would have given back to the source: of pools without uses, or all.
            self._returned.append((0, 0, None))
            self._closing = self._store.closed
        self._store.refused = False
        self._torn = False
        self._watch()

    def _watch(self) -> None:
        store = self._store
        if self.private.routes:
            self.private.forget_ended_routes()
        self._attention = self.reuse.closed = bool(
            store.pending
            or store.privates
            or store.closed
            or self.private.routes
            or store.history.recording
            or self._out
            or self._torn
            or self.loan.front
            or self.policy.careful
        )

    def _free_noted(self) -> None:
        self._urgent = False
        if self.reuse.stacks:
            self._returned.extend(self.reuse.clear())
        if self._returned or self._closing:
            self._take_loan()
        if self._returned:
            call_for_finalizers(self._free_if_live, self._take_returned())
        if self._closing:
            self._closing = False
            call_for_finalizers(Store.release_everything, [self._store])

    def _take_returned(self) -> Iterator[Freed]:
        while self._returned:
            yield self._returned[0]
            # Only now: if that was interrupted, it is repeated, before anything is allocated.
            self._returned.popleft()

    def _free_if_live(self, freed: Freed) -> None:
        address, claim, routed = freed
        if address == 0:  # for pools without a user
            self._store.release_all_unused()
            return
        block = self._store.live(address, claim)
        if block is None:
            return
        if self._attention:
            try:
                self._free(block, routed)
            except BaseException:
                if block.state == LIVE:
                    self._store.pending.postpone(block)  # nothing is left that could free it again
                raise
        else:
            self._store.put_back(block)  # that is all when the fast path suffices

    # For the parts of the cache -------------------------------------------------------------------

    @property
    def lock(self) -> threading.RLock:
        """What a fork holds, so that no thread is in the middle of a call."""
        return self._lock

    @entry_point
    def call(self, action: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Do something of a part of the cache as an entry point."""
        return action(*arguments, **options)

    @_beside_front
    def call_beside_front(
        self, action: Callable[P, T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Do something as an entry point that leaves the default pools to the front."""
        return action(*arguments, **options)

    @property
    def inside(self) -> bool:
        """Under the lock: whether this thread interrupted its own call."""
        return self._inside

    def usual(self) -> bool:
        """Under the lock: whether nothing is going on that only Python knows how to do."""
        store = self._store
        return not (
            self._inside
            or self._out
            or self._torn
            or self.private.routes
            or store.captures
            or store.closed
            or store.history.recording
        )

    def plan(self, nbytes: int) -> tuple[int, int]:
        """Under the lock: the rounded size and the pool of requests like this one."""
        return self._plans.get(nbytes) or self._plan(nbytes)

    def free_later(self, addresses: Iterable[int]) -> None:
        """Have the next call free these."""
        self._returned.extend((address, 0, None) for address in addresses if address)

    def _look(self) -> None:
        """Have the blocks up to date, under the lock. In the middle of a call they are."""
        if self.loan.out and not self._inside:
            self._update()

    @entry_point
    def _update(self) -> None:
        """Every entry point does it."""

    def require_live(self, address: int, claim: int | None = None) -> Block:
        """The live block at an address; InvalidArgument if there is none. Under the lock."""
        explain.require_address(address)
        self._look()
        block = self._store.live(address, claim)
        if block is None:
            raise InvalidArgument(f"this cache has no live allocation at {address:#x}")
        return block
