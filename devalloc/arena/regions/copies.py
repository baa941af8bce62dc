"""Copies and zeros by address, for the device that an arena is on.

The copies are not waited on before the end of the `with` block, so copies overlap with each other
and with what the caller does meanwhile. They are queued on the current stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import torch

from devalloc.sizes import format_size
from devalloc.sources import cudart

if TYPE_CHECKING:
    from devalloc.arena.store.streams import Streams


class Copies(Protocol):
    """Copies of bytes between addresses of the device and of the host, in either direction."""

    def copy(self, to: int, start: int, nbytes: int) -> None: ...

    def zero(self, address: int, nbytes: int) -> None: ...

    def wait(self) -> None:
        """Wait until all that was asked for is done."""
        ...


class _HostCopies:
    def copy(self, to: int, start: int, nbytes: int) -> None:
        ctypes.memmove(to, start, nbytes)

    def zero(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def wait(self) -> None:
        pass


class _CudaCopies:
    def __init__(self, runtime: ModuleType, streams: Streams) -> None:
        self._runtime = runtime
        self._streams = streams
        self._stream = streams.current()

    def copy(self, to: int, start: int, nbytes: int) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        (status,) = self._runtime.cudaMemcpyAsync(to, start, nbytes, kind, self._stream)
        cudart.check(status, f"copying {format_size(nbytes)}")

    def zero(self, address: int, nbytes: int) -> None:
        (status,) = self._runtime.cudaMemsetAsync(address, 0, nbytes, self._stream)
        cudart.check(status, f"zeroing {format_size(nbytes)}")

    def wait(self) -> None:
        self._streams.record(self._stream).synchronize()


@contextmanager
def copies_on(device: torch.device, streams: Streams) -> Iterator[Copies]:
    """Copies that are done when the block ends, also if it ends with an error."""
    if device.type == "cpu":
        yield _HostCopies()
        return
    with cudart.current(device) as runtime:
        copies = _CudaCopies(runtime, streams)
        try:
            yield copies
        finally:
            copies.wait()
