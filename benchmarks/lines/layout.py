"""Where the experiment keeps its state: one int64 tensor, apart from the data.

    word            what                                                     written by
    0..15           geometry, immutable                                      host
    HINTS           per copy: the first chunk that may have free pages       open, free
    lines           per class and stripe: the line word                      malloc, open, free
    halves          per line: a ring of places, two halves each              malloc, open
    magazines       per program index and class: a span of slots             malloc, free
    chunk words     one per chunk: bit set = page is free                    open, free
    page records    per page: 64 words of live bits, the page word, padding  malloc, free, open

Line word: 0..31 credits, signed; 32..51 places opened; 52..63 sparse pages, signed (a hint).
Half of a place: 0..22 page; 23 VOID: it has no tickets; 24..43 lap; 44..63 unused tickets, signed.
Page word: 0..15 out; 16..31 most that is sparse; 32..37 class; 38..43 stripe; 44 SLAB;
45..58 slots in magazines.
Magazine: 0..22 page; 23..35 first slot; 36..49 count; 50..56 class + 1 (0 in all: empty).

A page word lies beside the live bits of its page, so that the words of neighbouring pages do not
share a cache line: free is bound by atomics on lines that many programs want.
"""

import triton
import triton.language as tl

from devalloc.kernels.layout import load_immutable, program_index

BASE = tl.constexpr(1)
STRIPES_AND_RING = tl.constexpr(2)
RECORDS = tl.constexpr(3)
CHUNK_WORDS = tl.constexpr(4)
PLACES = tl.constexpr(5)
CHUNKS = tl.constexpr(6)
MAGAZINES = tl.constexpr(7)
MAGAZINE_MASK = tl.constexpr(8)

HINTS = tl.constexpr(256)
HINT_COPIES = tl.constexpr(32)
HINT_STRIDE = tl.constexpr(8)
LINES = tl.constexpr(512)
LINE_STRIDE = tl.constexpr(80)
LISTED = tl.constexpr(16)  # from a line word to the list of its sparse pages, page + 1 each
SPARSE_LIST = tl.constexpr(64)
RECORD_WORDS = tl.constexpr(68)
PAGE_WORD = tl.constexpr(64)

LINE_MASK = tl.constexpr((1 << 20) - 1)
OPENED = tl.constexpr(1 << 32)
SPARSE_SHIFT = tl.constexpr(52)
SPARSE = tl.constexpr(1 << 52)

PAGE_MASK = tl.constexpr((1 << 23) - 1)
VOID = tl.constexpr(1 << 23)
LAP_SHIFT = tl.constexpr(24)
LAP_MASK = tl.constexpr((1 << 20) - 1)
UNUSED_SHIFT = tl.constexpr(44)
OPEN_MASK = tl.constexpr((1 << 44) - 1)  # page, VOID and lap

SPAN_SLOT = tl.constexpr(23)
SPAN_COUNT = tl.constexpr(36)
SPAN_CLASS = tl.constexpr(50)

MOST_SHIFT = tl.constexpr(16)
CLASS_SHIFT = tl.constexpr(32)
STRIPE_SHIFT = tl.constexpr(38)
SLAB = tl.constexpr(1 << 44)
CACHED_SHIFT = tl.constexpr(45)


@triton.jit
def load_base(heap):
    """The address of page 0."""
    return load_immutable(heap, BASE)


@triton.jit
def load_records(heap):
    """The record of page 0."""
    return heap + load_immutable(heap, RECORDS)


@triton.jit
def load_chunk_words(heap):
    return heap + load_immutable(heap, CHUNK_WORDS)


@triton.jit
def load_chunks(heap):
    """How many chunks the heap has (int32)."""
    return load_immutable(heap, CHUNKS).to(tl.int32)


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
def line_ptr(heap, cls, stripe):
    return heap + LINES + (cls.to(tl.int64) * load_stripes(heap) + stripe) * LINE_STRIDE


@triton.jit
def line_of(heap, word):
    """The line word of the class and stripe in a page word."""
    cls = (word >> CLASS_SHIFT) & 63
    return heap + LINES + (cls * load_stripes(heap) + ((word >> STRIPE_SHIFT) & 63)) * LINE_STRIDE


@triton.jit
def ring_index(heap, cls, stripe, place):
    """The number of a place among those of all rings. Neighbours lie in different cache lines."""
    ring_log2 = load_ring_log2(heap)
    spread_log2 = tl.minimum(ring_log2, 4)
    at = place & ((1 << ring_log2) - 1)
    at = ((at & ((1 << spread_log2) - 1)) << (ring_log2 - spread_log2)) + (at >> spread_log2)
    return ((cls.to(tl.int64) * load_stripes(heap) + stripe) << ring_log2) + at


@triton.jit
def place_ptr(heap, index):
    return heap + load_immutable(heap, PLACES) + index


@triton.jit
def lap_of(heap, place):
    """How often the ring had been through when it came to ``place`` (int64)."""
    return ((place >> load_ring_log2(heap)) & LAP_MASK).to(tl.int64)


@triton.jit
def place_lap(word):
    return (word >> LAP_SHIFT) & LAP_MASK


@triton.jit
def place_page(word):
    return (word & PAGE_MASK).to(tl.int32)


@triton.jit
def live_bit(records, page, granule):
    """``(ptr, bit)``: the word and bit of the live bit of ``granule`` of ``page`` (int32)."""
    ptr = records + page.to(tl.int64) * RECORD_WORDS + (granule & 63)
    return ptr, (granule & 0).to(tl.int64) + 1 << (granule >> 6).to(tl.int64)


@triton.jit
def page_word_ptr(records, page):
    return records + page.to(tl.int64) * RECORD_WORDS + PAGE_WORD


@triton.jit
def slab_word(cls, stripe, slots):
    """The page word of a slab with nothing out."""
    most = (slots >> 1).to(tl.int64) << MOST_SHIFT
    return most + (cls.to(tl.int64) << CLASS_SHIFT) + (stripe.to(tl.int64) << STRIPE_SHIFT) + SLAB


@triton.jit
def page_class(word):
    return ((word >> CLASS_SHIFT) & 63).to(tl.int32)


@triton.jit
def page_out(word):
    return (word & 0xFFFF).to(tl.int32)


@triton.jit
def is_sparse(word):
    """1 (int64) for the word of a page in use of which a quarter is free, or one slot."""
    out = page_out(word)
    return ((out > 0) & (out <= ((word >> MOST_SHIFT) & 0xFFFF).to(tl.int32))).to(tl.int64)


@triton.jit
def bit_of(page):
    """The bit of a page in its chunk word."""
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
