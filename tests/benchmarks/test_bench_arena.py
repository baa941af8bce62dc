"""The arena benchmark runs, and notices losses that differ and memory that is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import devalloc
from benchmarks.arena import bench_arena
from benchmarks.arena import pairs as arena_pairs
from benchmarks.arena import scale as arena_scale
from benchmarks.arena import training as arena_training
from benchmarks.arena.training import TINY, ArenaPlace, PytorchPlace
from benchmarks.harness import WrongResult
from benchmarks.results import read_rows

CPU = torch.device("cpu")


class Twin(PytorchPlace):
    """Another place, with the same memory."""

    name = "twin"


def test_the_command_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":0:0"))
    options = ["--device", "cpu", "--rounds", "2", "--turns", "64", "--out", str(tmp_path)]
    done = CliRunner().invoke(bench_arena.main, options)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*.csv")
    rows = read_rows(path)
    assert {row["check"] for row in rows} == {"ok"}
    assert all(row["commit"] and row["torch"] == torch.__version__ for row in rows)
    found = {(row["pattern"], row["allocator"], row["op"]) for row in rows}
    expected = {("training", "torch", "step"), ("part", "devalloc", "part")}
    for pattern in arena_pairs.PATTERNS:
        expected |= {(pattern, name, "pair") for name in ("torch", "devalloc")}
        expected.add((pattern, "devalloc", "ratio"))
    assert expected <= found
    assert all(float(row["median"]) > 0 for row in rows if row["op"] in ("step", "pair", "part"))


def test_two_places_take_turns() -> None:
    order: list[str] = []

    class First(PytorchPlace):
        def inside(self) -> Any:
            order.append(self.name)
            return super().inside()

    class Second(First):
        name = "second"

    found = arena_training.compare(TINY, CPU, [First, Second], rounds=2)
    assert order == ["torch", "second", "second", "torch", "torch", "second"]
    samples = {(name, each.op): each for name, both in found for each in both}
    assert len(samples["torch", "step"].values) == 2
    assert ("torch", "ratio") not in samples
    (ratio, other) = samples["second", "ratio"].values
    steps = [samples[name, "step"].values for name in ("second", "torch")]
    assert [ratio, other] == [ours / theirs for ours, theirs in zip(*steps, strict=True)]


def test_a_loss_that_differs_by_a_bit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = arena_training._step
    calls: list[float] = []

    def wrong(*arguments: Any) -> float:
        calls.append(right(*arguments))
        # The last step of the second run.
        return calls[-1] * (1 + 2**-50) if len(calls) == 2 * TINY.steps else calls[-1]

    monkeypatch.setattr(arena_training, "_step", wrong)
    with pytest.raises(WrongResult, match=f"step {TINY.steps - 1} of twin"):
        arena_training.compare(TINY, CPU, [PytorchPlace, Twin], rounds=1)


class FakeArena:
    """What `ArenaPlace` asks of an arena, on a machine without a GPU."""

    def __init__(self, freed: int) -> None:
        self.freed = freed

    def empty_cache(self) -> None:
        pass

    def close(self) -> None:
        pass

    def stats(self) -> dict[str, int]:
        return {
            "outside_segment.allocated": 5,
            "outside_segment.freed": self.freed,
            "outside_bytes.current": (5 - self.freed) * 1024,
            "reserved_bytes.all.current": 0,
        }


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ArenaPlace]:
    def make(freed: int = 5, segments: tuple[tuple[int, tuple[int, int]], ...] = ()) -> ArenaPlace:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(devalloc, "Arena", lambda *_, **__: FakeArena(freed))
        monkeypatch.setattr(
            torch.cuda,
            "memory_snapshot",
            lambda: [
                {"address": at, "total_size": 1 << 20, "segment_pool_id": pool}
                for at, pool in segments
            ],
        )
        return ArenaPlace(torch.device("cuda", 0))

    return make


def test_memory_that_is_left_is_noticed(place: Callable[..., ArenaPlace]) -> None:
    place().end()
    with pytest.raises(WrongResult, match="1024 B are left: 5 segments taken, 4 given back"):
        place(freed=4).end()


def test_memory_past_the_arena_is_noticed(place: Callable[..., ArenaPlace]) -> None:
    tensor = torch.empty(10)
    at = tensor.data_ptr()
    place(segments=((at - 100, (0, 1)),)).require_all_inside([tensor])
    with pytest.raises(WrongResult, match="lies outside"):
        place(segments=((at - 100, (0, 0)),)).require_all_inside([tensor])
    begun = place()
    place(segments=((1 << 40, (0, 0)),))
    with pytest.raises(WrongResult, match="past the arena"):
        begun.require_all_inside([])


@pytest.mark.proves("library/pytorch-s")
@pytest.mark.gpu
def test_on_the_gpu_training_inside_an_arena_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cuda", torch.cuda.current_device())
    found = dict(arena_training.compare(TINY, device, [PytorchPlace, ArenaPlace], rounds=1))
    segments = {each.op: each.values for each in found["devalloc"]}
    assert segments["segments"][0] > 0


def test_scale_rows_need_no_gpu_and_lie_apart(tmp_path: Path) -> None:
    options = ["--only", "scale", "--rounds", "2", "--blocks", "200", "--out", str(tmp_path)]
    done = CliRunner().invoke(bench_arena.main, options)
    assert done.exit_code == 0, done.output
    assert not list(tmp_path.glob("*.csv"))
    (path,) = (tmp_path / "scale").glob("*.csv")
    rows = read_rows(path)
    assert {row["pattern"] for row in rows} == {"scale"}
    assert {int(row["n"]) for row in rows} == {100, 200}
    assert {row["row"].split("-", 1)[1].rpartition("-")[0] for row in rows} == set(
        arena_scale.CASES
    )
    assert all(float(row["median"]) > 0 and row["gpu"] != "interpreter" for row in rows)


def test_a_cache_that_fails_its_audit_is_noticed() -> None:
    def torn(count: int) -> arena_scale.Timed:
        timed = arena_scale.CASES["same-size"].make(count)
        timed.cache._store.reserved += 1
        return timed

    with pytest.raises(WrongResult, match="C3"):
        arena_scale.measure(arena_scale.CASES["free"]._replace(make=torn), 100, 1)
