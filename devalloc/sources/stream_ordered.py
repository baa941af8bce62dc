"""Device memory by cudaMallocFromPoolAsync, from a pool of its own."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from devalloc.common.arguments import require_device
from devalloc.errors import InvalidArgument
from devalloc.sizes import format_size, parse_size
from devalloc.sources import cudart
from devalloc.sources.source import Capabilities, Ledger, Segment


class AsyncSource:
    """Stream-ordered memory of one device, from a memory pool of its own.

    With a stream, the memory may be used by work that is queued on that stream afterwards, and a
    free takes effect after the work that was queued on its stream before. Neither waits, and both
    may be captured into a CUDA graph (the memory then belongs to the graph). Without a stream,
    `allocate` waits until every stream may use the memory, and `free` waits for the device, because
    the memory may have been used on any stream.

    The pool is destroyed when nothing refers to the source and all its memory is back.

    Parameters
    ----------
    device : torch.device
        With an index.
    release_threshold : int or str
        Bytes of unused memory that the pool keeps when the program synchronises. With 0, CUDA's
        default, the pool then gives everything back and later asks the driver again.

    Raises
    ------
    InvalidArgument
        If the device is no CUDA device with an index, or has no memory pools.
    """

    granularity = 256
    capabilities = Capabilities(stream_ordered=True)

    def __init__(self, device: torch.device, release_threshold: int | str = 0) -> None:
        require_device("AsyncSource", device, "cuda")
        threshold = parse_size(release_threshold)
        self.device = device
        self._out = Ledger(f"memory pool on {device}")
        with cudart.current(device) as runtime:
            self._require_pools(runtime)
            self._pool = self._make_pool(runtime, threshold)
            status, self._stream = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
            if status != runtime.cudaError_t.cudaSuccess:
                runtime.cudaMemPoolDestroy(self._pool)
            cudart.check(status, "making the stream of a memory pool")
        weakref.finalize(self, _destroy, device, self._pool, self._stream).atexit = False

    def __repr__(self) -> str:
        return f"AsyncSource({self.device})"

    def _require_pools(self, runtime: Any) -> None:
        supported = runtime.cudaDeviceAttr.cudaDevAttrMemoryPoolsSupported
        status, found = runtime.cudaDeviceGetAttribute(supported, self.device.index)
        cudart.check(status, f"asking {self.device} about memory pools")
        if not found:
            raise InvalidArgument(f"{self.device} has no memory pools; use CudaSource")

    def _make_pool(self, runtime: Any, threshold: int) -> Any:
        from cuda.bindings.driver import cuuint64_t

        wanted = runtime.cudaMemPoolProps()
        wanted.allocType = runtime.cudaMemAllocationType.cudaMemAllocationTypePinned
        wanted.location.type = runtime.cudaMemLocationType.cudaMemLocationTypeDevice
        wanted.location.id = self.device.index
        status, pool = runtime.cudaMemPoolCreate(wanted)
        cudart.check(status, f"making a memory pool on {self.device}")
        attribute = runtime.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
        (status,) = runtime.cudaMemPoolSetAttribute(pool, attribute, cuuint64_t(threshold))
        if status != runtime.cudaError_t.cudaSuccess:
            runtime.cudaMemPoolDestroy(pool)
        cudart.check(status, f"setting a release threshold of {format_size(threshold)}")
        return pool

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        """Take ``nbytes`` bytes from the pool; raises OutOfMemory. Without a stream it waits."""
        self._out.check(nbytes)
        with cudart.current(self.device) as runtime:
            order = self._stream if stream is None else stream
            status, address = runtime.cudaMallocFromPoolAsync(nbytes, self._pool, order)
            if cudart.is_out_of_memory(status):
                raise cudart.device_exhausted("cudaMallocFromPoolAsync", nbytes, self.device)
            cudart.check(status, f"cudaMallocFromPoolAsync of {format_size(nbytes)}")
            if stream is None:
                (status,) = runtime.cudaStreamSynchronize(self._stream)
                cudart.check(status, "waiting for cudaMallocFromPoolAsync")
        self._out.enter(int(address), nbytes)
        return int(address)

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        """Return memory to the pool, in the order of ``stream`` or after waiting for the device."""
        with self._out.leaving(address, nbytes) as done, cudart.current(self.device) as runtime:
            if stream is None:
                (status,) = runtime.cudaDeviceSynchronize()
                cudart.check_freed(status, f"waiting for {self.device}")
            order = self._stream if stream is None else stream
            done.extend(map(runtime.cudaFreeAsync, (address,), (order,)))
            cudart.check_freed(done[0][0], f"cudaFreeAsync of {format_size(nbytes)}")

    def has(self, address: int) -> bool:
        return self._out.has(address)

    def trim(self, keep: int | str = 0) -> None:
        """Give unused memory of the pool back to the device, down to ``keep`` bytes.

        Memory is unused only once its free has taken effect; synchronise first to reach all of it.
        """
        (status,) = cudart.runtime().cudaMemPoolTrimTo(self._pool, parse_size(keep))
        cudart.check(status, "trimming a memory pool")

    def reserved(self) -> int:
        """Bytes of device memory that the pool holds, given out or not. Does not synchronise."""
        runtime = cudart.runtime()
        attribute = runtime.cudaMemPoolAttr.cudaMemPoolAttrReservedMemCurrent
        status, value = runtime.cudaMemPoolGetAttribute(self._pool, attribute)
        cudart.check(status, "asking a memory pool for its size")
        return int(value)

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        return cudart.device_view(segment, offset, nbytes, self.device)


def _destroy(device: torch.device, pool: Any, stream: Any) -> None:
    with cudart.current(device) as runtime:
        (status,) = runtime.cudaStreamDestroy(stream)
        cudart.check_freed(status, "destroying the stream of a memory pool")
        # CUDA keeps the pool until frees that are still queued on a stream have taken effect.
        (status,) = runtime.cudaMemPoolDestroy(pool)
        cudart.check_freed(status, "destroying a memory pool")
