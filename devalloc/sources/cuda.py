"""Device memory by cudaMalloc, through cuda-python."""

from __future__ import annotations

import torch

from devalloc.common.arguments import require_device
from devalloc.sizes import format_size
from devalloc.sources import cudart
from devalloc.sources.source import Capabilities, Ledger, Segment


class CudaSource:
    """cudaMalloc and cudaFree on one device.

    Both calls may synchronise the device; neither may be made while a stream is captured.

    Parameters
    ----------
    device : torch.device
        With an index.

    Raises
    ------
    InvalidArgument
        For anything else.
    """

    granularity = 256
    capabilities = Capabilities(peer_accessible=True)

    def __init__(self, device: torch.device) -> None:
        require_device("CudaSource", device, "cuda")
        self.device = device
        self._out = Ledger(f"cudaMalloc on {device}")

    def __repr__(self) -> str:
        return f"CudaSource({self.device})"

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        """cudaMalloc of ``nbytes`` bytes; raises OutOfMemory, or DevallocError if CUDA fails."""
        self._out.check(nbytes)
        with cudart.current(self.device) as runtime:
            status, address = runtime.cudaMalloc(nbytes)
        if cudart.is_out_of_memory(status):
            raise cudart.device_exhausted("cudaMalloc", nbytes, self.device)
        cudart.check(status, f"cudaMalloc of {format_size(nbytes)}")
        self._out.enter(int(address), nbytes)
        return int(address)

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        """cudaFree; waits for the work that uses the memory, on any stream."""
        with self._out.leaving(address, nbytes) as done:
            done.extend(map(cudart.runtime().cudaFree, (address,)))
            cudart.check_freed(done[0][0], f"cudaFree of {format_size(nbytes)}")

    def has(self, address: int) -> bool:
        return self._out.has(address)

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        return cudart.device_view(segment, offset, nbytes, self.device)
