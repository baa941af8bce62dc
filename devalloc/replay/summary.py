"""Replays side by side: a table for people, and a picture over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from devalloc.errors import OutOfMemory
from devalloc.replay.engine import Replay
from devalloc.replay.trace import Trace
from devalloc.sizes import format_size

POINTS = 2000


def describe_trace(trace: Trace) -> list[str]:
    """Lines for people: what was recorded, and how it was read."""
    requested = trace.requested()
    origin = ", ".join(f"{key} {value}" for key, value in trace.origin.items())
    lines = [
        *([origin] if origin else []),
        f"{len(trace.events)} events: {trace.allocations} allocations on {trace.streams} "
        f"stream{'s' * (trace.streams != 1)}, at most {format_size(max(requested, default=0))} "
        "requested at a time",
    ]
    return lines + [f"note: {note}" for note in trace.notes]


def replay_table(replays: Sequence[Replay]) -> Table:
    """One row for each replay; it fits a terminal of 80 columns.

    Unused is the share of reserved bytes that the program did not request, averaged over events.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for column in (
        "peak\nreserved",
        "peak\nallocated",
        "source\nallocs",
        "source\nfrees",
        "unused\nshare",
        "failed",
        "us per\nevent",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for each in replays:
        allocated, seconds = each.peak_allocated, each.seconds_per_event
        table.add_row(
            each.name,
            format_size(each.peak_reserved),
            "-" if allocated is None else format_size(allocated),
            str(each.source_allocations),
            str(each.source_frees),
            f"{each.mean_fragmentation:.1%}",
            str(each.failures),
            "-" if seconds is None else f"{seconds * 1e6:.2f}",
        )
    return table


def require_room(trace: Trace, replays: Sequence[Replay], capacity: int | None) -> str:
    """A line about allocations that failed because there was no room, or nothing.

    Raises
    ------
    OutOfMemory
        If some policy could not serve a single allocation: its row means nothing then.
    """
    failed = [each for each in replays if each.failures]
    if capacity is None or not failed:
        return ""
    most = format_size(max(trace.requested(), default=0))
    room = f"a device of {format_size(capacity)}"
    nothing = [each.name for each in failed if each.failures == trace.allocations]
    if nothing:
        raise OutOfMemory(
            f"{room} served no allocation under {', '.join(nothing)}; the program requests up to "
            f"{most} at a time, and policies reserve segments of some MiB: raise --capacity"
        )
    return f"failed: allocations that found no room on {room}, and were left out from there on"


def save_plot(path: Path, replays: Sequence[Replay], title: str) -> None:
    """Write a PNG that shows reserved bytes and fragmentation by event. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    asked = list(_thinned(replays[0].requested))
    above.fill_between(*zip(*asked, strict=True), color="0.85", label="requested")
    for each in replays:
        # A recorded result is the reference: dashed and dark.
        style = {"color": "black", "linestyle": "--"} if each.seconds is None else {}
        above.plot(*zip(*_thinned(each.reserved), strict=True), label=each.name, **style)
        below.plot(*zip(*_thinned(each.fragmentation()), strict=True), label=each.name, **style)
    above.set_title(title)
    above.set_ylabel("bytes reserved")
    highest = max(each.peak_reserved for each in replays)
    above.yaxis.set_major_locator(MultipleLocator(1 << max(highest.bit_length() - 3, 0)))
    above.yaxis.set_major_formatter(lambda value, _: format_size(int(value)))
    above.set_ylim(bottom=0)
    above.legend()
    below.set_ylabel("unused share of what is reserved")
    below.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    below.set_ylim(0, 1)
    below.set_xlabel("event")
    figure.savefig(path, dpi=110)


def _thinned(values: Sequence[float]) -> Iterator[tuple[int, float]]:
    """At most about `POINTS` points of a curve: the largest of each stretch, so peaks remain."""
    step = max(1, len(values) // POINTS)
    for first in range(0, len(values), step):
        stretch = values[first : first + step]
        highest = max(stretch)
        yield first + list(stretch).index(highest), highest
