"""Segments and heaps over sources: nothing is lost when one fails, everything comes back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from devalloc import DevallocError, Heap, InvalidArgument, OutOfMemory
from devalloc.kernels import layout
from devalloc.sizes import PAGE_BYTES
from devalloc.sources import CudaSource, HostSource, Segment, Source
from tests.conftest import ON_GPU
from tests.sources.doubles import CountingSource, CrookedSource
from tests.support import DEVICE


def make_source() -> Source:
    return CudaSource(torch.device("cuda", 0)) if ON_GPU else HostSource()


@pytest.fixture(
    params=[
        pytest.param("host", id="host"),
        pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
        pytest.param("crooked", id="crooked"),
    ]
)
def source(request: pytest.FixtureRequest) -> Iterator[CountingSource]:
    if request.param == "crooked":
        made: CountingSource = CrookedSource(HostSource())
    elif request.param == "host":
        made = CountingSource(HostSource())
    else:
        made = CountingSource(CudaSource(torch.device("cuda", 0)))
    yield made
    gc.collect()
    assert made.live == {}, "the test leaked"


@pytest.mark.parametrize("nbytes", [1, 100, 4096, 1 << 20])
@pytest.mark.parametrize("alignment", [1, 256, 4096, PAGE_BYTES, 1 << 20])
def test_alignment(source: CountingSource, nbytes: int, alignment: int) -> None:
    segment = Segment(source, nbytes, alignment)
    assert segment.address % alignment == 0
    assert segment.nbytes == nbytes
    ((raw, taken),) = source.live.items()
    if not isinstance(source, CrookedSource):
        assert raw <= segment.address
        assert segment.address + nbytes <= raw + taken


def test_a_source_keeps_its_granularity(source: CountingSource) -> None:
    segments = [Segment(source, 100, 1) for _ in range(5)]
    assert all(segment.address % source.granularity == 0 for segment in segments)
    assert len({segment.address for segment in segments}) == 5


@pytest.mark.parametrize("alignment", [0, -256, 3, 384, 1.5, None])
def test_an_alignment_is_a_power_of_two(source: CountingSource, alignment: int) -> None:
    with pytest.raises(InvalidArgument, match=r"alignment .* power of two"):
        Segment(source, 100, alignment)
    assert source.allocations == 0


def test_a_granularity_is_a_power_of_two(source: CountingSource) -> None:
    """Multiples of 384 B need not be multiples of 256 B."""
    source.granularity = 384
    with pytest.raises(InvalidArgument, match=r"granularity .* power of two.* not 384"):
        Segment(source, 100, 256)
    assert source.allocations == 0


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, "x", None])
@pytest.mark.parametrize("alignment", [256, 1 << 20])
def test_segments_of_nothing(source: CountingSource, nbytes: int, alignment: int) -> None:
    with pytest.raises(InvalidArgument, match="at least one byte"):
        Segment(source, nbytes, alignment)
    assert source.live == {}


def test_views(source: CountingSource) -> None:
    segment = Segment(source, 4096)
    whole = segment.view()
    assert whole.dtype == torch.uint8
    assert whole.shape == (4096,)
    assert whole.device == source.device
    assert whole.data_ptr() == segment.address
    part = segment.view(1000, 24)
    assert part.data_ptr() == segment.address + 1000
    whole.fill_(7)
    part.fill_(9)
    assert int(whole.sum()) == 7 * (4096 - 24) + 9 * 24
    assert segment.view(4096).shape == (0,)
    assert segment.view(10, 0).shape == (0,)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 4097), (4097, 0), (4000, 97), (0, -1)])
def test_views_beyond_the_segment(source: CountingSource, offset: int, nbytes: int) -> None:
    segment = Segment(source, 4096)
    with pytest.raises(IndexError):
        segment.view(offset, nbytes)


def test_memory_returns_with_the_last_view(source: CountingSource) -> None:
    segment = Segment(source, 4096)
    view = segment.view()
    typed = view.view(torch.int64)[10:20].reshape(2, 5)
    del segment
    gc.collect()
    assert len(source.live) == 1
    del view
    gc.collect()
    assert len(source.live) == 1, "a tensor made of the view still refers to the memory"
    typed.fill_(3)
    assert int(typed.sum()) == 30
    del typed
    gc.collect()
    assert source.live == {}


def test_more_than_there_is(source: CountingSource) -> None:
    with pytest.raises(OutOfMemory) as caught:
        Segment(source, 1 << 60)
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, DevallocError)
    assert source.live == {}
    assert Segment(source, 4096).view().numel() == 4096


# Heaps over sources ---------------------------------------------------------------------------


def test_a_heap_over_any_source() -> None:
    source = CountingSource(make_source())
    with Heap("1MiB", source=source) as heap:
        assert heap.base % PAGE_BYTES == 0
        assert len(source.live) == 2
        assert sum(source.live.values()) < 1.2 * heap.capacity + 2 * PAGE_BYTES
        heap.free(heap.malloc([64, 100_000]))
        heap.audit()
    gc.collect()
    assert source.live == {}


@pytest.mark.skipif(ON_GPU, reason="memory of the host: no kernel could use it on the GPU")
def test_a_heap_over_crooked_memory() -> None:
    source = CrookedSource(HostSource())
    with Heap("1MiB", source=source) as heap:
        assert heap.base % PAGE_BYTES == 0
        addrs = heap.malloc([heap.capacity])
        assert addrs.item() == heap.base
        heap.tensor(addrs[0], heap.capacity, torch.uint8).fill_(1)
        heap.free(addrs)
        heap.audit()


def test_two_hundred_heaps_leak_nothing() -> None:
    source = CountingSource(make_source())
    for _ in range(200):
        heap = Heap("256KiB", source=source)
        heap.handle.sum()
        heap.close()
        assert source.live == {}, "closing is enough: no garbage collection is needed"
    assert source.allocations == 400


def test_forgotten_heaps_leak_nothing() -> None:
    source = CountingSource(make_source())
    for _ in range(20):
        Heap("256KiB", source=source)
    gc.collect()
    assert source.live == {}


def test_what_refers_to_a_heap_keeps_its_memory() -> None:
    source = CountingSource(make_source())
    heap = Heap("256KiB", source=source)
    handle = heap.handle
    view = heap.tensor(heap.malloc([4096])[0], 512, torch.int64)
    heap.close()
    assert len(source.live) == 2
    view.fill_(1)
    assert int(view.sum()) == 512
    del view
    gc.collect()
    assert len(source.live) == 1
    assert int(handle[layout.MAGAZINES_AND_PAGES.value]) >> 32 == 4
    del handle
    gc.collect()
    assert source.live == {}


@pytest.mark.parametrize("fail_at", [1, 2])
def test_a_source_that_fails(fail_at: int) -> None:
    """Whichever of the heap's two segments fails, the other is given back."""
    source = CountingSource(make_source(), fail_at)
    with pytest.raises(OutOfMemory, match="injected"):
        Heap("1MiB", source=source)
    gc.collect()
    assert source.live == {}
    with Heap("1MiB", source=source) as heap:
        assert heap.malloc([64]).item() != 0
        heap.reset()
    gc.collect()
    assert source.live == {}


def test_more_than_the_machine_has() -> None:
    # Overcommitting systems may map 512 GiB of host memory, so ask the source for more.
    source = make_source()
    with pytest.raises(OutOfMemory, match=r"ask for less"):
        Segment(source, 1 << 56)


@pytest.mark.gpu
def test_device_memory_is_given_back() -> None:
    """One heap after another, more than the device could hold at once: a leak ends in OutOfMemory,
    whatever other processes do with the device meanwhile."""
    total = torch.cuda.get_device_properties(0).total_memory
    for _ in range(total // (1 << 30) + 8):
        Heap("1GiB").close()


@pytest.mark.gpu
def test_a_failed_cuda_malloc_leaves_no_error_behind() -> None:
    with pytest.raises(OutOfMemory, match="cudaMalloc of"):
        Segment(CudaSource(torch.device("cuda", 0)), 1 << 50)
    assert float(torch.ones(10, device=DEVICE).sum()) == 10.0
