"""The README's six numbers (ours, the best alternative, how many times better), and its picture."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib

from benchmarks.arena import bench_arena, bench_process
from benchmarks.results import newest, read_rows
from benchmarks.tables.comparison import Comparison, peer_values
from benchmarks.tables.tables import table

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Rows = list[dict[str, str]]

HEAP = {
    ("thread-64-1000000", "alloc"): "malloc: 1M x 64 B, one for each lane",
    ("thread-64-1000000", "free"): "free: the same",
    ("cta-65536-4096", "alloc"): "malloc: 4,096 x 64 KiB, one for each program",
    ("thread-1024-1000000", "free"): "free: 1M x 1 KiB, one for each lane",
}
"""Rows of heaps, in words."""

PEERS = {
    "cuda": "CUDA's malloc",
    "gallatin": "Gallatin",
    "halloc": "Halloc",
    "ouro": "Ouroboros",
    "regeff": "RegEff",
    "scatter": "ScatterAlloc",
    "xmalloc": "XMalloc",
}
"""Names of allocators, by what comes before an underscore."""


def digits(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def times(ratio: float) -> str:
    return f"{ratio:.0f} x" if ratio >= 10 else f"{ratio:.2g} x"


def readable(name: str) -> str:
    """The name of an allocator in the peers' rows, in words."""
    return PEERS.get(name.partition("_")[0], name)


def heap_line(what: str, line: Comparison) -> tuple[str, ...]:
    """A time of a heap in us, beside the best published CUDA allocator."""
    name = readable(line.peer_name)
    ours, peer = digits(line.ours * 1e3), digits(line.peer * 1e3)
    return what, f"{ours} us", f"{peer} us ({name})", times(line.ratio)


def tensor_line(rows: Rows) -> tuple[str, ...]:
    """Making and dropping a tensor of a shape that was there before."""
    found = {
        row["allocator"]: float(row["median"])
        for row in rows
        if row["pattern"] == "one" and row["op"] == "pair" and row["size"] == str(1 << 20)
    }
    ours, torch = found["devalloc"], found["torch"]
    what = "arena: make and drop a tensor of 1 MiB"
    return what, f"{digits(ours)} us", f"{digits(torch)} us (`torch.empty`)", times(torch / ours)


def training_line(rows: Rows) -> tuple[str, ...]:
    """The most memory that a training run took from the GPU."""
    peaks = {
        name: statistics.median(
            int(row["peak_bytes"]) / (1 << 30) for row in rows if row["allocator"] == name
        )
        for name in ("install-frugal", "torch")
    }
    ours, torch = peaks["install-frugal"], peaks["torch"]
    return (
        "arena: memory taken to train GPT-2",
        f"{digits(ours)} GiB",
        f"{digits(torch)} GiB (PyTorch)",
        times(torch / ours),
    )


def markdown(
    lines: list[Comparison], arena: Rows | None = None, process: Rows | None = None
) -> str:
    """The table; rows of arenas and of whole programs are the newest unless they are given."""
    if arena is None:
        arena = read_rows(newest(bench_arena.FOLDER))
    if process is None:
        process = read_rows(max(bench_process.FOLDER.glob("*-gpt2.csv")))
    found = {(line.row, line.op): line for line in lines}
    body = [heap_line(what, found[key]) for key, what in HEAP.items()]
    body += [tensor_line(arena), training_line(process)]
    return table(("what", "devalloc", "best alternative", "ratio"), 1, body)


def bars(lines: list[Comparison], peers: Rows, op: str) -> list[tuple[str, float]]:
    """(name, us) for 1M x 64 B, the fastest first; of variants of one allocator the fastest."""
    row = "thread-64-1000000"
    (ours,) = (line.ours for line in lines if (line.row, line.op) == (row, op))
    found = {"devalloc": ours * 1e3}
    for name, value in peer_values(peers, row, op).items():
        shown = readable(name)
        found[shown] = min(found.get(shown, value * 1e3), value * 1e3)
    return sorted(found.items(), key=lambda each: each[1])


def draw(lines: list[Comparison], peers: Rows, folder: Path) -> Path:
    """Times of 1M requests of 64 B beside those of published allocators, as an SVG."""
    # The same rows give the same file, as in `plots.draw`.
    with plt.rc_context({"svg.hashsalt": "devalloc", "svg.fonttype": "none", "font.size": 12}):
        figure, sides = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
        for axes, op, name in zip(sides, ("alloc", "free"), ("malloc", "free"), strict=True):
            found = bars(lines, peers, op)[::-1]
            colours = ["#c2410c" if who == "devalloc" else "#94a3b8" for who, _ in found]
            drawn = axes.barh([who for who, _ in found], [us for _, us in found], color=colours)
            axes.bar_label(drawn, [f"{us:,.0f} us" for _, us in found], padding=4)
            axes.set_xscale("log")
            axes.set_xlim(5, 20 * found[0][1])
            axes.set_title(f"{name}: 1M x 64 B (log scale)")
            axes.set_xticks([])
            axes.minorticks_off()
            axes.spines[["top", "right", "bottom"]].set_visible(False)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "readme.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))
    return path
