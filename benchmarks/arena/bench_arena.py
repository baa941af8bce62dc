"""Measure arenas: a training run inside one, and tensors from one, beside PyTorch's allocator.

    devalloc bench arena                   # rows go to benchmarks/results/arena/
    devalloc bench arena --only pairs      # without the training runs
    devalloc bench arena --device cpu      # tiny; `use` needs a GPU and is left out
    devalloc bench arena --only scale      # any number of blocks; rows go to arena/scale/

Names of rows: ``training-4x256``: layers and width; ``one-16384``: a pattern of `pairs` and
the bytes of its largest tensor; ``part-...``: a piece of the fast path, alone. Both allocators
take turns in one process, and ``ratio`` is ours over PyTorch's, turn by turn.

``scale-free-1000000``: a case of `scale` and how many blocks there are. These need no GPU and
are measured when asked for; ``gpu`` names the processor.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from benchmarks.options import require_device
from benchmarks.results import RESULTS, RowFile

if TYPE_CHECKING:
    import torch

    from benchmarks.harness import Samples

FOLDER = RESULTS / "arena"
"""Apart from the rows of the heap: the newest of those is what the tables show."""

SCALE_FOLDER = FOLDER / "scale"

PARTS = ("training", "pairs", "parts")
SCALE = "scale"
PAIR_TURNS = 2000


def columns(
    row: str, pattern: str, allocator: str, size: int, n: int, samples: Samples
) -> dict[str, object]:
    """The columns of one row, but for where it was measured."""
    return {
        "row": row,
        "pattern": pattern,
        "size": size,
        "n": n,
        "param": "",
        "lanes": 0,
        "warps": 0,
        "allocator": allocator,
        "state": "warm",
        **samples.record(),
    }


def training_rows(device: torch.device, rounds: int) -> Iterator[dict[str, object]]:
    """The training run; on the CPU a tiny one, and PyTorch's allocator alone."""
    from benchmarks.arena import training as training

    cuda = device.type == "cuda"
    program = training.Program() if cuda else training.TINY
    places = [training.PytorchPlace, training.ArenaPlace] if cuda else [training.PytorchPlace]
    row = f"training-{program.layers}x{program.width}"
    for name, found in training.compare(program, device, list(places), rounds):
        for samples in found:
            yield columns(row, "training", name, 0, program.steps, samples)


def pair_rows(device: torch.device, rounds: int, turns: int) -> Iterator[dict[str, object]]:
    """`Arena.empty` and its end beside `torch.empty`."""
    import devalloc
    from benchmarks.arena import pairs

    with devalloc.Arena(device) as arena:
        for pattern in pairs.PATTERNS:
            for shape in pairs.SHAPES:
                nbytes = 4 * shape[0] * shape[1]
                for name, found in pairs.measure(pattern, shape, arena, rounds, turns):
                    for samples in found:
                        row = f"{pattern}-{nbytes}"
                        yield columns(row, pattern, name, nbytes, turns, samples)
        arena.cache.audit()


def part_rows(device: torch.device, rounds: int, turns: int) -> Iterator[dict[str, object]]:
    """What the fast path consists of."""
    import devalloc
    from benchmarks.arena import pairs

    with devalloc.Arena(device) as arena:
        for name, call in pairs.parts(arena, pairs.SHAPES[0]).items():
            samples = pairs.measure_part(call, rounds, turns)
            yield columns(f"part-{name}", "part", "devalloc", 0, turns, samples)


def processor() -> str:
    """The name of the processor, as far as the system reports it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def scale_rows(rounds: int, largest: int | None) -> Iterator[dict[str, object]]:
    """What operations cost beside few and beside very many blocks."""
    from benchmarks.arena import scale as arena_scale

    for case, count, samples in arena_scale.rows(rounds, largest):
        row = columns(f"scale-{case}-{count}", SCALE, "devalloc", 0, count, samples)
        yield {**row, "gpu": processor()}


@click.command("arena")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder of results.")
@click.option("--only", type=click.Choice((*PARTS, SCALE)), multiple=True, help="[all but scale]")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option("--turns", type=click.IntRange(1), default=PAIR_TURNS, show_default=True)
@click.option("--blocks", type=click.IntRange(100), help="Scale: at most so many. [a million]")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(
    out: Path, only: tuple[str, ...], rounds: int, turns: int, blocks: int | None, device: str
) -> None:
    """Measure arenas: training inside one, and tensors from one, beside PyTorch's allocator."""
    if only == (SCALE,):
        device = "cpu"
    require_device(device)
    # cuBLAS reads it when it starts; without it sums have no fixed order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from benchmarks.harness import WrongResult, provenance

    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    source = provenance(place, seed=0, heap_bytes=0)
    here, beside_many = RowFile(out), RowFile(out / SCALE)
    console = Console(highlight=False, soft_wrap=True)
    chosen = only or PARTS
    try:
        for kind in (*PARTS, SCALE):
            if kind not in chosen:
                continue
            file = beside_many if kind == SCALE else here
            if kind == "training":
                rows = training_rows(place, rounds)
            elif kind == "pairs":
                rows = pair_rows(place, rounds, turns)
            elif kind == "parts":
                rows = part_rows(place, rounds, turns)
            else:
                rows = scale_rows(rounds, blocks)
            for row in rows:
                file.write({**source, **row})
                spread = f"{float(str(row['p20'])):.4g} to {float(str(row['p80'])):.4g}"
                console.print(
                    f"{row['row']:<26} {row['allocator']:<9} {row['op']:<9} "
                    f"{float(str(row['median'])):10.4f} {row['unit']:<6} ({spread})"
                )
    except WrongResult as error:
        raise click.ClickException(str(error)) from error
    for file in (here, beside_many):
        if file.path is not None:
            console.print(f"rows: {file.path}")


if __name__ == "__main__":
    main()
