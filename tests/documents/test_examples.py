"""The examples do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ON_GPU

ROOT = Path(__file__).resolve().parents[2]


# As `python -m examples.NAME`, but interpreted kernels run faster.
QUICKLY = """
import runpy, sys
from devalloc.testing import quick_interpreter
with quick_interpreter():
    runpy.run_module(sys.argv[1], run_name="__main__")
"""


def run(example: str) -> subprocess.CompletedProcess[str]:
    how = ["-m"] if ON_GPU else ["-c", QUICKLY]
    return subprocess.run(
        [sys.executable, *how, f"examples.{example}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.skipif(ON_GPU, reason="the example interleaves interpreted kernels")
def test_lock_free_stack_shows_the_bug_and_the_repair() -> None:
    done = run("lock_free_stack")
    assert done.returncode == 0, done.stderr
    assert "schedules (all)" in done.stdout
    assert "all nodes [1, 1, 0, 2, 3]" in done.stdout
    assert "1 preemptions" in done.stdout
    assert 'replay("0*2 1*9")' in done.stdout.splitlines()[-1]
    # The guide shows the same line.
    assert 'replay("0*2 1*9")' in (ROOT / "docs" / "guide" / "testing.md").read_text()


def test_debug_heap_names_the_culprit() -> None:
    done = run("debug_heap")
    assert done.returncode == 0, done.stderr
    assert re.search(r"neighbour lists +4 +40 B", done.stdout)
    sentence = done.stdout.splitlines()[-1]
    assert sentence.startswith("devalloc.errors.Overflow: overflow: the byte at 0x")
    assert sentence.endswith("since the last check: 4 x overflow")
    # The guide shows the same line, but for addresses and times.
    assert shape(sentence) in shape((ROOT / "docs" / "guide" / "debugging.md").read_text())


def test_mailboxes_lose_no_letter() -> None:
    done = run("mailboxes")
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"written (\d+), read (\d+), left in the boxes (\d+)\n", done.stdout)
    assert found
    written, read, left = map(int, found.groups())
    assert written == read + left
    assert min(read, left) > 0


def test_ragged_rows_are_those_of_the_reference() -> None:
    """(It compares them itself.)"""
    done = run("ragged_rows")
    assert done.returncode == 0, done.stderr
    found = re.match(r"(\d+) rows, (\d+) numbers; the longest row has (\d+): all as", done.stdout)
    assert found
    rows, numbers, longest = map(int, found.groups())
    assert rows + longest < numbers < rows * longest
    if not ON_GPU:
        assert (rows, numbers, longest) == (1000, 60542, 179)


def numbers_of(example: str, *patterns: str) -> list[int]:
    """Run an example, which compares its results itself, and find numbers in what it prints."""
    done = run(example)
    assert done.returncode == 0, done.stderr
    found = [re.search(pattern, done.stdout) for pattern in patterns]
    assert all(found), done.stdout
    return [int(number) for match in found for number in match.groups()]


def test_neighbour_lists_are_those_of_the_reference() -> None:
    atoms, steps, most = numbers_of("neighbour_lists", r"(\d+) atoms, (\d+) steps, up to (\d+) ")
    assert (atoms, steps) == ((200_000, 101) if ON_GPU else (300, 4))
    assert most > 50


def test_paged_cache_attends_to_all_tokens() -> None:
    steps, sequences, ended, taken, given_back = numbers_of(
        "paged_kv_cache",
        r"(\d+) steps of (\d+) sequences, (\d+) ended",
        r"pages taken, given back +(\d+), (\d+)",
    )
    assert (steps, sequences) == ((501, 64) if ON_GPU else (41, 4))
    assert ended > 0
    assert taken > given_back > 0


def test_sparse_product_is_that_of_torch() -> None:
    rows, entries, squared = numbers_of(
        "sparse_product", r"(\d+) rows, (\d+) entries, (\d+) in the square"
    )
    assert rows == (1_000_000 if ON_GPU else 200)
    assert rows < entries < squared


def test_inverted_index_has_every_token() -> None:
    tokens, words, batches, chunks = numbers_of(
        "inverted_index", r"(\d+) tokens, (\d+) words, (\d+) batches", r"chunks +(\d+)"
    )
    assert batches == (100 if ON_GPU else 4)
    assert tokens > chunks > words  # lists have grown


def test_the_index_of_examples_is_complete() -> None:
    folder = ROOT / "examples"
    listed = re.findall(r"\[(\w+\.py)\]", (folder / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in folder.glob("[!_]*.py"))


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 150


def shape(text: str) -> str:
    """A message without what differs from run to run: addresses, ages and line breaks."""
    text = re.sub(r"0x[0-9a-f]+", "ADDRESS", text)
    return " ".join(re.sub(r"[0-9.e-]+ s ago", "AGE", text).split())
