"""Adjacency lists that grow and shrink inside kernels.

Owns one list of int32 per vertex. A list is one contiguous allocation of a `devalloc.Heap`, made,
enlarged, shrunk and freed by the kernels below; its final length is not known beforehand. Three
tensors hold each list's address (0: no list), length and capacity.

Invariants
    length <= capacity; capacity is 0 or a power of two of at least MIN_ENTRIES; the address is 0
    if and only if the capacity is 0. Entries keep the order in which they were inserted.
Concurrency
    A batch is sorted by vertex before the launch, and the lane at the first edge of a vertex owns
    that vertex: it alone reads and writes the vertex's three words and its list. So no program
    changes a word that another reads, plain loads are right, and launches on one stream are
    ordered. Any number of lanes call malloc and free at once; the heap takes care of that.
Balance
    Vertices of real graphs differ in degree by orders of magnitude. So work that is proportional
    to a list's length is not done by its owner but by all lanes of the program: the lists of a
    program are laid end to end, and lane i takes items i, i + LANES, ... of the whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from devalloc import kernels as da
from devalloc.errors import InvalidArgument
from devalloc.heap.gather_scatter import owner_of

if TYPE_CHECKING:
    from devalloc.heap import Heap

ENTRY_BYTES = 4
MIN_LANES = 128  # a program's threads, so that no thread holds a copy of another's lane
MAX_LANES = 4096
MIN_ENTRIES = tl.constexpr(4)  # 16 bytes, the smallest slot
MAX_ENTRIES = tl.constexpr(1 << 30)


@triton.jit
def entry_ptr(addr):
    return addr.to(tl.pointer_type(tl.int32))


@triton.jit
def capacity_for(entries):
    """The smallest power of two that holds so many entries (int64 block), at least MIN_ENTRIES."""
    n = tl.maximum(entries, MIN_ENTRIES) - 1
    n = n | (n >> 1)
    n = n | (n >> 2)
    n = n | (n >> 4)
    n = n | (n >> 8)
    n = n | (n >> 16)
    return n + 1


@triton.jit
def copy_lists(source, target, length, LANES: tl.constexpr):
    """Copy ``length`` entries from address ``source`` to ``target`` in each lane (int64 blocks).

    Lanes with length 0 do nothing. All lanes work on all lists; the barriers order the copy with
    what other threads of the program did to the lists before and will do after.
    """
    tl.debug_barrier()
    ends = tl.cumsum(length, axis=0)
    starts = ends - length
    total = tl.max(ends, axis=0)
    base = total * 0
    while base < total:
        item = base + tl.arange(0, LANES)
        inside = item < total
        owner = owner_of(ends, item, LANES)
        from_addr = tl.gather(source - starts * 4, owner, 0) + item * 4
        to_addr = tl.gather(target - starts * 4, owner, 0) + item * 4
        tl.store(entry_ptr(to_addr), tl.load(entry_ptr(from_addr), mask=inside), mask=inside)
        base += LANES
    tl.debug_barrier()


@triton.jit
def contains(sorted_ptr, low, high, value):
    """Whether ``value`` is among the ascending int32 at ``[low, high)`` of a tensor that does not
    change; lanes with an empty range return false."""
    end = high
    left = tl.max(high - low, axis=0)
    while left > 0:
        middle = (low + high) >> 1
        open_range = low < high
        probe = tl.load(sorted_ptr + middle, mask=open_range, other=0)
        after = probe < value
        high = tl.where(open_range & (after == 0), middle, high)
        low = tl.where(open_range & after, middle + 1, low)
        left = tl.max(high - low, axis=0)
    return (low < end) & (tl.load(sorted_ptr + low, mask=low < end, other=0) == value)


@triton.jit
def before(counts, position, LANES: tl.constexpr):
    """Sum of the first ``position`` counts, given their inclusive prefix sum; 0 <= position."""
    last = tl.gather(counts, tl.minimum(tl.maximum(position - 1, 0), LANES - 1).to(tl.int32), 0)
    return tl.where(position > 0, last, 0)


@triton.jit
def compact_lists(list_addr, length, target_ptr, first, last, LANES: tl.constexpr):
    """Remove from each lane's list what occurs in ``[first, last)`` of the sorted ``target_ptr``.

    In place and in order. Returns how many entries stay, per lane. Within one round all lanes
    read before any writes; a round writes only where this or an earlier one has read.
    """
    ends = tl.cumsum(length, axis=0)
    starts = ends - length
    total = tl.max(ends, axis=0)
    kept = length * 0
    base = total * 0
    while base < total:
        item = base + tl.arange(0, LANES)
        inside = item < total
        owner = owner_of(ends, item, LANES)
        addr = tl.gather(list_addr, owner, 0)
        place = item - tl.gather(starts, owner, 0)
        value = tl.load(entry_ptr(addr + place * 4), mask=inside, other=0)
        low = tl.where(inside, tl.gather(first, owner, 0), 0)
        high = tl.where(inside, tl.gather(last, owner, 0), 0)
        stays = inside & (contains(target_ptr, low, high, value) == 0)
        # Entries of this round that stay: in all lists so far, and in each lane's list.
        ones = stays.to(tl.int64)
        counts = tl.cumsum(ones, axis=0)
        earlier = before(counts, tl.minimum(starts - base, LANES), LANES)
        until = before(counts, tl.minimum(ends - base, LANES), LANES)
        place = tl.gather(kept - earlier, owner, 0) + counts - ones
        tl.debug_barrier()
        tl.store(entry_ptr(addr + place * 4), value, mask=stays)
        kept += until - earlier
        base += LANES
    return kept


@triton.jit(do_not_specialize=["edges", "vertices"])
def insert_kernel(
    heap,
    address_ptr,
    length_ptr,
    capacity_ptr,
    source_ptr,
    target_ptr,
    begin_ptr,
    end_ptr,
    accepted_ptr,
    edges,
    vertices,
    LANES: tl.constexpr,
):
    """Append a batch's edges, sorted by source. One lane per edge; the first of a vertex acts.

    A list that has no room moves to a new allocation of at least twice its capacity. If there is
    no memory the list stays as it was, and ``accepted`` stays 0 at the vertex's first edge.
    """
    edge = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    vertex = tl.load(source_ptr + edge, mask=edge < edges, other=-1)
    known = (vertex >= 0) & (vertex < vertices)
    begin = tl.load(begin_ptr + edge, mask=known, other=-1)
    owns = known & (begin == edge)
    added = tl.load(end_ptr + edge, mask=owns, other=0) - tl.where(owns, edge, 0)
    old = tl.load(address_ptr + vertex, mask=owns, other=0)
    length = tl.load(length_ptr + vertex, mask=owns, other=0).to(tl.int64)
    capacity = tl.load(capacity_ptr + vertex, mask=owns, other=0).to(tl.int64)

    wanted = length + added
    fits = wanted <= capacity
    moves = owns & (fits == 0) & (wanted <= MAX_ENTRIES)
    room = capacity_for(wanted)
    new = da.malloc(heap, tl.where(moves, room * 4, 0), mask=moves)
    moves = moves & (new != 0)
    taken = owns & (fits | moves)

    now = tl.where(moves, new, old)
    copy_lists(old, now, tl.where(moves, length, 0), LANES)
    copy_lists(
        target_ptr.to(tl.int64) + edge * 4, now + length * 4, tl.where(taken, added, 0), LANES
    )
    da.free(heap, old, mask=moves)

    tl.store(address_ptr + vertex, now, mask=moves)
    tl.store(capacity_ptr + vertex, room.to(tl.int32), mask=moves)
    tl.store(length_ptr + vertex, wanted.to(tl.int32), mask=taken)
    tl.store(accepted_ptr + edge, tl.full((LANES,), 1, tl.int8), mask=taken)


@triton.jit(do_not_specialize=["edges", "vertices"])
def delete_kernel(
    heap,
    address_ptr,
    length_ptr,
    capacity_ptr,
    source_ptr,
    target_ptr,
    begin_ptr,
    end_ptr,
    edges,
    vertices,
    LANES: tl.constexpr,
):
    """Remove a batch's edges, sorted by source and target. Lanes as in :func:`insert_kernel`.

    A list that became empty is freed; one that is at most half full moves to a smaller
    allocation, or stays where it is if there is none.
    """
    edge = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    vertex = tl.load(source_ptr + edge, mask=edge < edges, other=-1)
    known = (vertex >= 0) & (vertex < vertices)
    begin = tl.load(begin_ptr + edge, mask=known, other=-1)
    owns = known & (begin == edge)
    last = tl.load(end_ptr + edge, mask=owns, other=0)
    old = tl.load(address_ptr + vertex, mask=owns, other=0)
    length = tl.load(length_ptr + vertex, mask=owns, other=0).to(tl.int64)
    capacity = tl.load(capacity_ptr + vertex, mask=owns, other=0).to(tl.int64)

    kept = compact_lists(old, length, target_ptr, edge, last, LANES)
    emptied = owns & (old != 0) & (kept == 0)
    room = capacity_for(kept)
    moves = owns & (kept > 0) & (room < capacity)
    new = da.malloc(heap, tl.where(moves, room * 4, 0), mask=moves)
    moves = moves & (new != 0)
    copy_lists(old, new, tl.where(moves, kept, 0), LANES)
    da.free(heap, old, mask=moves | emptied)

    # An emptied list wanted nothing, so its new address is 0.
    changed = moves | emptied
    tl.store(address_ptr + vertex, new, mask=changed)
    tl.store(capacity_ptr + vertex, tl.where(moves, room, 0).to(tl.int32), mask=changed)
    tl.store(length_ptr + vertex, kept.to(tl.int32), mask=owns)


@triton.jit(do_not_specialize=["vertices"])
def release_kernel(heap, address_ptr, length_ptr, capacity_ptr, vertices, LANES: tl.constexpr):
    """Free every list. One lane per vertex."""
    vertex = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = vertex < vertices
    addr = tl.load(address_ptr + vertex, mask=inside, other=0)
    da.free(heap, addr, mask=inside)
    none = tl.zeros((LANES,), tl.int32)
    tl.store(address_ptr + vertex, none.to(tl.int64), mask=inside)
    tl.store(length_ptr + vertex, none, mask=inside)
    tl.store(capacity_ptr + vertex, none, mask=inside)


class AdjacencyLists:
    """One growing list of int32 per vertex, in a heap; all changes happen on the device.

    Parameters
    ----------
    heap : devalloc.Heap
        Where the lists are allocated. It must outlive them.
    vertices : int
        Number of lists.
    lanes : int, optional
        Edges per program, a power of two from 128 to 4096. Default: 256; in the interpreter 4096.

    Notes
    -----
    Every method queues its work on the current stream and does not synchronise, except `to_csr`.
    """

    def __init__(self, heap: Heap, vertices: int, lanes: int | None = None) -> None:
        self.heap = heap
        self.vertices = vertices
        # The interpreter's cost is per operation, at any width; a GPU needs many programs.
        self.lanes = lanes or (MAX_LANES if heap.device.type == "cpu" else 256)
        if not MIN_LANES <= self.lanes <= MAX_LANES or self.lanes & (self.lanes - 1):
            raise InvalidArgument(
                f"lanes must be a power of two from {MIN_LANES} to {MAX_LANES}, not {self.lanes}"
            )
        self.addresses = torch.zeros(vertices, dtype=torch.int64, device=heap.device)
        self.lengths = torch.zeros(vertices, dtype=torch.int32, device=heap.device)
        self.capacities = torch.zeros(vertices, dtype=torch.int32, device=heap.device)

    def insert(self, sources: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Append edges; a list's new entries come in the order of the batch.

        Parameters
        ----------
        sources, targets : torch.Tensor
            int32, shape (edges,), on the heap's device. Duplicates are kept.

        Returns
        -------
        torch.Tensor
            bool, shape (edges,): which edges were inserted. For the others there was no memory, or
            no such vertex; their lists are unchanged, and they may be inserted again.
        """
        sources, order = torch.sort(sources, stable=True)
        targets = targets[order]
        begin, end = segments(sources)
        accepted = torch.zeros(len(sources), dtype=torch.int8, device=self.heap.device)
        insert_kernel[self.grid(len(sources))](
            self.heap.handle,
            self.addresses,
            self.lengths,
            self.capacities,
            sources,
            targets,
            begin,
            end,
            accepted,
            len(sources),
            self.vertices,
            LANES=self.lanes,
        )
        result = torch.empty(len(sources), dtype=torch.bool, device=self.heap.device)
        result[order] = accepted[begin] != 0
        return result

    def delete(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Remove edges; the others keep their order. Unknown edges are ignored.

        Parameters
        ----------
        sources, targets : torch.Tensor
            int32, shape (edges,), on the heap's device. Every copy of an edge goes.
        """
        keys = torch.sort((sources.to(torch.int64) << 32) | targets.to(torch.int64)).values
        sources = (keys >> 32).to(torch.int32)
        targets = keys.to(torch.int32)
        begin, end = segments(sources)
        delete_kernel[self.grid(len(sources))](
            self.heap.handle,
            self.addresses,
            self.lengths,
            self.capacities,
            sources,
            targets,
            begin,
            end,
            len(sources),
            self.vertices,
            LANES=self.lanes,
        )

    def release(self) -> None:
        """Free every list."""
        release_kernel[self.grid(self.vertices)](
            self.heap.handle,
            self.addresses,
            self.lengths,
            self.capacities,
            self.vertices,
            LANES=self.lanes,
        )

    def to_csr(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the lists out: offsets (int64, vertices + 1) and entries (int32). Synchronises."""
        entries, offsets = self.heap.gather(self.addresses, self.lengths, torch.int32)
        return offsets, entries

    def warm_up(self, edges: int) -> None:
        """Compile and load all kernels that change lists, with a batch of edges of no vertex."""
        nothing = torch.full((edges,), -1, dtype=torch.int32, device=self.heap.device)
        self.insert(nothing, nothing)
        self.delete(nothing, nothing)
        self.release()

    def grid(self, items: int) -> tuple[int]:
        return (max(1, triton.cdiv(items, self.lanes)),)


def segments(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of the sorted keys, where the run of its equals begins and ends (int64)."""
    begin = torch.searchsorted(keys, keys, right=False)
    end = torch.searchsorted(keys, keys, right=True)
    return begin, end
