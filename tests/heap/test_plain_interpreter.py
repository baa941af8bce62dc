"""Triton's interpreter as it comes: the other tests run their kernels in `quick_interpreter`, and a
heap must do there what it does here."""

from __future__ import annotations

import random

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from devalloc import Heap, Stats
from devalloc.sizes import PAGE_BYTES
from tests import user_kernels as uk
from tests.conftest import HAS_GREENLET, ON_GPU
from tests.support import (
    EDGE_SIZES,
    error_counts,
    free_lanes,
    free_scalars,
    int64,
    malloc_lanes,
    malloc_scalars,
    write,
    wrong_words,
)

pytestmark = [
    pytest.mark.oldest,
    pytest.mark.skipif(ON_GPU, reason="compares two ways to interpret kernels"),
    pytest.mark.skipif(not HAS_GREENLET, reason="needs greenlet for the other way"),
]

PLAIN_CALL = InterpretedFunction.__call__


@pytest.fixture(autouse=True, scope="module")
def quick() -> None:
    """Not here."""


def observed(debug: bool) -> list[tuple[list[int], dict[str, int], Stats]]:
    """What a heap answers to a little of everything: addresses and sizes, errors, statistics."""
    generator = random.Random(7)
    sizes = [generator.choice(EDGE_SIZES) for _ in range(12)] + [0, -1, 5 * PAGE_BYTES, 1 << 40]
    seen = []
    with Heap(40 * PAGE_BYTES, debug=debug) as heap:

        def note(values: torch.Tensor) -> None:
            offsets = torch.where(values >= heap.base, values - heap.base, values)
            seen.append((offsets.tolist(), error_counts(heap), heap.stats()))

        lanes = malloc_lanes(heap, sizes, 16)
        note(lanes)
        scalars = malloc_scalars(heap, [17, 4000, PAGE_BYTES])
        note(scalars)
        note(heap.usable_size(lanes))
        written = heap.usable_size(scalars) // 8 * 8
        write(scalars, written)
        uk.realloc_lanes_kernel[(1,)](heap.handle, scalars, int64([64, 70_000, 16]), 3, BLOCK=4)
        note(scalars)
        note(int64([wrong_words(scalars, torch.minimum(written, int64([16, 4000, 16])))]))
        heap.audit()
        free_scalars(heap, scalars)
        free_lanes(heap, [*lanes[:4].tolist(), *lanes[:4].tolist(), heap.base + 8], 16)
        note(lanes)
        free_lanes(heap, lanes[4:], 16)
        heap.audit()
        note(lanes)
    return seen


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_a_heap_does_the_same_in_the_quick_interpreter(debug: bool) -> None:
    from devalloc.testing import quick_interpreter

    assert InterpretedFunction.__call__ is PLAIN_CALL
    expected = observed(debug)
    with quick_interpreter():
        assert InterpretedFunction.__call__ is not PLAIN_CALL
        assert observed(debug) == expected
    assert sum(sum(errors.values()) for _, errors, _ in expected) > 4
