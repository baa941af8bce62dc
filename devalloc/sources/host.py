"""Host memory, for Triton's interpreter and for machines without a GPU."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from devalloc.errors import OutOfMemory
from devalloc.sizes import format_size
from devalloc.sources.base import Segment


class HostSource:
    """Anonymous memory mappings: page-aligned, zeroed, returned to the system on free."""

    device = torch.device("cpu")
    granularity = mmap.PAGESIZE

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def allocate(self, nbytes: int) -> int:
        """Map ``nbytes`` bytes; raises OutOfMemory."""
        try:
            memory = mmap.mmap(-1, nbytes)
        except (OSError, OverflowError) as error:
            raise OutOfMemory(
                f"host memory: cannot map {format_size(nbytes)} ({error}); ask for less"
            ) from error
        anchor = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(anchor)
        del anchor
        self._maps[address] = memory
        return address

    def free(self, address: int, nbytes: int) -> None:
        """Unmap what :meth:`allocate` mapped."""
        self._maps.pop(address).close()

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        buffer: Any = (ctypes.c_ubyte * nbytes).from_address(segment.address + offset)
        buffer.segment = segment  # the tensor keeps the buffer, the buffer the segment
        return torch.frombuffer(buffer, dtype=torch.uint8)
