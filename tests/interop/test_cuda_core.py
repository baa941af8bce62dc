"""cuda.core's buffers in an arena."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace

import pytest
import torch

from devalloc import Arena, InvalidArgument, OutOfMemory
from tests.interop.support import on_a_device

core = pytest.importorskip("cuda.core", reason="needs cuda.core")
if not hasattr(core, "MemoryResource"):
    pytest.skip("needs cuda.core from 1.0 on", allow_module_level=True)

BUFFER = "devalloc.interop.cuda_core.Buffer"


@pytest.fixture(autouse=True)
def current_device() -> None:
    """What cuda.core asks of its users wherever there is a GPU."""
    if torch.cuda.is_available():
        core.Device().set_current()


def live(arena: Arena) -> int:
    return arena.stats()["allocation.all.current"]


def test_host_buffers() -> None:
    arena = Arena(source="host")
    resource = arena.memory_resource()
    assert isinstance(resource, core.MemoryResource)
    buffer = resource.allocate(1000, stream=None)
    assert (buffer.size, buffer.memory_resource) == (1000, resource)
    assert (buffer.is_host_accessible, buffer.is_device_accessible) == (True, False)
    assert buffer.device_id == -1
    address = int(buffer.handle)
    ctypes.memset(address, 5, 1000)
    tensor = torch.from_dlpack(buffer)
    assert (tensor == 5).all()
    assert tensor.data_ptr() == address
    assert live(arena) == 1
    del tensor
    buffer.close()
    assert live(arena) == 0
    again = resource.allocate(1000, stream=None)
    assert int(again.handle) == address
    del again
    gc.collect()
    assert live(arena) == 0, "a forgotten buffer returns too"


def test_empty_buffers_have_addresses() -> None:
    resource = Arena(source="host").memory_resource()
    buffers = [resource.allocate(0, stream=None) for _ in range(3)]
    assert len({int(buffer.handle) for buffer in buffers}) == 3
    assert all(buffer.size == 0 for buffer in buffers)


def test_bad_requests_change_nothing() -> None:
    arena = Arena(source="host", limit="4MiB")
    resource = arena.memory_resource()
    with pytest.raises(InvalidArgument, match="negative"):
        resource.allocate(-1, stream=None)
    with pytest.raises(OutOfMemory):
        resource.allocate(1 << 30, stream=None)
    block = arena.alloc(10)
    with pytest.raises(InvalidArgument, match="no buffer of this memory resource"):
        resource.deallocate(block.address, 10, stream=None)
    assert live(arena) == 1
    arena.close()
    with pytest.raises(InvalidArgument, match="closed"):
        arena.memory_resource()
    with pytest.raises(InvalidArgument, match="closed"):
        resource.allocate(1, stream=None)


class Stream:
    """What the resource looks at of a ``cuda.core.Stream``."""

    def __init__(self, handle: int) -> None:
        self.handle = handle


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that are addresses: a real one would look for a device."""

    def from_handle(address: int, size: int, resource: object, *, stream: object) -> int:
        return address

    monkeypatch.setattr(BUFFER, SimpleNamespace(from_handle=from_handle))


@pytest.mark.usefixtures("made")
def test_a_buffer_outlives_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default stream has the memory then, and waits; the one that is gone must not be asked."""
    arena, streams = on_a_device(monkeypatch)
    resource = arena.memory_resource()
    address = resource.allocate(4096, stream=Stream(5))
    arena.cache.forget_stream(5)
    resource.deallocate(address, 4096, stream=Stream(6))
    assert streams.waits == [(0, 6)]
    assert live(arena) == 0
    address = resource.allocate(4096, stream=Stream(5))
    arena.cache.forget_stream(5)
    resource.deallocate(address, 4096, stream=Stream(1))
    assert streams.waits == [(0, 6)], "the default stream's other name"
    assert live(arena) == 0


@pytest.mark.usefixtures("made")
def test_a_return_that_fails_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, streams = on_a_device(monkeypatch)
    resource = arena.memory_resource()
    address = resource.allocate(4096, stream=Stream(5))
    with pytest.raises(InvalidArgument, match=r"a cuda\.core\.Stream here"):
        resource.deallocate(address, 4096, stream=None)

    def gone(stream: int, event: object) -> None:
        raise RuntimeError("no such stream")

    with monkeypatch.context() as patch:
        patch.setattr(streams, "wait", gone)
        with pytest.raises(RuntimeError, match="no such stream"):
            resource.deallocate(address, 4096, stream=Stream(6))
    assert live(arena) == 1
    resource.deallocate(address, 4096, stream=Stream(6))
    assert live(arena) == 0
    with pytest.raises(InvalidArgument, match="no buffer"):
        resource.deallocate(address, 4096, stream=Stream(6))


@pytest.mark.usefixtures("made")
def test_a_buffer_that_could_not_be_freed_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, streams = on_a_device(monkeypatch)
    resource = arena.memory_resource()
    address = resource.allocate(4096, stream=Stream(5))
    arena.cache.record_stream(address, 7)

    def broken(stream: int) -> object:
        raise RuntimeError("no event")

    with monkeypatch.context() as patch:
        patch.setattr(streams, "record", broken)
        with pytest.raises(RuntimeError, match="no event"):
            resource.deallocate(address, 4096, stream=Stream(5))
    assert live(arena) == 1
    resource.deallocate(address, 4096, stream=Stream(5))
    assert live(arena) == 0


@pytest.mark.usefixtures("made")
def test_the_per_thread_default_stream_owns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may give back: it is this thread's then."""
    arena, streams = on_a_device(monkeypatch)
    resource = arena.memory_resource()
    with pytest.raises(InvalidArgument, match="per-thread default stream"):
        resource.allocate(4096, stream=Stream(2))
    resource.deallocate(resource.allocate(4096, stream=Stream(5)), 4096, stream=Stream(2))
    assert streams.waits == [(5, 2)]
    assert live(arena) == 0


def test_a_buffer_that_is_not_made_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(source="host")
    resource = arena.memory_resource()
    with pytest.raises(TypeError):
        resource.allocate(4096, stream=object())
    assert live(arena) == 0

    def half_made(address: int, size: int, resource: object, *, stream: object) -> None:
        resource.deallocate(address, size, stream=stream)  # type: ignore[attr-defined]
        others.append(arena.alloc(size))
        raise RuntimeError("no context")

    others: list[object] = []
    monkeypatch.setattr(BUFFER, SimpleNamespace(from_handle=half_made))
    with pytest.raises(RuntimeError, match="no context"):
        resource.allocate(4096, stream=None)
    assert live(arena) == 1, "which belongs to another arena"
    arena.cache.audit()


@pytest.mark.proves("library/cuda-core")
@pytest.mark.gpu
def test_on_the_gpu_buffers_and_streams() -> None:
    device = core.Device(torch.cuda.current_device())
    device.set_current()
    with Arena() as arena:
        resource = arena.memory_resource()
        with pytest.raises(InvalidArgument, match=r"a cuda\.core\.Stream here"):
            resource.allocate(10, stream=3)
        stream, other = device.create_stream(), device.create_stream()
        first = resource.allocate(4 << 20, stream=stream)
        assert (first.is_device_accessible, first.device_id) == (True, device.device_id)
        torch.cuda.synchronize()
        seen = torch.from_dlpack(first)
        with torch.cuda.stream(torch.cuda.ExternalStream(int(stream.handle))):
            seen.fill_(3)
        torch.cuda.synchronize()
        assert (seen == 3).all()
        del seen
        address = int(first.handle)
        # The other stream still reads when the buffer is closed on it and taken again.
        copy = torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.ExternalStream(int(other.handle))):
            torch.cuda._sleep(50_000_000)
            copy.copy_(torch.from_dlpack(first).view(torch.uint8))
        first.close(other)
        assert live(arena) == 0
        second = resource.allocate(4 << 20, stream=stream)
        assert int(second.handle) == address
        again = torch.from_dlpack(second)
        with torch.cuda.stream(torch.cuda.ExternalStream(int(stream.handle))):
            again.fill_(9)
        torch.cuda.synchronize()
        assert (copy == 3).all(), "the reuse waits until the stream that closed the buffer is done"
        del again
        second.close()
        default = resource.allocate(100, stream=device.default_stream)
        default.close()
        assert live(arena) == 0
        for each in (stream, other):
            arena.cache.forget_stream(int(each.handle))
        arena.cache.audit()
