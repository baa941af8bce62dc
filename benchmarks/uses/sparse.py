"""The square of a sparse matrix: rows in a heap, left there or gathered; two passes; or PyTorch's
own product. The kernels of the heap are those of ``examples/sparse_product.py``, and the two passes
are made of the same parts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
import triton.language as tl

import devalloc
from benchmarks.uses.measure import Input, Way, require_equal
from devalloc.demo.graph import read_graph
from examples.sparse_product import KEPT, TILE, add_products, matrix, move_row, power_law, square

Matrix = tuple[torch.Tensor, ...]


@triton.jit
def pass_kernel(small, large, places, starts, columns, values, sizes, rows, lengths, offsets,
                out_columns, out_values, FILL: tl.constexpr, KEPT: tl.constexpr,
                ENTRIES: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Count the rows' entries, or with ``FILL`` write them. Each program has a small table; a row
    that needs a larger one has it at its ``places`` of the large ones."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        slots = tl.load(sizes + row)
        table = small + tl.program_id(0).to(tl.int64) * (8 * KEPT)
        if slots > KEPT:
            table = large + 8 * tl.load(places + row)
        keys = table.to(tl.pointer_type(tl.int32))
        sums = (table + 4 * slots).to(tl.pointer_type(tl.float32))
        first, end = tl.load(starts + row), tl.load(starts + row + 1)
        count = add_products(keys, sums, slots, starts, columns, values, first, end,
                             ENTRIES, WIDE, LANES)  # fmt: skip
        if FILL:
            begin = tl.load(offsets + row)
            move_row(keys, sums, slots, (out_columns + begin, out_values + begin), count, 1, LANES)
        else:
            move_row(keys, sums, slots, (out_columns, out_values), 0, 1, LANES)  # only clears
            tl.store(lengths + row, count)


class Square(Way):
    """``a``: row starts, columns, values; ``wanted``: keys and values of the square."""

    def __init__(self, a: Matrix, wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.a, self.wanted = a, wanted
        self.rows, self.device = len(a[0]) - 1, a[0].device
        self.programs = 16 * 132 if self.device.type == "cuda" else 2

    def compare(self, offsets: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> int:
        row = torch.repeat_interleave(
            torch.arange(self.rows, device=self.device), offsets.diff().long()
        )
        keys, order = (row * self.rows + columns).sort()
        require_equal(keys, self.wanted[0], "places")
        require_equal(values[order], self.wanted[1], "values")
        return 0


class InHeap(Square):
    """The rows stay in the heap."""

    def __init__(self, a: Matrix, wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__(a, wanted)
        # Beside the result all programs hold tables, which for dense rows are several times the
        # result and runs of up to MiBs. The capacity is not compared; the pages in use are.
        least = (2048 if self.device.type == "cuda" else 16) << 20
        room = max(least, 8 * 8 * len(wanted[0]))
        self.heap = devalloc.Heap(room, device=self.device)
        self.addrs = torch.zeros(self.rows, dtype=torch.int64, device=self.device)

    def begin(self) -> None:
        assert self.heap is not None
        self.heap.free(self.addrs)

    def step(self) -> None:
        assert self.heap is not None
        self.addrs, self.lengths = square(self.heap, *self.a, self.programs)

    def gather(self) -> None:
        assert self.heap is not None
        pairs, self.offsets = self.heap.gather(self.addrs, self.lengths, torch.int64)
        columns, values = pairs.view(torch.int32).view(-1, 2).unbind(1)
        self.columns, self.values = columns, values

    def check(self) -> int:
        self.gather()
        values = self.values.contiguous().view(torch.float32)
        found = self.compare(self.offsets, self.columns, values)
        del self.columns, self.values
        return found


class Gathered(InHeap):
    """The rows are copied to one tensor of pairs, and freed."""

    def begin(self) -> None:
        self.columns = self.values = torch.empty(0)

    def step(self) -> None:
        super().step()
        self.gather()
        assert self.heap is not None
        self.heap.free(self.addrs)

    def check(self) -> int:
        values = self.values.contiguous().view(torch.float32)
        return self.compare(self.offsets, self.columns, values)


class TwoPasses(Square):
    def begin(self) -> None:
        self.offsets = self.columns = self.values = torch.empty(0)

    def step(self) -> None:
        starts, device = self.a[0], self.device
        products = starts.diff()[self.a[1]].float()
        products = torch.segment_reduce(products, "sum", offsets=starts, unsafe=True)
        sizes = torch.exp2(torch.ceil(torch.log2(2 * products.clamp(min=32)))).int()
        large = sizes * (sizes > KEPT)
        places = large.cumsum(0)
        room = int(places[-1])
        places -= large
        small = torch.zeros(self.programs * 2 * KEPT, dtype=torch.int32, device=device)
        tables = torch.zeros(2 * room, dtype=torch.int32, device=device)
        lengths = torch.empty(self.rows, dtype=torch.int32, device=device)
        offsets = torch.zeros(self.rows + 1, dtype=torch.int64, device=device)
        given = small.data_ptr(), tables.data_ptr(), places, *self.a, sizes, self.rows, lengths
        pass_kernel[(self.programs,)](*given, offsets, lengths, self.a[2], False, KEPT, *TILE,
                                      num_warps=1)  # fmt: skip
        torch.cumsum(lengths, 0, out=offsets[1:])
        count = int(offsets[-1])
        columns = torch.empty(count, dtype=torch.int32, device=device)
        values = torch.empty(count, dtype=torch.float32, device=device)
        pass_kernel[(self.programs,)](*given, offsets, columns, values, True, KEPT, *TILE,
                                      num_warps=1)  # fmt: skip
        self.offsets, self.columns, self.values = offsets, columns, values

    def check(self) -> int:
        return self.compare(self.offsets, self.columns, self.values)


class Torch(Square):
    """``torch.sparse.mm``"""

    def __init__(self, a: Matrix, wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__(a, wanted)
        with warnings.catch_warnings():  # that CSR tensors are in beta state
            warnings.simplefilter("ignore", UserWarning)
            self.matrix = torch.sparse_csr_tensor(
                *a, (self.rows, self.rows), check_invariants=False
            )
        if self.device.type == "cpu":  # where CSR needs a library that few builds have
            self.matrix = self.matrix.to_sparse_coo()

    def begin(self) -> None:
        self.result = None

    def step(self) -> None:
        self.result = torch.sparse.mm(self.matrix, self.matrix)

    def check(self) -> int:
        if self.device.type == "cpu":
            self.result = self.result.coalesce().to_sparse_csr()
        result = self.result
        return self.compare(result.crow_indices(), result.col_indices(), result.values())


def reference(starts: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> Matrix:
    """Keys (row * rows + column, sorted) and values of the square, from a list of all products."""
    rows, device = len(starts) - 1, starts.device
    row = torch.repeat_interleave(torch.arange(rows, device=device), starts.diff())
    lengths = starts.diff()[columns].long()
    entry = torch.repeat_interleave(lengths)
    other = torch.arange(len(entry), device=device) - (lengths.cumsum(0) - lengths)[entry]
    other += starts[columns[entry]]
    keys, place = torch.unique(row[entry] * rows + columns[other], return_inverse=True)
    return keys, values.new_zeros(len(keys)).index_add_(0, place, values[entry] * values[other])


def graph_matrix(path: Path, device: torch.device) -> Matrix:
    """The adjacency matrix of a graph, both ways."""
    graph = read_graph(path)
    i, j = (torch.from_numpy(part).to(device) for part in (graph.sources, graph.targets))
    return matrix(torch.cat([i, j]), torch.cat([j, i]), graph.vertices)


def inputs(device: torch.device, graphs: tuple[Path, ...] = ()) -> Iterator[Input]:
    rows, entries = (1_000_000, 10_000_000) if device.type == "cuda" else (60, 120)
    ways = {"heap": InHeap, "heap, gathered": Gathered, "two passes": TwoPasses,
            "torch.sparse.mm": Torch}  # fmt: skip
    for name in ("power-law", *graphs):
        if isinstance(name, Path):
            a = graph_matrix(name, device)
        else:
            a = matrix(*(part.to(device) for part in power_law(rows, entries)), rows)
        wanted = reference(*a)
        stem = name.name.partition(".")[0] if isinstance(name, Path) else name
        yield Input("sparse", stem, len(a[0]) - 1, 8 * len(wanted[0]), {
            way: lambda kind=kind, a=a, wanted=wanted: kind(a, wanted)
            for way, kind in ways.items()
        })  # fmt: skip
