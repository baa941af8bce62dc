"""Small things about the lanes of a block, which also work on scalars.

Most of what is above is written once, for a scalar request of the whole program and for a block
with a request per lane (malloc and free begin apart). A scalar is a block of one lane that needs
no reductions.

Words are united, and the word of a lane is picked, in two halves: NVIDIA has an instruction that
reduces 32 bits over a warp; 64 take five exchanges, each waiting for the last.
"""

import triton
import triton.language as tl

from .bits import halves, join


@triton.constexpr_function
def axes(x):
    """How many axes an argument has; 0 for a scalar, a Python number or None."""
    return len(getattr(x, "shape", ()))


@triton.constexpr_function
def is_block(x):
    """Whether an argument is a block rather than a scalar, a Python number or None."""
    return len(getattr(x, "shape", ())) > 0


@triton.constexpr_function
def width(x):
    """How many lanes a block has; 1 for a scalar."""
    return int(x.shape[0]) if len(getattr(x, "shape", ())) > 0 else 1


@triton.jit
def lane_index(model):
    """The lanes' numbers (int32), in the shape of ``model``."""
    return tl.arange(0, model.shape[0]) if is_block(model) else tl.full((), 0, tl.int32)


@triton.jit
def count_lanes(flags):
    """How many flags are true (int32)."""
    return tl.sum(flags.to(tl.int32), axis=0) if is_block(flags) else flags.to(tl.int32)


@triton.jit
def any_lane(flags):
    return count_lanes(flags) > 0


@triton.jit
def first_lane(flags):
    """Lane of the first true flag; the width of the block if there is none."""
    first = tl.where(flags, lane_index(flags), width(flags))
    return tl.min(first, axis=0) if is_block(flags) else first


@triton.jit
def unite(values):
    """The sum of a block, as a scalar: the union, if each bit is set in one lane at most."""
    if is_block(values):
        if values.dtype == tl.int64:
            high, low = halves(values)
            values = join(tl.sum(high, axis=0), tl.sum(low, axis=0))
        else:
            values = tl.sum(values, axis=0)
    return values


@triton.jit
def pick(values, lane):
    """The value in ``lane`` of a block, as a scalar; 0 if the block has no such lane."""
    return unite(tl.where(lane_index(values) == lane, values, 0)) if is_block(values) else values


@triton.jit
def rank_of(flags):
    """How many lanes before this one are flagged too (int32); meaningless where not flagged."""
    rank = lane_index(flags)
    if count_lanes(flags) < flags.shape[0]:
        rank = tl.cumsum(flags.to(tl.int32), axis=0) - 1
    return rank
