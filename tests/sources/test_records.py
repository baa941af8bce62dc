"""Adaptors that keep records: logs, statistics, tracking."""

from __future__ import annotations

import csv
import threading
from pathlib import Path

import pytest

from devalloc import DevallocError, InvalidArgument, InvalidFree, OutOfMemory
from devalloc.sources import HostSource, Segment, Source
from devalloc.sources.adaptors import (
    LimitAdaptor,
    LogAdaptor,
    StatisticsAdaptor,
    TrackingAdaptor,
)
from tests.sources.doubles import CountingSource


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.proves("rmm/logging-csv")
def test_log(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with LogAdaptor(LimitAdaptor(HostSource(), 12_288), path) as source:
        address = source.allocate(9_000, 0x1F)
        with pytest.raises(OutOfMemory):
            source.allocate(9_000)
        with pytest.raises(InvalidFree):
            source.free(address, 8_999)
        source.free(address, 9_000, 0x1F)
    assert path.read_text().startswith("Thread,Time,Action,Pointer,Size,Stream\n")
    found = rows(path)
    assert [(r["Action"], r["Pointer"], r["Size"], r["Stream"]) for r in found] == [
        ("allocate", hex(address), "9000", "0x1f"),
        ("allocate failure", "0x0", "9000", "0x0"),
        ("free", hex(address), "8999", "0x0"),
        ("free failure", hex(address), "8999", "0x0"),
        ("free", hex(address), "9000", "0x1f"),
    ]
    assert {r["Thread"] for r in found} == {str(threading.get_ident())}
    times = [float(r["Time"]) for r in found]
    assert times == sorted(times)
    source.free(source.allocate(1), 1)
    assert len(rows(path)) == 5, "closed: served, not logged"
    assert not source._rows, "nor kept"


def test_a_log_reaches_the_file(tmp_path: Path) -> None:
    at_once = LogAdaptor(HostSource(), tmp_path / "at-once.csv", auto_flush=True)
    later = LogAdaptor(HostSource(), tmp_path / "later.csv")
    for source in (at_once, later):
        source.free(source.allocate(1), 1)
    assert len(rows(at_once.path)) == 2
    later.flush()
    assert len(rows(later.path)) == 2
    at_once.close()
    later.close()
    later.close()
    later.flush()


@pytest.mark.parametrize("write", ["call", "flush"])
def test_a_row_that_comes_while_another_is_written_waits_for_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    """A garbage collection frees memory after the writer's last look at the queue."""
    with LogAdaptor(HostSource(), tmp_path / "log.csv", auto_flush=True) as source:
        garbage = [source.allocate(5), source.allocate(6)]
        flush = source._file.flush

        def interrupted() -> None:
            flush()
            if garbage:
                source.free(garbage[-1], 4 + len(garbage))
                garbage.pop()

        monkeypatch.setattr(source._file, "flush", interrupted)
        if write == "call":
            source.free(source.allocate(100), 100)
        else:
            source.flush()
        assert garbage == []
        assert [row["Size"] for row in rows(source.path) if row["Action"] == "free"] == (
            ["6", "5", "100"] if write == "call" else ["6", "5"]
        )


@pytest.mark.parametrize("auto_flush", [False, True])
def test_a_log_that_cannot_be_written_loses_no_memory(auto_flush: bool) -> None:
    """The disk is full: calls are served, and the log says so when it is flushed or closed."""
    beneath = CountingSource(HostSource())
    source = LogAdaptor(LimitAdaptor(beneath, 1 << 20), "/dev/full", auto_flush)
    address = source.allocate(100)
    assert beneath.live == {address: 100}
    segment = Segment(source, 200)
    with pytest.raises(DevallocError, match=r"/dev/full.*No space left"):
        source.flush()
    with pytest.raises(OutOfMemory):
        source.allocate(1 << 21)
    with pytest.raises(InvalidFree):
        source.free(address, 99)
    source.free(address, 100)
    del segment  # its finalizer raises nothing, or the test would fail
    assert beneath.live == {}
    assert not source._rows
    with pytest.raises(DevallocError, match=r"/dev/full.*No space left"):
        source.close()
    assert source._file.closed
    source.free(source.allocate(1), 1)


def test_a_log_ends_with_the_first_row_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hole would show addresses given out twice."""
    source = LogAdaptor(HostSource(), tmp_path / "log.csv", auto_flush=True)
    address = source.allocate(1)

    def full(text: str) -> int:
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(source._file, "write", full)
        source.free(address, 1)
    source.free(source.allocate(2), 2)
    with pytest.raises(DevallocError, match=r"log\.csv.*full"), source:
        pass
    assert [row["Action"] for row in rows(source.path)] == ["allocate"]


def test_an_interrupted_row_loses_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beneath = CountingSource(HostSource())
    with LogAdaptor(beneath, tmp_path / "log.csv") as source:
        write = source._file.write

        def interrupted(text: str) -> int:
            monkeypatch.setattr(source._file, "write", write)
            raise KeyboardInterrupt

        monkeypatch.setattr(source._file, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            source.allocate(100)
        assert beneath.live == {}


@pytest.mark.parametrize("stream", ["s", 1.5, True])
def test_the_stream_of_a_logged_call_is_a_handle(tmp_path: Path, stream: int) -> None:
    beneath = CountingSource(HostSource())
    with LogAdaptor(beneath, tmp_path / "log.csv") as source:
        with pytest.raises(InvalidArgument, match=r"stream.*handle"):
            source.allocate(100, stream)
        assert beneath.live == {}
        address = source.allocate(100)
        with pytest.raises(InvalidArgument, match=r"stream.*handle"):
            source.free(address, 100, stream)
        assert beneath.live == {address: 100}
        source.free(address, 100)
    assert [row["Action"] for row in rows(source.path)] == ["allocate", "free"]


@pytest.mark.parametrize("nbytes", [0, "x", pytest.param(10**5000, id="huge")])
def test_impossible_requests_are_not_logged(tmp_path: Path, nbytes: int) -> None:
    source = LogAdaptor(HostSource(), tmp_path / "log.csv")
    with source, pytest.raises(InvalidArgument):
        source.allocate(nbytes)
    assert rows(source.path) == []


@pytest.mark.proves("rmm/logging-csv")
def test_a_log_of_threads_gives_no_address_out_twice(tmp_path: Path) -> None:
    """Addresses come again at once, so a free logged too late would show."""
    path = tmp_path / "log.csv"
    with LogAdaptor(HostSource(), path) as source:

        def work() -> None:
            for _ in range(200):
                source.free(source.allocate(4096), 4096)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    found = rows(path)
    assert len(found) == 4 * 200 * 2
    live: set[str] = set()
    for row in found:
        if row["Action"] == "allocate":
            assert row["Pointer"] not in live
            live.add(row["Pointer"])
        else:
            live.remove(row["Pointer"])
    assert not live


@pytest.mark.proves("rmm/statistics-push")
def test_statistics() -> None:
    """Bytes are pages of 4096, which is how host memory is taken."""
    source = StatisticsAdaptor(LimitAdaptor(HostSource(), 12_288))
    first = source.allocate(6_000)
    source.free(source.allocate(3_000), 3_000)
    with pytest.raises(OutOfMemory):
        source.allocate(5_000)
    with pytest.raises(InvalidFree):
        source.free(first, 1)
    found = source.counters
    assert (found.bytes.current, found.bytes.peak, found.bytes.total) == (8_192, 12_288, 12_288)
    assert (found.allocations.current, found.allocations.peak) == (1, 2)
    assert (found.allocations.total, found.failures) == (2, 1)
    source.free(first, 6_000)
    assert source.counters.bytes.current == 0
    assert found.bytes.current == 8_192, "a copy"


@pytest.mark.proves("rmm/statistics-push")
def test_sections_of_statistics() -> None:
    """What a section counts is its own, and belongs to the one around it afterwards."""
    source = StatisticsAdaptor(HostSource())
    old = source.allocate(1_000)
    source.push()
    assert source.counters.bytes.total == 0
    source.free(old, 1_000)
    assert source.counters.bytes.current == -4_096
    new = source.allocate(5_000)
    source.free(new, 5_000)
    inner = source.pop()
    assert (inner.bytes.current, inner.bytes.peak, inner.bytes.total) == (-4_096, 4_096, 8_192)
    assert inner.allocations.total == 1
    outer = source.counters
    assert (outer.bytes.current, outer.bytes.peak, outer.bytes.total) == (0, 8_192, 12_288)
    with pytest.raises(InvalidArgument, match="pop without push"):
        source.pop()


def allocate_here(source: Source) -> int:
    return source.allocate(5_000, 7)


@pytest.mark.proves("rmm/out-stacks")
def test_tracking() -> None:
    source = TrackingAdaptor(LimitAdaptor(HostSource(), 20_000))
    assert source.report() == ""
    address = allocate_here(source)
    other = source.allocate(100)
    with pytest.raises(InvalidFree):
        source.free(other, 99)
    with pytest.raises(OutOfMemory):
        source.allocate(50_000)
    first, second = source.outstanding()
    assert (first.address, first.nbytes, first.stream) == (address, 5_000, 7)
    assert first.thread == threading.get_ident()
    assert first.stack[-1].name == "allocate_here"
    assert first.stack[-2].name == "test_tracking"
    assert second.address == other
    assert source.outstanding_bytes == 12_288, "whole pages"
    assert f"4.883 KiB at {address:#x}, allocated by\n" in source.report()
    assert "return source.allocate(5_000, 7)" in source.report()
    source.free(address, 5_000)
    source.free(other, 100)
    assert source.outstanding() == []


@pytest.mark.proves("rmm/out-stacks")
def test_tracking_without_stacks() -> None:
    source = TrackingAdaptor(HostSource(), frames=0)
    address = source.allocate(1)
    assert source.outstanding()[0].stack == []
    source.free(address, 1)
    short = TrackingAdaptor(HostSource(), frames=1)
    address = allocate_here(short)
    assert [frame.name for frame in short.outstanding()[0].stack] == ["allocate_here"]
    short.free(address, 5_000)


def test_a_free_that_loses_a_race_leaves_no_entry() -> None:
    """It began first, and the other frees before it comes to the source beneath."""

    class Overtaken(HostSource):
        overtakes = True

        def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
            if self.overtakes:
                self.overtakes = False
                tracker.free(address, nbytes)
            super().free(address, nbytes, stream)

    tracker = TrackingAdaptor(Overtaken())
    address = tracker.allocate(5000)
    with pytest.raises(InvalidFree):
        tracker.free(address, 5000)
    assert tracker.outstanding_bytes == 0
