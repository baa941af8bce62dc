"""Where the experiment keeps its state: one int64 tensor, apart from the data.

    word            what                                                     written by
    0..31           geometry, immutable                                      host
    32..111         errors and their records, as in the heap                 malloc, free
    HINTS           per copy: the first chunk that may have free pages       malloc, free
    LINES           per class and stripe: the line word                      malloc
    page records    per page: 64 words of live bits, the page word, the      malloc, free
                    length of a run, padding
    rows            a bit per page, 64 pages to a word: free pages, and for  malloc, free
                    each class those with room for half of their slots
    idle words      where lanes swap that have nothing to swap               malloc, free
    places          per line: a ring of the pages its tickets lead to        malloc
    magazines       per program index and class: a span of slots             malloc, free

`geometry.py` says how many of each a heap has, and where they begin.

Line word: 0..31 tickets left of the places opened, signed; 32..62 places opened.
Place: 0..22 and 23..45 two pages, all bits set where there is none; 46..63 the number of the place.
Page word: 0..23 out; 24..29 class; 30 KEPT; 31 SLAB; 32..44 half of its slots; 45 RUN;
46 SPANNED: some of its slots were in a magazine.
Magazine: 0..22 page; 23..35 first slot; 36..49 count; 50..56 class + 1 (0 in all: empty).

A page word lies beside the live bits of its page, so that the words of neighbouring pages do not
share a cache line: free is bound by atomics on lines that many programs want.
"""

import triton
import triton.language as tl

from devalloc.kernels.layout import load_immutable, program_index

MAGIC = tl.constexpr(0x0DE7A110C0000002)

MAGIC_WORD = tl.constexpr(0)
BASE = tl.constexpr(1)
STRIPES_AND_RING = tl.constexpr(2)
RECORDS = tl.constexpr(3)
ROWS = tl.constexpr(4)
PLACES = tl.constexpr(5)
CHUNKS = tl.constexpr(6)
MAGAZINES = tl.constexpr(7)
MAGAZINE_MASK = tl.constexpr(8)
PAGES = tl.constexpr(9)
IDLE = tl.constexpr(10)  # where the idle words begin, shifted; below that, their number less one
IDLE_SHIFT = tl.constexpr(16)
IDLE_MASK = tl.constexpr((1 << 16) - 1)

HINTS = tl.constexpr(256)
HINT_COPIES = tl.constexpr(32)
HINT_STRIDE = tl.constexpr(8)
LINES = tl.constexpr(512)
LINE_STRIDE = tl.constexpr(8)
RECORD_WORDS = tl.constexpr(68)
PAGE_WORD = tl.constexpr(64)
LENGTH = tl.constexpr(1)  # from a page word to the pages of a run

PLACE_MASK = tl.constexpr((1 << 31) - 1)
OPENED = tl.constexpr(1 << 32)

PAGE_MASK = tl.constexpr((1 << 23) - 1)
SECOND_SHIFT = tl.constexpr(23)
NUMBER_SHIFT = tl.constexpr(46)
NUMBER_MASK = tl.constexpr((1 << 18) - 1)

SPAN_SLOT = tl.constexpr(23)
SPAN_COUNT = tl.constexpr(36)
SPAN_CLASS = tl.constexpr(50)

OUT_MASK = tl.constexpr((1 << 24) - 1)
CLASS_SHIFT = tl.constexpr(24)
KEPT = tl.constexpr(1 << 30)
SLAB = tl.constexpr(1 << 31)
HALF_SHIFT = tl.constexpr(32)
RUN = tl.constexpr(1 << 45)
SPANNED = tl.constexpr(1 << 46)


@triton.jit
def load_base(heap):
    """The address of page 0."""
    return load_immutable(heap, BASE)


@triton.jit
def load_records(heap):
    """The record of page 0."""
    return heap + load_immutable(heap, RECORDS)


@triton.jit
def load_chunks(heap):
    """How many chunks the heap has (int32)."""
    return load_immutable(heap, CHUNKS).to(tl.int32)


@triton.jit
def load_pages(heap):
    """How many pages the heap has (int32)."""
    return load_immutable(heap, PAGES).to(tl.int32)


@triton.jit
def free_row(heap):
    """The words of the free pages, one per chunk."""
    return heap + load_immutable(heap, ROWS)


@triton.jit
def class_row(heap, cls):
    """The words of the pages of class ``cls`` that have room for half of their slots."""
    return free_row(heap) + (cls + 1).to(tl.int64) * load_immutable(heap, CHUNKS)


@triton.jit
def load_stripes(heap):
    return load_immutable(heap, STRIPES_AND_RING) & 0xFFFF


@triton.jit
def load_ring_log2(heap):
    """Log2 (int32) of the places of a ring."""
    return (load_immutable(heap, STRIPES_AND_RING) >> 16).to(tl.int32)


@triton.jit
def own_stripe(heap):
    return program_index() & (load_stripes(heap).to(tl.int32) - 1)


@triton.jit
def hint_ptr(heap):
    """This program's copy of the hint where free pages begin."""
    return heap + HINTS + (program_index() & (HINT_COPIES - 1)) * HINT_STRIDE


@triton.jit
def idle_ptr(heap, lane):
    """A word that no program reads, for a lane that must not swap anything."""
    idle = load_immutable(heap, IDLE)
    mask = (idle & IDLE_MASK).to(tl.int32)
    return heap + (idle >> IDLE_SHIFT) + ((program_index() * 32 + lane) & mask)


@triton.jit
def line_ptr(heap, cls):
    """This program's line of class ``cls``."""
    at = cls.to(tl.int64) * load_stripes(heap) + own_stripe(heap)
    return heap + LINES + at * LINE_STRIDE


@triton.jit
def place_ptr(heap, cls, place):
    """The word of a place of this program's line. Neighbours lie in different cache lines."""
    ring_log2 = load_ring_log2(heap)
    spread_log2 = tl.minimum(ring_log2, 4)
    at = place & ((1 << ring_log2) - 1)
    at = ((at & ((1 << spread_log2) - 1)) << (ring_log2 - spread_log2)) + (at >> spread_log2)
    line = cls.to(tl.int64) * load_stripes(heap) + own_stripe(heap)
    return heap + load_immutable(heap, PLACES) + (line << ring_log2) + at


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
def live_bit(records, page, granule):
    """``(ptr, bit)``: the word and bit of the live bit of ``granule`` of ``page`` (int32)."""
    ptr = records + page.to(tl.int64) * RECORD_WORDS + (granule & 63)
    return ptr, (granule & 0).to(tl.int64) + 1 << (granule >> 6).to(tl.int64)


@triton.jit
def page_word_ptr(records, page):
    return records + page.to(tl.int64) * RECORD_WORDS + PAGE_WORD


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
def is_slab_of(word, cls):
    """Whether the page with this word is a slab of class ``cls``."""
    return ((word >> CLASS_SHIFT) & 191) == (cls.to(tl.int64) + 128)


@triton.jit
def bit_of(page):
    """The bit of a page in the word of its chunk."""
    return (page & 0).to(tl.int64) + 1 << (page & 63).to(tl.int64)


@triton.jit
def magazine_ptr(heap, cls):
    """This program's magazine for class ``cls`` (int32 scalar)."""
    mask = load_immutable(heap, MAGAZINE_MASK).to(tl.int32)
    return heap + load_immutable(heap, MAGAZINES) + ((program_index() + cls * 677) & mask)


@triton.jit
def span_of(page, slot, count, cls):
    word = page.to(tl.int64) + (slot.to(tl.int64) << SPAN_SLOT)
    return word + (count.to(tl.int64) << SPAN_COUNT) + ((cls + 1).to(tl.int64) << SPAN_CLASS)


@triton.jit
def span_count(span):
    return ((span >> SPAN_COUNT) & 0x3FFF).to(tl.int32)
