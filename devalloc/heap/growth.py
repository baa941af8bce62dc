"""The memory of a heap that grows: addresses for all of it, memory for what there is so far.

Data, state and the table of a debug heap are reservations. To grow, memory is mapped behind the
next records and chunks, and then words are copied that no kernel writes: see kernels/growing.py.
Copies need no program to run, so a heap also grows while programs that wait for it fill the device.
(What maps memory waits for nothing. Copies may, in CUDA: see docs/guide/growing.md.)
Chunks that were given back are filled first.

The unit is a chunk of 4 MiB. A larger step is mapped in pieces of a quarter of it, because a piece
can only be given back as a whole, and costs the same whatever its size.

Concurrency: a thread may grow the heap while others use it. ``lock`` is held by each change, but
not while a kernel takes chunks: that kernel may be queued behind programs that wait for the heap to
grow. ``shrinking`` is held by all of `Growth.give_back`, and by what must not see pages that are
taken and still mapped. It is acquired before ``lock``.

Interruptions: Ctrl-C can leave any of these functions between two calls. So a step is noted before
it begins, or entered when it is complete, by stores without a call in between, and the next call
brings to an end what was interrupted. What is mapped, the source knows. Words of the free row are
copied once, because programs may use the pages at once: the C code that copies also notes it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import starmap
from typing import TYPE_CHECKING, Any, cast

import torch

from devalloc.errors import InvalidArgument
from devalloc.heap.geometry import CHUNK_PAGES, Geometry
from devalloc.kernels import layout
from devalloc.sizes import PAGE_BYTES, format_size
from devalloc.sources import Segment, cudart

if TYPE_CHECKING:
    from devalloc.heap.debug_table import DebugTable
    from devalloc.sources.source import Mappable

CLOSED = "the heap is closed"
CHUNK_BYTES = CHUNK_PAGES * PAGE_BYTES
LARGEST_PIECE = 256 << 20
MOST_AHEAD = 64 << 20  # bytes of state that are mapped before they are needed
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
        self.last_answer = 0
        """What ANSWERS holds."""
        self.ended = False
        """Whether the heap is closed. Set with both locks."""
        self.lock = threading.RLock()
        self.shrinking = threading.RLock()
        # Chunks that have records, from the first to the last that there ever were, and which of
        # them were given back. Changed together.
        self._there: tuple[int, list[tuple[int, int]]] = 0, []
        # Copies that publish pages, and what the finished ones returned.
        self._owed: tuple[list[tuple[Any, ...]], list[Any]] | None = None
        # The pieces that a kernel is to take, where it says which it has, and its stream.
        self._taking: tuple[list[tuple[int, int]], torch.Tensor, Any] | None = None
        self._kept = 0
        self._process = os.getpid()
        self._source = cast("Mappable", data.source)
        self._data = data
        self._control = control
        self._front = front
        self._geometry = geometry
        self._table = table
        # Bytes of each that are mapped and cleared.
        self._mapped = {id(control): 0} | ({id(table.segment): 0} if table else {})
        self._device = data.source.device
        # (One of PyTorch's may be the one on which a program waits for the heap to grow.)
        self._stream = own_stream(self, self._device) if self._device.type == "cuda" else None
        # (Copied from pinned memory, no step needs a multiprocessor.)
        pinned = self._stream is not None
        self._zeros = _pattern(_ZEROS, 0, pinned)
        self._ones = _pattern(_ONES, -1, pinned)
        words = torch.zeros(
            layout.EXTENT_COPIES.value + 1, dtype=torch.int64, device="cpu", pin_memory=pinned
        )
        self._extent, self._answer = words[:-1], words[-1:]
        _GROWTHS.add(self)

    # What there is --------------------------------------------------------------------------------

    @property
    def chunks(self) -> int:
        """From the first to the last that there ever were: so many have records."""
        return self._there[0]

    @property
    def pages(self) -> int:
        """Pages that have a record."""
        return self.chunks * CHUNK_PAGES

    @property
    def capacity(self) -> int:
        """Bytes of data that have memory."""
        chunks, absent = self._there
        return (chunks - sum(count for _, count in absent)) * CHUNK_BYTES

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
        chunks, absent = self._there
        for first, count in [*absent, (chunks, 0)]:
            if first > begin:
                parts.append((begin, first - begin))
            begin = first + count
        return parts

    def absent_pages(self) -> list[slice]:
        """Where pages were given back."""
        return [slice(at * CHUNK_PAGES, (at + n) * CHUNK_PAGES) for at, n in self._there[1]]

    # Growing --------------------------------------------------------------------------------------

    def map_first(self, chunks: int) -> None:
        """Map the first chunks of a new heap, whose state is written afterwards."""
        with self._current():
            if self._front:
                self._source.map(self._data.address, 0, self._front, LARGEST_PIECE)
            self._map_state(chunks)
            self._map_data([(0, chunks)], self._piece(chunks))
            # (The state is written next, on the current stream.)
            self._synchronise()
        self._there, self._kept = (chunks, []), chunks

    def follow(self) -> None:
        """Let what is copied from now on come after what the current stream has to do."""
        if self._stream is not None:
            own = torch.cuda.ExternalStream(int(self._stream), device=self._device)
            own.wait_stream(torch.cuda.current_stream(self._device))

    def grow(self, nbytes: int, tell: bool = False) -> int:
        """Add at least ``nbytes``; returns by how much the capacity has grown. With ``tell``
        programs that wait learn of it.

        Raises
        ------
        InvalidArgument
            Beyond the limit, or if the heap is closed; nothing has changed then.
        OutOfMemory
            If the source has not so much memory; nothing has changed then.
        """
        self.require_allowed()
        with self.lock, self._current():
            self._require_open()
            self._publish()
            self._drop_strays()
            before = self.capacity
            wanted = -(-nbytes // CHUNK_BYTES)
            if before + wanted * CHUNK_BYTES > self.limit:
                raise InvalidArgument(
                    f"the heap has {format_size(before)} and a limit of {format_size(self.limit)}: "
                    f"it cannot grow by {format_size(nbytes)}"
                )
            parts = self._parts_for(wanted)
            end = sum(parts[-1]) if parts else 0
            try:
                self._map_state(end)
                self._map_data(parts, self._piece(wanted))
            except BaseException:
                self._drop_strays()
                raise
            chunks, absent = self._there
            copies = self._extents(end) if end > chunks else []
            copies += self._free(parts)
            # (The first ones are filled first.)
            there = max(chunks, end), _behind(absent, end)
            # (From here on nothing fails but the device itself.)
            self._there, self._owed = there, (copies, [])
            self._publish(tell)
            return self.capacity - before

    def _parts_for(self, chunks: int) -> list[tuple[int, int]]:
        """First and number of the chunks to map: those that were given back, then new ones."""
        parts = []
        there, absent = self._there
        for first, count in [*absent, (there, chunks)]:
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

    def _require_open(self) -> None:
        if self.ended:
            raise InvalidArgument(CLOSED)

    @staticmethod
    def _piece(chunks: int) -> int:
        quarter = max(chunks // 4, 1)
        return min(CHUNK_BYTES << quarter.bit_length() - 1, LARGEST_PIECE)

    def _extents(self, chunks: int) -> list[tuple[Any, ...]]:
        """The copy that says how many chunks have records."""
        self._extent.fill_(chunks * CHUNK_PAGES)
        return [self._copy_of(layout.EXTENT.value, self._extent)]

    def _free(self, parts: list[tuple[int, int]]) -> list[tuple[Any, ...]]:
        """The copies that make all pages of chunks free."""
        return [
            self._copy_of(self._geometry.rows + at, self._ones[: first + count - at])
            for first, count in parts
            for at in range(first, first + count, len(self._ones))
        ]

    def _publish(self, tell: bool = False) -> None:
        """Make the copies that are owed, and wait for them."""
        if self._owed is not None:
            self._copy(*self._owed)
            # (The pages may lie far behind what there was.)
            self._reset_hints()
            if tell:
                self._put_answer(more=self.capacity < self.limit)
            self._synchronise()
            self._owed = None

    def next_answer(self, more: bool) -> int:
        """The word of the next answer, which differs from all before. In a process that was
        forked no thread answers."""
        self.last_answer = (self.last_answer | 1) + 1 + (more and self.is_ours)
        return self.last_answer

    def answer(self, more: bool) -> None:
        """Tell programs that wait that the host has done what it could; ``more``: it may still.
        Raises InvalidArgument if the heap is closed."""
        with self.lock, self._current():
            self._require_open()
            self._put_answer(more)
            self._synchronise()

    def _put_answer(self, more: bool) -> None:
        self._answer.fill_(self.next_answer(more))
        self._copy([self._copy_of(layout.ANSWERS.value, self._answer)])

    def _map_data(self, parts: list[tuple[int, int]], largest: int) -> None:
        for first, count in parts:
            offset, nbytes = self._front + first * CHUNK_BYTES, count * CHUNK_BYTES
            self._source.map(self._data.address, offset, nbytes, largest)

    def _drop_strays(self) -> None:
        """Unmap what a call that failed or was interrupted had mapped."""
        chunks, absent = self._there
        for first, count in _joined([*absent, (chunks, self._geometry.chunks - chunks)]):
            for offset, nbytes in self._handles(first, count):
                self._source.unmap(self._data.address, offset, nbytes)

    def _handles(self, first: int, count: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the handles that lie inside some chunks."""
        begin = self._front + first * CHUNK_BYTES
        return self._source.parts(self._data.address, begin, count * CHUNK_BYTES)

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
        if words * 8 > before:
            # Half as much again when the heap grows, so that most steps need nothing here.
            ahead = min(words * 4, MOST_AHEAD) if before else 0
            whole = -(-segment.nbytes // unit) * unit
            after = min(-(-(words * 8 + ahead) // unit) * unit, whole)
            # (More than is noted if a call was interrupted.)
            mapped = before + sum(
                nbytes for _, nbytes in self._source.parts(segment.address, before, whole - before)
            )
            if after > mapped:
                self._source.map(segment.address, mapped, after - mapped, LARGEST_PIECE)
            after = max(after, mapped)
            # (What is published is copied later, on the same stream.)
            self._clear(segment.address + before, min(after, segment.nbytes) - before)
            self._mapped[id(segment)] = after

    # Copies ---------------------------------------------------------------------------------------

    def _copy(self, copies: list[tuple[Any, ...]], done: list[Any] | None = None) -> None:
        """Make those copies of which ``done`` has no result yet.

        In one call into C, which also enters the results: no Ctrl-C comes between a copy and its
        result.
        """
        results = [] if done is None else done
        if self._stream is None:
            results.extend(starmap(ctypes.memmove, copies[len(results) :]))
        else:
            results.extend(starmap(cudart.runtime().cudaMemcpyAsync, copies[len(results) :]))
            for (status,) in results:
                cudart.check(status, "cudaMemcpyAsync")

    def _copy_of(self, first: int, words: torch.Tensor) -> tuple[Any, ...]:
        """The arguments of a copy to the word ``first`` of the state."""
        return self._copy_to(self._control.address + first * 8, words, len(words) * 8)

    def _copy_to(self, address: int, words: torch.Tensor, nbytes: int) -> tuple[Any, ...]:
        if self._stream is None:
            return address, words.data_ptr(), nbytes
        kind = cudart.runtime().cudaMemcpyKind.cudaMemcpyHostToDevice
        return address, words.data_ptr(), nbytes, kind, self._stream

    def _clear(self, address: int, nbytes: int) -> None:
        step = len(self._zeros) * 8
        self._copy(
            [
                self._copy_to(address + at, self._zeros, min(step, nbytes - at))
                for at in range(0, nbytes, step)
            ]
        )

    def _reset_hints(self) -> None:
        """Let programs look for pages from the front of the heap on."""
        step, copies = layout.HINT_STRIDE.value, layout.HINT_COPIES.value
        first = layout.HINTS.value
        if self._stream is None:
            hints = range(first, first + copies * step, step)
            self._copy([self._copy_of(at, self._zeros[:1]) for at in hints])
        else:
            runtime = cudart.runtime()
            (status,) = runtime.cudaMemcpy2DAsync(
                self._control.address + first * 8, step * 8, self._zeros.data_ptr(), 8, 8, copies,
                runtime.cudaMemcpyKind.cudaMemcpyHostToDevice, self._stream,
            )  # fmt: skip
            cudart.check(status, "cudaMemcpy2DAsync")

    def _synchronise(self) -> None:
        if self._stream is not None:
            (status,) = cudart.runtime().cudaStreamSynchronize(self._stream)
            cudart.check(status, "waiting for the copies of a heap that grows")

    def _current(self) -> AbstractContextManager[object]:
        """In this context the driver's calls have a device, also in a thread that had none."""
        return nullcontext() if self._stream is None else cudart.current(self._device)

    # Shrinking ------------------------------------------------------------------------------------

    def give_back(self, take: Callable[[list[int], list[int], torch.Tensor], None]) -> int:
        """Unmap pieces whose chunks are all free, but those that a heap was made with; returns the
        bytes.

        ``take(firsts, counts, taken)`` takes the chunks of a piece out of use if all their pages
        are free, stores 1 for each piece where it did, on the current stream, and waits for it.

        Raises
        ------
        InvalidArgument
            If the heap is closed.
        DevallocError
            If the device refuses to unmap a piece. This one and those after it stay.
        """
        with self.shrinking, self._current():
            with self.lock:
                self.settle()
                self._drop_strays()
                pieces = [
                    ((offset - self._front) // CHUNK_BYTES, nbytes // CHUNK_BYTES)
                    for offset, nbytes in self._handles(self._kept, self.chunks - self._kept)
                ]
            if not pieces:
                return 0
            taken = torch.zeros(len(pieces), dtype=torch.int64, device=self._device)
            stream = None
            if self._stream is not None:
                stream = torch.cuda.current_stream(self._device)
            self._taking = pieces, taken, stream
            try:
                take([first for first, _ in pieces], [count for _, count in pieces], taken)
            finally:
                given = self._unmap_taken()
            return given

    def settle(self) -> None:
        """Bring what was interrupted to its end; the caller has both locks. Raises InvalidArgument
        if the heap is closed."""
        self._require_open()
        with self._current():
            # (After a fork no source can be asked.)
            if self.is_ours:
                self._unmap_taken()
            self._publish()

    def _unmap_taken(self) -> int:
        """Unmap the pieces that were taken; make those free again that the device does not unmap.
        Returns the bytes."""
        if self._taking is None:
            return 0
        pieces, taken, stream = self._taking
        if stream is not None:
            stream.synchronize()
        ours = [piece for piece, won in zip(pieces, taken.tolist(), strict=True) if won]
        with self.lock:
            try:
                for piece in ours:
                    # (If this was interrupted, some are not there any more.)
                    for offset, nbytes in self._handles(*piece):
                        self._source.unmap(self._data.address, offset, nbytes, keep=False)
            finally:
                left = [piece for piece in ours if self._handles(*piece)]
                gone = [piece for piece in ours if piece not in left]
                self._publish()
                chunks, absent = self._there
                there, copies = (chunks, _joined([*absent, *gone])), self._free(left)
                self._there, self._owed, self._taking = there, (copies, []), None
                self._publish()
        return sum(count for _, count in gone) * CHUNK_BYTES

    # Forks ----------------------------------------------------------------------------------------

    def begin_in_child(self) -> None:
        """Have locks that no thread holds, and let no program wait for an answer."""
        self.lock, self.shrinking = threading.RLock(), threading.RLock()
        # (CUDA is not used after a fork.)
        if self.last_answer & 1 and not self.ended and self._stream is None:
            self.answer(more=False)


_GROWTHS: weakref.WeakSet[Growth] = weakref.WeakSet()


def _begin_in_child() -> None:
    for growth in _GROWTHS:
        growth.begin_in_child()


os.register_at_fork(after_in_child=_begin_in_child)


def own_stream(owner: object, device: torch.device) -> Any:
    """A stream for no other use, by the CUDA runtime; destroyed when ``owner`` is gone."""
    with cudart.current(device) as runtime:
        status, stream = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
        cudart.check(status, "making the stream of a heap that grows")
    weakref.finalize(owner, _destroy, device, stream).atexit = False
    return stream


def _destroy(device: torch.device, stream: Any) -> None:
    with cudart.current(device) as runtime:
        (status,) = runtime.cudaStreamDestroy(stream)
        cudart.check_freed(status, "destroying the stream of a heap that grows")


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
