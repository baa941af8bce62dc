"""Programs that allocate while the host grows the heap, or takes chunks out of use."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from devalloc import kernels as da
from devalloc.heap.geometry import Geometry, Present, initialise
from devalloc.heap.heap_audit import audit
from devalloc.heap.state import State
from devalloc.kernels import layout, upkeep
from devalloc.sizes import PAGE_BYTES
from devalloc.testing import PCT, Exhaustive, Interleaving, Launch, Run, ScheduleError
from tests.conftest import ON_GPU
from tests.heap.bare import NOWHERE

pytestmark = pytest.mark.skipif(ON_GPU, reason="interleavings run in the interpreter")

PAGES = 128
BELL = 224
"""A word of the state that nothing else uses, for the bell."""
EXTENT = layout.EXTENT
ANSWERS = layout.ANSWERS
COPIES = layout.EXTENT_COPIES


@triton.jit
def pair_kernel(heap, out, nbytes, keeps):
    """malloc, and free unless the block is to be kept."""
    addr = da.malloc(heap, nbytes)
    tl.store(out, addr)
    if keeps == 0:
        da.free(heap, addr)


@triton.jit
def host_grows_kernel(heap, row, wrong_order: tl.constexpr):
    """What the host copies when it adds the second chunk, in its order, or in another."""
    lane = tl.arange(0, COPIES)
    extent = tl.full((COPIES,), 128, tl.int64)
    if wrong_order:
        tl.atomic_xchg(heap + row + 1, tl.full((), -1, tl.int64))
    tl.atomic_xchg(heap + EXTENT + lane, extent)
    if wrong_order == 0:
        tl.atomic_xchg(heap + row + 1, tl.full((), -1, tl.int64))


@triton.jit
def host_answers_kernel(heap, row, bell_word: tl.constexpr):
    """Wait for the bell, grow the heap, and answer that this was all."""
    rung = tl.atomic_or(heap + bell_word, tl.full((), 0, tl.int64))
    while rung == 0:
        rung = tl.atomic_or(heap + bell_word, tl.full((), 0, tl.int64))
    host_grows_kernel(heap, row, False)
    tl.atomic_xchg(heap + ANSWERS, tl.full((), 4, tl.int64))


@triton.jit
def host_misses_kernel(heap, row, bell_word: tl.constexpr):
    """:func:`host_answers_kernel`, but another program's word, of a request that was answered
    before, replaces the first one."""
    rung = tl.atomic_or(heap + bell_word, tl.full((), 0, tl.int64))
    while rung == 0:
        rung = tl.atomic_or(heap + bell_word, tl.full((), 0, tl.int64))
    rung = tl.full((), (1 << 32) + 1, tl.int64)
    tl.atomic_xchg(heap + bell_word, rung)
    looks = 0
    while ((rung >> 32) != 3) & (looks < 1000):
        rung = tl.atomic_or(heap + bell_word, tl.full((), 0, tl.int64))
        looks += 1
    if (rung >> 32) == 3:
        host_grows_kernel(heap, row, False)
        tl.atomic_xchg(heap + ANSWERS, tl.full((), 4, tl.int64))


@triton.jit
def host_trims_kernel(heap, row, taken, bell_word: tl.constexpr):
    """Take the second chunk out of use, if it is free, and say that the heap may grow again; then
    wait for the bell and give it back."""
    whole = tl.full((), -1, tl.int64)
    old = tl.atomic_cas(heap + row + 1, whole, whole * 0)
    tl.store(taken, (old == -1).to(tl.int64))
    if old == -1:
        tl.atomic_xchg(heap + ANSWERS, whole * 0 + 5)
        rung = whole * 0
        looks = 0
        while ((rung >> 32) != 5) & (looks < 400):
            rung = tl.atomic_or(heap + bell_word, whole * 0)
            looks += 1
        if (rung >> 32) == 5:
            tl.atomic_xchg(heap + row + 1, whole)
            tl.atomic_xchg(heap + ANSWERS, whole * 0 + 6)


@triton.jit
def hasty_take_kernel(heap, row, taken):
    """A wrong :func:`take_chunks_kernel`: it looks first, and then takes."""
    word = tl.atomic_or(heap + row + 1, tl.full((), 0, tl.int64))
    if word == -1:
        tl.atomic_xchg(heap + row + 1, tl.full((), 0, tl.int64))
    tl.store(taken, (word == -1).to(tl.int64))


class Growing:
    """A heap of one chunk of two, or of both; nothing behind its addresses."""

    def __init__(self, chunks: int, answers: int = 0) -> None:
        self.geometry = Geometry.of(PAGES, stripes=1, ring=16, magazines=32, grows=True)
        self.handle = torch.zeros(self.geometry.words, dtype=torch.int64)
        address = self.handle.data_ptr() + BELL * 8
        initialise(
            self.handle,
            self.geometry,
            NOWHERE,
            Present(64 * chunks, [(0, chunks)], address if answers else 0, answers),
        )
        self.row = self.geometry.rows

    def check(self, pages: int, taken: bool = False) -> None:
        absent = [slice(64, 128)] if taken else []
        audit(State(self.handle, self.geometry, pages, absent))

    def fill(self, nbytes: int) -> None:
        """One block, without interleaving."""
        out = torch.zeros(1, dtype=torch.int64)
        pair_kernel[(1,)](self.handle, out, nbytes, 1)
        assert out.item() != 0


def outs(count: int) -> list[torch.Tensor]:
    return [torch.zeros(1, dtype=torch.int64) for _ in range(count)]


def growing_lab() -> Interleaving:
    heap = Growing(chunks=1)
    heap.fill(62 * PAGE_BYTES)
    large, small = outs(2)

    def check(run: Run) -> None:
        heap.check(PAGES)
        pages = State(heap.handle, heap.geometry, PAGES)
        assert pages.live_blocks() == 1 + sum(1 for out in (large, small) if out.item())
        assert pages.fixed[layout.ERRORS.value + layout.E_INVALID_FREE.value] == 0

    return Interleaving(
        Launch(pair_kernel, (1,), heap.handle, large, 40 * PAGE_BYTES, 1),
        Launch(pair_kernel, (1,), heap.handle, small, 30_000, 1),
        Launch(host_grows_kernel, (1,), heap.handle, heap.row, False),
        check=check,
    )


def test_growing_beside_malloc() -> None:
    growing_lab().explore(PCT(depth=3, seed=1), schedules=300)


def freeing_lab(wrong_order: bool) -> Interleaving:
    """A block of the new chunk is freed by its program: it must be one of the heap by then."""
    heap = Growing(chunks=1)
    heap.fill(64 * PAGE_BYTES)
    (out,) = outs(1)

    def check(run: Run) -> None:
        heap.check(PAGES)
        state = State(heap.handle, heap.geometry, PAGES)
        assert state.live_blocks() == 1
        assert not state.fixed[layout.ERRORS.value + layout.E_INVALID_FREE.value]

    return Interleaving(
        Launch(pair_kernel, (1,), heap.handle, out, 30_000, 0),
        Launch(host_grows_kernel, (1,), heap.handle, heap.row, wrong_order),
        check=check,
        shrink_seconds=2.0,
    )


def test_a_block_of_a_new_chunk_is_freed_at_once() -> None:
    freeing_lab(wrong_order=False).explore(Exhaustive(preemptions=1), schedules=400)


def test_growing_in_the_wrong_order_is_found() -> None:
    with pytest.raises(ScheduleError):
        freeing_lab(wrong_order=True).explore(PCT(depth=3, seed=1), schedules=400)


def test_a_program_that_finds_nothing_gets_what_the_host_adds() -> None:
    heap = Growing(chunks=1, answers=3)
    heap.fill(64 * PAGE_BYTES)
    first, second = outs(2)

    def check(run: Run) -> None:
        heap.check(PAGES)
        assert first.item() != 0
        assert second.item() != 0

    lab = Interleaving(
        Launch(pair_kernel, (1,), heap.handle, first, 20 * PAGE_BYTES, 1),
        Launch(pair_kernel, (1,), heap.handle, second, 1000, 1),
        Launch(host_answers_kernel, (1,), heap.handle, heap.row, BELL),
        check=check,
    )
    lab.explore(PCT(depth=3, seed=2), schedules=100)


def test_a_request_that_another_word_replaced_is_made_again() -> None:
    heap = Growing(chunks=1, answers=3)
    heap.fill(64 * PAGE_BYTES)
    (out,) = outs(1)

    def check(run: Run) -> None:
        heap.check(PAGES)
        assert out.item() != 0

    lab = Interleaving(
        Launch(pair_kernel, (1,), heap.handle, out, 20 * PAGE_BYTES, 1),
        Launch(host_misses_kernel, (1,), heap.handle, heap.row, BELL),
        check=check,
        shrink_seconds=2.0,
    )
    lab.explore(PCT(depth=2, seed=2), schedules=20)


def test_a_heap_at_its_limit_grows_again_after_a_trim_during_the_search() -> None:
    heap = Growing(chunks=2, answers=2)
    heap.fill(64 * PAGE_BYTES)
    out, taken = outs(2)

    def check(run: Run) -> None:
        heap.check(PAGES)
        assert out.item() != 0

    lab = Interleaving(
        Launch(pair_kernel, (1,), heap.handle, out, 20 * PAGE_BYTES, 1),
        Launch(host_trims_kernel, (1,), heap.handle, heap.row, taken, BELL),
        check=check,
        shrink_seconds=2.0,
    )
    lab.explore(PCT(depth=3, seed=3), schedules=100)


def taking_lab(hasty: bool) -> Interleaving:
    heap = Growing(chunks=2)
    heap.fill(62 * PAGE_BYTES)
    large, taken = outs(2)
    firsts = torch.tensor([1])
    counts = torch.tensor([1])

    def check(run: Run) -> None:
        heap.check(PAGES, bool(taken.item()))
        assert (large.item() == 0) == bool(taken.item())

    take = (
        Launch(hasty_take_kernel, (1,), heap.handle, heap.row, taken)
        if hasty
        else Launch(upkeep.take_chunks_kernel, (1,), heap.handle, firsts, counts, taken)
    )
    return Interleaving(
        Launch(pair_kernel, (1,), heap.handle, large, 10 * PAGE_BYTES, 1),
        take,
        check=check,
        shrink_seconds=2.0,
    )


def test_chunks_are_taken_beside_malloc() -> None:
    taking_lab(hasty=False).explore(PCT(depth=3, seed=3), schedules=500)


def test_taking_after_a_look_is_found() -> None:
    with pytest.raises(ScheduleError):
        taking_lab(hasty=True).explore(PCT(depth=3, seed=3), schedules=400)
