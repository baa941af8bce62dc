"""Kernels with mistakes, for the tests of debug heaps."""

import triton
import triton.language as tl

from devalloc import kernels as da
from devalloc.kernels.debug.block_table import padded_size
from devalloc.kernels.debug.guards import near_end


@triton.jit
def malloc_lanes_kernel(heap, sizes, tags, addrs, n, BLOCK: tl.constexpr):
    """One block per lane, with a tag of its own."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    size = tl.load(sizes + index, mask=inside, other=0)
    tag = tl.load(tags + index, mask=inside, other=0)
    tl.store(addrs + index, da.malloc(heap, size, inside, tag), mask=inside)


@triton.jit
def malloc_scalar_kernel(heap, sizes, tags, addrs):
    """One block per program."""
    program = tl.program_id(0)
    addr = da.malloc(heap, tl.load(sizes + program), tag=tl.load(tags + program))
    tl.store(addrs + program, addr)


@triton.jit
def zeros_lanes_kernel(heap, sizes, tags, addrs, n, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    size = tl.load(sizes + index, mask=inside, other=0)
    tag = tl.load(tags + index, mask=inside, other=0)
    tl.store(addrs + index, da.zeros(heap, size, inside, tag), mask=inside)


@triton.jit
def zeros_scalar_kernel(heap, sizes, tags, addrs):
    program = tl.program_id(0)
    addr = da.zeros(heap, tl.load(sizes + program), tag=tl.load(tags + program))
    tl.store(addrs + program, addr)


@triton.jit
def retag_kernel(heap, addrs, sizes, tag, BLOCK: tl.constexpr):
    """``addrs[i] = realloc(addrs[i], sizes[i])`` with a tag."""
    lane = tl.arange(0, BLOCK)
    addr = da.realloc(heap, tl.load(addrs + lane), tl.load(sizes + lane), tag=tag)
    tl.store(addrs + lane, addr)


@triton.jit
def poke_kernel(addrs, value, n, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``BYTES`` bytes of ``value`` at each address."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    addr = tl.load(addrs + index, mask=index < n, other=0)
    for byte in tl.static_range(BYTES):
        ptr = (addr + byte).to(tl.pointer_type(tl.int8))
        tl.store(ptr, tl.full((BLOCK,), 0, tl.int8) + value, mask=addr != 0)


@triton.jit
def peek_kernel(addr, nbytes, out, BLOCK: tl.constexpr):
    """The bytes of one block."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ptr = (tl.load(addr) + index).to(tl.pointer_type(tl.int8))
    tl.store(out + index, tl.load(ptr, mask=index < nbytes, other=0), mask=index < nbytes)


@triton.jit
def near_zone_kernel(sizes, ends, padded, n, BLOCK: tl.constexpr):
    """By size, where in a block its near zone ends, and what the block takes, both in bytes."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    size = tl.load(sizes + index, mask=inside, other=1)
    tl.store(ends + index, near_end(size) * 8, mask=inside)
    tl.store(padded + index, padded_size(size), mask=inside)
