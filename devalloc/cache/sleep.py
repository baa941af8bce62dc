"""Private pools whose segments have no memory for a while: the cache's side of regions.

While a pool's memory is being taken away or given back, and while it is away, nothing is allocated
there (`PoolSet.refusal` says why). Frees are bookkeeping, as always. Segments that sleep do not
count against the limit (`Store.asleep`).
"""

from __future__ import annotations

from typing import NamedTuple

from devalloc.cache.blocks import FREE, LIVE, PoolSet, Segment
from devalloc.cache.store import Store
from devalloc.errors import InvalidArgument, OutOfMemory
from devalloc.sizes import format_size


class LiveBlock(NamedTuple):
    """A live block, and the rule that `set_rule` gave it ("" if none)."""

    address: int
    nbytes: int
    rule: str


class Content(NamedTuple):
    """A segment, its live blocks in the order of addresses, and the streams that may use it."""

    address: int
    nbytes: int
    blocks: list[LiveBlock]
    streams: set[int]


def segments_of(store: Store, pools: PoolSet) -> list[Segment]:
    return [each for each in store.segments.values() if each.pool in pools.pools]


def begin(store: Store, pools: PoolSet, refusal: str, keep_idle: bool) -> list[Content]:
    """Allocate nothing from the pools from now on.

    Idle segments go back, unless ``keep_idle``: graphs use them when they are replayed. Raises
    InvalidArgument during a capture.
    """
    if store.captures:
        raise InvalidArgument("no region can be paused or resumed during a capture")
    before, pools.refusal = pools.refusal, refusal
    try:
        if not keep_idle:
            store.release_idle(pools)
        return contents(store, pools)
    except BaseException:
        pools.refusal = before
        raise


def contents(store: Store, pools: PoolSet) -> list[Content]:
    return [_content(store, pools, segment) for segment in segments_of(store, pools)]


def _content(store: Store, pools: PoolSet, segment: Segment) -> Content:
    blocks: list[LiveBlock] = []
    streams = {segment.stream}
    for block in segment.blocks():
        if block.state == FREE:
            continue
        streams.add(block.home.stream)
        streams |= store.pending.uses.get(block.address, set())
        if block.state == LIVE:  # or it is freed, and needed only until its streams are done
            blocks.append(LiveBlock(block.address, block.size, pools.rules.get(block.address, "")))
    return Content(segment.address, segment.size, blocks, streams)


def mark(store: Store, pools: PoolSet, asleep: bool, refusal: str) -> None:
    """Say whether the segments of the pools have memory.

    Raises OutOfMemory if they are to have it and the limit forbids it; nothing has changed then.
    """
    changing = [each for each in segments_of(store, pools) if each.asleep != asleep]
    nbytes = sum(segment.size for segment in changing)
    if not asleep and store.limit is not None and store.taken + nbytes > store.limit:
        raise OutOfMemory(
            f"{format_size(nbytes)} cannot be resumed: {format_size(store.taken)} of a limit of "
            f"{format_size(store.limit)} are taken; free memory and call empty_cache(), or raise "
            "the limit"
        )
    for segment in changing:
        segment.asleep = asleep
    store.asleep = sum(each.size for each in store.segments.values() if each.asleep)
    pools.refusal = refusal
