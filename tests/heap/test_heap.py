"""The contract of a heap on the device: shapes of calls, kinds of sizes, content, realloc."""

import random

import pytest
import torch

from devalloc import Heap, InvalidArgument, InvalidFree, OutOfMemory
from devalloc.sizes import CLASS_SIZES, MAX_SLOT, PAGE_BYTES
from tests import user_kernels as uk
from tests.conftest import ON_GPU
from tests.support import (
    EDGE_SIZES,
    MIB,
    WARPS,
    assert_blocks,
    assert_empty,
    assert_whole_capacity,
    free_lanes,
    free_scalars,
    int64,
    malloc_lanes,
    malloc_scalars,
    write,
    wrong_words,
)

pytestmark = pytest.mark.oldest

# (lanes, warps): every width, and all warps at the widths of practice.
WIDTHS = [(1, 1), (2, 1), (64, 1), (1024, 1), (4096, 1)]
if ON_GPU:
    WIDTHS = [(1, 1), (1, 4), (2, 8), (64, 1), (64, 4), (64, 8), (1024, 4), (1024, 8), (1024, 16)]
    WIDTHS += [(4096, 8)]


def usable(heap: Heap, addrs: torch.Tensor) -> torch.Tensor:
    sizes = torch.zeros_like(addrs)
    n = addrs.numel()
    uk.usable_size_lanes_kernel[((n + 63) // 64,)](heap.handle, addrs, sizes, n, BLOCK=64)
    return sizes


# Shapes of calls ------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "warps"), WIDTHS)
def test_block_widths(block: int, warps: int) -> None:
    """Equal sizes, mixed sizes, and a ragged last program."""
    n = min(2 * block + block // 2 + 1, 4500)
    with Heap("16MiB") as heap:
        same = malloc_lanes(heap, [48] * n, block, warps)
        assert_blocks(heap, same, [48] * n)
        sizes = [(40, 200, 1000)[i % 3] for i in range(n)]
        mixed = malloc_lanes(heap, sizes, block, warps)
        assert_blocks(heap, torch.cat([same, mixed]), [48] * n + sizes)
        heap.audit()
        free_lanes(heap, torch.cat([same, mixed])[torch.randperm(2 * n)], block, warps)
        assert_whole_capacity(heap)


@pytest.mark.parametrize("warps", WARPS)
def test_scalars(warps: int) -> None:
    sizes = [1, 16, 100, 5000, MAX_SLOT, MAX_SLOT + 1, PAGE_BYTES, 200_000]
    with Heap("1MiB") as heap:
        addrs = malloc_scalars(heap, sizes, warps)
        assert_blocks(heap, addrs, sizes)
        heap.audit()
        free_scalars(heap, addrs, warps)
        assert_whole_capacity(heap)


@pytest.mark.parametrize("block", [64, 256])
def test_without_a_mask(block: int) -> None:
    with Heap("4MiB") as heap:
        sizes, addrs = int64([64] * 2 * block), int64([-1] * 2 * block)
        uk.malloc_unmasked_kernel[(2,)](heap.handle, sizes, addrs, BLOCK=block)
        assert_blocks(heap, addrs, sizes)
        uk.free_unmasked_kernel[(2,)](heap.handle, addrs, BLOCK=block)
        assert_whole_capacity(heap)


def test_masked_lanes_do_nothing() -> None:
    """Sizes and addresses of masked lanes may be anything at all."""
    wanted = int64([i % 3 == 0 for i in range(64)])
    sizes = int64([64 if i % 3 == 0 else -(1 << 40) for i in range(64)])
    with Heap("1MiB") as heap:
        addrs = int64([-1] * 64)
        uk.malloc_masked_kernel[(1,)](heap.handle, sizes, wanted, addrs, BLOCK=64)
        on = wanted != 0
        assert (addrs[~on] == 0).all()
        assert_blocks(heap, addrs[on], sizes[on])
        assert heap.stats().allocations == int(on.sum())
        heap.check()
        wild = torch.where(on, addrs, 12345)
        uk.free_masked_kernel[(1,)](heap.handle, wild, wanted, BLOCK=64)
        assert_whole_capacity(heap)


def test_no_lane_at_all() -> None:
    none = int64([0] * 64)
    with Heap("1MiB") as heap:
        before = heap.handle.clone()
        addrs = int64([-1] * 64)
        uk.malloc_masked_kernel[(1,)](heap.handle, none + 64, none, addrs, BLOCK=64)
        assert (addrs == 0).all()
        uk.free_masked_kernel[(1,)](heap.handle, none + 12345, none, BLOCK=64)
        address = int64([-1])
        uk.malloc_scalar_masked_kernel[(1,)](heap.handle, int64([64]), int64([0]), address)
        assert address.tolist() == [0]
        heap.check()
        assert heap.stats().allocations == 0
        assert torch.equal(heap.handle, before)


def test_a_scalar_under_a_true_mask() -> None:
    with Heap("1MiB") as heap:
        addrs = int64([-1, -1])
        uk.malloc_scalar_masked_kernel[(2,)](heap.handle, int64([64, 64]), int64([1, 0]), addrs)
        assert_blocks(heap, addrs[:1], [64])
        assert int(addrs[1]) == 0
        free_scalars(heap, addrs)


@pytest.mark.parametrize("nbytes", [64, 2 * PAGE_BYTES])
def test_a_scalar_size_under_a_block_mask(nbytes: int) -> None:
    """The shape follows the mask: one allocation per active lane, wherever the first is."""
    wanted = int64([0, 1, 0, 1])
    with Heap("1MiB") as heap:
        addrs = int64([-1] * 4)
        uk.malloc_same_size_kernel[(1,)](heap.handle, nbytes, wanted, addrs, BLOCK=4)
        heap.check()
        assert (addrs[wanted == 0] == 0).all()
        assert_blocks(heap, addrs[wanted != 0], [nbytes, nbytes])
        heap.free(addrs)
        assert_whole_capacity(heap)


def test_a_size_in_the_source() -> None:
    with Heap("1MiB") as heap:
        addrs = int64([-1] * 2)
        uk.malloc_constant_kernel[(2,)](heap.handle, addrs, NBYTES=100)
        assert_blocks(heap, addrs, [100, 100])
        heap.free(addrs)


@pytest.mark.parametrize("nbytes", [64, PAGE_BYTES])
def test_in_loops_and_branches(nbytes: int) -> None:
    with Heap("1MiB") as heap:
        addrs = int64([-1] * 4)
        uk.malloc_conditional_kernel[(4,)](heap.handle, addrs, 3, nbytes)
        assert addrs[0::2].tolist() == [0, 0]
        assert_blocks(heap, addrs[1::2], [nbytes] * 2)
        stats = heap.stats()
        assert (stats.allocations, stats.frees) == (6, 4)
        heap.free(addrs)
        assert_whole_capacity(heap)


def test_one_kernel_allocates_another_frees_and_so_may_the_host() -> None:
    with Heap("1MiB") as heap:
        free_scalars(heap, malloc_lanes(heap, [64, 100_000]))
        heap.free(malloc_scalars(heap, [64, 100_000]))
        free_lanes(heap, heap.malloc([64, 100_000]))
        assert_whole_capacity(heap)


# Sizes ----------------------------------------------------------------------------------------


def test_edge_sizes() -> None:
    """Around every class and around pages: disjoint, aligned, usable, waste within the law."""
    with Heap("32MiB") as heap:
        addrs = heap.malloc(EDGE_SIZES)
        assert_blocks(heap, addrs, EDGE_SIZES)
        sizes = heap.usable_size(addrs)
        assert torch.equal(usable(heap, addrs), sizes)
        for wanted, got in zip(EDGE_SIZES, sizes.tolist(), strict=True):
            if wanted <= MAX_SLOT:
                assert got == min(size for size in CLASS_SIZES if size >= wanted)
            else:
                assert got == -(-wanted // PAGE_BYTES) * PAGE_BYTES
        # What is usable belongs to one block alone.
        assert_blocks(heap, addrs, sizes)
        write(addrs, sizes)
        heap.audit()
        assert wrong_words(addrs, sizes) == 0
        heap.free(addrs)
        assert_whole_capacity(heap)


def test_zero_bytes() -> None:
    with Heap("1MiB") as heap:
        assert malloc_lanes(heap, [0, 64, 0])[0::2].tolist() == [0, 0]
        assert malloc_scalars(heap, [0]).tolist() == [0]
        assert heap.malloc([0]).tolist() == [0]
        heap.check()
        assert heap.stats().failures == 0


def test_powers_of_two_are_aligned_to_themselves() -> None:
    sizes = [1 << k for k in range(18)] * 2
    with Heap("16MiB") as heap:
        heap.malloc([16, 48, 80, 5000])
        addrs = malloc_lanes(heap, sizes)
        assert_blocks(heap, addrs, sizes)
        heap.free(addrs)
        heap.reset()


@pytest.mark.parametrize("pages", [1, 15, 16])
def test_runs_up_to_the_capacity(pages: int) -> None:
    with Heap("1MiB") as heap:
        for nbytes in (pages * PAGE_BYTES, pages * PAGE_BYTES - 1):
            addrs = heap.malloc([nbytes] * (16 // pages))
            assert_blocks(heap, addrs, [nbytes] * (16 // pages))
            assert heap.usable_size(addrs).tolist() == [pages * PAGE_BYTES] * (16 // pages)
            heap.audit()
            heap.free(addrs)
        assert_whole_capacity(heap)


def test_a_heap_of_one_page() -> None:
    with Heap(PAGE_BYTES) as heap:
        for size in (16, 64, MAX_SLOT, PAGE_BYTES):
            count = PAGE_BYTES // size
            addrs = heap.malloc([size] * count)
            assert_blocks(heap, addrs, [size] * count)
            assert heap.stats().free == 0
            assert heap.malloc([size]).tolist() == [0]
            with pytest.raises(OutOfMemory):
                heap.check()
            heap.free(addrs)
            assert_whole_capacity(heap)


@pytest.mark.parametrize("pages", [17, 65, 1601])
def test_odd_capacities(pages: int) -> None:
    """Capacities that are no power of two, with partial chunks and partial words of hints."""
    with Heap(pages * PAGE_BYTES + 12345) as heap:
        assert heap.capacity == pages * PAGE_BYTES
        assert_whole_capacity(heap)
        count = min(pages, 17)
        singles = heap.malloc([PAGE_BYTES] * count)
        assert_blocks(heap, singles, [PAGE_BYTES] * count)
        heap.audit()
        heap.free(singles)
        assert_whole_capacity(heap)


def test_runs_over_several_chunks() -> None:
    """Runs that fill a chunk, cross chunks, and end in the heap's partial last chunk."""
    pages = [1, 63, 64, 65, 100, 129, 640]
    with Heap(1601 * PAGE_BYTES) as heap:
        sizes = [n * PAGE_BYTES for n in pages]
        addrs = heap.malloc(sizes)
        assert_blocks(heap, addrs, sizes)
        heap.audit()
        snapshot = heap.snapshot()
        assert sorted(snapshot.run_pages[snapshot.run_pages > 0].tolist()) == pages
        # Free every second one: the rest stays where it is, and what is free is found again.
        heap.free(addrs[0::2])
        heap.audit()
        again = heap.malloc(sizes[0::2])
        live = torch.cat([addrs[1::2], again])
        assert_blocks(heap, live, sizes[1::2] + sizes[0::2])
        heap.audit()
        heap.free(live)
        assert_whole_capacity(heap)
        # 25 chunks and one page: a run of 1601 pages uses the partial chunk.
        for count in (1600, 1601):
            addr = heap.malloc([count * PAGE_BYTES])
            assert addr.item() == heap.base
            heap.free(addr)
        assert heap.malloc([1601 * PAGE_BYTES + 1]).item() == 0
        with pytest.raises(OutOfMemory):
            heap.check()


def test_whole_capacity_after_any_workload() -> None:
    generator = random.Random(5)
    with Heap(150 * PAGE_BYTES) as heap:
        sizes = [generator.choice(EDGE_SIZES) for _ in range(120)]
        first = heap.malloc(sizes[:60])
        heap.free(first[::2])
        second = heap.malloc(sizes[60:])
        heap.audit()
        heap.free(torch.cat([first[1::2], second]))
        assert_whole_capacity(heap)


# Content --------------------------------------------------------------------------------------


def test_freed_memory_is_used_again() -> None:
    with Heap("128KiB") as heap:
        first = heap.malloc([64] * 500)
        heap.free(first)
        # More than what is left besides: some of them must return.
        second = malloc_lanes(heap, [64] * (heap.capacity // 64), 2048)
        assert set(first.tolist()) <= set(second.tolist())
        heap.free(second)


def test_what_is_written_stays() -> None:
    """Live blocks keep their content while others come and go around them."""
    generator = random.Random(7)
    with Heap("16MiB") as heap:
        sizes = [generator.choice((16, 48, 100, 1000, 5000, 40_000, 140_000)) for _ in range(64)]
        kept = heap.malloc(sizes)
        lengths = heap.usable_size(kept)
        write(kept, lengths)
        for _ in range(2):
            others = malloc_lanes(heap, sizes)
            write(others, heap.usable_size(others), first_tag=1000)
            free_lanes(heap, others)
        assert wrong_words(kept, lengths) == 0
        heap.free(kept)
        assert_empty(heap)


def test_usable_size_of_what_does_not_live() -> None:
    with Heap("1MiB") as heap:
        slot, run, gone = heap.malloc([64, 3 * PAGE_BYTES, 64]).tolist()
        heap.free([gone])
        nothing = [0, slot + 8, slot + 16, run + 16, run + PAGE_BYTES, gone, heap.base - 64]
        nothing += [heap.base + heap.capacity, 12345, -64]
        assert heap.usable_size([slot, *nothing, run]).tolist() == [
            64,
            *[0] * len(nothing),
            3 * PAGE_BYTES,
        ]
        sizes = int64([-1])
        uk.usable_size_scalar_kernel[(1,)](heap.handle, int64([run]), sizes)
        assert sizes.tolist() == [3 * PAGE_BYTES]
        heap.check()
        heap.free([slot, run])
        assert_empty(heap)


def test_zeros() -> None:
    sizes = [1, 16, 17, 200, 5000, 40_000, 100_000, 0]
    with Heap("1MiB") as heap:
        dirty = heap.malloc([heap.capacity])
        heap.tensor(dirty[0], heap.capacity, torch.uint8).fill_(0xA5)
        heap.free(dirty)
        addrs = int64([-1] * len(sizes))
        uk.zeros_lanes_kernel[(1,)](heap.handle, int64(sizes), addrs, len(sizes), BLOCK=8)
        assert addrs[-1] == 0
        assert_blocks(heap, addrs[:-1], sizes[:-1])
        for addr, nbytes in zip(addrs[:-1], sizes[:-1], strict=True):
            assert not heap.tensor(addr, nbytes, torch.uint8).any()
        alone = int64([-1, -1])
        uk.zeros_scalar_kernel[(2,)](heap.handle, int64([3000, 70_000]), alone)
        assert not heap.tensor(alone[0], 3000, torch.uint8).any()
        assert not heap.tensor(alone[1], 70_000, torch.uint8).any()
        heap.free(torch.cat([addrs, alone]))
        assert_whole_capacity(heap)


# realloc --------------------------------------------------------------------------------------


def realloc_lanes(heap: Heap, addrs: torch.Tensor, sizes: list[int], warps: int = 1):
    moved = addrs.clone()
    n = len(sizes)
    uk.realloc_lanes_kernel[((n + 15) // 16,)](
        heap.handle, moved, int64(sizes), n, BLOCK=16, num_warps=warps
    )
    return moved


def test_realloc_keeps_the_content() -> None:
    before = [16, 100, 64, 5000, 40_000, 100_000, 200_000, 64]
    after = [64, 5000, 17, 100_000, 200_000, 100, 1000, 64]
    with Heap("4MiB") as heap:
        addrs = heap.malloc(before)
        lengths = heap.usable_size(addrs)
        write(addrs, lengths)
        moved = realloc_lanes(heap, addrs, after)
        assert_blocks(heap, moved, after)
        heap.audit()
        kept = torch.minimum(lengths, int64(after)) // 8 * 8
        assert wrong_words(moved, kept) == 0
        assert heap.stats().allocations - heap.stats().frees == len(after)
        heap.free(moved)
        assert_whole_capacity(heap)


def test_realloc_that_fits_stays() -> None:
    with Heap("1MiB") as heap:
        addrs = heap.malloc([100, 3 * PAGE_BYTES])
        moved = realloc_lanes(heap, addrs, [112, 3 * PAGE_BYTES - 5])
        assert torch.equal(moved, addrs)
        smaller = realloc_lanes(heap, addrs, [1, 1])
        assert (smaller != 0).all()
        heap.free(smaller)
        assert_empty(heap)


def test_realloc_of_null_allocates_and_to_nothing_frees() -> None:
    with Heap("1MiB") as heap:
        (live,) = heap.malloc([64]).tolist()
        moved = realloc_lanes(heap, int64([0, live, 0]), [128, 0, 0])
        assert_blocks(heap, moved[:1], [128])
        assert moved[1:].tolist() == [0, 0]
        heap.check()
        stats = heap.stats()
        assert (stats.allocations, stats.frees) == (2, 1)
        heap.free(moved)
        assert_empty(heap)


def test_realloc_of_a_wrong_address() -> None:
    with Heap("1MiB") as heap:
        (live,) = heap.malloc([64]).tolist()
        before = heap.stats()
        moved = realloc_lanes(heap, int64([live + 8, heap.base - 64]), [128, 0])
        assert moved.tolist() == [0, 0]
        with pytest.raises(InvalidFree, match="2 x invalid free"):
            heap.check()
        assert heap.stats() == before
        heap.free([live])
        assert_empty(heap)


def test_a_failed_realloc_keeps_the_old_block() -> None:
    with Heap("1MiB") as heap:
        addrs = heap.malloc([64, 100_000])
        sizes = heap.usable_size(addrs)
        write(addrs, sizes)
        assert realloc_lanes(heap, addrs, [2 * MIB, -5]).tolist() == [0, 0]
        with pytest.raises((OutOfMemory, InvalidArgument)) as caught:
            heap.check()
        assert "1 x out of memory, 1 x invalid argument" in str(caught.value)
        assert torch.equal(heap.usable_size(addrs), sizes)
        assert wrong_words(addrs, sizes) == 0
        heap.free(addrs)
        assert_empty(heap)


def test_realloc_scalar() -> None:
    with Heap("1MiB") as heap:
        addrs = heap.malloc([64, 64])
        write(addrs, int64([64, 64]))
        uk.realloc_scalar_kernel[(2,)](heap.handle, addrs, int64([5000, 100_000]))
        assert_blocks(heap, addrs, [5000, 100_000])
        assert wrong_words(addrs, int64([64, 64])) == 0
        heap.free(addrs)
        assert_whole_capacity(heap)
