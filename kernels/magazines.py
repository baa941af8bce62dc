"""Magazines: slots that a program freed and takes again; see ``lines``."""

import triton
import triton.language as tl

from .atomics import fence
from .bits import lsr
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
    fence(heap + ERRORS)
    page = tl.where(there, span & PAGE_MASK, 0).to(tl.int32)
    counts = tl.where(there, span_count(span), 0)
    change = counts.to(tl.int64)
    ptr = page_word_ptr(load_records(heap), page)
    now = tl.atomic_add(ptr, -change, mask=there, sem="relaxed") - change
    leave_account(heap, page, now, counts, there, runs=False)


@triton.jit(noinline=True)
def release_span(heap, span):
    """:func:`release_spans` for one span (int64 scalar; 0: none), which it returns."""
    if span != 0:
        release_spans(heap, span, span != 0)
    return span


@triton.jit
def put_span(records, magazines, mask, cls, span, word):
    """Put a span of a page with this word into the magazine, if that is empty. Returns whether."""
    ptr = magazine_ptr(magazines, mask, cls)
    if (word & SPANNED) == 0:
        # Once in the life of a page, and while the slots are still ours: later, the page may be
        # another's. (So the swap waits for what this returns, in which bit 63 is clear.)
        page_ptr = page_word_ptr(records, (span & PAGE_MASK).to(tl.int32))
        span += lsr(tl.atomic_or(page_ptr, (span & 0) + SPANNED, sem="relaxed"), 63)
    return tl.atomic_cas(ptr, span & 0, span, sem="relaxed") == 0


@triton.jit
def take_span(heap, cls, count):
    """The span of ``count`` slots of class ``cls`` in the magazine, or 0."""
    magazines, mask = load_magazines(heap)
    ptr = magazine_ptr(magazines, mask, cls)
    word = tl.atomic_xchg(ptr, tl.full((), 0, tl.int64), sem="acquire")
    wanted = (count.to(tl.int64) << SPAN_COUNT) + ((cls + 1).to(tl.int64) << SPAN_CLASS)
    if (word != 0) & ((word >> SPAN_COUNT) != (wanted >> SPAN_COUNT)):
        word = release_span(heap, tl.atomic_xchg(ptr, word, sem="acq_rel")) & 0
    return word
