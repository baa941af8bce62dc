"""The benchmark of whole programs: its judgement, and that it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.arena import bench_process
from benchmarks.arena.bench_process import Found, ratios, verdict
from benchmarks.results import read_rows


def found(medians: list[float], losses: list[list[float]], left: int = 0) -> Found:
    return Found(medians, [1 << 30] * len(medians), losses, [left] * len(medians))


PLAIN = found([10.0, 20.0], [[1.0, 2.0], [1.0, 2.1]])


@pytest.mark.parametrize(
    ("losses", "left", "words"),
    [
        ([[1.0, 2.0]], 0, "ok"),
        ([[1.0, 2.05], [1.0, 2.15]], 0, "ok"),
        ([[1.0, 2.4]], 0, "losses differ by 0.3, PyTorch's own runs by 0.1"),
        ([[1.0, 2.0], [9.0, 2.0]], 0, "losses differ by 8"),
        ([[1.0, 2.0]], 512, "512 B left"),
    ],
)
def test_wrong_runs_are_noticed(losses: list[list[float]], left: int, words: str) -> None:
    assert verdict(found([11.0] * len(losses), losses, left), PLAIN).startswith(words)


def test_one_round_says_nothing_of_losses() -> None:
    one = found([10.0], [[1.0, 2.0]])
    assert verdict(one, one) == "losses not compared"


def test_ratios_are_those_of_a_round() -> None:
    assert ratios(found([11.0, 21.0], []), PLAIN) == [1.1, 1.05]
    assert ratios(found([11.0], []), PLAIN) == [1.1]


def test_it_runs_without_a_gpu(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--rounds", "2", "--out", str(tmp_path)]
    done = CliRunner().invoke(bench_process.main, options)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*.csv")
    rows = read_rows(path)
    steps = str(bench_process.TURNS * bench_process.STEPS)
    assert [(row["allocator"], row["n"], row["check"]) for row in rows] == [
        ("torch", steps, "ok")
    ] * 2
    assert "1.0000" in done.output
