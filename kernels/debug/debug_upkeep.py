"""Kernels that the host launches on a debug heap."""

import triton
import triton.language as tl

from .. import layout
from ..api import malloc
from ..atomics import atomic_load
from ..lanes import any_lane, count_lanes
from ..layout import NUM_CLASSES, PAGE_LOG2
from . import block_table, guards
from .block_table import BY_AUDIT, CELL_LOG2, PAGE_CELLS, RUN_USE


@triton.jit
def malloc_tagged_kernel(heap, sizes, addrs, n, tag, BLOCK: tl.constexpr):
    """``addrs[i] = malloc(sizes[i], tag=tag)`` for i < n; one lane per request."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    size = tl.load(sizes + index, mask=inside, other=0)
    tl.store(addrs + index, malloc(heap, size, inside, tag), mask=inside)


@triton.jit
def clock_kernel(ticks):
    """The time by the clock of the table's entries."""
    tl.store(ticks, block_table.clock_ticks())


@triton.jit(noinline=True)
def freed_run_bytes(heap, page, pages):
    """How many bytes (int64) of a freed run of ``pages`` pages (int32 scalars), from its start on,
    lie in pages that have been nothing else since."""
    lane = tl.arange(0, 64)
    known = pages
    done = pages * 0
    while done < known:
        place = done + lane
        inside = place < pages
        mark = atomic_load(block_table.mark_ptr(heap, page + tl.where(inside, place, 0)), inside)
        other = inside & (block_table.mark_use(mark) != place + RUN_USE)
        known = tl.minimum(known, tl.min(tl.where(other, place, known), axis=0))
        done += 64
    return known.to(tl.int64) << PAGE_LOG2


@triton.jit
def audit_kernel(heap, live_count, BLOCK: tl.constexpr):
    """Look at the guards of all blocks that begin in ``BLOCK`` cells, live or freed, record those
    that have changed, and add the number of live ones to ``live_count``. The heap is at rest."""
    heap = block_table.control_block(heap)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    page = (first // PAGE_CELLS).to(tl.int32)
    cell = layout.load_base(heap) + ((first + tl.arange(0, BLOCK)) << CELL_LOG2)
    entry = block_table.entry_ptr(heap, cell)
    word = tl.load(entry)
    birth = tl.load(entry + 1)
    mark = atomic_load(block_table.mark_ptr(heap, page))
    used = (word != 0) & (block_table.entry_epoch(birth) == block_table.mark_epoch(mark))
    if any_lane(used):
        live = used & block_table.is_live(word)
        freed = used & (live == 0)
        addr = cell + (block_table.entry_granule(word) << 4).to(tl.int64)
        nbytes = block_table.entry_size(word)
        use = block_table.mark_use(mark)
        block = layout.class_bytes(tl.minimum(use, NUM_CLASSES - 1)).to(tl.int64) + nbytes * 0
        words = block >> 3
        slots = freed
        if use >= RUN_USE:
            # One block, which begins with the page.
            slots = freed & (freed == 0)
            length = layout.run_pages(atomic_load(layout.page_word_ptr(heap, page)))
            block = nbytes * 0 + (length << PAGE_LOG2)
            if any_lane(freed):
                size = tl.sum(tl.where(freed, nbytes, 0), axis=0)
                pages = ((size - 1) >> PAGE_LOG2).to(tl.int32) + 1
                block = tl.minimum(freed_run_bytes(heap, page, pages), nbytes) & -16
                words = block >> 3
        poisoned = tl.minimum(guards.poisoned_words(heap, nbytes), words)
        wrong = guards.near_wrong(addr, nbytes, live | slots) | guards.front_wrong(addr, live)
        changed = guards.any_bit(wrong) | guards.span_changed(addr, nbytes & 0, poisoned, freed)
        end = guards.far_end(heap, nbytes, block)
        changed = changed | guards.span_changed(addr, guards.near_end(nbytes), end, live | slots)
        if changed:
            guards.diagnose_lanes(heap, addr, None, BY_AUDIT, False, live)
            guards.diagnose_lanes(heap, addr, poisoned, BY_AUDIT, False, freed)
        tl.atomic_add(live_count, count_lanes(live).to(tl.int64), sem="relaxed")
