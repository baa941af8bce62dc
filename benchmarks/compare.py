"""Our rows beside the best peer's and the targets.

    python -m benchmarks.compare                   # the newest results, on the terminal
    python -m benchmarks.compare FILE              # another file
    python -m benchmarks.compare --write-docs      # also into docs/performance.md

A peer's row counts if it finished, verified, and returned no null. Times of peers contain the
host's launch, ours do not (see ``harness``): the difference of the empty kernels is added to our
times before they are compared, where it is not in our favour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.results import ROOT, newest, read_rows
from benchmarks.rows import WIDTHS

PEERS = ROOT / "benchmarks" / "peers" / "h200.csv"
TARGETS = ROOT / "benchmarks" / "targets.csv"
DOCUMENT = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
DEVICE_TABLE, README_TABLE = "device", "readme"

# The rows that the README shows, by what the row's name begins with.
SHOWN = ("thread-64-1000000", "thread-1024-1000000", "mixed-4096-", "warp-1024-", "cta-65536-",
         "cta-1048576-", "churn-1024-65536", "latency-64-", "oom-64-", "frag-")  # fmt: skip

# The built-in malloc makes its heap when the first kernel allocates, so its `init` says nothing.
NO_CREATE = {"cuda"}


@dataclass(frozen=True)
class Comparison:
    """One operation of one row. Numbers are NaN where there is none; `note` says why ours is."""

    row: str
    op: str
    unit: str
    higher_is_better: bool
    ours: float
    peer: float
    peer_name: str
    target: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """How many times better than the best peer we are; above 1 is ahead."""
        return self.ours / self.peer if self.higher_is_better else self.peer / self.ours

    @property
    def met(self) -> bool:
        if math.isnan(self.ours) or self.note:
            return False
        return self.ours >= self.target if self.higher_is_better else self.ours <= self.target


def number(text: str) -> float:
    """A number, or NaN where a peer's row says ``hang``, ``skipped`` or ``error:...``."""
    try:
        return float(text)
    except ValueError:
        return math.nan


# Peers -------------------------------------------------------------------------------------------


def peer_values(peers: Iterable[dict[str, str]], row: str, op: str) -> dict[str, float]:
    """Every valid peer's value of one operation of a row, by allocator."""
    pattern, size, n = row.split("-")
    column = "free_ms_median" if op == "free" else "alloc_ms_median"
    if pattern == "create":
        pattern = "init"
    found: dict[str, float] = {}
    for peer in peers:
        if (peer["pattern"], peer["size"], peer["n"]) != (pattern, size, n):
            continue
        clean = peer["failures"] == "0" and peer["overlaps_checked"] in ("ok", "-")
        value = number(peer[column])
        if math.isnan(value) or not (clean or pattern == "oom"):
            continue
        if not (pattern == "init" and peer["allocator"] in NO_CREATE):
            found[peer["allocator"]] = value
    if pattern == "write":
        base = peer_values(peers, f"write_base-{size}-{n}", op)
        return {name: value / base[name] for name, value in found.items() if name in base}
    return found


def best(values: dict[str, float], higher_is_better: bool) -> tuple[float, str]:
    if not values:
        return math.nan, "-"
    name = (max if higher_is_better else min)(values, key=lambda key: values[key])
    return values[name], name


def peer_floor(peers: Iterable[dict[str, str]]) -> float:
    """The peers' empty kernel of one thread: the median over their runs, in ms."""
    values = sorted(peer_values(peers, "empty-0-1", "alloc").values())
    return values[len(values) // 2]


# Ours --------------------------------------------------------------------------------------------


class Results:
    """Our rows at one block width, made comparable.

    Parameters
    ----------
    rows : list of dict
        As read from a result file.
    width : (int, int)
        Lanes per program and warps of the rows that allocate by lane.
    floor : float
        The peers' empty kernel in ms.
    """

    def __init__(
        self, rows: list[dict[str, str]], width: tuple[int, int], floor: float = 0.0
    ) -> None:
        lanes, warps = map(str, width)
        self.rows = {
            (row["row"], row["op"]): row
            for row in rows
            if row["lanes"] in ("1", "0") or (row["lanes"], row["warps"]) == (lanes, warps)
        }
        self.empty = self._value("empty-0-1", "kernel")
        added = floor - self.empty
        self.launch = added if added > 0 else 0.0

    def _value(self, row: str, op: str, column: str = "median") -> float:
        found = self.rows.get((row, op))
        return number(found[column]) if found else math.nan

    def value(self, row: str, op: str) -> float:
        """The number that stands for an operation: a time with the peers' launch in it, the ratio
        of filling over filling a plain array, the worst span, or the utilisation."""
        pattern, size, n = row.split("-")
        if pattern == "write":
            plain = self._value(f"write_base-{size}-{n}", op) + self.launch
            return (self._value(row, op) + self.launch) / plain
        if pattern == "frag":
            return self._value(row, op, "max")
        value = self._value(row, op)
        return value if pattern in ("oom", "create") else value + self.launch

    def note(self, row: str, op: str) -> str:
        """Why the row does not count, or nothing."""
        found = self.rows.get((row, op)) or self.rows.get((row, "-"))
        if not found:
            return "not measured"
        if found["check"] != "ok":
            return found["check"]
        nulls = int(found["failures"])
        return f"{nulls} nulls" if nulls and found["pattern"] != "oom" else ""


def compare(
    results: Results, peers: list[dict[str, str]], targets: list[dict[str, str]]
) -> list[Comparison]:
    """One comparison per line of the targets, in their order."""
    lines = []
    for target in targets:
        row, op, higher = target["row"], target["op"], target["better"] == "higher"
        peer, name = best(peer_values(peers, row, op), higher)
        lines.append(
            Comparison(
                row=row,
                op=op,
                unit=target["unit"],
                higher_is_better=higher,
                ours=results.value(row, op),
                peer=peer,
                peer_name=name,
                target=float(target["target"]),
                note=results.note(row, op),
            )
        )
    return lines


# Output ------------------------------------------------------------------------------------------

HEADER = ("row", "op", "unit", "ours", "best peer", "", "ratio", "target", "met")


def show(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


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
        "yes" if line.met else "no",
    )


def markdown(lines: list[Comparison], about: list[str]) -> str:
    body = [f"| {' | '.join(cells(line))} |" for line in lines]
    rule = "| --- | --- | --- | ---: | ---: | --- | ---: | ---: | --- |"
    return "\n".join([*about, "", f"| {' | '.join(HEADER)} |", rule, *body])


def width_table(rows: list[dict[str, str]]) -> str:
    """Everything measured, as measured, with a column per block width of the lane patterns."""
    widths = [f"{lanes} x {warps}" for lanes, warps in WIDTHS]
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        if row["pattern"].startswith("at_rest"):
            continue
        scalar = row["lanes"] == "1"
        width = widths[0] if scalar else f"{row['lanes']} x {row['warps']}"
        text = show(number(row["median"])) if row["check"] == "ok" else row["check"]
        found.setdefault((row["row"], row["op"], row["unit"]), {})[width] = text
    body = [
        f"| {' | '.join([*key, *(values.get(width, '') for width in widths)])} |"
        for key, values in found.items()
    ]
    head = f"| row | op | unit | {' | '.join(widths)} |"
    return "\n".join([head, "| --- | --- | --- | ---: | ---: | ---: |", *body])


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
    known = [line for line in lines if not math.isnan(line.peer)]
    ahead = sum(line.ratio > 1 and not line.note for line in known)
    return [
        f"{first['gpu']}, driver {first['driver']}, CUDA {first['cuda']}, torch {first['torch']}, "
        f"Triton {first['triton']}, Python {first['python']}, commit {first['commit']}, "
        f"{first['date'][:10]}. Medians of {first['rounds']} rounds.",
        f"Targets met: {sum(line.met for line in lines)} of {len(lines)}. Ahead of the best peer: "
        f"{ahead} of {len(known)}. Our empty kernel takes {show(results.empty)} ms; "
        f"{show(results.launch)} ms were added to our times for the launch that the peers' "
        "times contain.",
    ]


def short_table(lines: list[Comparison]) -> str:
    """The README's rows: ours beside the best peer's."""
    head = "| row | op | unit | devalloc | best peer | |\n| --- | --- | --- | ---: | ---: | --- |"
    body = [f"| {' | '.join([*cells(line)[:6]])} |" for line in lines if line.row.startswith(SHOWN)]
    return "\n".join([head, *body])


def write_block(document: Path, name: str, text: str) -> None:
    """Replace what stands between the markers; a document without them is an error."""
    begin, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
    old = document.read_text()
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise click.ClickException(f"{document} needs one {begin} and, after it, one {end}")
    before, _, rest = old.partition(begin)
    document.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


@click.command()
@click.argument("file", required=False, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--write-docs", is_flag=True, help="Put the tables into docs/performance.md and README.md."
)
@click.option("--lanes", default=WIDTHS[0][0], show_default=True, help="Lanes per program.")
@click.option("--warps", default=WIDTHS[0][1], show_default=True, help="Warps per program.")
def main(file: Path | None, write_docs: bool, lanes: int, warps: int) -> None:
    """Show our rows beside the best peer's and the targets."""
    try:
        rows = read_rows(file or newest())
    except FileNotFoundError as error:
        raise click.ClickException(str(error)) from error
    peers = read_rows(PEERS)
    results = Results(rows, (lanes, warps), peer_floor(peers))
    lines = compare(results, peers, read_rows(TARGETS))
    about = describe(rows, results, lines)
    print_table(lines, about)
    if write_docs:
        widths = "All rows as measured, by lanes x warps of a program (scalar ones in the first):"
        text = f"{markdown(lines, about)}\n\n{widths}\n\n{width_table(rows)}"
        write_block(DOCUMENT, DEVICE_TABLE, text)
        write_block(README, README_TABLE, short_table(lines))
        Console().print(f"wrote {DOCUMENT} and {README}")


if __name__ == "__main__":
    main()
