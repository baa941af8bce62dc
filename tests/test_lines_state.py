"""The experiment's state: its size, what is read of it, its audit, trim and reset."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from benchmarks.lines import layout
from benchmarks.lines.audit import audit
from benchmarks.lines.blocks import block_start, usable_any
from benchmarks.lines.geometry import CLASSES, MAX_PAGES, Geometry, retire
from benchmarks.lines.host import Lines, pairs_kernel
from benchmarks.lines.state import State
from benchmarks.lines.upkeep import trim_kernel
from devalloc.errors import CorruptionError
from devalloc.heap.state import FREE, RUN, SLAB
from devalloc.report.snapshot_file import load_snapshot, save_snapshot
from devalloc.sizes import CLASS_SIZES, CLASS_SLOTS, MAX_SLOT, PAGE_BYTES
from tests.conftest import HAS_GREENLET, ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="the experiment is measured on a GPU, not tested")


def of_pages(pages: int) -> Lines:
    return Lines(pages * PAGE_BYTES, "cpu")


def malloc(heap: Lines, sizes: list[int], lanes: int = 64) -> torch.Tensor:
    addrs = torch.zeros(len(sizes), dtype=torch.int64)
    heap.malloc(torch.tensor(sizes), addrs, lanes)
    return addrs


def free(heap: Lines, addrs: torch.Tensor, lanes: int = 64) -> None:
    heap.free(addrs.clone(), torch.ones(addrs.numel(), dtype=torch.int32), lanes)


def copy_of(heap: Lines) -> Lines:
    other = of_pages(heap.pages)
    other.handle.copy_(heap.handle)
    return other


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
        "lines": (layout.LINES.value, g.lines * layout.LINE_STRIDE.value),
        "records": (g.records, pages * layout.RECORD_WORDS.value),
        "rows": (g.rows, (CLASSES + 1) * g.chunks),
        "idle": (g.idle_words, g.idle),
        "places": (g.places, g.lines * g.ring),
        "magazines": (g.magazine_words, g.magazines),
    }
    assert g.records == layout.LINES.value + g.lines * layout.LINE_STRIDE.value
    end = layout.HINTS.value + layout.HINT_COPIES.value * layout.HINT_STRIDE.value
    for name, (start, length) in sizes.items():
        assert end <= start < end + 16, name
        end = start + length
    assert end == g.words < 1 << 30
    for count in (g.stripes, g.ring, g.magazines, g.idle):
        assert count & (count - 1) == 0
    assert g.magazines <= pages
    assert g.magazines <= 64 * g.chunks, "trim has a program per chunk"
    header = g.header(1 << 47)
    assert len(header) <= 16, "debug heaps use the words behind"
    assert all(0 <= word < 1 << 63 for word in header)
    assert header[layout.STRIPES_AND_RING.value] == g.stripes + (g.ring.bit_length() - 1 << 16)
    assert header[layout.IDLE.value] >> layout.IDLE_SHIFT.value == g.idle_words
    assert header[layout.IDLE.value] & layout.IDLE_MASK.value == g.idle - 1


@pytest.mark.parametrize("wrong", [(0,), (MAX_PAGES + 1,), (16, 3), (16, 1, 12)])
def test_what_is_no_geometry(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"pages, not|powers of two"):
        Geometry.of(*wrong)


# Heaps at rest ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [1, 2, 15, 16, 63, 64, 65, 130, 1025])
def test_a_fresh_heap(pages: int) -> None:
    heap = of_pages(pages)
    new = heap.handle.clone()
    heap.audit()
    assert torch.equal(heap.handle, new), "an audit changes nothing"
    stats = heap.stats()
    assert (stats.used, stats.free, stats.blocks, stats.occupied) == (0, stats.capacity, 0, 0)
    assert stats.largest_free == stats.capacity == pages * PAGE_BYTES
    snapshot = heap.snapshot()
    assert len(snapshot.page_kind) == pages
    assert (snapshot.page_kind == FREE).all()


@pytest.mark.parametrize("pages", [1, 2, 5])
def test_the_smallest_heaps_can_be_filled_and_emptied(pages: int) -> None:
    heap = of_pages(pages)
    slots = 16 * pages
    addrs = malloc(heap, [4096] * (slots + 3), 8)
    assert int((addrs != 0).sum()) == slots
    heap.audit()
    stats = heap.stats()
    assert (stats.free, stats.largest_free, stats.failures) == (0, 0, 3)
    free(heap, addrs[addrs != 0], 8)
    heap.audit()
    assert heap.stats().largest_free == pages * PAGE_BYTES
    assert malloc(heap, [pages * PAGE_BYTES]).tolist() == [heap.base]
    heap.audit()
    assert heap.stats().occupied == pages * PAGE_BYTES


def expected(heap: Lines, live: dict[int, int]) -> dict[str, int]:
    """What statistics say of live blocks, sizes by address."""
    used = sum(map(rounded, live.values()))
    pages = {}
    for addr, nbytes in live.items():
        size = rounded(nbytes)
        for page in range(addr // PAGE_BYTES, -(-(addr + size) // PAGE_BYTES)):
            pages[page] = size if size <= MAX_SLOT else PAGE_BYTES
    used += sum(PAGE_BYTES % size for size in pages.values())
    return {"used": used, "blocks": len(live), "occupied": len(pages) * PAGE_BYTES}


def assert_agrees(heap: Lines, live: dict[int, int]) -> None:
    audit(heap.state())
    resting = heap.state().stats()
    heap.trim()
    state = heap.state()
    audit(state)
    stats = state.stats()
    assert {name: getattr(stats, name) for name in ("used", "blocks", "occupied")} == expected(
        heap, live
    )
    assert stats.used + stats.free == stats.capacity
    # A trim only makes what rests free, which was counted as free before.
    for name in ("used", "free", "largest_free", "occupied", "blocks", "failures"):
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
    heap = of_pages(pages)
    chance = np.random.default_rng(pages)
    live: dict[int, int] = {}
    for _ in range(5):
        sizes = chance.integers(1, 4097, 48)
        sizes[chance.random(48) < 0.3] = 64
        sizes[chance.random(48) < 0.1] = chance.integers(30_000, 200_000)
        addrs = malloc(heap, sizes.tolist(), lanes)
        live |= {
            addr: size for addr, size in zip(addrs.tolist(), sizes.tolist(), strict=True) if addr
        }
        assert_agrees(heap, live)
        gone = [addr for addr in sorted(live) if chance.random() < 0.6]
        free(heap, torch.tensor(gone), lanes)
        live = {addr: size for addr, size in live.items() if addr not in gone}
        assert_agrees(heap, live)
    free(heap, torch.tensor(list(live)), lanes)
    assert_agrees(heap, {})
    assert len(heap.free_pages()) == pages


@pytest.mark.parametrize("sizes", [[64] * 100 + [300] * 40 + [70_000] * 3, [8192] * 8 * 20])
def test_the_largest_request_is_the_largest(sizes: list[int]) -> None:
    heap = of_pages(20)
    addrs = malloc(heap, sizes, 32)
    free(heap, addrs[addrs != 0][::3], 1)
    for _ in range(2):
        largest = heap.state().stats().largest_free
        assert malloc(copy_of(heap), [largest + 1]).tolist() == [0]
        assert malloc(copy_of(heap), [largest]).tolist() != [0]
        heap.trim()


def test_statistics_can_be_printed() -> None:
    heap = of_pages(20)
    malloc(heap, [64] * 3 + [*CLASS_SIZES[10:17]] + [70_000])
    text = str(heap.stats())
    assert re.search(r"of 1.25 MiB used \(.*%\), in pages of 640 KiB; largest request", text)
    assert "11 blocks live; 0 requests failed" in text
    assert "4 of 2 other sizes" in text
    assert "1 larger than 32 KiB" in text


def test_a_snapshot_survives_a_file(tmp_path: Path) -> None:
    heap = of_pages(30)
    malloc(heap, [64] * 3 + [1024, 200_000, 70_000])
    before = heap.snapshot()
    save_snapshot(before, tmp_path / "heap.snapshot")
    after = load_snapshot(tmp_path / "heap.snapshot")
    assert np.array_equal(after.page_kind, before.page_kind)
    kinds = np.bincount(before.page_kind, minlength=3)
    assert kinds.tolist() == [30 - 2 - 6, 2, 6]
    assert sorted(before.run_pages[before.run_pages > 0]) == [2, 4]
    assert sorted(before.page_slots[before.page_kind == SLAB]) == [64, 1024]


def test_a_copy_can_be_read_meanwhile() -> None:
    heap = of_pages(20)
    addrs = malloc(heap, [64, 1024, 70_000])
    copy = State(heap.handle.clone(), heap.geometry)
    free(heap, addrs)
    audit(copy)
    assert copy.stats().blocks == 3
    assert heap.stats().blocks == 0


# trim, reset, and a heap that is closed ---------------------------------------------------------


def resting_heap() -> Lines:
    """With spans in magazines, of which two programs empty some each, empty pages that are kept,
    and a few blocks."""
    heap = of_pages(300)
    for size, count in ((64, 40), (1024, 30), (2048, 20)):
        addrs = torch.zeros(count, dtype=torch.int64)
        heap.malloc_scalars(addrs, size, 1)
        heap.free_scalars(addrs[: count - 1], 1)
    addrs = malloc(heap, [*range(16, 4096, 100)] * 4, 32)
    free(heap, addrs, 32)
    return heap


def test_trim_makes_all_free_that_rests_as_a_search_does() -> None:
    heap = resting_heap()
    before = heap.state()
    audit(before)
    assert len(before.spans.page) > 20
    assert int(before.idle.sum()) > 5
    other = copy_of(heap)
    other.rest()
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
    free(heap, torch.from_numpy(heap.base + slots[:, 0] * PAGE_BYTES + slots[:, 1] * 16), 1)
    assert heap.state().live_blocks() == 0
    heap.trim()
    assert len(heap.free_pages()) == heap.pages
    assert heap.state().stale_hints() == 0
    assert malloc(heap, [heap.pages * PAGE_BYTES]).tolist() == [heap.base]


def _live_bits(state: State) -> np.ndarray:
    """For each page, which of its granules have their live bits set."""
    words = state.records[:, : layout.PAGE_WORD.value].numpy()
    bits = (words[:, None, :] >> np.arange(64)[None, :, None]) & 1
    return bits.reshape(len(words), -1)


def test_a_trim_lets_programs_look_at_the_front_again() -> None:
    heap = of_pages(300)
    free(heap, malloc(heap, [1024] * 3))
    page = int(heap.state().spans.page[0])
    hints = heap.handle[layout.HINTS.value :][: 8 * layout.HINT_COPIES.value : 8]
    hints.fill_(4)
    heap.trim()
    assert len(heap.free_pages()) == heap.pages
    assert int(hints.min()) == page // 64 < 4


@pytest.mark.skipif(not HAS_GREENLET, reason="interleaving programs needs greenlet")
@pytest.mark.parametrize("pairs", [0, 1])
def test_programs_of_a_trim_may_meet(pairs: int) -> None:
    """One empties the magazine of a page that another looks at, beside a malloc and a free."""
    from devalloc.testing import PCT, Interleaving, Launch, Run

    heap = of_pages(130)
    heap.handle[layout.HINTS.value :][: 8 * layout.HINT_COPIES.value : 8] = 1
    addrs = malloc(heap, [1024] * 3 + [64] * 2)
    free(heap, addrs[:3])
    free(heap, addrs[3:])
    assert len(heap.state().spans.page) == 2
    assert (heap.state().spans.page >= 64).all()

    def check(run: Run) -> None:
        state = heap.state()
        audit(state)
        assert state.live_blocks() == 0
        if not pairs:
            assert int(state.page_free.sum()) == heap.pages
        assert state.stats().largest_free == heap.pages * PAGE_BYTES

    launches = [Launch(trim_kernel, (2,), heap.handle)]
    if pairs:
        launches.append(Launch(pairs_kernel, (1,), heap.handle, pairs, 1024, LINES=True))
    report = Interleaving(*launches, check=check).explore(PCT(7), 150)
    assert report.schedules == 150


def test_a_reset_heap_is_a_new_one() -> None:
    heap = resting_heap()
    malloc(heap, [-1, 1 << 40])
    assert sum(heap.errors().values()) == 2
    heap.reset()
    assert torch.equal(heap.handle, of_pages(heap.pages).handle)
    heap.audit()


def test_a_closed_heap_serves_nobody() -> None:
    heap = of_pages(20)
    addrs = malloc(heap, [64, 1024, 70_000])
    retire(heap.handle, heap.geometry)
    assert malloc(heap, [64, 2000, 70_000]).tolist() == [0, 0, 0]
    free(heap, addrs)
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
    heap = of_pages(200)
    sizes = [48, 48, 1000, 9000, 32768, 70_000, 140 * PAGE_BYTES]
    addrs = malloc(heap, sizes)
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
    heap = of_pages(20)
    addrs = malloc(heap, [64, 1024, 70_000])
    wrong = [0, heap.base - 16, heap.base + 20 * PAGE_BYTES, *(addrs + 16).tolist(), 5]
    assert heap.usable_size(torch.tensor(wrong)).tolist() == [0] * 7
    assert heap.usable_size(addrs).tolist() == [64, 1024, 131_072]
    sizes = torch.zeros_like(addrs)
    usable_scalar_kernel[(3,)](heap.handle, addrs, sizes)
    assert sizes.tolist() == [64, 1024, 131_072]
    free(heap, addrs)
    assert heap.usable_size(addrs).tolist() == [0, 0, 0]


# The audit --------------------------------------------------------------------------------------

PAGES = 70  # two chunks, the second of six pages
SLOT_CLASS = CLASS_SIZES.index(1024)
SMALL_CLASS = CLASS_SIZES.index(64)


class Damage:
    """Words of a heap at rest, found by what they mean."""

    def __init__(self, heap: Lines) -> None:
        self.geometry = g = heap.geometry
        self.words = heap.handle
        state = heap.state()
        self.slab = int(np.flatnonzero((state.kind == SLAB) & (state.cls == SLOT_CLASS))[0])
        self.small = int(np.flatnonzero((state.kind == SLAB) & (state.cls == SMALL_CLASS))[0])
        self.runs = np.flatnonzero(state.kind == RUN).tolist()
        self.free = np.flatnonzero(state.page_free).tolist()
        self.magazines = [g.magazine_words + int(at) for at in state.spans.magazine]

    def word(self, page: int) -> int:
        return self.geometry.records + page * layout.RECORD_WORDS.value + layout.PAGE_WORD.value

    def set(self, at: int, value: int) -> None:
        self.words[at] = value

    def add(self, at: int, value: int) -> None:
        self.words[at] += value

    def flip(self, at: int, bit: int) -> None:
        self.words[at] ^= torch.tensor(1) << bit

    def live(self, page: int, granule: int) -> None:
        self.flip(self.word(page) - 64 + granule % 64, granule // 64)

    def row_bit(self, page: int, row: int = 0) -> None:
        self.flip(self.geometry.rows + row * self.geometry.chunks + page // 64, page % 64)

    def length(self, run: int, value: int) -> None:
        self.set(self.word(run) + layout.LENGTH.value, value)

    def span(self, at: int, page: int, slot: int, count: int, cls: int) -> None:
        word = page + (slot << 23) + (count << 36) + (cls + 1 << 50)
        self.set(self.magazines[at], word)

    def place(self, at: int, first: int, number: int) -> None:
        """Write the place at index ``at`` of the ring of the slab's line (see `place_ptr`)."""
        ring = self.geometry.ring
        low = at % 16 * (ring // 16) + at // 16
        line = SLOT_CLASS * self.geometry.stripes
        none = layout.PAGE_MASK.value << 23
        word = first + none + (number << 46)
        self.set(self.geometry.places + line * ring + low, (word ^ 1 << 63) - (1 << 63))


def move_live_bit(d: Damage) -> None:
    d.live(d.slab, 0)
    d.live(d.slab, 1)


def run_inside_a_run(d: Damage) -> None:
    d.set(d.word(d.runs[0] + 1), layout.RUN.value + 1)
    d.length(d.runs[0] + 1, 1)


def forget_slab(d: Damage) -> None:
    for slot in range(3):
        d.live(d.slab, 64 * slot)
    d.set(d.word(d.slab), int(d.words[d.word(d.slab)]) & ~layout.KEPT.value & ~0xFFFFFF)


def span_of_live_slots(d: Damage) -> None:
    d.span(0, d.slab, 0, 2, SLOT_CLASS)


PLANTED: dict[str, tuple[str, Callable[[Damage], None]]] = {
    "a changed geometry": ("H4: the geometry", lambda d: d.add(layout.PAGES.value, 1)),
    "a hint below the heap": ("H3: hints of", lambda d: d.set(layout.HINTS.value, -1)),
    "a hint beyond the heap": ("H3: hints of", lambda d: d.set(layout.HINTS.value + 8, 2)),
    "a page beyond the end": ("H2: pages beyond the heap's end", lambda d: d.row_bit(PAGES)),
    "a page of a class beyond the end": (
        "H2: classes with pages beyond the heap's end",
        lambda d: d.row_bit(PAGES, SLOT_CLASS + 1),
    ),
    "a page of no kind": ("H4: page words of no kind", lambda d: d.set(d.word(d.free[0]), 5)),
    "a slab with other bits": (
        "H4: page words of no kind",
        lambda d: d.flip(d.word(d.slab), 50),
    ),
    "a run of a class": ("H4: page words of no kind", lambda d: d.flip(d.word(d.runs[0]), 25)),
    "a slab and a run": ("H4: page words of no kind", lambda d: d.flip(d.word(d.slab), 45)),
    "a slab of no class": ("H4: slabs of no class", lambda d: d.add(d.word(d.slab), 40 << 24)),
    "a wrong half": ("H4: slabs with a wrong half", lambda d: d.add(d.word(d.slab), 1 << 32)),
    "a run beyond the heap": ("H1: runs that reach", lambda d: d.length(d.runs[0], 1000)),
    "a run of no length": ("H1: runs that reach", lambda d: d.length(d.runs[0], 0)),
    "a run of a negative length": ("H1: runs that reach", lambda d: d.length(d.runs[0], -3)),
    "runs that overlap": ("H1: pages with more than one", lambda d: d.length(d.runs[0], 4)),
    "a run inside a run": ("H1: pages with more than one owner", run_inside_a_run),
    "a free page that is a slab": (
        "H1: pages with more than one owner",
        lambda d: d.set(d.word(d.free[0]), int(d.words[d.word(d.slab)])),
    ),
    "a used page that is free": ("H1: pages with more than", lambda d: d.row_bit(d.slab)),
    "a page of a run that is free": (
        "H1: pages with more than one owner",
        lambda d: d.row_bit(d.runs[0] + 1),
    ),
    "a run too short": ("H2: pages without an owner", lambda d: d.length(d.runs[0], 2)),
    "a page that is lost": ("H2: pages without an owner", lambda d: d.row_bit(d.free[0])),
    "a run that is lost": ("H2: pages without an owner", lambda d: d.set(d.word(d.runs[0]), 0)),
    "a run that counts twice": (
        "H4: runs whose account is not 1",
        lambda d: d.add(d.word(d.runs[0]), 1),
    ),
    "a magazine of no class": (
        "H4: magazines of no class",
        lambda d: d.span(0, d.small, 0, 1, 50),
    ),
    "a magazine with bits of nothing": (
        "H4: magazines of no class",
        lambda d: d.flip(d.magazines[0], 60),
    ),
    "a magazine with a free page": (
        "H4: magazines whose page is no slab of their class",
        lambda d: d.span(0, d.free[0], 0, 1, SMALL_CLASS),
    ),
    "a magazine with a page beyond the heap": (
        "H4: magazines whose page is no slab of their class",
        lambda d: d.span(0, PAGES + 5, 0, 1, SMALL_CLASS),
    ),
    "a magazine with a page of another class": (
        "H4: magazines whose page is no slab of their class",
        lambda d: d.span(0, d.slab, 5, 1, SMALL_CLASS),
    ),
    "a magazine with no slots": (
        "H4: magazines with slots that their page does not have",
        lambda d: d.span(0, d.small, 0, 0, SMALL_CLASS),
    ),
    "a magazine beyond its page": (
        "H4: magazines with slots that their page does not have",
        lambda d: d.span(0, d.small, CLASS_SLOTS[SMALL_CLASS] - 1, 2, SMALL_CLASS),
    ),
    "a magazine with too much": (
        "H4: magazines with over half a page",
        lambda d: d.span(0, d.small, 0, CLASS_SLOTS[SMALL_CLASS] // 2 + 1, SMALL_CLASS),
    ),
    "magazines with the same slots": (
        "H1: magazines with slots that are in another one",
        lambda d: d.set(d.magazines[1], int(d.words[d.magazines[0]])),
    ),
    "a magazine with live slots": ("H1: magazines with slots that are live", span_of_live_slots),
    "a span that is lost": ("H4: accounts", lambda d: d.set(d.magazines[0], 0)),
    "a live bit too many": ("H4: accounts", lambda d: d.live(d.slab, 640)),
    "a live bit too few": ("H4: accounts", lambda d: d.live(d.slab, 0)),
    "an account too high": ("H4: accounts", lambda d: d.add(d.word(d.slab), 1)),
    "an account too low": ("H4: accounts", lambda d: d.add(d.word(d.slab), -1)),
    "more out than there is": ("H4: more slots out", lambda d: d.add(d.word(d.slab), 100)),
    "a live bit between slots": ("H4: live bits where no block can begin", move_live_bit),
    "a live bit in a free page": (
        "H4: live bits where no block can begin",
        lambda d: d.live(d.free[0], 320),
    ),
    "a live bit inside a run": (
        "H4: live bits where no block can begin",
        lambda d: d.live(d.runs[0] + 1, 0),
    ),
    "a second live bit of a run": (
        "H4: runs without exactly one live bit",
        lambda d: d.live(d.runs[0], 4095),
    ),
    "a run without a live bit": (
        "H4: runs without exactly one live bit",
        lambda d: d.live(d.runs[0], 0),
    ),
    "an empty slab": ("H3: slabs with nothing out", forget_slab),
    "a place that is another's": (
        "H4: places with the number of another one",
        lambda d: d.place(3, d.slab, 4),
    ),
    "a place that nobody opened": (
        "H4: places that their line has not opened",
        lambda d: d.place(3, d.slab, 3),
    ),
    "a place beyond the heap": (
        "H4: places that lead beyond the heap",
        lambda d: d.place(1, PAGES, 1),
    ),
}


@pytest.fixture
def heap() -> Lines:
    """At rest: a slab with live and free slots, one with slots in two magazines, adjacent runs,
    and free pages in both chunks."""
    heap = of_pages(PAGES)
    malloc(heap, [1024] * 3)
    malloc(heap, [3 * PAGE_BYTES] * 2)
    small = torch.zeros(4, dtype=torch.int64)
    heap.malloc_scalars(small, 64, 1)
    heap.free_scalars(small[:2], 1)
    return heap


@pytest.mark.parametrize("name", PLANTED)
def test_planted_corruption(name: str, heap: Lines) -> None:
    message, plant = PLANTED[name]
    audit(heap.state())
    good = heap.handle.clone()
    damage = Damage(heap)
    assert (len(damage.runs), len(damage.magazines)) == (2, 2)
    assert damage.runs[0] + 3 == damage.runs[1]
    plant(damage)
    bad = heap.handle.clone()
    assert not torch.equal(bad, good)
    with pytest.raises(CorruptionError, match=f"^{message}"):
        audit(heap.state())
    assert torch.equal(heap.handle, bad), "an audit changes nothing"
    heap.handle.copy_(good)
    heap.audit()


def test_each_message_of_the_audit_is_planted() -> None:
    source = (Path(__file__).parent.parent / "benchmarks/lines/audit.py").read_text()
    messages = re.findall(r'"(H\d: [^"{]*)', source.partition("def audit")[2])
    messages = [message for message in messages if not message.endswith(".")]
    assert len(messages) > 20
    for message in messages:
        assert any(message.startswith(planted) for planted, _ in PLANTED.values()), message


def test_messages_say_where(heap: Lines) -> None:
    damage = Damage(heap)
    damage.add(damage.word(damage.slab), 1)
    where = (
        rf"4 out, 3 live bits, 0 in magazines\): 1 pages, the first is page {damage.slab} \(word"
    )
    with pytest.raises(CorruptionError, match=where):
        audit(heap.state())
    damage.add(damage.word(damage.slab), -1)
    damage.span(1, damage.free[0], 0, 1, SMALL_CLASS)
    where = rf"1 magazines, the first is magazine \d+ \(word 0x\w+, page {damage.free[0]}\)"
    with pytest.raises(CorruptionError, match=where):
        audit(heap.state())


def test_rows_of_classes_are_advice(heap: Lines) -> None:
    damage = Damage(heap)
    assert heap.state().stale_hints() == 0
    damage.row_bit(damage.free[0], SLOT_CLASS + 1)
    damage.row_bit(damage.slab, SLOT_CLASS + 1)  # (It has room: this is not stale.)
    damage.row_bit(damage.slab, SMALL_CLASS + 1)
    damage.row_bit(damage.runs[0], 1)
    audit(heap.state())
    assert heap.state().stale_hints() == 3


@pytest.mark.parametrize("opened", [1 << 18, (1 << 18) + 5, (1 << 31) - 3])
def test_numbers_of_places_wrap_around(heap: Lines, opened: int) -> None:
    damage = Damage(heap)
    heap.handle[layout.LINES.value + SLOT_CLASS * 8] = opened << 32
    damage.set(damage.geometry.places + SLOT_CLASS * damage.geometry.ring + 1, 0)
    for behind in (1, 2, 16):
        number = (opened - behind) & layout.NUMBER_MASK.value
        damage.place(number % heap.geometry.ring, damage.slab, number)
    audit(heap.state())
    ahead = (opened + 1) & layout.NUMBER_MASK.value
    damage.place(ahead % heap.geometry.ring, damage.slab, ahead)
    if opened > 1 << 18:
        with pytest.raises(CorruptionError, match="that their line has not opened"):
            audit(heap.state())
