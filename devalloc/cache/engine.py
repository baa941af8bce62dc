"""`Cache`: the caching allocator. The core with streams, graphs, upkeep and reports."""

from __future__ import annotations

from collections.abc import Callable

from devalloc.cache.core import limit_of
from devalloc.cache.graph_pools import Graphs
from devalloc.cache.outside import Outside
from devalloc.cache.reports import Reports
from devalloc.errors import InvalidArgument
from devalloc.sizes import format_size, quote


class Cache(Graphs, Reports):
    """A host caching allocator over one source.

    Parameters
    ----------
    source : Source
        Where segments come from. Its granularity must be at least 256 bytes.
    policy : str or Policy
        ``"torch"``, ``"tiny"``, ``"bfc"``, ``"auto_growth"``, ``"frugal"``, or a policy object
        with options.
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
    allows (docs/host.md). `malloc` and `free` never wait for the device, unless the source does,
    memory runs out, or the cache is closed.
    """

    # Streams --------------------------------------------------------------------------------------

    def record_stream(self, address: int, stream: int) -> None:
        """Say that ``stream`` also uses the block.

        After its free the block becomes available only when the work that was queued on ``stream``
        at that time is done; the free itself does not wait. The stream that owns the block is
        ignored. Raises InvalidArgument if no block lives at ``address``, or if ``stream`` is not an
        int.
        """
        if type(stream) is not int:
            raise InvalidArgument(f"a stream is given by its handle, an int, not {quote(stream)}")
        with self._entered() as store:
            block = self._live(address)
            if stream != block.home.stream:
                store.uses.setdefault(address, set()).add(stream)

    def forget_stream(self, stream: int) -> None:
        """Give what ``stream`` owns to the default stream. Call it before ``stream`` is destroyed.

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
            # First: a block whose user ends meanwhile must not be parked.
            self.parking.forget_stream(stream)
            store.forget_stream(stream)

    def order_behind(self, address: int, stream: int) -> None:
        """Order what the block's stream does from now on behind what is queued on ``stream`` now.

        The block's stream is the one that owns it now, which `forget_stream` may have changed.
        Finalizers that interrupt this cache may call it too.
        """
        with self._lock:
            owner = self._live(address).home.stream
            if stream != owner:
                self.streams.wait(owner, self.streams.record(stream))

    def process_events(self) -> None:
        """Make pending blocks free whose streams are done with them. Every malloc does so too."""
        with self._entered() as store:
            store.process_events()

    def set_safe_frontier(self, time: int) -> None:
        """With time stamps: say that the work of all frees before number ``time`` is done."""
        with self._entered():
            self._stamping_policy().set_safe_frontier(time)

    @property
    def clock(self) -> int:
        """With time stamps: the number of frees so far."""
        return self._stamping_policy().clock

    # Upkeep ---------------------------------------------------------------------------------------

    @property
    def limit(self) -> int | None:
        """The most bytes that are reserved from the source, or None."""
        return self._store.limit

    def set_limit(self, limit: int | str | None) -> None:
        """Change the limit. If more is reserved than that, all idle memory goes to the source.

        Raises
        ------
        InvalidArgument
            If the memory in use does not fit into the new limit, or the policy cannot work with it;
            then the limit stays as it was.
        """
        bound = limit_of(limit)
        with self._entered() as store:
            if bound is not None and store.taken > bound:
                store.give_back()
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
        """Give all idle segments back to the source; returns their bytes.

        Waits for streams that still use freed blocks. Does nothing during a capture.
        """
        with self._entered() as store:
            before = store.reserved
            store.give_back()
            return before - store.reserved

    def on_low_memory(self, callback: Callable[[], object]) -> None:
        """Have ``callback``, which may free blocks, called before the source is asked for more.

        It runs on the allocating thread, and on several threads at once if several allocate. The
        cache's lock is not held, so two caches may empty each other. The callback must not allocate
        from this cache.
        """
        with self._entered():
            self._holders.append(callback)

    @property
    def outside(self) -> Outside:
        """Segments that another allocator takes from the source, under this cache's limit."""
        return self._store.outside
