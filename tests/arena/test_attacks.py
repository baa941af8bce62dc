"""Guarantees under attack: calls that are interrupted anywhere, stale blocks, what is dropped.

CPython handles a signal on the main thread when a Python function begins and when any call of C
code has ended. `interrupt` raises KeyboardInterrupt at each of these places in turn.
"""

from __future__ import annotations

import contextlib
import gc
import random
import runpy
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import devalloc.arena
from devalloc import (
    Arena,
    DevallocError,
    DoubleFree,
    InvalidArgument,
    InvalidFree,
    InvalidFreeError,
    OutOfMemory,
)
from devalloc.arena import Block
from devalloc.cache import AutoGrowthPolicy, BfcPolicy, Cache, FrugalPolicy, Policy
from devalloc.sources import HostSource
from devalloc.sources.adaptors import AlignedAdaptor
from tests.arena.support import KIB, MIB, FakeStreams, NumberSource, threads_that_switch


class Interruption:
    """Raises KeyboardInterrupt at the n-th place where a signal could be handled."""

    def __init__(self, place: int) -> None:
        self.left = place
        self.happened = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "c_return") or frame.f_code.co_filename == __file__:
            return
        self.left -= 1
        if self.left == 0:
            self.happened = True
            sys.setprofile(None)
            raise KeyboardInterrupt


def interrupt(action: Callable[[], object], place: int) -> bool | None:
    """Interrupt an action: whether it has ended with that, or None if it was over before.

    (An interruption of a generator that is being dropped is shown by Python and ends nothing.)
    """
    interruption = Interruption(place)
    enabled = gc.isenabled()
    gc.disable()
    try:
        sys.setprofile(interruption)
        action()
    except KeyboardInterrupt:
        assert interruption.happened
        return True
    finally:
        sys.setprofile(None)
        if enabled:
            gc.enable()
    return False if interruption.happened else None


class World:
    """A cache with some of everything: blocks of two streams, free ones, pending ones, a pool."""

    def __init__(self, policy: str | Policy, share: bool = False) -> None:
        self.source = NumberSource(capacity=240 * MIB)
        self.streams = FakeStreams()
        self.cache = Cache(
            self.source, policy, limit=200 * MIB, streams=self.streams, share_streams=share
        )
        cache = self.cache
        self.blocks = [cache.malloc(300 * KIB, stream) for stream in (0, 0, 0, 0, 1, 1)]
        self.large = cache.malloc(30 * MIB)
        idle = cache.malloc(40 * MIB)
        self.used = cache.malloc(5 * MIB)
        pending = cache.malloc(7 * MIB)
        for block in (self.used, pending):
            cache.record_stream(block, 2)
            cache.record_stream(block, 3)
        cache.free(pending)
        cache.free(idle)
        cache.free(self.blocks[0])
        cache.free(self.blocks[2])
        self.pool = cache.private_pool()
        with cache.route(self.pool):
            cache.free(cache.malloc(8 * MIB))

    def live(self) -> set[int]:
        segments = self.cache.snapshot()["segments"]
        return {
            block["address"]
            for segment in segments  # type: ignore[attr-defined]
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }

    def end(self) -> None:
        """Everything still works, and all memory goes back."""
        cache = self.cache
        cache.audit()
        for size in (200, 300 * KIB, 3 * MIB):
            first, second = cache.malloc(size), cache.malloc(size, 1)
            cache.free(first)
            cache.free(second)
        for address in self.live():
            cache.free(address)
        stats = cache.stats()
        assert stats["allocation.all.allocated"] == stats["allocation.all.freed"]
        if self.pool.uses:
            self.pool.release()
        cache.process_events()
        assert not cache._store.privates, "a pool without a user stays"
        cache.close()
        cache.audit()
        assert not self.source.live
        assert not self.source.parts_of


def _grow_or_fail(world: World) -> int:
    try:  # (Not `suppress`, in which an interruption would come too late.)
        return world.cache.malloc(100 * MIB)
    except OutOfMemory:  # of bfc
        return 0


ALLOCATIONS: dict[str, Callable[[World], object]] = {
    "exact fit": lambda world: world.cache.malloc(300 * KIB),
    "split": lambda world: world.cache.malloc(10 * KIB),
    "grow": lambda world: world.cache.malloc(25 * MIB),
    "release and grow": _grow_or_fail,
    "another stream": lambda world: world.cache.malloc(300 * KIB, 7),
}
FREES: dict[str, Callable[[World], int]] = {
    "merge": lambda world: world.blocks[1],
    "alone": lambda world: world.blocks[4],
    "whole segment": lambda world: world.large,
    "used by streams": lambda world: world.used,
}


def _capture(world: World) -> None:
    with world.cache.route(world.pool, capture=True):
        pass


OTHERS: dict[str, Callable[[World], object]] = {
    "events": lambda world: (
        (world.streams.advance(2), world.streams.advance(3)) and world.cache.process_events()
    ),
    "empty_cache": lambda world: world.cache.empty_cache(),
    "forget_stream": lambda world: world.cache.forget_stream(1),
    "capture": _capture,
    "stats": lambda world: world.cache.stats(),
    "limit": lambda world: world.cache.set_limit(90 * MIB),  # which releases
    "record_stream": lambda world: world.cache.record_stream(world.large, 5),
    "private pool": lambda world: world.cache.private_pool(),
    "release": lambda world: world.pool.release(),
}
SOME_POLICIES = (
    ("torch", False),
    ("frugal", True),
    (BfcPolicy(timestamps=True), False),
    (AutoGrowthPolicy(free_idle_chunks="at_once"), False),
    (FrugalPolicy(expandable_segments=True), True),
)
SOME_IDS = ("torch", "frugal", "stamps", "at_once", "expandable")


def places(make: Callable[[], World], act: Callable[[World], object]) -> Iterator[World]:
    """Worlds in which the action was interrupted, at one place after the other."""
    place = 1
    while True:
        world = make()
        ended = interrupt(lambda world=world: act(world), place)  # type: ignore[misc]
        if ended is None:
            break
        if ended:
            yield world
        place += 1
    assert place > 3, "there are places"


@pytest.mark.proves("library/interrupted-calls")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("policy", "share"), SOME_POLICIES, ids=SOME_IDS)
@pytest.mark.parametrize("act", ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_an_interrupted_malloc_allocates_nothing(
    policy: str | Policy, share: bool, act: Callable[[World], object]
) -> None:
    expected = World(policy, share).live()
    for world in places(lambda: World(policy, share), act):
        assert world.live() == expected
        world.end()


@pytest.mark.proves("library/interrupted-calls")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("policy", "share"), SOME_POLICIES, ids=SOME_IDS)
@pytest.mark.parametrize("chosen", FREES.values(), ids=FREES)
def test_an_interrupted_free_has_happened_or_not(
    policy: str | Policy, share: bool, chosen: Callable[[World], int]
) -> None:
    before = World(policy, share).live()
    outcomes = set()
    for world in places(
        lambda: World(policy, share), lambda world: world.cache.free(chosen(world))
    ):
        address = chosen(world)
        freed = address not in world.live()
        outcomes.add(freed)
        assert world.live() == before - ({address} if freed else set())
        if freed:
            with pytest.raises(InvalidFreeError):
                world.cache.free(address)
        else:
            world.cache.free(address)
        world.end()
    assert outcomes == {False, True}


@pytest.mark.proves("library/interrupted-calls")
@pytest.mark.parametrize("aligned", [False, True], ids=["plain", "aligned"])
def test_an_interrupted_release_has_happened_or_not(aligned: bool) -> None:
    """The source of host memory is interrupted too, and reports whether it has the memory back."""
    place = 1
    happened: bool | None = True
    outcomes = set()
    while happened is not None:
        host = HostSource()
        cache = Cache(AlignedAdaptor(host, 64 * KIB) if aligned else host)
        cache.free(cache.malloc(30 * MIB))
        happened = interrupt(cache.empty_cache, place)
        outcomes.add(cache.reserved)
        assert sorted(host._out._sizes) == sorted(host._maps)
        cache.empty_cache()
        cache.audit()
        assert cache.reserved == 0
        assert not host._maps
        cache.close()
        place += 1
    assert outcomes == {0, 30 * MIB}


@pytest.mark.proves("library/interrupted-calls", "library/closed-caches")
@pytest.mark.filterwarnings("ignore")
def test_what_a_closed_cache_should_give_back_goes_back() -> None:
    def make() -> World:
        world = World("torch")
        world.cache.close()
        return world

    for world in places(make, lambda world: world.cache.free(world.large)):
        assert (world.large in world.source.live) == (world.large in world.live())


@pytest.mark.proves("library/interrupted-calls")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("act", OTHERS.values(), ids=OTHERS)
def test_interrupted_calls_leave_a_sound_cache(act: Callable[[World], object]) -> None:
    expected = World("torch", True).live()
    for world in places(lambda: World("torch", True), act):
        world.cache.audit()
        assert world.live() == expected
        world.end()


@pytest.mark.parametrize("free", [False, True], ids=["alloc", "free"])
def test_interrupted_blocks_of_arenas_are_not_lost(free: bool) -> None:
    place, happened = 1, False
    while happened is not None:
        arena = Arena(source=NumberSource())
        kept: list[Block] = []
        if free:
            block = arena.alloc(1000)
            happened = interrupt(lambda arena=arena, block=block: arena.free(block), place)
            if happened is None:
                break
            with contextlib.suppress(DoubleFree):
                arena.free(block)  # tells whether the first has happened
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                happened = interrupt(
                    lambda arena=arena, kept=kept: kept.append(arena.alloc(1000)), place
                )
        assert arena.stats()["allocation.all.current"] == len(kept)
        arena.cache.audit()
        for block in kept:
            arena.free(block)
        place += 1
    assert place > 10


@contextmanager
def alarms(handler: Callable[[int, object], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.proves("library/interrupted-calls")
def test_signals_at_any_time() -> None:
    """Real ones, at random times, in a program that allocates and frees all the time."""

    class Alarm(BaseException):
        pass

    armed = [False]

    def ring(number: int, frame: object) -> None:
        if armed[0]:
            raise Alarm

    source = NumberSource()
    cache = Cache(source, "torch", streams=FakeStreams())
    rng = random.Random(5)
    live: set[int] = set()
    rung = 0
    with alarms(ring):
        for _ in range(300):
            armed[0] = True
            try:
                # (Again after a while: what a callback of the garbage collector raises is lost.)
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00005, 0.0006), 0.5)
                while True:
                    if len(live) > 30:
                        cache.free(live.pop())
                    elif rng.random() < 0.02:
                        cache.empty_cache()
                    else:
                        live.add(cache.malloc(rng.choice((100, 300 * KIB, 3 * MIB)), 0))
            except Alarm:
                rung += 1
            finally:
                armed[0] = False
            cache.audit()
            # What the program has lost, between the cache and its set, is the program's.
            segments = cache.snapshot()["segments"]
            found = {
                block["address"]
                for segment in segments  # type: ignore[attr-defined]
                for block in segment["blocks"]
                if block["state"] == "active_allocated"
            }
            assert len(found ^ live) <= 1
            for address in found - live:
                cache.free(address)
            live &= found
    assert rung == 300
    for address in live:
        cache.free(address)
    cache.close()
    assert not source.live


# Stale blocks -------------------------------------------------------------------------------------


@pytest.mark.proves("library/block-freed")
def test_a_block_whose_free_was_interrupted_frees_nobody_elses_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The free has happened, the address belongs to another block by now, and only then comes
    Ctrl-C."""
    arena = Arena(source="host")
    block = arena.alloc(5000)
    free = arena.cache.free
    others: list[int] = []

    def freed_and_given_out(*arguments: int) -> None:
        free(*arguments)
        others.append(arena.cache.malloc(5000))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arena.cache, "free", freed_and_given_out)
        with pytest.raises(KeyboardInterrupt):
            arena.free(block)
    assert others == [block.address]
    with pytest.raises(DoubleFree, match="was freed before"):
        arena.free(block)
    with pytest.raises(InvalidArgument, match="was freed before"):
        arena.record_stream(block, 7)
    assert arena.cache.owns(others[0])


class Refusing(NumberSource):
    """Takes nothing back while ``refuses``, and says so after a moment."""

    refuses = True

    def __init__(self) -> None:
        super().__init__()
        self.asked_back = threading.Event()

    def free(self, address: int, nbytes: int) -> None:
        if self.refuses:
            self.asked_back.set()
            time.sleep(0.001)  # in which another thread comes to wait for the lock
            raise RuntimeError("not today")
        super().free(address, nbytes)


@pytest.mark.proves("library/block-freed")
def test_who_frees_again_after_a_failure_races_the_next_owner() -> None:
    """The block is free, but its segment could not be released, and another thread takes it."""
    with threads_that_switch(1e-6):
        for _ in range(200):
            source = Refusing()
            arena = Arena(source=source, policy=AutoGrowthPolicy(free_idle_chunks="at_once"))
            block = arena.alloc(5 * MIB)
            others: list[int] = []

            def take(
                arena: Arena = arena, source: Refusing = source, to: list[int] = others
            ) -> None:
                source.asked_back.wait(10)
                to.append(arena.cache.malloc(5 * MIB))

            thread = threading.Thread(target=take)
            thread.start()
            with pytest.raises(RuntimeError, match="not today"):
                arena.free(block)
            thread.join(10)
            assert others == [block.address]
            source.refuses = False
            with pytest.raises(DoubleFree, match="was freed before"):
                arena.free(block)
            assert arena.cache.owns(others[0])
            arena.cache.free(others[0])
            arena.cache.audit()
            assert not source.live


def test_only_the_owner_frees_a_claimed_block() -> None:
    arena = Arena(source="host")
    block = arena.alloc(5000)
    with pytest.raises(InvalidFree, match=r"devalloc\.Block; free that"):
        arena.cache.free(block.address)
    arena.free(block)
    address = arena.cache.malloc(5000)
    with pytest.raises(DoubleFree):
        arena.free(block)
    arena.cache.free(address)


# What is closed, dropped or called back -----------------------------------------------------------


@pytest.mark.proves("library/closed-caches")
@pytest.mark.parametrize("nbytes", [0, 100, MIB])
def test_a_closed_cache_refuses(nbytes: int) -> None:
    source = NumberSource()
    cache = Cache(source)
    kept = cache.malloc(100)
    cache.close()
    with pytest.raises(InvalidArgument, match="closed"):
        cache.malloc(nbytes)
    cache.free(kept)
    assert not source.live


@pytest.mark.proves("library/closed-caches")
def test_a_dropped_block_warns_and_returns() -> None:
    arena = Arena(source="host")
    kept = [arena.alloc(5000)]
    with pytest.warns(ResourceWarning, match="5 KiB.*dropped without"):
        kept.clear()
    assert arena.stats()["allocation.all.current"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arena.free(arena.alloc(5000))
        arena.free(arena.alloc(0))
        arena.alloc(0)
        gc.collect()


@pytest.mark.proves("library/closed-caches")
def test_a_dropped_pool_warns_and_returns() -> None:
    source = NumberSource()
    cache = Cache(source)
    pools = [cache.private_pool()]
    pools[0].retain()
    with cache.route(pools[0]):
        cache.free(cache.malloc(30 * MIB))
        kept = cache.malloc(100)
    with pytest.warns(ResourceWarning, match="dropped with 2 uses left"):
        pools.clear()
    assert list(source.live.values()) == [2 * MIB]
    cache.free(kept)
    assert not source.live
    cache.audit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.private_pool().release()
        gc.collect()


def test_filters_run_without_the_lock() -> None:
    """Another thread uses the cache meanwhile, and the filter waits for it."""
    cache = Cache(NumberSource())
    seen: list[int] = []

    def accepts(stream: int) -> bool:
        seen.append(stream)
        thread = threading.Thread(target=cache.stats)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        return stream == 4

    with cache.private_pool() as pool, cache.route(pool, accepts, capture=True):
        address = cache.malloc(30 * MIB, 4)
        cache.free(address)
        assert cache.malloc(30 * MIB, 4) == address
        cache.free(address)
        cache.free(cache.malloc(MIB, 5))
    assert set(seen) == {4, 5}
    cache.audit()


def test_a_filter_is_not_asked_in_the_middle_of_a_call() -> None:
    """A finalizer frees during an allocation: the block is held until the capture ends."""
    cache = Cache(NumberSource())
    inside: list[bool] = []

    class Amid(NumberSource):
        meanwhile: Callable[[], None] | None = None

        def allocate(self, nbytes: int) -> int:
            if self.meanwhile is not None:
                self.meanwhile()
            return super().allocate(nbytes)

    source = Amid()
    cache = Cache(source)
    block = cache.malloc(30 * MIB)

    def accepts(stream: int) -> bool:
        inside.append(cache._inside)
        return False

    with cache.private_pool() as pool, cache.route(pool, accepts, capture=True):
        source.meanwhile = lambda: cache.free_in_finalizer(block)
        cache.malloc(40 * MIB)
        source.meanwhile = None
        assert cache.stats()["active.all.current"] == 2
    assert cache.stats()["active.all.current"] == 1
    assert not any(inside)


def test_without_the_global_lock_arenas_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    package = Path(devalloc.arena.__file__)
    with pytest.raises(DevallocError, match="arenas need the global interpreter lock"):
        runpy.run_path(str(package))


def test_threads_that_wait_for_a_free_are_woken() -> None:
    cache = Cache(NumberSource(), AutoGrowthPolicy(retry_wait_s=20), limit=2 * MIB)
    block = cache.malloc(2 * MIB)
    threading.Timer(0.05, cache.free, [block]).start()
    begun = time.monotonic()
    assert cache.malloc(2 * MIB) == block
    assert time.monotonic() - begun < 5
