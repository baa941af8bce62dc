"""malloc and free: magazines, whole pages, lines and searches, in this order; see ``lines``."""

import triton
import triton.language as tl

from .addresses import locate, run_head
from .atomics import atomic_load, fence
from .bell import ask_for_pages, load_answers, may_grow
from .bits import divide, halves, join, lsr, mix
from .groups import alike
from .lanes import (
    any_lane,
    count_lanes,
    first_lane,
    is_block,
    lane_index,
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
    FREES,
    LENGTH,
    MAX_SLOT,
    NUM_CLASSES,
    PAGE_BYTES,
    PAGE_LOG2,
    PAGE_MASK,
    REACHED,
    RUN,
    SLAB,
    SPAN_CLASS,
    SPAN_COUNT,
    SPAN_SLOT,
    SPANNED,
    address_of,
    bit_of,
    class_bytes,
    class_slots,
    free_row,
    hint_ptr,
    is_place,
    line_ptr,
    load_base,
    load_records,
    magazine_ptr,
    page_class,
    page_word_ptr,
    place_page,
    place_ptr,
    program_index,
    size_class,
    slab_word,
    slots_of,
    span_count,
    span_of,
)
from .lines import (
    await_places,
    groups,
    leaders,
    leave_account,
    leave_one,
    leave_pages,
    open_places,
    pass_over,
    promise,
    stop_keeping,
    ticket_place,
)
from .live import another, claim_others, heard, live_bit, speak_for, word_period
from .pages import take_any, window
from .record import record_error
from .search import malloc_run, search_slots
from .target import anew

GROUP = tl.constexpr(32)  # lanes of a block of several classes that are served together
ROUNDS = tl.constexpr(8)  # tickets that a request draws before it searches
LATE = tl.constexpr(-2)  # in place of a page: the place was not open in time


@triton.jit
def malloc_mixed(heap, cls, active, polls: tl.constexpr):
    """Slots of classes ``cls`` for the active lanes: addresses, 0 where there is none."""
    lane = lane_index(cls)
    addr = (cls * 0).to(tl.int64)
    rounds = 0
    given_heap = heap
    given_cls = cls
    while any_lane(active) & (rounds < ROUNDS):
        heap = anew(given_heap)
        cls = anew(given_cls)
        size = class_bytes(cls)
        slots = slots_of(size)
        records = load_records(heap)
        line = line_ptr(heap, cls)
        front = atomic_load(hint_ptr(heap) + lane * 0, lane == 0)
        leader, rank, count = groups(cls, active, 6)
        leads = active & (leader == lane)
        word = tl.atomic_add(line, -count.to(tl.int64), mask=leads, sem="relaxed")
        word = leaders(word, leader)
        place, slot = ticket_place(word, rank, slots)
        opens = active & (slot == 0)
        if any_lane(opens):
            total = tl.sum(tl.where(active, size, 0), axis=0)
            at = pick(front, 0).to(tl.int32)
            open_places(heap, cls, slots, place, opens, at, window(total))
        # The lanes of half a place: one reads the ring and asks the page for all.
        second = slot >= slots - (slots >> 1)
        # (A group had consecutive tickets, so it may have come to 32 halves that follow.)
        half = (place << 1) + second.to(tl.int32)
        head, rank, users = groups(cls + ((half & 31) << 6), active, 11)
        heads = active & (head == lane)
        state = await_places(place_ptr(heap, cls, place), place, heads, polls)
        page = tl.where(is_place(state, place), place_page(state, second), LATE)
        asks = heads & (page >= 0)
        granted = promise(heap, page, cls, users, slots, asks)
        packed = leaders(join(tl.where(heads, page, LATE), granted), head)
        page, granted = halves(packed)
        got = active & (page >= 0)
        good = got & (rank < granted)
        last = good & (slot == slots - 1)
        granule = slot * (size >> 4)
        ptr, bit = live_bit(records, tl.where(good, page, 0), granule)
        old = tl.atomic_or(ptr, bit, mask=good, sem="acquire")
        stop_keeping(heap, page, last)
        lost = good & ((old & bit) != 0)
        bad = active & (good == 0)
        if any_lane(lost | bad):
            granule = tl.where(lost, another(old, granule, size), granule)
            granule = claim_others(records, tl.where(good, page, 0), granule, size, lost)
            # (Where a place leads to no page, later tickets had better lead to another place.)
            over = tl.where(got, heads & (granted < users), bad)
            # (Where there was no page, a search is next.)
            bad = bad & (page != -1)
            pass_over(heap, cls, page, place, users - granted, over)
        where = address_of(load_base(heap), tl.where(good, page, 0), granule)
        addr = tl.where(good, where, addr)
        active = bad
        rounds += 1
    return addr


@triton.jit
def claim_span(heap, span, size, index, good, acquired: tl.constexpr):
    """Claim slots of spans for the ``good`` lanes: each has the ``index``-th of the span in its
    lane (a scalar: one). Addresses; 0 in other lanes. Who took the spans out of a magazine has
    ``acquired`` what their last owner did."""
    records = load_records(heap)
    page = tl.where(good, span & PAGE_MASK, 0).to(tl.int32)
    granule = (((span >> SPAN_SLOT) & 0x1FFF).to(tl.int32) + index) * (size >> 4)
    ptr, bits = live_bit(records, page, granule)
    speaks = good
    if is_block(good):
        turn, bits = speak_for(granule, size >> 4, index, span_count(span) - 1 - index)
        speaks = good & (turn == 0)
    if acquired:
        old = tl.atomic_or(ptr, bits, mask=speaks, sem="relaxed")
    else:
        old = tl.atomic_or(ptr, bits, mask=speaks, sem="acquire")
    wrong = tl.where(speaks, old & bits, 0)
    if any_lane(wrong != 0):
        # A program with a promise of other slots was there first: each lane still finds a slot.
        lost = wrong != 0
        if is_block(good):
            lost = good & heard(page, granule, wrong)
        granule = claim_others(records, page, granule, size + granule * 0, lost)
    return tl.where(good, address_of(load_base(heap), page, granule), 0)


@triton.jit(noinline=True)
def draw_spans(heap, cls, need, polls: tl.constexpr):
    """Draw ``need`` tickets (int32 scalar, fewer than a page has slots) of class ``cls``. Returns
    up to three spans of slots, as many as the tickets were good for; of page PAGE_MASK if a ticket
    led to no page."""
    part = tl.arange(0, 4)
    slots = class_slots(cls)
    front = atomic_load(hint_ptr(heap) + part * 0, part == 0)
    line = line_ptr(heap, cls) + part * 0
    change = -need.to(tl.int64) + (part * 0).to(tl.int64)
    word = pick(tl.atomic_add(line, change, mask=part == 0, sem="relaxed"), 0)
    place, slot = ticket_place(word, need * 0, slots)
    # Half a place is a part.
    middle = slots - (slots >> 1)
    part += (slot >= middle).to(tl.int32)
    ahead = part >> 1
    second = (part & 1) != 0
    begin = ahead * slots + tl.where(second, middle, 0)
    end = tl.where(second, (ahead + 1) * slots, begin + middle)
    begin = tl.maximum(begin, slot)
    counts = tl.maximum(tl.minimum(end, slot + need) - begin, 0)
    start = begin - ahead * slots
    place += ahead
    kind = cls + part * 0
    opens = (counts > 0) & (start == 0)
    if any_lane(opens):
        at = pick(front, 0).to(tl.int32)
        around = window(class_bytes(cls) * need)
        open_places(heap, kind, slots + part * 0, place, opens, at, around)
    state = await_places(place_ptr(heap, kind, place), place, counts > 0, polls)
    page = tl.where(is_place(state, place), place_page(state, second), LATE)
    asks = (counts > 0) & (page >= 0)
    granted = promise(heap, page, kind, counts, slots, asks)
    last = asks & (start + counts == slots)
    stop_keeping(heap, page, last)
    # (Nothing is granted where a place leads to no page. Later tickets lead to another place then.)
    over = granted < counts
    if any_lane(over):
        pass_over(heap, kind, page, place, counts - granted, over)
    page = tl.where(page == -1, PAGE_MASK, tl.maximum(page, 0)).to(tl.int32)
    spans = span_of(page, start, granted, kind)
    return pick(spans, 0), pick(spans, 1), pick(spans, 2)


@triton.jit
def has_no_page(span):
    """Whether the span is that of a ticket that led to no page."""
    return (span & PAGE_MASK) == PAGE_MASK


@triton.jit
def malloc_alike(heap, cls, same, rank, need, polls: tl.constexpr):
    """Slots of one class for ``need`` lanes, numbered by ``rank``, fewer than a page has."""
    addr = (rank * 0).to(tl.int64)
    rounds = 0
    given_heap = heap
    while (need > 0) & (rounds < ROUNDS):
        heap = anew(given_heap)
        span, second, third = draw_spans(heap, cls, need, polls)
        # (Then a search is next.)
        no_page = has_no_page(span) | has_no_page(second) | has_no_page(third)
        index = rank
        span += (rank * 0).to(tl.int64)
        beyond = index >= span_count(span)
        index = tl.where(beyond, index - span_count(span), index)
        span = tl.where(beyond, second, span)
        beyond = beyond & (index >= span_count(span))
        index = tl.where(beyond, index - span_count(span), index)
        span = tl.where(beyond, third, span)
        good = same & (index < span_count(span))
        where = claim_span(heap, span, class_bytes(cls), index, good, acquired=False)
        addr = tl.where(good, where, addr)
        same = same & (good == 0)
        need = count_lanes(same)
        if need > 0:
            rank = rank_of(same)
        rounds = tl.where(no_page, ROUNDS, rounds + 1)
    return addr


@triton.jit(noinline=True)
def search_block(heap, nbytes, count):
    """A block of ``nbytes`` (int64 scalar) from a search; ``count`` lanes want one like it. Returns
    its address, or 0 if there is none."""
    addr = nbytes * 0
    if nbytes > MAX_SLOT:
        addr = malloc_run(heap, ((nbytes - 1) >> PAGE_LOG2) + 1)
    elif nbytes > 0:
        cls = size_class(nbytes.to(tl.int32))
        found = search_slots(heap, cls)
        if found >= 0:
            size = class_bytes(cls)
            slots = slots_of(size)
            slot = (mix(program_index() + count) & 0x7FFF) * slots >> 15
            granule = slot * (size >> 4)
            granule = claim_others(load_records(heap), found, granule, size, found >= 0)
            addr = address_of(load_base(heap), found, granule)
    return addr


@triton.jit(noinline=True)
def malloc_last(heap, nbytes, count):
    """:func:`search_block`, and if it finds nothing, again after the heap has grown, if it can. If
    there is no block, 0, and all these lanes have failed."""
    answers = load_answers(heap)
    addr = search_block(heap, nbytes, count)
    while (addr == 0) & may_grow(heap, answers, nbytes):
        answers = ask_for_pages(heap, nbytes, answers)
        addr = search_block(heap, nbytes, count)
    if addr == 0:
        kind = tl.where(nbytes < 0, E_INVALID_ARGUMENT, E_OUT_OF_MEMORY)
        record_error(heap, kind + 0, addr, nbytes, count)
    return addr


@triton.jit
def malloc_whole(heap, cls, same, rank, n):
    """``n`` whole pages (int32 scalar, 1 to 64) for the lanes that fill them, the first of those
    numbered by ``rank``. Addresses; 0 in other lanes, and where there is no page."""
    records = load_records(heap)
    size = class_bytes(cls)
    slots = slots_of(size)
    pages, have = take_any(heap, n)
    lane = tl.arange(0, 64)
    state = slab_word(cls, slots) + slots + (pages & 0).to(tl.int64)
    ptr = page_word_ptr(records, pages)
    tl.atomic_add(ptr, state, mask=lane < have, sem="acquire")
    tl.atomic_max(ptr + REACHED, (pages & 0).to(tl.int64) + 1, mask=lane < have, sem="relaxed")
    at = divide(tl.where(same, rank, 0), slots)
    page = tl.gather(pages, tl.minimum(at, n - 1), 0)
    slot = rank - at * slots
    got = same & (rank < have * slots)
    page = tl.where(got, page, 0)
    granule = slot * (size >> 4)
    ptr, _bit = live_bit(records, page, granule)
    further = tl.minimum(n * slots - 1 - rank, slots - 1 - slot)
    turn, bits = speak_for(granule, size >> 4, slot, further)
    tl.atomic_or(ptr, bits, mask=got & (turn == 0), sem="relaxed")
    return tl.where(got, address_of(load_base(heap), page, granule), 0)


@triton.jit(noinline=True)
def release_span(heap, word):
    """Give the slots of a span back to the account of their page (int64 scalar; 0: none)."""
    if word != 0:
        count = span_count(word)
        page = (word & PAGE_MASK).to(tl.int32)
        # What was done in these slots happens before what the page's next owners do.
        fence(heap + ERRORS)
        one = (word & 0) + count
        now = tl.atomic_add(page_word_ptr(load_records(heap), page), -one, sem="relaxed") - one
        leave_account(heap, page, now, count, count > 0, runs=False)
    return word


@triton.jit
def put_span(heap, cls, span, word):
    """Put a span of a page with this word into the magazine, if that is empty. Returns whether."""
    if (word & SPANNED) == 0:
        # Once in the life of a page, and while the slots are still ours: later, the page may be
        # another's. (So the swap waits for what this returns, in which bit 63 is clear.)
        ptr = page_word_ptr(load_records(heap), (span & PAGE_MASK).to(tl.int32))
        span += lsr(tl.atomic_or(ptr, (span & 0) + SPANNED, sem="relaxed"), 63)
    return tl.atomic_cas(magazine_ptr(heap, cls), span & 0, span, sem="relaxed") == 0


@triton.jit
def take_span(heap, cls, count):
    """The span of ``count`` slots of class ``cls`` in the magazine, or 0."""
    ptr = magazine_ptr(heap, cls)
    word = tl.atomic_xchg(ptr, tl.full((), 0, tl.int64), sem="acquire")
    wanted = (count.to(tl.int64) << SPAN_COUNT) + ((cls + 1).to(tl.int64) << SPAN_CLASS)
    if (word != 0) & ((word >> SPAN_COUNT) != (wanted >> SPAN_COUNT)):
        word = release_span(heap, tl.atomic_xchg(ptr, word, sem="acq_rel")) & 0
    return word


@triton.jit
def malloc_any(heap, nbytes, active, polls: tl.constexpr = 4000):
    """Addresses of blocks for int64 sizes, a scalar or a block; 0 in other lanes."""
    small = active & (nbytes > 0) & (nbytes <= MAX_SLOT)
    classes = size_class(tl.where(small, nbytes, 1).to(tl.int32))
    cls = tl.maximum(pick_first(classes, small), 0)
    same = small & (classes == cls)
    rank = rank_of(same)
    count = count_lanes(same)
    addr = nbytes * 0
    rest = active & (nbytes != 0)
    if count == count_lanes(small):
        span = tl.full((), 0, tl.int64)
        size = class_bytes(cls)
        if (count > 0) & (count * size * 2 <= PAGE_BYTES):
            span = take_span(heap, cls, count)
        if span != 0:
            spans = span + (rank * 0).to(tl.int64)
            addr = claim_span(heap, spans, size, rank, same, acquired=True)
        elif is_block(nbytes):
            if count >= slots_of(size):
                n = tl.minimum(divide(count, slots_of(size)), 64)
                addr = malloc_whole(heap, cls, same, rank, n)
        rest = rest & (addr == 0)
    if any_lane(rest):
        small = rest & small
        if is_block(nbytes):
            left = count_lanes(small)
            # (Of a block that fills more than 64 pages, more may be left than a page has slots.)
            alone = (any_lane(small & (classes != cls)) == 0) & (left < class_slots(cls))
            if alone:
                if left > 0:
                    more = malloc_alike(heap, cls, small, rank_of(small), left, polls)
                    addr = tl.where(small, more, addr)
            elif width(nbytes) > GROUP:
                # A few lanes at a time: wider, this would decide how many registers it needs.
                lane = lane_index(nbytes)
                group = tl.arange(0, GROUP)
                at = first_lane(small) & -GROUP
                while at < nbytes.shape[0]:
                    kinds = tl.gather(tl.where(small, classes, -1), at + group, 0)
                    part = malloc_mixed(heap, tl.maximum(kinds, 0), kinds >= 0, polls)
                    mine = small & (lane >= at) & (lane < at + GROUP)
                    addr = tl.where(mine, tl.gather(part, tl.where(mine, lane - at, 0), 0), addr)
                    at = first_lane(small & (lane >= at + GROUP)) & -GROUP
            else:
                more = malloc_mixed(heap, classes, small, polls)
                addr = tl.where(small, more, addr)
            rest = rest & (addr == 0)
            at = first_lane(rest)
            given_heap = heap
            asked = anew(nbytes)
            small = rest & (asked > 0) & (asked <= MAX_SLOT)
            classes = size_class(tl.where(small, asked, 1).to(tl.int32))
            while at < width(rest):
                heap = anew(given_heap)
                # What one lane does not find, others of its class do not find either.
                nth = tl.where(small, classes, NUM_CLASSES + lane_index(nbytes))
                same = rest & (nth == pick(nth, at))
                more = malloc_last(heap, pick(nbytes, at), count_lanes(same))
                addr = tl.where(lane_index(rest) == at, more, addr)
                rest = rest & tl.where(more == 0, same == 0, lane_index(rest) != at)
                at = first_lane(rest)
        else:
            addr = malloc_scalar(heap, nbytes, polls)
    tl.debug_barrier()
    return addr


@triton.jit(noinline=True)
def malloc_scalar(heap, nbytes, polls: tl.constexpr):
    """:func:`malloc_any` for a scalar size that is not 0, when the magazine has nothing."""
    addr = nbytes * 0
    one = addr.to(tl.int32) + 1
    if (nbytes > 0) & (nbytes <= MAX_SLOT):
        cls = size_class(nbytes.to(tl.int32))
        addr = malloc_alike(heap, cls, one == 1, one * 0, one, polls)
    if addr == 0:
        addr = malloc_last(heap, nbytes, one)
    return addr


# free ---------------------------------------------------------------------------------------------


@triton.jit(noinline=True)
def report_wrong(heap, addr):
    """Record that ``addr`` (int64 scalar), which is not 0, was freed though nothing lives there: a
    double free if a block could have begun there, or else an invalid one. Returns 0."""
    inside, page, granule = locate(heap, addr, addr != 0)
    word = atomic_load(page_word_ptr(load_records(heap), page))
    size = class_bytes(page_class(word))
    slot = divide(granule << 4, size)
    begins = ((word & SLAB) != 0) & (slot * size == granule << 4) & (slot < slots_of(size))
    double = begins | (((word & RUN) != 0) & (granule == 0))
    if inside & ((word & (SLAB + RUN)) == 0):
        # The page is free, or on its way between owners, if it is not inside of a run.
        taken = (atomic_load(free_row(heap) + (page >> 6)) & bit_of(page)) == 0
        head = run_head(load_records(heap), page, taken)
        ptr = page_word_ptr(load_records(heap), head)
        run = (atomic_load(ptr) & RUN) != 0
        double = (run == 0) | (page - head >= atomic_load(ptr + LENGTH))
    kind = tl.where(inside & double, E_DOUBLE_FREE, E_INVALID_FREE)
    record_error(heap, kind + 0, addr, addr * 0, kind * 0 + 1)
    return kind * 0


@triton.jit
def count_frees(heap, count):
    """Count ``count`` (int32 scalar) blocks that were freed."""
    tl.atomic_add(hint_ptr(heap) + FREES, count.to(tl.int64), sem="relaxed")


@triton.jit
def free_scalar(heap, addr, inside, page, granule):
    """free of one address, which is not 0."""
    records = load_records(heap)
    lane = tl.arange(0, 2)
    bit_ptr, bit = live_bit(records, page, granule)
    # The live bit and the page word, in one round trip to memory.
    ptr = tl.where(lane == 0, bit_ptr + lane * 0, page_word_ptr(records, page) + lane * 0)
    change = tl.where((lane == 0) & (lane * 0 == 1 - inside.to(tl.int32)), bit ^ -1, -1)
    old = tl.atomic_and(ptr, change, sem="relaxed")
    word = pick(old, 1)
    if inside & ((pick(old, 0) & bit) != 0):
        cls = page_class(word)
        size = class_bytes(cls)
        kept = size > PAGE_BYTES
        if ((word & SLAB) != 0) & (size * 2 <= PAGE_BYTES):
            span = span_of(page, divide(granule << 4, size), page * 0 + 1, cls)
            kept = put_span(heap, cls, span, word)
        if kept == 0:
            leave_one(heap, page)
        count_frees(heap, page * 0 + 1)
    else:
        report_wrong(heap, addr)


@triton.jit
def free_block(heap, addr, given, active, page, granule):
    """free of a block. The ``active`` lanes of those ``given`` lie in the heap."""
    records = load_records(heap)
    ptr, bit = live_bit(records, page, granule)
    counts = granule * 0 + 1
    lane = lane_index(active)
    count = count_lanes(active)
    first_page = pick(page, 0)
    first = pick(granule, 0)
    # (If the pages are far apart, this may be any number. Then the lanes are not in order.)
    unit = pick((page << 12) + granule, 1) - ((first_page << 12) + first)
    where = first + lane * unit
    there = (page == first_page + (where >> 12)) & (granule == (where & 4095))
    orderly = (active == (lane < count)) & ((active == 0) | there)
    together = (count > 1) & (unit > 0) & (unit <= 2048)
    together = together & (count_lanes(orderly) == active.shape[0])
    before = granule * 0
    further = before
    speaks = active
    bits = bit
    word = bit & 0
    # (That of the first page, for the magazine.)
    one_page = together & (first + count * unit <= 4096) & (count * unit <= 2048)
    if together:
        before = tl.minimum(lane, divide(granule, unit))
        further = tl.minimum(count - 1 - lane, divide(4095 - granule, unit))
        turn, bits = speak_for(granule, unit, before, further)
        speaks = active & (turn == 0)
        counts = further + 1
    if one_page:
        word = atomic_load(page_word_ptr(records, page), lane == 0)
    old = tl.atomic_and(ptr, bits ^ -1, mask=speaks, sem="relaxed")
    wrong = tl.where(speaks, (old & bits) ^ bits, 0)
    if any_lane((wrong != 0) | (given & (active == 0))):
        hit = wrong != 0
        if together:
            # (For each word the first of its consecutive slots has spoken.)
            period_log2, _apart = word_period(unit)
            speaker = lane - (before >> period_log2 << period_log2)
            hit = (tl.gather(wrong, speaker, 0) & bit) != 0
        active = active & (hit == 0)
        together = together != together
        one_page = together
        failed = given & (active == 0)
        at = first_lane(failed)
        while at < width(failed):
            report_wrong(heap, pick(addr, at))
            at = first_lane(failed & (lane > at))
    count_frees(heap, count_lanes(active))
    kept = first < 0
    if one_page:
        state = pick(word, 0)
        cls = page_class(state)
        slot = divide(first, unit)
        fits = ((state & SLAB) != 0) & (class_bytes(cls) == unit << 4) & (slot * unit == first)
        if fits:
            span = span_of(first_page, slot, count, cls)
            kept = put_span(heap, cls, span, state)
    if kept == 0:
        speaks = active & (before == 0)
        if together == 0:
            leader, _rank, counts = alike(page, active)
            speaks = active & (leader == lane)
        change = counts.to(tl.int64)
        ptr = page_word_ptr(records, page)
        now = tl.atomic_add(ptr, -change, mask=speaks, sem="relaxed") - change
        if together & (first + count * unit > 4096):
            # The pages follow one another: a few lanes retire them.
            few = tl.arange(0, 16)
            done = first * 0
            pages = (first + count * unit + 4095) >> 12
            while done < pages:
                number = done + few
                lead = tl.where(number > 0, divide((number << 12) - first + unit - 1, unit), 0)
                inside = (number < pages) & (lead < count)
                lead = tl.where(inside, lead, 0)
                words = tl.gather(now, lead, 0)
                left = tl.gather(counts, lead, 0)
                some = tl.minimum(pages - done, 16)
                leave_pages(heap, first_page + done, some, words, left, inside)
                done += 16
        else:
            leave_account(heap, page, now, counts, speaks)


@triton.jit
def free_any(heap, addr, active):
    """Free blocks at int64 addresses that malloc gave; 0 is ignored."""
    given = active & (addr != 0)
    inside, page, granule = locate(heap, addr, given)
    # What this program wrote happens before anything that the next owner does.
    fence(heap + ERRORS)
    if is_block(active):
        free_block(heap, addr, given, inside, page, granule)
    elif given:
        free_scalar(heap, addr, inside, page, granule)
