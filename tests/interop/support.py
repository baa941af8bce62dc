"""PyTorch's side of the C functions that an arena gives it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int, c_size_t, c_void_p
from typing import NamedTuple

import pytest
from triton import knobs

from devalloc.interop.bridge import Functions

TYPES = (
    CFUNCTYPE(c_void_p, c_size_t, c_int, c_void_p),
    CFUNCTYPE(None, c_void_p, c_size_t, c_int, c_void_p),
    CFUNCTYPE(None, c_void_p, c_void_p),
    CFUNCTYPE(None),
)


class Calls(NamedTuple):
    """C functions as Python can call them: without the GIL, NULL as None."""

    malloc: Callable[[int, int, int | None], int | None]
    free: Callable[[int | None, int, int, int | None], None]
    record_stream: Callable[[int | None, int | None], None]
    reset: Callable[[], None]


def require_compiler() -> None:
    """Skip where nothing could compile the functions; where it fails, the test should."""
    if not (
        knobs.build.impl or os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    ):
        pytest.skip("needs a C compiler: there is no gcc and no clang, and CC is not set")


def called(functions: Callable[[], Functions]) -> Calls:
    require_compiler()
    return Calls(*(kind(at) for kind, at in zip(TYPES, functions(), strict=True)))
