"""The thread of the host that answers heaps that grow by themselves."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from devalloc import DevallocError, Heap
from devalloc.heap import watcher
from devalloc.heap.growth import CHUNK_BYTES as CHUNK
from devalloc.sources import VirtualSource
from devalloc.sources.virtual_calls import HostPages
from tests.conftest import ON_GPU
from tests.support import until

MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture
def heap() -> Iterator[Heap]:
    with Heap("4MiB", limit="64MiB") as made:
        yield made


class Word:
    """A bell's word, with something to do after it was read."""

    def __init__(self, value: int, then: Callable[[Word], None]) -> None:
        self._value = value
        self._then = then

    @property
    def value(self) -> int:
        value = self._value
        self._then(self)
        return value

    @value.setter
    def value(self, value: int) -> None:
        self._value = value


def by_hand(heap: Heap) -> watcher.Bell:
    """A bell to which no thread attends."""
    assert heap._growth is not None
    return watcher.Bell(heap._growth, heap.device)


def test_the_thread_serves_several_heaps_and_ends_with_the_last() -> None:
    gc.collect()
    until(lambda: not watcher.watcher.running)
    heaps = [Heap("1MiB", limit="32MiB", grow="auto") for _ in range(3)]
    assert watcher.watcher.running
    for heap in heaps:
        assert heap.malloc([9 * MIB]).item() != 0
    heaps.pop().close()
    assert watcher.watcher.running
    heaps.pop().close()
    del heap, heaps
    gc.collect()
    until(lambda: not watcher.watcher.running)


def test_a_request_that_comes_while_an_older_one_is_looked_at_is_answered(heap: Heap) -> None:
    bell = by_hand(heap)
    bell.welcome()
    last = bell.growth.last_answer

    def ring(word: Word) -> None:
        word.value = (last << 32) + 64

    bell._rung = Word(((last - 2) << 32) + 64, ring)  # type: ignore[assignment]
    bell.attend()
    assert heap.capacity == CHUNK, "answered before"
    bell.attend()
    assert heap.capacity == CHUNK + watcher.LEAST_BYTES
    for _ in range(3):
        bell.attend()
    assert heap.capacity < heap.limit, "a request is answered once"


def test_a_heap_that_another_thread_grows_does_not_hold_up_others() -> None:
    with (
        Heap("1MiB", limit="64MiB", grow="auto") as busy,
        Heap("1MiB", limit="64MiB", grow="auto") as other,
    ):
        assert busy._growth is not None
        assert busy._bell is not None
        with busy._growth.lock:
            busy._bell._rung.value = (busy._growth.last_answer << 32) + 64
            time.sleep(20 * watcher.PAUSE_S)
            assert other.malloc([9 * MIB]).item() != 0
            assert busy.capacity == CHUNK
        until(lambda: busy.capacity > CHUNK)


def test_a_thread_that_cannot_be_started_is_started_for_the_next_heap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.collect()
    until(lambda: not watcher.watcher.running)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "devalloc heaps that grow":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Heap("1MiB", limit="64MiB", grow="auto")
    monkeypatch.undo()
    assert not watcher.watcher.running
    assert not watcher.watcher._bells
    with Heap("1MiB", limit="64MiB", grow="auto") as heap:
        assert heap.malloc([9 * MIB]).item() != 0


def test_a_heap_is_welcome_again_while_the_thread_looks_at_the_time(
    heap: Heap, monkeypatch: pytest.MonkeyPatch
) -> None:
    bell = by_hand(heap)
    bell._refused_at = time.monotonic() - 1

    class Clock:
        @staticmethod
        def monotonic() -> float:
            bell._refused_at = None  # as a trim or a reset in another thread
            return time.monotonic()

    monkeypatch.setattr(watcher, "time", Clock)
    bell.attend()


class BrokenPages(HostPages):
    broken = False

    def create(self, nbytes: int):  # type: ignore[no-untyped-def]
        if self.broken:
            raise DevallocError("cuMemCreate failed: injected")
        return super().create(nbytes)


@pytest.mark.skipif(ON_GPU, reason="the double of the driver is on the CPU")
def test_an_error_of_the_driver_is_an_answer_too(unraisable: list[str]) -> None:
    pages = BrokenPages()
    with (
        Heap("1MiB", limit="64MiB", grow="auto", source=VirtualSource(CPU, pages)) as heap,
        Heap("1MiB", limit="64MiB", grow="auto") as other,
    ):
        assert heap._growth is not None
        pages.broken = True
        before = heap._growth.last_answer
        assert heap.malloc([9 * MIB]).item() == 0
        assert heap._growth.last_answer > before
        time.sleep(20 * watcher.PAUSE_S)
        assert unraisable == ["cuMemCreate failed: injected"]
        heap.clear_errors()
        assert other.malloc([9 * MIB]).item() != 0
        pages.broken = False
        time.sleep(3 * watcher.RETRY_S)
        assert heap.malloc([9 * MIB]).item() != 0


def test_no_error_ends_the_thread(monkeypatch: pytest.MonkeyPatch, unraisable: list[str]) -> None:
    def fail(bells: Any) -> None:
        raise MemoryError("injected")

    with Heap("1MiB", limit="64MiB", grow="auto") as heap:
        monkeypatch.setattr(watcher.Watcher, "_attend_all", fail)
        until(lambda: "injected" in unraisable)
        monkeypatch.undo()
        assert heap.malloc([9 * MIB]).item() != 0


@pytest.mark.skipif(ON_GPU, reason="the double of the driver is on the CPU")
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_heap_that_the_thread_looks_at_gives_its_memory_back(how: str) -> None:
    source = VirtualSource(CPU, HostPages())
    heap = Heap("4MiB", limit="64MiB", grow="auto", source=source)
    looking, go_on = threading.Event(), threading.Event()

    def wait(word: Word) -> None:
        looking.set()
        go_on.wait(10)

    assert heap._bell is not None
    heap._bell._rung = Word(0, wait)  # type: ignore[assignment]
    assert looking.wait(10)
    try:
        if how == "closed":
            heap.close()
        del heap
        assert source.stats().mapped == 0
    finally:
        go_on.set()


def test_at_exit_the_thread_ends_for_good(heap: Heap) -> None:
    ending = watcher.Watcher()
    bell = by_hand(heap)
    ending.add(bell)
    assert ending.running
    thread = ending._thread
    ending.end()
    assert thread is not None
    assert not thread.is_alive()
    ending = watcher.Watcher()
    ending.end()
    ending.add(bell)
    assert not ending.running
