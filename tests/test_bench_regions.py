"""`devalloc bench regions` runs, and notices contents that did not come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import bench_regions
from benchmarks.results import read_rows

CPU = torch.device("cpu")


def run(tmp_path: Path) -> tuple[int, str, list[dict[str, str]]]:
    options = ["--device", "cpu", "--rounds", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(bench_regions.main, options)
    (path,) = tmp_path.glob("*.csv")
    return done.exit_code, done.output, read_rows(path)


def test_the_command_writes_rows(tmp_path: Path) -> None:
    code, output, rows = run(tmp_path)
    assert code == 0, output
    assert {row["check"] for row in rows} == {"ok"}
    assert {row["case"] for row in rows} == {"no backup", "cpu", "cpu, prepared", "replaced by 5 %"}
    assert all(float(row["median"]) > 0 for row in rows)
    ratios = [float(row["median"]) for row in rows if row["op"] == "host bytes / bytes"]
    assert ratios
    assert max(ratios) <= 1.01
    assert sum(row["op"] == "prepare" for row in rows) == 2
    # What compare --write-docs makes of them.
    shown = bench_regions.markdown(rows)
    assert "| case | operation | unit | 1 block | 20 blocks |" in shown
    assert shown.count("| cpu, prepared |") == 5
    assert "20 tensors of 1 MiB" in shown


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
