"""Many threads on one cache: nothing lost, nothing given twice, also when the source fails.

Each thread checks that what it holds is held by nobody else: all live ranges are entered in one
dict whose insertion is atomic. With the engine's lock planted away, all ten cases fail.
"""

from __future__ import annotations

import gc
import random
import sys
import threading

import pytest

from devalloc import OutOfMemory
from devalloc.cache import Cache
from tests.arena.support import KIB, MIB, NumberSource

THREADS = 8
SHORT, LONG = 20_000, 100_000
POLICIES = ("tiny", "torch", "bfc", "auto_growth", "frugal")


class Worker(threading.Thread):
    def __init__(self, cache: Cache, owners: dict[int, int], seed: int, steps: int) -> None:
        super().__init__()
        self.cache, self.owners, self.steps = cache, owners, steps
        self.random = random.Random(seed)
        self.seed = seed
        self.failures = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error

    def work(self) -> None:
        live: list[int] = []
        for _ in range(self.steps):
            if live and (len(live) > 40 or self.random.random() < 0.5):
                address = live.pop(self.random.randrange(len(live)))
                assert self.owners.pop(address) == self.seed
                self.cache.free(address)
                continue
            size = self.random.choice((100, 700, 5 * KIB, 300 * KIB, 2 * MIB, 12 * MIB))
            try:
                address = self.cache.malloc(size, stream=self.random.randrange(2))
            except OutOfMemory:
                self.failures += 1
                continue
            assert self.owners.setdefault(address, self.seed) == self.seed, "given twice"
            live.append(address)
        for address in live:
            assert self.owners.pop(address) == self.seed
            self.cache.free(address)


def stress(policy: str, steps: int, failing: float) -> None:
    source = NumberSource(capacity=2000 * MIB, failing=failing, seed=1)
    cache = Cache(source, policy, share_streams=policy == "torch")
    owners: dict[int, int] = {}
    workers = [Worker(cache, owners, seed, steps) for seed in range(THREADS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            cache.audit()
            for worker in workers:
                worker.join(0.1)
    finally:
        sys.setswitchinterval(interval)
    for worker in workers:
        assert worker.error is None, f"seed {worker.seed}: {worker.error!r}"
    failures = sum(worker.failures for worker in workers)
    assert (source.failures > 0) == bool(failing)
    assert failing or failures == 0
    assert not owners
    cache.audit()
    stats = cache.stats()
    assert stats["allocation.all.current"] == 0
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] > 0
    cache.empty_cache()
    assert not source.live


@pytest.mark.parametrize("failing", [0.0, 0.5], ids=["sound", "failing"])
@pytest.mark.parametrize("policy", POLICIES)
def test_threads(policy: str, failing: float) -> None:
    stress(policy, SHORT, failing)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("failing", [0.0, 0.5], ids=["sound", "failing"])
@pytest.mark.parametrize("policy", POLICIES)
def test_many_threads_for_long(policy: str, failing: float) -> None:
    stress(policy, LONG, failing)


class Cycle:
    """Garbage that only a collection finds, and whose end frees a block."""

    def __init__(self, cache: Cache) -> None:
        self.me = self
        self.cache = cache
        self.address = cache.malloc(700)

    def __del__(self) -> None:
        self.cache.free(self.address)


def test_a_collection_may_free_in_the_middle_of_any_call() -> None:
    cache = Cache(NumberSource(), "torch")
    threshold = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for step in range(3000):
            Cycle(cache)
            cache.free(cache.malloc(1 + step % 3000))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert cache.stats()["allocation.all.current"] == 0
    cache.audit()
