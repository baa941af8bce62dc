"""malloc and free inside Triton kernels.

Importing this package needs no GPU, driver or CUDA library, and imports neither Triton nor the
device code: the first use of `Heap` does. Triton reads ``TRITON_INTERPRET`` when a kernel is
decorated, and for its own kernels when Triton is imported, so set the variable before that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from devalloc import _locate_kernels
from devalloc.errors import (
    CorruptionError,
    DevallocError,
    DoubleFree,
    InvalidArgument,
    InvalidFree,
    InvalidFreeError,
    InvalidPointer,
    InvalidWriteError,
    LeakWarning,
    OutOfMemory,
    Overflow,
    UseAfterFree,
)

if TYPE_CHECKING:
    from devalloc.arena import Arena, Block
    from devalloc.heap import Heap, Snapshot, Stats
    from devalloc.heap.compiled import launcher

__version__ = "0.1.0"

__all__ = [
    "Arena",
    "Block",
    "CorruptionError",
    "DevallocError",
    "DoubleFree",
    "Heap",
    "InvalidArgument",
    "InvalidFree",
    "InvalidFreeError",
    "InvalidPointer",
    "InvalidWriteError",
    "LeakWarning",
    "OutOfMemory",
    "Overflow",
    "Snapshot",
    "Stats",
    "UseAfterFree",
    "__version__",
    "launcher",
]

_LAZY = {
    "Arena": "devalloc.arena",
    "Block": "devalloc.arena",
    "Heap": "devalloc.heap",
    "Snapshot": "devalloc.heap",
    "Stats": "devalloc.heap",
    "launcher": "devalloc.heap.compiled",
}

_locate_kernels.register()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
