"""Comparisons and rows as tables, for the terminal and for documents."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.device.plan import GROUPS
from benchmarks.tables.comparison import Comparison, Results, best, number, peer_values, show

HEADER = ("row", "op", "unit", "ours", "best peer", "", "ratio", "target", "ceiling", "met")


def cells(line: Comparison) -> tuple[str, ...]:
    return (
        line.row,
        line.op,
        line.unit,
        show(line.ours) if not line.note else f"{show(line.ours)} ({line.note})",
        show(line.peer),
        line.peer_name,
        show(line.ratio),
        show(line.target),
        show(line.ceiling),
        "yes" if line.met else "no",
    )


def extent(numbers: list[float], shown: Callable[[float], str] = show) -> str:
    """The least and the most of some numbers."""
    known = sorted(value for value in numbers if not math.isnan(value))
    if not known:
        return "-"
    return " to ".join(dict.fromkeys((shown(known[0]), shown(known[-1]))))


def _but_size(line: Comparison) -> tuple[str, str, str]:
    pattern, _size, count = line.row.split("-", 2)
    return pattern, count, line.op


def markdown(lines: list[Comparison], about: list[str]) -> str:
    """One line for rows that differ in their size only, or of one size in their count.

    `all_tables` has each of them, and `print_table` beside its target.
    """
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for line in lines:
        pattern, _size, count = line.row.split("-", 2)
        same = [other for other in lines if _but_size(other) == _but_size(line)]
        groups.setdefault((pattern, count if len(same) > 1 else "", line.op), []).append(line)
    body = []
    for (pattern, count, op), group in groups.items():
        sizes = extent([float(line.row.split("-")[1]) for line in group], "{:.0f}".format)
        count = count or extent([float(line.row.split("-")[2]) for line in group], "{:.0f}".format)
        ratios = extent([line.ratio for line in group if not line.note])
        met = f"{sum(line.met for line in group)} of {len(group)}"
        body.append((f"{pattern}, {count}", op, sizes, ratios, met))
    return "\n".join([*about, "", table(("row", "op", "sizes, B", "ratio", "met"), 3, body)])


def print_table(lines: list[Comparison], about: list[str]) -> None:
    table = Table(*HEADER)
    for line in lines:
        style = "green" if line.met else ("yellow" if line.ratio > 1 else "red")
        table.add_row(*cells(line), style=style)
    console = Console()
    console.print(table)
    for text in about:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def describe(rows: list[dict[str, str]], results: Results, lines: list[Comparison]) -> list[str]:
    """Where the numbers come from, and the count of what was reached."""
    first = rows[0]
    rounds, _rows = Counter(row["rounds"] for row in rows).most_common(1)[0]
    known = [line for line in lines if not math.isnan(line.peer)]
    ahead = sum(line.ratio > 1 and not line.note for line in known)
    return [
        f"{first['gpu']}, driver {first['driver']}, CUDA {first['cuda']}, torch {first['torch']}, "
        f"Triton {first['triton']}, Python {first['python']}, commit {first['commit']}, "
        f"{first['date'][:10]}. Medians of {rounds} rounds.",
        f"Targets met: {sum(line.met for line in lines)} of {len(lines)}. Ahead of the best peer: "
        f"{ahead} of {len(known)}. Our empty kernel takes {show(results.empty)} ms; "
        f"{show(results.launch)} ms were added to our times for the launch that the peers' "
        "times contain.",
    ]


# Groups ------------------------------------------------------------------------------------------

GROUP_HEADER = ("row", "lanes x warps", "allocator", "caches", "op", "unit", "median", "p20", "p80",
                "p99", "best peer", "")  # fmt: skip


def group_cells(row: dict[str, str], peers: list[dict[str, str]]) -> tuple[str, ...]:
    """A measured row as it is, with the best peer's where one measured the same."""
    parts = row["row"].split("-")
    peer, name = math.nan, ""
    if len(parts) == 3 and row["op"] in ("alloc", "free", "kernel", "create"):
        peer, name = best(peer_values(peers, row["row"], row["op"]), higher_is_better=False)
    if row["pattern"] in ("write", "write_base"):
        peer, name = math.nan, ""
    median = show(number(row["median"])) if row["check"] == "ok" else row["check"]
    quantiles = (show(number(row[column])) for column in ("p20", "p80", "p99"))
    return (
        row["row"],
        f"{row['lanes']} x {row['warps']}",
        row["allocator"],
        row["state"],
        row["op"],
        row["unit"],
        median,
        *quantiles,
        show(peer),
        name if not math.isnan(peer) else "",
    )


def rows_table(rows: list[dict[str, str]], peers: list[dict[str, str]]) -> str:
    """Rows as measured."""
    body = [f"| {' | '.join(group_cells(row, peers))} |" for row in rows]
    rule = "| --- | --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |"
    return "\n".join([f"| {' | '.join(GROUP_HEADER)} |", rule, *body])


def group_table(rows: list[dict[str, str]], peers: list[dict[str, str]], group: str) -> str | None:
    """The rows of a group as measured, or None if there are none."""
    keys = {
        (row.name, str(row.lanes), str(row.warps), str(row.registers), row.allocator, row.state)
        for row in GROUPS[group](None)
    }
    columns = ("row", "lanes", "warps", "registers", "allocator", "state")
    found = [row for row in rows if tuple(row[column] for column in columns) in keys]
    return rows_table(found, peers) if found else None


def debug_table(rows: list[dict[str, str]]) -> str:
    """What a debug heap costs: times with one over those with an ordinary heap.

    Raises
    ------
    KeyError
        If a row was not measured with an ordinary heap.
    """
    found = {(row["row"], row["op"], row["allocator"]): float(row["median"]) for row in rows}
    lines: dict[str, list[str]] = {}
    for (name, op, allocator), debug in found.items():
        if allocator == "debug":
            ordinary = found[name, op, "devalloc"]
            lines.setdefault(name, []).append(f"{op} {debug / ordinary:.1f}")
    return "\n".join(f"- `{name}`: {', '.join(ratios)}" for name, ratios in lines.items())


APART = {
    "order": ("What order costs", "One turn of a loop of dependent atomics.", ()),
    "litmus": (
        "Memory order",
        "`heap` must forbid; `returned` and `fenced` too; all others lack order.",
        ("test", "name", "variant", "lanes", "warps", "programs", "instances", "relevant",
         "forbidden"),
    ),
    "stress": (
        "Stress",
        "Phases of one run; `nulls` of full heaps, `double_frees` on purpose.",
        ("phase", "capacity", "operations", "nulls", "double_frees", "bytes_verified", "seconds",
         "violations", "check"),
    ),
}  # fmt: skip
"""What is measured apart, by the folder of its rows: a title, what it is, and the columns to show;
none: as the groups."""


def apart(name: str, rows: list[dict[str, str]]) -> list[str]:
    """The section of something that is measured apart."""
    title, what, columns = APART[name]
    body = [tuple(row[column] for column in columns) for row in rows]
    shown = table(columns, 3, body) if columns else rows_table(rows, [])
    return [f"## {title}", f"{what} Commit {rows[0]['commit']}.", shown]


def all_tables(
    rows: list[dict[str, str]],
    peers: list[dict[str, str]],
    others: Mapping[str, list[dict[str, str]]],
    about: list[str],
) -> str:
    """Everything measured, group by group. A row that is in two groups is shown in both. ``others``
    are the rows of what is measured `APART`."""
    text = [
        "# Measured rows",
        "Made by `devalloc bench compare --write-docs` from the newest rows beside it. Our times "
        "are without the host's launch; those of the peers contain it.",
        about[0],
    ]
    for group, plan in GROUPS.items():
        shown = group_table(rows, peers, group)
        if shown:
            text += [f"## {group}", " ".join(str(plan.__doc__).split()), shown]
    for name, found in others.items():
        text += apart(name, found)
    return "\n\n".join(text) + "\n"


def table(head: tuple[str, ...], numbers_from: int, body: list[tuple[str, ...]]) -> str:
    """Markdown; the columns from ``numbers_from`` on are numbers."""
    rule = ["---" if at < numbers_from else "---:" for at in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, tuple(rule), *body))


# Documents ---------------------------------------------------------------------------------------


def write_block(document: Path, name: str, text: str) -> None:
    """Replace what stands between the markers; a document without them is an error."""
    begin, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
    old = document.read_text()
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise click.ClickException(f"{document} needs one {begin} and, after it, one {end}")
    before, _, rest = old.partition(begin)
    document.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")
