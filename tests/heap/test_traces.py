"""Random traces of all operations against a plain-Python heap, shrunk when they fail.

Hypothesis prints a failing trace as the lines of a program that repeats it; the examples are the
same in every run (`tests/conftest.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from devalloc import Heap
from devalloc.sizes import CLASS_SIZES, MAX_SLOT, PAGE_BYTES
from tests import user_kernels as uk
from tests.plain_heap import has_room, set_aside
from tests.support import (
    DEVICE,
    EDGE_SIZES,
    assert_whole_capacity,
    error_counts,
    int64,
    promised_alignment,
    write,
    wrong_words,
)

LANES = 8
# Content is written and verified up to here: enough to see blocks that overlap.
MOST_WRITTEN = 4096

sizes = st.one_of(
    st.sampled_from(EDGE_SIZES),
    st.sampled_from([16, 48, 1024, 32752, PAGE_BYTES]),  # often the same, so that pages fill
    st.builds(
        lambda pages, step: pages * PAGE_BYTES + step,
        st.sampled_from([1, 2, 3, 63, 64, 65]),
        st.sampled_from([-1, 0, 1]),
    ),
)
odd_sizes = st.one_of(sizes, sizes, st.sampled_from([0, -1]))
shapes = st.sampled_from(["lanes", "masked", "scalar", "host"])
picks = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=LANES)


@dataclass
class Block:
    """A live block: bytes set aside for it, and the pattern of which ``written`` bytes hold."""

    size: int
    tag: int
    written: int


class Traces(RuleBasedStateMachine):
    """One heap and what must be in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.live: dict[int, Block] = {}
        self.dead: list[int] = []
        self.tag = 1
        self.allocations = self.frees = self.failures = 0

    @initialize(
        pages=st.sampled_from([2, 5, 66, 130]), wanted=st.lists(sizes, min_size=2, max_size=12)
    )
    def make(self, pages: int, wanted: list[int]) -> None:
        """A heap with dirty memory and some blocks."""
        self.pages = pages
        self.heap = heap = self.stack.enter_context(Heap(pages * PAGE_BYTES))
        whole = heap.malloc([heap.capacity])
        heap.tensor(whole[0], heap.capacity, torch.uint8).fill_(0xA5)
        heap.free(whole)
        heap.reset()
        self.allocated(self.run_malloc("host", wanted))

    def teardown(self) -> None:
        if hasattr(self, "heap"):
            self.verify(list(self.live))
            self.heap.free(list(self.live))
            assert_whole_capacity(self.heap)
        self.stack.close()

    # Operations on the device, in every shape of call -------------------------------------------

    def masked(self, shape: str, values: list[int]) -> Iterator[tuple[int, int]]:
        """Pairs of value and whether its lane is active: with masks, every other one."""
        for index, value in enumerate(values):
            yield value, int(shape != "masked" or index % 2 == 0)

    def run_malloc(self, shape: str, wanted: list[int]) -> list[tuple[int, int]]:
        """Pairs of size and address of the requests that were made."""
        heap = self.heap
        if shape == "host":
            return list(zip(wanted, heap.malloc(wanted).tolist(), strict=True))
        if shape == "scalar":
            addrs = torch.full((len(wanted),), -1, dtype=torch.int64, device=DEVICE)
            uk.malloc_scalar_kernel[(len(wanted),)](heap.handle, int64(wanted), addrs)
            return list(zip(wanted, addrs.tolist(), strict=True))
        padded = wanted + [1] * (LANES - len(wanted))
        active = [flag for _, flag in self.masked(shape, wanted)] + [0] * (LANES - len(wanted))
        addrs = torch.full((LANES,), -1, dtype=torch.int64, device=DEVICE)
        uk.malloc_masked_kernel[(1,)](heap.handle, int64(padded), int64(active), addrs, BLOCK=LANES)
        pairs = list(zip(padded, addrs.tolist(), active, strict=True))
        assert all(addr == 0 for _, addr, flag in pairs if not flag)
        return [(size, addr) for size, addr, flag in pairs if flag]

    def run_free(self, shape: str, given: list[int]) -> list[int]:
        """The addresses whose free was asked for."""
        heap = self.heap
        if shape == "host":
            heap.free(given)
            return given
        if shape == "scalar":
            uk.free_scalar_kernel[(len(given),)](heap.handle, int64(given))
            return given
        active = [flag for _, flag in self.masked(shape, given)] + [0] * (LANES - len(given))
        # Inactive lanes hold live addresses, which must stay.
        padded = given + [next(iter(self.live), 0)] * (LANES - len(given))
        uk.free_masked_kernel[(1,)](heap.handle, int64(padded), int64(active), BLOCK=LANES)
        return [addr for addr, flag in zip(padded, active, strict=True) if flag]

    # Rules ------------------------------------------------------------------------------------

    @rule(shape=shapes, wanted=st.lists(odd_sizes, min_size=1, max_size=LANES))
    def malloc(self, shape: str, wanted: list[int]) -> None:
        self.allocated(self.run_malloc(shape, wanted))

    @rule(shape=shapes, size=sizes, count=st.integers(2, LANES))
    def malloc_alike(self, shape: str, size: int, count: int) -> None:
        self.allocated(self.run_malloc(shape, [size] * count))

    @rule(scalar=st.booleans(), wanted=st.lists(sizes.filter(lambda n: n <= PAGE_BYTES),
                                                min_size=1, max_size=4))  # fmt: skip
    def zeros(self, scalar: bool, wanted: list[int]) -> None:
        addrs = torch.full((len(wanted),), -1, dtype=torch.int64, device=DEVICE)
        if scalar:
            uk.zeros_scalar_kernel[(len(wanted),)](self.heap.handle, int64(wanted), addrs)
        else:
            uk.zeros_lanes_kernel[(1,)](
                self.heap.handle, int64(wanted), addrs, len(wanted), BLOCK=LANES
            )
        for size, addr in zip(wanted, addrs.tolist(), strict=True):
            if addr:
                assert not self.heap.tensor(addr, size, torch.uint8).any()
        self.allocated(list(zip(wanted, addrs.tolist(), strict=True)))

    @precondition(lambda self: self.live)
    @rule(shape=shapes, chosen=picks)
    def free(self, shape: str, chosen: list[int]) -> None:
        blocks = list(self.live)
        given = list(dict.fromkeys(blocks[index % len(blocks)] for index in chosen))
        freed = self.run_free(shape, given)
        self.verify(freed)
        self.forget(freed)
        assert error_counts(self.heap) == {}

    @precondition(lambda self: self.live)
    @rule(shape=shapes, chosen=st.integers(0, 1 << 20))
    def free_twice(self, shape: str, chosen: int) -> None:
        addr = list(self.live)[chosen % len(self.live)]
        freed = self.run_free("lanes" if shape == "masked" else shape, [addr, addr])
        assert freed == [addr, addr]
        self.forget([addr])
        assert error_counts(self.heap) == {"double free": 1}

    @precondition(lambda self: self.dead)
    @rule(shape=shapes, chosen=st.integers(0, 1 << 20))
    def free_dead(self, shape: str, chosen: int) -> None:
        addr = self.dead[chosen % len(self.dead)]
        if addr in self.live:
            return
        self.run_free(shape, [addr])
        counts = error_counts(self.heap)
        # (In a page that was cut anew the address may lie inside a slot.)
        assert counts in ({"double free": 1}, {"invalid free": 1})

    @precondition(lambda self: self.live)
    @rule(shape=shapes, chosen=st.integers(0, 1 << 20), step=st.sampled_from([1, 8, 16, -8]))
    def free_inside(self, shape: str, chosen: int, step: int) -> None:
        addr, block = list(self.live.items())[chosen % len(self.live)]
        if not 0 < step < block.size and step != -8:
            return
        self.run_free(shape, [addr + step])
        assert error_counts(self.heap) == {"invalid free": 1}

    @rule(size=odd_sizes, grow=st.booleans(), scalar=st.booleans(), chosen=st.integers(0, 1 << 20))
    def realloc(self, size: int, grow: bool, scalar: bool, chosen: int) -> None:
        """Of a live block, or (with address 0) of none; to more than it has, or to any size."""
        blocks = [*self.live, 0]
        old = blocks[chosen % len(blocks)]
        if grow and old and size > 0:
            size += self.live[old].size
        room = size > 0 and has_room(self.blocks(), set_aside(size), self.heap.base, self.pages)
        addrs = int64([old])
        if scalar:
            uk.realloc_scalar_kernel[(1,)](self.heap.handle, addrs, int64([size]))
        else:
            uk.realloc_lanes_kernel[(1,)](self.heap.handle, addrs, int64([size]), 1, BLOCK=LANES)
        self.resized(old, int(addrs[0]), size, room)

    def resized(self, old: int, new: int, size: int, room: bool) -> None:
        block = self.live.get(old)
        if size == 0 and block is not None:
            assert new == 0
            self.forget([old])
        elif block is not None and 0 < size <= block.size:
            assert new == old
        elif new == 0:
            assert not room, f"realloc to {size} B failed although there was room"
            self.failures += size > 0
        else:
            assert room
            kept = 0 if block is None else min(block.written, size // 8 * 8)
            if block is not None and kept:
                assert wrong_words(int64([new]), int64([kept]), block.tag) == 0
            if block is not None:
                self.forget([old])
            self.place(size, new)
        counts = error_counts(self.heap)
        failed = new == 0 and size != 0
        assert counts == (
            {"out of memory" if size > 0 else "invalid argument": 1} if failed else {}
        )

    @precondition(lambda self: self.live)
    @rule(chosen=picks)
    def usable_size(self, chosen: list[int]) -> None:
        blocks = list(self.live)
        asked = [blocks[index % len(blocks)] for index in chosen]
        wanted = [self.live[addr].size for addr in asked]
        assert self.heap.usable_size(asked).tolist() == wanted
        assert self.heap.usable_size([addr + 8 for addr in asked]).tolist() == [0] * len(asked)

    @precondition(lambda self: len(self.live) > 2)
    @rule()
    def trim(self) -> None:
        self.heap.trim()

    @precondition(lambda self: len(self.live) > 16)
    @rule()
    def reset(self) -> None:
        self.heap.reset()
        self.live.clear()
        self.allocations = self.frees = self.failures = 0

    # The model --------------------------------------------------------------------------------

    def blocks(self) -> list[tuple[int, int]]:
        return [(addr, block.size) for addr, block in self.live.items()]

    def allocated(self, pairs: list[tuple[int, int]]) -> None:
        for size, addr in pairs:
            if addr:
                self.place(size, addr)
        failed = [size for size, addr in pairs if addr == 0 and size > 0]
        negative = [size for size, addr in pairs if size < 0]
        self.failures += len(failed)
        for size in failed:
            assert not has_room(self.blocks(), set_aside(size), self.heap.base, self.pages), (
                f"malloc of {size} B failed although there is room"
            )
        expected = {"out of memory": len(failed), "invalid argument": len(negative)}
        assert error_counts(self.heap) == {name: n for name, n in expected.items() if n}

    def place(self, size: int, addr: int) -> None:
        assert size > 0
        aside = set_aside(size)
        assert self.heap.base <= addr <= self.heap.base + self.heap.capacity - aside
        assert addr % promised_alignment(size) == 0
        for other, length in self.blocks():
            assert other + length <= addr or addr + aside <= other, "two live blocks overlap"
        written = min(aside, MOST_WRITTEN) // 8 * 8
        self.live[addr] = Block(aside, self.tag, written)
        write(int64([addr]), int64([written]), self.tag)
        self.tag += 1
        self.allocations += 1

    def verify(self, addrs: list[int]) -> None:
        for addr in addrs:
            block = self.live[addr]
            assert wrong_words(int64([addr]), int64([block.written]), block.tag) == 0

    def forget(self, addrs: list[int]) -> None:
        for addr in addrs:
            del self.live[addr]
        self.dead = [*self.dead, *addrs][-32:]
        self.frees += len(addrs)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "heap"):
            return
        self.heap.audit()
        stats = self.heap.stats()
        assert (stats.allocations, stats.frees) == (self.allocations, self.frees)
        assert stats.failures == self.failures
        assert stats.used + stats.free == stats.capacity
        for row in stats.per_class:
            assert row.live == sum(block.size == row.size for block in self.live.values())
        runs = sum(block.size for block in self.live.values() if block.size > MAX_SLOT)
        assert stats.used >= runs
        if stats.largest_free > MAX_SLOT:
            assert has_room(self.blocks(), stats.largest_free, self.heap.base, self.pages)
        if stats.largest_free < stats.capacity:
            more = max(stats.largest_free, MAX_SLOT) // PAGE_BYTES * PAGE_BYTES + PAGE_BYTES
            assert not has_room(self.blocks(), more, self.heap.base, self.pages)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a failing trace is shrunk for up to five minutes
@pytest.mark.parametrize("traces", [8, pytest.param(100, marks=pytest.mark.long)])
def test_traces(traces: int) -> None:
    run_state_machine_as_test(
        Traces,
        settings=settings(max_examples=traces, stateful_step_count=20, report_multiple_bugs=False),
    )


def test_slot_sizes_cover_every_class() -> None:
    """The sizes that traces draw meet both sides of every boundary between classes."""
    assert {set_aside(size) for size in EDGE_SIZES if size <= MAX_SLOT} == set(CLASS_SIZES)
    assert all({size, size + 1} <= set(EDGE_SIZES) for size in CLASS_SIZES)
