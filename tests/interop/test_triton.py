"""Scratch memory of Triton's launches from an arena."""

from __future__ import annotations

import contextvars
import gc
import itertools

import pytest
import torch
import triton
import triton.language as tl

from devalloc import Arena, InvalidArgument, OutOfMemory

pytestmark = pytest.mark.oldest


def live(arena: Arena) -> int:
    return arena.stats()["allocation.all.current"]


@pytest.mark.parametrize("alignment", [1, 128, 256, 512, 4096])
def test_alignment_is_honoured(alignment: int) -> None:
    allocate = Arena(source="host").triton_allocator()
    buffers = [allocate(700, alignment, None) for _ in range(9)]
    addresses = sorted(buffer.data_ptr() for buffer in buffers)
    assert all(address % alignment == 0 for address in addresses)
    assert all(b - a >= 700 for a, b in itertools.pairwise(addresses))


def test_a_buffer_is_owned_by_the_launch_stream() -> None:
    """Held until the launch returns; reused on that stream at once and on no other."""
    arena = Arena(source="host")
    allocate = arena.triton_allocator()
    buffer = allocate(1 << 20, 128, 7)
    address = buffer.data_ptr()
    assert live(arena) == 1
    del buffer
    assert live(arena) == 0
    other = allocate(1 << 20, 128, 8)
    assert other.data_ptr() != address
    assert allocate(1 << 20, 128, 7).data_ptr() == address


def test_a_buffer_keeps_the_arena() -> None:
    buffer = Arena(source="host").triton_allocator()(4096, 128, None)
    gc.collect()
    arena = buffer._arena
    assert live(arena) == 1
    del buffer
    assert live(arena) == 0


def test_bad_requests_change_nothing() -> None:
    arena = Arena(source="host", limit="4MiB")
    allocate = arena.triton_allocator()
    with pytest.raises(InvalidArgument, match="power of two, not 48 B"):
        allocate(10, 48, None)
    with pytest.raises(InvalidArgument, match="negative"):
        allocate(-1, 128, None)
    with pytest.raises(OutOfMemory):
        allocate(1 << 30, 128, None)
    assert allocate(0, 4096, None).data_ptr() == 0
    assert live(arena) == 0
    arena.close()
    with pytest.raises(InvalidArgument, match="closed"):
        allocate(10, 128, None)
    with pytest.raises(InvalidArgument, match="closed"):
        arena.triton_allocator()


@triton.jit
def _copy_by_descriptor(source, target, rows, columns, SIDE: tl.constexpr):
    read = tl.make_tensor_descriptor(source, [rows, columns], [columns, 1], [SIDE, SIDE])
    write = tl.make_tensor_descriptor(target, [rows, columns], [columns, 1], [SIDE, SIDE])
    row, column = tl.program_id(0) * SIDE, tl.program_id(1) * SIDE
    write.store([row, column], read.load([row, column]) + 1)


@pytest.mark.proves("library/triton-set_allocator")
@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_on_the_gpu_descriptors_made_in_kernels_live_in_the_arena() -> None:
    """Launches on two streams at once, whose scratch would collide if it were reused too early."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("descriptors need scratch memory from compute capability 9.0 on")
    with Arena() as arena:
        sizes: list[int] = []
        allocate = arena.triton_allocator()

        def counted(size: int, alignment: int, stream: int | None) -> object:
            sizes.append(size)
            buffer = allocate(size, alignment, stream)
            assert buffer.data_ptr() % alignment == 0
            return buffer

        source = torch.arange(1024 * 1024, device="cuda", dtype=torch.float32).view(1024, 1024)
        targets = [torch.zeros_like(source) for _ in range(40)]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]

        def launch() -> None:
            triton.set_allocator(counted)
            for step, target in enumerate(targets):
                with torch.cuda.stream(streams[step % 2]):
                    _copy_by_descriptor[(16, 16)](source, target, 1024, 1024, SIDE=64)

        contextvars.copy_context().run(launch)  # the allocator is of this context only
        torch.cuda.synchronize()
        assert len(sizes) == 40
        assert all(torch.equal(target, source + 1) for target in targets)
        assert live(arena) == 0
        arena.cache.audit()
