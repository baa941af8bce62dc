"""Many threads on one cache: nothing lost, nothing given twice, also when the source fails.

Each thread checks that what it holds is held by no other thread: all live ranges are entered in one
dict whose insertion is atomic, and tensors of arenas are read back. Without the engine's lock (a
planted bug) all cases fail; if memory is kept for reuse to which a tensor still refers, those with
arenas do.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from devalloc import Arena, OutOfMemory
from devalloc.arena import Block
from devalloc.cache import AutoGrowthPolicy, Cache
from devalloc.sources import HostSource
from devalloc.sources.adaptors import FaultAdaptor, StatisticsAdaptor
from tests.arena.support import KIB, MIB, FakeEvent, FakeStreams, NumberSource, threads_that_switch

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


def run_audited(workers: Sequence[Worker | ArenaWorker], caches: Sequence[Cache]) -> None:
    """Run threads to their end, which take turns often, and audit the caches all the while."""
    with threads_that_switch():
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            for cache in caches:
                cache.audit()
            for worker in workers:
                worker.join(0.1)
    for worker in workers:
        assert worker.error is None, f"seed {worker.seed}: {worker.error!r}"


def stress(policy: str, steps: int, failing: float) -> None:
    source = NumberSource(capacity=2000 * MIB, failing=failing, seed=1)
    cache = Cache(source, policy, share_streams=policy == "torch")
    owners: dict[int, int] = {}
    workers = [Worker(cache, owners, seed, steps) for seed in range(THREADS)]
    run_audited(workers, [cache])
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


@pytest.mark.proves("tiny/mutex", "tiny/tests-same")
@pytest.mark.parametrize("failing", [0.0, 0.5], ids=["sound", "failing"])
@pytest.mark.parametrize("policy", POLICIES)
def test_threads(policy: str, failing: float) -> None:
    stress(policy, SHORT, failing)


@pytest.mark.proves("tiny/mutex")
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("failing", [0.0, 0.5], ids=["sound", "failing"])
@pytest.mark.parametrize("policy", POLICIES)
def test_many_threads_for_long(policy: str, failing: float) -> None:
    stress(policy, LONG, failing)


# Arenas -------------------------------------------------------------------------------------------


class ArenaWorker(threading.Thread):
    """Tensors, views of them and blocks of two arenas; all of it is written and read back."""

    def __init__(self, arenas: list[Arena], seed: int, steps: int) -> None:
        super().__init__()
        self.arenas, self.seed, self.steps = arenas, seed, steps
        self.random = random.Random(seed)
        self.held: list[tuple[torch.Tensor, int]] = []
        self.blocks: list[Block] = []
        self.failures = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for step in range(self.steps):
                try:
                    self.turn(step)
                except torch.OutOfMemoryError:
                    self.failures += 1
            while self.held:
                self.end_one()
            while self.blocks:
                self.blocks[-1].arena.free(self.blocks.pop())
        except BaseException as error:
            self.error = error

    def turn(self, step: int) -> None:
        arena = self.random.choice(self.arenas)
        chance = self.random.random()
        if chance < 0.5:
            self.begin(arena, step)
        elif chance < 0.9 and self.held:
            self.end_one()
        elif chance < 0.94:
            self.blocks.append(arena.alloc(self.random.choice((100, 5 * KIB, 2 * MIB))))
        elif chance < 0.998 and self.blocks:
            block = self.blocks.pop(self.random.randrange(len(self.blocks)))
            block.arena.free(block)
        else:
            arena.empty_cache()  # so that the source is asked again and again

    def begin(self, arena: Arena, step: int) -> None:
        words = self.random.choice((16, 16, 16, 500, 4096, self.random.randrange(1, 40_000)))
        tag = self.seed * 1_000_000 + step
        tensor = arena.empty((words,), torch.int64)
        tensor[0] = tensor[-1] = tag
        if step % 3 == 0:
            tensor = tensor.data  # which alone keeps the memory
        if step % 50 == 0:
            cycle: list[object] = [tensor]
            cycle.append(cycle)
        self.held.append((tensor, tag))
        if len(self.held) > 40:
            self.end_one()

    def end_one(self) -> None:
        tensor, tag = self.held.pop(self.random.randrange(len(self.held)))
        assert int(tensor[0]) == int(tensor[-1]) == tag, "another thread has this memory"


def arena_stress(steps: int, failing: float) -> None:
    sources = [StatisticsAdaptor(FaultAdaptor(HostSource(), failing, seed)) for seed in (1, 2)]
    arenas = [
        Arena(source=source, policy=policy, limit="600MiB")
        for source, policy in zip(sources, ("torch", "frugal"), strict=True)
    ]
    workers = [ArenaWorker(arenas, seed, steps) for seed in range(THREADS)]
    run_audited(workers, [arena.cache for arena in arenas])
    assert (sum(worker.failures for worker in workers) > 0) == bool(failing)
    gc.collect()
    for arena, source in zip(arenas, sources, strict=True):
        arena.cache.audit()
        stats = arena.stats()
        assert stats["allocation.all.current"] == 0
        assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] > steps
        arena.close()
        assert arena.cache.reserved == source.counters.bytes.current == 0


@pytest.mark.proves("rmm/faults-tests")
@pytest.mark.parametrize("failing", [0.0, 0.5], ids=["sound", "failing"])
def test_threads_with_arenas(failing: float) -> None:
    arena_stress(2_000, failing)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("failing", [0.0, 0.5], ids=["sound", "failing"])
def test_many_threads_with_arenas_for_long(failing: float) -> None:
    arena_stress(LONG, failing)


# Callbacks ----------------------------------------------------------------------------------------


@pytest.mark.proves("torch/order-events")
def test_two_caches_may_empty_each_other() -> None:
    caches = [Cache(NumberSource(), "torch") for _ in range(2)]
    # No thread goes on before both are in the middle of their requests.
    meeting = threading.Barrier(2)
    for cache, other in zip(caches, reversed(caches), strict=True):
        cache.on_low_memory(lambda: meeting.wait(20))
        cache.on_low_memory(other.empty_cache)

    def work(cache: Cache) -> None:
        for _ in range(50):
            cache.free(cache.malloc(30 * MIB))
            cache.empty_cache()

    threads = [threading.Thread(target=work, args=(cache,), daemon=True) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "each waits for the other"
    for cache in caches:
        cache.audit()
        assert cache.reserved == 0


# Finalizers ---------------------------------------------------------------------------------------


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


class Interrupting(NumberSource):
    """Does in the middle of the engine's next calls what a finalizer would; refuses some frees."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self.meanwhile: list[Callable[[], object]] = []
        self.refused: set[int] = set()

    def allocate(self, nbytes: int) -> int:
        while self.meanwhile:
            self.meanwhile.pop()()
        return super().allocate(nbytes)

    def free(self, address: int, nbytes: int) -> None:
        if nbytes in self.refused:
            raise RuntimeError("not today")
        super().free(address, nbytes)


class InterruptingStreams(FakeStreams):
    """The same within a free of what other streams use."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[Callable[[], object]] = []

    def record(self, stream: int) -> FakeEvent:
        while self.meanwhile:
            self.meanwhile.pop()()
        return super().record(stream)


def test_a_finalizer_may_close_in_the_middle_of_an_allocation() -> None:
    source = Interrupting()
    cache = Cache(source, "torch")
    cache.free(cache.malloc(30 * MIB))
    source.meanwhile = [cache.close]
    address = cache.malloc(40 * MIB)
    cache.free(address)
    assert not source.live
    cache.audit()


@pytest.mark.parametrize("last", [False, True], ids=["close", "free what is closed"])
def test_what_a_finalizer_asks_of_a_closed_cache_waits_for_no_other_call(last: bool) -> None:
    source, streams = NumberSource(), InterruptingStreams()
    cache = Cache(source, "torch", streams=streams)
    other, address = cache.malloc(20 * MIB), cache.malloc(30 * MIB)
    cache.record_stream(address, 2)
    if last:
        cache.close()
        streams.meanwhile = [partial(cache.free, other)]
    else:
        cache.free(other)
        streams.meanwhile = [cache.close]
    cache.free(address)
    assert set(source.live.values()) <= {30 * MIB}, "at most what an event guards"
    cache.close()
    assert not source.live
    cache.audit()


def test_a_close_that_fails_may_be_repeated() -> None:
    source = Interrupting()
    arena = Arena(source=source)
    for block in [arena.alloc(size * MIB) for size in (30, 40, 50)]:
        arena.free(block)
    source.refused = {40 * MIB}
    with pytest.raises(RuntimeError, match="not today"):
        arena.close()
    assert list(source.live.values()) == [40 * MIB], "the others went back"
    arena.cache.audit()
    source.refused.clear()
    arena.close()
    assert not source.live


def test_a_finalizers_free_that_fails_stops_nothing(unraisable: list[str]) -> None:
    source = Interrupting()
    cache = Cache(source, "torch")
    blocks = [cache.malloc(30 * MIB) for _ in range(3)]
    source.refused = {30 * MIB}
    source.meanwhile = [*(partial(cache.free, block) for block in blocks), cache.close]
    address = cache.malloc(40 * MIB)
    assert [cache.owns(block) for block in (*blocks, address)] == [False, False, False, True]
    assert unraisable == ["not today"] * 4, "the last one for the close"
    source.refused.clear()
    cache.free(address)
    cache.empty_cache()
    cache.audit()
    assert not source.live


def test_a_finalizers_free_that_fails_while_a_request_waits(unraisable: list[str]) -> None:
    source = Interrupting(capacity=40 * MIB)
    cache = Cache(source, AutoGrowthPolicy(retry_wait_s=0.1))
    block = cache.malloc(10 * MIB)
    source.refused = {10 * MIB}
    source.meanwhile = [partial(cache.free, block), cache.close]
    with pytest.raises(RuntimeError, match="not today"):
        cache.malloc(40 * MIB)  # by then the request itself gives back what is idle
    assert unraisable == ["not today"] * 2
    source.refused.clear()
    cache.close()
    cache.audit()
    assert not source.live
