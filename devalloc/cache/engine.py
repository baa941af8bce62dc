"""`Cache`: the caching allocator. The core with streams, graphs, upkeep and reports."""

from __future__ import annotations

from collections.abc import Callable

from devalloc.cache.graph_pools import Graphs
from devalloc.cache.outside import Outside
from devalloc.cache.reports import Reports
from devalloc.errors import InvalidArgument
from devalloc.sizes import format_size, parse_size


class Cache(Graphs, Reports):
    """A host caching allocator over one source.

    Parameters
    ----------
    source : Source
        Where segments come from. Its granularity must be a multiple of 256 bytes.
    policy : str or Policy
        ``"torch"``, ``"tiny"``, ``"bfc"``, ``"auto_growth"``, ``"frugal"``, or an object with
        options.
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
            self.parking.forget_stream(stream)  # first: what ends meanwhile must not be parked
            store.forget_stream(stream)

    def order_behind(self, address: int, stream: int) -> None:
        """Order what the block's stream does from now on behind what is queued on ``stream`` now.

        The stream is the one that owns the block by now (`forget_stream`). Also for finalizers that
        interrupt this cache.
        """
        with self._lock:
            owner = self._live(address).home.stream
            if stream != owner:
                self.streams.wait(owner, self.streams.record(stream))

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

    # Upkeep ---------------------------------------------------------------------------------------

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
        """Give all idle segments back to the source; their bytes.

        Waits for streams that still use freed blocks. Does nothing during a capture.
        """
        with self._entered() as store:
            before = store.reserved
            store.give_back()
            return before - store.reserved

    def on_low_memory(self, callback: Callable[[], object]) -> None:
        """Call ``callback``, which may free blocks, before the source is asked for more.

        It runs on the thread that allocates, on several at once if several do, and holds no lock of
        this cache: two caches may empty each other. It must not allocate from this cache.
        """
        with self._entered():
            self._holders.append(callback)

    @property
    def outside(self) -> Outside:
        """Segments that another allocator takes from the source, under this cache's limit."""
        return self._store.outside
