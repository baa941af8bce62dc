"""Neighbour lists of moving atoms: lists in a heap, two passes, lists padded to a guess, or a log
of pairs that is sorted. All but the two passes are recorded as a CUDA graph. The atoms, their cells
and the reference are those of ``examples/neighbour_lists.py``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

import devalloc
from benchmarks.harness import WrongResult
from benchmarks.uses.measure import Input, Way, recorded, require_equal
from examples.neighbour_lists import CUTOFF, LANES, Neighbours, random_atoms, reference

COUNT, STORE, LOG = (tl.constexpr(mode) for mode in range(3))


@triton.jit
def search(places, order, starts, atoms, row, there, ptr, limit, total,
           MODE: tl.constexpr, GRID: tl.constexpr, CUTOFF: tl.constexpr):  # fmt: skip
    """Count each lane's neighbours, and store up to ``limit`` at ``ptr``, or append all pairs to a
    log of ``limit`` entries at ``ptr`` with their number in ``total``."""
    x = tl.load(places + row, mask=there, other=0)
    y = tl.load(places + atoms + row, mask=there, other=0)
    z = tl.load(places + 2 * atoms + row, mask=there, other=0)
    column = (x / CUTOFF).to(tl.int32)
    me = tl.load(order + row, mask=there, other=0).to(tl.int64) << 32
    found = row * 0
    for strip in range(9):
        line = (y / CUTOFF).to(tl.int32) + strip % 3 - 1
        layer = (z / CUTOFF).to(tl.int32) + strip // 3 - 1
        inside = there & (line >= 0) & (line < GRID) & (layer >= 0) & (layer < GRID)
        cell = (layer * GRID + line) * GRID
        begin = tl.load(starts + cell + tl.maximum(column - 1, 0), mask=inside, other=0)
        end = tl.load(starts + cell + tl.minimum(column + 2, GRID), mask=inside, other=0)
        for step in range(tl.max(end - begin, axis=0)):
            other = begin + step
            near = (other < end) & (other != row)
            dx = tl.load(places + other, mask=near, other=0) - x
            dy = tl.load(places + atoms + other, mask=near, other=0) - y
            dz = tl.load(places + 2 * atoms + other, mask=near, other=0) - z
            near = near & (dx * dx + dy * dy + dz * dz <= CUTOFF * CUTOFF)
            if MODE == STORE:
                fits = near & (found < limit)
                tl.store(ptr + found, tl.load(order + other, mask=fits, other=0), mask=fits)
            if MODE == LOG:
                count = tl.sum(near.to(tl.int32), axis=0)
                if count > 0:
                    place = tl.atomic_add(total, count, sem="relaxed")
                    place += tl.cumsum(near.to(tl.int32), axis=0) - 1
                    fits = near & (place < limit)
                    atom = tl.load(order + other, mask=fits, other=0)
                    tl.store(ptr + place, me | atom.to(tl.int64), mask=fits)
            found += near.to(tl.int32)
    return found


@triton.jit
def count_kernel(places, order, starts, counts, atoms,
                 GRID: tl.constexpr, CUTOFF: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = row < atoms
    count = search(places, order, starts, atoms, row, there, counts, 0, counts, COUNT, GRID, CUTOFF)
    tl.store(counts + tl.load(order + row, mask=there, other=0), count, mask=there)


@triton.jit
def fill_kernel(places, order, starts, values, offsets, atoms,
                GRID: tl.constexpr, CUTOFF: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = row < atoms
    begin = tl.load(offsets + tl.load(order + row, mask=there, other=0), mask=there, other=0)
    search(places, order, starts, atoms, row, there, values + begin, 1 << 30, offsets,
           STORE, GRID, CUTOFF)  # fmt: skip


@triton.jit
def pad_kernel(places, order, starts, values, counts, atoms, width,
               GRID: tl.constexpr, CUTOFF: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = row < atoms
    atom = tl.load(order + row, mask=there, other=0)
    count = search(places, order, starts, atoms, row, there, values + atom.to(tl.int64) * width,
                   width, counts, STORE, GRID, CUTOFF)  # fmt: skip
    tl.store(counts + atom, count, mask=there)


@triton.jit
def log_kernel(places, order, starts, log, total, atoms, limit,
               GRID: tl.constexpr, CUTOFF: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    search(places, order, starts, atoms, row, row < atoms, log, limit, total, LOG, GRID, CUTOFF)


class Atoms:
    """An input: the atoms at the start, and the reference after the steps of a round."""

    def __init__(self, atoms: int, clustered: bool, steps: int, device: torch.device) -> None:
        places, self.grid = random_atoms(atoms, clustered)
        self.steps, self.device = steps, device
        self.places = places.to(device)
        torch.manual_seed(0)
        self.speeds = torch.randint_like(self.places, -20, 21)
        self.first_pairs = len(reference(self.places))
        moving = Moving(self, None)
        moving.begin()
        for _ in range(steps):
            moving.lists.move()
        self.pairs = reference(moving.lists.places)


class Moving(Way):
    """Atoms that each round begin where they were."""

    def __init__(self, atoms: Atoms, heap: devalloc.Heap | None) -> None:
        self.atoms, self.heap, self.steps = atoms, heap, atoms.steps
        # (The example's class moves the atoms for all ways; only one of them has lists in a heap.)
        self.lists = Neighbours(heap or atoms, atoms.places.clone(), atoms.grid)
        self.shape = {"GRID": atoms.grid, "CUTOFF": CUTOFF, "LANES": LANES}
        self.launch = (triton.cdiv(len(self.lists.counts), LANES),)

    def begin(self) -> None:
        self.lists.places.copy_(self.atoms.places)
        self.lists.speeds.copy_(self.atoms.speeds)

    def keys(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Pairs as those of the reference, from rows that lie end to end."""
        atom = torch.arange(len(lengths), device=values.device)
        row = torch.repeat_interleave(atom, lengths.long())
        return (row * len(lengths) + values).sort().values


class InHeap(Moving):
    def __init__(self, atoms: Atoms) -> None:
        heap = devalloc.Heap(max(8 << 20, 16 * atoms.first_pairs), device=atoms.device)
        super().__init__(atoms, heap)
        self.step = recorded(self.lists.step, atoms.device)  # type: ignore[method-assign]

    def check(self) -> int:
        assert self.heap is not None
        found = self.heap.gather(self.lists.addrs, self.lists.counts, torch.int32)[0]
        require_equal(self.keys(found, self.lists.counts), self.atoms.pairs, "pairs")
        return 0


class TwoPasses(Moving):
    def __init__(self, atoms: Atoms) -> None:
        super().__init__(atoms, None)

    def step(self) -> None:
        places, order, starts = self.lists.move()
        n = len(order)
        self.values = None
        count_kernel[self.launch](places, order, starts, self.lists.counts, n, **self.shape)
        self.offsets = torch.zeros(n + 1, dtype=torch.int64, device=order.device)
        torch.cumsum(self.lists.counts, 0, out=self.offsets[1:])
        self.values = torch.empty(int(self.offsets[-1]), dtype=torch.int32, device=order.device)
        fill_kernel[self.launch](places, order, starts, self.values, self.offsets, n, **self.shape)

    def check(self) -> int:
        require_equal(self.keys(self.values, self.lists.counts), self.atoms.pairs, "pairs")
        return 0


class Padded(Moving):
    """As wide as twice the mean at the start, in steps of 16."""

    def __init__(self, atoms: Atoms) -> None:
        super().__init__(atoms, None)
        n = len(self.lists.counts)
        self.width = triton.cdiv(2 * atoms.first_pairs // n, 16) * 16
        self.values = torch.empty(n, self.width, dtype=torch.int32, device=atoms.device)
        self.step = recorded(self.pad, atoms.device)  # type: ignore[method-assign]

    def pad(self) -> None:
        places, order, starts = self.lists.move()
        pad_kernel[self.launch](places, order, starts, self.values, self.lists.counts, len(order),
                                self.width, **self.shape)  # fmt: skip

    def check(self) -> int:
        kept = self.lists.counts.clamp(max=self.width)
        inside = torch.arange(self.width, device=kept.device) < kept[:, None]
        keys = self.keys(self.values[inside], kept)
        return require_subset(keys, self.atoms.pairs, int((self.lists.counts - kept).sum()))


class Logged(Moving):
    """With room for a quarter more pairs than there are at the start."""

    def __init__(self, atoms: Atoms) -> None:
        super().__init__(atoms, None)
        n, device = len(self.lists.counts), atoms.device
        self.log = torch.empty(atoms.first_pairs * 5 // 4, dtype=torch.int64, device=device)
        self.total = torch.zeros(1, dtype=torch.int32, device=device)
        self.rows = torch.arange(n + 1, dtype=torch.int64, device=device) << 32
        self.step = recorded(self.write, device)  # type: ignore[method-assign]

    def write(self) -> None:
        places, order, starts = self.lists.move()
        self.total.zero_()
        self.log.fill_(torch.iinfo(torch.int64).max)
        log_kernel[self.launch](places, order, starts, self.log, self.total, len(order),
                                len(self.log), **self.shape)  # fmt: skip
        self.pairs = self.log.sort().values
        self.offsets = torch.searchsorted(self.pairs, self.rows)

    def check(self) -> int:
        pairs = self.pairs[: int(self.offsets[-1])]
        keys = (pairs >> 32) * (len(self.rows) - 1) + (pairs & 0xFFFFFFFF)
        return require_subset(keys, self.atoms.pairs, max(0, int(self.total) - len(self.log)))


def require_subset(found: torch.Tensor, wanted: torch.Tensor, dropped: int) -> int:
    """Raise WrongResult unless ``found`` are ``wanted``, but for ``dropped`` of them."""
    if len(found) + dropped != len(wanted) or not bool(torch.isin(found, wanted).all()):
        raise WrongResult(f"{len(found)} pairs and {dropped} dropped, of {len(wanted)}")
    return dropped


def inputs(device: torch.device) -> Iterator[Input]:
    atoms, steps = (200_000, 50) if device.type == "cuda" else (100, 2)
    ways = {"heap": InHeap, "two passes": TwoPasses, "padded": Padded, "log": Logged}
    for name in ("uniform", "clustered"):
        given = Atoms(atoms, name == "clustered", steps, device)
        yield Input("neighbours", name, atoms, 4 * len(given.pairs), {
            way: lambda kind=kind, given=given: kind(given) for way, kind in ways.items()
        })  # fmt: skip
