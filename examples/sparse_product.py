"""The square of a sparse matrix, row by row, each row added up in a hash table of the heap.

A program adds the products of a row up in a hash table, counts what is in it, takes a block of that
size, and moves the row there. So the memory is that of the result and of a few tables.

Without a heap one computes everything twice, first only to count; or takes room for all products,
of which there may be many times more.

Run it: ``python examples/sparse_product.py`` (without a GPU: with ``TRITON_INTERPRET=1``).
"""

import torch
import triton
import triton.language as tl

import devalloc
from devalloc import kernels as da

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
KEPT = 1024 if ON_GPU else 64  # slots of the table that a program keeps
TILE = (8, 16, 128) if ON_GPU else (64, 16, 1024)  # the interpreter needs wide ones


@triton.jit
def add_products(keys, sums, slots, starts, columns, values, first, end,
                 ENTRIES: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Add a row's products to a table: ``keys``, columns + 1. Returns how many keys there are."""
    for at in range(first, end, ENTRIES):
        entry = at + tl.arange(0, ENTRIES)
        column = tl.load(columns + entry, mask=entry < end, other=0)
        factor = tl.load(values + entry, mask=entry < end, other=0.0)
        begin = tl.load(starts + column, mask=entry < end, other=0)
        stop = tl.load(starts + column + 1, mask=entry < end, other=0)
        for step in range(0, tl.max(stop - begin, axis=0), WIDE):
            other = begin[:, None] + step + tl.arange(0, WIDE)[None, :]
            todo = other < stop[:, None]
            key = tl.load(columns + other, mask=todo, other=0) + 1
            product = factor[:, None] * tl.load(values + other, mask=todo, other=0.0)
            slot = ((key.to(tl.uint32) * 2654435769) >> 7).to(tl.int32) & (slots - 1)
            while tl.max(tl.max(todo.to(tl.int32), axis=1), axis=0) > 0:
                # Lanes may need one free slot. All write, then each reads which key is there.
                free = todo & (tl.load(keys + slot, mask=todo, other=0) == 0)
                tl.store(keys + slot, key, mask=free)
                tl.debug_barrier()
                found = todo & (tl.load(keys + slot, mask=todo, other=0) == key)
                tl.atomic_add(sums + slot, product, mask=found, sem="relaxed")
                todo = todo & (found == 0)
                slot = (slot + 1) & (slots - 1)
    tl.debug_barrier()
    count = tl.zeros((LANES,), tl.int32)
    for at in range(0, slots, LANES):
        slot = at + tl.arange(0, LANES)
        count += (tl.load(keys + slot, mask=slot < slots, other=0) != 0).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def move_row(keys, sums, slots, row, count, STRIDE: tl.constexpr, LANES: tl.constexpr):
    """Move what is in a table to ``row``, columns and values, and clear the table."""
    done = tl.zeros((), tl.int32)
    for at in range(0, slots, LANES):
        slot = at + tl.arange(0, LANES)
        key = tl.load(keys + slot, mask=slot < slots, other=0)
        used = key != 0
        place = done + tl.cumsum(used.to(tl.int32), axis=0) - 1
        tl.store(row[0] + place * STRIDE, key - 1, mask=used & (place < count))
        total = tl.load(sums + slot, mask=used, other=0.0)
        tl.store(row[1] + place * STRIDE, total, mask=used & (place < count))
        tl.store(keys + slot, slot * 0, mask=used)
        tl.store(sums + slot, total * 0, mask=used)
        done += tl.sum(used.to(tl.int32), axis=0)
    tl.debug_barrier()


@triton.jit
def square_kernel(heap, starts, columns, values, sizes, rows, addrs, lengths, KEPT: tl.constexpr,
                  ENTRIES: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """A row is a block of pairs, column and value; ``sizes``: slots of its table."""
    kept = da.zeros(heap, 8 * KEPT)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        first, end = tl.load(starts + row), tl.load(starts + row + 1)
        slots = tl.load(sizes + row)
        table = kept
        if slots > KEPT:
            table = da.zeros(heap, slots.to(tl.int64) * 8)
        addr, count = table * 0, slots * 0
        if table != 0:
            keys = da.pointer(heap, table, tl.int32)
            sums = da.pointer(heap, table + 4 * slots, tl.float32)
            count = add_products(keys, sums, slots, starts, columns, values, first, end,
                                 ENTRIES, WIDE, LANES)  # fmt: skip
            addr = da.malloc(heap, count.to(tl.int64) * 8)
            count = tl.where(addr != 0, count, 0)  # no memory: an empty row; the heap recorded it
            pairs = addr.to(tl.pointer_type(tl.int32)), (addr + 4).to(tl.pointer_type(tl.float32))
            move_row(keys, sums, slots, pairs, count, 2, LANES)
            da.free(heap, table, slots > KEPT)
        tl.store(addrs + row, addr)
        tl.store(lengths + row, count)
    da.free(heap, kept)


def square(heap: devalloc.Heap, starts, columns, values, programs: int):
    """The rows of the square: addresses of blocks of pairs, and how many pairs."""
    products = starts.diff()[columns].float()
    products = torch.segment_reduce(products, "sum", offsets=starts, unsafe=True)
    sizes = torch.exp2(torch.ceil(torch.log2(2 * products.clamp(min=32)))).int()
    addrs, lengths = torch.empty_like(sizes, dtype=torch.int64), torch.empty_like(sizes)
    square_kernel[(programs,)](heap.handle, starts, columns, values, sizes, len(sizes), addrs,
                               lengths, KEPT, *TILE, num_warps=1)  # fmt: skip
    return addrs, lengths


def power_law(rows: int, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries (i, j) of a matrix: rows and columns have lengths of a power law, exponent 2.1."""
    random = torch.Generator().manual_seed(0)
    share = (torch.rand(2, rows, generator=random) ** (-1 / 1.1)).clamp(max=rows**0.5)
    counts = (share / share.sum(1, keepdim=True) * entries).ceil().long()
    i, j = (torch.repeat_interleave(torch.arange(rows), count) for count in counts)
    return i, j[torch.randint(len(j), (len(i),), generator=random)]


def matrix(i: torch.Tensor, j: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
    """Row starts, columns and values: 1 to 3, so that sums are exact in any order."""
    keys = torch.unique(i.long() * rows + j)
    starts = torch.searchsorted(keys, torch.arange(rows + 1, device=keys.device) * rows)
    return starts.int(), (keys % rows).int(), (keys % 3 + 1).float()


def main() -> None:
    rows, entries, programs = (1_000_000, 10_000_000, 2112) if ON_GPU else (200, 600, 2)
    with devalloc.Heap("4GiB" if ON_GPU else "4MiB") as heap:
        a = matrix(*(part.to(heap.device) for part in power_law(rows, entries)), rows)
        addrs, lengths = square(heap, *a, programs)
        pairs, offsets = heap.gather(addrs, lengths, torch.int64)
        peak = heap.stats().peak
    columns, values = pairs.view(torch.int32).view(-1, 2).unbind(1)
    row = torch.repeat_interleave(offsets.diff())
    keys, order = (row * rows + columns).sort()
    sparse = torch.sparse_csr_tensor(*a, (rows, rows)).to_sparse_coo()
    wanted = torch.sparse.mm(sparse, sparse).coalesce()
    assert torch.equal(keys, wanted.indices()[0] * rows + wanted.indices()[1])
    assert torch.equal(values.contiguous().view(torch.float32)[order], wanted.values())

    print(f"{rows} rows, {len(a[1])} entries, {len(pairs)} in the square: all as expected")
    print(f"  columns and values       {len(pairs) / 2**17:9.2f} MiB")
    print(f"  the heap's pages, peak   {peak / 2**20:9.2f} MiB")


if __name__ == "__main__":
    main()
