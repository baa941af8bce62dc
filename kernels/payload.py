"""Zeroing and copying allocations that belong to the caller."""

import triton
import triton.language as tl

from .lanes import is_block


@triton.jit
def as_column(x):
    """A scalar or block as a block of shape (lanes, 1)."""
    if is_block(x):
        column = x[:, None]
    else:
        column = x + tl.zeros((1, 1), x.dtype)
    return column


@triton.jit
def fill_zero(addr, nbytes):
    """Zero ``nbytes`` (rounded up to 16, so inside the slot; 0: nothing) at each address."""
    addr = as_column(addr)
    words = (as_column(nbytes) + 15) >> 4 << 1
    most = tl.max(tl.max(words, axis=1), axis=0)
    step: tl.constexpr = 1024 // addr.shape[0] if addr.shape[0] < 1024 else 1
    column = tl.arange(0, step)[None, :].to(tl.int64)
    at = most * 0
    while at < most:
        index = at + column
        ptr = (addr + index * 8).to(tl.pointer_type(tl.int64))
        zero = tl.zeros((addr.shape[0], step), tl.int64)
        tl.store(ptr, zero, mask=index < words)
        at += step
    tl.debug_barrier()


@triton.jit
def copy(source, target, nbytes):
    """Copy ``nbytes`` (rounded up to 16; 0: nothing) from each source to each target address. Both
    belong to the caller, so plain loads are right; the barriers order them with other threads'."""
    tl.debug_barrier()
    source = as_column(source)
    target = as_column(target)
    words = (as_column(nbytes) + 15) >> 4 << 1
    most = tl.max(tl.max(words, axis=1), axis=0)
    step: tl.constexpr = 1024 // source.shape[0] if source.shape[0] < 1024 else 1
    column = tl.arange(0, step)[None, :].to(tl.int64)
    at = most * 0
    while at < most:
        index = at + column
        inside = index < words
        from_ptr = (source + index * 8).to(tl.pointer_type(tl.int64))
        to_ptr = (target + index * 8).to(tl.pointer_type(tl.int64))
        tl.store(to_ptr, tl.load(from_ptr, mask=inside), mask=inside)
        at += step
    tl.debug_barrier()
