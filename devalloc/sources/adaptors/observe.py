"""Adaptors that count allocations, and that remember which code asked for them."""

from __future__ import annotations

import dataclasses
import sys
import threading
import traceback

from devalloc.errors import InvalidArgument
from devalloc.sizes import format_size, require_count
from devalloc.sources.adaptors.adaptor import Adaptor
from devalloc.sources.source import Source, bytes_taken, require_free


@dataclasses.dataclass
class Counter:
    """One quantity: its current value, its peak, and the sum of all additions."""

    current: int = 0
    peak: int = 0
    total: int = 0

    def add(self, amount: int) -> None:
        self.current += amount
        self.total += amount
        self.peak = max(self.peak, self.current)

    def subtract(self, amount: int) -> None:
        self.current -= amount

    def absorb(self, inner: Counter) -> None:
        """Continue as if everything that ``inner`` counted had been counted here."""
        self.peak = max(self.peak, self.current + inner.peak)
        self.current += inner.current
        self.total += inner.total


@dataclasses.dataclass
class Counters:
    """Bytes and number of allocations, and how many calls of `allocate` failed."""

    bytes: Counter = dataclasses.field(default_factory=Counter)
    allocations: Counter = dataclasses.field(default_factory=Counter)
    failures: int = 0

    def absorb(self, inner: Counters) -> None:
        self.bytes.absorb(inner.bytes)
        self.allocations.absorb(inner.allocations)
        self.failures += inner.failures

    def copy(self) -> Counters:
        return Counters(
            dataclasses.replace(self.bytes), dataclasses.replace(self.allocations), self.failures
        )


class StatisticsAdaptor(Adaptor):
    """Counts what passes through it, in nested sections (as RMM's statistics resource).

    Bytes are what allocations take: whole multiples of the source's granularity.

    A free is counted after it is done, so a peak is never too low; with several threads it may be
    too high by what they were just giving back.
    """

    def __init__(self, inner: Source) -> None:
        super().__init__(inner)
        self._stack = [Counters()]
        self._lock = threading.RLock()

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        try:
            address = super().allocate(nbytes, stream)
        except BaseException:
            with self._lock:
                self._stack[-1].failures += 1
            raise
        with self._lock:
            self._stack[-1].bytes.add(bytes_taken(self.inner, nbytes))
            self._stack[-1].allocations.add(1)
        return address

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        super().free(address, nbytes, stream)
        with self._lock:
            self._stack[-1].bytes.subtract(bytes_taken(self.inner, nbytes))
            self._stack[-1].allocations.subtract(1)

    @property
    def counters(self) -> Counters:
        """A copy of the innermost section's counters.

        If memory from before the section is freed in it, its current values can be negative.
        """
        with self._lock:
            return self._stack[-1].copy()

    def push(self) -> None:
        """Begin a section that counts from zero. Sections are shared by all threads."""
        with self._lock:
            self._stack.append(Counters())

    def pop(self) -> Counters:
        """End the innermost section; return its counts and add them to the section around it.

        Raises
        ------
        InvalidArgument
            If no section was begun by `push`.
        """
        with self._lock:
            if len(self._stack) == 1:
                raise InvalidArgument("pop without push: only the outermost section is left")
            popped = self._stack.pop()
            self._stack[-1].absorb(popped)
        return popped


@dataclasses.dataclass(frozen=True)
class Outstanding:
    """One allocation that has not come back."""

    address: int
    nbytes: int
    stream: int | None
    thread: int
    stack: traceback.StackSummary
    """Python frames of the call, outermost first; empty if stacks were off."""


class TrackingAdaptor(Adaptor):
    """Remembers what is out and which lines asked for it (as RMM's tracking resource).

    Parameters
    ----------
    inner : Source
    frames : int
        How many Python frames to keep for each call, the innermost ones; 0 for none. Each takes
        about a microsecond; the text of the lines is read only when it is shown.
    """

    def __init__(self, inner: Source, frames: int = 16) -> None:
        super().__init__(inner)
        require_count("frames", frames, 0)
        self.frames = frames
        self._out: dict[int, Outstanding] = {}
        self._lock = threading.RLock()  # a finaliser may free while this thread holds it

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        address = super().allocate(nbytes, stream)
        stack = traceback.StackSummary()
        if self.frames:
            walk = traceback.walk_stack(sys._getframe(1))
            stack = traceback.StackSummary.extract(walk, limit=self.frames, lookup_lines=False)
            stack.reverse()
        thread = threading.get_ident()
        entry = Outstanding(address, nbytes, stream, thread, stack)
        with self._lock:
            self._out[address] = entry
        return address

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        require_free("TrackingAdaptor", address, nbytes)
        known = self._out.get(address)
        super().free(address, nbytes, stream)
        # Removed afterwards, because only the source inside knows which of several frees is the
        # first; and only if it is the same entry, for another thread may have the address by now.
        with self._lock:
            if self._out.get(address) is known:
                self._out.pop(address, None)

    @property
    def outstanding_bytes(self) -> int:
        """The bytes that all allocations take: whole multiples of the source's granularity."""
        return sum(bytes_taken(self.inner, each.nbytes) for each in self.outstanding())

    def outstanding(self) -> list[Outstanding]:
        """The allocations that are out, oldest first."""
        return list(self._out.values())

    def report(self) -> str:
        """What is out, as text for people: a line and a stack for each; empty if nothing is."""
        lines = []
        for each in self.outstanding():
            lines.append(f"{format_size(each.nbytes)} at {each.address:#x}, allocated by\n")
            lines += each.stack.format()
        return "".join(lines)
