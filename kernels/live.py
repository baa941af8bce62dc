"""Live bits: one per granule of 16 bytes, set while an allocation begins there.

Where a bit lies follows from the address alone (see ``layout``), so a free need not know what it
frees. Of consecutive slots of a page every n-th has its bit in the same word: every sixteenth of 64
bytes, every one of 1 KiB. So one lane can *speak* for all slots of its word, by one atomic: the
slots of a span are consecutive, and so mostly are addresses that are freed together. A hundred
lanes then need a handful of atomics.

Shared words and their writers
    *Live bits*: a claim sets by `or`, a free clears by `and`, a new run sets its own. What these
    return shows to exactly one lane, or its speaker, that it changed the bit. Order: see ``lines``.
"""

import triton
import triton.language as tl

from .bits import comb, divide, floor_log2, low_mask, mix, next_bit
from .lanes import any_lane, first_lane, lane_index, pick
from .layout import LIVE_WORDS, RECORD_WORDS, program_index, slots_of

# The step, in slots, to look for another slot by: coprime to the slots per page of every class that
# has more of them; and in few classes do a few such steps lead round the page to near the start.
STRIDE = tl.constexpr(23)


@triton.jit
def live_bit(records, page, granule):
    """``(ptr, bit)``: the word and bit of the live bit of ``granule`` of ``page`` (int32)."""
    ptr = records + (page * RECORD_WORDS + (granule & 63)).to(tl.int64)
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
def another(word, granule, size):
    """The granule to try next for a slot of ``size`` bytes when the one at ``granule`` was another
    program's and its word of live bits is ``word``: that of a clear bit of the word, or else some
    way off, mostly in another word. Each lane was promised a slot of its page, so it will find one.

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
    other = (next_bit(tl.where(unset != 0, unset, 1), start) << 6) + (granule & 63)
    beyond = granule + tl.where(unit * STRIDE < end, unit * STRIDE, unit)
    beyond = tl.where(beyond < end, beyond, beyond - end)
    return tl.where(unset != 0, other, beyond)


@triton.jit
def claim_others(records, page, granule, size, wants):
    """Claim slots for the lanes in ``wants``, each promised one of its page: that at ``granule``,
    or another. Returns where they begin."""
    while any_lane(wants):
        ptr, bit = live_bit(records, page, granule)
        old = tl.atomic_or(ptr, bit, mask=wants, sem="relaxed")
        wants = wants & ((old & bit) != 0)
        if any_lane(wants):
            granule = tl.where(wants, another(old | bit, granule, size), granule)
    return granule


@triton.jit(noinline=True)
def claim_other(records, page, granule, size):
    """:func:`claim_others` for one slot (int32 scalars), rarely: what is inlined in a caller's loop
    takes registers all through it."""
    return claim_others(records, page, granule, size, size > 0)
