"""One allocation under way."""

from __future__ import annotations

from devalloc.arena.store.blocks import FreeList, PoolSet


class Request:
    """One allocation under way: requested bytes, rounded bytes, pool, stream.

    ``freed_before``, if not None, is the time up to which frees are known to be done for this
    caller, who does not work in the order of the owner's stream. ``segment`` is the bytes of the
    segment that was last asked for on its behalf, 0 if none was.
    """

    __slots__ = ("freed_before", "index", "nbytes", "pools", "segment", "size", "stream")

    def __init__(
        self,
        nbytes: int,
        size: int,
        index: int,
        stream: int,
        pools: PoolSet,
        freed_before: int | None,
    ) -> None:
        self.nbytes = nbytes
        self.size = size
        self.index = index
        self.stream = stream
        self.pools = pools
        self.freed_before = freed_before
        self.segment = 0

    @property
    def home(self) -> FreeList:
        return self.pools.pools[self.index].list_of(self.stream)
