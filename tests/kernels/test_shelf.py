"""Pages that lie on the shelf: free for every program, and found first by the program that put
them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl

from devalloc import Heap
from devalloc import kernels as da
from devalloc.heap.state import MIN_SHELF
from devalloc.kernels import layout
from devalloc.sizes import PAGE_BYTES
from tests.support import error_counts

LANES = 128
SIZE = 4096  # 16 slots in a page: the lanes fill 8
PAGES = LANES * SIZE // PAGE_BYTES


@triton.jit
def malloc_lanes(heap, addrs, size, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    tl.store(addrs + lane, da.malloc(heap, lane.to(tl.int64) * 0 + size))


@triton.jit
def free_lanes(heap, addrs, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    da.free(heap, tl.load(addrs + lane))


@triton.jit
def malloc_scalar(heap, addrs, size):
    tl.store(addrs + tl.program_id(0), da.malloc(heap, size))


@triton.jit
def free_scalar(heap, addrs):
    da.free(heap, tl.load(addrs + tl.program_id(0)))


class Blocks:
    """What ``programs`` programs got, 128 lanes each or one run."""

    def __init__(self, heap: Heap, programs: int, size: int, lanes: int = LANES) -> None:
        self.heap, self.programs, self.lanes = heap, programs, lanes
        self.addrs = torch.zeros(programs * lanes, dtype=torch.int64, device=heap.device)
        if lanes > 1:
            malloc_lanes[(programs,)](heap.handle, self.addrs, size, LANES=lanes)
        else:
            malloc_scalar[(programs,)](heap.handle, self.addrs, size)

    def free(self) -> None:
        if self.lanes > 1:
            free_lanes[(self.programs,)](self.heap.handle, self.addrs, LANES=self.lanes)
        else:
            free_scalar[(self.programs,)](self.heap.handle, self.addrs)


def shelved(heap: Heap) -> int:
    """How many pages are counted as being on the shelf."""
    start, step = layout.TRANSIT.value + layout.SHELVED.value, layout.TRANSIT_STRIDE.value
    counts = heap.handle[start::step][: layout.TRANSIT_STRIPES.value]
    return int((counts & 0xFFFFFFFF).sum())


@pytest.fixture
def heap(device: torch.device) -> Iterator[Heap]:
    with Heap(MIN_SHELF * PAGE_BYTES, device=device) as heap:
        yield heap
        heap.audit()


def test_pages_that_were_filled_are_at_hand_for_the_next(heap: Heap) -> None:
    first = Blocks(heap, 4, SIZE)
    assert (first.addrs != 0).all()
    first.free()
    assert shelved(heap) == 4 * PAGES
    second = Blocks(heap, 4, SIZE)
    assert torch.equal(second.addrs, first.addrs)
    assert shelved(heap) == 0
    second.free()


def test_a_run_is_at_hand_for_the_next(heap: Heap) -> None:
    first = Blocks(heap, 3, 5 * PAGE_BYTES, lanes=1)
    first.free()
    assert shelved(heap) == 15
    second = Blocks(heap, 3, 5 * PAGE_BYTES - 1, lanes=1)
    assert torch.equal(second.addrs, first.addrs)
    second.free()


def test_what_lies_on_the_shelf_is_free(heap: Heap) -> None:
    Blocks(heap, 2, SIZE).free()
    Blocks(heap, 4, PAGE_BYTES, lanes=1).free()
    assert shelved(heap) > 0
    stats = heap.stats()
    assert stats.free == stats.largest_free == heap.capacity
    assert stats.allocations == stats.frees == 2 * LANES + 4
    assert not heap.snapshot().page_kind.any()
    (everything,) = heap.malloc([heap.capacity]).tolist()
    assert everything == heap.base
    assert shelved(heap) == 0
    heap.free([everything])


def test_what_lies_on_the_shelf_serves_other_classes(heap: Heap) -> None:
    """Most of what is free lies there, and all of it is asked for in slots of another class."""
    reserve = MIN_SHELF // 8
    rest = heap.malloc([heap.capacity - (16 * PAGES + reserve) * PAGE_BYTES])
    assert rest.item() != 0
    blocks = Blocks(heap, 16, SIZE)
    assert (blocks.addrs != 0).all()
    blocks.free()
    assert shelved(heap) == 16 * PAGES
    other = Blocks(heap, (16 * PAGES + reserve) * 64 // LANES, 1024)
    assert (other.addrs != 0).all()
    assert shelved(heap) == 0
    other.free()
    heap.free(rest)


def test_another_use_takes_the_place(heap: Heap) -> None:
    slabs, run = Blocks(heap, 1, SIZE // 2), Blocks(heap, 1, 3 * PAGE_BYTES, lanes=1)
    slabs.free()
    assert shelved(heap) == PAGES // 2
    run.free()
    assert shelved(heap) == 3
    assert torch.equal(Blocks(heap, 1, 3 * PAGE_BYTES, lanes=1).addrs, run.addrs)
    run.free()


def test_one_of_a_kind_is_enough(heap: Heap) -> None:
    """A second of the same kind goes back to where every program finds it."""
    first, second = Blocks(heap, 1, SIZE), Blocks(heap, 1, SIZE)
    first.free()
    second.free()
    assert shelved(heap) == PAGES
    assert torch.equal(Blocks(heap, 1, SIZE).addrs, first.addrs)
    heap.free(first.addrs)


def test_only_half_of_the_heap_lies_there(heap: Heap) -> None:
    blocks = Blocks(heap, MIN_SHELF // 16, 15 * PAGE_BYTES, lanes=1)
    assert (blocks.addrs != 0).all()
    blocks.free()
    assert 0 <= shelved(heap) <= MIN_SHELF // 2
    heap.audit()


def test_nothing_is_put_there_while_others_need_it(heap: Heap) -> None:
    """After a request that got nothing, until more than an eighth of the pages is free again."""
    spare = MIN_SHELF // 8
    rest = heap.malloc([heap.capacity - spare * PAGE_BYTES])
    slabs, run = Blocks(heap, 1, SIZE), Blocks(heap, 1, PAGE_BYTES, lanes=1)
    assert heap.malloc([heap.capacity]).item() == 0
    slabs.free()
    run.free()
    assert shelved(heap) == 0
    heap.free(rest)
    again = Blocks(heap, 2, SIZE)
    heap.free(again.addrs[:LANES])  # (Is not let in, and sees that there are pages.)
    assert shelved(heap) == 0
    heap.free(again.addrs[LANES:])
    assert shelved(heap) == PAGES
    assert error_counts(heap) == {"out of memory": 1}


def test_a_small_heap_has_no_shelf(device: torch.device) -> None:
    with Heap((MIN_SHELF - 1) * PAGE_BYTES, device=device) as heap:
        Blocks(heap, 2, SIZE).free()
        Blocks(heap, 2, PAGE_BYTES, lanes=1).free()
        assert shelved(heap) == 0
        heap.audit()


def test_trim_clears_the_shelf(heap: Heap) -> None:
    Blocks(heap, 5, SIZE).free()
    Blocks(heap, 9, PAGE_BYTES, lanes=1).free()
    heap.trim()
    assert shelved(heap) == 0
    assert int(heap.handle[layout.USED.value]) == 0


@pytest.mark.parametrize("lanes", [1, LANES])
def test_what_lies_on_the_shelf_is_not_freed_again(heap: Heap, lanes: int) -> None:
    blocks = Blocks(heap, 2, SIZE if lanes > 1 else PAGE_BYTES, lanes)
    blocks.free()
    before = shelved(heap)
    blocks.free()
    assert shelved(heap) == before > 0
    assert error_counts(heap) == {"double free": 2 * lanes}


def test_pages_with_a_slot_that_lives_are_not_put_there(heap: Heap) -> None:
    """Two blocks share what one of them cleared but for a slot."""
    blocks = Blocks(heap, 1, SIZE)
    heap.free(blocks.addrs[:-1])
    assert shelved(heap) in (0, PAGES - 1)
    heap.audit()
    heap.free(blocks.addrs[-1:])
