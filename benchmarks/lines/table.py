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
}
"""Microseconds that the next heap may take; other rows may be 5 % slower than today."""


def comparison(rows: list[dict[str, str]]) -> str:
    """The rows that both have, side by side."""
    found = {(row["row"], row["op"], row["allocator"]): row for row in rows}
    body = []
    for name, op, allocator in found:
        ours = found.get((name, op, "lines"))
        if allocator != "devalloc" or ours is None:
            continue
        today = float(found[name, op, allocator]["median"])
        limit = MUST.get((name, op), today * (1.2 if name.startswith("mixed") else 1.05))
        cells = (f"{today:.1f}", f"{float(ours['median']):.1f}", f"{limit:.1f}")
        body.append((name, op, *cells))
    return table(("row", "op", "today", "lines", "at most"), 2, body)


def variants(pairs: list[dict[str, str]], halves: list[dict[str, str]]) -> str:
    """The rows of two variants of the experiment, side by side, and those that one has alone."""
    found = [
        {(row["row"], row["op"]): row for row in rows if row["allocator"] == "lines"}
        for rows in (pairs, halves)
    ]
    body = []
    for name, op in dict.fromkeys([*found[0], *found[1]]):
        digits = 2 if name.startswith("shape") and op not in ("alloc", "free") else 1
        rows = [each.get((name, op)) for each in found]
        cells = (f"{float(row['median']):.{digits}f}" if row else "" for row in rows)
        body.append((name, op, *cells))
    return table(("row", "op", "pairs", "halves"), 2, body)


def blocks() -> dict[str, str]:
    """Each table of the document by its name."""
    first, second = read_rows(newest(FOLDER)), read_rows(newest(FOLDER / "halves"))
    return {"lines": comparison(first), "halves": variants(first, second)}


def write(document: Path = DOCUMENT) -> None:
    for name, text in blocks().items():
        write_block(document, name, text)


if __name__ == "__main__":
    write()
