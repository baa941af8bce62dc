"""Addresses without memory, to try allocators at any scale on any machine."""

from __future__ import annotations

import threading

import torch

from devalloc.errors import InvalidArgument, OutOfMemory
from devalloc.sizes import format_size, parse_size
from devalloc.sources.source import Capabilities, Ledger, Segment, granularity_of


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
    capabilities = Capabilities(mappable=True)

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
        # Of reservations: what is mapped there, bytes by offset.
        self._parts: dict[int, dict[int, int]] = {}
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
        with self._lock:
            self._take(self._rounded(nbytes))
            address = self._take_addresses(nbytes)
        self._out.enter(address, nbytes)
        return address

    def _take_addresses(self, nbytes: int) -> int:
        address = self._next
        self._next += self._rounded(nbytes) + self.granularity
        return address

    def _take(self, nbytes: int) -> None:
        if self.capacity is not None and self.used + nbytes > self.capacity:
            self.failures += 1
            raise OutOfMemory(
                f"simulated memory: {format_size(nbytes)} asked for, "
                f"{format_size(self.capacity - self.used)} of "
                f"{format_size(self.capacity)} are free; raise the capacity"
            )
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        self.allocations += 1

    def _give(self, nbytes: int) -> None:
        self.used -= nbytes
        self.frees += 1

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        with self._out.leaving(address, nbytes), self._lock:
            parts = self._parts.pop(address, None)
            if parts is None:
                self._give(self._rounded(nbytes))
            elif parts:
                self._give(sum(parts.values()))

    # As a source that maps memory: see `devalloc.sources.source.Mappable` -------------------------

    def reserve(self, nbytes: int) -> int:
        self._out.check(nbytes)
        with self._lock:
            address = self._take_addresses(nbytes)
            self._parts[address] = {}
        self._out.enter(address, nbytes)
        return address

    def map(self, address: int, offset: int, nbytes: int, largest: int) -> None:
        with self._lock:
            self._take(nbytes)
            for start in range(offset, offset + nbytes, largest):
                self._parts[address][start] = min(largest, offset + nbytes - start)

    def unmap(self, address: int, offset: int, nbytes: int, *, keep: bool = True) -> None:
        with self._lock:
            for start, _ in self.parts(address, offset, nbytes):
                del self._parts[address][start]
            self._give(nbytes)

    def parts(self, address: int, offset: int, nbytes: int) -> list[tuple[int, int]]:
        with self._lock:
            return sorted(
                (start, size)
                for start, size in self._parts[address].items()
                if offset <= start and start + size <= offset + nbytes
            )

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        """Raises InvalidArgument: there is nothing to look at."""
        raise InvalidArgument("simulated memory cannot be viewed; use HostSource for real memory")
