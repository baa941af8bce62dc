"""Every planted bug is found by its scenario. One that survives is a hole in the scenarios."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ON_GPU
from tests.interleaving import table, trial
from tests.interleaving.directed import NOT_REACHED
from tests.interleaving.mutants import ALL, Mutant

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ON_GPU, reason="interleaves the programs of interpreted kernels"),
]


def planted(mutant: Mutant, folder: Path) -> Path:
    """A copy of kernels/ with the bug in it."""
    copy = folder / "kernels"
    shutil.copytree(ROOT / "kernels", copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / mutant.file
    source = file.read_text()
    assert source.count(mutant.old) == 1, (
        f"{mutant.name}: its text occurs {source.count(mutant.old)} times in {mutant.file}"
    )
    changed = source.replace(mutant.old, mutant.new)
    compile(changed, file, "exec")
    file.write_text(changed)
    return copy


def explore(scenario: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.interleaving.trial", scenario, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(
    mutant: Mutant, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    done = explore(mutant.scenario, "--kernels", str(planted(mutant, tmp_path)))
    assert done.returncode == trial.FAILED, (
        f"{mutant.name} survives {mutant.scenario}: {mutant.breaks}\n{done.stdout}{done.stderr}"
    )
    assert NOT_REACHED not in done.stdout, done.stdout
    before = sum(int(count) for count in re.findall(r": (\d+) schedules", done.stdout))
    last = re.search(r"found by schedule (\d+) of", done.stdout)
    seconds = re.search(r"failed after ([\d.]+) s", done.stdout)
    assert last is not None
    assert seconds is not None
    assert 'replay("' in done.stdout
    schedules = before + int(last[1])
    record_property("mutant", [mutant.name, mutant.scenario, schedules, float(seconds[1])])


def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    """What the mutants are compared with; and the copy is what runs."""
    plain = Mutant("none", "bits.py", "Owns no state. ", "", "nothing", "double_free_of_a_run")
    folder = planted(plain, tmp_path)
    done = explore(plain.scenario, "--kernels", str(folder), "--scale", "0.05")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "pages.py").write_text("raise ImportError('the copy')")
    broken = explore(plain.scenario, "--kernels", str(folder), "--scale", "0.05")
    assert broken.returncode != 0
    assert "the copy" in broken.stderr


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in ALL}) == len(ALL)


def test_the_table_is_what_was_recorded() -> None:
    recorded = {name: scenario for name, (scenario, _schedules) in table.killed().items()}
    assert recorded == {mutant.name: mutant.scenario for mutant in ALL}
    text = table.DOCUMENT.read_text()
    assert table.with_table(text) == text, "run: python -m tests.interleaving.table"
