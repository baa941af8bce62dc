"""Where everything lies: the control block of a heap, its words and their fields.

The control block is one int64 tensor, apart from user data, so that a user's overflow cannot
reach it. Words 0..31 never change after the heap is made and may be loaded plainly
(:func:`load_geometry`); all others change under running kernels and are touched by atomics only.

    word            what                                              written by
    0..31           geometry (immutable; 16..18: see ``table``)       host
    ERRORS          one counter per kind of error                     record, table
    RECORDS         count of records; the first MAX_RECORDS, 4 words  record
    PEAK, USED      pages taken from the page level, and their peak   pages
    HELD            pages in batches of stripes, spares among them    batches
    RUNS            large allocations (runs) ever handed out          heap
    GRANTED         per class: slots ever granted, as credits (those  batches, detached
                    that came back are subtracted) or by draws
    TRANSIT         how many are in hand, and epochs, striped         pages, batches, shelf
    ... + SHELVED   pages on the shelf, striped; a bit: closed        shelf
    STRIPES         per class and stripe: the stripe word, and a      heap, batches, slabs
                    spare batch, also as a stripe word
    places          pages on the shelf and their use, per place       shelf
    hints           ORDERS + NUM_CLASSES rows, one bit per chunk      pages, detached, batches
    page bits       one word per chunk: bit set = page is free        pages
    page words      one per page: what the page is                    detached, batches, shelf,
                                                                      heap
    live bits       64 words per page: bit set = an allocation        live, heap
                    begins here

A **page** is 64 KiB, a **chunk** 64 pages (4 MiB): one word of page bits.

Page word:

    0..23   out         slots that are credits or accounted (slab; see slabs); length in pages (run)
    24..29  class       size class (slab)
    30      ATTACHED    the page belongs to the batch of a stripe
    31      PUBLISHED   a search for the class will find this page: the chunk's hint is set
    32..33  kind        FREE (also: inside a run), SLAB, RUN

Live bits: a **granule** is 16 bytes, and a page has 4096 of them. The bit of granule g of a page
is bit g >> 6 of the page's word g & 63, whatever the page is used for, so a free finds the bit of
an address without knowing what lies there. Slots that are 1 KiB apart share a word: the few slots
of a page of large ones lie in few words, and slots of neighbouring lanes in neighbouring words.

Stripe word: a batch of pages and how many of its slots are still to be handed out.

    0..31   credits, signed   below or at 0: dry; slot i is handed out when credits are slots - i
    32..54  first page
    55..61  batch length in pages (0: no batch)
"""

import triton
import triton.language as tl

from .bits import divide, floor_log2
from .target import has_ptx

MAGIC = tl.constexpr(0x0DE7A110C0000001)

PAGE_LOG2 = tl.constexpr(16)
PAGE_BYTES = tl.constexpr(1 << 16)
CHUNK_PAGES = tl.constexpr(64)
LIVE_WORDS = tl.constexpr(64)  # words of live bits per page: 4096 granules of 16 bytes
ORDERS = tl.constexpr(7)  # hint rows of the page level: a free run of 2**k pages, k = 0..6
NUM_CLASSES = tl.constexpr(38)
MAX_SLOT = tl.constexpr(1 << 15)
MAX_BATCH = tl.constexpr(64)

# Geometry: MAGIC, the base, then numbers below 2**32, two to a word, so that a fast path needs
# few loads and few registers: malloc loads the base and one word, free one word more.
BASE_WORD = tl.constexpr(1)  # address of page 0
PACKED_WORD = tl.constexpr(2)
G_STRIPES = tl.constexpr(0)
G_LIVE_BITS = tl.constexpr(1)
G_PAGES = tl.constexpr(2)
G_PAGE_WORDS = tl.constexpr(3)
G_PAGE_BITS = tl.constexpr(4)
G_HINTS = tl.constexpr(5)
G_ROW_WORDS = tl.constexpr(6)
G_MAX_BATCH = tl.constexpr(7)
G_SHELF = tl.constexpr(8)
G_PLACES = tl.constexpr(9)
G_SHELVABLE = tl.constexpr(10)  # how many pages each word of SHELVED may count
G_WORDS = tl.constexpr(11)  # length of the control block

# Mutable words at fixed places.
ERRORS = tl.constexpr(32)
RECORD_COUNT = tl.constexpr(40)
RECORDS = tl.constexpr(48)
MAX_RECORDS = tl.constexpr(16)
PEAK = tl.constexpr(112)
USED = tl.constexpr(128)
HELD = tl.constexpr(136)
RUNS = tl.constexpr(144)
GRANTED = tl.constexpr(160)
TRANSIT = tl.constexpr(256)
TRANSIT_STRIPES = tl.constexpr(32)
TRANSIT_STRIDE = tl.constexpr(8)
SHELVED = tl.constexpr(4)  # from a transit word to a count of pages on the shelf (32 bits)
SHELF_CLOSED = tl.constexpr(1 << 40)  # set in such a count: nothing may be put on the shelf
STRIPES = tl.constexpr(512)
STRIPE_STRIDE = tl.constexpr(8)
SPARE = tl.constexpr(4)  # from a stripe word to its spare batch

# Kinds of error.
E_DOUBLE_FREE = tl.constexpr(0)
E_INVALID_FREE = tl.constexpr(1)
E_OUT_OF_MEMORY = tl.constexpr(2)
E_INVALID_ARGUMENT = tl.constexpr(3)
# (4 and 5: see ``table``.)
E_INVALID_POINTER = tl.constexpr(6)
# In a record of an invalid argument, in place of an address: a length of ``rows``, not a size.
IN_ROWS = tl.constexpr(-1)

# Page word.
OUT_MASK = tl.constexpr((1 << 24) - 1)
CLASS_SHIFT = tl.constexpr(24)
CLASS_MASK = tl.constexpr(63 << 24)
ATTACHED = tl.constexpr(1 << 30)
PUBLISHED = tl.constexpr(1 << 31)
KIND_SHIFT = tl.constexpr(32)
KIND_MASK = tl.constexpr(3 << 32)
SLAB = tl.constexpr(1 << 32)
RUN = tl.constexpr(2 << 32)

# Stripe word.
BATCH_SHIFT = tl.constexpr(55)

# The use of pages at a place of the shelf: this if they are a run; of slabs it is their class.
FOR_RUN = tl.constexpr(63)


@triton.constexpr_function
def immutable_load(word):
    """The PTX of :func:`load_immutable`. (The compiler then has no address to compute.)"""
    return f"ld.global.nc.b64 $0, [$1+{8 * word}];"


@triton.jit
def load_immutable(heap, word: tl.constexpr):
    """One immutable word of the control block (int64).

    On CUDA a load that is declared to read what nobody writes (``ld.global.nc``). A plain load
    would be repeated after every acquire and every barrier, each time from beyond the first-level
    cache, which an acquire empties.
    """
    if has_ptx():
        value = tl.inline_asm_elementwise(
            immutable_load(word),
            "=l,l",
            [heap],
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )
    else:
        value = tl.load(heap + word)
    return value


@triton.jit
def load_base(heap):
    """The address of page 0."""
    return load_immutable(heap, BASE_WORD)


@triton.jit
def load_geometry(heap, field: tl.constexpr):
    """One of the G_ numbers, as int64."""
    word = load_immutable(heap, PACKED_WORD + field // 2)
    if field % 2 == 0:
        value = word & 0xFFFFFFFF
    else:
        value = word >> 32
    return value


@triton.jit
def page_word_ptr(heap, page):
    return heap + load_geometry(heap, G_PAGE_WORDS) + page


@triton.jit
def page_bits_ptr(heap, chunk):
    return heap + load_geometry(heap, G_PAGE_BITS) + chunk


@triton.jit
def live_words(heap):
    """The first word of live bits; a page has LIVE_WORDS of them."""
    return heap + load_geometry(heap, G_LIVE_BITS)


@triton.jit
def hint_ptr(heap, row, chunk):
    """The word of hint row ``row`` that holds the bit of ``chunk`` (bit ``chunk & 63``)."""
    words = load_geometry(heap, G_ROW_WORDS)
    return heap + load_geometry(heap, G_HINTS) + row * words + (chunk >> 6)


@triton.jit
def address_of(base, page, granule):
    """The address of a granule of ``page`` (int32); ``base`` is that of page 0."""
    return base + (page.to(tl.int64) << PAGE_LOG2) + (granule << 4).to(tl.int64)


@triton.jit
def place_of(base, addr):
    """``(page, granule)`` of an address of the heap."""
    offset = addr - base
    return (offset >> PAGE_LOG2).to(tl.int32), ((offset >> 4) & 4095).to(tl.int32)


@triton.jit
def stripe_ptr(heap, cls, stripe):
    index = cls.to(tl.int64) * load_geometry(heap, G_STRIPES) + stripe
    return heap + STRIPES + index * STRIPE_STRIDE


@triton.jit
def program_index():
    """This program's number within its launch (int32), for spreading and for error records."""
    x = tl.num_programs(0)
    y = tl.num_programs(1)
    return tl.program_id(0) + x * (tl.program_id(1) + y * tl.program_id(2))


@triton.jit
def program_count():
    """How many programs the launch has (int32, at most 2**30)."""
    plane = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    return tl.minimum(tl.minimum(plane, 1 << 30) * tl.num_programs(2), 1 << 30).to(tl.int32)


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
def class_steps(cls):
    """``(n, k)``, int32: a slot of class ``cls``, one of the first 32, is n times 2**k bytes."""
    return (cls & 3) + tl.where(cls < 4, 1, 5), tl.maximum(cls >> 2, 1) + 3


@triton.jit
def class_bytes(cls):
    """Slot size in bytes (int32) of class ``cls`` (int32)."""
    steps, step_log2 = class_steps(cls)
    high = divide(cls * 0 + PAGE_BYTES // 16, tl.maximum(39 - cls, 2)) << 4
    return tl.where(cls < 32, steps << step_log2, high)


@triton.jit
def slots_of(size):
    """Slots of ``size`` bytes (int32) in a page."""
    return divide(size * 0 + PAGE_BYTES, size)


@triton.jit
def class_slots(cls):
    """Slots per page (int32) of class ``cls``."""
    steps, step_log2 = class_steps(cls)
    return tl.where(cls < 32, divide(cls * 0 + PAGE_BYTES >> step_log2, steps), 39 - cls)


# Fields ---------------------------------------------------------------------------------------


@triton.jit
def page_out(word):
    return (word & OUT_MASK).to(tl.int32)


@triton.jit
def page_class(word):
    return ((word >> CLASS_SHIFT) & 63).to(tl.int32)


@triton.jit
def is_slab(word):
    return (word & KIND_MASK) == SLAB


@triton.jit
def is_run(word):
    return (word & KIND_MASK) == RUN


@triton.jit
def slab_of(cls):
    """The page word of a slab of class ``cls`` (int32): nothing out, no stripe's, not published."""
    return (cls.to(tl.int64) << CLASS_SHIFT) + SLAB


@triton.jit
def stripe_credits(word):
    """Signed credits (int32) of a stripe word."""
    return word.to(tl.int32)


@triton.jit
def stripe_place(word):
    """``(first page, batch length)`` of a stripe word, as int32."""
    # (Credits below zero have borrowed one from the upper half.)
    high = ((word + (1 << 31)) >> 32).to(tl.int32)
    return high & ((1 << 23) - 1), (high >> 23) & 127


@triton.jit
def pack_stripe(page, batch, credits):
    return (page.to(tl.int64) << 32) + (batch.to(tl.int64) << BATCH_SHIFT) + credits.to(tl.int64)
