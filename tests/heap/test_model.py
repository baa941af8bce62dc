"""Random traces against a plain model: a dictionary of live blocks.

A failing trace is named by its seed, which is in the test's name; the trace depends on nothing
else. ``pytest tests/heap/test_model.py -k seed3`` replays one.
"""

import random

import pytest
import torch

from devalloc import Heap
from devalloc.sizes import CLASS_SIZES, CLASS_SLOTS, MAX_SLOT, PAGE_BYTES
from tests.support import (
    EDGE_SIZES,
    assert_blocks,
    assert_whole_capacity,
    free_lanes,
    malloc_lanes,
    write,
    wrong_words,
)

STEPS = 9


class Model:
    """Which blocks must be live, and the checks that follow from it."""

    def __init__(self, heap: Heap, generator: random.Random) -> None:
        self.heap = heap
        self.generator = generator
        self.live: dict[int, int] = {}
        self.allocations = self.frees = self.failures = 0
        self.tag = 1
        self.written: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        # A trace stays with few classes, or the heap's pages would be used up by their number.
        self.classes = generator.sample(CLASS_SIZES, 4)

    def draw_size(self) -> int:
        kind = self.generator.random()
        if kind < 0.6:
            return max(1, self.generator.choice(self.classes) - self.generator.choice((0, 0, 1)))
        if kind < 0.7:
            return self.generator.choice(EDGE_SIZES)
        pages = self.generator.choice((1, 1, 2, 3, 5, 20, 63, 64, 65))
        return pages * PAGE_BYTES + self.generator.choice((-1, 0, 1))

    def malloc(self) -> None:
        sizes = [self.draw_size()] * self.generator.choice((0, 1, 30, 200))
        sizes = [size for size in sizes if size <= MAX_SLOT]
        sizes += [self.draw_size() for _ in range(self.generator.randint(1, 6))]
        self.generator.shuffle(sizes)
        addrs = malloc_lanes(self.heap, sizes, 256)
        usable = self.heap.usable_size(addrs)
        # No block of 4 MiB is filled: words are written up to a page's length.
        write(addrs, usable.clamp(max=PAGE_BYTES), self.tag)
        self.written.append((addrs, usable.clamp(max=PAGE_BYTES), self.tag))
        self.tag += len(sizes)
        for size, addr, has in zip(sizes, addrs.tolist(), usable.tolist(), strict=True):
            if addr:
                assert has >= size
                assert addr not in self.live
                self.live[addr] = has
            else:
                self.failures += 1
                self.nulls.append(size)
        self.allocations += int((addrs != 0).sum())

    def free(self) -> None:
        share = self.generator.choice((0.1, 0.5, 0.5, 1.0))
        chosen = [addr for addr in self.live if self.generator.random() < share]
        self.verify(set(chosen))
        self.generator.shuffle(chosen)
        if chosen:
            free_lanes(self.heap, chosen, 256)
        for addr in chosen:
            del self.live[addr]
        self.frees += len(chosen)

    def verify(self, leaving: set[int]) -> None:
        """The content of every block is what was written; those leaving are forgotten."""
        remaining = []
        for addrs, sizes, tag in self.written:
            assert wrong_words(addrs, sizes, tag) == 0
            # Holes keep the tags in place.
            stays = torch.tensor([addr not in leaving for addr in addrs.tolist()])
            kept = torch.where(stays.to(addrs.device), addrs, 0)
            if kept.any():
                remaining.append((kept, sizes, tag))
        self.written = remaining

    def step(self) -> None:
        self.nulls: list[int] = []
        if self.live and self.generator.random() < 0.45:
            self.free()
        else:
            self.malloc()
        self.check()

    def check(self) -> None:
        heap = self.heap
        heap.audit()
        assert_blocks(heap, torch.tensor(list(self.live)), list(self.live.values()))
        stats = heap.stats()
        assert stats.allocations == self.allocations
        assert stats.frees == self.frees
        assert stats.failures == self.failures
        assert stats.used + stats.free == stats.capacity
        assert stats.used >= sum(self.live.values())
        for row in stats.per_class:
            assert row.live == sum(size == row.size for size in self.live.values())
        # Null means that nothing of that shape is free, after the step as well: a step that
        # allocates frees nothing.
        for size in self.nulls:
            if size > MAX_SLOT:
                assert stats.largest_free < size
            else:
                assert stats.largest_free < PAGE_BYTES
                cls = next(i for i, has in enumerate(CLASS_SIZES) if has >= size)
                row = stats.per_class[cls]
                assert row.live == row.pages * CLASS_SLOTS[cls]
        if heap.stats().failures:
            heap.clear_errors()


@pytest.mark.parametrize("pages", [10, 150])
@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"seed{seed}")
def test_random_trace(seed: int, pages: int) -> None:
    generator = random.Random(seed * 1000 + pages)
    with Heap(pages * PAGE_BYTES) as heap:
        model = Model(heap, generator)
        for _ in range(STEPS):
            model.step()
        model.verify(set())
        if model.live:
            free_lanes(heap, list(model.live), 256)
        assert_whole_capacity(heap)
