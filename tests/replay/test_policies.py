"""The policies of the cache in a replay, on traces small enough to work out by hand."""

from __future__ import annotations

import pytest

from devalloc import InvalidArgument
from devalloc.cache import POLICIES
from devalloc.replay.policies import ALLOCATORS, chosen_policies, replay_policies
from devalloc.replay.trace import Event, Recorded, Trace

MIB = 1 << 20


def events(*steps: tuple[int, int, int]) -> Trace:
    return Trace(tuple(Event(*step) for step in steps))


def test_every_policy_is_there() -> None:
    expandable = ["torch-expandable", "frugal-expandable"]
    assert list(ALLOCATORS) == ["none", *POLICIES, *expandable]
    assert chosen_policies([]) == list(ALLOCATORS)
    assert chosen_policies(["torch", "none", "torch"]) == ["torch", "none"]
    with pytest.raises(InvalidArgument, match=r"no such policy: a, b; there are none, "):
        chosen_policies(["a", "none", "b"])


def test_known_results() -> None:
    """1000 B, 3 MiB, which is freed, 15 MiB, 1 MiB + 1: by the rules of each policy."""
    trace = events(
        (0, 1000, 0), (1, 3 * MIB, 0), (1, 0, 0), (2, 15 * MIB, 0), (3, MIB + 1, 0), (0, 0, 0)
    )
    found = {each.name: each for each in replay_policies(trace, ALLOCATORS, None)}
    # A small segment of 2 MiB and a large one of 20 MiB, from which all large ones are cut.
    for name in ("torch", "tiny"):
        assert found[name].peak_reserved == 22 * MIB
        assert found[name].source_allocations == 2
        assert found[name].peak_allocated == 1024 + 15 * MIB + MIB + 512
    # Segments of exactly what is asked for; the last one is cut from the 3 MiB that came back.
    assert found["auto_growth"].peak_reserved == 1024 + 18 * MIB
    assert found["auto_growth"].source_allocations == 3
    # 2 MiB, then regions that double until the request fits: 4 MiB and 16 MiB.
    assert found["bfc"].peak_reserved == (2 + 4 + 16) * MIB
    # 2, 8 and 16 MiB; the 8 are given back before the 16, and then needed again.
    assert found["frugal"].peak_reserved == (2 + 16 + 8) * MIB
    assert found["frugal"].source_allocations == 4
    assert found["frugal"].source_frees == 1
    assert found["none"].source_allocations == 4
    # As without expandable segments.
    assert found["torch-expandable"].peak_reserved == 22 * MIB
    assert found["frugal-expandable"].peak_reserved == (2 + 16 + 8) * MIB
    assert found["frugal-expandable"].source_frees == 1
    caching = set(found) - {"none", "frugal", "frugal-expandable"}
    assert {found[name].source_frees for name in caching} == {0}


@pytest.mark.parametrize("name", POLICIES)
def test_streams_are_kept_apart(name: str) -> None:
    """What one stream freed serves the same stream again, and no other."""
    steps = [(0, 5 * MIB, 0), (0, 0, 0), (1, 5 * MIB, 0), (1, 0, 0)]
    (same,) = replay_policies(events(*steps), [name], None)
    (other,) = replay_policies(events(*steps[:2], (1, 5 * MIB, 1), (1, 0, 1)), [name], None)
    assert same.source_allocations == 1
    assert other.source_allocations == 2
    assert list(same.requested) == list(other.requested)


@pytest.mark.parametrize("name", POLICIES)
def test_a_device_that_is_too_small(name: str) -> None:
    """What fits is served, also after a failure; idle segments are given back to serve it."""
    trace = events(
        (0, 20 * MIB, 0), (1, 50 * MIB, 0), (0, 0, 0), (2, 30 * MIB, 0), (1, 0, 0), (2, 0, 0)
    )
    (found,) = replay_policies(trace, [name], 40 * MIB)
    assert found.failures == 1
    assert found.peak_reserved <= 40 * MIB
    assert [held // MIB for held in found.requested] == [20, 20, 0, 30, 30, 0]


def test_what_was_recorded_comes_first() -> None:
    trace = Trace((Event(0, 5, 0),), recorded=Recorded(0, ((0, 2 * MIB),)))
    found = replay_policies(trace, ["torch"], None)
    assert [each.name for each in found] == ["recorded", "torch"]
    assert found[0].peak_reserved == found[1].peak_reserved
