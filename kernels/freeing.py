"""free: live bits are cleared, then slots go to a magazine or to the account of their page."""

import triton
import triton.language as tl

from . import layout
from .addresses import locate, run_head
from .atomics import atomic_load, fence
from .bits import divide, lsr
from .error_record import record_error
from .groups import GROUP
from .lanes import any_lane, count_lanes, first_lane, is_block, lane_index, pick, width
from .layout import E_DOUBLE_FREE, E_INVALID_FREE, ERRORS, FREES, KEPT, OUT_MASK, RUN, SLAB
from .lines import leave_account, leave_slots, retire, retire_run
from .live import live_bit, speak_for
from .magazines import put_lanes, put_span


@triton.jit(noinline=True)
def report_wrong(heap, addr):
    """Record that ``addr`` (int64 scalar), which is not 0, was freed though no block is there: a
    double free if a block could have begun there, or else an invalid one. Returns 0."""
    inside, page, granule = locate(heap, addr, addr != 0)
    word = atomic_load(layout.page_word_ptr(heap, page))
    size = layout.class_bytes(layout.page_class(word))
    slot = divide(granule << 4, size)
    begins = ((word & SLAB) != 0) & (slot * size == granule << 4) & (slot < layout.slots_of(size))
    double = begins | (((word & RUN) != 0) & (granule == 0))
    if inside & ((word & (SLAB + RUN)) == 0):
        # The page is free, or on its way between owners, if it is not inside of a run.
        taken = (atomic_load(layout.free_row(heap) + (page >> 6)) & layout.bit_of(page)) == 0
        head = run_head(heap, page, taken)
        before = atomic_load(layout.page_word_ptr(heap, head))
        double = ((before & RUN) == 0) | (page - head >= layout.run_pages(before))
    kind = tl.where(inside & double, E_DOUBLE_FREE, E_INVALID_FREE)
    record_error(heap, kind + 0, addr, addr * 0, kind * 0 + 1)
    return kind * 0


@triton.jit
def count_frees(heap, count):
    """Count ``count`` (int32 scalar) blocks that were freed."""
    # (As a block of different addresses: for one, the assembler adds code to collect lanes.)
    lane = tl.arange(0, 32)
    ptr = layout.hint_ptr(heap) + FREES + lane
    tl.atomic_add(ptr, count.to(tl.int64), mask=lane == 0, sem="relaxed")


@triton.jit
def free_scalar(heap, records, last, addr, inside, page, granule):
    """free of one address, which is not 0."""
    lane = tl.arange(0, 32)
    bit_ptr, bit = live_bit(records, page, granule)
    # The live bit and the page word, in one round trip to memory.
    ptr = tl.where(lane == 0, bit_ptr, layout.page_word_ptr(heap, page))
    change = tl.where(lane < inside.to(tl.int32), bit ^ -1, -1)
    old = tl.atomic_and(ptr, change, mask=lane < 2, sem="relaxed")
    word = pick(old, 1)
    if inside & any_lane((lane == 0) & ((old & bit) != 0)):
        count_frees(heap, page * 0 + 1)
        if (word & SLAB) != 0:
            cls = layout.page_class(word)
            span = layout.span_of(page, granule, page * 0 + 1, cls)
            put_span(heap, last, cls, span, word, inside)
        elif retire_run(heap, page, (word & (-1 - OUT_MASK)) + 1, owner=True) == 0:
            # (Another program has come to the run's word by mistake.)
            leave_slots(heap, page, inside)
    else:
        report_wrong(heap, addr)


@triton.jit(noinline=True)
def free_one(heap, addr, page, lost):
    """What follows for one lane of a block in which not all bits were cleared (int64 and int32
    scalars): its slot leaves the account or, if it was ``lost``, a report. Returns 0."""
    if lost == 0:
        count_frees(heap, lost + 1)
        leave_slots(heap, page, lost == 0)
    else:
        report_wrong(heap, addr)
    return page * 0


@triton.jit
def free_block(heap, records, last, addr, given, active, page, granule):
    """free of a block. The ``active`` lanes of those ``given`` lie in the heap."""
    ptr, bit = live_bit(records, page, granule)
    lane = lane_index(active)
    count = count_lanes(active)
    strays = count_lanes(given) - count
    first_page = pick(page, 0)
    first = pick(granule, 0)
    # (If the pages are far apart, this may be any number. Then the lanes are not in order.)
    unit = pick((page << 12) + granule, 1) - ((first_page << 12) + first)
    unit = tl.where(count == 1, 1, unit)
    where = first + lane * unit
    there = (page == first_page + (where >> 12)) & (granule == (where & 4095))
    orderly = (active == (lane < count)) & ((active == 0) | there)
    together = (count > 0) & (unit > 0) & (unit <= 2048)
    together = together & (count_lanes(orderly) == active.shape[0])
    pages = (first + count * unit + 4095) >> 12
    spans = together & (pages == 1) & (count * unit <= 2048)
    # (`near`: the pages, if they follow one another; or those of some lanes, to see if all are
    # alike. What only lanes in order need is passed by otherwise: it is a third of the way.)
    samples: tl.constexpr = min(width(active), GROUP)
    sample = tl.arange(0, samples)
    if together:
        # One lane for all slots of a word, and one for all of a page.
        before = tl.minimum(lane, divide(granule, unit))
        further = tl.minimum(count - 1 - lane, divide(4095 - granule, unit))
        turn, bits = speak_for(granule, unit, before, further)
        bit = tl.where(active & (turn == 0), bits, 0)
        counts = tl.where(active & (before == 0), further + 1, 0)
        near = first_page + sample
        looks = sample < pages
    else:
        bit = tl.where(active, bit, 0)
        counts = active.to(tl.int32)
        near = tl.gather(page, sample, 0)
        looks = tl.gather(active.to(tl.int32), sample, 0) != 0
    word = atomic_load(layout.page_word_ptr(heap, near), looks)
    old = tl.atomic_and(ptr, bit ^ -1, mask=bit != 0, sem="relaxed")
    # (Behind the atomics, so that they do not wait for what was loaded.)
    cls = layout.page_class(word)
    kind = tl.max(tl.where(looks, cls, 0), axis=0)
    several = (together == 0) & any_lane(looks & (cls != kind))
    wrong = (old & bit) ^ bit
    if count_lanes(wrong != 0) + strays == 0:
        count_frees(heap, count)
        if spans:
            state = pick(word, 0)
            alike_slots = (count == 1) | (layout.class_bytes(kind) == unit << 4)
            spans = ((state & SLAB) != 0) & alike_slots
            if spans:
                span = layout.span_of(first_page, first, count, kind)
                put_span(heap, last, kind, span, state, first >= 0)
        if spans == 0:
            if several:
                page, counts = put_lanes(heap, last, page, granule, word, active)
            elif together:
                # Pages of which nothing else is out are retired at once, by a few lanes. (If one is
                # not, because other programs have come to it since, its slots leave its account.)
                lead = tl.where(sample > 0, divide((sample << 12) - first + unit - 1, unit), 0)
                left = tl.gather(counts, tl.where(looks & (lead < count), lead, 0), 0)
                whole = looks & (lead < count) & (layout.page_out(word) == left)
                whole = whole & ((word & (KEPT + SLAB)) == SLAB)
                gone = retire(heap, near, word, whole, left <= layout.page_half(word))
                nth = tl.where(counts != 0, page - first_page, 0)
                gone = tl.gather(gone.to(tl.int32), tl.minimum(nth, width(near) - 1), 0)
                counts = tl.where((gone == 0) | (nth >= width(near)), counts, 0)
            leave_account(heap, page, counts)
    else:
        # For each lane: those that are together spoke for all whose word it was.
        shared = (page << 6) + (granule & 63)
        at = first_lane(given)
        while at < width(given):
            spoke = (lane == at) | (together & (shared == pick(shared, at)))
            hit = spoke & ((lsr(wrong, (pick(granule, at) >> 6).to(tl.int64)) & 1) != 0)
            lost = any_lane(hit | ((lane == at) & (active == 0)))
            free_one(heap, pick(addr, at), pick(page, at), lost.to(tl.int32))
            at = first_lane(given & (lane > at))


@triton.jit
def free_any(heap, addr, active):
    """Free blocks at int64 addresses that malloc gave; 0 is ignored."""
    given = active & (addr != 0)
    records = layout.load_records(heap)
    last = layout.last_magazine(heap)
    # What this program wrote happens before anything that the next owner does. (Here, so that the
    # words above, which never change, are under way meanwhile.)
    fence(heap + ERRORS, "release")
    inside, page, granule = locate(heap, addr, given)
    if is_block(active):
        free_block(heap, records, last, addr, given, inside, page, granule)
    elif given:
        free_scalar(heap, records, last, addr, inside, page, granule)
