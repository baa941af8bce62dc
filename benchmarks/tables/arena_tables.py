"""The rows of ``bench_arena`` as tables for documents; medians, without their spread."""

from __future__ import annotations

from benchmarks.arena.scale import CASES
from benchmarks.tables.comparison import number, show
from benchmarks.tables.tables import table
from devalloc.sizes import format_size

Rows = list[dict[str, str]]

PARTS = {
    "nothing": "the loop and a call of nothing, contained in all that follow",
    "current-stream": "asking for the current stream",
    "look-up": "finding a cached block of this shape, type and stream",
    "template-data": "a new tensor over the cached storage",
    "weak-reference": "a weak reference to it, which calls back at its end",
    "three-counts": "whether anything else refers to the storage",
    "engine-pair": "the engine: a block split off, and merged again",
    "storage-over-pointer": "a storage over the block",
    "tensor-over-storage": "a tensor over a storage",
    "empty-tensor": "instead: an empty tensor, for `set_`",
    "as-strided": "instead: a view by `as_strided`",
}
"""What the parts are, in the order of the fast path first."""


def about(rows: Rows) -> str:
    """Where the rows come from."""
    first = rows[0]
    return (
        f"{first['gpu']}, driver {first['driver']}, CUDA {first['cuda']}, torch {first['torch']}, "
        f"Python {first['python']}, commit {first['commit']}, {first['date'][:10]}. Medians of "
        f"{first['rounds']} rounds, both allocators in turns."
    )


def _median(row: dict[str, str]) -> str:
    return show(number(row["median"]))


def _spread(row: dict[str, str]) -> str:
    return " ".join(
        (show(number(row["median"])), f"({show(number(row['p20']))} to {show(number(row['p80']))})")
    )


def _found(rows: Rows, pattern: str) -> dict[tuple[str, str, str], dict[str, str]]:
    return {
        (row["row"], row["allocator"], row["op"]): row for row in rows if row["pattern"] == pattern
    }


def training_table(rows: Rows) -> str:
    """One column for each allocator."""
    found = _found(rows, "training")
    (name,) = {row for row, _, _ in found}
    body = [
        (f"{text}", *(_median(found[name, who, op]) for who in ("torch", "devalloc")))
        for op, text in (
            ("step", "one step, ms"),
            ("segments", "segments taken in the first 20 steps"),
            ("later", "segments taken after that"),
        )
    ]
    peaks = (found[name, who, "step"]["peak_bytes"] for who in ("torch", "devalloc"))
    body.append(("most memory taken", *(format_size(int(peak)) for peak in peaks)))
    body.append(("time over PyTorch's, run by run", "1", _spread(found[name, "devalloc", "ratio"])))
    steps = found[name, "torch", "step"]["n"]
    return table((f"{steps} steps", "PyTorch's allocator", "inside `use()`"), 1, body)


def pairs_table(rows: Rows) -> str:
    """One line for each pattern and size."""
    body = []
    for pattern in ("one", "layers", "changing"):
        found = _found(rows, pattern)
        for name in dict.fromkeys(row for row, _, _ in found):
            size = format_size(int(found[name, "torch", "pair"]["size"]))
            columns = (("torch", "pair"), ("devalloc", "pair"), ("devalloc", "ratio"))
            cells = [_median(found[name, who, op]) for who, op in columns]
            body.append((pattern, size, *cells))
    return table(("pattern", "largest", "`torch.empty`, us", "`Arena.empty`, us", "ratio"), 2, body)


def parts_table(rows: Rows) -> str:
    """One line for each part, the fast path first."""
    found = {row["row"].removeprefix("part-"): row for row in rows if row["pattern"] == "part"}
    order = sorted(found, key=[*PARTS, *found].index)
    body = [(PARTS[name], _median(found[name])) for name in order]
    return table(("part", "us"), 1, body)


def scale_table(rows: Rows) -> str:
    """One line for each case, with its largest count."""
    first = rows[0]
    body, begin = [], 0.0
    for row in rows:
        case = CASES[row["row"].removeprefix("scale-").rpartition("-")[0]]
        median, count = number(row["median"]), int(row["n"])
        begin = median if count == case.counts[0] else begin
        if count != case.counts[-1]:
            continue
        beside = f"{count:,} {case.beside}"
        body.append((case.operation, beside, _median(row), f"{median / begin:.2f}"))
    about = (
        f"{first['gpu']} (no GPU), Python {first['python']}, commit {first['commit']}, "
        f"{first['date'][:10]}. Medians of up to "
        f"{first['rounds']} rounds. *Growth*: over the fewest that were measured."
    )
    head = ("operation", "beside", "us", "growth")
    return "\n\n".join((about, table(head, 2, body)))


def blocks(rows: Rows) -> dict[str, str]:
    """What goes into the document, by the name of the block."""
    return {
        "pairs": "\n\n".join((about(rows), pairs_table(rows))),
        "training": training_table(rows),
        "parts": parts_table(rows),
    }
