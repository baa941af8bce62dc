"""The user kernels of every workload: what a user of the heap would write.

Lanes per program (``LANES``) and warps are parameters of the launch. Kernels that allocate by lane
mask off the lanes beyond ``n``; scalar ones make one request per program. All store the addresses,
so that another kernel can free them. Integers are not specialised: one binary per block width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from devalloc import kernels as da

# Floors: what no allocator can be faster than ----------------------------------------------------


@triton.jit(do_not_specialize=["n"])
def empty_kernel(out, n, LANES: tl.constexpr):
    """Nothing: the cost of a launch and of scheduling its programs."""


@triton.jit(do_not_specialize=["base", "n", "size"])
def store_kernel(base, out, n, size, LANES: tl.constexpr):
    """Addresses by arithmetic: the cost of storing one address per lane."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    tl.store(out + lane, base + lane * size, mask=lane < n)


@triton.jit(do_not_specialize=["base", "n", "size", "capacity"])
def bump_kernel(counter, base, capacity, out, n, size, LANES: tl.constexpr):
    """A bump allocator, one atomic per program: cannot free, but nothing that can is simpler."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = lane < n
    ones = active.to(tl.int64)
    start = tl.atomic_add(counter, tl.sum(ones, axis=0) * size, sem="relaxed")
    offset = start + (tl.cumsum(ones, axis=0) - 1) * size
    tl.store(out + lane, tl.where(offset + size <= capacity, base + offset, 0), mask=active)


# One request per lane ----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n", "size"])
def malloc_lanes_kernel(heap, out, n, size, LANES: tl.constexpr):
    """``thread``: n requests of one size, one per lane."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = lane < n
    addr = da.malloc(heap, tl.zeros((LANES,), tl.int64) + size, active)
    tl.store(out + lane, addr, mask=active)


@triton.jit(do_not_specialize=["n"])
def malloc_mixed_kernel(heap, sizes, out, n, LANES: tl.constexpr):
    """``mixed``, ``frag``, ``shape``: n requests, one per lane, each of its own size."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = lane < n
    addr = da.malloc(heap, tl.load(sizes + lane, mask=active, other=0), active)
    tl.store(out + lane, addr, mask=active)


@triton.jit(do_not_specialize=["n"])
def free_lanes_kernel(heap, addrs, n, LANES: tl.constexpr):
    """Free n addresses, one per lane."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = lane < n
    da.free(heap, tl.load(addrs + lane, mask=active, other=0), active)


@triton.jit(do_not_specialize=["n", "size", "rounds"])
def churn_kernel(heap, wrong, nulls, n, size, rounds, LANES: tl.constexpr):
    """``churn``: every lane mallocs, writes a word of its own, checks it and frees, `rounds` times.

    Stores per program how many words had changed and how many requests got nothing.
    """
    program = tl.program_id(0)
    lane = program.to(tl.int64) * LANES + tl.arange(0, LANES)
    active = lane < n
    changed = tl.zeros((LANES,), tl.int32)
    missing = tl.zeros((LANES,), tl.int32)
    turn = rounds * 0
    while turn < rounds:  # the interpreter of Triton 3.6 cannot count to an argument with range
        addr = da.malloc(heap, tl.zeros((LANES,), tl.int64) + size, active)
        got = active & (addr != 0)
        tag = (lane << 16) + turn
        ptr = addr.to(tl.pointer_type(tl.int64))
        tl.store(ptr, tag, mask=got)
        # The word may be read by another thread than the one that wrote it.
        tl.debug_barrier()
        seen = tl.load(ptr, mask=got, other=0, volatile=True)
        changed += (got & (seen != tag)).to(tl.int32)
        missing += (active & (addr == 0)).to(tl.int32)
        da.free(heap, addr, active)
        turn += 1
    tl.store(wrong + program, tl.sum(changed, axis=0))
    tl.store(nulls + program, tl.sum(missing, axis=0))


# One request per warp --------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n", "size"])
def malloc_warps_kernel(heap, out, n, size, LANES: tl.constexpr):
    """``warp``: n requests of one size, by one lane in 32."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    asks = ((lane & 31) == 0) & ((lane >> 5) < n)
    addr = da.malloc(heap, tl.zeros((LANES,), tl.int64) + size, asks)
    tl.store(out + (lane >> 5), addr, mask=asks)


@triton.jit(do_not_specialize=["n"])
def free_warps_kernel(heap, addrs, n, LANES: tl.constexpr):
    """Free n addresses, one lane in 32 each."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    asks = ((lane & 31) == 0) & ((lane >> 5) < n)
    da.free(heap, tl.load(addrs + (lane >> 5), mask=asks, other=0), asks)


# One request per program -------------------------------------------------------------------------


@triton.jit(do_not_specialize=["size"])
def malloc_scalar_kernel(heap, out, size):
    """``scalar``, usually with one warp, and ``cta`` with four: one request per program."""
    tl.store(out + tl.program_id(0), da.malloc(heap, size))


@triton.jit
def free_scalar_kernel(heap, addrs):
    """Free one address per program."""
    da.free(heap, tl.load(addrs + tl.program_id(0)))


@triton.jit(do_not_specialize=["pairs", "size"])
def latency_kernel(heap, nulls, pairs, size):
    """``latency``: malloc and free, one after the other, in one program."""
    missing = tl.full((), 0, tl.int32)
    turn = pairs * 0
    while turn < pairs:
        addr = da.malloc(heap, size)
        missing += (addr == 0).to(tl.int32)
        da.free(heap, addr)
        turn += 1
    tl.store(nulls, missing)


# What the memory is for --------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n"])
def fill_kernel(addrs, n, WORDS: tl.constexpr, LANES: tl.constexpr):
    """``write``: every lane fills its allocation with 8-byte words."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = lane < n
    ptr = tl.load(addrs + lane, mask=active, other=0).to(tl.pointer_type(tl.int64))
    for word in tl.static_range(WORDS):
        tl.store(ptr + word, lane * WORDS + word, mask=active)


@triton.jit(do_not_specialize=["n"])
def check_kernel(addrs, wrong, n, WORDS: tl.constexpr, LANES: tl.constexpr):
    """Count per program the words that are not what `fill_kernel` wrote."""
    program = tl.program_id(0)
    lane = program.to(tl.int64) * LANES + tl.arange(0, LANES)
    active = lane < n
    ptr = tl.load(addrs + lane, mask=active, other=0).to(tl.pointer_type(tl.int64))
    bad = tl.zeros((LANES,), tl.int32)
    for word in tl.static_range(WORDS):
        seen = tl.load(ptr + word, mask=active, other=0)
        bad += (active & (seen != lane * WORDS + word)).to(tl.int32)
    tl.store(wrong + program, tl.sum(bad, axis=0))
