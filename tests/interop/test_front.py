"""The front cache: what it keeps, what it must not keep, and that nobody else can tell.

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
from pathlib import Path

import pytest

from devalloc import Arena, OutOfMemory
from devalloc.cache import BfcPolicy, Cache, Policy, TorchPolicy
from devalloc.cache import statistics as rows
from devalloc.interop import bridge, pluggable
from devalloc.interop.pluggable import AllocationWarning
from tests.arena.support import KIB, MIB, FakeStreams, NumberSource
from tests.interop.support import Calls, called, require_compiler

ROOT = Path(__file__).resolve().parents[2]
DEVICES = itertools.count(5)


class Process:
    """A cache that serves PyTorch, with its front; ``entered`` counts the calls into Python."""

    def __init__(
        self, policy: str | Policy = "torch", capacity: int | None = None, **bounds: int
    ) -> None:
        self.device = next(DEVICES) % 64
        self.streams = FakeStreams()
        self.source = NumberSource(capacity)
        self.cache = Cache(self.source, policy, streams=self.streams)
        self.calls: Calls = called(pluggable.functions)
        rules = self.cache.policy
        self.front = bridge.Front("install", self.device, rules.unit, rules.zero_is_null, **bounds)
        self.cache.attach_front(self.front)
        pluggable._INSTALLED.caches[self.device] = self.cache
        self.entered = 0
        lend, take_back = self.cache.lend, self.cache.take_back

        def counted_lend(nbytes: int, stream: int) -> int:
            self.entered += 1
            return lend(nbytes, stream)

        def counted_take_back(address: int, nbytes: int) -> None:
            self.entered += 1
            take_back(address, nbytes)

        self.cache.lend = counted_lend  # type: ignore[method-assign]
        self.cache.take_back = counted_take_back  # type: ignore[method-assign]

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        return self.calls.malloc(nbytes, self.device, stream) or 0

    def free(self, address: int, nbytes: int, stream: int = 0) -> None:
        self.calls.free(address, nbytes, self.device, stream)

    def held(self) -> int:
        return self.front.counts()["held"]

    def end(self) -> None:
        """All memory goes back; the device's front is left empty and off."""
        self.cache.audit()
        self.cache.record_history("state")
        assert self.front.counts() == {"known": 0, "held": 0, "held_bytes": 0, "classes": 0}
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


def test_a_freed_block_is_handed_out_again_without_python(process: Process) -> None:
    address = process.malloc(5 * MIB, 3)
    entered = process.entered
    for nbytes in (5 * MIB, 5 * MIB - 100, 5 * MIB):
        process.free(address, nbytes, 3)
        assert process.held() == 1
        assert process.malloc(nbytes, 3) == address
    assert process.entered == entered
    assert process.malloc(5 * MIB, 3) != address
    for block in (address, address + 5 * MIB):
        process.free(block, 5 * MIB, 3)


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


def test_streams_and_sizes_do_not_share(process: Process) -> None:
    address = process.malloc(5 * MIB, 3)
    process.free(address, 5 * MIB, 3)
    entered = process.entered
    others = [process.malloc(5 * MIB, 4), process.malloc(5 * MIB + 1, 3)]
    assert process.entered == entered + 2
    assert others[0] != address
    assert process.cache.stats()["allocation.all.current"] == 2
    process.free(others[0], 5 * MIB, 4)
    process.free(others[1], 5 * MIB + 1, 3)


def test_statistics_are_those_of_a_cache_that_is_always_asked(make: Callable[..., Process]) -> None:
    process, plain = make(), Cache(NumberSource(), "torch")
    rng = random.Random(3)
    pairs: list[tuple[int, int, int]] = []
    sizes = [rng.choice((100, 400, 5000, 3 * MIB, 30 * MIB)) for _ in range(12)]
    for step in range(3000):
        if pairs and (len(pairs) > 30 or rng.random() < 0.5):
            nbytes, mine, its = pairs.pop(rng.randrange(len(pairs)))
            process.free(mine, nbytes)
            plain.free(its)
        else:
            nbytes = rng.choice(sizes) - rng.randrange(50)
            pairs.append((nbytes, process.malloc(nbytes), plain.malloc(nbytes)))
        if step % 500 == 250:
            process.cache.audit()
    assert process.entered < 1500
    # What is held is not merged, so the places and the inactive blocks may differ.
    names = [
        f"{quantity}.{pool}.{kind}"
        for quantity in ("allocation", "active", "requested_bytes")
        for pool in rows.POOLS
        for kind in ("current", "peak", "allocated", "freed")
    ]
    found, expected = process.cache.stats(), plain.stats()
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}
    for nbytes, mine, _ in pairs:
        process.free(mine, nbytes)


def test_the_codes_of_rows_are_those_of_the_statistics() -> None:
    from importlib import resources

    text = resources.files("devalloc.interop").joinpath("bridge.c").read_text()
    line = (
        f"enum {{ MALLOC = {rows.MALLOC}, FREE = {rows.FREE}, MALLOC_PART = {rows.MALLOC_PART}, "
        f"FREE_PART = {rows.FREE_PART} }};"
    )
    assert line in text


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


@pytest.mark.parametrize("flush", FLUSHES.values(), ids=FLUSHES)
def test_who_looks_or_changes_things_sees_no_front(
    process: Process, flush: Callable[[Cache], object]
) -> None:
    kept = process.malloc(100)
    address = process.malloc(5 * MIB)
    process.free(address, 5 * MIB)
    process.free(kept, 100)
    kept = process.malloc(90)  # of the same class, with another request
    assert process.held() == 1
    flush(process.cache)
    assert process.held() == 0
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
    process.free(kept, 90)


def test_the_source_is_asked_for_nothing_that_is_held(make: Callable[..., Process]) -> None:
    process = make(capacity=22 * MIB)
    blocks = [process.malloc(5 * MIB) for _ in range(4)]
    for block in blocks:
        process.free(block, 5 * MIB)
    assert process.held() == 4
    address = process.malloc(19 * MIB)
    assert address == blocks[0], "the four were merged"
    assert process.source.asked == [20 * MIB]
    process.free(address, 19 * MIB)
    address = process.malloc(22 * MIB)
    assert process.source.asked[1:] == [22 * MIB, 22 * MIB], "what was held went back for it"
    process.free(address, 22 * MIB)


def test_running_out_gives_null(make: Callable[..., Process]) -> None:
    process = make(capacity=20 * MIB)
    address = process.malloc(20 * MIB)
    with pytest.warns(AllocationWarning, match="OutOfMemory"):
        assert process.malloc(20 * MIB) == 0
    process.free(address, 20 * MIB)
    assert process.malloc(20 * MIB) == address
    process.free(address, 20 * MIB)


@pytest.mark.parametrize("by", ["PyTorch", "the arena"])
def test_what_another_stream_uses_is_not_held(process: Process, by: str) -> None:
    address = process.malloc(5 * MIB)
    process.free(address, 5 * MIB)
    assert process.malloc(5 * MIB) == address
    if by == "PyTorch":
        process.calls.record_stream(address, 9)
    else:
        process.cache.record_stream(address, 9)
    process.free(address, 5 * MIB)
    assert process.held() == 0
    assert process.streams.queued == {9: 1}
    other = process.malloc(5 * MIB)
    assert other != address
    process.free(other, 5 * MIB)
    process.streams.advance(9)
    process.cache.process_events()
    assert process.malloc(5 * MIB) == address
    process.free(address, 5 * MIB)


def test_the_own_stream_is_no_other(process: Process) -> None:
    address = process.malloc(5 * MIB, 3)
    process.calls.record_stream(address, 3)
    process.free(address, 5 * MIB, 3)
    assert process.held() == 1


def test_a_forgotten_streams_blocks_are_not_held_under_its_name(process: Process) -> None:
    """Its handle may be that of a new stream, which is not behind the one that owns them now."""
    address = process.malloc(5 * MIB, 3)
    process.cache.forget_stream(3)
    process.free(address, 5 * MIB, 3)
    assert process.held() == 0
    other = process.malloc(5 * MIB, 3)
    assert other != address
    process.free(other, 5 * MIB, 3)


def test_a_capture_takes_nothing_from_the_front_and_gives_it_nothing(process: Process) -> None:
    cache = process.cache
    held, live = process.malloc(5 * MIB), process.malloc(6 * MIB)
    process.free(held, 5 * MIB)
    with cache.private_pool() as pool:
        with cache.route(pool, capture=True):
            assert process.held() == 0
            inside = process.malloc(5 * MIB)
            assert inside != held
            process.free(inside, 5 * MIB)
            assert process.malloc(5 * MIB) == inside, "in the pool"
            process.free(live, 6 * MIB)
            assert process.held() == 0
            assert cache.stats()["active.all.current"] == 2, "held until the capture ends"
        again = process.malloc(6 * MIB)
        process.free(again, 6 * MIB)
        assert process.held() == 1, "the front is on again, beside the pool"
        process.free(inside, 5 * MIB)
        assert process.held() == 1, "a graph's block is not held"


def test_history_sees_every_event(process: Process) -> None:
    address = process.malloc(5 * MIB)
    process.cache.record_history("all", stacks=False)
    for _ in range(3):
        process.free(address, 5 * MIB)
        address = process.malloc(5 * MIB)
    process.cache.record_history(None)
    trace = process.cache.snapshot()["device_traces"][0]  # type: ignore[index]
    assert [entry["action"] for entry in trace].count("alloc") == 3
    process.free(address, 5 * MIB)
    assert process.malloc(5 * MIB) == address
    process.free(address, 5 * MIB)


@pytest.mark.parametrize(
    "policy", [TorchPolicy(garbage_collection_threshold=0.5), BfcPolicy(timestamps=True)], ids=str
)
def test_policies_that_see_every_call_do(policy: Policy, make: Callable[..., Process]) -> None:
    require_compiler()
    source = NumberSource()
    cache = Cache(source, policy, limit="1GiB", streams=FakeStreams())
    front = bridge.Front("install", next(DEVICES) % 64, 512, True)
    cache.attach_front(front)
    cache.take_back(cache.lend(5 * MIB, 0), 5 * MIB)
    assert front.counts()["known"] == 0


@pytest.mark.parametrize(("bound", "most"), [({"max_blocks": 10}, 10), ({"max_bytes": 10_240}, 20)])
def test_bounds(make: Callable[..., Process], bound: dict[str, int], most: int) -> None:
    process = make(**bound)
    blocks = [process.malloc(512) for _ in range(50)]
    highest = 0
    for block in blocks:
        process.free(block, 512)
        highest = max(highest, process.held())
    assert highest == most
    assert process.cache.stats()["allocation.all.current"] == 0
    large = process.malloc(64 * MIB)
    process.free(process.malloc(512), 512)
    process.free(large, 64 * MIB)
    assert process.held() == 1 + (bound == {"max_blocks": 10}), "what never fits flushes nothing"


def test_a_log_that_is_full_is_read(process: Process) -> None:
    address = process.malloc(512)
    for _ in range(40_000):
        process.free(address, 512)
        assert process.malloc(512) == address
    process.free(address, 512)
    stats = process.cache.stats()
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] == 40_001
    assert stats["allocated_bytes.all.peak"] == 512
    assert 2 <= process.entered < 20


def test_wrong_frees_are_shown(process: Process) -> None:
    address = process.malloc(5 * MIB)
    process.free(address, 5 * MIB)
    with pytest.warns(AllocationWarning, match="DoubleFree"):
        process.free(address, 5 * MIB)
    with pytest.warns(AllocationWarning, match="InvalidFree"):
        process.free(12345, 1)
    assert process.malloc(5 * MIB) == address
    process.free(address, 5 * MIB)


def test_blocks_of_the_arenas_own_are_not_held(process: Process) -> None:
    address = process.cache.malloc(5 * MIB)
    process.cache.free(address)
    assert process.front.counts()["known"] == 0


@pytest.mark.parametrize("policy", ["torch", "bfc", "auto_growth", "frugal", "tiny"])
def test_random_calls(policy: str, make: Callable[..., Process]) -> None:
    """Against a plain model: what is live is disjoint, on its stream, and all is accounted for."""
    process = make(policy, capacity=400 * MIB, max_blocks=60)
    rng = random.Random(policy)
    live: dict[int, tuple[int, int]] = {}
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
            before = process.front.counts()["known"]
            assert before >= len(live)
            process.cache.audit()
            assert process.front.counts()["known"] <= len(live)
            ends = 0
            for address in sorted(live):
                assert address >= ends
                assert process.cache.size_of(address) >= live[address][0]
                ends = address + process.cache.size_of(address)
            stats = process.cache.stats()
            assert stats["requested_bytes.all.current"] == sum(at[0] for at in live.values())
    for address, (nbytes, stream) in live.items():
        process.free(address, nbytes, stream)


def test_many_addresses_and_classes(process: Process) -> None:
    """The tables grow, and lose entries from the midst of long runs."""
    rng = random.Random(1)
    blocks = [(process.malloc(512 * (1 + at % 700)), 512 * (1 + at % 700)) for at in range(5000)]
    for _ in range(3):
        rng.shuffle(blocks)
        for address, nbytes in blocks[:3000]:
            process.free(address, nbytes)
        assert process.held() == 3000
        entered = process.entered
        addresses = {address for address, _ in blocks[:3000]}
        blocks[:3000] = [(process.malloc(nbytes), nbytes) for _, nbytes in blocks[:3000]]
        assert {address for address, _ in blocks[:3000]} == addresses
        assert process.entered == entered
    for address, nbytes in blocks:
        process.free(address, nbytes)


def test_threads(make: Callable[..., Process]) -> None:
    """Without the GIL, while another thread audits, empties and captures."""
    process = make("torch", max_blocks=50)
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

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    watcher = threading.Thread(target=look)
    try:
        for thread in (watcher, *threads):
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()
        watcher.join()
        sys.setswitchinterval(interval)
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
    front = arena.cache._front
    assert isinstance(front, bridge.Front)
    assert front.counts()["held"] == 1
    arena.cache.record_history("state")
    with pytest.raises(OutOfMemory):
        arena.cache.malloc(1 << 62)


# On a GPU -----------------------------------------------------------------------------------------


ON_A_GPU = """
import gc, os, threading, torch, devalloc
arena = devalloc.Arena.install(policy="{policy}", limit="8GiB")
front = arena.cache._front
torch.ones(1, device="cuda").sum().item()

# Steady sizes: once no segment is added, before which the front is emptied, nothing enters Python.
def turn():
    sizes = (100, 5000, 3 << 20)
    held = [torch.full((size,), 7, dtype=torch.int32, device="cuda") for size in sizes]
    assert all(bool((tensor == 7).all()) for tensor in held)
for _ in range(3):
    turn()
entered = []
lend = arena.cache.lend
arena.cache.lend = lambda nbytes, stream: entered.append(nbytes) or lend(nbytes, stream)
for _ in range(50):
    turn()
assert not entered, entered
assert front.counts()["held"] >= 3

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
                    assert bool((tensor == tag).all()), "somebody else has this memory"
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
assert front.counts()["held"] > 0
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


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("policy", ["torch", "frugal", "bfc"])
def test_on_the_gpu_the_front_keeps_every_promise(policy: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_A_GPU.replace("{policy}", policy)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stdout == "sound\n", done.stderr


def step(length: int, layers: int = 6) -> Iterator[tuple[str, str, int]]:
    """What a training step of a sequence of this length asks for: (malloc or free, name, bytes)."""
    wide = 16 * KIB * length
    for layer in range(layers):
        yield "malloc", f"kept {layer}", wide
        yield "malloc", f"scores {layer}", 64 * length * length
        yield "malloc", "temporary", 4 * wide
        yield "malloc", f"inner {layer}", 4 * wide
        yield "free", "temporary", 4 * wide
        yield "malloc", f"mask {layer}", KIB * length
    for layer in reversed(range(layers)):
        yield "malloc", "gradient", 4 * wide
        yield "free", f"inner {layer}", 4 * wide
        yield "malloc", "of scores", 64 * length * length
        yield "free", f"scores {layer}", 64 * length * length
        yield "free", "of scores", 64 * length * length
        yield "free", f"mask {layer}", KIB * length
        yield "free", f"kept {layer}", wide
        yield "free", "gradient", 4 * wide


def train(process: Process, lengths: list[int]) -> None:
    blocks: dict[str, int] = {}
    for length in lengths:
        for what, name, nbytes in step(length):
            if what == "malloc":
                blocks[name] = process.malloc(nbytes)
            else:
                process.free(blocks.pop(name), nbytes)


@pytest.mark.parametrize("policy", ["torch", "frugal"])
def test_the_front_costs_no_memory_while_a_program_changes(
    make: Callable[..., Process], policy: str
) -> None:
    draw = random.Random(4)
    lengths = [draw.randint(64, 900) for _ in range(40)]
    peaks, entered = [], []
    for process in (make(policy), make(policy, max_bytes=0)):
        train(process, lengths)
        # Then it repeats itself, and is served from the front.
        train(process, [512] * 150)
        before = process.entered
        train(process, [512] * 10)
        entered.append(process.entered - before)
        peaks.append(process.cache.stats()["reserved_bytes.all.peak"])
    assert entered == [0, 10 * len(list(step(512)))]
    assert peaks[0] <= 1.02 * peaks[1]


def test_a_want_of_large_blocks_leaves_small_ones_in_the_front(
    make: Callable[..., Process],
) -> None:
    process = make("torch", capacity=40 * MIB)
    for nbytes in (12 * MIB, 16 * MIB, 24 * MIB):  # no new sizes any more
        process.free(process.malloc(nbytes), nbytes)
        process.cache.empty_cache()
    blocks = [(process.malloc(nbytes), nbytes) for nbytes in (KIB, 12 * MIB, 24 * MIB)]
    for address, nbytes in blocks:
        process.free(address, nbytes)
    for _ in range(3000):  # so many calls that the program repeats itself
        process.free(process.malloc(KIB), KIB)
    assert process.held() == 3
    entered = process.entered
    process.free(process.malloc(16 * MIB), 16 * MIB)
    assert process.entered == entered + 1
    for nbytes in (KIB, 12 * MIB):
        process.free(process.malloc(nbytes), nbytes)
    assert process.entered == entered + 1, "what the request did not need is still there"
