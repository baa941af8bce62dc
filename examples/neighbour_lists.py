"""Neighbour lists of moving atoms, made anew in each replay of one CUDA graph.

Each lane writes a list into the block that the list had in the step before. If that is too small,
or much too large, the lane takes another block and writes again.

Without a heap one pads every list to a guess and loses what is longer, or runs two passes and waits
for the sum of the lengths, which a graph cannot do.

Run it: ``python examples/neighbour_lists.py`` (without a GPU: with ``TRITON_INTERPRET=1``).
"""

import torch
import triton
import triton.language as tl

import devalloc
from devalloc import kernels as da

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
CUTOFF = 1024  # positions are whole numbers, so distances are exact, and so is the reference
LANES = 128 if ON_GPU else 512


@triton.jit
def write_lists(heap, addr, room, places, order, starts, atoms, row, searching,
                GRID: tl.constexpr, CUTOFF: tl.constexpr):  # fmt: skip
    """Write what has room in each searching lane's block; returns how many neighbours there are."""
    x = tl.load(places + row, mask=searching, other=0)
    y = tl.load(places + atoms + row, mask=searching, other=0)
    z = tl.load(places + 2 * atoms + row, mask=searching, other=0)
    column = (x / CUTOFF).to(tl.int32)
    found = row * 0
    for strip in range(9):  # three cells side by side are one range of atoms
        line = (y / CUTOFF).to(tl.int32) + strip % 3 - 1
        layer = (z / CUTOFF).to(tl.int32) + strip // 3 - 1
        inside = searching & (line >= 0) & (line < GRID) & (layer >= 0) & (layer < GRID)
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
            fits = near & (found < room)
            place = da.pointer(heap, addr + 4 * found, tl.int32, fits)
            tl.store(place, tl.load(order + other, mask=fits, other=0), mask=fits)
            found += near.to(tl.int32)
    return found


@triton.jit
def lists_kernel(heap, places, order, starts, addrs, rooms, counts, atoms,
                 GRID: tl.constexpr, CUTOFF: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """``places`` are sorted by cell, ``order`` says which atoms those are; one atom a lane."""
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = row < atoms
    atom = tl.load(order + row, mask=there, other=0)
    addr = tl.load(addrs + atom, mask=there, other=0)
    room = tl.load(rooms + atom, mask=there, other=0)
    count = write_lists(heap, addr, room, places, order, starts, atoms, row, there, GRID, CUTOFF)
    change = there & ((count > room) | ((room > 16) & (10 * count < 7 * room)))
    if tl.max(change.to(tl.int32), axis=0) > 0:
        da.free(heap, addr, change)
        addr = tl.where(change, da.malloc(heap, 4 * count, change), addr)
        room = tl.where(change, (da.usable_size(heap, addr, change) // 4).to(tl.int32), room)
        write_lists(heap, addr, room, places, order, starts, atoms, row, change, GRID, CUTOFF)
        tl.store(addrs + atom, addr, mask=change)
        tl.store(rooms + atom, room, mask=change)
    tl.store(counts + atom, tl.minimum(count, room), mask=there)  # less only without memory


def random_atoms(atoms: int, clustered: bool) -> tuple[torch.Tensor, int]:
    """Places (3, atoms) and cells on a side: uniform with 40 neighbours, or half in clusters."""
    random = torch.Generator().manual_seed(0)
    grid = max(2, round((atoms * (0.25 if clustered else 0.1)) ** (1 / 3)))
    places = torch.rand(3, atoms, generator=random) * grid
    if clustered:
        sizes = torch.randint(200, 3000, (atoms,), generator=random)
        cluster = torch.repeat_interleave(sizes)[: atoms // 2]
        centres = torch.rand(3, atoms, generator=random) * (grid - 2) + 1
        near = torch.randn(3, atoms // 2, generator=random) * 0.55
        places[:, : atoms // 2] = centres[:, cluster] + near
    return (places * CUTOFF).round().clamp(0, grid * CUTOFF - 1), grid


class Neighbours:
    """Atoms that move, and their lists: ``addrs`` and ``counts``, by atom."""

    def __init__(self, heap: devalloc.Heap, places: torch.Tensor, grid: int) -> None:
        self.heap, self.places, self.grid = heap, places.to(heap.device), grid
        self.speeds = torch.randint_like(self.places, -20, 21)
        self.cells = torch.arange(grid**3 + 1, dtype=torch.int32, device=heap.device)
        self.addrs = torch.zeros(places.shape[1], dtype=torch.int64, device=heap.device)
        self.rooms, self.counts = self.addrs.int(), self.addrs.int()

    def move(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Move the atoms, which walls reflect. Returns the places by cell, and whose they are."""
        moved = self.places + self.speeds
        self.places.copy_(moved.clamp(0, self.grid * CUTOFF - 1))
        self.speeds.mul_(torch.where(moved == self.places, 1, -1))
        x, y, z = (self.places / CUTOFF).int()
        cells, order = torch.sort((z * self.grid + y) * self.grid + x)
        return self.places[:, order], order.int(), torch.searchsorted(cells, self.cells).int()

    def step(self) -> None:
        places, order, starts = self.move()
        lists_kernel[(triton.cdiv(len(order), LANES),)](
            self.heap.handle, places, order, starts, self.addrs, self.rooms, self.counts,
            len(order), GRID=self.grid, CUTOFF=CUTOFF, LANES=LANES)  # fmt: skip


def reference(places: torch.Tensor) -> torch.Tensor:
    """All pairs as first * atoms + second, sorted, by looking at every pair."""
    atoms, found = places.shape[1], []
    for first in range(0, atoms, 512):
        x, y, z = places[:, first : first + 512, None] - places[:, None, :]
        i, j = (x * x + y * y + z * z <= CUTOFF * CUTOFF).nonzero(as_tuple=True)
        found.append(((i + first) * atoms + j)[i + first != j])
    return torch.cat(found)


def main() -> None:
    atoms, steps = (200_000, 100) if ON_GPU else (300, 3)
    with devalloc.Heap("1GiB" if ON_GPU else "4MiB") as heap:
        lists = Neighbours(heap, *random_atoms(atoms, clustered=True))
        lists.step()  # compiles, too
        graph = torch.cuda.CUDAGraph() if ON_GPU else None
        if graph:
            with torch.cuda.graph(graph):
                lists.step()
        for _ in range(steps):
            graph.replay() if graph else lists.step()
        heap.check()
        values, offsets = heap.gather(lists.addrs, lists.counts, torch.int32)
        peak = heap.stats().peak
    row = torch.repeat_interleave(torch.arange(atoms, device=offsets.device), offsets.diff())
    assert torch.equal((row * atoms + values).sort().values, reference(lists.places))
    most = int(lists.counts.max())
    print(f"{atoms} atoms, {steps + 1} steps, at most {most} neighbours: all as expected")
    print(f"  what is stored           {len(values) / 2**18:9.2f} MiB")
    print(f"  the heap's pages, peak   {peak / 2**20:9.2f} MiB")
    print(f"  padded to the longest    {atoms * most / 2**18:9.2f} MiB, if it were known")


if __name__ == "__main__":
    main()
