"""Growing and trimming that is interrupted, refused, or overtaken by another thread or a fork."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from devalloc import Heap, InvalidArgument
from devalloc.errors import DevallocError
from devalloc.heap import geometry as heap_geometry
from devalloc.heap import growth as growth_module
from devalloc.heap.geometry import CHUNK_PAGES, Geometry, Present, initialise
from devalloc.heap.growth import CHUNK_BYTES, Growth
from devalloc.kernels import layout, upkeep
from devalloc.sources import Segment, VirtualSource, cudart
from devalloc.sources.virtual_calls import HostPages
from tests.conftest import ON_GPU
from tests.sources.doubles import FakeRuntime, fake_runtime
from tests.support import int64

pytestmark = pytest.mark.skipif(ON_GPU, reason="the double of the driver is on the CPU")

MIB = 1 << 20
CHUNK = CHUNK_BYTES
CPU = torch.device("cpu")


class DirtyPages(HostPages):
    """Memory that is mapped has any contents. Unmapping may be refused, and creating may wait."""

    refuses = 0
    """How many calls of `unmap` succeed before one is refused; 0: none is."""
    entered: threading.Event | None = None
    go_on: threading.Event | None = None

    def create(self, nbytes: int):  # type: ignore[no-untyped-def]
        if self.entered is not None and self.go_on is not None:
            self.entered.set()
            assert self.go_on.wait(20)
        return super().create(nbytes)

    def allow(self, address: int, nbytes: int) -> None:
        super().allow(address, nbytes)
        # (Less of large pieces, which hold data, to save time.)
        ctypes.memset(address, 0xAB, nbytes if nbytes < CHUNK else mmap.PAGESIZE)

    def unmap(self, address: int, nbytes: int) -> None:
        if self.refuses:
            self.refuses -= 1
            if not self.refuses:
                raise DevallocError("cuMemUnmap failed: injected")
        super().unmap(address, nbytes)


# Ctrl-C -------------------------------------------------------------------------------------------


class Interrupted:
    """Raises KeyboardInterrupt at the n-th line that is run of growth.py."""

    def __init__(self, n: int) -> None:
        self.left = n
        self.where = 0

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = frame.f_lineno
                raise KeyboardInterrupt
        return self._line

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line if frame.f_code.co_filename == growth_module.__file__ else None

    def __call__(self, action: Callable[[], object]) -> bool:
        """Whether it happened."""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


class Bare:
    """What grows, without a heap; programs are played that take whole chunks."""

    def __init__(self) -> None:
        self.source = VirtualSource(CPU, DirtyPages(granularity=1 << 16))
        self.geometry = Geometry.of(16 * CHUNK_PAGES, stripes=1, ring=16, magazines=32, grows=True)
        data = Segment(self.source, 16 * CHUNK, mapped=False)
        self.data = data
        self.control = Segment(self.source, self.geometry.words * 8, keeps=(data,), mapped=False)
        self.growth = Growth(data, self.control, 0, self.geometry, None)
        self.growth.map_first(1)
        self.handle = self.control.view().view(torch.int64)
        present = Present(self.growth.pages, self.growth.present())
        initialise(self.handle, self.geometry, data.address, present)
        self.row = self.handle[self.geometry.rows :][: self.geometry.chunks]
        self.used: set[int] = set()

    def use(self, chunk: int) -> None:
        """As a program that takes all pages of a chunk."""
        if self.row[chunk] == -1:
            self.row[chunk] = 0
            self.used.add(chunk)

    def end_use(self, chunk: int) -> None:
        if chunk in self.used:
            self.used.discard(chunk)
            self.row[chunk] = -1

    def trim(self) -> int:
        def take(firsts: list[int], counts: list[int], taken: torch.Tensor) -> None:
            for at, (first, count) in enumerate(zip(firsts, counts, strict=True)):
                if (self.row[first : first + count] == -1).all():
                    self.row[first : first + count] = 0
                    taken[at] = 1

        return self.growth.give_back(take)

    def check(self) -> None:
        """All chunks that there are, and only these, are free or used; only these are mapped."""
        with self.growth.shrinking, self.growth.lock:
            self.growth.settle()
        present = {
            chunk for first, count in self.growth.present() for chunk in range(first, first + count)
        }
        assert self.used <= present
        assert self.growth.capacity == len(present) * CHUNK
        for chunk, word in enumerate(self.row.tolist()):
            assert word == (-1 if chunk in present - self.used else 0), chunk
        first = layout.EXTENT.value
        extents = self.handle[first : first + layout.EXTENT_COPIES.value]
        assert extents.tolist() == [self.growth.pages] * len(extents)
        records = self.handle[self.geometry.records : self.geometry.words_of(self.growth.pages)]
        assert not records.any(), "records are cleared"

    def check_mapped(self) -> None:
        """What an interrupted call had mapped is gone after the next."""
        self.growth.grow(0)
        nbytes = sum(n for _, n in self.source.parts(self.data.address, 0, 16 * CHUNK))
        assert nbytes == self.growth.capacity


@pytest.mark.parametrize("name", ["grow", "trim"])
def test_a_call_that_is_interrupted_has_happened_or_not(name: str) -> None:
    """Wherever it is, and although programs use at once what they see."""
    for n in range(1, 2000):
        bare = Bare()
        for _ in range(5):
            bare.growth.grow(CHUNK)
        for chunk in (0, 2, 4):
            bare.use(chunk)
        assert bare.trim() == 3 * CHUNK
        bare.end_use(2)
        bare.growth.grow(CHUNK)
        before = bare.growth.capacity
        bare.check()
        # (A trim gives pieces back, each completely or not at all.)
        call, changes = {
            "grow": (partial(bare.growth.grow, 7 * CHUNK), (0, 7)),
            "trim": (bare.trim, (0, -1, -2)),
        }[name]
        interrupted = Interrupted(n)
        happened = interrupted(call)
        if name == "grow":
            for chunk in range(16):
                bare.use(chunk)
        bare.check()
        change = (bare.growth.capacity - before) // CHUNK
        assert change in changes, interrupted.where
        if not happened:
            assert n > 50
            assert change == changes[-1]
            return
        bare.check_mapped()
        bare.check()
        bare.growth.grow(bare.growth.limit - bare.growth.capacity)
        bare.check()
        for chunk in range(16):
            bare.end_use(chunk)
        assert bare.trim() == 15 * CHUNK
        bare.check()
    pytest.fail("it never ended")


def test_calls_that_are_interrupted_again_and_again() -> None:
    choice = random.Random(3)
    bare = Bare()
    count = 0
    for _ in range(1500):
        room = (bare.growth.limit - bare.growth.capacity) // CHUNK
        wanted = choice.randint(0, min(room, 9)) * CHUNK
        call = choice.choice([partial(bare.growth.grow, wanted), bare.trim, bare.check])
        count += Interrupted(int(choice.expovariate(0.02)))(call)
        for _ in range(2):
            choice.choice([bare.use, bare.end_use])(choice.randrange(16))
        if choice.random() < 0.3:
            bare.check()
    assert count > 300
    bare.check()
    bare.check_mapped()


def test_an_interrupted_close_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Heap("1MiB", limit="64MiB", grow="auto") as heap:
        with monkeypatch.context() as patch:
            patch.setattr(heap_geometry, "retire", interrupted)
            with pytest.raises(KeyboardInterrupt):
                heap.close()
        assert not heap.closed
        assert heap.malloc([9 * MIB]).item() != 0, "it still grows by itself"
        heap.check()


# Refused ------------------------------------------------------------------------------------------


def test_pieces_that_are_not_unmapped_stay() -> None:
    pages = DirtyPages()
    with Heap("4MiB", limit="64MiB", grow="auto", source=VirtualSource(CPU, pages)) as heap:
        for _ in range(3):
            heap.grow(CHUNK)
        pages.refuses = 2
        with pytest.raises(DevallocError, match="injected"):
            heap.trim()
        assert heap.capacity == 3 * CHUNK
        heap.audit()
        blocks = heap.malloc([CHUNK] * 3)
        assert (blocks != 0).all()
        assert heap.capacity == 3 * CHUNK
        heap.free(blocks)
        assert heap.grow(CHUNK) == CHUNK
        assert heap.trim() == 3 * CHUNK
        assert heap.capacity == CHUNK
        heap.audit()


# Other threads ------------------------------------------------------------------------------------


@contextmanager
def growing_slowly(pages: DirtyPages, heap: Heap) -> Iterator[tuple[threading.Thread, list[Any]]]:
    """A thread that grows the heap, and waits for the device within the block."""
    results: list[Any] = []

    def grow() -> None:
        try:
            results.append(heap.grow(CHUNK))
        except BaseException as error:
            results.append(error)

    pages.entered, pages.go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=grow)
    thread.start()
    assert pages.entered.wait(20)
    try:
        yield thread, results
    finally:
        pages.go_on.set()
        thread.join()
        pages.entered = pages.go_on = None


def test_a_heap_is_closed_while_it_grows() -> None:
    pages = DirtyPages()
    source = VirtualSource(CPU, pages)
    heap = Heap("4MiB", limit="64MiB", source=source)
    handle, growth = heap.handle, heap._growth
    assert growth is not None
    with growing_slowly(pages, heap) as (thread, results):
        closing = threading.Thread(target=heap.close)
        closing.start()
        time.sleep(0.1)
        assert not heap.closed
    closing.join()
    assert not thread.is_alive()
    assert results == [CHUNK]
    assert heap.closed
    out = int64([1])
    upkeep.malloc_kernel[(1,)](handle, int64([1000]), out, 1, BLOCK=1)
    assert out.item() == 0, "nothing is free in a closed heap"
    # A thread that was about to call:
    for call in (
        partial(growth.grow, 1),
        partial(growth.answer, True),
        partial(growth.give_back, heap._take_chunks),
    ):
        with pytest.raises(InvalidArgument, match="the heap is closed"):
            call()
    del growth, handle, call
    gc.collect()
    assert source.stats().mapped == 0


def test_a_trim_lets_other_threads_grow() -> None:
    """Its kernel may be queued behind one that waits for the heap to grow."""
    with Heap("4MiB", limit="64MiB") as heap:
        heap.grow(8 * MIB)
        growth = heap._growth
        assert growth is not None
        grown: list[int] = []

        def take(firsts: list[int], counts: list[int], taken: torch.Tensor) -> None:
            thread = threading.Thread(target=lambda: grown.append(heap.grow(CHUNK)))
            thread.start()
            thread.join(20)
            assert grown == [CHUNK]
            heap._take_chunks(firsts, counts, taken)

        assert growth.give_back(take) == 2 * CHUNK
        assert heap.capacity == 2 * CHUNK
        heap.audit()


# Forks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stats", "reset", "audit", "close"])
def test_a_process_is_forked_while_a_heap_grows(name: str) -> None:
    pages = DirtyPages()
    with Heap("4MiB", limit="64MiB", source=VirtualSource(CPU, pages)) as heap:
        with growing_slowly(pages, heap):
            child = os.fork()
            if child == 0:
                try:
                    getattr(heap, name)()
                    os._exit(7)
                finally:
                    os._exit(1)
            deadline = time.monotonic() + 20
            while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(child, 9)
                time.sleep(0.01)
            assert os.waitstatus_to_exitcode(ended[1]) == 7
        assert heap.capacity == 2 * CHUNK
        heap.audit()


def test_no_program_of_a_forked_process_waits_for_an_answer() -> None:
    with Heap("1MiB", limit="64MiB", grow="auto") as heap:
        child = os.fork()
        if child == 0:
            try:
                for _ in range(2):
                    assert heap.malloc([9 * MIB]).item() == 0
                    assert heap.handle[layout.ANSWERS.value] & 1 == 0
                    heap.reset()
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert heap.malloc([9 * MIB]).item() != 0


# Streams ------------------------------------------------------------------------------------------


def test_a_growing_heap_has_a_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("cuda.bindings.runtime")
    runtime = fake_runtime(monkeypatch)

    class Owner:
        pass

    owner = Owner()
    assert growth_module.own_stream(owner, torch.device("cuda", 0)) == "own"
    assert runtime.calls == [("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)]
    del owner
    assert runtime.calls[1:] == [("cudaStreamDestroy", "own")]
    runtime.fail["cudaStreamCreateWithFlags"] = runtime.cudaError_t.cudaErrorMemoryAllocation
    with pytest.raises(DevallocError, match="making the stream of a heap that grows"):
        growth_module.own_stream(Owner(), torch.device("cuda", 0))


class Copying(FakeRuntime):
    """Notes copies and makes them, in host memory."""

    def cudaMemcpyAsync(self, to: int, start: int, n: int, kind: Any, stream: Any) -> tuple[Any]:
        ctypes.memmove(to, start, n)
        return super().cudaMemcpyAsync(to, start, n, kind, stream)

    def cudaMemcpy2DAsync(
        self, to: int, step: int, start: int, _: int, width: int, rows: int, kind: Any, stream: Any
    ) -> tuple[Any]:
        for row in range(rows):
            ctypes.memmove(to + row * step, start + row * width, width)
        return (self._done("cudaMemcpy2DAsync", to, stream),)


def test_on_a_device_the_heap_grows_by_copies_on_that_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In order: records are cleared, EXTENT, words of the row, hints; and then it waits."""
    pytest.importorskip("cuda.bindings.runtime")
    runtime = Copying()
    monkeypatch.setattr(cudart, "runtime", lambda: runtime)
    monkeypatch.setattr(cudart, "current", runtime.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=list))
    bare = Bare()
    bare.growth._stream = "own"
    bare.growth.grow(3 * CHUNK)
    *cleared, extent, row, hints, wait = runtime.calls
    assert all(call[1] >= bare.control.address + bare.geometry.records * 8 for call in cleared)
    assert extent[1] == bare.control.address + layout.EXTENT.value * 8
    assert row[1] == bare.row.data_ptr() + 8
    assert hints[1] == bare.control.address + layout.HINTS.value * 8
    assert wait[0] == "cudaStreamSynchronize"
    assert {call[-1] for call in runtime.calls} == {"own"}
    bare.check()
    assert bare.trim() == 3 * CHUNK
    bare.check()
