"""What an operation of the host cache costs beside few and beside very many blocks.

A case builds a cache over a source of numbers, without memory behind them, and gives the operation
that is timed. So the rows say what the bookkeeping costs, and need no GPU. The cache is audited at
the end, if it has at most `AUDITED` blocks.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from benchmarks.harness import Samples, WrongResult
from devalloc.cache import AutoGrowthPolicy, BfcPolicy, Cache, FrugalPolicy, Policy
from devalloc.errors import CorruptionError

KIB, MIB = 1 << 10, 1 << 20
AUDITED = 300_000
ENOUGH_S = 0.02
"""A sample has so many operations that it takes about this long."""


class Numbers:
    """A source of addresses without memory; none is given out twice."""

    device = torch.device("cpu")
    granularity = 256

    def __init__(self) -> None:
        self._next = 1 << 40

    def allocate(self, nbytes: int) -> int:
        address = self._next
        self._next += nbytes + 512
        return address

    def free(self, address: int, nbytes: int) -> None:
        pass


class Timed(NamedTuple):
    """An operation on a cache: does ``count`` of them and returns the seconds that it timed.

    ``rounds`` bounds the samples of what can be repeated only at great cost; 0 is no bound.
    """

    cache: Cache
    seconds: Callable[[int], float]
    rounds: int = 0


def _fragments(policy: str | Policy, count: int) -> Cache:
    """``count`` free blocks of 1 KiB, no two of them neighbours."""
    cache = Cache(Numbers(), policy)  # type: ignore[arg-type]
    for block in [cache.malloc(KIB) for _ in range(2 * count)][::2]:
        cache.free(block)
    return cache


def _pairs(cache: Cache, nbytes: int) -> Timed:
    def seconds(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            cache.free(cache.malloc(nbytes))
        return time.perf_counter() - begun

    return Timed(cache, seconds)


def _same_size(count: int) -> Timed:
    return _pairs(_fragments("torch", count), KIB)


def _split_and_merge(count: int) -> Timed:
    return _pairs(_fragments("torch", count), 100)


def _frees(count: int) -> Timed:
    """Frees anywhere, of blocks without free neighbours; they are allocated again untimed."""
    cache = Cache(Numbers(), "torch")  # type: ignore[arg-type]
    apart = [cache.malloc(KIB) for _ in range(4 * count)][::2]
    for block in apart[::2]:
        cache.free(block)
    live = apart[1::2]
    rng = random.Random(0)

    def seconds(frees: int) -> float:
        places = rng.sample(range(count), min(frees, count))
        begun = time.perf_counter()
        for place in places:
            cache.free(live[place])
        took = time.perf_counter() - begun
        for place in places:
            live[place] = cache.malloc(KIB)
        return took * frees / len(places)

    return Timed(cache, seconds)


def _empty_cache(count: int) -> Timed:
    """For each segment. The segments are made again untimed."""
    cache = Cache(Numbers(), "auto_growth")  # type: ignore[arg-type]

    def seconds(times: int) -> float:
        for block in [cache.malloc((4 + 2 * (at % 5)) * MIB) for at in range(count)]:
            cache.free(block)
        begun = time.perf_counter()
        cache.empty_cache()
        return (time.perf_counter() - begun) * times / count

    return Timed(cache, seconds, rounds=3)


def _at_once(count: int) -> Timed:
    policy = AutoGrowthPolicy(free_idle_chunks="at_once", chunk_size=2 * count * KIB)
    return _pairs(_fragments(policy, count), 4 * count * KIB)


def _stamps(count: int) -> Timed:
    return _pairs(_fragments(BfcPolicy(timestamps=True), count), KIB)


def _misses(count: int) -> Timed:
    """A few that give idle segments back, which are made again untimed."""
    cache = Cache(Numbers(), FrugalPolicy())  # type: ignore[arg-type]

    def seconds(times: int) -> float:
        segments = [cache.malloc((4 + 2 * (at % 5)) * MIB) for at in range(count)]
        for block in segments:
            cache.free(block)
        held = cache.malloc(2000 * MIB)  # what looks at idle segments has done so
        begun = time.perf_counter()
        blocks = [cache.malloc(20 * MIB) for _ in range(times)]
        took = time.perf_counter() - begun
        for block in (held, *blocks):
            cache.free(block)
        cache.empty_cache()
        cache.set_limit(None)  # forgets the policy's record
        return took

    return Timed(cache, seconds, rounds=10)


def _after_sizes(count: int) -> Timed:
    cache = Cache(Numbers(), "auto_growth")  # type: ignore[arg-type]
    for at in range(count):
        cache.free(cache.malloc(256 * (at + 1)))
    cache.empty_cache()
    return _pairs(cache, KIB)


def _after_streams(count: int) -> Timed:
    cache = Cache(Numbers(), "torch")  # type: ignore[arg-type]
    for stream in range(1, count + 1):
        cache.free(cache.malloc(KIB, stream))
    cache.empty_cache()

    def seconds(times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            cache.free(cache.malloc(KIB))
            cache.empty_cache()
        return time.perf_counter() - begun

    return Timed(cache, seconds)


class Case(NamedTuple):
    """``make`` builds it for each of the ``counts``; the other fields are words for the table."""

    make: Callable[[int], Timed]
    counts: tuple[int, ...]
    operation: str
    beside: str


CASES: dict[str, Case] = {
    "same-size": Case(
        *(
            _same_size,
            (100, 100_000, 1_000_000),
            "malloc and free, torch",
            "free blocks of its size",
        )
    ),
    "split": Case(
        *(_split_and_merge, (100, 100_000, 1_000_000)),
        *("malloc that splits and free that merges, torch", "free blocks"),
    ),
    "free": Case(
        *(_frees, (100, 300_000), "free, torch"),
        "free blocks, and three times as many live ones",
    ),
    "empty-cache": Case(
        *(_empty_cache, (2000, 200_000), "`empty_cache`, for each segment, auto_growth"),
        "idle segments",
    ),
    "at-once": Case(
        *(_at_once, (100, 100_000)),
        *('malloc and free of a segment, auto_growth "at_once"', "free blocks"),
    ),
    "stamps": Case(
        _stamps, (100, 10_000), "malloc and free, bfc with time stamps", "stamped chunks"
    ),
    "miss": Case(_misses, (1000, 10_000), "malloc that asks the source, frugal", "idle segments"),
    "sizes": Case(
        _after_sizes, (100, 50_000), "malloc and free, auto_growth", "sizes that came and went"
    ),
    "streams": Case(
        *(_after_streams, (100, 20_000), "malloc, free and `empty_cache`, torch"),
        "streams that came and went",
    ),
}


def measure(case: Case, count: int, rounds: int, enough_s: float = ENOUGH_S) -> Samples:
    """Microseconds of one operation. Garbage collection is off."""
    gc.collect()
    gc.disable()
    try:
        timed = case.make(count)
        took = timed.seconds(10) / 10
        times = 10 if timed.rounds else max(1, min(20_000, int(enough_s / max(took, 1e-9))))
        bound = min(rounds, timed.rounds or rounds)
        values = [timed.seconds(times) * 1e6 / times for _ in range(bound)]
        if count <= AUDITED:
            try:
                timed.cache.audit()
            except CorruptionError as error:
                raise WrongResult(str(error)) from error
        return Samples("operation", values, unit="us")
    finally:
        gc.enable()


def rows(rounds: int, largest: int | None = None) -> Iterator[tuple[str, int, Samples]]:
    """(case, count, samples); with ``largest`` no case has more blocks than that."""
    for name, case in CASES.items():
        bounded = (min(count, largest or count) for count in case.counts)
        for count in dict.fromkeys(bounded):
            yield name, count, measure(case, count, rounds)
