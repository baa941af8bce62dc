"""Heaps are filled, emptied and filled again; live blocks lies in few pages, at the front."""

from __future__ import annotations

import pytest
import torch

from devalloc.kernels import layout
from devalloc.sizes import CLASS_SIZES, CLASS_SLOTS, PAGE_BYTES
from tests.conftest import ON_GPU
from tests.heap.bare import BareHeap

pytestmark = pytest.mark.skipif(ON_GPU, reason="the benchmarks measure it on a GPU")

PAGES = 1024


def overlaps(addrs: torch.Tensor, sizes: torch.Tensor) -> int:
    start, order = addrs.sort()
    end = start + sizes[order]
    return int((end[:-1] > start[1:]).sum())


def exchanged(heap: BareHeap, sizes: torch.Tensor, lanes: int, rounds: int) -> torch.Tensor:
    """Blocks of these sizes, after a random half of them was freed and allocated again."""
    count = sizes.numel()
    addrs = heap.malloc(sizes, lanes)
    chance = torch.Generator().manual_seed(3)
    for _ in range(rounds):
        chosen = (torch.rand(count, generator=chance) < 0.5).to(torch.int32)
        heap.free_some(addrs, chosen, lanes)
        heap.refill(sizes, addrs, lanes)
        assert int((addrs == 0).sum()) == 0
        assert overlaps(addrs, sizes) == 0
    return addrs


@pytest.mark.parametrize(
    ("low", "high", "count", "lanes"),
    [(16, 4096, 600, 32), (64, 64, 1500, 32), (1280, 1280, 256, 64), (40, 2000, 100, 64)],
    ids=["mixed", "alike", "whole-pages", "wide"],
)
def test_blocks_are_apart_and_all_but_open_pages_come_back(
    low: int, high: int, count: int, lanes: int
) -> None:
    heap = BareHeap(PAGES, stripes=2)
    chance = torch.Generator().manual_seed(1)
    sizes = torch.randint(low, high + 1, (count,), generator=chance)
    addrs = exchanged(heap, sizes, lanes, rounds=3)
    heap.free(addrs, lanes)
    # What is left is the open place of each line, up to two pages, and what is in magazines.
    classes = len({int(size) for size in sizes}) if low == high else 38
    assert heap.pages - len(heap.free_pages()) <= 4 * classes


def test_a_block_may_fill_more_pages_than_are_taken_together() -> None:
    heap = BareHeap(PAGES, stripes=1)
    sizes = torch.full((256,), 32752)
    addrs = heap.malloc(sizes, 256)
    assert int((addrs == 0).sum()) == 0
    assert overlaps(addrs, sizes) == 0
    heap.free(addrs, 256)
    assert heap.pages - len(heap.free_pages()) <= 4


@pytest.mark.parametrize("size", [512, 1024, 40])
def test_a_block_frees_what_is_still_live(size: int) -> None:
    heap = BareHeap(PAGES, stripes=1)
    addrs = heap.malloc(torch.full((256,), size), 256)
    chosen = (torch.arange(256) % 3 == 0).to(torch.int32)
    rest = addrs.clone()
    heap.free_some(rest, chosen, 256)
    heap.free(addrs, 256)
    # (What is left is a page whose place is open.)
    assert heap.pages - len(heap.free_pages()) <= (size == 40)
    assert int(heap.state().out.sum()) == 0


def test_scalars_are_freed_in_the_interpreter() -> None:
    heap = BareHeap(PAGES, stripes=1)
    addrs = heap.malloc_scalars(70, 1024)
    assert overlaps(addrs, torch.full((70,), 1024)) == 0
    heap.free_scalars(addrs)
    again = heap.malloc_scalars(70, 1024)
    assert torch.equal(addrs.sort().values, again.sort().values)


def test_half_empty_pages_are_used_again() -> None:
    heap = BareHeap(PAGES, stripes=1)
    sizes = torch.full((1000,), 1024)
    addrs = exchanged(heap, sizes, 32, rounds=6)
    pages = torch.unique(addrs // PAGE_BYTES).numel()
    assert pages * PAGE_BYTES <= 2 * int(sizes.sum())


def test_what_lives_stays_at_the_front() -> None:
    heap = BareHeap(PAGES)
    sizes = torch.randint(16, 4097, (1500,), generator=torch.Generator().manual_seed(2))
    addrs = exchanged(heap, sizes, 32, rounds=2)
    assert int(addrs.max() - addrs.min()) <= 3 * int(sizes.sum())
    assert heap.largest_free() >= 3 * len(heap.free_pages()) // 4


def malloc_until_null(heap: BareHeap, size: int, lanes: int) -> torch.Tensor:
    """Blocks of one size, in launches of several programs, until some are null."""
    found = []
    while True:
        addrs = heap.malloc(torch.full((4 * lanes,), size), lanes)
        found.append(addrs[addrs != 0])
        if int((addrs == 0).sum()):
            return torch.cat(found)


@pytest.mark.parametrize(("size", "pages"), [(64, 4), (1024, 16), (4096, 16), (32768, 16)])
def test_a_heap_can_be_filled_to_the_last_slot_and_emptied(size: int, pages: int) -> None:
    heap = BareHeap(pages)
    for _ in range(2):
        addrs = malloc_until_null(heap, size, 32)
        assert addrs.unique().numel() == addrs.numel() == pages * PAGE_BYTES // size
        assert heap.errors()["out of memory"] > 0
        heap.free(addrs, 32)
    heap.rest()
    assert len(heap.free_pages()) == heap.pages


@pytest.mark.parametrize("pages", [2, 22, 33, 40, 65, 129, 200])
def test_equal_runs_fill_the_heap(pages: int) -> None:
    heap = BareHeap(PAGES)
    addrs = malloc_until_null(heap, pages * PAGE_BYTES, 1)
    assert addrs.numel() >= 0.9 * (heap.pages // pages)
    assert overlaps(addrs, torch.full((addrs.numel(),), pages * PAGE_BYTES)) == 0
    heap.free(addrs, 1)
    assert len(heap.free_pages()) == heap.pages


@pytest.mark.parametrize("count", [16, 32, 64])
def test_a_few_live_blocks_leave_room_for_a_large_one(count: int) -> None:
    heap = BareHeap(count * 32)
    heap.malloc_scalars(count, 64)
    assert int(heap.malloc([4 << 20], 1)) != 0


def test_what_rests_serves_a_request_that_needs_it() -> None:
    heap = BareHeap(16)
    addrs = malloc_until_null(heap, 64, 32)
    heap.free(addrs, 32)
    assert int(heap.malloc([1 << 20], 1)) != 0


def test_wrong_frees_are_counted_and_change_nothing() -> None:
    heap = BareHeap(16)
    addrs = heap.malloc([64, 64, 64, 64, 1024, 40000, 70000, 16], 8)
    heap.free(addrs, 8)
    before = heap.handle.clone()
    heap.free(addrs, 8)
    inside = addrs.clone() + 16
    inside[3:] = 5
    heap.free(inside, 8)
    errors = heap.errors()
    assert errors["double free"] == 8
    assert errors["invalid free"] == 8
    heap.handle[32:112] = before[32:112]
    assert torch.equal(heap.handle, before)


def test_sizes_that_are_nothing_or_wrong() -> None:
    heap = BareHeap(16)
    addrs = heap.malloc([0, -1, 64, 1 << 40], 4)
    assert [bool(addr) for addr in addrs] == [False, False, True, False]
    assert heap.errors()["invalid argument"] == 1
    assert heap.errors()["out of memory"] == 1


@pytest.mark.parametrize("opened", [(1 << 18) - 1, (1 << 31) - 1])
def test_the_numbers_of_places_begin_again(opened: int) -> None:
    """Of a place only 18 bits of its number are known, and of a line's places 31."""
    heap = BareHeap(16)
    lines = heap.handle[heap.geometry.line_words]
    lines.fill_(opened << 32)
    addrs = heap.malloc([1024, 64] * 200, 32)
    assert addrs.unique().numel() == 400
    heap.audit()
    heap.free(addrs, 32)
    heap.audit()
    assert len(heap.free_pages()) == heap.pages


def test_two_lanes_may_have_tickets_for_one_slot() -> None:
    """Two places lead to one page, and a block has more lanes of its class than a page has slots.

    Each of these lanes was granted a slot, so each gets one of its own. The audit finds a live bit
    that belongs to no block."""
    heap = BareHeap(16, stripes=1, ring=2)
    size, cls = 8192, CLASS_SIZES.index(8192)
    slots = CLASS_SLOTS[cls]
    (addr,) = heap.malloc([size], 1).tolist()
    page = (addr - heap.base) // PAGE_BYTES
    # As if two tickets of the first place had been drawn, its second half led nowhere, and the page
    # was listed as half empty, so that the next place is opened with it.
    nowhere = layout.PAGE_MASK.value << layout.SECOND_SHIFT.value
    heap.handle[heap.geometry.places + cls * heap.geometry.ring] = nowhere + page
    heap.handle[heap.geometry.line_words][cls] = (1 << 32) + slots - 2
    heap.handle[heap.geometry.rows + (cls + 1) * heap.geometry.chunks] = 1 << page
    addrs = heap.malloc([size] * 10 + [64] * 22, 32)
    assert addrs.unique().numel() == 32
    assert int((addrs == 0).sum()) == 0
    heap.audit()
    heap.free(torch.cat([addrs, torch.tensor([addr])]), 1)
    heap.audit()
    assert len(heap.free_pages()) == heap.pages


def test_a_ring_may_be_lapped() -> None:
    """By a program that asks for more pages than it has places, and by one after the other."""
    heap = BareHeap(40, ring=2)
    for lanes in (32, 512):
        addrs = heap.malloc([8192] * 128 + [4096] * 128, lanes)
        assert addrs.unique().numel() == addrs.numel()
        heap.audit()
        heap.free(addrs, lanes)
    heap.audit()
    assert heap.errors()["out of memory"] == 0
