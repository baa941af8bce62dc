"""The worked example of docs/design.md, word for word."""

from pathlib import Path

import pytest

from devalloc import DoubleFree, Heap
from devalloc.kernels import layout
from devalloc.sizes import CLASS_SIZES
from tests.support import free_scalars, malloc_scalars

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
CLASS = CLASS_SIZES.index(1024)


def documented() -> dict[str, tuple[int, int, int]]:
    """Of each step in the table: credits, out, live bits."""
    text = DESIGN.read_text().split("### One malloc and one free", 1)[1].split("\n### ", 1)[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    steps = [row for row in rows if len(row) == 7 and row[5].startswith("`0x")]
    return {row[1]: (int(row[3]), int(row[4]), int(row[5].strip("`"), 16)) for row in steps}


def words(heap: Heap) -> tuple[int, int, int]:
    """Of class, page 0: credits of its stripe, out, the first word of live bits."""
    geometry = heap._geometry
    stripe = layout.STRIPES.value + CLASS * geometry.stripes * layout.STRIPE_STRIDE.value
    credits, page = heap.handle[[stripe, geometry.page_words]].tolist()
    return credits & 0xFFFFFFFF, page & 0xFFFFFF, int(heap.handle[geometry.live_bits])


def test_the_example() -> None:
    steps = documented()
    assert len(steps) == 5
    with Heap("64MiB") as heap:
        for _ in range(6):
            malloc_scalars(heap, [1000])
        assert words(heap) == steps["before"]
        addr = malloc_scalars(heap, [1000])
        assert int(addr) - heap.base == 0x1800
        assert words(heap) == steps["malloc: claim"]
        free_scalars(heap, addr)
        assert words(heap) == steps["free: subtract"]
        free_scalars(heap, addr)
        assert words(heap) == steps["free: subtract"]
        with pytest.raises(DoubleFree):
            heap.check()
