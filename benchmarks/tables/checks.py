"""What must hold over many rows: that a cost stays flat while something else grows.

Times are those of the kernels, without the host's launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.device.plan import HEAPS, is_usual
from benchmarks.tables.comparison import number, show

FLAT = 1.5
FULL = 3.0
TAIL = 3.0
FEWEST, MOST = 16_384, 16_777_216

Key = tuple[str, str]


@dataclass(frozen=True)
class Check:
    """One thing that must hold: a quotient of measured times and its limit; NaN: not measured."""

    what: str
    value: float
    limit: float

    @property
    def verdict(self) -> str:
        if math.isnan(self.value):
            return "not measured"
        return "yes" if self.value <= self.limit else "no"


class Times:
    """Clean rows of the heap at their usual width, warm, by name and operation."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.rows: dict[Key, dict[str, str]] = {
            (row["row"], row["op"]): row
            for row in rows
            if is_usual(row)
            and row["allocator"] in ("devalloc", "none")
            and row["state"] == "warm"
            and row["check"] == "ok"
            and row["failures"] == "0"
        }

    def get(self, name: str, op: str, column: str = "median") -> float:
        row = self.rows.get((name, op))
        return number(row[column]) if row else math.nan


def spread(values: Sequence[float]) -> float:
    """The largest over the smallest; NaN if any is missing."""
    missing = not values or any(math.isnan(value) for value in values)
    return math.nan if missing else max(values) / min(values)


def largest_rise(values: Sequence[float]) -> float:
    """How many times more a later value is than an earlier one, at most; NaN if any is missing."""
    if not values or any(math.isnan(value) for value in values):
        return math.nan
    return max(max(values[i:]) / value for i, value in enumerate(values))


def per_request(times: Times, op: str) -> list[float]:
    """ms per request of 64 B, less the empty kernel, for each n from `FEWEST` to `MOST`."""
    empty = times.get("empty-0-1", "kernel")
    counts = [4**power for power in range(13) if FEWEST <= 4**power <= MOST]
    return [(times.get(f"thread-64-{n}", op) - empty) / n for n in counts]


def all_checks(rows: list[dict[str, str]]) -> list[Check]:
    """Every check, for malloc and for free."""
    times = Times(rows)
    found = []
    for op in ("alloc", "free"):
        costs = per_request(times, op)
        lanes = f"{op}, 64 B: time per request, {FEWEST:,} to {MOST:,} lanes"
        found.append(Check(f"{lanes}: largest / smallest", spread(costs), FLAT))
        found.append(Check(f"{lanes}: largest rise with the lanes", largest_rise(costs), FLAT))
        for size, n in ((64, 100_000), (1024, 16_384)):
            heaps = [times.get(f"heap-{size}-{n}-{heap}", op) for heap in HEAPS]
            text = f"{op}, {size} B: heaps of 64 MiB to 100 GiB: largest / smallest"
            found.append(Check(text, spread(heaps), FLAT))
        for size in (64, 1024):
            name = f"fill-{size}-100000"
            full = times.get(f"{name}-95", op) / times.get(f"{name}-0", op)
            found.append(Check(f"{op}, {size} B: 95 % full / empty", full, FULL))
            for level in (0, 50, 95):
                name = f"tail-{size}-100000-{level}"
                tail = times.get(name, op, "p99") / times.get(name, op)
                text = f"{op}, {size} B, {level} % full: p99 of 1000 rounds / median"
                found.append(Check(text, tail, TAIL))
    return found


def markdown(checks: list[Check]) -> str:
    """What holds as a number, and the rest one by one."""
    rest = [check for check in checks if check.verdict != "yes"]
    lines = [f"{len(checks) - len(rest)} of {len(checks)} limits hold{':' if rest else '.'}", ""]
    lines += [
        f"- {check.what}: {show(check.value)}, limit {check.limit} ({check.verdict})"
        for check in rest
    ]
    return "\n".join(lines).rstrip().replace("hold:", "hold. The others:")
