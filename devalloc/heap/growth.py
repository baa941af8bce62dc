"""The memory of a heap that grows: addresses for all of it, memory for what there is so far.

Data, state and the table of a debug heap are reservations. To grow, memory is mapped behind the
next records and chunks, and then words are copied that no kernel writes: see kernels/growing.py.
Copies need no program to run, so a heap also grows while programs that wait for it fill the device.
Chunks that were given back are filled first.

The unit is a chunk of 4 MiB. A larger step is mapped in pieces of a quarter of it, because a piece
can only be given back as a whole, and costs the same whatever its size.

Concurrency: one lock; a thread may grow the heap while others use it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, cast

import torch

from devalloc.errors import InvalidArgument
from devalloc.heap.geometry import CHUNK_PAGES, Geometry
from devalloc.kernels import layout
from devalloc.sizes import PAGE_BYTES, format_size
from devalloc.sources import Segment, cudart

if TYPE_CHECKING:
    from devalloc.heap.debug_table import DebugTable
    from devalloc.sources.source import Mappable

CHUNK_BYTES = CHUNK_PAGES * PAGE_BYTES
LARGEST_PIECE = 256 << 20
_ZEROS = 1 << 19  # words of the patterns that are copied
_ONES = 1 << 12


class Growth:
    """How much of a heap that grows has memory, and the steps that change it.

    Parameters
    ----------
    data, control : Segment
        Reservations of one `Mappable` source.
    front : int
        Bytes of ``data`` before page 0.
    geometry : Geometry
        Of all that the heap may have; whole chunks.
    table : DebugTable or None
        Its segment is a reservation too.
    """

    def __init__(
        self,
        data: Segment,
        control: Segment,
        front: int,
        geometry: Geometry,
        table: DebugTable | None,
    ) -> None:
        self.chunks = 0
        """From the first to the last that there ever were: so many have records."""
        self.last_answer = 0
        """What ANSWERS holds."""
        self._kept = 0
        self.lock = threading.RLock()
        self._process = os.getpid()
        self._absent: list[tuple[int, int]] = []
        self._source = cast("Mappable", data.source)
        self._data = data
        self._control = control
        self._front = front
        self._geometry = geometry
        self._table = table
        self._mapped = {id(control): 0} | ({id(table.segment): 0} if table else {})
        self._words: dict[int, torch.Tensor] = {}
        self._device = data.source.device
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
        # (Copied from pinned memory, no step needs a multiprocessor.)
        pinned = self._stream is not None
        self._zeros = _pattern(_ZEROS, 0, pinned)
        self._ones = _pattern(_ONES, -1, pinned)
        words = torch.zeros(
            layout.EXTENT_COPIES.value + 1, dtype=torch.int64, device="cpu", pin_memory=pinned
        )
        self._extent, self._answer = words[:-1], words[-1:]

    # What there is --------------------------------------------------------------------------------

    @property
    def pages(self) -> int:
        """Pages that have a record."""
        return self.chunks * CHUNK_PAGES

    @property
    def capacity(self) -> int:
        """Bytes of data that have memory."""
        return (self.chunks - sum(count for _, count in self._absent)) * CHUNK_BYTES

    @property
    def limit(self) -> int:
        return self._geometry.pages * PAGE_BYTES

    @property
    def mapped(self) -> int:
        """Bytes of memory behind data, state and table."""
        return self._front + self.capacity + sum(self._mapped.values())

    def present(self) -> list[tuple[int, int]]:
        """First and number of the chunks that have memory, ascending."""
        parts = []
        begin = 0
        for first, count in [*self._absent, (self.chunks, 0)]:
            if first > begin:
                parts.append((begin, first - begin))
            begin = first + count
        return parts

    def absent_pages(self) -> list[slice]:
        """Where pages were given back."""
        return [slice(at * CHUNK_PAGES, (at + n) * CHUNK_PAGES) for at, n in self._absent]

    # Growing --------------------------------------------------------------------------------------

    def map_first(self, chunks: int) -> None:
        """Map the first chunks of a new heap, whose state is written afterwards."""
        with self._current():
            if self._front:
                self._source.map(self._data.address, 0, self._front, LARGEST_PIECE)
            self._map_state(chunks)
            self._map_data([(0, chunks)], self._piece(chunks))
            if self._stream is not None:
                # (The state is written next, on the current stream.)
                self._stream.synchronize()
        self.chunks = self._kept = chunks
        self._handle = self._words_of(self._control)

    def grow(self, nbytes: int, tell: bool = False) -> int:
        """Add at least ``nbytes``; returns by how much the capacity has grown. With ``tell``
        programs that wait learn of it.

        Raises
        ------
        InvalidArgument
            Beyond the limit; nothing has changed then.
        OutOfMemory
            If the source has not so much memory; nothing has changed then.
        """
        self.require_allowed()
        with self.lock, self._current():
            before = self.capacity
            wanted = -(-nbytes // CHUNK_BYTES)
            if before + wanted * CHUNK_BYTES > self.limit:
                raise InvalidArgument(
                    f"the heap has {format_size(before)} and a limit of {format_size(self.limit)}: "
                    f"it cannot grow by {format_size(nbytes)}"
                )
            parts = self._parts_for(wanted)
            self._map_state(sum(parts[-1]) if parts else 0)
            self._map_data(parts, self._piece(wanted))
            # (From here on nothing fails but the device itself.)
            self._publish(parts, tell)
            return self.capacity - before

    def _parts_for(self, chunks: int) -> list[tuple[int, int]]:
        """First and number of the chunks to map: those that were given back, then new ones."""
        parts = []
        for first, count in [*self._absent, (self.chunks, chunks)]:
            taken = min(count, chunks)
            if taken:
                parts.append((first, taken))
            chunks -= taken
        return _joined(parts)

    @property
    def is_ours(self) -> bool:
        """Whether this process made the heap, and was not forked from it."""
        return os.getpid() == self._process

    def require_allowed(self) -> None:
        """Raise InvalidArgument where a heap can neither grow nor give memory back."""
        if not self.is_ours:
            raise InvalidArgument(
                f"the heap belongs to process {self._process}; a process that was forked from it "
                "can neither grow nor trim it"
            )
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(
                "a heap can neither grow nor give memory back in the capture of a graph: do it "
                "before or after; kernels of the graph see it when the graph is replayed"
            )

    @staticmethod
    def _piece(chunks: int) -> int:
        quarter = max(chunks // 4, 1)
        return min(CHUNK_BYTES << quarter.bit_length() - 1, LARGEST_PIECE)

    def _publish(self, parts: list[tuple[int, int]], tell: bool) -> None:
        # (The first ones are filled first.)
        self._absent = _behind(self._absent, sum(parts[-1]) if parts else 0)
        known = self.chunks
        self.chunks = max(known, sum(parts[-1])) if parts else known
        with self._copies():
            if self.chunks > known:
                self._extent.fill_(self.pages)
                self._put(layout.EXTENT.value, self._extent)
            for first, count in parts:
                for at in range(first, first + count, len(self._ones)):
                    length = min(first + count - at, len(self._ones))
                    self._put(self._geometry.rows + at, self._ones[:length])
            # (These may lie far behind what there was.)
            self._reset_hints()
            if tell:
                self._put_answer(more=self.capacity < self.limit)

    def next_answer(self, more: bool) -> int:
        """The word of the next answer, which differs from all before."""
        self.last_answer = (self.last_answer | 1) + 1 + more
        return self.last_answer

    def answer(self, more: bool) -> None:
        """Tell programs that wait that the host has done what it could; ``more``: it may still."""
        with self.lock, self._copies():
            self._put_answer(more)

    def _put_answer(self, more: bool) -> None:
        self._answer.fill_(self.next_answer(more))
        self._put(layout.ANSWERS.value, self._answer)

    def _map_data(self, parts: list[tuple[int, int]], largest: int) -> None:
        done: list[tuple[int, int]] = []
        try:
            for first, count in parts:
                offset, nbytes = self._front + first * CHUNK_BYTES, count * CHUNK_BYTES
                self._source.map(self._data.address, offset, nbytes, largest)
                done.append((offset, nbytes))
        except BaseException:
            for offset, nbytes in done:
                self._source.unmap(self._data.address, offset, nbytes)
            raise

    def _map_state(self, chunks: int) -> None:
        """Map and clear what lies behind the records of so many chunks, and their debug entries."""
        pages = chunks * CHUNK_PAGES
        self._map_words(self._control, self._geometry.words_of(pages))
        if self._table is not None:
            self._map_words(self._table.segment, self._table.words_of(pages))
            self._table.pages = max(self._table.pages, pages)

    def _map_words(self, segment: Segment, words: int) -> None:
        unit = self._source.granularity
        before = self._mapped[id(segment)]
        after = -(-words * 8 // unit) * unit
        if after > before:
            self._source.map(segment.address, before, after - before, LARGEST_PIECE)
            self._mapped[id(segment)] = after
            target = self._words_of(segment)
            end = min(after // 8, len(target))
            # (What is published is copied later, on the same stream.)
            with self._copies(wait=False):
                for at in range(before // 8, end, _ZEROS):
                    part = target[at : min(at + _ZEROS, end)]
                    part.copy_(self._zeros[: len(part)], non_blocking=True)

    def _words_of(self, segment: Segment) -> torch.Tensor:
        """All words of a segment. (PyTorch makes no tensor of it before some have memory.)"""
        words = self._words.get(id(segment))
        if words is None:
            words = self._words[id(segment)] = segment.view().view(torch.int64)
        return words

    def _put(self, first: int, words: torch.Tensor) -> None:
        self._handle[first : first + len(words)].copy_(words, non_blocking=True)

    def _reset_hints(self) -> None:
        """Let programs look for pages from the front of the heap on."""
        step, copies = layout.HINT_STRIDE.value, layout.HINT_COPIES.value
        first = layout.HINTS.value
        hints = self._handle[first : first + copies * step : step]
        if self._stream is None:
            hints.copy_(self._zeros[:copies])
        else:
            # (A copy of PyTorch's with a stride would be a kernel.)
            runtime = cudart.runtime()
            (status,) = runtime.cudaMemcpy2DAsync(
                hints.data_ptr(), step * 8, self._zeros.data_ptr(), 8, 8, copies,
                runtime.cudaMemcpyKind.cudaMemcpyHostToDevice, self._stream.cuda_stream,
            )  # fmt: skip
            cudart.check(status, "cudaMemcpy2DAsync")

    def _current(self) -> AbstractContextManager[object]:
        """In this context the driver's calls have a device, also in a thread that had none."""
        return nullcontext() if self._stream is None else cudart.current(self._device)

    def _copies(self, wait: bool = True) -> AbstractContextManager[None]:
        return nullcontext() if self._stream is None else _Copies(self._stream, wait)

    # Shrinking ------------------------------------------------------------------------------------

    def give_back(self, take: Callable[[list[int], list[int]], list[bool]]) -> int:
        """Unmap pieces whose chunks are all free, but those that a heap was made with; returns the
        bytes.

        ``take(firsts, counts)`` takes the chunks of a piece out of use if all their pages are free,
        and says for each piece whether it did.
        """
        with self.lock, self._current():
            begin = self._front + self._kept * CHUNK_BYTES
            length = (self.chunks - self._kept) * CHUNK_BYTES
            pieces = [
                ((offset - self._front) // CHUNK_BYTES, nbytes // CHUNK_BYTES)
                for offset, nbytes in self._source.parts(self._data.address, begin, length)
            ]
            if not pieces:
                return 0
            taken = take([first for first, _ in pieces], [count for _, count in pieces])
            given = 0
            for (first, count), free in zip(pieces, taken, strict=True):
                if free:
                    offset, nbytes = self._front + first * CHUNK_BYTES, count * CHUNK_BYTES
                    self._absent = _joined([*self._absent, (first, count)])
                    self._source.unmap(self._data.address, offset, nbytes, keep=False)
                    given += nbytes
            return given


class _Copies(AbstractContextManager[None]):
    """Within it copies go to a stream of their own; with ``wait`` they are done at its end."""

    def __init__(self, stream: torch.cuda.Stream, wait: bool) -> None:
        self._stream = stream
        self._wait = wait
        self._context = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)
        if self._wait:
            self._stream.synchronize()


@cache
def _pattern(words: int, value: int, pinned: bool) -> torch.Tensor:
    """What all heaps of the process copy from."""
    return torch.full((words,), value, dtype=torch.int64, device="cpu", pin_memory=pinned)


def _joined(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint (first, count), ascending, with adjacent ones as one."""
    joined: list[tuple[int, int]] = []
    for first, count in sorted(parts):
        if joined and sum(joined[-1]) == first:
            joined[-1] = joined[-1][0], joined[-1][1] + count
        else:
            joined.append((first, count))
    return joined


def _behind(absent: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """What of ``absent`` lies at or behind chunk ``end``."""
    return [
        (max(first, end), first + count - max(first, end))
        for first, count in absent
        if first + count > end
    ]


def require_growing_source(source: object) -> None:
    """Raise InvalidArgument unless memory can be mapped later in what the source reserves."""
    if not getattr(getattr(source, "capabilities", None), "mappable", False):
        raise InvalidArgument(
            f'a heap with a limit needs a source that maps memory later: source="virtual", not '
            f"{source!r}"
        )
    granularity = getattr(source, "granularity", 0)
    if CHUNK_BYTES % granularity:
        raise InvalidArgument(
            f"a heap grows in steps of {format_size(CHUNK_BYTES)}, and memory of {source!r} comes "
            f"in multiples of {format_size(granularity)}"
        )
