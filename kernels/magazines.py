"""Magazines: slots that a program freed and takes again; see ``lines``."""

import triton
import triton.language as tl

from .atomics import alone, fence
from .bits import lsr
from .groups import alike, from_leader, last_start
from .lanes import any_lane, count_lanes, lane_index, pick
from .layout import (
    ERRORS,
    PAGE_BYTES,
    PAGE_MASK,
    SLAB,
    SPAN_CLASS,
    SPAN_COUNT,
    SPANNED,
    class_bytes,
    load_magazines,
    load_records,
    magazine_ptr,
    page_class,
    page_word_ptr,
    span_count,
    span_of,
)
from .lines import leave_account


@triton.jit
def release_spans(heap, span, there):
    """Give the slots of spans back to the accounts of their pages, for the lanes (or scalar) in
    ``there``."""
    # What was done in these slots happens before what their pages' next owners do.
    fence(heap + ERRORS, "acq_rel")
    page = tl.where(there, span & PAGE_MASK, 0).to(tl.int32)
    counts = tl.where(there, span_count(span), 0)
    change = counts.to(tl.int64)
    ptr = page_word_ptr(load_records(heap), page)
    now = tl.atomic_add(ptr, -change, mask=there, sem="relaxed") - change
    leave_account(heap, page, now, counts, there, runs=False)


@triton.jit(noinline=True)
def release_span(heap, span):
    """:func:`release_spans` for one span (int64 scalar; 0: none). Returns 0."""
    release_spans(heap, span, span != 0)
    return span & 0


@triton.jit
def swap(ptr, span):
    """Put a span (int64 scalar) into a magazine, and return what was there."""
    ptr, one = alone(ptr, 1)
    return pick(tl.atomic_xchg(ptr, span, mask=one, sem="relaxed"), 0)


@triton.jit
def put_span(heap, records, magazines, cls, span, word):
    """Put a span of a page with this word into the magazine, and release the one that was there."""
    if (word & SPANNED) == 0:
        # Once in the life of a page, and while the slots are still ours: later, the page may be
        # another's. (So the swap waits for what this returns, in which bit 63 is clear.)
        page_ptr = page_word_ptr(records, (span & PAGE_MASK).to(tl.int32))
        span += lsr(tl.atomic_or(page_ptr, (span & 0) + SPANNED, sem="relaxed"), 63)
    old = swap(magazine_ptr(magazines, cls), span)
    if old != 0:
        release_span(heap, old)


@triton.jit
def take_span(heap, cls, count):
    """The span of ``count`` slots of class ``cls`` in the magazine, or 0."""
    ptr = magazine_ptr(load_magazines(heap), cls)
    word = swap(ptr, tl.full((), 0, tl.int64))
    wanted = (count.to(tl.int64) << SPAN_COUNT) + ((cls + 1).to(tl.int64) << SPAN_CLASS)
    if (word != 0) & ((word >> SPAN_COUNT) != (wanted >> SPAN_COUNT)):
        word = release_span(heap, swap(ptr, word))
    return word


@triton.jit
def take_spans(heap, cls, counts, wants):
    """In each lane of a block in ``wants`` the span of so many slots of class ``cls`` in the
    magazine, or 0."""
    ptr = magazine_ptr(load_magazines(heap), cls)
    word = tl.atomic_xchg(ptr, (cls * 0).to(tl.int64), mask=wants, sem="relaxed")
    word = tl.where(wants, word, 0)
    wanted = (counts.to(tl.int64) << SPAN_COUNT) + ((cls + 1).to(tl.int64) << SPAN_CLASS)
    fits = (word >> SPAN_COUNT) == (wanted >> SPAN_COUNT)
    if any_lane((word != 0) & (fits == 0)):
        release_spans(heap, word, (word != 0) & (fits == 0))
    return tl.where(fits, word, 0)


@triton.jit
def put_spans(heap, magazines, page, granule, word, active, group):
    """Put what the lanes of a block freed into magazines, where their slots follow one another in a
    page; with the words of the pages, and groups (``alike``) by page. Returns ``(page, counts,
    speaks)``: what now has to leave the accounts of pages, by which lanes: what was in the
    magazines, or else what was freed."""
    _leader, rank, counts, upto = group
    lane = lane_index(page)
    cls = page_class(word)
    size = class_bytes(cls)
    start = granule - rank * (size >> 4)
    first = last_start(upto, rank == 0)
    apart = start != from_leader(start, first)
    orderly = last_start(upto, apart | (rank == 0)) == first
    # (The last of a group sees them all.)
    speaks = active & (rank == counts - 1)
    kind, _rank, _counts, _upto = alike(cls, active, 6)
    # Lanes of one class mostly are in one page, if all came from one malloc. Those of any list of
    # addresses are not: they would leave single slots in magazines, and so keep many pages.
    one_malloc = count_lanes(speaks) * 4 <= count_lanes(active & (kind == lane)) * 5
    puts = speaks & orderly & ((word & SLAB) != 0)
    puts = puts & (counts * size * 2 <= tl.where(one_malloc, PAGE_BYTES, 0))
    span = span_of(page, start, counts, cls)
    new = puts & ((word & SPANNED) == 0)
    if any_lane(new):
        ptr = page_word_ptr(load_records(heap), tl.where(new, page, 0))
        seen = tl.atomic_or(ptr, (span & 0) + SPANNED, mask=new, sem="relaxed")
        span += lsr(tl.where(new, seen, 0), 63)
    old = tl.atomic_xchg(magazine_ptr(magazines, cls), span, mask=puts, sem="relaxed")
    old = tl.where(puts, old, 0)
    if any_lane(old != 0):
        # What was done in these slots happens before what their pages' next owners do.
        fence(heap + ERRORS, "acq_rel")
    page = tl.where(puts, old & PAGE_MASK, page).to(tl.int32)
    counts = tl.where(puts, span_count(old), counts)
    return page, counts, tl.where(puts, old != 0, speaks)
