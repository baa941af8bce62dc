"""trim: what a search takes that finds nothing else, by many programs.

Each program empties 64 magazines and retires the pages of one chunk. A page that has slots in the
magazine of one program and lies in the chunk of another is retired by the later of the two: the
first when it takes the slots out of the account, the second when it finds nothing out. Both try to
exchange the page word, and one succeeds.
"""

import triton
import triton.language as tl

from devalloc.kernels.atomics import atomic_load, fence
from devalloc.kernels.lanes import any_lane
from devalloc.kernels.layout import ERRORS, load_immutable, program_index

from .blocks import usable_any
from .layout import (
    KEPT,
    MAGAZINE_MASK,
    MAGAZINES,
    PAGE_MASK,
    SLAB,
    hint_ptr,
    load_pages,
    load_records,
    page_out,
    page_word_ptr,
    span_count,
)
from .lines import leave_account, retire
from .pages import give_pages


@triton.jit
def retire_idle(heap, page, word, idle):
    """Give back the ``idle`` pages, which have nothing out by their words, whether or not a place
    leads to them."""
    if any_lane(idle):
        won = retire(heap, page, word, idle, idle)
        # What was read from the page words comes before the bits of the free row are set.
        fence(heap + ERRORS)
        give_pages(heap, page, won)
        hints = hint_ptr(heap) + page * 0
        tl.atomic_min(hints, (page >> 6).to(tl.int64), mask=won, sem="relaxed")


@triton.jit
def rest_magazines(heap, first):
    """Empty the 64 magazines from ``first`` on, as far as there are any."""
    lane = tl.arange(0, 64)
    ptr = heap + load_immutable(heap, MAGAZINES) + first + lane
    here = first + lane <= load_immutable(heap, MAGAZINE_MASK).to(tl.int32)
    full = here & (atomic_load(ptr, here) != 0)
    if any_lane(full):
        span = tl.atomic_xchg(ptr, (lane * 0).to(tl.int64), mask=full, sem="relaxed")
        full = full & (span != 0)
        # What was done in these slots happens before what their pages' next owners do.
        fence(heap + ERRORS)
        page = tl.where(full, span & PAGE_MASK, 0).to(tl.int32)
        counts = tl.where(full, span_count(span), 0)
        change = counts.to(tl.int64)
        word_ptr = page_word_ptr(load_records(heap), page)
        now = tl.atomic_add(word_ptr, -change, mask=full, sem="relaxed") - change
        leave_account(heap, page, now, counts, full, runs=False)
        kept = full & ((now & (KEPT + SLAB)) == (KEPT + SLAB))
        retire_idle(heap, page, now, kept & (page_out(now) == 0))


@triton.jit
def rest_pages(heap, first):
    """Retire those of the 64 pages from ``first`` on that are slabs with nothing out."""
    lane = tl.arange(0, 64)
    pages = load_pages(heap)
    here = first + lane < pages
    page = tl.minimum(first + lane, pages - 1)
    word = atomic_load(page_word_ptr(load_records(heap), page), here)
    retire_idle(heap, page, word, here & ((word & SLAB) != 0) & (page_out(word) == 0))


@triton.jit
def trim_kernel(heap):
    """Make everything free that rests. A program per chunk: there are no more magazines than pages.
    Then everybody can find whatever is free, and pages that are free as a whole serve any size."""
    first = program_index() * 64
    rest_magazines(heap, first)
    rest_pages(heap, first)


@triton.jit
def usable_size_kernel(heap, addrs, sizes, n, BLOCK: tl.constexpr):
    """``sizes[i] = usable_size(addrs[i])`` for i < n."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    addr = tl.load(addrs + index, mask=inside, other=0)
    tl.store(sizes + index, usable_any(heap, addr, inside), mask=inside)
