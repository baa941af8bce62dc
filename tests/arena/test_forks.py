"""A child process finds every cache between two calls, whatever the threads of its parent did."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from devalloc import Arena
from devalloc.arena.cache import forks
from devalloc.cache import Cache
from tests.arena.support import MIB, NumberSource

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


def passes(pid: int) -> bool:
    """Whether a child ends well, and soon."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def in_child(work: Callable[[], object]) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return passes(pid)


def use(cache: Cache) -> None:
    before = cache.stats()["allocation.all.current"]
    blocks = [cache.malloc(700), cache.malloc(30 * MIB)]
    cache.audit()
    for block in blocks:
        cache.free(block)
    assert cache.stats()["allocation.all.current"] == before


@pytest.mark.proves("tiny/mutex")
def test_children_of_a_busy_process_can_allocate() -> None:
    arenas = [Arena(source="host", policy=policy) for policy in ("torch", "bfc")]
    over = threading.Event()

    def work(arena: Arena) -> None:
        while not over.is_set():
            arena.free(arena.alloc(5000))
            arena.cache.stats()

    threads = [threading.Thread(target=work, args=(arena,)) for arena in arenas * 2]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert in_child(lambda: [use(arena.cache) for arena in arenas])
    finally:
        over.set()
        for thread in threads:
            thread.join()
    for arena in arenas:
        use(arena.cache)


def test_a_fork_in_the_middle_of_a_call_goes_on_in_both() -> None:
    class Forking(NumberSource):
        pid = -1

        def allocate(self, nbytes: int) -> int:
            if self.pid < 0:
                self.pid = os.fork()
            return super().allocate(nbytes)

    source = Forking()
    cache = Cache(source)
    try:
        address = cache.malloc(700)
        assert cache.owns(address)
        use(cache)
    finally:
        if source.pid == 0:
            os._exit(not cache.owns(address))
    assert passes(source.pid)


def test_a_child_waits_for_no_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is in the source for long."""
    monkeypatch.setattr(forks, "_PATIENCE_S", 0.1)
    inside, leave = threading.Event(), threading.Event()

    class Slow(NumberSource):
        def allocate(self, nbytes: int) -> int:
            if nbytes == 50 * MIB:
                inside.set()
                assert leave.wait(20)
            return super().allocate(nbytes)

    cache = Cache(Slow(), limit=100 * MIB)
    slow = threading.Thread(target=cache.malloc, args=(50 * MIB,))
    slow.start()
    assert inside.wait(20)
    try:
        assert in_child(lambda: [use(cache), cache.set_limit(40 * MIB)])
    finally:
        leave.set()
        slow.join()
    use(cache)


def test_two_threads_may_fork_at_once() -> None:
    cache = Cache(NumberSource())
    passed: list[bool] = []
    threads = [
        threading.Thread(target=lambda: passed.append(in_child(lambda: use(cache))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert passed == [True] * 4
    use(cache)


def test_a_garbage_collection_amid_the_list_of_caches_is_harmless() -> None:
    """Wherever it comes, and though it ends a cache: else the fork would go on without locks."""
    kept = [Cache(NumberSource()) for _ in range(30)]
    before = gc.get_threshold()
    for allocations in range(1, 30):
        gc.collect(0)
        gc.disable()
        garbage = Cache(NumberSource())
        garbage._holders.append(garbage.free)  # a cycle, which only a collection ends
        del garbage
        gc.set_threshold(gc.get_count()[0] + allocations)
        gc.enable()
        try:
            assert set(kept) <= set(forks._living())
        finally:
            gc.set_threshold(*before)
