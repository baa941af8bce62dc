"""malloc: a magazine, whole pages, lines, then a search; see ``lines``."""

import triton
import triton.language as tl

from . import lanes, layout
from .atomics import alone, atomic_load, fence, load_one
from .bits import divide, halves, join, lsr, mix
from .error_record import record_error
from .groups import GROUP, alike, from_leader, last_start
from .growing import ask_for_pages, load_answers
from .layout import E_INVALID_ARGUMENT, E_OUT_OF_MEMORY, MAX_SLOT, NUM_CLASSES, PAGE_BYTES, REACHED
from .lines import await_places, open_places, pass_over, promise, stop_keeping, ticket_place
from .live import claim_other, claim_others, heard, live_bit, speak_for
from .magazines import take_spans
from .pages import one_of, take_adjacent, window
from .search import guess_slots, malloc_run, search_slots

ROUNDS = tl.constexpr(8)  # tickets that a request draws before it searches
LATE = tl.constexpr(-2)  # in place of a page: the place was not open in time


@triton.jit
def claim_spans(heap, span, size, index, good, shared: tl.constexpr):
    """Claim slots of spans for the ``good`` lanes: each has the ``index``-th of the span in its
    lane. ``shared``: no two lanes have one slot, so one lane can claim all of a word. Addresses; 0
    in other lanes."""
    records = layout.load_records(heap)
    page, first = layout.span_start(tl.where(good, span, 0))
    granule = first + index * (size >> 4)
    ptr, bits = live_bit(records, page, granule)
    speaks = good
    if shared:
        turn, bits = speak_for(granule, size >> 4, index, layout.span_count(span) - 1 - index)
        speaks = good & (turn == 0)
    old = tl.atomic_or(ptr, bits, mask=speaks, sem="relaxed")
    wrong = tl.where(speaks, old & bits, 0)
    if lanes.any_lane(wrong != 0):
        # A program with a promise of other slots was there first: each lane still finds a slot.
        lost = wrong != 0
        if shared:
            lost = good & heard(page, granule, wrong)
        granule = claim_others(records, page, granule, size + granule * 0, lost)
    return tl.where(good, layout.address_of(heap, page, granule), 0)


@triton.jit
def claim_span(heap, span, size):
    """:func:`claim_spans` for the one slot of a span (int64 scalar). Returns its address."""
    records = layout.load_records(heap)
    page, granule = layout.span_start(span)
    ptr, bit = live_bit(records, page, granule)
    ptr, one = alone(ptr, 1)
    old = tl.atomic_or(ptr, bit, mask=one, sem="relaxed")
    if lanes.any_lane(one & ((old & bit) != 0)):
        granule = claim_other(records, page, granule, size)
    return layout.address_of(heap, page, granule)


@triton.jit
def use_tickets(heap, cls, word, rank, count, upto, active, front, area, skip, polls: tl.constexpr):
    """Slots for tickets. Each active lane has the ``rank``-th of the ``count`` tickets of class
    ``cls`` that its group (see ``alike``) drew by a subtraction that returned line word ``word``;
    or all from there on, if it is alone. Those that lie in one half of a place are used together:
    the first of these lanes, or the one that is alone, asks the page for all of them. Later tickets
    are led elsewhere if it has too little room, or if ``skip`` is 1 and not 0.

    Returns ``(span, index, tickets, page)``: a span of slots, of which the lane's is the
    ``index``-th, or 0 if there is none for it; how many tickets are used together; and a page below
    0 if the place was not open in time (LATE), or leads to no page (-1)."""
    size = layout.class_bytes(cls)
    slots = layout.slots_of(size)
    place, slot = ticket_place(word, rank, slots)
    opens = active & (slot == 0)
    if lanes.any_lane(opens):
        open_places(heap, cls, slots, place, opens, front, area)
    middle = slots - (slots >> 1)
    second = slot >= middle
    index = tl.minimum(rank, tl.where(second, slot - middle, slot))
    tickets = index + tl.minimum(count - rank, tl.where(second, slots, middle) - slot)
    heads = active & (index == 0)
    state = await_places(layout.place_ptr(heap, cls, place), place, heads, polls)
    page = tl.where(layout.is_place(state, place), layout.place_page(state, second), LATE)
    asks = heads & (page >= 0)
    granted = promise(heap, page, cls, tickets, slots, asks)
    stop_keeping(heap, page, asks & (slot + tickets == slots))
    over = heads & (granted < tickets + skip)
    if lanes.any_lane(over):
        pass_over(heap, cls, page, place, tickets - granted, over)
    page, granted = halves(from_leader(join(page, granted), last_start(upto, index == 0)))
    span = layout.span_of(page, (slot - index) * (size >> 4), granted, cls)
    return tl.where(active & (index < granted), span, 0), index, tickets, page


@triton.jit
def malloc_mixed(heap, cls, active, polls: tl.constexpr):
    """Slots of classes ``cls`` for up to GROUP lanes, the active ones: addresses, 0 where there is
    none."""
    lane = lanes.lane_index(cls)
    addr = (cls * 0).to(tl.int64)
    rounds = 0
    while lanes.any_lane(active) & (rounds < ROUNDS):
        size = layout.class_bytes(cls)
        leader, rank, count, upto = alike(cls, active, 6)
        front = atomic_load(layout.hint_ptr(heap) + lane * 0, lane == 0)
        line = layout.line_ptr(heap, cls)
        leads = active & (leader == lane)
        word = tl.atomic_add(line, -count.to(tl.int64), mask=leads, sem="relaxed")
        # (What an opener needs, computed while the ticket is under way.)
        area = window(heap, tl.sum(tl.where(active, size, 0), axis=0))
        word = from_leader(word, leader)
        front = lanes.pick(front, 0).to(tl.int32)
        span, index, _tickets, page = use_tickets(
            heap, cls, word, rank, count, upto, active, front, area, 0, polls
        )
        good = active & (span != 0)
        # (Where there was no page, a search is next.)
        again = active & (span == 0) & (page != -1)
        # (Several places may lead to one page, so two lanes may have one slot.)
        claimed = claim_spans(heap, span, size, index, good, shared=False)
        addr = tl.where(good, claimed, addr)
        active = again
        rounds += 1
    return addr


@triton.jit(noinline=True)
def next_span(heap, cls, word, done, need, polls: tl.constexpr):
    """Use tickets of ``need`` (int32 scalar, fewer than a page has slots) of class ``cls``, which
    are drawn if ``done`` is 0: those from the ``done``-th on that lie in one half of a place.
    Returns the line word, and span, tickets and page as :func:`use_tickets` does (scalars)."""
    lane = tl.arange(0, 32)
    one = lane == 0
    kind = cls + lane * 0
    count = need + lane * 0
    front = atomic_load(layout.hint_ptr(heap) + lane * 0, one)
    if done == 0:
        line = layout.line_ptr(heap, kind)
        word = lanes.pick(tl.atomic_add(line, -count.to(tl.int64), mask=one, sem="relaxed"), 0)
    # (If tickets lie across two halves, and could lie in one, later ones had better be elsewhere.)
    slots = layout.class_slots(cls)
    half = slots >> 1
    skip = (done > 0) & (half * 2 == slots) & (divide(half, need) * need == half)
    area = window(heap, layout.class_bytes(cls) * need)
    front = lanes.pick(front, 0).to(tl.int32)
    span, _index, tickets, page = use_tickets(
        heap, kind, word + lane * 0, done + lane * 0, count, 1 << lane, one, front, area,
        skip.to(tl.int32), polls,
    )  # fmt: skip
    return word, lanes.pick(span, 0), lanes.pick(tickets, 0), lanes.pick(page, 0)


@triton.jit
def malloc_alike(heap, cls, same, rank, need, polls: tl.constexpr):
    """Slots of one class for ``need`` lanes, numbered by ``rank``, fewer than a page has."""
    addr = (rank * 0).to(tl.int64)
    size = layout.class_bytes(cls)
    word = need.to(tl.int64)
    rounds = 0
    while (need > 0) & (rounds < ROUNDS):
        done = need * 0
        rounds += 1
        while done < need:
            word, span, tickets, page = next_span(heap, cls, word, done, need, polls)
            index = rank - done
            good = same & (index >= 0) & (index < layout.span_count(span))
            spans = span + (rank * 0).to(tl.int64)
            claimed = claim_spans(heap, spans, size, index, good, shared=True)
            addr = tl.where(good, claimed, addr)
            # (Where there was no page, a search is next.)
            rounds = tl.where(page == -1, ROUNDS, rounds)
            done += tickets
        same = same & (addr == 0)
        need = lanes.count_lanes(same)
        if need > 0:
            rank = lanes.rank_of(same)
    return addr


@triton.jit(noinline=True)
def guess_slot(heap, cls):
    """:func:`guess_slots` for one class (int32 scalar)."""
    return guess_slots(heap, cls, cls >= 0)


@triton.jit
def malloc_last(heap, nbytes, count):
    """A block of ``nbytes`` (int64 scalar) from a search; in a heap that grows by itself, from
    another if it finds nothing, when the host has answered or will not. Returns its address; or 0,
    and then all ``count`` lanes that want the same have failed."""
    answers = load_answers(heap)
    addr = nbytes * 0
    again = count > 0
    while again:
        if nbytes > MAX_SLOT:
            addr = malloc_run(heap, nbytes)
        elif nbytes > 0:
            cls = layout.size_class(nbytes.to(tl.int32))
            addr = guess_slot(heap, cls)
            if addr == 0:
                page = search_slots(heap, cls)
                if page >= 0:
                    size = layout.class_bytes(cls)
                    first = one_of(layout.slots_of(size), mix(layout.program_index())) * (size >> 4)
                    # (Not `claim_other`: blocks of 32 lanes would get fewer registers, and spill.)
                    granule = claim_others(layout.load_records(heap), page, first, size, page >= 0)
                    addr = layout.address_of(heap, page, granule)
        again = (addr == 0) & (answers != 0)
        if again:
            answers = ask_for_pages(heap, nbytes, answers)
    if addr == 0:
        kind = tl.where(nbytes < 0, E_INVALID_ARGUMENT, E_OUT_OF_MEMORY)
        record_error(heap, kind + 0, addr, nbytes, count)
    return addr


@triton.jit
def malloc_whole(heap, cls, same, rank, count):
    """Whole pages for ``count`` lanes (int32 scalar) that fill some, numbered by ``rank``.
    Addresses; 0 in other lanes, and for those left over, fewer than a page has slots unless pages
    are rare."""
    addr = (rank * 0).to(tl.int64)
    lane = tl.arange(0, 64)
    records = layout.load_records(heap)
    size = layout.class_bytes(cls)
    slots = layout.slots_of(size)
    have = count * 0 + 1
    most = tl.minimum(divide(slots * 0 + lanes.width(rank), slots), 64)
    while (have > 0) & (slots <= count):
        first, have = take_adjacent(heap, tl.minimum(divide(count, slots), 64), most)
        here = lane < have
        ptr = layout.page_word_ptr(heap, tl.where(here, first + lane, first))
        state = layout.slab_word(cls, slots) + slots
        old = tl.atomic_add(ptr, state + (lane & 0).to(tl.int64), mask=here, sem="relaxed")
        # (The addresses are made of what was there, so the fence of malloc comes behind it.)
        seen = tl.sum(tl.where(here, lsr(old, 63), 0).to(tl.int32), axis=0)
        taken = (lane & 0).to(tl.int64) + have
        tl.atomic_max(ptr + REACHED, taken, mask=here & (lane == 0), sem="relaxed")
        got = same & (rank >= 0) & (rank < have * slots)
        at = divide(tl.where(got, rank, 0), slots)
        page = first + at
        slot = tl.where(got, rank, 0) - at * slots
        granule = slot * (size >> 4)
        ptr, _bit = live_bit(records, page, granule)
        turn, bits = speak_for(granule, size >> 4, slot, slots - 1 - slot)
        tl.atomic_or(ptr, bits, mask=got & (turn == 0), sem="relaxed")
        addr = tl.where(got, layout.address_of(heap, page, granule + seen), addr)
        rank -= have * slots
        count -= have * slots
    return addr


@triton.jit
def malloc_block(heap, nbytes, active, polls: tl.constexpr):
    """Addresses of blocks for a block of int64 sizes; 0 in other lanes."""
    small = active & (nbytes > 0) & (nbytes <= MAX_SLOT)
    classes = layout.size_class(tl.where(small, nbytes, 1).to(tl.int32))
    cls = tl.max(classes, axis=0)
    same = small & (classes == cls)
    rank = lanes.rank_of(same)
    count = lanes.count_lanes(same)
    addr = nbytes * 0
    rest = active & (nbytes != 0)
    full = count < 0
    if lanes.width(nbytes) > GROUP:
        # Without free pages, others of the class mostly have some room: so guesses come first. (Of
        # fewer lanes they come last, since there they would decide how many registers are used.)
        full = load_one(layout.hint_ptr(heap)) >= layout.load_chunks(heap)
    if count == lanes.count_lanes(small):
        span = tl.full((), 0, tl.int64)
        size = layout.class_bytes(cls)
        # (More than half of a page is never in a magazine.)
        if (count > 0) & (count * size * 2 <= PAGE_BYTES):
            ptr = layout.magazine_ptr(heap, layout.last_magazine(heap), cls)
            span = take_spans(heap, ptr, cls, count, count > 0)
        if span != 0:
            spans = span + (rank * 0).to(tl.int64)
            addr = claim_spans(heap, spans, size, rank, same, shared=True)
        elif full == 0:
            addr = malloc_whole(heap, cls, same, rank, count)
    else:
        width: tl.constexpr = lanes.width(nbytes)
        last = layout.last_magazine(heap)
        own = layout.lane_magazine(heap, last, lanes.lane_index(nbytes), width)
        sizes = layout.class_bytes(classes)
        slots = take_spans(heap, own, classes, classes * 0 + 1, small)
        addr = claim_spans(heap, slots, sizes, classes * 0, slots != 0, shared=False)
    rest = rest & (addr == 0)
    if lanes.any_lane(rest):
        small = rest & small
        if lanes.width(nbytes) > GROUP:
            if full:
                addr = tl.where(small, guess_slots(heap, classes, small), addr)
                rest = rest & (addr == 0)
                small = rest & small
                if lanes.any_lane(small):
                    # (So that what opens places looks at all chunks again.)
                    tl.atomic_min(layout.hint_ptr(heap), tl.full((), 0, tl.int64), sem="relaxed")
        left = lanes.count_lanes(small)
        # (Of a block that fills more than 64 pages, more may be left than a page has slots.)
        mixed = lanes.any_lane(small & (classes != cls)) | (left >= layout.class_slots(cls))
        if mixed == 0:
            more = malloc_alike(heap, cls, small, lanes.rank_of(small), left, polls)
            addr = tl.where(small, more, addr)
        elif lanes.width(nbytes) > GROUP:
            # A few lanes at a time: wider, this would decide how many registers it needs.
            lane = lanes.lane_index(nbytes)
            group = tl.arange(0, GROUP)
            at = lanes.first_lane(small) & -GROUP
            while at < nbytes.shape[0]:
                kinds = tl.gather(tl.where(small, classes, -1), at + group, 0)
                part = malloc_mixed(heap, tl.maximum(kinds, 0), kinds >= 0, polls)
                mine = small & (lane >= at) & (lane < at + GROUP)
                addr = tl.where(mine, tl.gather(part, tl.where(mine, lane - at, 0), 0), addr)
                at = lanes.first_lane(small & (lane >= at + GROUP)) & -GROUP
        else:
            more = malloc_mixed(heap, classes, small, polls)
            addr = tl.where(small, more, addr)
        rest = rest & (addr == 0)
        at = lanes.first_lane(rest)
        small = rest & small
        while at < nbytes.shape[0]:
            # What one lane does not find, others of its class do not find either.
            nth = tl.where(small, classes, NUM_CLASSES + lanes.lane_index(nbytes))
            same = rest & (nth == lanes.pick(nth, at))
            found = malloc_last(heap, lanes.pick(nbytes, at), lanes.count_lanes(same))
            addr = tl.where(lanes.lane_index(rest) == at, found, addr)
            rest = rest & tl.where(found == 0, same == 0, lanes.lane_index(rest) != at)
            at = lanes.first_lane(rest)
    return addr


@triton.jit
def malloc_scalar(heap, nbytes, active, polls: tl.constexpr):
    """The address of a block of ``nbytes`` (int64 scalar), or 0; 0 if not ``active``."""
    small = active & (nbytes > 0) & (nbytes <= MAX_SLOT)
    cls = layout.size_class(tl.where(small, nbytes, 1).to(tl.int32))
    size = layout.class_bytes(cls)
    span = nbytes * 0
    addr = nbytes * 0
    if small:
        # (More than half of a page is never in a magazine.)
        if size * 2 <= PAGE_BYTES:
            ptr = layout.magazine_ptr(heap, layout.last_magazine(heap), cls)
            span = take_spans(heap, ptr, cls, cls * 0 + 1, small)
        rounds = cls * 0
        while (span == 0) & (rounds < ROUNDS):
            _word, span, _tickets, page = next_span(heap, cls, span, cls * 0, cls * 0 + 1, polls)
            # (Where there was no page, a search is next.)
            rounds = tl.where(page == -1, ROUNDS, rounds + 1)
    if span != 0:
        addr = claim_span(heap, span, size)
    elif active & (nbytes != 0):
        addr = malloc_last(heap, nbytes, cls * 0 + 1)
    return addr


@triton.jit
def malloc_any(heap, nbytes, active, polls: tl.constexpr = 4000):
    """Addresses of blocks for int64 sizes, a scalar or a block; 0 in other lanes."""
    find: tl.constexpr = malloc_block if lanes.is_block(nbytes) else malloc_scalar
    addr = find(heap, nbytes, active, polls)
    # What the last owners did happens before anything that the caller does.
    fence(layout.hint_ptr(heap), "acquire")
    return addr
