"""Tables of arenas in the documents are those of the newest rows, which show what was wanted."""

from __future__ import annotations

import math

import pytest

from benchmarks.arena import bench_arena
from benchmarks.arena.scale import CASES
from benchmarks.results import newest, read_rows
from benchmarks.tables import arena_tables
from benchmarks.tables.compare import ARENA_BLOCKS, HOST

ROWS = read_rows(newest(bench_arena.FOLDER))
SCALE_ROWS = read_rows(newest(bench_arena.SCALE_FOLDER))


@pytest.mark.parametrize("block", sorted(arena_tables.blocks(ROWS)))
def test_the_tables_are_those_of_the_newest_rows(block: str) -> None:
    text = ARENA_BLOCKS[block].read_text()
    assert f"<!-- table:{block} -->\n{arena_tables.blocks(ROWS)[block]}\n<!--" in text


def test_the_rows_show_what_was_wanted() -> None:
    """A step within 2 %, and a tensor of a shape that comes again no slower than PyTorch's."""
    ratios = {row["row"]: float(row["median"]) for row in ROWS if row["op"] == "ratio"}
    assert ratios.pop("training-4x256") <= 1.02
    assert all(ratio <= 1 for name, ratio in ratios.items() if not name.startswith("changing"))
    assert all(row["check"] == "ok" for row in ROWS)


def test_the_table_of_scale_is_that_of_the_newest_rows() -> None:
    table = arena_tables.scale_table(SCALE_ROWS)
    assert f"<!-- table:scale -->\n{table}\n<!--" in HOST.read_text()


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
