"""The calls that virtual memory is made of, and the CPU's double of them.

Three kinds of calls: addresses are reserved and released; physical memory is created in *handles*
and released; a handle is mapped at reserved addresses, made accessible, and unmapped again. A
handle cannot be split. Unmapping keeps the handle, so it can be mapped elsewhere.

`devalloc.sources.virtual` checks every argument and undoes what is half done; the calls here only
do it or raise.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import Any, Protocol

import torch

from devalloc.errors import DevallocError, OutOfMemory
from devalloc.sizes import format_size, require_power_of_two
from devalloc.sources.host import available_bytes, host_view
from devalloc.sources.libc import drop, libc, reason
from devalloc.sources.source import Segment


class Pages(Protocol):
    """Virtual memory of one device. All sizes and addresses are multiples of ``granularity``.

    A call that raises has changed nothing.
    """

    device: torch.device
    granularity: int
    host_accessible: bool

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses, aligned to the granularity; raises OutOfMemory."""
        ...

    def unreserve(self, address: int, nbytes: int) -> None:
        """Release a whole reservation, in which nothing is mapped."""
        ...

    def create(self, nbytes: int) -> Any:
        """A handle of so much physical memory; raises OutOfMemory."""
        ...

    def release(self, handle: Any, nbytes: int) -> None:
        """Give the memory of a handle, which is not mapped, back to the device."""
        ...

    def map(self, address: int, handle: Any, nbytes: int) -> None:
        """Map a whole handle at addresses where nothing is mapped. They stay inaccessible."""
        ...

    def allow(self, address: int, nbytes: int) -> None:
        """Make a range accessible that is mapped without gaps."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap a range that is mapped without gaps, by whole handles. Waits for nothing."""
        ...

    def wait(self, stream: int | None) -> None:
        """Wait for the work of one stream, or without one of the whole device."""
        ...

    def free_bytes(self) -> int:
        """Memory that the device has left."""
        ...

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor that keeps ``segment`` alive."""
        ...


_PROT_NONE = 0
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FAILED = ctypes.c_void_p(-1).value

_lock = threading.RLock()
"""Around what is looked at and then changed: calls of the C library let go of Python's own lock. A
finalizer may call within a call."""
# (A child begins with what no other thread was changing.)
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


class _HostHandle:
    """``nbytes`` of host memory, whose contents lie where they were mapped last, if anywhere."""

    __slots__ = ("nbytes", "place")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.place: int | None = None


class HostPages:
    """Host memory that behaves like a GPU's virtual memory.

    A reservation is a private mapping without access, so touching an address where nothing is
    mapped ends the process with a segmentation fault, as it ends a kernel with an illegal access.
    mprotect makes mapped pages accessible, and unmapping takes the access away. The contents of an
    unmapped handle stay where they were, and are there again if it is mapped at the same place,
    until the handle is released or mapped elsewhere, another is mapped there, or the addresses are
    released: then madvise drops the pages. Contents are undefined in all other cases, as on a GPU.

    Parameters
    ----------
    granularity : int
        Bytes, a power of two and no less than a page of the system. Default: that of GPUs.
    """

    device = torch.device("cpu")
    host_accessible = True

    def __init__(self, granularity: int = 2 << 20) -> None:
        require_power_of_two("a granularity", granularity)
        self.granularity = max(granularity, mmap.PAGESIZE)
        # The mapped handles, and those that are not and have contents, by address.
        self._mapped: dict[int, _HostHandle] = {}
        self._resting: dict[int, _HostHandle] = {}

    def __repr__(self) -> str:
        return "HostPages()"

    def reserve(self, nbytes: int) -> int:
        # (Private: after a fork, parent and child must not write to each other's memory.)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        wanted = nbytes + self.granularity
        raw = libc().mmap(None, wanted, _PROT_NONE, flags, -1, 0)
        if raw in (None, _MAP_FAILED):
            raise OutOfMemory(
                f"host memory: cannot reserve {format_size(nbytes)} of addresses ({reason()}); "
                "ask for less"
            )
        address: int = (raw + self.granularity - 1) & -self.granularity
        # What lies outside goes back; if that fails, addresses are lost and no memory.
        if address > raw:
            libc().munmap(raw, address - raw)
        if end := raw + wanted - address - nbytes:
            libc().munmap(address + nbytes, end)
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        with _lock:
            # Before: afterwards the addresses may belong to another reservation.
            self._forget(address, nbytes)
            if libc().munmap(address, nbytes):
                raise DevallocError(f"munmap of {format_size(nbytes)} failed: {reason()}")

    def create(self, nbytes: int) -> _HostHandle:
        return _HostHandle(nbytes)

    def release(self, handle: _HostHandle, nbytes: int) -> None:
        with _lock:
            place = handle.place
            if place is None:
                return
            try:
                drop(place, nbytes)
            except DevallocError:
                # (A finalizer may have released the addresses just before.)
                if handle.place is not None:
                    raise
            self._resting.pop(place, None)
            handle.place = None

    def map(self, address: int, handle: _HostHandle, nbytes: int) -> None:
        with _lock:
            if handle.place != address:
                self.release(handle, nbytes)
                drop(address, nbytes)
            self._forget(address, nbytes)
            handle.place = address
            self._mapped[address] = handle

    def allow(self, address: int, nbytes: int) -> None:
        if libc().mprotect(address, nbytes, _PROT_READ_WRITE):
            raise OutOfMemory(
                f"host memory: cannot map {format_size(nbytes)} ({reason()}); ask for less"
            )

    def unmap(self, address: int, nbytes: int) -> None:
        with _lock:
            if libc().mprotect(address, nbytes, _PROT_NONE):
                raise DevallocError(f"mprotect of {format_size(nbytes)} failed: {reason()}")
            end = address + nbytes
            while address < end:
                handle = self._resting[address] = self._mapped.pop(address)
                address += handle.nbytes

    def _forget(self, address: int, nbytes: int) -> None:
        """What is left in a range has no contents any more."""
        for place, handle in tuple(self._resting.items()):
            if place < address + nbytes and address < place + handle.nbytes:
                handle.place = None
                self._resting.pop(place, None)

    def wait(self, stream: int | None) -> None:
        pass

    def free_bytes(self) -> int:
        return available_bytes()

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        return host_view(segment, offset, nbytes)
