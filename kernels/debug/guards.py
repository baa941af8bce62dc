"""Guards of a debug heap: bytes that must not change, and the code that looks at them.

Every byte of a guard is POISON_BYTE. The guards of a live block of n bytes are

    front   the 16 bytes before it, which are the last of the slot before
    near    from its end on: the rest of that granule (16 bytes) and, if there is room before the
            next block's front, one more

and, if the heap watches everything, all from there to the next block's front. What was freed is
poison: its head, which is its first HEAD_WORDS words, and, if the heap watches everything, the
rest. Guards of a freed block are its poison and its near zone.

Heads and the zones around a block are looked at by code without branches, and one reduction tells
whether anything is wrong at all. If so, slow code finds out what.

Why the front may lie in another's slot: a block has 32 bytes more than was asked for, so the last
16 of a slot or run belong to no block. They are written by the malloc that first
gets the block behind them, and do not change until the page is cut for something else.

Concurrency: near zone and poison belong to the owner of the block. The front may be written or
mended by the two neighbours at once, both of whom write poison.

Branches depend on what is read here by plain loads, although a stray write may come at any moment.
So no two threads of a program may read the same word: all tiles have at least as many elements as
the program has threads, and branches are taken on what was reduced over all threads.
"""

import triton
import triton.language as tl

from .. import layout
from ..atomics import atomic_load
from ..bits import lowest_bit
from ..lanes import any_lane, first_lane, is_block, lane_index, pick
from ..layout import MAX_SLOT, PAGE_LOG2, SLAB
from ..payload import as_column
from ..target import has_ptx
from . import block_table
from .block_table import ALL_WORD, E_OVERFLOW, E_USE_AFTER_FREE, HEAD_WORDS, RUN_USE

POISON_BYTE = 0xDB
POISON = tl.constexpr(0xDBDBDBDBDBDBDBDB - (1 << 64))
MAX_THREADS = tl.constexpr(1024)  # of a program
FRONT_WORDS = tl.constexpr(2)
# Memory is read and written in sectors, so a head's words are handled by as many as a sector has,
# or the second half of each would be moved by itself.
SECTOR_WORDS = tl.constexpr(4)
LONG_SPAN = tl.constexpr(512)  # words; longer spans are handled one by one by the whole program
NOWHERE = tl.constexpr(1 << 62)


@triton.jit
def watches_all(heap):
    """Whether everything behind a block and all of a freed block is watched."""
    return layout.load_immutable(heap, ALL_WORD) != 0


@triton.jit
def near_doubles(nbytes):
    """Whether the near zone of a block of ``nbytes`` lies in two granules, or in one because there
    is room for no more before the front of the next, by ``padded_size``: as for a multiple of 16,
    unless it is a power of two and gets a slot of twice its size."""
    low = nbytes.to(tl.int32)
    power = ((low & (low - 1)) == 0) & (low != 32) & (nbytes <= MAX_SLOT)
    return ((low & 15) != 0) | power


@triton.jit
def near_end(nbytes):
    """First word behind the near zone of a block of ``nbytes``: 16 to 32 bytes behind its end, and
    even. (The size alone tells: the block is at least what a malloc of so many bytes takes.)"""
    return (nbytes >> 4) + 1 + near_doubles(nbytes).to(tl.int64) << 1


@triton.jit
def far_end(heap, nbytes, block):
    """First word behind what is guarded after the end of a live block."""
    return tl.where(watches_all(heap), (block >> 3) - FRONT_WORDS, near_end(nbytes))


@triton.jit
def head_granules(nbytes):
    """How many granules (int32) the head of a freed block of ``nbytes`` bytes has."""
    return (tl.minimum(nbytes, HEAD_WORDS * 8).to(tl.int32) + 15) >> 4


@triton.jit
def poisoned_words(heap, nbytes):
    """How many words of a freed block of ``nbytes`` bytes are poison; even."""
    words = nbytes + 15 >> 4 << 1
    return tl.where(watches_all(heap), words, tl.minimum(words, HEAD_WORDS))


@triton.constexpr_function
def width(model, least, threads):
    """How many columns a tile with a row per lane of ``model`` has, in a program of ``threads``
    threads: no more than needed, for they cost registers."""
    shape = getattr(model, "shape", ())
    return max(least, threads // int(shape[0] if len(shape) else 1))


@triton.jit
def columns(model, least: tl.constexpr):
    """The numbers (int32) of the columns of a tile with a row per lane of ``model``: ``least`` or
    more, so that there are at least as many elements as threads."""
    if has_ptx():
        threads: tl.constexpr = tl.extra.cuda.num_threads()
    else:
        threads: tl.constexpr = MAX_THREADS
    return tl.arange(0, width(model, least, threads))[None, :]


@triton.jit
def span_lane():
    """The numbers (int64) of the words that the whole program handles at once: few per thread, or
    every kernel that can get here would need registers for them."""
    if has_ptx():
        lane = tl.arange(0, tl.extra.cuda.num_threads() * 2)
    else:
        lane = tl.arange(0, MAX_THREADS)
    return lane.to(tl.int64)


@triton.jit
def tile_ptr(addr, column):
    """Pointers to words, numbered by column, from each lane's address on. That is a multiple of 16,
    as the compiler is told, so that two words are one access. Masks must not part the two."""
    ptr = as_column(addr).to(tl.pointer_type(tl.int64)) + column
    return tl.multiple_of(ptr, (8, 16))  # (bytes: within a column, and along a row)


@triton.jit
def as_mask(flags):
    """A lane's flag as a column of flags."""
    return as_column(flags.to(tl.int32)) != 0


@triton.jit
def load_once(ptr, active):
    """Words (int64) that may change meanwhile, each read by one thread; inactive lanes give 0."""
    column = columns(ptr, 1)
    ptrs = as_column(ptr.to(tl.int64)).to(tl.pointer_type(tl.int64)) + column
    only = as_mask(active) & (column == 0)
    words = tl.sum(tl.load(ptrs, mask=only, other=0, volatile=True), axis=1)
    if is_block(ptr):
        value = words
    else:
        value = tl.sum(words, axis=0)
    return value


@triton.jit
def load_entry(entry, active):
    """Both words of the entries of blocks that the caller has; 0 in other lanes."""
    if is_block(entry):
        # One access for both, by the thread that looks at the lane's other tiles.
        column = columns(entry, 2)
        inside = as_mask(active) & (column < 2)
        words = tl.load(tile_ptr(entry.to(tl.int64), column), mask=inside, other=0)
        first = tl.sum(tl.where(column == 0, words, 0), axis=1)
        second = tl.sum(tl.where(column == 1, words, 0), axis=1)
    else:
        first = tl.load(entry, mask=active, other=0)
        second = tl.load(entry + 1, mask=active, other=0)
    return first, second


@triton.jit
def halves(words):
    """Both halves of each word in one int32, which is 0 only if the word is."""
    return (words | (words >> 32)).to(tl.int32)


@triton.jit
def any_bit(tile):
    """Whether any bit of a tile of int32 is set (scalar)."""
    rows = tl.max(tile.to(tl.uint32, bitcast=True), axis=1)
    return tl.max(rows, axis=0) != 0


# Guards of live blocks ------------------------------------------------------------------------
#
# What is wrong with a zone is a tile of int32 with a row per lane, 0 where nothing is wrong, for
# :func:`any_bit`. Whose zone it is, :func:`diagnose_lanes` finds out.


@triton.jit
def guard_bits(nbytes, column):
    """Which bits of the granule in which a block of ``nbytes`` ends are behind the end, by the
    granule's words (a tile, of which columns 0 and 1 have a meaning)."""
    bits = as_column((nbytes.to(tl.int32) & 15) << 3) - (column << 6)
    mask = (bits & 0).to(tl.int64) - 1 << tl.minimum(tl.maximum(bits, 0), 63).to(tl.int64)
    return tl.where(bits < 64, mask, 0)


@triton.jit
def near_granules(addr, nbytes, column):
    """``(ptr, mask, second)`` of the near zones: pointers to the granule in which the block ends,
    which bits of it are the zone's, and the flags (a column) of lanes with a second granule."""
    ptr = tile_ptr(addr + (nbytes & -16), column)
    return ptr, guard_bits(nbytes, column), as_mask(near_doubles(nbytes))


@triton.jit
def near_wrong(addr, nbytes, active):
    """What is not poison in the near zones of blocks of the active lanes."""
    column = columns(addr, 2)
    active = as_mask(active) & (column < 2)
    ptr, mask, second = near_granules(addr, nbytes, column)
    words = tl.load(ptr, mask=active, other=POISON)
    more = tl.load(ptr + 2, mask=active & second, other=POISON)
    return halves(((words ^ POISON) & mask) | (more ^ POISON))


@triton.jit
def front_wrong(addr, active):
    """What is not poison in the fronts of blocks of the active lanes."""
    column = columns(addr, 2)
    active = as_mask(active) & (column < 2)
    words = tl.load(tile_ptr(addr - 16, column), mask=active, other=POISON)
    return halves(words ^ POISON)


@triton.jit
def write_guards(addr, nbytes, near, front, KEEP: tl.constexpr):
    """Poison the near zones of the lanes in ``near`` and the fronts of those in ``front``. With
    ``KEEP`` a block keeps what it has in the granule in which it ends; otherwise it may lose it."""
    column = columns(addr, 2)
    near = as_mask(near) & (column < 2)
    ptr, mask, second = near_granules(addr, nbytes, column)
    poison = tl.full(ptr.shape, POISON, tl.int64)
    words = poison
    if KEEP:
        words = tl.load(ptr, mask=near & as_mask((nbytes & 15) != 0), other=POISON)
        words = (words & (mask ^ -1)) | (mask & POISON)
    tl.store(ptr, words, mask=near)
    tl.store(ptr + 2, poison, mask=near & second)
    tl.store(tile_ptr(addr - 16, column), poison, mask=as_mask(front) & (column < 2))


# Poison ---------------------------------------------------------------------------------------


@triton.jit
def load_head(addr, active):
    """The heads of blocks of the active lanes, as a tuple of tiles of words. (The address alone
    decides what is read, so that this is under way while the entry still is.)"""
    column = columns(addr, SECTOR_WORDS)
    inside = as_mask(active) & (column < HEAD_WORDS)
    ptr = tile_ptr(addr, column)
    tiles = ()
    for first in tl.static_range(0, HEAD_WORDS, column.shape[1]):
        tiles += (tl.load(ptr + first, mask=inside),)
    return tiles


@triton.jit
def head_wrong(tiles, nbytes, active):
    """What is not poison in the heads of freed blocks of ``nbytes`` of the active lanes."""
    column = columns(nbytes, SECTOR_WORDS)
    count = as_column(tl.where(active, head_granules(nbytes), 0))
    wrong = (column + count) & 0
    for i in tl.static_range(len(tiles)):
        inside = (column + i * column.shape[1]) // 2 < count
        wrong = wrong | tl.where(inside, halves(tiles[i] ^ POISON), 0)
    return wrong


@triton.jit
def poison_head(heap, addr, nbytes, active):
    """Poison the heads of blocks of ``nbytes`` of the active lanes."""
    column = columns(addr, SECTOR_WORDS)
    count = as_column(tl.where(active, head_granules(nbytes), 0))
    ptr = tile_ptr(addr, column)
    # (Not a constant as far as the compiler can see, or it would load it into registers anew for
    # every store. The address of the heap is that of a page, so it is even.)
    poison = tl.zeros(ptr.shape, tl.int64) + (POISON + (layout.load_base(heap) & 1))
    for first in tl.static_range(0, HEAD_WORDS, column.shape[1]):
        tl.store(ptr + first, poison, mask=(column + first) // 2 < count)


@triton.jit
def span_lanes(start, end, active):
    """``(count, long)`` of spans of words from ``start`` to ``end``, both even: how many granules
    (int32) each has; where these are too many for a lane, ``long`` is set and ``count`` is 0."""
    words = tl.where(active, end - start, 0)
    long = words > LONG_SPAN
    return tl.where(long, 0, words >> 1).to(tl.int32), long


@triton.jit
def most_of(count):
    return tl.max(tl.max(as_column(count), axis=1), axis=0)


@triton.jit
def span_changed(addr, start, end, active, least: tl.constexpr = 4):
    """Whether any word of the active lanes in [start, end), counted from their address, is not
    poison (scalar). At least ``least`` words of a lane at a time: fewer cost fewer registers."""
    count, long = span_lanes(start, end, active)
    most = most_of(count)
    column = columns(addr, least)
    first = addr + (start << 3)
    wrong = (as_column(count) + column) & 0
    at = most * 0
    while at < most:
        ptr = tile_ptr(first, column + at * 2)
        words = tl.load(ptr, mask=column // 2 + at < as_column(count), other=POISON)
        wrong = wrong | halves(words ^ POISON)
        at += column.shape[1] // 2
    changed = any_bit(wrong)
    while any_lane(long):
        lane = first_lane(long)
        here = pick(addr, lane)
        found = scan(here, pick(start, lane), pick(end, lane), here & 0, lane * 0)
        changed = changed | (found != NOWHERE)
        long = long & (lane_index(long) != lane)
    return changed


@triton.jit
def poison_span(addr, start, end, active):
    """Poison the words in [start, end) of the active lanes, counted from their address."""
    count, long = span_lanes(start, end, active)
    most = most_of(count)
    column = columns(addr, 4)
    first = addr + (start << 3)
    at = most * 0
    while at < most:
        ptr = tile_ptr(first, column + at * 2)
        poison = tl.full(ptr.shape, POISON, tl.int64)
        tl.store(ptr, poison, mask=column // 2 + at < as_column(count))
        at += column.shape[1] // 2
    while any_lane(long):
        lane = first_lane(long)
        poison_long(pick(addr, lane), pick(start, lane), pick(end, lane))
        long = long & (lane_index(long) != lane)


@triton.jit(noinline=True)
def poison_long(addr, start, end):
    """:func:`poison_span` of one block (int64 scalars), by the whole program; returns 0."""
    lane = span_lane()
    at = start
    while at < end:
        ptr = (addr + (at + lane) * 8).to(tl.pointer_type(tl.int64))
        tl.store(ptr, tl.full(lane.shape, POISON, tl.int64), mask=at + lane < end)
        at += lane.shape[0]
    return addr & 0


@triton.jit(noinline=True)
def scan(addr, start, end, skip, mend):
    """Address of the lowest byte that is not poison in words [start, end), counted from ``addr``;
    NOWHERE if all are poison. The first ``skip`` bytes of the first word are left out. int64
    scalars. With ``mend`` != 0 the words are made poison again."""
    lane = span_lane()
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
        at += lane.shape[0]
    return found


@triton.jit
def block_at(heap, page, active):
    """Bytes (int64) of the live blocks that begin in these pages."""
    ptr = layout.page_word_ptr(heap, page)
    state = atomic_load(ptr, active)
    slot = layout.class_bytes(layout.page_class(state)).to(tl.int64)
    return tl.where((state & SLAB) != 0, slot, layout.run_pages(state) << PAGE_LOG2)


@triton.jit
def entry_at(heap, addr):
    """``(page, entry)`` of the block at an address (int64 scalar)."""
    page, _granule = layout.place_of(layout.load_base(heap), addr)
    return page, block_table.entry_ptr(heap, addr)


@triton.jit(noinline=True)
def record_write(heap, kind, at, addr, finder):
    """Record that the byte at ``at``, a guard of the block at ``addr``, has changed; returns 1.
    Scalars. If ``at`` is NOWHERE, nothing is recorded and 0 returned."""
    count = finder * 0
    if at != NOWHERE:
        _page, entry = entry_at(heap, addr)
        block_table.record_fault(
            heap, kind, at, addr, atomic_load(entry), atomic_load(entry + 1), finder
        )
        count += 1
    return count


@triton.jit(noinline=True)
def diagnose_live(heap, addr, finder, mend):
    """Find out which guards of a live block have changed, record it, and mend them if ``mend`` is
    not 0. Scalars. Returns how many faults there are (int32)."""
    page, entry = entry_at(heap, addr)
    nbytes = block_table.entry_size(atomic_load(entry))
    end = far_end(heap, nbytes, block_at(heap, page, page >= 0))
    kind = finder * 0 + E_OVERFLOW
    high = scan(addr, nbytes >> 3, end, nbytes & 7, mend)
    low = scan(addr, addr * 0 - FRONT_WORDS, addr * 0, addr * 0, mend)
    count = record_write(heap, kind, low, addr, finder)
    return count + record_write(heap, kind, high, addr, finder)


@triton.jit(noinline=True)
def diagnose_freed(heap, addr, poisoned, finder):
    """Find out whether a freed block, whose first ``poisoned`` words are poison, has changed, and
    record it. Scalars. Returns how many faults there are (int32)."""
    at = scan(addr, addr * 0, poisoned, addr * 0, finder * 0)
    page, entry = entry_at(heap, addr)
    use = block_table.mark_use(atomic_load(block_table.mark_ptr(heap, page)))
    # (What was behind the end of a run may be another's by now.)
    if use < RUN_USE:
        nbytes = block_table.entry_size(atomic_load(entry))
        end = far_end(heap, nbytes, layout.class_bytes(use).to(tl.int64))
        at = tl.minimum(at, scan(addr, nbytes >> 3, end, nbytes & 7, finder * 0))
    return record_write(heap, finder * 0 + E_USE_AFTER_FREE, at, addr, finder)


@triton.jit
def diagnose_lanes(heap, addr, poisoned, finder: tl.constexpr, mend: tl.constexpr, active):
    """Diagnose the blocks of the active lanes, at least one of which has changed: freed ones, or
    live ones if ``poisoned`` is None. Returns the lanes whose blocks have."""
    changed = active & (active == 0)
    while any_lane(active):
        lane = first_lane(active)
        here = lane_index(active) == lane
        if poisoned is None:
            count = diagnose_live(heap, pick(addr, lane), lane * 0 + finder, lane * 0 + mend)
        else:
            count = diagnose_freed(heap, pick(addr, lane), pick(poisoned, lane), lane * 0 + finder)
        changed = changed | (here & (count > 0))
        active = active & (here == 0)
    return changed
