"""Random calls of caches with captures, pools and failures: in the end all memory is back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from devalloc import InvalidArgument, OutOfMemory
from devalloc.cache import AutoGrowthPolicy, BfcPolicy, Cache, PrivatePool, make_policy
from tests.arena.support import KIB, MIB, FakeEvent, FakeStreams, NumberSource

POLICIES = (
    *("tiny", "torch", "bfc", "auto_growth", "frugal"),
    BfcPolicy(timestamps=True),
    AutoGrowthPolicy(free_idle_chunks="at_once"),
)
SIZES = (100, 5 * KIB, MIB // 2, MIB, 3 * MIB, 12 * MIB, 30 * MIB)


class Refused(Exception):
    pass


class Source(NumberSource):
    refusing = 0.0

    def free(self, address: int, nbytes: int) -> None:
        if self.random.random() < self.refusing:
            raise Refused
        super().free(address, nbytes)


class Streams(FakeStreams):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.refusing = 0.0

    def record(self, stream: int) -> FakeEvent:
        if self.random.random() < self.refusing:
            raise Refused
        return super().record(stream)


class Life:
    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.source = Source(capacity=200 * MIB, failing=0.02, seed=seed)
        self.streams = Streams(seed)
        self.cache = Cache(
            self.source,
            make_policy(rng.choice(POLICIES)),
            limit=220 * MIB,
            streams=self.streams,
            share_streams=rng.random() < 0.6,
        )
        self.live: list[int] = []
        self.pools: list[PrivatePool] = []
        self.routes: list[AbstractContextManager[None]] = []

    def turn(self) -> None:
        steps: dict[Callable[[], object], float] = {
            self.malloc: 16,
            self.free: 10,
            self.record: 4,
            self.begin_pool: 2,
            self.end_pool: 2,
            self.begin_route: 2,
            self.end_route: 2,
            self.cache.close: 0.3,
            self.cache.empty_cache: 1,
            lambda: self.streams.advance(self.random.randrange(3)): 1,
        }
        (step,) = self.random.choices(list(steps), list(steps.values()))
        with contextlib.suppress(OutOfMemory, Refused):
            step()
        self.cache.audit()

    def malloc(self) -> None:
        size, stream = self.random.choice(SIZES), self.random.randrange(3)
        if self.cache.closed:
            with pytest.raises(InvalidArgument, match="closed"):
                self.cache.malloc(size, stream)
        else:
            self.live.append(self.cache.malloc(size, stream))

    def free(self) -> None:
        if self.live:
            address = self.live.pop(self.random.randrange(len(self.live)))
            try:
                self.cache.free(address)
            finally:
                if self.cache.owns(address):
                    self.live.append(address)

    def record(self) -> None:
        if self.live:
            self.cache.record_stream(self.random.choice(self.live), self.random.randrange(3))

    def begin_pool(self) -> None:
        self.pools.append(self.cache.private_pool())

    def end_pool(self) -> None:
        if self.pools:
            self.pools.pop(self.random.randrange(len(self.pools))).release()

    def begin_route(self) -> None:
        if self.pools:
            capture = self.random.random() < 0.5
            route = self.cache.route(self.random.choice(self.pools), capture=capture)
            route.__enter__()
            self.routes.append(route)

    def end_route(self) -> None:
        if self.routes:
            self.routes.pop().__exit__(None, None, None)

    def end(self) -> None:
        """In any order of what there is to end."""
        ends = [self.free] * len(self.live) + [self.end_pool] * len(self.pools)
        ends += [self.end_route] * len(self.routes) + [self.cache.close]
        self.random.shuffle(ends)
        for end in ends:
            end()
            self.cache.audit()


@pytest.mark.proves("torch/cached-memory")
@pytest.mark.parametrize("failing", [False, True], ids=["sound", "failing"])
def test_in_the_end_all_memory_is_back(failing: bool) -> None:
    for seed in range(200):
        life = Life(seed)
        if failing:
            life.streams.refusing, life.source.refusing = 0.05, 0.1
        for _ in range(60):
            life.turn()
        life.streams.refusing = life.source.refusing = 0.0
        life.end()
        life.cache.close()  # for what waits for events
        assert not life.source.live, f"seed {seed}"
        life.cache.audit()
