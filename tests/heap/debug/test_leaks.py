"""Leaks are named: by tag, with sizes and ages; and what closing a heap says about them."""

import time
import warnings

import pytest
import torch

from devalloc import Heap, InvalidArgument, LeakWarning
from tests.heap.debug.support import SHAPES, debug_heap, free, malloc, no_leak_warning

pytestmark = pytest.mark.oldest


@pytest.mark.parametrize("shape", SHAPES)
def test_leaks_by_tag(shape: str) -> None:
    with debug_heap() as heap:
        start = time.monotonic()
        kv = malloc(heap, [100, 5000, 70_000], [heap.tag("kv-cache")] * 3, shape)
        time.sleep(0.2)
        later = time.monotonic()
        rest = malloc(heap, [64] * 5, [7, 7, 7, 0, 7], shape)
        free(heap, kv[1:2], shape)
        free(heap, rest[:1], shape)
        report = heap.leaks()
        end = time.monotonic()
        rows = {row.tag: row for row in report.rows}
        assert [row.tag for row in report.rows] == ["kv-cache", "7", ""]
        assert (report.count, len(report), report.bytes) == (6, 6, 70_100 + 4 * 64)
        assert (rows["kv-cache"].count, rows["kv-cache"].bytes) == (2, 70_100)
        assert rows["kv-cache"].largest == 70_000
        assert (rows["7"].count, rows["7"].bytes, rows[""].count) == (3, 192, 1)
        # Ages are of this clock, within what lies between the launches and the report.
        assert 0.2 <= rows["kv-cache"].newest <= rows["kv-cache"].oldest <= end - start + 1e-3
        assert 0 <= rows["7"].newest <= rows["7"].oldest <= end - later + 1e-3
        blocks = list(report.blocks())
        assert {(b.address, b.size, b.tag) for b in blocks} == {
            (int(kv[0]), 100, "kv-cache"),
            (int(kv[2]), 70_000, "kv-cache"),
            *((int(rest[i]), 64, "" if i == 3 else "7") for i in (1, 2, 3, 4)),
        }
        assert [b.age for b in blocks] == sorted((b.age for b in blocks), reverse=True)
        assert [b.size for b in report.blocks("kv-cache")] in ([100, 70_000], [70_000, 100])
        free(heap, kv[[0, 2]], shape)
        free(heap, rest[1:], shape)


def test_the_report_is_a_table() -> None:
    with debug_heap() as heap:
        assert str(heap.leaks()) == "no live blocks"
        addrs = malloc(heap, [1024, 1024, 300], [heap.tag("kv-cache")] * 2 + [3])
        lines = str(heap.leaks()).splitlines()
        assert lines[0].split() == ["tag", "blocks", "bytes", "largest", "oldest"]
        assert lines[1].split()[:6] == ["kv-cache", "2", "2", "KiB", "1", "KiB"]
        assert lines[2].split()[:2] == ["3", "1"]
        assert lines[3].startswith("3 live blocks, 2.29")
        free(heap, addrs)


def test_closing_with_live_blocks_warns() -> None:
    heap = Heap("1MiB", debug=True)
    heap.malloc([1000, 1000], tag="forgotten")
    with pytest.warns(LeakWarning, match=r"(?s)forgotten +2 +1.953 KiB.*2 live blocks"):
        heap.close()
    heap.close()


def test_the_end_of_a_with_block_warns() -> None:
    with pytest.warns(LeakWarning, match="1 live block"), Heap("1MiB", debug=True) as heap:
        heap.malloc([1000])


def test_no_warning_where_nothing_leaks() -> None:
    with no_leak_warning():
        with Heap("1MiB", debug=True) as heap:
            heap.free(heap.malloc([1000]))
        with Heap("1MiB") as heap:
            heap.malloc([1000])


def test_no_warning_beside_another_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", LeakWarning)
        with pytest.raises(InvalidArgument), Heap("1MiB", debug=True) as heap:
            heap.tensor(heap.malloc([1000])[0], 1001, torch.uint8)
