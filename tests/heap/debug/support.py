"""What the tests of debug heaps share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from devalloc import Heap, LeakWarning
from devalloc.heap.debug_table import GUARD_BYTES
from devalloc.heap.recorded_errors import Fault
from devalloc.sizes import PAGE_BYTES
from tests import user_kernels as uk
from tests.heap.debug import kernels as dk
from tests.support import DEVICE, free_lanes, free_scalars, int64, programs

SHAPES = ["scalar", "lanes"]
MODES = [True, "full"]

# Slots of small, middle and large classes, powers of two and not, multiples of words and not;
# and runs.
SIZES = [
    *(1, 8, 15, 16, 17, 31, 32, 33, 48, 64, 100, 127, 128, 250, 256, 1000, 1024, 1025),
    *(4096, 5000, 8192, 20_000, 32_704, 32_768, 32_769),
    *(PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 200_000),
]


@contextmanager
def debug_heap(capacity: str = "4MiB", debug: bool | str = True) -> Iterator[Heap]:
    """A debug heap that must end with nothing live, nothing recorded and clean audits."""
    heap = Heap(capacity, debug=debug)
    yield heap
    heap.check()
    heap.audit()
    stats = heap.stats()
    assert (stats.used, stats.largest_free) == (0, heap.capacity - GUARD_BYTES)
    assert heap.leaks().count == 0
    heap.close()


def malloc(
    heap: Heap,
    sizes: Sequence[int],
    tags: Sequence[int] | None = None,
    shape: str = "lanes",
    zero: bool = False,
    warps: int = 4,
) -> torch.Tensor:
    wanted, owners = int64(sizes), int64(tags if tags is not None else [0] * len(sizes))
    addrs = torch.full_like(wanted, -1)
    n = wanted.numel()
    if shape == "scalar":
        scalar = dk.zeros_scalar_kernel if zero else dk.malloc_scalar_kernel
        scalar[(n,)](heap.handle, wanted, owners, addrs, num_warps=warps)
    else:
        lanes = dk.zeros_lanes_kernel if zero else dk.malloc_lanes_kernel
        lanes[programs(n, 64)](heap.handle, wanted, owners, addrs, n, BLOCK=64, num_warps=warps)
    assert (addrs != 0).all()
    return addrs


def free(heap: Heap, addrs: torch.Tensor | Sequence[int], shape: str = "lanes") -> None:
    if shape == "scalar":
        free_scalars(heap, addrs, warps=4)
    else:
        free_lanes(heap, addrs, block=64, warps=4)


def realloc(heap: Heap, addrs: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    moved, n = addrs.clone(), addrs.numel()
    uk.realloc_lanes_kernel[programs(n, 16)](heap.handle, moved, int64(sizes), n, BLOCK=16)
    return moved


def poke(addrs: torch.Tensor | Sequence[int], value: int = 1, nbytes: int = 1) -> None:
    """Write at addresses, of any owner."""
    where = int64(addrs)
    n = where.numel()
    dk.poke_kernel[programs(n, 64)](where, value, n, BYTES=nbytes, BLOCK=64)


def peek(addr: int, nbytes: int) -> torch.Tensor:
    out = torch.zeros(nbytes, dtype=torch.int8, device=DEVICE)
    dk.peek_kernel[programs(nbytes, 1024)](int64([addr]), nbytes, out, BLOCK=1024)
    return out.cpu()


def owners(heap: Heap, count: int) -> tuple[list[int], list[str]]:
    """Tags for ``count`` blocks: every other has a name."""
    tags = [heap.tag(f"owner {i}") if i % 2 else i + 1 for i in range(count)]
    return tags, [f"owner {i}" if i % 2 else str(i + 1) for i in range(count)]


def shown(tag: str) -> str:
    """How a message shows a tag."""
    if not tag:
        return "no tag"
    return f"tag {tag}" if tag.isdigit() else f"tag {tag!r}"


def assert_faults(
    heap: Heap,
    kind: type[Exception],
    found_by: str,
    wanted: Sequence[tuple[int, int, int, str]],
) -> None:
    """The record has exactly one fault for each (address, block, size, tag), and its message names
    all of them; `check` raises the first, with the count, and clears the record."""
    faults = heap.faults()
    found = sorted((f.address, f.block, f.size, f.tag) for f in faults)
    assert found == sorted(wanted)
    for fault in faults:
        assert (fault.kind, fault.found_by) == (kind, found_by)
        assert_names(fault.message, fault)
    with pytest.raises(kind) as raised:
        heap.check()
    # (The age has grown since.)
    assert str(raised.value).startswith(faults[0].message.partition(", allocated ")[0])
    assert f"since the last check: {len(wanted)} x " in str(raised.value)
    heap.check()
    assert heap.faults() == []


def assert_names(message: str, fault: Fault) -> None:
    assert f"{fault.address:#x}" in message
    assert f"block of {fault.size} bytes at {fault.block:#x}" in message
    assert shown(fault.tag) in message


@contextmanager
def no_leak_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", LeakWarning)
        yield
