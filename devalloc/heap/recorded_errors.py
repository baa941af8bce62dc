"""What kernels recorded in a heap when a request, a free or a pointer was wrong.

The counts and records lie in the first words of the heap's state: see ``kernels/layout.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from devalloc.errors import (
    DevallocError,
    DoubleFree,
    InvalidArgument,
    InvalidFree,
    InvalidFreeError,
    InvalidPointer,
    OutOfMemory,
    Overflow,
    UseAfterFree,
)
from devalloc.kernels import layout
from devalloc.sizes import format_size

KINDS: tuple[tuple[type[DevallocError], str], ...] = (
    (DoubleFree, "double free"),
    (InvalidFree, "invalid free"),
    (OutOfMemory, "out of memory"),
    (InvalidArgument, "invalid argument"),
    (Overflow, "overflow"),
    (UseAfterFree, "use after free"),
    (InvalidPointer, "invalid pointer"),
)
"""Errors by their number in kernels, with what messages call them."""

_FIRST = layout.ERRORS.value
_COUNT = layout.RECORD_COUNT.value
_RECORDS = layout.ERROR_RECORDS.value
_MOST = layout.MAX_RECORDS.value


@dataclass(frozen=True)
class Fault:
    """One error that kernels recorded in a heap.

    Attributes
    ----------
    kind : type
        `DoubleFree`, `InvalidFree`, `OutOfMemory`, `InvalidArgument` or `InvalidPointer`; in a
        debug heap also `Overflow` or `UseAfterFree`.
    address : int
        The lowest byte that was written, or the address that was freed or wanted; 0 for a failed
        malloc.
    block, size : int
        First byte and requested bytes of the block concerned; 0 where they are not known. For a
        failed malloc ``size`` is the bytes that were asked for.
    tag : str
        The tag of the block's owner, a name or a number; empty if there is none.
    found_by : str
        "free", "malloc", "realloc", "audit", "pointer", "gather" or "scatter"; an ordinary heap
        does not distinguish the last two.
    program : int
        The program of the launch that found the error, which may not be the one that made it.
    message : str
        All of this as text.
    """

    kind: type[DevallocError]
    address: int
    block: int
    size: int
    tag: str
    found_by: str
    program: int
    message: str


@dataclass(frozen=True)
class ErrorRecords:
    """The errors recorded in the state of a heap.

    ``words`` is the state as int64 words, ``base`` the address of the heap, ``limit`` its bytes at
    most, ``guarded`` whether it is a debug heap. Reading waits for the current stream only.
    """

    words: torch.Tensor
    base: int
    limit: int
    guarded: bool

    def counts(self) -> list[int]:
        """How many errors of each kind."""
        return self.words[_FIRST : _FIRST + len(KINDS)].tolist()

    def faults(self) -> list[Fault]:
        """The first errors, in the order in which they were recorded."""
        number, *words = self.words[_COUNT : _RECORDS + 4 * _MOST].tolist()
        words = words[_RECORDS - _COUNT - 1 :]
        return [self._fault(*words[at : at + 4]) for at in range(0, 4 * min(number, _MOST), 4)]

    def unrecorded(self) -> Fault:
        """The error of the first kind that was counted. (A program that was killed in between may
        have counted one without recording it.)"""
        return self._fault(next(kind for kind, count in enumerate(self.counts()) if count), 0, 0, 0)

    def clear(self) -> int:
        """Forget all; returns how many requests had failed. Does not wait for the device."""
        failures = int(self.words[_FIRST + layout.E_OUT_OF_MEMORY.value])
        self.words[_FIRST : _RECORDS + 4 * _MOST].zero_()
        return failures

    def _fault(self, kind: int, address: int, size: int, program: int) -> Fault:
        error = KINDS[kind][0]
        text = self._describe(error, address, size, program)
        finder = "free" if issubclass(error, InvalidFreeError) else "malloc"
        if error is InvalidPointer or address == layout.IN_ROWS.value:
            finder = "gather or scatter"
        return Fault(error, address, 0, size, "", finder, program, text)

    def _describe(self, error: type[DevallocError], address: int, size: int, program: int) -> str:
        where = f"in program {program}"
        offset = address - self.base
        place = (
            f"offset {offset:#x} of the heap"
            if 0 <= offset < self.limit
            else "not an address of this heap"
        )
        if error is DoubleFree:
            return (
                f"double free of {address:#x} ({place}) {where}: there is no live block; it was "
                "freed before or never allocated"
            )
        if error is InvalidFree:
            return (
                f"invalid free of {address:#x} ({place}) {where}: it is not the start of an "
                "allocation; free exactly what malloc returned"
            )
        if error is OutOfMemory:
            guards = " (with the guards of a debug heap)" if self.guarded else ""
            text = f"malloc of {format_size(size)}{guards} failed {where}"
            if size > self.limit:
                text += f": the whole heap has {format_size(self.limit)}"
            return text
        if error is InvalidPointer:
            what = f"gather or scatter of {size} bytes at {address:#x} ({place}) {where}"
            if address == 0:
                return f"{what}: malloc gave no memory there; give such rows the length 0"
            return (
                f"{what}: no live block of so many bytes is there; it was freed, never allocated, "
                "or is smaller"
            )
        if address == layout.IN_ROWS.value:
            if size < 0:
                return (
                    f"a row of {size} elements, or from element {size} on, {where}: offsets of "
                    "rows begin at 0 or later and never decrease"
                )
            return f"gather or scatter {where}: the values have no room for {size} elements"
        return f"malloc of {size} bytes {where}: a size cannot be negative"
