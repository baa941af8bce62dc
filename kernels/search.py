"""What is done when lines and guesses find nothing: exact searches, and runs of pages.

A search looks everywhere: for free pages, for pages of the class with room, and then it takes what
rests: spans out of magazines, and kept pages with nothing out. It gives up when a pass finds
nothing, and saw the same words as the pass before it, or after PASSES of them. So it fails only if
nothing was free at some time, or if others kept taking and giving meanwhile.
"""

import triton
import triton.language as tl

from . import layout
from .atomics import atomic_load
from .bits import floor_log2, lowest_bit, lsr, mix, next_bit, run_starts
from .lanes import any_lane, count_lanes, pick, rank_of
from .layout import MAGAZINES, PAGE_WORD, REACHED, SLAB
from .lines import leave_one, promise, retire, touch_words
from .magazines import release_spans
from .pages import give_run, one_of, run_bits

PASSES = tl.constexpr(16)
FAR = tl.constexpr(1 << 30)


@triton.jit
def take_rest(heap, first):
    """Empty the 32 magazines from ``first`` on, and retire those of the 32 pages from there on that
    are slabs with nothing out, whether or not a place leads to them. Returns how many of both there
    were (int32). A page whose last slots lie in a magazine further on needs another call."""
    lane = tl.arange(0, 32)
    ptr = heap + MAGAZINES + first + lane
    here = first + lane <= layout.last_magazine(heap)
    full = here & (atomic_load(ptr, here) != 0)
    if any_lane(full):
        # (An exchange for nothing. Triton 3.6 cannot compile one of these addresses for AMD.)
        span = tl.atomic_and(ptr, (lane * 0).to(tl.int64), mask=full, sem="relaxed")
        full = full & (span != 0)
        release_spans(heap, span, full)
    pages = layout.load_pages(heap)
    here = first + lane < pages
    page = tl.minimum(first + lane, pages - 1)
    word = atomic_load(layout.page_word_ptr(heap, page), here)
    idle = here & ((word & SLAB) != 0) & (layout.page_out(word) == 0)
    if any_lane(idle):
        idle = retire(heap, page, word, idle, idle)
    return count_lanes(full) + count_lanes(idle)


@triton.jit(noinline=True)
def take_what_rests(heap):
    """Empty all magazines, and retire pages that are kept with nothing out. Returns how many there
    were (int32). If some, there may be more: see :func:`take_rest`."""
    end = tl.maximum(layout.last_magazine(heap) + 1, layout.load_pages(heap))
    some = end * 0
    at = some
    while at < end:
        some += take_rest(heap, at)
        at += 32
    return some


@triton.jit
def next_pass(heap, passes, lost, same):
    """What follows after a pass that found nothing: take what rests. Returns how many passes there
    were, or more than are allowed if the next could not find anything: nothing rested, this one
    ``lost`` nothing to others, and saw the ``same`` words as the one before."""
    rested = take_what_rests(heap)
    last = (rested == 0) & (lost == 0) & (passes > 0) & same
    return passes + 1 + tl.where(last, PASSES, 0)


@triton.jit(noinline=True)
def ask(heap, cls, page):
    """Ask ``page`` for one slot of class ``cls`` (int32 scalars). Returns it, or -1."""
    one = page * 0 + 1
    granted = promise(heap, page, cls, one, layout.class_slots(cls), one == 1)
    if granted == 0:
        leave_one(heap, page)
    return tl.where(granted == 1, page, -1)


@triton.jit(noinline=True)
def search_slots(heap, cls):
    """Promise a slot of class ``cls`` (int32 scalar), wherever there is one. Returns the page, or
    -1 if there is none."""
    lane = tl.arange(0, 64)
    slots = layout.class_slots(cls)
    chunks = (layout.load_pages(heap) + 63) >> 6
    found = cls * 0 - 1
    before = (cls * 0).to(tl.int64)
    passes = cls * 0
    while (found < 0) & (passes < PASSES):
        seen = before & 0
        lost = cls * 0
        # Pages of the class with room for half of their slots, then free pages, of 64 chunks at a
        # time; then all pages of the class.
        kind = cls * 0
        while (found < 0) & (kind < 3):
            row = tl.where(kind == 0, layout.class_row(heap, cls), layout.free_row(heap))
            end = tl.where(kind == 2, layout.load_pages(heap), chunks)
            at = cls * 0
            tries = cls * 0
            while (found < 0) & (at < end):
                here = at + lane < end
                if kind == 2:
                    word = atomic_load(layout.page_word_ptr(heap, at + lane), here)
                    word = tl.where(layout.is_slab_of(word, cls), word, 0)
                    some = here & (word != 0) & (layout.page_out(word) < slots)
                else:
                    word = atomic_load(row + at + lane, here)
                    some = word != 0
                weight = (2 * (at + lane) + 1).to(tl.int64)
                seen += tl.sum(tl.where(tries == 0, word, 0) * weight, axis=0)
                count = count_lanes(some)
                if count > 0:
                    salt = mix(layout.program_index() + tries * 977 + passes * 7919)
                    chosen = some & (rank_of(some) == one_of(count, salt))
                    index = at + tl.sum(tl.where(chosen, lane, 0), axis=0)
                    if kind == 2:
                        found = ask(heap, cls, index)
                    else:
                        bit = next_bit(pick(word, index - at), (salt >> 16) & 63)
                        old = tl.atomic_and(row + index, layout.bit_of(bit) ^ -1, sem="relaxed")
                        if (old & layout.bit_of(bit)) != 0:
                            page = index * 64 + bit
                            if kind == 1:
                                state = layout.slab_word(cls, slots)
                                ptr = layout.page_word_ptr(heap, page)
                                tl.atomic_add(ptr, state, sem="relaxed")
                                tl.atomic_max(ptr + REACHED, state & 0 | 1, sem="relaxed")
                            found = ask(heap, cls, page)
                            # (Others may use the rest.)
                            rest = tl.where((found >= 0) & (slots > 2), layout.bit_of(bit), 0)
                            tl.atomic_or(layout.class_row(heap, cls) + index, rest, sem="relaxed")
                # (Others were first: look at the same words again, but a bounded number of times.)
                lost = lost | ((count > 0) & (found < 0)).to(tl.int32)
                tries = tl.where((count > 0) & (tries < PASSES), tries + 1, 0)
                at += tl.where(tries > 0, 0, 64)
            kind += 1
        if found < 0:
            passes = next_pass(heap, passes, lost, seen == before)
            before = seen
    return found


# Runs ---------------------------------------------------------------------------------------------


@triton.jit(noinline=True)
def take_run(heap, page, n):
    """Take the ``n`` pages from ``page`` on (int32 scalars) if all are free. Returns whether."""
    lane = tl.arange(0, 32)
    at = page >> 6
    took = page * 0 + 1
    while (took != 0) & (at * 64 < page + n):
        bits = run_bits(page, n, at + lane)
        ptr = layout.free_row(heap) + at + lane
        old = tl.atomic_and(ptr, bits ^ -1, mask=bits != 0, sem="relaxed")
        got = tl.where(bits != 0, old & bits, 0)
        if any_lane(got != bits):
            # Other programs have some of them: all that we took goes back.
            tl.atomic_or(ptr, got, mask=got != 0, sem="relaxed")
            give_run(heap, page, at * 64 - page)
            took = took * 0
        at += 32
    return took


@triton.jit
def greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def top_ones(x):
    """How many of the upper bits of int64 ``x`` != -1 are set, down to the first that is not."""
    zeros = x ^ -1
    # (What is below the highest bit could round it up.)
    top = zeros & (lsr(zeros, 1) ^ -1)
    return 63 - floor_log2(top.to(tl.uint64, bitcast=True))


@triton.jit(noinline=True)
def find_run(heap, n):
    """Take the first ``n`` adjacent free pages (int32 scalar). Returns the first page, -1 if there
    are no such pages, after as many passes as a search makes."""
    lane = tl.arange(0, 64)
    chunks = (layout.load_pages(heap) + 63) >> 6
    found = n * 0 - 1
    before = (n * 0).to(tl.int64)
    passes = n * 0
    # Programs that want runs at one time look one behind the other: all free, and no two meet.
    guess = (layout.program_index() & 0x7FFFFFFF).to(tl.int64) * n
    if (layout.program_count() > 1) & (guess + n <= layout.load_pages(heap)):
        if take_run(heap, guess.to(tl.int32), n) != 0:
            found = guess.to(tl.int32)
    while (found < 0) & (passes < PASSES):
        seen = before & 0
        lost = n * 0
        at = n * 0
        begin = n * 0  # where the free pages begin that reach to the end of the last word
        while (found < 0) & (at < chunks):
            word = atomic_load(layout.free_row(heap) + at + lane, at + lane < chunks)
            seen += tl.sum(word * (2 * (at + lane) + 1).to(tl.int64), axis=0)
            chunk = (at + lane) * 64
            word = word & (run_bits(begin * 0, begin, at + lane) ^ -1)
            starts = tl.where(word == -1, -1, chunk + 64 - top_ones(word))
            starts = tl.maximum(tl.associative_scan(starts, 0, greater), begin)
            earlier = tl.where(lane == 0, begin, tl.gather(starts, tl.maximum(lane - 1, 0), 0))
            across = chunk + lowest_bit(word ^ -1) - earlier >= n
            inside = tl.where(n <= 64, run_starts(word, tl.minimum(n, 64)), 0)
            fits = tl.where(inside != 0, chunk + lowest_bit(inside), FAR)
            fits = tl.where(across, earlier, fits)
            page = tl.min(fits, axis=0)
            if page < FAR:
                if take_run(heap, page, n) != 0:
                    found = page
            # (Otherwise another program was first: on from the next page.)
            again = (found < 0) & (page < FAR)
            lost = lost | again.to(tl.int32)
            begin = tl.where(again, page + 1, pick(starts, 63))
            at += tl.where(again, 0, 64)
        if found < 0:
            passes = next_pass(heap, passes, lost, seen == before)
            before = seen
    return found


@triton.jit(noinline=True)
def malloc_run(heap, length):
    """Allocate ``length`` pages (int64 scalar): the address, or 0."""
    addr = length * 0
    if length <= layout.load_pages(heap):
        page = find_run(heap, length.to(tl.int32))
        if page >= 0:
            ptr = layout.page_word_ptr(heap, page)
            # (What their last owners did happens before what follows the fence of malloc.)
            touched = touch_words(heap, page, length.to(tl.int32), layout.run_word(length) + 1)
            tl.atomic_max(ptr + REACHED, length, sem="relaxed")
            # (The live bit after the page word: it is made of what was there.)
            tl.atomic_or(ptr - PAGE_WORD, touched.to(tl.int64) + 1, sem="relaxed")
            addr = layout.address_of(heap, page, page * 0)
    return addr
