"""Lines: slots of one class, one after the other, from pages that are opened when they are wanted.

For each class and stripe the line word counts tickets, and a ring has the pages of its places.
Ticket t of a class with s slots to a page is slot t mod s of place t div s. The program that
gets the first ticket of a place *opens* it: it finds a page and writes it into the ring. The others
of the place read the ring until it is there. So programs that want many pages at one time open them
all at one time, and empty pages are not cached: they are free.

A place has a fresh page; or, as a *pair*, half of the slots of each of two pages of the class of
which half is free. A slot is promised, and accounted in the page word, before its live bit is set,
so a ticket of a pair that meets a live bit finds another clear one in its page.
"""

import triton
import triton.language as tl

from devalloc.kernels.atomics import atomic_load
from devalloc.kernels.bits import divide, mix
from devalloc.kernels.lanes import any_lane, first_lane, lane_index, pick, width
from devalloc.kernels.layout import class_slots, program_index
from devalloc.kernels.pages import one_of

from .layout import (
    CLASS_SHIFT,
    IS_LATEST,
    LAP_SHIFT,
    LATEST,
    LATEST_SHIFT,
    LINE_MASK,
    NO_PAGE,
    OPENED,
    PAIR,
    SPARSE,
    SPARSE_SHIFT,
    UNUSED_SHIFT,
    hint_ptr,
    is_sparse,
    lap_of,
    line_of,
    line_ptr,
    load_records,
    load_ring_log2,
    own_stripe,
    page_out,
    page_word_ptr,
    place_page,
    place_ptr,
    ring_index,
    second_ptr,
    slab_word,
)
from .pages import take_pages, window

LEAST_SPARSE = tl.constexpr(1)  # sparse pages of a line that are not worth a look: its open place
SWAPS = tl.constexpr(6)


@triton.jit
def line_credits(word):
    return word.to(tl.int32)


@triton.jit
def line_places(word):
    """Places opened so far (int32, 20 bits)."""
    # (Credits below zero have borrowed one from the upper half.)
    return (((word + (1 << 31)) >> 32) & LINE_MASK).to(tl.int32)


@triton.jit
def ticket_place(word, rank, slots):
    """``(place, slot, opened)`` of the ``rank``-th of the tickets that were taken by a subtraction
    that returned line word ``word``."""
    left = line_credits(word) - 1 - rank
    opened = left >= 0
    behind = tl.maximum(-1 - left, 0)
    ahead = divide(behind, slots)
    places = line_places(word)
    place = tl.where(opened, places - 1, places + ahead) & LINE_MASK
    slot = tl.where(opened, slots - 1 - left, behind - ahead * slots)
    return place, slot, opened


@triton.jit
def take_tickets(heap, line, need):
    """Subtract ``need`` (int32 scalar) from a line. Returns the line word as it was, LATEST, and
    the hint where free pages begin: all in one round trip to memory."""
    lane = tl.arange(0, 4)
    hints = hint_ptr(heap) + lane * 0
    ptr = tl.where(lane == 2, hints, line + lane * LATEST)
    change = tl.where(lane == 0, -need, 0).to(tl.int64)
    words = tl.atomic_add(ptr, change, mask=lane < 3, sem="relaxed")
    return pick(words, 0), pick(words, 1), pick(words, 2).to(tl.int32)


@triton.jit
def latest_page(latest, place):
    """The page of ``place`` if it is the place that was opened last; else -1."""
    same = (latest & IS_LATEST) != 0
    same = same & (((latest >> LATEST_SHIFT) & LINE_MASK).to(tl.int32) == place)
    return tl.where(same, (latest & NO_PAGE).to(tl.int32), -1)


@triton.jit(noinline=True)
def find_pair(heap, cls, stripe, place):
    """Two pages of the line of which half is free, each with a promise of half of its slots to the
    caller: both in an int64, upper and lower half, below 0 where there is none. (Scalars.)

    The ring is the directory: 64 of the pages that the line had before are looked at.
    """
    lane = tl.arange(0, 64)
    slots = class_slots(cls)
    salt = mix(program_index() + place * 7919)
    ring = (place & 0) + 1 << load_ring_log2(heap)
    known = tl.where(lap_of(heap, place) == 1, place - ring, ring)
    at = one_of(tl.minimum(tl.maximum(known - 64, 1), 1 << 16), salt)
    index = ring_index(heap, cls, stripe, place - known + at + lane)
    places = atomic_load(place_ptr(heap, index), at + lane < known)
    page = place_page(places)
    there = (places != 0) & (page != NO_PAGE)
    words = atomic_load(page_word_ptr(load_records(heap), tl.where(there, page, 0)), there)
    same = ((words >> CLASS_SHIFT) & 63).to(tl.int32) == cls
    fits = there & same & (is_sparse(page_out(words), slots >> 1) != 0)
    first = tl.full((), -1, tl.int32)
    second = first
    tries = 0
    while (tries < SWAPS) & (second < 0) & any_lane(fits):
        tries += 1
        # From the lower half of them, but not all programs the same one.
        low = tl.min(tl.where(fits, page, 1 << 24), axis=0)
        high = tl.max(tl.where(fits, page, 0), axis=0)
        pivot = low + (
            one_of(tl.minimum(tl.maximum(high - low, 1), 1 << 16), mix(salt + tries)) >> 1
        )
        chosen = tl.min(tl.where(fits & (page >= pivot), page, 1 << 24), axis=0)
        word = pick(words, first_lane(fits & (page == chosen)))
        fits = fits & (page != chosen)
        more = tl.where(first < 0, slots - (slots >> 1), slots >> 1)
        ptr = page_word_ptr(load_records(heap), chosen)
        if tl.atomic_cas(ptr, word, word + more.to(tl.int64), sem="relaxed") == word:
            change = is_sparse(page_out(word) + more, slots >> 1) * SPARSE - SPARSE
            tl.atomic_add(line_of(heap, word), change, sem="relaxed")
            second = tl.where(first >= 0, chosen, second)
            first = tl.where(first < 0, chosen, first)
    return (first.to(tl.int64) << 32) | (second.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def find_pairs(heap, word, cls, place, opens):
    """:func:`find_pair` for the lanes (or scalar) that open a place of a line with sparse pages."""
    lane = lane_index(place)
    stripe = own_stripe(heap)
    first = lane * 0 - 1
    second = first
    tries = opens & ((word >> SPARSE_SHIFT) > LEAST_SPARSE)
    at = first_lane(tries)
    while at < width(tries):
        both = find_pair(heap, pick(cls, at), stripe, pick(place, at))
        first = tl.where(lane == at, (both >> 32).to(tl.int32), first)
        second = tl.where(lane == at, both.to(tl.int32), second)
        at = first_lane(tries & (lane > at))
    return first, second


@triton.jit
def open_places(heap, word, front, cls, slots, place, opens, nbytes):
    """Open the places whose first ticket an opening lane (or the scalar program) has. ``word``: the
    line words that the tickets came from; ``front``: the first chunk that may have free pages;
    ``nbytes``: what the program asks for in all (int32)."""
    stripe = own_stripe(heap)
    first, second = find_pairs(heap, word, cls, place, opens)
    fresh = opens & (second < 0)
    unused = slots.to(tl.int64)
    if any_lane(fresh):
        page = take_pages(heap, fresh, front, window(nbytes))
        got = fresh & (page >= 0)
        # All of a fresh page, or half of it beside one that was found.
        beside = got & (first >= 0)
        out = tl.where(beside, slots >> 1, slots)
        state = slab_word(cls, stripe, slots) + out.to(tl.int64)
        ptr = page_word_ptr(load_records(heap), tl.where(got, page, 0))
        tl.atomic_xchg(ptr, state, mask=got, sem="relaxed")
        tl.atomic_add(line_ptr(heap, cls, stripe), unused * 0 + SPARSE, mask=beside, sem="relaxed")
        second = tl.where(beside, page, second)
        first = tl.where(got & (first < 0), page, first)
    paired = opens & (second >= 0)
    index = ring_index(heap, cls, stripe, place)
    if any_lane(paired):
        tl.atomic_xchg(second_ptr(heap, index), second.to(tl.int64), mask=paired, sem="relaxed")
    state = (lap_of(heap, place) << LAP_SHIFT) + (unused << UNUSED_SHIFT)
    state = state + tl.where(first >= 0, first, NO_PAGE) + tl.where(paired, PAIR, 0)
    tl.atomic_xchg(place_ptr(heap, index), state, mask=opens, sem="relaxed")
    latest = ((place & LINE_MASK).to(tl.int64) << LATEST_SHIFT) + first + IS_LATEST
    latest = tl.where(paired | (first < 0), 0, latest)
    tl.atomic_xchg(line_ptr(heap, cls, stripe) + LATEST, latest, mask=opens, sem="relaxed")
    tl.atomic_add(line_ptr(heap, cls, stripe), unused + OPENED, mask=opens, sem="relaxed")


@triton.jit(noinline=True)
def open_place(heap, word, front, cls, place, nbytes):
    """:func:`open_places` for one place (scalars); returns 0."""
    open_places(heap, word, front, cls, class_slots(cls), place, place == place, nbytes)
    return place * 0


@triton.jit
def read_places(heap, index, place, wants, polls: tl.constexpr):
    """The places of the lanes (or scalar) in ``wants``, once they are open; 0 if they never are."""
    ptr = place_ptr(heap, index)
    lap = lap_of(heap, place)
    word = atomic_load(ptr, wants)
    waits = wants & (((word >> LAP_SHIFT) ^ lap) != 0)
    tries = 0
    while any_lane(waits) & (tries < polls):
        now = atomic_load(ptr, waits)
        word = tl.where(waits, now, word)
        waits = waits & (((now >> LAP_SHIFT) ^ lap) != 0)
        tries += 1
    return tl.where(waits, NO_PAGE, word)


@triton.jit
def second_page(heap, index, word, slot, slots):
    """Lanes whose slot is in the second page of a pair, and that page."""
    there = ((word & PAIR) != 0) & (slot >= slots - (slots >> 1))
    page = atomic_load(second_ptr(heap, tl.where(there, index, 0)), there)
    return there, page.to(tl.int32)


@triton.jit
def any_pair(word):
    return any_lane((word & PAIR) != 0)
