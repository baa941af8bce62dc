"""Zeroing and copying allocations that belong to the caller."""

import triton
import triton.language as tl

from .lanes import is_block


@triton.jit
def as_column(x):
    """A scalar or block as a block of shape (lanes, 1)."""
    return x[:, None] if is_block(x) else x + tl.zeros((1, 1), x.dtype)


@triton.jit
def fill(addr, nbytes, source=None):
    """Write ``nbytes`` (rounded up to 16, so inside the slot; 0: nothing) at each address: what is
    at a ``source`` address, or else zeros. Both blocks belong to the caller, so plain loads are
    right; the barriers order them with other threads'."""
    if source is not None:
        tl.debug_barrier()
        source = as_column(source)
    addr = as_column(addr)
    words = (as_column(nbytes) + 15) >> 4 << 1
    most = tl.max(tl.max(words, axis=1), axis=0)
    step: tl.constexpr = 1024 // addr.shape[0] if addr.shape[0] < 1024 else 1
    column = tl.arange(0, step)[None, :].to(tl.int64)
    at = most * 0
    while at < most:
        index = at + column
        inside = index < words
        value = tl.zeros((addr.shape[0], step), tl.int64)
        if source is not None:
            value = tl.load((source + index * 8).to(tl.pointer_type(tl.int64)), mask=inside)
        tl.store((addr + index * 8).to(tl.pointer_type(tl.int64)), value, mask=inside)
        at += step
    tl.debug_barrier()
