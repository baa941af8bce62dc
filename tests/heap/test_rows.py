"""Many blocks and one tensor: `Heap.gather` and `Heap.scatter` against PyTorch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from devalloc import Heap, InvalidArgument, InvalidPointer
from devalloc.heap import jagged as host_rows
from tests.support import DEVICE, assert_empty, error_counts, int64

pytestmark = pytest.mark.oldest

# Nothing, little, and more than a program's share.
LENGTHS = [0, 0, 1, 3, 17, 100, host_rows.SPAN + 5, 0, 2, 5000, 1, 0]


def rows_of(lengths: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows whose bytes are all different."""
    total = sum(lengths) * dtype.itemsize
    numbers = torch.arange(1, total // 8 + 2, dtype=torch.int64) * 0x9E3779B97F4A7C15
    if dtype is torch.bool:
        values = numbers.view(torch.uint8)[:total] % 2 != 0
    else:
        values = numbers.view(torch.uint8)[:total].clone().view(dtype)
    return list(values.to(DEVICE).split(list(lengths)))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether all bytes are equal (NaNs too)."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def offsets_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.cat([int64([0]), int64(lengths).cumsum(0)])


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.bool, torch.bfloat16, torch.int32, torch.float64, torch.complex128],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_rows_of_every_type(dtype: torch.dtype, debug: bool) -> None:
    """Through blocks and back, and each block holds its row."""
    lengths = LENGTHS if dtype is torch.int32 else [0, 0, 1, 3, 17, 100, 0, 2, 1]
    rows = rows_of(lengths, dtype)
    with Heap("16MiB", debug=debug) as heap:
        addrs = heap.malloc([length * dtype.itemsize for length in lengths])
        heap.scatter(torch.cat(rows), offsets_of(lengths), addrs)
        for addr, row in zip(addrs.tolist(), rows, strict=True):
            assert same(heap.tensor(addr, len(row), dtype), row)
        values, offsets = heap.gather(addrs, lengths, dtype)
        assert (values.dtype, offsets.dtype) == (dtype, torch.int64)
        assert values.device == offsets.device == heap.device
        assert same(values, torch.cat(rows))
        assert torch.equal(offsets, offsets_of(lengths))
        heap.check()
        heap.free(addrs)
        assert heap.stats().used == 0


def test_many_rows_at_random() -> None:
    generator = random.Random(5)
    lengths = [generator.choice([0, 0, 0, 1, 2, 9, 40]) for _ in range(3 * host_rows.LANES)]
    lengths += [0] * (2 * host_rows.LANES)  # more than a program looks at in one turn
    lengths += [7]
    rows = rows_of(lengths, torch.int32)
    with Heap("16MiB") as heap:
        addrs = heap.malloc([length * 4 for length in lengths])
        heap.scatter(torch.cat(rows), offsets_of(lengths), addrs)
        values, _offsets = heap.gather(addrs, lengths, torch.int32)
        assert same(values, torch.cat(rows))
        # Some of each row, in another order.
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1))
        some = [min(lengths[i], 2) for i in order.tolist()]
        values, _offsets = heap.gather(addrs[order.to(DEVICE)], some, torch.int32)
        wanted = [rows[i][:2] for i in order.tolist()]
        assert same(values, torch.cat(wanted))
        heap.free(addrs)
        assert_empty(heap)


def test_shapes_of_arguments() -> None:
    with Heap("1MiB") as heap:
        addrs = heap.malloc(int64([[16, 32, 0], [4, 0, 8]]))
        lengths = torch.tensor([[4, 8, 0], [1, 0, 2]], dtype=torch.int32)
        row = torch.arange(15, dtype=torch.int32, device=DEVICE)
        offsets = offsets_of(lengths.flatten().tolist())
        heap.scatter(row, offsets, addrs)
        for given in (lengths, lengths.to(DEVICE), lengths.to(torch.int64)):
            values, found = heap.gather(addrs, given, torch.int32)
            assert same(values, row)
            assert torch.equal(found, offsets)
        # Not contiguous, and from a list.
        values, found = heap.gather(addrs.t(), lengths.t(), torch.int32)
        assert values.tolist() == [0, 1, 2, 3, 12, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14]
        values, found = heap.gather(addrs.flatten().tolist(), [1, 1, 0, 1, 0, 1], torch.int32)
        assert values.tolist() == [0, 4, 12, 13]
        heap.scatter(row.repeat_interleave(2)[::2], offsets, addrs.flatten().tolist())
        for empty in ([], int64([]).reshape(0, 3)):
            lengths = [] if isinstance(empty, list) else empty
            values, found = heap.gather(empty, lengths, torch.float32)
            assert (values.shape, found.tolist()) == ((0,), [0])
            heap.scatter(values, found, empty)
        heap.check()
        heap.free(addrs)
        assert_empty(heap)


def test_a_jagged_tensor() -> None:
    lengths = [3, 0, 5, 1]
    rows = rows_of(lengths, torch.int32)
    with Heap("1MiB") as heap:
        addrs = heap.malloc([length * 4 for length in lengths])
        heap.scatter(torch.cat(rows), offsets_of(lengths), addrs)
        nested = torch.nested.nested_tensor_from_jagged(*heap.gather(addrs, lengths, torch.int32))
        for found, row in zip(nested.unbind(), rows, strict=True):
            assert same(found, row)
        heap.free(addrs)


def test_room_for_more() -> None:
    with Heap("1MiB") as heap:
        addrs = heap.malloc([16, 8])
        heap.scatter(torch.arange(6.0, device=DEVICE), offsets_of([4, 2]), addrs)
        for lengths in ([4, 2], int64([4, 2])):
            values, offsets = heap.gather(addrs, lengths, torch.float32, total=10)
            assert values.shape == (10,)
            assert values[:6].tolist() == [0, 1, 2, 3, 4, 5]
            assert offsets.tolist() == [0, 4, 6]
        with pytest.raises(InvalidArgument, match="the rows have 6 elements, total is 5"):
            heap.gather(addrs, [4, 2], torch.float32, total=5)
        for total in (-1, 1.5, "6"):
            with pytest.raises(InvalidArgument, match="total is a number of elements"):
                heap.gather(addrs, [4, 2], torch.float32, total=total)  # type: ignore[arg-type]
        heap.free(addrs)
        assert_empty(heap)


# Mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [False, True])
def test_rows_without_blocks(debug: bool) -> None:
    """Null, freed, inner, foreign, and too small: recorded, zeros, and nothing else is touched."""
    with Heap("1MiB", debug=debug) as heap:
        addrs = heap.malloc([64] * 5)
        for addr in addrs.tolist():
            heap.tensor(addr, 64, torch.uint8).fill_(0x11)
        kept, freed, inner, small, last = addrs.tolist()
        heap.free([freed])
        given = [kept, freed, 0, inner + 16, small, 0, heap.base + heap.capacity, last]
        lengths = [16, 4, 3, 2, 17, 0, 1, 16]
        values, offsets = heap.gather(given, lengths, torch.int32)
        assert values.tolist() == [0x11111111] * 16 + [0] * 27 + [0x11111111] * 16
        faults = heap.faults()
        assert {fault.kind for fault in faults} == {InvalidPointer}
        assert len(faults) == (5 if debug else 1)
        assert "gather" in faults[0].message
        assert f"{freed:#x}" in faults[0].message
        assert "freed" in faults[0].message
        assert error_counts(heap) == {"invalid pointer": 5}

        heap.scatter(torch.full_like(values, 0x22222222), offsets, given)
        assert error_counts(heap) == {"invalid pointer": 5}
        for addr, byte in ((kept, 0x22), (inner, 0x11), (small, 0x11), (last, 0x22)):
            assert (heap.tensor(addr, 64, torch.uint8) == byte).all()
        heap.audit()
        heap.free([kept, inner, small, last])
        assert error_counts(heap) == {}


@pytest.mark.parametrize("debug", [False, True])
def test_null_rows_say_so(debug: bool) -> None:
    with Heap("1MiB", debug=debug) as heap:
        addrs = heap.malloc([2 << 20])
        heap.clear_errors()
        heap.gather(addrs, [5], torch.int8)
        with pytest.raises(InvalidPointer, match="malloc gave no memory"):
            heap.check()


def test_offsets_that_are_none() -> None:
    """What they lead to is not touched, whatever they are."""
    with Heap("1MiB") as heap:
        addrs = heap.malloc([64] * 3)
        values = torch.arange(16, dtype=torch.int32, device=DEVICE)
        for offsets, count in (
            ([0, 4, 2, 16], 1),
            ([16, 12, 8, 4], 3),
            ([-8, -4, 4, 8], 1),
            ([1 << 62, -(1 << 62), 5, 0], 2),
        ):
            heap.scatter(values, int64(offsets), addrs)
            counts = error_counts(heap)
            assert counts.get("invalid argument", 0) == count
        heap.scatter(values, int64([0, 4, 8, 17]), addrs)
        with pytest.raises(InvalidArgument, match=r"no room for 17 elements.*1 x invalid argument"):
            heap.check()
        before = heap.tensor(addrs[0], 16, torch.int32).zero_()
        heap.scatter(values, int64([-3, 1, 1, 1]), addrs)
        assert not before.any()
        with pytest.raises(InvalidArgument, match=r"from element -3 on.*begin at 0 or later"):
            heap.check()
        heap.scatter(values, int64([0, 4, 2, 3]), addrs)
        with pytest.raises(InvalidArgument, match=r"a row of -2 elements.*never decrease"):
            heap.check()
        heap.audit()
        heap.free(addrs)
        assert_empty(heap)


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([1, -2], "row 1 has the length -2"),
        ([1, 1 << 61], "more than any memory has"),
        ([1], "one length for each address"),
        (torch.ones(2, 1, dtype=torch.int64), "one length for each address"),
        ([1, 1.5], "lengths must be integers"),
        (torch.ones(2), "lengths must be integers"),
        (torch.ones(2, dtype=torch.bool), "lengths must be integers"),
        (7, "lengths must be integers"),
        (torch.ones(2, dtype=torch.int64, device="meta"), "lengths must be on"),
    ],
)
def test_lengths_that_are_none(lengths: object, text: str) -> None:
    with Heap("1MiB") as heap:
        addrs = heap.malloc([64] * 2)
        with pytest.raises(InvalidArgument, match=text):
            heap.gather(addrs, lengths, torch.int32)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="a dtype is one of torch's"):
            heap.gather(addrs, [1, 1], int)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"a tensor of torch.qint8 over given memory"):
            heap.gather(addrs, [1, 1], torch.qint8)
        heap.free(addrs)


def test_values_that_are_none() -> None:
    with Heap("1MiB") as heap:
        addrs = heap.malloc([64] * 2)
        good, offsets = torch.zeros(8, device=DEVICE), int64([0, 4, 8])
        for values in (good.reshape(2, 4), good.to("meta"), [0.0] * 8, None):
            with pytest.raises(InvalidArgument, match="scatter: values is a tensor with one axis"):
                heap.scatter(values, offsets, addrs)  # type: ignore[arg-type]
        for wrong in (int64([0, 4]), offsets.to(torch.int32), int64([0, 4, 6, 8])):
            with pytest.raises(InvalidArgument, match="one more than the 2 addresses"):
                heap.scatter(good, wrong, addrs)
        with pytest.raises(InvalidArgument, match="scatter: offsets is a tensor"):
            heap.scatter(good, [0, 4, 8], addrs)  # type: ignore[arg-type]
        heap.free(addrs)
    for call in (
        lambda: heap.gather(addrs, [1, 1], torch.int8),
        lambda: heap.scatter(good, offsets, addrs),
    ):
        with pytest.raises(InvalidArgument, match="closed"):
            call()


# On a device ----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_nothing_is_waited_for() -> None:
    with Heap("1MiB") as heap:
        addrs = heap.malloc([64] * 3)
        lengths = torch.tensor([4, 0, 16])
        on_device = lengths.to(DEVICE)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            values, offsets = heap.gather(addrs, lengths, torch.int32)
            heap.gather(addrs, [4, 0, 16], torch.int32)
            heap.gather(addrs, on_device, torch.int32, total=20)
            heap.scatter(values, offsets, addrs)
            with pytest.raises(RuntimeError, match="synchroniz"):
                heap.gather(addrs, on_device, torch.int32)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        heap.free(addrs)


@pytest.mark.gpu
def test_lengths_on_a_device() -> None:
    """Mistakes in them are found by the kernel, and recorded."""
    with Heap("1MiB") as heap:
        addrs = heap.malloc([64] * 3)
        heap.scatter(
            torch.arange(48, dtype=torch.int32, device=DEVICE), int64([0, 16, 32, 48]), addrs
        )
        values, _ = heap.gather(addrs, int64([16, 16, 16]), torch.int32, total=40)
        assert values.tolist() == list(range(40))
        with pytest.raises(InvalidArgument, match="no room for 48 elements"):
            heap.check()
        heap.gather(addrs, int64([16, -1, 16]), torch.int32)
        with pytest.raises(InvalidArgument, match="a row of -1 elements"):
            heap.check()
        heap.gather(addrs, int64([-16, 0, 0]), torch.int32)
        assert error_counts(heap) == {"invalid argument": 1}
        heap.free(addrs)
