"""What a kernel calls: malloc, free, usable_size, zeros, realloc.

Everything is written for a 1-D block of requests, one per lane; a scalar request is a block of one
lane. The lanes of a program that want the same thing as its first active lane are served by one
atomic; the others go lane by lane, in the same instruction.

A malloc of one lane or of a uniform block is two dependent round trips to memory: the ticket and
the claim. A free is three: pin, clear, count. Everything else is behind a branch, and its bulk in
functions that are not inlined.

Owns the slot bits: bit s of a slab page is set while slot s is live.
"""

import triton
import triton.language as tl

from .atomics import atomic_cas, atomic_load, fence
from .bits import divide, low_mask, lsr, mix, popcount, select_bit
from .layout import (
    ATTACHED,
    E_DOUBLE_FREE,
    E_INVALID_ARGUMENT,
    E_INVALID_FREE,
    E_OUT_OF_MEMORY,
    ERRORS,
    G_BASE,
    G_PAGES,
    G_SLOT_BITS,
    G_STRIPES,
    KIND_FREE,
    KIND_RUN,
    KIND_SHIFT,
    MAX_SLOT,
    PAGE_BYTES,
    PAGE_LOG2,
    PIN,
    PIN_SHIFT,
    PUBLISHED,
    RUNS,
    SLOT_WORDS,
    class_bytes,
    load_geometry,
    page_bits_ptr,
    page_class,
    page_count,
    page_kind,
    page_pins,
    page_word_ptr,
    program_index,
    size_class,
    slot_bits_ptr,
    stripe_credits,
    stripe_place,
    stripe_ptr,
)
from .pages import release_run
from .record import record_error
from .slabs import is_slab, more_tickets, settle, take_run

# Lanes ----------------------------------------------------------------------------------------


@triton.jit
def count_lanes(flags):
    return tl.sum(flags.to(tl.int32), axis=0)


@triton.jit
def first_lane(flags):
    """Lane of the first true flag; the width of the block if there is none."""
    lane = tl.arange(0, flags.shape[0])
    return tl.min(tl.where(flags, lane, flags.shape[0]), axis=0)


@triton.jit
def pick(values, lane):
    """The scalar in ``lane`` of a block."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == lane, values, 0), axis=0)


@triton.jit
def group_of(key, active):
    """The lanes that share the key (int32, below 2**24) of the first active lane.

    Returns ``(leader, grouped)``: the leader is a lane; it acts for all grouped lanes.
    """
    lane = tl.arange(0, key.shape[0]).to(tl.int64)
    none: tl.constexpr = 1 << 40
    first = tl.min(tl.where(active, (lane << 24) + key, none), axis=0)
    grouped = active & (key == (first & 0xFFFFFF).to(tl.int32))
    return (first >> 24).to(tl.int32), grouped


@triton.jit
def report_lanes(heap, kind: tl.constexpr, flags, addr, size):
    """Count the flagged lanes as errors of ``kind`` and record the first of them."""
    bad = count_lanes(flags)
    if bad > 0:
        at = first_lane(flags)
        record_error(heap, bad * 0 + kind, pick(addr, at), pick(size, at), bad)


# malloc ---------------------------------------------------------------------------------------


@triton.constexpr_function
def claim_order(lanes):
    """The order of tickets and claims: acquire for a single lane, where it costs nothing; for a
    block relaxed, and a fence behind it all, because every element would pay (atomics.fence)."""
    return "acquire" if lanes == 1 else "relaxed"


@triton.jit
def take_tickets(heap, cls, active, stripes):
    """A stripe word and a rank for every active lane: it owns a slot if rank < credits."""
    lane = tl.arange(0, cls.shape[0])
    leader, grouped = group_of(cls, active)
    ones = grouped.to(tl.int32)
    place = tl.cumsum(ones, axis=0) - 1
    count = tl.where(lane == leader, tl.sum(ones, axis=0), 1)
    acts = active & ((lane == leader) | (grouped == 0))
    ptr = stripe_ptr(heap, cls, program_index() & (stripes - 1))
    sem: tl.constexpr = claim_order(cls.shape[0])
    old = tl.atomic_add(ptr, -count.to(tl.int64), mask=acts, sem=sem)
    word = tl.where(grouped, pick(old, leader), old)
    return word, tl.where(grouped, place, 0)


@triton.jit
def refill_tickets(heap, cls, word, rank, active):
    """Tickets for the lanes whose stripe was dry. Returns all words and ranks anew, and the
    lanes for which the heap has nothing left."""
    pending = active & (rank >= stripe_credits(word))
    crossed = pending & (stripe_credits(word) >= 0)
    failed = active & (active == 0)
    left = count_lanes(pending)
    while left > 0:
        # Refills that are ours come first: whoever waits for us may be waited for by us.
        duty = pending & crossed
        wanted = pick(cls, first_lane(tl.where(count_lanes(duty) > 0, duty, pending)))
        same = pending & (cls == wanted)
        place = tl.cumsum(same.to(tl.int32), axis=0) - 1
        more = more_tickets(heap, wanted, count_lanes(same), count_lanes(same & crossed))
        credits = stripe_credits(more)
        got = same & (place < credits)
        word = tl.where(got, more, word)
        rank = tl.where(got, place, rank)
        failed = failed | (same & (credits <= 0))
        # What one refill did not cover is ours to refill again.
        crossed = crossed | same
        pending = pending & (got == 0) & (failed == 0)
        left = count_lanes(pending)
    return word, rank, failed


@triton.jit
def claim_slots(bits, word, rank, slots, active):
    """Turn tickets into slots: ``(page, slot)`` per lane, their bits set.

    A ticket into a fresh batch names its slot; any other only promises one in its page, and the
    search for it begins at a hashed place. Either way the bit is claimed by an `or` that says
    whether it was clear. If it was not, the word that came back shows which bits are, and the
    next try takes one of those. Tickets are accounted, so a clear bit is always there. ``bits``
    points to the slot bits of page 0.
    """
    first, batch, fresh = stripe_place(word)
    ticket = batch * slots - stripe_credits(word).to(tl.int32) + rank
    # Inactive lanes must index nothing wild.
    salt = mix(program_index() * 4096 + tl.arange(0, slots.shape[0]))
    ticket = tl.where(fresh != 0, ticket, (salt & 0xFFFF) * slots >> 16)
    ticket = tl.where(active, ticket, 0)
    step = divide(ticket, slots)
    page = tl.where(active, first + step, 0)
    slot = ticket - step * slots
    ptr = bits + page.to(tl.int64) * SLOT_WORDS
    bit = tl.full(slot.shape, 1, tl.int64) << (slot & 63).to(tl.int64)
    sem: tl.constexpr = claim_order(slot.shape[0])
    old = tl.atomic_or(ptr + (slot >> 6), bit, mask=active, sem=sem)
    lost = active & ((old & bit) != 0)
    left = count_lanes(lost)
    words = (slots + 63) >> 6
    while left > 0:
        at = slot >> 6
        valid = low_mask(tl.minimum(slots - at * 64, 64).to(tl.int64))
        clear = (old ^ -1) & valid
        choices = popcount(clear)
        here = at * 64 + select_bit(clear, salt % tl.maximum(choices, 1))
        next_word = tl.where(at + 1 < words, at + 1, 0) * 64
        slot = tl.where(lost, tl.where(choices > 0, here, next_word), slot)
        bit = tl.full(slot.shape, 1, tl.int64) << (slot & 63).to(tl.int64)
        old = tl.atomic_or(ptr + (slot >> 6), bit, mask=lost, sem=sem)
        lost = lost & ((old & bit) != 0)
        left = count_lanes(lost)
        salt = mix(salt)
    return page, slot


@triton.jit
def malloc_lanes(heap, nbytes, active):
    """:func:`malloc` for a block of int64 sizes; inactive lanes give 0."""
    base = load_geometry(heap, G_BASE)
    stripes = load_geometry(heap, G_STRIPES).to(tl.int32)
    bits = heap + load_geometry(heap, G_SLOT_BITS)
    asks = active & (nbytes > 0)
    small = asks & (nbytes <= MAX_SLOT)
    cls = size_class(tl.where(small, nbytes, 1).to(tl.int32))
    size = class_bytes(cls)
    slots = divide(size * 0 + PAGE_BYTES, size)
    word, rank = take_tickets(heap, cls, small, stripes)
    # One look decides whether anything out of the ordinary is asked for.
    odd = tl.where(small, rank >= stripe_credits(word), active & (nbytes != 0))
    unusual = count_lanes(odd)
    failed = active & (active == 0)
    if unusual > 0:
        word, rank, failed = refill_tickets(heap, cls, word, rank, small)
    placed = small & (failed == 0)
    page, slot = claim_slots(bits, word, rank, slots, placed)
    offset = (page.to(tl.int64) << PAGE_LOG2) + (slot * size).to(tl.int64)
    addr = tl.where(placed, base + offset, 0)
    if unusual > 0:
        addr = malloc_large(heap, addr, nbytes, asks & (nbytes > MAX_SLOT))
        report_lanes(heap, E_INVALID_ARGUMENT, active & (nbytes < 0), addr, nbytes)
        report_lanes(heap, E_OUT_OF_MEMORY, asks & (addr == 0), addr, nbytes)
    # What the last owners wrote happens before anything we will. (A run was fenced when taken.)
    if nbytes.shape[0] == 1:
        tl.debug_barrier()
    else:
        fence(heap + ERRORS)
    return addr


@triton.jit
def malloc_large(heap, addr, nbytes, large):
    """``addr`` with the addresses of runs in the ``large`` lanes, one by one."""
    left = count_lanes(large)
    while left > 0:
        at = first_lane(large)
        length = ((pick(nbytes, at) - 1) >> PAGE_LOG2) + 1
        run = malloc_run(heap, length)
        here = tl.arange(0, large.shape[0]) == at
        addr = tl.where(here, run, addr)
        large = large & (here == 0)
        left = count_lanes(large)
    return addr


@triton.jit(noinline=True)
def malloc_run(heap, length):
    """Allocate ``length`` pages (int64 scalar): the address, or 0."""
    addr = length * 0
    if length <= load_geometry(heap, G_PAGES):
        page = take_run(heap, length.to(tl.int32))
        if page >= 0:
            tl.atomic_add(heap + RUNS, length * 0 + 1, sem="relaxed")
            # Added, not stored: a free of a wrong address may have pinned the page.
            fence(heap + RUNS)
            state = length + (KIND_RUN << KIND_SHIFT)
            tl.atomic_add(page_word_ptr(heap, page), state, sem="relaxed")
            addr = load_geometry(heap, G_BASE) + (page.to(tl.int64) << PAGE_LOG2)
    return addr


# free -----------------------------------------------------------------------------------------


@triton.jit
def locate(heap, addr, active):
    """``(inside, page, within)``: is it an aligned address of the heap, its page, offset in it."""
    offset = addr - load_geometry(heap, G_BASE)
    size = load_geometry(heap, G_PAGES) << PAGE_LOG2
    inside = active & (offset >= 0) & (offset < size) & ((offset & 15) == 0)
    offset = tl.where(inside, offset, 0)
    return inside, (offset >> PAGE_LOG2).to(tl.int32), (offset & (PAGE_BYTES - 1)).to(tl.int32)


@triton.jit
def slot_of(state, within):
    """``(slot, slots, exact)``: which slot of a slab page an offset lies in, how many the page
    has, and whether the offset begins the slot."""
    size = class_bytes(page_class(state))
    slots = divide(size * 0 + PAGE_BYTES, size)
    slot = divide(within, size)
    return slot, slots, (slot * size == within) & (slot < slots)


@triton.jit
def free_lanes(heap, addr, active):
    """:func:`free` for a block of int64 addresses."""
    lane = tl.arange(0, addr.shape[0])
    active = active & (addr != 0)
    bits = heap + load_geometry(heap, G_SLOT_BITS)
    inside, page, within = locate(heap, addr, active)
    ptr = page_word_ptr(heap, page)
    leader, grouped = group_of(page, inside)
    acts = inside & ((lane == leader) | (grouped == 0))

    # What this program wrote happens before anything the next owner does.
    fence(heap + ERRORS)

    # Pin: from here to the unpin below no slab among these pages is retired.
    pin = tl.full(addr.shape, PIN, tl.int64)
    old = tl.atomic_add(ptr, pin, mask=acts, sem="relaxed")
    state = tl.where(grouped, pick(old, leader), old)
    slot, slots, exact = slot_of(state, within)
    tracked = inside & is_slab(state) & exact

    # Clear the live bits.
    bit = tl.full(addr.shape, 1, tl.int64) << (slot & 63).to(tl.int64)
    word_ptr = bits + page.to(tl.int64) * SLOT_WORDS + (slot >> 6)
    live = tl.atomic_and(word_ptr, bit ^ -1, mask=tracked, sem="relaxed")
    freed = tracked & ((live & bit) != 0)

    # Count what was freed and unpin, in one addition per page.
    ones = freed.to(tl.int32)
    total = tl.where(lane == leader, tl.sum(tl.where(grouped, ones, 0), axis=0), ones)
    change = total.to(tl.int64) - PIN
    now = tl.atomic_add(ptr, change, mask=acts, sem="relaxed") + change
    # Until the unpin the page was the slab that we saw; now it may be for us to settle.
    detached = acts & is_slab(now) & ((now & ATTACHED) == 0)
    # (A wrong free may have pinned anything, and seen another class: let settle look.)
    idle = (page_pins(now) == 0) & ((page_count(now) == slots) | (is_slab(state) == 0))
    hidden = ((now & PUBLISHED) == 0) & (page_count(now) > 0)
    asks = detached & (idle | hidden)

    odd = asks | (active & (freed == 0))
    if count_lanes(odd) > 0:
        finish_frees(heap, page, asks)
        run = inside & (page_kind(state) == KIND_RUN) & (within == 0)
        freed = freed | free_runs(heap, page, run)
        wrong = active & (freed == 0)
        if count_lanes(wrong) > 0:
            # Nothing lives at a well-formed address: freed before, or never handed out.
            empty = inside & (page_kind(state) == KIND_FREE)
            dead = tracked | run | (empty & pages_become_free(heap, page, wrong & empty))
            double = wrong & inside & dead
            report_lanes(heap, E_DOUBLE_FREE, double, addr, addr * 0)
            report_lanes(heap, E_INVALID_FREE, wrong & (double == 0), addr, addr * 0)


@triton.jit
def pages_become_free(heap, page, active):
    """Which of the pages are free, rather than inside a run. Looks again a few times, because a
    page that is just being given back has lost its page word and not yet got its page bit."""
    ptr = page_bits_ptr(heap, page >> 6)
    shift = (page & 63).to(tl.int64)
    found = active & (active == 0)
    looks = count_lanes(active) * 0 + 64
    while looks > 0:
        bits = atomic_load(ptr, active)
        found = active & ((lsr(bits, shift) & 1) != 0)
        looks = tl.where(count_lanes(active & (found == 0)) > 0, looks - 1, 0)
    return found


@triton.jit
def finish_frees(heap, page, asks):
    """Settle the pages of the flagged lanes, chunk by chunk."""
    left = count_lanes(asks)
    while left > 0:
        chunk = pick(page, first_lane(asks)) >> 6
        same = asks & ((page >> 6) == chunk)
        # Several lanes may ask for the same page.
        bits = tl.full((), 0, tl.int64)
        turn = same
        more = count_lanes(turn)
        while more > 0:
            at = pick(page, first_lane(turn))
            bits = bits | (tl.full((), 1, tl.int64) << (at & 63).to(tl.int64))
            turn = turn & (page != at)
            more = count_lanes(turn)
        settle(heap, chunk, bits)
        asks = asks & (same == 0)
        left = count_lanes(asks)


@triton.jit
def free_runs(heap, page, flags):
    """Free the runs that begin at the pages of the flagged lanes; says which lanes succeeded."""
    freed = flags & (flags == 0)
    left = count_lanes(flags)
    while left > 0:
        at = first_lane(flags)
        here = tl.arange(0, flags.shape[0]) == at
        done = free_run(heap, pick(page, at))
        freed = freed | (here & (done != 0))
        flags = flags & (here == 0)
        left = count_lanes(flags)
    return freed


@triton.jit(noinline=True)
def free_run(heap, page):
    """Free the run that begins at ``page`` (int32 scalar): 1, or 0 if none does (any more).

    The compare-and-swap from RUN to FREE decides between two frees of the same run; pins of
    wrong frees that are at work on the page stay in the word.
    """
    ptr = page_word_ptr(heap, page)
    word = atomic_load(ptr)
    done = page * 0
    while (done == 0) & (page_kind(word) == KIND_RUN):
        old = atomic_cas(ptr, word, word >> PIN_SHIFT << PIN_SHIFT)
        if old == word:
            release_run(heap, page, page_count(word))
            done += 1
        word = old
    return done


# The contract ---------------------------------------------------------------------------------


@triton.jit
def as_lanes(x, mask):
    """``(lanes, active)``: a scalar or Python number as a block of one lane, or of the mask's
    lanes; a block as it is; int64, and which lanes take part."""
    lanes = x + tl.zeros((1,), tl.int64)
    active = lanes == lanes
    if mask is not None:
        # (Not `active & mask`: the interpreter would keep that as integers.)
        active = tl.where(mask, lanes * 0 + 1, 0) != 0
        lanes = lanes + active.to(tl.int64) * 0
    return lanes, active


@triton.jit
def malloc(heap, nbytes, mask=None):
    """Allocate device memory from a heap, inside a kernel.

    Parameters
    ----------
    heap : pointer to int64
        ``Heap.handle``, passed to the kernel as an argument.
    nbytes : int or int64 scalar, or 1-D block
        Bytes wanted: one allocation for the program, or one per lane.
    mask : bool of the same shape, optional
        Lanes that take part. Others give 0.

    Returns
    -------
    int64 address(es), 0 where there is no memory. At least 16-byte aligned; a power of two up to
    the page (64 KiB) is aligned to itself, larger requests to the page. 0 bytes gives 0 and is
    no failure. A negative size gives 0 and is recorded as InvalidArgument; exhaustion gives 0
    and is recorded as OutOfMemory.

    Notes
    -----
    May be called by any program of any kernel on any stream of the heap's device. Two atomics in
    a row for one request or for a block of equal requests. All programs of a heap may fail and
    retry independently; null is returned only if no memory of that shape is free.
    """
    lanes, active = as_lanes(nbytes, mask)
    return like(malloc_lanes(heap, lanes, active), nbytes, mask)


@triton.jit
def free(heap, addr, mask=None):
    """Give memory back. ``addr``: what malloc returned, scalar or 1-D block; 0 is ignored.

    Everything the program did with the memory is ordered before anything its next owner does.
    An address that is not a live allocation changes nothing and is recorded: DoubleFree if it
    could have been one, InvalidFree if it could not. Three atomics in a row.
    """
    lanes, active = as_lanes(addr, mask)
    free_lanes(heap, lanes, active)


@triton.jit
def usable_size(heap, addr, mask=None):
    """Bytes (int64) that may be used at ``addr``, at least what was asked for; 0 if nothing
    lives there. Two atomics in a row; changes nothing."""
    lanes, active = as_lanes(addr, mask)
    return like(usable_lanes(heap, lanes, active & (lanes != 0)), addr, mask)


@triton.jit
def usable_lanes(heap, addr, active):
    inside, page, within = locate(heap, addr, active)
    state = atomic_load(page_word_ptr(heap, page), inside)
    slot, _slots, exact = slot_of(state, within)
    slab = is_slab(state) & exact
    bits = atomic_load(slot_bits_ptr(heap, page) + (slot >> 6), slab)
    live = slab & ((lsr(bits, (slot & 63).to(tl.int64)) & 1) != 0)
    run = (page_kind(state) == KIND_RUN) & (within == 0)
    size = tl.where(live, class_bytes(page_class(state)), 0).to(tl.int64)
    return tl.where(run, page_count(state).to(tl.int64) << PAGE_LOG2, size)


@triton.jit
def zeros(heap, nbytes, mask=None):
    """:func:`malloc`, and the memory (rounded up to 16 bytes) is zero."""
    lanes, active = as_lanes(nbytes, mask)
    addr = malloc_lanes(heap, lanes, active)
    fill_zero(addr, tl.where(addr != 0, lanes, 0))
    return like(addr, nbytes, mask)


@triton.jit
def realloc(heap, addr, nbytes, mask=None):
    """Resize allocations, as C's realloc: the content is kept up to the smaller size.

    ``addr`` 0 allocates; ``nbytes`` 0 frees and gives 0; if the new size fits the block, the
    address stays. 0 for any other request means that nothing happened: the old block is still
    the caller's. A wrong ``addr`` is recorded as by :func:`free`, and gives 0.
    """
    old, _all = as_lanes(addr, mask)
    lanes, active = as_lanes(nbytes + old * 0, mask)
    new = realloc_lanes(heap, old + lanes * 0, lanes, active)
    return like(new, addr + nbytes, mask)


@triton.jit
def realloc_lanes(heap, addr, nbytes, active):
    have = usable_lanes(heap, addr, active & (addr != 0))
    known = active & ((addr == 0) | (have > 0))
    stays = known & (nbytes > 0) & (nbytes <= have)
    moves = known & (stays == 0) & (nbytes != 0)
    new = malloc_lanes(heap, nbytes, moves)
    copy_lanes(addr, new, tl.where(new != 0, tl.minimum(have, nbytes), 0))
    free_lanes(heap, addr, active & ((new != 0) | (nbytes == 0) | (known == 0)))
    return tl.where(stays, addr, new)


@triton.jit
def fill_zero(addr, nbytes):
    """Zero ``nbytes`` (rounded up to 16, so inside the slot) at each address."""
    words = (nbytes + 15) >> 4 << 1
    most = tl.max(words, axis=0)
    step: tl.constexpr = 1024 // addr.shape[0] if addr.shape[0] < 1024 else 1
    column = tl.arange(0, step)[None, :].to(tl.int64)
    at = most * 0
    while at < most:
        index = at + column
        ptr = (addr[:, None] + index * 8).to(tl.pointer_type(tl.int64))
        zero = tl.zeros((addr.shape[0], step), tl.int64)
        tl.store(ptr, zero, mask=index < words[:, None])
        at += step
    tl.debug_barrier()


@triton.jit
def copy_lanes(source, target, nbytes):
    """Copy ``nbytes`` (rounded up to 16) from each source to each target address. Both belong to
    the caller, so plain loads are right; the barriers order them with other threads' accesses."""
    tl.debug_barrier()
    words = (nbytes + 15) >> 4 << 1
    most = tl.max(words, axis=0)
    step: tl.constexpr = 1024 // source.shape[0] if source.shape[0] < 1024 else 1
    column = tl.arange(0, step)[None, :].to(tl.int64)
    at = most * 0
    while at < most:
        index = at + column
        inside = index < words[:, None]
        from_ptr = (source[:, None] + index * 8).to(tl.pointer_type(tl.int64))
        to_ptr = (target[:, None] + index * 8).to(tl.pointer_type(tl.int64))
        tl.store(to_ptr, tl.load(from_ptr, mask=inside), mask=inside)
        at += step
    tl.debug_barrier()


@triton.constexpr_function
def is_block(x):
    """Whether an argument is a block rather than a scalar, a Python number or None."""
    return len(getattr(x, "shape", ())) > 0


@triton.jit
def like(lanes, model, mask):
    """``lanes`` in the shape of the arguments: a scalar unless one of them is a block."""
    if is_block(model):
        result = lanes
    elif is_block(mask):
        result = lanes
    else:
        result = tl.sum(lanes, axis=0)
    return result
