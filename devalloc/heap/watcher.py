"""Growing heaps by themselves: kernels ring a bell, and a thread of the host answers.

One thread serves all heaps of the process that were made with ``grow="auto"``. It looks at their
bells, a word each in memory that kernels and the host reach, every PAUSE_S seconds. It ends when no
such heap is left, and at exit; a process that is forked has none, and its heaps are refused. A heap
that another thread grows or trims at the moment is left for the next time.

A heap is doubled, or grown by LEAST_BYTES or by what is asked for if that is more. If the device
has less, half of that is tried, and so on. The answer says whether asking again makes sense.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref

import torch

from devalloc.common.cleanup import call_for_finalizers
from devalloc.errors import OutOfMemory
from devalloc.heap.growth import CHUNK_BYTES, Growth
from devalloc.sizes import PAGE_BYTES
from devalloc.sources import cudart

PAUSE_S = 0.0005
LEAST_BYTES = 32 << 20
"""Each step stops the programs that need it for a millisecond or two: small heaps take few."""
RETRY_S = 0.1
"""How long after the device had no memory kernels may ask for more again."""


class Bell:
    """What one heap's kernels ask for, and the answers to it."""

    def __init__(self, growth: Growth, device: torch.device) -> None:
        pinned = device.type == "cuda"
        # (Not kept alive: the thread would give the memory of a heap that ends back, and to wait
        # for the device then would hold up the other heaps.)
        self._growth = weakref.ref(growth)
        self.word = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.address = self.word.data_ptr()
        self.device = device
        self.ended = False
        self._rung = ctypes.c_int64.from_address(self.address)
        self._attended = 0
        self._refused_at: float | None = None

    @property
    def growth(self) -> Growth:
        growth = self._growth()
        assert growth is not None
        return growth

    @property
    def is_over(self) -> bool:
        return self.ended or self._growth() is None

    def attend(self) -> None:
        """Answer if a kernel has asked; the next time, if the heap is in use by another thread."""
        # (Both are read once: kernels and other threads change them.)
        word, refused_at = self._rung.value, self._refused_at
        again = refused_at is not None and time.monotonic() - refused_at > RETRY_S
        if word == self._attended and not again:
            return
        growth = self._growth()
        # (To wait, perhaps for a long step of the user's, would hold up the other heaps.)
        if growth is None or not growth.lock.acquire(blocking=False):
            return
        try:
            if self.ended:
                return
            if self.device.type == "cuda":
                _allow_captures()
            # The word stays: to clear it could clear what was written since. It is older than the
            # next answer, and if there can be none, trying again helps no program.
            self._attended = word
            if again:
                self.welcome()
            if word >> 32 == growth.last_answer:
                self._grow((word & 0xFFFFFFFF) * PAGE_BYTES)
        finally:
            growth.lock.release()

    def first_answer(self) -> int:
        """What kernels of a heap without blocks find as the last answer."""
        self._refused_at = None
        more = self.growth.capacity < self.growth.limit
        return self.growth.next_answer(more)

    def welcome(self) -> None:
        """Let kernels ask (again), if the heap is below its limit."""
        self._refused_at = None
        self.growth.answer(more=self.growth.capacity < self.growth.limit)

    def _grow(self, nbytes: int) -> None:
        room = self.growth.limit - self.growth.capacity
        least = min(max(nbytes, CHUNK_BYTES), room)
        wanted = min(max(nbytes, self.growth.capacity, LEAST_BYTES), room)
        grown = False
        try:
            while wanted > 0 and not grown:
                try:
                    self.growth.grow(wanted, tell=True)
                    grown = True
                except OutOfMemory:
                    wanted = max(wanted // 2, least) if wanted > least else 0
        finally:
            # (Programs wait for an answer after any other error, too.)
            if not grown:
                if room > 0:
                    self._refused_at = time.monotonic()
                self.growth.answer(more=False)

    def end(self) -> None:
        """Answer no more; waits for an answer that is under way."""
        self.ended = True
        if self.growth.is_ours:
            with self.growth.lock:
                pass


class Watcher:
    """The thread, and the bells that it looks at."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bells: list[Bell] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def add(self, bell: Bell) -> None:
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                thread = threading.Thread(
                    target=self._serve, name="devalloc heaps that grow", daemon=True
                )
                thread.start()  # may fail: a process has only so many threads
                self._thread = thread
            self._bells.append(bell)

    @property
    def running(self) -> bool:
        return self._thread is not None

    def end(self) -> None:
        """Stop for good, and wait for what is under way."""
        with self._lock:
            self._stop.set()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _serve(self) -> None:
        this = threading.current_thread()
        while not self._stop.wait(PAUSE_S):
            # (No error ends the thread, which other heaps need, too.)
            call_for_finalizers(Watcher._attend_all, (self,))
            if self._thread is not this:
                return

    def _attend_all(self) -> None:
        """Answer every bell; without any, the thread is not needed any more."""
        with self._lock:
            self._bells = [bell for bell in self._bells if not bell.is_over]
            bells = tuple(self._bells)
            if not bells:
                self._thread = None
        call_for_finalizers(Bell.attend, bells)


def _allow_captures() -> None:
    """Let this thread map memory while another one captures a graph."""
    runtime = cudart.runtime()
    relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    runtime.cudaThreadExchangeStreamCaptureMode(relaxed)


watcher = Watcher()


def _begin_anew() -> None:
    global watcher
    watcher = Watcher()


def watch(bell: Bell) -> None:
    """Answer a bell from now on, until it ends or its heap does."""
    watcher.add(bell)


atexit.register(lambda: watcher.end())
os.register_at_fork(after_in_child=_begin_anew)
