"""Sources for tests: one that checks its caller, a CUDA runtime that only takes notes, and a CUDA
driver that keeps the rules of virtual memory."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from devalloc import OutOfMemory
from devalloc.sources import Capabilities, Segment, Source, cuda_pages, cudart, handles
from devalloc.sources.source import require_free, require_request


class CountingSource:
    """Passes on to another source and remembers what is out; `fail_at` makes one call fail."""

    def __init__(self, inner: Source, fail_at: int | None = None) -> None:
        self.inner = inner
        self.device = inner.device
        self.granularity = inner.granularity
        self.capabilities: Capabilities = inner.capabilities
        self.live: dict[int, int] = {}
        self.leaving: list[int] = []  # addresses that some thread is freeing
        self.allocations = 0
        self.fail_at = fail_at
        self._lock = threading.RLock()

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        with self._lock:
            self.allocations += 1
            number = self.allocations
        if number == self.fail_at:
            raise OutOfMemory("injected")
        address = self.inner.allocate(nbytes, stream)
        with self._lock:
            assert address not in self.live or address in self.leaving
            self._note(address, nbytes)
        return address

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        require_free("counting", address, nbytes)
        with self._lock:
            raced, known = address in self.leaving, self.live.get(address)
            self.leaving.append(address)
        try:
            self.inner.free(address, nbytes, stream)
            assert raced or known == nbytes, "free gets what allocate gave"
            self._note(address, -nbytes)
        finally:
            with self._lock:
                self.leaving.remove(address)

    def _note(self, address: int, change: int) -> None:
        """Afterwards, for only the source beneath knows which of several racing frees won; a sum,
        for by then another thread may have been given the same address."""
        with self._lock:
            left = self.live.pop(address, 0) + change
            if left:
                self.live[address] = left

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        return self.inner.view(segment, offset, nbytes)


class CrookedSource(CountingSource):
    """Addresses that are multiples of 64 and of nothing larger."""

    def __init__(self, inner: Source) -> None:
        super().__init__(inner)
        self.granularity = 64

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        require_request("crooked memory", nbytes)  # impossible requests stay impossible
        return super().allocate(nbytes + 64, stream) + 64

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        require_free("crooked memory", address, nbytes)
        super().free(address - 64, nbytes + 64, stream)


def fake_runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """In place of CUDA's runtime until the test ends."""
    made = FakeRuntime()
    monkeypatch.setattr(cudart, "runtime", lambda: made)
    monkeypatch.setattr(cudart, "current", made.current)
    return made


class FakeRuntime:
    """The CUDA runtime as notes of its calls; enumerations and structs are the real ones.

    ``fail`` maps the name of a function to the status that it returns from now on.
    """

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self._real = runtime
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, Any] = {}
        self.attributes: dict[Any, int] = {}
        self.pools_supported = 1
        self._next = 0x10000

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def _done(self, name: str, *arguments: Any) -> Any:
        self.calls.append((name, *arguments))
        return self.fail.get(name, self._real.cudaError_t.cudaSuccess)

    def _address(self, name: str, *arguments: Any) -> tuple[Any, int]:
        status = self._done(name, *arguments)
        self._next += 0x10000
        return status, self._next

    def cudaGetLastError(self) -> tuple[Any]:
        return (self._done("cudaGetLastError"),)

    def cudaMalloc(self, nbytes: int) -> tuple[Any, int]:
        return self._address("cudaMalloc", nbytes)

    def cudaFree(self, address: int) -> tuple[Any]:
        return (self._done("cudaFree", address),)

    def cudaHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, int]:
        return self._address("cudaHostAlloc", nbytes, flags)

    def cudaFreeHost(self, address: int) -> tuple[Any]:
        return (self._done("cudaFreeHost", address),)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Any]:
        return (self._done("cudaHostRegister", address, nbytes, flags),)

    def cudaHostUnregister(self, address: int) -> tuple[Any]:
        return (self._done("cudaHostUnregister", address),)

    def cudaMemcpyAsync(self, to: int, start: int, n: int, kind: Any, stream: int) -> tuple[Any]:
        return (self._done("cudaMemcpyAsync", to, start, n, stream),)

    def cudaMemsetAsync(self, address: int, value: int, n: int, stream: int) -> tuple[Any]:
        return (self._done("cudaMemsetAsync", address, value, n, stream),)

    def cudaDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, int]:
        return self._done("cudaDeviceGetAttribute", attribute, device), self.pools_supported

    def cudaMemPoolCreate(self, properties: Any) -> tuple[Any, str]:
        return self._done("cudaMemPoolCreate", properties), "pool"

    def cudaMemPoolSetAttribute(self, pool: str, attribute: Any, value: Any) -> tuple[Any]:
        self.attributes[attribute] = int(value)
        return (self._done("cudaMemPoolSetAttribute", pool),)

    def cudaMemPoolGetAttribute(self, pool: str, attribute: Any) -> tuple[Any, int]:
        return self._done("cudaMemPoolGetAttribute", pool, attribute), 4096

    def cudaMemPoolTrimTo(self, pool: str, keep: int) -> tuple[Any]:
        return (self._done("cudaMemPoolTrimTo", pool, keep),)

    def cudaMemPoolDestroy(self, pool: str) -> tuple[Any]:
        return (self._done("cudaMemPoolDestroy", pool),)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, str]:
        return self._done("cudaStreamCreateWithFlags", flags), "own"

    def cudaStreamDestroy(self, stream: str) -> tuple[Any]:
        return (self._done("cudaStreamDestroy", stream),)

    def cudaStreamSynchronize(self, stream: Any) -> tuple[Any]:
        return (self._done("cudaStreamSynchronize", stream),)

    def cudaDeviceSynchronize(self) -> tuple[Any]:
        return (self._done("cudaDeviceSynchronize"),)

    def cudaMallocFromPoolAsync(self, nbytes: int, pool: str, stream: Any) -> tuple[Any, int]:
        return self._address("cudaMallocFromPoolAsync", nbytes, pool, stream)

    def cudaFreeAsync(self, address: int, stream: Any) -> tuple[Any]:
        return (self._done("cudaFreeAsync", address, stream),)

    @contextmanager
    def current(self, device: torch.device) -> Iterator[FakeRuntime]:
        """In place of `cudart.current`."""
        yield self


def one_at_a_time(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that checks and then changes what the driver has."""

    @functools.wraps(call)
    def locked(driver: FakeDriver, *arguments: Any) -> Any:
        with driver.lock:
            return call(driver, *arguments)

    return locked


class FakeDriver:
    """The virtual memory of the CUDA driver, strictly: a call that breaks its rules gets
    INVALID_VALUE. As with the real one, threads may call at the same time.

    Enumerations and structs are the real ones. ``fail`` maps the name of a function to the statuses
    that its next calls return; ``fail_at`` makes the call of that number fail, of any kind.
    A handle is an int; ``capacity`` bytes can be created.
    """

    granule = 2 << 20

    def __init__(self, capacity: int = 64 << 30) -> None:
        from cuda.bindings import driver

        self._real = driver
        self.lock = threading.RLock()  # a finalizer may call within a call
        self.capacity = capacity
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, list[Any]] = {}
        self.fail_at: int | None = None
        self.attributes = {
            "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
            "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": 1,
        }
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}  # address -> (bytes, handle)
        self.accessible: set[int] = set()
        self.properties: list[Any] = []
        self._next = 1 << 40
        self._handle = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    @property
    def state(self) -> tuple[object, ...]:
        """All that a caller can have left behind."""
        return self.reserved, self.handles, self.mapped, self.accessible

    @contextmanager
    def current(self, device: torch.device) -> Iterator[None]:
        """In place of `cudart.current`."""
        yield

    def _status(self, name: str, *arguments: Any) -> Any:
        self.calls.append((name, *arguments))
        if len(self.calls) == self.fail_at:
            return self.CUresult.CUDA_ERROR_UNKNOWN
        injected = self.fail.get(name)
        return injected.pop(0) if injected else self.CUresult.CUDA_SUCCESS

    def _do(self, allowed: bool, action: Callable[[], object], *call: Any) -> tuple[Any]:
        status = self._status(*call)
        if status == self.CUresult.CUDA_SUCCESS:
            if not allowed:
                return (self.CUresult.CUDA_ERROR_INVALID_VALUE,)
            action()
        return (status,)

    def cuDeviceGet(self, index: int) -> tuple[Any, int]:
        return self._status("cuDeviceGet", index), 40 + index

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, int]:
        status = self._status("cuDeviceGetAttribute", attribute.name, device)
        return status, self.attributes[attribute.name]

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> tuple[Any, int]:
        return self._status("cuMemGetAllocationGranularity", option.name), self.granule

    @one_at_a_time
    def cuMemAddressReserve(
        self, nbytes: int, alignment: int, address: int, flags: int
    ) -> tuple[Any, int]:
        status = self._status("cuMemAddressReserve", nbytes, alignment, address, flags)
        if status == self.CUresult.CUDA_SUCCESS:
            if nbytes % self.granule or nbytes >= 1 << 47:
                return self.CUresult.CUDA_ERROR_INVALID_VALUE, 0
            self._next += nbytes + self.granule
            self.reserved[self._next - nbytes] = nbytes
        return status, self._next - nbytes

    @one_at_a_time
    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Any]:
        allowed = self.reserved.get(address) == nbytes and not any(
            address <= at < address + nbytes for at in self.mapped
        )
        return self._do(
            allowed, lambda: self.reserved.pop(address), "cuMemAddressFree", address, nbytes
        )

    @one_at_a_time
    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[Any, int]:
        self.properties.append(properties)
        status = self._status("cuMemCreate", nbytes, flags)
        if status == self.CUresult.CUDA_SUCCESS:
            if nbytes % self.granule:
                return self.CUresult.CUDA_ERROR_INVALID_VALUE, 0
            if sum(self.handles.values()) + nbytes > self.capacity:
                return self.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
            self._handle += 1
            self.handles[self._handle] = nbytes
        return status, self._handle

    @one_at_a_time
    def cuMemRelease(self, handle: int) -> tuple[Any]:
        allowed = handle in self.handles and all(handle != each for _, each in self.mapped.values())
        return self._do(allowed, lambda: self.handles.pop(handle), "cuMemRelease", handle)

    @one_at_a_time
    def cuMemMap(
        self, address: int, nbytes: int, offset: int, handle: int, flags: int
    ) -> tuple[Any]:
        inside = any(
            at <= address and address + nbytes <= at + n for at, n in self.reserved.items()
        )
        free = all(
            at + n <= address or address + nbytes <= at for at, (n, _) in self.mapped.items()
        )
        unused = all(handle != each for _, each in self.mapped.values())
        whole = self.handles.get(handle) == nbytes and offset == flags == 0
        return self._do(
            inside and free and unused and whole,
            lambda: self.mapped.update({address: (nbytes, handle)}),
            "cuMemMap",
            address,
            nbytes,
            offset,
            handle,
            flags,
        )

    def _tiles(self, address: int, nbytes: int) -> list[int] | None:
        """The mappings that tile a range, or None."""
        found, at = [], address
        while at < address + nbytes and at in self.mapped:
            found.append(at)
            at += self.mapped[at][0]
        return found if at == address + nbytes else None

    @one_at_a_time
    def cuMemSetAccess(self, address: int, nbytes: int, access: Any, count: int) -> tuple[Any]:
        tiles = self._tiles(address, nbytes)
        (each,) = access
        return self._do(
            tiles is not None,
            lambda: self.accessible.update(tiles or ()),
            "cuMemSetAccess",
            address,
            nbytes,
            (each.location.type.name, each.location.id, each.flags.name),
            count,
        )

    @one_at_a_time
    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any]:
        tiles = self._tiles(address, nbytes)

        def unmap() -> None:
            for at in tiles or ():
                del self.mapped[at]
                self.accessible.discard(at)

        return self._do(tiles is not None, unmap, "cuMemUnmap", address, nbytes)

    def cuCtxSynchronize(self) -> tuple[Any]:
        return (self._status("cuCtxSynchronize"),)

    def cuStreamSynchronize(self, stream: int) -> tuple[Any]:
        return (self._status("cuStreamSynchronize", stream),)


@contextmanager
def fake_driver() -> Iterator[FakeDriver]:
    """A driver in place of CUDA's, with 3 of 8 GiB free, and a releaser of its own."""
    with pytest.MonkeyPatch.context() as patch:
        driver = FakeDriver()
        patch.setattr(cuda_pages, "driver", lambda: driver)
        patch.setattr(cudart, "current", driver.current)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 8 << 30))
        patch.setattr(handles, "_RELEASER", handles._Releaser())
        yield driver
        # What the test made is finished with this driver, not with the next.
        gc.collect()
        handles._RELEASER.end()
