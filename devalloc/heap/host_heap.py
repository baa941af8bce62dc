"""`Heap`: memory that kernels allocate from."""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import cast

import torch

from devalloc.common.arguments import index_or_list, require_dtype, sizes_of
from devalloc.common.owner import Owner
from devalloc.errors import (
    DevallocError,
    InvalidArgument,
    InvalidFreeError,
    LeakWarning,
    OutOfMemory,
)
from devalloc.heap import geometry as heap_geometry
from devalloc.heap.compiled import mark_static, refuse
from devalloc.heap.debug_table import DebugTable, Tags, largest_request
from devalloc.heap.devices import INTERPRETED, memory_of, on_device, resolve_device
from devalloc.heap.geometry import CHUNK_PAGES, MAX_PAGES, Geometry, Present
from devalloc.heap.growth import CHUNK_BYTES, CLOSED, Growth, require_growing_source
from devalloc.heap.heap_audit import audit
from devalloc.heap.jagged import JaggedMethods
from devalloc.heap.leaks import LeakReport
from devalloc.heap.recorded_errors import KINDS, ErrorRecords, Fault
from devalloc.heap.state import Snapshot, State, Stats, describe
from devalloc.heap.watcher import Bell, watch
from devalloc.kernels import upkeep
from devalloc.kernels.debug import debug_upkeep
from devalloc.sizes import PAGE_BYTES, format_size, parse_size
from devalloc.sources import CudaSource, HostSource, Segment, Source
from devalloc.sources.names import NAMES, named_source
from devalloc.sources.source import bytes_taken

__all__ = ["Heap", "Snapshot", "Stats"]

# Blocks are wide in the interpreter, where a program costs the same at any width.
_BLOCK = 1024 if INTERPRETED else 128


def _sizes_of(
    capacity: int | str, limit: int | str | None, grows: bool, device: torch.device
) -> tuple[int, int]:
    """The pages that a heap may have, and the chunks with which one that grows begins."""
    least = parse_size(capacity)
    if least < PAGE_BYTES:
        raise InvalidArgument(
            f"a heap of {capacity!r} cannot hold one page of {format_size(PAGE_BYTES)}"
        )
    if limit is not None:
        most = parse_size(limit)
        if most < least:
            raise InvalidArgument(
                f"a limit of {format_size(most)} is below the capacity, {format_size(least)}"
            )
    else:
        most = max(least, min(memory_of(device), MAX_PAGES * PAGE_BYTES)) if grows else least
    pages = most // PAGE_BYTES
    if grows:
        pages = -(-most // CHUNK_BYTES) * CHUNK_PAGES
    if pages > MAX_PAGES:
        raise InvalidArgument(
            f"a heap holds at most {format_size(MAX_PAGES * PAGE_BYTES)}, not {format_size(most)}"
        )
    return pages, -(-least // CHUNK_BYTES)


class Heap(JaggedMethods, Owner):
    """Device memory that kernels subdivide with ``malloc`` and ``free``.

    Parameters
    ----------
    capacity : int or str
        Bytes, or text such as ``"256MiB"``; rounded down to whole pages of 64 KiB. The heap's own
        state is stored elsewhere and takes 0.8 to 1.2 % more from 4 MiB on, 2 % for 1 MiB, and
        8 to 17 KiB for a heap of less.
    device : torch.device, str or int, optional
        A CUDA device, or the CPU under Triton's interpreter. Default: the current CUDA device,
        or the CPU when interpreting.
    source : str or Source, optional
        Where the memory comes from: ``"cuda"``, ``"virtual"``, ``"async"``, ``"host"``, or a source
        object. Default: cudaMalloc, or host memory when interpreting.
    debug : bool or "full"
        Find overflows, uses after free, double frees and leaks, and say whose block it was: see
        docs/guide/debugging.md. The first 64 bytes of a freed block are watched, with "full"
        all of them. A debug heap takes a quarter of the capacity more. Each block takes 32
        bytes more (a power of two up to 32 KiB takes twice its size), and at least 64 bytes.
    limit : int or str, optional
        Bytes, or text, up to which the heap may grow; it and the capacity are rounded up to whole
        chunks of 4 MiB. Only addresses are taken for what is not there yet, and 0.02 % of state.
        Needs a source that maps memory later: ``"virtual"``, the default with a limit.
    grow : str, optional
        ``"auto"``: a thread of the host grows the heap when a malloc finds nothing, which waits for
        it for 0.3 s at most. It doubles the heap, or adds 32 MiB or what is asked for if that is
        more. The default limit is then the memory of the device. See docs/guide/growing.md, also
        for what keeps the host from answering: a ``.cpu()`` behind the kernel, for instance.

    Raises
    ------
    InvalidArgument
        If the capacity is under one page or over 512 GiB, the limit is under the capacity, the
        device cannot run the kernels, or ``source`` is not a source that has memory there.
    OutOfMemory
        If the source has not enough memory.

    Notes
    -----
    Use it in a ``with`` block: at the end of the block recorded errors are raised and the heap is
    closed. Making a heap does not synchronise beyond what the source does: the heap is ready for
    the current stream, and for other streams once they wait for that one. Methods that
    read the heap (`check`, `faults`, `leaks`, `stats`, `audit`, `snapshot`) wait for the device
    first, and so do `reset`, `clear_errors` and `close`. A heap that is dropped without `close`
    gives its memory back when its last handle and its last tensor are gone. It belongs to one
    process, and can be neither copied nor pickled.
    """

    @torch.inference_mode(False)  # or no code could write the handle outside of inference mode
    def __init__(
        self,
        capacity: int | str,
        device: torch.device | str | int | None = None,
        source: str | Source | None = None,
        debug: bool | str = False,
        limit: int | str | None = None,
        grow: str | None = None,
    ) -> None:
        if debug not in (True, False, "full"):
            raise InvalidArgument(f'debug is True, False or "full", not {debug!r}')
        if grow not in (None, "auto"):
            raise InvalidArgument(f'grow is "auto" or None, not {grow!r}')
        grows = grow is not None or limit is not None
        self.device = resolve_device(device)
        source = self._source_of(source, grows)
        pages, chunks = _sizes_of(capacity, limit, grows, self.device)
        self._geometry = Geometry.of(pages, grows=grows)
        self._failures_before = 0
        # (In a debug heap even the first block has a guard in front of it, and wrong pointers lead
        # there: see kernels/debug/pointers.py. In one that grows, chunks begin where pieces may.)
        front = 0
        if debug:
            front = max(PAGE_BYTES, source.granularity) if grows else PAGE_BYTES
        nbytes = front + pages * PAGE_BYTES
        data = Segment(source, nbytes, alignment=PAGE_BYTES, mapped=not grows)
        self.base = data.address + front
        self._tags = Tags()
        self._debug = None
        if debug:
            self._debug = DebugTable(source, pages, self.base, debug == "full", grows)
        # A kernel needs only the handle to reach all of this.
        keeps = (data,) if self._debug is None else (data, self._debug.segment)
        self._control = Segment(source, self._geometry.words * 8, keeps=keeps, mapped=not grows)
        # An arena's memory may be asleep for a while.
        self._refusal_at = getattr(source, "refusal_at", None)
        self._data: Segment | None = data
        self._growth: Growth | None = None
        self._bell: Bell | None = None
        self._capacity = pages * PAGE_BYTES
        if grows:
            self._growth = Growth(data, self._control, front, self._geometry, self._debug)
            self._growth.map_first(chunks)
            if grow == "auto":
                self._bell = Bell(self._growth, self.device)
                self._control.keeps = (*keeps, self._bell.word)
        self._handle = self._control.view().view(torch.int64)
        # What kernels get. Its type marks a debug heap.
        self._argument = self._handle if self._debug is None else self._handle.view(torch.uint64)
        mark_static(self._argument)
        self._initialise()
        if self._bell is not None:
            watch(self._bell)

    def _source_of(self, source: object, grows: bool) -> Source:
        if source is None and grows:
            source = "virtual"
        if source is None:
            return HostSource() if self.device.type == "cpu" else CudaSource(self.device)
        if isinstance(source, str):
            source = named_source(source, self.device)
        elif isinstance(source, type) or not callable(getattr(source, "allocate", None)):
            raise InvalidArgument(
                f"a source is one of {NAMES}, or an object such as "
                f"devalloc.sources.HostSource(), not {source!r}"
            )
        if grows:
            require_growing_source(source)
        return cast("Source", source)

    def _initialise(self) -> None:
        present = None
        if self._growth is not None:
            bell, answers = 0, 0
            if self._bell is not None:
                bell, answers = self._bell.address, self._bell.first_answer()
            present = Present(self._growth.pages, self._growth.present(), bell, answers)
        heap_geometry.initialise(self._handle, self._geometry, self.base, present)
        if self._debug is not None:
            self._debug.attach(self._handle)
        if self._growth is not None:
            self._growth.follow()

    @property
    def capacity(self) -> int:
        """Bytes that kernels can allocate from now."""
        return self._capacity if self._growth is None else self._growth.capacity

    @property
    def limit(self) -> int:
        """Bytes up to which the heap may grow; the capacity of one that cannot."""
        return self._geometry.pages * PAGE_BYTES

    def grow(self, nbytes: int | str) -> int:
        """Make the heap larger while kernels allocate from it; nothing moves.

        Kernels that are running may use the new memory at once, also those of a replayed graph.

        Parameters
        ----------
        nbytes : int or str
            Bytes to add, at least; whole chunks of 4 MiB are. First those that `trim` gave back.

        Returns
        -------
        int
            By how many bytes the capacity has grown.

        Raises
        ------
        InvalidArgument
            If the heap has no limit or would exceed it, in the capture of a graph, and in a
            process that was forked. Nothing has changed then.
        OutOfMemory
            If the device has not so much memory; nothing has changed then.

        Notes
        -----
        Waits for a stream of its own, with small copies, and not for the device, unless CUDA holds
        these up: see docs/guide/growing.md. May be called from any thread.
        """
        # (Before: another thread may close the heap.)
        growth = self._growth
        self._require_open()
        if growth is None:
            raise InvalidArgument("the heap cannot grow: it was made without a limit")
        return growth.grow(parse_size(nbytes))

    # Life -------------------------------------------------------------------------------------

    @property
    def handle(self) -> torch.Tensor:
        """The argument to pass to kernels: an int64 tensor on the heap's device.

        A debug heap's is a uint64 tensor: a kernel knows a debug heap by this type.

        Raises
        ------
        InvalidArgument
            If the heap is closed, or if the current device, on which Triton launches kernels, is
            not the heap's.
        """
        refusal = self._refusal()
        if refusal:
            # (torch.compile traces this, and the error is for when the code runs.)
            if torch.compiler.is_compiling():
                refuse(self._argument, refusal)
            else:
                raise InvalidArgument(refusal)
        return self._argument

    def _refusal(self) -> str:
        """Why kernels cannot be launched with the handle now; empty if they can."""
        if self.closed:
            return CLOSED
        if refusal := self._asleep():
            return refusal
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            return (
                f"the heap is on {self.device}, but kernels are launched on the current device "
                f"cuda:{torch.cuda.current_device()}; launch inside torch.cuda.device("
                f"{self.device.index})"
            )
        return ""

    def _asleep(self) -> str:
        """Why the heap's memory cannot be used now; empty if it can."""
        # (torch.compile could not trace the arena, and compiled code does not ask again anyway.)
        if self._refusal_at is None or torch.compiler.is_compiling():
            return ""
        refusal = self._refusal_at(self._control.address)
        return f"the heap cannot be used: {refusal}" if refusal else ""

    @property
    def closed(self) -> bool:
        return self._data is None

    def close(self) -> None:
        """Give the memory back (once no tensor made by `tensor` refers to it).

        Waits for the device. Closing twice is harmless. A debug heap with live blocks issues a
        `LeakWarning` that contains its leak report. In a kernel that is launched later with an
        old `handle`, malloc returns 0 and every free is a wrong free.

        A heap in a region of an arena that is asleep cannot be closed: InvalidArgument. Dropping
        it gives its memory back.
        """
        self._close(warn=True)

    def _close(self, warn: bool) -> None:
        if self._data is not None:
            self._require_open()
            self._synchronise()
            leaks = self.leaks() if warn and self._debug is not None else None
            nothing = torch.empty(0, dtype=torch.int64, device="cpu")
            keeps = () if self._debug is None else (self._debug.segment,)
            with self._alone():
                if self.closed:  # by another thread
                    return
                # (Also for copies of an interrupted call.)
                self._synchronise()
                heap_geometry.retire(self._handle, self._geometry, self._state_pages)
                self._synchronise()
                self._capacity = self.capacity
                if self._bell is not None:
                    self._bell.end()
                if self._growth is not None:
                    self._growth.ended = True
                self._control.keeps = keeps
                self._data = self._growth = self._bell = self._debug = None
                self._handle = self._argument = nothing
                del self._control
            if leaks:
                warnings.warn(f"{self!r}, with live blocks:\n{leaks}", LeakWarning, stacklevel=3)

    def __enter__(self) -> Heap:
        self._require_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        done = False
        try:
            if not self.closed:
                self._check_at_end(error)
            done = kind is None
        finally:
            if self.closed or not self._asleep():  # or the error is raised, or there is one
                self._close(warn=done)

    def _check_at_end(self, error: BaseException | None) -> None:
        """`check`. If there is an ``error`` already, add what kernels recorded to it as a note,
        because that may be the cause."""
        try:
            self.check()
        except DevallocError as recorded:
            if error is None:
                raise
            if sys.version_info >= (3, 11):
                error.add_note(f"Before that {self!r} had recorded: {recorded}")

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"on {self.device}"
        return f"<devalloc.Heap {format_size(self.capacity)} {state}>"

    def _require_open(self) -> None:
        if self.closed:
            raise InvalidArgument(CLOSED)
        if refusal := self._asleep():
            raise InvalidArgument(refusal)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # Looking ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the first error that kernels recorded, with the counts of all, and clear them.

        Does nothing if kernels have recorded no error. Waits for the device.

        Raises
        ------
        DoubleFree, InvalidFree, OutOfMemory, InvalidArgument, InvalidPointer
            From any heap.
        Overflow, UseAfterFree
            From a debug heap. There these and wrong frees come before the other errors, and the
            message of a wrong free says whose block it was.
        """
        self._require_open()
        self._synchronise()
        counts = self._errors.counts()
        if not any(counts):
            return
        message = ", ".join(
            f"{count} x {name}" for count, (_, name) in zip(counts, KINDS, strict=True) if count
        )
        fault = (self.faults() or [self._errors.unrecorded()])[0]
        details = fault.message
        if fault.kind is OutOfMemory and fault.size <= self.limit:
            state = describe(self.stats())
            details += f" when its kernel ran; now {state}; {self._remedy()}"
        self.clear_errors()
        raise fault.kind(f"{details}. Recorded by kernels since the last check: {message}")

    @property
    def _errors(self) -> ErrorRecords:
        return ErrorRecords(self._handle, self.base, self.limit, self._debug is not None)

    def _remedy(self) -> str:
        if self.capacity == self.limit:
            return "make the heap larger or free sooner"
        if self._bell is None:
            return f"grow the heap, whose limit is {format_size(self.limit)}, or free sooner"
        return (
            "the device had no more memory for the heap to grow, or the host could not answer in "
            "time: it cannot while .cpu() or .tolist() waits for the kernel, so call "
            "torch.cuda.synchronize() first"
        )

    def faults(self) -> list[Fault]:
        """The errors that kernels have recorded since the last `check`.

        These are the first 16 errors. A debug heap gives the first 32 overflows, uses after free
        and wrong frees, followed by the other errors among the first 16. Changes nothing; waits
        for the device.
        """
        self._require_open()
        self._synchronise()
        faults = self._errors.faults()
        if self._debug is not None:
            with on_device(self.device):
                known = self._debug.faults(self._tags)
            faults = known + [at for at in faults if not issubclass(at.kind, InvalidFreeError)]
        return faults

    def leaks(self) -> LeakReport:
        """The live blocks of a debug heap, by tag, with sizes and ages. Waits for the device.

        Ask where nothing should be live: a block that is still in use is listed like one that was
        forgotten.

        Raises
        ------
        InvalidArgument
            If this is not a debug heap, or if it is closed.
        """
        self._require_open()
        if self._debug is None:
            raise InvalidArgument("only a debug heap knows its blocks: use Heap(..., debug=True)")
        self._synchronise()
        with on_device(self.device):
            return self._debug.leaks(self._tags)

    def tag(self, name: str) -> int:
        """The number of an owner's name, to be passed to ``malloc`` in kernels.

        Within one heap a name always has the same number. Messages and leak reports of a debug
        heap show the name; other heaps ignore tags. Numbers from 1 to 255 may be used without a
        name; 0 is no tag.

        Raises
        ------
        InvalidArgument
            For what is not text, and for text that is empty or all digits: reports show numbers
            without a name so.
        """
        if not isinstance(name, str):
            raise InvalidArgument(f"the name of a tag is text, not {name!r}")
        return self._tags.number(name)

    def clear_errors(self) -> None:
        """Forget recorded errors. Waits for the device."""
        self._require_open()
        self._synchronise()
        self._failures_before += self._errors.clear()
        if self._debug is not None:
            self._debug.clear_faults()
        self._synchronise()

    def stats(self) -> Stats:
        """How full the heap is, and how much it was used.

        Retires empty pages first (see `trim`), as a malloc that needs them would, but gives nothing
        back to the device. Waits for the device.
        """
        self._rest()
        stats = self._state().stats(self._failures_before)
        stats = replace(stats, mapped=self._mapped())
        if self._debug is None:
            return stats
        return replace(stats, largest_free=largest_request(stats.largest_free))

    def _mapped(self) -> int:
        if self._growth is not None:
            return self._growth.mapped
        segments = [self._control, self._data, None if self._debug is None else self._debug.segment]
        return sum(bytes_taken(each.source, each.nbytes) for each in segments if each is not None)

    def snapshot(self) -> Snapshot:
        """All pages at this moment, to draw or compare. Retires empty pages first, as `stats` does,
        then waits for the device."""
        self._rest()
        return self._state().snapshot(str(self.device))

    def audit(self) -> None:
        """Check the invariants H1 to H4 of the whole heap. Waits for the device.

        Raises
        ------
        CorruptionError
            Its message names the invariant that does not hold, and where.
        Overflow, UseAfterFree
            In a debug heap, if a guard has changed anywhere: see docs/guide/debugging.md.
        """
        self._require_open()
        audit(self._state())
        self._rest()
        state = self._state()
        audit(state)
        if self._debug is not None:
            with on_device(self.device):
                self._debug.audit(self._handle, state.live_blocks(), self._tags)

    def _state(self) -> State:
        self._synchronise()
        growth = self._growth
        if growth is None:
            return State(self._handle, self._geometry)
        with self._alone():
            growth.settle()
            pages, absent = growth.pages, growth.absent_pages()
            return State(self._handle, self._geometry, pages, absent)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Meanwhile no other thread grows, trims, resets or closes the heap if it has a limit."""
        growth = self._growth
        if growth is None:
            yield
        else:
            with growth.shrinking, growth.lock:
                yield

    @property
    def _state_pages(self) -> int:
        """How many pages have a record."""
        return self._geometry.pages if self._growth is None else self._growth.pages

    # Using ------------------------------------------------------------------------------------

    def malloc(self, sizes: torch.Tensor | Sequence[int] | int, tag: int | str = 0) -> torch.Tensor:
        """Allocate one block per element of ``sizes``, in one launch on the current stream.

        Parameters
        ----------
        sizes : int, sequence of ints, or int64 tensor of any shape on the heap's device
            Bytes of each block. An int is one block, and gives a tensor without dimensions.
        tag : int or str
            The owner of the blocks, for a debug heap: a name, a number from 1 to 255, or a number
            that `tag` returned. 0 is no tag.

        Returns
        -------
        int64 tensor of the same shape
            Addresses; 0 where there was no memory, which is recorded: see `check`. The call does
            not synchronise.
        """
        sizes = self._requests(sizes, "sizes")
        number = self._tags.number(tag)
        addrs = torch.empty_like(sizes)
        if self._debug is None:
            self._launch(upkeep.malloc_kernel, sizes, addrs)
        else:
            self._launch(debug_upkeep.malloc_tagged_kernel, sizes, addrs, tag=number)
        return addrs

    def free(self, addrs: torch.Tensor | Sequence[int] | int) -> None:
        """Free blocks by address (zeros are ignored), in one launch on the current stream.

        Wrong addresses change nothing and are recorded: see `check`. Does not synchronise.
        """
        self._launch(upkeep.free_kernel, self._requests(addrs, "addrs"))

    def usable_size(self, addrs: torch.Tensor | Sequence[int] | int) -> torch.Tensor:
        """Usable bytes of each block, 0 where there is none. One launch; does not synchronise."""
        addrs = self._requests(addrs, "addrs")
        sizes = torch.empty_like(addrs)
        self._launch(upkeep.usable_size_kernel, addrs, sizes)
        return sizes

    @torch.inference_mode(False)  # or no code could write the tensor outside of inference mode
    def tensor(
        self, addr: int | torch.Tensor, shape: int | Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor over one allocation, without a copy. Waits for the current stream.

        The tensor does not own the allocation: free the address when you no longer use the
        tensor. The tensor does keep the heap's memory as a whole from being given back.

        A tensor without elements needs no allocation: any address will do, also the 0 that malloc
        gave for 0 bytes, and the call does not wait.

        Raises
        ------
        InvalidArgument
            If there is no live block at ``addr``, if the block is too small, or if an argument is
            not an address, a shape or a type.
        """
        dims = sizes_of(shape)
        require_dtype(dtype)
        nbytes = math.prod(dims) * dtype.itemsize
        try:
            address = operator.index(addr)
        except TypeError:
            raise InvalidArgument(f"an address is one integer, not {addr!r}") from None
        self._require_open()
        if nbytes == 0:
            return torch.empty(dims, dtype=dtype, device=self.device)
        if address == 0:
            raise InvalidArgument(
                "nothing is allocated at address 0: malloc gave no memory; Heap.check says why"
            )
        usable = int(self.usable_size([address])[0])
        if nbytes > usable:
            raise InvalidArgument(
                f"a {dtype} tensor of shape {dims} has {nbytes} bytes; "
                + (f"the block at {address:#x} has {usable}" if usable else
                   f"nothing is allocated at {address:#x}")
            )  # fmt: skip
        assert self._data is not None
        view = self._data.view(address - self._data.address, nbytes)
        return view.view(dtype).view(dims)

    def reset(self) -> None:
        """Free everything and forget errors and counts. Waits for the device.

        No address from before may be used or freed afterwards.
        """
        self._require_open()
        self._synchronise()
        with self._alone():
            if self._growth is not None:
                self._growth.settle()
            self._initialise()
            # (Growing copies on another stream.)
            self._synchronise()
        self._failures_before = 0

    def trim(self) -> int:
        """Make all free that is not live, and give free memory of a heap that grows back to the
        device; returns the bytes. The capacity that the heap was made with stays.

        Never needed for correctness: a malloc that finds no memory takes what rests, too. Memory is
        given back in the pieces in which the heap grew (4 MiB for steps below 32 MiB, a quarter of
        larger ones), where all of a piece is free, and never if a running kernel could be given
        it. A debug heap gives none back: it watches what was freed.

        Two launches on the current stream, and no wait, in a heap without a limit. With a limit
        three launches, after which the call waits for the current stream.

        Raises
        ------
        InvalidArgument
            In the capture of a graph and in a process that was forked, if the heap has a limit.
        """
        growth, bell = self._growth, self._bell
        self._require_open()
        if growth is not None:
            growth.require_allowed()
        self._rest()
        if growth is None or self._debug is not None:
            return 0
        before = growth.capacity
        try:
            return growth.give_back(self._take_chunks)
        finally:
            with growth.lock:
                if bell is not None and growth.capacity < before and not growth.ended:
                    bell.welcome()

    def _rest(self) -> None:
        """Make everything free that is not live: slots in magazines, then pages without blocks."""
        self._require_open()
        programs = self._geometry.rest_programs(self._state_pages)
        with on_device(self.device):
            for _ in range(2):  # the second retires pages whose last slots lay in magazines
                upkeep.rest_kernel[(programs,)](self._handle, num_warps=1)

    def _take_chunks(self, firsts: list[int], counts: list[int], taken: torch.Tensor) -> None:
        first, count = (self._upload(torch.tensor(each, device="cpu")) for each in (firsts, counts))
        with on_device(self.device):
            upkeep.take_chunks_kernel[(len(firsts),)](
                self._handle, first, count, taken, num_warps=1
            )
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _requests(self, values: torch.Tensor | Sequence[int] | int, name: str) -> torch.Tensor:
        self._require_open()
        if not isinstance(values, torch.Tensor):
            try:
                numbers = index_or_list(values)
                return self._upload(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise InvalidArgument(
                    f"{name} must be a 64-bit integer, a list of them, or an int64 tensor: {error}"
                ) from error
        if values.dtype != torch.int64 or values.device != self.device:
            raise InvalidArgument(
                f"{name} must be an int64 tensor on {self.device}, not {values.dtype} on "
                f"{values.device}"
            )
        return values.contiguous()

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the CPU on the heap's device, for the current stream, without waiting."""
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _launch(self, kernel: object, *tensors: torch.Tensor, **more: int) -> None:
        n = tensors[0].numel()
        if n:
            grid = ((n + _BLOCK - 1) // _BLOCK,)
            with on_device(self.device):
                kernel[grid](  # type: ignore[index]
                    self._argument, *tensors, n, **more, BLOCK=_BLOCK, num_warps=1
                )
