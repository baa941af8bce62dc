"""The tables of docs/compact-heap.md, made from the newest rows of the races.

python -m benchmarks.lines.table
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.lines.race import FOLDER
from benchmarks.results import ROOT, newest, read_rows
from benchmarks.tables.tables import table, write_block

DOCUMENT = ROOT / "docs" / "compact-heap.md"

MUST = {
    ("mixed-64-100000", "alloc"): 9.5,
    ("mixed-256-100000", "alloc"): 11.0,
    ("mixed-1024-100000", "alloc"): 12.0,
    ("mixed-4096-100000", "alloc"): 14.0,
    ("mixed-8192-100000", "alloc"): 17.0,
    ("shape-A", "alloc"): 35.0,
    ("shape-B", "alloc"): 250.0,
    ("shape-A", "span"): 3.0,
    ("shape-B", "span"): 2.0,
    ("shape-E", "span"): 10.0,
    ("shape-F", "span"): 10.0,
    **{(f"shape-{shape}", "touched"): 2.0 for shape in "ABEF"},
}
"""What the next heap may need, us or a ratio; other rows may be slower than today by a share."""

FEW = ("thread-64-32", "thread-64-16384")


def allowed(name: str, op: str, today: float) -> float | None:
    """The most that a row may need: None where nothing is asked for."""
    if (name, op) in MUST:
        return MUST[name, op]
    if name.startswith("shape"):
        return None
    if name.startswith("mixed"):
        return today * 1.2
    return today * (1.08 if name in FEW else 1.05)


def comparison(today: list[dict[str, str]], lines: list[dict[str, str]]) -> str:
    """The rows that both have, side by side."""
    before = {(row["row"], row["op"]): row for row in today if row["allocator"] == "devalloc"}
    body = []
    for row in lines:
        key = (row["row"], row["op"])
        if key not in before:
            continue
        digits = 2 if row["unit"] == "ratio" else 1
        old = float(before[key]["median"])
        limit = allowed(*key, old)
        values = (old, float(row["median"]), limit)
        cells = ("" if value is None else f"{value:.{digits}f}" for value in values)
        body.append((*key, *cells))
    return table(("row", "op", "today", "lines", "at most"), 2, body)


def blocks() -> dict[str, str]:
    """Each table of the document by its name."""
    today, lines = read_rows(newest(FOLDER)), read_rows(newest(FOLDER / "advice"))
    return {"lines": comparison(today, lines)}


def write(document: Path = DOCUMENT) -> None:
    for name, text in blocks().items():
        write_block(document, name, text)


if __name__ == "__main__":
    write()
