"""`devalloc bench regions` runs, and notices contents that did not come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.arena import bench_regions
from benchmarks.results import read_rows

CPU = torch.device("cpu")


def run(tmp_path: Path, *more: str) -> tuple[int, str, list[dict[str, str]]]:
    options = ["--device", "cpu", "--rounds", "1", "--out", str(tmp_path), *more]
    done = CliRunner().invoke(bench_regions.main, options)
    (path,) = tmp_path.glob("*.csv")
    return done.exit_code, done.output, read_rows(path)


def test_the_command_writes_rows(tmp_path: Path) -> None:
    code, output, rows = run(tmp_path)
    assert code == 0, output
    assert {row["check"] for row in rows} == {"ok"}
    assert {row["case"] for row in rows} == {
        "host memory",
        "no backup",
        "cpu",
        "cpu, prepared",
        *(f"replaced by 5 %, {policy}" for policy in bench_regions.POLICIES),
    }
    assert all(float(row["median"]) > 0 for row in rows)
    ratios = [float(row["median"]) for row in rows if row["op"] == "host bytes / bytes"]
    assert ratios
    assert max(ratios) <= 1.01
    assert sum(row["op"] == "prepare" for row in rows) == 2
    kept = {row["case"]: float(row["median"]) for row in rows if row["op"] == "reserved / live"}
    plain, *expandable = (kept[f"replaced by 5 %, {policy}"] for policy in bench_regions.POLICIES)
    assert max(expandable) <= 1.1 < plain
    # What compare --write-docs makes of them.
    shown = bench_regions.markdown(rows)
    assert "| case | unit | prepare | first pause | later pauses | resume |" in shown
    assert "medians, for 1, 20 blocks." in shown
    assert shown.count("| cpu, prepared | GiB/s |") == 1
    assert "20 tensors of 16 MiB" in shown
    assert "1 under frugal, expandable." in shown
    assert "commit, 8 threads: " in shown


SAVER = """
from contextlib import contextmanager

class Saver:
    hook_mode = retain_cpu_backup = None
    @contextmanager
    def region(self, tag, enable_cpu_backup):
        assert tag == "measured" and self.hook_mode == "torch"
        yield
    def pause(self, tag):
        assert tag == "measured"
    resume = pause

torch_memory_saver = Saver()
"""


def test_another_allocator_is_measured_beside_ours(tmp_path: Path) -> None:
    package = tmp_path / "there"
    package.mkdir()
    (package / "torch_memory_saver.py").write_text(SAVER)
    code, output, rows = run(tmp_path, "--memory-saver", str(package))
    assert code == 0, output
    for case in ("no backup", "cpu", "cpu, kept"):
        found = [row for row in rows if row["case"] == f"torch_memory_saver, {case}"]
        assert {row["op"] for row in found} == {"first pause", "later pauses", "resume"}
        assert {row["blocks"] for row in found} == {"1", "20"}
    assert "| torch_memory_saver, cpu, kept | GiB/s |  |" in bench_regions.markdown(rows)
    (package / "torch_memory_saver.py").write_text(SAVER.replace("resume = pause", "resume = None"))
    code, output, _ = run(tmp_path / "again", "--memory-saver", str(package))
    assert code == 1
    assert "the worker with torch_memory_saver has ended" in output


def test_lost_contents_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume = bench_regions.Region.resume

    def damaged(self: bench_regions.Region) -> float:
        seconds = resume(self)
        self.tensors[0][-1] = 252
        return seconds

    monkeypatch.setattr(bench_regions.Region, "resume", damaged)
    code, output, rows = run(tmp_path)
    assert code == 1
    assert "cpu, 1 blocks: 1 of 1 blocks differ" in output
    assert any(row["check"] == "1 of 20 blocks differ" for row in rows)
