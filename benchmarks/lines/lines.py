"""Lines: slots of one class, one after the other, from pages that are opened when they are wanted.

For each class and stripe the line word counts tickets, and a ring has the pages of its places.
Ticket t of a class with s slots to a page is slot t mod s of place t div s. The program that
gets the first ticket of a place *opens* it: it takes a page and writes it into the ring. The others
of the place read the ring until it is there. So programs that want many pages at one time open them
all at one time.

A place has two *halves*, mostly those of a fresh page. While a line has sparse pages, of which half
is free, an opener takes halves of these, which it finds in the list of the line. A slot is
promised, and accounted in the page word, before its live bit is set, so a program that meets a live
bit finds another clear one.
"""

import triton
import triton.language as tl

from devalloc.kernels.atomics import atomic_cas, atomic_load
from devalloc.kernels.bits import divide, lsr, mix
from devalloc.kernels.groups import alike, from_leader
from devalloc.kernels.lanes import (
    any_lane,
    count_lanes,
    first_lane,
    is_block,
    lane_index,
    pick,
    rank_of,
)
from devalloc.kernels.lanes import width as width_of
from devalloc.kernels.layout import class_slots, program_index

from .layout import (
    CACHED_SHIFT,
    LAP_SHIFT,
    LINE_MASK,
    LISTED,
    OPEN_MASK,
    OPENED,
    SPARSE,
    SPARSE_LIST,
    UNUSED_SHIFT,
    VOID,
    hint_ptr,
    is_sparse,
    lap_of,
    line_of,
    line_ptr,
    load_records,
    own_stripe,
    page_class,
    page_out,
    page_word_ptr,
    place_lap,
    place_page,
    place_ptr,
    ring_index,
    slab_word,
)
from .pages import give_pages, take_pages

THRIFT = tl.constexpr(1)  # more sparse pages than these are used before fresh ones are taken
TURNS = tl.constexpr(4)  # tries of an opener to get sparse pages
PADDING = tl.constexpr(1)  # from a page word to an unused one


@triton.jit
def groups(keys, active):
    """:func:`alike` for blocks; a scalar is a group of its own."""
    if is_block(keys):
        leader, rank, count = alike(keys, active)
    else:
        leader = keys * 0
        rank = keys * 0
        count = keys * 0 + 1
    return leader, rank, count


@triton.jit
def leaders(values, leader):
    """:func:`from_leader` for blocks; a scalar's own value."""
    if is_block(values):
        values = from_leader(values, leader)
    return values


@triton.jit
def line_credits(word):
    return word.to(tl.int32)


@triton.jit
def line_places(word):
    """Places opened so far (int32, 20 bits)."""
    # (Credits below zero have borrowed one from the upper half.)
    return (((word + (1 << 31)) >> 32) & LINE_MASK).to(tl.int32)


@triton.jit
def ticket_place(word, rank, slots):
    """``(place, slot, opened)`` of the ``rank``-th of the tickets that were taken by a subtraction
    that returned line word ``word``."""
    left = line_credits(word) - 1 - rank
    opened = left >= 0
    behind = tl.maximum(-1 - left, 0)
    ahead = divide(behind, slots)
    past = divide(tl.maximum(left, 0), slots)
    places = line_places(word)
    place = tl.where(opened, places - 1 - past, places + ahead) & LINE_MASK
    slot = tl.where(opened, slots - 1 - left + past * slots, behind - ahead * slots)
    return place, slot, opened


@triton.jit
def leave_account(heap, page, now, counts, speaks):
    """What follows after ``counts`` left the account of pages, which left their words ``now``."""
    idle = speaks & (page_out(now) == 0)
    change = (is_sparse(now) - is_sparse(now + counts.to(tl.int64))) * SPARSE
    crossed = speaks & (change != 0)
    give_pages(heap, page, idle)
    if any_lane(crossed | idle):
        line = line_of(heap, tl.where(crossed, now, 0))
        tl.atomic_add(line, change, mask=crossed, sem="relaxed")
        lists = crossed & (change > 0)
        entry = line + LISTED + (page & (SPARSE_LIST - 1))
        tl.atomic_xchg(entry, page.to(tl.int64) + 1, mask=lists, sem="relaxed")
        hints = hint_ptr(heap) + page * 0
        tl.atomic_min(hints, (page >> 6).to(tl.int64), mask=idle, sem="relaxed")


@triton.jit
def cancel(heap, page, tickets, lanes):
    """Take tickets that no program will use out of the accounts of pages."""
    ptr = page_word_ptr(load_records(heap), tl.where(lanes, page, 0))
    gone = tickets.to(tl.int64)
    now = tl.atomic_add(ptr, -gone, mask=lanes, sem="relaxed") - gone
    leave_account(heap, page, now, tickets, lanes)


@triton.jit(noinline=True)
def find_sparse(heap, cls, stripe, place):
    """Two sparse pages (int32 scalars) of the line, each with a promise of one half of ``place`` to
    the caller; -1 in place of those that were not found."""
    lane = tl.arange(0, SPARSE_LIST)
    slots = class_slots(cls)
    salt = mix(program_index() + place * 7919)
    listed = line_ptr(heap, cls, stripe) + LISTED + lane
    entry = atomic_load(listed)
    there = entry != 0
    page = tl.maximum(entry.to(tl.int32) - 1, 0)
    word = page_word_ptr(load_records(heap), page)
    first = place * 0 - 1
    second = first
    turns = place * 0
    while ((first < 0) | (second < 0)) & (turns < TURNS):
        state = atomic_load(word, there)
        fits = there & (page_class(state) == cls) & (is_sparse(state) != 0)
        # (Slots in magazines are free by their live bits, but not ours.)
        fits = fits & (lsr(state, CACHED_SHIFT) == 0)
        count = tl.maximum(count_lanes(fits), 1)
        turn = rank_of(fits) - ((salt & 0x7FFF) * count >> 15)
        turn = tl.where(turn < 0, turn + count, turn)
        upper = turn == tl.where(first < 0, 0, -1)
        lower = turn == tl.where(second < 0, tl.where(first < 0, 1, 0), -1)
        chosen = fits & (upper | lower)
        after = state + tl.where(upper, slots - (slots >> 1), slots >> 1).to(tl.int64)
        ptr = tl.where(chosen, word, word + PADDING)
        old = atomic_cas(ptr, tl.where(chosen, state, -1), tl.where(chosen, after, -1))
        won = chosen & (old == state)
        full = won & (is_sparse(after) == 0)
        tl.atomic_add(line_of(heap, state), (state & 0) - SPARSE, mask=full, sem="relaxed")
        # (An entry that was written anew meanwhile may be lost, until its page is sparse again.)
        tl.atomic_xchg(listed, entry & 0, mask=full | (there & (fits == 0)), sem="relaxed")
        first = tl.maximum(first, tl.max(tl.where(won & upper, page, -1), axis=0))
        second = tl.maximum(second, tl.max(tl.where(won & lower, page, -1), axis=0))
        there = fits & (won == 0)
        turns = tl.where(any_lane(there), turns + 1, TURNS)
        salt = mix(salt)
    return first, second


@triton.jit
def publish(ptr, before, page, tickets, lap, opens):
    """Write halves of places that are open now into the ring, where ``before`` was when last looked
    at. Returns the words as they were just before."""
    got = page >= 0
    now = tl.where(got, page.to(tl.int64), VOID) + (lap << LAP_SHIFT)
    unused = tl.where(got, tickets, 0).to(tl.int64) << UNUSED_SHIFT
    return tl.atomic_add(ptr, now - (before & OPEN_MASK) + unused, mask=opens, sem="relaxed")


@triton.jit
def settle_tickets(heap, ptr, old, page, opens):
    """Take tickets that no program will use out of the accounts; :func:`publish` found ``old``."""
    carried = (old >> UNUSED_SHIFT).to(tl.int32)
    if any_lane(opens & (carried != 0)):
        # Above 0: tickets of the last lap, whose holders stand still and will find that it is over.
        # Below 0: tickets of this lap, whose holders did not wait for us.
        got = page >= 0
        cancel(heap, place_page(old), carried, opens & (carried > 0))
        cancel(heap, page, -carried, opens & got & (carried < 0))
        back = -carried.to(tl.int64) << UNUSED_SHIFT
        tl.atomic_add(ptr, back, mask=opens & (got == 0) & (carried < 0), sem="relaxed")


@triton.jit
def open_places(heap, cls, slots, place, opens, thrifty, front, width):
    """Open the places of the lanes (or scalar) in ``opens``, the ``thrifty`` ones from sparse
    pages if they can; fresh pages are looked for among ``width`` from chunk ``front`` on."""
    lane = lane_index(place)
    stripe = own_stripe(heap)
    ptr = place_ptr(heap, ring_index(heap, cls, stripe, place) * 2)
    # (Not waited for until pages are taken. Only this program changes page and lap meanwhile.)
    before_0 = atomic_load(ptr, opens)
    before_1 = atomic_load(ptr + 1, opens)
    page_0 = place * 0 - 1
    page_1 = page_0
    saves = opens & thrifty
    at = first_lane(saves)
    while at < width_of(saves):
        first, second = find_sparse(heap, pick(cls, at), stripe, pick(place, at))
        page_0 = tl.where(lane == at, first, page_0)
        page_1 = tl.where(lane == at, second, page_1)
        at = first_lane(saves & (lane > at))
    slots_0 = slots - (slots >> 1)
    slots_1 = slots >> 1
    out = tl.where(page_0 < 0, slots_0, 0) + tl.where(page_1 < 0, slots_1, 0)
    fresh = opens & (out > 0)
    if any_lane(fresh):
        page = take_pages(heap, fresh, front, width)
        got = fresh & (page >= 0)
        state = slab_word(cls, stripe, slots) + out.to(tl.int64)
        word = page_word_ptr(load_records(heap), tl.where(got, page, 0))
        tl.atomic_xchg(word, state, mask=got, sem="relaxed")
        partly = got & (is_sparse(state) != 0)
        line = line_ptr(heap, cls, stripe)
        tl.atomic_add(line, (state & 0) + SPARSE, mask=partly, sem="relaxed")
        entry = line + LISTED + (page & (SPARSE_LIST - 1))
        tl.atomic_xchg(entry, page.to(tl.int64) + 1, mask=partly, sem="relaxed")
        page_0 = tl.where(page_0 < 0, page, page_0)
        page_1 = tl.where(page_1 < 0, page, page_1)
    lap = lap_of(heap, place)
    old_0 = publish(ptr, before_0, page_0, slots_0, lap, opens)
    old_1 = publish(ptr + 1, before_1, page_1, slots_1, lap, opens)
    more = slots.to(tl.int64) + OPENED
    tl.atomic_add(line_ptr(heap, cls, stripe), more, mask=opens, sem="relaxed")
    settle_tickets(heap, ptr, old_0, page_0, opens)
    settle_tickets(heap, ptr + 1, old_1, page_1, opens)


@triton.jit
def await_places(ptr, lap, wants, polls: tl.constexpr):
    """The words of the half places of the lanes (or scalar) in ``wants``, which wait a bounded time
    until they are open."""
    word = atomic_load(ptr, wants)
    waits = wants & (place_lap(word) != lap)
    tries = 0
    while any_lane(waits) & (tries < polls):
        now = atomic_load(ptr, waits)
        word = tl.where(waits, now, word)
        waits = waits & (place_lap(now) != lap)
        tries += 1
    return word
