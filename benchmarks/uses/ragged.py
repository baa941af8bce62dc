"""Rows whose lengths are known when they are made: one pass over growing blocks, two passes, or
rows padded to a guess. The input is that of ``examples/ragged_rows.py``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

import devalloc
from benchmarks.uses.measure import Input, Way, require_equal
from examples import ragged_rows


@triton.jit
def walk(row, going, ptr, limit, STORE: tl.constexpr):
    """Store a row per lane at ``ptr``, up to ``limit`` elements; returns the lengths."""
    value = (row + 1).to(tl.int64)
    length = row * 0
    while tl.max(going.to(tl.int32), axis=0) > 0:
        if STORE:
            tl.store(ptr + length, value, mask=going & (length < limit))
        length += going.to(tl.int32)
        going = going & (value != 1)
        value = tl.where(value % 2 == 0, value // 2, 3 * value + 1)
    return length


@triton.jit
def count_kernel(lengths, rows, LANES: tl.constexpr):
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    length = walk(row, row < rows, lengths + row, 0, False)
    tl.store(lengths + row, length, mask=row < rows)


@triton.jit
def fill_kernel(values, offsets, rows, LANES: tl.constexpr):
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    begin = tl.load(offsets + row, mask=row < rows, other=0)
    end = tl.load(offsets + row + 1, mask=row < rows, other=0)
    walk(row, row < rows, values + begin, end - begin, True)


@triton.jit
def pad_kernel(values, lengths, rows, width, LANES: tl.constexpr):
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    length = walk(row, row < rows, values + row.to(tl.int64) * width, width, True)
    tl.store(lengths + row, length, mask=row < rows)


class Rows(Way):
    """What the ways have in common: ``values`` and ``offsets``."""

    def __init__(self, rows: int, wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.rows, self.wanted = rows, wanted
        self.device = wanted[0].device
        self.lanes = 128 if self.device.type == "cuda" else 1024
        self.grid = (triton.cdiv(rows, self.lanes),)
        self.lengths = torch.empty(rows, dtype=torch.int32, device=self.device)

    def check(self) -> int:
        require_equal(self.offsets, self.wanted[1], "offsets")
        require_equal(self.values, self.wanted[0], "rows")
        return 0


class OnePass(Rows):
    def __init__(self, rows: int, wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__(rows, wanted)
        self.heap = devalloc.Heap(max(8 << 20, 4 * wanted[0].nbytes), device=self.device)
        self.addrs = torch.empty(rows, dtype=torch.int64, device=self.device)

    def step(self) -> None:
        assert self.heap is not None
        self.values = self.offsets = None
        ragged_rows.make_rows[self.grid](
            self.heap.handle, self.addrs, self.lengths, self.rows, LANES=self.lanes
        )
        self.values, self.offsets = self.heap.gather(self.addrs, self.lengths, torch.int64)
        self.heap.free(self.addrs)


class TwoPasses(Rows):
    def step(self) -> None:
        self.values = None
        count_kernel[self.grid](self.lengths, self.rows, LANES=self.lanes)
        self.offsets = torch.zeros(self.rows + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(self.lengths, 0, out=self.offsets[1:])
        self.values = torch.empty(int(self.offsets[-1]), dtype=torch.int64, device=self.device)
        fill_kernel[self.grid](self.values, self.offsets, self.rows, LANES=self.lanes)


class Padded(Rows):
    """As wide as twice the mean."""

    def step(self) -> None:
        self.width = 2 * len(self.wanted[0]) // self.rows
        self.values = None
        self.values = torch.empty(self.rows, self.width, dtype=torch.int64, device=self.device)
        pad_kernel[self.grid](self.values, self.lengths, self.rows, self.width, LANES=self.lanes)

    def check(self) -> int:
        values, offsets = self.wanted
        require_equal(self.lengths.long(), offsets.diff(), "lengths")
        column = torch.arange(self.width, device=self.device)
        inside = column < self.lengths[:, None]
        place = (offsets[:-1, None] + column)[inside]
        require_equal(self.values[inside], values[place], "rows")
        return len(values) - len(place)


def inputs(device: torch.device) -> Iterator[Input]:
    rows = 200_000 if device.type == "cuda" else 100
    wanted = ragged_rows.reference(rows, device)
    ways = {"heap": OnePass, "two passes": TwoPasses, "padded": Padded}
    yield Input("ragged", "collatz", rows, wanted[0].nbytes, {
        name: lambda way=way: way(rows, wanted) for name, way in ways.items()
    })  # fmt: skip
