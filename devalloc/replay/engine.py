"""Replaying: what an allocator would have reserved if it had served the recorded program.

Memory is simulated (`SimulatedSource`), so any trace can be replayed on any machine. An allocator
runs twice over fresh memory: once against the clock, and once with a look at it after every event.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from devalloc.errors import InvalidArgument, OutOfMemory
from devalloc.replay.trace import Event, Trace
from devalloc.sources import SimulatedSource, Source


class Allocator(Protocol):
    """What a trace is replayed through: gives blocks for sizes and streams, over a source.

    ``free`` gets what ``alloc`` returned; ``peak_allocated`` is the most bytes that were in blocks
    at a time, rounding included.
    """

    def alloc(self, nbytes: int, stream: int) -> Any: ...

    def free(self, block: Any) -> None: ...

    @property
    def peak_allocated(self) -> int: ...


class Uncached:
    """No cache: every allocation and every free is a call of the source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._allocated = 0
        self.peak_allocated = 0

    def alloc(self, nbytes: int, stream: int) -> tuple[int, int]:
        address = self._source.allocate(nbytes, stream)
        self._allocated += nbytes
        self.peak_allocated = max(self.peak_allocated, self._allocated)
        return address, nbytes

    def free(self, block: tuple[int, int]) -> None:
        self._source.free(*block)
        self._allocated -= block[1]


@dataclasses.dataclass(frozen=True)
class Replay:
    """What one allocator did with a trace.

    Attributes
    ----------
    name : str
    reserved : sequence of int
        Bytes held from the source after each event.
    requested : sequence of int
        Bytes that the program had allocated then, unrounded and without failed allocations.
    peak_reserved : int
        The most bytes held from the source. A segment that came and went inside one event counts.
    peak_allocated : int or None
        The most bytes in blocks, rounding included; None if it was not recorded.
    source_allocations, source_frees : int
        Successful calls of the source.
    failures : int
        Allocations of the program that failed.
    seconds : float or None
        Time for all events; None for a result that was recorded and not replayed.
    """

    name: str
    reserved: Sequence[int]
    requested: Sequence[int]
    peak_reserved: int
    peak_allocated: int | None
    source_allocations: int
    source_frees: int
    failures: int = 0
    seconds: float | None = None

    @property
    def seconds_per_event(self) -> float | None:
        return None if self.seconds is None else self.seconds / max(len(self.reserved), 1)

    def fragmentation(self) -> list[float]:
        """After each event, the share of reserved bytes that the program did not request."""
        return [
            1 - asked / held if held else 0.0
            for asked, held in zip(self.requested, self.reserved, strict=True)
        ]

    @property
    def mean_fragmentation(self) -> float:
        shares = self.fragmentation()
        return sum(shares) / max(len(shares), 1)


def replay(
    trace: Trace,
    make: Callable[[Source], Allocator],
    name: str,
    capacity: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Replay:
    """Let an allocator serve a trace.

    Parameters
    ----------
    trace : Trace
    make : callable
        Makes a fresh allocator over the source it is given. Called twice.
    name : str
    capacity : int, optional
        Bytes of the simulated device. Default: no limit. Allocations that do not fit fail, and the
        replay goes on as if the program had not made them.
    clock : callable
        Gives the time in seconds.

    Raises
    ------
    InvalidArgument
        If the trace has no events.
    """
    if not trace.events:
        raise InvalidArgument("the trace has no events, so there is nothing to replay")
    seconds = _timed(trace.events, make(SimulatedSource(capacity)), clock)
    source = SimulatedSource(capacity)
    allocator = make(source)
    reserved, requested = array("q"), array("q")
    live: dict[int, tuple[Any, int]] = {}
    current = failures = 0
    for block, size, stream in trace.events:
        if size:
            try:
                live[block] = (allocator.alloc(size, stream), size)
                current += size
            except OutOfMemory:
                failures += 1
        elif block in live:
            handle, size = live.pop(block)
            allocator.free(handle)
            current -= size
        reserved.append(source.used)
        requested.append(current)
    return Replay(
        name,
        reserved,
        requested,
        source.peak,
        allocator.peak_allocated,
        source.allocations,
        source.frees,
        failures,
        seconds,
    )


def _timed(events: tuple[Event, ...], allocator: Allocator, clock: Callable[[], float]) -> float:
    """Seconds for all events, without Python's garbage collection."""
    live: dict[int, Any] = {}
    alloc, free = allocator.alloc, allocator.free
    collecting = gc.isenabled()
    gc.disable()
    try:
        begin = clock()
        for block, size, stream in events:
            if size:
                try:
                    live[block] = alloc(size, stream)
                except OutOfMemory:
                    continue
            elif block in live:
                free(live.pop(block))
        return clock() - begin
    finally:
        if collecting:
            gc.enable()


def recorded_replay(trace: Trace, name: str = "recorded") -> Replay | None:
    """What the recorded allocator did, from the trace; None if that is not known."""
    recorded = trace.recorded
    if recorded is None:
        return None
    reserved = array("q")
    held = recorded.reserved_at_start
    changes = iter((*recorded.changes, (len(trace.events) + 1, 0)))
    position, nbytes = next(changes)
    for index in range(len(trace.events)):
        # What the allocator did just before an event, it did for that event.
        while position <= index:
            held += nbytes
            position, nbytes = next(changes)
        reserved.append(held)
    return Replay(
        name,
        reserved,
        array("q", trace.requested()),
        recorded.peak_reserved,
        None,
        recorded.source_allocations,
        recorded.source_frees,
    )
