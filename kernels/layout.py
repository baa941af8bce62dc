"""Where everything lies: the state of a heap, its words and their fields.

The state is one int64 tensor, apart from user data, so that a user's overflow cannot reach it.
Words 0..31 never change after the heap is made and may be loaded plainly; all others change under
running kernels and are touched by atomics only.

    word            what                                                     written by
    0..31           geometry, immutable (16..18: see ``debug.block_table``)  host
    ERRORS          one counter per kind of error                            record, table
    ERROR_RECORDS   count of records; the first MAX_RECORDS, 4 words each    record
    EXTENT, ANSWERS of a heap that grows: its pages so far, in copies; how   host
                    often the host has grown it, or could not
    HINTS           per copy: the first chunk that may have free pages, and  malloc, free
                    how many blocks were freed
    MAGAZINES       per program index and class, or lane: a span of slots    malloc, free
    lines           per class and stripe: the line word                      malloc
    rows            a bit per page, 64 pages to a word: free pages, and for  malloc, free
                    each class those with room for half of their slots
    places          per line: a ring of the pages its tickets lead to        malloc
    page records    per page: 64 words of live bits, the page word, the      malloc, free
                    most pages taken from here on

A **page** is 64 KiB, a **chunk** 64 pages (4 MiB): one word of a row.

Line word: 0..31 tickets left of the places opened, signed; 32..62 places opened.
Place: 0..22 and 23..45 two pages, all bits set where there is none; 46..63 the number of the place.
Page word: 0..23 out; 24..29 class; 30 KEPT; 31 SLAB; 32..55 half of the slots of a slab, or the
pages of a run; 56 RUN; 57 SPANNED: some of its slots were in a magazine.
Magazine: 0..22 page; 23..34 first granule; 36..49 count; 50..56 class + 1 (0 in all: empty).

Live bits: a **granule** is 16 bytes, and a page has 4096 of them. The bit of granule g of a page
is bit g >> 6 of the page's word g & 63, whatever the page is used for, so a free finds the bit of
an address without knowing what lies there. Slots that are 1 KiB apart share a word: the few slots
of a page of large ones lie in few words, and slots of neighbouring lanes in neighbouring words.

A page word lies beside the live bits of its page, so that the words of neighbouring pages do not
share a cache line: free is bound by atomics on lines that many programs want.
"""

import triton
import triton.language as tl

from .atomics import load_one
from .bits import divide, floor_log2
from .target import anew, assembly, has_ptx

MAGIC = tl.constexpr(0x0DE7A110C0000002)

PAGE_LOG2 = tl.constexpr(16)
PAGE_BYTES = tl.constexpr(1 << 16)
LIVE_WORDS = tl.constexpr(64)  # words of live bits per page: 4096 granules of 16 bytes
NUM_CLASSES = tl.constexpr(38)
MAX_SLOT = tl.constexpr(1 << 15)

# Immutable words. (What is needed together shares a sector of 32 bytes, since each is a wait for a
# program that has just begun: the first four are all of a free, and of a malloc by a magazine.)
MAGAZINES_AND_PAGES = tl.constexpr(0)  # the number of the last magazine; from bit 32 on, pages
BASE = tl.constexpr(1)
PAGE_RECORDS = tl.constexpr(2)
CHUNKS_AND_ROWS = tl.constexpr(3)  # chunks; from bit 32 on, the word of the free row
LINES = tl.constexpr(4)
PLACES = tl.constexpr(5)
STRIPES_AND_RING = tl.constexpr(6)
BELL = tl.constexpr(7)  # address of the word that asks the host for more pages, or 0
MAGIC_WORD = tl.constexpr(8)

# Mutable words at fixed places.
ERRORS = tl.constexpr(32)
RECORD_COUNT = tl.constexpr(40)
ERROR_RECORDS = tl.constexpr(48)
MAX_RECORDS = tl.constexpr(16)
EXTENT = tl.constexpr(128)
EXTENT_COPIES = tl.constexpr(64)
ANSWERS = tl.constexpr(192)
HINTS = tl.constexpr(256)
HINT_COPIES = tl.constexpr(32)
HINT_STRIDE = tl.constexpr(8)
FREES = tl.constexpr(4)  # from a hint to a count of blocks that were freed
MAGAZINES = tl.constexpr(512)
PAGE_MAGAZINES = tl.constexpr(8)  # magazines for each page, mostly
LINE_STRIDE = tl.constexpr(8)  # times the lines of a class: see line_ptr
RECORD_WORDS = tl.constexpr(68)
PAGE_WORD = tl.constexpr(64)
REACHED = tl.constexpr(1)  # from a page word to the most pages that were ever taken from it on

PLACE_MASK = tl.constexpr((1 << 31) - 1)
OPENED = tl.constexpr(1 << 32)

PAGE_MASK = tl.constexpr((1 << 23) - 1)
SECOND_SHIFT = tl.constexpr(23)
NUMBER_SHIFT = tl.constexpr(46)
NUMBER_MASK = tl.constexpr((1 << 18) - 1)

SPAN_FIRST = tl.constexpr(23)
SPAN_COUNT = tl.constexpr(36)
SPAN_CLASS = tl.constexpr(50)

OUT_MASK = tl.constexpr((1 << 24) - 1)
CLASS_SHIFT = tl.constexpr(24)
KEPT = tl.constexpr(1 << 30)
SLAB = tl.constexpr(1 << 31)
HALF_SHIFT = tl.constexpr(32)
HALF_MASK = tl.constexpr((1 << 24) - 1)
RUN = tl.constexpr(1 << 56)
SPANNED = tl.constexpr(1 << 57)

# Kinds of error.
E_DOUBLE_FREE = tl.constexpr(0)
E_INVALID_FREE = tl.constexpr(1)
E_OUT_OF_MEMORY = tl.constexpr(2)
E_INVALID_ARGUMENT = tl.constexpr(3)
# (4 and 5: see ``debug.block_table``.)
E_INVALID_POINTER = tl.constexpr(6)
# In a record of an invalid argument, in place of an address: a length of a row, not a size.
IN_ROWS = tl.constexpr(-1)


@triton.constexpr_function
def immutable_load(bits, byte):
    """The PTX of loads of what never changes. (The compiler then has no address to compute.)"""
    return f"ld.global.nc.b{bits} $0, [$1+{byte}];"


@triton.jit
def load_immutable(heap, word: tl.constexpr):
    """One immutable word of the control block (int64).

    On CUDA a load that is declared to read what is never written (``ld.global.nc``). A plain load
    would be repeated after every acquire and every barrier, each time from beyond the first-level
    cache, which an acquire empties.
    """
    load: tl.constexpr = immutable_load(64, 8 * word)
    return assembly(load, "=l,l", (heap,), tl.int64, True) if has_ptx() else tl.load(heap + word)


@triton.jit
def load_half(heap, word: tl.constexpr, upper: tl.constexpr):
    """The lower or ``upper`` half of such a word (int32)."""
    # (Loaded by itself, since what both halves need would stay in registers in between.)
    load: tl.constexpr = immutable_load(32, 8 * word + 4 * upper)
    half = (load_immutable(heap, word) >> (32 * upper)).to(tl.int32)
    return assembly(load, "=r,l", (heap,), tl.int32, True) if has_ptx() else half


@triton.jit
def program_index():
    """This program's number within its launch (int32), for spreading and for error records."""
    x = tl.num_programs(0)
    y = tl.num_programs(1)
    # (What depends on it is not kept in registers, or on the stack, all through a caller's loop.)
    return anew(tl.program_id(0) + x * (tl.program_id(1) + y * tl.program_id(2)))


@triton.jit
def program_count():
    """How many programs the launch has (float32: not exact if there are very many)."""
    plane = tl.num_programs(0).to(tl.float32) * tl.num_programs(1).to(tl.float32)
    return plane * tl.num_programs(2).to(tl.float32)


@triton.jit
def load_base(heap):
    """The address of page 0."""
    return load_immutable(heap, BASE)


@triton.jit
def load_records(heap):
    """The record of page 0."""
    return heap + load_immutable(heap, PAGE_RECORDS)


@triton.jit
def load_pages(heap):
    """How many pages the heap has (int32). In a heap that grows, this many have a record; it never
    becomes less."""
    pages = load_half(heap, MAGAZINES_AND_PAGES, 1)
    if pages == 0:
        # (It grows.)
        copy = program_index() & (EXTENT_COPIES - 1)
        pages = load_one(heap + EXTENT + copy)
    return pages


@triton.jit
def load_chunks(heap):
    """How many chunks the heap has (int32), or may have, if it grows: rows are that long, and
    zeros where there are no pages yet."""
    return load_half(heap, CHUNKS_AND_ROWS, 0)


@triton.jit
def free_row(heap):
    """The words of the free pages, one per chunk."""
    return heap + load_half(heap, CHUNKS_AND_ROWS, 1)


@triton.jit
def class_word(heap, cls, chunk):
    """The word of the pages of a chunk that are of class ``cls`` and have room for half of their
    slots: one of the row of the class."""
    # (One load, and 32 bits: a free waits for this.)
    both = load_immutable(heap, CHUNKS_AND_ROWS)
    return heap + ((both >> 32).to(tl.int32) + (cls + 1) * both.to(tl.int32) + chunk)


@triton.jit
def load_stripes(heap):
    """How many lines each class has (int64)."""
    return load_immutable(heap, STRIPES_AND_RING) & 0xFFFF


@triton.jit
def line_index(heap, cls):
    """The number (int64) of this program's line of class ``cls``."""
    stripes = load_stripes(heap)
    return cls.to(tl.int64) * stripes + (program_index() & (stripes.to(tl.int32) - 1))


@triton.jit
def hint_ptr(heap):
    """This program's copy of the hint where free pages begin."""
    return heap + HINTS + (program_index() & (HINT_COPIES - 1)) * HINT_STRIDE


@triton.jit
def line_ptr(heap, cls):
    """This program's line of class ``cls``. Where there are many, they lie far apart: programs that
    draw tickets at one time would wait for each other, if their lines shared a sector."""
    first = heap + load_immutable(heap, LINES)
    return first + line_index(heap, cls) * load_stripes(heap) * LINE_STRIDE


@triton.jit
def place_ptr(heap, cls, place):
    """The word of a place of this program's line. Neighbours lie in different cache lines."""
    ring_log2 = (load_immutable(heap, STRIPES_AND_RING) >> 16).to(tl.int32)
    spread_log2 = tl.minimum(ring_log2, 4)
    at = place & ((1 << ring_log2) - 1)
    at = ((at & ((1 << spread_log2) - 1)) << (ring_log2 - spread_log2)) + (at >> spread_log2)
    return heap + load_immutable(heap, PLACES) + (line_index(heap, cls) << ring_log2) + at


@triton.jit
def pack_place(first, second, place):
    """The word of a place that leads to two pages (-1: to none)."""
    pages = (first & PAGE_MASK).to(tl.int64) + ((second & PAGE_MASK).to(tl.int64) << SECOND_SHIFT)
    return pages + ((place & NUMBER_MASK).to(tl.int64) << NUMBER_SHIFT)


@triton.jit
def is_place(word, place):
    """Whether the word is that of ``place``."""
    return ((word >> NUMBER_SHIFT) & NUMBER_MASK).to(tl.int32) == (place & NUMBER_MASK)


@triton.jit
def is_before(word, place):
    """Whether the word is that of a place before ``place``: that is still to come."""
    number = (word >> NUMBER_SHIFT).to(tl.int32)
    return ((number - place) & NUMBER_MASK) > (NUMBER_MASK >> 1)


@triton.jit
def place_page(word, second):
    """One of the two pages (int32) of a place, or -1."""
    page = (tl.where(second, word >> SECOND_SHIFT, word) & PAGE_MASK).to(tl.int32)
    return tl.where(page != PAGE_MASK, page, -1)


@triton.jit
def page_word_ptr(heap, page):
    # (In 32 bits: the records of 512 GiB have 2 ** 23 * 68 words.)
    return load_records(heap) + (page * RECORD_WORDS).to(tl.int64) + PAGE_WORD


@triton.jit
def slab_word(cls, slots):
    """The page word of a slab with nothing out."""
    half = (slots >> 1).to(tl.int64) << HALF_SHIFT
    return half + (cls.to(tl.int64) << CLASS_SHIFT) + SLAB


@triton.jit
def page_class(word):
    return ((word >> CLASS_SHIFT) & 63).to(tl.int32)


@triton.jit
def page_out(word):
    return (word & OUT_MASK).to(tl.int32)


@triton.jit
def page_half(word):
    """Half of the slots of a slab (int32)."""
    return ((word >> HALF_SHIFT) & 0x1FFF).to(tl.int32)


@triton.jit
def run_word(length):
    """The page word of a run of ``length`` pages (int64) with nothing out."""
    return (length << HALF_SHIFT) + RUN


@triton.jit
def run_pages(word):
    """The pages (int64) of a run."""
    return (word >> HALF_SHIFT) & HALF_MASK


@triton.jit
def is_slab_of(word, cls):
    """Whether the page with this word is a slab of class ``cls``."""
    return ((word >> CLASS_SHIFT) & 191) == (cls.to(tl.int64) + 128)


@triton.jit
def bit_of(page):
    """The bit of a page in the word of its chunk."""
    return (page & 0).to(tl.int64) + 1 << (page & 63).to(tl.int64)


@triton.jit
def last_magazine(heap):
    """The number (int32) of the last magazine: one less than a power of two."""
    return load_half(heap, MAGAZINES_AND_PAGES, 0)


@triton.jit
def idle_ptr(heap, lane):
    """A word for a lane that must swap nothing: a magazine, which never is -1, so to swap -1 for -1
    there changes nothing."""
    return heap + MAGAZINES + ((program_index() * 32 + lane) & last_magazine(heap))


@triton.jit
def magazine_ptr(heap, last, cls):
    """This program's magazine for class ``cls`` (int32); with :func:`last_magazine`."""
    # (A program's lie side by side. An odd step: programs that want one class use all magazines.)
    return heap + MAGAZINES + ((program_index() * (NUM_CLASSES + 1) + cls) & last)


@triton.jit
def lane_magazine(heap, last, lane, width: tl.constexpr):
    """The magazine of each ``lane`` of this program's block; with :func:`last_magazine`."""
    return heap + MAGAZINES + ((program_index() * width + lane) & last)


@triton.jit
def span_of(page, granule, count, cls):
    """``count`` consecutive slots of ``page``, of which the first begins at ``granule``."""
    word = page.to(tl.int64) + (granule.to(tl.int64) << SPAN_FIRST)
    return word + (count.to(tl.int64) << SPAN_COUNT) + ((cls + 1).to(tl.int64) << SPAN_CLASS)


@triton.jit
def span_start(span):
    """``(page, granule)`` where a span begins."""
    return (span & PAGE_MASK).to(tl.int32), ((span >> SPAN_FIRST) & 0xFFF).to(tl.int32)


@triton.jit
def span_count(span):
    return ((span >> SPAN_COUNT) & 0x3FFF).to(tl.int32)


@triton.jit
def address_of(heap, page, granule):
    """The address of a granule of ``page`` (int32)."""
    return load_base(heap) + (page.to(tl.int64) << PAGE_LOG2) + (granule << 4).to(tl.int64)


@triton.jit
def place_of(base, addr):
    """``(page, granule)`` of an address of the heap."""
    offset = addr - base
    return (offset >> PAGE_LOG2).to(tl.int32), ((offset >> 4) & 4095).to(tl.int32)


# Size classes ---------------------------------------------------------------------------------
#
#   0..7     16, 32, ... 128
#   8..31    four steps per doubling up to 8 KiB
#   32..37   a page cut in 7, 6, 5, 4, 3, 2
#
# devalloc.sizes makes the same table on the host; a test holds them together.


@triton.jit
def size_class(nbytes):
    """Class (int32) of requests of ``nbytes`` in [1, MAX_SLOT] (int32)."""
    low = nbytes - 1
    e = floor_log2(tl.maximum(low, 128))
    middle = (e - 7) * 4 + (low >> (e - 2)) + 4
    high = 39 - divide(low * 0 + PAGE_BYTES, ((low >> 4) << 4) + 16)
    return tl.where(nbytes <= 128, low >> 4, tl.where(nbytes <= 8192, middle, high))


@triton.jit
def class_bytes(cls):
    """Slot size in bytes (int32) of class ``cls`` (int32)."""
    low = (cls & 3) + tl.where(cls < 4, 1, 5) << tl.maximum(cls >> 2, 1) + 3
    high = divide(cls * 0 + PAGE_BYTES // 16, tl.maximum(39 - cls, 2)) << 4
    return tl.where(cls < 32, low, high)


@triton.jit
def slots_of(size):
    """Slots of ``size`` bytes (int32) in a page."""
    return divide(size * 0 + PAGE_BYTES, size)


@triton.jit
def class_slots(cls):
    """Slots per page (int32) of class ``cls``."""
    return slots_of(class_bytes(cls))
