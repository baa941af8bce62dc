"""Reading files: logs in RMM's columns, the compact format, and what is damaged."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from devalloc import InvalidArgument, OutOfMemory
from devalloc.replay.files import load_trace, read_log, save_compact
from devalloc.replay.torch_snapshots import snapshot_trace
from devalloc.replay.trace import Event, Recorded, Trace
from devalloc.sources import HostSource
from devalloc.sources.adaptors import LimitAdaptor, LogAdaptor
from tests.replay.torch_like import a_snapshot

# Logs -----------------------------------------------------------------------------------------


def test_a_log_of_our_own(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with LogAdaptor(LimitAdaptor(HostSource(), 12_288), path) as source:
        first = source.allocate(5000, 0x1F)
        with pytest.raises(OutOfMemory):
            source.allocate(6000)
        with pytest.raises(ValueError, match="at least one byte"):
            source.allocate(0)  # not logged
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
        "1 x failed allocations, left out",
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
    """It begins in the middle: what is freed first was live before."""
    path = tmp_path / "rmm.csv"
    data = RMM_LOG.encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    trace = load_trace(path)
    assert trace.live_at_start == 1
    assert trace.requested() == [256, 0, 512, 1536, 1024, 0]
    assert trace.notes == (
        "1 blocks (256 B) were live before the first event",
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
        ("Action,Pointer,Size\nallocate,0x10,many\n", "line 2: the Size is 'many', not a wh"),
        ("Action,Pointer,Size\nallocate,there,5\n", "line 2: the Pointer is 'there', not a"),
        ("Action,Pointer,Size\nallocate,0x10\n", "line 2: the row ends before its Size"),
        ("Action,Pointer,Size\nallocate,0x10,5\nallo", "line 3: the row ends before its Pointer"),
        ("Pointer,Size,Action\n0x10,5,free\n0x1", "line 3: the row ends before its Action"),
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
        ('"live_at_start": 1', '"live_at_start": Infinity', "damaged header"),
        ('"reserved_at_start": 2', '"reserved_at_start": "x"', "damaged header"),
        ('"reserved_at_start": 2', '"reserved_at_start": []', "damaged header"),
        ('"reserved_at_start": 2', '"reserved_at_start": Infinity', "damaged header"),
        ('"origin": {}', f'"origin": {"[" * 50_000}', "damaged header"),
        ('"live_at_start": 1', '"live_at_start": 9', "9 blocks at the start, but 3 events"),
        ('"peak_reserved": 10', '"peak_reserved": 11', "peak does not follow"),
        ("action,block", "block,action", "the columns are"),
        ("a,1,4,0", "a,2,4,0", "line 6: not the next block"),
        ("a,1,4,0", "a,1,0,0", "line 6: not the next block"),
        ("a,1,4,0", "a,1,4", "line 6: 3 columns, not 4"),
        ("a,1,4,0", "b,1,4,0", "line 6: unknown action 'b'"),
        ("f,0,,", "f,5,,", "line 7: block 5 is not live"),
        ("f,0,,", "f,0,,\nf,0,,", "line 8: block 0 is not live"),
        ("f,0,,", "f,-1,,", "line 7: block -1 is not live"),
        ("s,,8,", "s,,x,", "line 5: the size is 'x', not a wh"),
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
