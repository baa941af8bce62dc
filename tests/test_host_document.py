"""docs/host.md and docs/host-cache.md: numbers come from rows; the tests that are named exist."""

from __future__ import annotations

import ast
import math
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks import arena_tables, bench_arena
from benchmarks.arena_scale import CASES
from benchmarks.compare import HOST, HOST_CACHE
from benchmarks.results import newest, read_rows

ROOT = Path(__file__).resolve().parents[1]
TEXT = HOST.read_text()
ROWS = read_rows(newest(bench_arena.FOLDER))
SCALE_ROWS = read_rows(newest(bench_arena.SCALE_FOLDER))

LETTERS = dict(re.findall(r"^- ([A-Z]): `(tests/[\w/.]+)`$", TEXT, re.MULTILINE))
"""What the document says its letters stand for."""

REASONS = ("replaced", "not yet", "left out", "as TinyTorch")
"""One of these words instead of a test: why there is none."""


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def mechanisms() -> list[list[str]]:
    """The rows of the tables of mechanisms, cell by cell."""
    _, _, part = TEXT.partition("## Every mechanism")
    part = re.sub(r"<!-- table:.*?<!-- /table", "", part, flags=re.DOTALL)
    lines = [line for line in part.splitlines() if line.startswith("|") and "---" not in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "mechanism"]


def named_tests(cell: str) -> list[tuple[str, str]]:
    """(file, test) that a cell names; the test is empty where the whole file is meant."""
    found, file = [], ""
    for letter, name in re.findall(r"\b([A-Z])\b|`([^`]+)`", re.sub(r"\([^)]*\)", "", cell)):
        if letter:
            file = LETTERS[letter]
            found.append((file, ""))
        elif name.endswith(".py"):
            file = name
            found.append((file, ""))
        elif name.startswith("test_"):
            found.append((file, name))
    return found


def test_the_letters_stand_for_files() -> None:
    assert len(LETTERS) > 8
    assert all((ROOT / path).exists() for path in LETTERS.values())


def test_there_are_tables_of_mechanisms() -> None:
    """One for each allocator, so that nothing below passes for want of rows."""
    assert len(mechanisms()) > 90
    assert {len(row) for row in mechanisms()} == {3}


@pytest.mark.parametrize("row", mechanisms(), ids=lambda row: row[0][:60])
def test_every_mechanism_names_a_test_or_a_reason(row: list[str]) -> None:
    named = named_tests(row[2])
    assert named or any(word in cell for cell in row[1:] for word in REASONS), row
    for file, name in named:
        assert (ROOT / file).exists(), file
        assert not name or name in names_in(file), f"{file} has no {name}"


@pytest.mark.parametrize("block", ["pairs", "parts", "training"])
def test_the_tables_are_those_of_the_newest_rows(block: str) -> None:
    assert f"<!-- table:{block} -->\n{arena_tables.blocks(ROWS)[block]}\n<!--" in TEXT


def test_the_rows_show_what_was_wanted() -> None:
    """A step within 2 %, and a tensor of a shape that comes again no slower than PyTorch's."""
    ratios = {row["row"]: float(row["median"]) for row in ROWS if row["op"] == "ratio"}
    assert ratios.pop("training-4x256") <= 1.02
    assert all(ratio <= 1 for name, ratio in ratios.items() if not name.startswith("changing"))
    assert all(row["check"] == "ok" for row in ROWS)


def test_the_table_of_scale_is_that_of_the_newest_rows() -> None:
    before = read_rows(bench_arena.SCALE_BEFORE)
    table = arena_tables.scale_table(SCALE_ROWS, before)
    assert f"<!-- table:scale -->\n{table}\n<!--" in HOST_CACHE.read_text()


def test_the_rows_of_scale_show_what_was_wanted() -> None:
    """A pair beside a million free blocks within 4; the rest logarithmic, but for the caches of the
    processor, for which it may take twice that."""
    medians: dict[str, dict[int, float]] = {}
    for row in SCALE_ROWS:
        case = row["row"].removeprefix("scale-").rpartition("-")[0]
        medians.setdefault(case, {})[int(row["n"])] = float(row["median"])
    assert set(medians) == set(CASES)
    for name, found in medians.items():
        assert set(found) == set(CASES[name].counts)
        few, many = min(found), max(found)
        assert found[many] <= 2 * found[few] * math.log(many) / math.log(few), name
    pairs = medians["same-size"]
    assert max(pairs) == 1_000_000
    assert max(pairs.values()) <= 4 * pairs[100]


def test_a_part_without_words_is_an_error() -> None:
    rows = [{**row, "row": "part-unheard-of"} for row in ROWS if row["pattern"] == "part"]
    with pytest.raises(KeyError, match="unheard-of"):
        arena_tables.parts_table(rows)
