"""Kernels that show what order between memory accesses costs, one after the other in a loop.

``SEM`` is the order of the atomic: relaxed, acquire, release or acq_rel. Each operation depends on
the value that the one before it returned, so the time of a loop is that of its round trips.
"""

from __future__ import annotations

import triton
import triton.language as tl

from devalloc.kernels.atomics import fence


@triton.jit(do_not_specialize=["turns"])
def vector_kernel(words, seen, turns, LANES: tl.constexpr, SEM: tl.constexpr, FENCED: tl.constexpr):
    """One atomic per lane and turn, each lane on a word of its own; stores the sum of what came
    back. With FENCED, a fence of the program follows each."""
    program = tl.program_id(0)
    lane = program * LANES + tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.int64)
    step = tl.full((LANES,), 1, tl.int64)
    turn = turns * 0
    while turn < turns:
        old = tl.atomic_add(words + lane, step, sem=SEM)
        if FENCED:
            fence(words, "acq_rel")
        total += old
        step = (old >> 62) + 1  # always 1, but known only when the atomic has returned
        turn += 1
    tl.store(seen + lane, total)


@triton.jit(do_not_specialize=["turns"])
def scalar_kernel(words, seen, turns, SEM: tl.constexpr, FENCED: tl.constexpr):
    """One atomic per program and turn, each program on a word of its own."""
    program = tl.program_id(0)
    total = tl.full((), 0, tl.int64)
    step = tl.full((), 1, tl.int64)
    turn = turns * 0
    while turn < turns:
        old = tl.atomic_add(words + program, step, sem=SEM)
        if FENCED:
            fence(words, "acq_rel")
        total += old
        step = (old >> 62) + 1
        turn += 1
    tl.store(seen + program, total)


@triton.jit(do_not_specialize=["turns"])
def bare_kernel(words, seen, turns, FENCED: tl.constexpr):
    """The loop without an atomic: what the loop itself costs, and with FENCED a fence in it."""
    program = tl.program_id(0)
    total = tl.full((), 0, tl.int64)
    turn = turns * 0
    while turn < turns:
        if FENCED:
            fence(words, "acq_rel")
        total += turn
        turn += 1
    tl.store(seen + program, total)
