"""Arithmetic on 64-bit words of bits, the same on every target and in the interpreter.

Owns no state. Words are int64 (Triton's atomics want signed operands), so bit 63 is the sign and
every right shift that must not copy it goes through :func:`lsr`. All functions take scalars or
blocks alike.
"""

import triton
import triton.language as tl

from .target import assembly, has_ptx


@triton.jit
def lsr(x, s):
    """Logical right shift of int64 ``x`` by ``s`` in [0, 63] (int or int64)."""
    return (x.to(tl.uint64, bitcast=True) >> s).to(tl.int64, bitcast=True)


@triton.jit
def halves(x):
    """The upper and the lower 32 bits of int64 ``x``, as int32."""
    return (x >> 32).to(tl.int32), x.to(tl.int32)


@triton.jit
def join(high, low):
    """The int64 whose :func:`halves` are ``high`` and ``low``."""
    word = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    if has_ptx():
        word = assembly("mov.b64 $0, {$2, $1};", "=l,r,r", (high, low), tl.int64, True)
    return word


@triton.jit
def popcount(x):
    """Number of set bits of int64 ``x``, as int32."""
    # (NVIDIA's compiler knows this, and has one instruction for it.)
    x = x - (lsr(x, 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + (lsr(x, 2) & 0x3333333333333333)
    x = (x + lsr(x, 4)) & 0x0F0F0F0F0F0F0F0F
    return lsr(x * 0x0101010101010101, 56).to(tl.int32)


@triton.jit
def lowest_bit(x):
    """Index of the lowest set bit of ``x`` (int32); 64 if ``x`` is 0."""
    return popcount((x & -x) - 1)


@triton.jit
def shift_left(x, n):
    """``x << n`` of int64 ``x`` for int32 ``n`` >= 0; 0 where ``n`` >= 64, as NVIDIA's instruction
    gives and LLVM's does not."""
    y = tl.where(n < 64, x << (n & 63).to(tl.int64), 0)
    if has_ptx():
        y = assembly("shl.b64 $0, $1, $2;", "=l,l,r", (x, n), tl.int64, True)
    return y


@triton.jit
def low_mask(n):
    """Word with the ``n`` lowest bits set, ``n`` an int32 tensor in [0, 64]."""
    return shift_left((n * 0).to(tl.int64) + 1, n) - 1


@triton.jit
def next_bit(x, start):
    """Index (int32) of the first set bit of ``x`` at or above bit ``start`` (int32 in [0, 63]), and
    if there is none, of its lowest. Needs ``x`` != 0."""
    turned = lsr(x, start.to(tl.int64)) | (x << (-start & 63).to(tl.int64))
    return (lowest_bit(turned) + start) & 63


@triton.jit
def comb(n):
    """Word with bits 0, n, 2n, ... set, for int32 ``n`` >= 1."""
    x = (n * 0).to(tl.int64) + 1
    for step in tl.static_range(6):
        x = x | shift_left(x, n << step)
    return x


@triton.jit
def run_starts(x, n):
    """Bits of ``x`` at which ``n`` adjacent set bits begin; ``n`` a scalar in [1, 64].

    Doubling: after each step ``x`` marks the starts of runs of ``have`` bits.
    """
    have = n * 0 + 1
    while have < n:
        step = tl.minimum(have, n - have).to(tl.int64)
        x = x & lsr(x, step)
        have += step.to(have.dtype)
    return x


@triton.jit
def divide(x, d):
    """``x // d`` for int32 ``x`` in [0, 2**18) and ``d`` in [1, 2**16), by a float reciprocal.

    (x + 1/2) / d is at least 1 / (2 d) away from any integer, and its computed value is off by at
    most 2**18 / d * 2**-21. A fifth of the instructions of an integer division.
    """
    d = d.to(tl.float32)
    inverse = 1.0 / d
    if has_ptx():
        # (A division would also have to be right for very small and large ``d``.)
        inverse = assembly("rcp.approx.ftz.f32 $0, $1;", "=f,f", (d,), tl.float32, True)
    return ((x.to(tl.float32) + 0.5) * inverse).to(tl.int32)


@triton.jit
def floor_log2(n):
    """Position of the highest set bit of ``n`` > 0, from the exponent of its float: of 24 bits, or
    with the bit below that one clear."""
    return (n.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def mix(x):
    """A 32-bit integer scrambled into [0, 2**31): a hash for choosing where to look first."""
    x = x.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> 1).to(tl.int32)
