"""The experiment in benchmarks/lines under every schedule that the plans of its scenarios choose;
and bugs planted in it, each of which is found.

A failure prints one line that replays it:
``python -m tests.interleaving.trial SCENARIO --replay "SCHEDULE"``.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ON_GPU
from tests.interleaving import lines_mutants, scenarios, test_mutants, trial
from tests.interleaving.lab import SCALE, SHORT
from tests.interleaving.lines_lab import LinesScenario
from tests.interleaving.lines_scenarios import ALL, BY_NAME, drawn
from tests.interleaving.mutants import Mutant

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ON_GPU, reason="interleaves the programs of interpreted kernels"),
    pytest.mark.timeout(120 + 300 * SCALE),
]

Record = Callable[[str, object], None]
LINES = test_mutants.ROOT / "benchmarks" / "lines"


@pytest.mark.parametrize("scale", [SHORT, pytest.param(1.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.name)
def test_every_schedule_leaves_sound_pages(
    scenario: LinesScenario, scale: float, record_property: Record
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


@pytest.mark.parametrize("mutant", lines_mutants.ALL, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(mutant: Mutant, tmp_path: Path, record_property: Record) -> None:
    copy = test_mutants.planted(mutant, tmp_path, LINES)
    record_property("mutant of lines", test_mutants.killed(mutant, copy))


def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    """What the mutants are compared with; and the copy is what runs."""
    plain = Mutant("none", "pages.py", "Owns the chunk words", "Owns", "nothing", "kept")
    folder = test_mutants.planted(plain, tmp_path, LINES)
    done = test_mutants.explore(folder, plain.scenario)
    assert done.status == 0, done.output
    (folder / "pages.py").write_text("raise ImportError('the copy')")
    broken = test_mutants.explore(folder, plain.scenario)
    assert broken.status == trial.RAISED
    assert "ImportError: the copy" in broken.output


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(ALL)
    assert not BY_NAME.keys() & scenarios.BY_NAME.keys()
    assert len({mutant.name for mutant in lines_mutants.ALL}) == len(lines_mutants.ALL)
