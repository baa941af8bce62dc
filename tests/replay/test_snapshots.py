"""Reading PyTorch's snapshots, from any point on, and their pickles, of any content."""

from __future__ import annotations

import copy
import gzip
import io
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devalloc import InvalidArgument
from devalloc.replay.files import load_trace
from devalloc.replay.torch_snapshots import snapshot_trace
from devalloc.replay.trace import Event, Recorded
from tests.replay.torch_like import SEGMENT, TorchLike, a_snapshot

# Snapshots of PyTorch -------------------------------------------------------------------------


def test_a_snapshot() -> None:
    recorder = TorchLike()
    first = recorder.alloc(1000)
    second = recorder.alloc(3_000_000, stream=7)
    recorder.free(first)
    recorder.free(second)
    recorder.empty_cache()
    trace = snapshot_trace(recorder.snapshot())
    assert trace.events == (
        Event(0, 1000, 0),
        Event(1, 3_000_000, 1),
        Event(0, 0, 0),
        Event(1, 0, 1),
    )
    assert trace.requested() == [1000, 3_001_000, 3_000_000, 0]
    assert (trace.live_at_start, trace.notes, trace.streams) == (0, (), 2)
    assert trace.recorded == Recorded(
        0, ((0, SEGMENT), (1, 2 * SEGMENT), (4, -SEGMENT), (4, -2 * SEGMENT))
    )
    assert trace.recorded.peak_reserved == 3 * SEGMENT
    assert (trace.recorded.source_allocations, trace.recorded.source_frees) == (2, 2)


def test_a_block_lives_until_its_free_is_completed() -> None:
    recorder = TorchLike()
    first = recorder.alloc(1000)
    recorder.request_free(first)
    recorder.alloc(2000)
    recorder.complete_free(first)
    recorder.request_free(recorder.alloc(4000))
    trace = snapshot_trace(recorder.snapshot())
    assert trace.requested() == [1000, 3000, 2000, 6000]


@pytest.mark.parametrize("left_out", ["free_requested", "free_completed"])
def test_a_recording_may_leave_out_one_kind_of_free(left_out: str) -> None:
    recorder = TorchLike()
    recorder.free(recorder.alloc(1000))
    recorder.alloc(2000)
    snapshot = recorder.snapshot()
    snapshot["device_traces"][0] = [e for e in recorder.entries if e["action"] != left_out]
    assert snapshot_trace(snapshot).requested() == [1000, 0, 2000]


def test_a_free_that_never_completes_but_must_have() -> None:
    recorder = TorchLike()
    first = recorder.alloc(1000)
    recorder.request_free(first)
    recorder.complete_free(first)
    assert recorder.alloc(2000) == first
    recorder.free(recorder.alloc(3000))
    entries = [e for e in recorder.entries if (e["action"], e["size"]) != ("free_completed", 1000)]
    trace = snapshot_trace({"device_traces": [entries], "segments": recorder.segments})
    assert trace.requested() == [1000, 0, 2000, 5000, 2000]
    assert trace.notes == ("1 x requested frees without completion, completed at the next use",)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.sampled_from([1, 512, 5000, 700_000, 3_000_000])),
        st.tuples(st.sampled_from(["free", "request", "complete", "empty"]), st.integers(0, 9)),
    ),
    max_size=40,
)


@given(actions, st.integers(0, 60), st.integers(0, 1))
def test_a_trace_may_begin_anywhere(steps: list[tuple[str, int]], cut: int, streams: int) -> None:
    """From any event on, what is allocated and reserved is what it was in the whole history."""
    recorder = TorchLike()
    live: list[int] = []
    pending: list[int] = []
    for kind, value in steps:
        if kind == "alloc":
            live.append(recorder.alloc(value, stream=value % 2 * streams))
        elif kind == "free" and live:
            recorder.free(live.pop(value % len(live)))
        elif kind == "request" and live:
            pending.append(live.pop(value % len(live)))
            recorder.request_free(pending[-1])
        elif kind == "complete" and pending:
            recorder.complete_free(pending.pop(value % len(pending)))
        elif kind == "empty":
            recorder.empty_cache()
    kept = len(recorder.entries) - cut
    if kept <= 0:
        return
    # A kind of free that is not in the part that is left would be taken as not recorded.
    recorder.free(recorder.alloc(512))
    whole = snapshot_trace(recorder.snapshot())
    part = snapshot_trace(recorder.snapshot(kept))
    assert whole.live_at_start == 0
    assert (
        part.requested()[part.live_at_start :]
        == whole.requested()[len(whole.events) - len(part.events) + part.live_at_start :]
    )
    assert part.requested()[-1] == sum(block["requested_size"] for block in recorder.live())
    assert whole.recorded is not None
    assert part.recorded is not None
    assert whole.recorded.reserved_at_start == 0
    missed = whole.recorded.changes[: len(whole.recorded.changes) - len(part.recorded.changes)]
    assert part.recorded.reserved_at_start == sum(nbytes for _, nbytes in missed)


def test_what_lived_before_is_told() -> None:
    recorder = TorchLike()
    kept, freed = recorder.alloc(1000), recorder.alloc(2000)
    before = len(recorder.entries)
    recorder.free(freed)
    recorder.alloc(5000)
    recorder.free(recorder.alloc(100))
    trace = snapshot_trace(recorder.snapshot(len(recorder.entries) - before))
    assert trace.live_at_start == 2
    assert trace.events[:3] == (Event(0, 1000, 0), Event(1, 2000, 0), Event(1, 0, 0))
    assert trace.notes == ("2 blocks (2.93 KiB) were live before the first event",)
    assert trace.recorded == Recorded(SEGMENT, ())
    assert kept < freed


def test_the_device_with_the_most_events() -> None:
    first, second = TorchLike(), TorchLike()
    first.alloc(100)
    second.alloc(200)
    second.alloc(300)
    for segment in second.segments:
        segment["device"] = 1
    snapshot = {
        "device_traces": [first.entries, second.entries],
        "segments": first.segments + second.segments,
    }
    assert snapshot_trace(snapshot).requested() == [200, 500]
    chosen = snapshot_trace(snapshot, device=0)
    assert chosen.requested() == [100]
    assert chosen.recorded is not None
    assert chosen.recorded.peak_reserved == SEGMENT
    for device in (2, -1):
        with pytest.raises(InvalidArgument, match=r"no events for device .* \[2, 3\]"):
            snapshot_trace(snapshot, device)


def test_other_kinds_of_events() -> None:
    """Mapped segments count as segments; what does not matter is left out, what is unknown is
    reported."""
    recorder = TorchLike()
    recorder.alloc(1000)
    recorder.entries[0]["action"] = "segment_map"
    recorder.alloc(100)
    recorder.entries[-1]["pool_id"] = (0, 1)
    for action in ("oom", "snapshot", "sneeze", "sneeze"):
        recorder.entries.append({"action": action, "size": 5, "stream": 0})
        recorder.entries[-1]["addr"] = 5
    trace = snapshot_trace(recorder.snapshot())
    assert trace.requested() == [1000, 1100]
    assert trace.recorded == Recorded(0, ((0, SEGMENT),))
    assert trace.notes == (
        "1 x events in private pools, treated like all others",
        "2 x events of the unknown kind 'sneeze', left out",
    )


def test_contradictions_are_told() -> None:
    recorder = TorchLike()
    address = recorder.alloc(1000)
    recorder.free(address)
    recorder.entries.append(dict(recorder.entries[-1]))  # completed twice
    recorder.alloc(2000)
    lost = recorder.alloc(3000)
    recorder.entries.append({"action": "alloc", "addr": lost, "size": 4000, "stream": 0})
    recorder.entries.append({"action": "free_completed", "addr": 99, "size": 0, "stream": 0})
    recorder.entries.append({"action": "alloc", "addr": 77, "size": 0, "stream": 0})
    trace = snapshot_trace(recorder.snapshot())
    assert trace.requested() == [1000, 0, 2000, 5000, 2000, 6000]
    assert trace.notes == (
        "1 x frees of what was free already, left out",
        "1 x addresses allocated again without a free; freed just before",
        "1 x frees of unknown blocks of unknown size, left out",
        "1 x allocations of no bytes, left out",
    )


def test_live_at_the_end_without_an_allocation() -> None:
    recorder = TorchLike()
    address = recorder.alloc(1000)
    recorder.free(address)
    entries = list(recorder.entries)
    recorder.alloc(2000)
    trace = snapshot_trace({"device_traces": [entries], "segments": recorder.segments})
    assert trace.requested() == [1000, 0]
    assert trace.notes == ("1 x blocks live at the end whose allocation is missing, left out",)


def test_reserved_bytes_that_do_not_add_up() -> None:
    """A segment went away after the recording had ended."""
    recorder = TorchLike()
    recorder.free(recorder.alloc(1000))
    trace = snapshot_trace({"device_traces": [recorder.entries], "segments": []})
    assert trace.recorded is None
    assert trace.notes == ("the recorded reserved bytes do not add up, and are left out",)
    assert trace.requested() == [1000, 0]


def broken(**changes: Any) -> Any:
    recorder = TorchLike()
    recorder.alloc(1000)
    snapshot = copy.deepcopy(recorder.snapshot())
    for key, value in changes.items():
        snapshot[key] = value
    return snapshot


@pytest.mark.parametrize(
    "snapshot",
    [
        None,
        17,
        [],
        {},
        {"segments": []},
        broken(segments=[{"device": 0}]),
        broken(segments=7),
        broken(device_traces=[[{"action": "alloc", "addr": 1}]]),
        broken(device_traces=[[{"addr": 1}]]),
        broken(device_traces=[[17]]),
        broken(device_traces=[[{"action": "alloc", "addr": None, "size": 1, "stream": 0}]]),
        broken(device_traces=[[{"action": ["alloc"], "addr": 1, "size": 1, "stream": 0}]]),
        broken(device_traces=[[{"action": "alloc", "addr": "x", "size": 1, "stream": 0}]]),
        broken(device_traces=[[{"action": "alloc", "addr": 1, "size": math.inf, "stream": 0}]]),
    ],
)
def test_no_snapshots(snapshot: Any) -> None:
    with pytest.raises(InvalidArgument, match="not a memory snapshot of PyTorch"):
        snapshot_trace(snapshot)


def test_a_snapshot_with_numbers_of_no_machine(tmp_path: Path) -> None:
    freed = {"action": "free_completed", "addr": 1, "size": 10**400, "stream": 0}
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(broken(device_traces=[[freed]])))
    with pytest.raises(InvalidArgument, match="no trace of a real program"):
        load_trace(path)


@pytest.mark.parametrize("traces", [[], [[]], [[], []]])
def test_nothing_was_recorded(traces: list[list[Any]]) -> None:
    with pytest.raises(InvalidArgument, match="switch recording on"):
        snapshot_trace(broken(device_traces=traces))


# Pickles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_pickles(tmp_path: Path, protocol: int, packed: bool) -> None:
    path = tmp_path / "snapshot.pickle"
    data = pickle.dumps(a_snapshot(), protocol)
    path.write_bytes(gzip.compress(data) if packed else data)
    trace = load_trace(path)
    expected = snapshot_trace(a_snapshot())
    assert (trace.events, trace.recorded) == (expected.events, expected.recorded)
    assert trace.origin == {"file": "snapshot.pickle"}


class Evil:
    """Makes a folder when it is unpickled by ordinary means."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_calls_something(tmp_path: Path) -> None:
    path, trap = tmp_path / "evil.pickle", tmp_path / "trap"
    path.write_bytes(pickle.dumps({"segments": [Evil(trap)]}))
    with pytest.raises(InvalidArgument, match=r"evil\.pickle: .*mkdir; only plain data is read"):
        load_trace(path)
    assert not trap.exists()
    pickle.loads(path.read_bytes())
    assert trap.exists(), "the trap works"


@pytest.mark.parametrize(
    "value",
    [Path("x"), complex, io.BytesIO(), ValueError("x"), Event(0, 1, 0), st.integers, range(3)],
    ids=lambda value: type(value).__name__,
)
def test_pickles_of_anything_but_plain_data(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "odd.pickle"
    try:
        path.write_bytes(pickle.dumps({"segments": value}))
    except TypeError:
        pytest.fail("choose a value that can be pickled")
    with pytest.raises(InvalidArgument, match="only plain data is read"):
        load_trace(path)


def test_a_pickle_that_refers_to_something_outside(tmp_path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return "outside" if obj == "here" else None

    path = tmp_path / "persistent.pickle"
    with path.open("wb") as file:
        Pickler(file).dump({"segments": "here"})
    with pytest.raises(InvalidArgument, match="only plain data is read"):
        load_trace(path)


@given(st.data())
def test_damaged_pickles(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Cut, or with bytes changed: a trace or an InvalidArgument, and nothing else."""
    whole = bytearray(pickle.dumps(a_snapshot()))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(2, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.pickle"
    path.write_bytes(whole[: data.draw(st.integers(2, len(whole)))])
    try:
        trace = load_trace(path)
    except InvalidArgument:
        return
    assert trace.events
