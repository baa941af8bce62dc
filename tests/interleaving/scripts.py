"""Programs as lists of heap operations, and the kernel that carries them out.

A script is one list of operations for each program. Addresses live in numbered slots that all
programs share, so that one may free what another allocated before. Every operation tells the
journal when it begins and when it ends, and what it returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from devalloc.kernels.allocation import malloc_any
from devalloc.kernels.api import realloc_any
from devalloc.kernels.freeing import free_any

MALLOC = tl.constexpr(0)
FREE = tl.constexpr(1)
REALLOC = tl.constexpr(2)
FREE_AT = tl.constexpr(3)
MALLOC_LANES = tl.constexpr(4)
FREE_LANES = tl.constexpr(5)
MALLOC_TWO = tl.constexpr(6)
LANES = tl.constexpr(4)
ROW = tl.constexpr(3)
# Journal entries of an operation: it begins; its lanes end, with the addresses in their slots.
ENTRIES = tl.constexpr(1 + LANES.value)


@triton.jit
def run_script(heap, script, slots, journal, OPS: tl.constexpr, POLLS: tl.constexpr):
    """Carry out ``OPS`` operations of (kind, bytes or offset, slot); a kind below 0 ends."""
    lane = tl.arange(0, LANES)
    program = tl.program_id(0)
    i = program * 0
    while i < OPS:
        row = script + (program * OPS + i) * ROW
        kind = tl.load(row)
        amount = tl.load(row + 1)
        slot = slots + tl.load(row + 2)
        entry = journal + (program * OPS + i) * ENTRIES
        if kind >= 0:
            tl.store(entry, 1)
            if kind == MALLOC:
                tl.store(slot, malloc_any(heap, amount, amount > 0, POLLS))
            if kind == FREE:
                addr = tl.load(slot)
                free_any(heap, addr, addr != 0)
            if kind == REALLOC:
                tl.store(slot, realloc_any(heap, tl.load(slot), amount, amount >= 0))
            if kind == FREE_AT:
                free_any(heap, tl.load(slot) + amount, program >= 0)
            if kind == MALLOC_LANES:
                tl.store(slot + lane, malloc_any(heap, amount + lane * 0, lane < LANES, POLLS))
            if kind == MALLOC_TWO:
                tl.store(slot + lane, malloc_any(heap, amount << (lane & 1), lane < LANES, POLLS))
            if kind == FREE_LANES:
                free_any(heap, tl.load(slot + lane), lane < LANES)
            many = (kind == MALLOC_LANES) | (kind == MALLOC_TWO) | (kind == FREE_LANES)
            inside = (lane == 0) | many
            tl.store(entry + 1 + lane, tl.load(slot + lane, mask=inside), mask=inside)
        i += 1


@dataclass(frozen=True)
class Op:
    """One operation of a script. ``amount``: bytes, or for FREE_AT an offset to the address."""

    kind: tl.constexpr
    slot: int
    amount: int = 0

    @property
    def lanes(self) -> int:
        return LANES.value if self.kind in (MALLOC_LANES, MALLOC_TWO, FREE_LANES) else 1

    @property
    def allocates(self) -> bool:
        return self.kind in (MALLOC, MALLOC_LANES, MALLOC_TWO, REALLOC)

    @property
    def frees(self) -> bool:
        return self.kind in (FREE, FREE_LANES, REALLOC)

    def of_lane(self, lane: int) -> Op:
        """What one lane asks for."""
        return replace(self, amount=self.amount << (lane & 1)) if self.kind == MALLOC_TWO else self


Script = tuple[tuple[Op, ...], ...]


def malloc(slot: int, nbytes: int) -> Op:
    return Op(MALLOC, slot, nbytes)


def free(slot: int) -> Op:
    return Op(FREE, slot)


def free_at(slot: int, offset: int) -> Op:
    """A free of the address in a slot plus an offset: not an address that malloc returned."""
    return Op(FREE_AT, slot, offset)


def realloc(slot: int, nbytes: int) -> Op:
    return Op(REALLOC, slot, nbytes)


def malloc_lanes(slot: int, nbytes: int) -> Op:
    """One block of ``nbytes`` per lane, into slots from ``slot`` on."""
    return Op(MALLOC_LANES, slot, nbytes)


def malloc_two(slot: int, nbytes: int) -> Op:
    """The same, but odd lanes ask for twice as much: two classes in one block."""
    return Op(MALLOC_TWO, slot, nbytes)


def free_lanes(slot: int) -> Op:
    return Op(FREE_LANES, slot)


def table(script: Sequence[Sequence[Op]]) -> tuple[torch.Tensor, int]:
    """The script as the kernel reads it, and how many operations a program has at most."""
    most = max(len(ops) for ops in script)
    rows = torch.full((len(script), most, ROW.value), -1, dtype=torch.int64)
    for program, ops in enumerate(script):
        for at, op in enumerate(ops):
            rows[program, at] = torch.tensor([op.kind.value, op.amount, op.slot])
    return rows, most
