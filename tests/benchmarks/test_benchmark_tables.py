"""Tables, checks and plots of measured rows; the commands that make them; the order benchmark."""

import html
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from benchmarks import harness
from benchmarks.device import bench_order, plan
from benchmarks.device.plan import Row
from benchmarks.device.worker import failed_record
from benchmarks.results import PROVENANCE, RESULTS, RowFile, newest, read_rows
from benchmarks.tables import checks, compare, comparison, plots, readme_table, tables
from benchmarks.tables.comparison import Results, peer_values
from benchmarks.uses import bench_uses
from devalloc import cli
from devalloc._benchmarks import load_benchmark
from devalloc.errors import DevallocError


def test_the_best_peer_is_one_that_finished() -> None:
    peers = read_rows(comparison.PEERS)
    best = {
        name: comparison.best(peer_values(peers, row, op), higher)
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
    numbers = {"op": op, "unit": "ms", "median": median, "max": 2 * median, "failures": 0}
    return {key: str(value) for key, value in (failed_record(row, "ok") | numbers).items()}


def test_the_launch_is_added_and_never_subtracted() -> None:
    ours = [
        our_row(plan.make("empty", 0, 1), "kernel", 0.002),
        our_row(plan.make("thread", 64, 1), "alloc", 0.004),
        our_row(plan.make("frag", 4096, 100_000), "span", 1.05),
    ]
    assert Results(ours, 0.005).value("thread-64-1", "alloc") == pytest.approx(0.007)
    assert Results(ours, 0.001).value("thread-64-1", "alloc") == pytest.approx(0.004)
    assert Results(ours, 0.005).value("frag-4096-100000", "span") == pytest.approx(2.1)
    assert math.isnan(Results(ours, 0.005, (256, 2)).value("thread-64-1", "alloc"))


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
    row = plan.make("thread", 64, 1_000_000)
    target = {"row": row.name, "op": "alloc", "target": "0.015", "unit": "ms", "better": "lower"}
    results = Results([our_row(row, "alloc", 0.014) | changes])
    (line,) = comparison.compare(results, read_rows(comparison.PEERS), [target])
    assert line.met is met
    assert tables.markdown([line], []).endswith(f" {int(met)} of 1 |")


def test_rows_that_differ_in_size_are_one_line() -> None:
    ours = [our_row(plan.make("thread", size, 1_000_000), "alloc", 0.014) for size in (16, 64)]
    targets = [
        {"row": row["row"], "op": "alloc", "target": "1", "unit": "ms", "better": "lower"}
        for row in ours
    ]
    lines = comparison.compare(Results(ours), read_rows(comparison.PEERS), targets)
    few, many = sorted(line.ratio for line in lines)
    expected = f"| thread, 1000000 | alloc | 16 to 64 | {few:.4g} to {many:.4g} | 2 of 2 |"
    assert tables.markdown(lines, []).endswith(expected)
    assert tables.extent([float("nan")]) == "-"


def test_a_group_table_shows_what_went_wrong_and_the_peer() -> None:
    row = plan.make("thread", 64, 1)
    ours = [our_row(row, "alloc", 0.25), our_row(plan.make("fill", 64, 100_000, param=95), "-", 1)]
    ours[1]["check"] = "hang: over 90 s"
    peers = read_rows(comparison.PEERS)
    found = tables.group_table(ours, peers, "target")
    assert found is not None
    assert "| thread-64-1 | 32 x 1 | devalloc | warm | alloc | ms | 0.25 |" in found
    assert "| halloc |" in found
    assert "hang" not in found
    assert "| hang: over 90 s |" in str(tables.group_table(ours, peers, "fill"))
    assert tables.group_table(ours, peers, "tail") is None


def test_the_block_in_a_document_is_replaced(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text("before\n<!-- table:x -->\nold\n<!-- /table:x -->\nafter\n")
    tables.write_block(document, "x", "new")
    assert document.read_text() == "before\n<!-- table:x -->\nnew\n<!-- /table:x -->\nafter\n"
    document.write_text("no markers")
    with pytest.raises(click.ClickException):
        tables.write_block(document, "x", "new")


def test_a_ceiling_is_the_floor_and_the_addresses() -> None:
    results = Results([our_row(plan.make("empty", 0, 1), "kernel", 0.003)], 0.005)
    assert results.ceiling("thread-64-1000000", "alloc") == pytest.approx(0.005 + 1e6 / 520e6)
    assert results.ceiling("churn-64-1024", "kernel") == pytest.approx(0.005 + 65_536 / 110e6)
    assert results.ceiling("oom-64-10000", "utilisation") == 1.0
    assert math.isnan(results.ceiling("latency-64-1000", "kernel"))


# The checks


def flat_rows(**slow: float) -> list[dict[str, str]]:
    """Rows of the n sweep that cost 1 ns per request, times `slow` for some counts."""
    ours = [our_row(plan.make("empty", 0, 1), "kernel", 0.003)]
    for n in plan.COUNTS:
        cost = 1e-6 * slow.get(f"n{n}", 1.0)
        ours.append(our_row(plan.make("thread", 64, n), "alloc", 0.003 + n * cost))
    return ours


@pytest.mark.parametrize(
    ("slow", "flat", "rise"),
    [
        ({}, "yes", "yes"),
        ({"n1024": 9.0}, "yes", "yes"),
        ({"n16384": 2.0}, "no", "yes"),
        ({"n16777216": 2.0}, "no", "no"),
    ],
)
def test_a_cost_that_is_not_flat_is_found(slow: dict[str, float], flat: str, rise: str) -> None:
    found = {check.what: check.verdict for check in checks.all_checks(flat_rows(**slow))}
    lanes = "alloc, 64 B: time per request, 16,384 to 16,777,216 lanes"
    assert found[f"{lanes}: largest / smallest"] == flat
    assert found[f"{lanes}: largest rise with the lanes"] == rise


def test_tails_and_levels_and_heaps_are_checked() -> None:
    ours = []
    for level, median in ((0, 1.0), (95, 3.5)):
        ours.append(our_row(plan.make("fill", 64, 100_000, param=level), "alloc", median))
        tail = plan.make("tail", 64, 100_000, param=level)
        ours.append(our_row(tail, "alloc", 1.0) | {"p99": str(2 * median)})
    ours += [our_row(plan.make("heap", 64, 100_000, param=h), "free", 1.0) for h in plan.HEAPS]
    found = {check.what: check.verdict for check in checks.all_checks(ours)}
    assert found["alloc, 64 B: 95 % full / empty"] == "no"
    assert found["alloc, 64 B, 0 % full: p99 of 1000 rounds / median"] == "yes"
    assert found["alloc, 64 B, 95 % full: p99 of 1000 rounds / median"] == "no"
    assert found["alloc, 64 B, 50 % full: p99 of 1000 rounds / median"] == "not measured"
    assert found["free, 64 B: heaps of 64 MiB to 100 GiB: largest / smallest"] == "yes"
    assert found["alloc, 64 B: heaps of 64 MiB to 100 GiB: largest / smallest"] == "not measured"


def test_a_wrong_row_is_not_taken_for_a_time() -> None:
    ours = flat_rows()
    ours[-1]["check"] = "1 overlaps"
    assert {check.verdict for check in checks.all_checks(ours)} == {"not measured"}


# Plots and documents


def test_plots_are_the_same_from_the_same_rows(tmp_path: Path) -> None:
    first, second = (plots.draw_all(flat_rows(), tmp_path / name) for name in ("a", "b"))
    assert [path.name for path in first] == ["n.svg"]
    assert first[0].read_text() == second[0].read_text()
    assert "devalloc alloc" in first[0].read_text()
    assert first[0].stat().st_size < 60_000


def test_a_plot_leaves_out_wrong_rows_and_other_widths() -> None:
    ours = flat_rows()
    ours[1]["failures"] = "1"
    ours[2]["lanes"] = "256"
    (points,) = plots.series(ours, plots.PLOT_LIST[0]).values()
    assert [n for n, _ in points] == list(plan.COUNTS)[2:]


def test_the_documents_get_tables_checks_and_plots(tmp_path: Path) -> None:
    ours = flat_rows()
    peers = read_rows(comparison.PEERS)
    results = Results(ours, comparison.peer_floor(peers))
    lines = comparison.compare(results, peers, read_rows(comparison.TARGETS))
    for row in ours:
        row |= dict.fromkeys(("gpu", "driver", "cuda", "torch", "triton", "python"), "x")
        row |= {"commit": "c", "date": "2000-01-01"}
    about = tables.describe(ours, results, lines)
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for name, mark in (("docs/performance.md", "device"), ("README.md", "readme")):
        (tmp_path / name).write_text(f"<!-- table:{mark} -->\n<!-- /table:{mark} -->\nby hand\n")
    table, short = tables.markdown(lines, about), "| what |"
    found = checks.all_checks(ours)
    order = RowFile(tmp_path / "benchmarks" / "results" / "order")
    source = {"gpu": "x", "date": "2000-01-01", "commit": "c0ffee"}
    order.write(our_row(Row("vector-relaxed", 8, 512, 128, 1, 1), "turn", 0.06) | source)
    for name in ("litmus", "stress"):
        shutil.copytree(RESULTS / name, tmp_path / "benchmarks" / "results" / name)
    written = compare.write_documents(ours, table, short, found, about, tmp_path)
    assert all(path.is_relative_to(tmp_path) and path.exists() for path in written)
    text = (tmp_path / "docs" / "performance.md").read_text()
    assert text.endswith("by hand\n")
    assert "(plots/n.svg)" in text
    assert "limits hold" in text
    every = (tmp_path / "benchmarks" / "results" / "README.md").read_text()
    assert "## n\n" in every
    assert "Commit c0ffee" in every
    assert "| hand-over | lanes-16 | free-without-fence |" in every
    assert "| double-frees | 8589934592 |" in every
    assert "| vector-relaxed-8-512-1 | 128 x 1 |" in every


def test_later_files_replace_rows_of_earlier_ones(tmp_path: Path) -> None:
    paths = []
    for name, median in (("a", 1.0), ("b", 2.0)):
        file = RowFile(tmp_path / name)
        source = {"gpu": "x", "date": "2000-01-01", "commit": name}
        file.write(our_row(plan.make("thread", 64, 1), "alloc", median) | source)
        assert file.path is not None
        paths.append(file.path)
    assert [row["median"] for row in compare.merged(tuple(paths))] == ["2.0"]


def test_what_a_debug_heap_costs() -> None:
    row = plan.make("thread", 64, 1)
    debug = plan.make("thread", 64, 1, allocator="debug")
    ours = [our_row(row, "alloc", 0.004), our_row(row, "free", 0.002)]
    both = [*ours, our_row(debug, "alloc", 0.010)]
    assert tables.debug_table(both) == "- `thread-64-1`: alloc 2.5"
    with pytest.raises(KeyError):
        tables.debug_table(both[1:])


def test_the_debug_document_is_made_of_its_rows(tmp_path: Path) -> None:
    document = tmp_path / "debug.md"
    shutil.copy(compare.DEBUG, document)
    compare.write_debug_document(document)
    assert document.read_text() == compare.DEBUG.read_text()


def test_the_document_of_uses_has_a_place_for_each_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of every use go into a copy of the document."""
    columns = dict.fromkeys(("median", "p20", "p80"), "0.5")
    columns |= {"peak_bytes": "64", "result_bytes": "32", "synchronisations": "1", "dropped": "0"}
    columns |= dict.fromkeys(PROVENANCE, "2026-01-01")
    measured = [
        {"use": use, "input": "small", "way": way, "check": "ok", "rounds": "10", **columns}
        for use in bench_uses.USES
        for way in ("heap", "other")
    ]
    document = tmp_path / "guide" / "uses.md"
    document.parent.mkdir()
    shutil.copy(compare.USES, document)
    monkeypatch.setattr(compare, "newest", lambda _folder: None)
    monkeypatch.setattr(compare, "read_rows", lambda _path: measured)
    compare.write_uses_document(document)
    text = document.read_text()
    line = "| small | other | 0.5 | 0.0 | 1 |"
    assert text.count(line) == len(bench_uses.USES)
    assert (tmp_path / "plots" / "uses.svg").exists()


# The README


def newest_lines() -> tuple[list[comparison.Comparison], list[dict[str, str]]]:
    peers, ours = read_rows(comparison.PEERS), read_rows(newest())
    results = Results(ours, comparison.peer_floor(peers))
    return comparison.compare(results, peers, read_rows(comparison.TARGETS)), peers


def test_the_readme_has_six_numbers_of_the_newest_rows() -> None:
    """And says so where a peer wins."""
    made = readme_table.markdown(newest_lines()[0])
    assert f"<!-- table:readme -->\n{made}\n<!--" in compare.README.read_text()
    body = [line.strip("| ").split(" | ") for line in made.splitlines()[2:]]
    assert len(body) == 6
    assert all(re.search(r"\d (us|GiB)", cell) for line in body for cell in line[1:3])
    ratios = [float(line[3].removesuffix(" x")) for line in body]
    assert min(ratios) < 1 < max(ratios)


def test_a_number_for_people_has_a_name_a_unit_and_few_digits() -> None:
    line = comparison.Comparison("r", "alloc", "ms", False, 0.017923, 0.23, "ouro_p_va", 1, 1)
    shown = readme_table.heap_line("malloc", line)
    assert shown == ("malloc", "17.9 us", "230 us (Ouroboros)", "13 x")
    slower = readme_table.heap_line("free", replace(line, peer=0.0035))
    assert slower[2:] == ("3.5 us (Ouroboros)", "0.2 x")


def test_the_picture_of_the_readme_is_made_of_rows(tmp_path: Path) -> None:
    lines, peers = newest_lines()
    names = [name for name, _ in readme_table.bars(lines, peers, "alloc")]
    assert len(names) == len(set(names)) == 7
    text = html.unescape(readme_table.draw(lines, peers, tmp_path).read_text())
    assert [name for name in names if name not in text] == []


# The command line


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("device", "--group"),
        ("compare", "--write-docs"),
        ("plot", "--out"),
        ("order", "--turns"),
        ("uses", "--graph"),
    ],
)
def test_the_command_line_finds_the_benchmarks(name: str, text: str) -> None:
    done = CliRunner().invoke(cli.main, ["bench", name, "--help"])
    assert done.exit_code == 0, done.output
    assert text in done.output


@pytest.mark.parametrize("name", ["arena", "device", "litmus", "order", "stress"])
def test_a_benchmark_without_its_gpu_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(cli.main, ["bench", name])
    assert (done.exit_code, done.output) == (
        1,
        "Error: there is no CUDA device; --device cpu runs without one\n",
    )


@pytest.mark.parametrize("value", ["nan", "inf", "-5", "0", "many"])
@pytest.mark.parametrize(
    ("name", "option"),
    [("litmus", "--blocks"), ("sanitize", "--operations"), ("stress", "--operations")],
)
def test_counts_are_positive_numbers(name: str, option: str, value: str) -> None:
    done = CliRunner().invoke(cli.main, ["bench", name, option, value])
    assert done.exit_code == 2
    assert f"'{value}' is not a number from 1 to 4.6e18" in done.output


def test_an_installation_without_benchmarks_says_so(tmp_path: Path) -> None:
    with pytest.raises(DevallocError, match="clone the repository"):
        load_benchmark("device.bench_device", tmp_path)
    assert CliRunner().invoke(cli.main, ["bench", "nothing"]).exit_code == 2


def test_a_foreign_package_of_that_name_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "results.py").write_text("")
    with pytest.raises(DevallocError, match="another package"):
        load_benchmark("results", tmp_path)
    sys.path.remove(str(tmp_path))


# Order


def test_what_order_costs_is_measured_in_every_case(tmp_path: Path, device: str) -> None:
    rounds = "1" if device == "cpu" else "10"  # beside other tests, some samples are too late
    options = ["--device", device, "--turns", "2", "--rounds", rounds, "--out", str(tmp_path)]
    cases = bench_order.all_cases()
    small = list(dict.fromkeys(replace(case, programs=1) for case in cases))
    assert len(set(cases)) == len(cases)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_order, "all_cases", lambda: small)
        done = CliRunner().invoke(bench_order.main, options)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*.csv")
    found = read_rows(path)
    assert [row["pattern"] for row in found] == [case.pattern for case in small]
    assert {row["unit"] for row in found} == {"us"}


def test_a_lost_addition_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_order, "launcher", lambda *_: lambda: None)
    case = bench_order.Case("vector", "relaxed", False, 32, 1)
    with pytest.raises(harness.WrongResult, match="lost"):
        bench_order.measure(case, torch.device("cpu"), 2, 1)
