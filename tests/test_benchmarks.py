"""The benchmarks run, and notice what is wrong: tiny versions of all workloads."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks import bench_device, compare, harness, rows, runners
from benchmarks.compare import Results, peer_values
from benchmarks.results import RowFile, newest, read_rows
from benchmarks.rows import Row
from benchmarks.worker import Job, failed_record

BASE, CAPACITY = 1 << 20, 1 << 20
SIZES = [64, 100, 4096, 16]
ADDRS = [BASE, BASE + 64, BASE + 4096, BASE + 8192]


@pytest.fixture(scope="module")
def bench(device: str) -> Iterator[runners.Bench]:
    place = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    with runners.Bench(place, 16 << 20, rounds=1, seed=1) as bench:
        yield bench


TINY = {row.pattern: rows.shrink(row) for row in rows.all_rows() if row.size in (0, 64, 4096)}
TINY |= {
    row.pattern: rows.shrink(row) for row in rows.all_rows() if row.pattern in ("cta", "create")
}


@pytest.mark.parametrize("pattern", sorted(runners.RUNNERS))
def test_a_workload_runs_and_leaves_the_heap_whole(bench: runners.Bench, pattern: str) -> None:
    for samples in bench.run(TINY[pattern]):
        record = samples.record()
        assert record["check"] == "ok"
        assert samples.failures == 0 or pattern == "oom"
        assert math.isfinite(float(str(record["median"])))
    rest = bench.at_rest()
    assert (rest.check, rest.values) == ("ok", [1.0])


def test_at_rest_notices_what_was_not_freed(bench: runners.Bench) -> None:
    bench.heap.malloc([64])
    assert "used" in bench.at_rest().check


def test_at_rest_notices_a_recorded_error(bench: runners.Bench) -> None:
    bench.heap.free([bench.heap.base])
    assert "double free" in bench.at_rest().check


# Verification


def verdict(addrs: list[int], sizes: list[int]) -> harness.Verdict:
    return harness.verify(torch.tensor(addrs), torch.tensor(sizes), BASE, CAPACITY)


def test_right_allocations_pass() -> None:
    assert verdict(ADDRS, SIZES).ok
    assert harness.verify(torch.tensor(ADDRS), 64, BASE, CAPACITY).ok


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({1: 0}, "1 nulls"),
        ({1: BASE + 48}, "1 overlaps"),
        ({1: BASE}, "1 overlaps"),
        ({3: BASE + CAPACITY}, "1 outside"),
        ({0: BASE - 64}, "1 outside"),
        ({3: BASE + 8200}, "1 misaligned"),
        ({2: BASE + 2048}, "1 misaligned"),
    ],
)
def test_a_planted_fault_is_found(change: dict[int, int], found: str) -> None:
    addrs = [change.get(i, addr) for i, addr in enumerate(ADDRS)]
    assert str(verdict(addrs, SIZES)) == found
    with pytest.raises(harness.WrongResult, match=found):
        harness.require(verdict(addrs, SIZES))


def test_an_allocator_that_hands_out_a_block_twice_is_not_timed(bench: runners.Bench) -> None:
    addrs = bench.addresses(4)
    twice = torch.tensor([0, 64, 64, 128], device=bench.device) + bench.heap.base
    with pytest.raises(harness.WrongResult, match="1 overlaps"):
        runners.alloc_then_free(bench, addrs, 64, lambda: addrs.copy_(twice), lambda: None)


def test_an_allocator_that_stores_nothing_is_not_timed(bench: runners.Bench) -> None:
    with pytest.raises(harness.WrongResult, match="4 nulls"):
        runners.alloc_then_free(bench, bench.addresses(4), 64, lambda: None, lambda: None)


# The command


def run_command(folder: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(
        bench_device.main, ["--device", "cpu", "--out", str(folder), *options]
    )
    return done.exit_code, done.output


def test_the_command_writes_rows_with_provenance(tmp_path: Path) -> None:
    status, output = run_command(tmp_path, "--rows", "^(empty-0-1|latency-64-)")
    assert status == 0, output
    (path,) = tmp_path.glob("*-interpreter-*.csv")
    found = read_rows(path)
    assert [row["row"] for row in found if row["op"] == "kernel"] == [
        "empty-0-1",
        "empty-0-40",
        "latency-64-4",
    ]
    assert all(row["check"] == "ok" and row["triton"] and row["date"] for row in found)
    assert [row["median"] for row in found if row["op"] == "at_rest"] == ["1.000000"] * 2
    with pytest.raises(FileNotFoundError):
        newest(tmp_path)  # times of the interpreter are no results


def test_a_row_that_hangs_is_recorded_and_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = (
        "import json, sys, time\n"
        "job = json.load(sys.stdin)\n"
        "for row in job['rows']:\n"
        "    key = '{pattern}-{size}-{n}@{lanes}x{warps}'.format(**row)\n"
        "    print(json.dumps({'begin': key}), flush=True)\n"
        "    if row['size'] == 16: time.sleep(60)\n"
        "    if row['size'] == 64: sys.exit(7)\n"
        "    record = json.loads(sys.argv[1]) | {'row': key, 'check': 'ok', 'failures': 0}\n"
        "    print(json.dumps({'row': record}), flush=True)\n"
    )
    source = {"gpu": "fake", "date": "2000-01-01", "commit": "0"}
    template = failed_record(Row("thread", 0, 0, 1, 1), "") | source
    real = bench_device.subprocess.Popen

    def start(_command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", fake, json.dumps(template)], **options)

    monkeypatch.setattr(bench_device.subprocess, "Popen", start)
    monkeypatch.setattr(bench_device, "START_SECONDS", 2.0)
    job = Job(tuple(rows.make("thread", size, 8) for size in (16, 32, 64, 128)), "cpu", 1, 1, 1)
    file = RowFile(tmp_path)
    measurement = bench_device.Measurement(job, file, row_seconds=2.0, budget=60.0)
    measurement._source = dict(source)
    measurement.run()
    assert file.path is not None
    checks = [row["check"] for row in read_rows(file.path)]
    assert checks == ["hang: over 2 s", "ok", "crash: exit status 7", "ok"]
    assert not measurement.pending


def test_a_spent_budget_leaves_rows_unmeasured(tmp_path: Path) -> None:
    status, output = run_command(tmp_path, "--rows", "^empty", "--budget", "0")
    assert status == 0
    assert "not measured" in output


@pytest.mark.parametrize("pattern", ["no-such-row", "("])
def test_a_pattern_without_rows_is_refused(tmp_path: Path, pattern: str) -> None:
    assert run_command(tmp_path, "--rows", pattern)[0] == 2


# The tables


def test_every_target_is_measured_and_every_key_is_unique() -> None:
    plan = rows.all_rows()
    assert len({row.key for row in plan}) == len(plan)
    assert {line["row"] for line in read_rows(compare.TARGETS)} <= {row.name for row in plan}
    assert {row.name for row in plan} >= rows.QUICK


def test_the_best_peer_is_one_that_finished() -> None:
    peers = read_rows(compare.PEERS)
    best = {
        name: compare.best(peer_values(peers, row, op), higher)
        for name, row, op, higher in (
            ("alloc", "thread-64-1000000", "alloc", False),
            ("free", "thread-1024-1000000", "free", False),
            ("oom", "oom-1024-10000", "utilisation", True),
            ("frag", "frag-4096-100000", "span", False),
            ("none", "thread-48-7", "alloc", False),
        )
    }
    assert best["alloc"] == (pytest.approx(0.0588, abs=1e-4), "scatter")
    assert best["free"] == (pytest.approx(0.0184, abs=1e-4), "gallatin")
    assert best["oom"] == (0.75, "gallatin")
    assert best["frag"][0] == pytest.approx(1.36, abs=0.01)
    assert best["none"][1] == "-"


def our_row(row: Row, op: str, median: float) -> dict[str, str]:
    numbers = {"op": op, "median": median, "max": 2 * median, "failures": 0}
    return {key: str(value) for key, value in (failed_record(row, "ok") | numbers).items()}


def test_the_launch_is_added_and_never_subtracted() -> None:
    ours = [
        our_row(rows.make("empty", 0, 1), "kernel", 0.002),
        our_row(rows.make("thread", 64, 1), "alloc", 0.004),
        our_row(rows.make("frag", 4096, 100_000), "span", 1.05),
    ]
    assert Results(ours, (128, 1), 0.005).value("thread-64-1", "alloc") == pytest.approx(0.007)
    assert Results(ours, (128, 1), 0.001).value("thread-64-1", "alloc") == pytest.approx(0.004)
    assert Results(ours, (128, 1), 0.005).value("frag-4096-100000", "span") == pytest.approx(2.1)
    assert math.isnan(Results(ours, (256, 2), 0.005).value("thread-64-1", "alloc"))


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, True),
        ({"median": "0.5"}, False),
        ({"check": "1 overlaps"}, False),
        ({"failures": "3"}, False),
    ],
)
def test_a_target_is_met_only_by_a_clean_row(changes: dict[str, str], met: bool) -> None:
    row = rows.make("thread", 64, 1_000_000)
    target = {"row": row.name, "op": "alloc", "target": "0.015", "unit": "ms", "better": "lower"}
    results = Results([our_row(row, "alloc", 0.014) | changes], (128, 1))
    (line,) = compare.compare(results, read_rows(compare.PEERS), [target])
    assert line.met is met
    assert f"| {'yes' if met else 'no'} |" in compare.markdown([line], [])


def test_a_row_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    rows_option = "^(empty-0-1|thread-4096-100000)@128"
    status, output = run_command(tmp_path, "--rows", rows_option, "--heap", "128KiB")
    assert status == 0, output
    assert "1 rows need more" in output


def test_the_width_table_shows_what_went_wrong() -> None:
    row = rows.make("thread", 64, 1)
    ours = [our_row(row, "alloc", 0.25), our_row(rows.make("thread", 64, 1, (256, 2)), "alloc", 1)]
    ours[1]["check"] = "hang: over 90 s"
    assert "| thread-64-1 | alloc | - | 0.25 | hang: over 90 s |  |" in compare.width_table(ours)


def test_the_block_in_a_document_is_replaced(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text("before\n<!-- table:x -->\nold\n<!-- /table:x -->\nafter\n")
    compare.write_block(document, "x", "new")
    assert document.read_text() == "before\n<!-- table:x -->\nnew\n<!-- /table:x -->\nafter\n"
    document.write_text("no markers")
    with pytest.raises(compare.click.ClickException):
        compare.write_block(document, "x", "new")
