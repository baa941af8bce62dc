"""The runners of the sweeps: over fill levels, sizes of the heap, and launches at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

import devalloc
from benchmarks.device import plan
from benchmarks.device import workloads as work
from benchmarks.device.bench import (
    Bench,
    Launch,
    Trial,
    alloc_then_free,
    lane_launch,
    require_rest,
)
from benchmarks.device.plan import Row
from benchmarks.harness import Samples, WrongResult, require, verify

FILL_LAUNCH = 1 << 20
"""Requests per launch while a heap is filled."""


def thread_trial(row: Row, heap: devalloc.Heap, addrs: torch.Tensor) -> Trial:
    """``n`` requests of one size, one per lane; another kernel frees them."""
    malloc = lane_launch(row, work.malloc_lanes_kernel, heap.handle, addrs, row.n, row.size)
    free = lane_launch(row, work.free_lanes_kernel, heap.handle, addrs, row.n)
    return Trial(heap.base, heap.capacity, malloc, free)


def with_heap(samples: list[Samples], heap: devalloc.Heap) -> list[Samples]:
    """Say on which heap the samples were measured, when it is not the shared one."""
    peak = heap.stats().peak
    for each in samples:
        each.peak_bytes, each.heap_bytes = peak, heap.capacity
    return samples


# Fill levels -------------------------------------------------------------------------------------


def fill_heap(bench: Bench, row: Row, heap: devalloc.Heap, slots: int) -> torch.Tensor:
    """Allocate every slot of a heap; returns the addresses."""
    addrs = bench.addresses(slots)
    lanes = 1024 if bench.interpreted else row.lanes
    for start in range(0, slots, FILL_LAUNCH):
        out = addrs[start : start + FILL_LAUNCH]
        part = replace(row, n=out.numel(), lanes=lanes)
        thread_trial(part, heap, out).malloc()
    require(verify(addrs, row.size, heap.base, heap.capacity))
    return addrs


def free_all(bench: Bench, row: Row, heap: devalloc.Heap, addrs: torch.Tensor) -> None:
    lanes = 1024 if bench.interpreted else row.lanes
    part = replace(row, n=addrs.numel(), lanes=lanes)
    lane_launch(part, work.free_lanes_kernel, heap.handle, addrs, part.n)()


def run_fill(bench: Bench, row: Row) -> list[Samples]:
    """``fill``, ``tail``: a heap is filled with the class, a random part is freed, so that exactly
    ``param`` percent are live; then n requests and their free are timed, round after round."""
    assert row.param is not None
    slots = bench.fill_slots
    live = slots * row.param // 100
    if slots - live < row.n:
        raise WrongResult(f"{row.n} requests do not fit: {slots - live} slots are free")
    rounds = (3 if bench.interpreted else plan.TAIL_ROUNDS) if row.pattern == "tail" else None
    generator = torch.Generator(bench.device).manual_seed(bench.seed)
    with devalloc.Heap(slots * row.size, device=bench.device) as heap:
        addrs = fill_heap(bench, row, heap, slots)
        addrs = addrs[torch.randperm(slots, generator=generator, device=bench.device)]
        kept, freed = addrs[:live], addrs[live:].clone()
        free_all(bench, row, heap, freed)
        heap.check()
        if heap.stats().used != live * row.size:
            raise WrongResult(f"{heap.stats().used} B are used, not {row.param} % of the heap")
        out = bench.addresses(row.n)
        trial = thread_trial(row, heap, out)
        samples = alloc_then_free(bench, trial, out, row.size, rounds, live=kept)
        with_heap(samples, heap)
        if live:
            free_all(bench, row, heap, kept.clone())
        require_rest(heap)
    return samples


# Sizes of the heap -------------------------------------------------------------------------------


def run_heap(bench: Bench, row: Row) -> list[Samples]:
    """The ``thread`` workload on a heap of ``param`` bytes."""
    assert row.param is not None
    with devalloc.Heap(row.param, device=bench.device) as heap:
        addrs = bench.addresses(row.n)
        samples = alloc_then_free(bench, thread_trial(row, heap, addrs), addrs, row.size)
        with_heap(samples, heap)
        require_rest(heap)
    return samples


# Launches at once --------------------------------------------------------------------------------


def at_once(device: torch.device, launches: Sequence[Launch]) -> Launch:
    """One launch per stream, all between two points of the current stream.

    In the interpreter, which has no streams, one after the other.
    """
    if device.type == "cpu":
        return lambda: [launch() for launch in launches]
    streams = [torch.cuda.Stream(device) for _ in launches]

    def run() -> None:
        current = torch.cuda.current_stream(device)
        begin = current.record_event()
        ends = []
        for stream, launch in zip(streams, launches, strict=True):
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                launch()
            ends.append(stream.record_event())
        for end in ends:
            current.wait_event(end)

    return run


def run_streams(bench: Bench, row: Row) -> list[Samples]:
    """``param`` launches of n requests each at once; the time is that of all of them."""
    assert row.param is not None
    heap = bench.heap
    addrs = bench.addresses(row.param, row.n)
    trials = [thread_trial(row, heap, part) for part in addrs]
    malloc = at_once(bench.device, [each.malloc for each in trials])
    free = at_once(bench.device, [each.free for each in trials if each.free is not None])
    trial = Trial(heap.base, heap.capacity, malloc, free)
    return alloc_then_free(bench, trial, addrs, row.size, patience=1 + row.param)
