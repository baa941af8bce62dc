"""Every planted bug is found by its scenario, by the schedules that each change has to pass. One
that survives is a hole in the scenarios."""

from __future__ import annotations

import multiprocessing
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ON_GPU
from tests.interleaving import table, trial
from tests.interleaving.directed import NOT_REACHED
from tests.interleaving.lab import SHORT
from tests.interleaving.mutants import ALL, Mutant

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240

# Trials are forked from a process that has imported what is the same for all of them.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["greenlet", "torch", "triton.runtime.interpreter"])

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


class Done(NamedTuple):
    status: int | None
    output: str


def explore(folder: Path, scenario: str, *options: str) -> Done:
    """Run a trial with the device code of ``folder``, in a process of its own."""
    output = folder.with_name("output")
    arguments = [scenario, "--kernels", str(folder), *options]
    process = FORKSERVER.Process(target=trial.run, args=(arguments, output))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    return Done(process.exitcode, output.read_text())


def killed(mutant: Mutant, copy: Path) -> list[object]:
    """The row of a mutant, whose scenario must fail with the device code in ``copy``."""
    done = explore(copy, mutant.scenario, "--shrink", "0", "--scale", str(SHORT))
    assert done.status == trial.FAILED, (
        f"{mutant.name} survives {mutant.scenario}: {mutant.breaks}\n{done.output}"
    )
    assert NOT_REACHED not in done.output, done.output
    before = sum(int(count) for count in re.findall(r": (\d+) schedules", done.output))
    last = re.search(r"found by schedule (\d+) of", done.output)
    seconds = re.search(r"failed after ([\d.]+) s", done.output)
    assert last is not None
    assert seconds is not None
    assert 'replay("' in done.output
    return [mutant.name, mutant.scenario, before + int(last[1]), float(seconds[1])]


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(
    mutant: Mutant, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("mutant", killed(mutant, planted(mutant, tmp_path)))


def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    """What the mutants are compared with; and the copy is what runs."""
    plain = Mutant("none", "pages.py", "Owns the chunk words", "Owns", "nothing", "kept")
    folder = planted(plain, tmp_path)
    done = explore(folder, plain.scenario)
    assert done.status == 0, done.output
    (folder / "pages.py").write_text("raise ImportError('the copy')")
    broken = explore(folder, plain.scenario)
    assert broken.status == trial.RAISED
    assert "ImportError: the copy" in broken.output


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in ALL}) == len(ALL)


def test_the_table_is_what_was_recorded() -> None:
    recorded = {name: scenario for name, (scenario, _schedules) in table.killed().items()}
    assert recorded == {mutant.name: mutant.scenario for mutant in ALL}
    text = table.DOCUMENT.read_text()
    assert table.with_table(text) == text, "run: python -m tests.interleaving.table"
