"""Device side of the stress run: take, tag, exchange, verify, free.

A live block is one word, an *entry*: where it begins, how long it is, and who tagged it. Entries
lie in a table of boxes, apart from the heap, so a fault of the heap cannot change what is expected
of a block. Every program puts its blocks into random boxes by an exchange and gets, in turn, blocks
of other programs, launches and streams, which it verifies and frees.

    entry   0..21   owner, odd        a hash of launch, lane and turn
            22..30  size code         (16 + low 4 bits) << high 5 bits: bytes requested
            31..62  granule           (address - base of the heap) / 16
            0       an empty box

The *tag* of a word is a hash of the block's address, its owner and the word's index. Blocks of up
to DEPTH words have all of them tagged, over all that may be used; longer ones the first, the last
and DEPTH - 2 between, at places that depend on the owner.

All functions take a scalar (one request for the program, LANES = 0) or a block of requests.
"""

import triton
import triton.language as tl

from devalloc import kernels as da
from devalloc.kernels.atomics import fence
from devalloc.kernels.bits import lowest_bit, mix
from devalloc.kernels.lanes import is_block
from devalloc.kernels.layout import MAX_SLOT, PAGE_LOG2, class_bytes, load_base, size_class

OWNER_BITS = tl.constexpr(22)
OWNER_MASK = tl.constexpr((1 << 22) - 1)
CODES = tl.constexpr(1 << 9)
CODE_MASK = tl.constexpr((1 << 9) - 1)
GRANULE_SHIFT = tl.constexpr(31)
DEPTH = tl.constexpr(512)
FAR = tl.constexpr(1 << 30)

# Counters.
MALLOCS = tl.constexpr(0)
NULLS = tl.constexpr(1)
FREES = tl.constexpr(2)
WORDS = tl.constexpr(3)
MOVES = tl.constexpr(4)
STAYS = tl.constexpr(5)

# Report: a count, then records of 8 words.
MAX_REPORTS = tl.constexpr(64)
RECORD_WORDS = tl.constexpr(8)
WRONG_TAG = tl.constexpr(0)
NOT_ZERO = tl.constexpr(1)
LOST_BY_REALLOC = tl.constexpr(2)
WRONG_ADDRESS = tl.constexpr(3)


# Entries --------------------------------------------------------------------------------------


@triton.jit
def code_bytes(code):
    """Bytes requested (int64) by a size code (int64)."""
    return (16 + (code & 15)) << (code >> 4)


@triton.jit
def usable_bytes(nbytes):
    """What the heap guarantees for requests of ``nbytes``: the slot, or whole pages."""
    slot = class_bytes(size_class(tl.minimum(nbytes, MAX_SLOT).to(tl.int32))).to(tl.int64)
    pages = ((nbytes - 1) >> PAGE_LOG2) + 1
    return tl.where(nbytes <= MAX_SLOT, slot, pages << PAGE_LOG2)


@triton.jit
def pack_entry(heap, addr, code, owner):
    granule = (addr - load_base(heap)) >> 4
    entry = (granule << GRANULE_SHIFT) + (code << OWNER_BITS) + owner
    return tl.where(addr != 0, entry, 0)


@triton.jit
def unpack_entry(heap, entry):
    """``(addr, code, owner)``; address 0 for an empty box."""
    addr = load_base(heap) + ((entry >> GRANULE_SHIFT) << 4)
    code = (entry >> OWNER_BITS) & CODE_MASK
    owner = entry & OWNER_MASK
    return tl.where(entry != 0, addr, 0), code, owner


@triton.jit
def draw_code(salt, first, span, flat):
    """A random size code: ``first`` to ``first + span`` in the logarithm of size / 16, each
    ``flat`` steps half as likely as those before."""
    x = mix(salt)
    rarity = lowest_bit((x | (1 << 20)).to(tl.int64))
    step = tl.minimum(rarity * flat + ((x >> 21) & 15) % flat, span)
    return ((first + step) * 16 + ((x >> 25) & 15)).to(tl.int64)


@triton.jit
def draw_owner(salt):
    return (mix(salt ^ 0x3C6EF372) & OWNER_MASK).to(tl.int64) | 1


# Tags -----------------------------------------------------------------------------------------


@triton.jit
def as_rows(x):
    """A scalar as a block of one, a block as it is."""
    if is_block(x):
        rows = x
    else:
        rows = x + tl.zeros((1,), x.dtype)
    return rows


@triton.jit
def block_key(addr, owner):
    return (addr * 0x1E3779B97F4A7C15) ^ (owner * 0x3F58476D1CE4E5B9)


@triton.jit
def tag(key, index):
    """The word that belongs at ``index`` (int64) of the block with this key."""
    return key ^ ((index + 1) * 0x14D049BB133111EB)


@triton.jit
def tagged_word(i, words, owner):
    """Index (int64) of the ``i``-th tagged word of a block of ``words``."""
    stride = tl.maximum((words - 2) // (DEPTH - 2), 1)
    between = 1 + (i - 1) * stride + owner % stride
    index = tl.where(i == 0, 0, tl.where(i == DEPTH - 1, words - 1, between))
    return tl.where(words <= DEPTH, i, index)


@triton.jit
def write_tags(addr, usable, owner, STEP: tl.constexpr):
    """Tag the blocks of the lanes whose address is not 0. Not ordered before anything."""
    addr = as_rows(addr)
    owner = as_rows(owner)
    words = tl.where(addr != 0, as_rows(usable) >> 3, 0)
    count = tl.minimum(words, DEPTH)
    key = block_key(addr, owner)
    column = tl.arange(0, STEP)[None, :].to(tl.int64)
    most = tl.max(count, axis=0)
    at = most * 0
    while at < most:
        i = at + column
        index = tagged_word(i, words[:, None], owner[:, None])
        ptr = (addr[:, None] + index * 8).to(tl.pointer_type(tl.int64))
        tl.store(ptr, tag(key[:, None], index), mask=i < count[:, None])
        at += STEP


@triton.jit
def verify_tags(
    report, kind, addr, tagged_at, usable, limit, owner, ZERO: tl.constexpr, STEP: tl.constexpr
):
    """Compare the words of the blocks at ``addr`` (0: none) with the tags that were written when
    the blocks lay at ``tagged_at``; words from byte ``limit`` on do not count. With ZERO they must
    be 0. Reports the first wrong word of each block as ``kind``. Returns the words compared.

    Nothing branches on what was read: threads of a program that hold copies of a lane may read
    different values if the heap is wrong.
    """
    addr = as_rows(addr)
    owner = as_rows(owner)
    words = tl.where(addr != 0, as_rows(usable) >> 3, 0)
    end = as_rows(limit) >> 3
    count = tl.minimum(words, DEPTH)
    key = block_key(as_rows(tagged_at), owner)
    column = tl.arange(0, STEP)[None, :].to(tl.int64)
    most = tl.max(count, axis=0)
    first = column + addr[:, None] * 0 + FAR
    value = first * 0
    compared = tl.zeros(addr.shape, tl.int64)
    at = most * 0
    while at < most:
        i = at + column
        index = tagged_word(i, words[:, None], owner[:, None])
        inside = (i < count[:, None]) & (index < end[:, None])
        ptr = (addr[:, None] + index * 8).to(tl.pointer_type(tl.int64))
        found = tl.load(ptr, mask=inside, other=0)
        expected = tag(key[:, None], index)
        if ZERO:
            expected = expected * 0
        news = inside & (found != expected) & (first >= FAR)
        first = tl.where(news, i, first)
        value = tl.where(news, found, value)
        compared += tl.sum(inside.to(tl.int64), axis=1)
        at += STEP
    where = tl.min(first, axis=1)
    bad = where < FAR
    found = tl.max(tl.where(first == where[:, None], value, -1 << 62), axis=1)
    index = tagged_word(where, words, owner)
    expected = tag(key, index)
    if ZERO:
        expected = expected * 0
    report_lanes(report, bad, kind, addr, words * 8, index, expected, found, owner)
    return compared


@triton.jit
def report_lanes(report, bad, kind, addr, size, index, expected, found, owner):
    """Count the lanes that are ``bad`` and write down the first of all. By masked atomics and
    stores, without a branch: see :func:`verify_tags`."""
    one = tl.full(bad.shape, 1, tl.int64)
    slot = tl.atomic_add(report + addr * 0, one, mask=bad, sem="relaxed")
    room = bad & (slot >= 0) & (slot < MAX_REPORTS)
    record = report + RECORD_WORDS + tl.where(room, slot, 0) * RECORD_WORDS
    tl.store(record, one * 0 + kind, mask=room)
    tl.store(record + 1, addr, mask=room)
    tl.store(record + 2, size, mask=room)
    tl.store(record + 3, index, mask=room)
    tl.store(record + 4, expected, mask=room)
    tl.store(record + 5, found, mask=room)
    tl.store(record + 6, owner, mask=room)
    tl.store(record + 7, one * 0 + tl.program_id(0), mask=room)


@triton.jit
def check_addresses(heap, report, addr, code, end):
    """Report new blocks that are misaligned or not inside the heap, which ends at ``end``."""
    addr = as_rows(addr)
    size = usable_bytes(code_bytes(as_rows(code)))
    inside = (addr >= load_base(heap)) & (addr + size <= end)
    bad = (addr != 0) & ((inside == 0) | ((addr & 15) != 0))
    report_lanes(report, bad, WRONG_ADDRESS, addr, size, addr * 0, addr * 0, addr, addr * 0)


@triton.jit
def count(counters, which: tl.constexpr, values):
    tl.atomic_add(counters + which, tl.sum(as_rows(values), axis=0), sem="relaxed")


# Launched by the run --------------------------------------------------------------------------


@triton.jit
def request_index(LANES: tl.constexpr):
    """Number of the request in its launch (int32): of the lane, or of the program (LANES 0)."""
    if LANES == 0:
        index = tl.program_id(0)
    else:
        index = tl.program_id(0) * LANES + tl.arange(0, LANES)
    return index


@triton.jit
def exchange_and_free(heap, boxes, box, entry, report, STEP: tl.constexpr):
    """Put entries into boxes; verify and free the blocks that were in there. Returns which lanes
    freed one (int64), and the words compared."""
    # What was written into our blocks comes before any program takes them out ...
    fence(report, "acq_rel")
    got = tl.atomic_xchg(boxes + box, entry, sem="relaxed")
    # ... and what others wrote into theirs before our look.
    fence(report, "acq_rel")
    addr, code, owner = unpack_entry(heap, got)
    usable = usable_bytes(code_bytes(code))
    words = verify_tags(report, WRONG_TAG, addr, addr, usable, usable, owner, False, STEP)
    da.free(heap, addr)
    return (got != 0).to(tl.int64), words


@triton.jit(do_not_specialize=["box_mask", "rounds", "first", "span", "flat", "seed"])
def churn_kernel(
    heap, end, boxes, tick, counters, report, box_mask, rounds, first, span, flat, seed,
    LANES: tl.constexpr, STEP: tl.constexpr, ZEROED: tl.constexpr,
):  # fmt: skip
    """Each request, ``rounds`` times: allocate, tag, exchange for another's block, verify and free
    that. With ZEROED the memory comes from `zeros`, and must be zero."""
    request = request_index(LANES)
    launch = tl.load(tick).to(tl.int32)
    mallocs = (request * 0).to(tl.int64)
    nulls = mallocs
    frees = mallocs
    words = as_rows(mallocs)
    turn = rounds * 0
    while turn < rounds:
        salt = mix(request * 0x01000193 + turn * 0x2545F491 + launch * 0x5BD1E995 + seed)
        code = draw_code(salt, first, span, flat)
        nbytes = code_bytes(code)
        usable = usable_bytes(nbytes)
        owner = draw_owner(salt)
        if ZEROED:
            addr = da.zeros(heap, nbytes)
            limit = (nbytes + 15) & -16
            words += verify_tags(report, NOT_ZERO, addr, addr, usable, limit, owner, True, STEP)
            # All threads have looked before any writes.
            tl.debug_barrier()
        else:
            addr = da.malloc(heap, nbytes)
        check_addresses(heap, report, addr, code, end)
        write_tags(addr, usable, owner, STEP)
        entry = pack_entry(heap, addr, code, owner)
        box = mix(salt + 0x1B873593) & box_mask
        freed, compared = exchange_and_free(heap, boxes, box, entry, report, STEP)
        mallocs += (addr != 0).to(tl.int64)
        nulls += (addr == 0).to(tl.int64)
        frees += freed
        words += compared
        turn += 1
    count(counters, MALLOCS, mallocs)
    count(counters, NULLS, nulls)
    count(counters, FREES, frees)
    count(counters, WORDS, words)


@triton.jit(do_not_specialize=["box_mask", "rounds", "first", "span", "flat", "seed"])
def realloc_kernel(
    heap, end, boxes, tick, counters, report, box_mask, rounds, first, span, flat, seed,
    LANES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Each request, ``rounds`` times: take a block out of a box, resize it, verify that its content
    was copied, tag it again, exchange it for another block, verify and free that."""
    request = request_index(LANES)
    launch = tl.load(tick).to(tl.int32)
    mallocs = (request * 0).to(tl.int64)
    nulls = mallocs
    frees = mallocs
    moves = mallocs
    stays = mallocs
    words = as_rows(mallocs)
    turn = rounds * 0
    while turn < rounds:
        salt = mix(request * 0x01000193 + turn * 0x2545F491 + launch * 0x5BD1E995 + seed)
        # Half of the requests take a block out; the others begin with none.
        takes = (salt & 1) == 0
        box = mix(salt + 0x7F4A7C15) & box_mask
        held = tl.atomic_xchg(boxes + box, (salt * 0).to(tl.int64), mask=takes, sem="relaxed")
        held = tl.where(takes, held, 0)
        fence(report, "acq_rel")
        old, old_code, old_owner = unpack_entry(heap, held)
        have = usable_bytes(code_bytes(old_code))
        code = draw_code(salt, first, span, flat)
        nbytes = code_bytes(code)
        new = da.realloc(heap, old, nbytes)
        # 0 says that nothing happened: the old block is still ours, and whole.
        place = tl.where(old == 0, 0, tl.where(new == 0, old, new))
        limit = tl.where(new == 0, have, tl.minimum(have, nbytes & -8))
        words += verify_tags(
            report, LOST_BY_REALLOC, place, old, have, limit, old_owner, False, STEP
        )
        tl.debug_barrier()
        # A block that stayed where it was is as long as it was.
        stayed = (old != 0) & (new == old)
        code = tl.where(stayed, old_code, code)
        check_addresses(heap, report, new, code, end)
        owner = draw_owner(salt)
        write_tags(new, usable_bytes(code_bytes(code)), owner, STEP)
        entry = tl.where(new != 0, pack_entry(heap, new, code, owner), held)
        box = mix(salt + 0x1B873593) & box_mask
        freed, compared = exchange_and_free(heap, boxes, box, entry, report, STEP)
        moved = ((old != 0) & (new != 0) & (new != old)).to(tl.int64)
        mallocs += ((old == 0) & (new != 0)).to(tl.int64) + moved
        frees += freed + moved
        moves += moved
        stays += stayed.to(tl.int64)
        nulls += (new == 0).to(tl.int64)
        words += compared
        turn += 1
    count(counters, MALLOCS, mallocs)
    count(counters, NULLS, nulls)
    count(counters, FREES, frees)
    count(counters, MOVES, moves)
    count(counters, STAYS, stays)
    count(counters, WORDS, words)


@triton.jit(do_not_specialize=["n", "seed"])
def tag_kernel(heap, addrs, codes, entries, tick, n, seed, LANES: tl.constexpr, STEP: tl.constexpr):
    """Tag blocks that the host allocated, one lane each, and make their entries."""
    index = request_index(LANES)
    inside = index < n
    addr = tl.load(addrs + index, mask=inside, other=0)
    code = tl.load(codes + index, mask=inside, other=0)
    owner = draw_owner(index * 0x01000193 + tl.load(tick).to(tl.int32) * 0x5BD1E995 + seed)
    write_tags(addr, usable_bytes(code_bytes(code)), owner, STEP)
    tl.store(entries + index, pack_entry(heap, addr, code, owner), mask=inside)


@triton.jit(do_not_specialize=["box_mask", "n", "seed"])
def exchange_kernel(boxes, entries, tick, report, box_mask, n, seed, LANES: tl.constexpr):
    """Put entries into random boxes, and in their place what was there."""
    index = request_index(LANES)
    inside = index < n
    entry = tl.load(entries + index, mask=inside, other=0)
    box = mix(index * 0x01000193 + tl.load(tick).to(tl.int32) * 0x5BD1E995 + seed) & box_mask
    fence(report, "acq_rel")
    got = tl.atomic_xchg(boxes + box, entry, mask=inside, sem="relaxed")
    fence(report, "acq_rel")
    tl.store(entries + index, got, mask=inside)


@triton.jit(do_not_specialize=["n"])
def verify_kernel(
    heap, entries, addrs, counters, report, n, LANES: tl.constexpr, STEP: tl.constexpr
):
    """Verify the blocks of entries, one lane each, and store their addresses."""
    index = request_index(LANES)
    inside = index < n
    addr, code, owner = unpack_entry(heap, tl.load(entries + index, mask=inside, other=0))
    usable = usable_bytes(code_bytes(code))
    words = verify_tags(report, WRONG_TAG, addr, addr, usable, usable, owner, False, STEP)
    tl.store(addrs + index, addr, mask=inside)
    count(counters, WORDS, words)


@triton.jit(do_not_specialize=["n", "blocks"])
def free_again_kernel(heap, addrs, n, blocks, LANES: tl.constexpr):
    """Every ``blocks`` programs free all addresses, so a larger grid frees them several times, at
    once: all but one of the frees of an address are double."""
    index = tl.program_id(0) % blocks * LANES + tl.arange(0, LANES)
    inside = index < n
    da.free(heap, tl.load(addrs + index, mask=inside, other=0), inside)


@triton.jit
def poke_kernel(addr, value):
    """Write one word at an address, in a block of any owner: a planted fault."""
    tl.store((tl.load(addr)).to(tl.pointer_type(tl.int64)), value)
