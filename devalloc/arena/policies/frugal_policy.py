"""A policy of this project: hold as little memory as the program's peak allows."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from devalloc.arena.policies.policy import (
    ROUND_LARGE,
    SMALL_MAX,
    SMALL_SEGMENT,
    FrontRule,
    TwoPoolPolicy,
)
from devalloc.arena.store.blocks import Block, Segment
from devalloc.errors import InvalidArgument
from devalloc.sizes import MIB, require_count, round_up, size_option

if TYPE_CHECKING:
    from devalloc.arena.store.request import Request
    from devalloc.arena.store.store import Store


_REMEMBERED = 256
"""Segments given back that are remembered; the oldest are forgotten first."""


class _GivenBack(NamedTuple):
    """A segment that was given back: it would serve requests of its size, pool and stream."""

    size: int
    pool: int
    stream: int


@dataclasses.dataclass
class FrugalPolicy(TwoPoolPolicy):
    """Sets no new record of reserved bytes while a segment lies idle.

    A miss (a request that no free block serves) that would reserve more than ever before first
    gives idle segments back: the smallest one that covers the excess, or else the largest ones in
    turn. Then it grows. Below the record it grows at once, so a program in a steady state keeps its
    segments. Every remainder is split off, and segments are as large as the demand: 2 MiB for
    blocks of up to 1 MiB, ``medium_segment`` for larger blocks below half of that, else the size
    rounded up to a multiple of 2 MiB.

    A miss that a segment given back earlier would have served is a regret. With the last of
    ``patience`` regrets the record rises to what that miss needs, and nothing is given back for it.
    So a program that asks for the same again and again stops returning and requesting segments.

    Parameters
    ----------
    allowance : int or str
        Bytes that may be reserved without giving anything back: the first record.
    medium_segment : int or str
        Bytes of the segments from which blocks of over 1 MiB and below half of this are cut; a
        multiple of 2 MiB. With 2 MiB no two such blocks share a new segment; a large value saves
        calls of the source.
    patience : int
        How many regrets it takes to raise the record beyond what demand alone calls for; at least
        1.

    Notes
    -----
    Cost: more calls of the source than `TorchPolicy` makes, each of which may wait for the device
    (cudaFree does, for all streams), and one pass over the free blocks on a miss above the record.
    An allocation that hits costs the same. An ``allowance`` avoids calls from the start. In a
    program that asks for the same again, regrets end the calls, at the cost of memory.

    The policy does not wait for blocks that other streams still use unless the source or the limit
    refuses. Then it waits for all pending blocks; if none of them serves, it gives back everything
    that is idle and asks the source once more. During a capture it gives nothing back. A change of
    the limit starts a new record.

    Source: rounding, the two pools and best fit are PyTorch's; splitting every remainder is that of
    Paddle's auto growth; the choice of what to give back is PyTorch's for oversize blocks, which
    acts only when memory has run out. Remembering what was given back, to learn that it should not
    have been, follows the ghost lists of ARC (Megiddo and Modha, 2003). The record as the trigger
    is new here.
    """

    name: ClassVar[str] = "frugal"

    allowance: int = 0
    medium_segment: int = 8 * MIB
    patience: int = 2
    _record: int = dataclasses.field(default=0, init=False, repr=False)
    _regrets: int = dataclasses.field(default=0, init=False, repr=False)
    _given_back: deque[_GivenBack] = dataclasses.field(
        default_factory=deque, init=False, repr=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.allowance = size_option("allowance", self.allowance, 0)
        require_count("patience", self.patience, 1)
        self.medium_segment = size_option("medium_segment", self.medium_segment, SMALL_SEGMENT)
        if self.medium_segment % ROUND_LARGE:
            raise InvalidArgument(
                f"medium_segment must be a multiple of {ROUND_LARGE} B, not {self.medium_segment}"
            )

    def attach(self, store: Store) -> None:
        self._record = max(self.allowance, store.reserved)
        self._regrets = 0
        self._given_back = deque(maxlen=_REMEMBERED)

    @property
    def front_rule(self) -> FrontRule:
        return FrontRule(1, 1)

    def splits(self, index: int, whole: int, size: int) -> bool:
        return True

    def miss(self, store: Store, request: Request) -> Block | None:
        nbytes = self._segment_for(request.size)
        if store.may_release():
            needed, bound = store.reserved + store.needed(request, nbytes), self._record
            regretted = self._regret(store, request)
            if regretted and self._regrets >= self.patience and needed > bound:
                self._regrets, bound = 0, needed
            if store.limit is not None:
                bound = min(bound, store.limit - (store.taken - store.reserved))
            self._give_back(store, needed - bound)
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

    def _regret(self, store: Store, request: Request) -> bool:
        """Whether a segment that was given back would serve now; it is counted, and forgotten."""
        missed = [
            each
            for each in self._given_back
            if each.size >= request.size
            and each.pool == request.index
            and (store.shared or each.stream == request.stream)
        ]
        if missed:
            self._given_back.remove(min(missed))
            self._regrets += 1
        return bool(missed)

    def _give_back(self, store: Store, excess: int) -> None:
        """Release the smallest idle segment of at least ``excess`` bytes. If there is none, release
        the largest one and go on with the rest of the excess, as long as segments are idle. What is
        free in expandable segments goes from the highest address on."""
        if store.expandable is not None and excess > 0:
            for nbytes, home in store.expandable.trim(store.default, excess):
                self._given_back.append(_GivenBack(nbytes, home.pool.index, home.stream))
            return
        while excess > 0:
            segment = self._smallest(store, excess) or self._largest(store)
            if segment is None:
                break
            owner = segment.first.home
            excess -= store.release(segment)
            self._given_back.append(_GivenBack(segment.size, owner.pool.index, owner.stream))

    @staticmethod
    def _smallest(store: Store, nbytes: int) -> Segment | None:
        found = [(pool.idle().first_from((nbytes,)), pool) for pool in store.default.pools]
        fits = [(place[0], pool.index, place[-1]) for place, pool in found if place is not None]
        if not fits:
            return None
        _, index, address = min(fits)
        return store.default.pools[index].idle_at(address)

    @staticmethod
    def _largest(store: Store) -> Segment | None:
        found = [(pool.idle().last(), pool) for pool in store.default.pools]
        idle = [(place[0], pool.index, place[-1]) for place, pool in found if place is not None]
        if not idle:
            return None
        _, index, address = max(idle)
        return store.default.pools[index].idle_at(address)
