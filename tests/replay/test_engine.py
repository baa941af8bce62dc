"""Replaying: what is counted, what happens when memory runs out, and the picture."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from devalloc import InvalidArgument
from devalloc.replay.engine import Replay, Uncached, recorded_replay, replay
from devalloc.replay.summary import POINTS, describe_trace, replay_table, save_plot
from devalloc.replay.trace import Event, Recorded, Trace
from devalloc.sources import Source

KIB = 1 << 10
# Two live at a time, on two streams; the first allocation also comes last.
TRACE = Trace(
    (
        Event(0, 1 * KIB, 0),
        Event(1, 3 * KIB, 1),
        Event(0, 0, 0),
        Event(2, 2 * KIB, 0),
        Event(1, 0, 1),
        Event(2, 0, 0),
        Event(3, 1 * KIB, 0),
    ),
    recorded=Recorded(0, ((0, 2 * KIB), (1, 4 * KIB), (5, -4 * KIB), (7, 100 * KIB))),
)


class Hoard:
    """Rounds up to 4 KiB and reuses what is free on the same stream; gives nothing back."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.allocated = self.peak_allocated = 0
        self.free_blocks: list[tuple[int, int]] = []
        self.calls: list[tuple[str, int]] = []

    def alloc(self, nbytes: int, stream: int) -> tuple[int, int]:
        self.calls.append(("alloc", nbytes))
        for block in self.free_blocks:
            if block[1] == stream:
                self.free_blocks.remove(block)
                break
        else:
            block = self.source.allocate(4 * KIB, stream), stream
        self.allocated += 4 * KIB
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: tuple[int, int]) -> None:
        self.calls.append(("free", block[1]))
        self.allocated -= 4 * KIB
        self.free_blocks.append(block)


def ticking() -> float:
    """A clock that shows 7 us more each time."""
    return next(TICKS) * 1e-6


TICKS = count(0, 7)


def test_replay() -> None:
    made: list[Hoard] = []

    def make(source: Source) -> Hoard:
        made.append(Hoard(source))
        return made[-1]

    found = replay(TRACE, make, "hoard", clock=ticking)
    assert list(found.reserved) == [4096, 8192, 8192, 8192, 8192, 8192, 8192]
    assert list(found.requested) == [1024, 4096, 3072, 5120, 2048, 0, 1024]
    assert (found.peak_reserved, found.peak_allocated) == (8192, 8192)
    assert (found.source_allocations, found.source_frees) == (2, 0)
    assert found.failures == 0
    assert found.seconds == pytest.approx(7e-6)
    assert found.seconds_per_event == pytest.approx(1e-6)
    assert found.fragmentation()[:2] == [0.75, 0.5]
    assert found.mean_fragmentation == pytest.approx(4.875 / 7)
    assert len(made) == 2, "the clock does not see what looking costs"
    assert made[0].calls == made[1].calls
    assert len(made[0].calls) == len(TRACE.events)


def test_no_cache() -> None:
    found = replay(TRACE, Uncached, "none")
    assert (found.source_allocations, found.source_frees) == (4, 3)
    assert found.peak_reserved == found.peak_allocated == max(TRACE.requested())
    assert list(found.reserved) == list(found.requested) == TRACE.requested()
    assert found.mean_fragmentation == 0


@pytest.mark.parametrize("make", [Uncached, Hoard])
def test_a_device_that_is_too_small(make: type[Uncached] | type[Hoard]) -> None:
    """What fails is counted, its free is left out, and everything else goes on."""
    found = replay(TRACE, make, "small", capacity=4 * KIB + 512)
    failed = 1  # the block of 2 KiB beside 3 KiB, or the second stream's 4 KiB
    assert found.failures == failed
    assert found.peak_reserved == 4 * KIB
    assert found.requested[-1] == 1 * KIB
    assert found.seconds is not None


def test_nothing_to_replay() -> None:
    with pytest.raises(InvalidArgument, match="no events"):
        replay(Trace(()), Uncached, "none")


def test_what_was_recorded() -> None:
    found = recorded_replay(TRACE)
    assert found is not None
    assert [held // KIB for held in found.reserved] == [2, 6, 6, 6, 6, 2, 2]
    assert found.peak_reserved == 102 * KIB, "also what was reserved after the last event"
    assert (found.source_allocations, found.source_frees) == (3, 1)
    assert (found.seconds, found.seconds_per_event, found.peak_allocated) == (None, None, None)
    assert recorded_replay(Trace(TRACE.events)) is None


def test_fragmentation_of_nothing() -> None:
    empty = Replay("empty", [0, 4], [0, 1], 4, 4, 1, 0)
    assert empty.fragmentation() == [0.0, 0.75]


def test_table() -> None:
    recorded = recorded_replay(TRACE, "PyTorch")
    assert recorded is not None
    table = replay_table([replay(TRACE, Hoard, "auto_growth", clock=ticking), recorded])
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(table)
    rows = [re.split(r"\s{2,}", line.strip()) for line in console.export_text().splitlines()]
    assert rows[-3:-1] == [
        ["auto_growth", "8 KiB", "8 KiB", "2", "0", "69.6%", "0", "1.00"],
        ["PyTorch", "102 KiB", "-", "3", "1", "52.4%", "0", "-"],
    ]


def test_a_table_of_large_numbers_fits_a_terminal() -> None:
    large = Replay("auto_growth", [0] * 100, [0] * 100, 1023 << 29, 1023 << 29, 109_145, 109_145)
    large = replace(large, failures=99_999, seconds=100 * 123.45e-6)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(replay_table([large]))
    text = console.export_text()
    assert "…" not in text
    assert "511.5 GiB  511.5 GiB  109145  109145    0.0%   99999  123.45" in text


def test_description() -> None:
    trace = Trace(TRACE.events, notes=("3 odd things",), origin={"gpu": "H1", "torch": "9"})
    assert describe_trace(trace) == [
        "gpu H1, torch 9",
        "7 events: 4 allocations on 2 streams, at most 5 KiB requested at a time",
        "note: 3 odd things",
    ]


def test_plot(tmp_path: Path) -> None:
    """The picture shows something, also of more events than it has points."""
    many = Trace(tuple(Event(n, 1 + n % 7, 0) for n in range(3 * POINTS)))
    for number, trace in enumerate((TRACE, many)):
        path = tmp_path / f"{number}.png"
        recorded = recorded_replay(trace)
        save_plot(
            path, [replay(trace, Uncached, "none"), *([recorded] if recorded else [])], "title"
        )
        picture = imread(path)
        assert picture.shape[:2] == (770, 1210)
        assert picture[..., :3].std() > 0.05


def test_a_thin_curve_keeps_its_peaks() -> None:
    from devalloc.replay.summary import _thinned

    values = [1.0] * 10_000
    values[7_777] = 5.0
    points = list(_thinned(values))
    assert (7_777, 5.0) in points
    assert len(points) <= POINTS + 1
