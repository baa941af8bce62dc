"""Which device a heap is on, and launching there."""

from __future__ import annotations

import os

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from devalloc.common.arguments import known_device
from devalloc.errors import InvalidArgument
from devalloc.heap.interpreted import install
from devalloc.kernels import upkeep

INTERPRETED = isinstance(upkeep.malloc_kernel, InterpretedFunction)
"""Whether the kernels run in Triton's interpreter."""

if INTERPRETED:
    install()


def on_device(device: torch.device) -> torch.cuda.device:
    """A context in which kernels are launched on ``device``; it does nothing for the CPU."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def memory_of(device: torch.device) -> int:
    """Bytes of memory that the device has in all."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """The device that the argument means, with its index.

    Raises
    ------
    InvalidArgument
        If the kernels, compiled or interpreted, cannot run there.
    """
    if isinstance(tl.sum, InterpretedFunction) != INTERPRETED:
        raise InvalidArgument(
            "TRITON_INTERPRET was changed after Triton was imported, and half of what kernels call "
            "is interpreted, half compiled; set it before"
        )
    if device is None:
        device = "cpu" if INTERPRETED else "cuda"
    wanted = known_device(device)
    if INTERPRETED:
        if wanted.type != "cpu":
            raise InvalidArgument(
                f"under Triton's interpreter a heap is on the CPU, not on {wanted}; unset "
                "TRITON_INTERPRET before Triton is imported to use the GPU"
            )
        return torch.device("cpu")
    if wanted.type != "cuda":
        raise InvalidArgument(
            f"a heap for compiled kernels is on a CUDA device, not on {wanted}; to run on the "
            "CPU set TRITON_INTERPRET=1 before Triton is imported"
        )
    if not torch.cuda.is_available():
        raise InvalidArgument(
            "no CUDA device is available; to run on the CPU set TRITON_INTERPRET=1 before Triton "
            "is imported"
        )
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if index >= torch.cuda.device_count():
        raise InvalidArgument(f"no such device: {wanted}; there are {torch.cuda.device_count()}")
    return torch.device("cuda", index)
