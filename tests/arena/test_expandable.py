"""Segments that grow and shrink: policies with ``expandable_segments``.

Over addresses without memory, over the CPU's double of mapped memory, and over a driver that fails
at each call in turn; unless marked `gpu`.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from devalloc import Arena, DevallocError, InvalidArgument, OutOfMemory
from devalloc.arena.store import expandable
from devalloc.cache import (
    POLICIES,
    AutoGrowthPolicy,
    BfcPolicy,
    Cache,
    FrugalPolicy,
    TorchPolicy,
    make_policy,
)
from devalloc.replay.torch_snapshots import snapshot_trace
from devalloc.sources import SimulatedSource, VirtualSource
from devalloc.sources.adaptors import StatisticsAdaptor
from devalloc.sources.cuda_pages import CudaPages
from devalloc.sources.virtual_calls import HostPages
from tests.arena.support import KIB, MIB, FakeStreams, NumberSource
from tests.arena.test_attacks import places
from tests.sources.doubles import FakeDriver, fake_driver

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
EXPANDABLE = TorchPolicy(expandable_segments=True)


def made(**options: object) -> tuple[Cache, NumberSource]:
    source = NumberSource()
    streams = FakeStreams()
    return Cache(source, EXPANDABLE, streams=streams, **options), source  # type: ignore[arg-type]


def segments(cache: Cache) -> list[tuple[int, int]]:
    """(offset from the first, MiB) of the segments."""
    found = [(at["address"], at["total_size"]) for at in cache.snapshot()["segments"]]
    return [((address - found[0][0]) // MIB, size // MIB) for address, size in found]


# Growing and shrinking ----------------------------------------------------------------------------


@pytest.mark.proves("torch/expandable-segments")
def test_one_segment_grows() -> None:
    cache, source = made()
    first = cache.malloc(16 * MIB)
    second = cache.malloc(17 * MIB - 512)
    third = cache.malloc(15 * MIB)
    assert (second, third) == (first + 16 * MIB, first + 33 * MIB - 512)
    assert source.asked == [16 * MIB, 18 * MIB, 14 * MIB], "only what is missing, in whole pages"
    assert segments(cache) == [(0, 48)]
    small = cache.malloc(1000)
    assert not first <= small < first + 64 * MIB, "the small pool has its own"
    cache.audit()
    stats = cache.stats()
    assert stats["segment.all.current"] == stats["segment.all.peak"] == 2
    assert stats["reserved_bytes.all.current"] == 50 * MIB == cache.reserved
    assert (stats["num_device_alloc"], stats["num_device_free"]) == (4, 0)
    for address in (first, second, third, small):
        cache.free(address)
    assert cache.empty_cache() == 50 * MIB
    assert (source.used, source.parts_of) == (0, {})


@pytest.mark.proves("torch/expandable-segments")
def test_what_is_free_in_the_middle_goes_and_comes_back() -> None:
    cache, source = made()
    blocks = [cache.malloc(20 * MIB) for _ in range(5)]
    for at in (1, 3):
        cache.free(blocks[at])
    assert cache.empty_cache() == 40 * MIB
    assert segments(cache) == [(0, 20), (40, 20), (80, 20)]
    cache.audit()
    assert cache.stats()["segment.all.current"] == 3 == cache.stats()["segment.all.peak"]
    # The lowest address where it fits, and then two segments are one.
    assert cache.malloc(12 * MIB) == blocks[1]
    assert segments(cache) == [(0, 32), (40, 20), (80, 20)]
    assert cache.malloc(14 * MIB) == blocks[3]
    assert cache.malloc(8 * MIB) == blocks[1] + 12 * MIB
    assert segments(cache) == [(0, 74), (80, 20)]
    cache.audit()
    assert cache.malloc(30 * MIB) == blocks[4] + 20 * MIB
    assert cache.reserved == source.used


@pytest.mark.proves("torch/expandable-segments")
def test_a_block_keeps_its_handle_and_no_more() -> None:
    cache, source = made()
    large = cache.malloc(200 * MIB)  # handles of 64, 64, 64 and 8 MiB
    cache.free(large)
    kept = cache.malloc(2 * MIB)
    assert kept == large
    assert cache.empty_cache() == 136 * MIB
    assert segments(cache) == [(0, 64)]
    cache.free(kept)
    cache.audit()
    assert cache.empty_cache() == 64 * MIB
    assert not source.parts_of


def test_growing_needs_less_where_little_is_left() -> None:
    cache, source = made(limit=25 * MIB)
    first = cache.malloc(3 * MIB)
    assert cache.reserved == 20 * MIB, "to be shared, as without expandable segments"
    second = cache.malloc(18 * MIB)
    assert source.asked == [20 * MIB, 2 * MIB]
    assert second == first + 3 * MIB
    third = cache.malloc(2 * MIB + 512)
    assert source.asked == [20 * MIB, 2 * MIB, 2 * MIB], "20 MiB were refused by the limit"
    with pytest.raises(OutOfMemory, match="a limit of 25 MiB"):
        cache.malloc(2 * MIB)
    cache.audit()
    for address in (first, second, third):
        cache.free(address)


def test_a_request_that_fits_nowhere_else_takes_a_new_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expandable, "RANGE_BYTES", 64 * MIB)
    cache, source = made()
    first, second = cache.malloc(40 * MIB), cache.malloc(30 * MIB)
    assert not first <= second < first + 64 * MIB
    third = cache.malloc(100 * MIB)
    assert len(source.parts_of) == 3
    assert cache.malloc(24 * MIB) == first + 40 * MIB, "the lowest that has room"
    cache.audit()
    cache.free(third)
    cache.empty_cache()
    assert len(source.parts_of) == 2, "addresses go with the last of the memory"


@pytest.mark.proves("torch/expandable-segments")
@pytest.mark.parametrize("name", POLICIES)
def test_many_tensors_replaced_by_larger_ones(name: str) -> None:
    """Weights that are updated one by one: without expandable segments twice the memory."""
    source = SimulatedSource(granularity=2 * MIB)
    cache = Cache(source, make_policy(name, expandable_segments=True))
    blocks = [cache.malloc(16 * MIB) for _ in range(600)]
    for at, block in enumerate(blocks):
        cache.free(block)
        blocks[at] = cache.malloc(16 * MIB * 105 // 100)
    stats = cache.stats()
    most = stats["reserved_bytes.all.peak"] / stats["allocated_bytes.all.peak"]
    assert most <= 1.1
    assert source.peak == stats["reserved_bytes.all.peak"]
    cache.audit()


def test_what_is_not_safe_yet_does_not_count_as_free_beside_a_gap() -> None:
    """With time stamps: it is not merged with what is mapped behind it."""
    source = NumberSource()
    cache = Cache(source, BfcPolicy(timestamps=True, expandable_segments=True))
    cache.free(cache.malloc(20 * MIB))
    large = cache.malloc(30 * MIB)
    assert source.asked == [20 * MIB, 30 * MIB]
    assert cache.size_of(large) == 30 * MIB
    cache.audit()


def test_a_range_that_was_made_for_nothing_goes() -> None:
    source = NumberSource(capacity=0)
    cache = Cache(source, EXPANDABLE)
    with pytest.raises(OutOfMemory, match="the source has 0 bytes"):
        cache.malloc(1000)
    cache.empty_cache()
    assert not source.parts_of
    cache.audit()


@pytest.mark.proves("frugal/expandable")
def test_frugal_gives_back_pages_before_it_sets_a_record() -> None:
    source = NumberSource()
    cache = Cache(source, FrugalPolicy(expandable_segments=True))
    blocks = [cache.malloc(20 * MIB) for _ in range(4)]
    cache.free(blocks[1])
    large = cache.malloc(40 * MIB)
    assert source.freed == [20 * MIB]
    assert cache.stats()["reserved_bytes.all.peak"] == 100 * MIB
    cache.free(large)
    cache.malloc(20 * MIB)
    assert source.used == cache.reserved
    cache.audit()


# Streams and pools --------------------------------------------------------------------------------


def test_streams_have_ranges_of_their_own() -> None:
    cache, source = made()
    addresses = {stream: cache.malloc(3 * MIB, stream) for stream in (0, 7)}
    assert len(source.parts_of) == 2
    cache.forget_stream(7)
    cache.audit()
    assert addresses[0] < cache.malloc(100 * MIB, 0) < addresses[7], "the first range has room"
    assert len(source.parts_of) == 2
    cache.free(addresses[7])
    cache.empty_cache()
    assert len(source.parts_of) == 1


def test_the_device_is_waited_for_before_anything_is_unmapped() -> None:
    cache, _ = made()
    streams = cache.streams
    assert isinstance(streams, FakeStreams)
    kept, freed = cache.malloc(20 * MIB, 3), cache.malloc(20 * MIB, 3)
    streams.record(3)
    cache.free(freed)
    assert streams.done.get(3, 0) == 0, "a free waits for nothing"
    cache.empty_cache()
    assert streams.done[3] == streams.queued[3]
    cache.free(kept)


@pytest.mark.proves("torch/expandable-segments")
def test_during_a_capture_nothing_is_unmapped() -> None:
    cache, source = made(limit=64 * MIB)
    kept, freed = cache.malloc(20 * MIB), cache.malloc(20 * MIB)
    cache.free(freed)
    pool = cache.private_pool()
    with cache.route(pool, capture=True):
        cache.streams.in_capture = True  # type: ignore[attr-defined]
        inside = cache.malloc(20 * MIB)
        with pytest.raises(OutOfMemory):
            cache.malloc(30 * MIB)
        assert cache.empty_cache() == 0
        cache.streams.in_capture = False  # type: ignore[attr-defined]
    assert not source.freed
    assert len(source.parts_of) == 2, "a private pool has ranges of its own"
    cache.free(inside)
    pool.release()
    cache.free(kept)
    cache.empty_cache()
    assert not source.parts_of
    cache.audit()


def test_pages_of_a_pool_that_no_graph_uses_go_with_each_free() -> None:
    cache, source = made()
    pool = cache.private_pool()
    with cache.route(pool):
        blocks = [cache.malloc(20 * MIB) for _ in range(3)]
    pool.release()
    cache.free(blocks[1])
    assert source.used == 40 * MIB
    cache.free(blocks[0])
    cache.free(blocks[2])
    assert not source.parts_of


def test_a_closed_cache_gives_pages_back_with_each_free() -> None:
    cache, source = made()
    blocks = [cache.malloc(20 * MIB) for _ in range(3)]
    cache.close()
    cache.free(blocks[1])
    assert source.used == 40 * MIB
    cache.audit()
    cache.free(blocks[2])
    cache.free(blocks[0])
    assert not source.parts_of


class StubbornSource(NumberSource):
    """Takes nothing back while `broken`, and counts how often it was asked to."""

    broken = True
    asked_back = 0

    def unmap(self, address: int, offset: int, nbytes: int) -> None:
        self.asked_back += 1
        if self.broken:
            raise RuntimeError("the driver is gone")
        super().unmap(address, offset, nbytes)


@pytest.mark.parametrize("blocks", [1, 2], ids=["a whole segment", "the end of one"])
def test_what_the_source_does_not_take_back_is_tried_once(blocks: int) -> None:
    source = StubbornSource()
    cache = Cache(source, EXPANDABLE, streams=FakeStreams())
    live = [cache.malloc(20 * MIB) for _ in range(blocks)]
    cache.close()
    with pytest.raises(RuntimeError, match="the driver is gone"):
        cache.free(live.pop())
    assert source.asked_back == 1
    cache.audit()
    source.broken = False
    cache.close()
    for block in live:
        cache.free(block)
    cache.audit()
    assert not source.parts_of


def test_regions_keep_segments_of_their_own() -> None:
    source = VirtualSource(CPU, HostPages())
    with Arena(source=source, policy=EXPANDABLE) as arena:
        outside = arena.full((MIB,), 1.0)
        with arena.region("a", backup="cpu"):
            inside = [arena.full((MIB,), float(at)) for at in range(8)]
        assert [at["is_expandable"] for at in arena.snapshot()["segments"]].count(True) == 1
        arena.pause()
        more = arena.full((8 * MIB,), 2.0)
        arena.resume()
        assert all(bool((each == at).all()) for at, each in enumerate(inside))
        assert bool((outside == 1).all())
        assert bool((more == 2).all())
        arena.cache.audit()
        del outside, inside, more
    gc.collect()
    assert source.stats().address_space == 0


# Reports ------------------------------------------------------------------------------------------


def test_history_and_snapshots_say_what_was_mapped() -> None:
    cache, _ = made()
    cache.record_history(stacks=False)
    blocks = [cache.malloc(20 * MIB) for _ in range(3)]
    cache.free(blocks[1])
    cache.empty_cache()
    snapshot = cache.snapshot()
    assert all(at["is_expandable"] for at in snapshot["segments"])
    assert snapshot["allocator_settings"]["expandable_segments"] is True
    entries = snapshot["device_traces"][0]
    changes = [
        (entry["action"], entry["addr"], entry["size"])
        for entry in entries
        if entry["action"].startswith("segment")
    ]
    assert changes == [
        *(("segment_map", block, 20 * MIB) for block in blocks),
        ("segment_unmap", blocks[1], 20 * MIB),
    ]
    recorded = snapshot_trace(snapshot).recorded
    assert recorded is not None
    assert recorded.peak_reserved == 60 * MIB, "a trace of it can be replayed"


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_it_takes_a_source_that_can_map(name: str) -> None:
    policy = make_policy(name, expandable_segments=True)
    for source in (HostPagesless(), StatisticsAdaptor(SimulatedSource())):
        with pytest.raises(InvalidArgument, match=r'reserved addresses, .*use source="virtual"'):
            Cache(source, policy)
    with pytest.raises(InvalidArgument, match='use source="virtual"'):
        Arena("cpu", policy=policy)


class HostPagesless(NumberSource):
    capabilities = None  # type: ignore[assignment]


@pytest.mark.proves("torch/expandable-segments", "torch/settings-string")
def test_the_settings_string() -> None:
    policy = TorchPolicy.from_settings("expandable_segments:True,roundup_power2_divisions:4")
    assert policy == TorchPolicy(expandable_segments=True, roundup_power2_divisions=4)
    assert not TorchPolicy.from_settings("expandable_segments:False").expandable_segments
    for bad in ("expandable_segments:yes", "expandable_segments:1", "expandable_segments:"):
        with pytest.raises(InvalidArgument, match="expandable_segments"):
            TorchPolicy.from_settings(bad)
    for bad_options in ({"expandable_segments": 1}, {"expandable_segments": "True"}):
        with pytest.raises(InvalidArgument, match="expandable_segments is True or False"):
            make_policy("torch", **bad_options)
    with pytest.raises(InvalidArgument, match="give only one of the two"):
        TorchPolicy.from_settings("expandable_segments:True,max_split_size_mb:64")
    with Arena("cpu", source="virtual", policy="expandable_segments:True") as arena:
        tensor = arena.full((1000,), 3.0)
        assert arena.snapshot()["segments"][0]["is_expandable"]
        stats = arena.stats()
        assert stats["virtual_bytes.address_space"] >= expandable.RANGE_BYTES
        assert stats["virtual_bytes.mapped"] >= stats["reserved_bytes.all.current"] == 2 * MIB
        assert float(tensor.sum()) == 3000
        del tensor


# Contents, failures, interruptions ----------------------------------------------------------------


@pytest.mark.parametrize("policy", [EXPANDABLE, AutoGrowthPolicy(expandable_segments=True)])
def test_contents_survive_whatever_is_mapped_around_them(policy: TorchPolicy) -> None:
    draw = random.Random(5)
    source = VirtualSource(CPU, HostPages())
    with Arena(source=source, policy=policy, limit="128MiB") as arena:
        live: list[tuple[torch.Tensor, int]] = []
        for turn in range(400):
            action = draw.random()
            try:
                if action < 0.55:
                    size = draw.choice((draw.randrange(1, 5000), draw.randrange(1, 2 * MIB)))
                    live.append((arena.full((size,), turn, dtype=torch.int32), turn))
                elif action < 0.9 and live:
                    live.pop(draw.randrange(len(live)))
                else:
                    arena.empty_cache()
            except OutOfMemory:
                live.clear()
            assert source.stats().mapped == arena.memory_reserved()
        arena.cache.audit()
        for tensor, turn in live:
            assert bool((tensor == turn).all())
        live.clear()
        del tensor
    gc.collect()
    assert source.stats().address_space == 0


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with fake_driver() as fake:
        yield fake


def scenario(cache: Cache) -> None:
    """Segments grow, are divided, joined and released; what fails is left out."""
    live: list[int] = []

    def malloc(nbytes: int) -> None:
        live.append(cache.malloc(nbytes))

    def free(at: int) -> None:
        if at < len(live):
            cache.free(live.pop(at))

    steps: tuple[Callable[[], object], ...] = (
        lambda: malloc(300 * KIB),
        *(lambda: malloc(20 * MIB),) * 3,
        lambda: malloc(150 * MIB),
        lambda: free(2),
        cache.empty_cache,
        lambda: malloc(12 * MIB),
        lambda: malloc(8 * MIB),
        lambda: free(0),
        lambda: malloc(100 * MIB),
    )
    first: DevallocError | None = None
    for step in steps:
        try:
            step()
        except DevallocError as error:
            first = first or error
        cache.audit()
    while live:
        cache.free(live.pop())
    cache.audit()
    if first is not None:
        raise first


def calls_of_the_scenario() -> int:
    with fake_driver() as fake:
        source = VirtualSource(GPU, CudaPages(GPU))
        source.idle_limit = "8GiB"
        fake.calls.clear()
        cache = Cache(source, EXPANDABLE, streams=FakeStreams())
        scenario(cache)
        cache.empty_cache()
        return len(fake.calls)


@pytest.mark.proves("torch/expandable-segments")
@pytest.mark.parametrize("call", range(1, calls_of_the_scenario() + 1))
def test_every_call_of_the_driver_may_fail(
    driver: FakeDriver, call: int, unraisable: list[str]
) -> None:
    """The statistics stay right, and the next correct call works."""
    source = VirtualSource(GPU, CudaPages(GPU))
    source.idle_limit = "8GiB"
    cache = Cache(source, EXPANDABLE, streams=FakeStreams())
    driver.calls.clear()
    driver.fail_at = call
    failed = None
    try:
        scenario(cache)
        cache.empty_cache()
    except DevallocError as error:
        failed = error
    assert failed is not None or unraisable, f"{driver.calls[call - 1]} failed unnoticed"
    assert source.stats().mapped == cache.reserved
    cache.audit()
    scenario(cache)
    cache.empty_cache()
    assert cache.reserved == 0
    source.trim()
    assert not any(driver.state), "nothing is left behind"


class KnowingSource(NumberSource):
    """Says whether memory is out, as sources do: of a range, and not of what is mapped in it."""

    def has(self, address: int) -> bool:
        return address in self.live or address in self.parts_of


class World:
    """A range with gaps, in which the next steps grow, join and divide segments."""

    def __init__(self) -> None:
        self.source = KnowingSource()
        self.cache = Cache(self.source, EXPANDABLE, streams=FakeStreams())
        self.blocks = [self.cache.malloc(20 * MIB) for _ in range(5)]
        self.cache.free(self.blocks[1])
        self.cache.empty_cache()
        self.cache.free(self.blocks[3])

    def end(self) -> None:
        self.cache.audit()
        assert self.source.used == self.cache.reserved
        for segment in self.cache.snapshot()["segments"]:  # type: ignore[attr-defined]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    self.cache.free(block["address"])
        self.cache.close()
        self.cache.audit()
        assert not self.source.parts_of


ACTS: dict[str, Callable[[World], object]] = {
    "grow": lambda world: world.cache.malloc(30 * MIB),
    "grow in a gap": lambda world: world.cache.malloc(12 * MIB),
    "join": lambda world: (world.cache.malloc(20 * MIB), world.cache.malloc(20 * MIB)),
    "a new range": lambda world: world.cache.malloc(100 * KIB),
    "divide": lambda world: world.cache.empty_cache(),
    "release": lambda world: (world.cache.free(world.blocks[0]), world.cache.empty_cache()),
    "release within a range": lambda world: (
        *map(world.cache.free, (world.blocks[2], world.blocks[4])),
        world.cache.empty_cache(),
    ),
    "close": lambda world: world.cache.close(),
}


@pytest.mark.proves("torch/expandable-segments", "library/interrupted-calls")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_interrupted_calls_leave_sound_segments(act: Callable[[World], object]) -> None:
    for world in places(World, act):  # type: ignore[arg-type, type-var]
        world.end()


# GPU ----------------------------------------------------------------------------------------------


@pytest.mark.proves("torch/expandable-segments")
@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("name", ["torch", "frugal"])
def test_on_the_gpu_tensors_are_replaced_by_larger_ones(name: str) -> None:
    arena = Arena("cuda:0", source="virtual", policy=make_policy(name, expandable_segments=True))
    # (The kernels used below are loaded, which takes memory of the device.)
    assert bool((arena.full((1,), 3, dtype=torch.int32) == 3).all())
    arena.empty_cache()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    tensors = [arena.full((4 * MIB,), at, dtype=torch.int32) for at in range(100)]
    for at in range(100):
        tensors[at] = torch.empty(0)
        tensors[at] = arena.full((4 * MIB * 105 // 100,), -at, dtype=torch.int32)
    assert all(bool((tensor == -at).all()) for at, tensor in enumerate(tensors))
    assert arena.max_memory_reserved() <= 1.1 * arena.max_memory_allocated()
    arena.cache.audit()
    tensors.clear()
    arena.close()
    arena.empty_cache()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= free - 64 * MIB


@pytest.mark.gpu
def test_on_the_gpu_contents_survive_random_calls() -> None:
    draw = random.Random(9)
    arena = Arena("cuda:0", source="virtual", policy=EXPANDABLE, limit="2GiB")
    live: list[tuple[torch.Tensor, int]] = []
    for turn in range(500):
        action = draw.random()
        try:
            if action < 0.6:
                size = draw.choice((draw.randrange(1, 5000), draw.randrange(1, 16 * MIB)))
                live.append((arena.full((size,), turn, dtype=torch.int32), turn))
            elif action < 0.95 and live:
                live.pop(draw.randrange(len(live)))
            else:
                arena.empty_cache()
        except OutOfMemory:
            del live[::2]
    arena.cache.audit()
    assert all(bool((tensor == turn).all()) for tensor, turn in live)
    live.clear()
    arena.close()
