"""The audit finds damage: each planted corruption is named by the invariant that it breaks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from devalloc import CorruptionError, Heap
from devalloc.heap import heap_audit
from devalloc.heap.heap_audit import audit
from devalloc.heap.state import RUN, SLAB
from devalloc.kernels import layout
from devalloc.sizes import CLASS_SIZES, CLASS_SLOTS, PAGE_BYTES
from tests.conftest import ON_GPU
from tests.heap.bare import BareHeap
from tests.support import assert_empty

on_the_host = pytest.mark.skipif(ON_GPU, reason="damages a state on the host")

PAGES = 70  # two chunks, the second of six pages
SLOT_CLASS = CLASS_SIZES.index(1024)
SMALL_CLASS = CLASS_SIZES.index(64)


class Damage:
    """Words of a heap at rest, found by what they mean."""

    def __init__(self, heap: BareHeap) -> None:
        self.geometry = g = heap.geometry
        self.words = heap.handle
        state = heap.state()
        self.slab = int(np.flatnonzero((state.kind == SLAB) & (state.cls == SLOT_CLASS))[0])
        self.small = int(np.flatnonzero((state.kind == SLAB) & (state.cls == SMALL_CLASS))[0])
        self.runs = np.flatnonzero(state.kind == RUN).tolist()
        self.free = np.flatnonzero(state.page_free).tolist()
        self.magazines = [g.magazine_words.start + int(at) for at in state.spans.magazine]

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
        self.set(self.word(run), layout.RUN.value + (value << layout.HALF_SHIFT.value) + 1)

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
    d.length(d.runs[0] + 1, 1)


def forget_slab(d: Damage) -> None:
    for slot in range(3):
        d.live(d.slab, 64 * slot)
    d.set(d.word(d.slab), int(d.words[d.word(d.slab)]) & ~layout.KEPT.value & ~0xFFFFFF)


def span_of_another_page(d: Damage) -> None:
    d.span(0, d.slab, 0, 2, SLOT_CLASS)


PLANTED: dict[str, tuple[str, Callable[[Damage], None]]] = {
    "a changed geometry": ("H4: the geometry", lambda d: d.add(layout.CHUNKS_AND_ROWS.value, 1)),
    "a hint below the heap": ("H3: hints of", lambda d: d.set(layout.HINTS.value, -1)),
    "a hint beyond the heap": ("H3: hints of", lambda d: d.set(layout.HINTS.value + 8, 3)),
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
    "a slab and a run": ("H4: page words of no kind", lambda d: d.flip(d.word(d.slab), 56)),
    "a slab of no class": ("H4: slabs of no class", lambda d: d.add(d.word(d.slab), 40 << 24)),
    "a wrong half": ("H4: slabs with a wrong half", lambda d: d.add(d.word(d.slab), 1 << 32)),
    "a run beyond the heap": ("H1: runs that reach", lambda d: d.length(d.runs[0], 1000)),
    "a run of no length": ("H1: runs that reach", lambda d: d.length(d.runs[0], 0)),
    "a run of the longest length": (
        "H1: runs that reach",
        lambda d: d.length(d.runs[0], 0xFFFFFF),
    ),
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
    "a magazine with slots of another page": ("H4: accounts", span_of_another_page),
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
    "a place that no program opened": (
        "H4: places that their line has not opened",
        lambda d: d.place(3, d.slab, 3),
    ),
    "a place beyond the heap": (
        "H4: places that lead beyond the heap",
        lambda d: d.place(1, PAGES, 1),
    ),
}


@pytest.fixture
def heap() -> BareHeap:
    """At rest: a slab with live and free slots, one with slots in two magazines, adjacent runs,
    and free pages in both chunks."""
    heap = BareHeap(PAGES)
    heap.malloc([1024] * 3)
    heap.malloc([3 * PAGE_BYTES] * 2)
    small = heap.malloc_scalars(4, 64)
    heap.free_scalars(small[:2])
    return heap


@on_the_host
@pytest.mark.parametrize("name", PLANTED)
def test_planted_corruption(name: str, heap: BareHeap) -> None:
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
    source = Path(heap_audit.__file__).read_text()
    messages = re.findall(r'"(H\d: [^"{]*)', source.partition("def audit")[2])
    messages = [message for message in messages if not message.endswith(".")]
    assert len(messages) > 20
    for message in messages:
        known = [planted for planted, _ in PLANTED.values()] + [planted for planted, *_ in GROWN]
        assert any(message.startswith(planted) for planted in known), message


GROWN = [
    ("H4: how far the heap has grown is wrong", layout.EXTENT.value + 3, 1),
    ("H1: pages with more than one owner", 1, 1),  # of the row: a page that was given back is free
    ("H2: pages beyond the heap's end are free", 3, 1),
]


@pytest.mark.parametrize(("message", "at", "change"), GROWN)
def test_planted_corruption_of_a_heap_that_grows(message: str, at: int, change: int) -> None:
    with Heap("4MiB", limit="32MiB") as heap:
        heap.grow("8MiB")
        heap.malloc([4 << 20])
        last = heap.malloc([4 << 20, 4 << 20])
        heap.free(last[:1])
        assert heap.trim() == 4 << 20
        heap.audit()
        if at < layout.EXTENT.value:
            at += heap._geometry.rows
        heap.handle[at] += change
        with pytest.raises(CorruptionError, match=f"^{message}"):
            heap.audit()
        heap.handle[at] -= change
        heap.audit()


@on_the_host
def test_messages_say_where(heap: BareHeap) -> None:
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


@on_the_host
def test_rows_of_classes_are_advice(heap: BareHeap) -> None:
    damage = Damage(heap)
    assert heap.state().stale_hints() == 0
    damage.row_bit(damage.free[0], SLOT_CLASS + 1)
    damage.row_bit(damage.slab, SLOT_CLASS + 1)  # (It has room: this is not stale.)
    damage.row_bit(damage.slab, SMALL_CLASS + 1)
    damage.row_bit(damage.runs[0], 1)
    audit(heap.state())
    assert heap.state().stale_hints() == 3


@on_the_host
def test_magazines_may_have_slots_in_common(heap: BareHeap) -> None:
    damage = Damage(heap)
    damage.set(damage.magazines[1], int(damage.words[damage.magazines[0]]))
    audit(heap.state())


@on_the_host
@pytest.mark.parametrize("opened", [1, 1 << 18, (1 << 18) + 5, (1 << 31) - 3])
def test_numbers_of_places_wrap_around(heap: BareHeap, opened: int) -> None:
    damage = Damage(heap)
    heap.handle[damage.geometry.lines_at + SLOT_CLASS * 8] = opened << 32
    damage.set(damage.geometry.places + SLOT_CLASS * damage.geometry.ring + 1, 0)
    for behind in (1, 2, 16):
        number = (opened - behind) & layout.NUMBER_MASK.value
        damage.place(number % heap.geometry.ring, damage.slab, number)
    audit(heap.state())
    ahead = (opened + 1) & layout.NUMBER_MASK.value
    damage.place(ahead % heap.geometry.ring, damage.slab, ahead)
    with pytest.raises(CorruptionError, match="that their line has not opened"):
        audit(heap.state())


def test_a_damaged_heap_says_so() -> None:
    with Heap(PAGES * PAGE_BYTES) as heap:
        (addr,) = heap.malloc([1024]).tolist()
        good = heap.handle.clone()
        at = heap._geometry.records + (addr - heap.base) // PAGE_BYTES * layout.RECORD_WORDS.value
        heap.handle[at + layout.PAGE_WORD.value] += 1
        with pytest.raises(CorruptionError, match=r"^H4: accounts"):
            heap.audit()
        heap.handle.copy_(good)
        heap.audit()


def test_sound_heaps_pass() -> None:
    with Heap(PAGES * PAGE_BYTES) as heap:
        kept = heap.malloc([1024] * 3)
        heap.audit()
        # With open places, spans in magazines and runs as well.
        addrs = heap.malloc([64, 200, 5000, PAGE_BYTES, 3 * PAGE_BYTES])
        heap.audit()
        heap.free(addrs)
        heap.audit()
        heap.free(kept)
        assert_empty(heap)
