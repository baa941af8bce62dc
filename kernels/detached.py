"""Detached pages: slabs that belong to no stripe; they are drawn from, published and retired.

Pages of a chunk are handled together, as the bits of one word. The argument, with that of the
batches that the pages come from, is in ``slabs``; the account (A) is there too.

Shared words and their writers
    *Page word*: free subtracts; draw, settle and unpublish compare and swap.
    *Class hint*: row ORDERS + class, a bit per chunk. PUBLISHED in a page word promises it.
"""

import triton
import triton.language as tl

from .atomics import atomic_cas, atomic_load, fence
from .bits import divide, floor_log2, lsr, mix, popcount, select_bit, turn_right
from .lanes import any_lane, first_lane, lane_bits, least_of, or_lanes, pick, width
from .layout import (
    ATTACHED,
    CHUNK_PAGES,
    CLASS_MASK,
    G_PAGES,
    GRANTED,
    KIND_MASK,
    ORDERS,
    OUT_MASK,
    PUBLISHED,
    SLAB,
    USED,
    class_slots,
    hint_ptr,
    load_geometry,
    pack_stripe,
    page_class,
    page_out,
    page_word_ptr,
    program_count,
    program_index,
    size_class,
    slab_of,
    slots_of,
)
from .pages import (
    FAR,
    begin_transit,
    count_given,
    end_transit,
    enter_transit,
    first_hinted,
    follow_peak,
    give_bits,
    has_begun,
    leave_transit,
    spread,
)
from .shelf import announce_put, count_shelved, put_on_shelf

# Page words -----------------------------------------------------------------------------------


@triton.jit
def is_idle(word):
    """Page words of detached slabs with out = 0: nobody is inside, so they can be retired."""
    return (word & (KIND_MASK | ATTACHED | OUT_MASK)) == SLAB


@triton.jit
def is_hidden(word):
    """Page words of detached slabs that are not published: no search can find them."""
    return (word & (KIND_MASK | ATTACHED | PUBLISHED)) == SLAB


@triton.jit
def free_slots(word, cls, slots):
    """Slots that can be drawn from pages with these words: 0 unless detached slabs of ``cls``."""
    fits = (word & (KIND_MASK | ATTACHED | CLASS_MASK)) == slab_of(cls)
    return tl.where(fits, slots - page_out(word), 0)


@triton.jit
def is_published(word, cls):
    return (word & (KIND_MASK | PUBLISHED | CLASS_MASK)) == slab_of(cls) + PUBLISHED


@triton.jit(noinline=True)
def settle(heap, chunk, pages, word):
    """Do what the words of ``pages`` (a word of bits) of a chunk ask for: retire those that are
    idle, publish those that are hidden. ``word``, idle or hidden and of their class, is a first
    guess at the words of all of them. Returns 1 if hints were set, after which transit must not end
    without a fence, or else 0.

    Whoever leaves a page idle or hidden by a subtraction calls this. (Whole pages, and those that
    unpublish has dealt with, are hidden while they are full: there is nothing to find.) A failed
    compare-and-swap means that the guess was wrong or that the word has changed, so it is looked at
    again; a page that has another class by now was retired, and is the business of others. The
    caller is in transit: a retired page is in hand until its bit is set, and a page that is being
    published is invisible until its hint is set, although other frees see the flag and return. The
    flag comes before the hint, so that behind its clearing of the hint :func:`unpublish` sees the
    flag, or else our hint is set later and stays.
    """
    lane = tl.arange(0, 64)
    cls = page_class(word)
    ptr = page_word_ptr(heap, chunk * 64 + lane)
    asks = (lsr(pages, lane.to(tl.int64)) & 1) != 0
    words = tl.where(asks, word, 0)
    idle = is_idle(words)
    hidden = is_hidden(words) & (idle == 0)
    published = asks & (asks == 0)
    retired = published
    going = pages != 0
    while going:
        expected = tl.where(idle | hidden, words, 0)
        seen = atomic_cas(ptr, expected, tl.where(hidden, words | PUBLISHED, 0))
        won = seen == expected
        published = published | (hidden & won)
        retired = retired | (idle & won)
        words = tl.where((idle | hidden) & (won == 0), seen, 0)
        asks = page_class(words) == cls
        idle = asks & is_idle(words)
        # (Drawn full again, it needs no publication, and may lie on the shelf by now.)
        hidden = asks & is_hidden(words) & (idle == 0) & (page_out(words) < class_slots(cls))
        going = any_lane(idle | hidden)
    # The flags before the hints; and what happened before the frees that made pages idle, before
    # the give.
    fence(heap + USED)
    bit = tl.full((), 1, tl.int64) << (chunk & 63).to(tl.int64)
    hinted = any_lane(published)
    tl.atomic_or(hint_ptr(heap, ORDERS + cls, chunk), bit, mask=hinted, sem="relaxed")
    given = lane_bits(retired)
    if given != 0:
        used = count_given(heap, popcount(given))
        hinted = hinted | (give_bits(heap, chunk, given) != 0)
        follow_peak(heap, used)
    return hinted.to(tl.int32)


@triton.jit(noinline=True)
def shelve_filled(heap, page, length, size):
    """Put ``length`` pages from ``page`` on, of one chunk, on the shelf, if they are detached and
    hidden slabs, full by their words. The program has cleared the live bits of all their slots, of
    ``size`` bytes, at once, and has yet to subtract them. Returns what ``put_on_shelf`` does, or 0
    if they are no such pages (all int32 scalars): then the slots are to be subtracted as usual.

    A program that can fill pages gets whole ones (``batches.open_whole``), which nobody else draws
    from and which are hidden while they are full. If a page is still in that state, then by (A) all
    that is in it is what we have cleared. So nobody else changes its word, not even a free that
    once made it hidden and has yet to :func:`settle` it, and what is accounted goes on to whoever
    takes the page from the shelf.
    """
    lane = tl.arange(0, 64)
    mine = lane < length
    announced = announce_put(heap, length)
    words = atomic_load(page_word_ptr(heap, page + tl.where(mine, lane, 0)), mine)
    cls = size_class(size)
    filled = slab_of(cls) + slots_of(size)
    done = length * 0
    if any_lane(mine & (words != filled)) == 0:
        done = put_on_shelf(heap, page, length, cls, announced)
    else:
        count_shelved(heap, -length)
    return done


@triton.jit
def shelve_filled_lanes(heap, page, size, whole):
    """:func:`shelve_filled` for the adjacent pages of the ``whole`` lanes of a block. Returns the
    lanes whose pages went on the shelf: all of these, or none."""
    last = tl.max(tl.where(whole, page, -1), axis=0)
    first = tl.min(tl.where(whole, page, FAR), axis=0)
    gone = whole & (whole == 0)
    # (Are they in one chunk? If there are none, they are not.)
    if first >> 6 == last >> 6:
        done = first * 0 + 2
        while done == 2:
            done = shelve_filled(heap, first, last - first + 1, size)
        gone = whole & (done != 0)
    return gone


@triton.jit
def settle_lanes(heap, page, word, asks):
    """:func:`settle` the pages of the flagged lanes, whose words are ``word`` now. Scalars or
    blocks; several lanes may name one page."""
    enter_transit(heap)
    hinted = tl.full((), 0, tl.int32)
    # A turn for all pages of a chunk with the same class: mostly there is one.
    key = (page & -64) + page_class(word)
    first = first_lane(asks)
    while first < width(asks):
        turn = pick(key, first)
        same = asks & (key == turn)
        bits = (word & 0) + 1 << (page & 63).to(tl.int64)
        # (If several lanes have seen words of one page, the least is the latest.)
        pages = or_lanes(tl.where(same, bits, 0))
        hinted = hinted | settle(heap, turn >> 6, pages, least_of(word, same))
        asks = asks & (same == 0)
        first = first_lane(asks)
    if hinted != 0:
        leave_transit(heap, hinted)
    else:
        # (Anything else was put by atomics whose results `settle` has looked at.)
        end_transit(heap, hinted + 1)


# Draws ----------------------------------------------------------------------------------------


@triton.jit
def unpublish(heap, cls, chunk):
    """Clear the hint of class ``cls`` for a chunk in which nothing can be drawn.

    PUBLISHED promises the hint, so it goes first, page by page; a page in which a slot is freed
    after that is published again by that free (settle). If a page was published behind our back,
    the hint is set again. In transit meanwhile, as in ``pages.drop_hints``.
    """
    lane = tl.arange(0, 64)
    hint = hint_ptr(heap, ORDERS + cls, chunk)
    bit = tl.full((), 1, tl.int64) << (chunk & 63).to(tl.int64)
    ptr = page_word_ptr(heap, chunk * 64 + lane)
    enter_transit(heap)
    words = atomic_load(ptr)
    full = is_published(words, cls) & (page_out(words) >= class_slots(cls))
    expected = tl.where(full, words, 0)
    atomic_cas(ptr, expected, tl.where(full, words ^ PUBLISHED, 0))
    tl.atomic_and(hint, bit ^ -1, sem="relaxed")
    fence(hint)
    again = any_lane(is_published(atomic_load(ptr), cls)).to(tl.int32)
    if again != 0:
        tl.atomic_or(hint, bit, sem="relaxed")
    leave_transit(heap, again)


@triton.jit
def draw_from(heap, cls, first, ptr, words, free, free_most, need):
    """Promise the caller up to ``need`` slots in pages of a chunk whose page words, at ``ptr``,
    were ``words`` with ``free`` slots, at most ``free_most`` in one. (Blocks of 64, in order of the
    pages from page ``first`` of the chunk on, and round.) A page gives up to three times 2**k
    slots. Returns k and two words of bits, the pages that give one or three times 2**k, and those
    that give two or three; 0 if other programs left nothing. The caller's transit ends here."""
    # The largest k that gives enough and leaves seven eighths of what is free, as slots are soon
    # found where many are clear. Or leaves half, or nothing; at last the one that gives most.
    k = need * 0
    share = free * 0
    most = need * 0
    leave = need * 0 + 3
    slack = leave
    step = floor_log2(tl.minimum(tl.maximum(free_most >> 3, 1), need))
    while (step >= 0) & (most < need):
        now = tl.minimum(free >> (step + leave), 3)
        gives = tl.minimum(tl.sum(now, axis=0), need >> step) << step
        k = tl.where(gives > most, step, k)
        share = tl.where(gives > most, now, share)
        slack = tl.where(gives > most, leave >> 1, slack)
        most = tl.maximum(gives, most)
        again = (step == 0) & (leave > 0) & (most < need)
        leave = tl.where(again, leave >> 1, leave)
        most_left = tl.maximum(free_most >> leave, 1)
        step = tl.where(again, floor_log2(tl.minimum(most_left, need)), step - 1)
    # No more of that than is needed, from the first page on.
    before = tl.cumsum(share, axis=0) - share
    share = tl.maximum(tl.minimum(share, (need >> k) - before), 0)
    mine = share > 0
    while any_lane(mine):
        expected = tl.where(mine, words, 0)
        more = (share << k).to(tl.int64)
        seen = atomic_cas(ptr, expected, tl.where(mine, words + more, 0))
        lost = mine & (seen != expected)
        # Where others were faster, again, if there still is enough (twice as much, if k was chosen
        # to leave seven eighths).
        words = tl.where(lost, seen, words)
        left = free_slots(words, cls, class_slots(cls)) >> (k + slack)
        share = tl.where(lost, tl.minimum(share, left), share)
        mine = lost & (share > 0)
    ones = lane_bits((share & 1) != 0)
    twos = lane_bits(share > 1)
    granted = popcount(ones) + popcount(twos) * 2 << k
    tl.atomic_add(heap + GRANTED + cls, granted.to(tl.int64), sem="relaxed")
    # (What the swap returned says how many were granted.)
    end_transit(heap, (granted > 0).to(tl.int32))
    return k, turn_right(ones, -first & 63), turn_right(twos, -first & 63)


@triton.jit(noinline=True)
def draw(heap, cls, need, looks):
    """Draw up to ``need`` slots of class ``cls`` from detached pages of a chunk (all int32).
    Returns (place, ones, twos), where place = 0 if nothing was found.

    place is written like a stripe word without a batch: its page is the first of the chunk, and its
    credits are k + 1. ``ones`` and ``twos`` are words of bits, one for each page of the chunk. In
    each page of ``ones`` the caller has 2**k slots, in those of ``twos`` twice as many, and three
    times as many in those of both.

    At most ``looks`` hinted chunks are looked at; with 0 all are, and hints that lead to nothing
    are dropped. First fit by address, but over several candidates, up to 16 times as many chunks as
    the launch has programs, so that these do not meet on the same page words. Each program begins
    at a place of its own among them and guesses that it has slots, without a look at the hints,
    unless ``looks`` is 0. Then the hints lead, and the choice is hashed.
    """
    lane = tl.arange(0, 64)
    row = ORDERS + cls
    slots = class_slots(cls)
    place = tl.full((), 0, tl.int64)
    ones = place
    twos = place
    left = tl.where(looks == 0, FAR, looks + 1)
    guess = looks > 0
    chunks = (load_geometry(heap, G_PAGES).to(tl.int32) + CHUNK_PAGES - 1) >> 6
    reach = tl.minimum(tl.minimum(program_count(), 1 << 12) << 4, chunks)
    salt = program_index()
    target = spread(salt, reach * CHUNK_PAGES)  # the page to begin with
    start = target >> 12
    while left > 0:
        chunk = target >> 6
        if guess == 0:
            # One word alone: mostly it serves, and rows that all programs read are slow.
            index = start
            hints = atomic_load(hint_ptr(heap, row, start * 64))
            if hints == 0:
                index, hints = first_hinted(heap, row, start)
            choices = tl.minimum(popcount(hints), reach)
            turn = divide((target >> 6 & 63) * choices, tl.minimum(reach, 64))
            hinted = (index << 6) + select_bit(hints, turn)
            chunk = tl.where(index != FAR, hinted, FAR)
        guess = guess != guess
        if chunk != FAR:
            # (Announced before anything is taken: by what the announcement returned.)
            announced = begin_transit(heap)
            first = target & 63
            ptr = page_word_ptr(heap, chunk * 64 + (lane + first & 63))
            states = atomic_load(ptr)
            free = tl.where(has_begun(announced), free_slots(states, cls, slots), 0)
            free_most = tl.max(free, axis=0)
            if free_most > 0:
                k, ones, twos = draw_from(heap, cls, first, ptr, states, free, free_most, need)
                drawn = pack_stripe(chunk * 64, k * 0, k + 1)
                place = tl.where((ones | twos) != 0, drawn, 0)
            else:
                end_transit(heap, looks * 0)
                if looks == 0:
                    unpublish(heap, cls, chunk)
            left = tl.where(place != 0, 0, left - 1)
            salt = mix(salt + 1)
            target = spread(salt, reach * CHUNK_PAGES)
            start = target >> 12
        else:
            # Nothing from there on: once more from the front, or there is nothing at all.
            left = tl.where(start > 0, left, 0)
            start = start * 0
    return place, ones, twos
