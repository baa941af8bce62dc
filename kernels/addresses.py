"""Which block an address belongs to, and how large it is.

Concurrency: a block is live as long as its owner lets others have its address, so what is read of
its page does not change meanwhile, but for the account. The words of other pages may be anything:
programs add to them what they would like to have, and take it back.
"""

import triton
import triton.language as tl

from . import layout
from .atomics import atomic_load
from .lanes import any_lane, is_block
from .layout import PAGE_LOG2, RUN, SLAB
from .live import live_bit
from .payload import as_column


@triton.jit
def locate(heap, addr, active):
    """``(inside, page, granule)``: whether it is an aligned address of the heap and the lane is
    active; its page and granule, or else 0 and 0."""
    base = layout.load_base(heap)
    end = layout.load_pages(heap).to(tl.uint64) << PAGE_LOG2
    # (As an unsigned number, what lies before the heap lies far behind it.)
    offset = (addr - base).to(tl.uint64, bitcast=True)
    inside = active & (offset < end) & ((addr & 15) == 0)
    page, granule = layout.place_of(base, tl.where(inside, addr, base))
    return inside, page, granule


@triton.jit
def run_head(heap, page, seeks):
    """For the ``seeks`` lanes (or scalar), whose page words are of no kind: the page before that
    has a kind, or 0. If it is the first of a run, ``page`` may belong to that. (A search, of 64
    pages at a time.)"""
    back = tl.arange(0, 64)[None, :] + 1
    head = page
    while any_lane(seeks):
        before = as_column(head) - back
        there = (as_column(seeks.to(tl.int32)) != 0) & (before >= 0)
        words = atomic_load(layout.page_word_ptr(heap, tl.maximum(before, 0)), there)
        found = tl.max(tl.where((words & (SLAB + RUN)) != 0, before, -1), axis=1)
        if is_block(head) == 0:
            found = tl.max(found, axis=0)
        head = tl.where(seeks, tl.where(found >= 0, found, tl.maximum(head - 64, 0)), head)
        seeks = seeks & (found < 0) & (head > 0)
    return head


@triton.jit
def usable_any(heap, addr, active):
    """Bytes (int64) that may be used at int64 addresses, a scalar or a block; 0 where no
    block is, and in inactive lanes."""
    inside, page, granule = locate(heap, addr, active)
    ptr, bit = live_bit(layout.load_records(heap), page, granule)
    live = inside & ((atomic_load(ptr, inside) & bit) != 0)
    word = atomic_load(layout.page_word_ptr(heap, page), live)
    slot = layout.class_bytes(layout.page_class(word)).to(tl.int64)
    run = tl.where((word & RUN) != 0, layout.run_pages(word) << PAGE_LOG2, 0)
    return tl.where((word & SLAB) != 0, slot, run)
