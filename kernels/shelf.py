"""The shelf: pages that one program has emptied, kept for the next that can use them as they are.

A launch that takes whole pages and gives them back is mostly followed by one like it, whose
programs would take at the page level what those before gave back there: page bits, page words and
hints, down and up again. So the shelf has places, one for each program
number (modulo how many there are). What a program frees stays at its place, and if the next program
of that number wants as many pages for the same use, it takes them by a look and a swap.

Shared words and their writers
    *Place*: 0, or pages and their use, in the form of a stripe word with the use in place of the
    credits. put and take compare and swap it. clear_place exchanges it for 0: in a flush, or for a
    put that finds it occupied.
    *SHELVED*: a count of the pages at every 32nd place. A put adds before its swap, a take and a
    flush subtract after theirs, so it is never too low. A bit in all of them closes the shelf. A
    search that would fail sets it; a put that was not let in clears it if there are pages again.
    *Page word*: whoever clears a place exchanges those of its pages for FREE.
Right
    Whoever has the word has the pages, alone. All live bits in them are clear. A slab is detached
    and hidden, and all its slots are out: they are accounted, as cleared and not yet subtracted,
    and the word stands for that subtraction. So nobody draws from it, and no valid free comes to
    it. A run has the page word that its free left. On the shelf page words do not change: a free
    that has yet to settle such a page, which it once left hidden, sees that the page is full.
Order
    put: behind the fence of free, whose clears have returned. take acquires; a flush fences.
Exhaustion
    A search that would fail flushes the shelf, in transit, unless all counts of SHELVED are 0. A
    put moves the epoch, so between two quiet passes the shelf only shrinks. (The put does not wait
    for the epoch, but until that has moved, the free has not returned.)
Reuse (ABA)
    The word at a place is all the right there is, whoever put it.
"""

import triton
import triton.language as tl

from .atomics import atomic_cas, atomic_load, fence
from .bits import low_mask
from .lanes import any_lane
from .layout import (
    G_PAGES,
    G_PLACES,
    G_SHELF,
    G_SHELVABLE,
    SHELF_CLOSED,
    SHELVED,
    TRANSIT,
    TRANSIT_STRIDE,
    TRANSIT_STRIPES,
    USED,
    load_geometry,
    pack_stripe,
    page_word_ptr,
    program_index,
    stripe_credits,
    stripe_place,
)
from .pages import (
    EPOCH,
    count_given,
    enter_transit,
    follow_peak,
    give_bits,
    leave_transit,
    transit_ptr,
)

CLOSED = tl.constexpr((1 << 30) - 1)  # as many pages as no shelf holds


@triton.jit
def own_place(heap):
    """The place (int32) of this program."""
    return program_index() & (load_geometry(heap, G_PLACES).to(tl.int32) - 1)


@triton.jit
def place_ptr(heap, place):
    return heap + load_geometry(heap, G_SHELF) + place


@triton.jit
def shelved_ptr(heap, place):
    """The word of SHELVED for ``place``."""
    return heap + TRANSIT + SHELVED + (place & (TRANSIT_STRIPES - 1)) * TRANSIT_STRIDE


@triton.jit
def estimate_shelved(heap, shelved):
    """How many pages (int32) lie on the shelf, if every word of SHELVED is ``shelved`` (int32)."""
    return shelved * tl.minimum(load_geometry(heap, G_PLACES).to(tl.int32), TRANSIT_STRIPES)


@triton.jit
def take_shelved(heap, length, use):
    """Take ``length`` pages (int32) for ``use`` from this program's place: the first, or -1."""
    ptr = place_ptr(heap, own_place(heap))
    word = atomic_load(ptr)
    page, pages = stripe_place(word)
    first = page * 0 - 1
    if (pages == length) & (stripe_credits(word) == use):
        if tl.atomic_cas(ptr, word, word & 0, sem="acquire") == word:
            count_shelved(heap, -pages)
            first = page
    return first


@triton.jit(noinline=True)
def clear_place(heap, place):
    """Give back what lies at ``place`` (int32 scalar). Returns how many pages that was."""
    lane = tl.arange(0, 64)
    ptr = place_ptr(heap, place)
    length = place * 0
    if atomic_load(ptr) != 0:
        enter_transit(heap)
        page, length = stripe_place(tl.atomic_xchg(ptr, length.to(tl.int64), sem="relaxed"))
        # (In 64 bits: from 32 Triton 3.6 makes an instruction for AMD that LLVM does not know.)
        state_ptr = page_word_ptr(heap, (page + lane).to(tl.int64))
        tl.atomic_xchg(state_ptr, lane.to(tl.int64) * 0, mask=lane < length, sem="relaxed")
        # Page words before page bits; and what the last owner did before what the next does.
        fence(heap + USED)
        tl.atomic_add(shelved_ptr(heap, place), -length.to(tl.int64), sem="relaxed")
        used = count_given(heap, length)
        give_bits(heap, page >> 6, low_mask(length) << (page & 63).to(tl.int64))
        follow_peak(heap, used)
        leave_transit(heap, (length > 0).to(tl.int32))
    return length


@triton.jit
def count_shelved(heap, pages):
    """Add ``pages`` (int32 scalar) to what lies at this program's place."""
    tl.atomic_add(shelved_ptr(heap, own_place(heap)), pages.to(tl.int64), sem="relaxed")


@triton.jit
def announce_put(heap, length):
    """Count ``length`` pages (int32 scalar) that the program is about to put on the shelf. Returns
    what :func:`put_on_shelf` wants. (One lane acts, because the result of an atomic on a scalar is
    waited for at once.)"""
    lane = tl.arange(0, 32)
    change = (lane * 0).to(tl.int64) + length.to(tl.int64)
    ptr = shelved_ptr(heap, own_place(heap)) + lane * 0
    return tl.atomic_add(ptr, change, mask=lane == 0, sem="relaxed")


@triton.jit
def put_on_shelf(heap, page, length, use, announced):
    """Put ``length`` pages (int32 scalars), which the program has emptied and has alone, at its
    place. ``announced``: what :func:`announce_put` returned. Returns 1; or 2 if something else lay
    there, which was given back: announce and try again; or 0 if the shelf is closed or would hold
    too much."""
    lane = tl.arange(0, 32)
    most = load_geometry(heap, G_SHELVABLE).to(tl.int32)
    counted = tl.where(announced >= SHELF_CLOSED, CLOSED, announced.to(tl.int32))
    shelved = tl.sum(tl.where(lane == 0, counted, 0), axis=0)
    done = length * 0
    # (Announced before it can be found: the branch depends on what the announcement returned.)
    if shelved + length <= most:
        word = pack_stripe(page, length, use)
        old = atomic_cas(place_ptr(heap, own_place(heap)), word & 0, word)
        done = tl.where(old == 0, 1, 2)
    if done == 1:
        tl.atomic_add(transit_ptr(heap), (done * 0 + EPOCH).to(tl.int64), sem="relaxed")
    else:
        count_shelved(heap, -length)
        if done == 2:
            clear_place(heap, own_place(heap))
        elif shelved == CLOSED:
            open_shelf(heap)
    return done


@triton.jit(noinline=True)
def open_shelf(heap):
    """Open the shelf again if no more than seven eighths of the pages are in use; returns 0."""
    lane = tl.arange(0, TRANSIT_STRIPES)
    pages = load_geometry(heap, G_PAGES)
    used = atomic_load(heap + USED)
    if used <= pages - (pages >> 3):
        opened = (lane * 0).to(tl.int64) + (SHELF_CLOSED ^ -1)
        tl.atomic_and(shelved_ptr(heap, lane), opened, sem="relaxed")
    return (used & 0).to(tl.int32)


@triton.jit(noinline=True)
def next_place(heap, done, begin):
    """Find a place where something lies, round the shelf from place ``begin`` on, the first
    ``done`` of which were looked at before. Returns how many have been looked at now, that place
    being the last of them (int32 scalars); more than there are places if there is none."""
    lane = tl.arange(0, 64)
    places = load_geometry(heap, G_PLACES).to(tl.int32)
    found = done * 0
    while (done < places) & (found == 0):
        at = (begin + done + lane) & (places - 1)
        words = atomic_load(place_ptr(heap, at), done + lane < places)
        found = tl.min(tl.where(words != 0, lane + 1, 65), axis=0)
        done += tl.minimum(found, 64)
        found = tl.where(found <= 64, found, 0)
    return tl.where(found != 0, done, places + 1)


@triton.jit
def flush_shelf(heap, most):
    """Close the shelf, as others will need the pages soon, and give back what lies at up to
    ``most`` (int32 scalar) places. Returns how many pages: 0 if nothing lies on it. Programs begin
    at different places."""
    gained = most * 0
    lane = tl.arange(0, TRANSIT_STRIPES)
    closed = (lane * 0).to(tl.int64) + SHELF_CLOSED
    counted = tl.atomic_or(shelved_ptr(heap, lane), closed, sem="relaxed")
    if any_lane(counted.to(tl.int32) != 0):
        places = load_geometry(heap, G_PLACES).to(tl.int32)
        begin = program_index() << 6
        done = gained
        while (done < places) & (most > 0):
            done = next_place(heap, done, begin)
            if done <= places:
                given = clear_place(heap, (begin + done - 1) & (places - 1))
                gained += given
                most -= (given > 0).to(tl.int32)
    return gained
