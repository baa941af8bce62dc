"""Every planted overflow, underflow and use after free is found, and named with address, size and
tag; what is right is never reported."""

import pytest
import torch

from devalloc import Overflow, UseAfterFree
from devalloc.kernels.debug.block_table import HEAD_WORDS
from devalloc.sizes import PAGE_BYTES
from tests import user_kernels as uk
from tests.conftest import ON_GPU
from tests.heap.debug import kernels as dk
from tests.heap.debug.support import (
    MODES,
    SHAPES,
    SIZES,
    assert_faults,
    debug_heap,
    free,
    malloc,
    owners,
    peek,
    poke,
    realloc,
)
from tests.support import (
    DEVICE,
    EDGE_SIZES,
    assert_blocks,
    int64,
    programs,
    write,
    wrong_words,
)

# From the first byte behind a block, or (negative) from the block itself; and how many bytes.
OVERFLOWS = {"a byte": (0, 1), "a word": (0, 8), "a byte further on": (3, 1)}
UNDERFLOWS = {"a byte": (-1, 1), "a word": (-8, 8), "the whole front": (-16, 16)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("offset", "nbytes"), OVERFLOWS.values(), ids=OVERFLOWS)
def test_overflow_is_found_by_free(offset: int, nbytes: int, shape: str) -> None:
    with debug_heap() as heap:
        tags, names = owners(heap, len(SIZES))
        addrs = malloc(heap, SIZES, tags, shape)
        ends = addrs + int64(SIZES)
        poke(ends + offset, nbytes=nbytes)
        free(heap, addrs, shape)
        at = (ends + offset).tolist()
        wanted = list(zip(at, addrs.tolist(), SIZES, names, strict=True))
        assert_faults(heap, Overflow, "free", wanted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("offset", "nbytes"), UNDERFLOWS.values(), ids=UNDERFLOWS)
def test_underflow_is_found_by_free(offset: int, nbytes: int, shape: str) -> None:
    with debug_heap() as heap:
        tags, names = owners(heap, len(SIZES))
        addrs = malloc(heap, SIZES, tags, shape)
        poke(addrs + offset, nbytes=nbytes)
        free(heap, addrs, shape)
        at = (addrs + offset).tolist()
        wanted = list(zip(at, addrs.tolist(), SIZES, names, strict=True))
        assert_faults(heap, Overflow, "free", wanted)


@pytest.mark.parametrize("size", [16, 100, 1024, 20_000])
def test_both_neighbours_are_named(size: int) -> None:
    """Between two blocks: the one that was freed is the one concerned, the other is mentioned."""
    with debug_heap() as heap:
        low, high = sorted(malloc(heap, [size, size], [7, 7]).tolist())
        poke([high - 2])
        free(heap, [high])
        (fault,) = heap.faults()
        assert (fault.kind, fault.address, fault.block) == (Overflow, high - 2, high)
        assert "2 bytes before the start" in fault.message
        near = high - 2 - (low + size) <= 64
        assert (f"behind the end of the block of {size} bytes at {low:#x}" in fault.message) == near
        heap.clear_errors()
        free(heap, [low])


@pytest.mark.parametrize("size", [32, 48, 1024])
def test_the_block_before_is_not_blamed(size: int) -> None:
    """Freed first, it does not look at what guards the front of the next."""
    with debug_heap("64KiB") as heap:
        low, high = sorted(malloc(heap, [size, size], [7, 8]).tolist())
        poke([high - 16])
        free(heap, [low])
        heap.check()
        free(heap, [high])
        assert_faults(heap, Overflow, "free", [(high - 16, high, size, "8")])


def test_both_ends_of_one_block() -> None:
    with debug_heap() as heap:
        addr = int(malloc(heap, [100], [9])[0])
        poke([addr - 1, addr + 100])
        free(heap, [addr])
        assert_faults(
            heap, Overflow, "free", [(addr - 1, addr, 100, "9"), (addr + 100, addr, 100, "9")]
        )


@pytest.mark.parametrize("debug", MODES)
def test_audit_finds_overflows_of_live_blocks(debug: bool | str) -> None:
    with debug_heap(debug=debug) as heap:
        for size in (64, 1000, PAGE_BYTES):
            addr = int(malloc(heap, [size], [heap.tag("the writer")])[0])
            heap.audit()
            poke([addr + size + 3])
            for _ in range(2):  # an audit changes nothing
                with pytest.raises(Overflow) as raised:
                    heap.audit()
                text = str(raised.value)
                assert f"{addr + size + 3:#x}" in text
                assert f"3 bytes behind the end of the block of {size} bytes at {addr:#x}" in text
                assert "tag 'the writer'" in text
                assert text.endswith("Found by this audit: 1 x overflow")
                heap.check()
            free(heap, [addr])
            assert_faults(heap, Overflow, "free", [(addr + size + 3, addr, size, "the writer")])
            heap.audit()


def test_far_behind_the_end_with_everything_watched() -> None:
    with debug_heap(debug="full") as heap:
        addr = int(malloc(heap, [33_000], [3])[0])
        poke([addr + 60_000])
        free(heap, [addr])
        assert_faults(heap, Overflow, "free", [(addr + 60_000, addr, 33_000, "3")])


def test_near_zones_end_before_the_next_front() -> None:
    """They have 16 to 32 bytes, and 32 behind a multiple of 16 if there is room for them."""
    sizes = torch.arange(1, 3 * PAGE_BYTES, device=DEVICE)
    ends, padded = torch.empty_like(sizes), torch.empty_like(sizes)
    n = sizes.numel()
    dk.near_zone_kernel[programs(n, 1024)](sizes, ends, padded, n, BLOCK=1024)
    zones, front = ends - sizes, (padded + 15) // 16 * 16 - 16
    assert ((ends % 16 == 0) & (zones >= 16) & (zones <= 32) & (ends <= front)).all()
    assert (sizes + 32 > front)[zones == 16].all()


# Use after free ---------------------------------------------------------------------------------


def offset_in(size: int, debug: bool | str) -> int:
    """Where to write in a freed block: the last byte that is watched, or one in the middle."""
    return size // 2 if debug == "full" else min(size, HEAD_WORDS.value * 8) - 1


@pytest.mark.parametrize("debug", MODES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 16, 33, 100, 1000, 1024, 20_000, 32_768, 65_536, 200_000])
def test_use_after_free_is_found(size: int, shape: str, debug: bool | str) -> None:
    """By an audit, and by the malloc that gets the block: the heap has no room for another."""
    offset = offset_in(size, debug)
    pages = 1 if size <= 16_384 else size // PAGE_BYTES + 1
    with debug_heap(f"{pages * 64}KiB", debug) as heap:
        addr = int(malloc(heap, [size], [heap.tag("gone")], shape)[0])
        free(heap, [addr], shape)
        heap.trim()
        heap.audit()
        poke([addr + offset])
        with pytest.raises(UseAfterFree) as raised:
            heap.audit()
        text = str(raised.value)
        assert f"{addr + offset:#x}" in text
        assert f"block of {size} bytes at {addr:#x} (tag 'gone'" in text
        again = malloc(heap, [size], [8], shape)
        assert again.tolist() == [addr]
        assert_faults(heap, UseAfterFree, "malloc", [(addr + offset, addr, size, "gone")])
        heap.audit()
        free(heap, again, shape)


@pytest.mark.parametrize("debug", MODES)
@pytest.mark.parametrize("offset", [HEAD_WORDS.value * 8, 999])
def test_reach(offset: int, debug: bool | str) -> None:
    """What is behind the head of a freed block is watched if everything is, and only then."""
    with debug_heap(debug=debug) as heap:
        addr = int(malloc(heap, [1000], [1])[0])
        free(heap, [addr])
        poke([addr + offset])
        if debug == "full":
            with pytest.raises(UseAfterFree, match=f"{addr + offset:#x}"):
                heap.audit()
        else:
            heap.audit()
        heap.reset()


def test_behind_the_end_of_a_freed_block() -> None:
    with debug_heap("64KiB") as heap:
        addrs = malloc(heap, [100], [4])
        addr = int(addrs[0])
        free(heap, addrs)
        heap.trim()
        poke([addr + 101])
        with pytest.raises(UseAfterFree, match=f"{addr + 101:#x}"):
            heap.audit()
        assert malloc(heap, [110], [5]).tolist() == [addr]
        assert_faults(heap, UseAfterFree, "malloc", [(addr + 101, addr, 100, "4")])
        free(heap, addrs)


def test_behind_the_end_of_a_freed_run() -> None:
    """The memory may belong to another block by now, so no error names it."""
    with debug_heap("256KiB") as heap:
        slot = int(malloc(heap, [1000], [4])[0])
        run = int(malloc(heap, [150_000], [5])[0])
        free(heap, [slot, run])
        heap.trim()
        poke([slot + 10, run + 150_003])
        addrs = malloc(heap, [1000, 40_000, 40_000, 40_000], [6] * 4)
        assert addrs[:2].tolist() == [slot, run]
        assert_faults(heap, UseAfterFree, "malloc", [(slot + 10, slot, 1000, "4")])
        free(heap, addrs)


def test_many_faults() -> None:
    """All are counted, and the first 32 written down."""
    with debug_heap() as heap:
        addrs = malloc(heap, [100] * 64, [5] * 64)
        poke(addrs + 100)
        free(heap, addrs)
        faults = heap.faults()
        assert len(faults) == 32
        assert all(fault.address == fault.block + 100 for fault in faults)
        with pytest.raises(Overflow, match=r"64 x overflow$"):
            heap.check()


# realloc and zeros ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_zeros_are_guarded(shape: str) -> None:
    with debug_heap() as heap:
        tags, names = owners(heap, len(SIZES))
        addrs = malloc(heap, SIZES, tags, shape, zero=True)
        for addr, size in zip(addrs.tolist(), SIZES, strict=True):
            assert (peek(addr, size) == 0).all()
        heap.audit()
        ends = addrs + int64(SIZES)
        poke(ends, value=0)  # a zero too many
        free(heap, addrs, shape)
        at = ends.tolist()
        wanted = list(zip(at, addrs.tolist(), SIZES, names, strict=True))
        assert_faults(heap, Overflow, "free", wanted)


def test_zeros_again_in_the_same_place() -> None:
    with debug_heap("64KiB") as heap:
        for size in (17, 17, 30, 30):
            addrs = malloc(heap, [size], zero=True)
            heap.audit()
            free(heap, addrs)
            heap.check()
            heap.trim()


@pytest.mark.parametrize("new", [1, 60, 99, 101, 5000, 100_000])
def test_realloc_keeps_content_and_owner(new: int) -> None:
    with debug_heap() as heap:
        addrs = malloc(heap, [100], [heap.tag("growing")])
        poke(addrs + torch.arange(100, device=DEVICE), value=5)
        old = int(addrs[0])
        moved = realloc(heap, addrs, [new])
        addr = int(moved[0])
        assert (addr == old) == (new <= 100)
        assert heap.usable_size([addr]).tolist() == [new]
        assert (peek(addr, min(100, new)) == 5).all()
        heap.audit()
        poke([addr + new])
        free(heap, [addr])
        assert_faults(heap, Overflow, "free", [(addr + new, addr, new, "growing")])


@pytest.mark.oldest
def test_realloc_finds_what_was_written_before() -> None:
    """A block that shrinks or moves is looked at like one that is freed."""
    with debug_heap() as heap:
        for new, found_by in ((50, "realloc"), (500, "free")):
            addrs = malloc(heap, [100], [6])
            addr = int(addrs[0])
            poke([addr + 100])
            after = realloc(heap, addrs, [new])
            assert_faults(heap, Overflow, found_by, [(addr + 100, addr, 100, "6")])
            free(heap, after)


def test_realloc_with_a_tag() -> None:
    with debug_heap() as heap:
        addrs = malloc(heap, [100, 100], [1, 2])
        sizes = int64([80, 900])
        dk.retag_kernel[(1,)](heap.handle, addrs, sizes, 77, BLOCK=2)
        (row,) = heap.leaks().rows
        assert (row.tag, row.count, row.bytes) == ("77", 2, 980)
        free(heap, addrs)


# What is right is not reported ------------------------------------------------------------------


@pytest.mark.parametrize("debug", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_may_be_used(shape: str, debug: bool | str) -> None:
    """Blocks are disjoint and aligned as guaranteed, and filled to the last byte nothing is
    wrong."""
    sizes = [size for size in EDGE_SIZES if size <= 10_000] if ON_GPU else EDGE_SIZES[::7]
    with debug_heap("64MiB" if ON_GPU else "8MiB", debug) as heap:
        addrs = malloc(heap, sizes, shape=shape)
        assert_blocks(heap, addrs, sizes)
        assert heap.usable_size(addrs).tolist() == sizes
        for addr, size in zip(addrs.tolist(), sizes, strict=True):
            heap.tensor(addr, size, torch.uint8).fill_(0x55)
        heap.audit()
        free(heap, addrs, shape)


@pytest.mark.parametrize("debug", MODES)
def test_pages_that_are_cut_anew(debug: bool | str) -> None:
    """What old blocks left behind is not mistaken for something written to new ones: all classes
    use the same few pages, one after the other, so each finds the pattern of the one before."""
    with debug_heap("256KiB", debug) as heap:
        for turn in range(2):
            for size in (16, 1000, 20_000, 64, 150_000, 5000, 250):
                count = min(64, 3 * PAGE_BYTES // (2 * size + 64)) // 2 * 2
                if size > 32_768:
                    addrs = malloc(heap, [size])
                else:
                    # (The second half comes to pages that are marked already.)
                    halves = [malloc(heap, [size] * (count // 2)) for _ in range(2)]
                    addrs = torch.cat(halves)
                count = len(addrs)
                heap.tensor(int(addrs[-1]), size, torch.uint8).fill_(turn + 1)
                write(addrs, int64([size] * count))
                assert wrong_words(addrs, int64([size] * count)) == 0
                free(heap, addrs[torch.randperm(count)])
                heap.check()
                heap.trim()
                heap.audit()


@pytest.mark.parametrize("debug", MODES)
@pytest.mark.parametrize("warps", [1, 4] if ON_GPU else [1])
def test_churn(warps: int, debug: bool | str) -> None:
    """Many programs allocate, write, verify and free blocks of mixed sizes: nothing is reported."""
    lanes, rounds = (8192, 20) if ON_GPU else (16, 3)
    block = 32 * warps if ON_GPU else 16
    with debug_heap("256MiB" if ON_GPU else "4MiB", debug) as heap:
        wrong, nulls = int64([0] * lanes), int64([0] * lanes)
        for seed in range(3 if ON_GPU else 1):
            uk.churn_lanes_kernel[(lanes // block,)](
                heap.handle, wrong, nulls, rounds, 16, 6000, seed, BLOCK=block, STEP=32,
                num_warps=warps,
            )  # fmt: skip
            assert (int(wrong.sum()), int(nulls.sum())) == (0, 0)
            heap.check()
            heap.audit()


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [1, 4, 8])
def test_blocks_change_hands(warps: int) -> None:
    """Blocks are handed from program to program within a launch and freed by another."""
    lanes, block, boxes = 16384, 32 * warps, 4096
    mailboxes, wrong = int64([0] * boxes), int64([0] * lanes)
    with debug_heap("1GiB") as heap:
        uk.exchange_kernel[(lanes // block,)](
            heap.handle, mailboxes, wrong, 20, boxes, 5, BLOCK=block, STEP=32, num_warps=warps
        )
        assert int(wrong.sum()) == 0
        heap.check()
        heap.audit()
        heap.free(mailboxes)


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [1, 4])
def test_one_culprit_among_many(warps: int) -> None:
    """A hundred thousand blocks, each with a tag; three of them overflow."""
    n = 100_000
    with debug_heap("1GiB") as heap:
        tags = [i % 200 + 1 for i in range(n)]
        addrs = malloc(heap, [200] * n, tags, warps=warps)
        bad = torch.tensor([17, 40_000, 99_999], device=DEVICE)
        poke(addrs[bad] + 203)
        heap.free(addrs)
        wanted = [(int(addrs[i]) + 203, int(addrs[i]), 200, str(tags[i])) for i in bad.tolist()]
        assert_faults(heap, Overflow, "free", wanted)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    with debug_heap("64MiB") as heap:
        sizes, addrs, kept = int64([100] * 256), int64([0] * 256), int64([0] * 256)

        def once() -> None:
            uk.malloc_lanes_kernel[(2,)](heap.handle, sizes, addrs, 256, BLOCK=128)
            uk.free_lanes_kernel[(2,)](heap.handle, kept, 256, BLOCK=128)
            kept.copy_(addrs)

        once()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        for _ in range(10):
            graph.replay()
        heap.check()
        heap.audit()
        poke(kept[5:6] + 100)
        graph.replay()
        at = int(heap.faults()[0].address)
        assert_faults(heap, Overflow, "free", [(at, at - 100, 100, "")])
        heap.free(kept)
