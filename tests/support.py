"""What the tests of the heap share: launching, waiting, patterns, what must hold of live blocks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import torch

from devalloc import DevallocError, Heap
from devalloc.sizes import CLASS_SIZES, MAX_SLOT, PAGE_BYTES
from tests import user_kernels as uk
from tests.conftest import ON_GPU

DEVICE = "cuda" if ON_GPU else "cpu"
# The number of warps means nothing to the interpreter.
WARPS = [1, 4, 8] if ON_GPU else [1]
MIB = 1 << 20

# Sizes around everything that changes what is done with a request.
EDGE_SIZES = sorted(
    {1, 15, 16, 17, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 2 * PAGE_BYTES, MAX_SLOT + 1}
    | {size + step for size in CLASS_SIZES for step in (-1, 0, 1)}
)


# Blocks of a program and words at a time. The interpreter takes as long for many words as for few.
FILL = {"BLOCK": 64, "STEP": 128} if ON_GPU else {"BLOCK": 16, "STEP": 1024}


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread, ten seconds at most."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def int64(values: Sequence[int] | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64).to(DEVICE)


def programs(count: int, block: int) -> tuple[int]:
    return ((count + block - 1) // block,)


def usual_warps(block: int) -> int:
    """How many warps a program of so many lanes has: compilers place a few lanes in each thread."""
    return max(1, min(block // 256, 16)) if ON_GPU else 1


def malloc_lanes(
    heap: Heap, sizes: Sequence[int] | torch.Tensor, block: int = 1024, warps: int = 0
) -> torch.Tensor:
    wanted = int64(sizes)
    addrs = torch.full_like(wanted, -1)
    n = wanted.numel()
    uk.malloc_lanes_kernel[programs(n, block)](
        heap.handle, wanted, addrs, n, BLOCK=block, num_warps=warps or usual_warps(block)
    )
    return addrs


def free_lanes(
    heap: Heap, addrs: Sequence[int] | torch.Tensor, block: int = 1024, warps: int = 0
) -> None:
    given = int64(addrs)
    n = given.numel()
    uk.free_lanes_kernel[programs(n, block)](
        heap.handle, given, n, BLOCK=block, num_warps=warps or usual_warps(block)
    )


def malloc_scalars(heap: Heap, sizes: Sequence[int], warps: int = 1) -> torch.Tensor:
    addrs = torch.full((len(sizes),), -1, dtype=torch.int64, device=DEVICE)
    uk.malloc_scalar_kernel[(len(sizes),)](heap.handle, int64(sizes), addrs, num_warps=warps)
    return addrs


def free_scalars(heap: Heap, addrs: Sequence[int] | torch.Tensor, warps: int = 1) -> None:
    given = int64(addrs)
    uk.free_scalar_kernel[(given.numel(),)](heap.handle, given, num_warps=warps)


def write(addrs: torch.Tensor, sizes: torch.Tensor, first_tag: int = 1) -> None:
    """Fill block i with the pattern of ``first_tag + i``."""
    n = addrs.numel()
    uk.write_kernel[programs(n, FILL["BLOCK"])](addrs, sizes, n, first_tag, **FILL)


def wrong_words(addrs: torch.Tensor, sizes: torch.Tensor, first_tag: int = 1) -> int:
    """How many words differ from what `write` wrote."""
    n = addrs.numel()
    wrong = torch.zeros_like(addrs)
    uk.verify_kernel[programs(n, FILL["BLOCK"])](addrs, sizes, wrong, n, first_tag, **FILL)
    return int(wrong.sum())


def promised_alignment(nbytes: int) -> int:
    if nbytes >= PAGE_BYTES:
        return PAGE_BYTES
    return max(16, nbytes) if nbytes & (nbytes - 1) == 0 else 16


def assert_blocks(heap: Heap, addrs: torch.Tensor, sizes: Sequence[int] | torch.Tensor) -> None:
    """All blocks are there, disjoint, inside the heap and aligned as guaranteed (H1)."""
    blocks = sorted(zip(addrs.tolist(), torch.as_tensor(sizes).tolist(), strict=True))
    end = heap.base
    for addr, nbytes in blocks:
        assert addr != 0, f"no memory for {nbytes} B"
        assert addr >= end, f"block at {addr:#x} of {nbytes} B overlaps the one before"
        assert addr % promised_alignment(nbytes) == 0, f"{nbytes} B at {addr:#x}"
        end = addr + nbytes
    assert end <= heap.base + heap.capacity


def assert_empty(heap: Heap) -> None:
    """There is no live block, nothing was recorded, and the heap is as it was when made."""
    heap.check()
    heap.audit()
    stats = heap.stats()
    assert (stats.used, stats.free) == (0, heap.capacity)
    assert stats.largest_free == heap.capacity
    assert all(row.live == 0 and row.pages == 0 for row in stats.per_class)


def assert_whole_capacity(heap: Heap) -> None:
    """An empty heap whose whole capacity is free in one piece."""
    assert_empty(heap)
    addr = heap.malloc([heap.capacity])
    assert addr.tolist() == [heap.base]
    assert heap.stats().free == 0
    heap.free(addr)
    assert_empty(heap)


def error_counts(heap: Heap) -> dict[str, int]:
    """The errors recorded since the last look, by name, as `Heap.check` tells them; clears them."""
    try:
        heap.check()
    except DevallocError as error:
        counts = str(error).rpartition("since the last check: ")[2]
        return {name: int(count) for count, name in re.findall(r"(\d+) x ([a-z ]+)", counts)}
    return {}
