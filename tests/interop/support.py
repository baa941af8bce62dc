"""PyTorch's side of the C functions that an arena gives it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int, c_size_t, c_void_p
from typing import NamedTuple

import pytest
import torch
from triton import knobs

from devalloc import Arena
from devalloc.arena.cache import allocator as cache_module
from devalloc.interop.bridge import Functions
from devalloc.sources import SimulatedSource
from tests.arena.support import FakeStreams

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


def on_a_device(monkeypatch: pytest.MonkeyPatch, index: int = 0) -> tuple[Arena, FakeStreams]:
    """An arena of a CUDA device that need not exist, and its streams."""
    streams = FakeStreams()
    monkeypatch.setattr(cache_module, "CudaStreams", lambda device: streams)
    source = SimulatedSource()
    source.device = torch.device("cuda", index)
    return Arena(source=source), streams
