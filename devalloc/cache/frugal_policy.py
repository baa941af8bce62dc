"""A policy of our own: hold as little memory as the program's peak allows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from devalloc.cache.blocks import Block, Segment
from devalloc.cache.policy import (
    MIB,
    MIN_BLOCK,
    ROUND_LARGE,
    SMALL_MAX,
    SMALL_SEGMENT,
    Policy,
    require_count,
    round_up,
)
from devalloc.errors import InvalidArgument

if TYPE_CHECKING:
    from devalloc.cache.store import Request, Store


@dataclasses.dataclass
class FrugalPolicy(Policy):
    """No new record of reserved bytes while a segment lies idle.

    A miss that would reserve more than ever before first gives idle segments back: the smallest
    one that covers the excess, or else the largest in turn, and then grows. Below the record it
    grows at once, so a program in a steady state keeps its segments. Every remainder is split off,
    and segments are as large as the demand: 2 MiB for blocks of up to 1 MiB, ``medium_segment``
    for blocks below half of that, else the size up to a multiple of 2 MiB.

    Parameters
    ----------
    allowance : int
        Bytes that may be reserved without giving anything back: the first record.
    medium_segment : int
        Bytes of the segments from which blocks of over 1 MiB and below half of it are cut; a
        multiple of 2 MiB. With 2 MiB no two such blocks share a new segment.

    Notes
    -----
    Cost: more calls of the source than `TorchPolicy` makes, each of which may wait for the device
    (cudaFree does, for all streams), and on a miss above the record one pass over the free blocks.
    An allocation that hits costs the same. Demand that wanders between streams or pools, which
    cannot serve each other, costs a release and a request at every move; an ``allowance`` avoids
    them.

    Blocks that other streams still use are not waited for unless the source or the limit refuses;
    then all pending blocks are awaited, and if none of them serves, everything idle is given back
    and the source is asked once more. During a capture nothing is given back. A change of the
    limit starts a new record.

    Source: rounding, the two pools and best fit as PyTorch's; splitting every remainder as
    Paddle's auto growth; the choice of what to give back as PyTorch's for oversize blocks, which
    acts only when memory has run out. The record as the trigger is ours.
    """

    name: ClassVar[str] = "frugal"

    allowance: int = 0
    medium_segment: int = 8 * MIB
    _record: int = dataclasses.field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        require_count("allowance", self.allowance, 0)
        require_count("medium_segment", self.medium_segment, SMALL_SEGMENT)
        if self.medium_segment % ROUND_LARGE:
            raise InvalidArgument(
                f"medium_segment must be a multiple of {ROUND_LARGE} B, not {self.medium_segment}"
            )

    def attach(self, store: Store) -> None:
        self._record = max(self.allowance, store.reserved)

    def round(self, nbytes: int) -> int:
        return max(MIN_BLOCK, round_up(nbytes, MIN_BLOCK))

    def pool_of(self, size: int) -> int:
        return 0 if size <= SMALL_MAX else 1

    def splits(self, index: int, whole: int, size: int) -> bool:
        return True

    def miss(self, store: Store, request: Request) -> Block | None:
        if store.ask_holders() and (block := store.find_for(request)) is not None:
            return block
        nbytes = self._segment_for(request.size)
        if store.may_release():
            bound = self._record
            if store.limit is not None:
                bound = min(bound, store.limit - (store.taken - store.reserved))
            self._give_back(store, store.reserved + nbytes - bound)
        block = store.grow(request, nbytes)
        if block is None and store.may_release():
            store.wait_for_events()
            if (block := store.find_for(request)) is not None:
                return block
            store.release_cached()
            store.counts["num_alloc_retries"] += 1
            block = store.grow(request, nbytes)
        self._record = max(self._record, store.reserved)
        return block

    def _segment_for(self, size: int) -> int:
        if size <= SMALL_MAX:
            return SMALL_SEGMENT
        if size < self.medium_segment // 2:
            return self.medium_segment
        return round_up(size, ROUND_LARGE)

    @staticmethod
    def _give_back(store: Store, excess: int) -> None:
        """Release the smallest idle segment of ``excess`` bytes or more, or the largest in turn
        until what is left of the excess has one or no segment is idle."""
        if excess <= 0:
            return
        idle: list[Segment] = []
        for index in (0, 1):
            idle += store.idle_segments(store.default, index)
        idle.sort(key=lambda segment: segment.size)
        while excess > 0 and idle:
            enough = (at for at, segment in enumerate(idle) if segment.size >= excess)
            excess -= store.release(idle.pop(next(enough, -1)))
