"""Sources for tests: one that checks its caller, and a CUDA runtime that only takes notes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from devalloc import OutOfMemory
from devalloc.sources import Capabilities, Segment, Source
from devalloc.sources.base import require_free, require_request


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
