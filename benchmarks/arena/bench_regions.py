"""Measure how regions sleep and wake, and what an arena of mapped memory keeps.

    devalloc bench regions                 # rows go to benchmarks/results/regions/
    devalloc bench regions --device cpu    # tiny, with the CPU's double: does it run
    devalloc bench regions --memory-saver FOLDER    # torch_memory_saver beside it

A pause is timed until the driver shows that the memory is free, a resume until the last copy is
done. Every block's contents are compared after a resume. `docs/guide/pausing.md` has the table.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from benchmarks.child import Child
from benchmarks.options import require_device
from benchmarks.results import PROVENANCE, RESULTS, RowFile, summary
from benchmarks.tables.tables import table

if TYPE_CHECKING:
    import torch

    from devalloc import Arena

FOLDER = RESULTS / "regions"
COLUMNS = ("case", "blocks", "bytes", "op", "unit", "median", "min", "max", "rounds", "check",
           *PROVENANCE)  # fmt: skip
GIB = 1 << 30
Measured = tuple[str, str, list[float]]
HOST, REPLACED, THEIRS = "host memory", "replaced by 5 %", "torch_memory_saver"
CASES = {"no backup": None, "cpu": "cpu", "cpu, prepared": "cpu"}
POLICIES = ("torch", "torch, expandable", "frugal, expandable")


class Region:
    """A region of ``blocks`` tensors, ``nbytes`` together, each filled with a number of its own."""

    def __init__(self, device: torch.device, nbytes: int, blocks: int, backup: str | None) -> None:
        self.device, self.backup = device, backup
        size = nbytes // blocks // 512 * 512
        self.nbytes = blocks * size
        self.tensors = self.allocate(size, blocks)
        for number, tensor in enumerate(self.tensors):
            tensor.fill_(number % 251)

    # What another allocator does in another way: see `benchmarks.arena.saver_worker` --------------

    def allocate(self, size: int, blocks: int) -> list[torch.Tensor]:
        import torch

        import devalloc

        self.arena: Arena = devalloc.Arena(self.device, source="virtual")
        with self.arena.region("measured", backup=self.backup):
            return [self.arena.empty(size, dtype=torch.uint8) for _ in range(blocks)]

    def sleep(self) -> None:
        self.arena.pause("measured")

    def wake(self) -> None:
        self.arena.resume("measured")

    def prepare(self) -> None:
        self.arena.prepare("measured")

    @property
    def kept(self) -> int | None:
        """Bytes of the backup; None if that is not known."""
        return self.arena.stats()["backup_bytes.pinned"]

    def close(self) -> None:
        self.tensors.clear()
        self.arena.close()

    # What is the same for all ---------------------------------------------------------------------

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
        self.sleep()
        # (Locking host memory takes a little of the device's.)
        while on_gpu and torch.cuda.mem_get_info(self.device)[0] - before < 0.99 * self.nbytes:
            if time.perf_counter() - begin > 60:
                raise click.ClickException("the driver does not show the memory after 60 s")
        return time.perf_counter() - begin

    def resume(self) -> float:
        begin = time.perf_counter()
        self.wake()
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
        region.prepare()
        yield "prepare", *in_units([time.perf_counter() - begin])
    yield "first pause", *in_units([region.pause()])
    if region.backup is not None and (kept := region.kept) is not None:
        yield "host bytes / bytes", "ratio", [kept / region.nbytes]
    resumed, paused = [region.resume()], []
    for _ in range(rounds):
        paused.append(region.pause())
        resumed.append(region.resume())
    yield "later pauses", *in_units(paused)
    yield "resume", *in_units(resumed[1:])


def replaced(device: torch.device, policy: str, count: int, size: int) -> float:
    """Most reserved over most live bytes, while one tensor after the other is replaced by one that
    is 5 % larger."""
    import torch

    import devalloc
    from devalloc.cache import make_policy

    name, _, expandable = policy.partition(", ")
    rules = make_policy(name, expandable_segments=bool(expandable))
    with devalloc.Arena(device, source="virtual", policy=rules) as arena:
        tensors = [arena.empty(size, dtype=torch.uint8) for _ in range(count)]
        for at in range(count):
            tensors[at] = torch.empty(0)  # the old one goes first, as in an update of weights
            tensors[at] = arena.empty(size * 105 // 100, dtype=torch.uint8)
        ratio = arena.max_memory_reserved() / arena.max_memory_allocated()
        tensors.clear()
    return ratio


def theirs(path: Path, device: torch.device, nbytes: int, blocks: int, case: str, rounds: int
           ) -> tuple[list[Measured], int, str]:  # fmt: skip
    """Operations, bytes and check of torch_memory_saver, in a process of its own.

    In the same one its memory would not come back from one case to the next.
    """
    wanted = {"path": str(path), "device": str(device), "nbytes": nbytes, "blocks": blocks,
              "case": case, "rounds": rounds}  # fmt: skip
    child = Child("benchmarks.arena.saver_worker", json.dumps(wanted))
    found: dict[str, Any] | None = child.read(seconds=240)
    child.process.wait(60)
    if found is None:
        raise click.ClickException("the worker with torch_memory_saver has ended")
    measured = [(op, unit, numbers) for op, unit, numbers in found["found"]]
    return measured, found["nbytes"], found["check"]


def markdown(rows: list[dict[str, str]]) -> str:
    """The guide's tables: a line for a case, a column for an operation, and in it a number for each
    number of blocks."""
    parts = [row for row in rows if row["case"] == HOST]
    ratios = [row for row in rows if row["op"] == "reserved / live"]
    backups = [float(row["median"]) for row in rows if row["op"] == "host bytes / bytes"]
    apart = ("reserved / live", "host bytes / bytes")
    rest = [row for row in rows if row not in parts and row["op"] not in apart]
    counts = sorted({int(row["blocks"]) for row in rest})
    lines: dict[tuple[str, str], dict[str, dict[int, str]]] = {}
    for row in sorted(rest, key=lambda row: int(row["blocks"])):
        cells = lines.setdefault((row["case"], row["unit"]), {})
        cells.setdefault(row["op"], {})[int(row["blocks"])] = f"{float(row['median']):.3g}"
    ops = ("prepare", "first pause", "later pauses", "resume")
    body = [
        (*line, *(", ".join(cells[op].values()) if op in cells else "" for op in ops))
        for line, cells in lines.items()
    ]
    header = ("case", "unit", *ops)
    first = rest[0]
    about = (
        f"{first['gpu']}, driver {first['driver']}, torch {first['torch']}, commit "
        f"{first['commit']}, {first['date'][:10]}. {int(first['bytes']) / GIB:.3g} GiB; medians, "
        f"for {', '.join(map(str, counts))} blocks."
    )
    texts = [about, table(header, 2, body)]
    if backups:
        texts.append(f"A backup takes at most {max(backups):.3g} times what it holds.")
    if parts:
        speeds = [(row["op"], f"{float(row['median']):.3g}") for row in parts]
        shown = "; ".join(f"{part}: {speed}" for part, speed in speeds)
        texts.append(f"What a first backup is made of, host memory alone, in GiB/s: {shown}.")
    if ratios:
        row = ratios[0]
        found = "; ".join(
            f"{float(row['median']):.3g} under {row['case'].removeprefix(REPLACED).strip(', ')}"
            for row in ratios
        )
        texts.append(
            f"{row['blocks']} tensors of {int(row['bytes']) // int(row['blocks']) >> 20} MiB, each "
            f"replaced by one that is 5 % larger: most reserved over most live bytes {found}."
        )
    return "\n\n".join(texts)


@click.command("regions")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder of results.")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option(
    "--memory-saver",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder from which torch_memory_saver can be imported, to measure it too.",
)
def main(out: Path, rounds: int, device: str, memory_saver: Path | None) -> None:
    """Measure how regions sleep and wake."""
    require_device(device)
    import torch

    from benchmarks.arena.host_parts import host_parts
    from benchmarks.harness import provenance

    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    source = provenance(place, seed=0, heap_bytes=0)
    file, console = RowFile(out, COLUMNS), Console(highlight=False, soft_wrap=True)
    nbytes, counts = (16 * GIB, (1, 200, 5000)) if device == "cuda" else (8 << 20, (1, 20))
    wrong = ""

    def tell(case: str, blocks: int, size: int, op: str, unit: str, found: list[float],
             check: str) -> None:  # fmt: skip
        row = {"case": case, "blocks": blocks, "bytes": size, "op": op, "unit": unit,
               **summary(found), "check": check}  # fmt: skip
        file.write({**source, **row})
        console.print(f"{case:<35} {blocks:>5}  {op:<24} {row['median']:>9} {unit:<7} {check}")

    size = GIB * 4 if device == "cuda" else 8 << 20
    for op, unit, numbers in host_parts(place, size):
        tell(HOST, 0, size, op, unit, numbers, "ok")
    for case, backup in CASES.items():
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
    count, size = 600 if device == "cuda" else 20, 16 << 20
    for policy in POLICIES:
        ratio = replaced(place, policy, count, size)
        case = f"{REPLACED}, {policy}"
        tell(case, count, count * size, "reserved / live", "ratio", [ratio], "ok")
    if memory_saver is not None:
        for case in ("no backup", "cpu", "cpu, kept"):
            for blocks in counts:
                few = rounds if case != "cpu" else min(rounds, 2)  # it takes seconds each
                found, size, check = theirs(memory_saver, place, nbytes, blocks, case, few)
                for op, unit, numbers in found:
                    tell(f"{THEIRS}, {case}", blocks, size, op, unit, numbers, check)
                if check != "ok":
                    wrong = wrong or f"{THEIRS}, {case}, {blocks} blocks: {check}"
    console.print(f"rows: {file.path}")
    if wrong:
        raise click.ClickException(wrong)


if __name__ == "__main__":
    main()
