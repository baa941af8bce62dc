"""Look for memory accesses out of order: litmus tests of the heap and of what it relies on.

    devalloc bench litmus                       # 10**8 hand-overs and instances of each shape
    devalloc bench litmus --blocks 1e6 --no-weakened
    devalloc bench litmus --device cpu          # tiny, in the interpreter

Blocks change hands and carry plain counters, ordered by nothing but malloc and free; classic shapes
are run with each order of accesses that the heap relies on, and with weaker ones. Then the
hand-over is run with copies of the device code that lack fences, or barriers too: these
should fail, and the table says whether they did. Rows go to ``benchmarks/results/litmus/``.

The exit status is 1 if anything is forbidden that must not be: weakened copies and weak orders may
fail.
"""

from __future__ import annotations

import contextlib
import json
import queue
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click
import rich
from rich.console import Console

from benchmarks.child import Child
from benchmarks.options import Count, require_device
from benchmarks.patches import patched_kernels
from benchmarks.results import PROVENANCE, RESULTS, RowFile
from benchmarks.stress.litmus import plan
from benchmarks.stress.litmus.plan import Job

FOLDER = RESULTS / "litmus"
START_SECONDS = 120.0
WORKER = "benchmarks.stress.litmus.worker"
COLUMNS = (
    "test",
    "name",
    "variant",
    "lanes",
    "warps",
    "programs",
    "instances",
    "relevant",
    "forbidden",
    "seconds",
    "detail",
    "check",
    *PROVENANCE,
)
WEAKENED_CASES = ("lanes-16", "lanes-64", "lanes-mixed", "scalar-4096")


class Table:
    """Rows as they come: to the file, to the terminal, and what went wrong."""

    def __init__(self, file: RowFile, budget: float) -> None:
        self.file = file
        self.deadline = time.monotonic() + budget
        self.problems: list[str] = []
        self.failed_variants: set[str] = set()
        self._console = Console()

    def run(self, job: Job, test_seconds: float) -> None:
        """Run a job in a child. A test that hangs or crashes is a row, and ends the job."""
        child = Child(WORKER, json.dumps(job.to_dict()))
        source: dict[str, object] = {}
        current = "start"
        wait = START_SECONDS
        try:
            while True:
                try:
                    message = child.read(min(wait, self.deadline - time.monotonic()))
                except queue.Empty:
                    self._lost(job, source, current, "hang, or out of time")
                    return
                if message is None:
                    break
                wait = test_seconds
                if "source" in message:
                    source = _columns(message["source"])
                elif "begin" in message:
                    current = str(message["begin"])
                else:
                    self._record(job, {**source, **_columns(message["row"])})
            status = child.process.wait()
            if status:
                self._lost(job, source, current, f"crash: exit status {status}")
        finally:
            child.end()

    def _lost(self, job: Job, source: dict[str, object], name: str, check: str) -> None:
        if not source:
            self.problems.append(f"{job.variant}: {check}")
            return
        empty = dict.fromkeys(("lanes", "warps", "programs", "instances", "relevant"), 0)
        row = {"test": "hand-over", "name": name, "variant": job.variant, **empty,
               "forbidden": 0, "seconds": "", "detail": "", "check": check}  # fmt: skip
        self._record(job, {**source, **row})

    def _record(self, job: Job, row: dict[str, object]) -> None:
        self.file.write(row)
        good = row["check"] == "ok" and not row["forbidden"]
        if row["check"] != "ok":
            if job.kernels:
                self.failed_variants.add(job.variant)
            else:
                self.problems.append(f"{row['name']} {row['variant']}: {row['check']}")
        self._console.print(
            f"{row['test']:<9} {row['name']:<12} {row['variant']:<18} "
            f"{int(str(row['instances'])):>13,} tried {int(str(row['relevant'])):>14,} relevant "
            f"{int(str(row['forbidden'])):>12,} forbidden  {row['seconds']} s  {row['detail']}  "
            f"{row['check']}",
            style=None if good else "red" if not job.kernels and row["check"] != "ok" else "yellow",
            highlight=False,
            soft_wrap=True,
        )


def _columns(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value


def compile_ahead(jobs: list[Job], seconds: float = 300.0) -> None:
    """Compile every test of the jobs, each in a process of its own, into Triton's cache."""
    parts = [
        replace(job, handovers=(case,), shapes=(), compile_only=True)
        for job in jobs
        for case in job.handovers
    ]
    parts += [replace(jobs[0], handovers=(), compile_only=True)]
    deadline = time.monotonic() + seconds
    children = [Child(WORKER, json.dumps(part.to_dict())) for part in parts]
    for child in children:
        with contextlib.suppress(queue.Empty):
            while child.read(deadline - time.monotonic()):
                pass
        child.end()


@click.command("litmus")
@click.option("--blocks", type=Count(), default="1e8", show_default=True,
              help="Hand-overs across multiprocessors, and instances of a shape.")  # fmt: skip
@click.option("--weakened/--no-weakened", default=True, help="Also code that lacks order.")
@click.option("--seed", type=click.IntRange(0, 1 << 30), default=1, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder of results.")
@click.option("--budget", type=float, default=540.0, show_default=True, help="Seconds in all.")
@click.option("--test-timeout", type=float, default=120.0, show_default=True, help="Seconds.")
@click.option("--compile-ahead", "ahead", is_flag=True, help="All tests at once, first.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(
    blocks: int,
    weakened: bool,
    seed: int,
    out: Path,
    budget: float,
    test_timeout: float,
    ahead: bool,
    device: str,
) -> None:
    """Litmus tests of memory order: hand-overs of blocks, and shapes, weakened ones beside."""
    require_device(device)
    job = Job(plan.HANDOVERS, plan.SHAPES, blocks, seed, device)
    if device == "cpu":
        job = plan.tiny(job)
    table = Table(RowFile(out, COLUMNS), budget)
    with tempfile.TemporaryDirectory() as scratch:
        jobs = [job]
        for name, patches in plan.WEAKENED.items() if weakened else ():
            folder = patched_kernels(patches, Path(scratch) / name)
            cases = tuple(case for case in job.handovers if case.name in WEAKENED_CASES)
            jobs.append(
                replace(job, handovers=cases, shapes=(), variant=name, kernels=str(folder),
                        blocks=job.blocks // 10)
            )  # fmt: skip
        if ahead and device == "cuda":
            started = time.monotonic()
            compile_ahead(jobs)
            rich.print(f"compiled in {time.monotonic() - started:.0f} s")
        for each in jobs:
            table.run(each, test_timeout)
    if table.file.path:
        rich.print(f"rows: {table.file.path}")
    for name in plan.WEAKENED if weakened else ():
        verdict = "failed, as it should" if name in table.failed_variants else "did not fail"
        rich.print(f"weakened copy {name}: {verdict}")
    if table.problems:
        raise click.ClickException("; ".join(table.problems))


if __name__ == "__main__":
    main()
