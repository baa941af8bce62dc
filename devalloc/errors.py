"""Every exception that devalloc raises. `DevallocError` is the base of all of them."""

from __future__ import annotations


class DevallocError(Exception):
    """Base of all errors of this package."""


class InvalidArgument(DevallocError, ValueError):
    """An argument that cannot work: a negative size, a closed heap, a tensor on another device."""


class OutOfMemory(DevallocError, MemoryError):
    """There is no free memory that fits the request, in the heap, the arena or the source."""


class InvalidFreeError(DevallocError):
    """Something was freed that is not a live allocation. The free changed nothing."""


class DoubleFree(InvalidFreeError):
    """An allocation could start at the address, but there is none, or it was freed."""


class InvalidFree(InvalidFreeError):
    """No allocation can start at the address: it is foreign, misaligned, or inside a block."""


class InvalidPointer(DevallocError):
    """A program accessed an address where there is no live block, or more than the block has."""


class InvalidWriteError(DevallocError):
    """A program wrote to memory that it did not own. Only a debug heap notices."""


class Overflow(InvalidWriteError):
    """A program wrote right before or behind a live block."""


class UseAfterFree(InvalidWriteError):
    """A program wrote to a block after it was freed."""


class LeakWarning(DevallocError, UserWarning):
    """A debug heap was closed while blocks were live."""


class CorruptionError(DevallocError):
    """An invariant of the allocator does not hold. The message names it."""
