"""The main job: lists that grow and shrink in kernels equal those made on the CPU."""

import gzip
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from rich.progress import Progress

import devalloc
from devalloc import Heap
from devalloc._benchmarks import has_benchmarks
from devalloc.cli import main
from devalloc.demo.graph import Graph, make_graph
from devalloc.demo.lists import AdjacencyLists
from devalloc.demo.reference import expected_lists, first_difference
from devalloc.demo.run import (
    MORE_PAGES,
    Job,
    caption,
    default_heap_bytes,
    describe_size,
    explanation,
    make_heap,
    run_demo,
    table_of,
)
from devalloc.heap.growth import CHUNK_BYTES
from devalloc.heap.watcher import LEAST_BYTES
from devalloc.report import load_snapshot, save_snapshot
from tests.conftest import ON_GPU

ROOT = Path(__file__).resolve().parents[2]


def random_graph(vertices: int, edges: int, seed: int) -> Graph:
    """A graph whose degrees differ by orders of magnitude."""
    random = np.random.default_rng(seed)
    sources = (vertices * random.random(edges) ** 4).astype(np.int64)
    return make_graph("random", vertices, sources, random.integers(0, vertices, edges))


def contents(lists: AdjacencyLists) -> list[list[int]]:
    offsets, entries = (tensor.tolist() for tensor in lists.to_csr())
    return [entries[offsets[v] : offsets[v + 1]] for v in range(lists.vertices)]


def ints(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def check_shape(lists: AdjacencyLists) -> None:
    """The invariants of the three tensors."""
    addresses, lengths, capacities = (
        tensor.tolist() for tensor in (lists.addresses, lists.lengths, lists.capacities)
    )
    for address, length, capacity in zip(addresses, lengths, capacities, strict=True):
        assert length <= capacity
        assert (address == 0) == (capacity == 0)
        assert capacity == 0 or (capacity >= 4 and capacity & (capacity - 1) == 0)
    live = [address for address in addresses if address]
    assert len(live) == len(set(live))
    assert lists.heap.stats().allocations - lists.heap.stats().frees == len(live)


def as_a_user(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in a fresh process, in which nothing has set TRITON_INTERPRET before."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "devalloc", *(str(part) for part in arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("lanes", [128, 1024])
def test_lists_follow_a_model(device: str, lanes: int) -> None:
    random = np.random.default_rng(1)
    model: list[list[int]] = [[] for _ in range(20)]
    with Heap("1MiB") as heap:
        lists = AdjacencyLists(heap, 20, lanes=lanes)
        for size in (1, 5, 300, 700):
            sources, targets = random.integers(0, 20, size) ** 2 // 20, random.integers(0, 50, size)
            assert lists.insert(ints(device, *sources), ints(device, *targets)).all()
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                model[source].append(target)
            assert contents(lists) == model
            sources, targets = random.integers(0, 20, size), random.integers(0, 50, size)
            lists.delete(ints(device, *sources), ints(device, *targets))
            gone = set(zip(sources.tolist(), targets.tolist(), strict=True))
            model = [[t for t in row if (v, t) not in gone] for v, row in enumerate(model)]
            assert contents(lists) == model
            check_shape(lists)
        lists.release()
        assert contents(lists) == [[] for _ in range(20)]
        assert heap.stats().used == 0
        heap.audit()


def test_a_list_longer_than_a_program_is_wide(device: str) -> None:
    with Heap("1MiB") as heap:
        lists = AdjacencyLists(heap, 3, lanes=128)
        order = torch.randperm(3000, generator=torch.manual_seed(0)).to(torch.int32)
        for part in order.to(device).split(700):
            assert lists.insert(torch.full_like(part, 1), part).all()
        assert contents(lists) == [[], order.tolist(), []]
        assert lists.capacities.tolist() == [0, 4096, 0]
        kept = [target for target in order.tolist() if target % 3]
        gone = ints(device, *range(0, 3000, 3))
        lists.delete(torch.full_like(gone, 1), gone)
        assert contents(lists)[1] == kept
        assert lists.capacities.tolist() == [0, 2048, 0]
        lists.delete(ints(device, *[1] * 3000), ints(device, *range(3000)))
        assert lists.addresses.tolist() == [0, 0, 0]
        assert heap.stats().used == 0


def test_batches_that_do_nothing(device: str) -> None:
    nothing = ints(device)
    with Heap("1MiB") as heap:
        lists = AdjacencyLists(heap, 2)
        assert lists.insert(nothing, nothing).tolist() == []
        lists.delete(nothing, nothing)
        lists.insert(ints(device, 1), ints(device, 7))
        lists.delete(ints(device, 1, 0), ints(device, 8, 7))
        assert contents(lists) == [[], [7]]
        lists.release()
        lists.release()


@pytest.mark.parametrize("lanes", [1, 64, 100, 8192])
def test_widths_that_are_not_offered(lanes: int) -> None:
    with Heap("1MiB") as heap, pytest.raises(devalloc.InvalidArgument, match="power of two"):
        AdjacencyLists(heap, 1, lanes=lanes)


def test_warming_up_changes_nothing(device: str) -> None:
    with Heap("1MiB") as heap:
        lists = AdjacencyLists(heap, 3)
        lists.warm_up(10)
        assert contents(lists) == [[], [], []]
        assert heap.stats().allocations == 0


def test_vertices_that_do_not_exist_are_refused(device: str) -> None:
    with Heap("1MiB") as heap:
        lists = AdjacencyLists(heap, 2)
        accepted = lists.insert(ints(device, 2, 1, -1, 0), ints(device, 5, 6, 7, 8))
        assert accepted.tolist() == [False, True, False, True]
        lists.delete(ints(device, 2, -1, 0), ints(device, 5, 7, 8))
        assert contents(lists) == [[], [6]]


def test_exhaustion_loses_nothing(device: str) -> None:
    """Lists that find no room keep what they had, and a freed heap takes new ones."""
    graph = random_graph(vertices=300, edges=6_000, seed=3)
    sources = torch.from_numpy(graph.sources).to(device)
    targets = torch.from_numpy(graph.targets).to(device)
    half = graph.edges // 2
    with Heap("64KiB") as heap:
        lists = AdjacencyLists(heap, graph.vertices)
        first = lists.insert(sources[:half], targets[:half]).cpu().numpy()
        second = lists.insert(sources[half:], targets[half:]).cpu().numpy()
        accepted = np.concatenate([first, second])
        assert accepted.any()
        assert not accepted.all()
        found = tuple(tensor.cpu().numpy() for tensor in lists.to_csr())
        expected = expected_lists(graph, np.flatnonzero(accepted))
        assert first_difference(found, expected) is None
        check_shape(lists)
        heap.audit()
        with pytest.raises(devalloc.OutOfMemory):
            heap.check()
        lists.release()
        everyone = ints(device, *range(graph.vertices))
        assert lists.insert(everyone, everyone).all()
        lists.release()
        heap.audit()
        assert heap.stats().largest_free == heap.capacity


def test_the_job_on_a_skewed_graph(tmp_path: Path) -> None:
    graph = random_graph(vertices=200, edges=4000, seed=5)
    output = tmp_path / "map.png"
    with Console(file=(tmp_path / "log").open("w"), width=80) as console:
        steps = run_demo(graph, output, batch=500, seed=2, console=console)
    assert [step.name for step in steps] == ["build", "delete", "free"]
    assert [step.edges for step in steps] == [graph.edges, graph.edges // 2, -(-graph.edges // 2)]
    assert [step.entries for step in steps] == [graph.edges, -(-graph.edges // 2), 0]
    assert steps[0].used >= steps[0].exact
    assert steps[0].used > steps[1].used > steps[2].used == 0
    assert steps[2].lists == 0
    assert output.read_bytes().startswith(b"\x89PNG")


def test_the_table_keeps_blocks_and_pages_apart(tmp_path: Path) -> None:
    """And more pages after deleting than before are explained, in the text and in the picture."""
    graph = random_graph(vertices=60, edges=900, seed=5)
    with Heap("1MiB") as heap, Progress(disable=True) as progress:
        build, delete, free = Job(graph, heap, 100, 0, progress).run()
    for step in (build, delete, free):
        assert step.exact <= step.used <= step.in_pages < step.mapped
        assert step.in_pages == step.pages * step.snapshot.page_bytes
    headings = [str(column.header) for column in table_of([build, delete, free], "").columns]
    assert headings[4:] == ["needed", "in blocks", "in pages", "mapped"]
    grown = replace(delete, snapshot=replace(delete.snapshot, page_kind=build.snapshot.page_kind))
    shrunk = replace(build, snapshot=free.snapshot)
    assert MORE_PAGES in explanation([shrunk, grown, free])
    assert caption([shrunk, grown, free]) == MORE_PAGES
    assert MORE_PAGES not in explanation([grown, shrunk, free])
    assert caption([grown, shrunk, free]) == ""


def test_a_planted_difference_is_found() -> None:
    graph = random_graph(vertices=20, edges=200, seed=1)
    offsets, entries = expected_lists(graph, np.arange(graph.edges))
    assert first_difference((offsets, entries), (offsets, entries)) is None
    wrong = entries.copy()
    wrong[offsets[3] + 1] += 1
    assert "list 3, entry 1" in str(first_difference((offsets, wrong), (offsets, entries)))
    fewer = expected_lists(graph, np.arange(graph.edges - 1))
    vertex = graph.sources[-1]
    assert f"list {vertex} has" in str(first_difference(fewer, (offsets, entries)))


@pytest.mark.alone
def test_the_heap_grows_by_itself(tmp_path: Path) -> None:
    """And gives back what it does not need in the end. (Alone: kernels wait for the host.)"""
    graph = random_graph(vertices=60, edges=900, seed=5)
    with make_heap(graph.edges, None, None) as heap, Progress(disable=True) as progress:
        assert "heap that grows by itself, up to" in describe_size(heap)
        full = heap.malloc([heap.capacity])  # so that the lists need more than there is
        job = Job(graph, heap, 100, 0, progress)
        if ON_GPU:
            job.lists.warm_up(100)  # what is loaded later waits for kernels that wait for the host
        build = job.build()
        assert heap.capacity == CHUNK_BYTES + LEAST_BYTES
        assert build.mapped > heap.capacity
        heap.free(full)
        piece = LEAST_BYTES // 4
        assert heap.trim() == 3 * piece  # the lists live in what was mapped then
        job.lists.release()
        assert heap.trim() == piece
    with make_heap(graph.edges, 1 << 20, None) as heap:
        assert heap.capacity == heap.limit == 1 << 20
        assert describe_size(heap) == "heap of 1 MiB"


def test_the_table_fits_a_narrow_terminal(tmp_path: Path) -> None:
    graph = random_graph(vertices=60, edges=900, seed=5)
    with Console(file=(tmp_path / "log").open("w"), width=80) as console:
        run_demo(graph, tmp_path / "map.png", console=console)
    assert "mapped" in (text := (tmp_path / "log").read_text())
    assert "…" not in text


def test_the_chosen_heap_is_large_enough() -> None:
    assert default_heap_bytes(1) == 1 << 20
    assert default_heap_bytes(100_000) == 4 << 20


# The command line ------------------------------------------------------------------------------


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def write_graph(path: Path, vertices: int, edges: int) -> Path:
    graph = random_graph(vertices, edges, seed=7)
    rows = np.stack([graph.sources, graph.targets], axis=1)
    lines = [f"{vertices} {graph.edges}", *(f"{source} {target}" for source, target in rows)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


@pytest.fixture
def edge_list(tmp_path: Path) -> Path:
    return write_graph(tmp_path / "edges.txt.gz", vertices=50, edges=400)


def test_demo_command(tmp_path: Path, edge_list: Path) -> None:
    output = tmp_path / "map.png"
    code, text = run("demo", "--graph", edge_list, "--output", output, "--batch", 100)
    assert code == 0, text
    assert "runs on: " in text
    assert "all lists equal the CPU's, edge for edge" in text
    assert "the heap's audit found no error" in text
    assert "H1" not in text
    assert 'first line "50 283": a header, not an edge' in text
    assert output.exists()


def test_demo_ignores_further_columns(tmp_path: Path, edge_list: Path) -> None:
    """As its help says: lists of edges often have weights."""
    weighted = tmp_path / "weighted.txt"
    lines = gzip.decompress(edge_list.read_bytes()).decode().splitlines()
    weighted.write_text("\n".join(f"{line} 0.5 7" for line in lines))
    output = ("--output", tmp_path / "map.png", "--batch", 100)
    for name in (edge_list, weighted):
        code, text = run("demo", "--graph", name, *output)
        assert code == 0, text
        assert "50 vertices, 283 edges" in text
    code, text = run("demo", "--help")
    assert code == 0
    assert "(a weight, a time) are numbers and are ignored" in " ".join(text.split())


def test_demo_says_when_the_heap_is_too_small(tmp_path: Path) -> None:
    rows = [f"{source} {target}" for source in range(1100) for target in range(9)]
    graph = tmp_path / "edges.txt"
    graph.write_text("\n".join(rows))
    output = tmp_path / "map.png"
    code, text = run("demo", "--graph", graph, "--heap", "64KiB", "--output", output)
    assert code == 1
    assert "Error: out of memory: " in text
    assert "of 9,900 edges found no room in a heap of 64 KiB" in text
    assert not output.exists()


def test_demo_refuses_bad_input_in_one_line(tmp_path: Path, edge_list: Path) -> None:
    broken = tmp_path / "broken.txt"
    broken.write_text("0 1\n1 two\n")
    output = ("--output", tmp_path / "map.png")
    for arguments, message in [
        (["--graph", broken], "broken.txt, line 2: expected two vertex ids, got '1 two'"),
        (["--graph", edge_list, "--heap", "1KiB"], "cannot hold one page"),
        (["--graph", edge_list, "--heap", "0"], "a heap of 0 cannot hold one page"),
        (["--graph", edge_list, "--device", "toaster"], "toaster"),
    ]:
        code, text = run("demo", *arguments, *output)
        assert code == 1, text
        assert message in text
        assert text.splitlines()[-1].startswith("Error: ")
    for command in (["demo"], ["view", edge_list], ["replay", edge_list]):
        assert run(*command, "--output", tmp_path / "map.jpg") == (
            1,
            f"Error: cannot write {tmp_path}/map.jpg: pictures are .png, .svg, .pdf; the name's "
            "end chooses\n",
        )
        assert not (tmp_path / "map.jpg").exists()
    code, text = run("demo", "--output", tmp_path / "missing" / "map.png")
    assert (code, text) == (
        1,
        f"Error: cannot write {tmp_path}/missing/map.png: its folder does not exist\n",
    )
    for arguments in (
        ["--graph", tmp_path / "nowhere"],
        ["--heap", "plenty"],
        ["--heap", "-5MiB"],
        ["--heap", "9" * 5000],
        ["--batch", "0"],
        ["--seed", "x"],
    ):
        assert run("demo", *arguments, *output)[0] == 2, arguments


def test_view_command(tmp_path: Path) -> None:
    with Heap("256KiB") as heap:
        save_snapshot(heap.snapshot(), tmp_path / "empty.npz")
        assert load_snapshot(tmp_path / "empty.npz").capacity == heap.capacity
    output = tmp_path / "map.png"
    code, text = run("view", tmp_path / "empty.npz", tmp_path / "empty.npz", "-o", output)
    assert code == 0, text
    assert output.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "other").write_text("something else")
    code, text = run("view", tmp_path / "other", "-o", output)
    assert code == 1
    assert "not a heap snapshot" in text
    assert run("view", tmp_path / "empty.npz")[0] == 2
    assert "devalloc.report.save_snapshot(heap.snapshot()" in run("view", "--help")[1]


def test_the_help_shows_the_benchmarks_in_a_checkout_only(tmp_path: Path) -> None:
    assert has_benchmarks()
    assert not has_benchmarks(tmp_path)
    assert "bench" in run("--help")[1]
    shutil.copytree(ROOT / "devalloc", tmp_path / "devalloc")
    shutil.copytree(ROOT / "kernels", tmp_path / "devalloc" / "kernels")
    done = subprocess.run(
        [sys.executable, "-m", "devalloc", "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: python -m devalloc" in done.stdout
    assert "demo" in done.stdout
    assert "bench" not in done.stdout


def test_info_command() -> None:
    code, text = run("info")
    assert code == 0
    for word in (
        devalloc.__version__,
        torch.__version__.split("+")[0],
        "driver",
        "interpreter",
        "cudaMalloc",
        'source "virtual"',
    ):
        assert word in text


def test_the_command_line_chooses_the_interpreter_by_itself(tmp_path: Path) -> None:
    graph = write_graph(tmp_path / "edges.txt.gz", vertices=5, edges=20)
    output = tmp_path / "map.png"
    done = as_a_user("demo", "--graph", graph, "--device", "cpu", "--output", output)
    assert done.returncode == 0, done.stderr
    assert "runs on: Triton's interpreter on the CPU (asked for)" in done.stdout
    assert "the heap's audit found no error" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "Error: there is no CUDA device, and so no cuda; --device cpu"),
        ("toaster", "Error: no such device: 'toaster'"),
    ],
)
def test_a_device_that_is_not_there_is_not_blamed_on_the_environment(
    tmp_path: Path, device: str, message: str
) -> None:
    done = as_a_user("demo", "--device", device, "--output", tmp_path / "map.png")
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert "TRITON_INTERPRET" not in done.stderr
