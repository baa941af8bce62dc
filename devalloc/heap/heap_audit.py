"""What must hold of a heap at rest, checked for every page, magazine and place.

H1  live blocks are disjoint and inside the heap: runs do not overlap
H2  every page is free, a slab, in one run or given back; nothing beyond the last page is free
H3  everything that is free can be found: no slab without blocks is forgotten, and searches begin
    inside the heap
H4  page words, live bits, magazines and rings agree: the account of a slab is its live bits and its
    slots in magazines, that of a run is 1; live bits are set only where blocks begin

A slot in a magazine may be live, or be in two magazines: a program that reserved some slot of a
page claims any slot whose live bit is clear, and so does the program that takes the span. Only
their number counts.

Lines, places and the rows of classes are advice (see `State.stale_hints`). Of these only what would
lead a kernel astray is checked: places that were not opened, and pages that do not exist.
"""

from __future__ import annotations

import numpy as np

from devalloc.errors import CorruptionError
from devalloc.heap.geometry import CLASSES
from devalloc.heap.state import RUN, SIZES, SLAB, SLOTS, State
from devalloc.kernels import layout
from devalloc.sizes import PAGE_BYTES

_SLAB_BITS = layout.SPANNED.value | (0x1FFF << layout.HALF_SHIFT.value) | (1 << 32) - 1
_NUMBERS = layout.NUMBER_MASK.value + 1


def audit(state: State) -> None:
    """Check H1 to H4; raise CorruptionError naming the invariant and where it does not hold."""
    _audit_words(state)
    _audit_pages(state)
    _audit_spans(state)
    _audit_slots(state)
    _audit_places(state)


def _fail(wrong: np.ndarray, message: str, noun: str, words: np.ndarray) -> None:
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise CorruptionError(
            f"{message}: {int(wrong.sum())} {noun}s, the first is {noun} {at} "
            f"(word {int(words[at]):#x})"
        )


def _fail_pages(state: State, wrong: np.ndarray, message: str) -> None:
    _fail(wrong, message, "page", state.words)


def _audit_words(state: State) -> None:
    """The words that never change, the hints, and what lies beyond the last page."""
    g = state.geometry
    known = np.array(g.header(0), dtype=np.int64)
    differs = state.fixed[: len(known)] != known
    differs[[layout.BASE.value, layout.BELL.value]] = False
    _fail(differs, "H4: the geometry is not that of the heap", "word", state.fixed)
    start, step = layout.HINTS.value, layout.HINT_STRIDE.value
    hints = state.fixed[start : start + layout.HINT_COPIES.value * step : step]
    wrong = (hints < 0) | (hints > g.chunks)
    _fail(wrong, "H3: hints of where free pages begin that lie beyond the heap", "word", hints)
    if g.grows:
        first = layout.EXTENT.value
        extents = state.fixed[first : first + layout.EXTENT_COPIES.value]
        _fail(extents != state.pages, "H4: how far the heap has grown is wrong", "word", extents)
    beyond = np.array(
        [int(state.row_bits(row)[state.pages :].sum()) for row in range(len(state.rows))]
    )
    if beyond[0]:
        raise CorruptionError(f"H2: pages beyond the heap's end are free: {beyond[0]}")
    _fail(beyond[1:] != 0, "H2: classes with pages beyond the heap's end", "class", beyond[1:])


def _audit_pages(state: State) -> None:
    """H1, H2: free pages, slabs and runs tile the heap; their words are possible ones."""
    pages = state.pages
    slab, run = state.kind == SLAB, state.kind == RUN
    other = (state.words != 0) & ~slab & ~run
    other |= slab & ((state.words & ~_SLAB_BITS) != 0)
    length = state.run_pages << layout.HALF_SHIFT.value
    other |= run & ((state.words & ~layout.OUT_MASK.value) != layout.RUN.value + length)
    _fail_pages(state, other, "H4: page words of no kind")
    _fail_pages(state, slab & (state.cls >= CLASSES), "H4: slabs of no class")
    beyond = run & ((state.run_pages < 1) | (state.run_pages > pages - np.arange(pages)))
    _fail_pages(state, beyond, "H1: runs that reach beyond the heap, or have no pages")
    owners = state.inside + slab + state.page_free + state.absent
    _fail_pages(state, owners > 1, "H1: pages with more than one owner")
    _fail_pages(state, owners < 1, "H2: pages without an owner that are not free")
    _fail_pages(state, run & (state.out != 1), "H4: runs whose account is not 1")
    half = (state.words >> layout.HALF_SHIFT.value) & layout.HALF_MASK.value
    _fail_pages(state, slab & (half != state.slots // 2), "H4: slabs with a wrong half")


def _audit_spans(state: State) -> None:
    """H4: what is in magazines are slots of slabs."""
    spans = state.spans

    def fail(wrong: np.ndarray, message: str) -> None:
        if wrong.any():
            at = np.flatnonzero(wrong)[0]
            raise CorruptionError(
                f"{message}: {int(wrong.sum())} magazines, the first is magazine "
                f"{int(spans.magazine[at])} (word {int(spans.word[at]):#x}, page "
                f"{int(spans.page[at])})"
            )

    fail(spans.cls < 0, "H4: magazines of no class")
    inside = spans.page < state.pages
    page = np.where(inside, spans.page, 0)
    theirs = inside & (state.kind[page] == SLAB) & (state.cls[page] == spans.cls)
    fail(~theirs, "H4: magazines whose page is no slab of their class")
    slot, rest = np.divmod(spans.granule * 16, SIZES[spans.cls])
    beyond = (rest != 0) | (spans.count < 1) | (slot + spans.count > SLOTS[spans.cls])
    fail(beyond, "H4: magazines with slots that their page does not have")
    fail(spans.count * SIZES[spans.cls] > PAGE_BYTES // 2, "H4: magazines with over half a page")


def _audit_slots(state: State) -> None:
    """H3, H4: live bits, accounts and magazines agree."""
    slab, run = state.kind == SLAB, state.kind == RUN
    bits, misplaced = state.live_bits()
    _fail_pages(state, run & (bits != 1), "H4: runs without exactly one live bit")
    _fail_pages(state, misplaced, "H4: live bits where no block can begin")
    _fail_pages(state, slab & (state.out > state.slots), "H4: more slots out than there are")
    wrong = slab & (state.out != bits + state.held)
    if wrong.any():
        page = int(np.flatnonzero(wrong)[0])
        _fail_pages(
            state,
            wrong,
            f"H4: accounts that are not live bits and slots in magazines (page {page}: "
            f"{state.out[page]} out, {bits[page]} live bits, {state.held[page]} in magazines)",
        )
    forgotten = slab & (state.out == 0) & ~state.kept
    _fail_pages(state, forgotten, "H3: slabs with nothing out that were not given back")


def _audit_places(state: State) -> None:
    """H4: no ring has places that its line has not opened, or that lead beyond the heap."""
    g = state.geometry
    words, opened = state.places()

    def fail(wrong: np.ndarray, message: str) -> None:
        if wrong.any():
            line, place = np.argwhere(wrong)[0]
            raise CorruptionError(
                f"{message}: {int(wrong.sum())} places, the first is place {place} of line "
                f"{line % g.stripes} of class {line // g.stripes} "
                f"(word {int(words[line, place]):#x})"
            )

    some = words != 0
    number = (words >> layout.NUMBER_SHIFT.value) & layout.NUMBER_MASK.value
    misplaced = some & (number % g.ring != np.arange(g.ring))
    fail(misplaced, "H4: places with the number of another one")
    # Only the lower bits of the number of a place are known. (A place is overwritten when the ring
    # has gone round, long before half of the numbers are used up.)
    behind = (opened[:, None] - 1 - number) % _NUMBERS
    fail(some & (behind >= _NUMBERS // 2), "H4: places that their line has not opened")
    for shift in (0, layout.SECOND_SHIFT.value):
        page = (words >> shift) & layout.PAGE_MASK.value
        wrong = (page >= state.pages) & (page != layout.PAGE_MASK.value)
        fail(wrong, "H4: places that lead beyond the heap")
