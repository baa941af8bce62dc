"""Lines lead programs to pages of their class. What they say is advice; the page words decide.

For each class and stripe a line counts tickets, and a ring says where they lead: ticket t of a
class with s slots to a page leads to place t div s. The program that gets the first ticket of a
place *opens* it: it finds pages and writes them into the ring. The others read the ring until they
are there. So programs that want many pages at one time open them all at one time.

A program adds to the word of a page the number of slots that it wants. What comes back says
whether the page is of its class and has room: then so many of its clear live bits are *promised*.
If not, the program takes back what it added, and draws another ticket. So nothing is wrong if a
place is old, or leads two lines to one page: it costs time.

Order: the word of a page carries it. A free fences before it clears live bits and subtracts; all
that ever changes a page word is a read-modify-write; and a malloc fences behind its addition. So
what was done in a page before happens before what its next owners do, whatever way the page took
between them. Runs touch the words of all their pages for this.
"""

import triton
import triton.language as tl

from . import layout
from .atomics import atomic_cas, atomic_load, fence, load_beside
from .bits import divide, lsr, mix, next_bit
from .lanes import any_lane, first_lane, is_block, lane_index, pick, rank_of
from .lanes import width as width_of
from .layout import ERRORS, KEPT, OPENED, PLACE_MASK, REACHED, RUN, SLAB, SPANNED
from .pages import find_pages, give_pages, give_run, move_hint, spread, try_pages

LOOKS = tl.constexpr(8)  # how many pages of the row of its class an opener tries
BESIDE = tl.constexpr(8)  # in how many words, which it loads at one time


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
    """Make the ``idle`` pages free, of which by their words nothing is out, or only what the caller
    frees, unless another program has come to them since. Returns which. Those ``listed`` may be in
    the row of their class."""
    lane = lane_index(page)
    ptr = layout.page_word_ptr(heap, page)
    if is_block(page):
        ptr = tl.where(idle, ptr, layout.idle_ptr(heap, lane))
    old = atomic_cas(ptr, tl.where(idle, word, -1), tl.where(idle, word & 0, -1))
    won = idle & (old == word)
    row = layout.class_word(heap, layout.page_class(word), page >> 6)
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
def leave_account(heap, page, counts, runs: tl.constexpr = True):
    """Take ``counts`` out of the accounts of pages, one for each lane; 0: nothing. Without ``runs``
    all pages are slabs."""
    change = counts.to(tl.int64)
    ptr = layout.page_word_ptr(heap, page)
    now = tl.atomic_add(ptr, -change, mask=counts != 0, sem="relaxed") - change
    settle(heap, page, now, counts, runs)


@triton.jit
def settle(heap, page, now, counts, runs: tl.constexpr = True):
    """What follows after ``counts`` left the accounts of pages, which left their words ``now``."""
    out = layout.page_out(now)
    below = layout.page_half(now) - out
    halved = (below >= 0) & (below < counts)
    empty = (out == 0) & (counts != 0)
    # (Mostly nothing follows, and every free waits until that is known.)
    if any_lane(halved | empty):
        crossed = halved & (out != 0) & ((now & (KEPT + SLAB + SPANNED)) == SLAB)
        row = layout.class_word(heap, layout.page_class(now), page >> 6)
        tl.atomic_or(row, layout.bit_of(page), mask=crossed, sem="relaxed")
        # (What was added to a page that is free, and taken back, leaves nothing to do.)
        idle = empty & ((now & (KEPT + SLAB)) == SLAB)
        ends = empty & ((now & RUN) != 0)
        if any_lane(idle | ends):
            retire(heap, page, now, idle, halved == 0)
            if runs:
                at = first_lane(ends)
                while at < width_of(ends):
                    retire_run(heap, pick(page, at), pick(now, at), owner=False)
                    at = first_lane(ends & (lane_index(ends) > at))


@triton.jit(noinline=True)
def leave_one(heap, page, now):
    """:func:`settle` after one left the account of ``page``, ``now`` its word. Returns 0."""
    settle(heap, page, now, page * 0 + 1)
    return page * 0


@triton.jit
def leave_slots(heap, page, leaves):
    """Take one slot each, or a run, out of the accounts of pages, for the lanes (or scalar) in
    ``leaves``. (Mostly many are left: nothing follows.)"""
    ptr = layout.page_word_ptr(heap, tl.where(leaves, page, 0))
    one = (page & 0).to(tl.int64) + 1
    now = tl.atomic_add(ptr, -one, mask=leaves, sem="relaxed") - one
    few = leaves & (((now & SLAB) == 0) | (layout.page_out(now) <= layout.page_half(now)))
    at = first_lane(few)
    while at < width_of(few):
        leave_one(heap, pick(page, at), pick(now, at))
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
def pass_over(heap, cls, page, place, counts, lanes):
    """Take back what was added to the words of pages that had no room for it (page -1: a place that
    leads to none), and go on from their places: later tickets lead to the next ones."""
    line = layout.line_ptr(heap, cls)
    word = atomic_load(line, lanes)
    left = word.to(tl.int32)
    last = lanes & (left > 0) & (((line_places(word) - 1) & PLACE_MASK) == place)
    lane = lane_index(page)
    ptr = tl.where(last, line, layout.idle_ptr(heap, lane))
    atomic_cas(ptr, tl.where(last, word, -1), tl.where(last, word - left.to(tl.int64), -1))
    there = lanes & (page >= 0)
    if any_lane(there):
        stop_keeping(heap, page, there)
        leave_account(heap, tl.where(there, page, 0), tl.where(there, counts, 0))


@triton.jit
def find_halves(heap, cls, row, chunk, seen):
    """Two pages of their class with room for half of their slots for each lane, -1 where none was
    found. Of the words of the row from ``chunk`` on, those in ``seen`` had bits. (Programs that
    see the same words begin with different ones.)"""
    lane = lane_index(chunk)
    first = chunk * 0 - 1
    second = first
    at = chunk
    some = (chunk * 0).to(tl.int64)
    wants = seen != 0
    tries = 0
    while any_lane(wants) & (tries < LOOKS):
        salt = mix(layout.program_index() * 64 + lane + tries * 977)
        empty = wants & (some == 0)
        if any_lane(empty):
            step = next_bit(tl.where(empty, seen, 1).to(tl.int64), salt >> 8 & (BESIDE - 1))
            at = tl.where(empty, chunk + step, at)
            some = tl.where(empty, atomic_load(row + at, empty), some)
            seen = tl.where(empty, seen & (-1 - (step * 0 + 1 << step)), seen)
        looks = wants & (some != 0)
        bit = next_bit(tl.where(looks, some, 1), salt & 63)
        page = tl.where(looks, at * 64 + bit, 0)
        old = tl.atomic_and(row + at, layout.bit_of(bit) ^ -1, mask=looks, sem="relaxed")
        word = atomic_load(layout.page_word_ptr(heap, page), looks)
        good = looks & ((old & layout.bit_of(bit)) != 0)
        # (With room for half of its slots, of which none was in a magazine.)
        half = layout.is_slab_of(word, cls) & (layout.page_out(word) <= layout.page_half(word))
        good = good & (half & ((word & SPANNED) == 0))
        second = tl.where(good & (first >= 0), page, second)
        first = tl.where(good & (first < 0), page, first)
        some = tl.where(looks, old & (layout.bit_of(bit) ^ -1), some)
        wants = wants & (second < 0) & ((some != 0) | (seen != 0))
        tries += 1
    return first, second


@triton.jit
def open_places(heap, cls, slots, place, opens, front, area):
    """Open the places of the lanes (or scalar) in ``opens``, each with two pages of the class that
    have room for half of their slots, or with one of these and a fresh one, or with a fresh one.
    Looks for fresh ones in the ``area`` that :func:`pages.window` gives, and for others before it,
    too. A program that got no fresh page at once first looks for others: most need none then."""
    width, start = area
    lane = lane_index(place)
    chunks = layout.load_chunks(heap)
    reach = tl.minimum(front + (width >> 6) + 1, chunks)
    # (Lanes that open nothing look, too, all at one place, but each program's elsewhere.)
    own = tl.where(opens, lane * 3 + place * 7, 0)
    chunk = spread(layout.program_index() * 5 + own, tl.maximum(reach - BESIDE, 0) + 1)
    row = layout.class_word(heap, tl.where(opens, cls, layout.program_index() & 31), 0)
    # (All under way at one time.)
    page = front * 64 + start + tl.where(opens, rank_of(opens), 0)
    page = tl.where(page < chunks * 64, page, page - chunks * 64)
    got, old = try_pages(heap, page, 1, opens)
    seen = load_beside(row + chunk, opens, BESIDE)
    seen = seen & ((reach * 0 + 1 << tl.minimum(reach, BESIDE)) - 1)
    half_1 = page * 0 - 1
    half_2 = half_1
    if any_lane(seen != 0):
        half_1, half_2 = find_halves(heap, cls, row, chunk, seen)
    both = opens & (half_2 >= 0)
    give_pages(heap, page, got & both)
    lost = opens & (got == 0) & (both == 0)
    if any_lane(lost):
        page, _one = find_pages(heap, lost, page, old, front * 0 + 1, width)
    page = tl.where(both, -1, page)
    first = tl.where(half_1 >= 0, half_1, page)
    second = tl.where(half_2 >= 0, half_2, page)
    fresh = opens & (page >= 0)
    ptr = layout.page_word_ptr(heap, tl.where(fresh, page, 0))
    tl.atomic_add(ptr, layout.slab_word(cls, slots) + KEPT, mask=fresh, sem="relaxed")
    state = layout.pack_place(first, second, place)
    tl.atomic_xchg(layout.place_ptr(heap, cls, place), state, mask=opens, sem="relaxed")
    # (What the others wait for comes first.)
    more = slots.to(tl.int64) + OPENED
    tl.atomic_add(layout.line_ptr(heap, cls), more, mask=opens, sem="relaxed")
    one = fresh & (half_1 >= 0)
    tl.atomic_or(row + (page >> 6), layout.bit_of(page), mask=one, sem="relaxed")
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
