"""Reading state that another program may change.

A Triton program is many threads and a ``tl.load`` of a scalar or of a small block is performed by
every thread that holds a copy. If the word changes in between, the copies differ inside one
program, branches computed from them diverge, and barriers stop matching. An atomic is executed
once and its result is broadcast, so *every mutable word is read through* :func:`atomic_load`;
a test fails the build otherwise.
"""

import triton
import triton.language as tl


@triton.jit
def atomic_load(ptr, mask=None):
    """Current value of int64 word(s); inactive lanes give 0. Acquire at device scope.

    Acquire because slow paths act on what they read (a page found free, a slab found idle), and
    the reads of one search must not be reordered with those of the next.
    """
    zero = ptr.to(tl.int64) & 0
    if mask is None:
        value = tl.atomic_or(ptr, zero, sem="acquire")
    else:
        value = tl.atomic_or(ptr, zero, mask=mask, sem="acquire")
        value = tl.where(mask, value, 0)
    return value


@triton.jit
def atomic_cas(ptr, expected, desired):
    """Compare-and-swap of int64 word(s), acq_rel; returns the old value.

    There is no mask. A lane that must not change anything passes ``expected == desired``.
    """
    return tl.atomic_cas(ptr, expected.to(tl.int64), desired.to(tl.int64))


@triton.jit
def one(ptr):
    """The int64 constant 1 in the shape of ``ptr`` (atomics want tensors as operands)."""
    return (ptr.to(tl.int64) & 0) + 1
