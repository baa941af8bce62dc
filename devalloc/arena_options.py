"""What a user may write for an arena, made definite: sources, limits, streams."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from devalloc.arguments import known_device
from devalloc.errors import InvalidArgument
from devalloc.sizes import parse_size
from devalloc.sources import AsyncSource, CudaSource, HostSource, Source

_SOURCES: dict[str, Callable[[torch.device], Source]] = {
    "cuda": CudaSource,
    "async": AsyncSource,
    "host": lambda device: HostSource(),
}

# CUDA's names for its two default streams, as handles. The legacy one is 0 too.
LEGACY_DEFAULT = 1
_PER_THREAD_DEFAULT = 2

_MEMORY = ("device", "granularity", "allocate", "free", "view")
"""What an object must have to be asked for memory."""


def known_source(name: str) -> None:
    """Raise InvalidArgument for a name that no source has."""
    if name not in _SOURCES:
        raise InvalidArgument(f"unknown source {name!r}; there are {', '.join(_SOURCES)}")


def resolve_source(device: torch.device | str | int | None, source: str | Source | None) -> Source:
    """The source that is named, or given, on the device; InvalidArgument if it cannot be there."""
    wanted = None if device is None else known_device(device)
    if source is not None and not isinstance(source, str):
        if isinstance(source, type) or not all(hasattr(source, name) for name in _MEMORY):
            raise InvalidArgument(
                f"a source is one of {', '.join(_SOURCES)}, or an object with "
                f"{', '.join(_MEMORY)}; not {source!r}"
            )
        if wanted is not None and wanted != source.device:
            raise InvalidArgument(f"the source is on {source.device}, not on {device}")
        return source
    if source is None:
        cuda = torch.cuda.is_available() if wanted is None else wanted.type == "cuda"
        source = "cuda" if cuda else "host"
    known_source(source)
    kind = "cpu" if source == "host" else "cuda"
    if wanted is not None and wanted.type != kind:
        raise InvalidArgument(f"the source {source!r} has no memory on {wanted}")
    if kind == "cpu":
        return _SOURCES[source](torch.device("cpu"))
    if not torch.cuda.is_available():
        raise InvalidArgument('no CUDA device is available; use source="host" on this machine')
    index = torch.cuda.current_device() if wanted is None or wanted.index is None else wanted.index
    if index >= torch.cuda.device_count():
        raise InvalidArgument(f"no such device: {wanted}; there are {torch.cuda.device_count()}")
    return _SOURCES[source](torch.device("cuda", index))


def resolve_limit(limit: int | str | float | None, device: torch.device) -> int | None:
    """Bytes; a float is a fraction of the device's memory."""
    if limit is None:
        return None
    if not isinstance(limit, float):
        return parse_size(limit)
    if not 0 < limit <= 1:
        raise InvalidArgument(f"a limit that is a fraction lies over 0 and up to 1, not {limit}")
    return int(limit * _device_memory(device))


def _device_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resolve_stream(stream: int, device: torch.device) -> int:
    """The handle of the stream under which the engine knows it."""
    if type(stream) is not int:
        raise InvalidArgument(f"a stream is given by its handle, an int, not {stream!r}")
    if device.type != "cuda":
        return stream
    if stream == _PER_THREAD_DEFAULT:
        raise InvalidArgument(
            "the per-thread default stream (handle 2) is another stream in each thread, which an "
            "arena cannot tell apart; use a stream that was created, or the default stream 0"
        )
    return 0 if stream == LEGACY_DEFAULT else stream
