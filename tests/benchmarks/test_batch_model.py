"""The model of batches, beside the heap itself: the same batches at every stripe."""

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.device import bench_batches
from benchmarks.device.batch_model import EVENTS, BatchModel, NotModelled
from devalloc import Heap
from devalloc.kernels import layout
from devalloc.sizes import PAGE_BYTES
from tests.support import assert_whole_capacity, free_lanes, malloc_lanes

LANES = 32
Spread = dict[tuple[int, int, int], tuple[int, int]]


def batches_of(heap: Heap) -> Spread:
    """Pages and credits by class, stripe and 0 or 1 for the spare."""
    stripes = heap._geometry.stripes
    first, stride = layout.STRIPES.value, layout.STRIPE_STRIDE.value
    count = layout.NUM_CLASSES.value * stripes
    words = heap.handle[first : first + count * stride].cpu().numpy().reshape(count, 2, -1)[:, :, 0]
    credits = np.maximum(words.astype(np.int32), 0)
    pages = words >> layout.BATCH_SHIFT.value
    return {
        (*divmod(int(i), stripes), int(j)): (int(pages[i, j]), int(credits[i, j]))
        for i, j in np.argwhere(pages > 0)
    }


def batches_in(model: BatchModel) -> Spread:
    return {
        (cls, at, which): (batch.pages, batch.credits)
        for (cls, at), stripe in model.stripes.items()
        for which, batch in enumerate((stripe.batch, stripe.spare))
        if batch is not None
    }


ALL = set(EVENTS)
SOME = {"swapped", "opened", "readied", "held"}


@pytest.mark.parametrize(
    ("pages", "least", "most", "count", "launches", "expected"),
    [(256, 2000, 3000, 1500, 4, ALL), (1024, 16, 8192, 640, 5, SOME)],
)
def test_the_model_has_the_heaps_batches(
    pages: int, least: int, most: int, count: int, launches: int, expected: set[str]
) -> None:
    sizes = np.random.default_rng(most).integers(least, most + 1, count)
    model = BatchModel(pages)
    happened: set[str] = set()
    with Heap(pages * PAGE_BYTES) as heap:
        for _ in range(launches):
            addrs = malloc_lanes(heap, sizes.tolist(), block=LANES)
            events = model.launch(sizes, LANES)
            happened |= {name for name, number in vars(events).items() if number}
            assert batches_in(model) == batches_of(heap)
            assert int(heap.handle[layout.HELD.value]) == events.held
            assert int(heap.handle[layout.USED.value]) == model.held + model.loose
            free_lanes(heap, addrs, block=LANES)
            model.free_all()
        assert_whole_capacity(heap)
    assert happened == expected


@pytest.mark.parametrize(
    ("sizes", "why"),
    [([1024] * 128, "pages of their own"), ([40000], "a run"), ([8192] * 4000, "fills")],
)
def test_what_the_model_leaves_out(sizes: list[int], why: str) -> None:
    with pytest.raises(NotModelled, match=why):
        BatchModel(256).launch(sizes, 128 if len(sizes) == 128 else 8)


def test_a_table_for_each_row() -> None:
    options = ["--rows", "thread-(64|1024)-16384@32x1$", "--heap", "64MiB", "--launches", "2"]
    done = CliRunner().invoke(bench_batches.main, options)
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    at = lines.index(["thread-64-16384@32x1"])
    assert lines[at + 1] == ["launch", *EVENTS]
    # (512 programs of 32 lanes, 16 at each of 32 stripes, of which each opens a batch of 2 pages.)
    assert lines[at + 2] == ["0", "0", "0", "32", "0", "0", "0", "0", "64"]
    assert lines[at + 3] == ["1", "0", "0", "0", "0", "0", "0", "0", "64"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "("], "unterminated subpattern"),
        (["--rows", "no such row"], "no row of mixed, thread, warp matches 'no such row'"),
        (["--heap", "1KiB"], "a heap has at least 64 KiB"),
        (["--heap", "much"], "much"),
    ],
)
def test_what_cannot_be_counted_is_refused(options: list[str], message: str) -> None:
    done = CliRunner().invoke(bench_batches.main, options)
    assert done.exit_code == 2
    assert message in done.output
