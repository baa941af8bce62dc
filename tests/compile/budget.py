"""The committed limits of budget.json, and how a measurement is compared with them.

Atomics, spills, stack and shared memory are limited to what was measured. Registers get slack,
because they move by a few with every compiler: up to the next multiple of eight, and eight more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BUDGET = Path(__file__).with_name("budget.json")
REGISTER_STEP = 8

Limits = dict[str, int]


def limits_of(row: dict[str, Any]) -> Limits:
    """Return the limits that a measured row asks for."""
    steps = -(-row["registers"] // REGISTER_STEP) + 1
    return {
        "atomics": sum(row["atomics"].values()),
        "registers": steps * REGISTER_STEP,
        "spill_bytes": row["spill_bytes"],
        "cold_spill_bytes": row["cold_spill_bytes"],
        "stack_bytes": row["stack_bytes"],
        "shared_bytes": row["shared_bytes"],
    }


def excess(row: dict[str, Any], limits: Limits) -> list[str]:
    """Return one line for every limit that a measured row exceeds."""
    found = {**row, "atomics": sum(row["atomics"].values())}
    return [
        f"{name}: {found[name]}, budget {limit}"
        for name, limit in limits.items()
        if found[name] > limit
    ]


def load() -> dict[str, Limits]:
    return json.loads(BUDGET.read_text())


def save(budget: dict[str, Limits]) -> None:
    """Write one line per case, so that a diff shows which cases changed."""
    lines = [f"  {json.dumps(key)}: {json.dumps(budget[key])}" for key in sorted(budget)]
    BUDGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")
