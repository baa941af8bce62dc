"""Slabs: pages cut into slots of one size class, and the stripes through which they are used.

Account first, then track. The account of a page is

    count + credits of its stripe + accounted slots = slots of the page

where an accounted slot is live, about to be claimed by a malloc that holds a ticket, or about to
be counted by a free that has cleared its bit. A ticket is one subtraction from a stripe word; it
promises a clear slot bit in the stripe's batch of pages, which the malloc then claims.

Shared words and their writers
    *Stripe word* (class, stripe): malloc subtracts credits; a refill or a flush exchanges it; a
    steal takes credits by compare-and-swap.
    *Page word*: free adds pins and counts; open, draw, renew, detach, settle and unpublish change
    the state.
    *Class hint*: row ORDERS + class, a bit per chunk. PUBLISHED in a page word promises it.
Linearisation
    malloc: the subtraction that returned enough credits. free: the addition to count.
Who may do what
    Credits of a batch exist in one stripe only; its pages are ATTACHED and nobody else draws from
    them. Detaching puts unused credits back into the counts. A page is retired by the
    compare-and-swap of its word from (detached, count = all, pins = 0) to FREE, so nobody is
    inside it: a malloc would be accounted, a free would have pinned it.
Why pins
    A valid free needs none: its own slot keeps count below "all". A *second* free of the same
    address has no slot; without a pin the page could be retired and cut anew between its look at
    the page word and its clearing of the bit, and it would clear a stranger's bit.
Order
    `fence` orders; the atomics are relaxed, but for the ticket and the claim of a single lane,
    which acquire and so replace the last fence. Free fences before it touches anything, so the
    payload happens before the clearing of the bit and before the count. Malloc fences after its
    claim, so it comes after the clearing of the bit that it claimed. Across a retirement: count
    -> fence of the retirer -> page bits -> fence of the refill -> stripe word -> ticket -> fence
    of the malloc. Credits that go back (detach) pass a fence too.
Reuse (ABA)
    Compare-and-swaps of page and stripe words compare the whole state; an equal state is an
    equal right, whatever happened in between.
Progress
    Lock-free. The program whose subtraction took a stripe below zero refills it; others wait for
    it a bounded time (it is running, not waiting to be scheduled) and then refill themselves.
"""

import triton
import triton.language as tl

from .atomics import atomic_cas, atomic_load, fence
from .bits import lowest_bit, lsr, mix, popcount, select_bit
from .layout import (
    ATTACHED,
    CLASS_SHIFT,
    COUNT_MASK,
    G_MAX_BATCH,
    G_STRIPES,
    GRANTED,
    KIND_SHIFT,
    KIND_SLAB,
    NUM_CLASSES,
    ORDERS,
    PUBLISHED,
    STRIPE_STRIDE,
    STRIPES,
    USED,
    class_slots,
    hint_ptr,
    load_geometry,
    pack_stripe,
    page_class,
    page_count,
    page_kind,
    page_pins,
    page_word_ptr,
    program_index,
    stripe_credits,
    stripe_place,
    stripe_ptr,
)
from .pages import (
    FAR,
    collect,
    count_pages,
    enter_transit,
    first_hinted,
    give_pages,
    lane_bits,
    leave_transit,
    take_pages,
)

FLUSH_IDLE = tl.constexpr(0)  # only batches with a page that is free as a whole
FLUSH_FREE = tl.constexpr(1)  # every batch with a free slot
FLUSH_ALL = tl.constexpr(2)

POLLS = tl.constexpr(1024)
REFILLING = tl.constexpr(-1)  # stripe word without a batch and below zero: somebody refills


@triton.jit
def is_slab(word):
    return page_kind(word) == KIND_SLAB


@triton.jit
def is_idle(word):
    """Page words of slabs that nothing is in and nobody uses: they can be retired."""
    detached = is_slab(word) & ((word & ATTACHED) == 0)
    return detached & (page_pins(word) == 0) & (page_count(word) == class_slots(page_class(word)))


@triton.jit
def is_hidden(word):
    """Page words of detached slabs with free slots that no search can find yet."""
    return is_slab(word) & ((word & (ATTACHED | PUBLISHED)) == 0) & (page_count(word) > 0)


@triton.jit(noinline=True)
def settle(heap, chunk, bits):
    """Do what the page words of one chunk (int32; ``bits`` says which pages) ask for: retire
    those that are idle, publish those with free slots that no search would find. Returns 0.

    Whoever makes a page idle or hidden by its change of the page word calls this. The state is
    read anew; a failed compare-and-swap means it changed again, so it is looked at again. In
    transit meanwhile: a retired page is in hand until its bit is set, and a page whose flag is
    set is hidden until its hint is, although other frees rely on the flag and return. The flag
    comes before the hint, so that :func:`unpublish` sees either the flag or our hint behind its
    clearing.
    """
    lane = tl.arange(0, 64)
    word_ptr = page_word_ptr(heap, chunk * 64 + lane)
    mine = (lsr(bits, lane.to(tl.int64)) & 1) != 0
    bit = tl.full((64,), 1, tl.int64) << (chunk & 63).to(tl.int64)
    retired = bits & 0
    enter_transit(heap)
    going = bits != 0
    while going:
        word = atomic_load(word_ptr, mine)
        idle = mine & is_idle(word)
        hidden = mine & is_hidden(word) & (idle == 0)
        expected = tl.where(idle | hidden, word, 0)
        desired = tl.where(hidden, word | PUBLISHED, 0)
        won = atomic_cas(word_ptr, expected, desired) == expected
        # Also: what the frees came after that made pages idle is now before the give.
        fence(heap + USED)
        row = hint_ptr(heap, ORDERS + page_class(word), chunk)
        tl.atomic_or(row, bit, mask=hidden & won, sem="relaxed")
        retired = retired | lane_bits(idle & won)
        mine = (idle | hidden) & (won == 0)
        going = lane_bits(mine) != 0
    if retired != 0:
        count_pages(heap, -popcount(retired))
        give_pages(heap, chunk + lane * 0, tl.where(lane == 0, retired, 0), lane == 0)
    leave_transit(heap, chunk * 0 + 1)
    return chunk * 0


@triton.jit
def unissued_slots(place_batch, credits, slots, lane):
    """Of each page ``lane`` of a batch, how many slots no ticket was given for (int32).

    Tickets go through a batch from its first page on, so what is left is at its end.
    """
    left = tl.maximum(credits, 0).to(tl.int32) - (place_batch - 1 - lane) * slots
    return tl.minimum(tl.maximum(left, 0), slots)


@triton.jit(noinline=True)
def detach(heap, cls, word):
    """Dissolve the batch of a stripe word that was exchanged for another; returns 0.

    Unused credits go back into the counts of its pages. The caller is in transit.
    """
    page, batch, _fresh = stripe_place(word)
    if batch > 0:
        lane = tl.arange(0, 64)
        slots = class_slots(cls)
        credits = stripe_credits(word)
        unused = tl.maximum(credits, 0)
        tl.atomic_add(heap + GRANTED + cls, -unused, sem="relaxed")
        # The credits' former owners happen before whoever draws them again.
        fence(heap + GRANTED + cls)
        back = unissued_slots(batch, credits, slots, lane).to(tl.int64)
        change = back + (PUBLISHED - ATTACHED)
        mine = lane < batch
        ptr = page_word_ptr(heap, page + tl.where(mine, lane, 0))
        now = tl.atomic_add(ptr, change, mask=mine, sem="relaxed") + change
        # The flag before the hint, as in settle.
        fence(heap + GRANTED + cls)
        bit = tl.full((), 1, tl.int64) << (page >> 6 & 63).to(tl.int64)
        tl.atomic_or(hint_ptr(heap, ORDERS + cls, page >> 6), bit, sem="relaxed")
        idle = lane_bits(mine & is_idle(now))
        if idle != 0:
            settle(heap, page >> 6, idle << (page & 63).to(tl.int64))
    return page * 0


@triton.jit(noinline=True)
def unpublish(heap, cls, chunk):
    """Clear the hint of class ``cls`` for a chunk in which nothing can be drawn; returns 0.

    PUBLISHED promises the hint, so it goes first, page by page, and a page that gets a free slot
    meanwhile is published again by that free (settle). A page that was published behind our back
    brings the hint back. In transit meanwhile, as in ``pages.drop_hints``.
    """
    lane = tl.arange(0, 64)
    hint = hint_ptr(heap, ORDERS + cls, chunk)
    bit = tl.full((), 1, tl.int64) << (chunk & 63).to(tl.int64)
    ptr = page_word_ptr(heap, chunk * 64 + lane)
    enter_transit(heap)
    words = atomic_load(ptr)
    empty = is_published(words, cls) & (page_count(words) == 0)
    expected = tl.where(empty, words, 0)
    atomic_cas(ptr, expected, tl.where(empty, words ^ PUBLISHED, 0))
    tl.atomic_and(hint, bit ^ -1, sem="relaxed")
    fence(hint)
    again = tl.max(is_published(atomic_load(ptr), cls).to(tl.int32), axis=0)
    if again != 0:
        tl.atomic_or(hint, bit, sem="relaxed")
    leave_transit(heap, again)
    return again


@triton.jit
def is_published(words, cls):
    return is_slab(words) & (page_class(words) == cls) & ((words & PUBLISHED) != 0)


@triton.jit
def drawable_slots(words, cls):
    """Free slots of page words that are detached slabs of class ``cls``; 0 for all others."""
    fits = is_slab(words) & (page_class(words) == cls) & ((words & ATTACHED) == 0)
    return tl.where(fits, page_count(words), 0)


@triton.jit(noinline=True)
def draw(heap, cls, least):
    """Attach the page with most free slots of a hinted chunk: a stripe word, or 0.

    A page with fewer than ``least`` free slots does not count; ``least`` > 1 looks at one chunk
    only, 1 searches them all and drops the hints of those that have nothing. On success the
    caller holds all free slots of the page as credits, and is once more in transit.
    """
    lane = tl.arange(0, 64)
    row = ORDERS + cls
    salt = mix(program_index())
    result = tl.full((), 0, tl.int64)
    index, hints = first_hinted(heap, row, tl.full((), 0, tl.int32))
    while (index != FAR) & (result == 0):
        chunk = index * 64 + select_bit(hints, salt % popcount(hints))
        ptr = page_word_ptr(heap, chunk * 64 + lane)
        words = atomic_load(ptr)
        counts = drawable_slots(words, cls)
        most = tl.max(counts, axis=0)
        if (most == 0) & (least == 1):
            unpublish(heap, cls, chunk)
        if most >= least:
            at = tl.min(tl.where(counts == most, lane, 64), axis=0)
            word = tl.sum(tl.where(lane == at, words, 0), axis=0)
            enter_transit(heap)
            attached = (word & ((COUNT_MASK | PUBLISHED) ^ -1)) | ATTACHED
            page = chunk * 64 + at
            old = atomic_cas(page_word_ptr(heap, page), word, attached)
            if old == word:
                result = pack_stripe(page, at * 0 + 1, at * 0, most)
            else:
                leave_transit(heap, at * 0)
        salt = mix(salt)
        if (least > 1) & (most < least):
            index = tl.full((), FAR, tl.int32)
        elif result == 0:
            index, hints = first_hinted(heap, row, tl.full((), 0, tl.int32))
    return result


@triton.jit(noinline=True)
def renew(heap, cls, old):
    """Make the pages at the front of a dry batch that are free again into a fresh batch.

    ``old`` is a stripe word that only the caller has. Returns a stripe word for the first k of
    its pages, or 0 (k = 0) if less than half would do. Tickets go through a batch from the front,
    so under churn all but its last pages are free again when it runs dry.
    """
    lane = tl.arange(0, 64)
    page, batch, _fresh = stripe_place(old)
    slots = class_slots(cls)
    mine = lane < batch
    ptr = page_word_ptr(heap, page + tl.where(mine, lane, 0))
    words = atomic_load(ptr, mine)
    whole = mine & (page_pins(words) == 0) & (page_count(words) == slots)
    front = lowest_bit(lane_bits(whole) ^ -1)
    result = tl.full((), 0, tl.int64)
    if (front * 2 >= batch) & (front > 0):
        whole = lane < front
        expected = tl.where(whole, words, 0)
        won = atomic_cas(ptr, expected, tl.where(whole, words - slots, 0)) == expected
        if lane_bits(whole & (won == 0)) != 0:
            # A wrong free has pinned a page meanwhile: undo.
            tl.atomic_add(ptr, slots.to(tl.int64) + words * 0, mask=whole & won, sem="relaxed")
        else:
            result = pack_stripe(page, front, front * 0 + 1, front * slots)
    return result


@triton.jit(noinline=True)
def open_batch(heap, cls, previous):
    """Take fresh pages and make them slabs: a stripe word, or 0. The caller is in transit.

    A batch grows fourfold over the stripe's ``previous`` length: little used classes stay small,
    and busy ones refill rarely.
    """
    cap = load_geometry(heap, G_MAX_BATCH).to(tl.int32)
    batch = tl.minimum(tl.maximum(previous * 4, 1), cap)
    page = tl.full((), -1, tl.int32)
    while (page < 0) & (batch > 0):
        page = take_pages(heap, batch)
        if page < 0:
            batch = batch >> 1
    result = tl.full((), 0, tl.int64)
    if page >= 0:
        lane = tl.arange(0, 64)
        mine = lane < batch
        # Added, not stored: a free of a wrong address may have pinned the page.
        slab = (cls.to(tl.int64) << CLASS_SHIFT) + (ATTACHED + (KIND_SLAB << KIND_SHIFT))
        ptrs = page_word_ptr(heap, page + tl.where(mine, lane, 0))
        tl.atomic_add(ptrs, slab, mask=mine, sem="relaxed")
        result = pack_stripe(page, batch, batch * 0 + 1, batch * class_slots(cls))
    return result


@triton.jit
def steal(heap, cls, need):
    """Tickets for up to ``need`` slots from whichever stripe of the class has credits, or 0.

    By compare-and-swap, never below zero: who takes a stripe below zero must refill it.
    """
    lane = tl.arange(0, 64)
    stripes = load_geometry(heap, G_STRIPES).to(tl.int32)
    ptr = stripe_ptr(heap, cls, lane)
    result = tl.full((), 0, tl.int64)
    at = need * 0
    while (result == 0) & (at < 64):
        words = atomic_load(ptr, lane < stripes)
        at = tl.min(tl.where((lane < stripes) & (stripe_credits(words) > 0), lane, 64), axis=0)
        if at < 64:
            word = tl.sum(tl.where(lane == at, words, 0), axis=0)
            rest = word - tl.minimum(stripe_credits(word), need.to(tl.int64))
            if atomic_cas(stripe_ptr(heap, cls, at), word, rest) == word:
                result = word
    return result


@triton.jit(noinline=True)
def flush(heap, index, end, mode):
    """Dissolve the batches of stripes [index, end) (int32, counted through all classes) so that
    their free slots and pages can be found by everybody. ``mode`` is a FLUSH constant. Returns
    how many were dissolved."""
    lane = tl.arange(0, 64)
    stripes = load_geometry(heap, G_STRIPES).to(tl.int32)
    dissolved = end * 0
    while index < end:
        at = index + lane
        words = atomic_load(heap + STRIPES + at * STRIPE_STRIDE, at < end)
        _pages, batches, _flags = stripe_place(words)
        left = (batches > 0) & (at < end)
        next_at = tl.min(tl.where(left, at, FAR), axis=0)
        while next_at < FAR:
            word = tl.sum(tl.where(at == next_at, words, 0), axis=0)
            cls = next_at // stripes
            page, batch, _fresh = stripe_place(word)
            slots = class_slots(cls)
            mine = lane < batch
            states = atomic_load(page_word_ptr(heap, page + tl.where(mine, lane, 0)), mine)
            free = page_count(states) + unissued_slots(batch, stripe_credits(word), slots, lane)
            some = tl.max(tl.where(mine, free, 0), axis=0)
            if (mode == FLUSH_ALL) | ((mode == FLUSH_FREE) & (some > 0)) | (some >= slots):
                enter_transit(heap)
                ptr = heap + STRIPES + next_at * STRIPE_STRIDE
                old = tl.atomic_xchg(ptr, tl.full((), 0, tl.int64), sem="relaxed")
                detach(heap, cls, old)
                leave_transit(heap, batch * 0 + 1)
                dissolved += 1
            left = left & (at > next_at)
            next_at = tl.min(tl.where(left, at, FAR), axis=0)
        index += 64
    return dissolved


@triton.jit
def find_batch(heap, cls, old, again):
    """A batch for a stripe that had ``old``: renewed, drawn or opened. Returns a stripe word or
    0, how many pages at the front of ``old`` it took over, and how many are new.

    A busy stripe (long batches) does not care for single pages with few free slots while fresh
    ones are to be had. ``again`` != 0: a search failed already; then nothing is announced unless
    a page may be free, for programs that find the heap exhausted must leave each other in peace,
    or none would see the quiet pass that ends its search.
    """
    _page, previous, _fresh = stripe_place(old)
    kept = previous * 0
    opened = previous * 0
    word = tl.full((), 0, tl.int64)
    if (previous > 0) & (stripe_credits(old) <= 0):
        word = renew(heap, cls, old)
        if word != 0:
            _first, kept, _new = stripe_place(word)
            enter_transit(heap)
    least = tl.maximum(class_slots(cls) * tl.maximum(previous, 1) >> 3, 2)
    if (word == 0) & (previous <= 8):
        word = draw(heap, cls, least)
    if word == 0:
        index = previous * 0
        if again != 0:
            index, _hints = first_hinted(heap, index, index)
        if index != FAR:
            enter_transit(heap)
            word = open_batch(heap, cls, previous)
            if word == 0:
                leave_transit(heap, previous * 0)
            _first, opened, _new = stripe_place(word)
    if word == 0:
        word = draw(heap, cls, previous * 0 + 1)
    return word, kept, opened


@triton.jit(noinline=True)
def refill(heap, cls, ptr, need, again):
    """Find slots for a dry stripe, keep up to ``need`` for the caller, install the rest.

    Returns a stripe word as a ticket would have (the caller owns min(need, credits) of it), or 0.
    The stripe is taken away from everybody first: its batch is then ours alone to renew or to
    detach, and others that come by see it below zero and wait.
    """
    old = tl.full((), 0, tl.int64)
    if again == 0:
        enter_transit(heap)
        old = tl.atomic_xchg(ptr, tl.full((), REFILLING, tl.int64), sem="relaxed")
        fence(ptr)
    page, batch, fresh = stripe_place(old)
    word = old
    kept = batch
    opened = batch * 0
    if stripe_credits(old) <= 0:
        word, kept, opened = find_batch(heap, cls, old, again)
    else:
        # Somebody refilled it before us.
        enter_transit(heap)
        tl.atomic_add(heap + GRANTED + cls, -stripe_credits(old), sem="relaxed")
    credits = tl.maximum(stripe_credits(word), 0)
    tl.atomic_add(heap + GRANTED + cls, credits, sem="relaxed")
    if (again == 0) | (word != 0):
        # The slots' former owners, and our page words, happen before whoever takes a ticket.
        fence(ptr)
        installed = word - tl.minimum(credits, need.to(tl.int64))
        other = tl.atomic_xchg(ptr, installed, sem="relaxed")
        detach(heap, cls, other)
        if kept < batch:
            rest = pack_stripe(page + kept, batch - kept, fresh, tl.minimum(credits, 0))
            detach(heap, cls, rest)
        if opened > 0:
            count_pages(heap, opened)
    if word != 0:
        leave_transit(heap, need * 0 + 1)
    if again == 0:
        leave_transit(heap, ((batch > 0) | (word != 0)).to(tl.int32))
    return word


@triton.jit(noinline=True)
def more_tickets(heap, cls, need, crossed):
    """Tickets for up to ``need`` slots of class ``cls`` when the stripe was dry (int32 scalars).

    ``crossed`` != 0: our subtraction took the stripe below zero, so the refill is ours. Returns a
    stripe word of which the caller owns the first min(need, credits) tickets, or 0 after two
    quiet passes (nothing found, nothing put back, nothing in hand): the memory is exhausted. Two,
    because a slot freed into an attached page behind our back is found by the second.
    """
    stripe = program_index() & (load_geometry(heap, G_STRIPES).to(tl.int32) - 1)
    ptr = stripe_ptr(heap, cls, stripe)
    result = tl.full((), 0, tl.int64)
    polls = tl.where(crossed != 0, 0, POLLS)
    while polls > 0:
        polls -= 1
        if stripe_credits(atomic_load(ptr)) >= 0:
            old = tl.atomic_add(ptr, -need.to(tl.int64), sem="relaxed")
            if stripe_credits(old) > 0:
                result = old
            # At 0 it was we who took it below: the refill is ours after all.
            polls = tl.where(stripe_credits(old) >= 0, 0, polls)
    quiet = need * 0
    before = tl.full((), -1, tl.int64)
    passes = need * 0
    while (result == 0) & (quiet < 2):
        result = refill(heap, cls, ptr, need, passes)
        passes += 1
        if result == 0:
            result = steal(heap, cls, need)
        if result == 0:
            stripes = load_geometry(heap, G_STRIPES).to(tl.int32)
            gained = flush(heap, cls * stripes, (cls + 1) * stripes, need * 0 + FLUSH_FREE)
            gained += flush(heap, need * 0, stripes * NUM_CLASSES, need * 0 + FLUSH_IDLE)
            after = collect(heap)
            same = (gained == 0) & (after >= 0) & (after == before)
            quiet = tl.where(same, quiet + 1, 0)
            before = after
    # What the stripe's refill came after happens before what the caller does with the slots.
    fence(ptr)
    return result


@triton.jit(noinline=True)
def take_run(heap, n):
    """Take ``n`` pages (int32) for a large allocation: the first page, or -1 when exhausted
    (two quiet passes, as in :func:`more_tickets`)."""
    page = tl.full((), -1, tl.int32)
    quiet = n * 0
    before = tl.full((), -1, tl.int64)
    while (page < 0) & (quiet < 2):
        page = take_pages(heap, n)
        if page < 0:
            stripes = load_geometry(heap, G_STRIPES).to(tl.int32)
            gained = flush(heap, n * 0, stripes * NUM_CLASSES, n * 0 + FLUSH_IDLE)
            after = collect(heap)
            same = (gained == 0) & (after >= 0) & (after == before)
            quiet = tl.where(same, quiet + 1, 0)
            before = after
    if page >= 0:
        count_pages(heap, n)
    return page
