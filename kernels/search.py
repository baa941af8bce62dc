"""Slots without tickets: guesses in a full heap, and exact searches; and runs of pages.

A search looks everywhere: for pages of the class with room, for free pages, and then it takes what
rests: spans out of magazines, and kept pages with nothing out. It gives up when a pass finds
nothing, and saw the same words as the pass before it, or after PASSES of them. So it fails only if
nothing was free at some time, or if others kept taking and giving meanwhile.
"""

import triton
import triton.language as tl

from . import layout
from .atomics import atomic_load, load_one
from .bits import floor_log2, lowest_bit, lsr, mix, run_starts
from .lanes import any_lane, count_lanes, first_lane, lane_index, pick, rank_of
from .layout import MAGAZINES, PAGE_LOG2, PAGE_WORD, REACHED, SLAB
from .lines import leave_slots, promise, retire, touch_words
from .live import another, claim_others, live_bit
from .magazines import release_spans
from .pages import give_run, one_of, run_bits, spread

PASSES = tl.constexpr(16)
GUESSES = tl.constexpr(64)  # pages that a lane tries before it searches
FAR = tl.constexpr(1 << 30)


@triton.jit
def empty_magazines(heap, first):
    """Empty the 32 magazines from ``first`` on. Returns how many were full (int32)."""
    lane = tl.arange(0, 32)
    ptr = heap + MAGAZINES + first + lane
    here = first + lane <= layout.last_magazine(heap)
    full = here & (atomic_load(ptr, here) != 0)
    if any_lane(full):
        # (An exchange for nothing. Triton 3.6 cannot compile one of these addresses for AMD.)
        span = tl.atomic_and(ptr, (lane * 0).to(tl.int64), mask=full, sem="relaxed")
        full = full & (span != 0)
        release_spans(heap, span, full)
    return count_lanes(full)


@triton.jit
def retire_idle(heap, first):
    """Retire those of the 32 pages from ``first`` on that are slabs with nothing out, whether or
    not a place leads to them. Returns how many there were (int32)."""
    lane = tl.arange(0, 32)
    pages = layout.load_pages(heap)
    here = first + lane < pages
    page = tl.minimum(first + lane, pages - 1)
    word = atomic_load(layout.page_word_ptr(heap, page), here)
    idle = here & ((word & SLAB) != 0) & (layout.page_out(word) == 0)
    if any_lane(idle):
        idle = retire(heap, page, word, idle, idle)
    return count_lanes(idle)


@triton.jit(noinline=True)
def take_what_rests(heap):
    """Empty all magazines, then retire pages that are kept with nothing out. Returns how many there
    were (int32). If some, others may have filled more meanwhile."""
    last = layout.last_magazine(heap)
    some = last * 0
    at = some
    while at <= last:
        # (Most are empty: many are looked at together.)
        many = at + tl.arange(0, 256)
        here = many <= last
        full = here & (atomic_load(heap + MAGAZINES + many, here) != 0)
        at = tl.where(any_lane(full), at + (first_lane(full) & -32), at + 256)
        if any_lane(full):
            some += empty_magazines(heap, at)
            at += 32
    at = some * 0
    while at < layout.load_pages(heap):
        some += retire_idle(heap, at)
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


@triton.jit
def ask(heap, cls, page, asks):
    """Ask pages for a slot of class ``cls`` each, for the lanes (or scalar) in ``asks``. Returns
    which were promised one."""
    granted = promise(heap, page, cls, cls * 0 + 1, layout.class_slots(cls), asks) > 0
    lost = asks & (granted == 0)
    if any_lane(lost):
        leave_slots(heap, page, lost)
    return granted


@triton.jit
def guess_slots(heap, cls, wants):
    """Slots for the lanes (or scalar) in ``wants``, wherever pages at random have some: where most
    pages of a class have room for one, no lane has to wait for another. Addresses, or 0."""
    records = layout.load_records(heap)
    size = layout.class_bytes(cls)
    slots = layout.slots_of(size)
    salt = layout.program_index() * 1024 + lane_index(cls) + 1
    page = cls * 0
    granule = cls * 0
    seeks = wants
    tries = 0
    while any_lane(seeks) & (tries < GUESSES):
        salt = mix(salt)
        page = tl.where(seeks, spread(salt, layout.load_pages(heap)), page)
        # The way to a clear bit, from a word of live bits read together with the page's word, is
        # computed while the page is asked.
        start = one_of(slots, salt) * (size >> 4)
        word = atomic_load(layout.page_word_ptr(heap, page), seeks)
        ptr, _bit = live_bit(records, page, start)
        live = atomic_load(ptr, seeks)
        granule = tl.where(seeks, another(live, start, size), granule)
        room = layout.is_slab_of(word, cls) & (layout.page_out(word) < slots)
        seeks = seeks & (ask(heap, cls, page, seeks & room) == 0)
        tries += 1
    wants = wants & (seeks == 0)
    granule = claim_others(records, page, granule, size, wants)
    return tl.where(wants, layout.address_of(heap, page, granule), 0)


@triton.jit(noinline=True)
def search_slots(heap, cls):
    """Promise a slot of class ``cls`` (int32 scalar), wherever there is one. Returns the page, or
    -1 if there is none."""
    lane = tl.arange(0, 64)
    slots = layout.class_slots(cls)
    pages = layout.load_pages(heap)
    chunks = (pages + 63) >> 6
    front = load_one(layout.hint_ptr(heap))
    found = cls * 0 - 1
    before = (cls * 0).to(tl.int64)
    passes = cls * 0
    while (found < 0) & (passes < PASSES):
        seen = before & 0
        lost = cls * 0
        at = cls * 0
        while (found < 0) & (at < chunks):
            # Of each chunk pages of the class, or else free ones.
            chunk = (front + at) % chunks
            page = chunk * 64 + lane
            here = page < pages
            ptr = layout.free_row(heap) + chunk
            free = pick(atomic_load(ptr + lane * 0, lane == 0), 0)
            word = atomic_load(layout.page_word_ptr(heap, tl.where(here, page, 0)), here)
            word = tl.where(layout.is_slab_of(word, cls), word, 0)
            some = here & (word != 0) & (layout.page_out(word) < slots)
            fresh = (any_lane(some) == 0) & (free != 0)
            some = tl.where(fresh, (lsr(free, lane) & 1).to(tl.int32), some.to(tl.int32)) != 0
            seen += tl.sum(word * (2 * page + 3).to(tl.int64), axis=0) + free * (2 * chunk + 1)
            count = count_lanes(some)
            if count > 0:
                salt = mix(layout.program_index() + passes * 7919)
                chosen = some & (rank_of(some) == one_of(count, salt))
                index = tl.sum(tl.where(chosen, page, 0), axis=0)
                bit = tl.where(fresh, layout.bit_of(index), 0)
                taken = tl.atomic_and(ptr, bit ^ -1, sem="relaxed") & bit
                if taken != 0:
                    ptr = layout.page_word_ptr(heap, index)
                    tl.atomic_add(ptr, layout.slab_word(cls, slots), sem="relaxed")
                    tl.atomic_max(ptr + REACHED, taken & 0 | 1, sem="relaxed")
                    # (Others may use the rest, and what is free beside it.)
                    row = layout.class_word(heap, cls, chunk)
                    tl.atomic_or(row, tl.where(slots > 2, taken, 0), sem="relaxed")
                    tl.atomic_min(layout.hint_ptr(heap), chunk.to(tl.int64), sem="relaxed")
                won = ask(heap, cls, index, taken == bit)
                found = tl.where(won, index, found)
                # (If others were first, the next pass looks again.)
                lost = lost | (found < 0).to(tl.int32)
            at += 1
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
        found = tl.where(take_run(heap, guess.to(tl.int32), n) != 0, guess.to(tl.int32), found)
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
                found = tl.where(take_run(heap, page, n) != 0, page, found)
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
def malloc_run(heap, nbytes):
    """Allocate whole pages for ``nbytes`` (int64 scalar): the address, or 0."""
    addr = nbytes * 0
    length = ((nbytes - 1) >> PAGE_LOG2) + 1
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
