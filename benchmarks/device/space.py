"""The runners of the group ``space``: how much memory a heap needs, and what it can still give.

Each makes a heap for its row, checks every block (none null, none overlapping), and in the end
frees everything and checks that the heap is whole.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

import devalloc
from benchmarks.device import plan
from benchmarks.device import workloads as work
from benchmarks.device.bench import Bench, Launch, lane_launch, require_rest, require_values
from benchmarks.device.plan import Row
from benchmarks.device.sweeps import thread_trial, with_heap
from benchmarks.harness import Samples, WrongResult, require, verify
from devalloc.heap.geometry import Geometry
from devalloc.heap.state import State
from devalloc.sizes import PAGE_BYTES

CHUNK_PAGES = 64
FAILING_BLOCK = 1024
"""Bytes of the blocks that fill the heap in which requests fail."""


def free_blocks(bench: Bench, row: Row, heap: devalloc.Heap, addrs: torch.Tensor) -> None:
    """Free addresses, one per lane; 0 is ignored."""
    part = replace(row, n=addrs.numel(), lanes=max(row.lanes, 32), warps=1)
    lane_launch(part, work.free_lanes_kernel, heap.handle, addrs, part.n)()


def scalar_launch(row: Row, heap: devalloc.Heap, out: torch.Tensor) -> Launch:
    """A launch of one request of the row's size by each of as many programs as ``out`` is long."""
    handle, options = heap.handle, row.launch_options
    return lambda: work.malloc_scalar_kernel[(out.numel(),)](handle, out, row.size, **options)


# After exchanges ---------------------------------------------------------------------------------


def largest_block(heap: devalloc.Heap) -> int:
    """Bytes of the largest block of whole pages that malloc gives: by trying."""
    least, most = 0, heap.capacity // PAGE_BYTES
    while least < most:
        middle = (least + most + 1) // 2
        addr = heap.malloc([middle * PAGE_BYTES])
        if int(addr[0]):
            heap.free(addr)
            least = middle
        else:
            most = middle - 1
    heap.clear_errors()
    return least * PAGE_BYTES


def touched_bytes(addrs: torch.Tensor) -> int:
    """Bytes of the pages in which a block begins."""
    return torch.unique(addrs // PAGE_BYTES).numel() * PAGE_BYTES


def microseconds(bench: Bench, samples: Samples, marks: list[object]) -> None:
    """Read what was queued, in us."""
    bench.collect(samples, marks)
    samples.values = [value * 1e3 for value in samples.values]
    require_values(samples)


def run_shape(bench: Bench, row: Row) -> list[Samples]:
    """``shape``, ``alike``: n blocks, then a random half is freed and allocated again, many times.
    ``renewed``: each time with other sizes, so that few lanes ask for what they freed.

    Times are those of the exchange. Span (from the lowest address to the highest end) and touched
    pages are over the bytes that live. ``largest`` is the largest block that malloc gives over the
    free bytes. ``largest_after`` is measured after a random 99 % were freed, as a share of the
    bytes that were free before: more cannot be expected of a heap that does not move blocks.
    """
    assert row.param is not None
    generator = bench.generator()
    sizes = torch.full((row.n,), row.size, dtype=torch.int64, device=bench.device)
    if row.pattern != "alike":
        sizes = bench.random_sizes(row.size, row.n, generator)
    addrs = bench.addresses(row.n)
    alloc, free = Samples("alloc", unit="us"), Samples("free", unit="us")
    alloc_marks: list[object] = []
    free_marks: list[object] = []
    rounds = plan.FRAG_ROUNDS if bench.device.type == "cuda" else 2
    with devalloc.Heap(row.param, device=bench.device) as heap:
        handle = heap.handle
        lane_launch(row, work.malloc_mixed_kernel, handle, sizes, addrs, row.n)()
        require(verify(addrs, sizes, heap.base, heap.capacity))
        for _ in range(rounds):
            chosen = (torch.rand(row.n, generator=generator) < 0.5).to(bench.device)
            if row.pattern == "renewed":
                sizes = torch.where(chosen, bench.random_sizes(row.size, row.n, generator), sizes)
            # (A size of 0 asks for nothing, and the address 0 is ignored.)
            fresh, wanted = bench.addresses(row.n), torch.where(chosen, sizes, 0)
            old = torch.where(chosen, addrs, 0)
            malloc = lane_launch(row, work.malloc_mixed_kernel, handle, wanted, fresh, row.n)
            release = lane_launch(row, work.free_lanes_kernel, handle, old, row.n)
            free_marks.append(bench.clock.start(release))
            alloc_marks.append(bench.clock.start(malloc))
            addrs = torch.where(chosen, fresh, addrs)
            require(verify(addrs, sizes, heap.base, heap.capacity))
        microseconds(bench, alloc, alloc_marks)
        microseconds(bench, free, free_marks)
        heap.check()
        live = int(sizes.sum())
        span = int((addrs + sizes).max() - addrs.min())
        free_bytes = heap.stats().free
        measured = [
            alloc,
            free,
            Samples("span", [span / live], "ratio"),
            Samples("touched", [touched_bytes(addrs) / live], "ratio"),
            Samples("largest", [largest_block(heap) / free_bytes], "ratio"),
        ]
        gone = torch.rand(row.n, generator=generator).to(bench.device) < 0.99
        free_blocks(bench, row, heap, torch.where(gone, addrs, 0))
        heap.check()
        after = [largest_block(heap) / free_bytes]
        measured.append(Samples("largest_after", after, "ratio"))
        with_heap(measured, heap)
        kept = addrs[~gone]
        require(verify(kept, sizes[~gone], heap.base, heap.capacity))
        free_blocks(bench, row, heap, kept)
        require_rest(heap)
    return measured


# A few blocks, and runs --------------------------------------------------------------------------


def occupied_chunks(heap: devalloc.Heap) -> int:
    """How many chunks are not wholly free."""
    pages = heap.capacity // PAGE_BYTES
    free = np.zeros(-(-pages // CHUNK_PAGES) * CHUNK_PAGES, dtype=bool)
    free[:pages] = State(heap.handle, Geometry.of(pages)).page_free
    free[pages:] = True
    return int((~free.reshape(-1, CHUNK_PAGES).all(1)).sum())


def run_live(bench: Bench, row: Row) -> list[Samples]:
    """``live``: a block for each of n programs in a fresh heap: chunks that are not wholly free."""
    assert row.param is not None
    samples = Samples("chunks", unit="chunks")
    addrs = bench.addresses(row.n)
    with devalloc.Heap(row.param, device=bench.device) as heap:
        for _ in range(bench.rounds):
            heap.reset()
            scalar_launch(row, heap, addrs)()
            require(verify(addrs, row.size, heap.base, heap.capacity))
            samples.values.append(occupied_chunks(heap))
        with_heap([samples], heap)
        free_blocks(bench, row, heap, addrs)
        require_rest(heap)
    return [samples]


def run_runs(bench: Bench, row: Row) -> list[Samples]:
    """``runs``: launches of n programs that each ask for one run, until a launch has a null: how
    many runs there are, over how many there could be."""
    assert row.param is not None
    samples = Samples("filled", unit="ratio")
    with devalloc.Heap(row.param, device=bench.device) as heap:
        possible = heap.capacity // row.size
        parts: list[torch.Tensor] = []
        while not parts or bool((parts[-1] != 0).all()):
            if len(parts) * row.n > possible:
                raise WrongResult(f"over {possible} runs fitted: more than the heap holds")
            parts.append(bench.addresses(row.n))
            scalar_launch(row, heap, parts[-1])()
        addrs = torch.cat(parts)
        live = addrs[addrs != 0]
        require(verify(live, row.size, heap.base, heap.capacity))
        samples.values.append(live.numel() / possible)
        heap.clear_errors()
        with_heap([samples], heap)
        free_blocks(bench, row, heap, live)
        require_rest(heap)
    return [samples]


# Requests that must fail -------------------------------------------------------------------------


def run_failing(bench: Bench, row: Row) -> list[Samples]:
    """``failing``: n programs ask a heap that is full of blocks of 1 KiB, and get nothing."""
    assert row.param is not None
    samples = Samples("alloc", unit="us")
    with devalloc.Heap(row.param, device=bench.device) as heap:
        count = heap.capacity // FAILING_BLOCK
        addrs, out = bench.addresses(count), bench.addresses(row.n)
        filling = replace(row, size=FAILING_BLOCK, n=count, lanes=32)
        thread_trial(filling, heap, addrs).malloc()
        require(verify(addrs, FAILING_BLOCK, heap.base, heap.capacity))
        heap.check()
        out.fill_(-1)
        launch = scalar_launch(row, heap, out)
        bench.sample(samples, launch)
        samples.values = [value * 1e3 for value in samples.values]
        given = int((out != 0).sum())
        if given:
            samples.check = f"{given} of {row.n} requests got a block of a full heap"
        heap.clear_errors()
        with_heap([samples], heap)
        free_blocks(bench, row, heap, addrs)
        require_rest(heap)
    return [samples]
