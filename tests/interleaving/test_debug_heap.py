"""A debug heap under chosen schedules: one program's mistake does not reach other blocks."""

import pytest
import torch
import triton
import triton.language as tl

from devalloc import Heap
from devalloc import kernels as da
from devalloc.sizes import PAGE_BYTES
from devalloc.testing import PCT, Interleaving, Launch, Run
from tests.conftest import ON_GPU
from tests.support import int64

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ON_GPU, reason="interleaves the programs of interpreted kernels"),
]

WORDS = 250


@triton.jit
def realloc_or_free(heap, had, out, WORDS: tl.constexpr):
    """Program 0 makes the second of three blocks smaller, while 1 frees them all and fills the page
    anew with blocks of ``WORDS`` words of its own."""
    if tl.program_id(0) == 0:
        tl.store(out, da.realloc(heap, tl.load(had + 1), 1000))
    else:
        lane = tl.arange(0, 32)
        for block in range(3):
            da.free(heap, tl.load(had + block))
        addr = da.malloc(heap, lane * 0 + WORDS * 8)
        word = tl.arange(0, 256)
        ptr = (addr[:, None] + word[None, :] * 8).to(tl.pointer_type(tl.int64))
        inside = (word[None, :] < WORDS) & (addr[:, None] != 0)
        tl.store(ptr, (lane[:, None] * 1000 + word[None, :]).to(tl.int64), mask=inside)
        tl.store(out + 1 + lane, addr)


def test_realloc_of_what_is_freed_meanwhile_writes_nothing() -> None:
    heap = Heap(PAGE_BYTES, debug=True)
    had = heap.malloc([20_000] * 3)
    out = int64([0] * 33)
    table = heap._debug._words

    def check(_: Run) -> None:
        for lane, addr in enumerate(out[1:].tolist()):
            if addr:
                block = heap.tensor(addr, WORDS, torch.int64)
                assert block.equal(torch.arange(WORDS) + lane * 1000), f"block of lane {lane}"
        heap.audit()

    interleaving = Interleaving(
        Launch(realloc_or_free, (2,), heap.handle, had, out, WORDS=WORDS),
        check=check,
        switch_at="writes",
        memory=[
            (heap.base - PAGE_BYTES, heap.capacity + PAGE_BYTES),
            (table.data_ptr(), table.nbytes),
        ],
    )
    for depth in (2, 3):
        interleaving.explore(PCT(depth=depth), 100)
    heap.free(had)
    heap.close()
