"""The state of a heap: its size, what is read of it, trim, and the audit of planted damage."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from devalloc.heap.geometry import CLASSES, MAX_PAGES, Geometry, retire
from devalloc.heap.heap_audit import audit
from devalloc.heap.state import FREE, SLAB, State
from devalloc.kernels import layout
from devalloc.kernels.addresses import usable_any
from devalloc.kernels.debug.pointers import block_start
from devalloc.kernels.upkeep import rest_kernel
from devalloc.report.snapshot_file import load_snapshot, save_snapshot
from devalloc.sizes import CLASS_SIZES, MAX_SLOT, PAGE_BYTES
from tests.conftest import HAS_GREENLET, ON_GPU
from tests.heap.bare import BareHeap, pairs_kernel

pytestmark = pytest.mark.skipif(ON_GPU, reason="reads states on the host")


def rounded(nbytes: int) -> int:
    """What a block of so many bytes takes."""
    if nbytes > MAX_SLOT:
        return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    return next(size for size in CLASS_SIZES if size >= nbytes)


# The size of the state --------------------------------------------------------------------------


def share(pages: int) -> float:
    """The state's part of the capacity."""
    return Geometry.of(pages).words * 8 / (pages * PAGE_BYTES)


def test_the_state_is_small() -> None:
    for pages in [*range(16, 5000), *(1 << k for k in range(13, 24))]:
        limit = 0.02 if pages < 64 else 0.015 if pages < 1024 else 0.012
        assert share(pages) <= limit, f"{pages} pages"
    assert max(Geometry.of(pages).words for pages in range(1, 17)) * 8 < 21_000


EVERY = [1, 2, 3, 15, 16, 17, 63, 64, 65, 1000, 1024, 100_000, MAX_PAGES - 1, MAX_PAGES]


@pytest.mark.parametrize("pages", EVERY)
def test_arrays_lie_one_behind_the_other(pages: int) -> None:
    g = Geometry.of(pages)
    sizes = {
        "magazines": (layout.MAGAZINES.value, g.magazines),
        "lines": (g.lines_at, g.lines * g.stripes * layout.LINE_STRIDE.value),
        "rows": (g.rows, (CLASSES + 1) * g.chunks),
        "places": (g.places, g.lines * g.ring),
        "records": (g.records, pages * layout.RECORD_WORDS.value),
    }
    lines = g.line_words
    assert (lines.start, lines.stop, lines.step) == (
        g.lines_at,
        sizes["lines"][1] + g.lines_at,
        g.stripes * layout.LINE_STRIDE.value,
    )
    end = layout.HINTS.value + layout.HINT_COPIES.value * layout.HINT_STRIDE.value
    for name, (start, length) in sizes.items():
        assert end <= start < end + 16, name
        end = start + length
    assert end == g.words < 1 << 30
    for count in (g.stripes, g.ring, g.magazines):
        assert count & (count - 1) == 0
    assert g.magazines <= layout.PAGE_MAGAZINES.value * pages
    assert g.rest_programs(pages) * 64 >= pages
    assert g.rest_programs(pages) * 64 * layout.PAGE_MAGAZINES.value >= g.magazines
    header = g.header(1 << 47)
    assert len(header) <= 16, "debug heaps use the words behind"
    assert all(0 <= word < 1 << 63 for word in header)
    assert header[layout.STRIPES_AND_RING.value] == g.stripes + (g.ring.bit_length() - 1 << 16)


@pytest.mark.parametrize("wrong", [(0,), (MAX_PAGES + 1,), (16, 3), (16, 1, 12)])
def test_what_is_no_geometry(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"pages, not|powers of two"):
        Geometry.of(*wrong)


# Heaps at rest ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [1, 2, 15, 16, 63, 64, 65, 130, 1025])
def test_a_fresh_heap(pages: int) -> None:
    heap = BareHeap(pages)
    new = heap.handle.clone()
    heap.audit()
    assert torch.equal(heap.handle, new), "an audit changes nothing"
    stats = heap.stats()
    assert (stats.used, stats.free, stats.occupied, stats.peak) == (0, stats.capacity, 0, 0)
    assert (stats.allocations, stats.frees, stats.failures) == (0, 0, 0)
    assert stats.largest_free == stats.capacity == pages * PAGE_BYTES
    snapshot = heap.snapshot()
    assert len(snapshot.page_kind) == pages
    assert (snapshot.page_kind == FREE).all()


@pytest.mark.parametrize("pages", [1, 2, 5])
def test_the_smallest_heaps_can_be_filled_and_emptied(pages: int) -> None:
    heap = BareHeap(pages)
    slots = 16 * pages
    addrs = heap.malloc([4096] * (slots + 3), 8)
    assert int((addrs != 0).sum()) == slots
    heap.audit()
    stats = heap.stats()
    assert (stats.free, stats.largest_free, stats.failures) == (0, 0, 3)
    heap.free(addrs[addrs != 0], 8)
    heap.audit()
    assert heap.stats().largest_free == pages * PAGE_BYTES
    assert heap.malloc([pages * PAGE_BYTES]).tolist() == [heap.base]
    heap.audit()
    assert heap.stats().occupied == pages * PAGE_BYTES


def expected(live: dict[int, int]) -> dict[str, int]:
    """What statistics say of live blocks, sizes by address."""
    used = sum(map(rounded, live.values()))
    pages = {}
    for addr, nbytes in live.items():
        size = rounded(nbytes)
        for page in range(addr // PAGE_BYTES, -(-(addr + size) // PAGE_BYTES)):
            pages[page] = size if size <= MAX_SLOT else PAGE_BYTES
    used += sum(PAGE_BYTES % size for size in pages.values())
    return {"used": used, "occupied": len(pages) * PAGE_BYTES}


def assert_agrees(heap: BareHeap, live: dict[int, int]) -> None:
    audit(heap.state())
    resting = heap.state().stats()
    heap.trim()
    state = heap.state()
    audit(state)
    stats = state.stats()
    assert {"used": stats.used, "occupied": stats.occupied} == expected(live)
    assert stats.allocations - stats.frees == len(live)
    assert stats.used + stats.free == stats.capacity
    # A trim only makes what rests free, which was counted as free before.
    for name in ("used", "free", "largest_free", "occupied", "peak", "frees", "failures"):
        assert getattr(stats, name) == getattr(resting, name), name
    sizes = [rounded(nbytes) for nbytes in live.values()]
    assert [row.live for row in stats.per_class] == [sizes.count(size) for size in CLASS_SIZES]
    assert [row.live for row in resting.per_class] == [row.live for row in stats.per_class]
    snapshot = heap.snapshot()
    assert int(snapshot.page_live.sum()) == sum(size <= MAX_SLOT for size in sizes)
    assert int((snapshot.run_pages > 0).sum()) == sum(size > MAX_SLOT for size in sizes)
    assert int((snapshot.page_kind != FREE).sum()) == stats.occupied // PAGE_BYTES
    where = torch.tensor(list(live), dtype=torch.int64)
    if live:
        assert heap.usable_size(where).tolist() == sizes


@pytest.mark.parametrize(("pages", "lanes"), [(40, 32), (130, 1)])
def test_statistics_say_what_lives(pages: int, lanes: int) -> None:
    heap = BareHeap(pages)
    chance = np.random.default_rng(pages)
    live: dict[int, int] = {}
    for _ in range(5):
        sizes = chance.integers(1, 4097, 48)
        sizes[chance.random(48) < 0.3] = 64
        sizes[chance.random(48) < 0.1] = chance.integers(30_000, 200_000)
        addrs = heap.malloc(sizes.tolist(), lanes)
        live |= {
            addr: size for addr, size in zip(addrs.tolist(), sizes.tolist(), strict=True) if addr
        }
        assert_agrees(heap, live)
        gone = [addr for addr in sorted(live) if chance.random() < 0.6]
        heap.free(torch.tensor(gone), lanes)
        live = {addr: size for addr, size in live.items() if addr not in gone}
        assert_agrees(heap, live)
    heap.free(torch.tensor(list(live)), lanes)
    assert_agrees(heap, {})
    assert len(heap.free_pages()) == pages


@pytest.mark.parametrize("sizes", [[64] * 100 + [300] * 40 + [70_000] * 3, [8192] * 8 * 20])
def test_the_largest_request_is_the_largest(sizes: list[int]) -> None:
    heap = BareHeap(20)
    addrs = heap.malloc(sizes, 32)
    heap.free(addrs[addrs != 0][::3], 1)
    for _ in range(2):
        largest = heap.state().stats().largest_free
        assert heap.copy().malloc([largest + 1]).tolist() == [0]
        assert heap.copy().malloc([largest]).tolist() != [0]
        heap.trim()


def test_statistics_can_be_printed() -> None:
    heap = BareHeap(20)
    heap.malloc([64] * 3 + [*CLASS_SIZES[10:17]] + [70_000])
    text = str(heap.stats())
    assert re.search(r"of 1.25 MiB used \(.*%\), peak 640 KiB; largest request", text)
    assert "11 blocks live (11 allocated, 0 freed); 0 requests failed" in text
    assert "4 of 2 other sizes" in text
    assert "1 larger than 32 KiB" in text


def test_a_snapshot_survives_a_file(tmp_path: Path) -> None:
    heap = BareHeap(30)
    heap.malloc([64] * 3 + [1024, 200_000, 70_000])
    before = heap.snapshot()
    save_snapshot(before, tmp_path / "heap.snapshot")
    after = load_snapshot(tmp_path / "heap.snapshot")
    assert np.array_equal(after.page_kind, before.page_kind)
    kinds = np.bincount(before.page_kind, minlength=3)
    assert kinds.tolist() == [30 - 2 - 6, 2, 6]
    assert sorted(before.run_pages[before.run_pages > 0]) == [2, 4]
    assert sorted(before.page_slots[before.page_kind == SLAB]) == [64, 1024]


def test_a_copy_can_be_read_meanwhile() -> None:
    heap = BareHeap(20)
    addrs = heap.malloc([64, 1024, 70_000])
    copy = State(heap.handle.clone(), heap.geometry)
    heap.free(addrs)
    audit(copy)
    assert copy.live_blocks() == 3
    assert heap.state().live_blocks() == 0


# trim, reset, and a heap that is closed ---------------------------------------------------------


def resting_heap() -> BareHeap:
    """With spans in magazines, of which two programs empty some each, empty pages that are kept,
    and a few blocks."""
    heap = BareHeap(300)
    for size, count in ((64, 40), (1024, 30), (2048, 20)):
        addrs = heap.malloc_scalars(count, size)
        heap.free_scalars(addrs[: count - 1])
    addrs = heap.malloc([*range(16, 4096, 100)] * 4, 32)
    heap.free(addrs, 32)
    return heap


def test_trim_makes_all_free_that_rests_as_a_search_does() -> None:
    heap = resting_heap()
    before = heap.state()
    audit(before)
    assert len(before.spans.page) > 20
    assert int(before.idle.sum()) > 5
    other = heap.copy()
    calls = 0
    while other.rest():
        calls += 1
    assert calls <= 2
    heap.trim()
    for each in (heap, other):
        state = each.state()
        audit(state)
        assert len(state.spans.page) == 0
        assert int(state.idle.sum()) == 0
        assert state.live_blocks() == before.live_blocks() == 3
    assert np.array_equal(heap.state().words, other.state().words)
    assert np.array_equal(heap.state().rows[0], other.state().rows[0])


def test_after_a_trim_of_an_empty_heap_all_pages_are_free() -> None:
    heap = resting_heap()
    state = heap.state()
    slots = np.argwhere(_live_bits(state))
    assert len(slots) == 3
    heap.free(torch.from_numpy(heap.base + slots[:, 0] * PAGE_BYTES + slots[:, 1] * 16), 1)
    assert heap.state().live_blocks() == 0
    heap.trim()
    assert len(heap.free_pages()) == heap.pages
    assert heap.state().stale_hints() == 0
    assert heap.malloc([heap.pages * PAGE_BYTES]).tolist() == [heap.base]


def _live_bits(state: State) -> np.ndarray:
    """For each page, which of its granules have their live bits set."""
    words = state.records[:, : layout.PAGE_WORD.value].numpy()
    bits = (words[:, None, :] >> np.arange(64)[None, :, None]) & 1
    return bits.reshape(len(words), -1)


def test_a_trim_lets_programs_look_at_the_front_again() -> None:
    heap = BareHeap(300)
    heap.free(heap.malloc([1024] * 3))
    page = int(heap.state().spans.page[0])
    hints = heap.handle[layout.HINTS.value :][: 8 * layout.HINT_COPIES.value : 8]
    hints.fill_(4)
    heap.trim()
    assert len(heap.free_pages()) == heap.pages
    assert int(hints.min()) == page // 64 < 4


@pytest.mark.skipif(not HAS_GREENLET, reason="interleaving programs needs greenlet")
@pytest.mark.parametrize("pairs", [0, 1])
def test_programs_of_a_trim_may_meet(pairs: int) -> None:
    """Two empty magazines of one page, then two look at pages, beside a malloc and a free."""
    from devalloc.testing import PCT, Interleaving, Launch, Run

    heap = BareHeap(130)
    heap.handle[layout.HINTS.value :][: 8 * layout.HINT_COPIES.value : 8] = 1
    addrs = heap.malloc([1024] * 3 + [64] * 2)
    heap.free(addrs[:3])
    heap.free(addrs[3:])
    assert len(heap.state().spans.page) == 2
    assert (heap.state().spans.page >= 64).all()

    def check(run: Run) -> None:
        state = heap.state()
        audit(state)
        assert state.live_blocks() == 0
        assert state.stats().largest_free == heap.pages * PAGE_BYTES

    def check_pages(run: Run) -> None:
        check(run)
        if not pairs:
            assert int(heap.state().page_free.sum()) == heap.pages

    for checks in (check, check_pages):
        launches = [Launch(rest_kernel, (2,), heap.handle)]
        if pairs:
            launches.append(Launch(pairs_kernel, (1,), heap.handle, pairs, 1024))
        report = Interleaving(*launches, check=checks).explore(PCT(7), 80)
        assert report.schedules == 80
        rest_kernel[(2,)](heap.handle)


def test_a_reset_heap_is_a_new_one() -> None:
    heap = resting_heap()
    heap.malloc([-1, 1 << 40])
    assert sum(heap.errors().values()) == 2
    heap.reset()
    assert torch.equal(heap.handle, BareHeap(heap.pages).handle)
    heap.audit()


def test_a_closed_heap_serves_nobody() -> None:
    heap = BareHeap(20)
    addrs = heap.malloc([64, 1024, 70_000])
    retire(heap.handle, heap.geometry, heap.pages)
    assert heap.malloc([64, 2000, 70_000]).tolist() == [0, 0, 0]
    heap.free(addrs)
    errors = heap.errors()
    assert errors["out of memory"] == 3
    assert errors["double free"] + errors["invalid free"] == 3
    assert heap.usable_size(addrs).tolist() == [0, 0, 0]


# Which block an address belongs to --------------------------------------------------------------


@triton.jit
def block_start_kernel(heap, addrs, starts, n, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    addr = tl.load(addrs + lane, mask=lane < n, other=0)
    tl.store(starts + lane, block_start(heap, addr, lane < n), mask=lane < n)


@triton.jit
def block_start_scalar_kernel(heap, addrs, starts):
    at = tl.program_id(0)
    tl.store(starts + at, block_start(heap, tl.load(addrs + at), at >= 0))


def test_inner_addresses_lead_to_their_block() -> None:
    heap = BareHeap(200)
    sizes = [48, 48, 1000, 9000, 32768, 70_000, 140 * PAGE_BYTES]
    addrs = heap.malloc(sizes)
    inner, starts = [], []
    for addr, size in zip(addrs.tolist(), map(rounded, sizes), strict=True):
        for offset in {0, 1, 15, size // 2, size - 1}:
            inner.append(addr + offset)
            starts.append(addr)
    inner += [heap.base - 1, heap.base + heap.pages * PAGE_BYTES, 0]
    starts += [heap.base] * 3
    asked = torch.tensor(inner)
    found = torch.zeros_like(asked)
    block_start_kernel[(1,)](heap.handle, asked, found, asked.numel(), LANES=64)
    assert found.tolist() == starts
    found.zero_()
    block_start_scalar_kernel[(asked.numel(),)](heap.handle, asked, found)
    assert found.tolist() == starts


@triton.jit
def usable_scalar_kernel(heap, addrs, sizes):
    at = tl.program_id(0)
    tl.store(sizes + at, usable_any(heap, tl.load(addrs + at), at >= 0))


def test_only_what_lives_has_a_size() -> None:
    heap = BareHeap(20)
    addrs = heap.malloc([64, 1024, 70_000])
    wrong = [0, heap.base - 16, heap.base + 20 * PAGE_BYTES, *(addrs + 16).tolist(), 5]
    assert heap.usable_size(torch.tensor(wrong)).tolist() == [0] * 7
    assert heap.usable_size(addrs).tolist() == [64, 1024, 131_072]
    sizes = torch.zeros_like(addrs)
    usable_scalar_kernel[(3,)](heap.handle, addrs, sizes)
    assert sizes.tolist() == [64, 1024, 131_072]
    heap.free(addrs)
    assert heap.usable_size(addrs).tolist() == [0, 0, 0]
