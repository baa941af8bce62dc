"""Streams and events, no more of them than a caching allocator needs.

A stream is an int: the raw handle on CUDA, any number on the CPU. Handle 0 is the default stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from devalloc.errors import DevallocError, InvalidArgument

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether all work before the point is done; never waits."""
        ...

    def synchronize(self) -> None:
        """Wait until all work before the point is done."""
        ...


class Streams(Protocol):
    """The streams of one device."""

    def current(self) -> int:
        """The stream on which this thread currently works."""
        ...

    def record(self, stream: int) -> Event:
        """The point after everything queued on ``stream`` so far."""
        ...

    def wait(self, stream: int, event: Event) -> None:
        """Order what is queued on ``stream`` from now on behind ``event``; never blocks."""
        ...

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        ...

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        ...

    def relaxed_capture(self) -> AbstractContextManager[None]:
        """Within it this thread may call the source while a stream is being captured."""
        ...


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HostStreams:
    """The CPU: work is done as soon as it is issued, and every event has happened."""

    def current(self) -> int:
        return 0

    def record(self, stream: int) -> Event:
        return _Done()

    def wait(self, stream: int, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def capturing(self) -> bool:
        return False

    def relaxed_capture(self) -> AbstractContextManager[None]:
        return nullcontext()


class CudaStreams:
    """The streams of one CUDA device, through torch; InvalidArgument where there is none."""

    def __init__(self, device: torch.device) -> None:
        import torch

        if not torch.cuda.is_available():
            raise InvalidArgument(
                f'no CUDA device is available, and so no streams of {device}; use source="host" on '
                "this machine"
            )
        self._torch = torch
        self.device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._raw: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    def current(self) -> int:
        return self._raw(self._index)

    def _stream(self, stream: int) -> torch.cuda.Stream:
        if stream == 0:
            return self._torch.cuda.default_stream(self._index)
        return self._torch.cuda.ExternalStream(stream, device=self._index)

    def record(self, stream: int) -> Event:
        event = self._torch.cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: int, event: Event) -> None:
        self._stream(stream).wait_event(event)  # type: ignore[arg-type]

    def synchronize(self) -> None:
        self._torch.cuda.synchronize(self._index)

    def capturing(self) -> bool:
        return bool(self._torch.cuda.is_current_stream_capturing())

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        from cuda.bindings import runtime

        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        status, before = runtime.cudaThreadExchangeStreamCaptureMode(mode)
        if status != runtime.cudaError_t.cudaSuccess:
            raise DevallocError(f"cannot relax the capture mode of this thread: {status.name}")
        try:
            yield
        finally:
            runtime.cudaThreadExchangeStreamCaptureMode(before)
