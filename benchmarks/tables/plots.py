"""Plots of measured rows: time against the number of requests, size, fill level and heap size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import matplotlib

from benchmarks.device.plan import is_usual
from benchmarks.results import ROOT, newest, read_rows
from benchmarks.tables.comparison import number

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PLOTS = ROOT / "docs" / "plots"

Rows = list[dict[str, str]]
Series = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Plot:
    """A picture: which rows, and which of their columns is the horizontal axis."""

    name: str
    title: str
    axis: str
    column: str
    wanted: Callable[[dict[str, str]], bool]
    logarithmic: bool = True


def _thread(size: str | None = None, n: str | None = None) -> Callable[[dict[str, str]], bool]:
    return lambda row: (
        row["pattern"] == "thread"
        and (size is None or row["size"] == size)
        and (n is None or row["n"] == n)
    )


PLOT_LIST = (
    Plot("n", "Requests of 64 B, one per lane", "requests", "n", _thread(size="64")),
    Plot("size", "4096 requests of one size", "bytes of a request", "size", _thread(n="4096")),
    Plot("fill", "100,000 requests in a heap that is not empty", "percent of the heap that is live",
         "param", lambda row: row["pattern"] == "fill", False),
    Plot("heap", "Requests in heaps of different size", "bytes of the heap",
         "param", lambda row: row["pattern"] == "heap"),
)  # fmt: skip


def series(rows: Rows, plot: Plot) -> Series:
    """The points of each line; only clean rows at their usual width."""
    lines: dict[str, dict[float, float]] = {}
    for row in rows:
        usable = row["check"] == "ok" and row["failures"] == "0" and row["unit"] == "ms"
        if not usable or not is_usual(row) or not plot.wanted(row):
            continue
        name = f"{row['allocator']} {row['op']}"
        if row["state"] != "warm":
            name += f", {row['state']}"
        if row["pattern"] != "thread":
            name += f", {row['size']} B"
        lines.setdefault(name, {})[float(row[plot.column])] = number(row["median"])
    return {name: sorted(points.items()) for name, points in sorted(lines.items())}


def draw(rows: Rows, plot: Plot, folder: Path) -> Path | None:
    """Write one plot as SVG; None if there are fewer than two points to any line."""
    lines = {name: points for name, points in series(rows, plot).items() if len(points) > 1}
    if not lines:
        return None
    # The same rows give the same file: no date in it, and ids that do not depend on the run.
    with plt.rc_context({"svg.hashsalt": "devalloc", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
        for name, points in lines.items():
            dashed = "--" if " free" in name else "-"
            axes.plot(*zip(*points, strict=True), dashed, marker=".", label=name)
        if plot.logarithmic:
            axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(title=plot.title, xlabel=plot.axis, ylabel="ms, median")
        axes.grid(alpha=0.3)
        figure.legend(fontsize="small", loc="outside right upper")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{plot.name}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    # Matplotlib leaves blanks at the ends of lines.
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))
    return path


def draw_all(rows: Rows, folder: Path = PLOTS) -> list[Path]:
    """Every plot that there are rows for."""
    return [path for plot in PLOT_LIST if (path := draw(rows, plot, folder))]


@click.command("plot")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=PLOTS, help="Folder for the SVGs.")
def main(files: tuple[Path, ...], out: Path) -> None:
    """Draw measured rows: the newest file's, or those of FILES."""
    try:
        rows = [row for path in files or (newest(),) for row in read_rows(path)]
    except FileNotFoundError as error:
        raise click.ClickException(str(error)) from error
    drawn = draw_all(rows, out)
    if not drawn:
        raise click.ClickException("no rows to plot: run devalloc bench device --group all")
    for path in drawn:
        click.echo(f"wrote {path}")


if __name__ == "__main__":
    main()
