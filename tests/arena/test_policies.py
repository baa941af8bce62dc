"""Every rule of every policy, by its numbers."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from itertools import pairwise
from typing import ClassVar

import pytest

from devalloc import InvalidArgument, OutOfMemory
from devalloc.arena.policies.bfc_policy import bin_of
from devalloc.arena.policies.torch_policy import next_division
from devalloc.arena.store.blocks import FreeList
from devalloc.arena.store.store import Store
from devalloc.cache import (
    AutoGrowthPolicy,
    BfcPolicy,
    Cache,
    TinyPolicy,
    TorchPolicy,
    make_policy,
)
from tests.arena.support import GIB, KIB, MIB, FakeStreams, NumberSource, cache

TWO_POOLS = pytest.mark.parametrize("policy", ["tiny", "torch"])

# What TinyTorch and PyTorch share ----------------------------------------------------------------


@pytest.mark.proves("tiny/rounding-512", "torch/rounding-pools")
@TWO_POOLS
@pytest.mark.parametrize(
    ("nbytes", "size", "segment"),
    [
        (1, 512, 2 * MIB),
        (511, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
    ],
)
def test_rounding_and_segments(policy: str, nbytes: int, size: int, segment: int) -> None:
    engine, source = cache(policy)
    address = engine.malloc(nbytes)
    assert engine.size_of(address) == size
    assert source.asked == [segment]


@pytest.mark.proves("tiny/pools-best", "torch/rounding-pools")
@TWO_POOLS
def test_small_and_large_do_not_share_segments(policy: str) -> None:
    engine, source = cache(policy)
    engine.malloc(MIB)
    engine.malloc(MIB + 1)
    assert source.asked == [2 * MIB, 20 * MIB]
    stats = engine.stats()
    assert stats["segment.small_pool.current"] == stats["segment.large_pool.current"] == 1


@pytest.mark.proves("tiny/split-512")
@TWO_POOLS
@pytest.mark.parametrize(
    ("first", "then", "size"),
    [
        (20 * MIB, 19 * MIB, 20 * MIB),  # the rest, 1 MiB, is not over 1 MiB
        (20 * MIB, 19 * MIB - 512, 19 * MIB - 512),
    ],
)
def test_a_large_block_is_split_over_a_mebibyte(
    policy: str, first: int, then: int, size: int
) -> None:
    engine, source = cache(policy)
    address = engine.malloc(first)
    engine.free(address)
    assert engine.malloc(then) == address, "the caller gets the front"
    assert engine.size_of(address) == size
    assert len(source.asked) == 1


@pytest.mark.proves("tiny/split-512")
@TWO_POOLS
def test_a_small_block_is_split_from_512_bytes_on(policy: str) -> None:
    engine, source = cache(policy)
    base = engine.malloc(MIB)
    rest = engine.malloc(MIB - 512)
    assert rest == base + MIB
    assert engine.malloc(512) == base + 2 * MIB - 512
    assert len(source.asked) == 1


@pytest.mark.proves("tiny/pools-best", "tiny/tests-same", "bfc/search-request", "frugal/best-fit")
@pytest.mark.parametrize("policy", ["tiny", "torch", "auto_growth", "frugal"])
def test_best_fit_then_lowest_address(policy: str) -> None:
    engine, _ = cache(policy)
    sizes = [40 * MIB, 30 * MIB, 30 * MIB, 50 * MIB]
    blocks = [engine.malloc(size) for size in sizes]
    for block in reversed(blocks):
        engine.free(block)
    assert engine.malloc(29 * MIB + 512 * KIB) in (blocks[1], blocks[1] + 512 * KIB)
    assert engine.malloc(30 * MIB) == blocks[2]
    assert engine.malloc(45 * MIB) in (blocks[3], blocks[3] + 5 * MIB)


@pytest.mark.proves("tiny/merge-free")
@pytest.mark.parametrize("policy", ["tiny", "torch", "bfc", "auto_growth", "frugal"])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_neighbours_merge_within_a_segment(policy: str, order: tuple[int, ...]) -> None:
    engine, _ = cache(policy, limit=8 * MIB)
    whole = engine.malloc(2 * MIB) if policy == "auto_growth" else 0
    engine.free(whole)
    blocks = [engine.malloc(300 * KIB) for _ in range(3)]
    for at in order:
        engine.free(blocks[at])
        engine.audit()
    (segment,) = engine.snapshot()["segments"]  # type: ignore[misc]
    assert [block["state"] for block in segment["blocks"]] == ["inactive"]


@pytest.mark.proves("auto_growth/zero-size", "bfc/zero-size")
@pytest.mark.parametrize("policy", ["torch", "bfc", "auto_growth", "frugal"])
def test_zero_bytes_give_null(policy: str) -> None:
    engine, source = cache(policy)
    assert engine.malloc(0) == 0
    engine.free(0)
    assert source.asked == []


@pytest.mark.proves("tiny/rounding-512")
def test_tiny_gives_zero_bytes_a_block() -> None:
    engine, _ = cache("tiny")
    first, second = engine.malloc(0), engine.malloc(0)
    assert second == first + 512


@pytest.mark.proves("tiny/source-fails")
@TWO_POOLS
def test_a_failing_source_is_asked_again_after_releasing(policy: str) -> None:
    engine, source = cache(policy, capacity=42 * MIB)
    for block in [engine.malloc(512), engine.malloc(20 * MIB)]:
        engine.free(block)
    engine.malloc(30 * MIB)
    assert source.asked == [2 * MIB, 20 * MIB, 30 * MIB, 30 * MIB]
    assert source.freed == [20 * MIB, 2 * MIB], "large blocks go first"
    assert engine.stats()["num_alloc_retries"] == 1


@pytest.mark.proves("tiny/source-fails")
def test_tiny_releases_only_what_is_not_split() -> None:
    engine, source = cache("tiny", capacity=42 * MIB)
    kept = engine.malloc(2 * MIB)  # in 20 MiB, of which 18 are free
    engine.free(engine.malloc(20 * MIB))
    engine.malloc(22 * MIB)
    assert source.freed == [20 * MIB]
    engine.free(kept)


# PyTorch -----------------------------------------------------------------------------------------


@pytest.mark.proves("torch/power-divisions")
def test_divisions() -> None:
    assert next_division(1200, 4) == 1280
    assert [next_division(n, 4) for n in (1024, 1025, 1281, 1537, 1793)] == [
        1024, 1280, 1536, 1792, 2048,
    ]  # fmt: skip
    policy = TorchPolicy(roundup_power2_divisions=4)
    assert policy.round(1200) == 1536, "up to 512 * divisions the multiples of 512 remain"
    assert policy.round(2048) == 2048
    assert policy.round(2049) == 2560
    assert policy.round(5 * MIB + 1) == 6 * MIB
    assert TorchPolicy(roundup_power2_divisions=1).round(5 * MIB + 1) == 5 * MIB + 512


@pytest.mark.proves("torch/power-divisions")
def test_divisions_by_interval() -> None:
    policy = TorchPolicy.from_settings("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    assert policy.round(300 * MIB + 1) == 300 * MIB + 512
    assert policy.round(513 * MIB) == 768 * MIB
    assert policy.round(GIB + 1) == GIB + 256 * MIB
    assert policy.round(2 * GIB + 1) == 2 * GIB + 256 * MIB
    assert policy.round(65 * GIB) == 72 * GIB
    first = TorchPolicy.from_settings("roundup_power2_divisions:[4:2]")
    assert first.round(1000 * KIB) == MIB, "the first value holds below its interval too"
    assert first.round(9 * MIB) == 9 * MIB


@pytest.mark.proves("torch/settings-string")
def test_settings_string() -> None:
    policy = TorchPolicy.from_settings(
        "max_split_size_mb:32, garbage_collection_threshold:0.75,backend:native"
    )
    assert policy == TorchPolicy(max_split_size=32 * MIB, garbage_collection_threshold=0.75)
    assert TorchPolicy.from_settings("") == TorchPolicy()


@pytest.mark.proves("torch/settings-string")
@pytest.mark.parametrize(
    "settings",
    [
        "max_split_size_mb", "max_split_size_mb:x", "max_split_size_mb:10", "unknown:1",
        "roundup_power2_divisions:3", "roundup_power2_divisions:[3:1]",
        "garbage_collection_threshold:2", "max_non_split_rounding_mb:19",
        "backend:cudaMallocAsync", "a:1,,b:2",
    ],
)  # fmt: skip
def test_bad_settings(settings: str) -> None:
    with pytest.raises(InvalidArgument):
        TorchPolicy.from_settings(settings)


@pytest.mark.proves("torch/reuse-owner")
def test_streams_do_not_share() -> None:
    engine, source = cache("torch")
    block = engine.malloc(30 * MIB, stream=1)
    engine.free(block)
    assert engine.malloc(30 * MIB, stream=2) != block
    assert engine.malloc(30 * MIB, stream=1) == block
    assert len(source.asked) == 2


@pytest.mark.proves("torch/oversize-rule")
def test_max_split_size() -> None:
    engine, _ = cache(TorchPolicy(max_split_size=32 * MIB))
    big = engine.malloc(60 * MIB)
    engine.free(big)
    small = engine.malloc(30 * MIB)
    assert small != big, "a request below the limit never takes a block above it"
    assert engine.malloc(40 * MIB) != big, "60 MiB are not less than 20 MiB larger than 40"
    taken = engine.malloc(40 * MIB + 512)
    assert taken == big
    assert engine.size_of(taken) == 60 * MIB, "and are not split"
    stats = engine.stats()
    assert stats["max_split_size"] == 32 * MIB
    assert stats["oversize_allocations.current"] == 2
    assert stats["oversize_segments.current"] == 2


@pytest.mark.proves("torch/oversize-rule")
def test_max_non_split_rounding() -> None:
    policy = TorchPolicy(max_split_size=32 * MIB, max_non_split_rounding="30MiB")
    assert policy == TorchPolicy.from_settings("max_split_size_mb:32,max_non_split_rounding_mb:30")
    engine, _ = cache(policy)
    big = engine.malloc(62 * MIB)
    engine.free(big)
    assert engine.malloc(32 * MIB) != big, "62 MiB are not less than 30 MiB larger"
    assert engine.malloc(32 * MIB + 512) == big


@pytest.mark.proves("torch/oversize-rule")
def test_oversize_blocks_are_released_before_all_others() -> None:
    engine, source = cache(TorchPolicy(max_split_size=32 * MIB), capacity=170 * MIB)
    for block in [engine.malloc(size * MIB) for size in (20, 40, 60, 50)]:
        engine.free(block)
    engine.malloc(80 * MIB)
    assert source.freed == [60 * MIB, 50 * MIB], "the largest, until they suffice together"
    engine, source = cache(TorchPolicy(max_split_size=32 * MIB), capacity=170 * MIB)
    for block in [engine.malloc(size * MIB) for size in (20, 40, 100)]:
        engine.free(block)
    engine.malloc(70 * MIB)
    assert source.freed == [100 * MIB], "or one that suffices alone"
    assert engine.stats()["num_alloc_retries"] == 0


@pytest.mark.proves("torch/garbage-collection")
def test_garbage_collection_frees_the_old() -> None:
    policy = TorchPolicy(garbage_collection_threshold=0.5)
    engine, source = cache(policy, limit=240 * MIB)
    blocks = [engine.malloc(size * MIB) for size in (30, 40, 50)]
    engine.free(blocks[0])
    for _ in range(5):
        engine.free(engine.malloc(3 * MIB, stream=9))
    engine.free(blocks[1])
    engine.malloc(60 * MIB)
    assert source.freed == [30 * MIB], "aged over the average; 40 MiB are younger"
    with pytest.raises(InvalidArgument, match="limit"):
        cache(policy)


def test_the_ages_of_segments_that_are_gone_are_forgotten() -> None:
    policy = TorchPolicy(garbage_collection_threshold=0.5)
    engine, source = cache(policy, limit=240 * MIB)
    kept = [engine.malloc(size) for size in (512, 3 * MIB)]
    for _ in range(50):
        for block in [engine.malloc(size * KIB) for size in (1, 5, 700, 5000, 30_000)]:
            engine.free(block)
        engine.empty_cache()
    assert len(source.freed) >= 50
    bound = engine.policy
    assert isinstance(bound, TorchPolicy)
    assert len(bound._ages) <= len(engine.snapshot()["segments"]) + 3  # type: ignore[arg-type]
    for block in kept:
        engine.free(block)


@pytest.mark.proves("torch/order-events")
def test_order_of_an_allocation() -> None:
    """Events, free block, callbacks, source, release of what is cached and source, error."""
    source, streams = NumberSource(capacity=100 * MIB), FakeStreams()
    engine = Cache(source, "torch", streams=streams)
    held = [engine.malloc(30 * MIB)]
    pending = engine.malloc(40 * MIB)
    engine.on_low_memory(lambda: engine.free(held.pop()) if held else None)
    engine.record_stream(pending, 7)
    engine.free(pending)
    streams.advance(7)
    assert engine.malloc(40 * MIB) == pending, "an event that has happened is seen first"
    assert held, "and no callback was needed"
    first = engine.malloc(30 * MIB)
    assert source.asked == [30 * MIB, 40 * MIB]
    assert not held, "the callback's block serves before the source is asked"
    engine.free(first)
    engine.malloc(60 * MIB)
    assert source.asked[2:] == [60 * MIB, 60 * MIB]
    assert source.freed == [30 * MIB]
    with pytest.raises(OutOfMemory):
        engine.malloc(60 * MIB)
    assert engine.stats()["num_ooms"] == 1


@pytest.mark.proves("torch/limit-also")
def test_the_limit_is_checked_before_the_source() -> None:
    engine, source = cache("torch", limit=30 * MIB)
    engine.malloc(20 * MIB)
    with pytest.raises(OutOfMemory, match="Raise the limit of 30 MiB"):
        engine.malloc(12 * MIB)
    assert source.asked == [20 * MIB]


# TensorFlow --------------------------------------------------------------------------------------


@pytest.mark.proves("bfc/sizes-multiples")
def test_bins() -> None:
    assert [bin_of(n) for n in (256, 511, 512, 1023, 1024)] == [0, 0, 1, 1, 2]
    assert bin_of(256 * MIB - 1) == 19
    assert bin_of(256 * MIB) == bin_of(100 * GIB) == 20


@pytest.mark.proves("bfc/sizes-multiples")
@pytest.mark.parametrize(("nbytes", "size"), [(1, 256), (256, 256), (257, 512)])
def test_bfc_rounds_to_256(nbytes: int, size: int) -> None:
    engine, _ = cache("bfc")
    engine.malloc(4096)
    assert engine.size_of(engine.malloc(nbytes)) == size


@pytest.mark.proves("bfc/split-twice")
def test_bfc_splits_from_twice_the_request_or_128_mib() -> None:
    policy = BfcPolicy()
    assert policy.splits(1, 2 * MIB, MIB)
    assert not policy.splits(1, 2 * MIB - 256, MIB)
    assert policy.splits(1, 428 * MIB, 300 * MIB)
    assert not policy.splits(1, 428 * MIB - 256, 300 * MIB)
    engine, _ = cache(BfcPolicy(fragmentation_fraction=0.1), limit=100 * MIB)
    engine.free(engine.malloc(64 * MIB))
    assert engine.size_of(engine.malloc(54 * MIB)) == 54 * MIB, "10 MiB are a tenth of the limit"


@pytest.mark.proves("rmm/pool-best", "auto_growth/naive-thread-local", "bfc/growth-doubling")
def test_bfc_growth() -> None:
    engine, source = cache("bfc")
    for _ in range(3):
        engine.malloc(2 * MIB)
    assert source.asked == [2 * MIB, 4 * MIB], "no doubling was needed: the next one doubles"
    engine.malloc(20 * MIB)
    assert source.asked[2:] == [32 * MIB], "8 doubled until 20 fit"
    engine.malloc(32 * MIB)
    assert source.asked[3:] == [32 * MIB], "doubled for the request: not doubled again"


@pytest.mark.proves("bfc/growth-doubling")
def test_bfc_without_growth_takes_the_limit() -> None:
    engine, source = cache(BfcPolicy(growth=False), limit=100 * MIB)
    engine.malloc(512)
    assert source.asked == [100 * MIB]
    with pytest.raises(InvalidArgument, match="limit"):
        cache(BfcPolicy(growth=False))


@pytest.mark.proves("bfc/nine-tenths")
def test_bfc_backs_off_by_a_tenth() -> None:
    engine, source = cache(BfcPolicy(first_region=10 * MIB), capacity=8 * MIB)
    engine.malloc(MIB)
    assert source.asked[:2] == [10 * MIB, 9 * MIB]
    assert source.used == source.asked[-1] <= 8 * MIB
    assert all(
        after == -(-int(before * 0.9) // 256) * 256 for before, after in pairwise(source.asked)
    )


@pytest.mark.proves("bfc/nine-tenths")
def test_bfc_backing_off_ends() -> None:
    """Rounding nine tenths up brings 2304 back to 2304: it must shrink by 256 at least."""
    engine, source = cache(BfcPolicy(first_region=2304), capacity=0)
    with pytest.raises(OutOfMemory):
        engine.malloc(256)
    assert source.asked == list(range(2304, 0, -256))


@pytest.mark.proves("rmm/pool-never", "bfc/order-free")
def test_bfc_stays_within_the_limit() -> None:
    engine, source = cache("bfc", limit=5 * MIB)
    blocks = [engine.malloc(2 * MIB), engine.malloc(2 * MIB)]
    assert source.asked == [2 * MIB, 3 * MIB], "what is left, not 4 MiB"
    for block in blocks:
        engine.free(block)
    engine.malloc(4 * MIB)
    assert sorted(source.freed) == [2 * MIB, 3 * MIB], "idle regions go before it fails"


@pytest.mark.proves("bfc/order-free")
def test_bfc_without_garbage_collection_fails() -> None:
    engine, source = cache(BfcPolicy(garbage_collection=False), limit=5 * MIB)
    engine.free(engine.malloc(2 * MIB))
    with pytest.raises(OutOfMemory):
        engine.malloc(4 * MIB)
    assert source.freed == []


@pytest.mark.proves("bfc/time-stamps")
def test_bfc_time_stamps() -> None:
    engine, _ = cache(BfcPolicy(timestamps=True))
    block = engine.malloc(2 * MIB, stream=1)
    engine.free(block)
    assert engine.clock == 1
    other = engine.malloc(4 * MIB, stream=2)
    assert other != block, "the frontier has not passed the free at 1"
    engine.set_safe_frontier(2)
    assert engine.malloc(2 * MIB, stream=2) == block
    engine.free(block)
    assert engine.malloc(2 * MIB, stream=2, freed_before=1) != block
    assert engine.malloc(2 * MIB, stream=2, freed_before=2) == block


@pytest.mark.proves("bfc/time-stamps")
def test_bfc_merges_stamped_chunks_when_they_are_safe() -> None:
    engine, source = cache(BfcPolicy(timestamps=True), limit=2 * MIB)
    for block in [engine.malloc(MIB), engine.malloc(MIB)]:
        engine.free(block)
    with pytest.raises(OutOfMemory):
        engine.malloc(2 * MIB, freed_before=1)
    engine.set_safe_frontier(3)
    engine.malloc(2 * MIB)
    assert len(source.asked) == 1


@pytest.mark.proves("bfc/time-stamps")
def test_bfc_merges_unsafe_stamps_for_their_own_stream() -> None:
    engine, source = cache(BfcPolicy(timestamps=True), limit=2 * MIB)
    for block in [engine.malloc(MIB), engine.malloc(MIB)]:
        engine.free(block)
    engine.malloc(2 * MIB)
    assert (len(source.asked), source.freed) == (1, [])


def test_time_goes_on_when_the_limit_changes() -> None:
    engine, _ = cache(BfcPolicy(timestamps=True))
    for _ in range(10):
        engine.free(engine.malloc(MIB))
    passed = engine.clock
    engine.set_limit(2 * MIB)
    block = engine.malloc(MIB, stream=1)
    engine.free(block)
    engine.set_safe_frontier(passed + 1)
    assert engine.clock == passed + 1
    assert engine.malloc(MIB, stream=2) != block, "its free came after the frontier"
    again, _ = cache(engine.policy)
    assert again.clock == 0


def test_time_stamps_are_refused_elsewhere() -> None:
    engine, _ = cache("torch")
    with pytest.raises(InvalidArgument, match="time stamps"):
        engine.malloc(512, freed_before=1)


@pytest.mark.proves("auto_growth/wait-free", "bfc/wait-free")
@pytest.mark.parametrize(
    "policy", [BfcPolicy(retry_wait_s=20), AutoGrowthPolicy(retry_wait_s=20)], ids=["bfc", "auto"]
)
def test_a_failing_request_waits_for_a_free(policy: BfcPolicy | AutoGrowthPolicy) -> None:
    engine, _ = cache(policy, limit=2 * MIB)
    block = engine.malloc(2 * MIB)
    threading.Timer(0.2, engine.free, [block]).start()
    started = time.monotonic()
    assert engine.malloc(2 * MIB)
    assert 0.1 < time.monotonic() - started < 10
    engine.audit()


@pytest.mark.proves("auto_growth/wait-free")
def test_waiting_ends() -> None:
    engine, _ = cache(AutoGrowthPolicy(retry_wait_s=0.1), limit=2 * MIB)
    engine.malloc(2 * MIB)
    started = time.monotonic()
    with pytest.raises(OutOfMemory):
        engine.malloc(2 * MIB)
    assert time.monotonic() - started >= 0.1


@pytest.mark.proves("bfc/report")
def test_report_names_bins_and_fragmentation() -> None:
    engine, _ = cache("bfc")
    blocks = [engine.malloc(512 * KIB) for _ in range(4)]
    engine.free(blocks[0])
    engine.free(blocks[2])
    text = engine.report()
    assert "largest free 512 KiB, fragmentation 50.0 %" in text
    assert "bin 11 from 512 KiB: 4 blocks, 1 MiB in use, 1 MiB free" in text
    assert "[" + "_" * 25 + "x" * 25 + "_" * 25 + "x" * 25 + "]" in text


# Paddle ------------------------------------------------------------------------------------------


@pytest.mark.proves("auto_growth/alignment-best", "auto_growth/chunk-max")
def test_auto_growth_gives_the_tail() -> None:
    engine, source = cache(AutoGrowthPolicy(chunk_size=MIB + 1))
    address = engine.malloc(1000)
    assert source.asked == [MIB + 256]
    assert address == min(source.live) + MIB + 256 - 1024
    assert engine.malloc(256) == address - 256, "any remainder is split off"


@pytest.mark.proves("auto_growth/chunk-max")
def test_auto_growth_asks_exactly_without_a_chunk_size() -> None:
    engine, source = cache("auto_growth")
    engine.malloc(1000)
    engine.malloc(5 * MIB + 1)
    assert source.asked == [1024, 5 * MIB + 256]


@pytest.mark.proves("auto_growth/alignment-best")
def test_auto_growth_alignment() -> None:
    engine, source = cache(AutoGrowthPolicy(alignment=1024))
    engine.malloc(1)
    assert source.asked == [1024]


@pytest.mark.proves("auto_growth/idle-chunks")
@pytest.mark.parametrize(
    ("when", "freed_after_free", "freed_after_miss"),
    [("at_once", 1, 1), ("on_miss", 0, 1), ("on_failure", 0, 0)],
)
def test_auto_growth_frees_idle_chunks(
    when: str, freed_after_free: int, freed_after_miss: int
) -> None:
    engine, source = cache(AutoGrowthPolicy(free_idle_chunks=when))
    engine.free(engine.malloc(MIB))
    assert len(source.freed) == freed_after_free
    engine.malloc(2 * MIB)
    assert len(source.freed) == freed_after_miss


@pytest.mark.proves("auto_growth/retry-once")
def test_auto_growth_retries_after_freeing() -> None:
    engine, source = cache("auto_growth", capacity=3 * MIB)
    engine.free(engine.malloc(2 * MIB))
    engine.malloc(3 * MIB)
    assert source.asked == [2 * MIB, 3 * MIB, 3 * MIB]
    engine, source = cache(AutoGrowthPolicy(free_idle_chunks="on_miss"), capacity=3 * MIB)
    engine.malloc(2 * MIB)
    with pytest.raises(OutOfMemory):
        engine.malloc(2 * MIB)
    assert source.asked == [2 * MIB, 2 * MIB], "asked once only"


# All ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("none", {}),
        ("torch", {"nothing": 1}),
        ("torch", {"max_split_size": 20 * MIB}),
        ("torch", {"max_split_size": "32 monkeys"}),
        ("torch", {"max_split_size": 1 << 70}),
        ("torch", {"max_split_size": 10**5000}),
        ("torch", {"roundup_power2_divisions": (1, 2)}),
        ("torch", {"roundup_power2_divisions": None}),
        ("torch", {"roundup_power2_divisions": 3.5}),
        ("torch", {"roundup_power2_divisions": True}),
        ("torch", {"roundup_power2_divisions": -1}),
        ("torch", {"roundup_power2_divisions": 3}),
        ("torch", {"roundup_power2_divisions": [2.0] * 16}),
        ("torch", {"roundup_power2_divisions": "2" * 16}),
        ("torch", {"garbage_collection_threshold": None}),
        ("torch", {"garbage_collection_threshold": "0.5"}),
        ("torch", {"garbage_collection_threshold": float("nan")}),
        ("torch", {"garbage_collection_threshold": 10**5000}),
        ("bfc", {"first_region": 0}),
        ("bfc", {"first_region": None}),
        ("bfc", {"first_region": 10**400}),
        ("bfc", {"fragmentation_fraction": 1.5}),
        ("bfc", {"fragmentation_fraction": None}),
        ("bfc", {"retry_wait_s": None}),
        ("bfc", {"retry_wait_s": -1}),
        ("auto_growth", {"alignment": 300}),
        ("auto_growth", {"alignment": None}),
        ("auto_growth", {"alignment": 1 << 70}),
        ("auto_growth", {"chunk_size": 1.5}),
        ("auto_growth", {"chunk_size": 10**400}),
        ("auto_growth", {"retry_wait_s": "10"}),
        ("auto_growth", {"free_idle_chunks": "never"}),
    ],
)
def test_bad_options(name: str, options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options), "a policy is one of")):
        make_policy(name, **options)


def test_one_policy_object_serves_several_caches() -> None:
    policy = BfcPolicy()
    (first, source), (second, other) = cache(policy), cache(policy)
    first.malloc(20 * MIB)
    second.malloc(512)
    assert (source.asked, other.asked) == ([32 * MIB], [2 * MIB])


def test_a_policy_of_the_users() -> None:
    @dataclasses.dataclass
    class LargestFirst(TinyPolicy):
        name: ClassVar[str] = "largest"

        def find(
            self, store: Store, home: FreeList, size: int, freed_before: int | None
        ) -> int | None:
            return max(home.from_size(size), default=(0, None))[1]

    engine, _ = cache(LargestFirst())
    blocks = [engine.malloc(size * MIB) for size in (30, 50, 40)]
    for block in blocks:
        engine.free(block)
    assert engine.malloc(25 * MIB) == blocks[1]


@pytest.mark.parametrize("seed", range(60))
def test_emptying_merges_stamped_chunks_of_all_streams(seed: int) -> None:
    engine, source = cache(BfcPolicy(timestamps=True))
    rng = random.Random(seed)
    live: list[int] = []
    for _ in range(40):
        if live and rng.random() < 0.5:
            engine.free(live.pop(rng.randrange(len(live))))
        else:
            live.append(engine.malloc(rng.choice([100, 200, 300, 500, 5000]), rng.randrange(2)))
    for block in live:
        engine.free(block)
    engine.empty_cache()
    assert not source.live
