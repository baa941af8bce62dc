"""Magazines: slots that a program freed and takes again; see ``lines``."""

import triton
import triton.language as tl

from .atomics import alone, fence
from .bits import lsr
from .lanes import pick
from .layout import (
    ERRORS,
    PAGE_MASK,
    SPAN_CLASS,
    SPAN_COUNT,
    SPANNED,
    load_magazines,
    load_records,
    magazine_ptr,
    page_word_ptr,
    span_count,
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
