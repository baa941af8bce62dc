"""The rows of ``bench_uses`` as tables for docs/guide/uses.md, and as a picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from benchmarks.tables.comparison import number, show
from benchmarks.tables.plots import PLOTS
from benchmarks.tables.tables import table

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

Rows = list[dict[str, str]]

HEADER = ("input", "way", "ms a step", "peak, MiB", "waits a step")


def cells(row: dict[str, str]) -> tuple[str, ...]:
    """One line. A way that failed has its check, and nothing else."""
    if row["check"] != "ok":
        return row["input"], row["way"], row["check"], "", ""
    return (
        row["input"],
        row["way"] if row["dropped"] == "0" else f"{row['way']}, drops {row['dropped']}",
        show(number(row["median"])),
        f"{int(row['peak_bytes']) / (1 << 20):.1f}",
        row["synchronisations"],
    )


def about(rows: Rows) -> str:
    """Where the rows come from."""
    first = rows[0]
    return (
        f"{first['gpu']}, driver {first['driver']}, CUDA {first['cuda']}, torch {first['torch']}, "
        f"Triton {first['triton']}, Python {first['python']}, commit {first['commit']}, "
        f"{first['date'][:10]}. Medians of {first['rounds']} rounds."
    )


def blocks(rows: Rows) -> dict[str, str]:
    """What goes into the document, by the name of the block: a table for each use."""
    found = {
        "uses": f"{about(rows)}\n\n![time and peak memory over those of a heap](../plots/uses.svg)"
    }
    for use in dict.fromkeys(row["use"] for row in rows):
        body = [cells(row) for row in rows if row["use"] == use]
        found[f"uses-{use}"] = table(HEADER, 2, body)
    return found


def draw(rows: Rows, folder: Path = PLOTS) -> Path:
    """Time and peak memory of each way over those of the heap, as an SVG."""
    usable = [row for row in rows if row["check"] == "ok"]
    base = {(row["use"], row["input"]): row for row in usable if row["way"] == "heap"}
    bars = [
        (f"{row['use']} {row['input']}: {row['way']}",
         float(row["median"]) / float(base[row["use"], row["input"]]["median"]),
         int(row["peak_bytes"]) / max(1, int(base[row["use"], row["input"]]["peak_bytes"])))
        for row in usable
        if row["way"] != "heap" and (row["use"], row["input"]) in base
    ][::-1]  # fmt: skip
    # The same rows give the same file, as in `plots.draw`.
    with plt.rc_context({"svg.hashsalt": "devalloc", "svg.fonttype": "none"}):
        figure, sides = plt.subplots(
            1, 2, figsize=(9, 1 + 0.24 * len(bars)), sharey=True, layout="constrained"
        )
        for axes, at, title in zip(sides, (1, 2), ("time", "peak memory"), strict=True):
            axes.barh([bar[0] for bar in bars], [bar[at] for bar in bars])
            axes.axvline(1, color="black", linewidth=1)
            axes.set_xscale("log")
            least, most = axes.get_xlim()
            base = 2 if most / least < 64 else 10
            axes.xaxis.set_major_locator(LogLocator(base=base))
            axes.xaxis.set_major_formatter("{x:g} x")
            axes.minorticks_off()
            axes.set(title=f"{title}, over the heap's")
            axes.grid(alpha=0.3, axis="x")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "uses.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))
    return path
