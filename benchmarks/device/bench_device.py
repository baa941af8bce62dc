"""Measure the device heap: every workload, verified before it is timed.

    devalloc bench device                          # the rows that targets name
    devalloc bench device --quick                  # one row per workload
    devalloc bench device --group n --group fill   # sweeps; --group all: everything
    devalloc bench device --rows 'thread-64-'      # those whose key matches
    devalloc bench device --device cpu --quick     # tiny, in the interpreter: does it run

This process does not touch the device. Rows are measured by a child, one after the other; one that
hangs or crashes is recorded as such, and another child goes on with the next row.
"""

from __future__ import annotations

import itertools
import queue
import re
import time
from dataclasses import replace
from pathlib import Path

import click
import rich
from rich.console import Console

from benchmarks.child import Child
from benchmarks.device import plan
from benchmarks.device.plan import Row
from benchmarks.device.worker import Job, failed_record
from benchmarks.options import require_device
from benchmarks.results import RESULTS, RowFile
from devalloc.errors import InvalidArgument
from devalloc.sizes import parse_size

START_SECONDS = 60.0
CUDA_ROW_SECONDS = 30.0
"""CUDA's malloc is asked for nothing that takes it longer, if it ends."""
FILL = 0.8
"""Rows that would fill more of the heap than this share are left out."""


class Measurement:
    """Runs a job to its end, through as many children as it takes.

    Parameters
    ----------
    job : Job
    file : RowFile
        Where rows go as they come.
    row_seconds : float
        A row that takes longer, compilation included, is recorded as a hang.
    budget : float
        Seconds for everything; rows that did not fit are left in `pending`.
    """

    def __init__(self, job: Job, file: RowFile, row_seconds: float, budget: float) -> None:
        self.job = job
        self.file = file
        self.row_seconds = row_seconds
        self.deadline = time.monotonic() + budget
        self.pending = list(job.rows)
        self.bad: list[str] = []
        self._source: dict[str, object] = {}
        self._console = Console()

    def run(self) -> None:
        while self.pending and time.monotonic() < self.deadline:
            before = len(self.pending)
            self._run_child()
            if len(self.pending) == before and time.monotonic() < self.deadline:
                raise click.ClickException("the worker ended before its first row; see above")

    def _run_child(self) -> None:
        kind = self.pending[0].child
        rows = tuple(itertools.takewhile(lambda row: row.child == kind, self.pending))
        row_seconds = self.row_seconds
        if kind == "cuda":
            row_seconds = min(row_seconds, CUDA_ROW_SECONDS)
        child = Child("benchmarks.device.worker", replace(self.job, rows=rows).to_json())
        current: Row | None = None  # begun and not yet recorded
        wait = START_SECONDS
        try:
            while True:
                left = self.deadline - time.monotonic()
                try:
                    message = child.read(min(wait, left))
                except queue.Empty:
                    if left > wait and current:
                        self._record(failed_record(current, f"hang: over {wait:.0f} s"))
                    elif current in self.job.rows:
                        self.pending.insert(0, current)
                    return
                if message is None:
                    status = child.process.wait()
                    if current:
                        self._record(failed_record(current, f"crash: exit status {status}"))
                    return
                wait = row_seconds
                if "source" in message:
                    self._source = _columns(message["source"])
                elif "begin" in message:
                    if self.pending and self.pending[0].key == message["begin"]:
                        current = self.pending.pop(0)
                    else:  # the check after a family
                        current = Row(str(message["begin"]), 0, 0, 0, 0)
                else:
                    current = None
                    self._record(_columns(message["row"]))
        finally:
            child.end()

    def _record(self, row: dict[str, object]) -> None:
        row = {**self._source, **row}
        self.file.write(row)
        width = f"{row['lanes']}x{row['warps']}"
        if row["registers"]:
            width += f"r{row['registers']}"
        wrong = row["check"] != "ok" or (row["failures"] and row["pattern"] != "oom")
        ours = row["allocator"] not in plan.BASELINES
        text = f"{row['row']:<28} {width:>7} {row['allocator']:<8} {row['state']:<4} "
        text += (
            f"{row['op']:<11} {float(str(row['median'])):>10.4f} {row['unit']:<5} {row['check']}"
        )
        style = ("red" if ours else "yellow") if wrong else None
        self._console.print(text, style=style, highlight=False, soft_wrap=True)
        if wrong and ours:
            self.bad.append(f"{row['row']}@{width} {row['op']}: {row['check']}")


def _columns(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value


def compile_ahead(job: Job, jobs: int) -> None:
    """Compile the job's kernels in several processes, into Triton's cache."""
    shapes = plan.compile_only(list(job.rows))
    shares = [share for i in range(jobs) if (share := tuple(shapes[i::jobs]))]
    small = replace(job, heap_bytes=64 << 20, rounds=1)
    children = [
        Child("benchmarks.device.worker", replace(small, rows=share).to_json()) for share in shares
    ]
    for child in children:
        try:
            while child.read(180.0):
                pass
        except queue.Empty:
            rich.print("a compilation ahead of time did not end; going on without it")
        child.end()


def select(rows: list[Row], pattern: str, quick: bool) -> list[Row]:
    """The rows whose key matches a regular expression."""
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise click.BadParameter(f"{pattern!r} is no regular expression: {error}") from error
    found = [row for row in rows if wanted.search(row.key)]
    if quick:
        first: dict[tuple[str, str], Row] = {}  # the usual width comes first
        for row in found:
            first.setdefault((row.name, row.allocator), row)
        found = [row for row in first.values() if row.name in plan.QUICK]
    if not found:
        raise click.BadParameter(f"no row matches {pattern!r}")
    return found


def fitting(rows: list[Row], heap_bytes: int) -> list[Row]:
    """Leave out, and say so, what would fill too much of the shared heap."""
    fits = [row for row in rows if row.live_bytes <= heap_bytes * FILL]
    if len(fits) < len(rows):
        rich.print(f"{len(rows) - len(fits)} rows need more than {FILL:.0%} of the heap: left out")
    return fits


@click.command("device")
@click.option(
    "--group",
    "groups",
    type=click.Choice([*plan.GROUPS, "all"]),
    multiple=True,
    default=["target"],
    show_default=True,
    help="Which rows; may be repeated.",
)
@click.option("--rows", "pattern", default=".", help="Only rows whose key matches this regex.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, help="Folder of results.")
@click.option("--quick", is_flag=True, help="One target row per workload.")
@click.option("--rounds", type=click.IntRange(1), default=None, help="Timed rounds [10].")
@click.option("--heap", default="8GiB", show_default=True, help="Capacity of the heap.")
@click.option("--lanes", type=click.IntRange(1), help="Lanes per program, for all rows.")
@click.option("--warps", type=click.IntRange(1), help="Warps per program, for all rows.")
@click.option(
    "--registers", type=click.IntRange(0), default=0, help="Per thread at most, for all our rows."
)
@click.option("--budget", type=float, default=3600.0, show_default=True, help="Seconds in all.")
@click.option("--row-timeout", type=float, default=90.0, show_default=True, help="Seconds a row.")
@click.option("--jobs", type=click.IntRange(0), default=0, help="Processes to compile ahead.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(
    groups: tuple[str, ...],
    pattern: str,
    out: Path,
    quick: bool,
    rounds: int | None,
    heap: str,
    lanes: int | None,
    warps: int | None,
    registers: int,
    budget: float,
    row_timeout: float,
    jobs: int,
    seed: int,
    device: str,
) -> None:
    """Measure the device heap; rows are written to a CSV file as they come."""
    require_device(device)
    width = None
    if lanes or warps:
        width = (lanes or plan.WIDE[0], warps or plan.WIDE[1])
    names = tuple(plan.GROUPS) if "all" in groups else groups
    rows = [
        row if row.allocator in plan.BASELINES else replace(row, registers=registers)
        for row in plan.rows_of(names, width)
    ]
    chosen = select(rows, pattern, quick)
    try:
        heap_bytes = parse_size(heap)
    except InvalidArgument as error:
        raise click.BadParameter(str(error)) from error
    if device == "cpu":
        # Shrinking makes some rows equal: measure each once. CUDA's malloc needs CUDA.
        ours = [row for row in chosen if row.allocator != "cuda"]
        chosen = list(dict.fromkeys(plan.shrink(row) for row in ours))
        heap_bytes = min(heap_bytes, 16 << 20)
        rounds = rounds or 1
    chosen = fitting(chosen, heap_bytes)
    job = Job(tuple(chosen), device, heap_bytes, rounds or 10, seed)
    file = RowFile(out)
    measurement = Measurement(job, file, row_timeout, budget)
    if jobs and device == "cuda":
        compile_ahead(job, jobs)
    measurement.run()
    if file.path:
        rich.print(f"rows: {file.path}")
    if measurement.pending:
        keys = ", ".join(row.key for row in measurement.pending)
        rich.print(f"not measured within {budget:.0f} s: {keys}")
    if measurement.bad:
        raise click.ClickException("wrong: " + "; ".join(measurement.bad))


if __name__ == "__main__":
    main()
