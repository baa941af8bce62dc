"""Any number of blocks: what an operation costs, and that what is gone leaves nothing behind.

Cost is counted and not timed: the calls of Python and C functions that one operation makes, which a
loop over everything multiplies. The long suite also takes times, at a million blocks.
"""

from __future__ import annotations

import random
import sys
import time
from bisect import bisect_left
from collections.abc import Callable

import pytest

from devalloc.arena.store.blocks import SortedSet
from devalloc.cache import AutoGrowthPolicy, BfcPolicy, Cache, FrugalPolicy, Policy
from tests.arena.support import KIB, MIB, NumberSource

FEW, MANY = 100, 3000


@pytest.mark.parametrize("seed", range(3))
def test_sorted_sets_are_sorted_sets(seed: int) -> None:
    """First it grows over several of its lists, then it shrinks to nothing."""
    rng = random.Random(seed)
    model = sorted(rng.sample(range(0, 40_000, 2), 2000))
    entries: SortedSet[int] = SortedSet(model)
    for step in range(6000):
        value = rng.randrange(40_000)
        place = bisect_left(model, value)
        assert entries.first_from(value) == (model[place] if place < len(model) else None)
        if rng.random() < (0.8 if step < 3000 else 0.2):
            if value not in model[place : place + 1]:
                entries.add(value)
                model.insert(place, value)
        elif model and rng.random() < 0.9:
            entries.remove(model.pop(rng.randrange(len(model))))
        elif model:
            assert entries.pop(0) == model.pop(0)
        assert (bool(entries), entries.last()) == (bool(model), model[-1] if model else None)
        if step % 500 == 0:
            assert list(entries) == model
            assert list(entries.from_entry(value)) == [at for at in model if at >= value]
            assert len(entries) == len(model)
            assert max(map(len, entries._lists)) <= 1024
    with pytest.raises(KeyError):
        entries.remove(-1)
    for entry in model:
        entries.remove(entry)
    assert not entries


def fragments(policy: str | Policy, count: int) -> Cache:
    """A cache with ``count`` free blocks of 1 KiB, which no two are neighbours."""
    cache = Cache(NumberSource(), policy)
    blocks = [cache.malloc(KIB) for _ in range(2 * count)]
    for block in blocks[::2]:
        cache.free(block)
    return cache


def idle(policy: Policy, count: int) -> Cache:
    """A cache with ``count`` idle segments."""
    cache = Cache(NumberSource(), policy)
    for block in [cache.malloc((4 + 2 * (at % 5)) * MIB) for at in range(count)]:
        cache.free(block)
    cache.malloc(2000 * MIB)  # what looks at idle segments has done so
    return cache


def calls_of(operation: Callable[[], object]) -> int:
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return count


def misses(cache: Cache) -> Callable[[], object]:
    return lambda: cache.malloc(20 * MIB)


def pair(cache: Cache, nbytes: int) -> Callable[[], object]:
    return lambda: cache.free(cache.malloc(nbytes))


CASES: dict[str, Callable[[int], Callable[[], object]]] = {
    "exact fit": lambda n: pair(fragments("torch", n), KIB),
    "split and merge": lambda n: pair(fragments("torch", n), 100),
    "whole segments at once": lambda n: pair(
        fragments(AutoGrowthPolicy(free_idle_chunks="at_once", chunk_size=2 * n * KIB), n),
        4 * n * KIB,
    ),
    "time stamps": lambda n: pair(fragments(BfcPolicy(timestamps=True), n), KIB),
    "frugal miss": lambda n: misses(idle(FrugalPolicy(), n)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_operation_costs_no_more_beside_many(
    case: Callable[[int], Callable[[], object]],
) -> None:
    costs = []
    for count in (FEW, MANY):
        operation = case(count)
        operation()
        costs.append(calls_of(operation))
    assert costs[1] <= 3 * costs[0], costs


def test_sizes_that_are_gone_leave_nothing() -> None:
    cache = Cache(NumberSource(), "auto_growth")
    for at in range(50_000):
        cache.free(cache.malloc(256 * (at + 1)))
    cache.empty_cache()
    rng = random.Random(1)
    for _ in range(3):
        for block in [cache.malloc(256 * rng.randrange(1, 3000)) for _ in range(300)]:
            cache.free(block)
        cache.audit()
        entries = [len(at.by_size) for at in cache._store.default.pools[1].lists.values()]
        assert sum(entries) <= 2 * len(cache._store.blocks) + 16
    cache.empty_cache()
    assert not cache._store.default.pools[1].lists


def test_streams_that_are_gone_leave_nothing() -> None:
    cache = Cache(NumberSource(), "torch")
    for stream in range(20_000):
        cache.free(cache.malloc(512, stream))
        cache.free(cache.malloc(30 * MIB, stream))
    cache.audit()
    cache.empty_cache()
    assert not any(pool.lists for pool in cache._store.all_pools())


def test_many_segments_that_were_idle_leave_no_large_table() -> None:
    """`set.pop` would search the table of a set that was large, again and again."""
    cache = idle(FrugalPolicy(), MANY)
    pool = cache._store.default.pools[1]
    pool.idle()
    assert not pool.touched
    assert sys.getsizeof(pool.touched) == sys.getsizeof(set())


def seconds(operation: Callable[[], object], times: int) -> float:
    best = float("inf")
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(times):
            operation()
        best = min(best, time.perf_counter() - begun)
    return best / times


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pair_beside_a_million_blocks() -> None:
    few, many = (seconds(pair(fragments("torch", count), KIB), 500) for count in (100, 1_000_000))
    assert many < 4 * few, (few, many)
