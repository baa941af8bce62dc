"""CUDA's virtual memory calls, through the driver's API.

The only module that makes them. It looks the driver up at every call, so that a test can replace it
with a double.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import torch

from devalloc.errors import DevallocError, InvalidArgument, OutOfMemory
from devalloc.sizes import format_size
from devalloc.sources import cudart
from devalloc.sources.source import Segment

ACCESS_PATIENCE_S = 2.0
"""How long `CudaPages.allow` repeats a call that the driver is not ready for."""
_ACCESS_PAUSE_S = 0.0005


def driver() -> ModuleType:
    """The bindings of the CUDA driver."""
    # Here and not above: importing devalloc must work without CUDA libraries.
    from cuda.bindings import driver as bindings

    return bindings


def _failed(call: str, nbytes: int, status: Any) -> DevallocError:
    results = driver().CUresult
    text = f"{call} of {format_size(nbytes)} failed: {status.name}"
    if status in (results.CUDA_ERROR_NOT_SUPPORTED, results.CUDA_ERROR_NOT_PERMITTED):
        text += '; this device cannot map memory into reserved addresses: use source="cuda"'
    return DevallocError(text)


def _done(status: Any) -> bool:
    return bool(status == driver().CUresult.CUDA_SUCCESS)


def _gone(status: Any) -> bool:
    """Whether a call that takes something away succeeded, or came after the driver's end."""
    return _done(status) or bool(status == driver().CUresult.CUDA_ERROR_DEINITIALIZED)


class CudaPages:
    """Virtual memory of one CUDA device: see `devalloc.sources.virtual_calls.Pages`.

    Raises
    ------
    InvalidArgument
        If the device has no virtual memory management.
    DevallocError
        If there is no driver, or the device cannot be asked.
    """

    host_accessible = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with cudart.current(device):
            self._require_support()
            self._properties = self._make_properties()
            self._access = driver().CUmemAccessDesc()
            self._access.location = self._properties.location
            self._access.flags = driver().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            option = driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
            status, found = driver().cuMemGetAllocationGranularity(self._properties, option)
        if not _done(status):
            raise DevallocError(f"asking {device} for its granularity failed: {status.name}")
        self.granularity = int(found)

    def __repr__(self) -> str:
        return f"CudaPages({self.device})"

    def _attribute(self, name: str) -> int:
        attribute = getattr(driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        status, number = driver().cuDeviceGet(self.device.index)
        if _done(status):
            status, value = driver().cuDeviceGetAttribute(attribute, number)
        if not _done(status):
            raise DevallocError(f"asking {self.device} for {name} failed: {status.name}")
        return int(value)

    def _require_support(self) -> None:
        if torch.version.hip is not None:
            raise InvalidArgument(
                'the source "virtual" needs CUDA, and this PyTorch is built for ROCm; use '
                'source="cuda"'
            )
        if not self._attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            raise InvalidArgument(
                f'{self.device} has no virtual memory management; use source="cuda"'
            )

    def _make_properties(self) -> Any:
        wanted = driver().CUmemAllocationProp()
        wanted.type = driver().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self.device.index
        # As PyTorch does: network cards may then read and write the memory.
        if self._attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):
            wanted.allocFlags.gpuDirectRDMACapable = 1
        return wanted

    def reserve(self, nbytes: int) -> int:
        with cudart.current(self.device):
            status, address = driver().cuMemAddressReserve(nbytes, self.granularity, 0, 0)
        results = driver().CUresult
        # (The size is a multiple of the granularity: what is invalid about it is that it is huge.)
        if status in (results.CUDA_ERROR_OUT_OF_MEMORY, results.CUDA_ERROR_INVALID_VALUE):
            raise OutOfMemory(
                f"cuMemAddressReserve of {format_size(nbytes)} on {self.device} failed: "
                f"{status.name}; ask for less"
            )
        if not _done(status):
            raise _failed("cuMemAddressReserve", nbytes, status)
        return int(address)

    def unreserve(self, address: int, nbytes: int) -> None:
        (status,) = driver().cuMemAddressFree(address, nbytes)
        if not _gone(status):
            raise _failed("cuMemAddressFree", nbytes, status)

    def create(self, nbytes: int) -> Any:
        with cudart.current(self.device):
            status, handle = driver().cuMemCreate(nbytes, self._properties, 0)
        if status == driver().CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise cudart.device_exhausted("cuMemCreate", nbytes, self.device)
        if not _done(status):
            raise _failed("cuMemCreate", nbytes, status)
        return handle

    def release(self, handle: Any, nbytes: int) -> None:
        (status,) = driver().cuMemRelease(handle)
        if not _gone(status):
            raise _failed("cuMemRelease", nbytes, status)

    def map(self, address: int, handle: Any, nbytes: int) -> None:
        (status,) = driver().cuMemMap(address, nbytes, 0, handle, 0)
        if status == driver().CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise cudart.device_exhausted("cuMemMap", nbytes, self.device)
        if not _done(status):
            raise _failed("cuMemMap", nbytes, status)

    def allow(self, address: int, nbytes: int) -> None:
        deadline = time.monotonic() + ACCESS_PATIENCE_S
        while True:
            (status,) = driver().cuMemSetAccess(address, nbytes, [self._access], 1)
            # Seen under load: the driver cannot do it now, and can soon afterwards.
            ready = status != driver().CUresult.CUDA_ERROR_NOT_READY
            if ready or time.monotonic() >= deadline:
                break
            time.sleep(_ACCESS_PAUSE_S)
        if status == driver().CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise cudart.device_exhausted("cuMemSetAccess", nbytes, self.device)
        if not _done(status):
            raise _failed("cuMemSetAccess", nbytes, status)

    def unmap(self, address: int, nbytes: int) -> None:
        (status,) = driver().cuMemUnmap(address, nbytes)
        if not _gone(status):
            raise _failed("cuMemUnmap", nbytes, status)

    def wait(self, stream: int | None) -> None:
        with cudart.current(self.device):
            if stream is None:
                (status,) = driver().cuCtxSynchronize()
            else:
                (status,) = driver().cuStreamSynchronize(stream)
        if not _gone(status):
            raise DevallocError(f"waiting for {self.device} failed: {status.name}")

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        return cudart.device_view(segment, offset, nbytes, self.device)
