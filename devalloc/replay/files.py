"""Traces in files: PyTorch's pickles, logs with RMM's columns, and this project's compact format.

The compact format is text, compressed with gzip. The first line marks it, the second is JSON
(``origin``, ``live_at_start``, ``reserved_at_start`` and ``peak_reserved`` in bytes or null,
``notes``), the third names the columns. Then come rows: ``a,block,size,stream`` allocates,
``f,block,,`` frees, and ``s,,size,`` changes what the recorded allocator has reserved. Blocks and
streams are numbered from 0 in the order in which they appear.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import operator
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from devalloc.common.foreign import refusing, whole_number
from devalloc.errors import InvalidArgument
from devalloc.replay.torch_snapshots import load_plain_pickle, snapshot_trace
from devalloc.replay.trace import Event, Recorded, Trace, TraceBuilder

MARK = "# devalloc trace 1"
COLUMNS = "action,block,size,stream"
REQUIRED = ("Action", "Pointer", "Size")  # of a log


def load_trace(path: str | Path, device: int | None = None) -> Trace:
    """Read a trace of any of the three kinds, distinguished by their content.

    Parameters
    ----------
    path : str or Path
        A pickle of ``torch.cuda.memory._snapshot()``, a CSV log with RMM's columns, or a compact
        trace; each may be compressed with gzip.
    device : int, optional
        Which device of a snapshot. Default: the one with the most events.

    Raises
    ------
    InvalidArgument
        If the file is none of these, is damaged, or holds a pickle of anything but plain data.
    OSError
        If it cannot be read.
    """
    path = Path(path)
    with refusing("damaged, or no trace", path):
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            return _plausible(_read_any(cast("IO[bytes]", file), path.name, device))


def _read_any(file: IO[bytes], name: str, device: int | None) -> Trace:
    start = file.read(64)
    file.seek(0)
    if start[:1] == b"\x80":
        return snapshot_trace(load_plain_pickle(file), device, {"file": name})
    text = io.TextIOWrapper(file, encoding="ascii", newline="")
    if start.startswith(MARK.encode()):
        return read_compact(text)
    return read_log(text, {"file": name})


def _plausible(trace: Trace) -> Trace:
    """Refuse sizes that no machine has, before anything computes with them in 64 bits."""
    most = max(trace.requested(), default=0)
    if trace.recorded is not None:
        most = max(most, *map(abs, trace.recorded.reserved()))
    if most >= 1 << 60:
        raise InvalidArgument("2**60 bytes or more at a time: no trace of a real program")
    return trace


# Logs -----------------------------------------------------------------------------------------


def read_log(lines: Iterable[str], origin: dict[str, str] | None = None) -> Trace:
    """A trace from a CSV log with the columns Action, Pointer, Size and Stream; others are allowed.

    Stream may be missing; Thread is used if it is there. ``allocate`` and ``free`` (or
    ``deallocate``) count. ``allocate failure`` does not, and ``free failure`` takes back the free
    before it of the same thread and pointer.
    """
    rows = csv.DictReader(lines)
    missing = set(REQUIRED) - set(rows.fieldnames or ())
    if missing:
        raise InvalidArgument(
            "neither a pickle, nor a compact trace, nor a CSV log with the columns Thread, Time, "
            f"Action, Pointer, Size, Stream (there is no {', '.join(sorted(missing))})"
        )
    builder = TraceBuilder()
    for action, address, size, stream in _log_calls(rows, builder):
        if action == "allocate":
            builder.allocate(address, size, stream)
        else:
            builder.free(address, size, stream)
    trace = builder.finish(origin=origin)
    if not trace.events:
        raise InvalidArgument("the log has no allocations and no frees")
    return trace


def _log_calls(rows: csv.DictReader[str], builder: TraceBuilder) -> list[tuple[str, int, int, str]]:
    calls: list[tuple[str, int, int, str] | None] = []
    last_free: dict[tuple[str | None, int], int] = {}
    for row in rows:
        action = (row["Action"] or "").strip()
        if action == "allocate failure":
            builder.note("failed allocations, left out")
            continue
        cut = [name for name in REQUIRED if row[name] is None]
        if cut:
            raise InvalidArgument(f"line {rows.line_num}: the row ends before its {cut[0]}")
        try:
            address, size = _pointer(row["Pointer"]), whole_number(row["Size"], "Size")
        except ValueError as error:
            raise InvalidArgument(f"line {rows.line_num}: {error}") from error
        by = (row.get("Thread"), address)
        if action == "free failure":
            builder.note("failed frees, left out")
            failed = last_free.pop(by, None)
            if failed is not None:
                calls[failed] = None
        elif action in ("allocate", "free", "deallocate"):
            if action != "allocate":
                last_free[by] = len(calls)
            calls.append((action, address, size, row.get("Stream") or ""))
        else:
            raise InvalidArgument(f"line {rows.line_num}: unknown action {action!r}")
    return [call for call in calls if call is not None]


def _pointer(text: str) -> int:
    return 0 if text.strip() == "(nil)" else whole_number(text, "Pointer", 16)


# The compact format ---------------------------------------------------------------------------


def save_compact(trace: Trace, path: str | Path) -> None:
    """Write ``trace`` in the compact format; equal traces give equal files. Raises OSError."""
    recorded = trace.recorded
    header = {
        "origin": trace.origin,
        "live_at_start": trace.live_at_start,
        "reserved_at_start": recorded.reserved_at_start if recorded else None,
        "peak_reserved": recorded.peak_reserved if recorded else None,
        "notes": trace.notes,
    }
    with (
        open(path, "wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="ascii", newline="\n") as file,
    ):
        file.write(f"{MARK}\n{json.dumps(header)}\n{COLUMNS}\n")
        for row in _rows(trace):
            file.write(row)


def _rows(trace: Trace) -> Iterator[str]:
    changes = iter(trace.recorded.changes if trace.recorded else ())
    position, nbytes = next(changes, (None, 0))
    for index, event in enumerate(trace.events):
        while position == index:
            yield f"s,,{nbytes},\n"
            position, nbytes = next(changes, (None, 0))
        if event.size:
            yield f"a,{event.block},{event.size},{event.stream}\n"
        else:
            yield f"f,{event.block},,\n"
    while position is not None:
        yield f"s,,{nbytes},\n"
        position, nbytes = next(changes, (None, 0))


def read_compact(file: IO[str]) -> Trace:
    """Read what `save_compact` wrote; raises InvalidArgument if it contradicts itself."""
    lines = iter(file)
    with refusing("damaged header"):
        next(lines)
        header = json.loads(next(lines))
        origin = {str(key): str(value) for key, value in header["origin"].items()}
        notes = tuple(str(note) for note in header["notes"])
        live_at_start, start = operator.index(header["live_at_start"]), header["reserved_at_start"]
        if start is not None:
            start = operator.index(start)
        columns = next(lines).strip()
    if columns != COLUMNS:
        raise InvalidArgument(f"the columns are {columns!r}, not {COLUMNS!r}")
    events, changes = _read_rows(lines)
    if not 0 <= live_at_start <= len(events):
        raise InvalidArgument(f"{live_at_start} blocks at the start, but {len(events)} events")
    recorded = None
    if start is not None:
        recorded = Recorded(start, tuple(changes))
        if recorded.peak_reserved != header.get("peak_reserved"):
            raise InvalidArgument("the recorded peak does not follow from the rows")
    return Trace(tuple(events), live_at_start, recorded, notes, origin)


def _read_rows(lines: Iterator[str]) -> tuple[list[Event], list[tuple[int, int]]]:
    events: list[Event] = []
    changes: list[tuple[int, int]] = []
    streams: list[int | None] = []  # of each block; None once it is freed
    for number, line in enumerate(lines, 4):
        try:
            cells = line.rstrip("\n").split(",")
            if len(cells) != 4:
                raise ValueError(f"{len(cells)} columns, not 4 ({COLUMNS})")
            action, block, size, stream = cells
            if action == "s":
                changes.append((len(events), whole_number(size, "size")))
            elif action == "a":
                event = Event(
                    whole_number(block, "block"),
                    whole_number(size, "size"),
                    whole_number(stream, "stream"),
                )
                if event.block != len(streams) or event.size < 1 or event.stream < 0:
                    raise ValueError("not the next block, or not a size and a stream")
                streams.append(event.stream)
                events.append(event)
            elif action == "f":
                events.append(_free_event(whole_number(block, "block"), streams))
            else:
                raise ValueError(f"unknown action {action!r}")
        except ValueError as error:
            raise InvalidArgument(f"line {number}: {error}") from error
    return events, changes


def _free_event(block: int, streams: list[Any]) -> Event:
    if not 0 <= block < len(streams) or streams[block] is None:
        raise ValueError(f"block {block} is not live")
    stream, streams[block] = streams[block], None
    return Event(block, 0, stream)
