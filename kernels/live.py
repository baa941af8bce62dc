"""Live bits: one per granule of 16 bytes, set while an allocation begins there.

Where a bit lies follows from the address alone (see ``layout``), so a free need not know what it
frees. Of consecutive slots of a page every n-th has its bit in the same word: every sixteenth of 64
bytes, every one of 1 KiB. So one lane can *speak* for all slots of its word, by one atomic: the
tickets of a block of one class are consecutive slots, and so mostly are addresses that are freed
together. A hundred lanes then need a handful of atomics.

Shared words and their writers
    *Live bits*: a claim sets by `or`, a free clears by `and`, a new run sets its own. What these
    return shows to exactly one lane, or its speaker, that it changed the bit. Order: see ``slabs``.
"""

import triton
import triton.language as tl

from .atomics import fence
from .bits import comb, divide, floor_log2, low_mask, mix, next_bit
from .groups import alike
from .lanes import any_lane, count_lanes, first_lane, is_block, lane_index, pick
from .layout import (
    ERRORS,
    LIVE_WORDS,
    address_of,
    live_words,
    load_base,
    place_of,
    program_index,
    slots_of,
    stripe_credits,
    stripe_place,
)

# The step, in slots, to look for another slot by: coprime to the slots per page of every class that
# has more of them; and in few classes do a few such steps lead round the page to near the start.
STRIDE = tl.constexpr(23)


@triton.jit
def live_bit(live, page, granule):
    """``(ptr, bit)``: the word and bit of the live bit of ``granule`` of ``page`` (int32).
    ``live``, here and below: the heap's first word of live bits."""
    ptr = live + page.to(tl.int64) * LIVE_WORDS + (granule & 63)
    return ptr, (granule & 0).to(tl.int64) + 1 << (granule >> 6).to(tl.int64)


@triton.jit
def word_period(unit):
    """For slots ``unit`` granules apart: ``(p, apart)``. Every 2**p-th slot is in the same word,
    the next one ``apart`` bits further up."""
    even = tl.minimum(floor_log2(unit & -unit), 6)
    return 6 - even, unit >> even


@triton.jit
def speak_for(granule, unit, before, further):
    """Share words among lanes that have consecutive slots, ``unit`` granules (int32) apart.

    ``before`` and ``further`` say of each lane how many lanes have the slots before and after its
    own in its page. Returns how many of the lanes before share its word (0: this lane speaks for
    the word), and the bits in the word of all these slots from its own on.
    """
    period_log2, apart = word_period(unit)
    others = tl.maximum(further, 0) >> period_log2
    bits = comb(apart) & low_mask(others * apart + 1)
    return before >> period_log2, bits << (granule >> 6).to(tl.int64)


@triton.jit
def heard(page, granule, wrong):
    """Which lanes' live bits are among the ``wrong`` ones of a lane that spoke for their word. One
    turn of the loop for each such word."""
    where = page * LIVE_WORDS + (granule & 63)
    bit = (granule & 0).to(tl.int64) + 1 << (granule >> 6).to(tl.int64)
    hit = wrong != wrong
    speaker = first_lane(wrong != 0)
    while speaker < wrong.shape[0]:
        mine = where == pick(where, speaker)
        hit = hit | (mine & ((bit & pick(wrong, speaker)) != 0))
        speaker = first_lane((wrong != 0) & (lane_index(wrong) > speaker))
    return hit


@triton.jit
def claim(live, page, granule, active):
    """Set live bits. Returns the words as they are now, and the lanes whose bit was set already."""
    ptr, bit = live_bit(live, page, granule)
    old = tl.atomic_or(ptr, bit, mask=active, sem="relaxed")
    return old | bit, active & ((old & bit) != 0)


@triton.jit
def ticket_slot(word, rank, size, active):
    """``(page, slot)`` that tickets name: each lane has the ``rank``-th of those that were taken by
    a subtraction that returned stripe word ``word``. Inactive lanes get 0, whatever their rank."""
    slots = slots_of(size)
    first, batch = stripe_place(word)
    ticket = tl.where(active, batch * slots - stripe_credits(word) + rank, 0)
    step = divide(ticket, slots)
    return tl.where(active, first + step, 0), ticket - step * slots


@triton.jit
def claim_tickets(live, word, rank, count, size, active):
    """Set the live bits of the slots that the ``count`` tickets from stripe word ``word`` name.

    ``rank`` numbers the active lanes. Returns their pages and granules, and for each lane that
    spoke for a word, the bits among those that somebody else had set before (0: all is well).
    """
    page, slot = ticket_slot(word, rank, size, active)
    granule = slot * (size >> 4)
    ptr, bit = live_bit(live, page, granule)
    speaks = active
    bits = bit
    if is_block(rank):
        granted = tl.minimum(stripe_credits(word), count)
        before = tl.minimum(rank, slot)
        further = tl.minimum(granted - rank, slots_of(size) - slot) - 1
        turn, bits = speak_for(granule, size >> 4, before, further)
        speaks = active & (turn == 0)
    old = tl.atomic_or(ptr, bits, mask=speaks, sem="relaxed")
    return page, granule, tl.where(speaks, old & bits, 0)


@triton.jit
def another(word, granule, size):
    """The granule to try next for a slot of ``size`` bytes when the one at ``granule`` was somebody
    else's and its word of live bits is ``word``: that of a clear bit of the word, or else some way
    off, mostly in another word. Each lane was promised a slot of its page, so it will find one.

    Lanes that tried neighbouring bits of one word look for clear ones from bits far apart, and so
    do different programs. Neighbouring slots are what other lanes of a draw try, so the way leads
    on by STRIDE slots, or by one where a page has no more than that. Either leads to all slots.
    """
    unit = size >> 4
    end = slots_of(size) * unit
    _period_log2, apart = word_period(unit)
    turn = divide(granule >> 6, apart)
    first = (granule >> 6) - turn * apart
    last = (end - unit - (granule & 63)) >> 6
    unset = (word ^ -1) & (comb(apart) << first.to(tl.int64)) & low_mask(last + 1)
    start = (mix(program_index()) + turn * 27) & 63
    other = (next_bit(unset, start) << 6) + (granule & 63)
    beyond = granule + tl.where(unit * STRIDE < end, unit * STRIDE, unit)
    beyond = tl.where(beyond < end, beyond, beyond - end)
    return tl.where(unset != 0, other, beyond)


@triton.jit
def claim_any(heap, addr, size, late):
    """Claim the slot, of ``size`` bytes, at each ``addr`` that is not 0, or else another one of its
    page: the caller was promised one. Returns the addresses; 0 where ``addr`` was.

    What the slots' last owners did happens before anything that the caller does next. For tickets
    claimed at once, the ticket has acquired that. Slots that were drawn or waited for (``late``, a
    scalar), and those claimed in place of a ticket's, are acquired by the fence here.
    """
    base = load_base(heap)
    live = live_words(heap)
    page, granule = place_of(base, addr)
    word, lost = claim(live, page, granule, addr != 0)
    late = late | any_lane(lost)
    while any_lane(lost):
        granule = tl.where(lost, another(word, granule, size), granule)
        word, lost = claim(live, page, granule, lost)
    if late:
        fence(heap + ERRORS)
    return tl.where(addr != 0, address_of(base, page, granule), 0)


@triton.jit
def clear(live, page, granule, active):
    """Clear the live bits of ``active`` lanes. Returns the lanes whose bits were set; those that
    are to subtract from the account of their page, and for how many lanes each; and, if the slots
    are equally far apart and span a page or more, their distance in granules (int32 scalar), or 0.

    If the lanes free consecutive slots, in order and from lane 0 on, one clears for all of a word
    and subtracts for all of a page. If not, each clears its own bit, and groups subtract together.
    """
    ptr, bit = live_bit(live, page, granule)
    speaks = active
    bits = bit
    counts = granule * 0 + 1
    unit = tl.full((), 0, tl.int32)
    if is_block(active):
        lane = lane_index(active)
        count = count_lanes(active)
        first_page = pick(page, 0)
        first = pick(granule, 0)
        # (If the pages are far apart, this may be any number. Then the lanes are not in order.)
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
        cleared = active
        speaks = active & (before == 0)
        if (together == 0) & (count > 1):
            # (While the atomics are under way.)
            leader, _rank, counts = alike(page, active)
            speaks = active & (leader == lane)
        if any_lane(wrong != 0):
            hit = wrong != 0
            if together:
                # (For each word the first of its consecutive slots has spoken.)
                period_log2, _apart = word_period(unit)
                speaker = lane - (before >> period_log2 << period_log2)
                hit = (tl.gather(wrong, speaker, 0) & bit) != 0
            # (Then each lane subtracts for itself.)
            cleared = active & (hit == 0)
            speaks = cleared
            counts = counts * 0 + 1
            together = together != together
        unit = tl.where(together & (count * unit >= 4096), unit, 0)
    else:
        cleared = active & (wrong == 0)
        speaks = cleared
    return cleared, speaks, counts, unit
