"""The backup of one region: in host memory, or in a file.

Memory is kept from one pause to the next, as far as it is locked; a file exists from `save` to
`forget`. Up to the budget of the arena memory is locked, beyond it pageable; what does not fit into
the host's memory goes to disk, if there is a folder for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from devalloc.arena.regions.backup_layout import Run, gathered, within
from devalloc.arena.regions.disk import BackupFile
from devalloc.arena.regions.host_memory import HostMemory
from devalloc.errors import InvalidArgument, OutOfMemory
from devalloc.sizes import format_size
from devalloc.sources import host

if TYPE_CHECKING:
    from devalloc.arena.regions.copies import Copies

CHUNK = 64 << 20
"""Bytes that are written to disk or read from it at once, through locked memory."""


class BackupSettings:
    """What an arena's backups may take.

    ``budget`` is the most bytes of locked memory, None for any; ``directory`` where files go.
    """

    def __init__(self) -> None:
        self.budget: int | None = None
        self.directory: str | None = None

    def require_directory(self) -> str:
        if self.directory is None:
            raise InvalidArgument(
                'a region with backup="disk" needs a folder; set arena.backup_directory first'
            )
        return self.directory


class Backup:
    """Where the contents of one region are kept while it sleeps."""

    def __init__(self, device: torch.device, settings: BackupSettings) -> None:
        self._device = device
        self._settings = settings
        self._places: dict[int, Run] = {}
        self._file: BackupFile | None = None
        self._staging: HostMemory | None = None
        self._memory: HostMemory | None = None

    @property
    def pinned(self) -> int:
        """Bytes of locked memory, kept ones included."""
        return sum(each.pinned for each in (self._memory, self._staging) if each)

    @property
    def pageable(self) -> int:
        return self._memory.committed - self._memory.pinned if self._memory else 0

    @property
    def on_disk(self) -> int:
        return self._file.nbytes if self._file else 0

    # Saving ---------------------------------------------------------------------------------------

    def prepare(self, nbytes: int, others: int) -> None:
        """Commit and lock memory for so many bytes; ``others`` are locked for other regions."""
        if not self._fits(nbytes):
            return  # they will go to disk
        try:
            for _ in self._memory_for(nbytes).pieces(self._pin(nbytes, others), only_locked=True):
                pass
        except BaseException:
            self.release()
            raise

    def save(self, runs: Sequence[Run], copies: Copies, disk: bool, others: int) -> None:
        """Copy the runs, in memory or to disk. If it raises, nothing is kept."""
        nbytes = sum(run.nbytes for run in runs)
        if not nbytes:
            return
        try:
            if disk or not self._fits(nbytes):
                self._save_to_disk(runs, nbytes, copies)
            else:
                memory = self._memory_for(nbytes)
                whole = gathered(runs)
                for start, end in memory.pieces(self._pin(nbytes, others)):
                    for run in within(whole, start, end):
                        copies.copy(memory.address + run.offset, run.address, run.nbytes)
        except BaseException:
            copies.wait()  # the memory must not go while something is copied there
            self.release()
            raise
        self._places = {run.address: run for run in runs}

    def _pin(self, nbytes: int, others: int) -> int:
        budget = self._settings.budget
        return nbytes if budget is None else max(budget - others, 0)

    def _fits(self, nbytes: int) -> bool:
        """Whether the host has memory for so many bytes; OutOfMemory if the disk cannot help."""
        kept = self._memory.nbytes if self._memory else 0
        kept = kept if kept >= nbytes else 0
        available = host.available_bytes()
        if nbytes - kept <= available:
            return True
        if self._settings.directory is None:
            raise OutOfMemory(
                f"a backup of {format_size(nbytes)} does not fit into the {format_size(available)} "
                "of host memory that are available; set backup_directory, or keep less"
            )
        return False

    def _memory_for(self, nbytes: int) -> HostMemory:
        if self._memory is None or self._memory.nbytes < nbytes:
            self._memory = None  # first: both may not fit
            self._memory = HostMemory(nbytes, self._device)
        return self._memory

    def _save_to_disk(self, runs: Sequence[Run], nbytes: int, copies: Copies) -> None:
        self._memory = None
        file = self._file = BackupFile(self._settings.require_directory(), nbytes)
        whole, staging = gathered(runs), self._lock_staging(nbytes)
        for start in range(0, nbytes, CHUNK):
            end = min(start + CHUNK, nbytes)
            for run in within(whole, start, end):
                copies.copy(staging.address + run.offset - start, run.address, run.nbytes)
            copies.wait()
            file.write(start, _bytes(staging, end - start))
        self._staging = None
        file.sync()

    def _lock_staging(self, nbytes: int) -> HostMemory:
        staging = self._staging = HostMemory(min(nbytes, CHUNK), self._device)
        for _ in staging.pieces(staging.nbytes):
            pass
        return staging

    # Restoring ------------------------------------------------------------------------------------

    def load(self, addresses: Sequence[int], copies: Copies) -> None:
        """Copy the blocks at these addresses back; those without a backup are left as they are."""
        whole = gathered(self._places[at] for at in addresses if at in self._places)
        if not whole:
            return
        if self._file is not None:
            self._load_from_disk(whole, self._file, copies)
            return
        memory = self._memory
        assert memory is not None  # there are places
        for start, end in memory.pieces(0):
            for run in within(whole, start, end):
                copies.copy(run.address, memory.address + run.offset, run.nbytes)

    def _load_from_disk(self, runs: Sequence[Run], file: BackupFile, copies: Copies) -> None:
        staging = self._lock_staging(file.nbytes)
        try:
            for start in range(0, file.nbytes, CHUNK):
                end = min(start + CHUNK, file.nbytes)
                parts = list(within(runs, start, end))
                if parts:
                    file.read(start, _bytes(staging, end - start))
                for run in parts:
                    copies.copy(run.address, staging.address + run.offset - start, run.nbytes)
                copies.wait()
        finally:
            copies.wait()
            self._staging = None

    def view(self, address: int) -> torch.Tensor | None:
        """The bytes of the block at an address, on the CPU; None if they are not in memory."""
        run = self._places.get(address)
        if run is None or self._memory is None:
            return None
        return self._memory.segment.view(run.offset, run.nbytes)

    # Ending ---------------------------------------------------------------------------------------

    def forget(self) -> None:
        """The contents are not needed any more; locked memory is kept for the next time."""
        self._places = {}
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._memory is not None:
            self._memory.drop_pageable()
            if not self._memory.pinned:
                self._memory = None

    def release(self) -> None:
        """`forget`, and give the memory back (when the last view is gone)."""
        self.forget()
        self._memory = self._staging = None


def _bytes(memory: HostMemory, nbytes: int) -> memoryview:
    return memoryview(memory.segment.view(0, nbytes).numpy())
