"""A batch that is used up rests, and is renewed when its pages are free again."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from devalloc import Heap
from devalloc.heap.state import State
from devalloc.kernels import batches, layout, pages
from devalloc.sizes import CLASS_SIZES, PAGE_BYTES
from devalloc.sources import HostSource
from tests.conftest import ON_GPU
from tests.support import DEVICE, assert_whole_capacity, free_lanes, malloc_lanes

SIZE = 16384
CLASS = CLASS_SIZES.index(SIZE)
SLOTS = PAGE_BYTES // SIZE
PAGES = 4096  # 64 stripes, batches of up to 16 pages
FIRST = 4  # pages of the first
NEXT = 16
LARGEST = 512 << 30
TURN = SLOTS - 1  # requests at a time: a lane that fills a page takes one of its own


class Batch(NamedTuple):
    """A batch as its stripe word has it; of credits below zero, 0."""

    page: int
    length: int
    credits: int

    @property
    def is_resting(self) -> bool:
        return self.length > 0 and self.credits == 0


def batch(heap: Heap, place: int = 0) -> Batch:
    """The batch of the first stripe of the class, or with SPARE the one beside it."""
    state = State(heap.handle, heap._geometry)
    at = CLASS, place // layout.SPARE.value
    return Batch(int(state.batch_page[at]), int(state.batch_length[at]), int(state.credits[at]))


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


def use_up_a_long_one(heap: Heap) -> torch.Tensor:
    """Allocate until a batch rests that is as long as may be."""
    live = [take(heap), *use_up(heap), drain(heap), take(heap)]
    assert (spare(heap).length, spare(heap).is_resting) == (NEXT, True)
    return torch.cat(live)


def drain(heap: Heap) -> torch.Tensor:
    """Allocate what is left in the batch, and no more."""
    left = batch(heap).credits
    found = [malloc_lanes(heap, [SIZE] * min(TURN, left - i)) for i in range(0, left, TURN)]
    assert batch(heap).credits == 0
    return torch.cat(found)


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
    free_lanes(heap, use_up_a_long_one(heap))
    resting, used = spare(heap), word(heap, layout.USED)
    seen = set()
    for _ in range(2 * NEXT * SLOTS // TURN):
        addrs = take(heap)
        seen |= set(addrs.tolist())
        free_lanes(heap, addrs)
    assert {page for page, _, _ in (batch(heap), spare(heap))} >= {resting.page}
    assert any(
        (addr - heap.base) // PAGE_BYTES in range(resting.page, resting.page + NEXT)
        for addr in seen
    )
    assert held(heap) == 2 * NEXT
    assert word(heap, layout.USED) == used, "no more is taken, nothing given back"
    heap.audit()


@pytest.mark.parametrize("freed", ["all", "front", "none"])
def test_what_a_prefetch_does_with_a_batch_that_rests(heap: Heap, freed: str) -> None:
    live = use_up_a_long_one(heap)
    resting = spare(heap)
    first = heap.base + resting.page * PAGE_BYTES
    gone = {"all": live >= 0, "front": live < first + PAGE_BYTES, "none": live < 0}[freed]
    free_lanes(heap, live[gone])
    had = held(heap)
    prefetch_kernel[(1,)](heap.handle, CLS=CLASS, HELD=0)
    assert held(heap) == had
    if freed == "all":
        assert spare(heap) == Batch(resting.page, NEXT, NEXT * SLOTS), "renewed"
    elif freed == "front":
        assert spare(heap) == resting, "unchanged: all of it will be free when it is needed"
    else:
        assert spare(heap).page != resting.page
        assert spare(heap).credits == NEXT * SLOTS, "the old one is dissolved"
    heap.audit()
    free_lanes(heap, live[~gone])


@pytest.mark.parametrize("plenty", [True, False])
def test_a_short_batch_that_rests_is_replaced_while_there_is_plenty(
    heap: Heap, plenty: bool
) -> None:
    free_lanes(heap, torch.cat([take(heap), *use_up(heap)]))
    resting, had = spare(heap), held(heap)
    prefetch_kernel[(1,)](heap.handle, CLS=CLASS, HELD=PAGES // 4 - had - int(plenty))
    if plenty:
        assert spare(heap).credits == NEXT * SLOTS
        assert held(heap) == had - FIRST + NEXT
    else:
        assert spare(heap) == Batch(resting.page, FIRST, FIRST * SLOTS), "renewed"
        assert held(heap) == had
    heap.audit()


def test_where_there_is_no_longer_one_a_batch_that_rests_is_renewed() -> None:
    """Between pages that are in use there are four at most, although there is plenty of them."""
    pages = 256
    with Heap(pages * PAGE_BYTES) as heap:
        every = heap.malloc([PAGE_BYTES] * pages)
        stays = (every - heap.base) // PAGE_BYTES % 5 == 0
        heap.free(every[~stays])
        live = [take(heap)]
        while not (spare(heap).is_resting and spare(heap).length == 4):
            live.append(take(heap))
        assert batch(heap).length == 4 < heap._geometry.max_batch
        free_lanes(heap, torch.cat(live))
        resting, had = spare(heap), held(heap)
        prefetch_kernel[(1,)](heap.handle, CLS=CLASS, HELD=0)
        assert spare(heap) == Batch(resting.page, 4, 4 * SLOTS)
        assert held(heap) == had
        heap.audit()
        heap.free(every[stays])
        assert_whole_capacity(heap)


@triton.jit
def prefetch_kernel(heap, CLS: tl.constexpr, HELD: tl.constexpr):
    """Have a spare ready, as if stripes held so many pages more."""
    cls = tl.program_id(0) * 0 + CLS
    tl.atomic_add(heap + layout.HELD, tl.full((), HELD, tl.int64))
    batches.prefetch(heap, cls, batches.own_stripe(heap, cls))
    tl.atomic_add(heap + layout.HELD, tl.full((), -HELD, tl.int64))


@triton.jit
def refill_kernel(heap, CLS: tl.constexpr, USED: tl.constexpr, HELD: tl.constexpr):
    """Refill the stripe, as if so many pages more were taken, or held by stripes."""
    zero = tl.program_id(0) * 0
    tl.atomic_add(heap + pages.USED, tl.full((), USED, tl.int64))
    tl.atomic_add(heap + layout.HELD, tl.full((), HELD, tl.int64))
    batches.refill(heap, zero + CLS, batches.own_stripe(heap, zero + CLS), zero)
    tl.atomic_add(heap + pages.USED, tl.full((), -USED, tl.int64))
    tl.atomic_add(heap + layout.HELD, tl.full((), -HELD, tl.int64))


def test_in_a_heap_that_fills_nothing_rests(heap: Heap) -> None:
    """What is free in used batches is to be drawn, by any program."""
    live = torch.cat([take(heap), *use_up(heap)])
    live = torch.cat([live, drain(heap)])
    refill_kernel[(1,)](heap.handle, CLS=CLASS, USED=PAGES * 3 // 4, HELD=0)
    assert spare(heap).length == 0
    assert held(heap) == batch(heap).length, "the spare, and nothing else"
    heap.audit()
    free_lanes(heap, live)


def test_where_batches_must_be_shorter_the_front_is_renewed(heap: Heap) -> None:
    addrs = use_up_a_long_one(heap)
    resting = spare(heap)
    behind = (addrs - heap.base) // PAGE_BYTES - resting.page
    gone = (behind >= 0) & (behind < 10)
    free_lanes(heap, addrs[gone])
    live = [addrs[~gone], drain(heap)]
    assert spare(heap) == resting, "the same half way"
    had, old = held(heap), batch(heap)
    refill_kernel[(1,)](heap.handle, CLS=CLASS, USED=0, HELD=PAGES * 5 // 8)
    assert batch(heap) == Batch(resting.page, 10, 10 * SLOTS)
    assert spare(heap) == old
    assert held(heap) == had - (NEXT - 10), "the pages behind are dissolved"
    heap.audit()
    free_lanes(heap, torch.cat(live))


def test_random_lifetimes_do_not_make_an_empty_heap_draw() -> None:
    """What rests with a few live slots is dissolved, and what is free in it not drawn: there
    are pages enough."""
    generator = torch.Generator().manual_seed(1)
    with Heap(4096 * PAGE_BYTES) as heap:
        live = [malloc_lanes(heap, [SIZE]) for _ in range(10)]
        for _ in range(200):
            at = int(torch.randint(len(live), (1,), generator=generator))
            free_lanes(heap, live[at])
            live[at] = malloc_lanes(heap, [SIZE])
            assert batch(heap).length > 0
        heap.audit()
        free_lanes(heap, torch.cat(live))
        assert_whole_capacity(heap)


def test_a_search_finds_what_is_free_in_a_batch_that_rests() -> None:
    """Every slot of a heap can be allocated, though used batches hold some of them."""
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


def ready_spare(heap: Heap) -> torch.Tensor:
    """Allocate until a spare is ready, and on until the batch is used up and no program has seen
    it."""
    live = use_up_a_long_one(heap)
    free_lanes(heap, live)
    addrs = drain(heap)
    assert spare(heap).credits == NEXT * SLOTS
    return addrs


def test_whoever_finds_nothing_left_takes_the_spare(heap: Heap) -> None:
    live = ready_spare(heap)
    old, new = batch(heap), spare(heap)
    addrs = take(heap)
    assert batch(heap) == Batch(new.page, NEXT, NEXT * SLOTS - TURN)
    assert spare(heap) == old, "it rests"
    assert ((addrs - heap.base) // PAGE_BYTES == new.page).all()
    heap.audit()
    free_lanes(heap, torch.cat([live, addrs]))


def swap_at_once(heap: Heap, need: int) -> int:
    """Swap, and keep so many slots: how many credits the word has that came back."""
    found = torch.full((1,), -1, dtype=torch.int64, device=DEVICE)
    swap_kernel[(1,)](heap.handle, found, CLS=CLASS, NEED=need)
    return int(found[0].to(torch.int32))


def test_a_spare_becomes_the_batch(heap: Heap) -> None:
    live = ready_spare(heap)
    old, new = batch(heap), spare(heap)
    assert swap_at_once(heap, 0) == new.credits
    assert (batch(heap), spare(heap)) == (new, old)
    heap.audit()
    free_lanes(heap, live)


@pytest.mark.parametrize(("credits", "need", "left"), [(5, 3, 2), (3, 3, 0), (1, 3, 0)])
def test_what_is_kept_of_a_spare_is_nobody_elses(
    heap: Heap, credits: int, need: int, left: int
) -> None:
    """Two refills at once may leave a part of a spare, even less than is needed."""
    live = ready_spare(heap)
    before = heap.handle.clone()
    at = layout.STRIPES.value + CLASS * 64 * layout.STRIPE_STRIDE.value + layout.SPARE.value
    heap.handle[at] -= spare(heap).credits - credits
    assert swap_at_once(heap, need) == credits
    assert batch(heap).credits == left
    assert int(heap.handle[at - layout.SPARE.value].to(torch.int32)) == left, "not below zero"
    heap.handle.copy_(before)
    heap.audit()
    free_lanes(heap, live)


def test_a_spare_that_is_not_ready_stays(heap: Heap) -> None:
    live = use_up_a_long_one(heap)
    before = heap.handle.clone()
    assert swap_at_once(heap, 1) == 0
    assert torch.equal(heap.handle, before), "nothing was put back, and no program is moving memory"
    free_lanes(heap, live)


@triton.jit
def swap_kernel(heap, found, CLS: tl.constexpr, NEED: tl.constexpr):
    zero = tl.program_id(0) * 0
    stripe = batches.own_stripe(heap, zero + CLS)
    tl.store(found, batches.swap(heap, zero + CLS, stripe, zero + NEED))


@pytest.mark.parametrize(
    ("size", "batch", "limit", "share", "length"),
    [
        (64, 0, 64, 0, 16),
        (64, 0, 64, 1, 16),
        (64, 0, 64, 2, 8),
        (64, 0, 64, 3, 4),
        (64, 0, 64, 15, 4),
        (1024, 0, 64, 15, 8),
        (2048, 0, 64, 15, 16),
        (32768, 0, 64, 15, 16),
        (64, 0, 8, 0, 2),
        (64, 0, 2, 0, 1),
        (64, 0, 1, 9, 1),
        (64, 0, 0, 9, 0),
        (64, 4, 64, 3, 16),
        (64, 4, 64, 4, 8),
        (64, 64, 64, 0, 64),
        (64, 11, 64, 4, 16),
        (64, 16, 4, 4, 4),
        (64, 16, 0, 4, 0),
    ],
)
def test_the_length_of_the_next_batch(
    size: int, batch: int, limit: int, share: int, length: int
) -> None:
    """`share`: how many sixteenths of the heap stripes hold."""
    found = torch.full((1,), -1, dtype=torch.int32, device=DEVICE)
    word = torch.tensor([batch << layout.BATCH_SHIFT.value], dtype=torch.int64, device=DEVICE)
    cls = CLASS_SIZES.index(size)
    length_kernel[(1,)](found, word, CLS=cls, LIMIT=limit, SHARE=share)
    assert found.tolist() == [length]


@triton.jit
def length_kernel(found, word, CLS: tl.constexpr, LIMIT: tl.constexpr, SHARE: tl.constexpr):
    zero = tl.program_id(0) * 0
    length = batches.next_length(zero + CLS, tl.load(word), zero + LIMIT, zero + SHARE)
    tl.store(found, length)


class FarSource(HostSource):
    """Memory of which most is never touched: the data are an address, the rest is mapped lazily."""

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        if nbytes > LARGEST // 2:
            self._out.enter(1 << 44, nbytes)
            return 1 << 44
        return super().allocate(nbytes, stream)

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        if address == 1 << 44:
            with self._out.leaving(address, nbytes):
                return
        super().free(address, nbytes, stream)


@pytest.mark.skipif(ON_GPU, reason="the heap's memory is not there")
def test_the_last_batch_of_the_largest_heap_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it is the page with number 2**23, which is taken for page 0."""
    zero = torch.Tensor.zero_
    # (Four GiB that are zero already.)
    monkeypatch.setattr(torch.Tensor, "zero_", lambda at: at if at.numel() > 1 << 28 else zero(at))
    with Heap(LARGEST, source=FarSource()) as heap:
        g = heap._geometry
        cls, length = len(CLASS_SIZES) - 1, layout.MAX_BATCH.value
        stripe = layout.STRIPES.value + cls * g.stripes * layout.STRIPE_STRIDE.value
        last = range(g.pages - length, g.pages)
        heap.handle[stripe + layout.SPARE.value] = (last[0] << 32) + (length << 55)
        attached = layout.SLAB.value + (cls << layout.CLASS_SHIFT.value) + layout.ATTACHED.value
        heap.handle[g.page_words + last[0] : g.page_words + g.pages] = attached
        heap.handle[g.page_bits + g.chunks - 1] = 0
        heap.handle[layout.USED.value] = heap.handle[layout.HELD.value] = length
        refill_at_once[(1,)](heap.handle, CLS=cls)
        word = int(heap.handle[stripe])
        assert (word >> 32 & ((1 << 23) - 1), word >> 55) == (last[0], length)
        assert int(heap.handle[g.page_words]) == 0
        assert held(heap) == length


@triton.jit
def refill_at_once(heap, CLS: tl.constexpr):
    none = tl.program_id(0) * 0
    batches.refill(heap, none + CLS, batches.own_stripe(heap, none + CLS), none)
