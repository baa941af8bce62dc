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
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from devalloc.cache.blocks import PoolSet

if TYPE_CHECKING:
    from devalloc.cache.cache import Cache


class PrivatePool:
    """Memory that graphs share, and a count of its uses. Made by `Cache.private_pool`.

    The count begins with one use. Call `retain` for each graph that is captured into the pool, and
    `release` when the graph is destroyed. After the last release idle memory goes back to the
    source at once, and every other segment when the last allocation in it is freed. As a context
    manager the pool releases the use it was made with.

    A pool that is dropped without its last release cannot be released any more: it gives a
    ResourceWarning, and the memory goes back as after the last release.
    """

    def __init__(self, cache: Cache, pools: PoolSet) -> None:
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

    def __del__(self) -> None:
        pools = getattr(self, "pools", None)
        if pools is not None and pools.uses > 0:
            warnings.warn(
                f"a private pool was dropped with {pools.uses} uses left; release it once for "
                "each graph that used it",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
            self.cache.abandon(pools)


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
