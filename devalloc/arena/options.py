"""Sources, limits and streams as users write them for an arena, made definite."""

from __future__ import annotations

import os

import torch

from devalloc.common.arguments import known_device
from devalloc.errors import InvalidArgument
from devalloc.sizes import parse_size, quote
from devalloc.sources import Source
from devalloc.sources.names import NAMES, kinds_of, named_source, require_kind
from devalloc.sources.source import require_source

# CUDA's names for its two default streams, as handles. The legacy one is 0 too.
LEGACY_DEFAULT = 1
_PER_THREAD_DEFAULT = 2

_CURRENT = torch.device("cuda")
"""Without an index, which is no device's: whichever is the current one."""


def place_of(device: torch.device | str | int | None, source: str | Source | None) -> torch.device:
    """The device that an arena with these arguments would be on.

    Makes nothing and does not initialise CUDA. So the index may be missing, which means the current
    device. Raises InvalidArgument for a source that cannot be there.
    """
    wanted = None if device is None else known_device(device)
    if source is not None and not isinstance(source, str):
        require_source(source, NAMES)
        if wanted is not None and wanted != source.device:
            raise InvalidArgument(f"the source is on {source.device}, not on {device}")
        return source.device
    if source is None:
        source = _default_source(wanted)
    if wanted is not None:
        require_kind(source, wanted)
    kinds = kinds_of(source)
    if wanted is None and "cpu" in kinds and not torch.cuda.is_available():
        wanted = torch.device("cpu")
    if (wanted.type if wanted is not None else kinds[0]) == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidArgument('no CUDA device is available; use source="host" on this machine')
    place = _CURRENT if wanted is None else wanted
    _require_present(place)
    return place


def cuda_place_of(
    device: torch.device | str | int | None, source: str | Source | None
) -> torch.device:
    """`place_of` for memory of PyTorch's CUDA tensors; InvalidArgument if they cannot use it."""
    place = place_of(device, source)
    if place.type != "cuda":
        raise InvalidArgument(f"PyTorch's CUDA tensors cannot have memory on {place}")
    if place == _CURRENT and source is not None and not isinstance(source, str):
        raise InvalidArgument(f"the device of {source!r} has no index; PyTorch asks by the index")
    _require_present(place)
    return place


def _require_present(place: torch.device) -> None:
    if place.index is not None and place.index >= torch.cuda.device_count():
        raise InvalidArgument(f"no such device: {place}; there are {torch.cuda.device_count()}")


def _default_source(wanted: torch.device | None) -> str:
    cuda = torch.cuda.is_available() if wanted is None else wanted.type == "cuda"
    return "cuda" if cuda else "host"


def resolve_source(device: torch.device | str | int | None, source: str | Source | None) -> Source:
    """The source object that is given or named; InvalidArgument if it cannot be on the device."""
    place = place_of(device, source)
    if source is not None and not isinstance(source, str):
        return source
    if place == _CURRENT:
        place = torch.device("cuda", torch.cuda.current_device())
    return named_source(source or _default_source(place), place)


def resolve_limit(limit: int | str | float | None, device: torch.device) -> int | None:
    """The limit in bytes; a float is a fraction of the device's memory."""
    if limit is None:
        return None
    if not isinstance(limit, float):  # (NumPy's float64 is a float too.)
        return parse_size(limit)
    if not 0 < limit <= 1:
        raise InvalidArgument(f"a limit that is a fraction lies over 0 and up to 1, not {limit}")
    return int(limit * _device_memory(device))


def _device_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resolve_stream(stream: int, device: torch.device) -> int:
    """The handle under which the cache knows the stream; InvalidArgument if there is none."""
    if type(stream) is not int:
        raise InvalidArgument(f"a stream is given by its handle, an int, not {quote(stream)}")
    if device.type != "cuda":
        return stream
    if stream == _PER_THREAD_DEFAULT:
        raise InvalidArgument(
            "the per-thread default stream (handle 2) is another stream in each thread, which an "
            "arena cannot distinguish; use a stream that was created, or the default stream 0"
        )
    return 0 if stream == LEGACY_DEFAULT else stream
