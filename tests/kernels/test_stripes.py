"""Stripe words in states that only many programs together bring about."""

import pytest
import torch
import triton
import triton.language as tl

from devalloc import Heap
from devalloc.kernels import batches, layout, pages, slabs
from devalloc.sizes import CLASS_SIZES, PAGE_BYTES
from tests.conftest import ON_GPU
from tests.support import DEVICE, assert_whole_capacity, free_lanes, malloc_lanes

CLASS = 3  # 64 B
LEAST = -(1 << 31)  # credits


@triton.jit
def await_kernel(
    heap, found, CLS: tl.constexpr, NEED: tl.constexpr, KNOWN: tl.constexpr, DUTY: tl.constexpr
):
    """Wait at a stripe from which we subtracted, or of which we know only that it is dry."""
    zero = tl.program_id(0) * 0
    word = tl.full((), batches.REFILLING, tl.int64)
    if KNOWN:
        word = tl.atomic_add(batches.own_stripe(heap, zero + CLS), -word * 0 - NEED) - NEED
    stripe = batches.own_stripe(heap, zero + CLS)
    place, duty = slabs.await_slots(heap, zero + CLS, stripe, zero + NEED, word, zero + DUTY)
    tl.store(found, place)
    tl.store(found + 1, duty.to(tl.int64))


@triton.jit
def announce_kernel(heap, found, CLS: tl.constexpr):
    stripe = batches.own_stripe(heap, tl.program_id(0) * 0 + CLS)
    word, spare, limit, share, front = batches.announce(heap, stripe)
    pages.end_transit(heap, limit * 0)
    tl.store(found, word)
    tl.store(found + 1, spare)
    tl.store(found + 2, limit.to(tl.int64))
    tl.store(found + 3, share.to(tl.int64))
    tl.store(found + 4, front.to(tl.int64))


def drawing_word(credits: int) -> int:
    return batches.DRAWING.value + 1 + credits


def stripe_word(heap: Heap, cls: int = CLASS) -> torch.Tensor:
    """The only stripe of the class in a small heap."""
    index = layout.STRIPES.value + cls * layout.STRIPE_STRIDE.value
    return heap.handle[index : index + 1]


@pytest.mark.parametrize(
    ("credits", "known"),
    [(LEAST, False), (LEAST + 1, False), *((-slabs.MAX_DEBT.value - 1, k) for k in (False, True))],
)
def test_a_large_debt_is_brought_back(credits: int, known: bool) -> None:
    """Every program draws beside the stripe and subtracts from it first: it must not wrap."""
    with Heap(32 * PAGE_BYTES) as heap:
        word = stripe_word(heap)
        word.fill_(drawing_word(credits))
        found = torch.full((2,), -1, dtype=torch.int64, device=DEVICE)
        await_kernel[(1,)](heap.handle, found, CLS=CLASS, NEED=5, KNOWN=known, DUTY=0)
        assert word.tolist() == [drawing_word(-1)]
        assert found.tolist() == [0, 0], "neither slots nor a duty: there may be some to be drawn"


@pytest.mark.parametrize(
    ("credits", "known"),
    [(-slabs.MAX_DEBT.value, False), (-slabs.MAX_DEBT.value + 5, True), (-1, False), (-1, True)],
)
def test_a_small_debt_is_left_alone(credits: int, known: bool) -> None:
    with Heap(32 * PAGE_BYTES) as heap:
        word = stripe_word(heap)
        word.fill_(drawing_word(credits))
        found = torch.full((2,), -1, dtype=torch.int64, device=DEVICE)
        await_kernel[(1,)](heap.handle, found, CLS=CLASS, NEED=5, KNOWN=known, DUTY=0)
        assert word.tolist() == [drawing_word(credits - 5 * known)]
        assert found.tolist() == [0, 0]


@pytest.mark.parametrize("known", [False, True])
def test_the_debt_of_a_refill_is_left_alone(known: bool) -> None:
    """While a program refills a stripe, only that program may replace the word."""
    with Heap(32 * PAGE_BYTES) as heap:
        word = stripe_word(heap)
        word.fill_(batches.REFILLING.value - slabs.MAX_DEBT.value - 5)
        found = torch.full((2,), -1, dtype=torch.int64, device=DEVICE)
        await_kernel[(1,)](heap.handle, found, CLS=CLASS, NEED=5, KNOWN=known, DUTY=0)
        assert word.tolist() == [batches.REFILLING.value - slabs.MAX_DEBT.value - 5 - 5 * known]
        assert found.tolist() == [0, 0]


def test_the_duty_to_refill_is_kept_where_no_spare_is_ready() -> None:
    with Heap(32 * PAGE_BYTES) as heap:
        found = torch.full((2,), -1, dtype=torch.int64, device=DEVICE)
        await_kernel[(1,)](heap.handle, found, CLS=CLASS, NEED=5, KNOWN=True, DUTY=1)
        assert found.tolist() == [0, 1]
        assert stripe_word(heap).tolist() == [-5], "no program has refilled it"
        stripe_word(heap).zero_()


@pytest.mark.parametrize("lanes", [1, 64] if not ON_GPU else [1, 64, 1024, 2048])
def test_malloc_works_beside_a_large_debt(lanes: int) -> None:
    with Heap(32 * PAGE_BYTES) as heap:
        word = stripe_word(heap)
        word.fill_(drawing_word(-slabs.MAX_DEBT.value - 1))
        addrs = malloc_lanes(heap, [64] * lanes, block=lanes)
        assert len(set(addrs.tolist()) - {0}) == lanes
        assert int(word.to(torch.int32)) > -slabs.MAX_DEBT.value
        heap.audit()
        free_lanes(heap, addrs, block=lanes)
        assert_whole_capacity(heap)


@pytest.mark.parametrize("lanes", [1, 64])
def test_a_large_debt_is_brought_back_by_who_can_draw(lanes: int) -> None:
    """No program fails to draw, so none takes the duty to refill: the debt would grow without
    end."""
    with Heap(32 * PAGE_BYTES) as heap:
        had = malloc_lanes(heap, [64] * 1024, block=1024)
        heap.trim()
        free_lanes(heap, had[::4].clone())
        word = stripe_word(heap)
        word.fill_(drawing_word(-slabs.MAX_DEBT.value - 1))
        addrs = malloc_lanes(heap, [64] * lanes, block=lanes)
        assert set(addrs.tolist()) <= set(had[::4].tolist()), "drawn"
        assert word.tolist() == [drawing_word(-1)]
        heap.audit()
        had[::4] = 0
        free_lanes(heap, torch.cat([had, addrs]))
        assert_whole_capacity(heap)


def test_a_large_debt_is_brought_back_by_who_gets_pages_of_its_own() -> None:
    """A block of several classes subtracts and, if it can fill pages, neither waits nor draws."""
    with Heap(62 * PAGE_BYTES) as heap:
        had = malloc_lanes(heap, [16384] * 160, block=256)
        heap.trim()
        free_lanes(heap, had[::4].clone())
        word = stripe_word(heap, CLASS_SIZES.index(16384))
        word.fill_(drawing_word(-slabs.MAX_DEBT.value - 1))
        addrs = malloc_lanes(heap, [16384, 64] * 16, block=32)
        assert (addrs != 0).all()
        assert word.tolist() == [drawing_word(-1)]
        heap.audit()
        had[::4] = 0
        free_lanes(heap, torch.cat([had, addrs]))
        assert_whole_capacity(heap)


@pytest.mark.parametrize(
    ("used", "held", "limit", "share"),
    [
        (0, 0, 64, 0),
        (8191, 8191, 64, 1),
        (8192, 8192, 64, 2),
        (16384, 16384, 64, 4),
        (32767, 32767, 64, 7),
        (32768, 32768, 32, 8),
        (36864, 36864, 16, 9),
        (40960, 40960, 8, 10),
        (40961, 40961, 4, 10),
        (40960, 24575, 64, 5),
        (40961, 24575, 4, 5),
        (32768, 0, 64, 0),
        (32769, 0, 0, 0),
        (49152, 32768, 4, 8),
        (49153, 32768, 0, 8),
        (65532, 65532, 4, 15),
        (65533, 65533, 0, 15),
    ],
)
def test_batches_are_short_when_much_is_held_or_taken(
    used: int, held: int, limit: int, share: int
) -> None:
    with Heap(65536 * PAGE_BYTES) as heap:
        stripe = layout.STRIPES.value + CLASS * 64 * layout.STRIPE_STRIDE.value
        heap.handle[layout.USED.value] = used
        heap.handle[layout.HELD.value] = held
        heap.handle[stripe] = 12
        heap.handle[stripe + layout.SPARE.value] = 34
        found = torch.full((5,), -1, dtype=torch.int64, device=DEVICE)
        announce_kernel[(1,)](heap.handle, found, CLS=CLASS)
        assert found.tolist() == [12, 34, limit, share, used // 64 * 3 // 2 + 64]
        assert heap.handle[layout.USED.value] == used, "only looked at"
        assert heap.handle[layout.HELD.value] == held
        heap.reset()


def test_a_small_heap_packs_when_half_of_it_is_taken() -> None:
    with Heap(32 * PAGE_BYTES) as heap:
        found = torch.full((5,), -1, dtype=torch.int64, device=DEVICE)
        announce_kernel[(1,)](heap.handle, found, CLS=CLASS)
        assert found.tolist() == [0, 0, heap._geometry.max_batch, 0, 1]
        heap.handle[layout.USED.value] = 17
        announce_kernel[(1,)](heap.handle, found, CLS=CLASS)
        assert found.tolist() == [0, 0, 0, 0, 1]
        heap.reset()
