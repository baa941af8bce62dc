"""Measure what people come for: each use of ``examples/`` beside what one would do without a heap.

    devalloc bench uses                    # rows go to benchmarks/results/uses/
    devalloc bench uses --only cache --graph email-Enron.txt.gz
    devalloc bench uses --device cpu       # tiny, in the interpreter: does it run

Every way is checked against a reference before it is timed. `docs/guide/uses.md` says what
the columns are, and where a heap wins and where it loses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from benchmarks.options import require_device
from benchmarks.results import RESULTS, RowFile

if TYPE_CHECKING:
    import torch

    from benchmarks.uses.measure import Input

FOLDER = RESULTS / "uses"
LINE = "{:<10} {:<18} {:<16} {:>10} {:>10} {:>8} {:>8}"
USES = ("ragged", "neighbours", "cache", "sparse", "index")


def inputs_of(use: str, device: torch.device, graphs: tuple[Path, ...]) -> Iterator[Input]:
    """The inputs of a use, each made when it is its turn."""
    from benchmarks.uses import cache, index, neighbours, ragged, sparse

    if use == "sparse":
        return sparse.inputs(device, graphs)
    modules = {"ragged": ragged, "neighbours": neighbours, "cache": cache, "index": index}
    return modules[use].inputs(device)


@click.command("uses")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder of results.")
@click.option("--only", type=click.Choice(USES), multiple=True, help="[all uses]")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option(
    "--graph",
    "graphs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="Edge list, plain or .gz: one more matrix to square. May be repeated.",
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(
    out: Path, only: tuple[str, ...], rounds: int, graphs: tuple[Path, ...], device: str
) -> None:
    """Measure the uses of examples/, each beside what one would do without a heap."""
    require_device(device)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which reads it
    import torch

    from benchmarks.harness import provenance
    from benchmarks.uses.measure import COLUMNS, measure

    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    source = provenance(place, seed=0, heap_bytes=0)
    file = RowFile(out, COLUMNS)
    console = Console(highlight=False, soft_wrap=True)
    console.print(LINE.format("use", "input", "way", "ms a step", "peak, MiB", "waits", "dropped"))
    failed = ""
    for use in USES:
        if only and use not in only:
            continue
        for given in inputs_of(use, place, graphs):
            for way, make in given.ways.items():
                row = {
                    **source,
                    "use": given.use,
                    "input": given.name,
                    "n": given.n,
                    "way": way,
                    "result_bytes": given.result_bytes,
                    **measure(make, place, rounds),
                }
                file.write(row)
                told = LINE.format(
                    use,
                    given.name,
                    way,
                    f"{float(str(row['median'])):.4f}",
                    f"{int(str(row['peak_bytes'])) / (1 << 20):.1f}",
                    str(row["synchronisations"]),
                    str(row["dropped"]),
                )
                if row["check"] != "ok":
                    told = f"{use} {given.name}, {way}: {row['check']}"
                    if way.startswith("heap"):
                        failed = failed or f"{use} {given.name}: {row['check']}"
                console.print(told)
    console.print(f"rows: {file.path}")
    if failed:
        raise click.ClickException(failed)


if __name__ == "__main__":
    main()
