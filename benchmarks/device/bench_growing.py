"""Measure what it costs that a heap grows while kernels use it.

    devalloc bench growing                 # rows go to benchmarks/results/growing/
    devalloc bench growing --device cpu    # tiny, in the interpreter: does it run

*Live*: memory is mapped into a heap while programs on all multiprocessors allocate and free; the
rounds with and without growth alternate. *Graph*: the demo's job on a random graph, in a heap that
starts with 1 MiB and grows by itself, beside one that was sized beforehand, and one that grows in
smaller steps. *Requests*: one launch, by the host's clock. `docs/guide/growing.md` has the table.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
import triton
import triton.language as tl
from rich.console import Console
from rich.progress import Progress

from benchmarks.harness import provenance, verify
from benchmarks.options import require_device
from benchmarks.results import PROVENANCE, RESULTS, RowFile, summary
from benchmarks.tables.tables import table
from devalloc import Heap
from devalloc import kernels as da
from devalloc.demo.graph import Graph, make_graph
from devalloc.demo.run import Job, default_batch, default_heap_bytes
from devalloc.heap import watcher
from devalloc.heap.growth import CHUNK_BYTES
from devalloc.sizes import format_size

FOLDER = RESULTS / "growing"
COLUMNS = ("case", "heap", "bytes", "op", "unit", "median", "min", "max", "rounds", "check",
           *PROVENANCE)  # fmt: skip
FIXED, GROWING, SLOWLY = "sized beforehand", "grows by itself", "in small steps"
KINDS = (FIXED, GROWING, SLOWLY)
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    live: tuple[int, ...]  # bytes of each growth
    programs: int
    kernel_s: float  # how long a kernel runs that sees the heap grow
    edges: int
    requests: tuple[tuple[int, int], ...]  # number, bytes each


ON_GPU = Plan((64 * MIB, GIB), 132, 0.05, 1_000_000, ((100_000, 64), (1_000_000, 1024)))
TINY = Plan((4 * MIB,), 1, 0.0, 300, ((256, 1024),))

Measured = tuple[str, str, int, str, str, list[float], str]
"""case, heap, bytes, op, unit, values, check"""


@triton.jit
def exchange_kernel(heap, turns, LANES: tl.constexpr):
    """malloc and free of a block of 64 bytes in each lane, ``turns`` times."""
    sizes = tl.full((LANES,), 64, tl.int64)
    turn = 0
    while turn < turns:
        da.free(heap, da.malloc(heap, sizes))
        turn += 1


class Live:
    """Growing a heap beneath a kernel that allocates all the time."""

    def __init__(self, heap: Heap, plan: Plan) -> None:
        self.heap, self.plan = heap, plan
        self.on_gpu = heap.device.type == "cuda"
        self.turns = 1
        self.seconds(0)  # compiled
        # (Twice: the GPU may not have come to its clock.)
        while self.on_gpu and min(self.seconds(0), self.seconds(0)) < plan.kernel_s:
            self.turns *= 2

    def seconds(self, nbytes: int) -> float:
        """How long the kernel runs, while the heap grows by ``nbytes``, if this is not 0."""
        self.grown_in = 0.0
        if self.on_gpu:
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        start = time.perf_counter()
        exchange_kernel[(self.plan.programs,)](self.heap.handle, self.turns, LANES=32)
        if self.on_gpu:
            end.record()
            time.sleep(self.plan.kernel_s / 10)
        if nbytes:
            now = time.perf_counter()
            self.heap.grow(nbytes)
            self.grown_in = time.perf_counter() - now
        if not self.on_gpu:
            return time.perf_counter() - start
        if nbytes and end.query():
            raise click.ClickException(
                f"the kernel ended before the heap had grown, in {self.grown_in * 1e3:.1f} ms"
            )
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def live(device: torch.device, plan: Plan, rounds: int) -> Iterator[Measured]:
    for nbytes in plan.live:
        limit = 4 * MIB + (rounds + 1) * nbytes
        with Heap("4MiB", limit=limit, device=device) as heap:
            kernel = Live(heap, plan)
            kernel.seconds(nbytes)
            grown, longer = [], []
            for _ in range(rounds):
                alone = kernel.seconds(0)
                longer.append(kernel.seconds(nbytes) / alone)
                grown.append(kernel.grown_in * 1e3)
            heap.check()
            heap.audit()
        yield "live", "grow()", nbytes, "grow", "ms", grown, "ok"
        yield "live", "grow()", nbytes, "kernel, against alone", "ratio", longer, "ok"


def random_graph(edges: int, seed: int) -> Graph:
    """Degrees fall off as in networks: a few vertices have very many edges."""
    random = np.random.default_rng(seed)
    vertices = max(edges // 16, 16)
    sources = (vertices * random.random(edges) ** 3).astype(np.int64)
    return make_graph("random", vertices, sources, random.integers(vertices, size=edges))


@contextmanager
def make_heap(kind: str, nbytes: int, device: torch.device) -> Iterator[Heap]:
    usual = watcher.LEAST_BYTES
    watcher.LEAST_BYTES = CHUNK_BYTES if kind == SLOWLY else usual
    size = nbytes if kind == FIXED else MIB
    limit = None if kind == FIXED else 4 * nbytes
    grow = None if kind == FIXED else "auto"
    try:
        with Heap(size, device=device, limit=limit, grow=grow) as heap:
            yield heap
    finally:
        watcher.LEAST_BYTES = usual


def graph(device: torch.device, plan: Plan, rounds: int, seed: int) -> Iterator[Measured]:
    edges = random_graph(plan.edges, seed)
    nbytes = max(default_heap_bytes(edges.edges), 16 * MIB)
    times: dict[tuple[str, str], list[float]] = {}
    mapped: dict[str, float] = {}
    for turn in range(rounds + 1):
        for kind in KINDS:
            with make_heap(kind, nbytes, device) as heap, Progress(disable=True) as progress:
                steps = Job(edges, heap, default_batch(edges.edges), seed, progress).run()
            mapped[kind] = max(step.mapped for step in steps) / MIB
            if turn > 0 or rounds == 1:
                taken = {step.name: step.seconds * 1e3 for step in steps}
                for op, value in {**taken, "all steps": sum(taken.values())}.items():
                    times.setdefault((kind, op), []).append(value)
    for (kind, op), values in times.items():
        yield f"graph, {edges.edges:,} edges", kind, nbytes, op, "ms", values, "ok"
    for kind, value in mapped.items():
        yield f"graph, {edges.edges:,} edges", kind, nbytes, "mapped", "MiB", [value], "ok"


@triton.jit
def request_kernel(heap, out, count, nbytes, LANES: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    addr = da.malloc(heap, nbytes + index * 0, index < count)
    tl.store(out + index, addr, mask=index < count)


def requests(device: torch.device, plan: Plan, rounds: int) -> Iterator[Measured]:
    for count, size in plan.requests:
        nbytes = max(4 << (count * size - 1).bit_length(), 16 * MIB)
        grid = (triton.cdiv(count, 128),)
        for kind in KINDS:
            found, check = [], "ok"
            for turn in range(rounds + 1):
                with make_heap(kind, nbytes, device) as heap:
                    out = torch.zeros(count, dtype=torch.int64, device=device)
                    request_kernel[grid](heap.handle, out, 0, size, LANES=128)
                    heap.stats()
                    begin = time.perf_counter()
                    request_kernel[grid](heap.handle, out, count, size, LANES=128)
                    out[-1].item()
                    if turn > 0 or rounds == 1:
                        found.append((time.perf_counter() - begin) * 1e3)
                    verdict = verify(out, size, heap.base, heap.limit)
                    check = check if verdict.ok else str(verdict)
                    if turn == 0:
                        heap.audit()
            case = f"requests, {count:,} of {format_size(size)}"
            yield case, kind, nbytes, "malloc", "ms", found, check


def markdown(rows: list[dict[str, str]]) -> str:
    """The guide's tables."""
    first = rows[0]
    about = (
        f"{first['gpu']}, driver {first['driver']}, torch {first['torch']}, Triton "
        f"{first['triton']}, commit {first['commit']}, {first['date'][:10]}. Medians of "
        f"{first['rounds']}. Small steps: 4 MiB at least."
    )
    found = {(row["case"], row["heap"], row["bytes"], row["op"]): float(row["median"])
             for row in rows}  # fmt: skip
    body = []
    for (case, heap, nbytes, op), value in found.items():
        if op == "grow":
            longer = found[case, heap, nbytes, "kernel, against alone"]
            text = f"{value:.2f} ms, kernels x {longer:.3f}"
            body.append((f"grow by {format_size(int(nbytes))}", text, "", ""))
        elif heap == FIXED and op in ("malloc", "all steps", "mapped"):
            unit = "MiB" if op == "mapped" else "ms"
            cells = [f"{found[case, kind, nbytes, op]:.4g} {unit}" for kind in KINDS]
            body.append((f"{case}: {op}", *cells[1:], cells[0]))
    return "\n\n".join((about, table(("what", "heap that grows", SLOWLY, FIXED), 1, body)))


@click.command("growing")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder of results.")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(out: Path, rounds: int, seed: int, device: str) -> None:
    """Measure heaps that grow."""
    require_device(device)
    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    plan = ON_GPU if device == "cuda" else TINY
    source = provenance(place, seed=seed, heap_bytes=0)
    file, console = RowFile(out, COLUMNS), Console(highlight=False, soft_wrap=True)
    wrong = ""
    parts = (live(place, plan, rounds), requests(place, plan, rounds),
             graph(place, plan, rounds, seed))  # fmt: skip
    for part in parts:
        for case, heap, nbytes, op, unit, found, check in part:
            row = {"case": case, "heap": heap, "bytes": nbytes, "op": op, "unit": unit,
                   **summary(found), "check": check}  # fmt: skip
            file.write({**source, **row})
            console.print(
                f"{case:<30} {heap:<17} {op:<22} {row['median']:>9} {unit:<6} "
                f"{row['min']} to {row['max']} {check}"
            )
            wrong = wrong or ("" if check == "ok" else f"{case}, {heap}: {check}")
    console.print(f"rows: {file.path}")
    if wrong:
        raise click.ClickException(wrong)


if __name__ == "__main__":
    main()
