"""Doubles for the tests of the cache: a source of addresses without memory, and streams whose
events happen when the test says so."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from devalloc import Arena, OutOfMemory
from devalloc.cache import Cache, Policy
from devalloc.sources import Source, VirtualSource
from devalloc.sources.source import Capabilities
from devalloc.sources.virtual_calls import HostPages

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@contextmanager
def threads_that_switch(interval: float = 1e-5) -> Iterator[None]:
    """Threads take turns after so many seconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run_watched(
    works: Iterable[Callable[[], None]], look: Callable[[], None], stop: threading.Event
) -> None:
    """Run each of `works` in a thread, all switching often, and `look` beside them until `stop`."""
    watcher, *threads = [threading.Thread(target=each) for each in (look, *works)]
    with threads_that_switch():
        try:
            for thread in (watcher, *threads):
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            stop.set()
            watcher.join()


@contextmanager
def audited_arena(source: Source | None = None) -> Iterator[Arena]:
    """An arena, over the CPU's double of virtual memory if nothing is given, audited in the end."""
    with Arena(source=source or VirtualSource(torch.device("cpu"), HostPages())) as arena:
        yield arena
        arena.cache.audit()
    gc.collect()


class NumberSource:
    """Addresses without memory, at most `capacity` bytes at a time.

    Freed ranges are never given out again, so a stale address cannot pass for a new one. With
    `failing` a seeded share of the calls fails.
    """

    device = torch.device("cpu")
    granularity = 256
    capabilities = Capabilities(mappable=True)

    def __init__(self, capacity: int | None = None, failing: float = 0.0, seed: int = 0) -> None:
        self.capacity = capacity
        self.failing = failing
        self.failures = 0
        self.random = random.Random(seed)
        self.live: dict[int, int] = {}
        # What is mapped in reservations, bytes by offset.
        self.parts_of: dict[int, dict[int, int]] = {}
        self.asked: list[int] = []
        self.freed: list[int] = []
        self.next = 1 << 40

    @property
    def used(self) -> int:
        return sum(self.live.values()) + sum(sum(at.values()) for at in self.parts_of.values())

    def _ask(self, nbytes: int) -> None:
        self.asked.append(nbytes)
        if self.random.random() < self.failing:
            self.failures += 1
            raise OutOfMemory("injected")
        if self.capacity is not None and self.used + nbytes > self.capacity:
            raise OutOfMemory(f"the source has {self.capacity} bytes")

    def allocate(self, nbytes: int) -> int:
        self._ask(nbytes)
        address = self.next
        self.next += (nbytes + 2 * self.granularity) // self.granularity * self.granularity
        self.live[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        if address in self.parts_of:
            assert not self.parts_of[address], "nothing is mapped where addresses are released"
            del self.parts_of[address]
            return
        assert self.live.get(address) == nbytes, "free gets what allocate gave"
        self.freed.append(nbytes)
        del self.live[address]  # last: an interrupted free has not happened

    def reserve(self, nbytes: int) -> int:
        address = self.next
        self.next += nbytes + self.granularity
        self.parts_of[address] = {}
        return address

    def map(self, address: int, offset: int, nbytes: int, largest: int) -> None:
        self._ask(nbytes)
        ends = range(offset, offset + nbytes, largest)
        added = {start: min(largest, offset + nbytes - start) for start in ends}
        present = self.parts_of[address]
        assert not any(at < offset + nbytes and offset < at + n for at, n in present.items())
        added.update(present)
        self.parts_of[address] = added  # last: an interrupted call has not happened

    def unmap(self, address: int, offset: int, nbytes: int) -> None:
        present = self.parts_of[address]
        inside = {at for at, _ in self.parts(address, offset, nbytes)}
        assert sum(present[at] for at in inside) == nbytes, "whole pieces are unmapped"
        left = {at: size for at, size in present.items() if at not in inside}
        self.freed.append(nbytes)
        self.parts_of[address] = left  # last, as in map

    def parts(self, address: int, offset: int, nbytes: int) -> list[tuple[int, int]]:
        present = sorted(self.parts_of[address].items())
        return [(at, n) for at, n in present if offset <= at and at + n <= offset + nbytes]

    def view(self, segment: object, offset: int, nbytes: int) -> torch.Tensor:
        raise AssertionError("the cache never looks at memory")


class FakeEvent:
    def __init__(self, streams: FakeStreams, stream: int, point: int) -> None:
        self.streams, self.stream, self.point = streams, stream, point
        self.behind = {**streams.seen.get(stream, {}), stream: point}

    def query(self) -> bool:
        self.streams.forbid_in_capture("query")
        self.streams.queries += 1
        return self.streams.done.get(self.stream, 0) >= self.point

    def synchronize(self) -> None:
        self.streams.forbid_in_capture("synchronize")
        self.streams.advance(self.stream, self.point)


class FakeStreams:
    """Work of a stream is a count; events are points in it that `advance` passes."""

    def __init__(self) -> None:
        self.queued: dict[int, int] = {}
        self.done: dict[int, int] = {}
        self.waits: list[tuple[int, int]] = []
        # Per stream, up to which point of which stream it is ordered behind (a vector clock).
        self.seen: dict[int, dict[int, int]] = {}
        self.queries = 0
        self.now = 0
        self.in_capture = False
        self.relaxed = 0

    def forbid_in_capture(self, what: str) -> None:
        assert not self.in_capture, f"{what} during a capture"

    def current(self) -> int:
        return self.now

    def record(self, stream: int) -> FakeEvent:
        self.forbid_in_capture("record")
        self.queued[stream] = self.queued.get(stream, 0) + 1
        return FakeEvent(self, stream, self.queued[stream])

    def wait(self, stream: int, event: FakeEvent) -> None:
        self.waits.append((stream, event.stream))
        seen = self.seen.setdefault(stream, {})
        for other, point in event.behind.items():
            seen[other] = max(seen.get(other, 0), point)

    def over(self, user: int, point: int, stream: int) -> bool:
        """Whether work of `user` up to `point` is done when new work of `stream` begins."""
        done = self.done.get(user, 0) >= point
        return done or user == stream or self.seen.get(stream, {}).get(user, 0) >= point

    def advance(self, stream: int, point: int | None = None) -> None:
        point = self.queued.get(stream, 0) if point is None else point
        self.done[stream] = max(self.done.get(stream, 0), point)

    def synchronize(self) -> None:
        self.forbid_in_capture("synchronize")
        for stream in self.queued:
            self.advance(stream)

    def capturing(self) -> bool:
        return self.in_capture

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        self.relaxed += 1
        yield


def cache(
    policy: str | Policy = "torch", capacity: int | None = None, **options: object
) -> tuple[Cache, NumberSource]:
    source = NumberSource(capacity)
    return Cache(source, policy, **options), source  # type: ignore[arg-type]
