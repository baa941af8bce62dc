"""What comes in the middle of something: Ctrl-C, a collection, a fork, a close."""

from __future__ import annotations

import concurrent.futures.thread
import gc
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from devalloc import Arena, DevallocError, InvalidArgument
from devalloc.arena.store.streams import HostStreams
from devalloc.cache import Cache
from devalloc.sources import HostSource
from devalloc.sources.adaptors import StatisticsAdaptor
from tests.arena.support import MIB, NumberSource

PATIENCE_S = 20


class Unrecordable(HostStreams):
    """Events of stream 7 cannot be recorded while ``broken``."""

    broken = False

    def record(self, stream: int) -> object:
        if self.broken and stream == 7:
            raise DevallocError("invalid resource handle")
        return super().record(stream)


def with_streams(arena: Arena) -> Unrecordable:
    streams = Unrecordable()
    arena._cache._store.streams = streams
    return streams


def on_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class Slow(NumberSource):
    """Takes its time on other threads than the first."""

    seconds = 1.0

    def allocate(self, nbytes: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(self.seconds)
        return super().allocate(nbytes)


def interrupt_soon() -> None:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


# Ctrl-C -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork with several threads
def test_ctrl_c_while_a_fork_waits_leaves_no_lock() -> None:
    caches = [Cache(NumberSource()) for _ in range(4)]
    slow = Cache(Slow())
    holder = on_a_thread(lambda: slow.malloc(100))
    time.sleep(0.1)
    interrupt_soon()
    try:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.5)
    except KeyboardInterrupt:
        pass
    holder.join(PATIENCE_S)
    for cache in [*caches, slow]:
        other = on_a_thread(lambda cache=cache: cache.malloc(100))
        other.join(PATIENCE_S)
        assert not other.is_alive()


def test_ctrl_c_while_a_callback_ends_leaves_others_alone() -> None:
    cache = Cache(Slow())
    others = []

    def low() -> None:
        if threading.current_thread() is threading.main_thread():
            others.append(on_a_thread(lambda: cache.malloc(5 * MIB)))
            time.sleep(0.1)
            interrupt_soon()

    cache.on_low_memory(low)
    with pytest.raises(KeyboardInterrupt) as caught:
        cache.malloc(MIB)
    assert caught.value.__context__ is None
    for other in others:
        other.join(PATIENCE_S)
    cache.audit()


# Collections --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_ends_while_another_lock_is_held_lets_a_fork_go_on() -> None:
    """The hooks of a fork wait for such locks, while caches are held."""
    cache = Cache(NumberSource())
    address = cache.malloc(100)
    forked = threading.Event()

    def submit() -> None:
        with concurrent.futures.thread._global_shutdown_lock:
            time.sleep(0.3)
            cache.free_in_finalizer(address)  # of a tensor that a collection ends here

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        forked.set()

    submitting = on_a_thread(submit)
    time.sleep(0.1)
    on_a_thread(fork)
    assert forked.wait(PATIENCE_S)
    submitting.join(PATIENCE_S)
    assert cache.stats()["allocation.all.current"] == 0


def test_collections_in_two_engines_do_not_wait_for_each_other() -> None:
    both = threading.Barrier(2)

    class Meeting(NumberSource):
        ends: Callable[[], None] | None = None

        def allocate(self, nbytes: int) -> int:
            if self.ends is not None:
                ends, self.ends = self.ends, None
                both.wait(PATIENCE_S)
                ends()
            return super().allocate(nbytes)

    sources = [Meeting(), Meeting()]
    one, two = caches = [Cache(source) for source in sources]
    blocks = [cache.malloc(100) for cache in caches]
    sources[0].ends = lambda: two.free_in_finalizer(blocks[1])
    sources[1].ends = lambda: one.free_in_finalizer(blocks[0])
    threads = [on_a_thread(lambda cache=cache: cache.malloc(30 * MIB)) for cache in caches]
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    for cache, block in zip(caches, blocks, strict=True):
        assert cache.stats()["allocation.all.current"] == 1
        assert not cache.owns(block)


def test_what_ends_amid_the_end_of_a_close_goes_back() -> None:
    """A finalizer closes the cache during a free, and another ends a block during that closing."""

    class Ending(NumberSource):
        ends: Callable[[], None] | None = None

        def free(self, address: int, nbytes: int) -> None:
            if self.ends is not None and nbytes == 30 * MIB:
                ends, self.ends = self.ends, None
                ends()
            super().free(address, nbytes)

    source = Ending()
    cache = Cache(source)
    idle, first, last = (cache.malloc(size * MIB) for size in (30, 40, 50))
    cache.free(idle)
    cache.record_history("all", stacks=False)
    history = cache._store.history
    requested = history.free_requested

    def close_then(block: object) -> None:
        history.free_requested = requested
        cache.close()
        source.ends = lambda: cache.free(last)
        requested(block)

    history.free_requested = close_then
    cache.free(first)
    assert not source.live


def test_a_tensor_whose_event_cannot_be_recorded_is_freed_later(unraisable: list[str]) -> None:
    arena = Arena(source="host")
    streams = with_streams(arena)
    tensor = arena.empty(1000)
    arena.record_stream(tensor, 7)
    streams.broken = True
    del tensor
    gc.collect()
    assert set(unraisable) == {"invalid resource handle"}
    streams.broken = False
    arena.empty_cache()
    assert arena.stats()["allocated_bytes.all.current"] == 0
    arena.close()


def test_who_runs_out_does_not_fail_for_anothers_event(unraisable: list[str]) -> None:
    arena = Arena(source="host", limit="64MiB")
    streams = with_streams(arena)
    block = arena.alloc(1000)
    arena.record_stream(block, 7)
    pool = arena.graph_pool()
    streams.broken = True
    with pytest.raises(DevallocError, match="invalid resource handle"), arena.capture(pool):
        arena.free(block)
    pool.release()
    arena.free(arena.alloc("40MiB"))
    arena.free(arena.alloc("50MiB"))
    assert set(unraisable) == {"invalid resource handle"}
    streams.broken = False
    arena.empty_cache()
    assert arena.stats()["allocated_bytes.all.current"] == 0
    arena.close()


# Closes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dropped", "closed", "in a capture"])
def test_what_another_stream_used_goes_back_after_the_end(how: str) -> None:
    source = StatisticsAdaptor(HostSource())
    arena = Arena(source=source)
    tensor = arena.empty(1000)
    arena.record_stream(tensor, 7)
    if how == "dropped":
        del arena
        gc.collect()
        assert source.counters.bytes.current > 0
        del tensor
    elif how == "closed":
        arena.close()
        del tensor
    else:
        pool = arena.graph_pool()
        with arena.capture(pool):
            del tensor
            arena.close()
        pool.release()
    assert source.counters.bytes.current == 0


# Modes --------------------------------------------------------------------------------------------


def test_a_type_first_seen_among_fake_tensors_is_as_good_as_others() -> None:
    from devalloc.arena.tensors import _blank

    _blank.cache_clear()
    arena = Arena(source="host")
    with FakeTensorMode():
        for size in (0, 4):
            with pytest.raises(InvalidArgument, match="FakeTensor"):
                arena.empty(size, torch.int16)
    assert arena.stats()["allocation.all.current"] == 0
    tensor = arena.empty(4, torch.int16).fill_(3)
    assert tensor.tolist() == [3] * 4
    del tensor
    arena.close()
