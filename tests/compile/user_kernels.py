"""The smallest kernels a user could write: one call of a device function, or malloc with free."""

import triton
import triton.language as tl

from devalloc import kernels as da


@triton.jit
def empty_kernel(heap, out, nbytes):
    """Touches its arguments only: the cost of compiling any kernel at all."""
    tl.store(out + tl.program_id(0), tl.program_id(0) + nbytes)


@triton.jit
def malloc_scalar(heap, out, nbytes):
    tl.store(out + tl.program_id(0), da.malloc(heap, nbytes))


@triton.jit
def malloc_lanes(heap, out, sizes, count, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = lane < count
    addr = da.malloc(heap, tl.load(sizes + lane, mask=mask, other=0), mask=mask)
    tl.store(out + lane, addr, mask=mask)


@triton.jit
def free_scalar(heap, addrs):
    da.free(heap, tl.load(addrs + tl.program_id(0)))


@triton.jit
def free_lanes(heap, addrs, count, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = lane < count
    da.free(heap, tl.load(addrs + lane, mask=mask, other=0), mask=mask)


@triton.jit
def pair_scalar(heap, out, nbytes):
    addr = da.malloc(heap, nbytes)
    if addr != 0:
        tl.store(addr.to(tl.pointer_type(tl.int32)), tl.program_id(0))
    tl.store(out + tl.program_id(0), addr)
    da.free(heap, addr)


@triton.jit
def pair_lanes(heap, out, sizes, count, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = lane < count
    addr = da.malloc(heap, tl.load(sizes + lane, mask=mask, other=0), mask=mask)
    tl.store(addr.to(tl.pointer_type(tl.int32)), lane, mask=mask & (addr != 0))
    tl.store(out + lane, addr, mask=mask)
    da.free(heap, addr, mask=mask)


@triton.jit
def usable_size_scalar(heap, addrs, out):
    tl.store(out + tl.program_id(0), da.usable_size(heap, tl.load(addrs + tl.program_id(0))))


@triton.jit
def usable_size_lanes(heap, addrs, out, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    tl.store(out + lane, da.usable_size(heap, tl.load(addrs + lane)))


@triton.jit
def zeros_scalar(heap, out, nbytes):
    tl.store(out + tl.program_id(0), da.zeros(heap, nbytes))


@triton.jit
def zeros_lanes(heap, out, sizes, count, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = lane < count
    addr = da.zeros(heap, tl.load(sizes + lane, mask=mask, other=0), mask=mask)
    tl.store(out + lane, addr, mask=mask)


@triton.jit
def realloc_scalar(heap, addrs, nbytes):
    addr = tl.load(addrs + tl.program_id(0))
    tl.store(addrs + tl.program_id(0), da.realloc(heap, addr, nbytes))


@triton.jit
def realloc_lanes(heap, addrs, sizes, count, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = lane < count
    addr = tl.load(addrs + lane, mask=mask, other=0)
    size = tl.load(sizes + lane, mask=mask, other=0)
    tl.store(addrs + lane, da.realloc(heap, addr, size, mask=mask), mask=mask)


@triton.jit
def pointer_scalar(heap, addrs):
    tl.store(da.pointer(heap, tl.load(addrs + tl.program_id(0)), tl.float32), 1.0)


@triton.jit
def pointer_lanes(heap, addrs, LANES: tl.constexpr):
    addr = tl.load(addrs + tl.program_id(0) * LANES + tl.arange(0, LANES))
    tl.store(da.pointer(heap, addr, tl.float32, addr != 0), 1.0, mask=addr != 0)


@triton.jit(noinline=True)
def probe_cold(heap, value):
    return tl.atomic_cas(heap, value, value + 1)


@triton.jit
def probe_kernel(heap, out):
    """Two atomics in its own body and one in a cold function: what the counting must find."""
    old = tl.atomic_add(heap, tl.full((), 1, tl.int64))
    if old > 5:
        old = probe_cold(heap, old)
    tl.atomic_or(heap + 1, old, sem="relaxed")
    tl.store(out, old)


@triton.jit
def never_lanes(heap, out, LANES: tl.constexpr):
    size = tl.full((LANES,), 64, tl.int64)
    addr = da.malloc(heap, size, False)
    da.free(heap, addr, False)
    tl.store(out + tl.arange(0, LANES), addr)
