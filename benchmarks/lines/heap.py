"""malloc and free of the experiment, for sizes of up to 32 KiB."""

import triton
import triton.language as tl

from devalloc.kernels.atomics import atomic_load, fence
from devalloc.kernels.bits import comb, divide, low_mask, mix, next_bit
from devalloc.kernels.groups import alike, from_leader
from devalloc.kernels.lanes import (
    any_lane,
    count_lanes,
    is_block,
    lane_index,
    pick,
    pick_first,
    rank_of,
)
from devalloc.kernels.layout import (
    ERRORS,
    MAX_SLOT,
    address_of,
    class_bytes,
    place_of,
    program_index,
    size_class,
    slots_of,
)
from devalloc.kernels.live import STRIDE, heard, speak_for, word_period

from .layout import (
    NO_PAGE,
    SPARSE,
    UNUSED_SHIFT,
    hint_ptr,
    is_sparse,
    line_of,
    line_ptr,
    live_bit,
    load_base,
    load_records,
    own_stripe,
    page_half,
    page_out,
    page_word_ptr,
    place_page,
    place_ptr,
    ring_index,
    slab_word,
)
from .lines import (
    any_pair,
    latest_page,
    line_credits,
    open_place,
    open_places,
    read_places,
    second_page,
    take_tickets,
    ticket_place,
)
from .pages import give_pages, take_any, window

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


@triton.jit
def malloc_mixed(heap, nbytes, small, classes, polls: tl.constexpr):
    """Slots for a block of at most GROUP lanes of several classes: addresses, or 0."""
    lane = lane_index(classes)
    stripe = own_stripe(heap)
    size = class_bytes(classes)
    slots = slots_of(size)
    records = load_records(heap)
    leader, rank, count = alike(classes, small)
    line = line_ptr(heap, classes, stripe)
    leads = small & (leader == lane)
    word = tl.atomic_add(line, -count.to(tl.int64), mask=leads, sem="relaxed")
    word = from_leader(word, leader)
    place, slot, opened = ticket_place(word, rank, slots)
    opens = small & (opened == 0) & (slot == 0)
    if any_lane(opens):
        total = tl.sum(tl.where(small, size, 0), axis=0)
        front = atomic_load(hint_ptr(heap)).to(tl.int32)
        open_places(heap, word, front, classes, slots, place, opens, total)
    head, _rank, users = alike(classes * 65536 + (place & 65535), small)
    index = ring_index(heap, classes, stripe, place)
    reads = small & (head == lane)
    word = read_places(heap, index, place, reads, polls)
    used = -users.to(tl.int64) << UNUSED_SHIFT
    tl.atomic_add(place_ptr(heap, index), used, mask=reads, sem="relaxed")
    word = from_leader(word, head)
    page = place_page(word)
    got = small & (page != NO_PAGE)
    if any_pair(tl.where(got, word, 0)):
        there, second = second_page(heap, index, tl.where(got, word, 0), slot, slots)
        page = tl.where(there, second, page)
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
def malloc_alike(heap, nbytes, cls, same, rank, count, polls: tl.constexpr):
    """Slots of one class for the ``same`` lanes, ``count`` of them and numbered by ``rank``: whole
    pages as far as the lanes fill some, and tickets for the rest. Addresses, or 0."""
    records = load_records(heap)
    size = class_bytes(cls)
    slots = slots_of(size)
    stripe = own_stripe(heap)
    whole = count * 0
    page = rank * 0
    slot = rank * 0
    before = rank * 0
    further = rank * 0
    got = same & (same == 0)
    paired = count < 0
    if is_block(nbytes):
        if count >= slots:
            n = divide(count, slots)
            whole = n * slots
            pages, have = take_any(heap, n, window(size * count))
            lane = tl.arange(0, 64)
            state = slab_word(cls, stripe, slots) + slots + (pages & 0)
            tl.atomic_xchg(page_word_ptr(records, pages), state, mask=lane < have, sem="relaxed")
            at = divide(tl.where(same, rank, 0), slots)
            page = tl.gather(pages, tl.minimum(at, n - 1), 0)
            slot = rank - at * slots
            before = slot
            further = tl.minimum(whole - 1 - rank, slots - 1 - slot)
            got = same & (rank < have * slots)
    if whole < count:
        need = count - whole
        line = line_ptr(heap, cls, stripe)
        word, latest, front = take_tickets(heap, line, need)
        place, first, _opened = ticket_place(word, need * 0, slots)
        # The tickets are slots of this place from `first` on, and then of the next.
        here = slots - first
        number = tl.maximum(rank - whole, 0)
        mine = same & (rank >= whole)
        slot = tl.where(mine, tl.where(number < here, first + number, number - here), slot)
        known = tl.where(need <= here, latest_page(latest, place), -1)
        if known >= 0:
            got = got | mine
            page = tl.where(mine, known, page)
            drawn = rank.to(tl.int64) * 0 - (need.to(tl.int64) << UNUSED_SHIFT)
            ptr = place_ptr(heap, ring_index(heap, cls, stripe, place)) + rank * 0
            tl.atomic_add(ptr, drawn, mask=mine & (rank == whole), sem="relaxed")
            if is_block(nbytes):
                before = tl.where(mine, number, before)
                further = tl.where(mine, need - 1 - number, further)
        else:
            if ((line_credits(word) <= 0) & (first == 0)) | (need > here):
                opens = tl.where(first == 0, place, place + 1)
                open_place(heap, word, front, cls, opens, size * count)
            if is_block(nbytes):
                both = tl.arange(0, 2)
                places = place + both
                reads = both < 1 + (need > here).to(tl.int32)
                users = tl.where(both == 0, tl.minimum(need, here), tl.maximum(need - here, 0))
            else:
                places = place
                reads = same
                users = need
            index = ring_index(heap, cls, stripe, places)
            words = read_places(heap, index, places, reads, polls)
            used = -users.to(tl.int64) << UNUSED_SHIFT
            tl.atomic_add(place_ptr(heap, index), used, mask=reads, sem="relaxed")
            paired = any_pair(tl.where(reads, words, 0))
            if is_block(nbytes):
                its = tl.where(number < here, pick(words, 0), pick(words, 1))
                before = tl.where(mine, tl.where(number < here, number, number - here), before)
                last = tl.where(number < here, tl.minimum(need, here), need)
                further = tl.where(mine, last - 1 - number, further)
            else:
                its = words
            page = tl.where(mine, place_page(its), page)
            got = got | (mine & (page != NO_PAGE))
            if paired:
                its = tl.where(mine & got, its, 0)
                its_index = ring_index(heap, cls, stripe, tl.where(number < here, place, place + 1))
                there, second = second_page(heap, its_index, its, slot, slots)
                page = tl.where(there, second, page)
    page = tl.where(got, page, 0)
    granule = slot * (size >> 4)
    ptr, bits = live_bit(records, page, granule)
    speaks = got
    if is_block(nbytes):
        if paired == 0:
            turn, bits = speak_for(granule, size >> 4, before, further)
            speaks = got & (turn == 0)
    old = tl.atomic_or(ptr, bits, mask=speaks, sem="relaxed")
    wrong = tl.where(speaks, old & bits, 0)
    if any_lane(wrong != 0):
        lost = wrong != 0
        if is_block(nbytes):
            lost = got & heard(page, granule, wrong)
        granule = claim_others(records, page, granule, size + granule * 0, lost)
    return tl.where(got, address_of(load_base(heap), page, granule), 0)


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
        if count > 0:
            addr = malloc_alike(heap, nbytes, cls, same, rank, count, polls)
    elif is_block(nbytes):
        if nbytes.shape[0] <= GROUP:
            addr = malloc_mixed(heap, nbytes, small, classes, polls)
        else:
            # A few lanes at a time: wider, this would decide how many registers a program needs.
            lane = lane_index(nbytes)
            some = tl.arange(0, GROUP)
            at = count * 0
            while at < nbytes.shape[0]:
                sizes = tl.gather(tl.where(small, nbytes, 0), at + some, 0)
                kinds = size_class(tl.maximum(sizes, 1).to(tl.int32))
                part = malloc_mixed(heap, sizes, sizes > 0, kinds, polls)
                mine = (lane >= at) & (lane < at + GROUP)
                addr = tl.where(mine, tl.gather(part, tl.where(mine, lane - at, 0), 0), addr)
                at += GROUP
    tl.debug_barrier()
    return addr


@triton.jit
def clear(records, page, granule, active):
    """``live.clear`` with the records of the experiment."""
    ptr, bit = live_bit(records, page, granule)
    speaks = active
    bits = bit
    counts = granule * 0 + 1
    if is_block(active):
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
        if together:
            before = tl.minimum(lane, divide(granule, unit))
            further = tl.minimum(count - 1 - lane, divide(4095 - granule, unit))
            turn, bits = speak_for(granule, unit, before, further)
            speaks = active & (turn == 0)
            counts = further + 1
    old = tl.atomic_and(ptr, bits ^ -1, mask=speaks, sem="relaxed")
    wrong = tl.where(speaks, (old & bits) ^ bits, 0)
    if is_block(active):
        speaks = active & (before == 0)
        if (together == 0) & (count > 1):
            leader, _rank, counts = alike(page, active)
            speaks = active & (leader == lane)
        if any_lane(wrong != 0):
            speaks = active & (wrong == 0)
            counts = counts * 0 + 1
    else:
        speaks = active & (wrong == 0)
    return speaks, counts


@triton.jit
def free(heap, addr, active):
    """Free slots at int64 addresses that malloc gave; 0 is ignored."""
    active = active & (addr != 0)
    base = load_base(heap)
    records = load_records(heap)
    page, granule = place_of(base, tl.where(active, addr, base))
    fence(heap + ERRORS)
    speaks, counts = clear(records, page, granule, active)
    change = counts.to(tl.int64)
    ptr = page_word_ptr(records, page)
    now = tl.atomic_add(ptr, -change, mask=speaks, sem="relaxed") - change
    out = page_out(now)
    half = page_half(now)
    idle = speaks & (out == 0)
    # The program that takes the last slot out of the account owns the page. (No branch, which would
    # have to be fetched by the few programs that take it while all others have ended.)
    give_pages(heap, page, idle)
    crossed = speaks & (is_sparse(out, half) != is_sparse(out + counts, half))
    if any_lane(crossed | idle):
        more = (is_sparse(out, half) - is_sparse(out + counts, half)) * SPARSE
        tl.atomic_add(line_of(heap, tl.where(crossed, now, 0)), more, mask=crossed, sem="relaxed")
        hints = hint_ptr(heap) + page * 0
        tl.atomic_min(hints, (page >> 6).to(tl.int64), mask=idle, sem="relaxed")
