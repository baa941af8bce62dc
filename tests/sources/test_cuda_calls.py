"""The calls that CUDA sources make and their order, against a runtime that only takes notes.

What CUDA does with them is for `test_conformance` on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from devalloc import DevallocError, InvalidArgument, InvalidFree, OutOfMemory
from devalloc.sources import (
    AsyncSource,
    CudaSource,
    PinnedSource,
    Segment,
    Source,
    VirtualSource,
)
from tests.sources.doubles import FakeRuntime, fake_runtime

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    made = fake_runtime(monkeypatch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 8 << 30))
    yield made
    gc.collect()  # what the test made is finished with this runtime, not with the next


@pytest.mark.proves("rmm/cuda-pinned")
def test_cuda_malloc(fake: FakeRuntime) -> None:
    source = CudaSource(DEVICE)
    address = source.allocate(5000, stream=7)
    source.free(address, 5000, stream=7)
    assert fake.calls == [("cudaMalloc", 5000), ("cudaFree", address)]


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (CudaSource, "cudaMalloc"),
        (AsyncSource, "cudaMallocFromPoolAsync"),
        (PinnedSource, "cudaHostAlloc"),
    ],
)
def test_failures(fake: FakeRuntime, make: Callable[[torch.device], Source], call: str) -> None:
    source = make(DEVICE)
    fake.fail[call] = fake.cudaError_t.cudaErrorMemoryAllocation
    with pytest.raises(OutOfMemory, match=rf"{call} of 1 TiB .*failed: .*ask for less") as error:
        source.allocate(1 << 40)
    assert fake.names()[-1] == "cudaGetLastError", "no other call may see this error"
    if source.device.type == "cuda":
        assert "3 GiB of 8 GiB are free" in str(error.value)
    fake.fail[call] = fake.cudaError_t.cudaErrorStreamCaptureUnsupported
    with pytest.raises(DevallocError, match=rf"{call} of 5 B failed: cudaErrorStreamCapture"):
        source.allocate(5)


@pytest.mark.parametrize("make", [CudaSource, AsyncSource, PinnedSource, VirtualSource])
@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda:0", r"is a torch\.device, such as device\(type=.*, not 'cuda:0'"),
        (0, r"is a torch\.device, .* not 0"),
        (None, r"is a torch\.device, .* not None"),
        (torch.device("meta"), "is not for meta; give a device such as"),
        (torch.device("cuda"), "needs an index, such as .*index=0"),
    ],
)
def test_devices_that_are_none(
    fake: FakeRuntime, make: Callable[[object], Source], device: object, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=rf"{make.__name__} {words}"):  # type: ignore[attr-defined]
        make(device)
    assert fake.calls == []


@pytest.mark.parametrize("make", [CudaSource, AsyncSource, PinnedSource])
def test_the_cpu_is_no_cuda_device(make: Callable[[torch.device], Source]) -> None:
    with pytest.raises(InvalidArgument, match=r"is not for cpu; give a device such as .*cuda"):
        make(torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "call"),
    [(CudaSource, "cudaFree"), (AsyncSource, "cudaFreeAsync"), (PinnedSource, "cudaFreeHost")],
)
def test_failed_frees(fake: FakeRuntime, make: Callable[[torch.device], Source], call: str) -> None:
    """The allocation is still out after a free that CUDA refused, and may be freed again."""
    source = make(DEVICE)
    address = source.allocate(5000)
    fake.fail[call] = fake.cudaError_t.cudaErrorStreamCaptureUnsupported
    with pytest.raises(DevallocError, match=rf"{call} of 4.883 KiB failed: cudaErrorStreamCapture"):
        source.free(address, 5000)
    # At the end of the process everything is gone already.
    fake.fail[call] = fake.cudaError_t.cudaErrorCudartUnloading
    source.free(address, 5000)
    with pytest.raises(InvalidFree):
        source.free(address, 5000)
    assert fake.names().count(call) == 2, "a wrong free does not reach CUDA"


@pytest.mark.proves("rmm/cuda-pinned")
def test_a_pool_of_its_own(fake: FakeRuntime) -> None:
    source = AsyncSource(DEVICE, release_threshold="1GiB")
    properties = next(call[1] for call in fake.calls if call[0] == "cudaMemPoolCreate")
    assert properties.location.type == fake.cudaMemLocationType.cudaMemLocationTypeDevice
    assert properties.location.id == 0
    threshold = fake.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
    assert fake.attributes == {threshold: 1 << 30}
    del fake.calls[:]
    address = source.allocate(5000, stream=0)
    source.free(address, 5000, stream=7)
    assert fake.calls == [
        ("cudaMallocFromPoolAsync", 5000, "pool", 0),
        ("cudaFreeAsync", address, 7),
    ], "with a stream nothing waits"
    del fake.calls[:]
    address = source.allocate(5000)
    source.free(address, 5000)
    assert fake.calls == [
        ("cudaMallocFromPoolAsync", 5000, "pool", "own"),
        ("cudaStreamSynchronize", "own"),
        ("cudaDeviceSynchronize",),
        ("cudaFreeAsync", address, "own"),
    ]
    source.trim("1MiB")
    assert fake.calls[-1] == ("cudaMemPoolTrimTo", "pool", 1 << 20)
    assert source.reserved() == 4096


@pytest.mark.proves("rmm/release-threshold")
def test_a_pool_goes_with_its_source(fake: FakeRuntime) -> None:
    source = AsyncSource(DEVICE)
    assert list(fake.attributes.values()) == [0]
    free = source.free
    address = source.allocate(5000, 0)
    del source
    gc.collect()
    assert "cudaMemPoolDestroy" not in fake.names(), "an object that can still free keeps the pool"
    free(address, 5000, 0)
    del free
    gc.collect()
    assert fake.names()[-3:] == ["cudaFreeAsync", "cudaStreamDestroy", "cudaMemPoolDestroy"]


@pytest.mark.parametrize("call", ["cudaMemPoolSetAttribute", "cudaStreamCreateWithFlags"])
def test_a_pool_that_cannot_be_finished(fake: FakeRuntime, call: str) -> None:
    fake.fail[call] = fake.cudaError_t.cudaErrorInvalidValue
    with pytest.raises(DevallocError, match="cudaErrorInvalidValue"):
        AsyncSource(DEVICE)
    assert fake.names()[-1] == "cudaMemPoolDestroy"


def test_a_device_without_pools(fake: FakeRuntime) -> None:
    fake.pools_supported = 0
    with pytest.raises(InvalidArgument, match="cuda:0 has no memory pools; use CudaSource"):
        AsyncSource(DEVICE)
    assert fake.names() == ["cudaDeviceGetAttribute"]


def test_pinned_memory_waits_for_its_users(fake: FakeRuntime) -> None:
    source = PinnedSource(DEVICE)
    first, second = source.allocate(5000), source.allocate(6000)
    flags = fake.cudaHostAllocPortable | fake.cudaHostAllocMapped
    assert fake.calls == [("cudaHostAlloc", 5000, flags), ("cudaHostAlloc", 6000, flags)]
    del fake.calls[:]
    source.free(first, 5000)
    source.free(second, 6000, stream=7)
    assert fake.calls == [
        ("cudaDeviceSynchronize",),
        ("cudaFreeHost", first),
        ("cudaStreamSynchronize", 7),
        ("cudaFreeHost", second),
    ]


@pytest.mark.proves("rmm/release-threshold")
@pytest.mark.gpu
def test_a_pool_returns_its_memory() -> None:
    """Threshold 0: given back when the program synchronises; a large one: kept, until trimmed."""
    lean, fat = AsyncSource(DEVICE), AsyncSource(DEVICE, release_threshold="1GiB")
    for source in (lean, fat):
        source.free(source.allocate(64 << 20), 64 << 20)
        torch.cuda.synchronize()
    assert lean.reserved() == 0
    assert fat.reserved() >= 64 << 20
    fat.trim()
    assert fat.reserved() == 0


@pytest.mark.proves("auto_growth/async-allocator")
@pytest.mark.gpu
def test_stream_order() -> None:
    """Memory freed on a stream comes again on that stream, and nothing waits for the kernels."""
    source = AsyncSource(DEVICE, release_threshold="1GiB")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        first = source.allocate(1 << 20, stream.cuda_stream)
        source.free(first, 1 << 20, stream.cuda_stream)
        second = source.allocate(1 << 20, stream.cuda_stream)
        assert not stream.query(), "it did not wait"
    assert second == first
    source.free(second, 1 << 20, stream.cuda_stream)
    stream.synchronize()


@pytest.mark.gpu
def test_allocation_inside_a_captured_graph() -> None:
    source = AsyncSource(DEVICE)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        address = source.allocate(1 << 20, stream.cuda_stream)
        source.free(address, 1 << 20, stream.cuda_stream)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()


@pytest.mark.proves("tiny/cpu-pinned", "rmm/cuda-pinned")
@pytest.mark.gpu
def test_pinned_memory_is_pinned() -> None:
    view = Segment(PinnedSource(DEVICE), 4096).view()
    assert view.is_pinned()
    view.fill_(5)
    assert int(view.to("cuda", non_blocking=True).sum()) == 5 * 4096
