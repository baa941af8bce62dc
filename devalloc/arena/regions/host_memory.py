"""Host memory for backups, of an exact size, made ready piece by piece.

To commit memory and to lock its pages takes far longer than to copy it. So several threads commit
the pieces, the caller's thread locks each as soon as it is committed, and the caller queues its
copies meanwhile (`HostMemory.pieces`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from devalloc.common.cleanup import call_for_finalizers
from devalloc.errors import OutOfMemory
from devalloc.sizes import format_size
from devalloc.sources import HostSource, Segment, cudart
from devalloc.sources.libc import drop, populate

PIECE = 64 << 20
"""Bytes that are committed and locked at once."""
_THREADS = 8


class HostMemory:
    """``nbytes`` of host memory; the first ``pinned`` of them are locked for copies of ``device``.

    On the CPU's double nothing needs to be locked, and ``pinned`` only counts.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.segment = Segment(HostSource(), nbytes)
        self.pinned = 0
        self._ready = 0
        self._device = device
        self._locked: list[int] = []
        # (The callback keeps the segment, so pages are unlocked before they are unmapped.)
        weakref.finalize(self, _unlock_all, self._locked, device, self.segment).atexit = False

    @property
    def address(self) -> int:
        return self.segment.address

    @property
    def committed(self) -> int:
        """Bytes that have memory."""
        return self._ready

    def pieces(self, pin: int, *, only_locked: bool = False) -> Iterator[tuple[int, int]]:
        """Commit the memory, or only what is locked, and lock up to ``pin`` bytes of it.

        Yields (start, end) of each piece as soon as it can be used; a copy must not reach from one
        piece into the next. Raises OutOfMemory if the system has not so much memory.
        """
        ends = ((start, min(start + PIECE, self.nbytes)) for start in range(0, self.nbytes, PIECE))
        ranges = [(start, end) for start, end in ends if end <= pin or not only_locked]
        with ThreadPoolExecutor(_THREADS, "devalloc-commit") as threads:
            try:
                commits = {
                    start: threads.submit(populate, self.address + start, end - start)
                    for start, end in ranges
                    if start >= self._ready
                }
                for start, end in ranges:
                    if start in commits:
                        commits[start].result()
                        self._ready = end
                    if self.pinned == start and end <= pin:
                        self._lock(start, end - start)
                    yield start, end
            finally:
                threads.shutdown(wait=True, cancel_futures=True)

    def _lock(self, start: int, nbytes: int) -> None:
        if self._device.type == "cuda":
            address = self.address + start
            with cudart.current(self._device) as runtime:
                flags = runtime.cudaHostRegisterPortable
                (status,) = runtime.cudaHostRegister(address, nbytes, flags)
            if cudart.is_out_of_memory(status):
                raise OutOfMemory(
                    f"cudaHostRegister of {format_size(nbytes)} failed: the system cannot lock so "
                    "much memory; set backup_budget"
                )
            cudart.check(status, f"cudaHostRegister of {format_size(nbytes)}")
            self._locked.append(address)
        self.pinned = start + nbytes

    def drop_pageable(self) -> None:
        """Keep only what is locked; the rest has no contents any more."""
        if self._ready > self.pinned:
            drop(self.address + self.pinned, self._ready - self.pinned)
            self._ready = self.pinned


def _unlock_all(locked: list[int], device: torch.device, segment: Segment) -> None:
    call_for_finalizers(lambda address: _unlock(address, device), locked)


def _unlock(address: int, device: torch.device) -> None:
    with cudart.current(device) as runtime:
        (status,) = runtime.cudaHostUnregister(address)
    cudart.check_freed(status, "cudaHostUnregister of a backup")
