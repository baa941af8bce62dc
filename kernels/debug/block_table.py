"""The table of a debug heap: what is known of every block, live or freed.

It lies apart from the data and from the control block, so that nothing a user overwrites in the
data can change what will be said about it. Its address is in the control block, whose words
TABLE_WORD, ENTRIES_WORD and ALL_WORD are immutable like all up to 31, and unused in an ordinary
heap.

    word            what                                              written by
    0               how many faults were found                        record_fault
    FAULTS          the first MAX_FAULTS, FAULT_WORDS words each      record_fault
    MARKS           one word per page: what it is cut for             guards
    entries         two words per CELL of 64 bytes: a block begins    malloc, free
                    in this cell

In a debug heap no slot is smaller than a cell, so no two blocks begin in one.

Entry, first word: written by the owner of the block. A free clears the live bit in it by an `and`,
a realloc by a compare-and-swap; the call that cleared it owns the block alone from then on. (Before
the address is handed on, no other program may free the block; a wrong free merely comes before or
after the store.)

    0..39   size in bytes, as requested
    40..55  tag
    56..59  live: bit of the granule, of the four in the cell, at which the block begins
    60..61  that granule, which stays when the live bit goes

Entry, second word: written and read only by the call that owns the block alone.

    0..39   when it was allocated, in ticks of 1024 ns
    40..63  epoch of the page then

Mark: what the page was last cut for, and an epoch that grows with every change of that. An entry
of an earlier epoch says what was there once; other blocks have lain across it since, so nothing
can be said about the bytes.

    0..31   use: size class, or RUN_USE + the page's place in its run
    32..63  epoch

Concurrency: only a malloc that has got a block in the page changes its mark, to the block's use.
While the block is live, the page has no other use, so all who change the mark write the same.
"""

import triton
import triton.language as tl

from .. import layout
from ..layout import ERRORS, MAX_SLOT, PAGE_LOG2
from ..target import has_ptx, is_interpreted, nanoseconds

TABLE_WORD = tl.constexpr(16)  # of the control block: address of the table
ENTRIES_WORD = tl.constexpr(17)  # index in the table of the first word of the entries
ALL_WORD = tl.constexpr(18)  # 1: everything is watched, whatever it costs

FAULTS = tl.constexpr(8)
FAULT_WORDS = tl.constexpr(8)
MAX_FAULTS = tl.constexpr(32)
MARKS = tl.constexpr(512)
CELL_LOG2 = tl.constexpr(6)
CELL_BYTES = tl.constexpr(1 << 6)
PAGE_CELLS = tl.constexpr(1 << 10)
HEAD_WORDS = tl.constexpr(8)  # the first words of a freed block, which are always poison
ENTRY_WORDS = tl.constexpr(2)

# Kinds of error beside those of `layout`; counted with them.
E_OVERFLOW = tl.constexpr(4)
E_USE_AFTER_FREE = tl.constexpr(5)
# Who found it.
BY_FREE = tl.constexpr(0)
BY_MALLOC = tl.constexpr(1)
BY_REALLOC = tl.constexpr(2)
BY_AUDIT = tl.constexpr(3)

MAX_BYTES = tl.constexpr((1 << 40) - 1)
TAG_SHIFT = tl.constexpr(40)
MAX_TAG = tl.constexpr((1 << 16) - 1)
LIVE_SHIFT = tl.constexpr(56)
GRANULE_SHIFT = tl.constexpr(60)
TICK_LOG2 = tl.constexpr(10)
MAX_TICKS = tl.constexpr((1 << 40) - 1)
EPOCH_SHIFT = tl.constexpr(40)
MAX_EPOCH = tl.constexpr((1 << 24) - 1)
RUN_USE = tl.constexpr(64)


@triton.constexpr_function
def is_debug(heap):
    """Whether the handle is a debug heap's, by its type: a pointer to uint64, not int64."""
    return heap.dtype.element_ty == tl.uint64


@triton.jit
def control_block(heap):
    """The handle of a debug heap as the pointer that everything below works with."""
    return heap.to(tl.pointer_type(tl.int64))


@triton.jit
def clock_ticks():
    """The time in ticks (int64, modulo 2**40)."""
    if has_ptx():
        time = tl.extra.cuda.globaltimer()
    elif is_interpreted():
        time = tl.full((), nanoseconds(), tl.int64)
    else:
        time = tl.extra.hip.memrealtime() * 10  # a clock of 100 MHz
    return (time >> TICK_LOG2) & MAX_TICKS


# Places ---------------------------------------------------------------------------------------


@triton.jit
def table_ptr(heap):
    return layout.load_immutable(heap, TABLE_WORD).to(tl.pointer_type(tl.int64))


@triton.jit
def mark_ptr(heap, page):
    return table_ptr(heap) + (page.to(tl.int64) + MARKS)


@triton.jit
def entry_ptr(heap, addr):
    """The first word of the entry of a block that begins at ``addr``."""
    cell = (addr - layout.load_base(heap)) >> CELL_LOG2
    return table_ptr(heap) + layout.load_immutable(heap, ENTRIES_WORD) + cell * ENTRY_WORDS


# Fields ---------------------------------------------------------------------------------------


@triton.jit
def entry_size(word):
    return word & MAX_BYTES


@triton.jit
def entry_tag(word):
    return (word >> TAG_SHIFT) & MAX_TAG


@triton.jit
def entry_granule(word):
    """Which of the four granules of its cell the block begins at (int32)."""
    return ((word >> GRANULE_SHIFT) & 3).to(tl.int32)


@triton.jit
def live_flag(granule):
    """The live bit in the entry of a block that begins at ``granule``."""
    return (granule & 0).to(tl.int64) + 1 << ((granule & 3) + LIVE_SHIFT).to(tl.int64)


@triton.jit
def is_live(word):
    return ((word >> LIVE_SHIFT) & 15) != 0


@triton.jit
def pack_entry(nbytes, tag, granule):
    """First word of the entry of a live block; ``tag`` int64."""
    place = (granule & 3).to(tl.int64) << GRANULE_SHIFT
    return nbytes + ((tag & MAX_TAG) << TAG_SHIFT) + live_flag(granule) + place


@triton.jit
def mark_use(mark):
    return (mark & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def mark_epoch(mark):
    return (mark >> 32) & MAX_EPOCH


@triton.jit
def entry_epoch(birth):
    return (birth >> EPOCH_SHIFT) & MAX_EPOCH


@triton.jit
def renewed(mark, use):
    """The mark of a page that is cut anew, for ``use`` (int32)."""
    return ((mark >> 32) + 1 << 32) + use.to(tl.int64)


# Sizes ----------------------------------------------------------------------------------------


@triton.jit
def padded_size(nbytes):
    """Bytes (int64) to ask the heap for: at least a cell, and at least 32 more than was requested,
    the first 16 of them the block's own zone, the last 16 the zone in front of the next block. A
    power of two is doubled: slots of that size are aligned as those of the power would be. 0 and
    negative sizes stay what they are."""
    power = (nbytes & (nbytes - 1)) == 0
    # (No heap has 2**62 bytes; a request for more must not wrap.)
    more = tl.minimum(nbytes, 1 << 62) + 32
    padded = tl.where(power & (nbytes <= MAX_SLOT), nbytes * 2, more)
    padded = tl.maximum(padded, CELL_BYTES)
    # (32 bytes have a slot of 64, of which 32 are zone; 16 and less have more.)
    return tl.where(nbytes > 0, padded, nbytes)


@triton.jit
def page_use(padded, active):
    """What the first pages of blocks of ``padded`` bytes are cut for (int32). (Computed as in
    malloc, so that the compiler does it once.)"""
    small = active & (padded > 0) & (padded <= MAX_SLOT)
    classes = layout.size_class(tl.where(small, padded, 1).to(tl.int32))
    return tl.where(padded <= MAX_SLOT, classes, RUN_USE)


@triton.jit
def block_bytes(padded):
    """Bytes (int64) of the slot or run that a malloc of ``padded`` bytes takes."""
    small = tl.minimum(tl.maximum(padded, 1), MAX_SLOT).to(tl.int32)
    run = ((padded - 1) >> PAGE_LOG2) + 1 << PAGE_LOG2
    return tl.where(
        padded <= MAX_SLOT, layout.class_bytes(layout.size_class(small)).to(tl.int64), run
    )


# Faults ---------------------------------------------------------------------------------------


@triton.jit(noinline=True)
def record_fault(heap, kind, at, block, word, birth, finder):
    """Count one error and write it down if there is room; returns 0.

    Scalars: ``at`` the address that was freed or written, ``block`` and the two words of its
    entry (0: no block is known). Only the host reads faults, after synchronising.
    """
    tl.atomic_add(heap + ERRORS + kind, (at & 0) + 1, sem="relaxed")
    table = table_ptr(heap)
    index = tl.atomic_add(table, (at & 0) + 1, sem="relaxed")
    if index < MAX_FAULTS:
        fault = table + FAULTS + index * FAULT_WORDS
        tl.atomic_xchg(fault, kind.to(tl.int64), sem="relaxed")
        tl.atomic_xchg(fault + 1, at, sem="relaxed")
        tl.atomic_xchg(fault + 2, block, sem="relaxed")
        tl.atomic_xchg(fault + 3, word, sem="relaxed")
        tl.atomic_xchg(fault + 4, birth, sem="relaxed")
        tl.atomic_xchg(fault + 5, finder.to(tl.int64), sem="relaxed")
        tl.atomic_xchg(fault + 6, layout.program_index().to(tl.int64), sem="relaxed")
    return kind * 0
