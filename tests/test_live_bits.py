"""What lanes hear of the live bits that another lane spoke for, when a ticket came too late."""

import pytest
import torch
import triton
import triton.language as tl

from devalloc.kernels import live
from tests.support import DEVICE


@triton.jit
def heard_kernel(pages, granules, wrong, out, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    page, granule = tl.load(pages + lane), tl.load(granules + lane)
    hit = live.heard(page, granule, tl.load(wrong + lane))
    tl.store(out + lane, hit.to(tl.int32))


@pytest.mark.parametrize(("lanes", "warps"), [(8, 1), (32, 1), (128, 1), (128, 4)])
def test_each_lane_hears_of_its_own_bit_only(lanes: int, warps: int) -> None:
    """Slots of 1 KiB, over several pages: those of a page are the bits of one word. The first lane
    of a page spoke for all of them, and some of the bits had been set by somebody else."""
    generator = torch.Generator().manual_seed(lanes)
    per_page = min(16, lanes // 2)
    lane = torch.arange(lanes)
    pages, slots = lane // per_page, lane % per_page
    taken = torch.rand(lanes, generator=generator) < 0.3
    taken[:per_page] = False  # (of a page nobody hears anything)
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
