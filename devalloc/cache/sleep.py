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


class Content(NamedTuple):
    """A segment and its live blocks.

    ``runs`` has (address, bytes) of live blocks, neighbours as one; ``streams`` all that may use
    the segment.
    """

    segment: Segment
    runs: list[tuple[int, int]]
    streams: set[int]


def segments_of(store: Store, pools: PoolSet) -> list[Segment]:
    return [each for each in store.segments.values() if each.pool in pools.pools]


def begin(store: Store, pools: PoolSet, refusal: str) -> list[Content]:
    """Allocate nothing from the pools from now on, and give idle segments back.

    Raises InvalidArgument during a capture.
    """
    if store.captures:
        raise InvalidArgument("no region can be paused or resumed during a capture")
    before, pools.refusal = pools.refusal, refusal
    try:
        store.release_idle(pools)
        return [_content(store, segment) for segment in segments_of(store, pools)]
    except BaseException:
        pools.refusal = before
        raise


def _content(store: Store, segment: Segment) -> Content:
    runs: list[tuple[int, int]] = []
    streams = {segment.stream}
    for block in segment.blocks():
        if block.state == FREE:
            continue
        streams.add(block.home.stream)
        streams |= store.pending.uses.get(block.address, set())
        if block.state != LIVE:  # freed, and needed only until its streams are done
            continue
        if runs and sum(runs[-1]) == block.address:
            runs[-1] = runs[-1][0], runs[-1][1] + block.size
        else:
            runs.append((block.address, block.size))
    return Content(segment, runs, streams)


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
