"""What runners work with: the shared heap, the clock, rounds of allocating and freeing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import devalloc
from benchmarks.device import plan
from benchmarks.device.cuda_malloc import CudaMalloc
from benchmarks.device.plan import Row
from benchmarks.harness import Clock, Samples, WrongResult, clock_for, require, verify
from devalloc.heap.debug_table import GUARD_BYTES

Launch = Callable[[], object]

DRAIN_ROUNDS = 16
"""Rounds that are queued before their times are read. A device queues about a thousand launches;
a host that waits for room in the queue would look slow, and its samples be dropped."""


class Bench:
    """The heap that rows are measured on, with the clock and the options.

    Parameters
    ----------
    device : torch.device
        A CUDA device, or the CPU under the interpreter.
    heap_bytes : int
        Capacity of the shared heap, which is made when it is first used, and of CUDA's own.
    rounds : int
        Timed rounds per row.
    seed : int
        Of mixed sizes and of what is freed at random.
    cuda : CudaMalloc, optional
        The built-in malloc, in a process that measures it.
    debug : bool
        Whether the shared heap is a debug heap.
    """

    def __init__(
        self,
        device: torch.device,
        heap_bytes: int,
        rounds: int,
        seed: int,
        cuda: CudaMalloc | None = None,
        debug: bool = False,
    ) -> None:
        self.device = device
        self.interpreted = device.type == "cpu"
        self.heap_bytes = heap_bytes
        self.rounds = rounds
        self.seed = seed
        self.cuda = cuda
        self.debug = debug
        self.clock: Clock = clock_for(device)
        self.oom_heap_bytes = plan.MIB if self.interpreted else plan.OOM_HEAP_BYTES
        self.fill_slots = 1024 if self.interpreted else plan.FILL_SLOTS
        self._heap: devalloc.Heap | None = None
        self._other: torch.Tensor | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._heap is not None:
            self._heap.close()

    @property
    def heap(self) -> devalloc.Heap:
        if self._heap is None:
            self._heap = devalloc.Heap(self.heap_bytes, device=self.device, debug=self.debug)
        return self._heap

    @property
    def heap_in_use(self) -> bool:
        return self._heap is not None

    def at_rest(self) -> Samples:
        """Check the shared heap after a family that freed everything; see `rest_of`. The heap is
        reset afterwards."""
        samples = rest_of(self.heap)
        self.heap.reset()
        return samples

    def addresses(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def random_sizes(self, most: int, n: int, generator: torch.Generator) -> torch.Tensor:
        """Uniform in [16, most]."""
        return torch.randint(16, most + 1, (n,), generator=generator).to(self.device)

    def sample(self, samples: Samples, launch: Launch, rounds: int | None = None) -> None:
        """Time one operation over all rounds, after one that is not timed.

        Between two rounds other kernels run, as between those of `alloc_then_free`: what runs
        right after itself finds its instructions still there, and is up to 0.7 us shorter.
        """
        launch()
        marks: list[object] = []
        between = self.addresses(1)
        for _ in range(rounds or self.rounds):
            between.zero_()
            marks.append(self.clock.start(launch))
            (between == 0).sum()
        self.collect(samples, marks)
        require_values(samples)

    def collect(self, samples: Samples, marks: list[object]) -> None:
        """Read what was queued; samples for which the host was too slow are dropped."""
        values = [self.clock.milliseconds(mark) for mark in marks]
        samples.values += [value for value in values if value is not None]
        marks.clear()

    def pass_other_data(self) -> None:
        """Write more than the caches hold, so that nothing of the heap is left in them."""
        if self._other is None:
            size = plan.MIB if self.interpreted else 256 * plan.MIB
            self._other = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._other.zero_()


def require_values(samples: Samples) -> None:
    if not samples.values:
        raise WrongResult("the host was too slow for every sample: no time is valid")


def rest_of(heap: devalloc.Heap) -> Samples:
    """Check a heap in which everything was freed: no errors recorded, audit clean. The value is
    the largest free block over the capacity, and must be 1."""
    samples = Samples("at_rest", unit="ratio")
    try:
        heap.check()
        heap.audit()
        stats = heap.stats()
        samples.values.append(stats.largest_free / stats.capacity)
        # (In a debug heap the largest request leaves room for its guards.)
        if stats.used or stats.capacity - stats.largest_free > GUARD_BYTES:
            samples.check = f"{stats.used} B used, largest free {stats.largest_free} B"
    except devalloc.DevallocError as error:
        samples.check = " ".join(str(error).split())
    return samples


def require_rest(heap: devalloc.Heap) -> None:
    """Raise WrongResult unless `rest_of` finds the heap whole."""
    rest = rest_of(heap)
    if rest.check != "ok":
        raise WrongResult(f"after everything was freed: {rest.check}")


# Launches ----------------------------------------------------------------------------------------


def cdiv(a: int, b: int) -> int:
    return (a + b - 1) // b


def lane_launch(row: Row, kernel: Any, *args: object) -> Launch:
    """A launch of a kernel that takes ``LANES``, with a program per block of lanes."""
    grid = (cdiv(row.n, row.lanes),)
    return lambda: kernel[grid](*args, LANES=row.lanes, **row.launch_options)


def nothing() -> None:
    """A function that does nothing."""


@dataclass
class Trial:
    """One allocator on one row: where its memory lies, and what is launched.

    Attributes
    ----------
    base, capacity : int
        First byte and bytes of its heap.
    malloc, free : callable
        Launches that fill the row's address array, and free what it holds. An allocator that
        cannot free has none.
    prepare : callable
        Run before each `malloc`, not timed.
    alignment : int, optional
        Bytes; default: what devalloc guarantees for each size.
    """

    base: int
    capacity: int
    malloc: Launch
    free: Launch | None
    prepare: Launch = nothing
    alignment: int | None = None


def alloc_then_free(
    bench: Bench,
    trial: Trial,
    addrs: torch.Tensor,
    sizes: torch.Tensor | int,
    rounds: int | None = None,
    patience: int = 1,
    live: torch.Tensor | None = None,
    cold: bool = False,
) -> list[Samples]:
    """Rounds of one launch that fills `addrs` and one that frees them.

    Round 0 is verified and not timed. `live` are addresses of the same size that were allocated
    before and must stay apart; `cold`: see `Bench.pass_other_data`.
    """
    alloc, release = Samples("alloc"), Samples("free")
    alloc_marks: list[object] = []
    free_marks: list[object] = []
    nulls = torch.zeros((), dtype=torch.int64, device=bench.device)
    for turn in range((rounds or bench.rounds) + 1):
        addrs.zero_()  # or a lane that stored nothing would pass with the last round's address
        trial.prepare()
        if cold:
            bench.pass_other_data()
        alloc_marks.append(bench.clock.start(trial.malloc, patience))
        if turn == 0:
            got = addrs.view(-1) if live is None else torch.cat([addrs.view(-1), live])
            require(verify(got, sizes, trial.base, trial.capacity, trial.alignment))
        nulls += (addrs == 0).sum()
        if trial.free is not None:
            if cold:
                bench.pass_other_data()
            free_marks.append(bench.clock.start(trial.free, patience))
        if turn == 0:
            alloc_marks.clear()
            free_marks.clear()
        elif turn % DRAIN_ROUNDS == 0:
            bench.collect(alloc, alloc_marks)
            bench.collect(release, free_marks)
    bench.collect(alloc, alloc_marks)
    bench.collect(release, free_marks)
    alloc.failures = int(nulls)
    measured = [alloc] if trial.free is None else [alloc, release]
    for samples in measured:
        require_values(samples)
    return measured
