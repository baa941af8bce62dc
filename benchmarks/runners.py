"""How each pattern is measured: one function per pattern, from a row to its samples.

Every runner verifies first (round 0, which is also the warm-up and is not timed), counts nulls in
every round, and frees what it allocated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import devalloc
from benchmarks import rows as plan
from benchmarks import workloads as work
from benchmarks.harness import (
    Clock,
    Samples,
    WrongResult,
    clock_for,
    require,
    verify,
)
from benchmarks.rows import Row

Launch = Callable[[], object]


class Bench:
    """The heap that rows are measured on, with the clock and the options.

    Parameters
    ----------
    device : torch.device
        A CUDA device, or the CPU under the interpreter.
    heap_bytes : int
        Capacity of the shared heap. ``oom`` and ``create`` make heaps of their own.
    rounds : int
        Timed rounds per row.
    seed : int
        Of mixed sizes and of what ``frag`` frees.
    """

    def __init__(self, device: torch.device, heap_bytes: int, rounds: int, seed: int) -> None:
        self.device = device
        self.rounds = rounds
        self.seed = seed
        self.clock: Clock = clock_for(device)
        self.heap = devalloc.Heap(heap_bytes, device=device)
        interpreted = device.type == "cpu"
        self.oom_heap_bytes = 1 << 20 if interpreted else plan.OOM_HEAP_BYTES

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_error: object) -> None:
        self.heap.close()

    def run(self, row: Row) -> list[Samples]:
        """Measure one row.

        Raises
        ------
        WrongResult
            If the allocations of the first round are wrong, or a later check fails.
        """
        return RUNNERS[row.pattern](self, row)

    def at_rest(self) -> Samples:
        """Check the heap after a family that freed everything; the value is the largest free block
        over the capacity, and must be 1. The heap is reset afterwards."""
        samples = Samples("at_rest", unit="ratio")
        try:
            self.heap.check()
            self.heap.audit()
            stats = self.heap.stats()
            samples.values.append(stats.largest_free / stats.capacity)
            if stats.used or stats.largest_free != stats.capacity:
                samples.check = f"{stats.used} B used, largest free {stats.largest_free} B"
        except devalloc.DevallocError as error:
            samples.check = " ".join(str(error).split())
        self.heap.reset()
        return samples

    def addresses(self, n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int64, device=self.device)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def random_sizes(self, most: int, n: int, generator: torch.Generator) -> torch.Tensor:
        """Uniform in [16, most]."""
        return torch.randint(16, most + 1, (n,), generator=generator).to(self.device)

    def sample(self, samples: Samples, launch: Launch) -> None:
        """Time one operation over all rounds, after one that is not timed."""
        marks = [self.clock.start(launch) for _ in range(self.rounds + 1)]
        collect(self.clock, samples, marks[1:])


def collect(clock: Clock, samples: Samples, marks: list[object]) -> None:
    values = [clock.milliseconds(mark) for mark in marks]
    samples.values += [value for value in values if value is not None]
    if not samples.values:
        raise WrongResult("the host was too slow for every sample: no time is valid")


def cdiv(a: int, b: int) -> int:
    return (a + b - 1) // b


def lane_launch(row: Row, kernel: Any, *args: object) -> Launch:
    """A launch of a kernel that takes ``LANES``, with a program per block of lanes."""
    grid = (cdiv(row.n, row.lanes),)
    return lambda: kernel[grid](*args, LANES=row.lanes, num_warps=row.warps)


# Floors ------------------------------------------------------------------------------------------


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


def run_bump(bench: Bench, row: Row) -> list[Samples]:
    samples = Samples("alloc")
    out = bench.addresses(row.n)
    counter = bench.addresses(1)
    heap = bench.heap
    launch = lane_launch(
        row, work.bump_kernel, counter, heap.base, heap.capacity, out, row.n, row.size
    )
    marks = []
    for _ in range(bench.rounds + 1):
        counter.zero_()
        marks.append(bench.clock.start(launch))
    require(verify(out, row.size, heap.base, heap.capacity))
    collect(bench.clock, samples, marks[1:])
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


def alloc_then_free(
    bench: Bench, addrs: torch.Tensor, sizes: torch.Tensor | int, malloc: Launch, free: Launch
) -> list[Samples]:
    """Rounds of one launch that fills `addrs` and one that frees them."""
    heap = bench.heap
    alloc_marks, free_marks = [], []
    nulls = torch.zeros((), dtype=torch.int64, device=bench.device)
    for turn in range(bench.rounds + 1):
        addrs.zero_()  # or a lane that stored nothing would pass with the last round's address
        alloc_marks.append(bench.clock.start(malloc))
        if turn == 0:
            require(verify(addrs, sizes, heap.base, heap.capacity))
        nulls += (addrs == 0).sum()
        free_marks.append(bench.clock.start(free))
    alloc, release = Samples("alloc"), Samples("free")
    collect(bench.clock, alloc, alloc_marks[1:])
    collect(bench.clock, release, free_marks[1:])
    alloc.failures = int(nulls)
    return [alloc, release]


def run_thread(bench: Bench, row: Row) -> list[Samples]:
    addrs = bench.addresses(row.n)
    handle = bench.heap.handle
    malloc = lane_launch(row, work.malloc_lanes_kernel, handle, addrs, row.n, row.size)
    free = lane_launch(row, work.free_lanes_kernel, handle, addrs, row.n)
    return alloc_then_free(bench, addrs, row.size, malloc, free)


def run_mixed(bench: Bench, row: Row) -> list[Samples]:
    addrs = bench.addresses(row.n)
    sizes = bench.random_sizes(row.size, row.n, bench.generator())
    handle = bench.heap.handle
    malloc = lane_launch(row, work.malloc_mixed_kernel, handle, sizes, addrs, row.n)
    free = lane_launch(row, work.free_lanes_kernel, handle, addrs, row.n)
    return alloc_then_free(bench, addrs, sizes, malloc, free)


def run_scalar(bench: Bench, row: Row) -> list[Samples]:
    addrs = bench.addresses(row.n)
    handle = bench.heap.handle
    grid, warps = (row.n,), row.warps
    return alloc_then_free(
        bench,
        addrs,
        row.size,
        lambda: work.malloc_scalar_kernel[grid](handle, addrs, row.size, num_warps=warps),
        lambda: work.free_scalar_kernel[grid](handle, addrs, num_warps=warps),
    )


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
        raise WrongResult(f"{wrong} words were changed by somebody else")
    collect(bench.clock, samples, marks[1:])
    return [samples]


def run_latency(bench: Bench, row: Row) -> list[Samples]:
    """The time is the kernel's; over ``n`` pairs, it is that of one pair."""
    samples = Samples("kernel")
    nulls = torch.zeros(1, dtype=torch.int32, device=bench.device)
    handle, warps = bench.heap.handle, row.warps
    bench.sample(
        samples,
        lambda: work.latency_kernel[(1,)](handle, nulls, row.n, row.size, num_warps=warps),
    )
    samples.failures = int(nulls)
    return [samples]


# Writing -----------------------------------------------------------------------------------------


def fill(bench: Bench, row: Row, addrs: torch.Tensor) -> Samples:
    samples = Samples("kernel")
    words = row.size // 8
    grid, options = (cdiv(row.n, row.lanes),), {"LANES": row.lanes, "num_warps": row.warps}
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
        heap.free(live)
        heap.check()
        heap.audit()
        if heap.stats().largest_free != heap.capacity:
            samples.check = "the heap is not whole after everything was freed"
    return [samples]


def run_frag(bench: Bench, row: Row) -> list[Samples]:
    """Span of the live addresses over live requested bytes, after each exchange of a half."""
    samples = Samples("span", unit="ratio")
    heap, generator = bench.heap, bench.generator()
    handle = heap.handle
    addrs = bench.addresses(row.n)
    sizes = bench.random_sizes(row.size, row.n, generator)
    lane_launch(row, work.malloc_mixed_kernel, handle, sizes, addrs, row.n)()
    half = row.n // 2
    part = Row(row.pattern, row.size, half, row.lanes, row.warps)
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
    lane_launch(row, work.free_lanes_kernel, handle, addrs, row.n)()
    return [samples]


RUNNERS: dict[str, Callable[[Bench, Row], list[Samples]]] = {
    "empty": run_empty,
    "store": run_store,
    "bump": run_bump,
    "create": run_create,
    "thread": run_thread,
    "mixed": run_mixed,
    "warp": run_scalar,
    "cta": run_scalar,
    "churn": run_churn,
    "latency": run_latency,
    "write": run_write,
    "write_base": run_write_base,
    "oom": run_oom,
    "frag": run_frag,
}
