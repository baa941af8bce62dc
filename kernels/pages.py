"""Free pages: one bit each, taken at the front of the heap.

Owns the chunk words and the hints. A page is taken by clearing its bit and given by setting it;
what comes back says who did. A window of more pages than the programs ask for together keeps them
apart: most openers then get the page that they guess first.
"""

import triton
import triton.language as tl

from .atomics import atomic_load
from .bits import (
    floor_log2,
    low_mask,
    lowest_bit,
    mix,
    next_bit,
    popcount,
    reciprocal,
    run_starts,
    select_bit,
)
from .lanes import any_lane, first_lane, lane_bits, lane_index, pick, rank_of
from .layout import (
    PAGE_BYTES,
    bit_of,
    free_row,
    hint_ptr,
    load_chunks,
    load_pages,
    program_count,
    program_index,
)
from .target import anew

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
    than are filled; and where among these this program's own part begins."""
    pages = (load_chunks(heap) * 64).to(tl.float32)
    programs = tl.minimum(program_count(), RESIDENT)
    share = nbytes.to(tl.float32) * (13 / 8 / PAGE_BYTES) + 1 / 16
    width = tl.minimum(share * programs, 1 << 22).to(tl.int32) + 2
    share = tl.minimum(share, pages * reciprocal(programs))
    index = program_index() & (RESIDENT - 1)
    return width, (index.to(tl.float32) * share).to(tl.int32)


@triton.jit
def find_chunk(heap, front, width, salt):
    """A chunk with free pages among the first ``width`` that have any, from ``front`` on; -1 if the
    64 chunks looked at have none (scalars). A window of more than 64 is looked at in part. Moves
    the hint to the first chunk with free pages, or past all of them."""
    lane = tl.arange(0, 32)
    chunks = load_chunks(heap)
    group = one_of((width + 31) >> 5, salt)
    start = front + group * 32
    start = tl.where(start < chunks, start, front)
    words = atomic_load(free_row(heap) + start + lane, start + lane < chunks)
    some = tl.sum(tl.where(words != 0, (lane * 0 + 1) << lane, 0), axis=0).to(tl.int64) & 0xFFFFFFFF
    beyond = tl.where(start + 32 < chunks, start + 32, 0)
    first = tl.where(some != 0, start + lowest_bit(some), beyond)
    if (start == front) & (first != front):
        tl.atomic_xchg(hint_ptr(heap), first.to(tl.int64), sem="relaxed")
    choices = tl.minimum(popcount(some), width)
    found = start + select_bit(some, one_of(tl.maximum(choices, 1), salt >> 8))
    return tl.where(choices > 0, found, -1)


@triton.jit
def guess_pages(heap, want, start):
    """Try to take a page for each lane (or scalar) in ``want``, one each from page ``start`` on.
    Returns the pages, and the words of their chunks as they were."""
    pages = load_chunks(heap) * 64
    page = start + tl.where(want, rank_of(want), 0)
    page = tl.where(page >= pages, page - pages, page)
    ptr = free_row(heap) + tl.where(want, page >> 6, 0)
    return page, tl.atomic_and(ptr, bit_of(page) ^ -1, mask=want, sem="relaxed")


@triton.jit
def find_pages(heap, want, page, old, front, width):
    """A page for each lane (or scalar) in ``want`` that has taken none: not ``page``, of whose
    chunk the word was ``old``. The others keep theirs; -1 where none was found."""
    lane = lane_index(want)
    guess = page
    page = tl.where(want, -1, page)
    pending = want
    tries = front * 0
    given_heap = heap
    while any_lane(pending) & (tries < TRIES):
        heap = anew(given_heap)
        words = free_row(heap)
        # What came back says which pages of the chunk are free. If none is, look at others.
        salt = mix(program_index() * 64 + lane + tries * 977)
        here = (guess >> 6) * 64 + next_bit(tl.where(old != 0, old, 1), salt & 63)
        guess = tl.where(pending & (old != 0), here, guess)
        if any_lane(pending & (old == 0)):
            at = find_chunk(heap, front, (width + 63) >> 6, mix(program_index() + tries * 977))
            if at >= 0:
                found = atomic_load(words + tl.where(pending, at, 0), pending)
                away = at * 64 + next_bit(tl.where(found != 0, found, 1), salt & 63)
                guess = tl.where(pending & (old == 0), away, guess)
            front = atomic_load(hint_ptr(heap)).to(tl.int32)
        bit = bit_of(guess)
        ptr = words + tl.where(pending, guess >> 6, 0)
        old = tl.atomic_and(ptr, bit ^ -1, mask=pending, sem="relaxed")
        won = pending & ((old & bit) != 0)
        page = tl.where(won, guess, page)
        pending = pending & (won == 0)
        tries += 1
    return page


@triton.jit
def take_adjacent(heap, need):
    """Take adjacent pages of one chunk: ``need`` (int32 scalar, 1 to 64), or fewer if there are not
    so many where it looks. Returns the first and how many, 0 if others always were there before."""
    lane = tl.arange(0, 64)
    words = free_row(heap)
    there = (load_pages(heap) + 63) >> 6
    chunks = load_chunks(heap)
    # One program after the other, from the front: if all is free there, no two of them meet. What a
    # program finds there otherwise are guesses of others, so it also guesses behind all these.
    step_log2 = floor_log2(need * 2 - 1)
    index = program_index() & ((1 << 24) - 1)
    programs = tl.minimum(program_count(), 1 << 24).to(tl.int32)
    at = (index >> (6 - step_log2)) + tl.where(lane == 0, 0, (programs << step_log2 >> 6) + 1)
    guesses = (lane == 0) | ((lane == 1) & (at < there))
    at = tl.where(at < there, at, at % there)
    mask = low_mask(need) << ((index << step_log2) & 63).to(tl.int64)
    mask = tl.where(guesses, mask, 0)
    first = need * 0
    have = need * 0
    tries = need * 0
    while (have == 0) & (tries < TRIES):
        old = tl.atomic_and(words + at, mask ^ -1, mask=mask != 0, sem="relaxed")
        old = tl.where(mask != 0, old, 0)
        which = first_lane((mask != 0) & ((old & mask) == mask))
        back = tl.where(lane == which, 0, old & mask)
        tl.atomic_or(words + at, back, mask=back != 0, sem="relaxed")
        if which < 64:
            first = pick(at, which) * 64 + lowest_bit(pick(mask, which))
            have = need
        else:
            chunk = pick(at, 1)
            word = pick(old, 1)
            if word == 0:
                # On to the next chunk with free pages, of the 64 that follow.
                near = chunk + 1 + lane
                near = tl.where(near < chunks, near, near % chunks)
                found = atomic_load(words + near)
                some = lane_bits(found != 0)
                step = tl.minimum(lowest_bit(some), 63)
                word = pick(found, step)
                chunk = pick(near, step)
            starts = run_starts(word, need)
            while (starts == 0) & (word != 0):
                need = need >> 1
                starts = run_starts(word, need)
            salt = mix(program_index() + tries * 977)
            low = next_bit(tl.where(starts != 0, starts, 1), salt & 63)
            one = tl.where(starts != 0, low_mask(need) << low.to(tl.int64), 0)
            at = lane * 0 + chunk
            mask = tl.where(lane == 1, one, 0)
        tries += 1
    return first, have


@triton.jit
def lower_hint(heap, page, active):
    """Let programs look for free pages from those of ``active`` lanes (or scalar) on, too."""
    ptr = hint_ptr(heap) + page * 0
    tl.atomic_min(ptr, (page >> 6).to(tl.int64), mask=active, sem="relaxed")


@triton.jit
def give_pages(heap, page, active):
    """Make the pages of ``active`` lanes (or scalar) free."""
    ptr = free_row(heap) + (page >> 6)
    tl.atomic_or(ptr, bit_of(page), mask=active, sem="relaxed")


@triton.jit
def give_together(heap, first_page, count):
    """Make ``count`` pages (int32, at most 64) from ``first_page`` on free (scalars)."""
    lane = tl.arange(0, 2)
    here = tl.minimum(count, 64 - (first_page & 63))
    first = low_mask(here) << (first_page & 63).to(tl.int64)
    bits = tl.where(lane == 0, first, low_mask(count - here))
    ptr = free_row(heap) + (first_page >> 6) + lane
    tl.atomic_or(ptr, bits, mask=bits != 0, sem="relaxed")


@triton.jit
def run_bits(page, n, chunk):
    """The bits, in the word of ``chunk`` (a block), of the ``n`` pages from ``page`` on."""
    low = tl.minimum(tl.maximum(page - chunk * 64, 0), 64)
    high = tl.minimum(tl.maximum(page + n - chunk * 64, 0), 64)
    return low_mask(high) & (low_mask(low) ^ -1)


@triton.jit(noinline=True)
def give_run(heap, page, n):
    """Make the ``n`` pages from ``page`` on (int32 scalars) free. Returns 0."""
    lane = tl.arange(0, 32)
    at = page >> 6
    while at * 64 < page + n:
        bits = run_bits(page, n, at + lane)
        tl.atomic_or(free_row(heap) + at + lane, bits, mask=bits != 0, sem="relaxed")
        at += 32
    return n * 0
