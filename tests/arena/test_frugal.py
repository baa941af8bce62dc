"""The policy "frugal", by its numbers: when it gives back, what, and when it must not."""

from __future__ import annotations

import random

import pytest

from devalloc import InvalidArgument, OutOfMemory
from devalloc.cache import Cache, FrugalPolicy, make_policy
from tests.arena.support import KIB, MIB, FakeStreams, cache


def cached(engine: Cache, *mebibytes: int, stream: int = 0) -> None:
    """Leave idle segments of these sizes, which were held at the same time."""
    for block in [engine.malloc(size * MIB, stream) for size in mebibytes]:
        engine.free(block)


def in_mib(sizes: list[int]) -> list[int]:
    return [size // MIB for size in sizes]


# Segments ----------------------------------------------------------------------------------------


@pytest.mark.proves("frugal/rounding-pools")
@pytest.mark.parametrize(
    ("nbytes", "size", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 8 * MIB),
        (4 * MIB - 512, 4 * MIB - 512, 8 * MIB),
        (4 * MIB, 4 * MIB, 4 * MIB),
        (4 * MIB + 1, 4 * MIB + 512, 6 * MIB),
        (41 * MIB, 41 * MIB, 42 * MIB),
    ],
)
def test_rounding_and_segments(nbytes: int, size: int, segment: int) -> None:
    engine, source = cache("frugal")
    address = engine.malloc(nbytes)
    assert engine.size_of(address) == size
    assert source.asked == [segment]


@pytest.mark.proves("frugal/rounding-pools")
@pytest.mark.parametrize(
    ("medium", "nbytes", "segment"),
    [
        (16 * MIB, 8 * MIB - 512, 16 * MIB),
        (16 * MIB, 8 * MIB, 8 * MIB),
        (2 * MIB, MIB + 512, 2 * MIB),
        (2 * MIB, 3 * MIB, 4 * MIB),
    ],
)
def test_the_medium_segment_is_an_option(medium: int, nbytes: int, segment: int) -> None:
    engine, source = cache(FrugalPolicy(medium_segment=medium))
    engine.malloc(nbytes)
    assert source.asked == [segment]


@pytest.mark.proves("frugal/best-fit")
def test_every_remainder_is_split_off() -> None:
    engine, source = cache("frugal")
    base = engine.malloc(20 * MIB - 512 * KIB)
    assert engine.size_of(base) == 20 * MIB - 512 * KIB
    (segment,) = engine.snapshot()["segments"]  # type: ignore[misc]
    assert [block["size"] for block in segment["blocks"]] == [20 * MIB - 512 * KIB, 512 * KIB]
    first = engine.malloc(MIB + 512)
    assert engine.malloc(2 * MIB) == first + MIB + 512, "the front, then what is left"
    assert in_mib(source.asked) == [20, 8]


# Giving back -------------------------------------------------------------------------------------


@pytest.mark.proves("frugal/above-record")
@pytest.mark.parametrize(
    ("asked", "given_back"),
    [
        (14, []),  # a hit
        (16, [10]),  # 2 over the record: the smallest that covers it
        (24, [10]),
        (26, [12]),  # 12 over
        (28, [14]),
        (30, [14, 10]),  # 16 over: the largest, then the smallest that covers the other 2
        (40, [14, 12]),
        (60, [14, 12, 10]),  # a new record, with nothing idle
    ],
)
def test_a_miss_above_the_record_gives_back_what_it_must(asked: int, given_back: list[int]) -> None:
    """The record is 50 MiB; 10, 12 and 14 MiB lie idle."""
    engine, source = cache("frugal")
    cached(engine, 50)
    engine.empty_cache()
    cached(engine, 10, 12, 14)
    source.freed.clear()
    engine.malloc(asked * MIB)
    assert in_mib(source.freed) == given_back
    assert engine.stats()["reserved_bytes.all.peak"] == max(50, asked) * MIB
    engine.audit()


@pytest.mark.proves("frugal/below-nothing")
def test_a_steady_state_keeps_its_segments() -> None:
    engine, source = cache("frugal")
    for _ in range(3):
        cached(engine, 10, 12, 14)
    assert in_mib(source.asked) == [10, 12, 14]
    assert source.freed == []


@pytest.mark.proves("frugal/below-nothing")
def test_blocks_in_use_are_no_reason_to_give_back() -> None:
    engine, source = cache("frugal")
    kept = engine.malloc(10 * MIB)
    cached(engine, 12)
    part = engine.malloc(5 * MIB)  # of the 12
    engine.malloc(14 * MIB)
    assert source.freed == []
    for block in (kept, part):
        engine.free(block)
    engine.malloc(16 * MIB)
    assert in_mib(source.freed) == [12, 10]


@pytest.mark.proves("frugal/above-record")
def test_small_segments_and_those_of_other_streams_are_given_back_too() -> None:
    engine, source = cache("frugal")
    small, large = engine.malloc(512), engine.malloc(20 * MIB, stream=1)
    engine.free(small)
    engine.free(large)
    engine.malloc(4 * MIB, stream=2)
    assert in_mib(source.freed) == [20]
    engine.malloc(20 * MIB, stream=2)
    assert in_mib(source.freed) == [20, 2]
    assert engine.stats()["reserved_bytes.all.peak"] == 24 * MIB


@pytest.mark.proves("frugal/first-record")
def test_up_to_the_allowance_nothing_is_given_back() -> None:
    engine, source = cache(FrugalPolicy(allowance=60 * MIB))
    cached(engine, 10)
    cached(engine, 20)
    cached(engine, 30)
    assert source.freed == []
    engine.malloc(32 * MIB)
    assert in_mib(source.freed) == [30, 10], "32 over the allowance"


@pytest.mark.proves("frugal/regrets-segments")
@pytest.mark.parametrize(
    ("options", "share", "peak", "per_turn"),
    [
        ({}, False, 40, 0),
        ({"patience": 1000}, False, 20, 2),
        ({"allowance": 40 * MIB}, False, 40, 0),
        ({}, True, 20, 0),
    ],
)
def test_demand_that_wanders_between_streams(
    options: dict[str, int], share: bool, peak: int, per_turn: int
) -> None:
    """It stops calling the source, or costs a release and a request for each move; an allowance,
    and sharing, spare them from the start."""
    engine, source = cache(FrugalPolicy(**options), streams=FakeStreams(), share_streams=share)
    for _ in range(5):
        source.freed.clear()
        cached(engine, 20, stream=1)
        cached(engine, 20, stream=2)
    assert len(source.freed) == per_turn
    assert engine.stats()["reserved_bytes.all.peak"] == peak * MIB


# Regrets -----------------------------------------------------------------------------------------


@pytest.mark.proves("frugal/regrets-segments")
@pytest.mark.parametrize("patience", [1, 2, 5])
def test_after_so_many_regrets_the_record_rises(patience: int) -> None:
    """Two streams take turns: each move but the first misses what the last one gave back."""
    engine, source = cache(FrugalPolicy(patience=patience))
    freed = []
    for turn in range(patience + 3):
        cached(engine, 20, stream=turn % 2)
        freed.append(len(source.freed))
    # The first grows, the second gives the first's back, and so on until it was regretted enough.
    assert freed == [min(turn, patience) for turn in range(patience + 3)]
    assert engine.stats()["reserved_bytes.all.peak"] == 40 * MIB
    engine.audit()


@pytest.mark.proves("frugal/regrets-segments")
@pytest.mark.parametrize(
    ("nbytes", "stream", "regretted"),
    [
        (20 * MIB, 1, True),
        (5 * MIB, 1, True),
        (20 * MIB + 1, 1, False),  # it would not have fitted
        (20 * MIB, 3, False),  # nor served another stream
        (512, 1, False),  # nor a small block
    ],
)
def test_what_was_given_back_is_missed_by_what_it_would_have_served(
    nbytes: int, stream: int, regretted: bool
) -> None:
    engine, source = cache(FrugalPolicy(patience=1))
    cached(engine, 20, stream=1)
    cached(engine, 20, stream=2)
    assert in_mib(source.freed) == [20]
    engine.malloc(nbytes, stream)
    assert len(source.freed) == (1 if regretted else 2)


def test_a_regret_counts_once() -> None:
    """One segment was given back: it cannot be missed twice."""
    engine, source = cache(FrugalPolicy(patience=2))
    cached(engine, 20, stream=1)
    cached(engine, 20, stream=2)
    cached(engine, 2, stream=1)  # gives back the second's for 8 MiB, and regrets the first's
    source.freed.clear()
    cached(engine, 20, stream=1)
    assert in_mib(source.freed) == [8], "no second regret: no rise"


def test_the_limit_holds_whatever_was_regretted() -> None:
    engine, source = cache(FrugalPolicy(patience=1), limit=30 * MIB)
    for turn in range(6):
        cached(engine, 20, stream=turn % 2)
    assert engine.stats()["reserved_bytes.all.peak"] == 20 * MIB
    assert len(source.freed) == 5
    assert engine.stats()["num_alloc_retries"] == 0


@pytest.mark.proves("frugal/regrets-segments")
@pytest.mark.parametrize("seed", range(20))
def test_programs_that_repeat_settle(seed: int) -> None:
    """For any turn: on two streams, blocks of all sizes that are live for a part of it."""
    rng = random.Random(seed)
    sizes = [
        rng.choice((900, 300 * KIB, 3 * MIB, 9 * MIB, rng.randrange(40 * MIB))) for _ in "x" * 9
    ]
    turn: list[tuple[int, int]] = []  # (size, stream) to allocate, or (-1, place) to free
    live: list[int] = []
    for _ in range(60):
        if live and rng.random() < 0.5:
            turn.append((-1, live.pop(rng.randrange(len(live)))))
        else:
            live.append(len(turn))
            turn.append((rng.choice(sizes), rng.randrange(2)))
    turn += [(-1, place) for place in live]
    engine, source = cache("frugal")
    calls = []
    for _ in range(300):
        blocks = {}
        for place, (size, at) in enumerate(turn):
            if size < 0:
                engine.free(blocks.pop(at))
            else:
                blocks[place] = engine.malloc(size, at)
        calls.append(len(source.asked) + len(source.freed))
    assert calls[-1] == calls[100], "no call in the last 200 turns"
    engine.audit()


@pytest.mark.proves("frugal/below-nothing")
def test_demands_that_alternate_settle() -> None:
    """10, 12 and 14 MiB, then 16 and 20: of each the other serves a part, and the rest is grown."""
    engine, source = cache("frugal")
    for _ in range(3):
        calls = len(source.asked) + len(source.freed)
        cached(engine, 10, 12, 14)
        cached(engine, 16, 20)
    assert len(source.asked) + len(source.freed) == calls
    assert engine.stats()["reserved_bytes.all.peak"] == 50 * MIB


@pytest.mark.proves("frugal/first-record")
def test_the_limit_bounds_the_record() -> None:
    engine, source = cache(FrugalPolicy(allowance=1000 * MIB), limit=60 * MIB)
    cached(engine, 10, 20, 30)
    engine.malloc(36 * MIB)
    assert in_mib(source.freed) == [30, 10], "not all, as after a failure"
    assert engine.stats()["num_alloc_retries"] == 0


def test_a_new_limit_starts_a_new_record() -> None:
    engine, source = cache("frugal")
    cached(engine, 50)
    engine.empty_cache()
    cached(engine, 10, 14)
    engine.set_limit(100 * MIB)
    source.freed.clear()
    engine.malloc(6 * MIB, stream=1)
    assert in_mib(source.freed) == [10], "6 MiB over a record of 24 MiB"


def test_a_request_that_failed_sets_no_record() -> None:
    engine, source = cache("frugal", capacity=20 * MIB)
    cached(engine, 10)
    with pytest.raises(OutOfMemory):
        engine.malloc(30 * MIB)
    source.capacity = None
    cached(engine, 10)
    source.freed.clear()
    engine.malloc(12 * MIB)
    assert in_mib(source.freed) == [10], "the record is 10 MiB"


# What it must not do -----------------------------------------------------------------------------


@pytest.mark.proves("frugal/nothing-given")
def test_nothing_is_given_back_during_a_capture() -> None:
    engine, source = cache("frugal", streams=FakeStreams())
    cached(engine, 10)
    pool = engine.private_pool()
    with engine.route(pool, capture=True):
        graph = engine.malloc(20 * MIB)
        engine.free(graph)
        engine.malloc(30 * MIB)
        source.capacity = source.used
        with pytest.raises(OutOfMemory):
            engine.malloc(40 * MIB)
        assert source.freed == []
    source.capacity = None
    engine.malloc(12 * MIB)
    assert in_mib(source.freed) == [10], "the 20 MiB are the graph's, although idle"
    engine.audit()


@pytest.mark.proves("frugal/nothing-given")
def test_what_an_event_guards_is_not_given_back() -> None:
    streams = FakeStreams()
    engine, source = cache("frugal", streams=streams)
    block = engine.malloc(10 * MIB)
    engine.record_stream(block, 7)
    engine.free(block)
    engine.malloc(12 * MIB)
    assert source.freed == []
    assert streams.done == {}, "the policy did not wait"
    streams.advance(7)
    engine.malloc(14 * MIB)
    assert in_mib(source.freed) == [10]


# Running out -------------------------------------------------------------------------------------


@pytest.mark.proves("frugal/source-fails")
def test_a_failing_source_is_asked_again_after_releasing_all() -> None:
    engine, source = cache(FrugalPolicy(allowance=1000 * MIB), capacity=40 * MIB)
    cached(engine, 10, 20)
    engine.malloc(36 * MIB)
    assert in_mib(source.asked) == [10, 20, 36, 36]
    assert sorted(in_mib(source.freed)) == [10, 20]
    assert engine.stats()["num_alloc_retries"] == 1


@pytest.mark.proves("frugal/source-fails")
def test_running_out_waits_for_events_and_takes_what_they_free() -> None:
    streams = FakeStreams()
    engine, source = cache("frugal", capacity=30 * MIB, streams=streams)
    base = engine.malloc(10 * MIB)
    engine.free(base)
    pending, _ = engine.malloc(6 * MIB), engine.malloc(4 * MIB)
    engine.record_stream(pending, 2)
    engine.free(pending)
    engine.malloc(20 * MIB)
    assert engine.malloc(6 * MIB) == pending == base
    assert streams.done == {2: 1}
    assert source.freed == []


def test_holders_are_asked_before_anything_is_given_back() -> None:
    engine, source = cache("frugal")
    cached(engine, 10)
    held = [engine.malloc(24 * MIB)]
    engine.on_low_memory(lambda: [engine.free(held.pop()) for _ in list(held)])
    source.freed.clear()
    engine.malloc(22 * MIB)
    assert source.freed == []
    assert in_mib(source.asked)[-1] == 24, "served from the holder's block"


@pytest.mark.parametrize(
    "options",
    [
        {"allowance": -1},
        {"allowance": 1.5},
        {"medium_segment": MIB},
        {"medium_segment": 3 * MIB},
        {"medium_segment": True},
        {"patience": 0},
    ],
)
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        make_policy("frugal", **options)
