"""How each pattern is measured: one function per pattern, from a row to its samples.

Every runner verifies first (round 0, which is also the warm-up and is not timed), counts nulls in
every round, and frees what it allocated. Those of the sweeps are in ``sweeps``, and those of the
group ``space`` in ``space``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

import torch

import devalloc
from benchmarks.device import plan
from benchmarks.device import workloads as work
from benchmarks.device.bench import (
    Bench,
    Trial,
    alloc_then_free,
    cdiv,
    lane_launch,
    require_rest,
    require_values,
)
from benchmarks.device.cuda_malloc import ALIGNMENT
from benchmarks.device.plan import Row
from benchmarks.device.space import run_failing, run_live, run_runs, run_shape
from benchmarks.device.sweeps import run_fill, run_heap, run_streams, thread_trial, with_heap
from benchmarks.harness import Samples, WrongResult, require, verify

# Floors ------------------------------------------------------------------------------------------


CUDA_ROUNDS = 3
"""CUDA's malloc takes up to a second a round."""

LATENCY_HEAPS = 32
LATENCY_HEAP_BYTES = 64 * plan.MIB
"""So large that the heaps lie apart from each other."""


def run_empty(bench: Bench, row: Row) -> list[Samples]:
    samples = Samples("kernel")
    out = bench.addresses(row.n)
    bench.sample(samples, lane_launch(row, work.empty_kernel, out, row.n))
    return [samples]


def run_store(bench: Bench, row: Row) -> list[Samples]:
    samples = Samples("alloc")
    out = bench.addresses(row.n)
    base = bench.heap.base
    bench.sample(samples, lane_launch(row, work.store_kernel, base, out, row.n, row.size))
    require(verify(out, row.size, base, bench.heap.capacity))
    return [samples]


def run_create(bench: Bench, row: Row) -> list[Samples]:
    """Making a heap and waiting for it, by the host's clock, cudaMalloc included; and resetting."""
    create, reset = Samples("create"), Samples("reset")
    for turn in range(bench.rounds + 1):
        begin = time.perf_counter()
        heap = devalloc.Heap(row.size, device=bench.device)
        synchronise(bench.device)
        made = time.perf_counter()
        heap.reset()
        synchronise(bench.device)
        cleared = time.perf_counter()
        if turn == 0:
            heap.audit()
        else:
            create.values.append((made - begin) * 1e3)
            reset.values.append((cleared - made) * 1e3)
        heap.close()
    return [create, reset]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Allocate, then free -----------------------------------------------------------------------------


def bump_trial(bench: Bench, row: Row, addrs: torch.Tensor) -> Trial:
    """A counter that only grows, over the same memory: the upper bound."""
    counter, heap = bench.addresses(1), bench.heap
    space = (heap.base, heap.capacity)
    launch = lane_launch(row, work.bump_kernel, counter, *space, addrs, row.n, row.size)
    return Trial(*space, launch, free=None, prepare=counter.zero_, alignment=ALIGNMENT)


def cuda_trial(bench: Bench, row: Row, addrs: torch.Tensor) -> Trial:
    """CUDA's own malloc, one request per thread, in blocks of 256."""
    assert bench.cuda is not None
    cuda = bench.cuda
    return Trial(
        base=1,  # its heap is not known: only that addresses are none of null and each other
        capacity=1 << 62,
        malloc=lambda: cuda.malloc_lanes(addrs, row.size),
        free=lambda: cuda.free_lanes(addrs),
        alignment=ALIGNMENT,
    )


def run_thread(bench: Bench, row: Row) -> list[Samples]:
    addrs = bench.addresses(row.n)
    if row.allocator == "bump":
        return alloc_then_free(bench, bump_trial(bench, row, addrs), addrs, row.size)
    if row.allocator == "cuda":
        rounds = min(bench.rounds, CUDA_ROUNDS)
        return alloc_then_free(bench, cuda_trial(bench, row, addrs), addrs, row.size, rounds)
    cold = row.state == "cold"
    trial = thread_trial(row, bench.heap, addrs)
    if cold:
        trial.prepare = bench.heap.reset
    return alloc_then_free(bench, trial, addrs, row.size, cold=cold)


def run_mixed(bench: Bench, row: Row) -> list[Samples]:
    addrs, heap = bench.addresses(row.n), bench.heap
    sizes = bench.random_sizes(row.size, row.n, bench.generator())
    malloc = lane_launch(row, work.malloc_mixed_kernel, heap.handle, sizes, addrs, row.n)
    free = lane_launch(row, work.free_lanes_kernel, heap.handle, addrs, row.n)
    trial = Trial(heap.base, heap.capacity, malloc, free)
    return alloc_then_free(bench, trial, addrs, sizes)


def run_scalar(bench: Bench, row: Row) -> list[Samples]:
    addrs, heap = bench.addresses(row.n), bench.heap
    handle, grid, options = heap.handle, (row.n,), row.launch_options
    trial = Trial(
        heap.base,
        heap.capacity,
        lambda: work.malloc_scalar_kernel[grid](handle, addrs, row.size, **options),
        lambda: work.free_scalar_kernel[grid](handle, addrs, **options),
    )
    return alloc_then_free(bench, trial, addrs, row.size)


def run_warp(bench: Bench, row: Row) -> list[Samples]:
    """One lane in 32 asks: n requests by as many warps, as the peers measure them."""
    addrs, heap = bench.addresses(row.n), bench.heap
    grid = (cdiv(row.n * 32, row.lanes),)
    options = {"LANES": row.lanes, **row.launch_options}
    trial = Trial(
        heap.base,
        heap.capacity,
        lambda: work.malloc_warps_kernel[grid](heap.handle, addrs, row.n, row.size, **options),
        lambda: work.free_warps_kernel[grid](heap.handle, addrs, row.n, **options),
    )
    return alloc_then_free(bench, trial, addrs, row.size)


# Allocate and free in one kernel -----------------------------------------------------------------


def run_churn(bench: Bench, row: Row) -> list[Samples]:
    samples = Samples("kernel")
    programs = cdiv(row.n, row.lanes)
    counts = torch.zeros(2, programs, dtype=torch.int32, device=bench.device)
    rounds = plan.CHURN_ROUNDS if bench.device.type == "cuda" else 3
    total = torch.zeros(2, dtype=torch.int64, device=bench.device)
    launch = lane_launch(
        row, work.churn_kernel, bench.heap.handle, counts[0], counts[1], row.n, row.size, rounds
    )
    marks = []
    for _ in range(bench.rounds + 1):
        counts.fill_(-1)
        marks.append(bench.clock.start(launch))
        total += counts.sum(1)
    wrong, samples.failures = total.tolist()
    if wrong:
        raise WrongResult(f"{wrong} words were changed by another program")
    bench.collect(samples, marks[1:])
    require_values(samples)
    return [samples]


def run_latency(bench: Bench, row: Row) -> list[Samples]:
    """The time is the kernel's; over ``n`` pairs, it is that of one pair. Each sample is the mean
    over several heaps: where the few words of one program lie decides up to a quarter of its time,
    which takes one of three values, so that a median would say how many heaps had which."""
    samples = Samples("kernel")
    nulls = torch.zeros(1, dtype=torch.int32, device=bench.device)
    if bench.cuda is not None:
        cuda = bench.cuda
        bench.sample(samples, lambda: cuda.latency(nulls, row.n, row.size), CUDA_ROUNDS)
        samples.failures = int(nulls)
    else:
        options = row.launch_options
        times: list[list[float]] = []
        with contextlib.ExitStack() as heaps:
            for _ in range(2 if bench.interpreted else LATENCY_HEAPS):
                heap = devalloc.Heap(LATENCY_HEAP_BYTES, device=bench.device)
                handle = heaps.enter_context(heap).handle

                def launch(handle=handle) -> None:
                    work.latency_kernel[(1,)](handle, nulls, row.n, row.size, **options)

                one = Samples("kernel")
                bench.sample(one, launch)
                times.append(one.values)
                samples.failures += int(nulls)
            # (Samples for which the host was too slow are missing.)
            samples.values = [sum(turn) / len(turn) for turn in zip(*times, strict=False)]
            with_heap([samples], heap)
    return [samples]


# Writing -----------------------------------------------------------------------------------------


def fill(bench: Bench, row: Row, addrs: torch.Tensor) -> Samples:
    samples = Samples("kernel")
    words = row.size // 8
    grid, options = (cdiv(row.n, row.lanes),), {"LANES": row.lanes, **row.launch_options}
    wrong = torch.full((grid[0],), -1, dtype=torch.int32, device=bench.device)
    bench.sample(samples, lambda: work.fill_kernel[grid](addrs, row.n, WORDS=words, **options))
    work.check_kernel[grid](addrs, wrong, row.n, WORDS=words, **options)
    if int(wrong.sum()):
        raise WrongResult(f"{int(wrong.sum())} words do not hold what was written")
    return samples


def run_write(bench: Bench, row: Row) -> list[Samples]:
    """Fill allocations; they come from the ``thread`` kernel, in an order of the heap's choice."""
    addrs = bench.addresses(row.n)
    heap = bench.heap
    lane_launch(row, work.malloc_lanes_kernel, heap.handle, addrs, row.n, row.size)()
    require(verify(addrs, row.size, heap.base, heap.capacity))
    samples = fill(bench, row, addrs)
    lane_launch(row, work.free_lanes_kernel, heap.handle, addrs, row.n)()
    return [samples]


def run_write_base(bench: Bench, row: Row) -> list[Samples]:
    """The same fill, with the same kernel, of the elements of a plain array, in order."""
    array = torch.empty(row.n * row.size, dtype=torch.uint8, device=bench.device)
    addrs = torch.arange(row.n, dtype=torch.int64, device=bench.device) * row.size
    return [fill(bench, row, addrs + array.data_ptr())]


# Space -------------------------------------------------------------------------------------------


def run_oom(bench: Bench, row: Row) -> list[Samples]:
    """Fill a heap until a launch fails: the value is requested bytes obtained over the heap's."""
    samples = Samples("utilisation", unit="ratio")
    with devalloc.Heap(bench.oom_heap_bytes, device=bench.device) as heap:
        most = heap.capacity // row.size + 2 * row.n
        addrs = bench.addresses(most)
        nulls, start = 0, 0
        while nulls == 0 and start + row.n <= most:
            out = addrs[start : start + row.n]
            lane_launch(row, work.malloc_lanes_kernel, heap.handle, out, row.n, row.size)()
            nulls = int((out == 0).sum())
            start += row.n
        if nulls == 0:
            raise WrongResult(f"{start} requests fitted: more than the heap holds")
        live = addrs[addrs != 0]
        require(verify(live, row.size, heap.base, heap.capacity))
        samples.values.append(live.numel() * row.size / heap.capacity)
        samples.failures = nulls
        heap.clear_errors()
        stats = heap.stats()
        if stats.largest_free >= row.size:
            samples.check = f"null with a free block of {stats.largest_free} B"
        samples.peak_bytes, samples.heap_bytes = stats.peak, stats.capacity
        heap.free(live)
        require_rest(heap)
    return [samples]


def run_frag(bench: Bench, row: Row) -> list[Samples]:
    """Span of the live addresses over live requested bytes, after each exchange of a half. In a
    heap of its own: one that other rows have used is spread out by what they did."""
    samples = Samples("span", unit="ratio")
    with devalloc.Heap(bench.heap.capacity, device=bench.device) as heap:
        handle, generator = heap.handle, bench.generator()
        addrs = bench.addresses(row.n)
        sizes = bench.random_sizes(row.size, row.n, generator)
        lane_launch(row, work.malloc_mixed_kernel, handle, sizes, addrs, row.n)()
        half = row.n // 2
        part = replace(row, n=half)
        rounds = plan.FRAG_ROUNDS if bench.device.type == "cuda" else 2
        for turn in range(rounds + 1):
            if turn:
                chosen = torch.randperm(row.n, generator=generator)[:half].to(bench.device)
                fresh = bench.random_sizes(row.size, half, generator)
                out = addrs[chosen]
                lane_launch(part, work.free_lanes_kernel, handle, out, half)()
                lane_launch(part, work.malloc_mixed_kernel, handle, fresh, out, half)()
                addrs[chosen], sizes[chosen] = out, fresh
            require(verify(addrs, sizes, heap.base, heap.capacity))
            samples.values.append(int(addrs.max() - addrs.min()) / int(sizes.sum()))
        samples.peak_bytes, samples.heap_bytes = heap.stats().peak, heap.capacity
        lane_launch(row, work.free_lanes_kernel, handle, addrs, row.n)()
        require_rest(heap)
    return [samples]


RUNNERS: dict[str, Callable[[Bench, Row], list[Samples]]] = {
    "empty": run_empty,
    "store": run_store,
    "create": run_create,
    "thread": run_thread,
    "mixed": run_mixed,
    "warp": run_warp,
    "cta": run_scalar,
    "scalar": run_scalar,
    "churn": run_churn,
    "latency": run_latency,
    "write": run_write,
    "write_base": run_write_base,
    "oom": run_oom,
    "frag": run_frag,
    "fill": run_fill,
    "heap": run_heap,
    "streams": run_streams,
    "tail": run_fill,
    "shape": run_shape,
    "renewed": run_shape,
    "alike": run_shape,
    "live": run_live,
    "runs": run_runs,
    "failing": run_failing,
}


def run(bench: Bench, row: Row) -> list[Samples]:
    """Measure one row.

    Raises
    ------
    WrongResult
        If the allocations of the first round are wrong, or a later check fails.
    """
    measured = RUNNERS[row.pattern](bench, row)
    if row.allocator == "devalloc" and row.pattern not in plan.OWN_HEAP:
        peak = bench.heap.stats().peak
        for samples in measured:
            samples.peak_bytes = peak
    return measured
