"""The heap under every schedule that the plans of the scenarios choose.

A failure prints one line that replays it:
``python -m tests.interleaving.trial SCENARIO --replay "SCHEDULE"``.
``-m long`` explores whole plans; with ``DEVALLOC_SCHEDULES=100``, a hundred times as many.
"""

from collections.abc import Callable

import pytest

from devalloc import CorruptionError
from devalloc.testing import PCT, Interleaving, Run
from tests.conftest import ON_GPU
from tests.interleaving.lab import SCALE, SHORT, Laboratory, Scenario
from tests.interleaving.scenarios import ALL, BY_NAME, drawn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ON_GPU, reason="interleaves the programs of interpreted kernels"),
    pytest.mark.timeout(120 + 300 * SCALE),
]

Record = Callable[[str, object], None]


@pytest.mark.parametrize("scale", [SHORT, pytest.param(1.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.name)
def test_every_schedule_leaves_a_sound_heap(
    scenario: Scenario, scale: float, record_property: Record
) -> None:
    reports = list(scenario.explore(scale * SCALE))
    schedules = sum(report.schedules for report in reports)
    seconds = sum(report.seconds for report in reports)
    record_property(
        "schedules",
        f"{scenario.name:26} {schedules:9} {sum(report.steps for report in reports):9} "
        f"{sum(report.outcomes for report in reports):8} {schedules / seconds:10.0f}  "
        + ", ".join(report.strategy for report in reports if report.complete),
    )
    assert schedules >= len(scenario.plan)


@pytest.mark.parametrize(
    ("seeds", "scale"), [(6, SHORT), pytest.param(60, 1.0, marks=pytest.mark.long)]
)
def test_programs_drawn_at_random(seeds: int, scale: float) -> None:
    for seed in range(seeds):
        assert list(drawn(seed).explore(scale * SCALE))


def test_audit_in_the_middle_refuses_or_is_right() -> None:
    """While programs are inside malloc and free, an audit says that the heap is not at rest, or
    finds it consistent; it never changes what it refuses."""
    with Laboratory(BY_NAME["retire_or_reserve"]) as laboratory:
        heap = laboratory.heap
        seen = {"refused": 0, "sound": 0}

        def look(run: Run) -> None:
            before = heap.handle.clone()
            refusal = None
            try:
                heap.audit()
            except CorruptionError as error:
                refusal = str(error)
            seen["sound" if refusal is None else "refused"] += 1
            if refusal is not None:
                assert refusal.startswith(("H1", "H2", "H3", "H4"))
                assert heap.handle.equal(before)

        interleaving = Interleaving(
            laboratory.launch,
            check=laboratory.check,
            invariant=look,
            journal=laboratory.journal,
            memory=[(heap.base, heap.capacity)],
        )
        interleaving.explore(PCT(depth=3), 3)
    assert seen["refused"] > 10
    assert seen["sound"] > 10


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(ALL)
