"""What adaptors bound, retry and inject, and that a failure beneath leaves them as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from devalloc import InvalidArgument, InvalidFree, OutOfMemory
from devalloc.cache import Cache
from devalloc.sources import Capabilities, HostSource, Segment, SimulatedSource, Source
from devalloc.sources.adaptors import (
    Adaptor,
    AlignedAdaptor,
    FailureCallbackAdaptor,
    FaultAdaptor,
    LimitAdaptor,
    LogAdaptor,
    RetryAdaptor,
    StatisticsAdaptor,
    TrackingAdaptor,
)
from tests.sources.doubles import CountingSource

KIB = 1 << 10


def test_an_adaptor_passes_on_what_it_can() -> None:
    inner = HostSource()
    assert Adaptor(inner).device == inner.device
    assert Adaptor(inner).granularity == inner.granularity
    assert Adaptor(inner).capabilities == Capabilities(host_accessible=True)
    assert repr(LimitAdaptor(Adaptor(inner), 1)) == "LimitAdaptor(Adaptor(HostSource()))"


def test_an_adaptor_hides_what_it_cannot_pass_on() -> None:
    inner = CountingSource(HostSource())
    inner.capabilities = Capabilities(
        mappable=True, pausable=True, peer_accessible=True, stream_ordered=True
    )
    assert Adaptor(inner).capabilities == Capabilities(peer_accessible=True, stream_ordered=True)


def test_the_stream_is_passed_on() -> None:
    seen: list[int | None] = []

    class Noting(SimulatedSource):
        def allocate(self, nbytes: int, stream: int | None = None) -> int:
            seen.append(stream)
            return super().allocate(nbytes, stream)

        def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
            seen.append(stream)
            super().free(address, nbytes, stream)

    source: Source = Noting()
    for make in (
        Adaptor,
        lambda inner: LimitAdaptor(inner, "1MiB"),
        lambda inner: AlignedAdaptor(inner, "64KiB"),
        lambda inner: RetryAdaptor(inner, 0),
        lambda inner: FailureCallbackAdaptor(inner, lambda nbytes: False),
        FaultAdaptor,
        StatisticsAdaptor,
        TrackingAdaptor,
    ):
        source = make(source)
    source.free(source.allocate(100, 17), 100, 18)
    assert seen == [17, 18]


# Bounds ---------------------------------------------------------------------------------------


@pytest.mark.proves("rmm/limiting")
def test_limit() -> None:
    source = LimitAdaptor(CountingSource(HostSource()), "20KiB")
    first = source.allocate(12 * KIB)
    with pytest.raises(
        OutOfMemory,
        match=r"of 9 KiB failed: it takes 12 KiB, and 12 KiB of a limit of 20 KiB .* raise",
    ):
        source.allocate(9 * KIB)
    assert source.inner.allocations == 1, "the source is not asked"
    second = source.allocate(8 * KIB)
    assert source.used == 20 * KIB
    source.free(first, 12 * KIB)
    source.limit = 4 * KIB
    with pytest.raises(OutOfMemory):
        source.allocate(1)
    source.free(second, 8 * KIB)
    source.free(source.allocate(4 * KIB), 4 * KIB)
    assert source.used == 0


def test_a_limit_counts_the_granularity() -> None:
    """What the source takes counts, and not what was asked for."""
    beneath = SimulatedSource(granularity=2 << 20)
    source = LimitAdaptor(beneath, "64MiB")
    got = [source.allocate(300 * KIB) for _ in range(32)]
    with pytest.raises(OutOfMemory, match="it takes 2 MiB, and 64 MiB of a limit of 64 MiB"):
        source.allocate(300 * KIB)
    assert source.used == beneath.used == 64 << 20
    for address in got:
        source.free(address, 300 * KIB)
    assert source.used == 0


def test_a_limit_counts_no_failures() -> None:
    source = LimitAdaptor(CountingSource(HostSource(), fail_at=1), "12KiB")
    with pytest.raises(OutOfMemory, match="injected"):
        source.allocate(6 * KIB)
    with pytest.raises(InvalidArgument):
        source.allocate(-(1 << 30))
    with pytest.raises(InvalidFree):
        source.free(4096, 6 * KIB)
    assert source.used == 0
    source.free(source.allocate(10 * KIB), 10 * KIB)


@pytest.mark.proves("rmm/limiting")
def test_a_limit_holds_with_threads() -> None:
    """16 threads ask for a fifth of the limit each, at once: exactly five get it."""
    source = LimitAdaptor(HostSource(), 5 * 4096)
    start = threading.Barrier(16)
    got: list[int] = []

    def work() -> None:
        start.wait()
        try:
            got.append(source.allocate(4096))
        except OutOfMemory:
            return

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) == 5
    for address in got:
        source.free(address, 4096)
    assert source.used == 0


@pytest.mark.proves("rmm/aligned")
def test_alignment() -> None:
    beneath = CountingSource(SimulatedSource(granularity=512))
    source = AlignedAdaptor(beneath, "64KiB")
    assert source.granularity == 64 * KIB
    for nbytes in (1, 1000, 100_000):
        address = source.allocate(nbytes)
        ((raw, taken),) = beneath.live.items()
        assert address % (64 * KIB) == 0
        assert raw <= address
        assert address + nbytes <= raw + taken
        source.free(address, nbytes)
    assert beneath.live == {}


@pytest.mark.proves("rmm/aligned")
def test_alignment_from_a_threshold_on() -> None:
    beneath = CountingSource(SimulatedSource(granularity=512))
    source = AlignedAdaptor(beneath, "64KiB", threshold=1000)
    assert source.granularity == 512
    small, large = source.allocate(999), source.allocate(1000)
    assert beneath.live[small] == 999, "passed on as it is"
    assert large % (64 * KIB) == 0
    source.free(small, 999)
    source.free(large, 1000)


def test_alignment_that_the_source_has_anyway_costs_nothing() -> None:
    beneath = CountingSource(HostSource())
    source = AlignedAdaptor(beneath, 256)
    address = source.allocate(1000)
    assert beneath.live == {address: 1000}
    source.free(address, 1000)


@pytest.mark.parametrize("alignment", [0, 3, 100, "3KiB"])
def test_an_alignment_is_a_power_of_two(alignment: int | str) -> None:
    with pytest.raises(InvalidArgument, match="power of two"):
        AlignedAdaptor(HostSource(), alignment)


@pytest.mark.parametrize("granularity", [0, -512, 100, 384, 1.5, "512", None])
def test_a_granularity_is_a_power_of_two(granularity: int) -> None:
    with pytest.raises(InvalidArgument, match=r"granularity .* power of two"):
        SimulatedSource(granularity=granularity)
    beneath = CountingSource(HostSource())
    beneath.granularity = granularity
    with pytest.raises(InvalidArgument, match=r"granularity .* power of two"):
        AlignedAdaptor(beneath, 256)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (RetryAdaptor, {"seconds": None}),
        (RetryAdaptor, {"seconds": "1"}),
        (RetryAdaptor, {"seconds": -1}),
        (RetryAdaptor, {"seconds": float("nan")}),
        (RetryAdaptor, {"seconds": float("inf")}),
        (RetryAdaptor, {"seconds": 10**400}),
        (RetryAdaptor, {"clock": None, "seconds": 1}),
        (RetryAdaptor, {"clock": 5, "seconds": 1}),
        (FailureCallbackAdaptor, {"callback": None}),
        (FailureCallbackAdaptor, {"callback": "f"}),
        (FaultAdaptor, {"probability": "x"}),
        (FaultAdaptor, {"probability": None}),
        (FaultAdaptor, {"probability": 1.5}),
        (FaultAdaptor, {"probability": 10**5000}),
        (FaultAdaptor, {"seed": []}),
        (FaultAdaptor, {"seed": None}),
        (FaultAdaptor, {"calls": 3}),
        (FaultAdaptor, {"calls": None}),
        (FaultAdaptor, {"calls": "3"}),
        (FaultAdaptor, {"calls": [[]]}),
        (FaultAdaptor, {"calls": [0]}),
        (TrackingAdaptor, {"frames": "x"}),
        (TrackingAdaptor, {"frames": 1.5}),
        (TrackingAdaptor, {"frames": None}),
        (TrackingAdaptor, {"frames": -1}),
        (TrackingAdaptor, {"frames": 10**400}),
    ],
)
def test_bad_options(make: Callable[..., Source], options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        make(SimulatedSource(), **options)


@pytest.mark.parametrize("inner", ["host", None, 5, HostSource, torch.device("cpu")], ids=str)
def test_what_is_no_source_is_refused(inner: Any, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    for make in (
        lambda: Adaptor(inner),
        lambda: LimitAdaptor(inner, "1GiB"),
        lambda: AlignedAdaptor(inner, 256),
        lambda: RetryAdaptor(inner, 1),
        lambda: FailureCallbackAdaptor(inner, lambda nbytes: False),
        lambda: FaultAdaptor(inner),
        lambda: LogAdaptor(inner, log),
        lambda: StatisticsAdaptor(inner),
        lambda: TrackingAdaptor(inner),
        lambda: Segment(inner, 100),
        lambda: Cache(inner),
    ):
        with pytest.raises(InvalidArgument, match=r"^a source is an object with .*HostSource\(\);"):
            make()
    assert not log.exists()


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, "x", None])
def test_impossible_requests_are_no_matter_of_memory(nbytes: int) -> None:
    for source in (
        LimitAdaptor(SimulatedSource(), 0),
        FaultAdaptor(SimulatedSource(), probability=1.0),
        RetryAdaptor(FaultAdaptor(SimulatedSource(), probability=1.0), seconds=60),
        FailureCallbackAdaptor(LimitAdaptor(SimulatedSource(), 0), lambda nbytes: True),
    ):
        with pytest.raises(InvalidArgument, match="at least one byte"):
            source.allocate(nbytes)


# Failures -------------------------------------------------------------------------------------


@pytest.mark.proves("auto_growth/wait-free")
def test_retry_waits_for_a_free() -> None:
    """A thread is out of memory until another one, later, frees."""
    source = RetryAdaptor(LimitAdaptor(HostSource(), 4096), seconds=60)
    first = source.allocate(4096)
    waiting = threading.Event()
    inner_allocate = source.inner.allocate

    def allocate(nbytes: int, stream: int | None = None) -> int:
        try:
            return inner_allocate(nbytes, stream)
        finally:
            waiting.set()

    source.inner.allocate = allocate
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(source.allocate(4096)))
    thread.start()
    assert waiting.wait(60), "it tries at once"
    assert got == []
    source.free(first, 4096)
    thread.join(60)
    assert len(got) == 1
    source.free(got[0], 4096)


def test_a_free_between_the_failure_and_the_wait_is_not_missed() -> None:
    source: RetryAdaptor

    class FreesWhileItFails(SimulatedSource):
        def allocate(self, nbytes: int, stream: int | None = None) -> int:
            try:
                return super().allocate(nbytes, stream)
            except OutOfMemory:
                source.free(first, 4096)
                raise

    source = RetryAdaptor(FreesWhileItFails(capacity=4096), seconds=30)
    first = source.allocate(4096)
    source.free(source.allocate(4096), 4096)
    assert source.inner.failures == 1


@pytest.mark.parametrize("seconds", [0, 0.05])
def test_retry_gives_up(seconds: float) -> None:
    source = RetryAdaptor(LimitAdaptor(HostSource(), 4096), seconds)
    with pytest.raises(OutOfMemory, match=rf"failed 1 times in {seconds:g} s, .* of a limit") as e:
        source.allocate(5000)
    assert isinstance(e.value.__cause__, OutOfMemory)
    assert source.inner.used == 0


def test_retry_gives_up_in_time_though_frees_go_on() -> None:
    """Every try is followed by a free that does not help; the clock ends it."""
    now = [0.0]
    source: RetryAdaptor

    class Busy(SimulatedSource):
        def allocate(self, nbytes: int, stream: int | None = None) -> int:
            now[0] += 1.0
            if nbytes > 4096:
                source.free(source.allocate(100), 100)
            return super().allocate(nbytes, stream)

    source = RetryAdaptor(Busy(capacity=4096), seconds=10.0, clock=lambda: now[0])
    with pytest.raises(OutOfMemory, match="failed 6 times in 10 s"):
        source.allocate(5000)


def test_retry_passes_other_errors() -> None:
    with pytest.raises(InvalidArgument, match="at least one byte"):
        RetryAdaptor(HostSource(), seconds=60).allocate(0)


@pytest.mark.proves("rmm/failure-callback")
def test_failure_callback() -> None:
    """Called until there is enough: two of three cached pieces have to go."""
    beneath = LimitAdaptor(HostSource(), 3 * 4096)
    cached = [beneath.allocate(4096) for _ in range(3)]
    asked: list[int] = []

    def release(nbytes: int) -> bool:
        asked.append(nbytes)
        if not cached:
            return False
        beneath.free(cached.pop(), 4096)
        return True

    source = FailureCallbackAdaptor(beneath, release)
    address = source.allocate(2 * 4096)
    assert asked == [2 * 4096] * 2
    assert len(cached) == 1
    with pytest.raises(OutOfMemory, match="limit"):
        source.allocate(4 * 4096)
    assert cached == []
    assert len(asked) == 4
    source.free(address, 2 * 4096)
    with pytest.raises(InvalidArgument):
        source.allocate(0)
    assert len(asked) == 4, "no matter of memory"


@pytest.mark.proves("rmm/failure-callback")
def test_what_a_failure_callback_raises_arrives() -> None:
    def refuse(nbytes: int) -> bool:
        raise KeyError(nbytes)

    with pytest.raises(KeyError):
        FailureCallbackAdaptor(LimitAdaptor(HostSource(), 0), refuse).allocate(1)


def outcomes(source: Source, calls: int) -> list[bool]:
    found = []
    for _ in range(calls):
        try:
            source.free(source.allocate(64), 64)
        except OutOfMemory:
            found.append(False)
        else:
            found.append(True)
    return found


@pytest.mark.proves("rmm/faults-tests")
def test_faults_are_the_same_in_every_run() -> None:
    first, again, other = (
        FaultAdaptor(SimulatedSource(), probability=0.3, seed=seed) for seed in (5, 5, 6)
    )
    found = outcomes(first, 500)
    assert found == outcomes(again, 500)
    assert found != outcomes(other, 500)
    assert 100 < found.count(False) < 200
    assert (first.attempts, first.injected) == (500, found.count(False))
    assert first.inner.allocations == found.count(True), "the source is not asked"


def test_faults_at_chosen_calls() -> None:
    source = FaultAdaptor(SimulatedSource(), calls=(2, 4))
    assert outcomes(source, 5) == [True, False, True, False, True]
    with pytest.raises(OutOfMemory, match=r"of 64 B failed: injected at call 1 \(seed 3, "):
        FaultAdaptor(SimulatedSource(), 1.0, seed=3).allocate(64)
