"""Stripe words in states that only many programs together bring about."""

import pytest
import torch
import triton
import triton.language as tl

from devalloc import Heap
from devalloc.kernels import layout, slabs
from devalloc.sizes import PAGE_BYTES
from tests.conftest import ON_GPU
from tests.support import DEVICE, assert_whole_capacity, free_lanes, malloc_lanes

CLASS = 3  # 64 B
LEAST = -(1 << 31)  # credits


@triton.jit
def await_kernel(heap, found, CLS: tl.constexpr, NEED: tl.constexpr):
    zero = tl.program_id(0) * 0
    place, duty = slabs.await_slots(heap, zero + CLS, zero + NEED)
    tl.store(found, place)
    tl.store(found + 1, duty.to(tl.int64))


def drawing_word(credits: int) -> int:
    return slabs.DRAWING.value + 1 + credits


def stripe_word(heap: Heap) -> torch.Tensor:
    """The only stripe of the class in a small heap."""
    index = layout.STRIPES.value + CLASS * layout.STRIPE_STRIDE.value
    return heap.handle[index : index + 1]


@pytest.mark.parametrize("credits", [LEAST, LEAST + 1, -slabs.MAX_DEBT.value - 1])
def test_a_large_debt_is_brought_back(credits: int) -> None:
    """Everybody draws beside the stripe and subtracts from it first: it must not wrap."""
    with Heap(32 * PAGE_BYTES) as heap:
        word = stripe_word(heap)
        word.fill_(drawing_word(credits))
        found = torch.full((2,), -1, dtype=torch.int64, device=DEVICE)
        await_kernel[(1,)](heap.handle, found, CLS=CLASS, NEED=5)
        assert word.tolist() == [drawing_word(-1)]
        assert found.tolist() == [0, 0], "neither slots nor a duty: there may be some to be drawn"


@pytest.mark.parametrize("credits", [-slabs.MAX_DEBT.value, -1])
def test_a_small_debt_is_left_alone(credits: int) -> None:
    with Heap(32 * PAGE_BYTES) as heap:
        word = stripe_word(heap)
        word.fill_(drawing_word(credits))
        found = torch.full((2,), -1, dtype=torch.int64, device=DEVICE)
        await_kernel[(1,)](heap.handle, found, CLS=CLASS, NEED=5)
        assert word.tolist() == [drawing_word(credits)]
        assert found.tolist() == [0, 0]


def test_the_debt_of_a_refill_is_left_alone() -> None:
    """Of a stripe that somebody refills, the word is the refiller's to replace."""
    with Heap(32 * PAGE_BYTES) as heap:
        word = stripe_word(heap)
        word.fill_(slabs.REFILLING.value - slabs.MAX_DEBT.value - 5)
        found = torch.full((2,), -1, dtype=torch.int64, device=DEVICE)
        await_kernel[(1,)](heap.handle, found, CLS=CLASS, NEED=5)
        assert word.tolist() == [slabs.REFILLING.value - slabs.MAX_DEBT.value - 5]
        assert found.tolist() == [0, 0]


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
