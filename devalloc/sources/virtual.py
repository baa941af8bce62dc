"""Virtual memory: addresses first, physical memory behind them when it is needed.

`VirtualSource.reserve` takes addresses only. `map` puts physical memory behind a part of them,
`unmap` takes it away, and the addresses stay. `allocate` does both steps, `free` undoes what was
done.

Physical memory comes in handles, which cannot be split: what was mapped as one handle is unmapped
as a whole. Calls cost by the handle, so a range is mapped with as few as possible: of 1 GiB each,
and one for the rest. A caller who wants to unmap smaller parts says so (``largest``). Handles that
are not mapped are kept for the next use: see `devalloc.sources.handles`.

Concurrency: one lock for each reservation. Calls about different ones do not wait for each other.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
from collections import deque
from collections.abc import Iterator

import torch

from devalloc.common.arguments import require_device
from devalloc.common.cleanup import call_for_finalizers
from devalloc.errors import InvalidArgument
from devalloc.sizes import format_size, is_integer, parse_size, quote, require_power_of_two
from devalloc.sources.cuda_pages import CudaPages
from devalloc.sources.handles import Handle, HandlePool, pool_of
from devalloc.sources.source import Capabilities, Ledger, Segment, bytes_taken
from devalloc.sources.virtual_calls import HostPages, Pages

LARGEST_HANDLE = 1 << 30
"""Bytes. Larger handles cost the same per byte."""


@dataclasses.dataclass(frozen=True)
class VirtualStats:
    """What a `VirtualSource` has; bytes, except for the counts.

    Attributes
    ----------
    address_space : int
        Reserved addresses, mapped or not.
    mapped : int
        Physical memory behind them.
    idle : int
        Physical memory in handles that are not mapped: idle ones, which all sources of the
        device share, and those that `VirtualSource.detach` holds.
    idle_limit : int
        Up to how much of it is kept.
    handles_created, handles_reused : int
        How many handles were made for the device so far, and how often an idle one was mapped
        again.
    """

    address_space: int
    mapped: int
    idle: int
    idle_limit: int
    handles_created: int
    handles_reused: int


class _Reservation:
    """A range of addresses, and the handles that are mapped in it, by offset."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.lock = threading.RLock()
        self.ended = False
        self.mapped = 0
        self.held: list[tuple[int, Handle]] = []
        self._offsets: list[int] = []
        self._handles: dict[int, Handle] = {}

    def enter(self, offset: int, handles: list[Handle]) -> None:
        for handle in handles:
            bisect.insort(self._offsets, offset)
            self._handles[offset] = handle
            offset += handle.nbytes
            self.mapped += handle.nbytes

    def remove(self, offset: int, handles: list[Handle]) -> None:
        first = bisect.bisect_left(self._offsets, offset)
        for place in self._offsets[first : first + len(handles)]:
            self.mapped -= self._handles.pop(place).nbytes
        del self._offsets[first : first + len(handles)]

    def between(self, start: int, end: int) -> Iterator[tuple[int, Handle]]:
        """The handles that overlap [start, end), with their offsets, ascending."""
        first = max(bisect.bisect_right(self._offsets, start) - 1, 0)
        for at in range(first, bisect.bisect_left(self._offsets, end)):
            offset = self._offsets[at]
            if offset + self._handles[offset].nbytes > start:
                yield offset, self._handles[offset]

    def runs(self) -> list[tuple[int, int]]:
        """(offset, bytes) of the parts that are mapped without gaps."""
        runs: list[tuple[int, int]] = []
        for offset in self._offsets:
            nbytes = self._handles[offset].nbytes
            if runs and sum(runs[-1]) == offset:
                runs[-1] = runs[-1][0], runs[-1][1] + nbytes
            else:
                runs.append((offset, nbytes))
        return runs


class VirtualSource:
    """Memory mapped into reserved addresses, on a CUDA device or the CPU.

    On the CPU it is a double of the GPU's: the same rules, in host memory (`HostPages`). Mapped
    memory is uninitialised.

    Parameters
    ----------
    device : torch.device
        With an index if it is a CUDA device.
    pages : Pages, optional
        What makes the calls. Default: those of the device, with the pool of idle handles that all
        its sources share. With ``pages`` the source has a pool of its own, which `trim` empties.

    Raises
    ------
    InvalidArgument
        If the device is no CPU or CUDA device, or has no virtual memory management.
    """

    def __init__(self, device: torch.device, pages: Pages | None = None) -> None:
        require_device("VirtualSource", device, "cuda", "cpu")
        if pages is None:
            self._pool = pool_of(CudaPages(device) if device.type == "cuda" else HostPages())
            pages = self._pool.pages
        else:
            self._pool = HandlePool(pages)
        self.device = pages.device
        self.granularity = pages.granularity
        self.capabilities = Capabilities(
            mappable=True, pausable=True, host_accessible=pages.host_accessible
        )
        self._pages = pages
        self._out = Ledger(f"virtual memory on {self.device}")
        self._reservations: dict[int, _Reservation] = {}
        # Reservations that were freed and that the driver refused to take back, or the memory
        # behind them; it is asked again later.
        self._ended: deque[_Reservation] = deque()

    def __repr__(self) -> str:
        return f"VirtualSource({self.device})"

    # The protocol ---------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        """Reserve addresses and map all of them; raises OutOfMemory. Waits for nothing."""
        self._out.check(nbytes)
        found = self._reserve(nbytes)
        try:
            self._map(found, 0, found.nbytes, LARGEST_HANDLE)
        except BaseException:
            self._give_up(found)
            raise
        self._out.enter(found.address, nbytes)
        return found.address

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        """Give back what `allocate` or `reserve` gave, and all that is mapped there.

        Waits for ``stream``, or without one for the device, if anything is mapped.
        """
        with self._out.leaving(address, nbytes):
            found = self._reservations[address]
            with found.lock:
                if found.mapped:
                    self._pages.wait(stream)
                for offset, mapped in found.runs():
                    self._unmap(found, offset, mapped, keep=True)
                self._discard(found, keep=True)
                found.ended = True
            self._give_up(found)

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        return self._pages.view(segment, offset, nbytes)

    # Addresses and memory apart -------------------------------------------------------------------

    def reserve(self, nbytes: int) -> int:
        """Addresses for ``nbytes`` bytes, rounded up to the granularity, with no memory behind.

        `free` gives them back. Touching them before `map` is an error: on a GPU an illegal memory
        access, on the CPU a segmentation fault.

        Raises
        ------
        OutOfMemory
            If there is not so much address space.
        InvalidArgument
            As for `allocate`.
        """
        self._out.check(nbytes)
        found = self._reserve(nbytes)
        self._out.enter(found.address, nbytes)
        return found.address

    def map(
        self,
        address: int,
        offset: int = 0,
        nbytes: int | None = None,
        largest: int | str = LARGEST_HANDLE,
    ) -> None:
        """Put physical memory behind a part of a reservation. Waits for nothing.

        Kernels that are running may use the memory as soon as they learn of it.

        Parameters
        ----------
        address : int
            The reservation's: what `reserve` or `allocate` returned.
        offset, nbytes : int
            The part, in multiples of the granularity; default: all from ``offset`` on. Nothing of
            it may be mapped yet.
        largest : int or str
            Bytes, a power of two: handles are no larger than this, so that parts of this size can
            be unmapped. Smaller handles cost more per byte.

        Raises
        ------
        OutOfMemory
            If the device has not so much memory; nothing has changed then.
        InvalidArgument
            For an address, a part or a size that cannot be; nothing has changed then.
        """
        unit = parse_size(largest)
        require_power_of_two("the largest handle", unit)
        found = self._find(address)
        with found.lock:
            self._require_attached(found)
            size = self._part(found, offset, nbytes)
            for place, handle in found.between(offset, offset + size):
                raise InvalidArgument(
                    f"cannot map {format_size(size)} at offset {offset} of {address:#x}: "
                    f"{format_size(handle.nbytes)} are mapped at offset {place}; unmap them first"
                )
            self._map(found, offset, size, max(min(unit, LARGEST_HANDLE), self.granularity))

    def unmap(
        self, address: int, offset: int = 0, nbytes: int | None = None, *, keep: bool = True
    ) -> None:
        """Take the physical memory of a part of a reservation away; the addresses stay.

        Does not wait: the caller knows that nothing uses the memory any more, no kernel either.

        Parameters
        ----------
        address, offset, nbytes
            As for `map`. All of the part must be mapped, and no handle may reach beyond it.
        keep : bool
            Whether the handles may stay idle for the next use. Without it they are given back to
            the device before this returns.

        Raises
        ------
        InvalidArgument
            For an address or a part that cannot be unmapped; nothing has changed then.
        """
        found = self._find(address)
        with found.lock:
            self._unmap(found, offset, self._part(found, offset, nbytes), keep)

    def parts(self, address: int, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the handles that lie inside a part of a reservation, ascending.

        What `unmap` can take away there. The part need not begin or end at the granularity.
        """
        found = self._find(address)
        with found.lock:
            return [
                (place, handle.nbytes)
                for place, handle in found.between(offset, offset + nbytes)
                if offset <= place and place + handle.nbytes <= offset + nbytes
            ]

    def detach(self, address: int) -> None:
        """Unmap all that is mapped in a reservation, and hold the handles with their contents.

        `attach` maps them again where they were; `discard`, like `free`, gives them back. Until
        then nothing can be mapped in the reservation. Does not wait, as `unmap`. If it raises,
        nothing has changed, or the error says what could not be undone.
        """
        found = self._find(address)
        with found.lock:
            self._require_attached(found)
            for offset, nbytes in found.runs():
                handles = list(found.between(offset, offset + nbytes))
                try:
                    self._pages.unmap(found.address + offset, nbytes)
                except BaseException:
                    self._attach(found)
                    raise
                found.remove(offset, [handle for _, handle in handles])
                found.held += handles

    def attach(self, address: int) -> None:
        """Map again what `detach` holds, with the same contents."""
        found = self._find(address)
        with found.lock:
            self._attach(found)

    def discard(self, address: int) -> None:
        """Give the handles that `detach` holds back to the device, and their contents up."""
        found = self._find(address)
        with found.lock:
            self._discard(found, keep=False)

    # Idle memory ----------------------------------------------------------------------------------

    @property
    def idle_limit(self) -> int:
        """Bytes of idle handles that are kept for all sources of the device; text to set it too."""
        return self._pool.limit

    @idle_limit.setter
    def idle_limit(self, limit: int | str) -> None:
        self._pool.limit = limit

    def trim(self, keep: int | str = 0) -> int:
        """Give idle handles back to the device, down to ``keep`` bytes; returns the bytes."""
        return self._pool.trim(keep)

    def free_bytes(self) -> int:
        """Memory that could be mapped: what the device has left, and idle handles."""
        return self._pages.free_bytes() + self._pool.idle

    def stats(self) -> VirtualStats:
        """Address space, mapped and idle memory. Changes nothing."""
        reservations = (*self._reservations.values(), *self._ended)
        return VirtualStats(
            address_space=sum(each.nbytes for each in reservations),
            mapped=sum(each.mapped for each in reservations),
            idle=self._pool.idle
            + sum(handle.nbytes for each in reservations for _, handle in tuple(each.held)),
            idle_limit=self._pool.limit,
            handles_created=self._pool.created,
            handles_reused=self._pool.reused,
        )

    # Steps ----------------------------------------------------------------------------------------

    def _reserve(self, nbytes: int) -> _Reservation:
        self._finish_ended()
        size = bytes_taken(self, nbytes)
        found = _Reservation(self._pages.reserve(size), size)
        self._reservations[found.address] = found
        return found

    def _find(self, address: int) -> _Reservation:
        found = self._reservations.get(address) if is_integer(address) else None
        if found is None:
            place = hex(address) if is_integer(address) else quote(address)
            raise InvalidArgument(
                f"no reservation of {self!r} begins at {place}; give what reserve or allocate "
                "returned"
            )
        return found

    def _part(self, found: _Reservation, offset: int, nbytes: int | None) -> int:
        """The bytes of a part; InvalidArgument if there is no such part."""
        size = found.nbytes - offset if nbytes is None and is_integer(offset) else nbytes
        if not (
            not found.ended
            and is_integer(offset)
            and size is not None
            and is_integer(size)
            and 0 <= offset < offset + size <= found.nbytes
            and offset % self.granularity == 0
            and size % self.granularity == 0
        ):
            raise InvalidArgument(
                f"offset {quote(offset)} and {quote(size)} B are no part of the reservation of "
                f"{found.nbytes} B at {found.address:#x}; give multiples of "
                f"{self.granularity} B within it"
            )
        return size

    def _require_attached(self, found: _Reservation) -> None:
        if found.held:
            raise InvalidArgument(
                f"the memory of the reservation at {found.address:#x} is detached; attach or "
                "discard it first"
            )

    def _attach(self, found: _Reservation) -> None:
        while found.held:
            offset, handle = found.held[-1]
            self._pages.map(found.address + offset, handle.value, handle.nbytes)
            try:
                self._pages.allow(found.address + offset, handle.nbytes)
            except BaseException:
                self._pages.unmap(found.address + offset, handle.nbytes)
                raise
            found.enter(offset, [handle])
            found.held.pop()

    def _discard(self, found: _Reservation, keep: bool) -> None:
        while found.held:
            self._pool.give(found.held.pop()[1], keep)

    def _map(self, found: _Reservation, offset: int, nbytes: int, largest: int) -> None:
        start = found.address + offset
        taken: list[tuple[Handle, bool]] = []
        mapped = 0
        try:
            for left in range(nbytes, 0, -largest):
                taken.append(self._pool.take(min(left, largest)))
            for handle, _ in taken:
                self._pages.map(start + mapped, handle.value, handle.nbytes)
                mapped += handle.nbytes
            self._pages.allow(start, nbytes)
        except BaseException:
            self._undo(found, offset, mapped, taken)
            raise
        found.enter(offset, [handle for handle, _ in taken])

    def _undo(
        self, found: _Reservation, offset: int, mapped: int, taken: list[tuple[Handle, bool]]
    ) -> None:
        """Unmap what was mapped, release new handles and keep the others."""
        if mapped:
            try:
                self._pages.unmap(found.address + offset, mapped)
            except Exception:
                # It stays mapped and recorded, so the next free or unmap tries again.
                end = 0
                while mapped:
                    mapped -= taken[end][0].nbytes
                    end += 1
                found.enter(offset, [handle for handle, _ in taken[:end]])
                taken = taken[end:]
        for handle, new in taken:
            self._pool.give(handle, keep=not new)

    def _unmap(self, found: _Reservation, offset: int, nbytes: int, keep: bool) -> None:
        end = offset
        handles = []
        for place, handle in found.between(offset, offset + nbytes):
            if place != end:
                break
            handles.append(handle)
            end += handle.nbytes
        if end != offset + nbytes:
            raise InvalidArgument(
                f"cannot unmap {format_size(nbytes)} at offset {offset} of {found.address:#x}: "
                "not all of it is mapped, or a handle reaches beyond it; unmap what was mapped"
            )
        self._pages.unmap(found.address + offset, nbytes)
        found.remove(offset, handles)
        for handle in handles:
            self._pool.give(handle, keep)

    def _give_up(self, found: _Reservation) -> None:
        """Give back a reservation that is no longer in use.

        If the driver refuses, it is asked again with the next reservation that comes or goes, and
        the error goes to `sys.unraisablehook`.
        """
        # Before: afterwards another thread may be given the same addresses.
        del self._reservations[found.address]
        self._ended.append(found)
        self._finish_ended()

    def _finish_ended(self) -> None:
        for _ in range(len(self._ended)):
            try:
                found = self._ended.popleft()
            except IndexError:  # another thread was faster
                return
            call_for_finalizers(self._finish, (found,))

    def _finish(self, found: _Reservation) -> None:
        try:
            for offset, nbytes in found.runs():
                self._unmap(found, offset, nbytes, keep=True)
            self._pages.unreserve(found.address, found.nbytes)
        except BaseException:
            self._ended.append(found)
            raise
