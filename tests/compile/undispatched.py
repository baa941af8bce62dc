"""Kernels of `user_kernels` again, on a contract that knows no debug heap: the functions of
``kernels/api.py`` without the choice, and a cast in place of ``pointer``. Kernels of one name must
come out as the same code."""

import triton
import triton.language as tl

from devalloc.kernels.addresses import usable_any
from devalloc.kernels.allocation import malloc_any
from devalloc.kernels.api import as_request, realloc_any
from devalloc.kernels.freeing import free_any
from devalloc.kernels.payload import fill


@triton.jit
def malloc(heap, nbytes, mask=None):
    sizes, active = as_request(heap, nbytes, mask)
    return malloc_any(heap, sizes, active)


@triton.jit
def free(heap, addr, mask=None):
    addrs, active = as_request(heap, addr, mask)
    free_any(heap, addrs, active)


@triton.jit
def usable_size(heap, addr, mask=None):
    addrs, active = as_request(heap, addr, mask)
    return usable_any(heap, addrs, active & (addrs != 0))


@triton.jit
def zeros(heap, nbytes, mask=None):
    sizes, active = as_request(heap, nbytes, mask)
    addr = malloc_any(heap, sizes, active)
    fill(addr, tl.where(addr != 0, sizes, 0))
    return addr


@triton.jit
def realloc(heap, addr, nbytes, mask=None):
    old, _all = as_request(heap, addr, mask)
    sizes, active = as_request(heap, nbytes + old * 0, mask)
    return realloc_any(heap, old + sizes * 0, sizes, active)


@triton.jit
def malloc_scalar(heap, out, nbytes):
    tl.store(out + tl.program_id(0), malloc(heap, nbytes))


@triton.jit
def malloc_lanes(heap, out, sizes, count, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = lane < count
    addr = malloc(heap, tl.load(sizes + lane, mask=mask, other=0), mask=mask)
    tl.store(out + lane, addr, mask=mask)


@triton.jit
def free_scalar(heap, addrs):
    free(heap, tl.load(addrs + tl.program_id(0)))


@triton.jit
def free_lanes(heap, addrs, count, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = lane < count
    free(heap, tl.load(addrs + lane, mask=mask, other=0), mask=mask)


@triton.jit
def usable_size_lanes(heap, addrs, out, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    tl.store(out + lane, usable_size(heap, tl.load(addrs + lane)))


@triton.jit
def zeros_scalar(heap, out, nbytes):
    tl.store(out + tl.program_id(0), zeros(heap, nbytes))


@triton.jit
def realloc_scalar(heap, addrs, nbytes):
    addr = tl.load(addrs + tl.program_id(0))
    tl.store(addrs + tl.program_id(0), realloc(heap, addr, nbytes))


@triton.jit
def pointer_lanes(heap, addrs, LANES: tl.constexpr):
    addr = tl.load(addrs + tl.program_id(0) * LANES + tl.arange(0, LANES))
    tl.store(addr.to(tl.pointer_type(tl.float32)), 1.0, mask=addr != 0)
