"""Kernels that would show a wrong order of memory accesses.

**Hand-over.** Every 16 bytes of a heap hold a counter: how often they were owned, and a seal of
that number. The program that gets a block loads the counters in it, plainly, stores each plus one,
plainly, and frees the block; nothing but malloc and free orders these accesses. A store that lands
after the next owner's, or a load that sees what was there before the last owner, loses an
increment: in the end the counters do not add up to what was counted. Number and seal that do not
belong together are seen at once.

**Shapes.** Two or three programs run the same loop over two words of their own, without waiting for
one another. Values only grow, so one launch gives as many instances of the shape as it has turns:

    MP   0: x = t; y = t                 1: reads y, then x             forbidden: x older than y
    WRC  0: x = t    1: y = x            2: reads y, then x             forbidden: x older than y
    SB   0: x = t; reads y               1: y = u; reads x              forbidden: both read too old

    ORDER  plain        stores, and loads past the first cache
           relaxed      relaxed atomics, none of which waits for another
           returned     relaxed atomics, the second of which depends on what the first returned
           fenced       stores and loads with the heap's fence between them
"""

import triton
import triton.language as tl

from devalloc import kernels as da
from devalloc.kernels.atomics import atomic_load, fence
from devalloc.kernels.bits import mix
from devalloc.kernels.target import has_ptx

HANDED = tl.constexpr(0)  # blocks handed over
CROSSED = tl.constexpr(1)  # those whose last owner ran on another multiprocessor
OWNED = tl.constexpr(2)  # counters incremented
TORN = tl.constexpr(3)  # counters whose seal was another's
NULLS = tl.constexpr(4)

SM_BITS = tl.constexpr(16)
SM_MASK = tl.constexpr((1 << 16) - 1)


@triton.jit
def multiprocessor():
    """Where the program runs, plus one (int64 scalar); elsewhere than on CUDA its number."""
    if has_ptx():
        found = tl.inline_asm_elementwise(
            "mov.u32 $0, %smid; add.u32 $0, $0, $1;",
            "=&r,r",
            [tl.full((), 1, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        found = tl.program_id(0) + 1
    return found.to(tl.int64) & SM_MASK


@triton.jit
def seal(number):
    """47 bits that belong to a count; 0 to 0."""
    return (number * 0x5DEECE66D) & 0x7FFFFFFFFFFF


@triton.jit(do_not_specialize=["rounds", "smallest_log2", "span", "seed"])
def handover_kernel(
    heap, totals, rounds, smallest_log2, span, seed, LANES: tl.constexpr, COUNTERS: tl.constexpr
):
    """Each request, ``rounds`` times: malloc, increment what is in the block, free. Blocks have
    ``2**smallest_log2`` bytes times 1 to ``2**(span - 1)``; COUNTERS * 16 of them are used at most.
    LANES = 0: one request for the program. Every thread needs counters of its own, so LANES (or 1)
    times COUNTERS must be at least the number of threads."""
    if LANES == 0:
        request = tl.program_id(0) + tl.arange(0, 1)
    else:
        request = tl.program_id(0) * LANES + tl.arange(0, LANES)
    column = tl.arange(0, COUNTERS)[None, :].to(tl.int64)
    here = multiprocessor()
    handed = tl.zeros(request.shape, tl.int64)
    nulls = handed
    owned = handed
    crossed = handed
    torn = handed
    turn = rounds * 0
    while turn < rounds:
        salt = mix(request * 0x01000193 + turn * 0x2545F491 + seed)
        if LANES == 0:
            choice = mix(tl.program_id(0) * 0x01000193 + turn * 0x2545F491 + seed) % span
            nbytes = (choice * 0).to(tl.int64) + 1 << (smallest_log2 + choice).to(tl.int64)
            scalar = da.malloc(heap, nbytes)
            addr = scalar + handed * 0
            length = nbytes + handed * 0
        else:
            length = (salt * 0).to(tl.int64) + 1 << (smallest_log2 + salt % span).to(tl.int64)
            addr = da.malloc(heap, length)
        mine = (addr[:, None] != 0) & (column * 16 < length[:, None])
        ptr = (addr[:, None] + column * 16).to(tl.pointer_type(tl.int64))
        number = tl.load(ptr, mask=mine, other=0)
        sealed = tl.load(ptr + 1, mask=mine, other=0)
        after = number + 1
        tl.store(ptr, after, mask=mine)
        tl.store(ptr + 1, (seal(after) << SM_BITS) + here, mask=mine)
        if LANES == 0:
            da.free(heap, scalar)
        else:
            da.free(heap, addr)
        last = sealed & SM_MASK
        wrong = mine & (((sealed >> SM_BITS) & 0x7FFFFFFFFFFF) != seal(number))
        handed += (addr != 0).to(tl.int64)
        nulls += (addr == 0).to(tl.int64)
        owned += tl.sum(mine.to(tl.int64), axis=1)
        foreign = mine & (column == 0) & (last != 0) & (last != here)
        crossed += tl.sum(foreign.to(tl.int64), axis=1)
        torn += tl.sum(wrong.to(tl.int64), axis=1)
        turn += 1
    tl.atomic_add(totals + HANDED, tl.sum(handed, axis=0), sem="relaxed")
    tl.atomic_add(totals + CROSSED, tl.sum(crossed, axis=0), sem="relaxed")
    tl.atomic_add(totals + OWNED, tl.sum(owned, axis=0), sem="relaxed")
    tl.atomic_add(totals + TORN, tl.sum(torn, axis=0), sem="relaxed")
    tl.atomic_add(totals + NULLS, tl.sum(nulls, axis=0), sem="relaxed")


# Shapes ---------------------------------------------------------------------------------------


@triton.jit
def put(ptr, value, after, ORDER: tl.constexpr):
    """Write ``value`` to words; with ORDER returned only where ``after``, which depends on an
    earlier access, is 0: always. Returns what depends on this access."""
    result = value * 0
    if ORDER == "plain" or ORDER == "fenced":
        tl.store(ptr, value)
    elif ORDER == "relaxed":
        tl.atomic_xchg(ptr, value, sem="relaxed")
    else:
        old = tl.atomic_xchg(ptr, value, mask=after == 0, sem="relaxed")
        result = old >> 62  # 0, but known only when the exchange has returned
    return result


@triton.jit
def get(ptr, after, ORDER: tl.constexpr):
    """Read words, at an address that with ORDER returned depends on an earlier access. (A plain
    load would always find the first value in the cache; a fence empties the cache.)"""
    if ORDER == "plain":
        value = tl.load(ptr, volatile=True)
    elif ORDER == "fenced":
        value = tl.load(ptr)
    elif ORDER == "relaxed":
        value = atomic_load(ptr)
    else:
        value = atomic_load(ptr + after)
    return value


@triton.jit
def between(totals, ORDER: tl.constexpr):
    if ORDER == "fenced":
        fence(totals, "acq_rel")


@triton.jit
def pair_words(x, y, group, LANES: tl.constexpr):
    """Pointers to the lanes' words of a group of programs: neighbours, as live bits and page words
    of neighbouring slots are; x and y lie apart."""
    at = group.to(tl.int64) * LANES + tl.arange(0, LANES)
    return x + at, y + at


@triton.jit(do_not_specialize=["turns", "groups"])
def message_kernel(
    x,
    y,
    places,
    totals,
    turns,
    groups,
    RELAYED: tl.constexpr,
    ORDER: tl.constexpr,
    LANES: tl.constexpr,
):
    """MP, or with RELAYED, WRC. ``totals``: reads that found something new, and forbidden ones.
    ``places``: where each program ran."""
    tl.store(places + tl.program_id(0), multiprocessor())
    role = tl.program_id(0) // groups
    x_ptr, y_ptr = pair_words(x, y, tl.program_id(0) % groups, LANES)
    zero = tl.zeros((LANES,), tl.int64)
    last = zero
    news = zero
    weak = zero
    turn = turns * 0
    while turn < turns:
        if role == 0:
            done = put(x_ptr, zero + turn + 1, zero, ORDER)
            if RELAYED == 0:
                between(totals, ORDER)
                put(y_ptr, zero + turn + 1, done, ORDER)
        elif (role == 1) & (RELAYED != 0):
            seen = get(x_ptr, zero, ORDER)
            between(totals, ORDER)
            put(y_ptr, seen, zero, ORDER)
        else:
            flag = get(y_ptr, zero, ORDER)
            between(totals, ORDER)
            data = get(x_ptr, flag >> 62, ORDER)
            news += (flag != last).to(tl.int64)
            weak += (data < flag).to(tl.int64)
            last = flag
        turn += 1
    tl.atomic_add(totals, tl.sum(news, axis=0), sem="relaxed")
    tl.atomic_add(totals + 1, tl.sum(weak, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["turns", "groups"])
def store_buffering_kernel(
    x, y, places, log, totals, turns, groups, ORDER: tl.constexpr, LANES: tl.constexpr
):
    """SB. ``log``: what each of the two programs of a group read in each turn (int32, in the order
    of role, group, turn, lane)."""
    tl.store(places + tl.program_id(0), multiprocessor())
    role = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    x_ptr, y_ptr = pair_words(x, y, group, LANES)
    zero = tl.zeros((LANES,), tl.int64)
    own = tl.where(role == 0, x_ptr.to(tl.int64), y_ptr.to(tl.int64))
    other = tl.where(role == 0, y_ptr.to(tl.int64), x_ptr.to(tl.int64))
    own_ptr = own.to(tl.pointer_type(tl.int64))
    other_ptr = other.to(tl.pointer_type(tl.int64))
    place = log + tl.program_id(0).to(tl.int64) * turns * LANES + tl.arange(0, LANES)
    turn = turns * 0
    while turn < turns:
        done = put(own_ptr, zero + turn + 1, zero, ORDER)
        between(totals, ORDER)
        tl.store(place, get(other_ptr, done, ORDER).to(tl.int32))
        place += LANES
        turn += 1
