"""Misuse: each case has one outcome, is counted, and leaves all other blocks as they were."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import devalloc
from devalloc import (
    DoubleFree,
    Heap,
    InvalidArgument,
    InvalidFree,
    InvalidFreeError,
    OutOfMemory,
)
from devalloc.kernels import layout
from devalloc.sizes import PAGE_BYTES
from tests import user_kernels as uk
from tests.conftest import ON_GPU
from tests.support import (
    DEVICE,
    MIB,
    WARPS,
    assert_empty,
    free_lanes,
    free_scalars,
    int64,
    malloc_lanes,
    malloc_scalars,
    write,
    wrong_words,
)

KEPT = [64, 64, 1000, 20_000, 3 * PAGE_BYTES]


@contextmanager
def bystanders(heap: Heap) -> Iterator[torch.Tensor]:
    """Live blocks that must survive, untouched, whatever happens inside."""
    addrs = heap.malloc(KEPT)
    sizes = heap.usable_size(addrs)
    write(addrs, sizes)
    before = heap.stats()
    yield addrs
    heap.check()
    heap.audit()
    after = heap.stats()
    assert (after.used, after.free) == (before.used, before.free)
    assert torch.equal(heap.usable_size(addrs), sizes)
    assert wrong_words(addrs, sizes) == 0
    heap.free(addrs)
    assert_empty(heap)


@contextmanager
def recorded(heap: Heap, error: type[Exception], *texts: str) -> Iterator[list[str]]:
    """``check`` afterwards raises ``error`` with all ``texts``, and is silent the second time. Its
    message is then in the list."""
    heap.check()
    messages: list[str] = []
    yield messages
    with pytest.raises(error) as caught:
        heap.check()
    assert type(caught.value) is error
    for text in texts:
        assert text in str(caught.value)
    messages.append(str(caught.value))
    heap.check()


# Sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [-1, -(1 << 40), -(1 << 63)])
def test_negative_sizes(size: int) -> None:
    with Heap("1MiB") as heap, bystanders(heap):
        with recorded(heap, InvalidArgument, f"malloc of {size} bytes", "2 x invalid argument"):
            assert malloc_lanes(heap, [size, 0, size], 4).tolist() == [0, 0, 0]
        with recorded(heap, InvalidArgument, "1 x invalid argument"):
            assert malloc_scalars(heap, [size]).tolist() == [0]
        assert heap.stats().failures == 0


@pytest.mark.parametrize("size", [MIB + 1, 1 << 33, 1 << 62, (1 << 63) - 1])
def test_sizes_over_the_capacity(size: int) -> None:
    with Heap("1MiB") as heap, bystanders(heap):
        with recorded(heap, OutOfMemory, "2 x out of memory", "the whole heap has 1 MiB"):
            assert malloc_lanes(heap, [size, 0, size], 4).tolist() == [0, 0, 0]
        with recorded(heap, OutOfMemory, "1 x out of memory"):
            assert malloc_scalars(heap, [size]).tolist() == [0]
        assert heap.stats().failures == 3


def test_bad_sizes_among_good_ones() -> None:
    sizes = [64, -5, 1 << 62, 0, 1000, MIB + 1, 100_000]
    with Heap("1MiB") as heap, bystanders(heap):
        with recorded(heap, InvalidArgument, "1 x invalid argument", "2 x out of memory"):
            addrs = malloc_lanes(heap, sizes, 8)
        assert [addr != 0 for addr in addrs.tolist()] == [1, 0, 0, 0, 1, 0, 1]
        heap.free(addrs)


def test_bad_sizes_under_a_false_mask() -> None:
    with Heap("1MiB") as heap, bystanders(heap):
        addrs = int64([-1] * 4)
        sizes = int64([-1, 1 << 62, 64, 0])
        uk.malloc_masked_kernel[(1,)](heap.handle, sizes, int64([0] * 4), addrs, BLOCK=4)
        assert addrs.tolist() == [0] * 4
        heap.check()


# Addresses ------------------------------------------------------------------------------------


def test_free_of_null() -> None:
    with Heap("1MiB") as heap, bystanders(heap):
        free_lanes(heap, [0] * 5)
        free_scalars(heap, [0])
        heap.check()


def foreign_addresses(heap: Heap) -> dict[str, int]:
    elsewhere = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    return {
        "foreign": elsewhere.data_ptr(),
        "below": heap.base - 64,
        "just below": heap.base - 1,
        "above": heap.base + heap.capacity,
        "far above": heap.base + heap.capacity + (1 << 40),
        "tiny": 16,
        "negative": -16,
        "least": -(1 << 63),
        "greatest": (1 << 63) - 1,
        "control block": heap.handle.data_ptr(),
    }


def test_foreign_addresses() -> None:
    with Heap("1MiB") as heap, bystanders(heap):
        wrong = foreign_addresses(heap)
        with recorded(heap, InvalidFree, f"{len(wrong)} x invalid free", "not an address of this"):
            free_lanes(heap, list(wrong.values()), 16)
        with recorded(heap, InvalidFree, f"{len(wrong)} x invalid free"):
            free_scalars(heap, list(wrong.values()))


def test_addresses_inside_blocks() -> None:
    with Heap("1MiB") as heap, bystanders(heap) as kept:
        small, _, slot, big, run = kept.tolist()
        wrong = [small + step for step in (1, 8, 16, 32, 63)]
        wrong += [slot + 16, slot + 1008, slot + 512, big + 16, big + 16384]
        wrong += [run + 8, run + 16, run + PAGE_BYTES - 16]
        wrong += [run + PAGE_BYTES, run + 2 * PAGE_BYTES, run + 2 * PAGE_BYTES + 64]
        with recorded(heap, InvalidFree, f"{len(wrong)} x invalid free", "not the start"):
            free_lanes(heap, wrong, 16)
        with recorded(heap, InvalidFree, f"{len(wrong)} x invalid free"):
            free_scalars(heap, wrong)


def test_the_rest_of_a_slab_page() -> None:
    """Pages that are no multiple of the slot size have a tail in which no block can be."""
    with Heap("1MiB") as heap, bystanders(heap):
        addr = heap.malloc([9000]).item()
        usable = heap.usable_size([addr]).item()
        slots = PAGE_BYTES // usable
        page = heap.base + (addr - heap.base) // PAGE_BYTES * PAGE_BYTES
        assert slots * usable < PAGE_BYTES
        with recorded(heap, InvalidFree, "1 x invalid free"):
            heap.free([page + slots * usable])
        heap.free([addr])


# Double frees ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 32768, 3 * PAGE_BYTES])
def test_twice_in_one_program(size: int) -> None:
    with Heap("1MiB") as heap, bystanders(heap):
        addrs = heap.malloc([size] * 2)
        with recorded(heap, DoubleFree, "2 x double free") as messages:
            uk.free_twice_kernel[(2,)](heap.handle, addrs)
        # Whose address is named, is open: either program may be the first to record its error.
        named = [f"double free of {addr:#x} " in messages[0] for addr in addrs.tolist()]
        assert sum(named) == 1
        stats = heap.stats()
        assert stats.allocations - stats.frees == len(KEPT)


@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("size", [16, 1000, PAGE_BYTES])
def test_twice_in_one_block_of_lanes(size: int, warps: int) -> None:
    """Lanes that hold the same address: one of them frees it."""
    with Heap("1MiB") as heap, bystanders(heap):
        addrs = heap.malloc([size] * 3)
        with recorded(heap, DoubleFree, "13 x double free"):
            free_lanes(heap, torch.cat([addrs, addrs.repeat(4), addrs[:1]]), 16, warps)


@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("size", [64, PAGE_BYTES])
def test_two_programs_of_one_launch(size: int, warps: int) -> None:
    with Heap("1MiB") as heap, bystanders(heap):
        addrs = heap.malloc([size] * 4)
        with recorded(heap, DoubleFree, "8 x double free"):
            uk.free_shared_kernel[(3,)](heap.handle, addrs, 4, num_warps=warps)
        addrs = heap.malloc([size] * 4)
        with recorded(heap, DoubleFree, "4 x double free"):
            uk.free_shared_lanes_kernel[(2,)](heap.handle, addrs, BLOCK=4, num_warps=warps)
        stats = heap.stats()
        assert stats.allocations - stats.frees == len(KEPT)


def test_a_slot_of_a_retired_slab() -> None:
    """The page may be free, in another slab, or in a run: only a live block that begins exactly
    there could be freed by such an address."""
    with Heap(2 * PAGE_BYTES) as heap:
        addrs = heap.malloc([64] * 100)
        stale = addrs.tolist()
        heap.free(addrs)
        heap.trim()
        assert heap.stats().largest_free == heap.capacity, "the slab is gone"
        with recorded(heap, DoubleFree, "100 x double free"):
            heap.free(stale)
        run = heap.malloc([heap.capacity])
        with recorded(heap, InvalidFree, "99 x invalid free"):
            heap.free(stale[1:])
        assert heap.usable_size(run).item() == heap.capacity
        heap.free(run)
        with recorded(heap, DoubleFree, "100 x double free"):
            heap.free(stale)
        other = heap.malloc([96] * 682 * 2)
        sizes = heap.usable_size(other)
        write(other, sizes)
        free_slots = [addr for addr in stale if addr not in set(other.tolist())]
        with recorded(heap, InvalidFree, f"{len(free_slots)} x invalid free"):
            heap.free(free_slots)
        assert torch.equal(heap.usable_size(other), sizes)
        assert wrong_words(other, sizes) == 0
        heap.free(other)
        assert_empty(heap)


def test_never_allocated() -> None:
    """Well-formed addresses of a fresh heap: it has no live block."""
    with Heap("1MiB") as heap:
        with recorded(heap, DoubleFree, "3 x double free"):
            heap.free([heap.base, heap.base + 16, heap.base + PAGE_BYTES])
        assert_empty(heap)


def test_all_misuse_at_once_is_counted_apart() -> None:
    with Heap("1MiB") as heap, bystanders(heap) as kept:
        gone = heap.malloc([64])
        heap.free(gone)
        heap.free([int(gone), 12345, int(kept[0]) + 8])
        heap.malloc([-1, 2 * MIB])
        with pytest.raises(InvalidFreeError) as caught:
            heap.check()
        message = str(caught.value)
        assert "1 x double free, 2 x invalid free, 1 x out of memory, 1 x invalid" in message


def test_more_errors_than_records() -> None:
    with Heap("1MiB") as heap, bystanders(heap):
        for _ in range(20):
            heap.free([12345] * 3)
        with pytest.raises(InvalidFree, match="60 x invalid free"):
            heap.check()


# Making a heap --------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, 1, PAGE_BYTES - 1, "0", "63KiB", -1, "-1MiB", 1 << 62])
def test_capacities_that_are_too_small_or_too_large(capacity: int | str) -> None:
    with pytest.raises(InvalidArgument):
        Heap(capacity)


@pytest.mark.parametrize("capacity", ["", "lots", "64 furlongs", "1e9", None, 1.5, True])
def test_capacities_that_make_no_sense(capacity: object) -> None:
    with pytest.raises(InvalidArgument, match="size"):
        Heap(capacity)  # type: ignore[arg-type]


def test_a_heap_too_small_says_what_a_page_is() -> None:
    with pytest.raises(InvalidArgument, match=r"'1KiB' cannot hold one page of 64 KiB"):
        Heap("1KiB")


@pytest.mark.parametrize("device", ["nonsense", "meta", "cpu" if ON_GPU else "cuda", "cuda:77"])
def test_devices_that_cannot_be(device: str) -> None:
    with pytest.raises(InvalidArgument):
        Heap("1MiB", device=device)


# Wrong tensors --------------------------------------------------------------------------------


def test_tensors_of_another_type_or_device() -> None:
    with Heap("1MiB") as heap, bystanders(heap):
        elsewhere = torch.zeros(3, dtype=torch.int64, device="meta" if not ON_GPU else "cpu")
        for wrong in (int64([64]).to(torch.int32), int64([64]).to(torch.float32), elsewhere):
            for method in (heap.malloc, heap.free, heap.usable_size):
                with pytest.raises(InvalidArgument, match="must be an int64 tensor on"):
                    method(wrong)


def test_lists_that_are_no_integers() -> None:
    """Nothing is rounded silently, and what does not fit 64 bits says so."""
    with Heap("1MiB") as heap, bystanders(heap):
        for wrong in ([1.5], ["64"], [None], [1 << 64], [[1], [2, 3]]):
            for method in (heap.malloc, heap.free, heap.usable_size):
                with pytest.raises(InvalidArgument):
                    method(wrong)  # type: ignore[arg-type]


def test_arrays_of_numpy_are_requests() -> None:
    with Heap("1MiB") as heap:
        addrs = heap.malloc(np.array([64, 100]))
        assert heap.usable_size(addrs.cpu().numpy()).tolist() == [64, 112]
        assert heap.tensor(addrs[1], np.array([5, 5]), torch.float32).shape == (5, 5)
        heap.free(addrs.cpu().numpy())
        assert_empty(heap)
        with pytest.raises(InvalidArgument, match="must be a 64-bit integer, a list of them"):
            heap.malloc(np.ones((2, 2), int))


@pytest.mark.parametrize("one", [1.5, None, 1 << 64])
def test_what_is_no_request(one: object) -> None:
    with Heap("1MiB") as heap, bystanders(heap):
        for method in (heap.malloc, heap.free, heap.usable_size):
            with pytest.raises(InvalidArgument, match=r"must be a 64-bit integer, a list of them"):
                method(one)  # type: ignore[arg-type]


# Closed heaps ---------------------------------------------------------------------------------

USES = {
    "handle": lambda heap: heap.handle,
    "check": lambda heap: heap.check(),
    "clear_errors": lambda heap: heap.clear_errors(),
    "stats": lambda heap: heap.stats(),
    "snapshot": lambda heap: heap.snapshot(),
    "audit": lambda heap: heap.audit(),
    "malloc": lambda heap: heap.malloc([64]),
    "free": lambda heap: heap.free([64]),
    "free nothing": lambda heap: heap.free([]),
    "usable_size": lambda heap: heap.usable_size([64]),
    "tensor": lambda heap: heap.tensor(64, 1, torch.uint8),
    "reset": lambda heap: heap.reset(),
    "trim": lambda heap: heap.trim(),
    "enter": lambda heap: heap.__enter__(),
}


@pytest.mark.parametrize("name", USES)
def test_a_closed_heap(name: str) -> None:
    heap = Heap("1MiB")
    heap.close()
    with pytest.raises(InvalidArgument, match="the heap is closed"):
        USES[name](heap)
    heap.close()
    assert heap.closed


def test_a_heap_that_outlives_its_context() -> None:
    with Heap("1MiB") as heap:
        handle = heap.handle
        addr = heap.malloc([64])
    assert heap.closed
    with pytest.raises(InvalidArgument, match="the heap is closed"):
        heap.free(addr)
    # A kept handle still leads to the control block, not to unmapped memory.
    assert handle.numel() > 0
    assert int(handle[layout.MAGAZINES_AND_PAGES.value]) >> 32 == 16
    gc.collect()


# Leaving the context --------------------------------------------------------------------------


def test_the_end_of_a_context_raises_what_was_recorded_and_closes() -> None:
    heap = Heap("1MiB")
    with pytest.raises(InvalidFree, match="1 x invalid free"), heap:
        heap.free([12345])
    assert heap.closed


def test_an_exception_inside_is_not_masked() -> None:
    heap = Heap("1MiB")
    with pytest.raises(RuntimeError, match="the user's own"), heap:  # noqa: PT012
        heap.free([12345])
        raise RuntimeError("the user's own")
    assert heap.closed


def test_closing_inside_the_context() -> None:
    with Heap("1MiB") as heap:
        heap.close()


def test_the_classes_of_errors() -> None:
    assert issubclass(InvalidArgument, ValueError)
    assert issubclass(OutOfMemory, MemoryError)
    assert issubclass(DoubleFree, InvalidFreeError)
    assert issubclass(InvalidFree, InvalidFreeError)
    for name in devalloc.__all__:
        value = getattr(devalloc, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, devalloc.DevallocError)
