"""`devalloc bench uses` runs, and notices results that are wrong and ways that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.harness import WrongResult
from benchmarks.results import read_rows
from benchmarks.tables import uses_tables
from benchmarks.uses import bench_uses, index, measure, neighbours, ragged, sparse
from benchmarks.uses.measure import Input, Way, require_equal
from tests.conftest import ON_GPU

CPU = torch.device("cpu")
WAYS = {
    "ragged": {"heap", "two passes", "padded"},
    "neighbours": {"heap", "two passes", "padded", "log"},
    "cache": {"heap", "host's list", "reserved"},
    "sparse": {"heap", "heap, gathered", "two passes", "torch.sparse.mm"},
    "index": {"heap", "sorted anew", "merged"},
}

small = pytest.mark.skipif(ON_GPU, reason="on a GPU the inputs are large: run devalloc bench uses")


@small
@pytest.mark.parametrize("use", bench_uses.USES)
def test_the_command_writes_rows(use: str, tmp_path: Path) -> None:
    graph = tmp_path / "square.txt"
    graph.write_text("0 1\n1 2\n2 3\n3 0\n")
    options = ["--device", "cpu", "--rounds", "1", "--out", str(tmp_path), "--only", use]
    done = CliRunner().invoke(bench_uses.main, [*options, "--graph", str(graph)])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*.csv")
    rows = read_rows(path)
    assert {row["check"] for row in rows} == {"ok"}
    assert all(float(row["median"]) > 0 for row in rows)
    assert all(row["commit"] and row["torch"] == torch.__version__ for row in rows)
    for name in {row["input"] for row in rows}:
        assert {row["way"] for row in rows if row["input"] == name} == WAYS[use]
    for row in rows:
        if row["way"].startswith("heap"):
            assert row["dropped"] == "0"
            assert int(row["peak_bytes"]) >= int(row["result_bytes"]) > 0
    if use == "sparse":
        assert {row["input"] for row in rows} == {"power-law", "square"}
    # What compare --write-docs makes of them.
    blocks = uses_tables.blocks(rows)
    assert set(blocks) == {"uses", f"uses-{use}"}
    assert blocks[f"uses-{use}"].count("\n") == len(rows) + 1
    picture = uses_tables.draw(rows, tmp_path).read_text()
    assert f"{use} {rows[-1]['input']}: {rows[-1]['way']}" in picture


class Wrong(Way):
    """Its result is not that of the reference."""

    def step(self) -> None:
        self.found = torch.tensor([1, 2, 4])

    def check(self) -> int:
        require_equal(self.found, torch.tensor([1, 2, 3]), "numbers")
        return 0


def test_a_wrong_result_is_a_row_without_times() -> None:
    found = measure.measure(Wrong, CPU, 2)
    assert found["check"] == "numbers: 1 of 3 differ"
    assert (found["median"], found["rounds"]) == ("nan", 0)
    row = {"input": "numbers", "way": "wrong", **{k: str(v) for k, v in found.items()}}
    assert uses_tables.cells(row) == ("numbers", "wrong", found["check"], "", "")


def test_a_way_that_fails_is_a_row() -> None:
    def fail() -> Way:
        raise RuntimeError("CUSPARSE_STATUS_INSUFFICIENT_RESOURCES\nmore")

    assert measure.measure(fail, CPU, 2)["check"] == "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES"


@small
def test_a_wrong_heap_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Input("ragged", "wrong", 3, 24, {"heap": Wrong})
    monkeypatch.setattr(bench_uses, "inputs_of", lambda *_: iter([given]))
    options = ["--device", "cpu", "--rounds", "1", "--out", str(tmp_path), "--only", "ragged"]
    done = CliRunner().invoke(bench_uses.main, options)
    assert done.exit_code == 1
    assert "ragged wrong: numbers: 1 of 3 differ" in done.output


@small
def test_what_guesses_drop_is_counted() -> None:
    """The longest Collatz rows are longer than twice the mean, and a cluster's atoms have more
    neighbours than twice the mean."""
    (rows,) = ragged.inputs(CPU)
    assert measure.measure(rows.ways["padded"], CPU, 1)["dropped"] > 0
    wanted = torch.arange(10)
    assert neighbours.require_subset(wanted[:7], wanted, 3) == 3
    with pytest.raises(WrongResult, match="7 pairs and 2 dropped, of 10"):
        neighbours.require_subset(wanted[:7], wanted, 2)
    with pytest.raises(WrongResult, match="of 10"):
        neighbours.require_subset(wanted[:7] + 5, wanted, 3)


def test_references_are_right() -> None:
    random = torch.Generator().manual_seed(0)
    a = sparse.matrix(*torch.randint(20, (2, 60), generator=random), 20)
    dense = torch.sparse_csr_tensor(*a, (20, 20)).to_dense()
    keys, values = sparse.reference(*a)
    assert torch.equal((dense @ dense).flatten()[keys], values)
    assert len(keys) == int((dense @ dense != 0).sum())
    text = index.zipf(5000, 100, CPU)
    counts = torch.bincount(text, minlength=100)
    assert counts[0] > 1.5 * counts[1] > 0
    assert int(text.max()) < 100


@pytest.mark.gpu
def test_on_a_gpu_waits_are_counted() -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    class Waits(Way):
        steps = 4

        def step(self) -> None:
            self.found = int(torch.ones(1, device=device).sum())

        def check(self) -> int:
            return 0

    class Goes(Waits):
        def step(self) -> None:
            self.found = torch.ones(1, device=device).sum()

    assert measure.measure(Waits, device, 1)["synchronisations"] == "1"
    assert measure.measure(Goes, device, 1)["synchronisations"] == "0"
