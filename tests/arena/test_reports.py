"""Statistics, history, snapshots, errors."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.cuda import _memory_viz

from devalloc import InvalidArgument, OutOfMemory
from devalloc.cache import Cache
from devalloc.replay.torch_snapshots import snapshot_trace
from tests.arena.support import KIB, MIB, FakeStreams, NumberSource, cache


@pytest.mark.proves("torch/statistics")
def test_statistics_by_hand() -> None:
    engine, _ = cache("torch")
    small, large = engine.malloc(1000), engine.malloc(3 * MIB)
    stats = engine.stats()
    assert stats["allocated_bytes.all.current"] == 1024 + 3 * MIB
    assert stats["requested_bytes.small_pool.current"] == 1000
    assert stats["reserved_bytes.large_pool.current"] == 20 * MIB
    assert stats["inactive_split.all.current"] == 2
    assert stats["inactive_split_bytes.all.current"] == 22 * MIB - 1024 - 3 * MIB
    assert stats["num_device_alloc"] == stats["segment.all.current"] == 2
    engine.free(large)
    stats = engine.stats()
    assert stats["inactive_split.large_pool.current"] == 0, "the whole segment is free"
    assert stats["allocated_bytes.all.peak"] == 1024 + 3 * MIB
    assert stats["allocated_bytes.large_pool.allocated"] == 3 * MIB
    assert stats["allocated_bytes.large_pool.freed"] == 3 * MIB
    assert stats["allocation.all.current"] == 1
    engine.reset_peaks()
    engine.reset_accumulated()
    stats = engine.stats()
    assert stats["allocated_bytes.all.peak"] == 1024
    assert stats["allocation.all.allocated"] == stats["num_device_alloc"] == 0
    engine.free(small)


@pytest.mark.proves("torch/statistics")
def test_statistics_have_pytorchs_names() -> None:
    engine, _ = cache("torch")
    names = set(engine.stats())
    for stem in (
        "allocation", "segment", "active", "inactive_split", "allocated_bytes",
        "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes",
    ):  # fmt: skip
        for pool in ("all", "small_pool", "large_pool"):
            for kind in ("current", "peak", "allocated", "freed"):
                assert f"{stem}.{pool}.{kind}" in names
    for stem in ("oversize_allocations", "oversize_segments"):
        assert f"{stem}.peak" in names
    assert {"num_alloc_retries", "num_ooms", "num_sync_all_streams"} <= names


@pytest.mark.proves("torch/statistics")
def test_peaks_are_exact_over_many_foldings() -> None:
    engine, _ = cache("torch")
    now = peak = 0
    live: list[tuple[int, int]] = []
    for step in range(40_000):
        if step % 7 < 4:
            size = 512 * (1 + step * 31 % 97)
            live.append((engine.malloc(size), size))
            now += size
            peak = max(peak, now)
        elif live:
            address, size = live.pop(step * 17 % len(live))
            engine.free(address)
            now -= size
        if len(live) > 300:
            for address, size in live[:200]:
                engine.free(address)
                now -= size
            del live[:200]
    stats = engine.stats()
    # The smallest remainder that is split off is 512 B, so small blocks are exactly as asked for.
    assert stats["requested_bytes.all.current"] == now
    assert stats["requested_bytes.all.peak"] == peak
    assert stats["allocated_bytes.all.peak"] == peak


def history_of(engine: Cache) -> list[str]:
    (trace,) = engine.snapshot()["device_traces"]  # type: ignore[misc]
    return [entry["action"] for entry in trace]


@pytest.mark.proves("torch/history-stacks")
def test_history() -> None:
    engine, _ = cache("torch", limit=30 * MIB)
    engine.free(engine.malloc(512))
    engine.empty_cache()
    engine.record_history("all", max_entries=100)
    block = engine.malloc(3 * MIB)
    engine.free(block)
    with pytest.raises(OutOfMemory):
        engine.malloc(50 * MIB)
    assert history_of(engine) == [
        "segment_alloc", "alloc", "free_requested", "free_completed", "segment_free", "oom",
        "snapshot",
    ]  # fmt: skip
    engine.record_history(None)
    engine.malloc(512)
    assert len(history_of(engine)) == 7, "nothing is added, nothing lost"


@pytest.mark.proves("torch/history-stacks")
def test_history_has_the_callers_stack() -> None:
    engine, _ = cache("torch")
    engine.record_history("state")

    def a_function_of_the_user() -> int:
        return engine.malloc(512)

    a_function_of_the_user()
    snapshot = engine.snapshot()
    assert snapshot["device_traces"] == [[]]
    (segment,) = snapshot["segments"]  # type: ignore[misc]
    frame = segment["blocks"][0]["frames"][0]
    assert frame["name"] == "a_function_of_the_user"
    assert frame["filename"] == __file__
    assert segment["frames"][0]["name"] == "a_function_of_the_user"


@pytest.mark.parametrize("policy", ["torch", "tiny", "bfc", "auto_growth", "frugal"])
def test_history_has_the_sizes_that_were_asked_for(policy: str) -> None:
    """So has a snapshot, and so a replay, which rounds by its own rules."""
    engine = Cache(NumberSource(), policy, streams=FakeStreams())
    before = engine.malloc(777)
    engine.record_history("all")
    sizes = [1001, 3 * MIB + 1, 5]
    first, second, third = map(engine.malloc, sizes)
    engine.free(first)
    engine.record_stream(second, 2)
    engine.free(second)
    engine.free(before)
    engine.empty_cache()  # waits for the second stream
    snapshot = engine.snapshot()
    (trace,) = snapshot["device_traces"]  # type: ignore[misc]
    events = [(e["action"], e["addr"], e["size"]) for e in trace if "segment" not in e["action"]]
    assert events == [
        *(("alloc", at, size) for at, size in zip((first, second, third), sizes, strict=True)),
        ("free_requested", first, 1001), ("free_completed", first, 1001),
        ("free_requested", second, sizes[1]),
        ("free_requested", before, 777), ("free_completed", before, 777),
        ("free_completed", second, sizes[1]),
        ("snapshot", 0, 0),
    ]  # fmt: skip
    assert snapshot_trace(snapshot).requested()[-1] == 5
    assert max(snapshot_trace(snapshot).requested()) == 777 + sum(sizes)


def test_a_block_of_no_bytes_has_its_own_in_the_history() -> None:
    engine, _ = cache("tiny")
    engine.record_history("all")
    address = engine.malloc(0)
    events = snapshot_trace(engine.snapshot())
    assert (events.requested(), events.notes) == ([engine.size_of(address)], ())


def test_history_keeps_the_newest() -> None:
    engine, _ = cache("torch")
    engine.record_history("all", max_entries=3, stacks=False)
    for _ in range(5):
        engine.free(engine.malloc(512))
    assert history_of(engine) == ["free_requested", "free_completed", "snapshot"]
    with pytest.raises(InvalidArgument):
        engine.record_history("some")


@pytest.mark.parametrize(
    "entries", ["1KiB", "5", 0, -1, 1.5, None, True, 10**30, pytest.param(10**5000, id="huge")]
)
def test_a_history_of_no_number_of_entries_changes_nothing(entries: object) -> None:
    engine, _ = cache("torch")
    with pytest.raises(InvalidArgument, match=r"max_entries must be an int from 1"):
        engine.record_history("all", max_entries=entries)  # type: ignore[arg-type]
    engine.malloc(512)
    assert history_of(engine) == []
    engine.record_history("all", max_entries=2)
    engine.malloc(512)
    with pytest.raises(InvalidArgument):
        engine.record_history(None, max_entries=entries)  # type: ignore[arg-type]
    engine.malloc(512)
    assert history_of(engine) == ["alloc", "snapshot"], "still recording"


def make_snapshot() -> dict[str, object]:
    streams = FakeStreams()
    engine = Cache(NumberSource(), "torch", streams=streams)
    engine.record_history("all")
    blocks = [engine.malloc(size, stream=1) for size in (1000, 3 * MIB, 5 * MIB, 30 * MIB)]
    engine.record_stream(blocks[1], 2)
    engine.free(blocks[1])
    engine.free(blocks[3])
    return engine.snapshot()


def test_snapshots_obey_the_format() -> None:
    snapshot = pickle.loads(pickle.dumps(make_snapshot(), protocol=4))
    states = set()
    for segment in snapshot["segments"]:
        end = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == end
            end += block["size"]
            states.add(block["state"])
        assert end == segment["address"] + segment["total_size"]
    assert states == {"active_allocated", "active_pending_free", "inactive"}


@pytest.mark.proves("torch/snapshots")
def test_torchs_own_functions_read_snapshots() -> None:
    snapshot = make_snapshot()
    text = _memory_viz.segsum(snapshot)
    assert "total_reserved: 52.0MiB" in text, text
    trace = _memory_viz.trace(snapshot)
    assert "= cudaMalloc(" in trace
    assert "11 entries" in trace
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "add_local_files(local_files" in plot(snapshot)


@pytest.mark.proves("torch/out-memory")
def test_running_out_says_how_much_where_and_what_to_do() -> None:
    engine, _ = cache("torch", limit=24 * MIB)
    keep = [engine.malloc(5 * MIB, stream=1) for _ in range(4)]
    engine.free(keep[0])
    engine.free(keep[2])
    with pytest.raises(OutOfMemory) as caught:
        engine.malloc(6 * MIB, stream=1)
    text = str(caught.value)
    for part in (
        "alloc of 6 MiB on stream 1 failed: a segment of 20 MiB was wanted, ",
        "20 MiB are reserved in 1 segments",
        "a limit of 24 MiB", "10 MiB of them allocated, 10 MiB free",
        "the largest free block that this request may take is 5 MiB", "fragmentation 50 %",
        "keep sizes apart", "Free neighbouring blocks", "raise the limit of 24 MiB, or free some",
    ):  # fmt: skip
        assert part in text, (part, text)
    with pytest.raises(OutOfMemory, match="set share_streams=True"):
        engine.malloc(5 * MIB, stream=2)
    with pytest.raises(OutOfMemory, match="larger than the limit: raise it"):
        engine.malloc(25 * MIB)
    assert not isinstance(caught.value, torch.OutOfMemoryError)


@pytest.mark.parametrize("policy", ["torch", "tiny"])
def test_a_segment_over_the_limit_is_named_and_nothing_is_to_be_freed(policy: str) -> None:
    engine, source = cache(policy, limit=8 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        engine.malloc(4 * MIB)
    text = str(caught.value)
    assert "failed: a segment of 20 MiB was wanted, 0 B are reserved" in text
    assert text.endswith(
        ". Raise the limit of 8 MiB to at least 20 MiB, or choose a policy or options with "
        "smaller segments"
    )
    small = engine.malloc(KIB)
    with pytest.raises(OutOfMemory) as caught:
        engine.malloc(4 * MIB)
    assert "free something" not in str(caught.value), "it would not help"
    engine.free(small)
    assert source.asked == [2 * MIB]


def test_what_would_serve_is_to_be_freed_although_a_new_segment_never_fits() -> None:
    engine, _ = cache("torch", limit=12 * MIB)
    keep = engine.malloc(10 * MIB)
    with pytest.raises(OutOfMemory, match=r"segment of 20 MiB was wanted.* or free something$"):
        engine.malloc(4 * MIB)
    engine.free(keep)
    assert engine.malloc(4 * MIB) == keep


def test_what_other_streams_still_use_is_something_to_free() -> None:
    engine, _ = cache("torch", limit=30 * MIB, streams=FakeStreams())
    address = engine.malloc(16 * MIB)
    engine.record_stream(address, 7)
    with engine.route(engine.private_pool(), capture=True):  # during which the cache does not wait
        engine.free(address)
        with pytest.raises(OutOfMemory, match=r"16 MiB freed but in use.* or free something$"):
            engine.malloc(16 * MIB)


def test_a_private_pool_is_to_be_released_where_nothing_can_be_freed() -> None:
    engine, _ = cache("torch", limit=30 * MIB)
    with engine.private_pool() as pool:
        with engine.route(pool, capture=False):
            engine.free(engine.malloc(16 * MIB))
        with pytest.raises(OutOfMemory, match=r"limit of 30 MiB, or release a private pool$"):
            engine.malloc(16 * MIB)
    engine.free(engine.malloc(16 * MIB))


def test_an_empty_cache_does_not_tell_to_free_something_of_it() -> None:
    engine, _ = cache("torch", capacity=MIB)
    with pytest.raises(OutOfMemory, match=r"\. Ask for less, or free memory of the source"):
        engine.malloc(4 * MIB)
    with pytest.raises(OutOfMemory, match=r"0 B are taken; raise the limit$"):
        cache("torch", limit=MIB)[0].external.allocate(2 * MIB)


def test_the_sources_words_are_passed_on() -> None:
    engine, _ = cache("torch", capacity=64 * KIB)
    with pytest.raises(OutOfMemory, match="the source said: the source has 65536 bytes"):
        engine.malloc(512)
    engine.audit()
