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

import devalloc
from benchmarks import child, harness
from benchmarks.device import bench_device, cuda_malloc, plan, runners, space, sweeps
from benchmarks.device.bench import Bench, Trial, alloc_then_free, nothing, rest_of
from benchmarks.device.plan import Row
from benchmarks.device.worker import Job, failed_record
from benchmarks.results import RowFile, newest, read_rows
from benchmarks.tables import comparison

BASE, CAPACITY = 1 << 20, 1 << 20
SIZES = [64, 100, 4096, 16]
ADDRS = [BASE, BASE + 64, BASE + 4096, BASE + 8192]


@pytest.fixture(scope="module")
def bench(device: str) -> Iterator[Bench]:
    place = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    # On a GPU beside other tests, the host is too slow for some samples.
    with Bench(place, 16 << 20, rounds=1 if device == "cpu" else 10, seed=1) as bench:
        yield bench


ALL = plan.rows_of(plan.GROUPS)
TINY = {
    row.pattern: plan.shrink(row)
    for row in ALL
    if row.allocator in ("devalloc", "none") and row.param != 99  # a full heap is searched slowly
}
TINY["bump"] = plan.shrink(plan.make("thread", 64, 100, allocator="bump"))
TINY["cold"] = plan.shrink(plan.make("thread", 64, 100, state="cold"))


@pytest.mark.parametrize("pattern", sorted({*runners.RUNNERS, "bump", "cold"}))
def test_a_workload_runs_and_leaves_the_heap_whole(bench: Bench, pattern: str) -> None:
    for samples in runners.run(bench, TINY[pattern]):
        record = samples.record()
        assert record["check"] == "ok"
        assert samples.failures == 0 or pattern == "oom"
        assert math.isfinite(float(str(record["median"])))
    rest = bench.at_rest()
    assert (rest.check, rest.values) == ("ok", [1.0])


OPS = {
    "shape": ["alloc", "free", "span", "touched", "largest", "largest_after"],
    "live": ["chunks"],
    "runs": ["filled"],
    "failing": ["alloc"],
}


@pytest.mark.parametrize("pattern", OPS)
def test_the_rows_of_space_measure_what_they_say(bench: Bench, pattern: str) -> None:
    found = {samples.op: samples for samples in runners.run(bench, TINY[pattern])}
    assert list(found) == OPS[pattern]
    if pattern == "shape":
        assert found["span"].values[0] >= 1
        assert 0 < found["largest"].values[0] <= 1
        assert found["largest_after"].values[0] >= found["largest"].values[0]
    if pattern == "live":
        assert set(found["chunks"].values) == {1.0}
    if pattern == "runs":
        assert 0.9 <= found["filled"].values[0] <= 1


def test_a_request_that_succeeds_in_a_full_heap_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "scalar_launch", lambda *_: nothing)
    (samples,) = runners.run(bench, TINY["failing"])
    assert "got a block of a full heap" in samples.check


def test_the_largest_block_is_found_by_trying() -> None:
    with devalloc.Heap("1MiB") as heap:
        assert space.largest_block(heap) == 1 << 20
        addr = heap.malloc([6 << 16])
        assert space.largest_block(heap) == 10 << 16
        heap.free(addr)
        heap.check()


def test_old_rows_of_scalars_have_their_name_of_today(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("row,pattern,lanes\nwarp-64-10,warp,1\nwarp-64-10,warp,256\n")
    assert [row["row"] for row in read_rows(file)] == ["scalar-64-10", "warp-64-10"]


def test_at_rest_notices_what_was_not_freed(bench: Bench) -> None:
    bench.heap.malloc([64])
    assert "used" in bench.at_rest().check


def test_a_debug_heap_at_rest() -> None:
    with devalloc.Heap("1MiB", debug=True) as heap:
        assert rest_of(heap).check == "ok"


def test_at_rest_notices_a_recorded_error(bench: Bench) -> None:
    bench.heap.free([bench.heap.base])
    assert "double free" in bench.at_rest().check


# Verification


def verdict(addrs: list[int], sizes: list[int]) -> harness.Verdict:
    return harness.verify(torch.tensor(addrs), torch.tensor(sizes), BASE, CAPACITY)


def trial(bench: Bench, malloc: Any) -> Trial:
    return Trial(bench.heap.base, bench.heap.capacity, malloc, free=nothing)


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


def test_an_allocator_that_hands_out_a_block_twice_is_not_timed(bench: Bench) -> None:
    addrs = bench.addresses(4)
    twice = torch.tensor([0, 64, 64, 128], device=bench.device) + bench.heap.base
    with pytest.raises(harness.WrongResult, match="1 overlaps"):
        alloc_then_free(bench, trial(bench, lambda: addrs.copy_(twice)), addrs, 64)


def test_an_allocator_that_stores_nothing_is_not_timed(bench: Bench) -> None:
    with pytest.raises(harness.WrongResult, match="4 nulls"):
        alloc_then_free(bench, trial(bench, nothing), bench.addresses(4), 64)


def test_an_allocator_that_hands_out_what_lives_is_not_timed(bench: Bench) -> None:
    addrs = bench.addresses(2)
    given = torch.tensor([0, 64], device=bench.device) + bench.heap.base
    with pytest.raises(harness.WrongResult, match="1 overlaps"):
        alloc_then_free(bench, trial(bench, lambda: addrs.copy_(given)), addrs, 64, live=given[1:])


def test_a_fill_row_that_cannot_fit_is_not_timed(bench: Bench) -> None:
    row = plan.make("fill", 64, bench.fill_slots, param=50)
    free = bench.fill_slots // 2
    with pytest.raises(harness.WrongResult, match=f"do not fit: {free} slots are free"):
        runners.run(bench, row)


@pytest.mark.parametrize("level", [0, 50, 95])
def test_the_fill_level_is_exact(bench: Bench, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def look(_bench: Bench, _trial: Trial, _out: Any, size: int, _rounds: Any, live: Any) -> Any:
        seen.append(live.numel() * size)
        return []

    monkeypatch.setattr(sweeps, "alloc_then_free", look)
    runners.run(bench, plan.shrink(plan.make("fill", 1024, 100, param=level)))
    assert seen == [bench.fill_slots * level // 100 * 1024]


def test_only_many_samples_have_a_tail() -> None:
    few, many = harness.Samples("alloc", [1.0] * 10), harness.Samples("alloc", list(range(101)))
    assert (few.record()["p99"], many.record()["p99"]) == ("", "99.000000")
    assert "heap_bytes" not in few.record()


# CUDA's own malloc


def test_the_cuda_baseline_compiles_for_the_device() -> None:
    try:
        binary = cuda_malloc.compile_source(cuda_malloc.SOURCE, "sm_90")
    except cuda_malloc.NotAvailable as error:
        pytest.skip(str(error))
    assert binary.startswith(b"\x7fELF")
    assert all(name.encode() in binary for name in cuda_malloc.KERNELS)
    with pytest.raises(RuntimeError, match="nonsense"):
        cuda_malloc.compile_source("nonsense", "sm_90")


@pytest.mark.gpu
def test_the_cuda_baseline_is_measured(tmp_path: Path) -> None:
    wanted = (("thread", 1), ("thread", 1000), ("latency", 10))
    chosen = tuple(plan.make(pattern, 64, n, allocator="cuda") for pattern, n in wanted)
    job = Job(chosen, "cuda", 64 << 20, 3, 1)
    file = RowFile(tmp_path)
    bench_device.Measurement(job, file, row_seconds=60.0, budget=120.0).run()
    assert file.path is not None
    found = read_rows(file.path)
    assert {(row["check"], row["failures"], row["allocator"]) for row in found} == {
        ("ok", "0", "cuda")
    }
    assert [row["op"] for row in found] == ["alloc", "free", "alloc", "free", "kernel"]


# The command


def run_command(folder: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(
        bench_device.main, ["--device", "cpu", "--out", str(folder), *options]
    )
    return done.exit_code, done.output


def test_the_command_writes_rows_with_provenance(tmp_path: Path) -> None:
    status, output = run_command(tmp_path, "--rows", "^(empty-0-1|scalar-64-|latency-64-)")
    assert status == 0, output
    (path,) = tmp_path.glob("*-interpreter-*.csv")
    found = read_rows(path)
    assert [row["row"] for row in found if row["op"] == "kernel"] == [
        "empty-0-5",
        "empty-0-1",
        "empty-0-40",
        "latency-64-4",
    ]
    assert all(row["check"] == "ok" and row["triton"] and row["date"] for row in found)
    assert {row["median"] for row in found if row["op"] == "at_rest"} == {"1.000000"}
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
    real = child.subprocess.Popen

    def start(_command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", fake, json.dumps(template)], **options)

    monkeypatch.setattr(child.subprocess, "Popen", start)
    monkeypatch.setattr(bench_device, "START_SECONDS", 2.0)
    job = Job(tuple(plan.make("thread", size, 8) for size in (16, 32, 64, 128)), "cpu", 1, 1, 1)
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


BEGIN = json.dumps({"begin": "thread-64-8@32x1"})


@pytest.mark.parametrize("said", ["", f"print({BEGIN!r}, flush=True)"], ids=["silent", "begun"])
def test_a_budget_that_ends_within_the_first_row_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    real = child.subprocess.Popen

    def start(_command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", f"import time\n{said}\ntime.sleep(60)"], **options)

    monkeypatch.setattr(child.subprocess, "Popen", start)
    job = Job((plan.make("thread", 64, 8),), "cpu", 1, 1, 1)
    measurement = bench_device.Measurement(job, RowFile(tmp_path), row_seconds=60.0, budget=1.0)
    measurement.run()
    assert measurement.pending == list(job.rows)


@pytest.mark.parametrize("pattern", ["no-such-row", "("])
def test_a_pattern_without_rows_is_refused(tmp_path: Path, pattern: str) -> None:
    assert run_command(tmp_path, "--rows", pattern)[0] == 2


def test_a_row_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    rows_option = "^(empty-0-1|thread-4096-100000)@128x1$"
    status, output = run_command(tmp_path, "--rows", rows_option, "--heap", "128KiB")
    assert status == 0, output
    assert "1 rows need more" in output


# The plan


def test_every_target_is_measured_and_every_key_is_unique() -> None:
    assert len({row.key for row in ALL}) == len(ALL)
    targets = {row.name for row in plan.target_rows()}
    assert {line["row"] for line in read_rows(comparison.TARGETS)} <= targets
    assert targets >= plan.QUICK


def test_the_sweeps_span_what_they_should() -> None:
    assert {1, 16_384, 16_777_216} <= {row.n for row in plan.n_rows()}
    assert {row.size for row in plan.size_rows()} >= {16, 1 << 20}
    assert [row.param for row in plan.fill_rows()][:7] == [0, 25, 50, 75, 90, 95, 99]
    assert {row.param for row in plan.heap_rows()} >= {64 << 20, 100 << 30}
    assert {row.warps for row in plan.warps_rows()} == {1, 2, 4, 8, 16}
    assert {row.param for row in plan.streams_rows()} == {1, 2, 4, 8}
    assert {row.param for row in plan.tail_rows()} == {0, 50, 95}
    assert {row.pattern for row in plan.space_rows()} == plan.SPACE
    for row in [*plan.fill_rows(), *plan.tail_rows()]:
        assert plan.FILL_SLOTS * (100 - (row.param or 0)) // 100 >= row.n


def test_cuda_rows_come_last_and_in_a_child_of_their_own() -> None:
    children = [row.child for row in ALL]
    assert children == sorted(children, reverse=True)
    assert set(children) == {"devalloc", "debug", "cuda"}


def test_one_small_row_per_kernel_is_compiled_ahead() -> None:
    ahead = plan.compile_only(ALL)
    assert len({(row.lanes, row.warps) for row in ahead if row.pattern == "thread"}) == 10
    assert all(row.n <= 2 and row.allocator == "devalloc" for row in ahead)
    fills = [row for row in ALL if row.pattern in ("fill", "streams")]
    assert [row.key for row in plan.compile_only(fills)] == ["thread-64-2@128x1"]
