"""What a draw guarantees: slots of pages that no stripe has, few enough of each to be found
soon."""

from collections import Counter

import pytest
import torch
import triton
import triton.language as tl

from devalloc import Heap
from devalloc.kernels import detached
from devalloc.sizes import CLASS_SIZES, PAGE_BYTES
from tests.support import DEVICE, assert_whole_capacity, free_lanes, malloc_lanes

SIZE = 1024
SLOTS = PAGE_BYTES // SIZE
PAGES = 64  # a chunk


@triton.jit
def draw_kernel(heap, found, CLS: tl.constexpr, NEED: tl.constexpr):
    """Two draws of a program that looks twice: the second gets what the first left."""
    zero = tl.program_id(0) * 0
    for turn in tl.static_range(2):
        place, ones, twos = detached.draw(heap, zero + CLS, zero + NEED, zero + 2)
        tl.store(found + 3 * turn, place)
        tl.store(found + 3 * turn + 1, ones)
        tl.store(found + 3 * turn + 2, twos)


def filled(heap: Heap) -> torch.Tensor:
    """All slots of the heap, in a row for each page."""
    addrs = malloc_lanes(heap, [SIZE] * (PAGES * SLOTS), block=1024)
    assert (addrs != 0).all()
    heap.trim()  # no stripe owns a page
    return addrs.sort().values.reshape(PAGES, SLOTS)


@pytest.mark.parametrize(
    ("free", "need", "k", "shares"),
    [
        ((32, 32), 128, 2, {1: 32}),  # an eighth
        ((16, 16), 128, 1, {1: 64}),
        ((4, 4), 16, 1, {1: 8}),  # there is no such plenty: half
        ((2, 2), 8, 0, {1: 8}),
        ((63, 63), 4, 2, {1: 1}),  # no more than is needed
        ((63, 63), 6, 1, {3: 1}),  # as much as is needed, at once
        ((63, 3), 12, 2, {1: 3}),
        ((3, 3), 128, 1, {1: 64}),  # nor half
        ((1, 1), 128, 0, {1: 64}),  # nor enough
        ((3, 5), 256, 1, {1: 32, 2: 32}),
        ((3, 5), 160, 1, {1: 28, 2: 26}),
        ((1, 2), 128, 0, {1: 32, 2: 32}),
        ((3, 13), 300, 2, {3: 25}),
    ],
)
def test_a_draw_leaves_much_of_a_page_if_it_can(
    free: tuple[int, int], need: int, k: int, shares: dict[int, int]
) -> None:
    """Even pages have ``free[0]`` free slots, odd ones ``free[1]``. ``shares``: from how many pages
    so many times 2**k slots are drawn, or, where it matters where a draw begins, may be."""
    with Heap(PAGES * PAGE_BYTES) as heap:
        addrs = filled(heap)
        for parity, count in enumerate(free):
            free_lanes(heap, addrs[parity::2, :count].reshape(-1).clone(), block=1024)
        found = torch.full((6,), -1, dtype=torch.int64, device=DEVICE)
        draw_kernel[(1,)](heap.handle, found, CLS=CLASS_SIZES.index(SIZE), NEED=need)
        place, ones, twos = (int(x) & ((1 << 64) - 1) for x in found[:3].tolist())
        assert (place & 0xFFFFFFFF) - 1 == k
        drawn = [(ones >> page & 1) + (twos >> page & 1) * 2 for page in range(PAGES)]
        assert Counter(share for share in drawn if share) == shares
        heap.reset()


def test_lanes_that_draw_get_all_that_is_there() -> None:
    """A third of each odd page is free, less of the others; blocks of lanes take it all, and no
    slot twice."""
    with Heap(PAGES * PAGE_BYTES) as heap:
        addrs = filled(heap)
        gaps = torch.cat([addrs[::2, ::20].reshape(-1), addrs[1::2, ::3].reshape(-1)])
        free_lanes(heap, gaps, block=128)
        again = malloc_lanes(heap, [SIZE] * len(gaps), block=128)
        assert sorted(again.tolist()) == sorted(gaps.tolist())
        heap.audit()
        free_lanes(heap, addrs.flatten(), block=1024)
        assert_whole_capacity(heap)


@pytest.mark.parametrize("lanes", [1, 8])
def test_a_heap_that_fills_is_packed(lanes: int) -> None:
    """Most pages are taken and half of their slots are free: these are used before fresh pages."""
    with Heap(PAGES * PAGE_BYTES) as heap:
        addrs = malloc_lanes(heap, [SIZE] * (40 * SLOTS), block=1024)
        heap.trim()
        free_lanes(heap, addrs[::2].clone(), block=1024)
        again = malloc_lanes(heap, [SIZE] * 4 * lanes, block=lanes)
        assert set(again.tolist()) <= set(addrs[::2].tolist())
        free_lanes(heap, torch.cat([addrs[1::2], again]), block=1024)
        assert_whole_capacity(heap)
