"""Device memory by cudaMalloc, through cuda-python."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from devalloc.errors import DevallocError, OutOfMemory
from devalloc.sizes import format_size
from devalloc.sources.base import Segment


def _runtime() -> ModuleType:
    # Here and not above: importing devalloc must work without CUDA libraries.
    from cuda.bindings import runtime

    return runtime


class CudaSource:
    """cudaMalloc and cudaFree on one device.

    Both may synchronise the device; neither may be called while a stream is captured.
    """

    granularity = 256

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, nbytes: int) -> int:
        """cudaMalloc ``nbytes`` bytes; raises OutOfMemory, DevallocError for other failures."""
        runtime = _runtime()
        with torch.cuda.device(self.device):
            # This runtime library keeps a current device of its own.
            runtime.cudaSetDevice(self.device.index)
            status, address = runtime.cudaMalloc(nbytes)
        if status == runtime.cudaError_t.cudaErrorMemoryAllocation:
            runtime.cudaGetLastError()  # clears it, or the next unrelated call would report it
            free, total = torch.cuda.mem_get_info(self.device)
            raise OutOfMemory(
                f"cudaMalloc of {format_size(nbytes)} on {self.device} failed: "
                f"{format_size(free)} of {format_size(total)} are free; ask for less, or call "
                "torch.cuda.empty_cache() to give back what PyTorch holds"
            )
        if status != runtime.cudaError_t.cudaSuccess:
            raise DevallocError(f"cudaMalloc of {format_size(nbytes)} failed: {status.name}")
        return int(address)

    def free(self, address: int, nbytes: int) -> None:
        """cudaFree; waits for the work that uses the memory."""
        runtime = _runtime()
        (status,) = runtime.cudaFree(address)
        unloading = runtime.cudaError_t.cudaErrorCudartUnloading
        if status not in (runtime.cudaError_t.cudaSuccess, unloading):
            raise DevallocError(f"cudaFree of {format_size(nbytes)} failed: {status.name}")

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.as_tensor(_DeviceArray(segment, offset, nbytes), device=self.device)


class _DeviceArray:
    """Bytes of a segment as a CUDA array; the tensor made of it keeps it, and it the segment."""

    def __init__(self, segment: Segment, offset: int, nbytes: int) -> None:
        self.segment = segment
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (segment.address + offset, False),
            "version": 3,
        }
