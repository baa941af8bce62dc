"""Addresses without memory, to try allocators at any scale on any machine."""

from __future__ import annotations

import threading

import torch

from devalloc.errors import InvalidArgument, OutOfMemory
from devalloc.sizes import format_size, parse_size
from devalloc.sources.base import Capabilities, Ledger, Segment, granularity_of


class SimulatedSource:
    """Hands out addresses with no memory behind them, and counts.

    Like a GPU's source it gives out whole multiples of its granularity. It never runs into
    fragmentation: address space is plentiful, and only the sum of bytes is limited. It never gives
    out adjacent segments, so a test notices if an allocator joins two.

    Parameters
    ----------
    capacity : int or str, optional
        The most bytes that may be out at a time. Default: no limit.
    granularity : int
        Bytes, a power of two.

    Raises
    ------
    InvalidArgument
        For a granularity that is not a power of two.
    """

    device = torch.device("cpu")
    capabilities = Capabilities()

    def __init__(self, capacity: int | str | None = None, granularity: int = 512) -> None:
        self.capacity = None if capacity is None else parse_size(capacity)
        self.granularity = granularity
        granularity_of(self)
        self.used = 0
        """Bytes that are out, in whole multiples of the granularity."""
        self.peak = 0
        """The most that was out at a time."""
        self.allocations = 0
        self.frees = 0
        self.failures = 0
        self._out = Ledger("simulated memory")
        self._next = 1 << 40
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"SimulatedSource(capacity={self.capacity})"

    @property
    def calls(self) -> int:
        """Allocations, failed ones included, and frees."""
        return self.allocations + self.failures + self.frees

    def _rounded(self, nbytes: int) -> int:
        return (nbytes + self.granularity - 1) & -self.granularity

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        """An address; raises OutOfMemory if the capacity would be exceeded."""
        self._out.check(nbytes)
        taken = self._rounded(nbytes)
        with self._lock:
            if self.capacity is not None and self.used + taken > self.capacity:
                self.failures += 1
                raise OutOfMemory(
                    f"simulated memory: {format_size(nbytes)} asked for, "
                    f"{format_size(self.capacity - self.used)} of "
                    f"{format_size(self.capacity)} are free; raise the capacity"
                )
            address = self._next
            self._next += taken + self.granularity
            self.used += taken
            self.peak = max(self.peak, self.used)
            self.allocations += 1
        self._out.enter(address, nbytes)
        return address

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        with self._out.leaving(address, nbytes), self._lock:
            self.used -= self._rounded(nbytes)
            self.frees += 1

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        """Raises InvalidArgument: there is nothing to look at."""
        raise InvalidArgument("simulated memory cannot be viewed; use HostSource for real memory")
