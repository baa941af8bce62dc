"""`devalloc bench growing` runs, and its rows make the guide's table."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.device import bench_growing
from benchmarks.results import read_rows
from tests.conftest import ON_GPU


@pytest.mark.skipif(ON_GPU, reason="on a GPU it takes long: run devalloc bench growing")
def test_the_command_writes_rows(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--rounds", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(bench_growing.main, options)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*.csv")
    rows = read_rows(path)
    assert {row["check"] for row in rows} == {"ok"}
    assert all(float(row["median"]) > 0 for row in rows)
    found = {(row["case"].partition(",")[0], row["heap"], row["op"]) for row in rows}
    kinds = bench_growing.KINDS
    steps = ("build", "delete", "free", "all steps", "mapped")
    assert found == {
        ("live", "grow()", "grow"),
        ("live", "grow()", "kernel, against alone"),
        *(("requests", kind, "malloc") for kind in kinds),
        *(("graph", kind, step) for kind in kinds for step in steps),
    }
    mapped = {row["heap"]: float(row["median"]) for row in rows if row["op"] == "mapped"}
    assert mapped[bench_growing.GROWING] < mapped[bench_growing.FIXED]
    shown = bench_growing.markdown(rows)
    assert "| grow by 4 MiB |" in shown
    assert "mapped | 6 MiB |" in shown
