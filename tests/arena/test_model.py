"""Random calls against a plain model: what is live is disjoint, and C1 to C3 hold after each."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from devalloc import DoubleFree, InvalidFreeError, OutOfMemory
from devalloc.cache import (
    AutoGrowthPolicy,
    BfcPolicy,
    Cache,
    FrugalPolicy,
    Policy,
    TinyPolicy,
    TorchPolicy,
    make_policy,
)
from tests.arena.support import MIB, FakeStreams, NumberSource

SIZES = st.one_of(
    st.integers(0, 4096),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB, 10 * MIB - 1, 25 * MIB, 60 * MIB]),
    st.integers(1, 70 * MIB),
)
STREAMS = st.integers(0, 2)
LIMIT = 200 * MIB


class Machine(RuleBasedStateMachine):
    policy: Policy
    share = False

    def __init__(self) -> None:
        super().__init__()
        self.source = NumberSource(capacity=LIMIT - 30 * MIB, failing=0.05)
        self.streams = FakeStreams()
        self.cache = Cache(
            self.source,
            self.policy,
            limit=LIMIT,
            streams=self.streams,
            share_streams=self.share,
        )
        self.failed = False
        self.live: dict[int, tuple[int, int]] = {}
        self.freed: list[int] = []
        # Address ranges that streams may still use: (address, size) -> [(stream, point)]
        self.used: list[tuple[int, int, int, int]] = []
        self.uses: dict[int, set[int]] = {}

    @rule(nbytes=SIZES, stream=STREAMS)
    def malloc(self, nbytes: int, stream: int) -> None:
        try:
            address = self.cache.malloc(nbytes, stream)
        except OutOfMemory:
            return
        if address == 0:
            assert nbytes == 0
            return
        self.failed = True  # until all is checked: teardown would hide what is wrong
        assert address % 256 == 0
        size = self.cache.size_of(address)
        assert size >= nbytes
        self._check_order(address, size, stream)
        self.live[address] = (size, stream)
        self.failed = False

    def _check_order(self, address: int, size: int, stream: int) -> None:
        """C2, from outside: who used these bytes before is done, or the new owner waits for it."""
        kept = []
        for start, nbytes, user, point in self.used:
            overlaps = start < address + size and address < start + nbytes
            assert not overlaps or self.streams.over(user, point, stream), (
                f"{address:#x} is still used by stream {user}"
            )
            if not overlaps:
                kept.append((start, nbytes, user, point))
        self.used = kept

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.live)))
        size, stream = self.live.pop(address)
        for user in {stream, *self.uses.pop(address, set())}:
            # A point of its own after everything the user has queued.
            event = self.streams.record(user)
            self.used.append((address, size, user, event.point))
        self.cache.free(address)
        self.freed.append(address)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), stream=STREAMS)
    def record_stream(self, data: st.DataObject, stream: int) -> None:
        address = data.draw(st.sampled_from(sorted(self.live)))
        self.cache.record_stream(address, stream)
        self.uses.setdefault(address, set()).add(stream)

    @rule(stream=STREAMS)
    def advance(self, stream: int) -> None:
        self.streams.advance(stream)

    @precondition(lambda self: self.freed)
    @rule(data=st.data(), offset=st.sampled_from([0, 1, 256]))
    def free_wrongly(self, data: st.DataObject, offset: int) -> None:
        address = data.draw(st.sampled_from(self.freed)) + offset
        if address not in self.live:
            with pytest.raises(InvalidFreeError):
                self.cache.free(address)

    @rule()
    def empty_cache(self) -> None:
        before = self.source.used
        released = self.cache.empty_cache()
        assert self.source.used == before - released
        # The call has waited until all events happened.
        self.used = [entry for entry in self.used if self.streams.done.get(entry[2], 0) < entry[3]]

    @invariant()
    def holds(self) -> None:
        self.cache.audit()
        assert self.source.used == self.cache.reserved
        ordered = sorted((at, size) for at, (size, _) in self.live.items())
        for (first, size), (second, _) in pairwise(ordered):
            assert first + size <= second
        stats = self.cache.stats()
        assert stats["allocation.all.current"] == len(self.live)
        assert stats["allocated_bytes.all.current"] == sum(size for size, _ in self.live.values())

    def teardown(self) -> None:
        if self.failed:
            return
        for address in self.live:
            self.cache.free(address)
        self.streams.synchronize()
        self.cache.empty_cache()
        self.cache.audit()
        assert self.cache.reserved == 0
        assert self.source.used == 0
        assert not self.source.parts_of


POLICIES: dict[str, Policy] = {
    "tiny": TinyPolicy(),
    "torch": TorchPolicy(),
    "torch-options": TorchPolicy(
        roundup_power2_divisions=4,
        max_split_size=24 * MIB,
        garbage_collection_threshold=0.5,
    ),
    "bfc": BfcPolicy(),
    "bfc-limit": BfcPolicy(growth=False, fragmentation_fraction=0.1),
    "bfc-timestamps": BfcPolicy(timestamps=True),
    "auto_growth": AutoGrowthPolicy(),
    "auto_growth-chunk": AutoGrowthPolicy(chunk_size=16 * MIB, free_idle_chunks="on_miss"),
    "auto_growth-at-once": AutoGrowthPolicy(free_idle_chunks="at_once"),
    **{
        f"{name}-expandable": make_policy(name, expandable_segments=True)
        for name in ("tiny", "torch", "bfc", "auto_growth", "frugal")
    },
    "timestamps-expandable": BfcPolicy(timestamps=True, expandable_segments=True),
    "at-once-expandable": AutoGrowthPolicy(free_idle_chunks="at_once", expandable_segments=True),
    "frugal": FrugalPolicy(),
    "frugal-options": FrugalPolicy(allowance=64 * MIB, medium_segment=24 * MIB),
}


@pytest.mark.proves(
    "torch/reuse-owner", "torch/expandable-segments", "rmm/reuse-across", "bfc/search-request"
)
@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("name", POLICIES)
def test_random_calls(name: str, share: bool) -> None:
    machine = type("M", (Machine,), {"policy": POLICIES[name], "share": share})
    case = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
    case("runTest").runTest()


@pytest.mark.proves("tiny/unknown-address")
def test_a_double_free_changes_nothing() -> None:
    source = NumberSource()
    cache = Cache(source, "torch")
    first, second = cache.malloc(1000), cache.malloc(1000)
    cache.free(first)
    before = cache.snapshot()
    with pytest.raises(DoubleFree):
        cache.free(first)
    with pytest.raises(InvalidFreeError, match="256 B inside the block"):
        cache.free(second + 256)
    with pytest.raises(InvalidFreeError, match="no segment"):
        cache.free(4096)
    assert cache.snapshot() == before
    cache.audit()
