"""Magazines: slots that a program freed and takes again; see ``lines``.

A program has one for each class, with a *span* in it: the consecutive slots of one page that its
lanes freed together. And each lane of a block has one, with the slot that it freed. A lane that
asks again for the size that it freed finds its slot there, whatever the other lanes do.
"""

import triton
import triton.language as tl

from . import layout
from .atomics import alone, atomic_load, fence
from .bits import lsr
from .groups import GROUP
from .lanes import any_lane, is_block, lane_index, pick, width
from .layout import ERRORS, PAGE_MASK, SLAB, SPAN_COUNT, SPANNED
from .lines import leave_account


@triton.jit
def release_spans(heap, span, there):
    """Give the slots of spans back to the accounts of their pages, for the lanes (or scalar) in
    ``there``."""
    # What was done in these slots happens before what their pages' next owners do.
    fence(heap + ERRORS, "acq_rel")
    page = tl.where(there, span & PAGE_MASK, 0).to(tl.int32)
    counts = tl.where(there, layout.span_count(span), 0)
    leave_account(heap, page, counts, runs=False)


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
def put_span(heap, last, cls, span, word, puts):
    """Put a span (int64 scalar) of a page with this word into the magazine of its class, if
    ``puts``. ``last``: the last magazine."""
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
def take_spans(heap, ptr, cls, counts, wants):
    """In each lane (or scalar) in ``wants``, the span of so many slots of class ``cls`` in the
    magazine at ``ptr``, or 0."""
    span = swap(ptr, (cls * 0).to(tl.int64), wants)
    wanted = layout.span_of(cls * 0, cls * 0, counts, cls)
    fits = (span >> SPAN_COUNT) == (wanted >> SPAN_COUNT)
    release(heap, span, (span != 0) & (fits == 0))
    return tl.where(fits, span, 0)


@triton.jit
def put_lanes(heap, last, page, granule, word, active):
    """Put the slots of a block's lanes into the magazines of these lanes. ``last``: the last
    magazine; ``word``: the words of the pages, if the block has up to GROUP lanes. Returns
    ``(page, counts)``: what leaves the accounts of pages in their place, which is what was in
    there; and runs."""
    if width(page) > GROUP:
        word = atomic_load(layout.page_word_ptr(heap, page), active)
    slots = active & ((word & SLAB) != 0)
    # (Their pages are listed all the same, not SPANNED: many would be.)
    span = layout.span_of(page, granule, page * 0 + 1, layout.page_class(word))
    ptr = layout.lane_magazine(heap, last, lane_index(page), width(page))
    old = swap(ptr, span, slots)
    if any_lane(old != 0):
        # (As in `release_spans`.)
        fence(heap + ERRORS, "acq_rel")
    page = tl.where(slots, (old & PAGE_MASK).to(tl.int32), page)
    return page, tl.where(slots, layout.span_count(old), active.to(tl.int32))
