"""The worked example of docs/design/heap.md, word for word."""

from pathlib import Path

import pytest

from devalloc import DoubleFree, Heap
from devalloc.kernels import layout
from devalloc.sizes import CLASS_SIZES
from tests.support import free_scalars, malloc_scalars

DESIGN = Path(__file__).parents[2] / "docs" / "design" / "heap.md"
CLASS = CLASS_SIZES.index(1024)


def documented() -> dict[str, tuple[int, int, int, str]]:
    """Of each step in the table: tickets left, out, live bits, magazine."""
    text = DESIGN.read_text().split("## One malloc, one free", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    steps = [row for row in rows if len(row) == 8 and row[5].startswith("`0x")]
    return {row[1]: (int(row[3]), int(row[4]), int(row[5].strip("`"), 16), row[6]) for row in steps}


def words(heap: Heap) -> tuple[int, int, int, str]:
    """Of class 19, page 0 and program 0: tickets left of the line, out, the first word of live
    bits, and the magazine in words."""
    g = heap._geometry
    line = range(g.words)[g.line_words][CLASS * g.stripes]
    tickets, live, page = heap.handle[[line, g.records, g.records + 64]].tolist()
    magazines = heap.handle[g.magazine_words]
    spans = magazines[magazines != 0].tolist()
    magazine = "empty"
    for span in spans:
        assert (span >> layout.SPAN_COUNT.value) & 0x3FFF == 1
        assert (span >> layout.SPAN_CLASS.value) == CLASS + 1
        magazine = f"granule {(span >> layout.SPAN_FIRST.value) & 0xFFF}"
    return tickets & 0xFFFFFFFF, page & 0xFFFFFF, live, magazine


def test_the_example() -> None:
    steps = documented()
    assert len(steps) == 6
    with Heap("64MiB") as heap:
        for _ in range(6):
            malloc_scalars(heap, [1000])
        assert words(heap) == steps["before"]
        addr = malloc_scalars(heap, [1000])
        assert int(addr) - heap.base == 0x1800
        assert words(heap) == steps["malloc: claim"]
        free_scalars(heap, addr)
        assert words(heap) == steps["free: magazine"]
        free_scalars(heap, addr)
        assert words(heap) == steps["free: magazine"]
        with pytest.raises(DoubleFree):
            heap.check()
