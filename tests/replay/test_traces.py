"""Reading traces: PyTorch's snapshots, from any point on; logs; the compact format; bad files."""

from __future__ import annotations

import copy
import gzip
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devalloc import InvalidArgument, OutOfMemory
from devalloc.replay.files import load_trace, read_log, save_compact
from devalloc.replay.pytorch import snapshot_trace
from devalloc.replay.trace import Event, Recorded, Trace
from devalloc.sources import HostSource
from devalloc.sources.adaptors import LimitAdaptor, LogAdaptor
from tests.replay.torch_like import SEGMENT, TorchLike

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
    assert trace.notes == ("2 blocks (2.93 KiB) lived before the first event",)
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
    """Mapped segments count as segments; what does not matter is left out, what is unknown told."""
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
    ],
)
def test_no_snapshots(snapshot: Any) -> None:
    with pytest.raises(InvalidArgument, match="not a memory snapshot of PyTorch"):
        snapshot_trace(snapshot)


@pytest.mark.parametrize("traces", [[], [[]], [[], []]])
def test_nothing_was_recorded(traces: list[list[Any]]) -> None:
    with pytest.raises(InvalidArgument, match="switch recording on"):
        snapshot_trace(broken(device_traces=traces))


# Pickles --------------------------------------------------------------------------------------


def a_snapshot() -> dict[str, Any]:
    recorder = TorchLike()
    addresses = [recorder.alloc(size) for size in (1000, 3_000_000, 600)]
    recorder.free(addresses[1])
    recorder.free(recorder.alloc(2_000_000))
    return recorder.snapshot()


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


# Logs -----------------------------------------------------------------------------------------


def test_a_log_of_our_own(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with LogAdaptor(LimitAdaptor(HostSource(), 10_000), path) as source:
        first = source.allocate(5000, 0x1F)
        with pytest.raises(OutOfMemory):
            source.allocate(6000)
        with pytest.raises(ValueError, match="at least one byte"):
            source.allocate(0)
        second = source.allocate(100)
        with pytest.raises(Exception, match="allocated there"):
            source.free(first, 4999)
        source.free(first, 5000)
        source.free(second, 100)
    trace = load_trace(path)
    assert trace.requested() == [5000, 5100, 100, 0]
    assert trace.streams == 2
    assert trace.recorded is None
    assert trace.origin == {"file": "log.csv"}
    assert trace.notes == (
        "2 x failed allocations, left out",
        "1 x failed frees, left out",
        "1 x frees on another stream than the allocation's, taken as on that one",
    )


RMM_LOG = """\
Thread,Time,Action,Pointer,Size,Stream
1979932,14:21:19.998533,free,0x30a000000,256,0x2
1979932,14:21:19.998533,allocate,0x30a000000,512,0x2
1980043,14:21:32.661875,allocate failure,(nil),99999999,0x2
1980043,14:21:32.661875,allocate,0x30b000000,1024,0x0
1980043,14:21:32.661875,free,0x30a000000,512,0x2
1980043,14:21:32.661875,deallocate,0x30b000000,1024,0x0
"""


@pytest.mark.parametrize("packed", [False, True])
def test_a_log_of_rmm(tmp_path: Path, packed: bool) -> None:
    """It begins in the middle: what is freed first lived before."""
    path = tmp_path / "rmm.csv"
    data = RMM_LOG.encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    trace = load_trace(path)
    assert trace.live_at_start == 1
    assert trace.requested() == [256, 0, 512, 1536, 1024, 0]
    assert trace.notes == (
        "1 blocks (256 B) lived before the first event",
        "1 x failed allocations, left out",
    )


def test_what_lived_before_is_allocated_by_address() -> None:
    rows = ["Action,Pointer,Size", "free,0x30,3", "free,0x10,1", "free,0x20,2"]
    trace = read_log(rows)
    assert [event.size for event in trace.events] == [1, 2, 3, 0, 0, 0]
    assert [event.block for event in trace.events] == [0, 1, 2, 2, 0, 1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is no Action, Pointer, Size"),
        ("hello\n", "there is no Action, Pointer, Size"),
        ("Action,Pointer\n", "there is no Size"),
        ("Action,Pointer,Size\n", "no allocations and no frees"),
        ("Action,Pointer,Size\nallocate,0x10,many\n", "line 2: invalid literal"),
        ("Action,Pointer,Size\nallocate,there,5\n", "line 2: invalid literal"),
        ("Action,Pointer,Size\nallocate,0x10\n", "line 2: "),
        ("Action,Pointer,Size\nallocate,0x10,5\nsteal,0x10,5\n", "line 3: unknown action 'steal'"),
    ],
)
def test_no_logs(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        read_log(text.splitlines(keepends=True))


# The compact format ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trace",
    [
        snapshot_trace(a_snapshot(), origin={"program": "a", "gpu": "b"}),
        Trace((Event(0, 5, 0), Event(1, 7, 1), Event(0, 0, 0)), 1, None, ("1 note",)),
        Trace((), 0, Recorded(10, ((0, 5), (0, -15)))),
        Trace((Event(0, 5, 0),), 0, Recorded(0, ((0, 5), (1, 6), (1, 7)))),
        Trace((Event(0, 5, 0), Event(0, 0, 0)), 0, Recorded(0, ((0, 5), (0, 6), (1, -5)))),
    ],
    ids=["snapshot", "unrecorded", "empty", "late-changes", "two-changes"],
)
def test_compact_traces(tmp_path: Path, trace: Trace) -> None:
    path = tmp_path / "trace.csv.gz"
    save_compact(trace, path)
    assert load_trace(path) == trace
    first = path.read_bytes()
    save_compact(trace, path)
    assert path.read_bytes() == first, "nothing of the time or the place in it"


BIG = 1 << 60
GOOD = """\
# devalloc trace 1
{"origin": {}, "live_at_start": 1, "reserved_at_start": 2, "peak_reserved": 10, "notes": []}
action,block,size,stream
a,0,4,0
s,,8,
a,1,4,0
f,0,,
"""


def test_a_compact_trace_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(GOOD)
    assert load_trace(path) == Trace(
        (Event(0, 4, 0), Event(1, 4, 0), Event(0, 0, 0)), 1, Recorded(2, ((1, 8),))
    )


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("{", "[", "damaged header"),
        ('"origin": {}, ', "", "damaged header"),
        ('"live_at_start": 1', '"live_at_start": "x"', "damaged header"),
        ('"live_at_start": 1', '"live_at_start": 9', "9 blocks at the start, but 3 events"),
        ('"peak_reserved": 10', '"peak_reserved": 11', "peak does not follow"),
        ("action,block", "block,action", "the columns are"),
        ("a,1,4,0", "a,2,4,0", "line 6: not the next block"),
        ("a,1,4,0", "a,1,0,0", "line 6: not the next block"),
        ("a,1,4,0", "a,1,4", "line 6: not enough values"),
        ("a,1,4,0", "b,1,4,0", "line 6: unknown action 'b'"),
        ("f,0,,", "f,5,,", "line 7: block 5 is not live"),
        ("f,0,,", "f,0,,\nf,0,,", "line 8: block 0 is not live"),
        ("f,0,,", "f,-1,,", "line 7: block -1 is not live"),
        ("s,,8,", "s,,x,", "line 5: invalid literal"),
        ("f,0,,", "ü", "ascii"),
    ],
)
def test_damaged_compact_traces(tmp_path: Path, before: str, after: str, reason: str) -> None:
    path = tmp_path / "trace.csv"
    assert before in GOOD
    path.write_text(GOOD.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(InvalidArgument, match=reason) as error:
        load_trace(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a,0,4,0", f"a,0,{BIG},0"),
        (
            '_start": 2, "peak_reserved": 10',
            f'_start": -{1 << 60}, "peak_reserved": {8 - (1 << 60)}',
        ),
    ],
)
def test_numbers_of_no_machine(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "trace.csv"
    assert before in GOOD
    path.write_text(GOOD.replace(before, after))
    with pytest.raises(InvalidArgument, match="no trace of a real program"):
        load_trace(path)


def test_a_cut_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    save_compact(snapshot_trace(a_snapshot()), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidArgument, match="damaged, or no trace"):
        load_trace(path)
    path.write_bytes(b"\x1f\x8b")
    with pytest.raises(InvalidArgument, match="damaged, or no trace"):
        load_trace(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        load_trace(tmp_path / "nowhere")
