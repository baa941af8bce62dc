"""cuda.core's buffers in an arena."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from devalloc import Arena, InvalidArgument, OutOfMemory

core = pytest.importorskip("cuda.core", reason="needs cuda.core")
if not hasattr(core, "MemoryResource"):
    pytest.skip("needs cuda.core from 1.0 on", allow_module_level=True)


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


@pytest.mark.gpu
def test_on_the_gpu_buffers_and_streams() -> None:
    device = core.Device(torch.cuda.current_device())
    device.set_current()
    with Arena() as arena:
        resource = arena.memory_resource()
        with pytest.raises(InvalidArgument, match=r"no cuda\.core\.Stream"):
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
        assert (copy == 3).all(), "the reuse waited for the stream that closed the buffer"
        del again
        second.close()
        default = resource.allocate(100, stream=device.default_stream)
        default.close()
        assert live(arena) == 0
        for each in (stream, other):
            arena.cache.forget_stream(int(each.handle))
        arena.cache.audit()
