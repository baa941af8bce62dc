"""Private pools: memory for CUDA graphs, which keep using their addresses when replayed.

A captured graph reads and writes fixed addresses whenever it is replayed. What was allocated in
its capture comes from pools of its own, so that nobody else is ever given those addresses while
the graph may run. The pools count the graphs that use them.

The four combinations: allocated and freed inside the capture, the block is reused in the capture;
allocated inside and freed outside, it returns to the private pool; allocated outside and freed
inside, it is held until the capture has ended (the captured work may still refer to it); both
outside, the graph is not concerned.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from devalloc.cache.store import PoolSet

if TYPE_CHECKING:
    from devalloc.cache.engine import Cache


class Route(NamedTuple):
    """Allocations that ``accepts(stream)`` go to ``pools``."""

    pools: PoolSet
    accepts: Callable[[int], bool]
    capture: bool


class PrivatePool:
    """A count of graphs and the memory that they share. Made by `Cache.private_pool`, with one use.

    Each graph that is captured into it calls `retain`, and `release` when it is destroyed. After
    the last release idle memory goes back to the source at once, and the rest with the last
    allocation in it. As a context manager it releases the use it was made with.
    """

    def __init__(self, cache: Cache, pools: PoolSet) -> None:
        self._cache = cache
        self.pools = pools

    @property
    def id(self) -> tuple[int, int]:
        """As ``segment_pool_id`` in snapshots."""
        return self.pools.owner

    @property
    def uses(self) -> int:
        return self.pools.uses

    def retain(self) -> None:
        """One graph more; InvalidArgument after the last release."""
        self._cache.change_uses(self.pools, 1)

    def release(self) -> None:
        """One graph fewer; InvalidArgument after the last one."""
        self._cache.change_uses(self.pools, -1)

    def __enter__(self) -> PrivatePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
