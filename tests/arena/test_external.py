"""Segments that another allocator takes from an engine's source."""

from __future__ import annotations

import threading
import time

import pytest

from devalloc import InvalidArgument, InvalidFree, OutOfMemory
from devalloc.cache import Cache
from devalloc.sources import SimulatedSource
from tests.arena.support import MIB, FakeEvent, FakeStreams, NumberSource, cache


@pytest.mark.proves("library/limit-holds")
def test_both_count_against_the_limit() -> None:
    engine, source = cache("auto_growth", limit=6 * MIB)
    outside = engine.external
    address = outside.allocate(4 * MIB)
    kept = engine.malloc(2 * MIB)
    assert (outside.held, engine.reserved, source.used) == (4 * MIB, 2 * MIB, 6 * MIB)
    with pytest.raises(OutOfMemory, match=r"limit of 6 MiB: 6 MiB are taken"):
        outside.allocate(1)
    with pytest.raises(OutOfMemory, match=r"4 MiB are with PyTorch's own allocator"):
        engine.malloc(2 * MIB)
    with pytest.raises(InvalidArgument, match="6 MiB that cannot be given back"):
        engine.set_limit(5 * MIB)
    assert outside.reserved == 4 * MIB, "nothing is left announced"
    outside.free(address)
    assert (outside.held, outside.reserved, source.used) == (0, 0, 2 * MIB)
    other = engine.malloc(2 * MIB)
    engine.free(other)
    engine.free(kept)
    engine.audit()


def test_a_failing_source_leaves_nothing() -> None:
    engine, _ = cache(capacity=2 * MIB)
    with pytest.raises(OutOfMemory):
        engine.external.allocate(4 * MIB)
    assert engine.external.reserved == 0
    assert engine.external.stats() == {
        "outside_segment.current": 0,
        "outside_segment.allocated": 0,
        "outside_segment.freed": 0,
        "outside_bytes.current": 0,
    }


def test_wrong_frees_change_nothing() -> None:
    engine, _ = cache()
    address = engine.external.allocate(MIB)
    with pytest.raises(InvalidFree, match="no segment is out there"):
        engine.external.free(address + 1)
    assert engine.external.reserved == MIB
    engine.external.free(address)
    with pytest.raises(InvalidFree):
        engine.external.free(address)
    assert engine.external.reserved == 0


def test_a_source_that_refuses_a_free_keeps_the_segment() -> None:
    class Stubborn(NumberSource):
        def free(self, address: int, nbytes: int) -> None:
            raise InvalidFree("not today")

    engine = Cache(Stubborn())
    address = engine.external.allocate(MIB)
    with pytest.raises(InvalidFree, match="not today"):
        engine.external.free(address)
    assert (engine.external.held, engine.external.reserved) == (MIB, MIB)


def test_nothing_waits_for_the_engine() -> None:
    """A thread is inside the engine and stays there: segments come and go all the same."""
    inside, leave = threading.Event(), threading.Event()

    class Holding(FakeStreams):
        def record(self, stream: int) -> FakeEvent:
            inside.set()
            assert leave.wait(20)
            return super().record(stream)

    engine, _ = cache(limit=64 * MIB, streams=Holding())
    address = engine.malloc(MIB)
    engine.record_stream(address, 2)
    holder = threading.Thread(target=engine.free, args=(address,))
    holder.start()
    assert inside.wait(20)
    done = threading.Event()

    def take() -> None:
        engine.external.free(engine.external.allocate(MIB))
        done.set()

    taker = threading.Thread(target=take)
    taker.start()
    served = done.wait(10)
    leave.set()
    holder.join()
    taker.join()
    assert served


@pytest.mark.proves("library/limit-holds")
def test_threads_never_exceed_the_limit() -> None:
    """The source takes its time after the limit was looked at: so do cudaMalloc's callers."""

    class Slow(SimulatedSource):
        def allocate(self, nbytes: int, stream: int | None = None) -> int:
            time.sleep(0.0001)
            return super().allocate(nbytes, stream)

    limit = 12 * MIB
    source = Slow(granularity=4096)
    engine = Cache(source, "auto_growth", limit=limit)
    errors: list[BaseException] = []

    def run(allocate: object, free: object) -> None:
        try:
            for _ in range(300):
                try:
                    free(allocate(5 * MIB))  # type: ignore[operator]
                except OutOfMemory:
                    time.sleep(0.0002)  # or the refused thread would end before any other frees
        except BaseException as error:
            errors.append(error)

    def cached_free(address: int) -> None:
        engine.free(address)
        engine.empty_cache()

    pairs = [(engine.external.allocate, engine.external.free), (engine.malloc, cached_free)] * 3
    threads = [threading.Thread(target=run, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert source.peak <= limit
    assert source.used == engine.external.reserved == engine.reserved == 0
    engine.audit()


@pytest.mark.parametrize("first", ["engine", "outside"])
def test_what_is_being_asked_for_counts(first: str) -> None:
    """One side is in the middle of a source call when the other looks at the limit."""

    class Meanwhile(SimulatedSource):
        def allocate(self, nbytes: int, stream: int | None = None) -> int:
            if callbacks:
                with pytest.raises(OutOfMemory):
                    callbacks.pop()(8 * MIB)
                refused.append(nbytes)
            return super().allocate(nbytes, stream)

    refused: list[int] = []
    source = Meanwhile()
    engine = Cache(source, "auto_growth", limit=12 * MIB)
    calls = [engine.external.allocate, engine.malloc]
    if first == "outside":
        calls.reverse()
    callbacks = calls[:1]
    calls[1](8 * MIB)
    assert refused == [8 * MIB]
    assert source.peak == 8 * MIB
