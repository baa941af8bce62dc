"""Where the experiment keeps its state: one int64 tensor, apart from the data.

    word            what                                                     written by
    0..15           geometry, immutable                                      host
    HINTS           per copy: the first chunk that may have free pages       open, free
    lines           per class and stripe: the line word                      malloc, open, free
    places          per line: a ring of places                               malloc, open
    seconds         per place of a ring: the second page of a pair           open
    chunk words     one per chunk: bit set = page is free                    open, free
    page records    per page: 64 words of live bits, the page word, padding  malloc, free, open

Line word: 0..31 credits, signed; 32..51 places opened; 52..63 sparse pages, signed (a hint).
Next to it, LATEST: the place that was opened last and its page, so that most tickets need not read
the ring: 0..22 page; 23..42 place; 43 set (0 in all: none, or a pair).
Place: 0..22 page; 23..35 unused tickets; 36 PAIR; 38..50 lap.
Page word: 0..15 out; 16..31 half of the slots; 32..37 class; 38..43 stripe; 44 SLAB.

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
SECONDS = tl.constexpr(7)

HINTS = tl.constexpr(256)
HINT_COPIES = tl.constexpr(32)
HINT_STRIDE = tl.constexpr(8)
LINES = tl.constexpr(512)
LINE_STRIDE = tl.constexpr(16)
LATEST = tl.constexpr(1)  # from a line word to the word beside it
LATEST_SHIFT = tl.constexpr(23)
IS_LATEST = tl.constexpr(1 << 43)
RECORD_WORDS = tl.constexpr(68)
PAGE_WORD = tl.constexpr(64)

LINE_MASK = tl.constexpr((1 << 20) - 1)
OPENED = tl.constexpr(1 << 32)
SPARSE_SHIFT = tl.constexpr(52)
SPARSE = tl.constexpr(1 << 52)

NO_PAGE = tl.constexpr((1 << 23) - 1)
UNUSED_SHIFT = tl.constexpr(23)
PAIR = tl.constexpr(1 << 36)
LAP_SHIFT = tl.constexpr(38)
LAP_MASK = tl.constexpr((1 << 13) - 1)

HALF_SHIFT = tl.constexpr(16)
CLASS_SHIFT = tl.constexpr(32)
STRIPE_SHIFT = tl.constexpr(38)
SLAB = tl.constexpr(1 << 44)


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
def second_ptr(heap, index):
    return heap + load_immutable(heap, SECONDS) + index


@triton.jit
def lap_of(heap, place):
    """How often the ring had been through when it came to ``place`` (int64)."""
    return ((place >> load_ring_log2(heap)) & LAP_MASK).to(tl.int64)


@triton.jit
def place_lap(word):
    return (word >> LAP_SHIFT) & LAP_MASK


@triton.jit
def place_page(word):
    return (word & NO_PAGE).to(tl.int32)


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
    half = (slots >> 1).to(tl.int64) << HALF_SHIFT
    return half + (cls.to(tl.int64) << CLASS_SHIFT) + (stripe.to(tl.int64) << STRIPE_SHIFT) + SLAB


@triton.jit
def page_out(word):
    return (word & 0xFFFF).to(tl.int32)


@triton.jit
def page_half(word):
    return ((word >> HALF_SHIFT) & 0xFFFF).to(tl.int32)


@triton.jit
def is_sparse(out, half):
    """1 (int64) for a page in use of which at least half is free."""
    return ((out > 0) & (out <= half)).to(tl.int64)


@triton.jit
def bit_of(page):
    """The bit of a page in its chunk word."""
    return (page & 0).to(tl.int64) + 1 << (page & 63).to(tl.int64)
