"""The calls of the C library for memory mappings that Python's `mmap` does not offer."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

from devalloc.errors import DevallocError, OutOfMemory
from devalloc.sizes import format_size

MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
"""Linux's numbers; Python names them only in some versions."""


@cache
def libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    )  # fmt: skip
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    for name in ("mprotect", "madvise"):
        getattr(library, name).argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


def reason() -> str:
    """Why the last call of this thread failed."""
    return os.strerror(ctypes.get_errno())


def populate(address: int, nbytes: int) -> None:
    """Give every page of a mapping memory. Keeps no Python lock, so threads can share the work."""
    libc().madvise(address, nbytes, _MADV_HUGEPAGE)  # fewer page faults; refused on some systems
    if libc().madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise OutOfMemory(
            f"host memory: {format_size(nbytes)} could not be committed ({reason()}); ask for less"
        )
    ctypes.memset(address, 0, nbytes)  # Linux before 5.14 does not know the advice


def drop(address: int, nbytes: int) -> None:
    """Take the pages of a mapping away; reading them gives zeros."""
    if libc().madvise(address, nbytes, MADV_DONTNEED):
        raise DevallocError(f"madvise of {format_size(nbytes)} failed: {reason()}")
