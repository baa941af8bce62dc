"""The front: it serves without Python what the policy would have served, with the same results.

Each test calls the C functions as PyTorch does, without the GIL, over caches of addresses.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from devalloc import Arena, OutOfMemory
from devalloc.arena.store import statistics as rows
from devalloc.arena.store.blocks import FreeList
from devalloc.cache import BfcPolicy, Cache, Policy, TorchPolicy
from devalloc.interop import bridge, pluggable
from devalloc.interop.pluggable import AllocationWarning
from tests.arena.support import KIB, MIB, FakeStreams, NumberSource, run_watched
from tests.interop.support import Calls, called, require_compiler

ROOT = Path(__file__).resolve().parents[2]
DEVICES = itertools.count(5)


class Process:
    """A cache that serves PyTorch, with its front; ``entered`` counts the calls into Python."""

    def __init__(
        self,
        policy: str | Policy = "torch",
        capacity: int | None = None,
        front: bool = True,
    ) -> None:
        self.device = next(DEVICES) % 64
        self.streams = FakeStreams()
        self.source = NumberSource(capacity)
        self.cache = Cache(self.source, policy, streams=self.streams)
        self.calls: Calls = called(pluggable.functions)
        rules = self.cache.policy
        self.front = bridge.Front("install", self.device, rules.unit, rules.zero_is_null)
        if front:
            self.cache.loan.attach(self.front)
        pluggable._INSTALLED.caches[self.device] = self.cache
        self.entered = 0
        serve, take_back = self.cache.loan.serve, self.cache.loan.take_back

        def counted_serve(nbytes: int, stream: int) -> int:
            self.entered += 1
            return serve(nbytes, stream)

        def counted_take_back(address: int) -> None:
            self.entered += 1
            take_back(address)

        self.cache.loan.serve = counted_serve  # type: ignore[method-assign]
        self.cache.loan.take_back = counted_take_back  # type: ignore[method-assign]

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        return self.calls.malloc(nbytes, self.device, stream) or 0

    def free(self, address: int, nbytes: int, stream: int = 0) -> None:
        self.calls.free(address, nbytes, self.device, stream)

    @property
    def on(self) -> bool:
        return bool(self.front.counts()["on"])

    def start(self) -> None:
        """Go on until the front serves."""
        for _ in range(3000):
            if self.on:
                return
            self.free(self.malloc(512), 512)
        raise AssertionError("the front never serves")

    def end(self) -> None:
        """All memory goes back; the device's front is left empty and off."""
        self.cache.audit()
        assert not self.on
        assert self.cache.stats()["allocation.all.current"] == 0
        self.cache.empty_cache()
        assert not self.source.live


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Process]]:
    require_compiler()
    monkeypatch.setattr(pluggable, "_INSTALLED", pluggable._Installed())
    made: list[Process] = []

    def make(*arguments: object, **options: object) -> Process:
        made.append(Process(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for process in made:
        process.end()


@pytest.fixture
def process(make: Callable[..., Process]) -> Process:
    return make()


@pytest.mark.proves("library/allocation-free-c")
def test_what_is_steady_is_served_without_python(process: Process) -> None:
    address = process.malloc(5 * MIB, 3)
    process.start()
    process.free(address, 5 * MIB, 3)
    assert process.malloc(5 * MIB, 3) == address, "its size enters Python once more"
    entered = process.entered
    for nbytes in (5 * MIB, 5 * MIB - 100, 5 * MIB):
        process.free(address, nbytes, 3)
        assert process.malloc(nbytes, 3) == address
    assert process.entered == entered
    other = process.malloc(5 * MIB, 4)
    assert other not in (0, address), "another stream has blocks of its own"
    assert process.entered == entered + 1
    assert not process.on, "the cache has taken everything back, to grow"
    process.free(other, 5 * MIB, 4)
    process.free(address, 5 * MIB, 3)


def steps(seed: str, count: int) -> Iterator[tuple[str, int, int]]:
    """A random program: (malloc, bytes, stream) or (free, which of the live blocks, 0)."""
    draw = random.Random(seed)
    sizes = [draw.choice((100, 400, 5000, 900 * KIB, 3 * MIB, 30 * MIB)) for _ in range(12)]
    live = 0
    for _ in range(count):
        if live and (live > 40 or draw.random() < 0.5):
            yield "free", draw.randrange(live), 0
            live -= 1
        else:
            yield "malloc", max(1, draw.choice(sizes) - draw.randrange(50)), draw.randrange(3)
            live += 1


@pytest.mark.proves("library/allocation-free-c")
@pytest.mark.parametrize(
    "policy",
    [
        "torch",
        "max_split_size_mb:24",
        "roundup_power2_divisions:4",
        "expandable_segments:True",
        "bfc",
        "auto_growth",
        "frugal",
        "tiny",
    ],
)
def test_every_block_is_where_the_policy_puts_it(policy: str, make: Callable[..., Process]) -> None:
    """The same addresses and statistics as those of a cache that is always asked."""
    process, plain = make(policy), Cache(NumberSource(), policy, streams=FakeStreams())
    live: list[tuple[int, int]] = []
    served = 0
    for at, (what, number, stream) in enumerate(steps(policy, 6000)):
        if what == "malloc":
            served += process.on
            address = process.malloc(number, stream)
            assert address == plain.malloc(number, stream)
            live.append((address, number))
        else:
            address, nbytes = live.pop(number)
            process.free(address, nbytes)
            plain.free(address)
        if at % 1500 == 700:
            process.cache.audit()
    assert served > 2000
    assert process.entered < 3000
    assert process.cache.stats() == plain.stats()
    for address, nbytes in live:
        process.free(address, nbytes)


def test_the_states_of_blocks_are_those_of_the_loan() -> None:
    from importlib import resources

    from devalloc.arena.cache import front

    text = resources.files("devalloc.interop").joinpath("bridge.c").read_text()
    names = ("FREE", "LENT", "KEPT", "SHARED")
    assert [getattr(front, f"_{name}") for name in names] == [0, 1, 2, 3]
    states = ", ".join(f"{name}_BLOCK" for name in names)
    assert f"enum {{ {states}, STATES = {front._STATES} }};" in text
    assert f"FIRST_BLOCK = {front._FIRST}, HOME_SHIFT = {front._HOME_SHIFT}," in text


FLUSHES: dict[str, Callable[[Cache], object]] = {
    "stats": lambda cache: cache.stats(),
    "snapshot": lambda cache: cache.snapshot(),
    "audit": lambda cache: cache.audit(),
    "report": lambda cache: cache.report(),
    "empty_cache": lambda cache: cache.empty_cache(),
    "set_limit": lambda cache: cache.set_limit("1GiB"),
    "private_pool": lambda cache: cache.private_pool().release(),
    "record_history": lambda cache: cache.record_history(None),
    "forget_stream": lambda cache: cache.forget_stream(9),
    "reset_peaks": lambda cache: cache.reset_peaks(),
}
LOOKS = FLUSHES | {
    "owns": lambda cache: cache.owns(1),
    "malloc": lambda cache: cache.free(cache.malloc(100)),
}


@pytest.mark.proves("library/allocation-free-c")
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_who_looks_or_changes_things_finds_everything(
    process: Process, look: Callable[[Cache], object]
) -> None:
    kept = process.malloc(100)
    address = process.malloc(5 * MIB)
    process.start()
    process.free(address, 5 * MIB)
    process.free(kept, 100)
    kept = process.malloc(90)
    assert process.on
    look(process.cache)
    assert not process.on
    assert not process.cache.owns(address)
    stats = process.cache.stats()
    assert stats["allocation.all.current"] == 1
    assert stats["requested_bytes.all.current"] == 90
    (block,) = (
        block
        for segment in process.cache.snapshot()["segments"]  # type: ignore[attr-defined]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    assert block["requested_size"] == 90
    process.start()
    process.free(kept, 90)
    assert process.on


@pytest.mark.proves("library/allocation-free-c")
@pytest.mark.parametrize("by", ["PyTorch", "the arena"])
def test_what_another_stream_uses_is_not_reused(process: Process, by: str) -> None:
    address = process.malloc(5 * MIB)
    process.start()
    if by == "PyTorch":
        process.calls.record_stream(address, 9)
    else:
        process.cache.record_stream(address, 9)
    assert process.on
    process.free(address, 5 * MIB)
    assert process.streams.queued == {9: 1}
    process.start()
    other = process.malloc(5 * MIB)
    assert other != address
    process.free(other, 5 * MIB)
    process.streams.advance(9)
    process.cache.process_events()
    process.start()
    assert process.malloc(5 * MIB) == address
    process.free(address, 5 * MIB)


def test_a_use_that_is_known_when_the_front_starts_is_kept(process: Process) -> None:
    address = process.malloc(5 * MIB)
    process.cache.record_stream(address, 9)
    process.start()
    process.free(address, 5 * MIB)
    assert process.streams.queued == {9: 1}
    process.streams.advance(9)


def test_the_own_stream_is_no_other(process: Process) -> None:
    address = process.malloc(5 * MIB, 3)
    process.start()
    process.calls.record_stream(address, 3)
    process.free(address, 5 * MIB, 3)
    assert process.on
    assert not process.streams.queued


def test_a_block_with_a_claim_needs_it(process: Process) -> None:
    address = process.cache.malloc(5 * MIB, claim=7)
    process.start()
    with pytest.warns(AllocationWarning):
        process.free(address, 5 * MIB)
    assert process.cache.owns(address, 7)
    process.start()
    process.cache.free(address, 7)


def test_a_forgotten_streams_blocks_are_the_default_streams(process: Process) -> None:
    address = process.malloc(5 * MIB, 3)
    process.start()
    process.cache.forget_stream(3)
    process.start()
    process.free(address, 5 * MIB, 3)
    other = process.malloc(5 * MIB, 3)
    assert other != address, "its handle may be that of a new stream"
    process.free(other, 5 * MIB, 3)


def test_a_capture_takes_nothing_from_the_front_and_gives_it_nothing(process: Process) -> None:
    cache = process.cache
    free, live = process.malloc(5 * MIB), process.malloc(6 * MIB)
    process.free(free, 5 * MIB)
    process.start()
    with cache.private_pool() as pool:
        with cache.route(pool, capture=True):
            assert not process.on
            inside = process.malloc(5 * MIB)
            assert inside != free
            for _ in range(100):
                process.free(inside, 5 * MIB)
                assert process.malloc(5 * MIB) == inside, "in the pool"
            process.free(live, 6 * MIB)
            assert not process.on
            assert cache.stats()["active.all.current"] == 2, "held until the capture ends"
        process.start()
        process.free(inside, 5 * MIB)
        assert cache.stats()["allocation.all.current"] == 0


def test_history_sees_every_event(process: Process) -> None:
    address = process.malloc(5 * MIB)
    process.start()
    process.cache.record_history("all", stacks=False)
    for _ in range(50):
        process.free(address, 5 * MIB)
        address = process.malloc(5 * MIB)
    process.cache.record_history(None)
    trace = process.cache.snapshot()["device_traces"][0]  # type: ignore[index]
    assert [entry["action"] for entry in trace].count("alloc") == 50
    process.free(address, 5 * MIB)


@pytest.mark.parametrize(
    "policy", [TorchPolicy(garbage_collection_threshold=0.5), BfcPolicy(timestamps=True)], ids=str
)
def test_policies_that_see_every_call_do(policy: Policy) -> None:
    require_compiler()
    cache = Cache(NumberSource(), policy, limit="1GiB", streams=FakeStreams())
    front = bridge.Front("install", next(DEVICES) % 64, 512, True)
    cache.loan.attach(front)
    for _ in range(200):
        cache.loan.take_back(cache.loan.serve(5 * MIB, 0))
    assert not front.counts()["on"]


def test_handing_over_costs_no_more_than_the_calls_before(process: Process) -> None:
    blocks = [process.malloc(512) for _ in range(4000)]
    process.cache.stats()
    entered = process.entered
    process.start()
    assert 900 < process.entered - entered < 2100
    for block in blocks:
        process.free(block, 512)


def test_a_log_that_is_full_is_read(process: Process) -> None:
    address = process.malloc(512)
    process.start()
    for _ in range(40_000):
        process.free(address, 512)
        assert process.malloc(512) == address
    assert process.on
    assert process.entered < 40
    process.free(address, 512)
    stats = process.cache.stats()
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] > 40_000
    assert stats["allocated_bytes.all.peak"] == 1024, "while the front was to start"


@pytest.mark.proves("library/allocation-free-c")
@pytest.mark.parametrize("name", ["stop", "read_log", "blocks"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_taking_back_may_be_interrupted(
    process: Process, monkeypatch: pytest.MonkeyPatch, name: str, after: bool
) -> None:
    _interrupt(process, monkeypatch, process.front, name, after)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_restoring_may_be_interrupted(
    process: Process, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    _interrupt(process, monkeypatch, FreeList, "refill", after)


def _interrupt(
    process: Process, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, after: bool
) -> None:
    kept = [process.malloc(nbytes) for nbytes in (100, 5 * MIB, 700, 3 * MIB, 900)]
    process.start()
    for address in kept[1::2]:
        process.free(address, 1)
    again = process.malloc(2 * MIB)
    inner = getattr(owner, name)

    def interrupted(*arguments: object) -> object:
        monkeypatch.undo()
        if after:
            inner(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        monkeypatch = patch
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.cache.stats()
    process.cache.audit()
    assert process.cache.stats()["allocation.all.current"] == 4
    process.start()
    for address in (*kept[::2], again):
        process.free(address, 1)
    assert process.on


def test_many_blocks(process: Process) -> None:
    """The tables grow, and lose entries from the middle of long runs."""
    rng = random.Random(1)
    blocks = [(process.malloc(512 * (1 + at % 700)), 512 * (1 + at % 700)) for at in range(5000)]
    process.start()
    for _ in range(3):
        rng.shuffle(blocks)
        for address, nbytes in blocks[:3000]:
            process.free(address, nbytes)
        blocks[:3000] = [(process.malloc(nbytes), nbytes) for _, nbytes in blocks[:3000]]
        assert len({address for address, _ in blocks}) == 5000
        process.cache.audit()
        process.start()
    for address, nbytes in blocks:
        process.free(address, nbytes)


def test_an_empty_request_enters_python_only_where_it_gets_a_block(
    make: Callable[..., Process],
) -> None:
    process = make("torch")
    assert process.malloc(0) == 0
    pool = process.cache.private_pool()
    with pool, process.cache.route(pool):  # the front is off
        assert process.malloc(0) == 0
    assert process.entered == 0
    tiny = make("tiny")
    address = tiny.malloc(0)
    assert address
    assert tiny.entered == 1
    tiny.free(address, 0)


def test_the_codes_of_rows_are_those_of_the_statistics() -> None:
    from importlib import resources

    text = resources.files("devalloc.interop").joinpath("bridge.c").read_text()
    line = (
        f"enum {{ MALLOC = {rows.MALLOC}, FREE = {rows.FREE}, SPLIT_IN = {rows.SPLIT_IN}, "
        f"SPLIT_OUT = {rows.SPLIT_OUT}, MALLOC_PART = {rows.MALLOC_PART}, "
        f"FREE_PART = {rows.FREE_PART} }};"
    )
    assert line in text


def test_running_out_gives_null(make: Callable[..., Process]) -> None:
    process = make(capacity=20 * MIB)
    address = process.malloc(20 * MIB)
    with pytest.warns(AllocationWarning, match="OutOfMemory"):
        assert process.malloc(20 * MIB) == 0
    process.free(address, 20 * MIB)
    assert process.malloc(20 * MIB) == address
    process.free(address, 20 * MIB)


def test_wrong_frees_are_shown(process: Process) -> None:
    address = process.malloc(5 * MIB)
    process.free(address, 5 * MIB)
    with pytest.warns(AllocationWarning, match="DoubleFree"):
        process.free(address, 5 * MIB)
    with pytest.warns(AllocationWarning, match="InvalidFree"):
        process.free(12345, 1)
    assert process.malloc(5 * MIB) == address
    process.free(address, 5 * MIB)


@pytest.mark.parametrize(
    "policy", ["torch", "bfc", "auto_growth", "frugal", "tiny", "expandable_segments:True"]
)
def test_random_calls(policy: str, make: Callable[..., Process]) -> None:
    """Against a plain model: what is live is disjoint, on its stream, and all is accounted for."""
    process = make(policy, capacity=400 * MIB)
    rng = random.Random(policy)
    live: dict[int, tuple[int, int]] = {}
    served = 0
    for step in range(4000):
        choice = rng.random()
        if choice < 0.5 and len(live) < 150:
            nbytes = rng.choice((1, 300, 512, 513, 5 * KIB, 700 * KIB, 3 * MIB))
            nbytes = max(1, nbytes - rng.randrange(300))
            stream = rng.randrange(3)
            address = process.malloc(nbytes, stream)
            assert address not in live
            live[address] = (nbytes, stream)
        elif live:
            address = rng.choice(list(live))
            nbytes, stream = live.pop(address)
            process.free(address, nbytes, stream)
        if step % 400 == 399:
            served += process.on
            process.cache.audit()
            ends = 0
            for address in sorted(live):
                assert address >= ends
                assert process.cache.size_of(address) >= live[address][0]
                ends = address + process.cache.size_of(address)
            stats = process.cache.stats()
            assert stats["requested_bytes.all.current"] == sum(at[0] for at in live.values())
    for address, (nbytes, stream) in live.items():
        process.free(address, nbytes, stream)
    assert served > 5


@pytest.mark.proves("library/allocation-free-c")
def test_threads(make: Callable[..., Process]) -> None:
    """Without the GIL, while another thread audits, empties and captures."""
    process = make("torch")
    owners: dict[int, int] = {}
    errors: list[BaseException] = []
    stop = threading.Event()

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            mine: list[tuple[int, int, int]] = []
            for _ in range(4000):
                if mine and (len(mine) > 20 or rng.random() < 0.5):
                    address, nbytes, stream = mine.pop(rng.randrange(len(mine)))
                    assert owners.pop(address) == seed
                    process.free(address, nbytes, stream)
                else:
                    nbytes, stream = rng.choice((100, 512, 5000, 3 * MIB)), rng.randrange(2)
                    address = process.malloc(nbytes, stream)
                    assert address
                    assert owners.setdefault(address, seed) == seed, "given twice"
                    mine.append((address, nbytes, stream))
            for address, nbytes, stream in mine:
                assert owners.pop(address) == seed
                process.free(address, nbytes, stream)
        except BaseException as error:
            errors.append(error)

    def look() -> None:
        try:
            while not stop.wait(0.002):
                process.cache.audit()
                process.cache.empty_cache()
                pool = process.cache.private_pool()
                with pool, process.cache.route(pool, capture=True):
                    process.free(process.malloc(MIB), MIB)
        except BaseException as error:
            errors.append(error)

    run_watched([partial(work, seed) for seed in range(6)], look, stop)
    assert not errors, errors[0]
    assert not owners
    stats = process.cache.stats()
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork with several threads
def test_children_of_a_busy_process_can_allocate(process: Process) -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            process.free(process.malloc(512), 512)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                process.free(process.malloc(512), 512)
                process.cache.stats()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_an_installed_arena_has_a_front(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    monkeypatch.setattr(pluggable, "_INSTALLED", pluggable._Installed())
    arena = Arena(source="host")
    arena.cache.source.device = type("Device", (), {"index": 63, "type": "cuda"})()
    pluggable.serve(arena.cache, arena)
    calls = called(pluggable.functions)
    address = calls.malloc(1000, 63, None)
    calls.free(address, 1000, 63, None)
    loan = arena.cache.loan
    assert isinstance(loan.front, bridge.Front)
    arena.cache.record_history("state")
    with pytest.raises(OutOfMemory):
        arena.cache.malloc(1 << 62)


# On a GPU -----------------------------------------------------------------------------------------


ON_A_GPU = """
import gc, os, threading, torch, devalloc
arena = devalloc.Arena.install(policy="{policy}", source="{source}", limit="8GiB")
front = arena.cache.loan.front
torch.ones(1, device="cuda").sum().item()

# Steady sizes: once no segment is added, and the front serves, nothing enters Python.
def turn():
    sizes = (100, 5000, 3 << 20)
    held = [torch.full((size,), 7, dtype=torch.int32, device="cuda") for size in sizes]
    assert all(bool((tensor == 7).all()) for tensor in held)
for _ in range(50):
    turn()
entered = []
serve = arena.cache.loan.serve
arena.cache.loan.serve = lambda nbytes, stream: entered.append(nbytes) or serve(nbytes, stream)
for _ in range(50):
    turn()
assert not entered, entered
assert front.counts()["on"]

# Threads, each on a stream of its own, that write a tag and read it back.
errors = []
def work(seed):
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            held = []
            for step in range(400):
                tag = seed * 100_000 + step
                tensor = torch.full((1000 + 5000 * (step % 7),), tag, device="cuda")
                held.append((tensor, tag))
                del tensor
                if len(held) > 5:
                    tensor, tag = held.pop(step % 5)
                    assert bool((tensor == tag).all()), "another thread has this memory"
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
for thread in threads: thread.start()
for thread in threads:
    while thread.is_alive():
        thread.join(0.01)
        arena.stats()
        arena.cache.audit()
assert not errors, errors[0]

# A tensor that a busy side stream still reads when it ends.
side = torch.cuda.Stream()
for step in range(20):
    tensor = torch.full((1 << 20,), step, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000)
        copy = tensor.clone()
    tensor.record_stream(side)
    del tensor
    other = torch.full((1 << 20,), -1, device="cuda")
    torch.cuda.synchronize()
    assert bool((copy == step).all()), "it was overwritten while the side stream read it"
    del other, copy

# A graph whose memory is its own, beside a front that is busy again after the capture.
pool = arena.graph_pool()
graph = torch.cuda.CUDAGraph()
x = torch.ones(1 << 16, device="cuda")
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    (x * 2 + 1).sum()
torch.cuda.current_stream().wait_stream(side)
with arena.capture(pool), torch.cuda.graph(graph, stream=side):
    y = x * 2 + 1
    z = y.sum()
for step in range(20):
    x.fill_(step)
    noise = [torch.full((1 << 16,), -5.0, device="cuda") for _ in range(4)]
    graph.replay()
    torch.cuda.synchronize()
    assert z.item() == (2 * step + 1) * (1 << 16), step
    del noise
assert front.counts()["on"]
del y, z, graph  # with the graph goes what PyTorch's generator keeps in the pool for it
pool.release()

child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0

arena.set_limit("4GiB")
big = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
del big
big = torch.empty((3 << 30) + (512 << 20), dtype=torch.uint8, device="cuda")
assert big.data_ptr()
del big, x
gc.collect()
torch.cuda.synchronize()
torch._C._cuda_clearCublasWorkspaces()
torch.cuda.empty_cache()
stats = arena.stats()
assert stats["reserved_bytes.all.current"] <= 4 << 20, stats["reserved_bytes.all.current"]
assert stats["allocation.all.allocated"] > 5000
arena.cache.audit()
print("sound")
"""


@pytest.mark.proves("library/allocation-free-c")
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("policy", ["torch", "frugal", "bfc", "expandable_segments:True"])
def test_on_the_gpu_the_front_keeps_every_promise(policy: str) -> None:
    source = "virtual" if "expandable" in policy else "cuda"
    done = subprocess.run(
        [sys.executable, "-c", ON_A_GPU.replace("{policy}", policy).replace("{source}", source)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stdout == "sound\n", done.stderr
