"""A batch that is used up rests, and is renewed when its pages are free again."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from devalloc import Heap
from devalloc.kernels import layout, pages, slabs
from devalloc.sizes import CLASS_SIZES, PAGE_BYTES
from tests.support import DEVICE, assert_whole_capacity, free_lanes, malloc_lanes

SIZE = 16384
CLASS = CLASS_SIZES.index(SIZE)
SLOTS = PAGE_BYTES // SIZE
PAGES = 16384  # 64 stripes, batches of up to 16 pages
FIRST = 4  # pages of the first
NEXT = 16
TURN = SLOTS - 1  # requests at a time: whoever fills a page takes its own


class Batch(NamedTuple):
    page: int
    length: int
    credits: int

    @property
    def is_resting(self) -> bool:
        return self.length > 0 and self.credits == 0


def batch(heap: Heap, place: int = 0) -> Batch:
    """The batch of the first stripe of the class, or with SPARE the one beside it."""
    stripes = heap._geometry.stripes
    index = layout.STRIPES.value + CLASS * stripes * layout.STRIPE_STRIDE.value + place
    packed = int(heap.handle[index])
    credits = (packed + (1 << 31)) % (1 << 32) - (1 << 31)
    high = packed - credits >> 32
    return Batch(high & ((1 << 23) - 1), high >> 23 & 127, credits)


def spare(heap: Heap) -> Batch:
    return batch(heap, layout.SPARE.value)


def word(heap: Heap, at: tl.constexpr) -> int:
    return int(heap.handle[at.value])


def held(heap: Heap) -> int:
    return word(heap, layout.HELD)


def take(heap: Heap) -> torch.Tensor:
    addrs = malloc_lanes(heap, [SIZE] * TURN)
    assert (addrs != 0).all()
    return addrs


def use_up(heap: Heap) -> list[torch.Tensor]:
    """Allocate until the first batch is used up."""
    live = []
    while not spare(heap).is_resting:
        live.append(take(heap))
        assert len(live) <= FIRST * SLOTS
    return live


@pytest.fixture
def heap():
    with Heap(PAGES * PAGE_BYTES) as made:
        assert made._geometry.stripes == 64
        assert made._geometry.max_batch == NEXT
        yield made
        assert_whole_capacity(made)


def test_a_batch_that_is_used_up_rests(heap: Heap) -> None:
    first = take(heap)
    page = batch(heap).page
    live = use_up(heap)
    assert spare(heap) == Batch(page, FIRST, 0)
    assert batch(heap).length == NEXT, "there is plenty"
    free_lanes(heap, torch.cat([first, *live]))
    assert held(heap) == FIRST + NEXT, "pages of a batch are not given back when they are empty"


def test_what_is_free_again_is_used_again(heap: Heap) -> None:
    live = use_up(heap)
    free_lanes(heap, torch.cat(live))
    resting, used = spare(heap), word(heap, layout.USED)
    seen = set()
    for _ in range(NEXT * SLOTS // TURN + FIRST * SLOTS // TURN):
        addrs = take(heap)
        seen |= set(addrs.tolist())
        free_lanes(heap, addrs)
    assert {page for page, _, _ in (batch(heap), spare(heap))} >= {resting.page}
    assert any(
        (addr - heap.base) // PAGE_BYTES in range(resting.page, resting.page + FIRST)
        for addr in seen
    )
    assert held(heap) == FIRST + NEXT
    assert word(heap, layout.USED) == used, "no more is taken, nothing given back"
    heap.audit()


@pytest.mark.parametrize("freed", ["all", "front", "none"])
def test_what_a_prefetch_does_with_a_batch_that_rests(heap: Heap, freed: str) -> None:
    live = torch.cat([take(heap), *use_up(heap)])
    resting = spare(heap)
    first = heap.base + resting.page * PAGE_BYTES
    gone = {"all": live >= 0, "front": live < first + PAGE_BYTES, "none": live < 0}[freed]
    free_lanes(heap, live[gone])
    had = held(heap)
    prefetch_kernel[(1,)](heap.handle, CLS=CLASS)
    if freed == "all":
        assert spare(heap) == Batch(resting.page, FIRST, FIRST * SLOTS), "renewed"
        assert held(heap) == had
    elif freed == "front":
        assert spare(heap) == resting, "left alone: all of it will be free when it is needed"
    else:
        assert spare(heap).page != resting.page
        assert spare(heap).credits == NEXT * SLOTS
        assert held(heap) == had - FIRST + NEXT, "the old one is dissolved"
    heap.audit()
    free_lanes(heap, live[~gone])


@triton.jit
def prefetch_kernel(heap, CLS: tl.constexpr):
    slabs.prefetch(heap, tl.program_id(0) * 0 + CLS)


@triton.jit
def refill_kernel(heap, found, CLS: tl.constexpr, USED: tl.constexpr):
    """Use up the stripe's batch, and refill it."""
    zero = tl.program_id(0) * 0
    tl.atomic_add(heap + pages.USED, tl.full((), USED, tl.int64))
    place, drawn = slabs.refill(heap, zero + CLS, zero)
    tl.atomic_add(heap + pages.USED, tl.full((), -USED, tl.int64))
    tl.store(found, place)
    tl.store(found + 1, drawn)


def test_in_a_heap_that_fills_nothing_rests(heap: Heap) -> None:
    """What is free in used batches is to be drawn, by everybody."""
    live = torch.cat([take(heap), *use_up(heap)])
    left = batch(heap).credits
    more = [malloc_lanes(heap, [SIZE] * min(TURN, left - i)) for i in range(0, left, TURN)]
    live = torch.cat([live, *more])
    assert batch(heap).credits == 0
    found = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    refill_kernel[(1,)](heap.handle, found, CLS=CLASS, USED=PAGES * 3 // 4)
    assert spare(heap).length == 0
    assert held(heap) == batch(heap).length, "the spare, and nothing else"
    heap.audit()
    free_lanes(heap, live)


def test_a_search_finds_what_is_free_in_a_batch_that_rests() -> None:
    """Every slot of a heap can be had, though used batches hold some of them."""
    with Heap(32 * PAGE_BYTES) as heap:
        live = [malloc_lanes(heap, [SIZE]) for _ in range(3 * SLOTS + 1)]
        assert spare(heap).is_resting
        page = heap.base + spare(heap).page * PAGE_BYTES
        inside = [i for i, addr in enumerate(live) if page <= int(addr[0]) < page + PAGE_BYTES]
        assert len(inside) == SLOTS
        free_lanes(heap, live.pop(inside[1]))
        rest = 32 * SLOTS - len(live)
        more = malloc_lanes(heap, [SIZE] * rest, block=1)
        assert len(set(more.tolist()) - {0}) == rest
        assert int(malloc_lanes(heap, [SIZE])[0]) == 0
        heap.clear_errors()
        heap.audit()
        free_lanes(heap, torch.cat([*live, more]))
        assert_whole_capacity(heap)
