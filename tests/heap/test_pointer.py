"""`da.pointer`, null pointers, and tensors that are no handles, on ordinary heaps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from devalloc import Heap, InvalidArgument, InvalidPointer
from devalloc.sizes import PAGE_BYTES
from tests import user_kernels as uk
from tests.conftest import ON_GPU
from tests.support import int64

pytestmark = pytest.mark.oldest
interpreted = pytest.mark.skipif(ON_GPU, reason="an ordinary heap on a device checks nothing")

# A block of each kind: in a page of slots, of slots that do not fill theirs, one page, many pages.
SIZES = [64, 1000, 20_000, PAGE_BYTES, 200 * PAGE_BYTES]


def first_error(error: BaseException) -> BaseException:
    """What Triton's own errors, raised on its way out, were caused by."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def refused(kind: type[Exception], *texts: str) -> Iterator[None]:
    """The kernel ends with an error of this kind, perhaps wrapped by the interpreter, which has all
    ``texts``."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        yield
    error = first_error(caught.value)
    assert type(error) is kind
    for text in texts:
        assert text in str(error)


def line_of(kernel: object, text: str) -> str:
    """The place of a line of a kernel in `user_kernels`: "file:line"."""
    path = Path(uk.__file__)
    lines = path.read_text().splitlines()
    name = kernel.fn.__name__  # type: ignore[attr-defined]
    start = next(i for i, line in enumerate(lines) if line.startswith(f"def {name}("))
    return f"{path}:{next(i for i in range(start, len(lines)) if text in lines[i]) + 1} in {name}"


def write_lanes(heap: Heap, addrs: torch.Tensor, step: int = 0, wanted: object = None) -> None:
    n = addrs.numel()
    flags = int64([1] * n if wanted is None else wanted)  # type: ignore[arg-type]
    uk.pointer_lanes_kernel[(1,)](heap.handle, addrs, step, flags, BLOCK=n)


def test_pointers_of_lanes() -> None:
    with Heap("16MiB") as heap:
        addrs = heap.malloc(SIZES[:4])
        for step in (0, 4, 60):
            write_lanes(heap, addrs, step)
            for lane, addr in enumerate(addrs.tolist()):
                assert heap.tensor(addr, 16, torch.int32)[step // 4] == lane
        heap.free(addrs)


def test_pointers_of_programs_and_of_tiles() -> None:
    with Heap("32MiB") as heap:
        addrs = heap.malloc(SIZES)
        for addr, size in zip(addrs.tolist(), SIZES, strict=True):
            heap.tensor(addr, size, torch.uint8).zero_()
            for step in {0, 8, size // 2 & -8, size - 8}:
                uk.pointer_scalar_kernel[(1,)](heap.handle, int64([addr]), step)
                assert heap.tensor(addr, size // 8, torch.int64)[step // 8] == 1
        heap.free(addrs)
        lengths = [0, 5, 16, 1]
        addrs = heap.malloc([64, 20, 64, 16])
        uk.pointer_tile_kernel[(1,)](heap.handle, addrs, int64(lengths), BLOCK=4, STEPS=16)
        values, _offsets = heap.gather(addrs, lengths, torch.int32)
        assert values.tolist() == [1000 * i + j for i, n in enumerate(lengths) for j in range(n)]
        heap.free(addrs)


def test_lanes_that_are_masked_are_not_looked_at() -> None:
    with Heap("1MiB") as heap:
        addr = int(heap.malloc(64))
        write_lanes(heap, int64([0, addr, 12345, addr + 64]), wanted=[0, 1, 0, 0])
        assert heap.tensor(addr, 1, torch.int32).item() == 1
        heap.free(addr)


@interpreted
def test_addresses_without_a_block() -> None:
    """Null, freed, never allocated, foreign: the error has the address, lane, program and line."""
    place = line_of(uk.pointer_lanes_kernel, "da.pointer")
    elsewhere = torch.zeros(8, dtype=torch.int64)
    with Heap("32MiB") as heap:
        kept = int(heap.malloc(64))
        freed = heap.malloc(SIZES)
        heap.free(freed)
        wrong = [*freed.tolist(), kept + 64, heap.base + heap.capacity, heap.base - 4]
        for addr in [*wrong, elsewhere.data_ptr(), -8, (1 << 63) - 1]:
            at = f"4 bytes at {addr:#x}"
            with refused(
                InvalidPointer, at, "(lane 1 of 2)", "in program 0, " + place, "no live block"
            ):
                write_lanes(heap, int64([kept, addr]))
        with refused(InvalidPointer, "address 0 ", "(lane 1 of 2)", place, "malloc gave no memory"):
            write_lanes(heap, int64([kept, 0]))
        with refused(InvalidPointer, "8 bytes at", "in program 2, ", "pointer_scalar_kernel"):
            uk.pointer_scalar_kernel[(4,)](heap.handle, int64([kept, kept, freed[0], 0]), 0)
        # Inside of what was a run.
        with refused(InvalidPointer, "there is no live block"):
            uk.pointer_scalar_kernel[(1,)](heap.handle, freed[4:], 100 * PAGE_BYTES)
        heap.check()
        heap.free(kept)


@interpreted
@pytest.mark.parametrize("size", SIZES)
def test_elements_that_do_not_fit(size: int) -> None:
    with Heap("32MiB") as heap:
        addr = int(heap.malloc(size))
        have = int(heap.usable_size(addr))
        last = int64([addr + have - 4])
        write_lanes(heap, last)
        with refused(InvalidPointer, f"the block of {have} bytes at {addr:#x} has only 3 bytes"):
            write_lanes(heap, last, 1)
        with refused(InvalidPointer, "8 bytes at", "has only 4 bytes there"):
            uk.pointer_scalar_kernel[(1,)](heap.handle, last, 0)
        with refused(InvalidPointer, f"4 bytes at {addr + have:#x}", "there is no live block"):
            write_lanes(heap, last, 4)
        with refused(InvalidPointer, f"4 bytes at {addr - 4:#x}"):
            write_lanes(heap, last, -have)
        heap.free(addr)


@interpreted
def test_a_failed_malloc_without_a_mask() -> None:
    """The error says where, and what the heap had recorded before is its note."""
    with refused(InvalidPointer, "address 0 ", "mask with addr != 0"), Heap("1MiB") as heap:
        write_lanes(heap, heap.malloc([1 << 21] * 2))
    if sys.version_info >= (3, 11):
        with pytest.raises(Exception) as caught, Heap("1MiB") as heap:  # noqa: PT011
            write_lanes(heap, heap.malloc([1 << 21] * 2))
        assert "had recorded: malloc of 2 MiB failed" in caught.value.__notes__[0]


# Null pointers by a cast ------------------------------------------------------------------------

NULLS: list[tuple[object, str, str, Callable[[torch.Tensor], object]]] = [
    (uk.fill_behind_null_kernel, "tl.store", "store to address 0x8 (lane 2 of 4)",
     lambda addrs: uk.fill_behind_null_kernel[(1,)](addrs, 3, BLOCK=4)),
    (uk.load_null_kernel, "tl.load(tl", "load from address 0x0 in",
     lambda addrs: uk.load_null_kernel[(1,)](addrs[2:], addrs.clone())),
    (uk.count_at_null_kernel, "tl.atomic_add", "atomic on address 0x0 in",
     lambda addrs: uk.count_at_null_kernel[(1,)](addrs[2:])),
    (uk.swap_at_null_kernel, "tl.atomic_cas", "atomic on address 0x0 in",
     lambda addrs: uk.swap_at_null_kernel[(1,)](addrs[2:])),
]  # fmt: skip


@interpreted
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(("kernel", "text", "what", "launch"), NULLS, ids=[n[2][:6] for n in NULLS])
def test_accesses_through_null(
    kernel: object, text: str, what: str, launch: Callable[[torch.Tensor], object], quick: bool
) -> None:
    if quick:
        pytest.importorskip("greenlet")
        from devalloc.testing import quick_interpreter
    with Heap("1MiB") as heap, quick_interpreter() if quick else nullcontext():
        addrs = torch.cat([heap.malloc([64, 64]), int64([0])])
        with refused(InvalidPointer, what, "in program 0, " + line_of(kernel, text)):
            launch(addrs)
        launch_args = torch.cat([addrs[:2], addrs[:1]])
        launch(launch_args)  # the same with memory
        heap.free(addrs)


# Handles ----------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_tensors_that_are_no_handles(dtype: torch.dtype) -> None:
    zeros = torch.zeros(64, dtype=dtype)
    addrs, sizes = int64([0, 0]), int64([8, 8])
    for kernel, args, block in (
        (uk.malloc_unmasked_kernel, (sizes, addrs), {"BLOCK": 2}),
        (uk.free_unmasked_kernel, (addrs,), {"BLOCK": 2}),
        (uk.usable_size_lanes_kernel, (addrs, sizes, 2), {"BLOCK": 2}),
        (uk.zeros_lanes_kernel, (sizes, addrs, 2), {"BLOCK": 2}),
        (uk.realloc_lanes_kernel, (addrs, sizes, 2), {"BLOCK": 2}),
        (uk.pointer_scalar_kernel, (addrs, 0), {}),
    ):
        name = kernel.fn.__name__
        with refused(InvalidArgument, "not a heap's handle in program 0, ", name, "word is 0x0"):
            kernel[(1,)](zeros, *args, **block)
    assert not zeros.view(torch.int64).any()


@interpreted
def test_a_handle_of_a_closed_heap_is_one() -> None:
    heap = Heap("1MiB")
    handle = heap.handle
    heap.close()
    addrs = int64([-1])
    uk.malloc_unmasked_kernel[(1,)](handle, int64([8]), addrs, BLOCK=1)
    assert addrs.tolist() == [0]


def test_pointers_are_checked_when_compiled() -> None:
    """What is no type, no address or no mask is a compile-time error with a clear message."""
    with Heap("1MiB") as heap:
        one = heap.malloc([64])
        for kernel, text in (
            (uk.pointer_to_nothing_kernel, "a type is one such as tl.float32"),
            (uk.pointer_of_fraction_kernel, "addresses are integers"),
            (uk.pointer_wide_mask_kernel, "a mask broadcasts to the addresses"),
            (uk.pointer_integer_mask_kernel, "a mask is of bool"),
        ):
            with pytest.raises(Exception) as caught:  # noqa: PT011
                kernel[(1,)](heap.handle, one, BLOCK=4)
            assert text in str(first_error(caught.value))
        heap.free(one)
