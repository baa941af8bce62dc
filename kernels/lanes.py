"""Small things about the lanes of a block, which also work on scalars.

Everything above is written once for a scalar request of the whole program and for a block with a
request per lane. A scalar is a block of one lane that needs no reductions.

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
    if is_block(model):
        index = tl.arange(0, model.shape[0])
    else:
        index = tl.full((), 0, tl.int32)
    return index


@triton.jit
def count_lanes(flags):
    """How many flags are true (int32)."""
    if is_block(flags):
        count = tl.sum(flags.to(tl.int32), axis=0)
    else:
        count = flags.to(tl.int32)
    return count


@triton.jit
def any_lane(flags):
    return count_lanes(flags) > 0


@triton.jit
def first_lane(flags):
    """Lane of the first true flag; the width of the block if there is none."""
    if is_block(flags):
        lane = tl.arange(0, flags.shape[0])
        first = tl.min(tl.where(flags, lane, flags.shape[0]), axis=0)
    else:
        first = (flags == 0).to(tl.int32)
    return first


@triton.jit
def unite(values):
    """The sum of a block, as a scalar: the union, if each bit is set in one lane at most."""
    if is_block(values):
        if values.dtype == tl.int64:
            high, low = halves(values)
            value = join(tl.sum(high, axis=0), tl.sum(low, axis=0))
        else:
            value = tl.sum(values, axis=0)
    else:
        value = values
    return value


@triton.jit
def pick(values, lane):
    """The value in ``lane`` of a block, as a scalar; 0 if the block has no such lane."""
    if is_block(values):
        values = unite(tl.where(tl.arange(0, values.shape[0]) == lane, values, 0))
    return values


@triton.jit
def rank_of(flags):
    """How many lanes before this one are flagged too (int32); meaningless where not flagged."""
    rank = lane_index(flags)
    if is_block(flags):
        if count_lanes(flags) < flags.shape[0]:
            rank = tl.cumsum(flags.to(tl.int32), axis=0) - 1
    return rank
