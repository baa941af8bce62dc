"""Race the experiment against the heap: the rows that decide about its design.

    python -m benchmarks.lines.race            # rows go to benchmarks/results/lines/

Both run in one process, in turns for each row. Every row is checked: no nulls, no overlaps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch

from benchmarks.harness import provenance
from benchmarks.lines.host import Lines, Raced, Today
from benchmarks.results import RESULTS, RowFile
from devalloc.sizes import PAGE_BYTES

FOLDER = RESULTS / "lines"
SEED = 5
HEAP = 8 << 30
WARM = 3
SPIN = 400_000

BLOCKS = (
    *(("mixed", 16, size, 100_000, 32) for size in (64, 256, 1024, 4096, 8192)),
    *(("thread", size, size, 1_000_000, 128) for size in (64, 256, 1024, 4096)),
    *(("thread", size, size, 100_000, 128) for size in (16, 64, 256, 1024)),
    *(("thread", 64, 64, n, 32) for n in (32, 16_384)),
)
SCALARS = (("scalar", 64, 100_000, 1), ("cta", 1024, 4096, 4), ("cta", 16_384, 4096, 4))
CHURNS = ((64, 65_536, 128), (1024, 65_536, 128), (64, 1024, 32))
SHAPES = (
    ("A", 16, 4096, 100_000),
    ("B", 16, 4096, 1_000_000),
    ("E", 16, 256, 100_000),
    ("F", 64, 64, 100_000),
)


def timed(launch: Callable[[], None]) -> float:
    """Microseconds of a launch, behind a kernel that hides what the host needs for it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SPIN)
    start.record()
    launch()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000


def verdict(out: torch.Tensor, sizes: torch.Tensor) -> str:
    """Whether blocks at ``out`` are there and apart."""
    addrs, order = out.sort()
    ends = addrs + sizes[order]
    nulls = int((addrs == 0).sum())
    overlaps = int((ends[nulls:-1] > addrs[nulls + 1 :]).sum())
    return "ok" if nulls + overlaps == 0 else f"{nulls} nulls, {overlaps} overlaps"


def touched(out: torch.Tensor) -> int:
    """Bytes of the pages in which a block begins."""
    return torch.unique(out // PAGE_BYTES).numel() * PAGE_BYTES


class Race:
    """Measures rows and writes them as they come."""

    def __init__(self, out: Path) -> None:
        self.file = RowFile(out)
        self.device = torch.device("cuda", 0)
        self.source = provenance(self.device, SEED, HEAP)
        self.checks: list[str] = []

    def row(self, of: Raced, row: str, op: str, values: list[float], check: str, **more: object):
        values = sorted(values)
        count = len(values)
        middle = statistics.median(values)
        unit = "ratio" if op in ("span", "touched", "largest") else "us"
        empty = dict.fromkeys(("size", "n", "param", "lanes", "warps", "p99", "peak_bytes"), "")
        self.file.write(
            {
                **empty,
                "row": row,
                "pattern": row.split("-")[0],
                "registers": 0,
                "allocator": of.name,
                "state": "warm",
                "op": op,
                "unit": unit,
                "median": middle,
                "p20": values[count // 5],
                "p80": values[count * 4 // 5],
                "min": values[0],
                "max": values[-1],
                "rounds": count,
                "failures": 0,
                "check": check,
                **more,
                **self.source,
            }
        )
        if check != "ok":
            self.checks.append(f"{of.name} {row} {op}: {check}")
        click.echo(f"{of.name:9} {row:22} {op:8} {middle:9.3f} {unit:6} {check}")

    def blocks(self, of: Raced, pattern: str, low: int, high: int, n: int, lanes: int) -> None:
        torch.manual_seed(SEED)
        sizes = torch.randint(low, high + 1, (n,), device=self.device)
        out = torch.zeros(n, dtype=torch.int64, device=self.device)
        every = torch.ones(n, dtype=torch.int32, device=self.device)
        mallocs, frees, check = [], [], "ok"
        for turn in range(WARM + 13):
            mallocs.append(timed(lambda: of.malloc(sizes, out, lanes)))
            if turn in (0, WARM + 12) and check == "ok":
                check = verdict(out, sizes)
            frees.append(timed(lambda: of.free(out, every, lanes)))
        row = f"{pattern}-{high}-{n}"
        more = {"size": high, "n": n, "lanes": lanes, "warps": 1}
        self.row(of, row, "alloc", mallocs[WARM:], check, **more)
        self.row(of, row, "free", frees[WARM:], check, **more)

    def scalars(self, of: Raced, pattern: str, size: int, n: int, warps: int) -> None:
        out = torch.zeros(n, dtype=torch.int64, device=self.device)
        mallocs, frees, check = [], [], "ok"
        for _ in range(WARM + 10):
            mallocs.append(timed(lambda: of.malloc_scalars(out, size, warps)))
            if torch.unique(out[out != 0]).numel() < n:
                check = "nulls or one block twice"
            frees.append(timed(lambda: of.free_scalars(out, warps)))
        more = {"size": size, "n": n, "warps": warps}
        self.row(of, f"{pattern}-{size}-{n}", "alloc", mallocs[WARM:], check, **more)
        self.row(of, f"{pattern}-{size}-{n}", "free", frees[WARM:], check, **more)

    def kernels(self, make: Callable[[], Raced]) -> None:
        of = make()
        times = [timed(lambda: of.pairs(1000, 64)) / 1000 for _ in range(10)]
        self.row(of, "latency-64-1000", "kernel", times[1:], "ok", size=64, n=1000)
        for size, n, lanes in CHURNS:
            of = make()
            wrong = torch.zeros(1, dtype=torch.int32, device=self.device)
            times = [timed(partial(of.churn, wrong, n, size, 32, lanes)) for _ in range(11)]
            check = "ok" if int(wrong) == 0 else f"{int(wrong)} words wrong"
            self.row(of, f"churn-{size}-{n}", "kernel", times[1:], check, size=size, n=n)

    def shape(self, of: Raced, name: str, low: int, high: int, n: int) -> None:
        torch.manual_seed(SEED)
        sizes = torch.randint(low, high + 1, (n,), device=self.device)
        out = torch.zeros(n, dtype=torch.int64, device=self.device)
        of.malloc(sizes, out, 32)
        mallocs, frees = [], []
        for _ in range(20):
            chosen = (torch.rand(n, device=self.device) < 0.5).to(torch.int32)
            frees.append(timed(partial(of.free, out, chosen, 32)))
            mallocs.append(timed(partial(of.malloc, sizes, out, 32)))
        check = verdict(out, sizes)
        live = int(sizes.sum())
        ends = out + sizes
        row = f"shape-{name}"
        more = {"size": high, "n": n, "lanes": 32, "warps": 1}
        self.row(of, row, "alloc", mallocs, check, **more)
        self.row(of, row, "free", frees, check, **more)
        self.row(of, row, "span", [int(ends.max() - out.min()) / live], check, **more)
        self.row(of, row, "touched", [touched(out) / live], check, **more)
        if isinstance(of, Lines):
            free = len(of.free_pages())
            self.row(of, row, "largest", [of.largest_free() / free], check, **more)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder of results.")
@click.option("--rows", default="blocks,scalars,kernels,shapes", help="Which kinds of rows.")
@click.option("--of", type=click.Choice(["both", "lines"]), default="both", help="What to race.")
def main(out: Path, rows: str, of: str) -> None:
    """Race the experiment against the heap, on a CUDA device."""
    race = Race(out)
    kinds = rows.split(",")
    first = 0 if of == "both" else 1
    for make in (lambda: Today(HEAP), lambda: Lines(HEAP))[first:]:
        if "blocks" in kinds:
            for block in BLOCKS:
                race.blocks(make(), *block)
        if "scalars" in kinds:
            for scalar in SCALARS:
                race.scalars(make(), *scalar)
        if "shapes" in kinds:
            for shape in SHAPES:
                race.shape(make(), *shape)
    if "kernels" in kinds:
        for make in (lambda: Today(HEAP), lambda: Lines(HEAP, memory=True))[first:]:
            race.kernels(make)
    if race.checks:
        raise click.ClickException("; ".join(race.checks))


if __name__ == "__main__":
    main()
