"""Streams, events, captures: C2 by its cases."""

from __future__ import annotations

import threading

import pytest

from devalloc import InvalidArgument, OutOfMemory
from devalloc.cache import POLICIES, AutoGrowthPolicy, BfcPolicy, Cache
from tests.arena.support import MIB, FakeEvent, FakeStreams, NumberSource


@pytest.fixture
def streams() -> FakeStreams:
    return FakeStreams()


@pytest.fixture
def source() -> NumberSource:
    return NumberSource()


@pytest.fixture
def engine(source: NumberSource, streams: FakeStreams) -> Cache:
    return Cache(source, "torch", streams=streams)


@pytest.mark.proves("torch/record_stream", "auto_growth/stream-safe")
def test_a_recorded_stream_defers_the_free(engine: Cache, streams: FakeStreams) -> None:
    block = engine.malloc(30 * MIB, stream=1)
    for user in (1, 2, 3, 3):
        engine.record_stream(block, user)
    engine.free(block)
    assert sorted(streams.queued) == [2, 3], "one event for each stream but the owner"
    stats = engine.stats()
    assert stats["allocation.all.current"] == 0
    assert stats["active_bytes.all.current"] == 30 * MIB
    streams.advance(2)
    assert engine.malloc(30 * MIB, stream=1) != block
    streams.advance(3)
    assert engine.malloc(30 * MIB, stream=1) == block
    engine.audit()


@pytest.mark.proves("auto_growth/recorded-stream")
def test_a_recorded_stream_can_be_erased(engine: Cache, streams: FakeStreams) -> None:
    block = engine.malloc(30 * MIB, stream=1)
    for user in (2, 3):
        engine.record_stream(block, user)
    engine.erase_stream(block, 2)
    engine.erase_stream(block, 9)
    engine.free(block)
    assert list(streams.queued) == [3]
    streams.advance(3)
    assert engine.malloc(30 * MIB, stream=1) == block
    engine.record_stream(block, 2)
    engine.erase_stream(block, 2)
    engine.free(block)
    assert engine.malloc(30 * MIB, stream=1) == block, "nothing is left to wait for"
    engine.free(block)
    with pytest.raises(InvalidArgument):
        engine.erase_stream(block, 2)
    engine.audit()


@pytest.mark.proves("torch/record_stream")
def test_the_own_stream_is_ignored(engine: Cache, streams: FakeStreams) -> None:
    block = engine.malloc(30 * MIB, stream=1)
    engine.record_stream(block, 1)
    engine.free(block)
    assert streams.queued == {}
    assert engine.malloc(30 * MIB, stream=1) == block


@pytest.mark.proves("auto_growth/free-stream")
def test_running_out_waits_for_events(streams: FakeStreams) -> None:
    engine = Cache(NumberSource(capacity=30 * MIB), "torch", streams=streams)
    block = engine.malloc(30 * MIB)
    engine.record_stream(block, 2)
    engine.free(block)
    engine.malloc(30 * MIB)
    assert streams.done == {2: 1}
    assert engine.stats()["num_sync_all_streams"] == 1


def free_in_use(engine: Cache, block: int) -> None:
    """Free a block that another stream still uses."""
    engine.record_stream(block, 2)
    engine.free(block)


@pytest.mark.proves("auto_growth/free-stream")
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_waits_for_events_at_the_limit(policy: str, streams: FakeStreams) -> None:
    engine = Cache(NumberSource(), policy, limit=20 * MIB, streams=streams)
    free_in_use(engine, engine.malloc(20 * MIB))
    assert engine.malloc(20 * MIB)
    engine = Cache(NumberSource(), policy, limit=40 * MIB, streams=streams)
    free_in_use(engine, engine.malloc(20 * MIB))
    assert engine.malloc(40 * MIB), "what has become idle goes back for it"
    engine.audit()


@pytest.mark.proves("torch/after-last")
@pytest.mark.parametrize("policy", POLICIES)
def test_what_events_have_freed_is_found_in_divided_segments(
    policy: str, streams: FakeStreams
) -> None:
    engine = Cache(NumberSource(), policy, limit=20 * MIB, streams=streams)
    engine.free(engine.malloc(20 * MIB))
    blocks = [engine.malloc(2 * MIB) for _ in range(10)]
    for block in blocks[:7]:
        free_in_use(engine, block)
    assert engine.malloc(8 * MIB)
    engine.audit()


@pytest.mark.parametrize("policy", [BfcPolicy, AutoGrowthPolicy])
def test_a_request_that_waits_takes_what_other_streams_free(
    policy: type[BfcPolicy | AutoGrowthPolicy], source: NumberSource, streams: FakeStreams
) -> None:
    engine = Cache(
        source,
        policy(retry_wait_s=20),
        limit=2 * MIB,
        streams=streams,
        share_streams=True,
    )
    blocks = [engine.malloc(MIB, stream=1) for _ in range(2)]
    threading.Timer(0.1, engine.free, [blocks[0]]).start()
    assert engine.malloc(MIB, stream=2) == blocks[0]
    assert streams.waits == [(2, 1)]
    engine.audit()


@pytest.mark.proves("rmm/reuse-across")
def test_sharing_takes_the_best_block_of_another_stream_in_order(streams: FakeStreams) -> None:
    source = NumberSource()
    engine = Cache(source, "torch", streams=streams, share_streams=True)
    blocks = [engine.malloc(size * MIB, stream=at) for at, size in ((1, 40), (2, 30))]
    for block in blocks:
        engine.free(block)
    assert engine.malloc(30 * MIB, stream=3) == blocks[1]
    assert streams.waits == [(3, 2)]
    assert engine.malloc(40 * MIB, stream=1) == blocks[0]
    assert streams.waits == [(3, 2)], "its own needs no wait"
    engine.free(blocks[1])
    assert engine.malloc(30 * MIB, stream=3) == blocks[1], "what was taken is owned by the taker"
    assert len(source.asked) == 2


@pytest.mark.proves("rmm/reuse-across")
def test_sharing_merges_what_several_streams_own(streams: FakeStreams) -> None:
    source = NumberSource()
    engine = Cache(source, "torch", streams=streams, share_streams=True)
    engine.free(engine.malloc(20 * MIB, stream=1))
    blocks = [engine.malloc(10 * MIB - 512, stream=at) for at in (1, 2)]
    assert len(source.asked) == 1
    for block in blocks:
        engine.free(block)
    streams.waits.clear()
    assert engine.malloc(20 * MIB, stream=3) == blocks[0]
    assert sorted(streams.waits) == [(3, 1), (3, 2)]
    assert len(source.asked) == 1


@pytest.mark.proves("torch/cached-memory")
def test_a_forgotten_stream_leaves_its_memory(engine: Cache, streams: FakeStreams) -> None:
    cached, live = engine.malloc(30 * MIB, stream=5), engine.malloc(40 * MIB, stream=5)
    other = engine.malloc(50 * MIB, stream=6)
    engine.record_stream(other, 5)
    engine.free(other)
    engine.free(cached)
    engine.forget_stream(5)
    engine.audit()
    assert engine.malloc(30 * MIB, stream=0) == cached
    assert engine.malloc(50 * MIB, stream=6) == other, "its events have happened"
    engine.free(live)
    assert engine.malloc(40 * MIB, stream=0) == live
    with pytest.raises(InvalidArgument):
        engine.forget_stream(0)


@pytest.mark.proves("torch/capture-query", "auto_growth/graphs-four")
def test_captures_query_and_release_nothing(
    engine: Cache, source: NumberSource, streams: FakeStreams
) -> None:
    pending, cached = engine.malloc(30 * MIB), engine.malloc(40 * MIB)
    engine.record_stream(pending, 2)
    engine.free(pending)
    engine.free(cached)
    streams.advance(2)
    outside = engine.malloc(50 * MIB)
    engine.record_stream(outside, 2)
    pool = engine.private_pool()
    with engine.route(pool, capture=True):
        streams.in_capture = True
        inside = engine.malloc(40 * MIB)
        assert inside != cached, "a graph's memory is its own"
        assert streams.relaxed == 1
        engine.free(inside)
        assert engine.malloc(40 * MIB) == inside, "inside, inside: reused in the capture"
        engine.free(outside)
        assert engine.empty_cache() == 0
        source.capacity = source.used
        with pytest.raises(OutOfMemory, match="before the capture"):
            engine.malloc(90 * MIB)
        engine.audit()
        streams.in_capture = False
    assert source.freed == []
    source.capacity = None
    assert engine.malloc(50 * MIB) != outside, "its event is recorded after the capture"
    streams.advance(2)
    assert engine.malloc(50 * MIB) == outside
    engine.free(inside)
    assert engine.malloc(40 * MIB) == cached, "inside, outside: back to the private pool"


@pytest.mark.proves("auto_growth/graphs-four")
def test_a_block_freed_in_a_capture_waits_for_its_end(engine: Cache, streams: FakeStreams) -> None:
    block = engine.malloc(30 * MIB)
    with engine.private_pool() as pool, engine.route(pool, capture=True):
        engine.free(block)
        with engine.route(engine.private_pool(), accepts=lambda stream: stream == 9):
            assert engine.stats()["active.all.current"] == 1
    assert engine.malloc(30 * MIB) == block


@pytest.mark.proves("tiny/graph-pools")
def test_a_private_pool_lives_as_long_as_its_graphs(engine: Cache, source: NumberSource) -> None:
    pool = engine.private_pool()
    with engine.route(pool, capture=True):
        engine.free(engine.malloc(30 * MIB))
        kept = engine.malloc(512)
    pool.retain()
    pool.release()
    engine.empty_cache()
    assert source.freed == [], "one graph still uses it"
    pool.release()
    assert source.freed == [30 * MIB], "what is idle goes at once"
    engine.free(kept)
    assert source.freed == [30 * MIB, 2 * MIB], "the rest with its last block"
    engine.audit()
    for call in (pool.retain, pool.release):
        with pytest.raises(InvalidArgument, match="released"):
            call()


@pytest.mark.proves("torch/private-pools")
def test_graphs_share_a_pool(engine: Cache, source: NumberSource) -> None:
    pool = engine.private_pool()
    with engine.route(pool, capture=True):
        block = engine.malloc(30 * MIB)
        engine.free(block)
    with engine.route(pool, capture=True):
        assert engine.malloc(30 * MIB) == block
    ids = {segment["segment_pool_id"] for segment in engine.snapshot()["segments"]}  # type: ignore
    assert ids == {pool.id}


@pytest.mark.proves("torch/private-pools")
def test_routes_by_stream(engine: Cache) -> None:
    pool = engine.private_pool()
    with engine.route(pool, accepts=lambda stream: stream == 4):
        engine.malloc(30 * MIB, stream=4)
        engine.malloc(30 * MIB, stream=5)
    ids = [segment["segment_pool_id"] for segment in engine.snapshot()["segments"]]  # type: ignore
    assert sorted(ids) == [(0, 0), pool.id]


@pytest.mark.proves("torch/private-pools", "rmm/arena-resource", "auto_growth/naive-thread-local")
def test_routes_by_thread(engine: Cache) -> None:
    pool = engine.private_pool()
    with engine.route(pool):
        thread = threading.Thread(target=engine.malloc, args=(30 * MIB,))
        thread.start()
        thread.join()
    ids = [segment["segment_pool_id"] for segment in engine.snapshot()["segments"]]  # type: ignore
    assert ids == [(0, 0)]


# Closed caches ------------------------------------------------------------------------------------


def test_closing_during_a_capture_gives_back_at_its_end(
    engine: Cache, source: NumberSource, streams: FakeStreams
) -> None:
    used = engine.malloc(40 * MIB)
    engine.free(engine.malloc(30 * MIB))
    with engine.private_pool() as pool, engine.route(pool, capture=True):
        engine.close()
        engine.free(used)
        assert source.freed == []
    assert not source.live


def test_closing_leaves_a_graph_its_memory(engine: Cache, source: NumberSource) -> None:
    pool = engine.private_pool()
    with engine.route(pool, capture=True):
        block = engine.malloc(30 * MIB)
    engine.close()
    engine.free(block)
    assert source.freed == [], "the graph still writes there when it is replayed"
    pool.release()
    assert not source.live


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("policy", POLICIES)
def test_closed_caches_give_back_what_several_streams_owned(
    policy: str, order: tuple[int, int], source: NumberSource, streams: FakeStreams
) -> None:
    engine = Cache(source, policy, streams=streams, share_streams=True)
    engine.free(engine.malloc(MIB, stream=1))
    blocks = [engine.malloc(MIB // 2, stream=at) for at in (1, 2)]
    engine.close()
    for at in order:
        engine.free(blocks[at])
        engine.audit()
    assert not source.live


@pytest.mark.parametrize("policy", POLICIES)
def test_unused_pools_give_back_what_several_streams_owned(
    policy: str, source: NumberSource, streams: FakeStreams
) -> None:
    engine = Cache(source, policy, streams=streams, share_streams=True)
    with engine.private_pool() as pool:
        with engine.route(pool):
            engine.free(engine.malloc(MIB, stream=1))
            blocks = [engine.malloc(MIB // 2, stream=at) for at in (1, 2)]
        assert len(source.live) == 1, "streams share"
        engine.free(blocks[0])
    engine.free(blocks[1])
    engine.audit()
    assert not source.live


def test_closed_caches_give_back_stamped_neighbours(source: NumberSource) -> None:
    engine = Cache(source, BfcPolicy(timestamps=True))
    blocks = [engine.malloc(MIB) for _ in range(2)]
    engine.close()
    for block in blocks:
        engine.free(block)
    engine.audit()
    assert not source.live


# Failures -----------------------------------------------------------------------------------------


class Failing(FakeStreams):
    """Cannot record on some streams."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[int] = set()

    def record(self, stream: int) -> FakeEvent:
        if stream in self.broken:
            raise RuntimeError("no event")
        return super().record(stream)


def test_a_free_that_cannot_record_changes_nothing(source: NumberSource) -> None:
    streams = Failing()
    engine = Cache(source, "torch", streams=streams)
    engine.record_history()
    block = engine.malloc(30 * MIB)
    for user in (2, 3):
        engine.record_stream(block, user)
    before = engine.stats()
    streams.broken = {3}
    with pytest.raises(RuntimeError, match="no event"):
        engine.free(block)
    engine.audit()
    assert engine.stats() == before
    assert engine.owns(block)
    streams.broken.clear()
    engine.free(block)
    assert engine.malloc(30 * MIB) != block, "both streams still use it"
    (trace,) = engine.snapshot()["device_traces"]  # type: ignore[misc]
    assert [entry["action"] for entry in trace].count("free_requested") == 1
    assert engine.empty_cache() == 30 * MIB
    engine.audit()


def test_what_cannot_be_recorded_after_a_capture_is_tried_again(source: NumberSource) -> None:
    streams = Failing()
    engine = Cache(source, "torch", streams=streams)
    blocks = [engine.malloc(30 * MIB) for _ in range(5)]
    for user, block in enumerate(blocks, 1):
        engine.record_stream(block, user)
    pool = engine.private_pool()
    streams.broken = {2, 4}

    def capture() -> None:
        with engine.route(pool, capture=True):
            for block in blocks:
                engine.free(block)

    with pytest.raises(RuntimeError, match="no event"):
        capture()
    assert pool.uses == 1, "the capture's use has ended all the same"
    engine.audit()
    for user in (1, 2, 3, 4, 5):
        streams.advance(user)
    assert sorted(engine.malloc(30 * MIB) for _ in range(3)) == [blocks[at] for at in (0, 2, 4)]
    with pytest.raises(RuntimeError, match="no event"):
        engine.empty_cache()
    streams.broken = {4}
    engine.forget_stream(4)  # which has nothing left to do
    assert engine.empty_cache() == 60 * MIB
    engine.audit()


def test_a_source_that_fails_at_the_end_of_a_capture(streams: FakeStreams) -> None:
    class Refusing(NumberSource):
        refusing = True

        def free(self, address: int, nbytes: int) -> None:
            if self.refusing:
                raise RuntimeError("not today")
            super().free(address, nbytes)

    source = Refusing()
    engine = Cache(source, "torch", streams=streams)
    unused, pool = engine.private_pool(), engine.private_pool()
    with engine.route(unused):
        engine.free(engine.malloc(30 * MIB))
    with pytest.raises(RuntimeError, match="not today"), engine.route(pool, capture=True):
        unused.release()
    assert pool.uses == 1
    source.refusing = False
    pool.release()
    engine.empty_cache()
    assert not source.live
    engine.audit()


class StreamOrdered(NumberSource):
    """Requires the stream with every call."""

    class capabilities:
        stream_ordered = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        assert stream is not None
        self.calls.append(("allocate", stream))
        return super().allocate(nbytes)

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        assert stream is not None
        self.calls.append(("free", stream))
        super().free(address, nbytes)


@pytest.mark.proves("torch/cudamallocasync-backend", "auto_growth/async-allocator")
def test_a_stream_ordered_source_gets_the_stream(streams: FakeStreams) -> None:
    source = StreamOrdered()
    engine = Cache(source, "torch", streams=streams, share_streams=True)
    block = engine.malloc(30 * MIB, stream=3)
    engine.free(block)
    engine.free(engine.malloc(30 * MIB, stream=4))
    streams.waits.clear()
    engine.empty_cache()
    assert source.calls == [("allocate", 3), ("free", 3)]
    assert (3, 4) in streams.waits, "the free is behind the other stream's work"
