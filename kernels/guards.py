"""Guards of a debug heap: bytes that nobody should change, and looking whether somebody did.

Every byte of a guard is POISON_BYTE. The guards of a live block of n bytes are

    front   the 16 bytes before it, which are the last of the slot before
    near    from its end on: up to four words, up to the next block's front

and, if the heap's reach is unlimited, everything from there to the next block's front. What was
freed is poison as far as the heap reaches: its first REACH words. Guards of a freed block are its
poison and its near zone.

Why the front may lie in another's slot: a block has 32 bytes more than was asked for, so the last
16 of a slot or run are nobody's memory, whoever has it. They are written by the malloc that first
gets the block behind them, and never change again until the page is cut for something else.

Concurrency: near zone and poison belong to whoever has the block. The front may be written or
mended by the two neighbours at once, both of whom write poison.

A branch is taken on what is read here by plain loads, although a stray write may come in between.
So no two threads of a program may read one word: all tiles have at least as many elements as the
program has threads, and what is computed from them is agreed upon in a reduction.
"""

import triton
import triton.language as tl

from .bits import lowest_bit
from .lanes import any_lane, first_lane, lane_index, pick
from .layout import load_immutable
from .payload import as_column
from .table import E_OVERFLOW, E_USE_AFTER_FREE, REACH_WORD, entry_size, padded_size, record_fault
from .target import has_ptx

POISON_BYTE = 0xDB
POISON = tl.constexpr(0xDBDBDBDBDBDBDBDB - (1 << 64))
MAX_THREADS = tl.constexpr(1024)  # of a program
FRONT_WORDS = tl.constexpr(2)
NEAR_WORDS = tl.constexpr(4)
LONG_SPAN = tl.constexpr(512)  # words; longer spans are handled one by one by the whole program
UNLIMITED = tl.constexpr(1 << 40)  # a reach of so many words or more
NOWHERE = tl.constexpr(1 << 62)


@triton.jit
def reach(heap):
    """How many words of a freed block are poisoned at most (int64)."""
    return load_immutable(heap, REACH_WORD)


@triton.jit
def watches_all(heap):
    """Whether everything behind a block and all of a freed block is watched."""
    return reach(heap) >= UNLIMITED


@triton.jit
def near_end(nbytes):
    """First word behind the near zone of a block of ``nbytes``: 16 to 32 bytes behind its end, and
    even. (Of the size alone: the block is at least what a malloc of so many bytes takes.)"""
    least = (padded_size(nbytes) + 15 >> 4) - 1
    return tl.minimum((nbytes >> 4) + 2, least) << 1


@triton.jit
def far_end(heap, nbytes, block):
    """First word behind what is guarded after the end of a live block."""
    return tl.where(watches_all(heap), (block >> 3) - FRONT_WORDS, near_end(nbytes))


@triton.jit
def poisoned_words(heap, nbytes):
    """How many words of a freed block of ``nbytes`` bytes are poison; even."""
    return tl.minimum(nbytes + 15 >> 4 << 1, reach(heap))


@triton.constexpr_function
def columns(model, least, threads):
    """Columns of a tile with a row per lane of ``model``, of a program of ``threads`` threads: no
    more than needed, for they cost registers."""
    shape = getattr(model, "shape", ())
    return max(least, threads // int(shape[0] if len(shape) else 1))


@triton.jit
def any_in_tile(flags):
    return tl.max(tl.max(flags.to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def front_tile(addr, step: tl.constexpr):
    """``(pointers, inside)`` of the words of each lane's front, as a tile of ``step`` columns."""
    column = tl.arange(0, step)[None, :].to(tl.int64)
    ptr = as_column(addr - FRONT_WORDS * 8).to(tl.pointer_type(tl.int64)) + column
    return ptr, column < FRONT_WORDS


@triton.jit
def near_tile(addr, nbytes, step: tl.constexpr):
    """``(pointers, inside, mask)`` of the words of each lane's near zone, as a tile of ``step``
    columns: mask has the bits of a word that are the guard's."""
    column = tl.arange(0, step)[None, :].to(tl.int64)
    first = nbytes >> 3
    ptr = as_column(addr + (first << 3)).to(tl.pointer_type(tl.int64)) + column
    inside = column < as_column(near_end(nbytes) - first)
    mask = tl.where(column == 0, (column & 0) - 1 << as_column((nbytes & 7) << 3), -1)
    return ptr, inside, mask


@triton.jit
def span_tile(addr, count, at, step: tl.constexpr):
    """``(pointers, inside)`` of ``step`` of the ``count`` words at each lane's address, from the
    ``at``-th on."""
    column = tl.arange(0, step)[None, :].to(tl.int64)
    ptr = as_column(addr).to(tl.pointer_type(tl.int64)) + (column + at)
    return ptr, column + at < as_column(count)


@triton.jit
def guards_changed(addr, nbytes, front: tl.constexpr, active):
    """Whether a guard word of a block of the active lanes is not poison (scalar); the front is
    looked at only with ``front``. Which lane's, :func:`diagnose_lanes` finds out."""
    if has_ptx():
        threads: tl.constexpr = tl.extra.cuda.num_threads()
    else:
        threads: tl.constexpr = MAX_THREADS
    active = as_column(active.to(tl.int32)) != 0
    ptr, inside, mask = near_tile(addr, nbytes, columns(addr, NEAR_WORDS, threads))
    words = tl.load(ptr, mask=inside & active, other=POISON)
    changed = any_in_tile(((words ^ POISON) & mask) != 0)
    if front:
        ptr, inside = front_tile(addr, columns(addr, FRONT_WORDS, threads))
        words = tl.load(ptr, mask=inside & active, other=POISON)
        changed = changed | any_in_tile(words != POISON)
    return changed


@triton.jit
def write_guards(addr, nbytes, near, front):
    """Poison the near zones of the lanes in ``near`` and the fronts of those in ``front``."""
    if has_ptx():
        threads: tl.constexpr = tl.extra.cuda.num_threads()
    else:
        threads: tl.constexpr = MAX_THREADS
    near = as_column(near.to(tl.int32)) != 0
    ptr, inside, mask = near_tile(addr, nbytes, columns(addr, NEAR_WORDS, threads))
    inside = inside & near
    # One word may be the block's in part.
    words = tl.load(ptr, mask=inside & (mask != -1), other=POISON)
    tl.store(ptr, (words & (mask ^ -1)) | (mask & POISON), mask=inside)
    front = as_column(front.to(tl.int32)) != 0
    ptr, inside = front_tile(addr, columns(addr, FRONT_WORDS, threads))
    tl.store(ptr, tl.full(ptr.shape, POISON, tl.int64), mask=inside & front)


@triton.jit
def span_changed(addr, start, end, active):
    """Whether a word of the active lanes in [start, end), counted from their address, is not
    poison (scalar)."""
    count = tl.where(active, end - start, 0)
    long = count > LONG_SPAN
    count = tl.where(long, 0, count)
    most = tl.max(tl.max(as_column(count), axis=1), axis=0)
    if has_ptx():
        step: tl.constexpr = columns(addr, 4, tl.extra.cuda.num_threads())
    else:
        step: tl.constexpr = columns(addr, 4, MAX_THREADS)
    first = addr + (start << 3)
    wrong = as_column(count).to(tl.int32) * tl.zeros((1, step), tl.int32)
    at = most * 0
    while at < most:
        ptr, inside = span_tile(first, count, at, step)
        words = tl.load(ptr, mask=inside, other=POISON)
        wrong = wrong | (words != POISON).to(tl.int32)
        at += step
    changed = any_in_tile(wrong)
    lane = first_lane(long)
    while any_lane(long & (lane_index(long) == lane)):
        here = pick(addr, lane)
        found = scan(here, pick(start, lane), pick(end, lane), here & 0, here & 0)
        changed = changed | (found != NOWHERE)
        lane = first_lane(long & (lane_index(long) > lane))
    return changed


@triton.jit
def poison_span(addr, start, end, active):
    """Poison the words in [start, end) of the active lanes, counted from their address."""
    count = tl.where(active, end - start, 0)
    long = count > LONG_SPAN
    count = tl.where(long, 0, count)
    most = tl.max(tl.max(as_column(count), axis=1), axis=0)
    if has_ptx():
        step: tl.constexpr = columns(addr, 4, tl.extra.cuda.num_threads())
    else:
        step: tl.constexpr = columns(addr, 4, MAX_THREADS)
    first = addr + (start << 3)
    at = most * 0
    while at < most:
        ptr, inside = span_tile(first, count, at, step)
        tl.store(ptr, tl.full(ptr.shape, POISON, tl.int64), mask=inside)
        at += step
    lane = first_lane(long)
    while any_lane(long & (lane_index(long) == lane)):
        poison_long(pick(addr, lane), pick(start, lane), pick(end, lane))
        lane = first_lane(long & (lane_index(long) > lane))


@triton.jit(noinline=True)
def poison_long(addr, start, end):
    """:func:`poison_span` of one block (int64 scalars), by the whole program; returns 0."""
    lane = tl.arange(0, MAX_THREADS).to(tl.int64)
    at = start
    while at < end:
        ptr = (addr + (at + lane) * 8).to(tl.pointer_type(tl.int64))
        tl.store(ptr, tl.full((MAX_THREADS,), POISON, tl.int64), mask=at + lane < end)
        at += MAX_THREADS
    return addr & 0


@triton.jit(noinline=True)
def scan(addr, start, end, skip, mend):
    """Address of the lowest byte that is not poison in words [start, end), counted from ``addr``,
    of the first of which ``skip`` bytes are not looked at; NOWHERE if all are. int64 scalars.
    With ``mend`` != 0 the words are made poison again."""
    lane = tl.arange(0, MAX_THREADS).to(tl.int64)
    found = (addr & 0) + NOWHERE
    at = start
    while at < end:
        index = at + lane
        inside = index < end
        mask = tl.where(index == start, (index & 0) - 1 << (skip << 3), -1)
        ptr = (addr + index * 8).to(tl.pointer_type(tl.int64))
        words = tl.load(ptr, mask=inside, other=POISON)
        wrong = (words ^ POISON) & mask
        byte = addr + index * 8 + (lowest_bit(wrong) >> 3).to(tl.int64)
        found = tl.minimum(found, tl.min(tl.where(wrong != 0, byte, NOWHERE), axis=0))
        if mend != 0:
            tl.store(ptr, (words & (mask ^ -1)) | (mask & POISON), mask=inside & (wrong != 0))
        at += MAX_THREADS
    return found


@triton.jit(noinline=True)
def diagnose(heap, addr, block, word, birth, poisoned, finder, mend):
    """Find out what happened to a block some guard of which may have changed, record it, and mend
    the guards if ``mend`` is not 0. Returns how many faults there are (int32).

    Scalars: ``block`` bytes from ``addr`` on, the words of its entry, and how many words of it are
    poison because it is freed; -1 if it is live.
    """
    nbytes = entry_size(word)
    live = poisoned < 0
    start = tl.where(live, poisoned * 0 - FRONT_WORDS, 0)
    low = scan(addr, start, tl.maximum(poisoned, 0), addr & 0, mend)
    high = scan(addr, nbytes >> 3, far_end(heap, nbytes, block), nbytes & 7, mend)
    faults = finder * 0
    if live:
        kind = finder * 0 + E_OVERFLOW
        if low != NOWHERE:
            record_fault(heap, kind, low, addr, word, birth, finder)
            faults += 1
        if high != NOWHERE:
            record_fault(heap, kind, high, addr, word, birth, finder)
            faults += 1
    else:
        at = tl.minimum(low, high)
        if at != NOWHERE:
            kind = finder * 0 + E_USE_AFTER_FREE
            record_fault(heap, kind, at, addr, word, birth, finder)
            faults += 1
    return faults


@triton.jit
def diagnose_lanes(heap, addr, block, word, birth, poisoned, finder, mend, active):
    """:func:`diagnose` the blocks of the active lanes, some of which has changed; ``finder`` and
    ``mend`` scalars. Returns which have."""
    changed = active & (active == 0)
    lane = first_lane(active)
    while any_lane(active & (lane_index(active) == lane)):
        faults = diagnose(
            heap,
            pick(addr, lane),
            pick(block, lane),
            pick(word, lane),
            pick(birth, lane),
            pick(poisoned, lane),
            lane * 0 + finder,
            lane * 0 + mend,
        )
        changed = changed | (lane_index(active) == tl.where(faults > 0, lane, -1))
        lane = first_lane(active & (lane_index(active) > lane))
    return changed
