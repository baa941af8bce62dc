"""`da.pointer` of a debug heap: what is recorded, and where a lane's pointer then leads."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from devalloc import Heap, InvalidPointer
from devalloc.sizes import PAGE_BYTES
from tests import user_kernels as uk
from tests.heap.debug.support import MODES, debug_heap, free, malloc, peek, shown
from tests.support import DEVICE, int64

pytestmark = pytest.mark.oldest

SIZES = [8, 20, 64, 1000, 5000, 20_000, PAGE_BYTES, 3 * PAGE_BYTES + 100]


def write_lanes(heap: Heap, addrs: torch.Tensor, step: int = 0) -> None:
    n = addrs.numel()
    uk.pointer_lanes_kernel[(1,)](heap.handle, addrs, step, int64([1] * n), BLOCK=n)


def texts(heap: Heap) -> list[str]:
    """What was recorded, all of it as InvalidPointer by `pointer`; and it is cleared."""
    faults = heap.faults()
    assert all((f.kind, f.found_by) == (InvalidPointer, "pointer") for f in faults)
    if faults:
        with pytest.raises(InvalidPointer, match=f"{len(faults)} x invalid pointer$"):
            heap.check()
    return [fault.message for fault in faults]


@pytest.mark.parametrize("debug", MODES)
def test_every_byte_that_was_asked_for(debug: bool | str) -> None:
    with debug_heap(debug=debug) as heap:
        addrs = malloc(heap, SIZES)
        for addr, size in zip(addrs.tolist(), SIZES, strict=True):
            heap.tensor(addr, size, torch.uint8).zero_()
            for step in sorted({0, size // 2 & -8, size - 8 & -8}):
                uk.pointer_scalar_kernel[(1,)](heap.handle, int64([addr]), step)
                assert peek(addr, size)[step] == 1
        assert texts(heap) == []
        free(heap, addrs)


def test_elements_beyond_the_end() -> None:
    with debug_heap() as heap:
        tag = heap.tag("rows")
        addrs = malloc(heap, SIZES, [tag] * len(SIZES))
        for addr, size in zip(addrs.tolist(), SIZES, strict=True):
            block = f"the block of {size} bytes at {addr:#x} ({shown('rows')})"
            for left in (3, 1):
                write_lanes(heap, int64([addr + size - left]))
                (text,) = texts(heap)
                assert f"invalid pointer to {addr + size - left:#x}" in text
                assert f"of {block} only {left} byte{'s' * (left != 1)} are left" in text
                assert "found by pointer in program 0" in text
            write_lanes(heap, int64([addr + size]))
            (text,) = texts(heap)
            assert f"it is right at the end of {block}" in text
        heap.audit()  # the guards are whole: nothing was written there
        free(heap, addrs)


def test_what_became_of_the_block() -> None:
    with debug_heap() as heap:
        (kept, *rest) = malloc(heap, [64, *SIZES], [5] * (len(SIZES) + 1)).tolist()
        free(heap, rest)
        for addr, size in zip(rest, SIZES, strict=True):
            for step in {0, size // 2}:
                write_lanes(heap, int64([kept, addr + step]))
                (text,) = texts(heap)
                assert f"the block of {size} bytes at {addr:#x} (tag 5, allocated" in text
                assert "s ago) was freed" in text
        elsewhere = torch.zeros(8, dtype=torch.int64, device=DEVICE)
        last = heap.base + heap.capacity - PAGE_BYTES
        for addr in (last, heap.base - 32, heap.base + heap.capacity, elsewhere.data_ptr(), -4):
            write_lanes(heap, int64([addr, kept]))
            (text,) = texts(heap)
            assert f"invalid pointer to {addr:#x}" in text
            assert "there is no live block" in text
        assert not elsewhere.any()
        write_lanes(heap, int64([0, 0, kept, 0]))
        found = texts(heap)
        assert len(found) == 3
        assert all("malloc gave no memory; mask with addr != 0" in text for text in found)
        assert (peek(kept, 1) == 2).all()
        free(heap, [kept])


@pytest.mark.parametrize("debug", MODES)
def test_wrong_pointers_lead_to_memory_that_nobody_uses(debug: bool | str) -> None:
    """What the kernel stores there is in no block and in no guard, and it goes on."""
    with debug_heap(debug=debug) as heap:
        addrs = malloc(heap, [64] * 8)
        for addr in addrs.tolist():
            heap.tensor(addr, 64, torch.uint8).fill_(0x11)
        free(heap, addrs[4:])
        uk.pointer_tile_kernel[(1,)](
            heap.handle,
            torch.cat([addrs[:2], addrs[4:6]]),
            int64([16, 32, 16, 1]),
            BLOCK=4,
            STEPS=32,
        )
        assert len(heap.faults()) == 32
        with pytest.raises(InvalidPointer, match="33 x invalid pointer"):
            heap.check()
        for row, addr in enumerate(addrs[:2].tolist()):
            wanted = [row * 1000 + column for column in range(16)]
            assert heap.tensor(addr, 16, torch.int32).tolist() == wanted
        for addr in addrs[2:4].tolist():
            assert (heap.tensor(addr, 64, torch.uint8) == 0x11).all()
        heap.audit()
        free(heap, addrs[:4])


def test_pages_that_were_cut_for_something_else() -> None:
    """An address in a run that is gone, where smaller blocks are now, and the other way round."""
    with debug_heap("1MiB") as heap:
        run = int(malloc(heap, [15 * PAGE_BYTES])[0])
        free(heap, [run])
        small = malloc(heap, [1000] * 400)
        inner = run + 3 * PAGE_BYTES + 512
        assert small.min() < inner < small.max()
        write_lanes(heap, int64([inner]))
        assert any(0 <= inner - addr < 1000 for addr in small.tolist())
        assert texts(heap) == []
        free(heap, small)
        run = int(malloc(heap, [15 * PAGE_BYTES])[0])
        write_lanes(heap, int64([int(small[7]), run + 15 * PAGE_BYTES - 4]))
        assert texts(heap) == []
        free(heap, [run])
        write_lanes(heap, int64([run + 9 * PAGE_BYTES]))
        (text,) = texts(heap)
        assert f"the block of {15 * PAGE_BYTES} bytes at {run:#x} (no tag, allocated" in text


WRONG_HANDLE = """
import torch
from tests import user_kernels as uk
zeros = torch.zeros(64, dtype=torch.int64, device="cuda").view(torch.uint64)
addrs = torch.full((4,), -1, dtype=torch.int64, device="cuda")
uk.malloc_unmasked_kernel[(1,)](zeros, torch.full_like(addrs, 8), addrs, BLOCK=4)
torch.cuda.synchronize()
assert addrs.tolist() == [0] * 4
uk.free_unmasked_kernel[(1,)](zeros, torch.full_like(addrs, 16), BLOCK=4)
torch.cuda.synchronize()
assert not zeros.view(torch.int64).any()
"""


@pytest.mark.gpu
def test_a_tensor_that_is_no_handle() -> None:
    """On a device nothing can be recorded then, and nothing is done."""
    done = subprocess.run(
        [sys.executable, "-c", WRONG_HANDLE], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
