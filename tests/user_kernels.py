"""Kernels as a user would write them, for the tests: every shape in which the device functions can
be called, kernels that write and verify patterns, and probes of the arithmetic below them."""

import triton
import triton.language as tl

from devalloc import kernels as da
from devalloc.kernels import bits, layout

# One request per lane -------------------------------------------------------------------------


@triton.jit
def malloc_lanes_kernel(heap, sizes, addrs, n, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    addr = da.malloc(heap, tl.load(sizes + index, mask=inside, other=0), inside)
    tl.store(addrs + index, addr, mask=inside)


@triton.jit
def free_lanes_kernel(heap, addrs, n, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    da.free(heap, tl.load(addrs + index, mask=inside, other=0), inside)


@triton.jit
def malloc_unmasked_kernel(heap, sizes, addrs, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(addrs + index, da.malloc(heap, tl.load(sizes + index)))


@triton.jit
def free_unmasked_kernel(heap, addrs, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    da.free(heap, tl.load(addrs + index))


@triton.jit
def malloc_masked_kernel(heap, sizes, wanted, addrs, BLOCK: tl.constexpr):
    """Lanes with ``wanted`` != 0 take part; what malloc gives for the others is stored too."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    addr = da.malloc(heap, tl.load(sizes + index), tl.load(wanted + index) != 0)
    tl.store(addrs + index, addr)


@triton.jit
def free_masked_kernel(heap, addrs, wanted, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    da.free(heap, tl.load(addrs + index), tl.load(wanted + index) != 0)


@triton.jit
def malloc_same_size_kernel(heap, nbytes, wanted, addrs, BLOCK: tl.constexpr):
    """A scalar size under a block mask: one allocation per active lane."""
    index = tl.arange(0, BLOCK)
    addr = da.malloc(heap, nbytes, tl.load(wanted + index) != 0)
    tl.store(addrs + index, addr)


@triton.jit
def usable_size_lanes_kernel(heap, addrs, sizes, n, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    addr = tl.load(addrs + index, mask=inside, other=0)
    tl.store(sizes + index, da.usable_size(heap, addr), mask=inside)


@triton.jit
def zeros_lanes_kernel(heap, sizes, addrs, n, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    addr = da.zeros(heap, tl.load(sizes + index, mask=inside, other=0), inside)
    tl.store(addrs + index, addr, mask=inside)


@triton.jit
def realloc_lanes_kernel(heap, addrs, sizes, n, BLOCK: tl.constexpr):
    """``addrs[i] = realloc(addrs[i], sizes[i])``."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    addr = tl.load(addrs + index, mask=inside, other=0)
    size = tl.load(sizes + index, mask=inside, other=0)
    tl.store(addrs + index, da.realloc(heap, addr, size, inside), mask=inside)


# One request per program ----------------------------------------------------------------------


@triton.jit
def malloc_scalar_kernel(heap, sizes, addrs):
    program = tl.program_id(0)
    tl.store(addrs + program, da.malloc(heap, tl.load(sizes + program)))


@triton.jit
def malloc_constant_kernel(heap, addrs, NBYTES: tl.constexpr):
    """A size that is a number in the source."""
    tl.store(addrs + tl.program_id(0), da.malloc(heap, NBYTES))


@triton.jit
def malloc_scalar_masked_kernel(heap, sizes, wanted, addrs):
    program = tl.program_id(0)
    addr = da.malloc(heap, tl.load(sizes + program), tl.load(wanted + program) != 0)
    tl.store(addrs + program, addr)


@triton.jit
def malloc_conditional_kernel(heap, addrs, rounds, nbytes):
    """Loops and branches: every odd program allocates ``rounds`` times and keeps the last."""
    program = tl.program_id(0)
    addr = tl.full((), 0, tl.int64)
    if program % 2 == 1:
        left = rounds + program * 0
        while left > 0:
            da.free(heap, addr)
            addr = da.malloc(heap, nbytes)
            left -= 1
    tl.store(addrs + program, addr)


@triton.jit
def free_scalar_kernel(heap, addrs):
    da.free(heap, tl.load(addrs + tl.program_id(0)))


@triton.jit
def usable_size_scalar_kernel(heap, addrs, sizes):
    program = tl.program_id(0)
    tl.store(sizes + program, da.usable_size(heap, tl.load(addrs + program)))


@triton.jit
def zeros_scalar_kernel(heap, sizes, addrs):
    program = tl.program_id(0)
    tl.store(addrs + program, da.zeros(heap, tl.load(sizes + program)))


@triton.jit
def realloc_scalar_kernel(heap, addrs, sizes):
    program = tl.program_id(0)
    addr = da.realloc(heap, tl.load(addrs + program), tl.load(sizes + program))
    tl.store(addrs + program, addr)


# Misuse ---------------------------------------------------------------------------------------


@triton.jit
def free_twice_kernel(heap, addrs):
    """One program frees one address twice in a row."""
    addr = tl.load(addrs + tl.program_id(0))
    da.free(heap, addr)
    da.free(heap, addr)


@triton.jit
def free_shared_kernel(heap, addrs, count):
    """All programs free all of ``addrs``, each beginning at another one."""
    program = tl.program_id(0)
    i = program * 0
    while i < count:  # (Triton 3.6's interpreter has no range over an argument with NumPy 2.4)
        da.free(heap, tl.load(addrs + (program + i) % count))
        i += 1


@triton.jit
def free_shared_lanes_kernel(heap, addrs, BLOCK: tl.constexpr):
    """All programs free the same block of addresses."""
    da.free(heap, tl.load(addrs + tl.arange(0, BLOCK)))


# Patterns -------------------------------------------------------------------------------------


@triton.jit
def pattern(tag, index):
    """The word that belongs at ``index`` of the block ``tag``: depends on both."""
    return (tag * 0x9E3779B1 + index * 0x85EBCA77) ^ (tag << 40)


@triton.jit
def write_words(addr, nbytes, tag, STEP: tl.constexpr):
    """Fill each lane's block, ``nbytes`` (multiples of 8) long, with its pattern."""
    words = tl.where(addr != 0, nbytes, 0) >> 3
    most = tl.max(words, axis=0)
    column = tl.arange(0, STEP)[None, :].to(tl.int64)
    at = most * 0
    while at < most:
        index = at + column
        ptr = (addr[:, None] + index * 8).to(tl.pointer_type(tl.int64))
        tl.store(ptr, pattern(tag[:, None], index), mask=index < words[:, None])
        at += STEP


@triton.jit
def count_wrong_words(addr, nbytes, tag, STEP: tl.constexpr):
    """How many words of each lane's block do not hold its pattern (int64)."""
    words = tl.where(addr != 0, nbytes, 0) >> 3
    most = tl.max(words, axis=0)
    column = tl.arange(0, STEP)[None, :].to(tl.int64)
    at = most * 0
    wrong = addr * 0
    while at < most:
        index = at + column
        inside = index < words[:, None]
        ptr = (addr[:, None] + index * 8).to(tl.pointer_type(tl.int64))
        found = tl.load(ptr, mask=inside, other=0)
        differs = inside & (found != pattern(tag[:, None], index))
        wrong += tl.sum(differs.to(tl.int64), axis=1)
        at += STEP
    return wrong


@triton.jit
def write_kernel(addrs, sizes, n, first_tag, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Block i gets the pattern of tag ``first_tag + i`` over ``sizes[i]`` bytes."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    addr = tl.load(addrs + index, mask=inside, other=0)
    write_words(addr, tl.load(sizes + index, mask=inside, other=0), first_tag + index, STEP)


@triton.jit
def verify_kernel(addrs, sizes, wrong, n, first_tag, BLOCK: tl.constexpr, STEP: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    addr = tl.load(addrs + index, mask=inside, other=0)
    size = tl.load(sizes + index, mask=inside, other=0)
    count = count_wrong_words(addr, size, first_tag + index, STEP)
    tl.store(wrong + index, count, mask=inside)


# Stress ---------------------------------------------------------------------------------------


@triton.jit
def random_size(seed, smallest, largest):
    """Sizes in [smallest, largest], most of them small: the fourth power of a uniform draw."""
    x = bits.mix(seed).to(tl.float32) / 2147483648.0
    x = x * x
    return smallest + (x * x * (largest - smallest).to(tl.float32)).to(tl.int64)


@triton.jit
def churn_lanes_kernel(
    heap, wrong, nulls, rounds, smallest, largest, seed, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """Each lane: malloc a random size, fill all that is usable, verify, free; again and again.

    Two generations are live at a time, so blocks are verified after others were taken and freed.
    """
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bad = tl.zeros((BLOCK,), tl.int64)
    missing = tl.zeros((BLOCK,), tl.int64)
    old = tl.zeros((BLOCK,), tl.int64)
    old_size = tl.zeros((BLOCK,), tl.int64)
    old_tag = tl.zeros((BLOCK,), tl.int64)
    i = tl.program_id(0) * 0
    while i < rounds:  # (Triton 3.6: see free_shared_kernel)
        size = random_size(lane * 7919 + i * 104729 + seed, smallest, largest)
        addr = da.malloc(heap, size)
        missing += (addr == 0).to(tl.int64)
        usable = da.usable_size(heap, addr)
        bad += ((addr != 0) & (usable < size)).to(tl.int64)
        tag = lane.to(tl.int64) * 65536 + i
        write_words(addr, usable, tag, STEP)
        tl.debug_barrier()
        bad += count_wrong_words(old, old_size, old_tag, STEP)
        da.free(heap, old)
        old = addr
        old_size = usable
        old_tag = tag
        i += 1
    tl.debug_barrier()
    bad += count_wrong_words(old, old_size, old_tag, STEP)
    da.free(heap, old)
    tl.store(wrong + lane, bad)
    tl.store(nulls + lane, missing)


@triton.jit
def churn_scalar_kernel(heap, wrong, nulls, rounds, smallest, largest, seed, STEP: tl.constexpr):
    """The same with one allocation per program."""
    program = tl.program_id(0)
    bad = tl.zeros((1,), tl.int64)
    missing = tl.full((), 0, tl.int64)
    i = tl.program_id(0) * 0
    while i < rounds:  # (Triton 3.6: see free_shared_kernel)
        size = random_size(program * 7919 + i * 104729 + seed, smallest, largest)
        addr = da.malloc(heap, size)
        missing += (addr == 0).to(tl.int64)
        usable = da.usable_size(heap, addr)
        block = addr + tl.zeros((1,), tl.int64)
        tag = program.to(tl.int64) * 65536 + i + tl.zeros((1,), tl.int64)
        write_words(block, usable + tl.zeros((1,), tl.int64), tag, STEP)
        tl.debug_barrier()
        bad += count_wrong_words(block, usable + tl.zeros((1,), tl.int64), tag, STEP)
        da.free(heap, addr)
        i += 1
    tl.store(wrong + program + tl.arange(0, 1), bad)
    tl.store(nulls + program, missing)


@triton.jit
def produce_kernel(
    heap, addrs, usables, seed, smallest, largest, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """Allocate one block per lane, fill it with the pattern of its lane, publish the address."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    addr = da.malloc(heap, random_size(index * 31 + seed, smallest, largest))
    usable = da.usable_size(heap, addr)
    write_words(addr, usable, index, STEP)
    tl.store(addrs + index, addr)
    tl.store(usables + index, usable)


@triton.jit
def consume_kernel(heap, addrs, usables, wrong, order, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Verify and free what `produce_kernel` published, in the permutation ``order``."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    taken = tl.load(order + index)
    addr = tl.load(addrs + taken)
    usable = tl.load(usables + taken)
    tl.store(wrong + index, count_wrong_words(addr, usable, taken, STEP))
    da.free(heap, addr)


@triton.jit
def exchange_kernel(
    heap, mailboxes, wrong, rounds, count, seed, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """Blocks change hands between programs of one launch: put a fresh block into a random mailbox,
    take out what was there, verify it, free it. A block says in its first word how long it is and
    in its second whose it was."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bad = tl.zeros((BLOCK,), tl.int64)
    i = tl.program_id(0) * 0
    while i < rounds:  # (Triton 3.6: see free_shared_kernel)
        size = random_size(lane * 613 + i * 15485863 + seed, tl.full((), 32, tl.int64), 2048)
        addr = da.malloc(heap, size)
        usable = da.usable_size(heap, addr)
        tag = lane.to(tl.int64) * 65536 + i
        write_words(addr + 16, tl.where(addr != 0, usable - 16, 0), tag, STEP)
        head = addr.to(tl.pointer_type(tl.int64))
        tl.store(head, usable, mask=addr != 0)
        tl.store(head + 1, tag, mask=addr != 0)
        # All threads' writes happen before the release of any of them.
        tl.debug_barrier()
        box = bits.mix(lane * 48271 + i * 69621 + seed) % count
        got = tl.atomic_xchg(mailboxes + box, addr, sem="acq_rel")
        tl.debug_barrier()
        found = got.to(tl.pointer_type(tl.int64))
        length = tl.load(found, mask=got != 0, other=16)
        owner = tl.load(found + 1, mask=got != 0, other=0)
        sane = (length >= 32) & (length <= 4096)
        bad += ((got != 0) & (sane == 0)).to(tl.int64)
        rest = tl.where((got != 0) & sane, length - 16, 0)
        bad += count_wrong_words(got + 16, rest, owner, STEP)
        da.free(heap, got)
        i += 1
    tl.store(wrong + lane, bad)


# Probes of the arithmetic ---------------------------------------------------------------------


@triton.jit
def size_class_kernel(cls, nbytes, slots, BLOCK: tl.constexpr):
    """For each size 1..BLOCK its class, and that class's slot size and slots per page."""
    size = tl.arange(0, BLOCK) + 1
    found = layout.size_class(size)
    tl.store(cls + size - 1, found)
    tl.store(nbytes + size - 1, layout.class_bytes(found))
    tl.store(slots + size - 1, layout.class_slots(found))


@triton.jit
def bits_kernel(words, begins, shifts, counts, nexts, shifted, lowest, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    word = tl.load(words + lane)
    tl.store(counts + lane, bits.popcount(word))
    tl.store(nexts + lane, bits.next_bit(word, tl.load(begins + lane)))
    tl.store(shifted + lane, bits.lsr(word, tl.load(shifts + lane)))
    tl.store(lowest + lane, bits.lowest_bit(word))


@triton.jit
def run_starts_kernel(words, starts, BLOCK: tl.constexpr):
    """Program p: where p + 1 adjacent set bits begin, of every word."""
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    found = bits.run_starts(tl.load(words + lane), program + 1)
    tl.store(starts + program * BLOCK + lane, found)


@triton.jit
def low_mask_kernel(masks, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK).to(tl.int64)
    tl.store(masks + n, bits.low_mask(n))


@triton.jit
def floor_log2_kernel(values, logs, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(logs + lane, bits.floor_log2(tl.load(values + lane)))


@triton.jit
def divide_kernel(divisors, quotients, BLOCK: tl.constexpr):
    """Program p: 0..BLOCK-1 divided by the p-th divisor."""
    program = tl.program_id(0)
    x = tl.arange(0, BLOCK)
    found = bits.divide(x, tl.load(divisors + program))
    tl.store(quotients + program.to(tl.int64) * BLOCK + x, found)


# Pointers --------------------------------------------------------------------------------------


@triton.jit
def pointer_lanes_kernel(heap, addrs, step, wanted, BLOCK: tl.constexpr):
    """Each lane that is wanted writes its number ``step`` bytes behind its address."""
    lane = tl.arange(0, BLOCK)
    mask = tl.load(wanted + lane) != 0
    ptr = da.pointer(heap, tl.load(addrs + lane) + step, tl.int32, mask)
    tl.store(ptr, lane, mask=mask)


@triton.jit
def pointer_scalar_kernel(heap, addrs, step):
    """Each program reads a word ``step`` bytes behind its address, and writes it back plus one."""
    ptr = da.pointer(heap, tl.load(addrs + tl.program_id(0)) + step, tl.int64)
    tl.store(ptr, tl.load(ptr) + 1)


@triton.jit
def pointer_tile_kernel(heap, addrs, lengths, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Row i, of so many numbers, becomes 1000 i, 1000 i + 1, ..."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, STEPS)[None, :]
    mask = column < tl.load(lengths + row)
    ptr = da.pointer(heap, tl.load(addrs + row) + column * 4, tl.int32, mask)
    tl.store(ptr, row * 1000 + column, mask=mask)


@triton.jit
def fill_behind_null_kernel(addrs, n, BLOCK: tl.constexpr):
    """A raw cast, and no mask for blocks that could not be had."""
    lane = tl.arange(0, BLOCK)
    addr = tl.load(addrs + lane, mask=lane < n, other=0)
    tl.store(addr.to(tl.pointer_type(tl.int32)) + 2, lane, mask=lane < n)


@triton.jit
def load_null_kernel(addrs, out):
    tl.store(out, tl.load(tl.load(addrs).to(tl.pointer_type(tl.int64))))


@triton.jit
def count_at_null_kernel(addrs):
    tl.atomic_add(tl.load(addrs).to(tl.pointer_type(tl.int64)), 1)


@triton.jit
def swap_at_null_kernel(addrs):
    one = tl.full((), 1, tl.int64)
    tl.atomic_cas(tl.load(addrs).to(tl.pointer_type(tl.int64)), one, one)


@triton.jit
def pointer_to_nothing_kernel(heap, addrs, BLOCK: tl.constexpr):
    tl.store(da.pointer(heap, tl.load(addrs), BLOCK), 1)


@triton.jit
def pointer_of_fraction_kernel(heap, addrs, BLOCK: tl.constexpr):
    tl.store(da.pointer(heap, tl.load(addrs).to(tl.float32), tl.int32), 1)


@triton.jit
def pointer_wide_mask_kernel(heap, addrs, BLOCK: tl.constexpr):
    tl.store(da.pointer(heap, tl.load(addrs), tl.int32, tl.arange(0, BLOCK) < 2), 1)


@triton.jit
def pointer_integer_mask_kernel(heap, addrs, BLOCK: tl.constexpr):
    tl.store(da.pointer(heap, tl.load(addrs), tl.int32, tl.program_id(0)), 1)
