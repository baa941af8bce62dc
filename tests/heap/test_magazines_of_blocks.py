"""Blocks of several classes, and blocks that lie across pages, put their slots into magazines."""

import pytest
import torch

from benchmarks.device import workloads as work
from devalloc import Heap

LANES = 32


@pytest.fixture
def heap() -> Heap:
    with Heap("16MiB", device="cpu") as heap:
        yield heap
        heap.check()
        heap.audit()


def malloc(heap: Heap, sizes: torch.Tensor, lanes: int = LANES) -> torch.Tensor:
    addrs = torch.zeros(len(sizes), dtype=torch.int64)
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


def test_the_same_request_finds_the_same_slots(heap: Heap) -> None:
    sizes = torch.randint(16, 1025, (4 * LANES,), generator=torch.Generator().manual_seed(5))
    first = malloc(heap, sizes)
    free(heap, first)
    assert in_magazines(heap) > 4
    again = malloc(heap, sizes)
    assert torch.equal(first, again)
    assert in_magazines(heap) == 0
    free(heap, again)


def test_other_counts_give_the_slots_back(heap: Heap) -> None:
    sizes = two_classes(1)
    free(heap, malloc(heap, sizes))
    assert in_magazines(heap) == 2
    sizes[0] = 128
    addrs = malloc(heap, sizes)
    assert in_magazines(heap) == 0
    assert heap.stats().used == heap.capacity - heap.stats().free
    free(heap, addrs)


@pytest.mark.parametrize("order", ["some left", "mixed up", "backwards"])
def test_what_is_not_a_whole_block_goes_to_its_pages(heap: Heap, order: str) -> None:
    addrs = malloc(heap, two_classes(4))
    if order == "some left":
        part = torch.where(torch.arange(LANES) < LANES - 1, addrs[:LANES], 0)
    elif order == "mixed up":
        # (One of each four of the four blocks: their slots do not follow one another.)
        part = addrs.view(4, LANES)[:, :8].t().reshape(-1).contiguous()
    else:
        part = addrs[:LANES].flip(0).contiguous()
    free(heap, part)
    assert in_magazines(heap) == 0
    free(heap, addrs[~torch.isin(addrs, part)].contiguous())


def test_addresses_of_many_pages_go_to_these(heap: Heap) -> None:
    """A list of addresses is no block: single slots in magazines would keep all these pages."""
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
