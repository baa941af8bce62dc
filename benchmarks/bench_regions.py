"""Measure how regions sleep and wake, and what an arena of mapped memory keeps.

    devalloc bench regions                 # rows go to benchmarks/results/regions/
    devalloc bench regions --device cpu    # tiny, with the CPU's double: does it run

A pause is timed until the driver shows that the memory is free, a resume until the last copy is
done. Every block's contents are compared after a resume. `docs/guide/pausing.md` has the table.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from benchmarks.options import require_device
from benchmarks.results import PROVENANCE, RESULTS, RowFile
from benchmarks.tables import table

if TYPE_CHECKING:
    import torch

    from devalloc import Arena

FOLDER = RESULTS / "regions"
COLUMNS = ("case", "blocks", "bytes", "op", "unit", "median", "min", "max", "rounds", "check",
           *PROVENANCE)  # fmt: skip
GIB = 1 << 30
Measured = tuple[str, str, list[float]]


class Region:
    """A region of ``blocks`` tensors, ``nbytes`` together, each filled with a number of its own."""

    def __init__(self, device: torch.device, nbytes: int, blocks: int, backup: str | None) -> None:
        import torch

        import devalloc

        self.device, self.backup = device, backup
        self.arena: Arena = devalloc.Arena(device, source="virtual")
        size = nbytes // blocks // 512 * 512
        self.nbytes = blocks * size
        with self.arena.region("measured", backup=backup):
            self.tensors = [self.arena.empty(size, dtype=torch.uint8) for _ in range(blocks)]
        for number, tensor in enumerate(self.tensors):
            tensor.fill_(number % 251)

    def close(self) -> None:
        self.tensors.clear()
        self.arena.close()

    def synchronise(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def pause(self) -> float:
        """Seconds until the driver shows the memory."""
        import torch

        self.synchronise()
        on_gpu = self.device.type == "cuda"
        before = torch.cuda.mem_get_info(self.device)[0] if on_gpu else 0
        begin = time.perf_counter()
        self.arena.pause("measured")
        # (Locking host memory takes a little of the device's.)
        while on_gpu and torch.cuda.mem_get_info(self.device)[0] - before < 0.99 * self.nbytes:
            if time.perf_counter() - begin > 60:
                raise click.ClickException("the driver does not show the memory after 60 s")
        return time.perf_counter() - begin

    def resume(self) -> float:
        begin = time.perf_counter()
        self.arena.resume("measured")
        self.synchronise()
        return time.perf_counter() - begin

    def check(self) -> str:
        """Whether the contents are those of the backup; without one anything may be there."""
        import torch

        if self.backup is None:
            return "ok"
        found = torch.stack([torch.stack(tensor.aminmax()) for tensor in self.tensors]).cpu()
        wanted = torch.arange(len(self.tensors)).remainder(251).to(torch.uint8)[:, None]
        wrong = int((found != wanted).any(dim=1).sum())
        return "ok" if wrong == 0 else f"{wrong} of {len(self.tensors)} blocks differ"


def measure(region: Region, prepared: bool, rounds: int) -> Iterator[Measured]:
    """Operations with their units and values."""
    gib = region.nbytes / GIB

    def in_units(seconds: Sequence[float]) -> tuple[str, list[float]]:
        if region.backup is None:
            return "ms/GiB", [1e3 * each / gib for each in seconds]
        return "GiB/s", [gib / each for each in seconds]

    if prepared:
        begin = time.perf_counter()
        region.arena.prepare("measured")
        yield "prepare", *in_units([time.perf_counter() - begin])
    yield "first pause", *in_units([region.pause()])
    if region.backup is not None:
        kept = region.arena.stats()["backup_bytes.pinned"]
        yield "host bytes / bytes", "ratio", [kept / region.nbytes]
    resumed, paused = [region.resume()], []
    for _ in range(rounds):
        paused.append(region.pause())
        resumed.append(region.resume())
    yield "later pauses", *in_units(paused)
    yield "resume", *in_units(resumed[1:])


def replaced(device: torch.device, count: int, size: int) -> float:
    """Most reserved over most live bytes, while one tensor after the other is replaced by one that
    is 5 % larger."""
    import torch

    import devalloc

    with devalloc.Arena(device, source="virtual") as arena:
        tensors = [arena.empty(size, dtype=torch.uint8) for _ in range(count)]
        for at in range(count):
            tensors[at] = torch.empty(0)  # the old one goes first, as in an update of weights
            tensors[at] = arena.empty(size * 105 // 100, dtype=torch.uint8)
        ratio = arena.max_memory_reserved() / arena.max_memory_allocated()
        tensors.clear()
    return ratio


def markdown(rows: list[dict[str, str]]) -> str:
    """The guide's table: a line for an operation, a column for a number of blocks."""
    counts = sorted({int(row["blocks"]) for row in rows if "GiB" in row["unit"]})
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in rows:
        cells = lines.setdefault((row["case"], row["op"], row["unit"]), {})
        cells[int(row["blocks"])] = f"{float(row['median']):.3g}"
    body = [[*line, *(cells.get(count, "") for count in counts)]
            for line, cells in lines.items() if set(cells) <= set(counts)]  # fmt: skip
    header = (
        "case",
        "operation",
        "unit",
        *(f"{count} block{'s' * (count > 1)}" for count in counts),
    )
    first, ratios = rows[0], [row for row in rows if row["op"] == "reserved / live"]
    about = (
        f"{first['gpu']}, driver {first['driver']}, torch {first['torch']}, commit "
        f"{first['commit']}, {first['date'][:10]}. {int(rows[0]['bytes']) / GIB:.3g} GiB; medians."
    )
    kept = [f"{row['blocks']} tensors of {int(row['bytes']) // int(row['blocks']) >> 20} MiB, each "
            f"replaced by one that is 5 % larger: most reserved over most live bytes "
            f"{float(row['median']):.3g}." for row in ratios]  # fmt: skip
    return "\n\n".join([about, table(header, 3, body), *kept])


def values(numbers: Sequence[float]) -> dict[str, object]:
    ordered = sorted(numbers)
    return {
        "median": f"{ordered[len(ordered) // 2]:.6g}",
        "min": f"{ordered[0]:.6g}",
        "max": f"{ordered[-1]:.6g}",
        "rounds": len(ordered),
    }


@click.command("regions")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder of results.")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(out: Path, rounds: int, device: str) -> None:
    """Measure how regions sleep and wake."""
    require_device(device)
    import torch

    from benchmarks.harness import provenance

    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    source = provenance(place, seed=0, heap_bytes=0)
    file, console = RowFile(out, COLUMNS), Console(highlight=False, soft_wrap=True)
    nbytes, counts = (16 * GIB, (1, 200, 5000)) if device == "cuda" else (8 << 20, (1, 20))
    wrong = ""

    def tell(case: str, blocks: int, size: int, op: str, unit: str, found: list[float],
             check: str) -> None:  # fmt: skip
        row = {"case": case, "blocks": blocks, "bytes": size, "op": op, "unit": unit,
               **values(found), "check": check}  # fmt: skip
        file.write({**source, **row})
        console.print(f"{case:<16} {blocks:>5}  {op:<18} {row['median']:>9} {unit:<7} {check}")

    for case, backup in (("no backup", None), ("cpu", "cpu"), ("cpu, prepared", "cpu")):
        for blocks in counts:
            region = Region(place, nbytes, blocks, backup)
            try:
                found = list(measure(region, case == "cpu, prepared", rounds))
                check = region.check()
            finally:
                region.close()
                gc.collect()
            for op, unit, numbers in found:
                tell(case, blocks, region.nbytes, op, unit, numbers, check)
            if check != "ok":
                wrong = wrong or f"{case}, {blocks} blocks: {check}"
    count, size = (600, 16 << 20) if device == "cuda" else (20, 1 << 20)
    ratio = replaced(place, count, size)
    tell("replaced by 5 %", count, count * size, "reserved / live", "ratio", [ratio], "ok")
    console.print(f"rows: {file.path}")
    if wrong:
        raise click.ClickException(wrong)


if __name__ == "__main__":
    main()
