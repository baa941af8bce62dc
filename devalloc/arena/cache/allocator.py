"""`Cache`: the caching allocator, with every entry point but malloc and free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from devalloc.arena.cache import explain, forks
from devalloc.arena.cache.locked_calls import LockedCalls, entry_point
from devalloc.arena.cache.private_pools import PrivatePool
from devalloc.arena.policies.policy import Policy
from devalloc.arena.policies.policy_names import make_policy
from devalloc.arena.store import audit
from devalloc.arena.store.external import External
from devalloc.arena.store.snapshot import snapshot
from devalloc.arena.store.streams import CudaStreams, HostStreams, Streams
from devalloc.common.arguments import require_callable
from devalloc.errors import DevallocError, InvalidArgument
from devalloc.sizes import format_size, parse_size, quote, require_count
from devalloc.sources.source import granularity_of, require_source

if TYPE_CHECKING:
    from devalloc.sources import Source


def _limit_of(limit: int | str | None) -> int | None:
    """A limit in bytes, of which a float can give a fraction."""
    if limit is None:
        return None
    nbytes = parse_size(limit)
    require_count("a limit in bytes", nbytes, 0)
    return nbytes


class Cache(LockedCalls):
    """A host caching allocator over one source.

    Parameters
    ----------
    source : Source
        Where segments come from. Its granularity must be at least 256 bytes.
    policy : str or Policy
        ``"torch"``, ``"tiny"``, ``"bfc"``, ``"auto_growth"``, ``"frugal"``, or a policy object
        with options; or PyTorch's settings, such as ``"max_split_size_mb:64"``.
    limit : int or str, optional
        The most bytes that are reserved from the source. Checked before the source is asked.
    streams : Streams, optional
        Default: torch's CUDA streams if the source is on a CUDA device, else `HostStreams`.
    share_streams : bool
        A request that the free blocks of its own stream cannot serve takes those of another
        stream, and its stream is made to wait for the work that is queued on that one.

    Raises
    ------
    InvalidArgument
        For options or a source that cannot work.

    Notes
    -----
    All methods may be called from any thread. A block is owned by the stream it was allocated on.
    Once freed, it may be given out again on that stream at once, and on others only as invariant C2
    allows (docs/design/host.md). `malloc` and `free` never wait for the device, unless the source
    does, memory runs out, or the cache is closed.

    A signal handler that raises (Ctrl-C) may end any call: `malloc` has then allocated nothing, a
    free has happened or not (freeing again tells), and the cache stays usable.
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
        require_source(source)
        if granularity_of(source) < 256:
            raise InvalidArgument(
                f"the granularity of {source!r} is {source.granularity} B, and a cache needs "
                "256 B or more; put an AlignedAdaptor around the source"
            )
        if streams is None:
            cuda = source.device.type == "cuda"
            streams = CudaStreams(source.device) if cuda else HostStreams()
        bound = make_policy(policy).bind()
        super().__init__(source, bound, _limit_of(limit), streams, share_streams)
        forks.watch(self)

    # Private pools: see `devalloc.arena.cache.private_pools` --------------------------------------

    def private_pool(self) -> PrivatePool:
        """A new pool for one graph, or for several that share memory."""
        return self.private.make()

    def route(
        self,
        pool: PrivatePool | None,
        accepts: Callable[[int], bool] | None = None,
        *,
        capture: bool = False,
    ) -> AbstractContextManager[None]:
        """Within the block, allocations go to ``pool``, or without one to no private pool.

        Parameters
        ----------
        accepts : callable, optional
            Called with the stream of each allocation, on the allocating thread and without the
            cache's lock; returns whether the allocation goes to the pool. Default: all allocations
            of this thread do.
        capture : bool
            Whether a stream is being captured meanwhile. Then the cache queries and records no
            event, waits for nothing, and gives nothing back to the source until the last capture
            has ended.

        Raises
        ------
        InvalidArgument
            For a pool of another cache, or one that has been released, and for ``accepts`` that
            cannot be called.
        """
        return self.private.route(pool, accepts, capture)

    # Streams --------------------------------------------------------------------------------------

    @property
    def streams(self) -> Streams:
        """The streams of the device."""
        return self._store.streams

    def record_stream(self, address: int, stream: int, claim: int | None = None) -> None:
        """Record that ``stream`` also uses the block.

        After its free the block becomes available only when the work that was queued on ``stream``
        at that time is done; the free itself does not wait. The stream that owns the block is
        ignored. Raises InvalidArgument if there is no live block at ``address`` (under ``claim``,
        if one is given), or if ``stream`` is not an int.
        """
        if type(stream) is not int:
            raise InvalidArgument(f"a stream is given by its handle, an int, not {quote(stream)}")
        with self._lock:
            if self._inside:
                raise DevallocError("the cache was used from a finalizer that interrupted it")
            if not claim and self.loan.share(address, stream):
                return
            block = self.require_live(address, claim)
            if stream != block.home.stream:
                self._store.pending.uses.setdefault(address, set()).add(stream)
                self._attention = self.reuse.closed = True

    def erase_stream(self, address: int, stream: int) -> None:
        """Undo one `record_stream`, after the caller has waited until ``stream`` is done.

        Raises InvalidArgument if there is no live block at ``address``. A stream that was not
        recorded is ignored.
        """
        with self._lock:
            self.require_live(address)
            uses = self._store.pending.uses
            users = uses.get(address, set())
            users.discard(stream)
            if not users:
                uses.pop(address, None)

    @entry_point
    def forget_stream(self, stream: int) -> None:
        """Give what ``stream`` owns to the default stream. Call it before ``stream`` is destroyed.

        Waits for the device.

        Raises
        ------
        InvalidArgument
            For the default stream, and during a capture.
        """
        if stream == 0:
            raise InvalidArgument("the default stream cannot be forgotten")
        store = self._store
        if store.captures:
            raise InvalidArgument("a stream cannot be forgotten during a capture")
        # First: if the user of a block ends meanwhile, the block must not be kept for reuse.
        self.reuse.forget_stream(stream)
        store.streams.synchronize()
        store.pending.forget_stream(stream)
        store.give_away(stream)

    def order_behind(self, address: int, stream: int) -> None:
        """Order what the block's stream does from now on behind what is queued on ``stream`` now.

        The block's stream is the one that owns it now, which `forget_stream` may have changed.
        Finalizers that interrupt this cache may call it too.
        """
        with self._lock:
            owner = self.require_live(address).home.stream
            if stream != owner:
                self._store.order(owner, stream)

    @entry_point
    def process_events(self) -> None:
        """Make pending blocks free whose streams are done with them. Every malloc does so too."""
        self._store.pending.process_events()

    @entry_point
    def set_safe_frontier(self, time: int) -> None:
        """With time stamps: say that the work of all frees before number ``time`` is done."""
        self.policy.set_safe_frontier(time)

    @property
    def clock(self) -> int:
        """With time stamps: the number of frees so far."""
        return self.policy.clock

    # Upkeep ---------------------------------------------------------------------------------------

    @property
    def limit(self) -> int | None:
        """The most bytes that are reserved from the source, or None."""
        return self._store.limit

    @entry_point
    def set_limit(self, limit: int | str | None) -> None:
        """Change the limit. If more is reserved than that, all idle memory goes to the source.

        Raises
        ------
        InvalidArgument
            If the memory in use does not fit into the new limit, or the policy cannot work with it;
            then the limit stays as it was.
        """
        store, bound = self._store, _limit_of(limit)
        if bound is not None and store.taken > bound:
            store.release_everything()
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

    @entry_point
    def empty_cache(self) -> int:
        """Give all idle segments back to the source; returns their bytes.

        Waits for streams that still use freed blocks. Does nothing during a capture.
        """
        before = self._store.reserved
        self._store.release_everything()
        return before - self._store.reserved

    @entry_point
    def on_low_memory(self, callback: Callable[[], object]) -> None:
        """Have ``callback``, which may free blocks, called before the source is asked for more.

        It runs on the allocating thread, and on several threads at once if several allocate. The
        cache's lock is not held, so two caches may empty each other. The callback must not allocate
        from this cache. Raises InvalidArgument for what cannot be called.
        """
        require_callable("a callback is a function without arguments", callback)
        self._holders.append(callback)

    @property
    def external(self) -> External:
        """Segments that another allocator takes from the source, under this cache's limit."""
        return self._store.external

    @property
    def closed(self) -> bool:
        return self._store.closed

    def close(self) -> None:
        """Refuse new allocations; give idle segments back now, and the others when they are idle.

        May be called again: after a failure of the source it gives back what was left.
        """
        with self._lock:
            self._store.closed = True
            self._attention = self.reuse.closed = True
            if self._inside:
                self._urgent = self._closing = True
                return
            self._give_back()

    @entry_point
    def _give_back(self) -> None:
        self._store.release_everything()

    # Forks: see `devalloc.arena.cache.forks` ------------------------------------------------------

    def begin_in_child(self, held: bool) -> None:
        """After a fork: threads that were in the middle of a call, or waited, do not exist here."""
        if not held:
            self._lock = threading.RLock()
            self._inside = False
            self._torn = self._attention = True
        self._wake = threading.Lock()
        self._wake.acquire()
        self._out &= {threading.get_ident()}

    # Reports --------------------------------------------------------------------------------------

    @entry_point
    def record_history(
        self, enabled: str | None = "all", *, max_entries: int = 100_000, stacks: bool = True
    ) -> None:
        """Switch history on or off.

        Parameters
        ----------
        enabled : {"all", "state", None}
            "all" records events, and where live blocks were allocated; "state" only the latter;
            None nothing.
        max_entries : int
            How many events are kept; the oldest are dropped first.
        stacks : bool
            Whether to record the Python stack of each event.
        """
        self._store.history.configure(enabled, max_entries, stacks)

    @entry_point
    def stats(self) -> dict[str, int]:
        """Statistics under the flat names of ``torch.cuda.memory_stats``; bytes and counts."""
        self.reuse.count()
        return self._store.stats()

    @entry_point
    def reset_peaks(self) -> None:
        """Start peaks again from the current values."""
        self._store.statistics.reset_peaks()

    @entry_point
    def reset_accumulated(self) -> None:
        """Start the ``allocated`` and ``freed`` sums and the ``num_`` counts again from zero."""
        self.reuse.count()
        self._store.statistics.reset_accumulated()
        self._store.counts.clear()

    @entry_point
    def snapshot(self) -> dict[str, object]:
        """All segments and blocks, and the history, in the format of ``torch.cuda.memory``."""
        return snapshot(self._store)

    @entry_point
    def report(self) -> str:
        """Text with bins, the largest free block, fragmentation, and a picture of occupancy."""
        return explain.report(self._store)

    @entry_point
    def audit(self) -> None:
        """Check invariants C1 to C3 (docs/design/host.md).

        Raises
        ------
        CorruptionError
            Its message names the invariant that does not hold.
        """
        audit.check(self._store)

    @property
    def reserved(self) -> int:
        """Bytes held from the source."""
        return self._store.reserved

    def owns(self, address: int, claim: int | None = None) -> bool:
        """Whether ``address`` is that of a live allocation, under this claim if one is given."""
        explain.require_address(address)
        with self._lock:
            self._look()
            return self._store.live(address, claim) is not None

    def size_of(self, address: int) -> int:
        """Usable bytes of the allocation at ``address``; InvalidArgument if there is none."""
        with self._lock:
            return self.require_live(address).size
