"""Count what happens at the stripes in each launch of a row, by a model: no device, no times.

    devalloc bench batches                        # the mixed rows, one after another in one heap
    devalloc bench batches --rows '^warp' --apart # each in a heap of its own

Launches of mixed sizes end with the program that has something rare to do: `opened` and `renewed`
are refills for which all programs of the stripe wait, `swapped` the short kind; the rest is done
ahead, while others go on. Before a change to how long batches are, or when they are renewed, this
says in seconds what it does to the rows. See ``batch_model``.
"""

from __future__ import annotations

import re

import click
import numpy as np
import rich
from rich.table import Table

from benchmarks.device.rows import Row, rows_of

PATTERNS = ("mixed", "thread", "warp")
LAUNCHES = 11
"""As a row is measured: one to warm up, and ten."""


def sizes_of(row: Row, seed: int) -> np.ndarray:
    """What the row's lanes ask for, in bytes."""
    if row.pattern == "mixed":
        return np.random.default_rng(seed).integers(16, row.size + 1, row.n)
    return np.full(row.n, row.size)


@click.command("batches")
@click.option("--rows", "pattern", default="^mixed.*@32x1", show_default=True, help="A regex.")
@click.option("--heap", default="8GiB", show_default=True, help="Capacity.")
@click.option("--launches", type=click.IntRange(1), default=LAUNCHES, show_default=True)
@click.option("--apart", is_flag=True, help="Each row in a heap of its own.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of mixed sizes.")
def main(pattern: str, heap: str, launches: int, apart: bool, seed: int) -> None:
    """Count refills and prefetches in the launches of rows, by a model: no device is needed."""
    # Here, not above: the kernels import Triton.
    from benchmarks.device.batch_model import EVENTS, BatchModel, NotModelled
    from devalloc.errors import InvalidArgument
    from devalloc.sizes import PAGE_BYTES, parse_size

    try:
        pages = parse_size(heap) // PAGE_BYTES
        chosen = re.compile(pattern)
    except (InvalidArgument, re.error) as error:
        raise click.UsageError(str(error)) from error
    if pages == 0:
        raise click.UsageError(f"--heap {heap}: a heap has at least {PAGE_BYTES >> 10} KiB")
    rows = [
        row
        for row in rows_of(["target"])
        if row.pattern in PATTERNS and row.allocator == "devalloc" and chosen.search(row.key)
    ]
    if not rows:
        raise click.UsageError(f"no row of {', '.join(PATTERNS)} matches {pattern!r}")
    model = BatchModel(pages)
    for row in rows:
        if apart:
            model = BatchModel(pages)
        sizes = sizes_of(row, seed)
        table = Table(box=None, title=row.key, title_justify="left", padding=(0, 1))
        for column in ("launch", *EVENTS):
            table.add_column(column, justify="right", no_wrap=True)
        try:
            for launch in range(launches):
                events = model.launch(sizes, row.lanes)
                model.free_all()
                table.add_row(str(launch), *(str(number) for number in vars(events).values()))
        except NotModelled as error:
            rich.print(f"{row.key}: not modelled: {error}")
            model = BatchModel(pages)
        else:
            rich.print(table)


if __name__ == "__main__":
    main()
