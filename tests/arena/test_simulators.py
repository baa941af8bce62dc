"""The policies against simulators of the allocators that they follow: the same addresses, the same
calls of the source, the same failures, in random traces.

A case is named by its seed: ``race(seed)`` repeats it.
"""

from __future__ import annotations

import random

import pytest

from devalloc import OutOfMemory
from devalloc.cache import AutoGrowthPolicy, BfcPolicy, Cache, Policy, TinyPolicy, TorchPolicy
from tests.arena.simulators import Paddle, PyTorch, Simulator, TensorFlow, TinyTorch
from tests.arena.support import KIB, MIB, NumberSource

STEPS = 250
SIZES = (
    *(1, 255, 256, 257, 511, 512, 513, 1200, 4096),
    *(MIB - 512, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1, 19 * MIB),
)

Sources = tuple[NumberSource, NumberSource]


def tiny(rng: random.Random, sources: Sources, limit: int) -> tuple[Policy, Simulator]:
    return TinyPolicy(), TinyTorch(sources[1], limit)


def torch(rng: random.Random, sources: Sources, limit: int) -> tuple[Policy, Simulator]:
    divisions = rng.choice((0, 0, 1, 2, 4, 8))
    split = rng.choice((None, None, 21 * MIB, 32 * MIB, 64 * MIB))
    threshold = rng.choice((0.0, 0.0, 0.3, 0.7))
    rounding = rng.choice((20 * MIB, 33 * MIB))
    policy = TorchPolicy(divisions, split, threshold, rounding)
    simulator = PyTorch(sources[1], limit, split or 1 << 62, threshold, divisions, rounding)
    return policy, simulator


def bfc(rng: random.Random, sources: Sources, limit: int) -> tuple[Policy, Simulator]:
    region = rng.choice((2304, 2 * MIB, 50 * MIB))
    return BfcPolicy(first_region=region), TensorFlow(sources[1], limit, region // 256 * 256)


def auto_growth(rng: random.Random, sources: Sources, limit: int) -> tuple[Policy, Simulator]:
    alignment = rng.choice((256, 512, 768))
    chunk = rng.choice((0, 5 * MIB, 16 * MIB + 1))
    idle = rng.choice(("on_failure", "on_miss", "at_once"))
    return (
        AutoGrowthPolicy(alignment, chunk, idle),
        Paddle(sources[1], limit, alignment, chunk, idle),
    )


MAKERS = {"tiny": tiny, "torch": torch, "bfc": bfc, "auto_growth": auto_growth}
STREAMS = {"torch": 3}


def race(name: str, seed: int, steps: int = STEPS) -> None:
    rng = random.Random(f"{name} {seed}")
    sources = NumberSource(), NumberSource()
    capacity = rng.choice((None, 60 * MIB, 150 * MIB, 400 * MIB))
    limit = rng.choice((60 * MIB - 1, 100 * MIB, 300 * MIB, 16 << 30))
    for source in sources:
        source.capacity = capacity
    policy, simulator = MAKERS[name](rng, sources, limit)
    cache = Cache(sources[0], policy, limit=limit)
    live: list[int] = []
    largest = rng.choice((4 * KIB, 2 * MIB, 60 * MIB))
    for step in range(steps):
        where = f"{name}, seed {seed}, step {step}, {policy}"
        if live and rng.random() < (0.7 if len(live) > 60 else 0.45):
            address = live.pop(rng.randrange(len(live)))
            cache.free(address)
            simulator.free(address)
        else:
            nbytes = rng.choice(SIZES) if rng.random() < 0.3 else rng.randrange(1, largest)
            stream = rng.randrange(STREAMS.get(name, 1))
            expected = simulator.malloc(nbytes, stream)
            try:
                found = cache.malloc(nbytes, stream)
            except OutOfMemory:
                assert expected is None, f"{where}: malloc of {nbytes} failed"
            else:
                assert found == expected, f"{where}: malloc of {nbytes}"
                live.append(found)
        assert sources[0].asked == sources[1].asked, where
        assert sorted(sources[0].freed) == sorted(sources[1].freed), where
        assert cache.reserved == simulator.reserved, where
        for source in sources:
            source.asked.clear()
            source.freed.clear()
    cache.audit()


@pytest.mark.parametrize("name", MAKERS)
def test_policies_do_what_their_originals_do(name: str) -> None:
    for seed in range(12):
        race(name, seed)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MAKERS)
def test_policies_do_what_their_originals_do_for_a_million_operations(name: str) -> None:
    for seed in range(1000, 5000):
        race(name, seed)


@pytest.mark.proves("bfc/growth-doubling", "bfc/nine-tenths")
def test_a_backed_off_region_is_a_float_of_24_bits() -> None:
    """The original doubles its region before it asks, and keeps that if the source refuses."""
    source = NumberSource(capacity=60 * MIB)
    cache = Cache(source, "bfc", limit=16 << 30)
    with pytest.raises(OutOfMemory):
        cache.malloc(164_349_353)
    cache.malloc(28_895_543)
    assert source.used == 61_410_560
    source = NumberSource(capacity=15 << 30)
    Cache(source, BfcPolicy(growth=False), limit=16 << 30).malloc(1)
    assert source.asked == [16 << 30, 15_461_881_856]
