"""Measure arenas as the allocator of whole programs: step times beside PyTorch's own allocator.

    devalloc bench process --model gpt2        # rows go to benchmarks/results/process/
    devalloc bench process --model resnet50 --rounds 2
    devalloc bench process --device cpu        # tiny, and PyTorch's allocator only

Every run is a process of its own (`process_worker`): PyTorch's allocator, ``Arena.use``, and
``Arena.install`` with the policies torch and frugal. The processes of a round exist side by side on
the same cores and take turns of a few steps, one process at a time: how fast a machine is changes
from second to second, by more than allocators differ. In the first round each policy also runs
without the front, which shows what Python costs.

The losses must be those of PyTorch's own runs: no farther from the nearest of them than these are
from one another, which takes two rounds to know. Memory must be balanced at the end. Rows are
written as they come, the table comes last.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.child import Child
from benchmarks.options import require_device
from benchmarks.results import RESULTS, RowFile

FOLDER = RESULTS / "process"
SECONDS = 240
TURNS = 12
STEPS = 5  # timed ones of a turn
CORES = 4


@dataclass(frozen=True)
class Kind:
    """How a process allocates."""

    name: str
    mode: str
    policy: str = "torch"
    front: bool = True
    rounds: int = 1000


KINDS = (
    Kind("torch", "torch"),
    Kind("use", "use"),
    Kind("install-torch", "install"),
    Kind("install-frugal", "install", "frugal"),
    Kind("install-torch-no-front", "install", front=False, rounds=1),
    Kind("install-frugal-no-front", "install", "frugal", front=False, rounds=1),
)


@dataclass
class Found:
    """What the processes of one kind did, one entry for each."""

    medians: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


def distance(one: list[float], other: list[float]) -> float:
    """The largest difference of two runs' losses."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def own_spread(runs: list[list[float]]) -> float:
    """The largest difference among some runs."""
    return max((distance(one, other) for one in runs for other in runs), default=0.0)


def verdict(found: Found, plain: Found) -> str:
    """What is wrong with the runs of one kind, beside PyTorch's own; "ok" if nothing is."""
    wrong = []
    allowed = own_spread(plain.losses)
    worst = max(min(distance(run, other) for other in plain.losses) for run in found.losses)
    if len(plain.losses) < 2:
        wrong.append("losses not compared")
    elif worst > allowed:
        wrong.append(f"losses differ by {worst:.3g}, PyTorch's own runs by {allowed:.3g}")
    if any(found.left):
        wrong.append(f"{max(found.left)} B left")
    return ", ".join(wrong) or "ok"


def ratios(found: Found, plain: Found) -> list[float]:
    """Median step over PyTorch's in the same round."""
    return [ours / its for ours, its in zip(found.medians, plain.medians, strict=False)]


def summary(everything: dict[str, Found]) -> Table:
    """The table that comes last."""
    table = Table("allocator", "step, ms", "ratio", "spread of ratio", "peak, GiB", "check")
    plain = everything["torch"]
    for name, found in everything.items():
        if not found.medians:
            continue
        over = ratios(found, plain)
        table.add_row(
            name,
            f"{statistics.median(found.medians):.3f}",
            f"{statistics.median(over):.4f}",
            f"{min(over):.4f} to {max(over):.4f}",
            f"{max(found.peaks) / (1 << 30):.3f}",
            verdict(found, plain),
        )
    return table


def read(child: Child, kind: Kind) -> dict[str, Any]:
    """The next message of the process; raises ClickException if there is none."""
    done = child.read(SECONDS)
    if done is None:
        raise click.ClickException(f"{kind.name}: the process ended without a result")
    return done


def run(model: str, kinds: list[Kind], device: str) -> list[dict[str, Any]]:
    """One process for each of some kinds, in turns."""
    children: list[Child] = []
    try:
        for kind in kinds:
            order = {
                "model": model,
                "mode": kind.mode,
                "policy": kind.policy,
                "front": kind.front,
                "device": device,
                "cores": CORES,
            }
            line = json.dumps(order) + "\n"
            children.append(Child("benchmarks.arena.process_worker", line, more=True))
        workers = list(zip(children, kinds, strict=True))
        for child, kind in workers:
            read(child, kind)
        times: list[list[float]] = [[] for _ in kinds]
        for turn in range(TURNS):
            for at in range(len(kinds)):
                at = (at + turn) % len(kinds)
                child, kind = workers[at]
                child.send(str(STEPS))
                times[at] += read(child, kind)["milliseconds"]
        results = []
        for at, (child, kind) in enumerate(workers):
            child.close()
            results.append({"milliseconds": times[at], **read(child, kind)})
        return results
    finally:
        for child in children:
            child.end()


def columns(model: str, kind: Kind, done: dict[str, Any], check: str) -> dict[str, object]:
    """One row: the steps of one process."""
    times = sorted(done["milliseconds"])
    count = len(times)
    return {
        "row": f"process-{model}",
        "pattern": "process",
        "size": 0,
        "n": count,
        "param": kind.policy,
        "lanes": 0,
        "warps": 0,
        "registers": 0,
        "allocator": kind.name,
        "state": "warm",
        "op": "step",
        "unit": "ms",
        "median": statistics.median(times),
        "p20": times[count // 5],
        "p80": times[count * 4 // 5],
        "p99": times[count * 99 // 100],
        "min": times[0],
        "max": times[-1],
        "rounds": count,
        "failures": 0,
        "check": check,
        "peak_bytes": done["peak"],
    }


@click.command("process")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder of results.")
@click.option("--model", type=click.Choice(["gpt2", "resnet50"]), default="gpt2")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(out: Path, model: str, rounds: int, device: str) -> None:
    """Measure arenas as the allocator of whole programs, beside PyTorch's own."""
    require_device(device)
    import torch

    from benchmarks.harness import provenance

    kinds = KINDS if device == "cuda" else KINDS[:1]
    chosen = model if device == "cuda" else "tiny"
    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    source = provenance(place, seed=0, heap_bytes=0)
    file = RowFile(out)
    console = Console(highlight=False, soft_wrap=True)
    everything = {kind.name: Found() for kind in kinds}
    for turn in range(rounds):
        turns = [kind for kind in kinds if turn < kind.rounds]
        for kind, done in zip(turns, run(chosen, turns, device), strict=True):
            found = everything[kind.name]
            found.medians.append(statistics.median(done["milliseconds"]))
            found.peaks.append(done["peak"])
            found.losses.append(done["losses"])
            found.left.append(done["left"])
            check = "ok" if not done["left"] else f"{done['left']} B left"
            file.write({**source, **columns(chosen, kind, done, check)})
            console.print(f"round {turn + 1} {kind.name:<24} {found.medians[-1]:10.3f} ms {check}")
    console.print(f"rows: {file.path}")
    console.print(summary(everything))


if __name__ == "__main__":
    main()
