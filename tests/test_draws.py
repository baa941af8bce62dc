"""What a draw promises: slots of pages that no stripe has, few enough of each to be found soon."""

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
    """Two draws of a program that looks twice: the second is told what is left by the first."""
    zero = tl.program_id(0) * 0
    for turn in tl.static_range(2):
        place, pages = detached.draw(heap, zero + CLS, zero + NEED, zero + 2)
        tl.store(found + 2 * turn, place)
        tl.store(found + 2 * turn + 1, pages)


def filled(heap: Heap) -> torch.Tensor:
    """All slots of the heap, in a row for each page."""
    addrs = malloc_lanes(heap, [SIZE] * (PAGES * SLOTS), block=1024)
    assert (addrs != 0).all()
    heap.trim()  # no page is a stripe's
    return addrs.sort().values.reshape(PAGES, SLOTS)


@pytest.mark.parametrize(
    ("free", "need", "each"),
    [
        (32, 128, 8),  # a quarter
        (16, 128, 4),
        (4, 16, 1),
        (63, 4, 4),  # no more than is needed
        (3, 128, 2),  # there is no such plenty
        (2, 8, 2),
        (1, 128, 1),
    ],
)
def test_a_draw_leaves_three_quarters_if_it_can(free: int, need: int, each: int) -> None:
    with Heap(PAGES * PAGE_BYTES) as heap:
        addrs = filled(heap)
        free_lanes(heap, addrs[:, :free].reshape(-1).clone(), block=1024)
        found = torch.full((4,), -1, dtype=torch.int64, device=DEVICE)
        draw_kernel[(1,)](heap.handle, found, CLS=CLASS_SIZES.index(SIZE), NEED=need)
        place, pages = (int(x) & ((1 << 64) - 1) for x in found[:2].tolist())
        assert 1 << (place & 0xFFFFFFFF) == each
        assert pages.bit_count() == min(need // each, PAGES)
        heap.reset()


def test_lanes_that_draw_get_all_that_is_there() -> None:
    """A third of each page is free; blocks of lanes take it all, and no slot twice."""
    with Heap(PAGES * PAGE_BYTES) as heap:
        addrs = filled(heap)
        gaps = addrs[:, ::3].reshape(-1).clone()
        free_lanes(heap, gaps, block=128)
        again = malloc_lanes(heap, [SIZE] * len(gaps), block=128)
        assert sorted(again.tolist()) == sorted(gaps.tolist())
        heap.audit()
        free_lanes(heap, addrs.flatten(), block=1024)
        assert_whole_capacity(heap)
