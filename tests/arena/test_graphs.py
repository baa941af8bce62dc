"""Arena memory in CUDA graphs: a device heap, and the four combinations of inside and outside.

The rules by themselves, on simulated streams, are in `test_streams.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from devalloc import Arena
from devalloc import kernels as da
from tests.arena.support import MIB
from tests.conftest import ON_GPU

LANES = 128
PROGRAMS, REPLAYS = (24, 1000) if ON_GPU else (3, 4)


@triton.jit
def exchange_kernel(heap, held_ptr, step_ptr, wrong_ptr, LANES: tl.constexpr):
    """Every lane checks and frees what the last launch left to it, and leaves something new."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    step = tl.load(step_ptr)
    old = tl.load(held_ptr + lane)
    there = old != 0
    words = (2 + (lane * 7 + (step - 1) * 13) % 97).to(tl.int64)
    first = tl.load(old.to(tl.pointer_type(tl.int64)), mask=there)
    last = tl.load((old + words * 8 - 8).to(tl.pointer_type(tl.int64)), mask=there)
    tag = lane * 1_000_003 + step - 1
    wrong = there & ((first != tag) | (last != tag + 1))
    tl.atomic_add(wrong_ptr, tl.sum(wrong.to(tl.int64)))
    da.free(heap, old, there)

    words = (2 + (lane * 7 + step * 13) % 97).to(tl.int64)
    new = da.malloc(heap, words * 8)
    got = new != 0
    tl.atomic_add(wrong_ptr + 1, tl.sum((new == 0).to(tl.int64)))
    tl.store(new.to(tl.pointer_type(tl.int64)), tag + 1, mask=got)
    tl.store((new + words * 8 - 8).to(tl.pointer_type(tl.int64)), tag + 2, mask=got)
    tl.store(held_ptr + lane, new)


@triton.jit
def free_kernel(heap, held_ptr, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    da.free(heap, tl.load(held_ptr + lane))


def launcher(
    heap_handle: torch.Tensor, device: str
) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor, torch.Tensor]:
    held = torch.zeros(LANES * PROGRAMS, dtype=torch.int64, device=device)
    step = torch.ones(1, dtype=torch.int64, device=device)
    wrong = torch.zeros(2, dtype=torch.int64, device=device)

    def launch() -> None:
        exchange_kernel[(PROGRAMS,)](heap_handle, held, step, wrong, LANES=LANES, num_warps=2)
        step.add_(1)

    return launch, held, step, wrong


@pytest.mark.proves("library/heap-captured")
def test_a_heap_of_an_arena_in_a_graph_that_is_replayed(device: str) -> None:
    """In the interpreter, which has no graphs, the same launches one by one."""
    with Arena(source="cuda" if ON_GPU else "host") as arena:
        heap = arena.heap("8MiB")
        launch, held, step, wrong = launcher(heap.handle, device)
        launch()  # compiled, and the first allocations made, before anything is captured
        if ON_GPU:
            torch.cuda.synchronize()
            graph, pool = torch.cuda.CUDAGraph(), arena.graph_pool()
            with torch.cuda.graph(graph), arena.capture(pool):
                launch()
            launch = graph.replay
        for turn in range(REPLAYS):
            launch()
            if turn % 100 == 0:  # the host allocates from the same heap and arena between
                kept = heap.malloc([100, 5000, 70_000])
                other = arena.empty(MIB, torch.uint8).fill_(turn % 256)
                heap.free(kept)
                assert (other == turn % 256).all()
        assert int(step) == REPLAYS + 2
        assert wrong.tolist() == [0, 0], "wrong tags, nulls"
        heap.check()
        heap.audit()
        stats = heap.stats()
        assert stats.allocations - stats.frees == LANES * PROGRAMS
        free_kernel[(PROGRAMS,)](heap.handle, held, LANES=LANES, num_warps=2)
        heap.check()
        heap.audit()
        assert heap.stats().largest_free == heap.capacity
        del launch, other
        if ON_GPU:
            del graph
            pool.release()
        heap.close()
        del heap
        gc.collect()
        arena.cache.audit()
        assert arena.stats()["allocation.all.current"] == 0


@pytest.mark.proves("torch/capture-query", "auto_growth/graphs-four", "library/allocation-free")
@pytest.mark.gpu
def test_on_the_gpu_inside_and_outside_in_all_combinations() -> None:
    with Arena() as arena:
        n = 5 * MIB
        result = torch.zeros(n, dtype=torch.int32, device="cuda")
        outside = arena.empty(n, torch.int32).fill_(1)
        held_back = outside.data_ptr()
        source_calls = arena.stats()["num_device_alloc"]
        torch.cuda.synchronize()
        graph, pool = torch.cuda.CUDAGraph(), arena.graph_pool()
        with torch.cuda.graph(graph), arena.capture(pool):
            inside = arena.empty(n, torch.int32).fill_(3)  # allocated inside, freed outside
            temporary = arena.empty(n, torch.int32).fill_(4)  # inside, inside
            of_temporary = temporary.data_ptr()
            result.add_(inside).add_(temporary)
            del temporary
            again = arena.empty(n, torch.int32).fill_(5)
            assert again.data_ptr() == of_temporary, "reused within the capture"
            result.add_(again)
            del again
            del outside  # allocated outside, freed inside
            assert arena.stats()["active.all.current"] == 2, "held until the capture has ended"
            late = arena.empty(n, torch.int32).fill_(6)
            assert late.data_ptr() == of_temporary
            del late
        assert arena.stats()["num_device_free"] == 0
        assert arena.stats()["num_device_alloc"] > source_calls, "of the pool, in the capture"
        # Outside, outside: the engine gives out what the capture held back, and nothing of the
        # pool, however much is asked for.
        both = [arena.empty(n, torch.int32).fill_(100 + at) for at in range(6)]
        assert held_back in [tensor.data_ptr() for tensor in both]
        del inside
        more = [arena.empty(n, torch.int32).fill_(200 + at) for at in range(4)]
        for _ in range(1000):
            graph.replay()
        torch.cuda.synchronize()
        assert (result == 1000 * (3 + 4 + 5)).all()
        assert all((tensor == 100 + at).all() for at, tensor in enumerate(both))
        assert all((tensor == 200 + at).all() for at, tensor in enumerate(more))
        del both, more, graph
        pool.release()
        arena.cache.audit()
        arena.empty_cache()
        assert arena.stats()["reserved_bytes.all.current"] == 0
