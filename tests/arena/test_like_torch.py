"""`Arena` called as people call torch: shapes, values, devices, sizes as text, statistics."""

from __future__ import annotations

import numpy
import pytest
import torch

from devalloc import Arena, InvalidArgument
from devalloc.cache import (
    AutoGrowthPolicy,
    BfcPolicy,
    Cache,
    FrugalPolicy,
    TorchPolicy,
    make_policy,
)
from tests.arena.support import MIB, NumberSource


@pytest.fixture
def arena() -> Arena:
    return Arena(source="host")


@pytest.mark.proves("library/pytorch-users")
@pytest.mark.parametrize(
    "size",
    [(2, 3), ((2, 3),), ([2, 3],), (torch.Size([2, 3]),), (numpy.int64(2), 3), (5,), ((),), (0, 3)],
    ids=str,
)
def test_shapes(arena: Arena, size: tuple[object, ...]) -> None:
    expected = torch.empty(*size).shape  # type: ignore[call-overload]
    for tensor in (arena.empty(*size), arena.empty(*size, dtype=torch.int8), arena.zeros(*size)):
        assert tensor.shape == expected
        assert tensor.is_contiguous()
    assert arena.empty((2, 3), torch.int16).dtype == torch.int16
    assert arena.empty(7, torch.int16).shape == (7,)


@pytest.mark.proves("auto_growth/new-memory", "library/pytorch-users")
def test_values(arena: Arena) -> None:
    for _ in range(2):  # the second time the block was used before
        assert arena.zeros(2, 3).tolist() == [[0.0] * 3] * 2
        assert arena.ones((3,), dtype=torch.int8).tolist() == [1] * 3
        for value in (7, 2.5, True, 1j):
            tensor, expected = arena.full((2, 2), value), torch.full((2, 2), value)
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected)
        assert arena.full(3, 7, dtype=torch.float64).tolist() == [7.0] * 3
    with pytest.raises(InvalidArgument, match="current stream"):
        arena.zeros(3, stream=7)


@pytest.mark.proves("library/pytorch-users")
@pytest.mark.parametrize(
    "other",
    [
        torch.empty(2, 3, dtype=torch.int16),
        torch.empty(2, 3).t(),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(10)[::2],
        torch.empty(0, 3),
    ],
    ids=lambda tensor: str(tensor.stride()),
)
def test_empty_like(arena: Arena, other: torch.Tensor) -> None:
    expected = torch.empty_like(other)
    tensor = arena.empty_like(other)
    assert (tensor.shape, tensor.stride()) == (expected.shape, expected.stride())
    assert tensor.dtype == expected.dtype
    assert arena.empty_like(other, dtype=torch.int64).dtype == torch.int64
    kept = tensor.fill_(3)
    del tensor
    assert (kept == 3).all()


def test_gradients(arena: Arena) -> None:
    for _ in range(2):
        assert not arena.empty(3).requires_grad
        for tensor in (
            arena.empty(3, requires_grad=True),
            arena.ones(3, requires_grad=True),
            arena.full((3,), 2.0, requires_grad=True),
            arena.empty_like(torch.empty(3), requires_grad=True),
        ):
            assert tensor.requires_grad
            assert tensor.is_leaf
        (arena.ones(3, requires_grad=True) * 2).sum().backward()


def test_devices(arena: Arena) -> None:
    assert arena.empty(3, device="cpu").device.type == "cpu"
    assert arena.zeros(3, device=torch.device("cpu")).device.type == "cpu"
    for wrong in ("meta", "cuda:0", "cuda"):
        with pytest.raises(InvalidArgument, match=r"the arena is on cpu, not on"):
            arena.empty(3, device=wrong)


@pytest.mark.parametrize(
    "call",
    [
        lambda arena: arena.empty(),
        lambda arena: arena.empty(2, 3.0),
        lambda arena: arena.empty((2, 3), 4),
        lambda arena: arena.empty(2, -3),
        lambda arena: arena.empty(2, "3"),
        lambda arena: arena.empty(2, torch.int8, dtype=torch.int8),
        lambda arena: arena.empty(2, device="nowhere"),
    ],
)
def test_bad_calls(arena: Arena, call: object) -> None:
    with pytest.raises(InvalidArgument):
        call(arena)  # type: ignore[operator]
    assert arena.memory_allocated() == 0


@pytest.mark.proves("library/pytorch-users")
def test_memory_in_numbers(arena: Arena) -> None:
    kept = arena.empty(5 * MIB, dtype=torch.int8)
    for _ in range(2):
        arena.empty(10 * MIB, dtype=torch.int8)
    del _
    assert arena.memory_allocated() == 5 * MIB
    assert arena.max_memory_allocated() == 15 * MIB
    assert arena.memory_reserved() == arena.cache.reserved == arena.max_memory_reserved()
    assert arena.memory_stats() == arena.stats()
    arena.reset_peak_memory_stats()
    assert arena.max_memory_allocated() == 5 * MIB
    summary = arena.memory_summary()
    for words in ("allocated", "5 MiB", "15 MiB", "source calls: 1 taken", "fragmentation"):
        assert words in summary
    del kept


@pytest.mark.proves("library/pytorch-users")
def test_sizes_as_text_and_of_numpy() -> None:
    assert TorchPolicy(max_split_size="64MiB") == TorchPolicy(max_split_size=64 * MIB)
    assert AutoGrowthPolicy(alignment="1KiB", chunk_size="16MiB") == AutoGrowthPolicy(
        1024, 16 * MIB
    )
    assert BfcPolicy(first_region="4MiB") == BfcPolicy(first_region=4 * MIB)
    assert FrugalPolicy(allowance="1GiB", medium_segment=numpy.int64(4 * MIB)) == FrugalPolicy(
        1 << 30, 4 * MIB
    )
    arena = Arena(source="host", limit=numpy.int64(30 * MIB))
    assert arena.cache.limit == 30 * MIB
    block = arena.alloc(numpy.int32(1000))
    assert block.nbytes == 1024
    arena.free(block)
    cache = Cache(NumberSource(), limit="20MiB")
    assert cache.malloc(numpy.int64(100))
    assert type(cache.limit) is int


@pytest.mark.parametrize("text", ["64 monkeys", "-1", "", "1MiB 2"])
def test_bad_text(text: str) -> None:
    with pytest.raises(InvalidArgument, match="first_region"):
        BfcPolicy(first_region=text)
    with pytest.raises(InvalidArgument):
        Arena(source="host", limit=text)


@pytest.mark.proves("torch/settings-string")
def test_settings_of_pytorch_are_a_policy() -> None:
    text = "max_split_size_mb:64,garbage_collection_threshold:0.8"
    expected = TorchPolicy(max_split_size=64 * MIB, garbage_collection_threshold=0.8)
    assert make_policy(text) == expected
    arena = Arena(source="host", policy=text, limit="1GiB")
    assert arena.cache.policy == expected
    with pytest.raises(InvalidArgument, match="unknown allocator setting"):
        Arena(source="host", policy="monkeys:64")
