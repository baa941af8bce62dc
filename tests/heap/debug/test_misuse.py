"""Wrong frees, wrong arguments, and the rest of the heap's functions on a debug heap."""

import pytest
import torch

import devalloc
from devalloc import DoubleFree, Heap, InvalidArgument, InvalidFree, OutOfMemory
from devalloc.sizes import PAGE_BYTES
from tests import user_kernels as uk
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
)
from tests.support import DEVICE, malloc_lanes

pytestmark = pytest.mark.oldest

# Double and invalid frees -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_double_free_names_the_last_owner(shape: str) -> None:
    with debug_heap() as heap:
        tags, names = owners(heap, len(SIZES))
        addrs = malloc(heap, SIZES, tags, shape)
        free(heap, addrs, shape)
        heap.check()
        free(heap, addrs, shape)
        at = addrs.tolist()
        assert_faults(heap, DoubleFree, "free", list(zip(at, at, SIZES, names, strict=True)))


def test_twice_by_one_program_and_by_two_lanes() -> None:
    with debug_heap() as heap:
        for size in (40, 5000, PAGE_BYTES):
            addrs = malloc(heap, [size], [3])
            addr = int(addrs[0])
            uk.free_twice_kernel[(1,)](heap.handle, addrs)
            assert_faults(heap, DoubleFree, "free", [(addr, addr, size, "3")])
            addr = int(malloc(heap, [size], [4])[0])
            free(heap, [addr, addr])
            assert_faults(heap, DoubleFree, "free", [(addr, addr, size, "4")])


def test_double_free_beside_live_blocks() -> None:
    """No other block is poisoned, and the block is not handed out twice."""
    with debug_heap() as heap:
        addrs = malloc(heap, [64] * 3, [1, 2, 3])
        for addr in addrs.tolist():
            heap.tensor(addr, 64, torch.uint8).fill_(0x11)
        middle = int(addrs[1])
        free(heap, [middle])
        free(heap, [middle])
        assert_faults(heap, DoubleFree, "free", [(middle, middle, 64, "2")])
        for addr in (int(addrs[0]), int(addrs[2])):
            assert (peek(addr, 64) == 0x11).all()
        heap.audit()
        free(heap, [int(addrs[0]), int(addrs[2])])


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [1, 4])
def test_many_programs_free_the_same_blocks(warps: int) -> None:
    """Of each block exactly one free succeeds, and the blocks of new owners stay unchanged."""
    count, programs = 256, 64
    with debug_heap("64MiB") as heap:
        addrs = malloc(heap, [100] * count, [9] * count)
        uk.free_shared_lanes_kernel[(programs,)](heap.handle, addrs, BLOCK=count, num_warps=warps)
        assert all((f.kind, f.size, f.tag) == (DoubleFree, 100, "9") for f in heap.faults())
        with pytest.raises(DoubleFree, match=f"{count * (programs - 1)} x double free$"):
            heap.check()
        heap.audit()


def test_invalid_frees() -> None:
    with debug_heap() as heap:
        addrs = malloc(heap, [100, 200_000], [heap.tag("whole"), 2])
        small, large = addrs.tolist()
        foreign = torch.zeros(16, dtype=torch.uint8, device=DEVICE)
        wrong = [small + 16, small + 32, small + 3, large + PAGE_BYTES, foreign.data_ptr(), 16]
        free(heap, wrong)
        faults = heap.faults()
        assert [fault.address for fault in faults] == wrong
        assert all((f.kind, f.block, f.size) == (InvalidFree, 0, 0) for f in faults)
        assert f"16 bytes inside the block of 100 bytes at {small:#x} (tag 'whole')" in (
            faults[0].message
        )
        assert f"65536 bytes inside the block of 200000 bytes at {large:#x} (tag 2)" in (
            faults[3].message
        )
        assert "not an address of this heap" in faults[4].message
        with pytest.raises(InvalidFree, match=r"6 x invalid free$"):
            heap.check()
        assert heap.usable_size(addrs).tolist() == [100, 200_000]
        free(heap, addrs)


# Arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", ["Full", 2, None, "yes"])
def test_what_debug_may_be(debug: object) -> None:
    with pytest.raises(InvalidArgument, match="debug is True, False or"):
        Heap("1MiB", debug=debug)  # type: ignore[arg-type]


@pytest.mark.parametrize("tag", [-1, 256, 1 << 16, 1.5, None])
def test_tags_that_are_none(tag: object) -> None:
    with debug_heap("1MiB") as heap, pytest.raises(InvalidArgument, match="a tag is a name"):
        heap.malloc([16], tag=tag)  # type: ignore[arg-type]


def test_tags() -> None:
    with debug_heap("1MiB") as heap:
        first, second = heap.tag("a"), heap.tag("b")
        assert first == heap.tag("a") != second
        assert min(first, second) > 255
        addrs = heap.malloc([16, 16], tag="a")
        more = torch.cat([heap.malloc([8], tag=second), heap.malloc([8], tag=200)])
        more = torch.cat([more, *(heap.malloc([8], tag=number) for number in (0, 1, 255))])
        leaked = {row.tag: row.count for row in heap.leaks().rows}
        assert leaked == {"a": 2, "b": 1, "200": 1, "": 1, "1": 1, "255": 1}, "0 is no tag"
        with pytest.raises(InvalidArgument, match="the name of a tag is text"):
            heap.tag(5)  # type: ignore[arg-type]
        heap.free(addrs)
        heap.free(more)


@pytest.mark.parametrize("name", ["7", "300", "007", ""])
def test_names_that_read_as_numbers_are_refused(name: str) -> None:
    """Or reports could not tell them from the user's own numbers, or from no tag."""
    with debug_heap("1MiB") as heap:
        addrs = heap.malloc([16, 16], tag=7)
        with pytest.raises(InvalidArgument, match=r"name of a tag .* pass a number as an int"):
            heap.tag(name)
        with pytest.raises(InvalidArgument, match=r"name of a tag"):
            heap.malloc([16], tag=name)
        assert [(row.tag, row.count) for row in heap.leaks().rows] == [("7", 2)]
        assert len(list(heap.leaks().blocks("7"))) == 2
        heap.free(addrs)


def test_an_ordinary_heap_ignores_tags() -> None:
    with Heap("1MiB") as heap:
        addrs = heap.malloc([100], tag="a name")
        more = malloc(heap, [100, 100], [heap.tag("a name"), 7])
        assert heap.faults() == []
        with pytest.raises(InvalidArgument, match="only a debug heap"):
            heap.leaks()
        heap.free(addrs)
        heap.free(more)


def test_sizes_that_cannot_be() -> None:
    with debug_heap("1MiB") as heap:
        addrs = malloc_lanes(heap, [0, -5, 1 << 62, (1 << 63) - 1, heap.capacity])
        assert addrs.tolist() == [0] * 5
        with pytest.raises(devalloc.DevallocError, match="3 x out of memory, 1 x invalid argument"):
            heap.check()


def test_out_of_memory_says_that_guards_count() -> None:
    with debug_heap("1MiB") as heap:
        assert heap.malloc([heap.capacity - 31]).tolist() == [0]
        with pytest.raises(OutOfMemory, match=r"with the guards of a debug heap"):
            heap.check()
        whole = heap.malloc([heap.capacity - 32])
        assert whole.tolist() == [heap.base]
        heap.free(whole)


# The rest of the heap ---------------------------------------------------------------------------


@pytest.mark.parametrize("debug", MODES)
def test_reset_forgets_everything(debug: bool | str) -> None:
    with debug_heap("1MiB", debug) as heap:
        addrs = heap.malloc([100, 1000, 70_000], tag=5)
        heap.tensor(addrs[0], 100, torch.uint8).fill_(1)
        heap.free(addrs[1:2])
        heap.free(addrs[1:2])
        heap.reset()
        assert heap.faults() == []
        assert heap.leaks().count == 0
        heap.audit()
        addrs = heap.malloc([5000] * 20)
        heap.audit()
        heap.free(addrs)


def test_stats_trim_tensor_and_snapshot() -> None:
    with debug_heap("1MiB") as heap:
        addrs = heap.malloc([100, 70_000])
        stats = heap.stats()
        assert (stats.allocations, stats.frees) == (2, 0)
        assert stats.used == 160 + PAGE_BYTES % 160 + 2 * PAGE_BYTES
        assert heap.snapshot().run_pages.max() == 2
        assert heap.tensor(addrs[0], 25, torch.float32).shape == (25,)
        with pytest.raises(InvalidArgument, match=r"the block at .* has 100"):
            heap.tensor(addrs[0], 26, torch.float32)
        heap.trim()
        heap.free(addrs)


def test_two_heaps_of_both_kinds() -> None:
    """One kernel, launched with either, does the right thing for each."""
    with debug_heap("1MiB") as careful, Heap("1MiB") as quick:
        for _ in range(2):
            a, b = malloc_lanes(careful, [100] * 4), malloc_lanes(quick, [100] * 4)
            assert careful.usable_size(a).tolist() == [100] * 4
            assert quick.usable_size(b).tolist() == [112] * 4
            careful.free(a)
            quick.free(b)


def test_the_audit_compares_table_and_heap() -> None:
    heap = Heap("1MiB", debug=True)
    addrs = heap.malloc([100, 100])
    heap.audit()
    uk.free_lanes_kernel[(1,)](heap._handle, addrs[:1], 1, BLOCK=16)  # by a handle not its own
    with pytest.raises(
        devalloc.CorruptionError, match="D1: the table has 2 live blocks, the heap 1"
    ):
        heap.audit()
    heap.reset()
    heap.close()
