"""malloc, free, usable_size, zeros and realloc of a debug heap.

A layer over ``allocation`` and ``freeing``: it asks for more than the user does, keeps an entry per
block in the table (``block_table``), and looks at the guards (``guards``) whenever it owns a block
alone.

Shared words and their writers
    *Entry*: the malloc that claimed the block stores it; a free clears the live bit in it. A free
    whose `and` finds the bit set owns the block alone, for the heap's own live bit is still set: it
    looks at the guards, poisons the block, and only then gives it to ``freeing.free_any``.
    *Mark*: see ``block_table``.
Linearisation
    malloc: as in an ordinary heap. free: other frees see the clearing of the entry's live bit,
    mallocs see the subtraction from the page word; a second free in between is a double free either
    way. A free that fails does so at its `and`.
Order
    Poison is written before the fence at the start of ``free_any``, and the next malloc of the
    block fences behind its claim, so it reads poison. A free fences before it looks at guards, so
    that it sees what was written before the address was handed on to it, by whatever atomics.
Reuse (ABA)
    A free with an address that was handed out again is a free of the new block, as in
    an ordinary heap.
Progress
    This layer waits for no other program. It costs a call a bounded amount of work, unless the heap
    watches everything: then that grows with the size of the block.
"""

import triton
import triton.language as tl

from ..addresses import locate
from ..allocation import malloc_any
from ..atomics import atomic_cas, atomic_load, fence
from ..freeing import free_any
from ..lanes import any_lane, first_lane, lane_index, pick
from ..layout import E_DOUBLE_FREE, E_INVALID_FREE, ERRORS, MAX_SLOT, PAGE_LOG2, load_base, place_of
from ..payload import as_column, fill
from . import block_table, guards
from .block_table import (
    BY_FREE,
    BY_MALLOC,
    BY_REALLOC,
    ENTRY_WORDS,
    EPOCH_SHIFT,
    HEAD_WORDS,
    RUN_USE,
)

# malloc ---------------------------------------------------------------------------------------


@triton.jit(noinline=True)
def mark_run(heap, page, pages):
    """Mark the pages of a new run behind its first (int32 scalars). Returns how many pages, from
    the first on, were last in a run that began at the same page."""
    lane = tl.arange(0, 64)
    known = pages
    done = pages * 0 + 1
    while done < pages:
        place = done + lane
        inside = place < pages
        ptr = block_table.mark_ptr(heap, page + tl.where(inside, place, 0))
        mark = atomic_load(ptr, inside)
        anew = inside & (block_table.mark_use(mark) != place + RUN_USE)
        tl.atomic_xchg(ptr, block_table.renewed(mark, place + RUN_USE), mask=anew, sem="relaxed")
        known = tl.minimum(known, tl.min(tl.where(anew, place, known), axis=0))
        done += 64
    return known


@triton.jit
def adopt(heap, addr, padded, active):
    """Look at what happened to the blocks at ``addr``, which mallocs of ``padded`` bytes by the
    active lanes were just given, while they were free; 0 is no block.

    Returns ``(epoch, known, word)``: the epoch of their pages; the lanes whose block was the last
    to lie there, and is unchanged since its free; and the first word of its entry. Writes after the
    free are recorded, if they are where the heap watches.
    """
    got = addr != 0
    large = got & (padded > MAX_SLOT)
    # We look at what the last owner left.
    fence(heap + ERRORS, "acq_rel")
    page, _granule = place_of(load_base(heap), addr)
    use = block_table.page_use(padded, active)
    # All loads that depend on the address alone are under way before any is used.
    mark = guards.load_once(block_table.mark_ptr(heap, page), got)
    word, birth = guards.load_entry(block_table.entry_ptr(heap, addr), got)
    head = guards.load_head(addr, got)
    anew = got & (block_table.mark_use(mark) != use)
    # (A branch, also because the compiler moves loads down to where their values are used, and
    # waits for one after the other there, unless there is a branch in between.)
    if any_lane(anew):
        mark = tl.where(anew, block_table.renewed(mark, use), mark)
        tl.atomic_xchg(block_table.mark_ptr(heap, page), mark, mask=anew, sem="relaxed")
    epoch = block_table.mark_epoch(mark)
    known = got & (anew == 0) & (word != 0) & (block_table.entry_epoch(birth) == epoch)
    nbytes = block_table.entry_size(word)
    # (What was behind the end of a run may be another's by now.)
    slots = known & (large == 0)
    changed = guards.any_bit(guards.head_wrong(head, nbytes, known)) | guards.any_bit(
        guards.near_wrong(addr, nbytes, slots)
    )
    everything = guards.watches_all(heap)
    if changed | everything | any_lane(large):
        # In a run, words are poison only in pages that are still marked for a run that began here.
        poisoned = guards.poisoned_words(heap, nbytes)
        rest = large
        while any_lane(rest):
            lane = first_lane(rest)
            here = lane_index(rest) == lane
            pages = block_table.block_bytes(pick(padded, lane)) >> PAGE_LOG2
            pages = mark_run(heap, pick(page, lane), pages.to(tl.int32)).to(tl.int64)
            words = tl.minimum(poisoned, pages << (PAGE_LOG2 - 3))
            poisoned = tl.where(here, words, poisoned)
            rest = rest & (here == 0)
        if everything:
            end = guards.far_end(heap, nbytes, block_table.block_bytes(padded))
            changed = changed | guards.span_changed(addr, nbytes * 0 + HEAD_WORDS, poisoned, known)
            changed = changed | guards.span_changed(addr, guards.near_end(nbytes), end, slots)
        if changed:
            wrong = guards.diagnose_lanes(heap, addr, poisoned, BY_MALLOC, False, known)
            known = known & (wrong == 0)
    return epoch, known, word


@triton.jit
def guard(heap, addr, nbytes, tag, epoch, near, front, active, KEEP: tl.constexpr):
    """Make blocks of the active lanes known: write the near zones of those in ``near`` and the
    fronts of those in ``front``, then all entries. Without ``KEEP`` the blocks hold nothing yet."""
    if any_lane(active & (near | front)):
        guards.write_guards(addr, nbytes, active & near, active & front, KEEP)
        if guards.watches_all(heap):
            end = guards.far_end(
                heap, nbytes, block_table.block_bytes(block_table.padded_size(nbytes))
            )
            guards.poison_span(addr, guards.near_end(nbytes), end, active & near)
    _page, granule = place_of(load_base(heap), addr)
    entry = block_table.entry_ptr(heap, addr)
    birth = block_table.clock_ticks() + (epoch << EPOCH_SHIFT)
    word = block_table.pack_entry(nbytes, tag + nbytes * 0, granule)
    column = guards.columns(addr, ENTRY_WORDS)
    both = tl.where(column == 0, as_column(word), as_column(birth))
    tl.store(
        guards.tile_ptr(entry.to(tl.int64), column),
        both,
        mask=guards.as_mask(active) & (column < 2),
    )
    tl.debug_barrier()


@triton.jit
def malloc_guarded(heap, nbytes, active, tag, ZERO: tl.constexpr):
    """``api.malloc``, or with ``ZERO`` ``api.zeros``, for int64 sizes."""
    padded = block_table.padded_size(nbytes)
    addr = malloc_any(heap, padded, active)
    got = addr != 0
    epoch, known, word = adopt(heap, addr, padded, active)
    same = known & (block_table.entry_size(word) == nbytes)
    if ZERO:
        fill(addr, tl.where(got, nbytes, 0))
        same = known & (known == 0)
    guard(heap, addr, nbytes, tag, epoch, same == 0, known == 0, got, ZERO)
    return addr


# free -----------------------------------------------------------------------------------------


@triton.jit
def check_guards(heap, addr, nbytes, page, finder, active):
    """Look at the guards of live blocks that the active lanes have, record those that were
    written, and mend them."""
    changed = guards.any_bit(
        guards.near_wrong(addr, nbytes, active) | guards.front_wrong(addr, active)
    )
    if guards.watches_all(heap):
        end = guards.far_end(heap, nbytes, guards.block_at(heap, page, active))
        # (With more, free would need half as many registers again, in any debug heap.)
        changed = changed | guards.span_changed(addr, guards.near_end(nbytes), end, active, 2)
    if changed:
        guards.diagnose_lanes(heap, addr, None, finder, True, active)
        # Words that were mended hold a few bytes of the block as well, which are poisoned next.
        tl.debug_barrier()


@triton.jit
def free_guarded(heap, addr, active):
    """``api.free`` for int64 addresses."""
    active = active & (addr != 0)
    inside, page, granule = locate(heap, addr, active)
    entry = block_table.entry_ptr(heap, addr)
    live = block_table.live_flag(granule)
    fence(heap + ERRORS, "acq_rel")
    word = tl.atomic_and(entry, live ^ -1, mask=inside, sem="relaxed")
    word = tl.where(inside, word, 0)
    mine = (word & live) != 0
    nbytes = block_table.entry_size(word)
    check_guards(heap, addr, nbytes, page, BY_FREE, mine)
    guards.poison_head(heap, addr, nbytes, mine)
    if guards.watches_all(heap):
        guards.poison_span(addr, nbytes * 0 + HEAD_WORDS, guards.poisoned_words(heap, nbytes), mine)
    report_lanes(heap, addr, word, active & (mine == 0))
    free_any(heap, addr, mine)


@triton.jit
def report_lanes(heap, addr, word, wrong):
    """Record for ``wrong`` lanes that no block is at ``addr``; the entry there is ``word``."""
    while any_lane(wrong):
        lane = first_lane(wrong)
        report_not_live(heap, pick(addr, lane), pick(word, lane))
        wrong = wrong & (lane_index(wrong) != lane)


@triton.jit(noinline=True)
def report_not_live(heap, addr, word):
    """Record that ``addr`` was freed where no block is live; ``word`` is the entry there, or 0.
    int64 scalars; returns 0."""
    granule = ((addr - load_base(heap)) >> 4).to(tl.int32)
    dead = (word != 0) & (block_table.entry_granule(word) == (granule & 3))
    kind = tl.where(dead, E_DOUBLE_FREE, E_INVALID_FREE)
    block = tl.where(dead, addr, 0)
    owner = tl.where(dead, word, 0)
    return block_table.record_fault(heap, kind, addr, block, owner, addr * 0, kind * 0 + BY_FREE)


# usable_size and realloc ------------------------------------------------------------------------


@triton.jit
def live_entry(heap, addr, active):
    """``(entry, word)`` at int64 addresses: ``word`` is 0 where no block is live, and ``entry`` is
    that of the first cell where the address is not the heap's, or the lane inactive."""
    inside, _page, granule = locate(heap, addr, active)
    entry = block_table.entry_ptr(heap, tl.where(inside, addr, load_base(heap)))
    word = atomic_load(entry, inside)
    return entry, tl.where((word & block_table.live_flag(granule)) != 0, word, 0)


@triton.jit
def usable_guarded(heap, addr, active):
    _entry, word = live_entry(heap, addr, active)
    return block_table.entry_size(word)


@triton.jit
def realloc_guarded(heap, addr, nbytes, active, tag):
    """``api.realloc`` for int64 addresses and sizes. A block that shrinks gets new guards, so what
    lies behind its new end is out of bounds from now on."""
    entry, word = live_entry(heap, addr, active & (addr != 0))
    have = block_table.entry_size(word)
    known = active & ((addr == 0) | (word != 0))
    stays = known & (nbytes > 0) & (nbytes <= have)
    moves = known & (stays == 0) & (nbytes != 0)
    if tag is None:
        owner = block_table.entry_tag(word)
    else:
        owner = tag + nbytes * 0
    padded = block_table.padded_size(nbytes)
    new = malloc_any(heap, padded, moves)
    got = new != 0
    epoch, fresh, _old = adopt(heap, new, padded, moves)
    fill(new, tl.where(got, tl.minimum(have, nbytes), 0), addr)
    guard(heap, new, nbytes, owner, epoch, got, fresh == 0, got, True)
    if any_lane(stays):
        new = tl.where(shrink(heap, addr, nbytes, owner, word, entry, stays), addr, new)
    free_guarded(heap, addr, active & (got | (nbytes == 0) | (known == 0)))
    return new


@triton.jit
def shrink(heap, addr, nbytes, owner, word, entry, stays):
    """Give the live blocks of the lanes in ``stays`` another size, not larger, where they are.
    Returns the lanes that did. (Where the entry is not ``word`` any more, because the block
    was freed meanwhile, that is recorded like a second free, and nothing changes.)

    As in a free, the call that takes the live bit away owns the block alone, until it is back."""
    _inside, page, granule = locate(heap, addr, stays)
    dead = word & (block_table.live_flag(granule) ^ -1)
    old = atomic_cas(entry, word, tl.where(stays, dead, word))
    asked = stays
    stays = stays & (old == word)
    report_lanes(heap, addr, old, asked & (stays == 0))
    fence(heap + ERRORS, "acq_rel")
    check_guards(heap, addr, block_table.entry_size(word), page, BY_REALLOC, stays)
    less = stays & (nbytes != block_table.entry_size(word))
    guards.write_guards(addr, nbytes, less, less & (less == 0), True)
    if guards.watches_all(heap):
        end = guards.far_end(heap, nbytes, guards.block_at(heap, page, stays))
        guards.poison_span(addr, guards.near_end(nbytes), end, less)
    tl.atomic_xchg(entry, block_table.pack_entry(nbytes, owner, granule), mask=stays, sem="relaxed")
    tl.debug_barrier()
    return stays
