"""Slabs: pages cut into slots of one size class, and how slots are handed out.

Account first, then track. The account of a page is

    out = credits of its stripe + accounted slots                                          (A)

where *out* is in the page word, and an accounted slot is live, or promised to a malloc that will
claim its live bit, or cleared by a free that will subtract it. Slots are promised in three ways:

- A *ticket*: a subtraction from the stripe word of a class. The batch of a stripe begins with all
  its slots clear, and ticket i names slot i: neighbouring lanes get neighbouring addresses.
- A *draw*: an addition to the page word of a detached page, by compare-and-swap, promises some of
  its clear slots. Many draws, frees and late claims may be at work in one page.
- *Whole pages*, opened for a program that can fill them. Its tickets are nobody else's.

Shared words and their writers
    *Stripe word* (class, stripe): malloc subtracts credits; a refill or a flush exchanges it;
    take_duty (of a refill) and limit_debt compare and swap it.
    *Spare* (class, stripe): ``batches`` exchanges or compares and swaps it; a flush exchanges it.
    *Page word*: free subtracts; ``batches``, ``detached`` and ``shelf`` change the state.
    *Class hint*: row ORDERS + class, a bit per chunk. PUBLISHED in a page word promises it.
Linearisation
    malloc: the subtraction that returned enough credits, or the compare-and-swap of a draw, or
    the take of whole pages, from the page level or the shelf. free: the subtraction from the page
    word, or the compare-and-swap that puts filled pages on the shelf.
Who may do what
    Credits of a batch exist in one stripe word or spare only; its pages are ATTACHED, not
    PUBLISHED, and nobody draws from them. A page is retired by the compare-and-swap of its word
    from (detached, out = 0) to FREE: by (A) nobody has a slot, a promise or a credit in it, so
    nobody is inside. A free that finds its live bit clear touches no page word.
Order
    `fence` orders. The atomics are relaxed, except that tickets acquire, and so do most exchanges
    and takes by one lane. A free fences before it clears the live bit, so what was done with the
    payload happens before that and before the subtraction. From there to the next owner the order
    passes either through the bit (a draw: the claim reads what the free cleared, and malloc fences
    behind it), or through subtraction -> fence of a refill, prefetch or retirement -> stripe word
    or page bits -> ticket or take, which acquires; late claims have a fence behind them.
Reuse (ABA)
    Compare-and-swaps of page words and spares compare the whole state; an equal state is an equal
    right, whatever happened in between.
Progress
    Lock-free. The program whose subtraction took a stripe from zero or above to below zero refills
    it; others draw, or wait for it a bounded time (it runs already, so it needs no place on the
    device that they hold), and then help themselves.
"""

import triton
import triton.language as tl

from .atomics import atomic_cas, atomic_load
from .batches import REFILLING, detach, open_whole, refill, swap, unissued_slots
from .detached import draw
from .layout import (
    G_STRIPES,
    NUM_CLASSES,
    SPARE,
    STRIPES,
    class_slots,
    load_geometry,
    page_out,
    page_word_ptr,
    program_count,
    stripe_credits,
    stripe_place,
)
from .pages import FAR, collect, end_transit, enter_transit, first_hinted, lacks_pages, take_pages
from .shelf import flush_shelf

FLUSH_IDLE = tl.constexpr(0)  # only batches with a page that is free as a whole
FLUSH_FREE = tl.constexpr(1)  # every batch with a free slot
FLUSH_ALL = tl.constexpr(2)

POLLS = tl.constexpr(256)  # how often a wait looks at a dry stripe
WAITS = tl.constexpr(4)  # how many such waits find_slots makes before it looks everywhere
WHOLE_PAGES = tl.constexpr(2)  # a program that can fill so many pages at once gets its own
DRY_PAGES = tl.constexpr(1)  # or so many, if the stripe is dry
MAX_DEBT = tl.constexpr(1 << 30)  # how far below zero credits may be before limit_debt acts


@triton.jit(noinline=True)
def next_batch(heap, index, end, mode):
    """The first batch in [index, end) that ``mode`` (a FLUSH constant) wants dissolved; FAR if
    there is none. Batches are numbered (int32) through all classes and their stripes, two for each
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
    """Dissolve those of batches [index, end), numbered as in :func:`next_batch`, that ``mode`` (a
    FLUSH constant) wants, so that everybody can find their free slots and pages. Returns how many
    were dissolved."""
    dissolved = end * 0
    while index < end:
        index = next_batch(heap, index, end, mode)
        if index < FAR:
            enter_transit(heap)
            ptr = heap + STRIPES + index * SPARE
            # (Acquire: what the slots' former owners did happens before what those who draw do.)
            old = tl.atomic_xchg(ptr, tl.full((), 0, tl.int64), sem="acquire")
            detach(heap, index // (load_geometry(heap, G_STRIPES) * 2).to(tl.int32), old)
            end_transit(heap, index * 0 + 1)
            dissolved += 1
            index += 1
    return dissolved


@triton.jit(noinline=True)
def flush_all(heap, cls, mode, most):
    """Make findable what stripes and shelf keep: with ``mode`` FLUSH_FREE, the free slots of class
    ``cls``; then, or with FLUSH_IDLE, free pages of all classes, and those at up to ``most`` places
    of the shelf (int32 scalars). Returns 0 if there was nothing."""
    gained = mode * 0
    while mode >= FLUSH_IDLE:
        stripes = load_geometry(heap, G_STRIPES).to(tl.int32)
        first = tl.where(mode == FLUSH_FREE, cls, 0) * stripes * 2
        end = tl.where(mode == FLUSH_FREE, cls + 1, NUM_CLASSES) * stripes * 2
        gained += flush(heap, first, end, mode)
        mode -= 1
    return gained + flush_shelf(heap, most)


@triton.jit
def is_drawing(word):
    """Whether the stripe word is DRAWING, less what requests have subtracted since."""
    page, batch = stripe_place(word)
    return (stripe_credits(word) < 0) & (batch == 0) & (page > 0)


@triton.jit
def limit_debt(ptr, word):
    """Set the credits at ``ptr`` back to just below zero if the stripe word there, ``word`` when it
    was last looked at, is very far below. While everybody draws, nobody refills, and every request
    subtracts: in the end the credits would wrap."""
    if stripe_credits(word) < -MAX_DEBT:
        atomic_cas(ptr, word, word - stripe_credits(word).to(tl.int64) - 1)


@triton.jit(noinline=True)
def await_slots(heap, cls, stripe, need, now, duty):
    """Get ``need`` slots (int32) from ``stripe``, which was dry, its word being ``now``, when we
    came by. With ``duty`` (1 or 0) it is ours to refill: that is done here if its spare is ready.
    Without, wait. Returns (place, duty): a stripe word as a subtraction returned it, or 0; and 1 if
    a refill is left to us, because we took the stripe below zero. Both 0: there may be slots to be
    drawn, or it takes too long."""
    place = tl.full((), 0, tl.int64)
    polls = tl.where(duty != 0, 0, need * 0 + POLLS)
    if duty != 0:
        place = swap(heap, cls, stripe, need)
        duty = tl.where(place != 0, 0, duty)
    while polls > 0:
        polls -= 1
        if is_drawing(now):
            limit_debt(stripe, now)
            polls = polls * 0
        else:
            now = atomic_load(stripe)
            if stripe_credits(now) >= 0:
                now = tl.atomic_add(stripe, -need.to(tl.int64), sem="acquire")
                credits = stripe_credits(now)
                place = tl.where(credits > 0, now, place)
                duty = ((credits >= 0) & (credits < need)).to(tl.int32)
                polls = tl.where(credits >= 0, 0, polls)
    return place, duty


@triton.jit(noinline=True)
def take_duty(stripe):
    """Make the refill of ``stripe`` ours if it is nobody's: 1 or 0."""
    now = atomic_load(stripe)
    duty = tl.full((), 0, tl.int32)
    if is_drawing(now):
        duty += (atomic_cas(stripe, now, tl.full((), REFILLING, tl.int64)) == now).to(tl.int32)
    return duty


@triton.jit(noinline=True)
def find_slots(heap, cls, stripe, need, state):
    """Slots for ``need`` requests of class ``cls`` (int32 scalars) when ``stripe`` had no tickets.
    ``state`` 1: our subtraction took the stripe below zero, so the refill is ours; -1: we have
    waited for tickets, or tried to get whole pages, and want more; 0: neither. Returns (place,
    ones, twos), as :func:`refill` does.

    First at that stripe, if we have not waited there; then everywhere, until something is found or
    two passes in a row were quiet (nothing found, nothing put back, nothing in hand): then all are
    0, the memory is exhausted. Two, because slots also move without transit: one that is freed
    behind the first pass is seen by the second (docs/design.md, "Two quiet passes").
    """
    place = tl.full((), 0, tl.int64)
    ones = place
    twos = place
    before = tl.full((), -1, tl.int64)
    quiet = need * 0
    duty = tl.maximum(state, 0)
    waits = tl.where(duty == 0, WAITS, 0)
    waited = state < 0
    if (state == 0) & (need >= class_slots(cls) * WHOLE_PAGES):
        place = open_whole(heap, cls, need)
        # (Programs that are served by this have subtracted, too, and never come to await_slots.)
        now = atomic_load(stripe)
        if is_drawing(now):
            limit_debt(stripe, now)
    while (place == 0) & (quiet < 2):
        everywhere = (waits <= 0) & (duty == 0)
        if (waits > 0) & (waited == 0):
            waits -= 1
            dry = tl.full((), REFILLING, tl.int64)
            place, duty = await_slots(heap, cls, stripe, need, dry, need * 0)
        waited = waited & (waited == 0)
        if (place | duty) == 0:
            looks = tl.where(everywhere, 0, 2)
            place, ones, twos = draw(heap, cls, need, looks)
            if (place == 0) & (everywhere == 0):
                duty = take_duty(stripe)
        if duty != 0:
            # If we have got tickets already, the refill keeps nothing for us.
            wants = tl.where(place == 0, need, 0)
            found = swap(heap, cls, stripe, wants)
            if found == 0:
                found, ones, twos = refill(heap, cls, stripe, wants)
            place = tl.where(place == 0, found, place)
            duty = need * 0
            waits = need * 0
        elif everywhere & (place == 0):
            # Nothing is announced unless a page may be free: programs that find the heap exhausted
            # must leave each other in peace, or none would see the quiet passes that end this.
            if lacks_pages(heap, need * 0 + 1) == 0:
                index, _hints = first_hinted(heap, need * 0, need * 0)
                if index != FAR:
                    place = open_whole(heap, cls, need)
            if place == 0:
                gained = flush_all(heap, cls, need * 0 + FLUSH_FREE, need * 0 + 1)
                after = collect(heap)
                same = (gained == 0) & (after >= 0) & (after == before)
                quiet = tl.where(same, quiet + 1, 0)
                before = after
    return place, ones, twos


@triton.jit(noinline=True)
def find_run(heap, n):
    """Take ``n`` pages (int32) for a large allocation: the first page; below 0 when exhausted
    (two quiet passes, as in :func:`find_slots`)."""
    page = tl.full((), -1, tl.int32)
    quiet = n * 0
    before = tl.full((), -1, tl.int64)
    while (page < 0) & (quiet < 2):
        page = take_pages(heap, n, program_count())
        if page < 0:
            gained = flush_all(heap, n * 0, n * 0 + FLUSH_IDLE, n * 0 + FAR)
            after = collect(heap)
            same = (gained == 0) & (after >= 0) & (after == before)
            quiet = tl.where(same, quiet + 1, 0)
            before = after
    return page
