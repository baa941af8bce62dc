"""Every exception that devalloc raises. `DevallocError` is the base of all of them."""

from __future__ import annotations


class DevallocError(Exception):
    """Base of all errors of this package."""


class InvalidArgument(DevallocError, ValueError):
    """A value that makes no sense: a negative size, a closed heap, a tensor of another device."""


class OutOfMemory(DevallocError, MemoryError):
    """No free memory of the wanted shape, in a heap or at the source."""


class InvalidFreeError(DevallocError):
    """Something was freed that is no live allocation. The heap is unchanged."""


class DoubleFree(InvalidFreeError):
    """The address could have been an allocation, but nothing lives there (any more)."""


class InvalidFree(InvalidFreeError):
    """The address cannot be an allocation: foreign, misaligned, or inside a block."""


class InvalidWriteError(DevallocError):
    """Memory was written by somebody who did not have it. Only a debug heap notices."""


class Overflow(InvalidWriteError):
    """Something was written right before or behind a live block."""


class UseAfterFree(InvalidWriteError):
    """Something was written to a block after it was freed."""


class LeakWarning(DevallocError, UserWarning):
    """A debug heap was closed while blocks were live."""


class CorruptionError(DevallocError):
    """An invariant of the allocator does not hold. The message names it."""
