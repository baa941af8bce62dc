"""Run a short stress run and hand-overs under NVIDIA's compute-sanitizer.

    devalloc bench sanitize                        # memcheck, racecheck and synccheck
    devalloc bench sanitize --tool memcheck --operations 1e6

What the tools see, and what not:

- *memcheck*: accesses outside of any allocation of the device, and misaligned ones. The heap's data
  is one allocation and its control block another, so a block that runs into its neighbour is not
  seen; the tags of the stress run are for that.
- *racecheck*: hazards between the threads of a program in *shared* memory, through which Triton
  passes the results of scalar atomics and reductions. It knows nothing of global memory, where the
  heap is: races between programs are for the stress run, the litmus tests and tests/interleaving.
- *synccheck*: barriers that not all threads of a program reach. It happens when copies of a mutable
  word are read by several threads and differ.

The tool is looked for on the PATH, under CUDA_HOME and CUDA_PATH, in /usr/local/cuda*, and among
the Python packages of NVIDIA; without one, that is said and the exit status is 3. It is 1 if a tool
found anything.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import rich

from benchmarks.options import Count
from benchmarks.results import ROOT
from benchmarks.stress import plan as stress
from benchmarks.stress.litmus import plan as litmus

TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = 86
"""Exit status that the tool is asked to give when it found something."""
MISSING = 3
PHASES = ("small", "mixed-churn-64x2", "zeros", "realloc", "scalars", "full-scalars")
HANDOVERS = ("lanes-64", "scalar-4096")


def places() -> Iterator[str]:
    """Where the tool may be, best first."""
    yield shutil.which("compute-sanitizer") or ""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield str(Path(os.environ[name]) / "bin" / "compute-sanitizer")
    for folder in sorted(glob.glob("/usr/local/cuda*"), reverse=True):
        yield str(Path(folder) / "bin" / "compute-sanitizer")
        yield str(Path(folder) / "compute-sanitizer" / "compute-sanitizer")
    packages = sysconfig.get_paths()["purelib"]
    yield from sorted(glob.glob(f"{packages}/nvidia/**/compute-sanitizer", recursive=True))


def find_tool() -> str | None:
    """The path of compute-sanitizer, or None."""
    found = (place for place in places() if place and os.access(place, os.X_OK))
    return next((place for place in found if Path(place).is_file()), None)


def stress_job(operations: int, seed: int, device: str) -> stress.Job:
    """Few programs and rounds: the tools make kernels a hundred times slower."""
    stages = tuple(
        replace(
            stage,
            capacity=min(stage.capacity, 256 << 20),
            boxes_log2=12,
            phases=tuple(
                replace(phase, programs=32, rounds=4, seconds=20.0)
                for phase in stage.phases
                if phase.name in PHASES
            ),
        )
        for stage in stress.STAGES[:2]
    )
    return stress.Job(stages, operations, seed, device)


def litmus_job(seed: int, device: str) -> litmus.Job:
    cases = tuple(
        replace(case, programs=64, rounds=8) for case in litmus.HANDOVERS if case.name in HANDOVERS
    )
    return litmus.Job(cases, (), 0, seed, device)


def examine(tool: str, check: str, worker: str, job: str, seconds: float) -> tuple[str, str]:
    """Run a worker under one tool. Returns a verdict, ``ok`` or why not, and the tool's lines."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        # Triton's cache is read and written as usual; compiling is not examined.
        command = [tool, "--tool", check, "--log-file", str(log), "--error-exitcode", str(FOUND)]
        command += ["--target-processes", "application-only", sys.executable, "-m", worker]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_inherited()])}
        try:
            done = subprocess.run(
                command, input=job, capture_output=True, text=True, cwd=ROOT, env=env,
                timeout=seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"did not end within {seconds:.0f} s", ""
        lines = log.read_text() if log.exists() else ""
    if done.returncode == FOUND:
        return "the tool found something", lines
    if done.returncode:
        return f"exit status {done.returncode}", lines + done.stdout[-2000:] + done.stderr[-2000:]
    return "ok", lines


def _inherited() -> list[str]:
    path = os.environ.get("PYTHONPATH")
    return [path] if path else []


@click.command("sanitize")
@click.option("--tool", "checks", type=click.Choice(TOOLS), multiple=True, default=TOOLS)
@click.option(
    "--operations", type=Count(), default="2e5", show_default=True, help="Of the stress run."
)
@click.option("--seed", type=click.IntRange(0, 1 << 30), default=1, show_default=True)
@click.option("--timeout", type=float, default=180.0, show_default=True, help="Seconds a run.")
def main(checks: tuple[str, ...], operations: int, seed: int, timeout: float) -> None:
    """Run the heap under compute-sanitizer: memcheck, racecheck, synccheck."""
    tool = find_tool()
    if tool is None:
        rich.print(
            "there is no compute-sanitizer on the PATH, under CUDA_HOME or in /usr/local/cuda*: "
            "nothing was examined"
        )
        sys.exit(MISSING)
    rich.print(f"{tool}")
    jobs = {
        "benchmarks.stress.worker": stress_job(operations, seed, "cuda").to_dict(),
        "benchmarks.stress.litmus.worker": litmus_job(seed, "cuda").to_dict(),
    }
    problems = []
    for check in checks:
        for worker, job in jobs.items():
            verdict, lines = examine(tool, check, worker, json.dumps(job), timeout)
            rich.print(f"{check:<10} {worker:<26} {verdict}")
            print(lines if verdict != "ok" else "\n".join(lines.splitlines()[-1:]))
            if verdict != "ok":
                problems.append(f"{check} of {worker}: {verdict}")
    if problems:
        raise click.ClickException("; ".join(problems))


if __name__ == "__main__":
    main()
