"""malloc and free of the experiment, for sizes of up to 32 KiB."""

import triton
import triton.language as tl

from devalloc.kernels.atomics import atomic_load, fence
from devalloc.kernels.bits import comb, divide, low_mask, mix, next_bit
from devalloc.kernels.groups import alike
from devalloc.kernels.lanes import (
    any_lane,
    count_lanes,
    first_lane,
    is_block,
    lane_index,
    pick,
    pick_first,
    rank_of,
    width,
)
from devalloc.kernels.layout import (
    ERRORS,
    MAX_SLOT,
    address_of,
    class_bytes,
    class_slots,
    place_of,
    program_index,
    size_class,
    slots_of,
)
from devalloc.kernels.live import STRIDE, heard, speak_for, word_period

from .layout import (
    CACHED_SHIFT,
    PAGE_MASK,
    SPAN_CLASS,
    SPAN_COUNT,
    SPAN_SLOT,
    SPARSE_SHIFT,
    UNUSED_SHIFT,
    VOID,
    hint_ptr,
    lap_of,
    line_ptr,
    live_bit,
    load_base,
    load_records,
    magazine_ptr,
    own_stripe,
    page_class,
    page_out,
    page_word_ptr,
    place_lap,
    place_page,
    place_ptr,
    ring_index,
    slab_word,
    span_of,
)
from .lines import (
    THRIFT,
    await_places,
    cancel,
    groups,
    leaders,
    leave_account,
    open_places,
    ticket_place,
)
from .pages import give_together, take_any, window

GROUP = tl.constexpr(32)  # lanes of a block of several classes that are served together


@triton.jit
def another(word, granule, size):
    """The granule to try next, see ``live.another``."""
    unit = size >> 4
    end = slots_of(size) * unit
    _period_log2, apart = word_period(unit)
    turn = divide(granule >> 6, apart)
    first = (granule >> 6) - turn * apart
    last = (end - unit - (granule & 63)) >> 6
    unset = (word ^ -1) & (comb(apart) << first.to(tl.int64)) & low_mask(last + 1)
    start = (mix(program_index()) + turn * 27) & 63
    other = (next_bit(tl.where(unset != 0, unset, 1), start) << 6) + (granule & 63)
    beyond = granule + tl.where(unit * STRIDE < end, unit * STRIDE, unit)
    beyond = tl.where(beyond < end, beyond, beyond - end)
    return tl.where(unset != 0, other, beyond)


@triton.jit
def claim_others(records, page, granule, size, lost):
    """Other slots for the lanes that ``lost`` theirs: each was promised one of its page."""
    while any_lane(lost):
        ptr, bit = live_bit(records, page, granule)
        old = tl.atomic_or(ptr, bit, mask=lost, sem="relaxed")
        lost = lost & ((old & bit) != 0)
        if any_lane(lost):
            granule = tl.where(lost, another(old | bit, granule, size), granule)
    return granule


@triton.jit(noinline=True)
def open_ahead(heap, word, cls, need):
    """Open the place that begins among ``need`` tickets (at most a page of them) from line word
    ``word``, if one does that is not open yet (scalars). A program that waited for other places
    first would keep others waiting for this one."""
    slots = class_slots(cls)
    place, slot, covered = ticket_place(word, need * 0, slots)
    begins = tl.where(slot == 0, 0, slots - slot)
    fits = begins < need
    place, slot, covered = ticket_place(word, tl.where(fits, begins, 0), slots)
    if fits & (covered == 0):
        thrifty = (word >> SPARSE_SHIFT) > THRIFT
        front = atomic_load(hint_ptr(heap)).to(tl.int32)
        width = window(class_bytes(cls) * need)
        open_places(heap, cls, slots, place, fits, thrifty, front, width)
    return need * 0


@triton.jit
def malloc_slots(heap, cls, active, word, number, alone, PART: tl.constexpr, polls: tl.constexpr):
    """Slots of classes ``cls`` for the active lanes of a block, or for a scalar: addresses, or 0
    where there is none. If these lanes are PART of a block and ``alone`` (a scalar), all of the
    block are of one class, their tickets come from line word ``word``, ``number`` says which each
    lane has, and their places are open or being opened."""
    lane = lane_index(cls)
    stripe = own_stripe(heap)
    size = class_bytes(cls)
    slots = slots_of(size)
    records = load_records(heap)
    line = line_ptr(heap, cls, stripe)
    front = atomic_load(hint_ptr(heap) + lane * 0, lane == 0)
    tries = active
    if PART:
        tries = active & (number * 0 == alone.to(tl.int32))
    leader, rank, count = groups(cls, active)
    leads = tries & (leader == lane)
    words = tl.atomic_add(line, -count.to(tl.int64), mask=leads, sem="relaxed")
    words = leaders(words, leader)
    if PART:
        word = tl.where(tries, words, word)
        rank = tl.where(tries, rank, number)
    else:
        word = words
    place, slot, covered = ticket_place(word, rank, slots)
    thrifty = (word >> SPARSE_SHIFT) > THRIFT
    opens = tries & (covered == 0) & (slot == 0)
    total = tl.where(active, size, 0)
    if is_block(total):
        total = tl.sum(total, axis=0)
    if any_lane(opens):
        at = pick(front, 0).to(tl.int32)
        open_places(heap, cls, slots, place, opens, thrifty, at, window(total))
    half = (place << 1) + (slot >= slots - (slots >> 1)).to(tl.int32)
    head, _rank, users = groups(cls * 65536 + (half & 65535), active)
    ptr = place_ptr(heap, ring_index(heap, cls, stripe, place) * 2 + (half & 1))
    lap = lap_of(heap, place)
    reads = active & (head == lane)
    state = await_places(ptr, lap, reads, polls)
    reads = reads & (((state & VOID) == 0) | (place_lap(state) != lap))
    used = -users.to(tl.int64) << UNUSED_SHIFT
    late = tl.atomic_add(ptr, used, mask=reads, sem="relaxed")
    early = reads & (place_lap(state) != lap)
    if any_lane(early):
        # Not open yet: the tickets are given up, unless it was opened just now.
        state = tl.where(early, late, state)
        void = early & (place_lap(late) == lap) & ((late & VOID) != 0)
        tl.atomic_add(ptr, -used, mask=void, sem="relaxed")
    good = (place_lap(state) == lap) & ((state & VOID) == 0)
    state = leaders(tl.where(good, state, -1), head)
    got = active & (state >= 0)
    page = place_page(state)
    page = tl.where(got, page, 0)
    granule = slot * (size >> 4)
    ptr, bit = live_bit(records, page, granule)
    old = tl.atomic_or(ptr, bit, mask=got, sem="relaxed")
    lost = got & ((old & bit) != 0)
    if any_lane(lost):
        granule = tl.where(lost, another(old, granule, size), granule)
        granule = claim_others(records, page, granule, size, lost)
    return tl.where(got, address_of(load_base(heap), page, granule), 0)


@triton.jit
def malloc_whole(heap, cls, same, rank, n):
    """``n`` whole pages (int32 scalar, 1 to 64) for the lanes that fill them, the first of those
    numbered by ``rank``. Addresses; 0 in other lanes, and where there is no page."""
    records = load_records(heap)
    size = class_bytes(cls)
    slots = slots_of(size)
    pages, have = take_any(heap, n)
    lane = tl.arange(0, 64)
    state = slab_word(cls, own_stripe(heap), slots) + slots + (pages & 0)
    tl.atomic_xchg(page_word_ptr(records, pages), state, mask=lane < have, sem="relaxed")
    at = divide(tl.where(same, rank, 0), slots)
    page = tl.gather(pages, tl.minimum(at, n - 1), 0)
    slot = rank - at * slots
    got = same & (rank < have * slots)
    page = tl.where(got, page, 0)
    granule = slot * (size >> 4)
    ptr, _bit = live_bit(records, page, granule)
    further = tl.minimum(n * slots - 1 - rank, slots - 1 - slot)
    turn, bits = speak_for(granule, size >> 4, slot, further)
    tl.atomic_or(ptr, bits, mask=got & (turn == 0), sem="relaxed")
    return tl.where(got, address_of(load_base(heap), page, granule), 0)


@triton.jit
def count_cached(heap, page, count):
    """Add to the number of slots of a page that are in magazines (scalars)."""
    change = count.to(tl.int64) << CACHED_SHIFT
    tl.atomic_add(page_word_ptr(load_records(heap), page), change, sem="relaxed")


@triton.jit(noinline=True)
def release_span(heap, word):
    """Give the slots of a span back to the account of their page (int64 scalar; 0: none)."""
    if word != 0:
        count = ((word >> SPAN_COUNT) & 0x3FFF).to(tl.int32)
        page = (word & PAGE_MASK).to(tl.int32)
        count_cached(heap, page, -count)
        cancel(heap, page, count, count > 0)
    return word


@triton.jit
def take_span(heap, cls, count):
    """The span of ``count`` slots of class ``cls`` in the magazine, or 0."""
    ptr = magazine_ptr(heap, cls)
    word = tl.atomic_xchg(ptr, tl.full((), 0, tl.int64), sem="acquire")
    wanted = (count.to(tl.int64) << SPAN_COUNT) + ((cls + 1).to(tl.int64) << SPAN_CLASS)
    if (word != 0) & ((word >> SPAN_COUNT) != (wanted >> SPAN_COUNT)):
        word = release_span(heap, tl.atomic_xchg(ptr, word, sem="relaxed")) & 0
    return word


@triton.jit
def malloc_span(heap, word, same, rank, count, size):
    """Addresses of the slots of a span."""
    records = load_records(heap)
    count_cached(heap, (word & PAGE_MASK).to(tl.int32), -count)
    page = (word & PAGE_MASK).to(tl.int32) + rank * 0
    slot = ((word >> SPAN_SLOT) & 0x1FFF).to(tl.int32) + rank
    granule = slot * (size >> 4)
    ptr, bits = live_bit(records, page, granule)
    speaks = same
    if is_block(rank):
        turn, bits = speak_for(granule, size >> 4, rank, count - 1 - rank)
        speaks = same & (turn == 0)
    old = tl.atomic_or(ptr, bits, mask=speaks, sem="relaxed")
    wrong = tl.where(speaks, old & bits, 0)
    if any_lane(wrong != 0):
        # A program with a promise of other slots was there first: each lane still finds a slot.
        lost = wrong != 0
        if is_block(rank):
            lost = same & heard(page, granule, wrong)
        granule = claim_others(records, page, granule, size + granule * 0, lost)
    return tl.where(same, address_of(load_base(heap), page, granule), 0)


@triton.jit
def malloc(heap, nbytes, active, polls: tl.constexpr = 4000):
    """Addresses of slots for int64 sizes up to 32 KiB, a scalar or a block; 0 in other lanes."""
    small = active & (nbytes > 0) & (nbytes <= MAX_SLOT)
    classes = size_class(tl.where(small, nbytes, 1).to(tl.int32))
    cls = tl.maximum(pick_first(classes, small), 0)
    same = small & (classes == cls)
    rank = rank_of(same)
    count = count_lanes(same)
    addr = nbytes * 0
    if count == count_lanes(small):
        span = tl.full((), 0, tl.int64)
        size = class_bytes(cls)
        if (count > 0) & (count * size * 2 <= 65536):
            span = take_span(heap, cls, count)
        if span != 0:
            addr = malloc_span(heap, span, same, rank, count, size)
            same = same & (same == 0)
        if is_block(nbytes):
            if count >= slots_of(size):
                n = divide(count, slots_of(size))
                addr = malloc_whole(heap, cls, same, rank, n)
                same = same & (rank >= n * slots_of(size))
        small = same
    word = tl.full((), 0, tl.int64)
    if any_lane(small):
        if width(nbytes) > GROUP:
            # A few lanes at a time: wider, this would decide how many registers a program needs.
            number = rank_of(small)
            need = count_lanes(small)
            alone = count_lanes(small & (classes == cls)) == need
            if alone:
                line = line_ptr(heap, cls, own_stripe(heap))
                word = tl.atomic_add(line, -need.to(tl.int64), sem="relaxed")
                open_ahead(heap, word, cls, need)
            lane = lane_index(nbytes)
            some = tl.arange(0, GROUP)
            at = first_lane(small) & -GROUP
            while at < nbytes.shape[0]:
                kinds = tl.gather(tl.where(small, classes, -1), at + some, 0)
                numbers = tl.gather(number, at + some, 0)
                kind = tl.maximum(kinds, 0)
                part = malloc_slots(heap, kind, kinds >= 0, word, numbers, alone, True, polls)
                mine = small & (lane >= at) & (lane < at + GROUP)
                addr = tl.where(mine, tl.gather(part, tl.where(mine, lane - at, 0), 0), addr)
                at = first_lane(small & (lane >= at + GROUP)) & -GROUP
        else:
            some = malloc_slots(heap, classes, small, word, classes, word, False, polls)
            addr = tl.where(small, some, addr)
    tl.debug_barrier()
    return addr


@triton.jit
def free_scalar(heap, addr, active, page, granule):
    """free of one address."""
    records = load_records(heap)
    lane = tl.arange(0, 2)
    ptr, bit = live_bit(records, page, granule)
    ptr = tl.where(lane == 0, ptr + lane * 0, page_word_ptr(records, page) + lane * 0)
    change = tl.where(lane == 0, bit ^ -1, -1)
    old = tl.atomic_and(ptr, change, mask=(lane >= 0) & active, sem="relaxed")
    word = pick(old, 1)
    if active & ((pick(old, 0) & bit) != 0):
        cls = page_class(word)
        size = class_bytes(cls)
        kept = size > 32768
        if size * 2 <= 65536:
            span = span_of(page, divide(granule << 4, size), page * 0 + 1, cls)
            kept = tl.atomic_cas(magazine_ptr(heap, cls), span & 0, span, sem="relaxed") == 0
            if kept:
                count_cached(heap, page, page * 0 + 1)
        if kept == 0:
            account = page_word_ptr(records, page)
            one = (page & 0).to(tl.int64) + 1
            now = tl.atomic_add(account, -one, sem="relaxed") - one
            leave_account(heap, page, now, page * 0 + 1, active)


@triton.jit
def free_block(heap, active, page, granule):
    """free of a block."""
    records = load_records(heap)
    ptr, bit = live_bit(records, page, granule)
    counts = granule * 0 + 1
    lane = lane_index(active)
    count = count_lanes(active)
    first_page = pick(page, 0)
    first = pick(granule, 0)
    unit = pick((page << 12) + granule, 1) - ((first_page << 12) + first)
    at = first + lane * unit
    there = (page == first_page + (at >> 12)) & (granule == (at & 4095))
    orderly = (active == (lane < count)) & ((active == 0) | there)
    together = (count > 1) & (unit > 0) & (unit <= 2048)
    together = together & (count_lanes(orderly) == active.shape[0])
    before = granule * 0
    further = before
    speaks = active
    bits = bit
    word = bit & 0
    # (That of the first page, for the magazine.)
    one_page = together & (first + count * unit <= 4096) & (count * unit <= 2048)
    if together:
        before = tl.minimum(lane, divide(granule, unit))
        further = tl.minimum(count - 1 - lane, divide(4095 - granule, unit))
        turn, bits = speak_for(granule, unit, before, further)
        speaks = active & (turn == 0)
        counts = further + 1
    if one_page:
        word = atomic_load(page_word_ptr(records, page), lane == 0)
    old = tl.atomic_and(ptr, bits ^ -1, mask=speaks, sem="relaxed")
    wrong = tl.where(speaks, (old & bits) ^ bits, 0)
    kept = first < 0
    if one_page:
        cls = page_class(pick(word, 0))
        slot = divide(first, unit)
        if (class_bytes(cls) == unit << 4) & (slot * unit == first) & (any_lane(wrong != 0) == 0):
            span = span_of(first_page, slot, count, cls)
            kept = tl.atomic_cas(magazine_ptr(heap, cls), span & 0, span, sem="relaxed") == 0
            if kept:
                count_cached(heap, first_page, count)
    if kept == 0:
        speaks = active & (before == 0)
        if (together == 0) & (count > 1):
            leader, _rank, counts = alike(page, active)
            speaks = active & (leader == lane)
        if any_lane(wrong != 0):
            speaks = active & (wrong == 0)
            counts = counts * 0 + 1
        change = counts.to(tl.int64)
        ptr = page_word_ptr(records, page)
        now = tl.atomic_add(ptr, -change, mask=speaks, sem="relaxed") - change
        pages = (first + count * unit + 4095) >> 12
        emptied = count_lanes(speaks & (page_out(now) == 0))
        if together & (emptied == pages) & (pages <= 64) & (pages > 1):
            give_together(heap, first_page, pages)
            hints = hint_ptr(heap) + page * 0
            tl.atomic_min(hints, (page >> 6).to(tl.int64), mask=lane == 0, sem="relaxed")
        else:
            leave_account(heap, page, now, counts, speaks)


@triton.jit
def free(heap, addr, active):
    """Free slots at int64 addresses that malloc gave; 0 is ignored."""
    active = active & (addr != 0)
    base = load_base(heap)
    page, granule = place_of(base, tl.where(active, addr, base))
    fence(heap + ERRORS)
    if is_block(active):
        free_block(heap, active, page, granule)
    else:
        free_scalar(heap, addr, active, page, granule)
