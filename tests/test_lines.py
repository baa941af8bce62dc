"""The experiment of docs/compact-heap.md: right, and as compact as the document says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.lines import layout, table
from benchmarks.lines.host import Lines
from devalloc.sizes import PAGE_BYTES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the race measures it on a GPU")

HEAP = 64 << 20


def overlaps(addrs: torch.Tensor, sizes: torch.Tensor) -> int:
    start, order = addrs.sort()
    end = start + sizes[order]
    return int((end[:-1] > start[1:]).sum())


def exchanged(heap: Lines, sizes: torch.Tensor, lanes: int, rounds: int) -> torch.Tensor:
    """Blocks of these sizes, after a random half of them was freed and allocated again."""
    count = sizes.numel()
    addrs = torch.zeros(count, dtype=torch.int64)
    chance = torch.Generator().manual_seed(3)
    heap.malloc(sizes, addrs, lanes)
    for _ in range(rounds):
        chosen = (torch.rand(count, generator=chance) < 0.5).to(torch.int32)
        heap.free(addrs, chosen, lanes)
        heap.malloc(sizes, addrs, lanes)
        assert int((addrs == 0).sum()) == 0
        assert overlaps(addrs, sizes) == 0
    return addrs


@pytest.mark.parametrize(
    ("low", "high", "count", "lanes"),
    [(16, 4096, 600, 32), (64, 64, 1500, 32), (1280, 1280, 256, 64), (40, 2000, 100, 64)],
    ids=["mixed", "alike", "whole-pages", "wide"],
)
def test_blocks_are_apart_and_all_but_open_pages_come_back(
    low: int, high: int, count: int, lanes: int
) -> None:
    heap = Lines(HEAP, "cpu", stripes=2)
    chance = torch.Generator().manual_seed(1)
    sizes = torch.randint(low, high + 1, (count,), generator=chance)
    addrs = exchanged(heap, sizes, lanes, rounds=3)
    heap.free(addrs, torch.ones(count, dtype=torch.int32), lanes)
    # What is left is the open place of each line, up to two pages, and what is in magazines.
    classes = len({int(size) for size in sizes}) if low == high else 38
    assert heap.pages - len(heap.free_pages()) <= 4 * classes


def test_a_block_may_fill_more_pages_than_are_taken_together() -> None:
    heap = Lines(HEAP, "cpu", stripes=1)
    sizes = torch.full((256,), 32752)
    addrs = torch.zeros(256, dtype=torch.int64)
    heap.malloc(sizes, addrs, 256)
    assert int((addrs == 0).sum()) == 0
    assert overlaps(addrs, sizes) == 0
    heap.free(addrs, torch.ones(256, dtype=torch.int32), 256)
    assert heap.pages - len(heap.free_pages()) <= 4


@pytest.mark.parametrize("size", [512, 1024, 40])
def test_a_block_frees_what_is_still_live(size: int) -> None:
    heap = Lines(HEAP, "cpu", stripes=1)
    addrs = torch.zeros(256, dtype=torch.int64)
    heap.malloc(torch.full((256,), size), addrs, 256)
    chosen = (torch.arange(256) % 3 == 0).to(torch.int32)
    heap.free(addrs.clone(), chosen, 256)
    heap.free(addrs, torch.ones(256, dtype=torch.int32), 256)
    # (What is left is a page whose place is open.)
    assert heap.pages - len(heap.free_pages()) <= (size == 40)
    records = heap.handle[heap.handle[layout.RECORDS.value] :]
    words = records[layout.PAGE_WORD.value :: layout.RECORD_WORDS.value][: heap.pages]
    assert int((words & layout.OUT_MASK.value).sum()) == 0


def test_scalars_are_freed_in_the_interpreter() -> None:
    heap = Lines(HEAP, "cpu", stripes=1)
    addrs = torch.zeros(70, dtype=torch.int64)
    heap.malloc_scalars(addrs, 1024, 1)
    assert overlaps(addrs, torch.full((70,), 1024)) == 0
    heap.free_scalars(addrs, 1)
    again = torch.zeros(70, dtype=torch.int64)
    heap.malloc_scalars(again, 1024, 1)
    assert torch.equal(addrs.sort().values, again.sort().values)


def test_half_empty_pages_are_used_again() -> None:
    heap = Lines(HEAP, "cpu", stripes=1)
    sizes = torch.full((1000,), 1024)
    addrs = exchanged(heap, sizes, 32, rounds=6)
    pages = torch.unique(addrs // PAGE_BYTES).numel()
    assert pages * PAGE_BYTES <= 2 * int(sizes.sum())


def test_what_lives_stays_at_the_front() -> None:
    heap = Lines(HEAP, "cpu")
    sizes = torch.randint(16, 4097, (1500,), generator=torch.Generator().manual_seed(2))
    addrs = exchanged(heap, sizes, 32, rounds=2)
    assert int(addrs.max() - addrs.min()) <= 3 * int(sizes.sum())
    assert heap.largest_free() >= 3 * len(heap.free_pages()) // 4


def test_the_tables_of_the_document_are_those_of_the_newest_rows() -> None:
    text = table.DOCUMENT.read_text()
    for block in table.blocks().values():
        assert block in text
