"""Host memory: plain, for Triton's interpreter and machines without a GPU, and pinned."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from devalloc.common.arguments import require_device
from devalloc.errors import OutOfMemory
from devalloc.sizes import format_size
from devalloc.sources import cudart
from devalloc.sources.source import Capabilities, Ledger, Segment


class HostSource:
    """Anonymous memory mappings: page-aligned, zeroed, returned to the system on free."""

    device = torch.device("cpu")
    granularity = mmap.PAGESIZE
    capabilities = Capabilities(host_accessible=True)

    def __init__(self) -> None:
        self._out = Ledger("host memory")
        self._maps: dict[int, mmap.mmap] = {}

    def __repr__(self) -> str:
        return "HostSource()"

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        """Map ``nbytes`` bytes; raises OutOfMemory."""
        self._out.check(nbytes)
        try:
            # (Private: after a fork, parent and child must not write to each other's memory.)
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise OutOfMemory(
                f"host memory: cannot map {format_size(nbytes)} ({error}); ask for less"
            ) from error
        anchor = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(anchor)
        del anchor
        self._maps[address] = memory
        self._out.enter(address, nbytes)
        return address

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        """Unmap what :meth:`allocate` mapped. No device can use it, so there is no waiting."""
        with self._out.leaving(address, nbytes) as done:
            done.extend(map(self._maps.pop, (address,)))  # without references it is unmapped
            done[0].close()

    def has(self, address: int) -> bool:
        return self._out.has(address)

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        return host_view(segment, offset, nbytes)


class PinnedSource:
    """Page-locked host memory by cudaHostAlloc.

    Tensors over it are on the CPU; every CUDA device can copy it asynchronously or use it in place.
    Neither allocate nor free may be called while a stream is captured.

    Parameters
    ----------
    user : torch.device
        The CUDA device, with an index, whose work uses the memory. `free` waits for it.

    Raises
    ------
    InvalidArgument
        If ``user`` is no such device.
    """

    device = torch.device("cpu")
    granularity = 256
    capabilities = Capabilities(host_accessible=True, peer_accessible=True)

    def __init__(self, user: torch.device) -> None:
        require_device("PinnedSource", user, "cuda")
        self.user = user
        self._out = Ledger("pinned memory")

    def __repr__(self) -> str:
        return f"PinnedSource({self.user})"

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        """cudaHostAlloc of ``nbytes`` bytes; raises OutOfMemory."""
        self._out.check(nbytes)
        with cudart.current(self.user) as runtime:
            flags = runtime.cudaHostAllocPortable | runtime.cudaHostAllocMapped
            status, address = runtime.cudaHostAlloc(nbytes, flags)
        if cudart.is_out_of_memory(status):
            raise OutOfMemory(
                f"cudaHostAlloc of {format_size(nbytes)} failed: the system cannot lock so much "
                "memory; ask for less"
            )
        cudart.check(status, f"cudaHostAlloc of {format_size(nbytes)}")
        self._out.enter(int(address), nbytes)
        return int(address)

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        """cudaFreeHost, after waiting for ``stream``, or without one for the device ``user``."""
        with self._out.leaving(address, nbytes) as done, cudart.current(self.user) as runtime:
            # CUDA does not guarantee that cudaFreeHost waits for copies that are under way.
            if stream is None:
                (status,) = runtime.cudaDeviceSynchronize()
            else:
                (status,) = runtime.cudaStreamSynchronize(stream)
            cudart.check_freed(status, f"waiting for the users of {format_size(nbytes)}")
            done.extend(map(runtime.cudaFreeHost, (address,)))
            cudart.check_freed(done[0][0], f"cudaFreeHost of {format_size(nbytes)}")

    def has(self, address: int) -> bool:
        return self._out.has(address)

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        return host_view(segment, offset, nbytes)


def host_view(segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over host memory; it keeps the segment alive."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    buffer: Any = (ctypes.c_ubyte * nbytes).from_address(segment.address + offset)
    buffer.segment = segment  # the tensor keeps the buffer, the buffer the segment
    return torch.frombuffer(buffer, dtype=torch.uint8)


_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Host memory that can be used without swapping; in a container, also within its limit.

    More than that would end the process, and not raise.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    available = kib * 1024
    with suppress(OSError, ValueError):  # no limit ("max"), or no such file
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        statistics = (_CGROUP / "memory.stat").read_text().splitlines()
        cached = sum(
            int(line.split()[1]) for line in statistics if line.startswith("inactive_file")
        )
        available = min(available, max(limit - used + cached, 0))
    return available
