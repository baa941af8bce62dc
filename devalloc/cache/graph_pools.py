"""Private pools: memory for CUDA graphs, which keep using their addresses when replayed.

A captured graph reads and writes fixed addresses whenever it is replayed. Memory that is allocated
during its capture comes from pools of its own, so that nothing else is ever given those addresses
while the graph may run. The pools count the graphs that use them.

There are four combinations. A block that is allocated and freed inside the capture is reused in the
capture. One that is allocated inside and freed outside returns to the private pool. One that is
allocated outside and freed inside is held until the capture has ended, because the captured work
may still refer to it. If both happen outside, the graph is not concerned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from devalloc.cache.blocks import PoolSet
from devalloc.cache.core import Core, Route
from devalloc.errors import InvalidArgument


class PrivatePool:
    """Memory that graphs share, and a count of its uses. Made by `Cache.private_pool`.

    The count begins with one use. Call `retain` for each graph that is captured into the pool, and
    `release` when the graph is destroyed. After the last release idle memory goes back to the
    source at once, and every other segment when the last allocation in it is freed. As a context
    manager the pool releases the use it was made with.
    """

    def __init__(self, cache: Graphs, pools: PoolSet) -> None:
        self.cache = cache
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
        self.cache.change_uses(self.pools, 1)

    def release(self) -> None:
        """One graph fewer; InvalidArgument after the last one."""
        self.cache.change_uses(self.pools, -1)

    def __enter__(self) -> PrivatePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Graphs(Core):
    """The engine's part for graphs: their pools, and which allocations go to them."""

    def private_pool(self) -> PrivatePool:
        """A new pool for one graph, or for several that share memory."""
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
            Called with the stream of each allocation, on the allocating thread; returns whether
            the allocation goes to the pool. Default: all allocations of this thread do.
        capture : bool
            Whether a stream is being captured meanwhile. Then no event is queried or recorded,
            nothing is waited for, and nothing goes back to the source until the last capture has
            ended.

        Raises
        ------
        InvalidArgument
            For a pool of another cache, or one that has been released.
        """
        if not isinstance(pool, PrivatePool) or pool.cache is not self:
            raise InvalidArgument(
                f"a pool is one that this cache's private_pool (or its arena's graph_pool) made, "
                f"not {pool!r}"
            )
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
            try:
                with self._entered() as store:
                    self._routes.remove(route)
                    store.captures -= capture
                    store.end_capture()
            finally:
                pool.release()

    def change_uses(self, pools: PoolSet, change: int) -> None:
        """Count one graph more or fewer; when none is left, idle memory goes to the source."""
        with self._entered() as store:
            if pools.uses + change < 0 or store.privates.get(pools.owner) is not pools:
                raise InvalidArgument(f"the private pool {pools.owner} has been released before")
            pools.uses += change
            if pools.uses == 0:
                store.release_unused(pools)
