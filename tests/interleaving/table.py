"""The list of planted bugs in docs/interleaving.md: ``python -m tests.interleaving.table``.

The rows come from ``killed.csv``, which a run of the tests writes when it is told to:
``DEVALLOC_RECORD_MUTANTS=1 python -m pytest tests/interleaving/test_mutants.py``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.interleaving.mutants import ALL

KILLED = Path(__file__).with_name("killed.csv")
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "interleaving.md"
COLUMNS = ("mutant", "scenario", "schedules")
BEGIN, END = "<!-- mutants -->\n", "<!-- end of mutants -->\n"


def write_killed(rows: Iterable[Mapping[str, object]]) -> None:
    with KILLED.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: str(row["mutant"])))


def killed() -> dict[str, tuple[str, int]]:
    """Of each mutant, the scenario that killed it and the schedules that took."""
    with KILLED.open(newline="") as file:
        return {
            row["mutant"]: (row["scenario"], int(row["schedules"])) for row in csv.DictReader(file)
        }


def table() -> str:
    """By scenario, the mutants that it kills and the schedules that took."""
    found: dict[str, list[str]] = {}
    rows = killed()
    for mutant in ALL:
        scenario, schedules = rows[mutant.name]
        found.setdefault(scenario, []).append(f"`{mutant.name}` {schedules}")
    return "".join(f"- `{name}`: {', '.join(mutants)}\n" for name, mutants in found.items())


def with_table(text: str) -> str:
    """The document with its table made anew."""
    before, begin, rest = text.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT.name} has no {BEGIN.strip()} with an end")
    return before + begin + table() + end + after


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
