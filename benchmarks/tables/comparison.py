"""Our rows made comparable: beside the best peer's, the targets, and what the card can do.

A peer's row counts if it finished, verified, and returned no null. Times of peers contain the
host's launch, ours do not (see ``harness``): the difference of the empty kernels is added to our
times before they are compared, where it is not in our favour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.device.plan import CHURN_ROUNDS, is_usual
from benchmarks.results import ROOT

PEERS = ROOT / "benchmarks" / "peers" / "h200.csv"
TARGETS = ROOT / "benchmarks" / "targets.csv"

# Rates of one H200, per ms: addresses stored, and 64-bit atomics on neighbouring words, which
# bound what an allocator can do that gives each lane an address, or changes a word for each.
STORES_PER_MS = 520e6
ATOMICS_PER_MS = 110e6

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
    ceiling: float
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


def show(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


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
    """Our rows, each at one block width, made comparable.

    Parameters
    ----------
    rows : list of dict
        As read from a result file.
    floor : float
        The peers' empty kernel in ms.
    width : (int, int), optional
        Lanes per program and warps of the rows that allocate by lane, instead of the usual ones.
    """

    def __init__(
        self,
        rows: list[dict[str, str]],
        floor: float = 0.0,
        width: tuple[int, int] | None = None,
    ) -> None:
        def wanted(row: dict[str, str]) -> bool:
            if width is None or row["lanes"] in ("1", "0"):
                return is_usual(row)
            asked = (row["lanes"], row["warps"]) == tuple(map(str, width))
            return asked and row["registers"] == "0"

        self.rows = {
            (row["row"], row["op"]): row
            for row in rows
            if wanted(row)
            and row["pattern"] != "scalar"
            and row["allocator"] in ("devalloc", "none")
            and row["state"] == "warm"
        }
        self.empty = self._value("empty-0-1", "kernel")
        added = floor - self.empty
        self.launch = added if added > 0 else 0.0

    def _value(self, row: str, op: str, column: str = "median") -> float:
        found = self.rows.get((row, op))
        return number(found[column]) if found else math.nan

    def value(self, row: str, op: str) -> float:
        """The number by which an operation is compared: a time with the peers' launch in it, the
        ratio of filling over filling a plain array, the worst span, or the utilisation."""
        pattern, size, n = row.split("-")
        if pattern == "write":
            plain = self._value(f"write_base-{size}-{n}", op) + self.launch
            return (self._value(row, op) + self.launch) / plain
        if pattern == "frag":
            return self._value(row, op, "max")
        value = self._value(row, op)
        return value if pattern in ("oom", "create") else value + self.launch

    def ceiling(self, row: str, op: str) -> float:
        """What no allocator can beat on this card: for times, an empty kernel, plus storing (or
        loading) an address per request, or for ``churn`` two atomics per pair."""
        pattern, _, n = row.split("-")
        floor = self.empty + self.launch
        if pattern in ("thread", "mixed", "warp", "cta"):
            return floor + int(n) / STORES_PER_MS
        if pattern == "churn":
            return floor + 2 * CHURN_ROUNDS * int(n) / ATOMICS_PER_MS
        return 1.0 if pattern in ("write", "oom", "frag") else math.nan

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
                ceiling=results.ceiling(row, op),
                note=results.note(row, op),
            )
        )
    return lines
