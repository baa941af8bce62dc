"""What a program did with memory: allocations and frees in order, without addresses.

Traces begin and end in the middle of a program. A block that was live before the first event is
known from its free, or from a list of what was live at the end; such blocks are allocated before
everything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from devalloc.sizes import format_size


class Event(NamedTuple):
    """One step: ``block`` is allocated with ``size`` bytes, or, if ``size`` is 0, freed."""

    block: int
    size: int
    stream: int


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What the recorded allocator did with its source.

    Attributes
    ----------
    reserved_at_start : int
        Bytes in segments before the first event.
    changes : tuple of (int, int)
        The number of events before the change, and bytes: positive for a new segment, negative
        for one that was given back.
    """

    reserved_at_start: int
    changes: tuple[tuple[int, int], ...]

    def reserved(self) -> list[int]:
        """Bytes in segments at the start and after each change."""
        return list(accumulate((n for _, n in self.changes), initial=self.reserved_at_start))

    @property
    def peak_reserved(self) -> int:
        return max(self.reserved())

    @property
    def source_allocations(self) -> int:
        return sum(nbytes > 0 for _, nbytes in self.changes)

    @property
    def source_frees(self) -> int:
        return sum(nbytes < 0 for _, nbytes in self.changes)


@dataclasses.dataclass(frozen=True)
class Trace:
    """Events in order. Blocks are numbered as they are allocated, streams as they appear.

    Attributes
    ----------
    events : tuple of Event
        The first ``live_at_start`` of them allocate what was live before the recording.
    recorded : Recorded, optional
        What the recorded allocator did, where that is known.
    notes : tuple of str
        For people: what was not as it should be, and how it was read.
    origin : dict of str to str
        Where the trace comes from: the program, the GPU, versions.
    """

    events: tuple[Event, ...]
    live_at_start: int = 0
    recorded: Recorded | None = None
    notes: tuple[str, ...] = ()
    origin: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def allocations(self) -> int:
        return sum(event.size > 0 for event in self.events)

    @property
    def streams(self) -> int:
        return len({event.stream for event in self.events})

    def requested(self) -> list[int]:
        """Bytes that the program had allocated after each event, unrounded."""
        sizes: dict[int, int] = {}
        current, found = 0, []
        for event in self.events:
            if event.size:
                sizes[event.block] = event.size
                current += event.size
            else:
                current -= sizes.pop(event.block)
            found.append(current)
        return found


class TraceBuilder:
    """Makes a `Trace` from allocations and frees by address.

    A free of an address that was never seen before is assumed to be the free of a block that was
    live at the start. Contradictions are counted and reported in the notes.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._streams: list[int] = []
        self._steps: list[tuple[int, bool]] = []  # block, whether it is allocated
        self._initial: list[tuple[int, int]] = []  # address, block
        self._live: dict[int, int] = {}  # address -> block
        self._seen: set[int] = set()
        self._stream_numbers: dict[object, int] = {}
        self._changes: list[tuple[int, int]] = []
        self._counts: dict[str, int] = {}

    def note(self, what: str) -> None:
        """Count one occurrence of ``what``."""
        self._counts[what] = self._counts.get(what, 0) + 1

    def _new_block(self, size: int, stream: object) -> int:
        self._sizes.append(size)
        numbers = self._stream_numbers
        self._streams.append(numbers.setdefault(stream, len(numbers)))
        return len(self._sizes) - 1

    def is_live(self, address: int) -> bool:
        return address in self._live

    def allocate(self, address: int, size: int, stream: object) -> None:
        if size <= 0:
            self.note("allocations of no bytes, left out")
            return
        if address in self._live:
            self.note("addresses allocated again without a free; freed just before")
            self._steps.append((self._live.pop(address), False))
        block = self._new_block(size, stream)
        self._live[address] = block
        self._seen.add(address)
        self._steps.append((block, True))

    def free(self, address: int, size: int, stream: object) -> None:
        block = self._live.pop(address, None)
        if block is None and address in self._seen:
            self.note("frees of what was free already, left out")
            return
        if block is None and size <= 0:
            self.note("frees of unknown blocks of unknown size, left out")
            return
        if block is None:
            block = self._add_initial(address, size, stream)
        elif self._stream_numbers.get(stream) != self._streams[block]:
            self.note("frees on another stream than the allocation's, taken as on that one")
        self._steps.append((block, False))

    def _add_initial(self, address: int, size: int, stream: object) -> int:
        block = self._new_block(size, stream)
        self._initial.append((address, block))
        self._seen.add(address)
        return block

    def lives_at_end(self, address: int, size: int, stream: object) -> None:
        """Add a block that is live after the last event. Call this after all events."""
        if address in self._seen:
            if address not in self._live:
                self.note("blocks live at the end whose allocation is missing, left out")
        elif size > 0:
            self._live[address] = self._add_initial(address, size, stream)

    def reserved_changes(self, nbytes: int) -> None:
        """The recorded allocator got a segment (positive) or gave one back (negative)."""
        self._changes.append((len(self._steps), nbytes))

    def finish(
        self, reserved_at_end: int | None = None, origin: dict[str, str] | None = None
    ) -> Trace:
        """The trace. With ``reserved_at_end``, bytes in segments, it has `Recorded` as well."""
        initial = [block for _, block in sorted(self._initial)]
        steps = [(block, True) for block in initial] + self._steps
        events = self._numbered(steps)
        recorded = None
        if reserved_at_end is not None:
            start = reserved_at_end - sum(nbytes for _, nbytes in self._changes)
            changes = ((len(initial) + position, nbytes) for position, nbytes in self._changes)
            recorded = Recorded(start, tuple(changes))
            if min(recorded.reserved()) < 0:
                recorded = None
        notes = [f"{count} x {what}" for what, count in self._counts.items()]
        if reserved_at_end is not None and recorded is None:
            notes.append("the recorded reserved bytes do not add up, and are left out")
        if initial:
            total = format_size(sum(self._sizes[block] for block in initial))
            notes.insert(0, f"{len(initial)} blocks ({total}) were live before the first event")
        return Trace(tuple(events), len(initial), recorded, tuple(notes), origin or {})

    def _numbered(self, steps: Iterable[tuple[int, bool]]) -> list[Event]:
        """Events, with blocks and streams numbered in the order in which they appear."""
        blocks: dict[int, int] = {}
        streams: dict[int, int] = {}
        events = []
        for block, allocated in steps:
            number = blocks.setdefault(block, len(blocks))
            stream = streams.setdefault(self._streams[block], len(streams))
            events.append(Event(number, self._sizes[block] if allocated else 0, stream))
        return events
