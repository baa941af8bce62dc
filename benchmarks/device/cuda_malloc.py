"""CUDA's own device malloc, compiled at run time: a baseline that any CUDA program has.

The size of its heap is a limit of the process, set before the first module that allocates is
loaded, and its memory is never given back; so it is measured in a process of its own. Some requests
take minutes or never end: `benchmarks.device.plan.FAST_FOR_CUDA` says which are asked for.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

SOURCE = """
typedef long long int64;

extern "C" __global__ void malloc_lanes(int64* out, int64 n, int64 size) {
    int64 lane = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    if (lane < n) out[lane] = (int64)malloc((size_t)size);
}

extern "C" __global__ void free_lanes(const int64* addrs, int64 n) {
    int64 lane = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    if (lane < n) free((void*)addrs[lane]);
}

extern "C" __global__ void latency(int* nulls, int64 pairs, int64 size) {
    int missing = 0;
    for (int64 turn = 0; turn < pairs; ++turn) {
        void* addr = malloc((size_t)size);
        missing += addr == nullptr;
        free(addr);
    }
    *nulls = missing;
}
"""
KERNELS = ("malloc_lanes", "free_lanes", "latency")
BLOCK = 256
ALIGNMENT = 16
"""The alignment in bytes that CUDA guarantees."""


class NotAvailable(Exception):
    """The run-time compiler or the driver's bindings are missing. The message says what."""


def _require_success(result: tuple[Any, ...], what: str, log: str = "") -> Any:
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"{what} failed: {status.name} {log}".rstrip())
    return values[0] if values else None


def compile_source(source: str, architecture: str) -> bytes:
    """The binary of CUDA C++ source for an architecture such as ``sm_90``; needs no GPU.

    Raises
    ------
    NotAvailable
        If there is no NVRTC.
    RuntimeError
        If the source does not compile; the message has the compiler's log.
    """
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise NotAvailable(f"no CUDA run-time compiler (NVRTC): {error}") from error
    program = _require_success(
        nvrtc.nvrtcCreateProgram(source.encode(), b"cuda_malloc.cu", 0, [], []), "NVRTC"
    )
    options = [f"--gpu-architecture={architecture}".encode()]
    compiled = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = b" " * _require_success(nvrtc.nvrtcGetProgramLogSize(program), "NVRTC's log")
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.rstrip(b"\0 ").decode()
    _require_success(compiled, f"compiling for {architecture}", text)
    binary = b" " * _require_success(nvrtc.nvrtcGetCUBINSize(program), "NVRTC's binary", text)
    _require_success(nvrtc.nvrtcGetCUBIN(program, binary), "NVRTC's binary")
    nvrtc.nvrtcDestroyProgram(program)
    return binary


class CudaMalloc:
    """The built-in malloc of one device. Make it before anything else runs in the process.

    Parameters
    ----------
    device : torch.device
        A CUDA device.
    heap_bytes : int
        Of its heap, which the driver takes when the first kernel is loaded.
    """

    def __init__(self, device: torch.device, heap_bytes: int) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        binary = compile_source(SOURCE, f"sm_{major}{minor}")
        from cuda.bindings import driver

        self._driver = driver
        torch.empty(1, device=device)  # makes the context that torch and we share
        self.heap_bytes = heap_bytes
        limit = driver.CUlimit.CU_LIMIT_MALLOC_HEAP_SIZE
        _require_success(driver.cuCtxSetLimit(limit, heap_bytes), "setting the heap's size")
        self._module = _require_success(driver.cuModuleLoadData(binary), "loading the kernels")
        self._kernels = {
            name: _require_success(
                driver.cuModuleGetFunction(self._module, name.encode()), f"finding {name}"
            )
            for name in KERNELS
        }

    def malloc_lanes(self, out: torch.Tensor, size: int) -> None:
        """One request of `size` bytes per element of `out`, one thread each."""
        self._launch("malloc_lanes", out.numel(), out, out.numel(), size)

    def free_lanes(self, addrs: torch.Tensor) -> None:
        self._launch("free_lanes", addrs.numel(), addrs, addrs.numel())

    def latency(self, nulls: torch.Tensor, pairs: int, size: int) -> None:
        """`pairs` times malloc and free, one after the other, in one thread."""
        self._launch("latency", 1, nulls, pairs, size)

    def _launch(self, name: str, threads: int, array: torch.Tensor, *numbers: int) -> None:
        block = min(BLOCK, threads)
        grid = (threads + block - 1) // block
        values = (array.data_ptr(), *numbers)
        types = (ctypes.c_void_p, *(ctypes.c_longlong for _ in numbers))
        stream = torch.cuda.current_stream().cuda_stream
        launched = self._driver.cuLaunchKernel(
            self._kernels[name], grid, 1, 1, block, 1, 1, 0, stream, (values, types), 0
        )
        _require_success(launched, f"launching {name}")
