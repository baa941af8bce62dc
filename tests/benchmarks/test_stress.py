"""The stress run and the litmus tests do what they say, small; and they notice what is wrong."""

from __future__ import annotations

import csv
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.patches import Patch, patched_kernels
from benchmarks.results import ROOT, RowFile
from benchmarks.stress import bench_litmus, bench_sanitize, bench_stress, codes, plan
from benchmarks.stress.litmus import plan as litmus
from benchmarks.stress.litmus.run import buffered, hand_over, run_shape
from benchmarks.stress.run import Run, Violation
from devalloc.kernels import layout
from devalloc.sizes import CLASS_SIZES
from tests.conftest import ON_GPU

DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
TINY = plan.tiny(plan.STAGES)
PLENTY = TINY[0]


def phase(name: str) -> plan.Phase:
    found = [p for stage in TINY for p in stage.phases if p.name == name]
    return found[0]


# The stress run ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mixed-churn-128x4", "zeros", "realloc", "streams", "graph", "huge", "double-frees"]
)
def test_a_phase_settles_its_accounts(name: str) -> None:
    with Run(PLENTY, DEVICE, seed=3) as run:
        tally = run.phase(phase("small"), 0)
        assert tally.counts["mallocs"] > tally.counts["frees"] > 0
        tally = run.phase(phase(name), 0)
        assert tally.counts["mallocs"] > 0
        assert tally.counts["words"] > 0
        if name == "realloc":
            assert tally.counts["moves"] + tally.counts["stays"] > 0
        assert (tally.planted > 0) == (name == "double-frees")
        run.finish()


def test_a_full_heap_is_full_and_its_nulls_are_counted() -> None:
    with Run(TINY[1], DEVICE, seed=3) as run:
        tally = run.phase(phase("full-lanes"), 80)
        assert tally.counts["nulls"] > 0
        assert tally.operations >= 80
        run.finish()


def test_ballast_is_held_and_given_back() -> None:
    with Run(TINY[2], DEVICE, seed=3) as run:
        before = run.heap.stats().used
        run.phase(phase("ballast-lanes"), 0)
        assert run.heap.stats().peak > PLENTY.capacity * 0.7
        assert before == 0
        run.finish()


def test_size_codes_agree_with_the_classes() -> None:
    usable, classes = codes.usable_of_codes().tolist(), codes.class_of_codes().tolist()
    for nbytes, have, cls in zip(codes.bytes_of_codes(), usable, classes, strict=True):
        assert have >= nbytes
        if cls < len(CLASS_SIZES):
            assert have == CLASS_SIZES[cls]
        else:
            assert (nbytes > layout.MAX_SLOT.value, have % layout.PAGE_BYTES.value) == (True, 0)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("overflow", r"wrong tag at 0x[0-9a-f]+ .*word 0 should be 0x[0-9a-f]{16}, "
                     "is 0x000000000badf00d"),
        ("leak", "live blocks: the heap says [0-9]+, it was"),
        ("double-free", "double frees: the heap says 1, it was 0"),
    ],
)  # fmt: skip
def test_a_fault_of_the_user_is_reported(fault: str, found: str) -> None:
    with Run(PLENTY, DEVICE, seed=1) as run:
        run.phase(phase("small"), 0)
        run.plant(fault)
        with pytest.raises(Violation, match=found):
            run.phase(phase("mixed-churn-128x4"), 0)


MUTANTS = {
    "slots overlap": (
        "mixed-churn-64x2",
        Patch("layout.py", "<< PAGE_LOG2) + (granule << 4).to(tl.int64)",
              "<< PAGE_LOG2) + ((granule & -5) << 4).to(tl.int64)"),
        "wrong tag|live bits|overlap",
    ),
    "zeros leaves the last words": (
        "zeros",
        Patch("payload.py", "    words = (as_column(nbytes) + 15) >> 4 << 1\n"
              "    most = tl.max(tl.max(words, axis=1), axis=0)\n"
              "    step: tl.constexpr = 1024 // addr.shape[0]",
              "    words = ((as_column(nbytes) + 15) >> 4 << 1) - 1\n"
              "    most = tl.max(tl.max(words, axis=1), axis=0)\n"
              "    step: tl.constexpr = 1024 // addr.shape[0]"),
        "not zero",
    ),
    "realloc copies too little": (
        "realloc",
        Patch("api.py", "tl.where(new != 0, tl.minimum(have, nbytes), 0)",
              "tl.where(new != 0, tl.minimum(have, nbytes) - 16, 0)"),
        "lost by realloc",
    ),
    "a second free is accepted": (
        "double-frees",
        Patch("freeing.py", "wrong = (old & bit) ^ bit", "wrong = ((old & bit) ^ bit) & 0"),
        "audit|double frees",
    ),
    "slots that were freed stay in the account": (
        "small",
        Patch("freeing.py", "leave_account(heap, page, counts)",
              "leave_account(heap, page, counts * 0)"),
        "audit: H",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_of_the_heap_is_reported(name: str, tmp_path: Path) -> None:
    phases, patch, found = MUTANTS[name]
    folder = patched_kernels([patch], tmp_path)
    options = ["--device", "cuda" if ON_GPU else "cpu", "--operations", "1e6", "--out",
               str(tmp_path), "--phases", phases, "--kernels", str(folder)]  # fmt: skip
    done = CliRunner().invoke(bench_stress.main, options)
    assert done.exit_code == 1
    rows = list(csv.DictReader(next(tmp_path.glob("*.csv")).open()))
    assert rows[-1]["violations"] == "1"
    assert re.search(found, rows[-1]["check"]), rows[-1]["check"]


def test_the_command_writes_a_row_per_phase(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--phases", "double", "--out", str(tmp_path), "--seed", "9"]
    done = CliRunner().invoke(bench_stress.main, options)
    assert done.exit_code == 0, done.output
    assert "violations: 0" in done.output
    (file,) = tmp_path.glob("*.csv")
    rows = list(csv.DictReader(file.open()))
    assert [row["phase"] for row in rows] == ["double-frees", "finish"]
    assert [row["check"] for row in rows] == ["ok", "ok"]
    assert int(rows[0]["double_frees"]) > 0
    assert rows[0]["seed"] == "9"


def test_a_run_that_crashes_is_a_violation(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise SystemExit(4)")
    options = ["--device", "cpu", "--phases", "double", "--out", str(tmp_path),
               "--kernels", str(tmp_path / "kernels")]  # fmt: skip
    done = CliRunner().invoke(bench_stress.main, options)
    assert done.exit_code == 1
    assert "crash: exit status 4" in done.output


def test_a_run_that_hangs_is_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(bench_stress, "START_SECONDS", 2.0)
    options = ["--device", "cpu", "--phases", "double", "--out", str(tmp_path),
               "--kernels", str(tmp_path / "kernels")]  # fmt: skip
    done = CliRunner().invoke(bench_stress.main, options)
    assert done.exit_code == 1
    assert "hang: over 2 s" in done.output


def test_a_run_that_is_out_of_time_is_no_violation(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("import time\ntime.sleep(60)")
    options = ["--device", "cpu", "--phases", "double", "--out", str(tmp_path), "--budget", "2",
               "--kernels", str(tmp_path / "kernels")]  # fmt: skip
    done = CliRunner().invoke(bench_stress.main, options)
    assert done.exit_code == 3
    assert "violations: 0; out of time in start" in " ".join(done.output.split())
    assert "raise --budget" in done.output


def test_jobs_survive_their_journey() -> None:
    job = plan.Job(plan.STAGES, 10**9, 1, "cuda")
    assert plan.Job.from_dict(job.to_dict()) == job
    order = litmus.Job(litmus.HANDOVERS, litmus.SHAPES, 10**8, 1, "cuda")
    assert litmus.Job.from_dict(order.to_dict()) == order


def test_the_plan_covers_what_it_promises() -> None:
    assert {shape.warps for shape in plan.Job(plan.STAGES, 1, 1, "cuda").shapes()} == {
        1, 2, 4, 8, 16,
    }  # fmt: skip
    shares = sum(p.share for stage in plan.STAGES for p in stage.phases)
    assert shares >= 1.0
    assert all(p.sizes.last <= 22 for stage in plan.STAGES for p in stage.phases)


# Litmus --------------------------------------------------------------------------------------

FULL_JOB = litmus.Job(litmus.HANDOVERS, litmus.SHAPES, 0, 1, DEVICE.type)
# On a GPU every thread needs counters of its own, so programs stay as wide as they are.
JOB = FULL_JOB if ON_GPU else litmus.tiny(FULL_JOB)


@pytest.mark.parametrize("case", JOB.handovers, ids=lambda case: case.name)
def test_counters_of_blocks_add_up(case: litmus.Handover) -> None:
    outcome = hand_over(case, 0, DEVICE, seed=1)
    assert (outcome.check, outcome.forbidden) == ("ok", 0)
    assert outcome.instances == case.programs * max(case.lanes, 1) * case.rounds


@pytest.mark.parametrize("shape", JOB.shapes, ids=lambda shape: f"{shape.name}-{shape.order}")
def test_shapes_run(shape: litmus.Shape) -> None:
    outcome = run_shape(shape, 1, DEVICE)
    assert outcome.instances == shape.groups * shape.lanes * shape.turns
    if shape.order in litmus.MUST_HOLD or not ON_GPU:
        assert outcome.forbidden == 0


def test_forbidden_store_buffering_is_seen() -> None:
    """Turns 1, 2, 3 of one lane. Program 0 reads 0, 0, 3; program 1 reads 2, 2, 3: allowed. Had
    program 1 read 1 in its first turn, its write of 1 was not seen in turn 2, nor turn 2 by it."""
    allowed = torch.tensor([[[[0], [0], [3]]], [[[2], [2], [3]]]], dtype=torch.int32)
    assert buffered(allowed) == (0, 0)
    forbidden = allowed.clone()
    forbidden[1, 0, 0, 0] = 1
    assert buffered(forbidden) == (0, 1)


def test_overlapping_blocks_break_counters(tmp_path: Path) -> None:
    _phases, patch, _found = MUTANTS["slots overlap"]
    folder = patched_kernels([patch], tmp_path)
    case = next(case for case in JOB.handovers if case.name == "lanes-64")
    job = replace(JOB, handovers=(case,), shapes=(), variant="overlap", kernels=str(folder))
    table = bench_litmus.Table(RowFile(tmp_path, bench_litmus.COLUMNS), 200.0)
    table.run(job, 100.0)
    assert table.failed_variants == {"overlap"}


@pytest.mark.parametrize("name", litmus.WEAKENED)
def test_weakened_copies_still_apply(name: str, tmp_path: Path) -> None:
    folder = patched_kernels(litmus.WEAKENED[name], tmp_path)
    assert any(
        (folder / patch.file).read_text() != (ROOT / "kernels" / patch.file).read_text()
        for patch in litmus.WEAKENED[name]
    )


def test_only_fences_order() -> None:
    """So there is nothing else to weaken."""
    for path in (ROOT / "kernels").rglob("*.py"):
        assert set(re.findall(r"sem=([^,)\s]*)", path.read_text())) <= {'"relaxed"', "sem"}, path


def test_a_patch_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lines.py has 'no such text' 0 times, not 1"):
        patched_kernels([Patch("lines.py", "no such text", "")], tmp_path)


# The sanitizer -------------------------------------------------------------------------------

TOOL = """\
#!{python}
import sys
log = sys.argv[sys.argv.index("--log-file") + 1]
open(log, "w").write("========= ERROR SUMMARY: {errors} errors")
sys.exit({status})
"""


@pytest.mark.parametrize(("errors", "status", "code"), [(0, 0, 0), (3, bench_sanitize.FOUND, 1)])
def test_the_sanitizer_is_found_and_believed(
    errors: int, status: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(TOOL.format(python=sys.executable, errors=errors, status=status))
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    done = CliRunner().invoke(bench_sanitize.main, ["--tool", "memcheck"])
    assert done.exit_code == code
    assert f"{errors} errors" in done.output


def test_without_a_sanitizer_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_sanitize, "places", lambda: iter([""]))
    done = CliRunner().invoke(bench_sanitize.main, [])
    assert done.exit_code == bench_sanitize.MISSING
    assert "no compute-sanitizer" in done.output
