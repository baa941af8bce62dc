"""Concurrency on a GPU: what the interpreter, which runs one program after another, cannot show.

Every block is filled with a pattern of its owner over all that is usable, and verified before it
is freed, so memory given to two owners at once is seen; every test ends with the audit and with
the whole capacity in one piece. Seeds are fixed, the interleaving is the GPU's.
"""

import pytest
import torch

from devalloc import DoubleFree, Heap
from devalloc.sizes import PAGE_BYTES
from tests import user_kernels as uk
from tests.support import MIB, assert_blocks, assert_whole_capacity, free_lanes, malloc_lanes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

WARPS = [1, 4, 8]
# Lanes per warp times warps: every thread has a lane; and half as many, so that lanes have copies.
BLOCKS = [(32, 1), (16, 1), (128, 4), (64, 4), (256, 8), (32, 8)]


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int64, device="cuda")


def total(values: torch.Tensor) -> int:
    return int(values.sum())


def finish(heap: Heap) -> None:
    torch.cuda.synchronize()
    assert_whole_capacity(heap)


@pytest.mark.parametrize(("block", "warps"), BLOCKS)
@pytest.mark.parametrize(("smallest", "largest"), [(16, 64), (16, 8192), (1, 40_000)])
def test_churn(block: int, warps: int, smallest: int, largest: int) -> None:
    lanes = 16384
    wrong, nulls = zeros(lanes), zeros(lanes)
    with Heap("2GiB") as heap:
        uk.churn_lanes_kernel[(lanes // block,)](
            heap.handle, wrong, nulls, 12, smallest, largest, 1, BLOCK=block, STEP=32,
            num_warps=warps,
        )  # fmt: skip
        torch.cuda.synchronize()
        assert total(wrong) == 0, "blocks were changed while they were owned"
        assert total(nulls) == 0, "there was memory for every request"
        heap.audit()
        stats = heap.stats()
        assert stats.allocations == stats.frees == lanes * 12
        finish(heap)


@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("largest", [64, 8192, 300_000])
def test_churn_of_scalars(warps: int, largest: int) -> None:
    programs = 4096
    wrong, nulls = zeros(programs), zeros(programs)
    with Heap("2GiB") as heap:
        uk.churn_scalar_kernel[(programs,)](
            heap.handle, wrong, nulls, 10, 16, largest, 2, STEP=128, num_warps=warps
        )
        torch.cuda.synchronize()
        assert (total(wrong), total(nulls)) == (0, 0)
        heap.audit()
        finish(heap)


@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("capacity", ["64KiB", "1MiB", "9MiB"])
def test_churn_in_a_nearly_full_heap(warps: int, capacity: str) -> None:
    """Nulls are right here, but every null is recorded, and no program hangs or gets less."""
    lanes, rounds = 2048, 8
    block = 32 * warps
    wrong, nulls = zeros(lanes), zeros(lanes)
    with Heap(capacity) as heap:
        uk.churn_lanes_kernel[(lanes // block,)](
            heap.handle, wrong, nulls, rounds, 16, 6000, 3, BLOCK=block, STEP=32, num_warps=warps
        )
        torch.cuda.synchronize()
        assert total(wrong) == 0
        heap.audit()
        stats = heap.stats()
        assert stats.failures == total(nulls)
        assert stats.allocations == stats.frees == lanes * rounds - total(nulls)
        heap.clear_errors()
        finish(heap)


@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("size", [16, 64, 1000, 4096, 32768, PAGE_BYTES, 3 * PAGE_BYTES])
def test_all_programs_fill_the_heap(size: int, warps: int) -> None:
    """More is asked for than there is, by all programs at once: not one slot stays unused."""
    block = 32 * warps
    rounded = {1000: 1024}.get(size, size)
    with Heap("64MiB") as heap:
        pages = heap.capacity // PAGE_BYTES
        slots = pages * PAGE_BYTES // rounded
        # (Programs that take runs at one time may leave a gap of a page for each chunk.)
        least = slots if rounded <= PAGE_BYTES else pages // 64 * (64 // 3)
        n = slots + slots // 10 + 1
        for _ in range(3):
            addrs = malloc_lanes(heap, torch.full((n,), size), block, warps)
            got = addrs[addrs != 0]
            assert least <= len(got) <= slots, "null although there was memory, or too many"
            ordered = torch.sort(got).values
            assert int((ordered[1:] - ordered[:-1]).min()) >= rounded
            assert heap.stats().failures == n - len(got)
            heap.audit()
            free_lanes(heap, got[torch.randperm(len(got), device="cuda")], block, warps)
            torch.cuda.synchronize()
            finish_round(heap)


def finish_round(heap: Heap) -> None:
    heap.clear_errors()
    assert_whole_capacity(heap)
    heap.reset()


@pytest.mark.parametrize("warps", WARPS)
def test_another_kernel_verifies_and_frees(warps: int) -> None:
    lanes, block = 65536, 32 * warps
    with Heap("2GiB") as heap:
        for seed in range(4):
            addrs, usables, wrong = zeros(lanes), zeros(lanes), zeros(lanes)
            grid = (lanes // block,)
            uk.produce_kernel[grid](
                heap.handle, addrs, usables, seed, 16, 20_000, BLOCK=block, STEP=32,
                num_warps=warps,
            )  # fmt: skip
            heap.audit()
            assert_blocks(heap, addrs, usables)
            order = torch.randperm(lanes, device="cuda")
            uk.consume_kernel[grid](
                heap.handle, addrs, usables, wrong, order, BLOCK=block, STEP=32, num_warps=warps
            )
            assert total(wrong) == 0
            finish(heap)


@pytest.mark.parametrize("warps", WARPS)
def test_blocks_change_hands_within_a_launch(warps: int) -> None:
    """The new owner sees what the old one wrote, and frees what it did not allocate."""
    lanes, block, boxes = 16384, 32 * warps, 4096
    mailboxes, wrong = zeros(boxes), zeros(lanes)
    with Heap("1GiB") as heap:
        uk.exchange_kernel[(lanes // block,)](
            heap.handle, mailboxes, wrong, 20, boxes, 5, BLOCK=block, STEP=32, num_warps=warps
        )
        torch.cuda.synchronize()
        assert total(wrong) == 0
        heap.audit()
        stats = heap.stats()
        assert stats.allocations - stats.frees == int((mailboxes != 0).sum())
        heap.free(mailboxes)
        finish(heap)


@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("size", [16, 1000, PAGE_BYTES, 2 * PAGE_BYTES])
def test_double_frees_are_counted_exactly(size: int, warps: int) -> None:
    """Many programs free the same addresses at once: of each, one succeeds."""
    count, programs = 256, 64
    with Heap("256MiB") as heap:
        kept = heap.malloc([size] * count)
        sizes = heap.usable_size(kept)
        uk.write_kernel[(count // 64,)](kept, sizes, count, 1, BLOCK=64, STEP=32)
        for lanes in (False, True):
            addrs = heap.malloc([size] * count)
            if lanes:
                uk.free_shared_lanes_kernel[(programs,)](
                    heap.handle, addrs, BLOCK=count, num_warps=warps
                )
            else:
                uk.free_shared_kernel[(programs,)](heap.handle, addrs, count, num_warps=warps)
            expected = count * (programs - 1)
            with pytest.raises(
                DoubleFree, match=f"since the last check: {expected} x double free$"
            ):
                heap.check()
            heap.audit()
            stats = heap.stats()
            assert stats.allocations - stats.frees == count
        wrong = zeros(count)
        uk.verify_kernel[(count // 64,)](kept, sizes, wrong, count, 1, BLOCK=64, STEP=32)
        assert total(wrong) == 0
        heap.free(kept)
        finish(heap)


@pytest.mark.parametrize("warps", WARPS)
def test_stale_frees_beside_churn(warps: int) -> None:
    """Addresses inside live pages, misaligned and foreign, are freed while others work: only the
    record changes. No block begins there, so the outcome is known."""
    lanes, block = 8192, 32 * warps
    wrong, nulls = zeros(lanes), zeros(lanes)
    bad_stream = torch.cuda.Stream()
    with Heap("512MiB") as heap:
        misaligned = heap.base + torch.arange(100_000, device="cuda") * 16 + 8
        torch.cuda.synchronize()
        uk.churn_lanes_kernel[(lanes // block,)](
            heap.handle, wrong, nulls, 12, 16, 4000, 7, BLOCK=block, STEP=32, num_warps=warps
        )
        with torch.cuda.stream(bad_stream):
            heap.free(misaligned)
        torch.cuda.synchronize()
        assert (total(wrong), total(nulls)) == (0, 0)
        with pytest.raises(Exception, match=r"100000 x invalid free$"):
            heap.check()
        finish(heap)


@pytest.mark.parametrize("warps", WARPS)
def test_several_streams(warps: int) -> None:
    lanes, block, streams = 8192, 32 * warps, 4
    wrong = [zeros(lanes) for _ in range(streams)]
    nulls = [zeros(lanes) for _ in range(streams)]
    with Heap("2GiB") as heap:
        handle = heap.handle
        torch.cuda.synchronize()
        for repeat in range(3):
            for index in range(streams):
                with torch.cuda.stream(torch.cuda.Stream()):
                    uk.churn_lanes_kernel[(lanes // block,)](
                        handle, wrong[index], nulls[index], 8, 16, 9000, repeat * 16 + index,
                        BLOCK=block, STEP=32, num_warps=warps,
                    )  # fmt: skip
            torch.cuda.synchronize()
            assert sum(map(total, wrong)) == 0
            assert sum(map(total, nulls)) == 0
            heap.audit()
        finish(heap)


@pytest.mark.parametrize("warps", WARPS)
def test_many_rounds_with_survivors(warps: int) -> None:
    """Half of the blocks stay live in every round: the heap fragments, and nothing is mixed up."""
    lanes, block = 20_000, 32 * warps
    generator = torch.Generator().manual_seed(11)
    with Heap("512MiB") as heap:
        live, sizes = zeros(lanes), zeros(lanes)
        for _ in range(10):
            goes = (torch.rand(lanes, generator=generator) < 0.5).cuda() & (live != 0)
            free_lanes(heap, torch.where(goes, live, 0), block, warps)
            live = torch.where(goes, 0, live)
            draws = torch.rand(lanes, generator=generator).pow(4)
            wanted = torch.where(live == 0, (draws * 60_000).long().cuda() + 1, 0)
            fresh = malloc_lanes(heap, wanted, block, warps)
            assert int(((fresh == 0) & (wanted > 0)).sum()) == 0
            sizes = torch.where(fresh != 0, wanted, sizes)
            live = torch.where(fresh != 0, fresh, live)
            assert_blocks(heap, live, sizes)
            heap.audit()
        free_lanes(heap, live, block, warps)
        finish(heap)


@pytest.mark.parametrize("warps", WARPS)
def test_in_a_cuda_graph(warps: int) -> None:
    """A captured malloc and free replays: addresses are chosen again in every replay."""
    n, block = 4096, 32 * warps
    sizes = torch.randint(1, 5000, (n,), device="cuda")
    addrs = zeros(n)
    grid = (n // block,)
    with Heap("256MiB") as heap:
        handle = heap.handle

        def once() -> None:
            uk.free_lanes_kernel[grid](handle, addrs, n, BLOCK=block, num_warps=warps)
            uk.malloc_lanes_kernel[grid](handle, sizes, addrs, n, BLOCK=block, num_warps=warps)

        once()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        heap.audit()
        assert_blocks(heap, addrs, sizes)
        assert heap.stats().allocations == 21 * n
        heap.free(addrs)
        finish(heap)


def test_a_large_heap() -> None:
    """More than 4 GiB: offsets do not fit 32 bits."""
    free, _ = torch.cuda.mem_get_info()
    if free < 20 << 30:
        pytest.skip("needs 20 GiB of free device memory")
    with Heap("16GiB") as heap:
        addrs = heap.malloc([512 * MIB] * 31)
        assert_blocks(heap, addrs, [512 * MIB] * 31)
        small = malloc_lanes(heap, torch.full((100_000,), 4096), 128, 4)
        assert_blocks(heap, small, [4096] * 100_000)
        for addr in (addrs.max(), small.max()):
            view = heap.tensor(addr, 1024, torch.float32)
            view.fill_(1.0)
            assert float(view.sum()) == 1024.0
        heap.free(addrs)
        free_lanes(heap, small)
        finish(heap)
