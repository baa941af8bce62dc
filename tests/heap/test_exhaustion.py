"""Exhaustion is exact: null only when nothing of that shape is free, wherever it might be."""

import random

import pytest
import torch

from devalloc import Heap, OutOfMemory
from devalloc.kernels import layout
from devalloc.sizes import CLASS_SIZES, PAGE_BYTES
from tests.support import (
    MIB,
    assert_blocks,
    assert_empty,
    assert_whole_capacity,
    free_lanes,
    free_scalars,
    malloc_lanes,
    malloc_scalars,
)


def fill(heap: Heap, size: int, block: int = 4096, programs: int = 4) -> torch.Tensor:
    """Allocate until a null; the addresses that were had, which must come before any null."""
    had = []
    while True:
        addrs = malloc_lanes(heap, [size] * (block * programs), block)
        had.append(addrs[addrs != 0])
        if (addrs == 0).any():
            return torch.cat(had)


@pytest.mark.parametrize("size", [64, 1024, 4096])
def test_utilisation(size: int) -> None:
    with Heap("1MiB") as heap:
        slots = heap.capacity // size
        addrs = fill(heap, size, block=max(512, slots // 16), programs=2)
        assert_blocks(heap, addrs, [size] * len(addrs))
        assert len(addrs) * size / heap.capacity >= 0.97
        # These sizes divide the page: nothing at all may be left.
        assert len(addrs) == slots
        assert heap.stats().free == 0
        with pytest.raises(OutOfMemory):
            heap.check()
        heap.audit()
        free_lanes(heap, addrs, 4096)
        assert_whole_capacity(heap)


@pytest.mark.parametrize("size", CLASS_SIZES[::5])
def test_every_slot_of_a_class(size: int) -> None:
    with Heap(3 * PAGE_BYTES) as heap:
        addrs = fill(heap, size, 1024 if size < 1024 else 128, programs=1)
        assert len(addrs) == 3 * (PAGE_BYTES // size)
        heap.clear_errors()
        free_lanes(heap, addrs)
        assert_whole_capacity(heap)


def test_a_block_that_wants_two_pages_gets_the_last_one() -> None:
    with Heap(3 * PAGE_BYTES) as heap:
        run = malloc_scalars(heap, [2 * PAGE_BYTES])
        addrs = malloc_lanes(heap, [1024] * 128, block=128)
        assert int((addrs != 0).sum()) == PAGE_BYTES // 1024
        heap.clear_errors()
        free_lanes(heap, torch.cat([run, addrs]))
        assert_whole_capacity(heap)


def test_random_sizes_leave_little() -> None:
    """16 B to 1 MiB, until three batches of sixteen were not served in full."""
    generator = random.Random(3)
    with Heap("32MiB") as heap:
        addrs, sizes, failures = [], [], 0
        while failures < 3:
            batch = [generator.randint(16, MIB) for _ in range(16)]
            got = heap.malloc(batch)
            failures += bool((got == 0).any())
            addrs.append(got[got != 0])
            sizes += [size for size, addr in zip(batch, got.tolist(), strict=True) if addr]
        everything = torch.cat(addrs)
        assert_blocks(heap, everything, sizes)
        stats = heap.stats()
        assert stats.free / stats.capacity < 0.03
        heap.clear_errors()
        heap.audit()
        heap.free(everything)
        assert_whole_capacity(heap)


def test_a_run_is_found_wherever_it_is() -> None:
    """In a full heap one hole at a time is opened, and exactly what fits into it is allocated."""
    pages = 66
    with Heap(pages * PAGE_BYTES) as heap:
        assert (heap.malloc([PAGE_BYTES] * pages) != 0).all()
        filled = set(range(pages))
        for first, length in ((63, 1), (5, 7), (64, 2), (20, 33)):
            hole = [heap.base + (first + n) * PAGE_BYTES for n in range(length)]
            heap.free(hole)
            assert heap.stats().largest_free == length * PAGE_BYTES
            too_much, fits = heap.malloc([(length + 1) * PAGE_BYTES, length * PAGE_BYTES]).tolist()
            assert too_much == 0
            assert fits == hole[0]
            filled -= set(range(first + 1, first + length))
        heap.clear_errors()
        heap.free([heap.base + n * PAGE_BYTES for n in filled])
        assert_whole_capacity(heap)


def test_a_block_in_a_full_heap_gets_what_pages_have_left() -> None:
    """Full pages of two classes, in which a few slots each become free again."""
    generator = random.Random(7)
    with Heap(66 * PAGE_BYTES) as heap:
        had = []
        for size, count in ((1024, 33 * 64), (256, 33 * 256)):
            addrs = malloc_lanes(heap, [size] * count)
            assert (addrs != 0).all()
            had += [(addr, size) for addr in addrs.tolist()]
        assert (malloc_lanes(heap, [1024] * 64, block=64) == 0).all()
        heap.clear_errors()
        generator.shuffle(had)
        gone, stay = had[:600], had[600:]
        free_lanes(heap, [addr for addr, _size in gone], 128)
        sizes = [size for _addr, size in gone]
        generator.shuffle(sizes)
        addrs = malloc_lanes(heap, sizes, block=128)
        assert heap.check() is None
        everything = torch.cat([addrs.cpu(), torch.tensor([addr for addr, _size in stay])])
        assert_blocks(heap, everything, sizes + [size for _addr, size in stay])
        heap.audit()
        free_lanes(heap, everything)
        assert_whole_capacity(heap)


def test_a_heap_that_was_full_has_free_pages_again() -> None:
    """A program whose hint says that there are none finds those that another has freed."""
    with Heap(2 * PAGE_BYTES) as heap:
        addrs = fill(heap, 1024, block=256, programs=1)
        hint = heap.handle[layout.HINTS.value]
        assert int(hint) == 1  # chunk: all that there are
        # The first program frees nothing. The hint of the second is another one.
        free_lanes(heap, [0] * 128 + addrs.tolist(), block=128)
        heap.clear_errors()
        assert int(hint) == 1
        assert (malloc_lanes(heap, [4096] * 64, block=64) != 0).sum() == 32
        heap.clear_errors()
        heap.audit()


def test_one_program_gets_what_others_hold() -> None:
    """What other programs have in their magazines, or their tickets lead to, is no reserve."""
    size = 4096
    with Heap("4MiB") as heap:
        most = heap.malloc([36 * PAGE_BYTES])  # so that there is less to fill
        slots = (heap.capacity // PAGE_BYTES - 36) * (PAGE_BYTES // size)
        first = malloc_scalars(heap, [size] * 4)
        rest = fill(heap, size, 512, programs=1)
        everything = torch.cat([first, rest])
        assert len(everything) == slots
        assert_blocks(heap, everything, [size] * len(everything))
        heap.clear_errors()

        apart = everything[torch.arange(50, 440, 10)]
        free_lanes(heap, apart)
        free_scalars(heap, first)
        assert len(heap._state().spans.magazine) == 4, "each program has put its slot aside"
        # One program; the freed slots lie anywhere.
        freed = torch.cat([first, apart])
        again = malloc_lanes(heap, [size] * len(freed), 64)
        assert sorted(again.tolist()) == sorted(freed.tolist())
        heap.check()
        assert malloc_lanes(heap, [size], 64).tolist() == [0]
        heap.clear_errors()
        free_lanes(heap, torch.cat([everything, most]), 512)
        assert_whole_capacity(heap)


def test_cached_pages_of_other_classes_are_reclaimed() -> None:
    """Every class keeps empty pages after a malloc and a free; any request that needs them gets
    them."""
    with Heap(2 * MIB) as heap:
        for wanted in ([heap.capacity], [32768] * 64):
            for size in CLASS_SIZES[::9]:
                heap.free(heap.malloc([size]))
            assert int(heap._state().idle.sum()) > 0, "pages are cached"
            addrs = malloc_lanes(heap, wanted, 4096)
            assert_blocks(heap, addrs, wanted)
            assert heap.stats().free == 0
            free_lanes(heap, addrs, 4096)
        assert_whole_capacity(heap)


def test_fill_with_one_class_then_another() -> None:
    with Heap("1MiB") as heap:
        for size in (64, 5120):
            addrs = fill(heap, size, 512, programs=1)
            assert len(addrs) == 16 * (PAGE_BYTES // size)
            free_lanes(heap, addrs, 512)
            heap.clear_errors()
        assert_whole_capacity(heap)


def test_exhaustion_in_the_middle_of_a_block() -> None:
    """A program that asks for more than there is gets all there is, and nulls for the rest."""
    with Heap(2 * PAGE_BYTES) as heap:
        addrs = malloc_lanes(heap, [1024] * 256, 256)
        assert int((addrs != 0).sum()) == 128
        live = addrs[addrs != 0]
        assert_blocks(heap, live, [1024] * 128)
        with pytest.raises(OutOfMemory, match="128 x out of memory"):
            heap.check()
        # Runs and slots in one program: what fits is given, whatever the order.
        free_lanes(heap, live)
        addrs = malloc_lanes(heap, [PAGE_BYTES, PAGE_BYTES, PAGE_BYTES, 64], 4)
        assert int((addrs != 0).sum()) == 2
        heap.clear_errors()
        heap.free(addrs)
        assert_whole_capacity(heap)


def test_memory_that_was_freed_since_the_failure() -> None:
    """The message does not say that what is free now was free then."""
    with Heap("1MiB") as heap:
        full = heap.malloc([heap.capacity])
        assert heap.malloc([64]).tolist() == [0]
        heap.free(full)
        with pytest.raises(OutOfMemory) as caught:
            heap.check()
        message = str(caught.value)
        assert "malloc of 64 B failed in program 0 when its kernel ran" in message
        assert "; now 1 MiB of 1 MiB are free" in message
        assert "; make the heap larger or free sooner. Recorded" in message


def test_failures_are_recorded_and_raised() -> None:
    with Heap("1MiB") as heap:
        addrs = heap.malloc([heap.capacity, 64, 100_000])
        # Slots are served before runs.
        assert addrs[0] == 0
        heap.free(addrs)
        heap.clear_errors()
        full = heap.malloc([heap.capacity])
        assert malloc_lanes(heap, [64] * 5 + [100_000] * 2).tolist() == [0] * 7
        with pytest.raises(OutOfMemory) as caught:
            heap.check()
        message = str(caught.value)
        assert "malloc of 64 B failed in program 0" in message
        assert "now 0 B of 1 MiB are free" in message
        assert "7 x out of memory" in message
        assert isinstance(caught.value, MemoryError)
        assert heap.stats().failures == 8
        heap.audit()
        heap.free(full)
        assert_empty(heap)
