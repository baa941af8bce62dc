"""The job: build adjacency lists on the device, delete half of the edges, free everything.

After each step the lists are copied out and compared with `reference`, edge for edge.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from devalloc import Heap
from devalloc.demo.graph import Graph
from devalloc.demo.lists import ENTRY_BYTES, AdjacencyLists
from devalloc.demo.reference import expected_lists, first_difference
from devalloc.errors import CorruptionError, InvalidArgument, OutOfMemory
from devalloc.heap.state import Snapshot
from devalloc.report.memory_map import save_memory_map, taken_pages
from devalloc.sizes import format_size

BATCHES = 16
SMALLEST_HEAP = 1 << 20


@dataclass(frozen=True)
class Step:
    """One step of the job, and the state after it. In bytes and seconds."""

    name: str
    edges: int  # inserted, deleted or freed in this step
    seconds: float
    entries: int  # in all lists, afterwards
    lists: int  # that are not empty
    used: int  # by blocks, whose sizes are rounded up
    mapped: int  # memory behind the heap, its state among it
    snapshot: Snapshot

    @property
    def exact(self) -> int:
        """Bytes for the entries in a build that first counts them and then allocates."""
        return self.entries * ENTRY_BYTES

    @property
    def pages(self) -> int:
        """That are in use."""
        return int(np.count_nonzero(taken_pages(self.snapshot)))

    @property
    def in_pages(self) -> int:
        """Bytes of those pages."""
        return self.pages * self.snapshot.page_bytes


def default_heap_bytes(edges: int) -> int:
    """Eight times what the entries need, up to a power of two: lists move while they grow."""
    return max(SMALLEST_HEAP, 1 << (edges * ENTRY_BYTES * 8 - 1).bit_length())


def default_batch(edges: int) -> int:
    return max(1, -(-edges // BATCHES))


class Job:
    """A graph, a heap and the lists in it, taken through the steps one after another.

    Parameters
    ----------
    graph : Graph
    heap : devalloc.Heap
    batch : int
        Edges per launch.
    seed : int
        Of the random order of insertions, and of the choice and order of the deletions.
    progress : rich.progress.Progress
        Shows how far each step is.
    """

    def __init__(self, graph: Graph, heap: Heap, batch: int, seed: int, progress: Progress) -> None:
        self.graph = graph
        self.heap = heap
        self.batch = batch
        self.progress = progress
        self.lists = AdjacencyLists(heap, graph.vertices)
        random = np.random.default_rng(seed)
        self.inserted = random.permutation(graph.edges)
        deleted = random.permutation(graph.edges)[: graph.edges // 2]
        self.deleted = self.inserted[deleted]
        self.kept = np.delete(self.inserted, deleted)

    def run(self) -> list[Step]:
        """All steps. Raises OutOfMemory, or CorruptionError if a result is wrong."""
        if self.heap.device.type != "cpu":
            task = self.progress.add_task("compile", total=None)
            self.lists.warm_up(min(self.batch, self.graph.edges))
            self.progress.remove_task(task)
        return [self.build(), self.delete(), self.free()]

    def build(self) -> Step:
        accepted: list[torch.Tensor] = []

        def insert(sources: torch.Tensor, targets: torch.Tensor) -> None:
            accepted.append(self.lists.insert(sources, targets))

        seconds = self.timed("build", insert, self.on_device(self.inserted))
        stored = torch.cat(accepted).cpu().numpy()
        self.compare(self.inserted[stored], "after the build")
        if not stored.all():
            raise OutOfMemory(
                f"out of memory: {np.count_nonzero(~stored):,} of {self.graph.edges:,} edges "
                f"found no room in a heap of {format_size(self.heap.capacity)}; the "
                f"{np.count_nonzero(stored):,} others are all there; give --heap a larger size"
            )
        return self.step("build", self.graph.edges, seconds)

    def delete(self) -> Step:
        seconds = self.timed("delete", self.lists.delete, self.on_device(self.deleted))
        self.compare(self.kept, "after the deletions")
        try:
            self.heap.check()
        except OutOfMemory:
            # A list found no smaller place and stayed where it was. That is no failure.
            self.progress.console.print("[dim]some lists found no room to shrink into[/dim]")
        return self.step("delete", len(self.deleted), seconds)

    def free(self) -> Step:
        seconds = self.timed("free", self.lists.release, [()])
        self.compare(self.kept[:0], "after freeing")
        self.heap.check()
        self.heap.audit()
        stats = self.heap.stats()
        if stats.used or stats.largest_free != stats.capacity:
            raise CorruptionError(
                f"everything was freed, but {format_size(stats.used)} are in use and the "
                f"largest free block has {format_size(stats.largest_free)}"
            )
        # (A heap that grows gives its memory back.)
        self.heap.trim()
        return self.step("free", len(self.kept), seconds)

    def on_device(self, edges: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of some of the graph's edges."""
        device = self.heap.device
        sources = torch.from_numpy(self.graph.sources[edges]).to(device).split(self.batch)
        targets = torch.from_numpy(self.graph.targets[edges]).to(device).split(self.batch)
        return list(zip(sources, targets, strict=True))

    def timed(
        self, name: str, launch: Callable[..., None], batches: Sequence[tuple[torch.Tensor, ...]]
    ) -> float:
        """Launch every batch and wait for the last; returns the seconds that this took."""
        task = self.progress.add_task(name, total=len(batches))
        self.synchronise()
        start = time.perf_counter()
        for batch in batches:
            launch(*batch)
            self.progress.advance(task)
        self.synchronise()
        return time.perf_counter() - start

    def synchronise(self) -> None:
        if self.heap.device.type == "cuda":
            torch.cuda.synchronize(self.heap.device)

    def compare(self, edges: np.ndarray, when: str) -> None:
        offsets, entries = (tensor.cpu().numpy() for tensor in self.lists.to_csr())
        difference = first_difference((offsets, entries), expected_lists(self.graph, edges))
        if difference:
            raise CorruptionError(f"{when} the lists differ from the CPU's: {difference}")

    def step(self, name: str, edges: int, seconds: float) -> Step:
        lengths = self.lists.lengths
        stats = self.heap.stats()
        return Step(
            name=name,
            edges=edges,
            seconds=seconds,
            entries=int(lengths.sum()),
            lists=int((lengths > 0).sum()),
            used=stats.used,
            mapped=stats.mapped,
            snapshot=self.heap.snapshot(),
        )


def run_demo(
    graph: Graph,
    output: str | Path,
    heap_bytes: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    device: str | None = None,
    console: Console | None = None,
) -> list[Step]:
    """Take a graph through the whole job, print what happened and draw the heap.

    Parameters
    ----------
    graph : Graph
    output : str or Path
        The PNG file for maps of the heap after each step.
    heap_bytes : int, optional
        Capacity of the heap. By default the heap begins with a chunk and grows by itself; where it
        cannot, the capacity is chosen from the number of edges.
    batch : int, optional
        Edges per launch; by default chosen from the number of edges.
    seed : int
        The same seed gives the same job.
    device : str, optional
        As for `devalloc.Heap`.
    console : rich.console.Console, optional
        Where to print; standard output by default.

    Raises
    ------
    OutOfMemory
        If the heap is too small for the graph. Nothing that was stored is lost or wrong.
    CorruptionError
        If the lists differ from the reference, or the heap violates an invariant.
    """
    console = console or Console()
    duplicates = f" ({graph.duplicates:,} duplicates dropped)" if graph.duplicates else ""
    console.print(
        f"graph: {graph.name}, {graph.vertices:,} vertices, {graph.edges:,} edges{duplicates}",
        highlight=False,
        soft_wrap=True,
    )
    if graph.header:
        console.print(
            f'first line "{graph.header}": a header, not an edge (vertices and edges agree)',
            highlight=False,
            soft_wrap=True,
        )
    with (
        make_heap(graph.edges, heap_bytes, device) as heap,
        launching_on(heap.device),
        progress_bar() as progress,
    ):
        job = Job(graph, heap, batch or default_batch(graph.edges), seed, progress)
        steps = job.run()
        size = describe_size(heap)
    console.print(table_of(steps, size))
    console.print(*explanation(steps), sep="\n", highlight=False, soft_wrap=True)
    heading = f"{graph.edges:,} edges in {steps[0].lists:,} lists that grow in the kernel"
    save_memory_map(output, *panels(steps), heading, notes(steps), caption(steps))
    console.print(f"picture: {output}", highlight=False, soft_wrap=True)
    return steps


def make_heap(edges: int, heap_bytes: int | None, device: str | None) -> Heap:
    """A heap of a given size, or one that grows by itself, where that is possible."""
    if heap_bytes is None:
        try:
            return Heap(SMALLEST_HEAP, device=device, grow="auto")
        except InvalidArgument:  # no virtual memory on this device
            heap_bytes = default_heap_bytes(edges)
    return Heap(heap_bytes, device=device)


def describe_size(heap: Heap) -> str:
    if heap.limit == heap.capacity:
        return f"heap of {format_size(heap.capacity)}"
    return f"heap that grows by itself, up to {format_size(heap.limit)}"


@contextmanager
def launching_on(device: torch.device) -> Iterator[None]:
    """A context in which kernels are launched on ``device``."""
    with torch.cuda.device(device if device.type == "cuda" else -1):
        yield


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("batches"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def table_of(steps: Sequence[Step], title: str) -> Table:
    """What the steps did, one row each."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("step", no_wrap=True)
    for heading in (
        "edges",
        "edges/s",
        "lists",
        "needed",
        "in blocks",
        "in pages",
        "mapped",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for step in steps:
        table.add_row(
            step.name,
            f"{step.edges:,}",
            f"{step.edges / max(step.seconds, 1e-9):,.0f}",
            f"{step.lists:,}",
            format_size(step.exact),
            format_size(step.used),
            format_size(step.in_pages),
            format_size(step.mapped),
        )
    return table


def explanation(steps: Sequence[Step]) -> list[str]:
    """What the columns of the table mean, and what was checked."""
    page = format_size(steps[0].snapshot.page_bytes)
    lines = [
        f"needed: {ENTRY_BYTES} bytes for each edge that is left",
        "in blocks: the lists' blocks; a list has room for a power of two of edges",
        f"in pages: what the heap holds for them, in pages of {page}, each for one size of block",
        "mapped: memory behind the heap and its state; what it grew by is given back in the end",
    ]
    build, delete = steps[0], steps[1]
    if delete.in_pages > build.in_pages:
        lines.append(MORE_PAGES)
    return [
        *lines,
        "checked: after every step all lists equal the CPU's, edge for edge",
        "checked: the heap's audit found no error, and everything is free again, in one piece",
    ]


MORE_PAGES = (
    "more pages after deleting: a list that shrinks moves to a smaller block before its old one is "
    "freed, and a page stays as long as any block in it is live"
)


def panels(steps: Sequence[Step]) -> tuple[list[Snapshot], list[str]]:
    """The snapshots to draw and their titles."""
    titles = {
        "build": "1. all edges inserted",
        "delete": "2. half of them deleted",
        "free": "3. everything freed",
    }
    return [step.snapshot for step in steps], [titles[step.name] for step in steps]


def notes(steps: Sequence[Step]) -> list[str]:
    """A line under each title: bytes of lists, of the pages that hold them, and of the heap."""
    return [
        f"{format_size(step.used)} in blocks, {format_size(step.in_pages)} in pages, "
        f"{format_size(step.mapped)} mapped"
        for step in steps
    ]


def caption(steps: Sequence[Step]) -> str:
    """What a reader of the picture alone needs to know."""
    return MORE_PAGES if steps[1].in_pages > steps[0].in_pages else ""
