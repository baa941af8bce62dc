"""malloc and free: what the functions of ``api`` do on an ordinary heap.

Everything is written once, for a scalar request of the program and for a block of requests, one
per lane (see ``lanes``). A block whose lanes want one size class takes its tickets by a single
subtraction; in other blocks the lanes of each class subtract in groups (see ``groups``), all in one
instruction.

A malloc is two dependent round trips to memory: the ticket and the claim of the live bit. A free
is two: the clearing of the live bit, and the subtraction from the page's account. Everything else
is behind a branch. Why it is correct: ``slabs``; for runs ``pages``; for pages put by, ``shelf``.
"""

import triton
import triton.language as tl

from .atomics import atomic_load, fence
from .batches import half_used, open_whole, own_stripe, prefetch
from .bits import divide, lowest_bit, lsr, mix, popcount, select_bit
from .detached import is_hidden, is_idle, settle_lanes, shelve_filled_lanes
from .groups import alike, from_leader
from .lanes import (
    any_lane,
    count_lanes,
    first_lane,
    is_block,
    lane_index,
    or_lanes,
    pick,
    pick_first,
    rank_of,
    width,
)
from .layout import (
    E_DOUBLE_FREE,
    E_INVALID_ARGUMENT,
    E_INVALID_FREE,
    E_OUT_OF_MEMORY,
    ERRORS,
    FOR_RUN,
    G_PAGES,
    KIND_SHIFT,
    MAX_BATCH,
    MAX_SLOT,
    PAGE_LOG2,
    RUN,
    RUNS,
    address_of,
    class_bytes,
    class_slots,
    is_run,
    is_slab,
    live_words,
    load_base,
    load_geometry,
    page_bits_ptr,
    page_class,
    page_out,
    page_word_ptr,
    place_of,
    program_index,
    size_class,
    slots_of,
    stripe_credits,
    stripe_place,
)
from .live import claim_any, claim_tickets, clear, heard, live_bit, ticket_slot
from .pages import count_taken, release_run
from .payload import as_column
from .record import record_error
from .shelf import announce_put, put_on_shelf, take_shelved
from .slabs import DRY_PAGES, POLLS, WHOLE_PAGES, await_slots, find_run, find_slots, is_drawing


@triton.jit
def report_failed(heap, nbytes, failed):
    """Count the lanes whose requests of ``nbytes`` failed, and record the first of each kind."""
    at = first_lane(failed)
    while at < width(failed):
        size = pick(nbytes, at)
        same = failed & ((nbytes < 0) == (size < 0))
        kind = tl.where(size < 0, E_INVALID_ARGUMENT, E_OUT_OF_MEMORY)
        record_error(heap, at * 0 + kind, size & 0, size, count_lanes(same))
        failed = failed & (same == 0)
        at = first_lane(failed)


# malloc ---------------------------------------------------------------------------------------


@triton.jit
def find_class(heap, cls, stripe, rank, active, need, state):
    """Search slots for the ``need`` active lanes, numbered by ``rank``, of one class, beginning at
    ``stripe``; ``state`` as in ``slabs.find_slots``. Returns the address of the slot that each lane
    was promised, or 0, and whether anything was found."""
    size = class_bytes(cls)
    place, ones, twos = find_slots(heap, cls, stripe, need, state)
    slots = slots_of(size)
    drawn = (ones | twos) != 0
    k = tl.where(drawn, stripe_credits(place) - 1, 0)
    pairs = popcount(twos) << (k + 1)
    total = tl.where(drawn, pairs + (popcount(ones) << k), stripe_credits(place))
    got = active & (rank < total)
    if drawn:
        # Some slots of each page, anywhere in it: first those of the pages in `twos`.
        first, _batch = stripe_place(place)
        paired = rank < pairs
        number = tl.where(paired, rank >> 1, rank - pairs) >> k
        at = select_bit(tl.where(paired, twos, ones), tl.where(got, number, 0))
        # Neighbours from some slot on: they lie in different words, or are different bits of one.
        # (The third share of a page begins at another slot.)
        salt = mix(program_index() * 4096 + tl.where(paired, at, at + 64))
        first_slot = (salt & 0xFFFF) * slots >> 16
        slot = first_slot + (rank & (tl.where(paired, 2, 1) << k) - 1)
        slot = tl.where(slot < slots, slot, slot - slots)
        page = first + at
    else:
        page, slot = ticket_slot(place, rank, size, got)
    addr = address_of(load_base(heap), page, slot * (size >> 4))
    return tl.where(got, addr, 0), total > 0


@triton.jit
def malloc_any(heap, nbytes, active):
    """``api.malloc`` for int64 sizes; inactive lanes give 0."""
    # The geometry first, in one round trip to memory.
    base = load_base(heap)
    live = live_words(heap)
    small = active & (nbytes > 0) & (nbytes <= MAX_SLOT)
    classes = size_class(tl.where(small, nbytes, 1).to(tl.int32))
    cls = tl.maximum(pick_first(classes, small), 0)
    stripe = own_stripe(heap, cls)
    same = small & (classes == cls)
    rank = rank_of(same)
    count = count_lanes(same)
    size = class_bytes(cls)
    word = tl.full((), 0, tl.int64)
    duty = count * 0
    half = count < 0
    whole = half
    alone = count > 0
    got = active & (active == 0)
    page, granule, taken = classes * 0, classes * 0, nbytes * 0
    if is_block(nbytes):
        alone = alone & (count == count_lanes(small))
        whole = alone & (count >= slots_of(size) * WHOLE_PAGES)
    if alone:
        if whole == 0:
            word = tl.atomic_add(stripe, -count.to(tl.int64), sem="acquire")
            duty += ((stripe_credits(word) >= 0) & (stripe_credits(word) < count)).to(tl.int32)
            half = half_used(word, slots_of(size), count)
            if is_block(nbytes):
                # (A scalar waits further down, where it costs fewer registers.)
                if stripe_credits(word) <= 0:
                    # (No whole pages where everybody draws: nobody refills there, so somebody has
                    # to find nothing and take that duty. Nor if the refill is ours, as we were the
                    # first to find no credit left: others wait for it.)
                    whole = (count >= slots_of(size) * DRY_PAGES) & (is_drawing(word) == 0)
                    whole = whole & (duty == 0)
                    if whole == 0:
                        now = word - count.to(tl.int64)
                        word, duty = await_slots(heap, cls, stripe, count, now, duty)
        if is_block(nbytes):
            if whole:
                word = open_whole(heap, cls, count)
        got = same & (rank < stripe_credits(word))
        page, granule, taken = claim_tickets(live, word, rank, count, size, got)
    addr = tl.where(got, address_of(base, page, granule), 0)
    rest = active & (got == 0) & (nbytes != 0)
    unserved = any_lane(rest | (taken != 0))
    # (One bit per class: flags of lanes, kept through all that follows, would cost registers.)
    halves = tl.where(half, (word & 0) + 1 << cls.to(tl.int64), 0)
    if is_block(rest) == 0:
        # (For a scalar, one function does the rest and the prefetch.)
        unserved = unserved | half
    if unserved:
        if is_block(rest):
            lost = got & heard(page, granule, taken)
            crossed = same & (got == 0) & (duty != 0)
            tries = tl.where(alone, small != small, small)
            # (A block of one class has waited already, or found that there are no whole pages.)
            polls = tl.where(alone, 0, count * 0 + POLLS)
            promised = tl.where(lost, addr, 0)
            more, found = malloc_rest(heap, nbytes, classes, rest, promised, tries, crossed, polls)
            halves = halves | found
            addr = tl.where(rest | lost, more, addr)
        else:
            addr = malloc_rest_scalar(heap, nbytes, addr, word, (taken != 0).to(tl.int32))
    if is_block(rest):
        # (Here, not in the code above, whose instructions few programs have fetched.)
        while halves != 0:
            cls = lowest_bit(halves)
            prefetch(heap, cls, own_stripe(heap, cls))
            halves = halves & (halves - 1)
    tl.debug_barrier()
    return addr


@triton.jit(noinline=True)
def find_one(heap, cls, duty):
    """:func:`find_class` for a scalar request, beginning at its own stripe, which is ours to refill
    if ``duty`` is 1: the address it was promised, or 0. (What is computed again here and after the
    call need not be kept across a call, see :func:`malloc_rest_scalar`.)"""
    one = duty * 0 + 1
    stripe = own_stripe(heap, cls)
    promised, _any = find_class(heap, cls, stripe, one * 0, one == 1, one, duty)
    return promised


@triton.jit(noinline=True)
def malloc_rest_scalar(heap, nbytes, addr, word, lost):
    """What :func:`malloc_rest` does, for a scalar request, and the prefetch. ``addr`` is where its
    ticket from stripe word ``word`` led, or 0; with ``lost`` (int32) that slot is somebody else's.
    Returns the address, 0 if there is none. (One function, which computes what it can from its
    arguments: every value that the caller keeps across a call costs it registers.)"""
    one = (word & 0).to(tl.int32) + 1
    cls = size_class(tl.minimum(tl.maximum(nbytes, 1), MAX_SLOT).to(tl.int32))
    promised = tl.where(lost != 0, addr, 0)
    stripe = own_stripe(heap, cls)
    if addr != 0:
        if half_used(word, class_slots(cls), one):
            prefetch(heap, cls, stripe)
    elif nbytes > MAX_SLOT:
        addr = malloc_run(heap, ((nbytes - 1) >> PAGE_LOG2) + 1)
    elif nbytes > 0:
        duty = (stripe_credits(word) == 0).to(tl.int32)
        promised = find_one(heap, cls, duty)
    if promised != 0:
        addr = claim_any(heap, promised, class_bytes(cls), one == 1)
    if (addr == 0) & (nbytes != 0):
        kind = tl.where(nbytes < 0, E_INVALID_ARGUMENT, E_OUT_OF_MEMORY)
        record_error(heap, one * 0 + kind, addr, nbytes, one)
    return addr


@triton.jit
def malloc_rest(heap, nbytes, classes, rest, promised, tries, crossed, polls):
    """Serve the lanes in ``rest``, which got no ticket: those of a block of several classes, which
    have yet to try (``tries``), those that came to a dry stripe, and large and invalid sizes. Serve
    also those that were ``promised`` a slot (an address, or 0) that somebody else has now. Returns
    the addresses in all these lanes (0: there is none), and a word of bits: the classes of which
    tickets taken here used up the first half of a batch. The ``crossed`` lanes' stripes are ours to
    refill; ``polls`` is how often to look at the others before a search, 0 if that was done."""
    patience = polls
    # Claims after waits and searches come late and need a fence: what others did with the slots
    # since the ticket (once its batch was dissolved) has to be acquired, as for a draw.
    late = polls == 0
    halves = rest & (rest == 0)
    pending = rest & (nbytes > 0) & (nbytes <= MAX_SLOT)
    sizes = class_bytes(classes)
    stripes = own_stripe(heap, classes)
    left = True
    while left:
        if any_lane(tries):
            # Tickets for the lanes that try, by one subtraction for each group.
            leader, rank, count = alike(classes, tries)
            leads = tries & (leader == lane_index(classes))
            word = tl.atomic_add(stripes, -count.to(tl.int64), mask=leads, sem="acquire")
            word = from_leader(word, leader)
            credits = stripe_credits(word)
            got = tries & (rank < credits)
            page, slot = ticket_slot(word, rank, sizes, got)
            where = address_of(load_base(heap), page, slot * (sizes >> 4))
            promised = tl.where(got, where, promised)
            pending = pending & (got == 0)
            crossed = crossed | (tries & (got == 0) & (credits >= 0))
            halves = halves | (tries & half_used(word, slots_of(sizes), count))
            tries = pending & (pending == 0)
        # Refills that are ours come first: we may be about to wait for a program that waits for us.
        cls, ours = next_class(classes, pending, crossed)
        left = cls >= 0
        if left & (ours == 0) & (polls > 0):
            # Wait for all classes at once, until one has credits again, but not for ever, and not
            # if there are slots to be drawn.
            late = polls == polls
            waits = polls > 0
            while waits:
                now = atomic_load(stripes, pending)
                tries = pending & (stripe_credits(now) >= 0)
                polls = tl.where(any_lane(pending & is_drawing(now)), 0, polls - 1)
                waits = (polls > 0) & (any_lane(tries) == 0)
        elif left:
            late = polls == polls
            now = pending & (classes == cls)
            state = tl.where(patience > 0, ours, ours * 2 - 1)
            stripe = own_stripe(heap, cls)
            where, found = find_class(heap, cls, stripe, rank_of(now), now, count_lanes(now), state)
            promised = tl.where(where != 0, where, promised)
            # Nothing is left of the class: its lanes fail.
            pending = pending & tl.where(found, where == 0, now == 0)
            crossed = crossed & (now == 0)
            polls = patience
    addr = claim_any(heap, promised, sizes, late)
    large = rest & (nbytes > MAX_SLOT)
    at = first_lane(large)
    while at < width(large):
        run = malloc_run(heap, ((pick(nbytes, at) - 1) >> PAGE_LOG2) + 1)
        addr = tl.where(lane_index(large) == at, run, addr)
        at = first_lane(large & (lane_index(large) > at))
    report_failed(heap, nbytes, rest & (addr == 0))
    used = or_lanes(tl.where(halves, (nbytes & 0) + 1 << classes.to(tl.int64), 0))
    return addr, used


@triton.jit
def next_class(classes, pending, crossed):
    """``(class, ours)``: the class of a ``pending`` lane, or -1 if there is none. Lanes that
    ``crossed``, whose stripes are ours to refill, come first: then ``ours`` is 1, or else 0."""
    lanes: tl.constexpr = width(classes)
    key = tl.where(crossed, 0, lanes * 64) + lane_index(classes) * 64 + classes
    least = tl.min(tl.where(pending, key, lanes * 128), axis=0)
    cls = tl.where(least < lanes * 128, least & 63, -1)
    return cls, (least < lanes * 64).to(tl.int32)


@triton.jit(noinline=True)
def malloc_run(heap, length):
    """Allocate ``length`` pages (int64 scalar): the address, or 0."""
    addr = length * 0
    if length <= load_geometry(heap, G_PAGES):
        pages = length.to(tl.int32)
        page = pages * 0 - 1
        if pages <= MAX_BATCH:
            page = take_shelved(heap, pages, FOR_RUN)
        if page < 0:
            page = find_run(heap, pages)
            if page >= 0:
                count_taken(heap, pages)
        if page >= 0:
            state = length + RUN
            old = tl.atomic_xchg(page_word_ptr(heap, page), state, sem="relaxed")
            # The page word before the live bit, or a wrong free could come between: the bit is
            # made of what the exchange returned, in which nothing is set above the kind.
            ptr, bit = live_bit(live_words(heap), page, page * 0)
            tl.atomic_or(ptr, bit | lsr(old, KIND_SHIFT + 2), sem="relaxed")
            tl.atomic_add(heap + RUNS, length * 0 + 1, sem="relaxed")
            addr = address_of(load_base(heap), page, page * 0)
    return addr


# free -----------------------------------------------------------------------------------------


@triton.jit
def locate(heap, addr, active):
    """``(inside, page, granule)``: whether it is an aligned address of the heap and the lane is
    active; its page and granule, or else 0 and 0."""
    base = load_base(heap)
    size = load_geometry(heap, G_PAGES) << PAGE_LOG2
    inside = active & (addr >= base) & (addr - base < size) & ((addr & 15) == 0)
    page, granule = place_of(base, tl.where(inside, addr, base))
    return inside, page, granule


@triton.jit
def needs_care(word):
    """Page words, after a subtraction, that leave something to do: of runs, or idle or hidden."""
    return is_idle(word) | is_hidden(word) | is_run(word)


@triton.jit
def free_any(heap, addr, active):
    """``api.free`` for int64 addresses."""
    active = active & (addr != 0)
    inside, page, granule = locate(heap, addr, active)
    # (All geometry before the fence, in one round trip to memory.)
    live = live_words(heap)
    ptr = page_word_ptr(heap, page)
    # What this program wrote happens before anything that the next owner does.
    fence(heap + ERRORS)
    freed, speaks, counts, unit = clear(live, page, granule, inside)
    if is_block(freed):
        if unit != 0:
            # (The lanes that speak for slots from the first to the last of a page.)
            whole = speaks & (granule == 0) & ((counts + 1) * unit > 4096)
            speaks = speaks & (shelve_filled_lanes(heap, page, unit << 4, whole) == 0)
    # Out of the account.
    change = counts.to(tl.int64)
    now = tl.atomic_add(ptr, -change, mask=speaks, sem="relaxed") - change
    wrong = active & (freed == 0)
    if any_lane((speaks & needs_care(now)) | wrong):
        if is_block(freed):
            free_rest(heap, addr, page, wrong, now, speaks)
        else:
            free_rest_scalar(heap, addr, page, wrong.to(tl.int32), now)


@triton.jit(noinline=True)
def free_rest_scalar(heap, addr, page, wrong, now):
    """:func:`free_rest` for a scalar; ``wrong`` is an int32. Returns 0."""
    free_rest(heap, addr, page, wrong != 0, now, wrong == 0)
    return page * 0


@triton.jit
def free_rest(heap, addr, page, wrong, now, acts):
    """What is left to do after the subtraction: give back runs, settle pages, report what was
    freed wrongly. The lanes in ``acts`` subtracted, which left their page words ``now``."""
    runs = acts & is_run(now)
    at = first_lane(runs)
    while at < width(runs):
        free_run(heap, pick(page, at), pick(page_out(now), at) + 1)
        at = first_lane(runs & (lane_index(runs) > at))
    asks = acts & (is_idle(now) | is_hidden(now))
    if any_lane(asks):
        settle_lanes(heap, page, now, asks)
    at = first_lane(wrong)
    while at < width(wrong):
        report_wrong(heap, pick(addr, at))
        at = first_lane(wrong & (lane_index(wrong) > at))


@triton.jit(noinline=True)
def report_wrong(heap, addr):
    """Record that ``addr`` (int64 scalar), which is not 0, was freed though nothing lives there: a
    double free if an allocation could have begun there, or else an invalid one. Returns 0."""
    inside, page, granule = locate(heap, addr, addr != 0)
    state = atomic_load(page_word_ptr(heap, page))
    slot = is_slab(state) & begins_slot(state, granule)
    head = is_run(state) & (granule == 0)
    empty = (is_slab(state) | is_run(state)) == 0
    looks = tl.where(inside & empty, 64, 0)
    while looks > 0:
        # Free, or inside a run? We look a few times, because a page that is just being given back
        # has lost its page word and not got its page bit yet.
        bits = atomic_load(page_bits_ptr(heap, page >> 6))
        free = (lsr(bits, (page & 63).to(tl.int64)) & 1) != 0
        head = head | free
        looks = tl.where(free, 0, looks - 1)
    double = inside & (slot | head)
    kind = tl.where(double, E_DOUBLE_FREE, E_INVALID_FREE)
    record_error(heap, page * 0 + kind, addr, addr * 0, page * 0 + 1)
    return page * 0


@triton.jit
def begins_slot(word, granule):
    """Whether a slot of a slab page begins at the granule."""
    size = class_bytes(page_class(word))
    slot = divide(granule << 4, size)
    return (slot * size == granule << 4) & (slot < slots_of(size))


@triton.jit(noinline=True)
def free_run(heap, page, n):
    """Put the run of ``n`` pages at ``page`` (int32 scalars) on the shelf, or else give it back;
    returns 0. The caller has cleared its live bit, so nobody else comes here with it."""
    done = tl.where(n <= MAX_BATCH, 2, 0)
    while done == 2:
        done = put_on_shelf(heap, page, n, n * 0 + FOR_RUN, announce_put(heap, n))
    if done == 0:
        tl.atomic_xchg(page_word_ptr(heap, page), (page * 0).to(tl.int64), sem="relaxed")
        release_run(heap, page, n)
    return page * 0


# usable_size ------------------------------------------------------------------------------------


@triton.jit
def block_start(heap, addr, active):
    """Where a block that the address lies in would begin: at a slot, or at a run. The base of the
    heap for addresses that are not the heap's, and in inactive lanes. (For the interpreter: a
    search, of 64 pages at a time, for the first page of a run.)"""
    inside, page, granule = locate(heap, addr & -16, active)
    state = atomic_load(page_word_ptr(heap, page), inside)
    size = class_bytes(page_class(state))
    slab = is_slab(state)
    first = tl.where(slab, divide(granule << 4, size) * (size >> 4), 0)
    head = page
    # Behind the first page of a run the page words are empty.
    seeks = inside & ((slab | is_run(state)) == 0)
    back = tl.arange(0, 64)[None, :] + 1
    while any_lane(seeks):
        before = as_column(head) - back
        there = (as_column(seeks.to(tl.int32)) != 0) & (before >= 0)
        words = atomic_load(page_word_ptr(heap, tl.maximum(before, 0)), there)
        found = tl.max(tl.where(words != 0, before, -1), axis=1)
        if is_block(head) == 0:
            found = tl.max(found, axis=0)
        head = tl.where(seeks, tl.where(found >= 0, found, tl.maximum(head - 64, 0)), head)
        seeks = seeks & (found < 0) & (head > 0)
    return address_of(load_base(heap), head, first)


@triton.jit
def usable_any(heap, addr, active):
    """Bytes that may be used at int64 addresses; 0 where nothing lives, and in inactive lanes."""
    inside, page, granule = locate(heap, addr, active)
    ptr, bit = live_bit(live_words(heap), page, granule)
    live = inside & ((atomic_load(ptr, inside) & bit) != 0)
    state = atomic_load(page_word_ptr(heap, page), inside)
    slot = class_bytes(page_class(state)).to(tl.int64)
    run = page_out(state).to(tl.int64) << PAGE_LOG2
    return tl.where(live, tl.where(is_slab(state), slot, run), 0)
