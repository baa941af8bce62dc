"""Sources by name, as users write them for a heap or an arena."""

from __future__ import annotations

from collections.abc import Callable

import torch

from devalloc.errors import InvalidArgument
from devalloc.sources.cuda import CudaSource
from devalloc.sources.host import HostSource
from devalloc.sources.source import Source
from devalloc.sources.stream_ordered import AsyncSource
from devalloc.sources.virtual import VirtualSource

# For each name the kinds of devices that it has memory on, and what makes the source.
_SOURCES: dict[str, tuple[tuple[str, ...], Callable[[torch.device], Source]]] = {
    "cuda": (("cuda",), CudaSource),
    "virtual": (("cuda", "cpu"), VirtualSource),
    "async": (("cuda",), AsyncSource),
    "host": (("cpu",), lambda device: HostSource()),
}

NAMES = ", ".join(_SOURCES)
"""All names, for messages."""


def kinds_of(name: str) -> tuple[str, ...]:
    """The kinds of devices on which the source of this name has memory, the usual one first.

    Raises InvalidArgument unless a source has this name.
    """
    if name not in _SOURCES:
        raise InvalidArgument(f"unknown source {name!r}; there are {NAMES}")
    return _SOURCES[name][0]


def require_kind(name: str, device: torch.device) -> None:
    """Raise InvalidArgument unless a source has this name, and memory on such a device."""
    if device.type not in kinds_of(name):
        raise InvalidArgument(f"the source {name!r} has no memory on {device}")


def named_source(name: str, device: torch.device) -> Source:
    """The source of this name on ``device``; InvalidArgument if there is none."""
    require_kind(name, device)
    return _SOURCES[name][1](device)
