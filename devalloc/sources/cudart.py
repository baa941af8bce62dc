"""What the CUDA sources share: the runtime library, its errors, tensors over device memory.

Callers look the functions up in this module at every call, so that a test can replace the library
with a double.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from devalloc.errors import DevallocError, OutOfMemory
from devalloc.sizes import format_size
from devalloc.sources.source import Segment


def runtime() -> ModuleType:
    """The bindings of the CUDA runtime."""
    # Here and not above: importing devalloc must work without CUDA libraries.
    from cuda.bindings import runtime as bindings

    return bindings


@contextmanager
def current(device: torch.device) -> Iterator[ModuleType]:
    """The bindings' runtime with ``device`` current, which it does not share with PyTorch's."""
    with torch.cuda.device(device):
        bindings = runtime()
        bindings.cudaSetDevice(device.index)
        yield bindings


def is_out_of_memory(status: Any) -> bool:
    """Whether a call failed for lack of memory; if so, clears the error that it left behind."""
    if status != runtime().cudaError_t.cudaErrorMemoryAllocation:
        return False
    runtime().cudaGetLastError()  # or the next unrelated call would report it
    return True


def check(status: Any, what: str) -> None:
    """Raise DevallocError unless ``status`` is success."""
    if status != runtime().cudaError_t.cudaSuccess:
        raise DevallocError(f"{what} failed: {status.name}")


def check_freed(status: Any, what: str) -> None:
    """Like `check`, but accept that at exit the driver has already freed everything."""
    if status != runtime().cudaError_t.cudaErrorCudartUnloading:
        check(status, what)


def device_exhausted(call: str, nbytes: int, device: torch.device) -> OutOfMemory:
    """The error for a request of device memory that failed."""
    free, total = torch.cuda.mem_get_info(device)
    return OutOfMemory(
        f"{call} of {format_size(nbytes)} on {device} failed: {format_size(free)} of "
        f"{format_size(total)} are free; ask for less, or call torch.cuda.empty_cache() to give "
        "back what PyTorch holds"
    )


def device_view(segment: Segment, offset: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor over device memory; it keeps the segment alive."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.as_tensor(_DeviceArray(segment, offset, nbytes), device=device)


class _DeviceArray:
    """Bytes of a segment as a CUDA array. A tensor made from it keeps it and so the segment."""

    def __init__(self, segment: Segment, offset: int, nbytes: int) -> None:
        self.segment = segment
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (segment.address + offset, False),
            "version": 3,
        }
