"""Reading state that another program may change.

A Triton program is many threads and a ``tl.load`` of a scalar or of a small block is performed by
every thread that holds a copy. If the word changes in between, the copies differ inside one
program, branches computed from them diverge, and barriers stop matching. An atomic is executed
once and its result is broadcast, so *every mutable word is read through* :func:`atomic_load`;
a test fails the build otherwise.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import num_warps

from .lanes import width
from .target import assembly, has_amdgcn, has_ptx


@triton.jit
def atomic_load(ptr, mask=None):
    """Current value of int64 word(s), relaxed; inactive lanes give 0.

    In a program of one warp, a relaxed load of a block that has lanes for all threads: one
    instruction reads for all of them, so copies of a lane cannot differ. Then programs that look at
    one word do not wait for each other, as atomics do.
    """
    zero = ptr.to(tl.int64) & 0
    if has_ptx() and num_warps() == 1 and width(ptr) >= 32:
        active = tl.full(ptr.shape, 1, tl.int32)
        if mask is not None:
            active = mask.to(tl.int32)
        load: tl.constexpr = "@active ld.relaxed.gpu.global.b64 $0, [$1];"
        start: tl.constexpr = ".reg .pred active; setp.ne.s32 active, $2, 0; mov.b64 $0, 0;"
        value = assembly("{" + start + load + "}", "=&l,l,r", (ptr, active), tl.int64)
    else:
        value = tl.atomic_or(ptr, zero, mask=mask, sem="relaxed")
        if mask is not None:
            value = tl.where(mask, value, 0)
    return value


@triton.jit
def load_beside(ptr, looks, n: tl.constexpr):
    """Which of the ``n`` words from each lane's ``ptr`` on are not 0: a bit for each (int32); none
    for lanes that do not look. All loads are under way at one time. Near the end of an array, what
    comes behind it in the state is loaded, too: the caller masks that."""
    seen = (ptr.to(tl.int64) & 0).to(tl.int32)
    for step in tl.static_range(n):
        seen = seen | tl.where(atomic_load(ptr + step, looks) != 0, 1 << step, 0)
    return seen


@triton.jit
def load_one(ptr):
    """The lower 32 bits (int32) of the word at a scalar pointer, relaxed. Programs of one warp do
    not wait for each other here, as atomics do."""
    lane = tl.arange(0, 32)
    return tl.sum(atomic_load(ptr + lane * 0, lane == 0).to(tl.int32), axis=0)


@triton.jit
def alone(ptr, count):
    """A scalar pointer as a block of 32, and a mask that has ``count`` lanes, 0 or 1. In a program
    of one warp, what an atomic on a block returns does not pass through shared memory, between two
    barriers, as that on a scalar does."""
    lane = tl.arange(0, 32)
    return ptr + lane * 0, lane < count


@triton.jit
def atomic_cas(ptr, expected, desired):
    """Compare-and-swap of int64 word(s), relaxed; returns the old value.

    There is no mask. A lane that must not change anything passes ``expected == desired``.
    """
    return tl.atomic_cas(ptr, expected.to(tl.int64), desired.to(tl.int64), sem="relaxed")


@triton.constexpr_function
def fence_instruction(sem):
    """The PTX of :func:`fence`. (Before Hopper it always does both.)"""
    if tl.target_info.current_target().arch < 90:
        sem = "acq_rel"
    return f"fence.{sem}.gpu; mov.b32 $0, $1;"


@triton.jit
def fence(word, sem: tl.constexpr):
    """Order the program's accesses to memory at device scope: all before it with all after it
    (``acq_rel``), or only with what it writes afterwards (``release``, which takes two thirds of
    the time), or only what it has read before with all after it (``acquire``, no time).

    Atomics are relaxed, and this fence orders them: an atomic with release semantics would cost a
    fence per element, one after the other. The barriers carry the order between the threads of the
    program. ``word`` is any mutable word of the control block: without PTX an atomic on it
    stands for the fence. One wave executes that, and it releases only what has arrived in memory,
    so each wave first waits for its own accesses.
    """
    if has_amdgcn():
        wait: tl.constexpr = "s_waitcnt vmcnt(0) lgkmcnt(0); v_mov_b32 $0, $1"
        assembly(wait, "=v,v", (tl.full((), 0, tl.int32),), tl.int32)
    tl.debug_barrier()
    if has_ptx():
        assembly(fence_instruction(sem), "=r,r", (tl.full((), 0, tl.int32),), tl.int32)
    else:
        tl.atomic_add(word, tl.full((), 0, tl.int64), sem=sem)
    tl.debug_barrier()
