"""Free pages: one bit each, taken at the front of the heap.

Owns the chunk words and the hints. A page is taken by clearing its bit and given by setting it;
what comes back says who did. A window of more pages than the programs ask for together keeps them
apart: most openers then get the page that they guess first.
"""

import triton
import triton.language as tl

from . import layout
from .atomics import atomic_load, load_one
from .bits import floor_log2, low_mask, lowest_bit, mix, next_bit, run_starts
from .lanes import any_lane, first_lane, lane_index, pick, unite
from .layout import PAGE_BYTES

RESIDENT = tl.constexpr(4096)  # programs that may look for pages at one time
TRIES = tl.constexpr(16)


@triton.jit
def one_of(choices, salt):
    """A number in [0, choices), 1 <= choices <= 2**16, from 15 bits of a hash."""
    return ((salt & 0x7FFF) * choices) >> 15


@triton.jit
def spread(index, places):
    """The place, in [0, places), of program ``index``: multiples of the golden ratio, which keep
    successive programs far apart, however many they are. ``places`` is below 2**24."""
    turn = (index.to(tl.uint32) * 0x9E3779B9) >> 8
    return (turn.to(tl.int64) * places >> 24).to(tl.int32)


@triton.jit
def window(heap, nbytes):
    """Where to look for free pages, if each program asks for ``nbytes`` (int32): among how many,
    13/8 of what all ask for together and a page for each 16 programs, since more pages are opened
    than are filled, but at most a 32nd of the heap more; and where among these this program's own
    part begins."""
    pages = (layout.load_chunks(heap) * 64).to(tl.float32)
    programs = tl.minimum(layout.program_count(), RESIDENT)
    share = nbytes.to(tl.float32) * (1 / PAGE_BYTES)
    share = tl.minimum(share * (13 / 8) + 1 / 16, share + pages / programs * (1 / 32))
    width = tl.minimum(share * programs, 1 << 22).to(tl.int32) + 2
    share = tl.minimum(share, pages / programs)
    index = layout.program_index() & (RESIDENT - 1)
    return width, (index.to(tl.float32) * share).to(tl.int32)


@triton.jit
def try_pages(heap, page, need, want, one: tl.constexpr = False):
    """Try to take ``need`` pages (int32 scalar, of one chunk) from ``page`` on, for the lanes (or
    scalar) in ``want``; for the first of them only that finds all, if ``one``. Returns which did,
    and the words of their chunks as they were."""
    ptr = layout.free_row(heap) + tl.where(want, page >> 6, 0)
    mask = low_mask(page * 0 + need) << (page & 63).to(tl.int64)
    old = tl.atomic_and(ptr, mask ^ -1, mask=want, sem="relaxed")
    old = tl.where(want, old, 0)
    won = want & ((old & mask) == mask)
    if one:
        won = won & (lane_index(page) == first_lane(won))
    back = tl.where(won, 0, old & mask)
    tl.atomic_or(ptr, back, mask=back != 0, sem="relaxed")
    return won, old


@triton.jit
def find_chunk(heap, width, salt):
    """``(chunk, word, none)`` (scalars): one of about the first ``width`` chunks with free pages,
    and its word, 0 if the 64 chunks looked at have none; and whether this was the rest of the heap.
    Moves the hint to the first with free pages, or past all that it has seen."""
    lane = tl.arange(0, 64)
    chunks = layout.load_chunks(heap)
    front = load_one(layout.hint_ptr(heap))
    choice = one_of(tl.maximum(tl.minimum(width, chunks - front), 1), salt)
    start = front + (choice & -64)
    near = start + lane
    near = tl.where(near < chunks, near, near % chunks)
    words = atomic_load(layout.free_row(heap) + near)
    some = unite(tl.where(words != 0, layout.bit_of(lane), 0))
    first = tl.minimum(start + 64, chunks)
    first = tl.where(some != 0, pick(near, lowest_bit(some)), first)
    if (start == front) & (first != front):
        tl.atomic_xchg(layout.hint_ptr(heap), first.to(tl.int64), sem="relaxed")
    step = next_bit(tl.where(some != 0, some, 1), choice & 63)
    return pick(near, step), pick(words, step), (start == front) & (first == chunks)


@triton.jit(noinline=True)
def move_hint(heap):
    """Move the hint on as :func:`find_chunk` does, rarely: a function of its own, so that kernels
    do not take longer to compile. Returns the chunk where it looked."""
    chunk, _word, _none = find_chunk(heap, 1, tl.full((), 0, tl.int32))
    return chunk


@triton.jit
def find_pages(heap, want, page, old, need, width):
    """``need`` adjacent pages of one chunk (int32 scalar, 1 to 64) for each lane (or scalar) in
    ``want``, or fewer, if there are not so many where it looks. It has not found them at ``page``,
    of whose chunk the word was ``old``. Returns the first pages, -1 where none was found and
    ``page`` in other lanes; and how many they are."""
    lane = lane_index(want)
    first = tl.where(want, -1, page)
    pending = want
    tries = need * 0
    while any_lane(pending) & (tries < TRIES):
        salt = mix(layout.program_index() + tries * 977)
        if any_lane(pending & (old == 0)):
            chunk, word, none = find_chunk(heap, (width + 63) >> 6, salt)
            tries += tl.where(none, TRIES, 0)
            page = tl.where(pending & (old == 0), chunk << 6, page)
            old = tl.where(old == 0, word, old)
        # What came back says which pages of the chunk are free.
        starts = run_starts(old, need)
        while any_lane(pending & (starts == 0) & (old != 0)):
            need = need >> 1
            starts = run_starts(old, need)
        near = mix(salt + lane) & 63
        page = (page >> 6 << 6) + next_bit(tl.where(starts != 0, starts, 1), near)
        won, old = try_pages(heap, page, need, pending & (starts != 0))
        first = tl.where(won, page, first)
        pending = pending & (won == 0)
        tries += 1
    return first, need


@triton.jit(noinline=True)
def find_adjacent(heap, page, old, need):
    """:func:`find_pages` for scalars, rarely: a function of its own, as :func:`move_hint`."""
    width, _start = window(heap, need * PAGE_BYTES)
    return find_pages(heap, page >= 0, page, old, need, width)


@triton.jit
def take_adjacent(heap, need, most):
    """Take adjacent pages of one chunk: ``need`` (int32 scalar, 1 to 64), or fewer if there are not
    so many where it looks. ``most``: what a program of this launch may need. Returns the first and
    how many, 0 if others always were there before."""
    lane = tl.arange(0, 32)
    there = (layout.load_pages(heap) + 63) >> 6
    # One program after the other, from the front: if all is free there, no two of them meet. What a
    # program finds there otherwise are guesses of others, so it also guesses behind all these.
    step_log2 = floor_log2(most * 2 - 1)
    index = layout.program_index() & ((1 << 24) - 1)
    programs = tl.minimum(layout.program_count(), 1 << 24).to(tl.int32)
    at = (index >> (6 - step_log2)) + tl.where(lane == 0, 0, (programs << step_log2 >> 6) + 1)
    guesses = (lane == 0) | ((lane == 1) & (at < there))
    page = (tl.where(at < there, at, at % there) << 6) + ((index << step_log2) & 63)
    won, old = try_pages(heap, page, need, guesses, one=True)
    first = tl.max(tl.where(won, page, -1), axis=0)
    if first < 0:
        # (Of lane 1, since what is free is rather there.)
        first, need = find_adjacent(heap, pick(page, 1), pick(old, 1), need)
    return tl.maximum(first, 0), tl.where(first >= 0, need, 0)


@triton.jit
def give_pages(heap, page, active):
    """Make the pages of ``active`` lanes (or scalar) free, those of a chunk by one atomic, and let
    programs look for free pages from there on, too."""
    while any_lane(active):
        chunk = pick(page, first_lane(active)) >> 6
        here = active & (page >> 6 == chunk)
        bits = unite(tl.where(here, layout.bit_of(page), 0))
        tl.atomic_or(layout.free_row(heap) + chunk, bits, sem="relaxed")
        tl.atomic_min(layout.hint_ptr(heap), chunk.to(tl.int64), sem="relaxed")
        active = active & (here == 0)


@triton.jit
def run_bits(page, n, chunk):
    """The bits, in the word of ``chunk`` (a block), of the ``n`` pages from ``page`` on."""
    low = tl.minimum(tl.maximum(page - chunk * 64, 0), 64)
    high = tl.minimum(tl.maximum(page + n - chunk * 64, 0), 64)
    return low_mask(high) & (low_mask(low) ^ -1)


@triton.jit(noinline=True)
def give_run(heap, page, n):
    """Make the ``n`` pages from ``page`` on (int32 scalars) free, as :func:`give_pages` does.
    Returns 0."""
    lane = tl.arange(0, 32)
    at = page >> 6
    while at * 64 < page + n:
        given = run_bits(page, n, at + lane)
        tl.atomic_or(layout.free_row(heap) + at + lane, given, mask=given != 0, sem="relaxed")
        at += 32
    tl.atomic_min(layout.hint_ptr(heap), (page >> 6).to(tl.int64), sem="relaxed")
    return n * 0
