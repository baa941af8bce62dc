"""What every source and every adaptor must do: one suite, a line for each to take part.

A source takes part with the function that makes it. An adaptor takes part over host memory, with
a source beneath that checks what the adaptor asks of it.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from devalloc import InvalidArgument, InvalidFree, OutOfMemory
from devalloc.sizes import PAGE_BYTES
from devalloc.sources import (
    AsyncSource,
    CudaSource,
    HostSource,
    PinnedSource,
    Segment,
    SimulatedSource,
    Source,
    VirtualSource,
)
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
from devalloc.sources.source import Mappable
from tests.sources.doubles import CountingSource, CrookedSource

GPU = torch.device("cuda", 0)


def host(path: Path) -> Source:
    return HostSource()


def crooked(path: Path) -> Source:
    return CrookedSource(HostSource())


def simulated(path: Path) -> Source:
    return SimulatedSource("1TiB")


def virtual(path: Path) -> Source:
    return VirtualSource(torch.device("cpu"))


def cuda(path: Path) -> Source:
    return CudaSource(GPU)


def stream_ordered(path: Path) -> Source:
    return AsyncSource(GPU, release_threshold="16MiB")


def virtual_on_cuda(path: Path) -> Source:
    return VirtualSource(GPU)


def pinned(path: Path) -> Source:
    return PinnedSource(GPU)


ADAPTORS: dict[str, Callable[[Source, Path], Adaptor]] = {
    "adaptor": lambda inner, path: Adaptor(inner),
    "limit": lambda inner, path: LimitAdaptor(inner, "1GiB"),
    "aligned": lambda inner, path: AlignedAdaptor(inner, PAGE_BYTES),
    "aligned-large": lambda inner, path: AlignedAdaptor(inner, "1MiB", threshold=5000),
    "retry": lambda inner, path: RetryAdaptor(inner, seconds=0),
    "callback": lambda inner, path: FailureCallbackAdaptor(inner, lambda nbytes: False),
    "fault": lambda inner, path: FaultAdaptor(inner),
    "log": lambda inner, path: LogAdaptor(inner, path / "log.csv"),
    "statistics": lambda inner, path: StatisticsAdaptor(inner),
    "tracking": lambda inner, path: TrackingAdaptor(inner),
}


def stacked(inner: Source, path: Path) -> Source:
    for make in ADAPTORS.values():
        inner = make(inner, path)
    return inner


def over_host(make: Callable[[Source, Path], Source]) -> Callable[[Path], Source]:
    return lambda path: make(HostSource(), path)


CASES = [
    *(pytest.param(make, id=make.__name__) for make in (host, crooked, simulated, virtual)),
    *(
        pytest.param(make, id=make.__name__, marks=pytest.mark.gpu)
        for make in (cuda, stream_ordered, pinned, virtual_on_cuda)
    ),
    *(pytest.param(over_host(make), id=name) for name, make in ADAPTORS.items()),
    pytest.param(over_host(stacked), id="all-adaptors"),
    pytest.param(
        lambda path: stacked(AsyncSource(GPU), path),
        id="all-adaptors-over-stream_ordered",
        marks=pytest.mark.gpu,
    ),
]


def innermost(source: Source) -> Adaptor | None:
    """The last adaptor of a stack."""
    found = None
    while isinstance(source, Adaptor):
        found, source = source, source.inner
    return found


@pytest.fixture(params=CASES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    """The source under test; at the end everything must be back, below its adaptors too."""
    made = request.param(tmp_path)
    last = innermost(made)
    beneath = CountingSource(last.inner if last else made)
    if last:
        last.inner = beneath
    else:
        made = beneath
    yield made
    gc.collect()
    assert beneath.live == {}, "the test leaked"
    if isinstance(made, LogAdaptor):
        made.close()


@pytest.fixture
def memory(source: Source) -> Source:
    """The source under test, if memory lies behind its addresses."""
    if "Simulated" in repr(getattr(source, "inner", source)):
        pytest.skip("addresses without memory")
    return source


@pytest.fixture
def stream(source: Source) -> int:
    return torch.cuda.Stream().cuda_stream if source.device.type == "cuda" else 0


SIZES = (1, 7, 255, 256, 257, 4096, 5001, PAGE_BYTES, (1 << 20) + 1)


@pytest.mark.proves("tiny/cache-off")
def test_addresses(source: Source) -> None:
    """Multiples of the granularity, and disjoint (H1)."""
    assert source.granularity & (source.granularity - 1) == 0
    live = [(source.allocate(nbytes), nbytes) for nbytes in SIZES * 3]
    end = 0
    for address, nbytes in sorted(live):
        assert address % source.granularity == 0
        assert address >= end
        end = address + nbytes
    for address, nbytes in live:
        source.free(address, nbytes)


def test_memory_keeps_what_was_written(memory: Source) -> None:
    segments = [Segment(memory, nbytes) for nbytes in SIZES]
    views = [segment.view() for segment in segments]
    for tag, view in enumerate(views):
        assert view.device == memory.device
        view.fill_(tag + 1)
    for tag, (segment, view) in enumerate(zip(segments, views, strict=True)):
        assert view.data_ptr() == segment.address
        assert int(view.sum(dtype=torch.int64)) == (tag + 1) * segment.nbytes


@pytest.mark.proves("tiny/cpu-pinned", "auto_growth/pinned-memory")
def test_host_accessible_memory(memory: Source) -> None:
    if not memory.capabilities.host_accessible:
        pytest.skip("the CPU cannot reach it")
    address = memory.allocate(5000)
    ctypes.memset(address, 7, 5000)
    assert ctypes.string_at(address, 5000) == b"\x07" * 5000
    memory.free(address, 5000)


def test_streams(source: Source, stream: int) -> None:
    """With a stream or without, in any combination."""
    for given, taken in itertools.product((None, stream), repeat=2):
        address = source.allocate(5000, given)
        source.free(address, 5000, taken)


@pytest.mark.parametrize("nbytes", [0, -1, -(1 << 40), 1.5, "x", None])
def test_requests_for_nothing(source: Source, nbytes: object) -> None:
    with pytest.raises(InvalidArgument, match="at least one byte"):
        source.allocate(nbytes)
    source.free(source.allocate(1), 1)


@pytest.mark.parametrize("nbytes", [1 << 62, 10**400, pytest.param(10**5000, id="huge")])
def test_requests_beyond_every_address_space(source: Source, nbytes: int) -> None:
    with pytest.raises(InvalidArgument, match="address space"):
        source.allocate(nbytes)
    source.free(source.allocate(1), 1)


def test_more_than_there_is(source: Source) -> None:
    with pytest.raises(OutOfMemory, match=r"TiB.*(ask for less|raise)"):
        source.allocate(1 << 60)
    source.free(source.allocate(1 << 20), 1 << 20)


def test_wrong_frees(source: Source) -> None:
    """Refused, and the allocation is as it was: the right free still works."""
    address = source.allocate(6000)
    with pytest.raises(InvalidFree):
        source.free(address, 5999)
    with pytest.raises(InvalidFree):
        source.free(address, 60)
    with pytest.raises(InvalidFree):
        source.free(address + source.granularity, 6000)
    with pytest.raises(InvalidFree):
        source.free(0, 6000)
    source.free(address, 6000)
    with pytest.raises(InvalidFree):
        source.free(address, 6000)
    source.free(source.allocate(6000), 6000)


@pytest.mark.parametrize("bad", ["x", None, 1.5, [], pytest.param(-(10**5000), id="huge")])
def test_frees_of_what_is_no_allocation(source: Source, bad: object) -> None:
    """Refused, and the allocation is as it was: the right free still works."""
    address = source.allocate(6000)
    with pytest.raises(InvalidArgument, match=r"address .* size"):
        source.free(bad, 6000)
    with pytest.raises(InvalidArgument, match=r"address .* size"):
        source.free(address, bad)
    with pytest.raises(InvalidArgument, match=r"address .* size"):
        source.free(float(address), 6000)
    source.free(address, 6000)


@pytest.mark.parametrize("alignment", [1, 4096, 1 << 20])
def test_segments(memory: Source, alignment: int) -> None:
    segment = Segment(memory, 10_000, alignment)
    assert segment.address % alignment == 0
    tail = segment.view(9_000, 1_000)
    tail.fill_(3)
    del segment
    gc.collect()
    assert int(tail.sum()) == 3_000


@pytest.mark.proves("rmm/thread-safe")
def test_threads(memory: Source) -> None:
    """Four threads write their tag into what they get, and read it back before they free it."""
    wrong: list[str] = []
    start = threading.Barrier(4)

    def work(tag: int) -> None:
        draw = random.Random(tag)
        held: list[tuple[torch.Tensor, int, int]] = []
        start.wait()
        for step in range(150):
            if held and draw.random() < 0.5:
                view, value, nbytes = held.pop(draw.randrange(len(held)))
                if int(view.sum(dtype=torch.int64)) != value * nbytes:
                    wrong.append(f"thread {tag}, step {step}, {nbytes} B")
            else:
                nbytes = draw.choice(SIZES[:-1])
                view, value = Segment(memory, nbytes).view(), 1 + tag * 50 + step % 50
                view.fill_(value)
                held.append((view, value, nbytes))

    threads = [threading.Thread(target=work, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_a_double_free_race_has_one_winner(source: Source) -> None:
    """Of several threads that free one allocation, one succeeds and the others are refused."""
    for _ in range(30):
        address = source.allocate(5000)
        outcomes: list[object] = []
        start = threading.Barrier(3)

        def free(
            address: int = address,
            outcomes: list[object] = outcomes,
            start: threading.Barrier = start,
        ) -> None:
            start.wait()
            try:
                source.free(address, 5000)
            except Exception as error:
                outcomes.append(error)
            else:
                outcomes.append("freed")

        threads = [threading.Thread(target=free) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert len(outcomes) == 3, outcomes
        assert outcomes.count("freed") == 1, outcomes
        assert sum(isinstance(each, InvalidFree) for each in outcomes) == 2, outcomes


# Sources that map memory into reserved addresses --------------------------------------------------


@pytest.fixture(
    params=[
        pytest.param(lambda: SimulatedSource("64MiB", granularity=MAPPED), id="simulated"),
        pytest.param(lambda: VirtualSource(torch.device("cpu")), id="virtual"),
        pytest.param(lambda: VirtualSource(GPU), id="virtual_on_cuda", marks=pytest.mark.gpu),
    ]
)
def mappable(request: pytest.FixtureRequest) -> Mappable:
    return request.param()


MAPPED = 2 << 20


def test_memory_is_mapped_and_unmapped_by_pieces(mappable: Mappable) -> None:
    assert mappable.capabilities.mappable
    assert mappable.granularity <= MAPPED
    nbytes = 16 * MAPPED
    address = mappable.reserve(nbytes)
    assert mappable.parts(address, 0, nbytes) == []
    mappable.map(address, 2 * MAPPED, 5 * MAPPED, 2 * MAPPED)
    pieces = [(2, 2), (4, 2), (6, 1)]
    found = mappable.parts(address, 0, nbytes)
    assert found == [(at * MAPPED, size * MAPPED) for at, size in pieces]
    assert mappable.parts(address, 2 * MAPPED + 1, 5 * MAPPED - 1) == found[1:]
    assert mappable.parts(address, 2 * MAPPED, 5 * MAPPED - 1) == found[:2]
    mappable.unmap(address, 4 * MAPPED, 2 * MAPPED)
    assert mappable.parts(address, 0, nbytes) == [found[0], found[2]]
    mappable.map(address, 4 * MAPPED, 2 * MAPPED, MAPPED)
    assert len(mappable.parts(address, 0, nbytes)) == 4
    other = mappable.reserve(nbytes)
    assert not address <= other < address + nbytes
    mappable.free(other, nbytes)
    mappable.free(address, nbytes)  # with what is mapped there
    for call in (mappable.free, mappable.free):
        with pytest.raises(InvalidFree):
            call(address, nbytes)


def test_a_map_that_fails_has_changed_nothing() -> None:
    source = SimulatedSource("64MiB", granularity=MAPPED)
    address = source.reserve(1 << 30)
    assert source.used == 0
    source.map(address, 0, 40 << 20, 1 << 30)
    with pytest.raises(OutOfMemory, match="raise the capacity"):
        source.map(address, 40 << 20, 40 << 20, 1 << 30)
    assert (source.used, source.peak, source.failures) == (40 << 20, 40 << 20, 1)
    assert source.parts(address, 0, 1 << 30) == [(0, 40 << 20)]
    source.free(address, 1 << 30)
    assert (source.used, source.frees) == (0, 1)
