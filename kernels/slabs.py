"""Slabs: pages cut into slots of one size class, and how slots are handed out.

Account first, then track. The account of a page is

    out = credits of its stripe + accounted slots                                          (A)

where an accounted slot is live, or promised to a malloc that will claim its live bit, or cleared
by a free that will subtract it. Slots are promised in three ways:

- A *ticket*: a subtraction from the stripe word of a class. The batch of a stripe begins with all
  its slots clear, and ticket i names slot i: neighbouring lanes get neighbouring addresses.
- A *draw*: an addition to the page word of a detached page, by compare-and-swap, promises some of
  its clear slots. Many draws, frees and late claims may be at work in one page.
- *Whole pages*, opened for a program that can fill them. Its tickets are nobody else's.

Shared words and their writers
    *Stripe word* (class, stripe): malloc subtracts credits; a refill or a flush exchanges it; who
    makes a refill its duty (take_duty) compares and swaps it.
    *Spare* (class, stripe): prefetch, refill and flush exchange it, refill compares and swaps it.
    It is ready, with all its credits (or those that two refills at once left of them), or it is
    used up and rests: then it has none. Its pages are attached in both cases.
    *Page word*: free subtracts; open, renew and detach change the state, and draw, settle,
    unpublish and retire_filled in ``detached``.
    *HELD*: how many pages are in batches; says only how much memory is spread, never whose it is.
    *Class hint*: row ORDERS + class, a bit per chunk. PUBLISHED in a page word promises it.
Linearisation
    malloc: the subtraction that returned enough credits, or the compare-and-swap of a draw, or
    the take of whole pages. free: the subtraction from the page word, or the compare-and-swap that
    retires filled pages.
Who may do what
    Credits of a batch exist in one stripe word or spare only; its pages are ATTACHED, not
    PUBLISHED, and nobody draws from them. A page is retired by the compare-and-swap of its word
    from (detached, out = 0) to FREE: by (A) nobody has a slot, a promise or a credit in it, so
    nobody is inside. A free that finds its live bit clear touches no page word.
Order
    `fence` orders; the atomics are relaxed, but for the tickets of scalars and of blocks of one
    class, which acquire, and exchanges and takes by one lane. Free fences before it clears the
    live bit, so the payload happens before that and before the subtraction. From there to the
    next owner the order passes through the bit (draw: the claim reads what the free cleared, and
    malloc fences behind it), or through subtraction -> fence of a refill, prefetch or retirement ->
    stripe word or page bits -> ticket, which acquires, or malloc fences behind its claims.
Reuse (ABA)
    Compare-and-swaps of page words compare the whole state; an equal state is an equal right,
    whatever happened in between.
Progress
    Lock-free. The program whose subtraction took a stripe below zero refills it; others draw, or
    wait for it a bounded time (it is running, not waiting to be scheduled), and then help
    themselves.
"""

import triton
import triton.language as tl

from .atomics import atomic_cas, atomic_load, fence
from .bits import floor_log2, lowest_bit
from .detached import draw, is_idle, settle
from .lanes import lane_bits, or_lanes, pick
from .layout import (
    ATTACHED,
    CLASS_SHIFT,
    G_MAX_BATCH,
    G_PAGES,
    G_STRIPES,
    GRANTED,
    HELD,
    NUM_CLASSES,
    ORDERS,
    PUBLISHED,
    SLAB,
    SPARE,
    STRIPES,
    USED,
    class_bytes,
    class_slots,
    hint_ptr,
    load_geometry,
    pack_stripe,
    page_out,
    page_word_ptr,
    program_count,
    program_index,
    stripe_credits,
    stripe_place,
    stripe_ptr,
)
from .pages import (
    FAR,
    IN_HAND,
    collect,
    count_taken,
    end_transit,
    enter_transit,
    first_hinted,
    lacks_pages,
    leave_transit,
    take_pages,
    take_within_chunk,
    transit_ptr,
)

FLUSH_IDLE = tl.constexpr(0)  # only batches with a page that is free as a whole
FLUSH_FREE = tl.constexpr(1)  # every batch with a free slot
FLUSH_ALL = tl.constexpr(2)

POLLS = tl.constexpr(256)
WAITS = tl.constexpr(4)
WHOLE_PAGES = tl.constexpr(2)  # who can fill so many pages at once gets pages of its own
DRY_PAGES = tl.constexpr(1)  # or so many, if the stripe is dry
SPARED = tl.constexpr(4)  # pages of a batch that gets a spare when half of it is used
FIRST_LOG2 = tl.constexpr(2)  # the first batch of a stripe is so much shorter than the longest,
FIRST_SIZE_LOG2 = tl.constexpr(7)  # and for slots of 2**k bytes has 2**(k - 7) pages, or SPARED
MAX_DEBT = tl.constexpr(1 << 30)
REFILLING = tl.constexpr(-1)  # stripe word without a batch and below zero: somebody refills
# The same, with a page: nobody refills, because there are slots to be drawn.
DRAWING = tl.constexpr((1 << 32) - 1)


# Batches --------------------------------------------------------------------------------------


@triton.jit
def unissued_slots(batch, credits, slots, lane):
    """Of each page ``lane`` of a batch, how many slots no ticket was given for (int32).

    Tickets go through a batch from its first page on, so what is left is at its end.
    """
    left = tl.maximum(credits, 0) - (batch - 1 - lane) * slots
    return tl.minimum(tl.maximum(left, 0), slots)


@triton.jit(noinline=True)
def detach(heap, cls, word):
    """Dissolve the batch of a stripe word that only the caller has; returns 0.

    Unused credits go out of the account of its pages. The caller is in transit, and may end it
    without a fence.
    """
    page, batch = stripe_place(word)
    if batch > 0:
        lane = tl.arange(0, 64)
        credits = stripe_credits(word)
        tl.atomic_add(heap + GRANTED + cls, -tl.maximum(credits, 0).to(tl.int64), sem="relaxed")
        tl.atomic_add(heap + HELD, -batch.to(tl.int64), sem="relaxed")
        unused = unissued_slots(batch, credits, class_slots(cls), lane)
        change = (PUBLISHED - ATTACHED) - unused.to(tl.int64)
        mine = lane < batch
        at = page + tl.where(mine, lane, 0)
        now = tl.atomic_add(page_word_ptr(heap, at), change, mask=mine, sem="relaxed") + change
        # The flag before the hint, as in settle.
        fence(heap + GRANTED + cls)
        bit = tl.full((), 1, tl.int64) << (page >> 6 & 63).to(tl.int64)
        tl.atomic_or(hint_ptr(heap, ORDERS + cls, page >> 6), bit, sem="relaxed")
        idle = lane_bits(mine & is_idle(now))
        if idle != 0:
            state = (cls.to(tl.int64) << CLASS_SHIFT) + (SLAB + PUBLISHED)
            settle(heap, page >> 6, idle << (page & 63).to(tl.int64), state)
        # The hints before the end of the transit.
        fence(heap + GRANTED + cls)
    return page * 0


@triton.jit(noinline=True)
def renew(heap, cls, old, least):
    """Make the pages at the front of a dry batch that are free again into a new batch.

    ``old`` is a stripe word that only the caller has, who is in transit. Returns a stripe word for
    the first k of its pages; or 0, and nothing has changed, if k is below ``least``. Tickets go
    through a batch from the front, so that is where pages are free first.
    """
    lane = tl.arange(0, 64)
    page, batch = stripe_place(old)
    slots = class_slots(cls)
    ptr = page_word_ptr(heap, page + tl.where(lane < batch, lane, 0))
    words = atomic_load(ptr, lane < batch)
    front = lowest_bit(lane_bits((lane < batch) & (page_out(words) == 0)) ^ -1)
    result = tl.full((), 0, tl.int64)
    if (front >= least) & (front > 0):
        # Nothing is out, so nobody else changes these words.
        tl.atomic_add(ptr, slots.to(tl.int64) + words * 0, mask=lane < front, sem="relaxed")
        tl.atomic_add(heap + GRANTED + cls, (front * slots).to(tl.int64), sem="relaxed")
        result = pack_stripe(page, front, front * slots)
    return result


@triton.jit(noinline=True)
def open_pages(heap, cls, batch, used, state, takers):
    """Take up to ``batch`` (1 to 64, int32) adjacent pages and make them slabs with ``state``
    (int64) in their page words, of which the first ``used`` slots are out. Returns a stripe word
    whose credits are those slots, or 0 if there is no page. ``takers`` as for the take. The
    caller is in transit, unless all slots are used."""
    page = tl.full((), -1, tl.int32)
    while (page < 0) & (batch > 0):
        page = take_within_chunk(heap, batch, takers)
        if page < 0:
            # (Shorter only if there is any page at all: a full heap is found full at once.)
            batch = tl.where(lacks_pages(heap, batch * 0 + 1) != 0, 0, batch >> 1)
    result = tl.full((), 0, tl.int64)
    if page >= 0:
        lane = tl.arange(0, 64)
        slots = class_slots(cls)
        used = tl.minimum(used, batch * slots)
        out = tl.minimum(tl.maximum(used - lane * slots, 0), slots).to(tl.int64)
        word = out + (cls.to(tl.int64) << CLASS_SHIFT) + (SLAB + state)
        mine = lane < batch
        ptr = page_word_ptr(heap, page + tl.where(mine, lane, 0))
        was = tl.atomic_xchg(ptr, word, mask=mine, sem="relaxed")
        if (state & PUBLISHED) != 0:
            # The flag before the hint, as in settle.
            fence(heap + GRANTED + cls)
            bit = tl.full((), 1, tl.int64) << (page >> 6 & 63).to(tl.int64)
            tl.atomic_or(hint_ptr(heap, ORDERS + cls, page >> 6), bit, sem="relaxed")
        tl.atomic_add(heap + GRANTED + cls, used.to(tl.int64), sem="relaxed")
        count_taken(heap, batch)
        result = pack_stripe(page, batch, used)
        if (state & ATTACHED) == 0:
            # The page words before the live bits, or a wrong free could come between: whoever has
            # slots has them from what the exchange returned, which is nothing (KIND_FREE). (Those
            # of a batch have a fence between them: `install`.)
            result = result | or_lanes(tl.where(mine, was, 0))
    return result


@triton.jit
def announce(heap, cls):
    """Enter transit, without a fence, and look at what decides about a batch for the program's
    stripe of class ``cls``, all by one instruction. Returns the stripe word, its spare, how many
    pages a batch may have now (int32), and whether there is plenty (1 or 0). 0 pages, when more
    than half of what stripes do not hold is taken, or all: time to pack rather than to spread.

    While stripes hold less than three eighths of the heap, batches are as long as may be; with
    every sixteenth more, half as long. (With all classes in use, long ones would hoard most of it.)
    When more than five eighths of the pages are taken they are short, or what a search has made
    others give back would be hoarded again at once. There is plenty until stripes hold an eighth.
    """
    stripe = own_stripe(heap, cls)
    # (Not a list of five words: blocks have lengths that are powers of two.)
    what = tl.arange(0, 8)
    ptr = tl.where(what == 0, transit_ptr(heap).to(tl.int64), (heap + USED).to(tl.int64))
    ptr = tl.where(what == 2, (heap + HELD).to(tl.int64), ptr)
    ptr = tl.where(what == 3, stripe.to(tl.int64), ptr)
    ptr = tl.where(what == 4, (stripe + SPARE).to(tl.int64), ptr)
    ptr = ptr.to(tl.pointer_type(tl.int64))
    change = tl.where(what == 0, IN_HAND, 0).to(tl.int64)
    seen = tl.atomic_add(ptr, change, mask=what < 5, sem="relaxed")
    pages = load_geometry(heap, G_PAGES)
    longest = load_geometry(heap, G_MAX_BATCH).to(tl.int32)
    used = pick(seen, 1)
    held = pick(seen, 2)
    limit = longest
    for sixteenths in tl.static_range(6, 10):
        limit = tl.where(held << 4 >= pages * sixteenths, limit >> 1, limit)
    short = tl.minimum(longest, SPARED)
    limit = tl.where(used * 8 > pages * 5, short, tl.maximum(limit, short))
    packs = ((used - held) * 2 > pages - held) | (used + short > pages)
    limit = tl.where(packs, 0, limit)
    plenty = (held << 3 < pages).to(tl.int32)
    return pick(seen, 3), pick(seen, 4), limit, plenty


@triton.jit
def next_length(cls, old, limit, plenty):
    """How long the batch (int32) is to be that follows the one in stripe word ``old``: twice as
    long, or four times while there is plenty, but not above ``limit``; and a power of two, for
    hints tell of such runs. The first is short, so that little used classes stay small."""
    _page, batch = stripe_place(old)
    log2 = floor_log2(tl.maximum(batch, 1)) + 1 + plenty
    some = tl.maximum(1 << floor_log2(class_bytes(cls)) >> FIRST_SIZE_LOG2, SPARED)
    first = tl.maximum(tl.minimum(limit >> FIRST_LOG2, some), tl.minimum(limit, 1))
    return tl.where(batch > 0, tl.minimum(limit, (batch & 0) + 1 << log2), first)


@triton.jit
def open_batch(heap, cls, batch):
    """A new batch for a stripe of class ``cls``, of up to ``batch`` pages (int32): a stripe word,
    or 0. The caller is in transit."""
    used = batch * class_slots(cls)
    stripes = load_geometry(heap, G_STRIPES).to(tl.int32)
    word = open_pages(heap, cls, batch, used, (cls * 0).to(tl.int64) + ATTACHED, stripes)
    _page, opened = stripe_place(word)
    tl.atomic_add(heap + HELD, opened.to(tl.int64), sem="relaxed")
    return word


@triton.jit(noinline=True)
def open_whole(heap, cls, need):
    """As many pages as the caller's ``need`` slots fill, but at least one: a stripe word that
    goes into no stripe, or 0. What the caller does not need of a single page can be drawn; pages
    that it fills are hidden until something in them is freed."""
    slots = class_slots(cls)
    shared = need < slots
    if shared:
        enter_transit(heap)
    batch = tl.minimum(tl.maximum(need // slots, 1), 32)
    state = tl.where(shared, PUBLISHED, (cls * 0).to(tl.int64))
    word = open_pages(heap, cls, batch, need, state, program_count())
    if shared:
        leave_transit(heap, (word != 0).to(tl.int32))
    return word


# Searching ------------------------------------------------------------------------------------


@triton.jit(noinline=True)
def next_batch(heap, index, end, mode):
    """The first batch in [index, end) that ``mode`` (a FLUSH constant) wants dissolved; FAR if
    there is none. Batches are counted (int32) through all classes and their stripes, two for each
    stripe: its own and its spare."""
    lane = tl.arange(0, 64)
    stripes = load_geometry(heap, G_STRIPES).to(tl.int32)
    found = end * 0 + FAR
    while (index < end) & (found == FAR):
        at = index + lane
        words = atomic_load(heap + STRIPES + at * SPARE, at < end)
        _pages, batches = stripe_place(words)
        first = tl.min(tl.where((batches > 0) & (at < end), at, FAR), axis=0)
        index = tl.where(first < FAR, first, index + 63) + 1
        if first < FAR:
            word = tl.sum(tl.where(at == first, words, 0), axis=0)
            page, batch = stripe_place(word)
            slots = class_slots(first // (stripes * 2))
            states = atomic_load(page_word_ptr(heap, page + tl.minimum(lane, batch - 1)))
            unused = unissued_slots(batch, stripe_credits(word), slots, lane)
            free = tl.where(lane < batch, slots - page_out(states) + unused, 0)
            some = tl.max(free, axis=0)
            if (mode == FLUSH_ALL) | ((mode == FLUSH_FREE) & (some > 0)) | (some >= slots):
                found = first
    return found


@triton.jit
def flush(heap, index, end, mode):
    """Dissolve batches [index, end), counted as in :func:`next_batch`, so that their free slots
    and pages can be found by everybody. ``mode`` is a FLUSH constant. Returns how many were
    dissolved."""
    dissolved = end * 0
    index = next_batch(heap, index, end, mode)
    while index < FAR:
        enter_transit(heap)
        ptr = heap + STRIPES + index * SPARE
        # (Acquire: the credits' former owners happen before whoever draws them.)
        old = tl.atomic_xchg(ptr, tl.full((), 0, tl.int64), sem="acquire")
        detach(heap, index // (load_geometry(heap, G_STRIPES) * 2).to(tl.int32), old)
        end_transit(heap, index * 0 + 1)
        dissolved += 1
        index = next_batch(heap, index + 1, end, mode)
    return dissolved


@triton.jit
def is_drawing(word):
    """Whether the stripe word is DRAWING, or was before requests subtracted from it."""
    page, batch = stripe_place(word)
    return (stripe_credits(word) < 0) & (batch == 0) & (page > 0)


@triton.jit(noinline=True)
def install(heap, cls, word, place):
    """Make ``word`` the word of the program's stripe of class ``cls`` (``place`` 0) or its spare
    (SPARE), and dissolve the batch that was there; returns 0. The caller is in transit."""
    ptr = own_stripe(heap, cls) + place
    # What the slots' former owners did, and our page words, before whoever takes a ticket.
    fence(ptr)
    return detach(heap, cls, tl.atomic_xchg(ptr, word, sem="relaxed"))


@triton.jit(noinline=True)
def refill(heap, cls, need):
    """Give the program's stripe of class ``cls``, which is dry, a batch and keep up to ``need``
    slots of it for the caller (int32 scalars). Returns (place, pages): a stripe word of whose
    credits the caller owns the first min(need, credits) and 0, or a draw, or 0 and 0.

    Unless a spare is ready, the stripe is taken away from everybody first: its batches are then
    ours alone to renew or to detach, and others that come by see it below zero. If the heap fills,
    slots of detached pages are used before fresh pages are opened: then the stripe stays without a
    batch, and everybody draws until somebody finds nothing. If not, the batch that is used up
    rests: if all of it is free again when the next one is used up, it is renewed.
    """
    ptr = own_stripe(heap, cls)
    pages = tl.full((), 0, tl.int64)
    _word, _spare, limit, plenty = announce(heap, cls)
    # Announced before anything is taken.
    fence(ptr)
    spare = tl.atomic_xchg(ptr + SPARE, pages, sem="acquire")
    place = tl.where(stripe_credits(spare) > 0, spare, 0)
    if place != 0:
        fence(ptr)
    mine = tl.minimum(tl.maximum(stripe_credits(place), 0), need)
    rest = tl.where(place != 0, place - mine.to(tl.int64), REFILLING)
    old = tl.atomic_xchg(ptr, rest, sem="acquire")
    # A short batch that is renewed and renewed never grows: it is replaced by a longer one, or put
    # beside another.
    least_renewed = tl.where(spare != 0, tl.minimum(limit, SPARED), SPARED)
    least_renewed = tl.where(limit == 0, 1, least_renewed)
    # (0 if the heap fills: then slots are drawn, nothing rests, and what is opened is one page.)
    length = next_length(cls, old, limit, plenty)
    aside = old
    if place == 0:
        if stripe_credits(old) > 0:
            # (Credits that were found by others, and are kept.)
            place = old
            aside = spare
        else:
            # What was used up longest ago: the one that rests, if there is one.
            rested = tl.where(spare != 0, spare, old)
            page, batch = stripe_place(rested)
            if batch >= least_renewed:
                # (Where not all of it is free, a longer one is better, if there may be one.)
                least = tl.where(limit >= batch, batch, batch + 1 >> 1)
                place = renew(heap, cls, rested, least)
            # What is not renewed of it is dissolved, unless it is the old one, which may rest now.
            _page, kept = stripe_place(place)
            aside = tl.where((place != 0) & (spare == 0), 0, old)
            lost = pack_stripe(page + kept, batch - kept, kept * 0)
            detach(heap, cls, tl.where((place == 0) & (spare == 0), 0, lost))
            if (place == 0) & (need > 0) & (length == 0):
                place, pages = draw(heap, cls, need, need * 0 + 2)
            if (place | pages) == 0:
                place = open_batch(heap, cls, tl.maximum(length, 1))
        mine = tl.minimum(tl.maximum(stripe_credits(place), 0), need)
        rest = tl.where(pages != 0, DRAWING, place - mine.to(tl.int64))
        install(heap, cls, rest, need * 0)
    _page, batch = stripe_place(aside)
    if (pages == 0) & (length > 0) & (batch > 0):
        # As `install`, but never for a spare that somebody else has made ready meanwhile.
        fence(ptr)
        rests = aside - tl.minimum(stripe_credits(aside), 0).to(tl.int64)
        aside = tl.where(atomic_cas(ptr + SPARE, aside & 0, rests) == 0, 0, aside)
    detach(heap, cls, aside)
    # (What was put, was put by atomics that have returned what decided a branch.)
    end_transit(heap, need * 0 + 1)
    return place, pages


@triton.jit(noinline=True)
def prefetch(heap, cls):
    """Have a spare batch ready for the program's stripe of class ``cls`` (int32 scalar), whose
    batch is half used; returns 0. The one that rests, if all of it is free again. If its first page
    is and its last is not, it is left alone: mostly it will be free when it is needed. Or else a
    new one, if there may be one: then what rests is dissolved."""
    ptr = own_stripe(heap, cls) + SPARE
    word, spare, limit, plenty = announce(heap, cls)
    _page, batch = stripe_place(word)
    first, rested = stripe_place(spare)
    # (Announced before anything is taken: by what the announcement returned.)
    ready = tl.full((), 0, tl.int64)
    if (batch > 0) & (stripe_credits(spare) <= 0):
        at = page_word_ptr(heap, tl.where(rested > 0, first, 0))
        last = tl.maximum(rested - 1, 0)
        begun = page_out(atomic_load(at))
        done = page_out(atomic_load(at + last))
        if (rested > 0) & (begun == 0):
            if done == 0:
                ready = tl.atomic_xchg(ptr, ready, sem="acquire")
                if stripe_credits(ready) <= 0:
                    _page, rested = stripe_place(ready)
                    renewed = renew(heap, cls, ready, rested)
                    ready = tl.where(renewed != 0, renewed, ready)
        elif limit > 0:
            ready = open_batch(heap, cls, next_length(cls, word, limit, plenty))
        if ready != 0:
            install(heap, cls, ready, cls * 0 + SPARE)
    end_transit(heap, (ready != 0).to(tl.int32))
    return cls * 0


@triton.jit
def half_used(word, slots, count):
    """Whether ``count`` tickets from stripe word ``word`` used up the first half of its batch, if
    that is a long one: whoever sees that should :func:`prefetch`."""
    _page, batch = stripe_place(word)
    half = batch * slots >> 1
    credits = stripe_credits(word)
    return (batch >= SPARED) & (credits >= half) & (credits - count < half)


@triton.jit
def own_stripe(heap, cls):
    """The stripe of class ``cls`` that this program uses."""
    return stripe_ptr(heap, cls, program_index() & (load_geometry(heap, G_STRIPES) - 1))


@triton.jit
def limit_debt(ptr, word):
    """Bring the stripe word at ``ptr``, when it was ``word``, back to just below zero if it is very
    far below. While everybody draws, nobody refills, and every request subtracts: in the end the
    credits would wrap."""
    if stripe_credits(word) < -MAX_DEBT:
        atomic_cas(ptr, word, word - stripe_credits(word).to(tl.int64) - 1)


@triton.jit(noinline=True)
def await_slots(heap, cls, need, now):
    """Wait at the program's stripe of class ``cls`` (int32 scalars), which was dry when we came by:
    its word is ``now``. Returns (place, duty): a stripe word as a subtraction returned it, or 0;
    and whether it is our duty to refill the stripe, as we took it below zero. Both 0: there may be
    slots to be drawn, or it takes too long."""
    ptr = own_stripe(heap, cls)
    place = tl.full((), 0, tl.int64)
    duty = need * 0
    polls = need * 0 + POLLS
    while polls > 0:
        polls -= 1
        if is_drawing(now):
            limit_debt(ptr, now)
            polls = polls * 0
        else:
            now = atomic_load(ptr)
            if stripe_credits(now) >= 0:
                now = tl.atomic_add(ptr, -need.to(tl.int64), sem="acquire")
                credits = stripe_credits(now)
                place = tl.where(credits > 0, now, place)
                duty = ((credits >= 0) & (credits < need)).to(tl.int32)
                polls = tl.where(credits >= 0, 0, polls)
    return place, duty


@triton.jit(noinline=True)
def take_duty(heap, cls):
    """Make the refill of the program's stripe ours if it is nobody's: 1 or 0."""
    ptr = own_stripe(heap, cls)
    now = atomic_load(ptr)
    duty = cls * 0
    if is_drawing(now):
        duty += (atomic_cas(ptr, now, tl.full((), REFILLING, tl.int64)) == now).to(tl.int32)
    return duty


@triton.jit(noinline=True)
def find_slots(heap, cls, need, state):
    """Slots for ``need`` requests of class ``cls`` when there were no tickets (int32 scalars).
    ``state`` 1: our subtraction took the stripe below zero, so the refill is ours; -1: we have
    waited for tickets, or tried to get whole pages, and want more; 0: neither. Returns (place,
    pages), as :func:`refill` does.

    First at the program's own stripe, if we have not waited there; then everywhere, until something
    is found or two passes were quiet (nothing found, nothing put back, nothing in hand): then both
    are 0, the memory is exhausted. Two, because a slot freed into an attached page behind our back
    is found by the second.
    """
    place = tl.full((), 0, tl.int64)
    pages = tl.full((), 0, tl.int64)
    before = tl.full((), -1, tl.int64)
    quiet = need * 0
    duty = tl.maximum(state, 0)
    waits = tl.where(duty == 0, WAITS, 0)
    waited = state < 0
    if (state == 0) & (need >= class_slots(cls) * WHOLE_PAGES):
        place = open_whole(heap, cls, need)
    while ((place | pages) == 0) & (quiet < 2):
        everywhere = (waits <= 0) & (duty == 0)
        if (waits > 0) & (waited == 0):
            waits -= 1
            dry = tl.full((), REFILLING, tl.int64)
            place, duty = await_slots(heap, cls, need, dry)
        waited = waited & (waited == 0)
        if (place | duty) == 0:
            looks = tl.where(everywhere, 0, 2)
            place, pages = draw(heap, cls, need, looks)
            if ((place | pages) == 0) & (everywhere == 0):
                duty = take_duty(heap, cls)
        if duty != 0:
            # Tickets that we have already are enough for us.
            found, drawn = refill(heap, cls, tl.where(place == 0, need, 0))
            place = tl.where(place == 0, found, place)
            pages = drawn
            duty = need * 0
            waits = need * 0
        elif everywhere & ((place | pages) == 0):
            # Announces nothing unless a page may be free: programs that find the heap exhausted
            # must leave each other in peace, or none would see the quiet pass that ends it.
            if lacks_pages(heap, need * 0 + 1) == 0:
                index, _hints = first_hinted(heap, need * 0, need * 0)
                if index != FAR:
                    place = open_whole(heap, cls, need)
            if place == 0:
                gained = need * 0
                mode = need * 0 + FLUSH_FREE
                while mode >= FLUSH_IDLE:
                    stripes = load_geometry(heap, G_STRIPES).to(tl.int32)
                    first = tl.where(mode == FLUSH_FREE, cls, 0) * stripes * 2
                    end = tl.where(mode == FLUSH_FREE, cls + 1, NUM_CLASSES) * stripes * 2
                    gained += flush(heap, first, end, mode)
                    mode -= 1
                after = collect(heap)
                same = (gained == 0) & (after >= 0) & (after == before)
                quiet = tl.where(same, quiet + 1, 0)
                before = after
    return place, pages


@triton.jit(noinline=True)
def find_run(heap, n):
    """Take ``n`` pages (int32) for a large allocation: the first page, or -1 when exhausted
    (two quiet passes, as in :func:`find_slots`)."""
    page = tl.full((), -1, tl.int32)
    quiet = n * 0
    before = tl.full((), -1, tl.int64)
    while (page < 0) & (quiet < 2):
        page = take_pages(heap, n, program_count())
        if page < 0:
            stripes = load_geometry(heap, G_STRIPES).to(tl.int32)
            gained = flush(heap, n * 0, stripes * (2 * NUM_CLASSES), n * 0 + FLUSH_IDLE)
            after = collect(heap)
            same = (gained == 0) & (after >= 0) & (after == before)
            quiet = tl.where(same, quiet + 1, 0)
            before = after
    return page
