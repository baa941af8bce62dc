"""Files of measured rows: writing them as they come, and finding the newest."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

PROVENANCE = (
    "gpu",
    "driver",
    "cuda",
    "torch",
    "triton",
    "python",
    "commit",
    "seed",
    "heap_bytes",
    "date",
)
"""The columns that say where, with what and when a row was measured."""

COLUMNS = (
    "row",
    "pattern",
    "size",
    "n",
    "param",
    "lanes",
    "warps",
    "registers",
    "allocator",
    "state",
    "op",
    "unit",
    "median",
    "p20",
    "p80",
    "p99",
    "min",
    "max",
    "rounds",
    "failures",
    "check",
    "peak_bytes",
    *PROVENANCE,
)


# What a file says that was written before a column existed.
OLDER = {"param": "", "registers": "0", "allocator": "devalloc", "state": "warm", "p99": ""}


def summary(numbers: Sequence[float]) -> dict[str, object]:
    """The cells of a row that say how its values are distributed."""
    ordered = sorted(numbers)
    return {
        "median": f"{ordered[len(ordered) // 2]:.6g}",
        "min": f"{ordered[0]:.6g}",
        "max": f"{ordered[-1]:.6g}",
        "rounds": len(ordered),
    }


class RowFile:
    """A CSV file of rows, made with the first row; every row is on disk when `write` returns."""

    def __init__(self, folder: Path, columns: Sequence[str] = COLUMNS) -> None:
        self.folder = folder
        self.columns = columns
        self.path: Path | None = None

    def write(self, row: dict[str, object]) -> None:
        first = self.path is None
        if self.path is None:
            self.path = self._new_path(row)
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="raise", lineterminator="\n")
            if first:
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            os.fsync(file.fileno())

    def _new_path(self, row: dict[str, object]) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        gpu = re.sub("[^a-z0-9]+", "-", str(row["gpu"]).lower())
        stem = f"{str(row['date'])[:10]}-{gpu}-{row['commit']}"
        names = [stem, *(f"{stem}-{again}" for again in range(2, 1000))]
        return next(p for p in (self.folder / f"{name}.csv" for name in names) if not p.exists())


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, as text; of targets, peers or our own."""
    with path.open(newline="") as file:
        return [_renamed({**OLDER, **row}) for row in csv.DictReader(file)]


def _renamed(row: dict[str, str]) -> dict[str, str]:
    """The row as it is called today: ``warp`` was one scalar request per program once."""
    if row.get("pattern") == "warp" and row.get("lanes") == "1":
        return {**row, "pattern": "scalar", "row": "scalar" + row["row"].removeprefix("warp")}
    return row


def newest(folder: Path = RESULTS) -> Path:
    """The file with the youngest row, those of the interpreter aside.

    Raises
    ------
    FileNotFoundError
        If the folder has none.
    """
    dated = []
    for path in folder.glob("*.csv"):
        rows = [row for row in read_rows(path) if row["gpu"] != "interpreter"]
        if rows:
            dated.append((max(row["date"] for row in rows), path))
    if not dated:
        raise FileNotFoundError(f"no measured rows in {folder}: run devalloc bench device")
    return max(dated)[1]
