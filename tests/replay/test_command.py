"""``devalloc replay`` as a user runs it."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from matplotlib.image import imread

from devalloc.cli import main
from devalloc.replay.files import load_trace, save_compact
from devalloc.replay.policies import ALLOCATORS
from tests.replay.torch_like import TorchLike


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    recorder = TorchLike()
    for round_ in range(5):
        addresses = [recorder.alloc(700_000 + 100_000 * round_, stream=n % 2) for n in range(6)]
        for address in addresses:
            recorder.free(address)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(recorder.snapshot(45)))
    return path


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the table by policy."""
    lines = text[text.index("───") : text.index("plot:")].splitlines()[1:]
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines if line.strip()]
    return {row[0]: row[1:] for row in cells}


def test_replay_command(tmp_path: Path, snapshot: Path) -> None:
    plot = tmp_path / "plot.png"
    code, text = run("replay", snapshot, "-o", plot)
    assert code == 0, text
    assert "32 events: 16 allocations on 2 streams, at most" in text
    assert "were live before the first event" in text
    found = rows(text)
    assert list(found) == ["recorded", *ALLOCATORS]
    assert found["none"][2] == "16", "every allocation is a call"
    assert imread(plot).shape[:2] == (770, 1210)
    assert f"plot: {plot}" in text.replace("\n", "")


def test_every_kind_of_trace_gives_the_same(tmp_path: Path, snapshot: Path) -> None:
    compact = tmp_path / "compact.csv.gz"
    save_compact(load_trace(snapshot), compact)
    results = []
    for path in (snapshot, compact):
        code, text = run("replay", path, "-o", tmp_path / "plot.png")
        assert code == 0, text
        results.append({name: row[:-1] for name, row in rows(text).items()})
    assert results[0] == results[1]


def test_chosen_policies(tmp_path: Path, snapshot: Path) -> None:
    plot = tmp_path / "plot.png"
    code, text = run("replay", snapshot, "-o", plot, "--policy", "none", "--policy", "none")
    assert code == 0, text
    assert list(rows(text)) == ["recorded", "none"]
    code, text = run("replay", snapshot, "-o", plot, "--policy", "lucky")
    assert code == 1
    assert "no such policy: lucky; there are none, tiny, torch" in text


def test_capacity(tmp_path: Path, snapshot: Path) -> None:
    """What does not fit is counted in the column of failures."""
    plot = tmp_path / "plot.png"
    code, text = run("replay", snapshot, "-o", plot, "--capacity", "4MiB", "--policy", "none")
    assert code == 0, text
    found = rows(text)
    assert found["recorded"][5] == "0"
    assert int(found["none"][5]) > 0
    assert "failed: allocations that found no room on a device of 4 MiB" in text
    assert run("replay", snapshot, "-o", plot, "--capacity", "lots")[0] == 2


@pytest.mark.parametrize("capacity", ["1", "1KiB"])
def test_a_capacity_that_serves_nothing_is_an_error(
    tmp_path: Path, snapshot: Path, capacity: str
) -> None:
    plot = tmp_path / "plot.png"
    code, text = run("replay", snapshot, "-o", plot, "--capacity", capacity, "--policy", "none")
    assert code == 1
    assert "served no allocation under none; the program requests up to" in text
    assert text.splitlines()[-1].endswith("raise --capacity")
    assert not plot.exists()


def test_the_table_says_what_its_columns_are(tmp_path: Path, snapshot: Path) -> None:
    code, text = run("replay", snapshot, "-o", tmp_path / "plot.png")
    assert code == 0
    assert "fragm" not in text
    above, below = text[: text.index("───")].splitlines()[-3:-1]
    assert above.index("unused") == below.index("share") - 1


def test_device(tmp_path: Path, snapshot: Path) -> None:
    code, text = run("replay", snapshot, "-o", tmp_path / "plot.png", "--device", "1")
    assert code == 1
    assert "no events for device 1" in text


def test_what_cannot_be_replayed(tmp_path: Path, snapshot: Path) -> None:
    """One line and exit status 1, no traceback, no plot."""
    bad, plot = tmp_path / "bad.pickle", tmp_path / "plot.png"
    for data, reason in (
        (pickle.dumps(Path("x")), "only plain data is read"),
        (b"Some,columns\n", "there is no Action"),
        (b"Action,Pointer,Size\nallocate,0x10,5\nallocate", "line 3: the row ends before its"),
        (b"Action,Pointer,Size\nallocate,0x10,x\n", "line 2: the Size is 'x', not a whole number"),
        (pickle.dumps([1]), "a value in it is not of the kind that belongs there"),
        (b"# devalloc trace 1\n{]\n", "damaged header: no JSON from column 2 on"),
        (b"\x1f\x8b\x08\x00" + bytes(range(60)), "what is compressed in it is damaged"),
        (b"\x89PNG", "byte 0x89 at 0 is no ascii text"),
    ):
        bad.write_bytes(data)
        code, text = run("replay", bad, "-o", plot)
        assert code == 1
        assert reason in text
        assert text.count("\n") == 1
    code, text = run("replay", snapshot, "-o", tmp_path / "nowhere" / "plot.png")
    assert code == 1
    assert "its folder does not exist" in text
    assert not plot.exists()
