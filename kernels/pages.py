"""The page level: a bitmap of free pages, runs of pages taken from it and given back.

Owns the page bits, the hint rows 0..6, the transit words and the page counters. The argument for
all of it is in docs/design.md; in short:

Shared words and their writers
    *Page bits*, one word per chunk of 64 pages, bit set = free. Takes clear bits, `give_pages` sets
    them. They alone say what is free: adjacent bits are one run, nothing is split or coalesced.
    *Hints*: row k has a bit per chunk, set whenever the chunk has 2**k adjacent free pages. It may
    be set without reason; at rest it is never missing. `give_pages` sets, `drop_hints` clears.
    *Transit*: (epoch << 20) + how many are in hand, for all modules. In hand: memory is taken to be
    put elsewhere, or a hint is being dropped. The epoch grows when memory was put; it may wrap.
Linearisation
    take: the compare-and-swap (or the `and`, for one page) that clears the bits.
    give: the `or` that sets them. Failure: see `collect`.
Order
    A give has a fence behind the atomic that told it that the pages are unused; a take within a
    chunk acquires, and a longer one has a fence behind it. So, through the page bits, what the old
    owner did happens before what the new owner does. All else is relaxed. A give is in transit, so
    there is a fence before its epoch moves; `collect` has fences on both sides, so a search lies
    between two collects.
Reuse (ABA)
    A compare-and-swap of page bits that succeeds on a value which changed and came back is
    right: the value says which pages are free, whoever freed them.
Progress
    Lock-free, as a failed compare-and-swap means that another program's succeeded; except for runs
    over several chunks, see `take_chunks`.
"""

import triton
import triton.language as tl

from .atomics import atomic_cas, atomic_load, fence
from .bits import (
    floor_log2,
    low_mask,
    lowest_bit,
    lsr,
    mix,
    next_bit,
    popcount,
    run_starts,
    select_bit,
)
from .lanes import lane_bits, pick
from .layout import (
    CHUNK_PAGES,
    G_HINTS,
    G_PAGES,
    G_ROW_WORDS,
    ORDERS,
    PEAK,
    TRANSIT,
    TRANSIT_STRIDE,
    TRANSIT_STRIPES,
    USED,
    hint_ptr,
    load_geometry,
    page_bits_ptr,
    program_index,
)

IN_HAND = tl.constexpr(1)  # in a transit word
EPOCH = tl.constexpr(1 << 20)
FAR = tl.constexpr(1 << 30)  # above every index: there is none


@triton.jit
def transit_ptr(heap):
    stripe = program_index() & (TRANSIT_STRIPES - 1)
    return heap + TRANSIT + stripe * TRANSIT_STRIDE


@triton.jit
def enter_transit(heap):
    """Announce that this program will hold memory which it may put back."""
    ptr = transit_ptr(heap)
    tl.atomic_add(ptr, tl.full((), IN_HAND, tl.int64), sem="relaxed")
    fence(ptr)


@triton.jit
def begin_transit(heap):
    """:func:`enter_transit` without waiting for it. Before the caller takes anything, it waits by
    looking at :func:`has_begun` of what this returns. (One lane of a block acts, because the result
    of an atomic on a scalar is waited for at once.)"""
    lane = tl.arange(0, 64)
    change = (lane * 0).to(tl.int64) + IN_HAND
    return tl.atomic_add(transit_ptr(heap) + lane * 0, change, mask=lane == 0, sem="relaxed")


@triton.jit
def has_begun(announced):
    """Flags of 64 lanes, all true, made of what :func:`begin_transit` returned: whoever looks at
    them waits for the announcement."""
    # (There are never so many in hand.)
    return ((announced & (EPOCH >> 1)) == 0) | (tl.arange(0, 64) != 0)


@triton.jit
def leave_transit(heap, put_back):
    """Undo :func:`enter_transit`; ``put_back`` (0 or 1): was memory put, so that epochs move?"""
    fence(transit_ptr(heap))
    end_transit(heap, put_back)


@triton.jit
def end_transit(heap, put_back):
    """:func:`leave_transit` without a fence, for callers that put nothing, or did so by atomics
    whose results they have looked at since."""
    tl.atomic_add(transit_ptr(heap), put_back.to(tl.int64) * EPOCH - IN_HAND, sem="relaxed")


@triton.jit
def collect(heap):
    """The sum of all epochs, or -1 while anything is in hand.

    Epochs only grow (they wrap after 2**44 changes, more than there can be between two calls). So
    two equal sums, with nothing in hand, mean that between the two calls no memory was put back or
    in transit, except by frees that have not returned (``shelf``). A failed malloc had two searches
    that found nothing, between three equal sums; it linearises at the second (docs/design.md).
    """
    lane = tl.arange(0, TRANSIT_STRIPES)
    fence(heap + TRANSIT)
    words = atomic_load(heap + TRANSIT + lane * TRANSIT_STRIDE)
    fence(heap + TRANSIT)
    in_hand = tl.sum(words & (EPOCH - 1), axis=0)
    epochs = tl.sum(lsr(words, 20), axis=0)
    return tl.where(in_hand == 0, epochs, epochs * 0 - 1)


@triton.jit
def give_pages(heap, chunk, bits, active):
    """Set page bits: the pages become free. Scalars or blocks; inactive lanes do nothing, and
    several lanes may name one chunk. The caller is in transit.

    The caller has fenced since it learnt that nobody uses the pages any more. Only those hints are
    set that the word deserves now and did not before: another give that changed the word before us
    may have yet to set its own, but it is in transit until it has. Returns the lanes that set
    hints; if any did, transit must not end without a fence.
    """
    old = tl.atomic_or(page_bits_ptr(heap, chunk), bits, mask=active, sem="relaxed")
    run = tl.where(active, old | bits, 0)
    was = tl.where(active, old, 0)
    # The bits before the hints, as `drop_hints` relies on: which hints are set depends on `old`.
    bit = (bits & 0) + 1 << (chunk & 63).to(tl.int64)
    hinted = active & (active == 0)
    order = tl.full((), 0, tl.int32)
    while order < ORDERS:
        gained = (run != 0) & (was == 0)
        hinted = hinted | gained
        tl.atomic_or(hint_ptr(heap, order, chunk), bit, mask=gained, sem="relaxed")
        step = (order * 0 + 1 << order).to(tl.int64)
        run = run & lsr(run, step & 63)
        was = was & lsr(was, step & 63)
        order += 1
    return hinted


@triton.jit(noinline=True)
def give_bits(heap, chunk, bits):
    """:func:`give_pages` for one chunk (scalars). Returns 1 if hints were set, or else 0."""
    return give_pages(heap, chunk, bits, bits != 0).to(tl.int32)


@triton.jit
def count_taken(heap, pages):
    """Add ``pages`` (int32) to the pages in use."""
    tl.atomic_add(heap + USED, pages.to(tl.int64), sem="relaxed")


@triton.jit
def count_given(heap, pages):
    """Subtract ``pages`` (int32) from the pages in use. Returns how many these were, in lane 0, for
    :func:`follow_peak`: called later, it has not long to wait. (One lane acts, because the result
    of an atomic on a scalar is waited for at once.)"""
    lane = tl.arange(0, 32)
    change = (lane * 0 - pages).to(tl.int64)
    return tl.atomic_add(heap + USED + lane * 0, change, mask=lane == 0, sem="relaxed")


@triton.jit
def follow_peak(heap, used):
    """Raise PEAK to ``used``, from :func:`count_given`. (That is enough: the most pages that ever
    were in use are those just before some give, or those of now.)"""
    lane = tl.arange(0, 32)
    tl.atomic_max(heap + PEAK + lane * 0, used, mask=lane == 0, sem="relaxed")


@triton.jit(noinline=True)
def drop_hints(heap, order, index, stale):
    """Clear the ``stale`` bits of word ``index`` of hint row ``order``, and set again those that
    have become true; returns 0.

    In transit meanwhile: a give that set the same hint between our look and our clearing may have
    returned, and no search may fail because its pages have no hint until we set it again.
    """
    lane = tl.arange(0, 64)
    row_ptr = hint_ptr(heap, order, index * 64)
    enter_transit(heap)
    tl.atomic_and(row_ptr, stale ^ -1, sem="relaxed")
    fence(row_ptr)
    suspect = (lsr(stale, lane.to(tl.int64)) & 1) != 0
    now = atomic_load(page_bits_ptr(heap, index * 64 + lane), suspect)
    again = lane_bits(run_starts(now, (order * 0 + 1) << order) != 0)
    if again != 0:
        tl.atomic_or(row_ptr, again, sem="relaxed")
    leave_transit(heap, (again != 0).to(tl.int32))
    return order * 0


@triton.jit(noinline=True)
def first_hinted(heap, row, cursor):
    """Index of the first non-zero word of hint row ``row`` at or after ``cursor``, and the word.

    Scalars. The index is FAR if there is none. One vector read per 4096 chunks (16 GiB).
    """
    words = load_geometry(heap, G_ROW_WORDS).to(tl.int32)
    row_ptr = heap + load_geometry(heap, G_HINTS) + row * words
    lane = tl.arange(0, 64)
    found = tl.full((), FAR, tl.int32)
    word = tl.full((), 0, tl.int64)
    while (found == FAR) & (cursor < words):
        index = (cursor >> 6 << 6) + lane
        row_words = atomic_load(row_ptr + index, (index >= cursor) & (index < words))
        found = tl.min(tl.where(row_words != 0, index, FAR), axis=0)
        word = tl.where(found != FAR, pick(row_words, found & 63), 0)
        cursor = (cursor >> 6 << 6) + 64
    return found, word


@triton.jit
def one_of(choices, salt):
    """A number in [0, choices), 1 <= choices <= 2**16, from 15 bits of a hash."""
    return ((salt & 0x7FFF) * choices) >> 15


@triton.jit
def spread(index, places):
    """The place, in [0, places), of program ``index``: multiples of the golden ratio, which keep
    successive programs far apart, however many they are. ``places`` is below 2**24."""
    turn = (index.to(tl.uint32) * 0x9E3779B9) >> 8
    return (turn.to(tl.int64) * places >> 24).to(tl.int32)


@triton.jit
def hinted_chunk(hints, width, salt):
    """The index of one of the first ``width`` bits set in ``hints``. (By other bits of the hash
    than chose the word, or all programs that chose it would meet in one chunk.)"""
    return select_bit(hints, one_of(tl.minimum(popcount(hints), width), salt >> 16))


@triton.jit
def choose_start(start, n, salt):
    """The bit set in ``start`` at which a run of ``n`` pages is to begin: the lowest, or for a
    single page the first from a hashed position on."""
    return next_bit(start, tl.where(n == 1, salt & 63, 0))


@triton.jit(noinline=True)
def lacks_pages(heap, n):
    """1 if fewer than ``n`` pages (int32) are free, wherever they are; 2 if none is; or else 0.

    This is one word, whereas rows of hints that all programs read are slow to search. No page whose
    bit is set is counted as used: a give subtracts first, a take adds last. (Relaxed, but a search
    that looks at USED while a give is under way is not quiet.)
    """
    free = load_geometry(heap, G_PAGES) - atomic_load(heap + USED)
    return (free < n).to(tl.int32) + (free < 1).to(tl.int32)


@triton.jit(noinline=True)
def take_within_chunk(heap, n, takers):
    """Take ``n`` in [1, 64] adjacent pages of one chunk. Returns the first page; -1 if there are
    none, -2 if it was seen that there are no pages at all.

    First fit by address, but over several candidates, so that programs do not meet on one word. For
    one page, they are twice as many chunks as ``takers`` programs would fill that take one each;
    for more, as many chunks as takers, since two that swap one word get in each other's way. The
    candidates lie at the front of the heap. Each program has its place among them and guesses that
    it is free: the attempt returns what is there. Then the hints lead. After a collision the
    choice widens, fourfold each time, and it is hashed, never the neighbour.
    """
    lane = tl.arange(0, 64)
    order = floor_log2(n)
    words = load_geometry(heap, G_ROW_WORDS).to(tl.int32)
    chunks = (load_geometry(heap, G_PAGES).to(tl.int32) + CHUNK_PAGES - 1) >> 6
    salt = mix(program_index())
    width = tl.maximum(tl.minimum(takers, 1 << 16) >> tl.where(n == 1, 5, 0), 16)
    cursor = tl.full((), 0, tl.int32)  # no hint word before this one serves
    first = one_of(tl.minimum((width >> 6) + 1, words), salt >> 10)  # the one to look at first
    page = tl.full((), -1, tl.int32)
    place = spread(program_index(), tl.minimum(width, chunks) * CHUNK_PAGES)
    target = place >> 6
    word = tl.full((), -1, tl.int64)
    start = word
    at = tl.where(n == 1, place & 63, 0)
    while (page < 0) & (cursor < words):
        tries = tl.full((), 4, tl.int32)
        while (page < 0) & (start != 0) & (tries > 0):
            ptr = page_bits_ptr(heap, target)
            run = low_mask(n) << at.to(tl.int64)
            # (Both acquire: what the pages' last owners did happens before us.)
            if n == 1:
                # Clearing one bit needs no agreement on the others.
                old = tl.atomic_and(ptr, run ^ -1, sem="acquire")
                taken = (old & run) != 0
            else:
                old = tl.atomic_cas(ptr, word, word & (run ^ -1), sem="acquire")
                taken = old == word
            if taken:
                page = target * 64 + at
            else:
                word = old
                start = run_starts(word, n)
                at = choose_start(start, n, salt)
                tries -= 1
        if (page < 0) & (start != 0):
            salt = mix(salt)
            width = tl.minimum(width * 4, 1 << 16)
            first = one_of(tl.minimum((width >> 6) + 1, words), salt >> 10)
        if page < 0:
            index = tl.maximum(cursor, first)
            hints = atomic_load(hint_ptr(heap, order, index * 64))
            if hints == 0:
                lacks = lacks_pages(heap, n)
                if lacks != 0:
                    index = index * 0 + FAR
                    cursor = first
                    page = -lacks
                else:
                    index, hints = first_hinted(heap, order, index)
            start = word & 0
            if index == FAR:
                # Nothing from there on: once more from the front, or there is nothing at all.
                cursor = tl.where(first > cursor, cursor, FAR)
                first = tl.full((), 0, tl.int32)
            else:
                # One hinted chunk is looked at alone; mostly it serves.
                target = index * 64 + hinted_chunk(hints, width, salt)
                word = atomic_load(page_bits_ptr(heap, target))
                start = run_starts(word, n)
                if start == 0:
                    # If not, all 64 of the hint word at once.
                    hinted = (lsr(hints, lane.to(tl.int64)) & 1) != 0
                    bits = atomic_load(page_bits_ptr(heap, index * 64 + lane), hinted)
                    fits = lane_bits(run_starts(bits, n) != 0)
                    if fits == 0:
                        stale = hints & (
                            lane_bits(run_starts(bits, (n * 0 + 1) << order) != 0) ^ -1
                        )
                        if stale != 0:
                            drop_hints(heap, order, index, stale)
                        cursor = tl.where(first <= cursor, index + 1, cursor)
                        first = tl.where(index + 1 < words, index + 1, 0)
                    else:
                        at = hinted_chunk(fits, width, salt)
                        word = pick(bits, at)
                        target = index * 64 + at
                        start = run_starts(word, n)
                at = choose_start(start, n, salt)
    return page


@triton.jit
def whole_chunks(heap, chunk, count):
    """How many of the ``count`` chunks from ``chunk`` on are free as a whole, up to the first
    that is not. Takes nothing."""
    lane = tl.arange(0, 64)
    done = count * 0
    going = count > 0
    while going:
        active = done + lane < count
        words = atomic_load(page_bits_ptr(heap, chunk + done + lane), active)
        failed = tl.min(tl.where(active & (words != -1), lane, 64), axis=0)
        done += tl.minimum(failed, count - done)
        going = (failed == 64) & (done < count)
    return done


@triton.jit
def claim_chunks(heap, chunk, count):
    """Take ``count`` whole chunks from ``chunk`` on. Returns how many it took before the first it
    could not (``count``: all), which are the caller's; others go back. The caller is in transit."""
    lane = tl.arange(0, 64)
    done = count * 0
    going = count > 0
    while going:
        active = done + lane < count
        wanted = tl.where(active, lane * 0 - 1, 0).to(tl.int64)
        target = tl.where(active, chunk + done + lane, chunk)
        old = atomic_cas(page_bits_ptr(heap, target), wanted, wanted * 0)
        failed = tl.min(tl.where(active & (old != -1), lane, 64), axis=0)
        beyond = active & (old == -1) & (lane > failed)
        if tl.sum(beyond.to(tl.int32), axis=0) > 0:
            give_pages(heap, target, wanted, beyond)
        done += tl.minimum(failed, count - done)
        going = (failed == 64) & (done < count)
    return done


@triton.jit
def claim_tail(heap, chunk, bits):
    """Take the pages ``bits`` of one chunk if all of them are free; 1 or 0."""
    ptr = page_bits_ptr(heap, chunk)
    word = atomic_load(ptr)
    claimed = chunk * 0
    while (claimed == 0) & ((word & bits) == bits):
        old = atomic_cas(ptr, word, word & (bits ^ -1))
        claimed = (old == word).to(tl.int32)
        word = old
    return claimed


@triton.jit(noinline=True)
def give_run(heap, page, n):
    """Give back ``n`` adjacent pages from ``page`` on, in one chunk or from the start of one.
    Returns 0. The caller is in transit, and has fenced as `give_pages` asks."""
    lane = tl.arange(0, 64)
    done = n * 0
    while done < n:
        at = page + done + lane * CHUNK_PAGES
        length = tl.minimum(n - done - lane * CHUNK_PAGES, CHUNK_PAGES)
        active = length > 0
        bits = low_mask(tl.maximum(length, 0)) << (at & 63).to(tl.int64)
        give_pages(heap, tl.where(active, at >> 6, 0), bits, active)
        done += 64 * CHUNK_PAGES
    return done * 0


@triton.jit(noinline=True)
def take_chunks(heap, n):
    """Take ``n`` >= 64 adjacent pages, beginning at a chunk. Returns the first page, -1 if none.

    Candidates come from hint row 6, first fit, and are looked at before anything is taken, so that
    memory goes back (and the epoch moves) only if another program got in between. Two takes that
    overlap may both step back and try again: here progress is only obstruction-free.
    """
    count = n >> 6
    rest = low_mask(n & 63)
    words = load_geometry(heap, G_ROW_WORDS).to(tl.int32)
    chunks = (load_geometry(heap, G_PAGES).to(tl.int32) + CHUNK_PAGES - 1) >> 6
    last = chunks - count - (rest != 0).to(tl.int32)
    page = tl.full((), -1, tl.int32)
    chunk = tl.full((), 0, tl.int32)
    length = tl.full((), 0, tl.int32)  # hinted chunks just before `chunk`
    hints = tl.full((), 0, tl.int64)
    while (page < 0) & (chunk < words * 64):
        if (chunk & 63) == 0:
            hints = atomic_load(hint_ptr(heap, ORDERS - 1, chunk))
        ahead = lsr(hints, (chunk & 63).to(tl.int64))
        hinted = (ahead & 1) != 0
        step = lowest_bit(tl.where(hinted, ahead ^ -1, ahead))
        step = tl.minimum(step, 64 - (chunk & 63))
        length = tl.where(hinted, length + step, 0)
        chunk += step
        while (page < 0) & (length >= count) & (chunk - length <= last):
            start = chunk - length
            free = whole_chunks(heap, start, count)
            if free < count:
                bad = start + free
                bit = tl.full((), 1, tl.int64) << (bad & 63).to(tl.int64)
                drop_hints(heap, count * 0 + (ORDERS - 1), bad >> 6, bit)
                length -= free + 1
            else:
                if rest != 0:
                    tail = atomic_load(page_bits_ptr(heap, start + count))
                else:
                    tail = rest
                if (tail & rest) == rest:
                    enter_transit(heap)
                    got = claim_chunks(heap, start, count)
                    held = got == count
                    if held & (rest != 0):
                        held = claim_tail(heap, start + count, rest) != 0
                    if held:
                        page = start * CHUNK_PAGES
                    elif got > 0:
                        give_run(heap, start * CHUNK_PAGES, got * CHUNK_PAGES)
                    leave_transit(heap, (page < 0).to(tl.int32))
                length -= 1
    return page


@triton.jit
def take_pages(heap, n, takers):
    """Take ``n`` >= 1 adjacent pages (int32). Returns the first page (int32); below 0 if none.

    ``takers``: how many programs may be about to do the same. Up to 63 pages lie in one chunk; more
    begin at the start of one. Below 0 says only that this search found nothing: whether that means
    exhaustion is for the caller to decide (:func:`collect`).
    """
    page = tl.full((), -1, tl.int32)
    if n < CHUNK_PAGES:
        page = take_within_chunk(heap, n, takers)
    elif n.to(tl.int64) <= load_geometry(heap, G_PAGES):
        page = take_chunks(heap, n)
        # What the pages' last owners did happens before us.
        fence(heap + USED)
    return page


@triton.jit(noinline=True)
def release_run(heap, page, n):
    """Give back the ``n`` pages (int32 scalars) of a run; returns 0. (The fence of `enter_transit`
    is the one that `give_pages` asks for.)"""
    enter_transit(heap)
    used = count_given(heap, n)
    give_run(heap, page, n)
    follow_peak(heap, used)
    leave_transit(heap, n * 0 + 1)
    return n * 0
