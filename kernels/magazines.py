"""Magazines: slots that a program freed and takes again; see ``lines``."""

import triton
import triton.language as tl

from . import layout
from .atomics import alone, fence
from .bits import lsr
from .groups import alike, from_leader, last_start
from .lanes import any_lane, count_lanes, is_block, lane_index, pick
from .layout import ERRORS, PAGE_BYTES, PAGE_MASK, SLAB, SPAN_COUNT, SPANNED
from .lines import leave_account


@triton.jit
def release_spans(heap, span, there):
    """Give the slots of spans back to the accounts of their pages, for the lanes (or scalar) in
    ``there``."""
    # What was done in these slots happens before what their pages' next owners do.
    fence(heap + ERRORS, "acq_rel")
    page = tl.where(there, span & PAGE_MASK, 0).to(tl.int32)
    counts = tl.where(there, layout.span_count(span), 0)
    change = counts.to(tl.int64)
    ptr = layout.page_word_ptr(heap, page)
    now = tl.atomic_add(ptr, -change, mask=there, sem="relaxed") - change
    leave_account(heap, page, now, counts, there, runs=False)


@triton.jit(noinline=True)
def release_span(heap, span):
    """:func:`release_spans` for one span (int64 scalar). Returns 0."""
    release_spans(heap, span, span != 0)
    return span & 0


@triton.jit
def release(heap, span, there):
    """:func:`release_spans`, where there are any. (For a scalar, and all of a block alike, this is
    rare, and code in the way costs time.)"""
    if any_lane(there):
        if is_block(span):
            release_spans(heap, span, there)
        else:
            release_span(heap, span)


@triton.jit
def swap(ptr, span, there):
    """Put spans into magazines, for the lanes in ``there`` (a scalar: always), and return what was
    in these; 0 in other lanes."""
    at, mask = (ptr, there) if is_block(ptr) else alone(ptr, 1)
    old = tl.atomic_xchg(at, span, mask=mask, sem="relaxed")
    return tl.where(there, old, 0) if is_block(ptr) else pick(old, 0)


@triton.jit
def put_spans(heap, last, cls, span, word, puts):
    """Put spans of pages with these words into the magazines of their classes, for the lanes (or
    scalar) in ``puts``, and release those that were there. ``last``: the last magazine."""
    new = puts & ((word & SPANNED) == 0)
    if any_lane(new):
        # Once in the life of a page, and while the slots are still ours: later, the page may be
        # another's. (So the swap waits for what this returns, in which bit 63 is clear.)
        ptr = layout.page_word_ptr(heap, tl.where(new, span & PAGE_MASK, 0).to(tl.int32))
        seen = tl.atomic_or(ptr, (span & 0) + SPANNED, mask=new, sem="relaxed")
        span += lsr(tl.where(new, seen, 0), 63)
    old = swap(layout.magazine_ptr(heap, last, cls), span, puts)
    release(heap, old, old != 0)


@triton.jit
def take_spans(heap, cls, counts, wants):
    """In each lane (or scalar) in ``wants``, the span of so many slots of class ``cls`` in the
    magazine, or 0."""
    ptr = layout.magazine_ptr(heap, layout.last_magazine(heap), cls)
    span = swap(ptr, (cls * 0).to(tl.int64), wants)
    wanted = layout.span_of(cls * 0, cls * 0, counts, cls)
    fits = (span >> SPAN_COUNT) == (wanted >> SPAN_COUNT)
    release(heap, span, (span != 0) & (fits == 0))
    return tl.where(fits, span, 0)


@triton.jit
def spans_of_block(page, granule, word, active, group):
    """The spans that the lanes of a block freed, if each class was freed by few pages: ``(span,
    puts)``, in the leader of each that may go to a magazine. With the words of the pages, and
    groups (``alike``) by page."""
    leader, rank, counts, upto = group
    cls = layout.page_class(word)
    size = layout.class_bytes(cls)
    start = granule - rank * (size >> 4)
    first = last_start(upto, rank == 0)
    apart = start != from_leader(start, first)
    orderly = last_start(upto, apart | (rank == 0)) == first
    # (It is the last of a group, and sees them all.)
    leads = active & (leader == lane_index(page))
    kind, _rank, _counts, _upto = alike(cls, active, 6)
    # Lanes of one class mostly are in one page, if all came from one malloc. Those of any list of
    # addresses are not: they would leave single slots in magazines, and so keep many pages.
    kinds = count_lanes(active & (kind == lane_index(page)))
    one_malloc = count_lanes(leads) * 4 <= kinds * 5
    puts = leads & orderly & ((word & SLAB) != 0)
    puts = puts & (counts * size * 2 <= tl.where(one_malloc, PAGE_BYTES, 0))
    return layout.span_of(page, start, counts, cls), puts
