"""The source protocol, and segments: memory that returns to its source by itself."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Source(Protocol):
    """Raw memory of one device.

    ``allocate`` raises OutOfMemory when there is none, and nothing is lost then. Addresses are
    multiples of ``granularity``. ``free`` may wait for the device; it must get back exactly what
    ``allocate`` gave.
    """

    device: torch.device
    granularity: int

    def allocate(self, nbytes: int) -> int: ...

    def free(self, address: int, nbytes: int) -> None: ...

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor: ...


class Segment:
    """One piece of memory from a source, given back when nothing refers to it any more.

    Tensors made by :meth:`view` refer to the segment, so memory that somebody can still reach is
    never returned.

    Parameters
    ----------
    source : Source
    nbytes : int
        Size in bytes, at least 1.
    alignment : int
        A power of two; the segment's address is a multiple of it (more is taken if needed).

    Raises
    ------
    OutOfMemory
        If the source has not enough.
    """

    def __init__(self, source: Source, nbytes: int, alignment: int = 256) -> None:
        extra = alignment if alignment > source.granularity else 0
        raw = source.allocate(nbytes + extra)
        self.source = source
        self.nbytes = nbytes
        self.address = (raw + alignment - 1) // alignment * alignment
        weakref.finalize(self, source.free, raw, nbytes + extra)

    def view(self, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """A uint8 tensor over ``nbytes`` bytes from ``offset`` on; no copy. Keeps the segment."""
        if nbytes is None:
            nbytes = self.nbytes - offset
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise IndexError(f"[{offset}, {offset + nbytes}) is not inside {self.nbytes} bytes")
        return self.source.view(self, offset, nbytes)
