"""Lanes of several classes, and blocks that lie across pages, put slots into magazines."""

import pytest
import torch

from benchmarks.device import workloads as work
from devalloc import DoubleFree, Heap
from tests.support import DEVICE

LANES = 32


@pytest.fixture
def heap() -> Heap:
    with Heap("16MiB") as heap:
        yield heap
        heap.check()
        heap.audit()


def malloc(heap: Heap, sizes: torch.Tensor, lanes: int = LANES) -> torch.Tensor:
    sizes = sizes.to(DEVICE)
    addrs = torch.zeros_like(sizes)
    grid = (-(-len(sizes) // lanes),)
    work.malloc_mixed_kernel[grid](heap.handle, sizes, addrs, len(sizes), LANES=lanes)
    assert bool((addrs != 0).all())
    return addrs


def free(heap: Heap, addrs: torch.Tensor, lanes: int = LANES) -> None:
    grid = (-(-len(addrs) // lanes),)
    work.free_lanes_kernel[grid](heap.handle, addrs, len(addrs), LANES=lanes)


def in_magazines(heap: Heap) -> int:
    return len(heap._state().spans.magazine)


def two_classes(blocks: int) -> torch.Tensor:
    """Sizes of 64 and 128 bytes in turn."""
    return torch.arange(blocks * LANES) % 2 * 64 + 64


@pytest.mark.parametrize("lanes", [16, LANES, 4 * LANES])
def test_each_lane_finds_the_slot_that_it_freed(heap: Heap, lanes: int) -> None:
    chance = torch.Generator().manual_seed(5)
    sizes = torch.randint(16, 8193, (8 * LANES,), generator=chance).to(DEVICE)
    addrs = malloc(heap, sizes, lanes)
    for _ in range(3):
        chosen = (torch.rand(len(sizes), generator=chance) < 0.5).to(DEVICE)
        free(heap, torch.where(chosen, addrs, 0), lanes)
        assert in_magazines(heap) == int(chosen.sum())
        again = torch.zeros_like(addrs)
        grid = (-(-len(sizes) // lanes),)
        wanted = torch.where(chosen, sizes, 0)
        work.malloc_mixed_kernel[grid](heap.handle, wanted, again, len(sizes), LANES=lanes)
        assert torch.equal(torch.where(chosen, addrs, 0), again)
        assert in_magazines(heap) == 0
    free(heap, addrs, lanes)


def test_lanes_that_ask_for_other_sizes_give_the_slots_back(heap: Heap) -> None:
    sizes = two_classes(1)
    free(heap, malloc(heap, sizes))
    assert in_magazines(heap) == LANES
    addrs = malloc(heap, sizes.roll(1))
    assert in_magazines(heap) == 0
    assert heap.stats().used == heap.capacity - heap.stats().free
    free(heap, addrs)


def test_a_magazine_has_at_most_half_a_page(heap: Heap) -> None:
    """Lanes in turn free half a page, more than that, a run, and nothing."""
    sizes = torch.tensor([32768, 21840, 65537, 0], device=DEVICE).repeat(8)
    addrs = torch.zeros_like(sizes)
    work.malloc_mixed_kernel[(1,)](heap.handle, sizes, addrs, LANES, LANES=LANES)
    free(heap, addrs)
    assert in_magazines(heap) == 16
    work.malloc_mixed_kernel[(1,)](heap.handle, sizes, addrs, LANES, LANES=LANES)
    assert in_magazines(heap) == 0
    free(heap, addrs)


def test_a_double_free_of_lanes_leaves_nothing_in_magazines(heap: Heap) -> None:
    addrs = malloc(heap, two_classes(1))
    free(heap, torch.where(torch.arange(LANES, device=DEVICE) // 2 == 3, addrs, 0))
    assert in_magazines(heap) == 2
    free(heap, addrs)
    with pytest.raises(DoubleFree):
        heap.check()
    heap.clear_errors()
    assert in_magazines(heap) == 2


def test_lanes_of_one_class_share_a_magazine_or_use_none(heap: Heap) -> None:
    """A malloc for such lanes asks for a span of them all."""
    addrs = malloc(heap, torch.full((16 * LANES,), 4096))
    scattered = addrs[:: len(addrs) // LANES].contiguous()
    assert len(set((scattered >> 16).tolist())) > 16
    free(heap, scattered)
    assert in_magazines(heap) == 0
    free(heap, addrs[~torch.isin(addrs, scattered)].contiguous())


def test_a_block_across_pages_lets_the_next_begin_with_one(heap: Heap) -> None:
    """32 slots shift the tickets of a line, so that 128 lie across pages, and no magazine holds
    them. The next draw begins with a page again."""
    odd = malloc(heap, torch.full((32,), 256))
    sizes = torch.full((128,), 256)
    for _ in range(2):
        block = malloc(heap, sizes, 128)
        free(heap, block, 128)
    assert in_magazines(heap) == 1
    assert torch.equal(malloc(heap, sizes, 128), block)
    free(heap, block, 128)
    free(heap, odd)


def test_whole_pages_where_no_so_many_are_adjacent(heap: Heap) -> None:
    """128 lanes of 16 KiB fill 32 pages; every second page is taken."""
    pages = malloc(heap, torch.full((heap.capacity >> 16,), 65536), 1)
    kept = pages[torch.argsort(pages)[1::2]]
    free(heap, pages[torch.argsort(pages)[::2]].contiguous(), 1)
    addrs = malloc(heap, torch.full((128,), 16384), 128)
    taken = set((addrs >> 16).tolist())
    assert len(set(addrs.tolist())) == 128
    assert not taken & set((kept >> 16).tolist())
    free(heap, addrs, 128)
    free(heap, kept.contiguous(), 1)


def test_a_block_frees_more_pages_than_it_looks_at(heap: Heap) -> None:
    """128 lanes of 32 KiB fill 64 pages: 32 are retired whole, the others slot by slot."""
    free(heap, malloc(heap, torch.full((128,), 32768), 128), 128)
    heap.audit()
    assert heap.stats().free == heap.capacity
