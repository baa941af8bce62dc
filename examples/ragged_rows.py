"""Rows whose lengths are known only when they are made, to one jagged tensor.

Row i is the Collatz sequence of i + 1: halve an even number, triple an odd one and add one, until
1 is reached. How many steps that takes is not known beforehand. Each lane makes a row in a block of
its own, which it grows as needed. `Heap.gather` lays the rows end to end, as in `torch.nested`.

Without a heap one makes all rows twice, first only to count, or pads every row to the longest.

Run it: ``python examples/ragged_rows.py`` (without a GPU: with ``TRITON_INTERPRET=1``).
"""

import torch
import triton
import triton.language as tl

import devalloc
from devalloc import kernels as da


@triton.jit
def make_rows(heap, addrs, lengths, rows, LANES: tl.constexpr):
    """One row per lane: its block and its length."""
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    value = (row + 1).to(tl.int64)
    addr = value * 0
    length = row * 0
    room = row * 0
    going = row < rows
    while tl.max(going.to(tl.int32), axis=0) > 0:
        full = going & (length == room)
        if tl.max(full.to(tl.int32), axis=0) > 0:
            larger = tl.maximum(room + room // 2, 16)
            new = da.realloc(heap, addr, larger * 8, full)
            grown = full & (new != 0)
            addr = tl.where(grown, new, addr)
            room = tl.where(grown, larger, room)
            going = going & (length < room)  # without memory a row ends; the heap has recorded it
        tl.store(da.pointer(heap, addr + length * 8, tl.int64, going), value, mask=going)
        length += going.to(tl.int32)
        going = going & (value != 1)
        value = tl.where(value % 2 == 0, value // 2, 3 * value + 1)
    tl.store(addrs + row, addr, mask=row < rows)
    tl.store(lengths + row, length, mask=row < rows)


def reference(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rows by PyTorch, a step of all of them at a time, counted first."""
    start = torch.arange(1, rows + 1, device=device)

    def steps():
        row, value = torch.arange(rows, device=device), start
        while len(row):
            yield row, value
            row, value = row[value != 1], value[value != 1]
            value = torch.where(value % 2 == 0, value // 2, 3 * value + 1)

    lengths = torch.zeros(rows, dtype=torch.int64, device=device)
    for row, _value in steps():
        lengths[row] += 1
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    values = torch.empty(int(offsets[-1]), dtype=torch.int64, device=device)
    for step, (row, value) in enumerate(steps()):
        values[offsets[row] + step] = value
    return values, offsets


def main() -> None:
    on_gpu = torch.cuda.is_available() and not triton.knobs.runtime.interpret
    rows, lanes = (200_000, 128) if on_gpu else (1000, 1024)
    with devalloc.Heap("1GiB" if on_gpu else "8MiB") as heap:
        addrs = torch.empty(rows, dtype=torch.int64, device=heap.device)
        lengths = torch.empty(rows, dtype=torch.int32, device=heap.device)
        make_rows[(triton.cdiv(rows, lanes),)](heap.handle, addrs, lengths, rows, LANES=lanes)
        heap.check()
        values, offsets = heap.gather(addrs, lengths, torch.int64)
        used = heap.stats()
        heap.free(addrs)

    wanted, wanted_offsets = reference(rows, values.device)
    assert torch.equal(offsets, wanted_offsets)
    assert torch.equal(values, wanted)
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    assert nested.size(0) == rows

    longest = int(lengths.max())
    mib = 8 / (1 << 20)
    print(f"{rows} rows, {len(values)} numbers; the longest row has {longest}: all as expected")
    print(f"  the numbers alone        {len(values) * mib:9.2f} MiB")
    print(f"  blocks in the heap       {used.used / (1 << 20):9.2f} MiB")
    print(f"  padded to the longest    {rows * longest * mib:9.2f} MiB, if its length were known")


if __name__ == "__main__":
    main()
