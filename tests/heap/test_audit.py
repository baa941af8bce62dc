"""The audit finds damage: each planted corruption is named by the invariant that it breaks."""

from collections.abc import Callable

import pytest
import torch

from devalloc import CorruptionError, Heap
from devalloc.heap.state import RUN, SLAB, Geometry
from devalloc.kernels import layout
from devalloc.sizes import CLASS_SIZES, PAGE_BYTES
from tests.support import assert_empty

PAGES = 70  # two chunks, the second of six pages
TRANSIT = layout.TRANSIT.value


class Damage:
    """Words of a heap at rest, found by what they mean."""

    def __init__(self, heap: Heap) -> None:
        self.geometry: Geometry = heap._geometry
        self.words = heap._handle
        state = heap._state()
        self.slabs = [int(page) for page in (state.kind == SLAB).nonzero()[0]]
        self.runs = [int(page) for page in (state.kind == RUN).nonzero()[0]]
        self.free = [int(page) for page in state.page_free.nonzero()[0]]

    def add(self, at: int, value: int) -> None:
        self.words[at] += value

    def flip(self, at: int, bit: int) -> None:
        self.words[at] ^= torch.tensor(1, dtype=torch.int64).to(self.words.device) << bit

    def page(self, page: int) -> int:
        return self.geometry.page_words + page

    def flip_page_bit(self, page: int) -> None:
        self.flip(self.geometry.page_bits + page // 64, page % 64)

    def live_word(self, page: int, word: int = 0) -> int:
        return self.geometry.live_bits + page * layout.LIVE_WORDS.value + word

    def shelve(self, page: int, use: int, length: int = 1) -> None:
        self.words[self.geometry.shelf] = use + (page << 32) + (length << layout.BATCH_SHIFT.value)
        self.add(TRANSIT + SHELVED, length)

    def hint(self, row: int) -> int:
        return self.geometry.hints + row * self.geometry.row_words

    def stripe(self, cls: int) -> int:
        step = self.geometry.stripes * layout.STRIPE_STRIDE.value
        return layout.STRIPES.value + cls * step


def forget_hint(damage: Damage, row: int) -> None:
    damage.words[damage.hint(row)] = 0


def empty_slab(damage: Damage) -> None:
    """A slab with its last slots free in live bits and account, but not retired."""
    page = damage.slabs[0]
    live = sum(int(damage.words[damage.live_word(page, word)]).bit_count() for word in range(64))
    for word in range(64):
        damage.words[damage.live_word(page, word)] = 0
    damage.add(damage.page(page), -live)


def move_live_bit(damage: Damage) -> None:
    """The number of live bits is right, but one is between two slots."""
    damage.flip(damage.live_word(damage.slabs[0]), 0)
    damage.flip(damage.live_word(damage.slabs[0], 1), 0)


KIND = layout.KIND_SHIFT.value
ORDERS = layout.ORDERS.value
SHELVED = layout.SHELVED.value
FOR_RUN = layout.FOR_RUN.value
SLOT_CLASS = CLASS_SIZES.index(1024)

PLANTED: dict[str, tuple[str, Callable[[Damage], None]]] = {
    "a live bit too many": ("H4", lambda d: d.flip(d.live_word(d.slabs[0]), 63)),
    "a live bit too few": ("H4", lambda d: d.flip(d.live_word(d.slabs[0]), 0)),
    "a live bit beyond the last slot": ("H4", lambda d: d.flip(d.live_word(d.slabs[0], 1), 0)),
    "a live bit in a free page": ("H4", lambda d: d.flip(d.live_word(d.free[0]), 5)),
    "a live bit in a run": ("H4", lambda d: d.flip(d.live_word(d.runs[0], 63), 63)),
    "a live bit between slots": ("H4", move_live_bit),
    "a run without a live bit": ("H4", lambda d: d.flip(d.live_word(d.runs[0]), 0)),
    "an account too high": ("H4", lambda d: d.add(d.page(d.slabs[0]), 1)),
    "an account too low": ("H4", lambda d: d.add(d.page(d.slabs[0]), -1)),
    "credits without slots": ("H4", lambda d: d.add(d.stripe(SLOT_CLASS), 1)),
    "an attached page without a batch": ("H4", lambda d: d.flip(d.page(d.slabs[0]), 30)),
    "a slab of no class": ("H4", lambda d: d.add(d.page(d.slabs[0]), 40 << 24)),
    "a page of no kind": ("H4", lambda d: d.add(d.page(d.free[0]), 3 << KIND)),
    "a free page that is a slab": ("H1", lambda d: d.add(d.page(d.free[0]), 1 << KIND)),
    "a used page that is free": ("H1", lambda d: d.flip_page_bit(d.slabs[0])),
    "a page of a run that is free": ("H1", lambda d: d.flip_page_bit(d.runs[0] + 1)),
    "runs that overlap": ("H1", lambda d: d.add(d.page(d.runs[0]), 1)),
    "a run inside a run": ("H1", lambda d: d.add(d.page(d.runs[0] + 1), (2 << KIND) + 1)),
    "a run beyond the heap": ("H1", lambda d: d.add(d.page(d.runs[0]), 1000)),
    "a run of no length": ("H1", lambda d: d.add(d.page(d.runs[0]), -3)),
    "a run too short": ("H2", lambda d: d.add(d.page(d.runs[0]), -1)),
    "a page that is lost": ("H2", lambda d: d.flip_page_bit(d.free[0])),
    "a run that is lost": ("H2", lambda d: d.add(d.page(d.runs[0]), -(2 << KIND) - 3)),
    "a page beyond the end": ("H2", lambda d: d.flip_page_bit(PAGES)),
    "a wrong number of used pages": ("H2", lambda d: d.add(layout.USED.value, 1)),
    "a wrong number of pages in batches": ("H4", lambda d: d.add(layout.HELD.value, 1)),
    "a wrong number of pages on the shelf": ("H2", lambda d: d.add(TRANSIT + SHELVED, 1)),
    "a slab on the shelf that is in use": ("H4", lambda d: d.shelve(d.slabs[0], SLOT_CLASS)),
    "a free page on the shelf": ("H1", lambda d: d.shelve(d.free[0], SLOT_CLASS)),
    "nothing on the shelf, for some use": ("H4", lambda d: d.shelve(d.free[0], SLOT_CLASS, 0)),
    "more on the shelf than there is": ("H4", lambda d: d.shelve(PAGES - 1, SLOT_CLASS, 3)),
    "a run on the shelf that is in use": ("H4", lambda d: d.shelve(d.runs[0], FOR_RUN, 3)),
    "memory being moved": ("H2", lambda d: d.add(TRANSIT, 1)),
    "a hidden slab": ("H3", lambda d: d.flip(d.page(d.slabs[0]), 31)),
    "an empty slab": ("H3", empty_slab),
    "no hint for a slab": ("H3", lambda d: forget_hint(d, ORDERS + SLOT_CLASS)),
    "no hint for single pages": ("H3", lambda d: forget_hint(d, 0)),
    "no hint for long runs": ("H3", lambda d: forget_hint(d, 5)),
}


def make_heap() -> Heap:
    """At rest: a slab with live and free slots, adjacent runs, free pages in both chunks."""
    heap = Heap(PAGES * PAGE_BYTES)
    kept = heap.malloc([1024] * 3)
    heap.malloc([3 * PAGE_BYTES])
    heap.malloc([3 * PAGE_BYTES])
    assert (kept != 0).all()
    heap.trim()
    return heap


@pytest.mark.parametrize("name", PLANTED)
def test_planted_corruption(name: str) -> None:
    invariant, plant = PLANTED[name]
    with make_heap() as heap:
        heap.audit()
        good = heap._handle.clone()
        damage = Damage(heap)
        assert len(damage.slabs) == 1
        assert len(damage.runs) == 2
        plant(damage)
        assert not torch.equal(heap._handle, good)
        with pytest.raises(CorruptionError, match=f"^{invariant}: "):
            heap.audit()
        # The audit of a damaged heap changes nothing; repaired, it is sound again.
        heap._handle.copy_(good)
        heap.audit()


def test_a_message_says_where() -> None:
    with make_heap() as heap:
        page = Damage(heap).slabs[0]
        heap._handle[heap._geometry.page_words + page] += 1
        with pytest.raises(CorruptionError, match=rf"1 pages, the first is page {page} \(word 0x"):
            heap.audit()
        heap._handle[heap._geometry.page_words + page] -= 1


def test_sound_heaps_pass() -> None:
    with make_heap() as heap:
        heap.audit()
        # With batches attached as well, before and after the pages are given back.
        addrs = heap.malloc([64, 200, 5000, PAGE_BYTES])
        heap.audit()
        heap.free(addrs)
        heap.audit()
        heap.reset()
        assert_empty(heap)
