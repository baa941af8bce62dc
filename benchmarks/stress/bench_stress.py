"""Stress the heap: 10**9 mallocs and frees in one run, all blocks verified, all counts compared.

    devalloc bench stress                          # about 10**9 operations, on a CUDA device
    devalloc bench stress --operations 1e7 --seed 7
    devalloc bench stress --plant overflow         # a planted fault: must be reported
    devalloc bench stress --device cpu             # tiny, in the interpreter

Phases follow one another on the same heap: requests per lane and per program with 1 to 16 warps,
sizes of 16 B to 1 MiB, zeros and realloc, many streams, CUDA graphs, calls by the host in between,
blocks freed eight times over, heaps that are full or nearly so. After each phase all live blocks
are verified, the heap audited, and every count compared. Rows go to ``benchmarks/results/stress/``.

The run happens in a child process; a phase that hangs or crashes is a violation. The exit status
is 1 if there was any, and 3 if the budget of seconds ended first: then nothing was found wrong, but
not all was done either.
"""

from __future__ import annotations

import contextlib
import json
import queue
import time
from dataclasses import replace
from pathlib import Path

import click
import rich
from rich.console import Console

from benchmarks.child import Child
from benchmarks.options import Count, require_device
from benchmarks.results import PROVENANCE, RESULTS, RowFile
from benchmarks.stress import plan
from benchmarks.stress.plan import Job

FOLDER = RESULTS / "stress"
START_SECONDS = 120.0
COLUMNS = (
    "phase",
    "capacity",
    "boxes",
    "launches",
    "operations",
    "mallocs",
    "frees",
    "nulls",
    "moves",
    "stays",
    "double_frees",
    "bytes_verified",
    "seconds",
    "operations_per_second",
    "violations",
    "check",
    *PROVENANCE,
)


class StressRun:
    """Runs a job in a child and collects its rows.

    Parameters
    ----------
    job : Job
    file : RowFile
    phase_seconds : float
        A phase that takes longer, with its audit, counts as a hang.
    budget : float
        Seconds for everything.
    """

    def __init__(self, job: Job, file: RowFile, phase_seconds: float, budget: float) -> None:
        self.job = job
        self.file = file
        self.phase_seconds = phase_seconds
        self.deadline = time.monotonic() + budget
        self.rows: list[dict[str, object]] = []
        self.problems: list[str] = []
        self.unfinished = ""
        """The phase in which the budget ended."""
        self._source: dict[str, object] = {}
        self._console = Console()

    def run(self) -> None:
        child = Child("benchmarks.stress.worker", json.dumps(self.job.to_dict()))
        phase = "start"
        wait = START_SECONDS
        try:
            while True:
                left = self.deadline - time.monotonic()
                try:
                    message = child.read(min(wait, left))
                except queue.Empty:
                    if left <= wait:
                        self.unfinished = phase
                    else:
                        self.problems.append(f"{phase}: hang: over {wait:.0f} s")
                    return
                if message is None:
                    break
                wait = self.phase_seconds
                if "source" in message:
                    self._source = _columns(message["source"])
                elif "begin" in message:
                    phase = str(message["begin"])
                else:
                    self._record(_columns(message["row"]))
            status = child.process.wait()
            if status and not self.problems:
                self.problems.append(f"{phase}: crash: exit status {status}")
        finally:
            child.end()

    def _record(self, row: dict[str, object]) -> None:
        self.rows.append(row)
        self.file.write({**self._source, **row, "heap_bytes": row["capacity"]})
        good = row["check"] == "ok"
        if not good:
            self.problems.append(f"{row['phase']}: {row['check']}")
        self._console.print(
            f"{row['phase']:<18} {int(str(row['operations'])):>13,} operations "
            f"{int(str(row['nulls'])):>11,} nulls {float(str(row['seconds'])):>8.2f} s "
            f"{int(str(row['bytes_verified'])) / 1e9:>9.2f} GB verified  {row['check']}",
            style=None if good else "red",
            highlight=False,
            soft_wrap=True,
        )

    def summary(self) -> str:
        total = {
            name: sum(int(str(row[name])) for row in self.rows)
            for name in ("operations", "mallocs", "frees", "nulls", "double_frees")
        }
        seconds = sum(float(str(row["seconds"])) for row in self.rows)
        size = sum(int(str(row["bytes_verified"])) for row in self.rows)
        return (
            f"{total['operations']:,} operations ({total['mallocs']:,} mallocs, "
            f"{total['frees']:,} frees) in {seconds:.1f} s: "
            f"{total['operations'] / max(seconds, 1e-9):.4g} a second; {size:,} bytes verified; "
            f"{total['nulls']:,} nulls of full heaps; {total['double_frees']:,} double frees "
            f"counted; violations: {len(self.problems)}"
            + (f"; out of time in {self.unfinished}" if self.unfinished else "")
        )


class OutOfTime(click.ClickException):
    """The budget ended before the run did; no violation."""

    exit_code = 3

    def __init__(self, phase: str, budget: float) -> None:
        super().__init__(
            f"out of time: the budget of {budget:.0f} s ended in {phase}, with no violation until "
            "then; raise --budget or lower --operations"
        )


def _columns(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value


def compile_ahead(job: Job, jobs: int, seconds: float = 300.0) -> None:
    """Compile the job's kernels in several processes, into Triton's cache."""
    stage = job.stages[0]
    phase = stage.phases[0]
    shapes = job.shapes()
    children = [
        Child("benchmarks.stress.worker", json.dumps(part.to_dict()))
        for share in (tuple(shapes[i::jobs]) for i in range(jobs))
        if share
        for part in [
            replace(
                job,
                stages=(replace(stage, phases=(replace(phase, shapes=share),)),),
                compile_only=True,
            )
        ]
    ]
    deadline = time.monotonic() + seconds
    for child in children:
        with contextlib.suppress(queue.Empty):
            while child.read(deadline - time.monotonic()):
                pass
        child.end()


@click.command("stress")
@click.option("--operations", type=Count(), default="1e9", show_default=True, help="In all, about.")
@click.option("--seed", type=click.IntRange(0, (1 << 31) - 1), default=1, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder of results.")
@click.option("--budget", type=float, default=540.0, show_default=True, help="Seconds in all.")
@click.option("--phase-timeout", type=float, default=120.0, show_default=True, help="Seconds.")
@click.option("--phase-seconds", type=float, default=20.0, show_default=True,
              help="A phase ends then, with however many operations.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(0), default=0, help="Processes to compile ahead.")
@click.option("--phases", "pattern", default="", help="Only phases whose name contains this.")
@click.option("--plant", type=click.Choice(plan.PLANTS), help="A fault that must be reported.")
@click.option("--kernels", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Folder with other device code, such as a copy with a bug in it.")  # fmt: skip
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(
    operations: int,
    seed: int,
    out: Path,
    budget: float,
    phase_timeout: float,
    phase_seconds: float,
    jobs: int,
    pattern: str,
    plant: str | None,
    kernels: Path | None,
    device: str,
) -> None:
    """Stress the heap: every block tagged, exchanged, verified; every count compared."""
    require_device(device)
    stages = plan.scaled(plan.STAGES, phase_seconds)
    if device == "cpu":
        stages = plan.tiny(stages)
    stages = plan.matching(stages, pattern)
    if not stages:
        raise click.BadParameter(f"no phase has {pattern!r} in its name")
    job = Job(stages, operations, seed, device, plant, str(kernels) if kernels else None)
    run = StressRun(job, RowFile(out, COLUMNS), phase_timeout, budget)
    if jobs and device == "cuda":
        started = time.monotonic()
        compile_ahead(job, jobs)
        rich.print(f"compiled in {time.monotonic() - started:.0f} s")
    run.run()
    rich.print(run.summary())
    if run.file.path:
        rich.print(f"rows: {run.file.path}")
    if run.problems:
        raise click.ClickException("; ".join(run.problems))
    if run.unfinished:
        raise OutOfTime(run.unfinished, budget)


if __name__ == "__main__":
    main()
