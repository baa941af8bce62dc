"""Batches: pages of a stripe, cut into slots of one size class; how they come, rest and go.

The argument is in ``slabs``, with the account (A) and the order of what happens here.

Shared words and their writers
    *Stripe word* (class, stripe): swap, refill and install exchange it. (``heap`` and ``slabs``
    subtract tickets from it; ``slabs`` takes duties, and its flush exchanges both words.)
    *Spare* (class, stripe): swap and put_aside compare and swap it; refill, prefetch and install
    exchange it. It is *ready*, with all its credits (or those that two refills at once left of
    them), or it is used up and *rests*, with none. Its pages are attached in both cases.
    *Page word*: open_pages, renew and detach change the state.
    *HELD*: how many pages are in batches; says only how much memory is spread, never whose it is.
"""

import triton
import triton.language as tl

from .atomics import atomic_cas, atomic_load, fence
from .bits import floor_log2, lowest_bit, reciprocal
from .detached import draw, is_idle, settle
from .lanes import count_lanes, lane_bits, or_lanes, pick
from .layout import (
    ATTACHED,
    G_MAX_BATCH,
    G_PAGES,
    G_STRIPES,
    GRANTED,
    HELD,
    ORDERS,
    PUBLISHED,
    SPARE,
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
    slab_of,
    stripe_credits,
    stripe_place,
    stripe_ptr,
)
from .pages import (
    IN_HAND,
    begin_transit,
    count_taken,
    end_transit,
    enter_transit,
    has_begun,
    leave_transit,
    take_within_chunk,
    transit_ptr,
)
from .shelf import estimate_shelved, own_place, shelved_ptr, take_shelved

SPARED = tl.constexpr(4)  # a batch of so many pages or more gets a spare when half of it is used
FIRST_LOG2 = tl.constexpr(2)  # the longest batch is 2**this times as long as a stripe's first,
FIRST_SIZE_LOG2 = tl.constexpr(7)  # which shrinks to SPARED, or 2**(k - 7) for slots of 2**k bytes
PLENTY = tl.constexpr(4)  # sixteenths of the heap: while stripes hold less, batches grow fast
REFILLING = tl.constexpr(-1)  # a stripe word below zero, without a batch: somebody refills
# Likewise, but its page is not 0: nobody refills, because there are slots to be drawn.
DRAWING = tl.constexpr((1 << 32) - 1)


@triton.jit
def unissued_slots(batch, credits, slots, lane):
    """For each page ``lane`` of a batch, how many slots no ticket was given for (int32).

    Tickets go through a batch from its first page on, so what is left is at its end.
    """
    left = tl.maximum(credits, 0) - (batch - 1 - lane) * slots
    return tl.minimum(tl.maximum(left, 0), slots)


@triton.jit(noinline=True)
def detach(heap, cls, word):
    """Dissolve the batch, if any, of a stripe word that only the caller has; returns 0.

    Its pages become detached and published, and unused credits leave their account. The caller is
    in transit, and may end it without a fence.
    """
    page, batch = stripe_place(word)
    if batch > 0:
        # (Triton 3.6 puts no barrier between what callers read of shared memory and what is written
        # to it here: a warp that is late would read the new values.)
        tl.debug_barrier()
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
            settle(heap, page >> 6, idle << (page & 63).to(tl.int64), slab_of(cls) + PUBLISHED)
        # The hints before the end of the transit.
        fence(heap + GRANTED + cls)
    return page * 0


@triton.jit(noinline=True)
def renew(heap, cls, old, least):
    """Make the pages at the front of a dry batch that are free again into a new batch.

    Only the caller has the stripe word ``old``, and it is in transit. Returns a stripe word for the
    first k of its pages; or 0, and nothing has changed, if k would be below ``least``. Tickets go
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
def open_pages(heap, cls, batch, least, used, state, takers):
    """Take ``batch`` (1 to 64, int32) adjacent pages, or else half as many, and so on, but not
    fewer than ``least``, and make them slabs with ``state`` (int64) in their page words, of which
    the first ``used`` slots are out. Returns a stripe word whose credits are those slots, or 0 if
    there are no such pages. ``takers`` as for `take_within_chunk`. The caller is in transit, unless
    all slots are used."""
    page = tl.full((), -1, tl.int32)
    while (page < 0) & (batch >= least):
        page = take_within_chunk(heap, batch, takers)
        if page < 0:
            # (Not shorter if it was seen that there are no pages: a full heap is soon found full.)
            batch = tl.where(page < -1, 0, batch >> 1)
    result = tl.full((), 0, tl.int64)
    if page >= 0:
        lane = tl.arange(0, 64)
        slots = class_slots(cls)
        used = tl.minimum(used, batch * slots)
        out = tl.minimum(tl.maximum(used - lane * slots, 0), slots).to(tl.int64)
        word = out + slab_of(cls) + state
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
            # The page words before the live bits, or a wrong free could come between. So what names
            # the slots is made of what the exchange returned, which is 0 (FREE). (For a batch the
            # fence of `install` stands between them.)
            result = result | or_lanes(tl.where(mine, was, 0))
    return result


@triton.jit(noinline=True)
def open_whole(heap, cls, need):
    """As many pages as the caller's ``need`` slots fill, but at least one and at most 32: a stripe
    word that goes into no stripe, or 0. A page that it does not fill is published: others draw the
    rest. Pages that it fills are hidden until something in them is freed; they come from the shelf
    if they lie there."""
    slots = class_slots(cls)
    shared = need < slots
    batch = tl.minimum(tl.maximum(need // slots, 1), 32)
    page = need * 0 - 1
    if shared:
        enter_transit(heap)
    else:
        page = take_shelved(heap, batch, cls)
    if page >= 0:
        slots = slots * batch
        word = pack_stripe(page, batch, slots)
        tl.atomic_add(heap + GRANTED + cls, slots.to(tl.int64), sem="relaxed")
    else:
        state = tl.where(shared, PUBLISHED, (cls * 0).to(tl.int64))
        word = open_pages(heap, cls, batch, need * 0 + 1, need, state, program_count())
    if shared:
        leave_transit(heap, (word != 0).to(tl.int32))
    return word


@triton.jit(noinline=True)
def announce(heap, stripe):
    """Enter transit, without a fence, and look at what decides about a batch for ``stripe``, all by
    one instruction. Returns the stripe word, its spare, and (int32) how many pages a batch may have
    now, how many sixteenths of the heap stripes hold, and in how many chunks, from the front of the
    heap, to look for pages. A batch may have 0 pages when more than half of what stripes do not
    hold is taken, or all: time to pack rather than to spread.

    While stripes hold less than half of the heap, batches are as long as they may be; half as long
    from there on, and so on with every sixteenth more. (With all classes in use, long ones would
    hoard most of it.) They are short as well when more than five eighths of the pages are taken, or
    what a search has made others give back would be hoarded again at once.
    """
    # (Eight lanes for six words: blocks have lengths that are powers of two.)
    what = tl.arange(0, 8)
    ptr = tl.where(what == 0, transit_ptr(heap).to(tl.int64), (heap + USED).to(tl.int64))
    ptr = tl.where(what == 2, (heap + HELD).to(tl.int64), ptr)
    ptr = tl.where(what == 3, stripe.to(tl.int64), ptr)
    ptr = tl.where(what == 4, (stripe + SPARE).to(tl.int64), ptr)
    ptr = tl.where(what == 5, shelved_ptr(heap, own_place(heap)).to(tl.int64), ptr)
    ptr = ptr.to(tl.pointer_type(tl.int64))
    change = tl.where(what == 0, IN_HAND, 0).to(tl.int64)
    seen = tl.atomic_add(ptr, change, mask=what < 6, sem="relaxed")
    pages = load_geometry(heap, G_PAGES).to(tl.int32)
    longest = load_geometry(heap, G_MAX_BATCH).to(tl.int32)
    counts = seen.to(tl.int32)
    used = pick(counts, 1)
    held = pick(counts, 2)
    taken = used - held - estimate_shelved(heap, pick(counts, 5))
    share = (held.to(tl.float32) * 16 * reciprocal(pages.to(tl.float32))).to(tl.int32)
    short = tl.minimum(longest, SPARED)
    limit = tl.maximum(longest >> tl.maximum(share - 7, 0), short)
    limit = tl.where((held + taken) * 8 > pages * 5, short, limit)
    packs = (taken * 2 > pages - held) | (used + short > pages)
    limit = tl.where(packs, 0, limit)
    # Half as many chunks again as what is taken would fill, and one for each stripe, so that
    # programs that open batches at one time find chunks of their own. (For one page, fewer do.)
    front = ((used >> 6) * 3 >> 1) + load_geometry(heap, G_STRIPES).to(tl.int32)
    return pick(seen, 3), pick(seen, 4), limit, share, front


@triton.jit
def next_length(cls, old, limit, share):
    """The length (int32) of the batch that is to follow the one in stripe word ``old``, of class
    ``cls``: twice as long, or four times until stripes hold a quarter of the heap (``share``: in
    sixteenths), but not above ``limit``; and a power of two, as hints tell of such runs.

    The first is a quarter of the longest; from an eighth of the heap on, half of that with every
    sixteenth, down to a minimum: where many classes are in use, those little used stay small.
    """
    _page, batch = stripe_place(old)
    log2 = floor_log2(tl.maximum(batch, 1)) + tl.where(share < PLENTY, 2, 1)
    some = tl.maximum(1 << floor_log2(class_bytes(cls)) >> FIRST_SIZE_LOG2, SPARED)
    quarter = limit >> FIRST_LOG2
    first = tl.maximum(quarter >> tl.maximum(share - 1, 0), some)
    first = tl.maximum(tl.minimum(first, quarter), tl.minimum(limit, 1))
    return tl.where(batch > 0, tl.minimum(limit, (batch & 0) + 1 << log2), first)


@triton.jit
def open_batch(heap, cls, batch, least, front):
    """A new batch for a stripe of class ``cls``, of up to ``batch`` pages, but at least ``least``
    (int32), first looked for in ``front`` chunks: a stripe word, or 0. The caller is in transit."""
    used = batch * class_slots(cls)
    word = open_pages(heap, cls, batch, least, used, (cls * 0).to(tl.int64) + ATTACHED, front)
    _page, opened = stripe_place(word)
    tl.atomic_add(heap + HELD, opened.to(tl.int64), sem="relaxed")
    return word


@triton.jit
def own_stripe(heap, cls):
    """The stripe of class ``cls`` that this program uses."""
    return stripe_ptr(heap, cls, program_index() & (load_geometry(heap, G_STRIPES) - 1))


@triton.jit
def half_used(word, slots, count):
    """Whether ``count`` tickets from stripe word ``word`` used up the first half of its batch, and
    that is a long one: whoever sees this should :func:`prefetch`."""
    _page, batch = stripe_place(word)
    half = batch * slots >> 1
    credits = stripe_credits(word)
    return (batch >= SPARED) & (credits >= half) & (credits - count < half)


@triton.jit(noinline=True)
def install(heap, cls, ptr, word):
    """Make ``word`` the stripe word or the spare at ``ptr``, of class ``cls``, and dissolve the
    batch that was there; returns 0. The caller is in transit."""
    # What the slots' former owners did, and our page words, before what a ticket's owner does.
    fence(ptr)
    return detach(heap, cls, tl.atomic_xchg(ptr, word, sem="relaxed"))


@triton.jit
def put_aside(heap, cls, stripe, word, keep):
    """Make the batch in ``word``, which only the caller has, the spare of ``stripe``. If another
    is there by now, or without ``keep``, it is dissolved. Credits below zero become 0: it rests.
    The caller is in transit."""
    _page, batch = stripe_place(word)
    if keep & (batch > 0):
        fence(stripe)
        rests = word - tl.minimum(stripe_credits(word), 0).to(tl.int64)
        word = tl.where(atomic_cas(stripe + SPARE, word & 0, rests) == 0, 0, word)
    detach(heap, cls, word)


@triton.jit(noinline=True)
def swap(heap, cls, stripe, need):
    """Make the spare of ``stripe``, which is dry, its batch, if one is ready, and keep up to
    ``need`` slots of it for the caller (int32 scalars). Returns a stripe word of whose credits the
    caller owns the first min(need, credits), or 0. The batch that is used up rests.

    The usual refill, so it is short: few programs of a launch come here, and each has to wait for
    instructions that no other has fetched yet."""
    announced = begin_transit(heap)
    place = atomic_load(stripe + SPARE)
    # (Announced before anything is taken: by what the announcement returned.)
    begun = count_lanes(has_begun(announced)) == 64
    if begun & (stripe_credits(place) > 0):
        if atomic_cas(stripe + SPARE, place, place & 0) == place:
            # What the slots' former owners did, before whoever takes a ticket.
            fence(stripe)
            rest = place - tl.minimum(stripe_credits(place), need).to(tl.int64)
            used = tl.atomic_xchg(stripe, rest, sem="acquire")
            put_aside(heap, cls, stripe, used, place != 0)
        else:
            place = place & 0
    else:
        place = place & 0
    end_transit(heap, (place != 0).to(tl.int32))
    return place


@triton.jit(noinline=True)
def refill(heap, cls, stripe, need):
    """Give ``stripe``, of class ``cls``, which is dry and has no spare to :func:`swap`, a batch and
    keep up to ``need`` slots of it for the caller (int32 scalars). Returns (place, ones, twos): a
    stripe word of whose credits the caller owns the first min(need, credits), 0 and 0; or what
    :func:`draw` returns; or zeros if there is nothing.

    The stripe's two words are taken first. Then its batches are ours alone to renew or to detach,
    and others that come by see it below zero. If the heap fills, slots of detached pages are drawn
    before fresh pages are opened: the stripe then stays without a batch (DRAWING), and everybody
    draws until somebody finds nothing. If the heap does not fill, the batch that is used up rests:
    if all of it is free again when the next one is used up, it is renewed.
    """
    ones = tl.full((), 0, tl.int64)
    twos = ones
    _word, _spare, limit, share, front = announce(heap, stripe)
    # Announced before anything is taken.
    fence(stripe)
    spare = tl.atomic_xchg(stripe + SPARE, ones, sem="acquire")
    old = tl.atomic_xchg(stripe, tl.full((), REFILLING, tl.int64), sem="acquire")
    # A short batch that is renewed again and again never grows: it is replaced by a longer one, or
    # put beside another.
    least_renewed = tl.where(spare != 0, tl.minimum(limit, SPARED), SPARED)
    least_renewed = tl.where(limit == 0, 1, least_renewed)
    # (0 if the heap fills: then slots are drawn, nothing rests, and what is opened is one page.)
    length = next_length(cls, old, limit, share)
    # (Credits of a batch that others have installed meanwhile are kept.)
    place = tl.where(stripe_credits(spare) > 0, spare, 0)
    place = tl.where(stripe_credits(old) > 0, old, place)
    aside = tl.where(stripe_credits(old) > 0, spare, old)
    if place == 0:
        # What was used up longest ago: the one that rests, if there is one.
        rested = tl.where(spare != 0, spare, old)
        page, batch = stripe_place(rested)
        if batch >= least_renewed:
            # (If not all of it is free, a longer one is better, if there may be one.)
            least = tl.where(limit >= batch, batch, batch + 1 >> 1)
            place = renew(heap, cls, rested, least)
        # What of it is not renewed is dissolved, unless it is the old one, which may rest now.
        _page, kept = stripe_place(place)
        aside = tl.where((place != 0) & (spare == 0), 0, old)
        # (If nothing is left, `lost` may name a page behind the heap's last, which has no number.)
        lost = pack_stripe(page + kept, batch - kept, kept * 0)
        rests = (place == 0) & (spare == 0)
        detach(heap, cls, tl.where(rests | (kept == batch), 0, lost))
        if (place == 0) & (need > 0) & (length == 0):
            place, ones, twos = draw(heap, cls, need, need * 0 + 2)
        if place == 0:
            place = open_batch(heap, cls, tl.maximum(length, 1), need * 0 + 1, front)
    mine = tl.minimum(tl.maximum(stripe_credits(place), 0), need)
    drawn = (ones | twos) != 0
    install(heap, cls, stripe, tl.where(drawn, DRAWING, place - mine.to(tl.int64)))
    put_aside(heap, cls, stripe, aside, (drawn == 0) & (length > 0))
    # (All that was put was put by atomics that have returned what decided a branch.)
    end_transit(heap, need * 0 + 1)
    return place, ones, twos


@triton.jit(noinline=True)
def prefetch(heap, cls, stripe):
    """Make a spare ready for ``stripe``, of class ``cls`` (int32 scalar), whose batch is half used;
    returns 0. If all of the resting batch is free again, that is renewed. If its first page is free
    and its last is not, it is left alone: mostly it will be free when it is needed. Or else a new
    one is opened, if there may be one, and what rests is dissolved. (While there is plenty, a new,
    longer one is better than one that rests, or the batches of a stripe would never grow.)"""
    ptr = stripe + SPARE
    word, spare, limit, share, front = announce(heap, stripe)
    _page, batch = stripe_place(word)
    first, rested = stripe_place(spare)
    # (Announced before anything is taken: by what the announcement returned.)
    ready = tl.full((), 0, tl.int64)
    if (batch > 0) & (stripe_credits(spare) <= 0):
        ptr_first = page_word_ptr(heap, first)
        begun = page_out(atomic_load(ptr_first))
        done = page_out(atomic_load(ptr_first + tl.maximum(rested - 1, 0)))
        serves = (rested > 0) & (begun == 0)
        free = serves & (done == 0)
        if (limit > 0) & ((serves == 0) | (free & (share < PLENTY))):
            least = tl.where(free, rested + 1, 1)
            length = next_length(cls, word, limit, share)
            ready = open_batch(heap, cls, length, least, front)
        if free & (ready == 0):
            ready = tl.atomic_xchg(ptr, ready, sem="acquire")
            if stripe_credits(ready) <= 0:
                _page, rested = stripe_place(ready)
                renewed = renew(heap, cls, ready, rested)
                ready = tl.where(renewed != 0, renewed, ready)
        if ready != 0:
            install(heap, cls, ptr, ready)
    end_transit(heap, (ready != 0).to(tl.int32))
    return cls * 0
