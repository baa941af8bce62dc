"""One way to do something, measured: time, memory, what the host waits for, what is dropped.

A round is some steps, one after the other; its sample is the time from the first to the end of the
last, by the host's clock with a synchronisation at the end, over the number of steps. So what the
host has to do in a step counts, as it does for a user. The first round is not timed: its result is
compared with the reference, and memory is read.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

import devalloc
from benchmarks.harness import WrongResult
from benchmarks.results import PROVENANCE

COLUMNS = ("use", "input", "n", "way", "unit", "median", "p20", "p80", "min", "max", "rounds",
           "steps", "synchronisations", "dropped", "result_bytes", "peak_bytes", "heap_peak_bytes",
           "check", *PROVENANCE)  # fmt: skip


class Way:
    """One way to do something: with a heap, or without.

    Attributes
    ----------
    heap : devalloc.Heap, optional
        Closed at the end. Its peak is added to that of PyTorch's allocator.
    steps : int
        Of a round.
    """

    heap: devalloc.Heap | None = None
    steps = 1

    def begin(self) -> None:
        """Before a round; not timed."""

    def step(self) -> None:
        """What is timed."""
        raise NotImplementedError

    def check(self) -> int:
        """Compare what the last step left with the reference; returns how much was dropped.

        Raises
        ------
        WrongResult
        """
        raise NotImplementedError

    def end(self) -> None:
        if self.heap is not None:
            self.heap.close()


@dataclass
class Input:
    """What all ways are given, and how to make each of them. Data that they share is there before.

    ``n`` counts what it consists of (rows, atoms, sequences, tokens); ``result_bytes`` is what has
    to be stored, without a gap.
    """

    use: str
    name: str
    n: int
    result_bytes: int
    ways: dict[str, Callable[[], Way]] = field(default_factory=dict)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def recorded(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A CUDA graph of a step, which runs once before; in the interpreter the step itself."""
    step()
    if device.type == "cpu":
        return step
    synchronise(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def timed_round(way: Way, device: torch.device) -> float:
    """Milliseconds for one step."""
    way.begin()
    synchronise(device)
    begin = time.perf_counter()
    for _ in range(way.steps):
        way.step()
    synchronise(device)
    return (time.perf_counter() - begin) * 1e3 / way.steps


def synchronisations(way: Way, device: torch.device) -> str:
    """How often the host waits in a step; empty where there is nothing to wait for."""
    if device.type == "cpu":
        return ""
    way.begin()
    synchronise(device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(way.steps):
                way.step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found = sum("synchronizing CUDA operation" in str(entry.message) for entry in told)
    return f"{found / way.steps:.4g}"


def measure(make: Callable[[], Way], device: torch.device, rounds: int) -> dict[str, object]:
    """The columns of a row that depend on the way.

    A way that fails, as libraries do for large inputs, has the error's first line as its check, and
    no times.
    """
    way, peak, heap_peak, dropped, waits, check = None, 0, 0, 0, "", "ok"
    times: list[float] = []
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    try:
        way = make()
        timed_round(way, device)
        if way.heap is not None:
            way.heap.check()
            peak = heap_peak = way.heap.stats().peak
        if device.type == "cuda":
            peak += torch.cuda.max_memory_allocated(device) - before
        dropped = way.check()
        waits = synchronisations(way, device)
        times = [timed_round(way, device) for _ in range(rounds)]
        if way.heap is not None:
            way.heap.check()
    except (RuntimeError, WrongResult, devalloc.DevallocError) as error:
        times, check = [], str(error).splitlines()[0][:200]
    heap_bytes = 0 if way is None or way.heap is None else way.heap.capacity
    if way is not None:
        way.end()
    return {
        "unit": "ms",
        **quantiles(times),
        "rounds": len(times),
        "steps": 0 if way is None else way.steps,
        "synchronisations": waits,
        "dropped": dropped,
        "peak_bytes": peak,
        "heap_peak_bytes": heap_peak,
        "heap_bytes": heap_bytes,
        "check": check,
    }


def quantiles(times: Sequence[float]) -> dict[str, object]:
    shares = {"median": 0.5, "p20": 0.2, "p80": 0.8, "min": 0, "max": 1}
    if not times:
        return dict.fromkeys(shares, "nan")
    return {name: f"{float(np.quantile(times, share)):.6f}" for name, share in shares.items()}


def require_equal(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Raise WrongResult if two tensors differ."""
    if found.shape != wanted.shape:
        raise WrongResult(f"{what}: {tuple(found.shape)} elements, not {tuple(wanted.shape)}")
    wrong = int((found != wanted).sum())
    if wrong:
        raise WrongResult(f"{what}: {wrong} of {found.numel()} differ")
