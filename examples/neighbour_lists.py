"""Neighbour lists of moving atoms, made again in each replay of one CUDA graph.

A list goes into the block that it had in the step before. Those for which it is too small, or much
too large, take another one and are written again. Without a heap one pads all lists to a guess, and
loses what is longer, or runs two passes and waits for the lengths' sum, which a graph cannot do.

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
def lists_kernel(heap, places, order, starts, addrs, rooms, counts, changed, total, atoms,
                 AGAIN: tl.constexpr, GRID: tl.constexpr, CUTOFF: tl.constexpr,
                 LANES: tl.constexpr):  # fmt: skip
    """Write lists, one a lane: all, and note in ``changed`` which need another block; or ``AGAIN``
    these. ``places`` are sorted by cell, and ``order`` says which atoms those are."""
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = row < (tl.load(total) if AGAIN else atoms)
    if AGAIN:
        row = tl.load(changed + row, mask=there, other=0)
    atom = tl.load(order + row, mask=there, other=0)
    addr = tl.load(addrs + atom, mask=there, other=0)
    room = tl.load(rooms + atom, mask=there, other=0)
    if AGAIN:
        da.free(heap, addr, there)
        addr = da.malloc(heap, 4 * tl.load(counts + atom, mask=there, other=0), there)
        room = (da.usable_size(heap, addr, there) // 4).to(tl.int32)
        tl.store(addrs + atom, addr, mask=there)
        tl.store(rooms + atom, room, mask=there)
    count = write_lists(heap, addr, room, places, order, starts, atoms, row, there, GRID, CUTOFF)
    tl.store(counts + atom, tl.minimum(count, room) if AGAIN else count, mask=there)
    if not AGAIN:
        change = there & ((count > room) | ((room > 16) & (10 * count < 7 * room)))
        place = tl.cumsum(change.to(tl.int32), axis=0) - 1
        place += tl.atomic_add(total, tl.sum(change.to(tl.int32), axis=0))
        tl.store(changed + place, row, mask=change)


def random_atoms(atoms: int, clustered: bool) -> tuple[torch.Tensor, int]:
    """Places (3, atoms) and cells on a side: uniform with 40 neighbours, or half in clusters."""
    seed = torch.Generator().manual_seed(0)
    grid = max(2, round((atoms * (0.25 if clustered else 0.1)) ** (1 / 3)))
    places = torch.rand(3, atoms, generator=seed) * grid
    if clustered:
        cluster = torch.repeat_interleave(torch.randint(200, 3000, (atoms // 99,), generator=seed))
        centre = (torch.rand(3, atoms, generator=seed) * (grid - 2) + 1)[:, cluster[: atoms // 2]]
        places[:, : atoms // 2] = centre + torch.randn(centre.shape, generator=seed) * 0.55
    return (places * CUTOFF).round().clamp(0, grid * CUTOFF - 1), grid


class Neighbours:  # atoms that move, and their lists: addrs and counts, by atom
    def __init__(self, heap: devalloc.Heap, places: torch.Tensor, grid: int) -> None:
        self.heap, self.places, self.grid = heap, places.to(heap.device), grid
        self.speeds = torch.randint_like(self.places, -20, 21)
        self.cells = torch.arange(grid**3 + 1, dtype=torch.int32, device=heap.device)
        self.addrs = torch.zeros(places.shape[1], dtype=torch.int64, device=heap.device)
        self.rooms, self.counts, self.changed = (self.addrs.int() for _ in range(3))
        self.total = self.rooms.new_zeros(1)

    def move(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Move the atoms, which walls reflect. Returns the places by cell, and whose they are."""
        moved = self.places + self.speeds
        self.places.copy_(moved.clamp(0, self.grid * CUTOFF - 1))
        self.speeds.mul_((moved == self.places) * 2 - 1)
        x, y, z = (self.places / CUTOFF).int()
        cells, order = torch.sort((z * self.grid + y) * self.grid + x)
        return self.places[:, order], order.int(), torch.searchsorted(cells, self.cells).int()

    def step(self) -> None:
        places, order, starts = self.move()
        self.total.zero_()
        for again in (False, True):
            lists_kernel[(triton.cdiv(len(order), LANES),)](
                self.heap.handle, places, order, starts, self.addrs, self.rooms, self.counts,
                self.changed, self.total, len(order), again, self.grid, CUTOFF, LANES)  # fmt: skip


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
        if ON_GPU:
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                lists.step()
        for _ in range(steps):
            graph.replay() if ON_GPU else lists.step()
        values, offsets = heap.gather(lists.addrs, lists.counts, torch.int32)
        peak = heap.stats().peak / 2**20
    row = torch.repeat_interleave(offsets.diff())
    assert torch.equal((row * atoms + values).sort().values, reference(lists.places))
    print(f"{atoms} atoms, {steps + 1} steps, up to {lists.counts.max()} neighbours: as expected")
    print(f"  what is stored           {len(values) / 2**18:9.2f} MiB")
    print(f"  the heap's pages, peak   {peak:9.2f} MiB")
    print(f"  padded to the longest    {atoms * lists.counts.max() / 2**18:9.2f} MiB, if known")


if __name__ == "__main__":
    main()
