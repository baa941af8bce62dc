"""Groups of lanes that request the same, as the heap uses them."""

import pytest
import torch
import triton
import triton.language as tl

from devalloc.kernels.groups import alike, from_leader
from tests.conftest import ON_GPU
from tests.support import DEVICE

pytestmark = pytest.mark.oldest

WIDTHS = [(1, 1), (8, 1), (32, 1), (32, 4), (64, 2), (128, 1), (128, 4), (512, 1)]


@triton.jit
def alike_kernel(keys, flags, out, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    active = tl.load(flags + lane) != 0
    leader, rank, count, _upto = alike(tl.load(keys + lane), active)
    tl.store(out + lane, leader)
    tl.store(out + LANES + lane, rank)
    tl.store(out + 2 * LANES + lane, count)
    tl.store(out + 3 * LANES + lane, from_leader(lane * 3, leader))


@triton.jit
def alike_rows_kernel(keys, flags, out, LANES: tl.constexpr):
    """The same with keys that come of a reduction: threads hold copies of lanes."""
    lane = tl.arange(0, LANES)
    column = tl.arange(0, 16)
    rows = tl.load(keys + lane[:, None] + column[None, :] * 0)
    key = tl.max(rows, axis=1)
    active = tl.load(flags + lane) != 0
    leader, rank, count, _upto = alike(key, active)
    tl.store(out + lane, leader)
    tl.store(out + LANES + lane, rank)
    tl.store(out + 2 * LANES + lane, count)
    tl.store(out + 3 * LANES + lane, from_leader(lane * 3, leader))


@pytest.mark.parametrize("kernel", [alike_kernel, alike_rows_kernel], ids=["lanes", "rows"])
@pytest.mark.parametrize("kinds", [1, 3, 1000])
@pytest.mark.parametrize(("lanes", "warps"), WIDTHS)
def test_groups_are_sound(lanes: int, warps: int, kinds: int, kernel: object) -> None:
    """Every active lane is in one group of lanes with its key; the ranks count the group."""
    generator = torch.Generator().manual_seed(lanes * 1000 + kinds)
    keys = torch.randint(0, kinds, (lanes,), dtype=torch.int32, generator=generator)
    active = torch.randint(0, 4, (lanes,), dtype=torch.int32, generator=generator) > 0
    out = torch.full((4, lanes), -1, dtype=torch.int32, device=DEVICE)
    flags = active.to(torch.int32).to(DEVICE)
    kernel[(1,)](keys.to(DEVICE), flags, out, LANES=lanes, num_warps=warps)  # type: ignore[index]
    leader, rank, count, given = out.cpu().tolist()
    groups: dict[int, list[int]] = {}
    for lane in torch.nonzero(active).flatten().tolist():
        groups.setdefault(leader[lane], []).append(lane)
    for first, members in groups.items():
        assert first in members
        assert len({int(keys[lane]) for lane in members}) == 1
        assert sorted(rank[lane] for lane in members) == list(range(len(members)))
        assert {count[lane] for lane in members} == {len(members)}
        assert rank[first] == len(members) - 1
        assert {given[lane] for lane in members} == {first * 3}
    if not ON_GPU:
        # (On a device that depends on which lanes a warp handles together.)
        assert len(groups) <= kinds * max(1, lanes // 32)
