"""A kernel to know a machine by: compile times are given in what compiling this one takes.

It uses nothing of devalloc, so that no change there moves it, and it asks the same of the compiler:
much code, a loop, branches, numbers and blocks, reductions and atomics. A change to it moves every
bound, unless `tests.compile.measure.REFERENCE_SECONDS` follows.
"""

import triton
import triton.language as tl


@triton.jit
def reference_kernel(counts, values, limit, LANES: tl.constexpr, ROUNDS: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    value = tl.load(values + lane, mask=lane < limit, other=0)
    left = limit
    while left > 0:
        for step in tl.static_range(ROUNDS):
            value = (value ^ (value >> 7)) * 0x5BD1E995 + step
            total = tl.sum(value, axis=0)
            if total > left:
                left -= tl.atomic_add(counts + step, total, sem="relaxed").to(tl.int32)
            value = tl.where(value > total, value - lane, value)
        left -= 1
    tl.store(values + lane, value, mask=lane < limit)
