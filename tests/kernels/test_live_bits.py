"""Live bits that another program had: what lanes learn of them, and where else they look."""

import math

import pytest
import torch
import triton
import triton.language as tl

from devalloc.kernels import live
from devalloc.sizes import CLASS_SIZES, PAGE_BYTES
from tests.support import DEVICE

pytestmark = pytest.mark.oldest


@triton.jit
def heard_kernel(pages, granules, wrong, out, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    page, granule = tl.load(pages + lane), tl.load(granules + lane)
    hit = live.heard(page, granule, tl.load(wrong + lane))
    tl.store(out + lane, hit.to(tl.int32))


@pytest.mark.parametrize(("lanes", "warps"), [(8, 1), (32, 1), (128, 1), (128, 4)])
def test_each_lane_hears_of_its_own_bit_only(lanes: int, warps: int) -> None:
    """Slots of 1 KiB, over several pages: those of a page are the bits of one word. The first lane
    of a page made the request for all of them, and some of the bits had been set by another
    program."""
    generator = torch.Generator().manual_seed(lanes)
    per_page = min(16, lanes // 2)
    lane = torch.arange(lanes)
    pages, slots = lane // per_page, lane % per_page
    taken = torch.rand(lanes, generator=generator) < 0.3
    taken[:per_page] = False  # (no lane learns anything of a page)
    taken[-1], taken[-2] = True, False
    bits = torch.where(taken, 1 << slots, 0)  # int64
    wrong = torch.zeros(lanes, dtype=torch.int64)
    for page in range(lanes // per_page):
        wrong[page * per_page] = bits[pages == page].sum()
    granules = (slots * 64 + 5).to(torch.int32)  # (the word is the granule modulo 64)
    out = torch.full((lanes,), -1, dtype=torch.int32, device=DEVICE)
    heard_kernel[(1,)](
        pages.to(torch.int32).to(DEVICE),
        granules.to(DEVICE),
        wrong.to(DEVICE),
        out,
        LANES=lanes,
        num_warps=warps,
    )
    assert out.cpu().tolist() == taken.to(torch.int32).tolist()


@pytest.mark.parametrize("size", CLASS_SIZES)
def test_who_goes_on_by_the_stride_comes_to_every_slot(size: int) -> None:
    """Or a lane with a reservation of the last slot of a page might search without end."""
    slots = PAGE_BYTES // size
    stride = live.STRIDE.value
    assert slots <= stride or math.gcd(slots, stride) == 1
