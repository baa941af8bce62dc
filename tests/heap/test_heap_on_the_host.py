"""What the host does with a heap: tensors of requests, views of memory, and what it holds."""

import gc
from collections.abc import Sequence

import pytest
import torch

from devalloc import Heap, InvalidArgument, InvalidFree, OutOfMemory
from devalloc.heap.debug_table import GUARD_BYTES
from devalloc.heap.state import FREE, RUN, SLAB, Geometry
from devalloc.sizes import CLASS_SIZES, CLASS_SLOTS, PAGE_BYTES
from tests.support import (
    DEVICE,
    MIB,
    assert_blocks,
    assert_empty,
    assert_whole_capacity,
    int64,
)

pytestmark = pytest.mark.oldest


def test_malloc_and_free_of_tensors() -> None:
    with Heap("4MiB") as heap:
        sizes = int64([[16, 100, 1000], [5000, 50_000, 500_000]])
        addrs = heap.malloc(sizes)
        assert addrs.shape == sizes.shape
        assert addrs.dtype == torch.int64
        assert_blocks(heap, addrs.flatten(), sizes.flatten())
        heap.free(addrs.t())  # not contiguous
        assert_empty(heap)
        assert heap.malloc([]).shape == (0,)
        heap.free([])
        heap.free([0, 0])
        assert heap.malloc(int64([0] * 10)[::2]).tolist() == [0] * 5
        assert_whole_capacity(heap)


def test_tensor() -> None:
    with Heap("1MiB") as heap:
        addr = heap.malloc([4000])[0]
        view = heap.tensor(addr, (10, 100), torch.float32)
        assert view.shape == (10, 100)
        assert view.dtype == torch.float32
        assert view.device == heap.device
        assert view.data_ptr() == int(addr)
        view.fill_(2.5)
        assert (heap.tensor(int(addr), 1000, torch.float32) == 2.5).all()
        assert heap.tensor(addr, (), torch.int64).shape == ()
        assert heap.tensor(addr, (0, 3), torch.int64).shape == (0, 3)
        heap.free(addr.reshape(1))


def test_one_block() -> None:
    """A number is one block, and an address is a number or a tensor without dimensions."""
    with Heap("1MiB") as heap:
        addr = heap.malloc(40)
        assert (addr.shape, addr.dtype) == ((), torch.int64)
        assert_blocks(heap, addr.reshape(1), [40])
        assert heap.tensor(addr, 10, torch.int32).data_ptr() == int(addr)
        assert int(heap.usable_size(addr)) == int(heap.usable_size(int(addr))) == 48
        heap.free(addr)
        heap.free(int(heap.malloc(40)))
        assert_empty(heap)


def test_an_empty_tensor_needs_no_block() -> None:
    with Heap("1MiB") as heap:
        nothing = heap.malloc(0)
        for addr in (nothing, 0, 12345):
            view = heap.tensor(addr, (2, 0, 3), torch.float16)
            assert (view.shape, view.dtype) == ((2, 0, 3), torch.float16)
            assert view.device == heap.device
        assert_empty(heap)
    with pytest.raises(InvalidArgument, match="closed"):
        heap.tensor(0, 0, torch.int8)


def test_statistics_to_be_read() -> None:
    with Heap("4MiB") as heap:
        assert str(heap.stats()).splitlines()[1].startswith("0 blocks live (0 allocated, 0 freed)")
        small = heap.malloc([64] * 1200)
        heap.free(heap.malloc([1000] * 3))
        heap.malloc([300, 70_000, 8 * MIB])
        stats = heap.stats()
        lines = str(stats).splitlines()
        assert "of 4 MiB used (5.0%), peak " in lines[0]
        assert lines[1] == "1,202 blocks live (1,205 allocated, 3 freed); 1 requests failed"
        assert [line.strip() for line in lines[2:]] == [
            "1,200 x 64 B", "1 x 320 B", "1 larger than 32 KiB",
        ]  # fmt: skip
        heap.malloc([100 * n for n in range(1, 20)])
        lines = str(heap.stats()).splitlines()
        assert len(lines) < 12
        assert sum(int(line.split()[0].replace(",", "")) for line in lines[2:]) == 1202 + 19
        heap.free(small)
        heap.reset()


def test_tensor_of_what_is_not_there() -> None:
    with Heap("1MiB") as heap:
        (addr,) = heap.malloc([64]).tolist()
        with pytest.raises(InvalidArgument, match=r"has 68 bytes.*has 64"):
            heap.tensor(addr, 17, torch.float32)
        with pytest.raises(InvalidArgument):
            heap.tensor(addr, -1, torch.float32)
        for wrong in (addr + 16, 0, heap.base - 64, 12345):
            with pytest.raises(InvalidArgument, match="nothing is allocated"):
                heap.tensor(wrong, 1, torch.uint8)
        heap.free([addr])
        with pytest.raises(InvalidArgument, match="nothing is allocated"):
            heap.tensor(addr, 1, torch.uint8)
        assert_empty(heap)


def test_a_tensor_outlives_the_heap() -> None:
    heap = Heap("1MiB")
    view = heap.tensor(heap.malloc([4096])[0], 1024, torch.float32)
    view.fill_(1.5)
    heap.close()
    del heap
    gc.collect()
    assert float(view.sum()) == 1536.0


def test_two_heaps() -> None:
    with Heap("1MiB") as one, Heap("2MiB") as two:
        first, second = one.malloc([64] * 100), two.malloc([64] * 100)
        assert_blocks(one, first, [64] * 100)
        assert_blocks(two, second, [64] * 100)
        two.free(first)
        with pytest.raises(InvalidFree, match=r"not an address of this heap.*100 x invalid free"):
            two.check()
        one.free(first)
        two.free(second)
        assert_whole_capacity(one)
        assert_whole_capacity(two)


def test_reset() -> None:
    with Heap("1MiB") as heap:
        fresh = heap.handle.clone()
        heap.malloc([64, 1000, 100_000, 2 * MIB])
        heap.free([12345])
        heap.reset()
        assert torch.equal(heap.handle, fresh)
        stats = heap.stats()
        assert (stats.allocations, stats.frees, stats.failures, stats.peak) == (0, 0, 0, 0)
        assert_whole_capacity(heap)


def test_trim_gives_cached_pages_back() -> None:
    with Heap("4MiB") as heap:
        heap.free(heap.malloc([64] * 1000))
        (kept,) = heap.malloc([1000]).tolist()
        heap.trim()
        snapshot = heap.snapshot()
        assert (snapshot.page_kind != FREE).sum() == 1
        assert snapshot.page_live.sum() == 1
        assert heap.usable_size([kept]).tolist() == [1024]
        heap.free([kept])
        assert_empty(heap)


def test_stats_against_a_count() -> None:
    """The numbers of a workload whose every step is known."""
    with Heap("4MiB") as heap:
        empty = heap.stats()
        assert (empty.capacity, empty.used, empty.free) == (4 * MIB, 0, 4 * MIB)
        assert (empty.largest_free, empty.occupied, empty.peak) == (4 * MIB, 0, 0)

        slots = heap.malloc([64] * 1500 + [1000] * 10)
        runs = heap.malloc([3 * PAGE_BYTES, PAGE_BYTES])
        heap.malloc([8 * MIB, 0, 8 * MIB])
        heap.free(slots[:500])
        stats = heap.stats()
        assert stats.allocations == 1512
        assert stats.frees == 500
        assert stats.failures == 2
        rows = {row.size: row for row in stats.per_class}
        assert (rows[64].live, rows[1024].live) == (1000, 10)
        assert sum(row.live for row in stats.per_class) == 1010
        slab_pages = sum(row.pages for row in stats.per_class)
        assert stats.used + stats.free == stats.capacity
        assert stats.used == 1000 * 64 + 10 * 1024 + 4 * PAGE_BYTES
        assert stats.used <= stats.occupied <= stats.peak <= stats.capacity
        assert slab_pages * PAGE_BYTES >= 1000 * 64 + 10 * 1024

        # Recorded errors are cleared by check; the count of failures is not.
        with pytest.raises(OutOfMemory, match="2 x out of memory"):
            heap.check()
        heap.check()
        assert heap.stats().failures == 2
        heap.malloc([8 * MIB])
        assert heap.stats().failures == 3
        heap.clear_errors()
        heap.free(slots[500:])
        heap.free(runs)
        assert_empty(heap)
        stats = heap.stats()
        assert (stats.allocations, stats.frees, stats.failures) == (1512, 1512, 3)


def test_what_the_state_takes() -> None:
    """As the docstring of `Heap` and the guide say, to the precision that they give."""
    sizes = {pages: 8 * Geometry.of(pages).words for pages in range(1, 1 << 14)}
    sizes |= {pages: 8 * Geometry.of(pages).words for pages in range(1 << 14, 1 << 23, 9973)}
    shares = {pages: size / (pages * PAGE_BYTES) for pages, size in sizes.items()}
    assert round(100 * shares[1]) == 13
    assert round(100 * shares[16]) == 2
    large = [100 * share for pages, share in shares.items() if pages >= 64]
    assert (round(min(large), 1), round(max(large), 1)) == (0.8, 1.2)
    small = [size / 1024 for pages, size in sizes.items() if pages < 16]
    assert (round(min(small)), round(max(small))) == (8, 17)


def test_peak_is_what_was_ever_taken() -> None:
    with Heap("1MiB") as heap:
        heap.free(heap.malloc([5 * PAGE_BYTES, 3 * PAGE_BYTES]))
        heap.free(heap.malloc([PAGE_BYTES]))
        stats = heap.stats()
        assert (stats.occupied, stats.peak) == (0, 8 * PAGE_BYTES)


def test_largest_free_is_what_succeeds() -> None:
    with Heap("1MiB") as heap:
        pages = heap.malloc([PAGE_BYTES] * 16)
        assert heap.stats().largest_free == 0
        heap.free([heap.base + n * PAGE_BYTES for n in (2, 3, 4, 9, 10)])
        assert heap.stats().largest_free == 3 * PAGE_BYTES
        assert heap.malloc([3 * PAGE_BYTES + 1]).item() == 0
        heap.clear_errors()
        assert heap.malloc([3 * PAGE_BYTES]).item() == heap.base + 2 * PAGE_BYTES
        assert_blocks(heap, heap.malloc([1000] * 65), [1000] * 65)
        stats = heap.stats()
        assert stats.largest_free == 1024
        assert stats.free == (2 * 64 - 65) * 1024
        assert pages.numel() == 16
        heap.reset()


def assert_largest_free(heap: Heap) -> int:
    """So much can be allocated in one piece, and not a byte more. (Changes nothing.)"""
    largest = heap.stats().largest_free
    (addr,) = heap.malloc([largest]).tolist()
    assert (addr != 0) == (largest != 0), f"no memory for {largest} B"
    heap.free([addr])
    assert heap.malloc([largest + 1]).tolist() == [0], f"more than {largest} B"
    heap.clear_errors()
    return largest


@pytest.mark.parametrize(
    "classes", [CLASS_SIZES[::6], pytest.param(CLASS_SIZES, marks=pytest.mark.long)],
    ids=["some", "all"],
)  # fmt: skip
@pytest.mark.parametrize("debug", [False, True, "full"])
def test_largest_free_of_any_heap(debug: bool | str, classes: Sequence[int]) -> None:
    """In runs of several lengths, in the slots of every class, and where nothing is left."""
    guards = GUARD_BYTES if debug else 0
    with Heap(20 * PAGE_BYTES, debug=debug) as heap:
        assert assert_largest_free(heap) == heap.capacity - guards
        heap.malloc([PAGE_BYTES - guards] * 20)
        assert assert_largest_free(heap) == 0
        for first, length in ((19, 1), (3, 2), (8, 5)):
            heap.free([heap.base + page * PAGE_BYTES for page in range(first, first + length)])
            assert assert_largest_free(heap) == length * PAGE_BYTES - guards
        heap.reset()
    with Heap(PAGE_BYTES, debug=debug) as heap:
        for size in classes:
            wanted = max(1, size - guards - 1)
            heap.malloc([wanted])
            assert assert_largest_free(heap) >= wanted
            heap.reset()


def test_snapshot() -> None:
    with Heap("1MiB") as heap:
        heap.malloc([1000] * 3)
        run = heap.malloc([3 * PAGE_BYTES]).item()
        snapshot = heap.snapshot()
        assert snapshot.capacity == heap.capacity
        assert snapshot.page_bytes == PAGE_BYTES
        assert snapshot.class_sizes == CLASS_SIZES
        first = (run - heap.base) // PAGE_BYTES
        assert snapshot.page_kind[first : first + 3].tolist() == [RUN] * 3
        assert snapshot.run_pages[first] == 3
        assert snapshot.run_pages.sum() == 3
        slabs = snapshot.page_kind == SLAB
        cls = CLASS_SIZES.index(1024)
        assert snapshot.page_class[slabs].tolist() == [cls]
        assert snapshot.page_live[slabs].tolist() == [3]
        assert snapshot.page_slots[slabs].tolist() == [CLASS_SLOTS[cls]]
        assert (snapshot.page_kind == FREE).sum() == 12
        assert (snapshot.page_class[~slabs] == -1).all()
        heap.reset()
        assert (heap.snapshot().page_kind == FREE).all()


def test_the_device_of_a_heap() -> None:
    with Heap("1MiB") as heap:
        assert heap.device.type == DEVICE
        assert heap.handle.device == heap.device
        assert repr(heap) == f"<devalloc.Heap 1 MiB on {heap.device}>"
    assert repr(heap) == "<devalloc.Heap 1 MiB closed>"
