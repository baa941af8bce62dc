"""Lines lead programs to pages of their class. What they say is advice; the page words decide.

For each class and stripe a line counts tickets, and a ring says where they lead: ticket t of a
class with s slots to a page leads to place t div s. The program that gets the first ticket of a
place *opens* it: it finds pages and writes them into the ring. The others read the ring until they
are there. So programs that want many pages at one time open them all at one time.

A program adds to the word of a page the number of slots that it wants. What comes back says
whether the page is of its class and has room: then so many of its clear live bits are *promised*.
If not, the program takes back what it added, asks the other page of the place, and draws another
ticket. So nothing is wrong if a place is old, or leads two lines to one page: it costs time.

Order: the word of a page carries it. A free fences before it clears live bits and subtracts; all
that ever changes a page word is a read-modify-write; and a malloc fences behind its addition. So
what was done in a page before happens before what its next owners do, whatever way the page took
between them. Runs touch the words of all their pages for this.
"""

import triton
import triton.language as tl

from . import layout
from .atomics import atomic_cas, atomic_load, fence
from .bits import divide, join, lowest_bit, lsr, mix, next_bit, popcount
from .groups import from_leader, has_groups, last_start
from .lanes import any_lane, first_lane, is_block, lane_index, pick, rank_of, unite
from .lanes import width as width_of
from .layout import ERRORS, KEPT, OPENED, OUT_MASK, PLACE_MASK, REACHED, RUN, SLAB, SPANNED
from .pages import find_pages, give_pages, give_run, move_hint, try_pages

LOOKS = tl.constexpr(6)  # how often an opener looks for pages of its class
BESIDE = tl.constexpr(2)  # in how many words for each lane, loaded at one time


@triton.jit
def line_places(word):
    """Places opened so far (int32, 31 bits)."""
    # (Credits below zero have borrowed one from the upper half.)
    return (((word + (1 << 31)) >> 32) & PLACE_MASK).to(tl.int32)


@triton.jit
def ticket_place(word, rank, slots):
    """``(place, slot)`` of the ``rank``-th of the tickets that were taken by a subtraction that
    returned line word ``word``."""
    # (Fewer tickets are left than a place has: each place is opened after its first was drawn.)
    left = word.to(tl.int32) - 1 - rank
    opened = left >= 0
    behind = tl.maximum(-1 - left, 0)
    ahead = divide(behind, slots)
    place = line_places(word) + tl.where(opened, -1, ahead)
    slot = tl.where(opened, slots - 1 - left, behind - ahead * slots)
    return place & PLACE_MASK, slot


@triton.jit
def retire(heap, page, word, idle, listed):
    """Make the ``idle`` pages free, which have nothing out by their words, unless another program
    has come to them since. Returns which. Those ``listed`` may be in the row of their class."""
    lane = lane_index(page)
    ptr = layout.page_word_ptr(heap, page)
    if is_block(page):
        ptr = tl.where(idle, ptr, layout.idle_ptr(heap, lane))
    old = atomic_cas(ptr, tl.where(idle, word, -1), tl.where(idle, word & 0, -1))
    won = idle & (old == word)
    row = layout.class_row(heap, layout.page_class(word)) + (page >> 6)
    tl.atomic_and(row, layout.bit_of(page) ^ -1, mask=won & listed, sem="relaxed")
    give_pages(heap, page, won)
    return won


@triton.jit(noinline=True)
def touch_words(heap, page, n, kind):
    """Add ``kind`` (int64 scalar) to the word of ``page``, and 0 to those of the other pages of the
    ``n`` from there on (int32 scalars), since they carry the order between the owners of a page.
    Returns 0, made of what was there, so that what depends on it comes later."""
    lane = tl.arange(0, 32)
    at = n * 0
    seen = (n * 0).to(tl.int64)
    while at < n:
        here = at + lane < n
        ptr = layout.page_word_ptr(heap, tl.where(here, page + at + lane, page))
        change = tl.where(at + lane == 0, kind, 0)
        words = tl.atomic_add(ptr, change, mask=here, sem="relaxed")
        seen += tl.sum(tl.where(here, lsr(words, 63), 0), axis=0)
        at += 32
    return seen.to(tl.int32)


@triton.jit(noinline=True)
def retire_run(heap, page, word, owner: tl.constexpr):
    """Give back the pages of the run at ``page`` if this is its word. The caller is the ``owner``,
    who has freed it behind a fence, or else comes after the owner. Returns whether (int32)."""
    ptr = layout.page_word_ptr(heap, page)
    won = (atomic_cas(ptr, word, word & 0) == word).to(tl.int32)
    if won != 0:
        if not owner:
            # What was done in the run happens before what its pages' next owners do.
            fence(heap + ERRORS, "acq_rel")
        length = layout.run_pages(word).to(tl.int32)
        give_run(heap, page, length + touch_words(heap, page, length, word & 0))
    return won


@triton.jit
def leave_account(heap, page, now, counts, speaks, runs: tl.constexpr = True):
    """What follows after ``counts`` left the accounts of pages, which left their words ``now``.
    Without ``runs`` all pages are slabs."""
    out = layout.page_out(now)
    # (What was added to a page that is free, and taken back, leaves nothing to do.)
    slab = speaks & ((now & (KEPT + SLAB)) == SLAB)
    idle = slab & (out == 0)
    limit = layout.page_limit(now)
    above = out + counts > limit
    crossed = slab & (out > 0) & (out <= limit) & above & ((now & SPANNED) == 0)
    row = layout.class_row(heap, layout.page_class(now)) + (page >> 6)
    tl.atomic_or(row, layout.bit_of(page), mask=crossed, sem="relaxed")
    ends = speaks & ((now & (RUN + OUT_MASK)) == RUN)
    if any_lane(idle | ends):
        retire(heap, page, now, idle, above == 0)
        if runs:
            at = first_lane(ends)
            while at < width_of(ends):
                retire_run(heap, pick(page, at), pick(now, at), owner=False)
                at = first_lane(ends & (lane_index(ends) > at))


@triton.jit(noinline=True)
def leave_one(heap, page, now, count):
    """:func:`leave_account` after ``count`` left the account of ``page``, ``now`` its word.
    Returns 0."""
    leave_account(heap, page, now, count, page >= 0)
    return page * 0


@triton.jit
def leave_slots(heap, page, counts, leaves):
    """Take ``counts`` slots, or a run, out of the accounts of pages, for the lanes (or scalar) in
    ``leaves``. (Mostly many are left: nothing follows.)"""
    ptr = layout.page_word_ptr(heap, tl.where(leaves, page, 0))
    change = counts.to(tl.int64)
    now = tl.atomic_add(ptr, -change, mask=leaves, sem="relaxed") - change
    few = leaves & (((now & SLAB) == 0) | (layout.page_out(now) <= layout.page_limit(now)))
    at = first_lane(few)
    while at < width_of(few):
        leave_one(heap, pick(page, at), pick(now, at), pick(counts, at))
        at = first_lane(few & (lane_index(few) > at))


@triton.jit
def promise(heap, page, cls, counts, slots, asks):
    """Ask pages for slots, ``counts`` each. Returns how many of them the caller was promised."""
    ptr = layout.page_word_ptr(heap, tl.where(asks, page, 0))
    old = tl.atomic_add(ptr, counts.to(tl.int64), mask=asks, sem="relaxed")
    room = tl.where(layout.is_slab_of(old, cls), slots - layout.page_out(old), 0)
    return tl.where(asks, tl.minimum(tl.maximum(room, 0), counts), 0)


@triton.jit
def stop_keeping(heap, page, lanes):
    """Let pages be retired when they are empty: nothing leads to them any more."""
    ptr = layout.page_word_ptr(heap, tl.where(lanes, page, 0))
    tl.atomic_and(ptr, (ptr.to(tl.int64) & 0) + (-1 - KEPT), mask=lanes, sem="relaxed")


@triton.jit
def take_back(heap, page, counts):
    """Take back what was added to the word of a page that has no room for it (int32 scalars)."""
    stop_keeping(heap, page, page >= 0)
    leave_slots(heap, page, counts, page >= 0)


@triton.jit
def pass_over(heap, cls, place):
    """Go on from a place (int32 scalar) that has no room, or leads to no page: later tickets lead
    to the next one."""
    line = layout.line_ptr(heap, cls)
    word = atomic_load(line)
    left = word.to(tl.int32)
    if (left > 0) & (((line_places(word) - 1) & PLACE_MASK) == place):
        atomic_cas(line, word, word - left.to(tl.int64))


@triton.jit(noinline=True)
def turn_over(heap, cls, place, page, other, tickets, granted, skip):
    """What follows if ``page`` promised ``granted`` of ``tickets``, too few, or if ``skip`` is 1
    (int32 scalars). If it had no room at all, the ``other`` page of its place may have some. If
    neither has, later tickets are led to other places. Returns the page and how many it promised,
    joined."""
    void = page < 0
    if (page >= 0) & (granted < tickets):
        take_back(heap, page, tickets - granted)
        void = (other < 0) | (other == page)
        if (void == 0) & (granted == 0):
            page = other
            granted = promise(heap, page, cls, tickets, layout.class_slots(cls), page >= 0)
            void = granted < tickets
            if void:
                take_back(heap, page, tickets - granted)
    if void | (skip != 0):
        pass_over(heap, cls, place)
        if (page >= 0) & (granted == tickets):
            stop_keeping(heap, page, page >= 0)
    return join(page, granted)


@triton.jit
def together(bits):
    """The bits of all lanes of a block, each of which has others; on AMD, its own."""
    return unite(bits) if has_groups() else bits


@triton.jit
def find_listed(heap, cls, opens, reach):
    """Two listed pages for each lane that opens, -1 where none was found. All lanes look, each for
    the last that opens up to it, or else the last of all, in words of the row of its class below
    chunk ``reach``. Where others take the pages that it saw first, it looks again."""
    lane = lane_index(cls)
    one = lane * 0 + 1 << lane
    upto = one * 2 - 1
    starts = together(tl.where(opens, one, 0))
    leader = last_start(tl.where((starts & upto) != 0, upto, -1), opens)
    theirs = one
    if has_groups():
        above = starts & (upto ^ -1)
        below = tl.where(above != 0, 0, (starts & -starts) - 1)
        theirs = from_leader(((above & -above) - 1 & -one) | below, leader)
    cls = from_leader(cls, leader)
    seeks = from_leader(opens.to(tl.int32), leader) != 0
    first = lane * 0 - 1
    second = first
    looks: tl.constexpr = BESIDE * width_of(cls)
    tries = 0
    while any_lane(seeks) & (tries < LOOKS):
        salt = mix(layout.program_index() * 8 + tries)
        chunk = lane * 0
        word = (lane * 0).to(tl.int64)
        for step in tl.static_range(BESIDE):
            # (At equal distances. Which come last, and count more, differs by program and try.)
            at = (lane + salt & (width_of(cls) - 1)) * BESIDE + (step + (salt >> 16) & (BESIDE - 1))
            at = (at * 32 + (salt >> 8 & 31)) * reach // (32 * looks)
            found = atomic_load(layout.class_row(heap, cls) + at)
            chunk = tl.where(found != 0, at, chunk)
            word = tl.where(found != 0, found, word)
        offers = together(tl.where(seeks & (word != 0), one, 0)) & theirs
        before = popcount((offers & one - 1).to(tl.int64) & 0xFFFFFFFF) + (first >= 0).to(tl.int32)
        takes = ((offers & one) != 0) & (before < 2)
        page = chunk * 64 + next_bit(tl.where(word != 0, word, 1), mix(salt + lane) & 63)
        row = layout.class_row(heap, cls) + chunk
        bit = layout.bit_of(page)
        old = tl.atomic_and(row, bit ^ -1, mask=takes, sem="relaxed")
        word = atomic_load(layout.page_word_ptr(heap, page), takes)
        mine = takes & ((old & bit) != 0)
        # (It may have become fuller, or another's, since; or have slots in a magazine.)
        good = layout.is_slab_of(word, cls) & (layout.page_out(word) <= layout.page_limit(word))
        good = mine & good & ((word & SPANNED) == 0)
        won = together(tl.where(good, one, 0)) & theirs
        low = won & -won
        high = won ^ low
        page_1 = from_leader(page, lowest_bit(tl.where(low != 0, low, 1).to(tl.int64)) & 31)
        page_2 = from_leader(page, lowest_bit(tl.where(high != 0, high, 1).to(tl.int64)) & 31)
        page_1 = tl.where(low != 0, page_1, -1)
        second = tl.where(first >= 0, page_1, tl.where(high != 0, page_2, -1))
        first = tl.where(first >= 0, first, page_1)
        # (Of bits of pages that are gone there may be many: then a fresh page is the shorter way.)
        stale = together(tl.where(mine & (good == 0), one, 0)) & theirs
        seeks = seeks & (second < 0) & (offers != 0) & (stale == 0)
        tries += 1
    return tl.where(opens, first, -1), tl.where(opens, second, -1)


@triton.jit
def open_places(heap, cls, slots, place, opens, front, area):
    """Open the places of the lanes (or scalar) in ``opens``, each with two listed pages of the
    class, or with one of these and a fresh one, or with a fresh one. Looks for fresh ones in the
    ``area`` that :func:`pages.window` gives, and for others in as many chunks as the pages that are
    in use fill, and an eighth more: those beyond become empty in time. A program that got no fresh
    page at once first looks for others: most need none then."""
    width, start, used = area
    chunks = layout.load_chunks(heap)
    reach = tl.minimum((tl.maximum(front * 64 + width, used + (used >> 3)) >> 6) + 1, chunks)
    # (All under way at one time.)
    page = front * 64 + start + tl.where(opens, rank_of(opens), 0)
    page = tl.where(page < chunks * 64, page, page - chunks * 64)
    got, old = try_pages(heap, page, 1, opens)
    listed_1, listed_2 = find_listed(heap, cls, opens, reach)
    both = opens & (listed_2 >= 0)
    give_pages(heap, page, got & both)
    lost = opens & (got == 0) & (both == 0)
    if any_lane(lost):
        page, _one = find_pages(heap, lost, page, old, front * 0 + 1, width)
    page = tl.where(both, -1, page)
    first = tl.where(listed_1 >= 0, listed_1, page)
    second = tl.where(listed_2 >= 0, listed_2, page)
    fresh = opens & (page >= 0)
    ptr = layout.page_word_ptr(heap, tl.where(fresh, page, 0))
    tl.atomic_add(ptr, layout.slab_word(cls, slots) + KEPT, mask=fresh, sem="relaxed")
    state = layout.pack_place(first, second, place)
    tl.atomic_xchg(layout.place_ptr(heap, cls, place), state, mask=opens, sem="relaxed")
    # (What the others wait for comes first.)
    more = slots.to(tl.int64) + OPENED
    tl.atomic_add(layout.line_ptr(heap, cls), more, mask=opens, sem="relaxed")
    one = fresh & (listed_1 >= 0)
    row = layout.class_row(heap, cls) + (page >> 6)
    tl.atomic_or(row, layout.bit_of(page), mask=one, sem="relaxed")
    tl.atomic_max(ptr + REACHED, (page & 0).to(tl.int64) + 1, mask=fresh, sem="relaxed")
    if any_lane(both & (got == 0)):
        # (So that the hint says when no page is free.)
        move_hint(heap)


@triton.jit
def await_places(ptr, place, wants, polls: tl.constexpr):
    """The words of the places of the lanes (or scalar) in ``wants``, which wait a bounded time
    until they are open. Where the ring has come round since, there is nothing to wait for."""
    word = atomic_load(ptr, wants)
    waits = wants & layout.is_before(word, place)
    tries = 0
    while any_lane(waits) & (tries < polls):
        now = atomic_load(ptr, waits)
        word = tl.where(waits, now, word)
        waits = waits & layout.is_before(now, place)
        tries += 1
    return word
