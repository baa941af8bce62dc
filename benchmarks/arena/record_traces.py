"""Record what PyTorch's allocator is asked by four programs, as traces for ``devalloc replay``.

    python -m benchmarks.arena.record_traces                     # all four, to benchmarks/traces/
    python -m benchmarks.arena.record_traces --only mnist --out out
    devalloc replay benchmarks/traces/mnist.csv.gz

Each program runs in a process of its own, so its trace begins with an allocator that holds
nothing. What the trace says is compared with PyTorch's own counters; if they differ, the command
fails and the trace is not to be used.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.arena.trace_workloads import WORKLOADS
from benchmarks.results import ROOT
from devalloc.replay.files import save_compact
from devalloc.replay.torch_snapshots import snapshot_trace
from devalloc.replay.trace import Trace
from devalloc.sizes import format_size

TRACES = ROOT / "benchmarks" / "traces"
MAX_ENTRIES = 4_000_000


class Mismatch(Exception):
    """The trace and PyTorch's counters disagree."""


def cross_check(trace: Trace, counters: dict[str, Any], entries: int) -> None:
    """Raise Mismatch unless the trace says what PyTorch counted.

    Parameters
    ----------
    trace : Trace
        From the start of the allocator.
    counters : dict
        ``torch.cuda.memory_stats()`` at the same moment.
    entries : int
        How many events were recorded; at `MAX_ENTRIES` the first ones are lost.
    """
    if entries >= MAX_ENTRIES:
        raise Mismatch(f"{entries} events: the recording is full, the first ones are lost")
    recorded = trace.recorded
    if recorded is None or recorded.reserved_at_start:
        raise Mismatch("the recording did not begin with an empty allocator")
    requested = trace.requested()
    found = {
        "reserved_bytes.all.peak": recorded.peak_reserved,
        "segment.all.allocated": recorded.source_allocations,
        "segment.all.freed": recorded.source_frees,
        "allocation.all.allocated": trace.allocations,
        "requested_bytes.all.peak": max(requested, default=0),
        "requested_bytes.all.current": requested[-1] if requested else 0,
    }
    wrong = [
        f"{name}: {value} in the trace, {counters.get(name)} counted"
        for name, value in found.items()
        if value != counters.get(name)
    ]
    if wrong:
        raise Mismatch("; ".join(wrong))


def record(name: str, out: Path) -> None:
    """Run one program on the current CUDA device and write its trace. Synchronises."""
    torch.cuda.init()  # recording is switched on for the devices that are there
    torch.cuda.memory._record_memory_history(
        "all", context=None, stacks="python", max_entries=MAX_ENTRIES
    )
    begin = time.perf_counter()
    WORKLOADS[name](torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    # The counters first: nothing is allocated between the two.
    counters, snapshot = torch.cuda.memory_stats(), torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    origin = {
        "program": name,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
    device = torch.cuda.current_device()
    trace = snapshot_trace(snapshot, device, origin)
    path = out / f"{name}.csv.gz"
    save_compact(trace, path)
    cross_check(trace, counters, len(snapshot["device_traces"][device]))
    assert trace.recorded is not None
    click.echo(
        f"{name}: {len(trace.events)} events, {seconds:.1f} s, reserved at most "
        f"{format_size(trace.recorded.peak_reserved)} in {trace.recorded.source_allocations} "
        f"segments, requested at most {format_size(max(trace.requested()))}, file "
        f"{format_size(path.stat().st_size)}" + "".join(f"; {note}" for note in trace.notes)
    )


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=TRACES)
@click.option("--only", type=click.Choice(sorted(WORKLOADS)), multiple=True)
@click.option("--seconds", type=click.IntRange(min=1), default=120, help="Limit for each program.")
@click.option("--in-this-process", is_flag=True, hidden=True)
def main(out: Path, only: tuple[str, ...], seconds: int, in_this_process: bool) -> None:
    """Record traces on the current CUDA device."""
    if not torch.cuda.is_available():
        raise click.ClickException("PyTorch sees no CUDA device; traces are recorded on one")
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in only or WORKLOADS:
        if in_this_process:
            record(name, out)
            continue
        command = [sys.executable, "-m", "benchmarks.arena.record_traces", "--in-this-process"]
        command += ["--only", name, "--out", str(out.absolute())]
        try:
            subprocess.run(command, cwd=ROOT, timeout=seconds, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed.append(name)
            click.echo(f"{name}: {error}", err=True)
    if failed:
        raise click.ClickException(f"not recorded: {', '.join(failed)}")


if __name__ == "__main__":
    main()
