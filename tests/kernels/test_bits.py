"""The arithmetic on words of bits against Python's integers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from devalloc.sizes import CLASS_SIZES, CLASS_SLOTS
from tests import user_kernels as uk
from tests.support import DEVICE

pytestmark = pytest.mark.oldest

BATCH = 64
ALL = (1 << 64) - 1

# What breaks bit tricks: nothing, everything, the sign bit alone, with and without neighbours.
EDGES = [0, 1, ALL, 1 << 63, ALL >> 1, ALL ^ 1, (1 << 63) | 1, 3 << 62, 0x5555555555555555]
EDGES += [0xAAAAAAAAAAAAAAAA, 1 << 31, 1 << 32, (1 << 32) - 1, ALL ^ ((1 << 32) - 1)]

uniform = st.integers(0, ALL)
# Few runs: runs of set bits, as a page map has them.
runs = st.lists(st.tuples(st.integers(0, 63), st.integers(1, 64)), max_size=4).map(
    lambda pairs: sum_of(((1 << length) - 1) << start & ALL for start, length in pairs)
)
batches = st.lists(uniform | runs | st.sampled_from(EDGES), min_size=BATCH, max_size=BATCH)


def sum_of(words) -> int:
    total = 0
    for word in words:
        total |= word
    return total


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def words_tensor(words: list[int]) -> torch.Tensor:
    return torch.tensor([signed(word) for word in words], dtype=torch.int64, device=DEVICE)


def unsigned(values: torch.Tensor) -> list[int]:
    return [value & ALL for value in values.tolist()]


def set_bits(word: int) -> list[int]:
    return [bit for bit in range(64) if word >> bit & 1]


def check_batch(words: list[int], begins: list[int], shifts: list[int]) -> None:
    given_words = words_tensor(words)
    begins_tensor = torch.tensor(begins, dtype=torch.int32, device=DEVICE)
    shifts_tensor = torch.tensor(shifts, dtype=torch.int64, device=DEVICE)
    counts, nexts, lowest = (torch.full_like(begins_tensor, -1) for _ in range(3))
    shifted = torch.zeros_like(given_words)
    uk.bits_kernel[(1,)](
        given_words, begins_tensor, shifts_tensor, counts, nexts, shifted, lowest, BLOCK=BATCH
    )
    assert counts.tolist() == [word.bit_count() for word in words]
    assert unsigned(shifted) == [word >> by for word, by in zip(words, shifts, strict=True)]
    for word, begin, found, low in zip(words, begins, nexts.tolist(), lowest.tolist(), strict=True):
        where = set_bits(word)
        assert low == (where[0] if where else 64), f"lowest bit of {word:#x}"
        if where:
            wanted = next((bit for bit in where if bit >= begin), where[0])
            assert found == wanted, f"from bit {begin} of {word:#x}"


batch_of = st.lists(st.integers(0, 63), min_size=BATCH, max_size=BATCH)


@settings(max_examples=12)
@given(batches, batch_of, batch_of)
def test_words(words: list[int], begins: list[int], shifts: list[int]) -> None:
    check_batch(words, begins, shifts)


def test_every_bit_of_a_full_word() -> None:
    check_batch([ALL] * BATCH, list(range(64)), list(range(64)))


def test_the_sign_bit_alone() -> None:
    check_batch([1 << 63] * BATCH, [0] * BATCH, list(range(64)))


def python_run_starts(word: int, length: int) -> int:
    mask = (1 << length) - 1
    return sum_of(1 << at for at in range(65 - length) if word >> at & mask == mask)


@settings(max_examples=3)
@given(batches)
def test_run_starts(words: list[int]) -> None:
    starts = torch.zeros(64 * BATCH, dtype=torch.int64, device=DEVICE)
    uk.run_starts_kernel[(64,)](words_tensor(words), starts, BLOCK=BATCH)
    found = unsigned(starts)
    for program in range(64):
        for lane, word in enumerate(words):
            wanted = python_run_starts(word, program + 1)
            assert found[program * BATCH + lane] == wanted, f"{program + 1} bits of {word:#x}"


def test_run_starts_of_edges() -> None:
    words = (EDGES * BATCH)[:BATCH]
    starts = torch.zeros(64 * BATCH, dtype=torch.int64, device=DEVICE)
    uk.run_starts_kernel[(64,)](words_tensor(words), starts, BLOCK=BATCH)
    wanted = [python_run_starts(word, length) for length in range(1, 65) for word in words]
    assert unsigned(starts) == wanted


def test_low_mask() -> None:
    masks = torch.zeros(128, dtype=torch.int64, device=DEVICE)
    uk.low_mask_kernel[(1,)](masks, BLOCK=128)
    assert unsigned(masks[:65]) == [(1 << n) - 1 for n in range(65)]


def test_floor_log2() -> None:
    values = [1, 2, 3] + [(1 << k) + step for k in range(2, 24) for step in (-1, 0, 1)]
    values += [(1 << 24) - 1]
    values += list(range(1, 129 - len(values)))
    given_values = torch.tensor(values, dtype=torch.int32, device=DEVICE)
    logs = torch.zeros_like(given_values)
    uk.floor_log2_kernel[(1,)](given_values, logs, BLOCK=128)
    assert len(values) == 128
    assert logs.tolist() == [value.bit_length() - 1 for value in values]


def test_divide() -> None:
    """Every dividend below 2**17 by every divisor in use, and by the extremes of the domain."""
    divisors = sorted({*CLASS_SIZES, *CLASS_SLOTS, *range(1, 9), (1 << 16) - 1})
    block = 1 << 17
    quotients = torch.zeros(len(divisors), block, dtype=torch.int32, device=DEVICE)
    by = torch.tensor(divisors, dtype=torch.int32, device=DEVICE)
    uk.divide_kernel[(len(divisors),)](by, quotients, BLOCK=block, num_warps=8)
    wanted = torch.arange(block, dtype=torch.int32, device=DEVICE)[None, :] // by[:, None]
    assert torch.equal(quotients, wanted)
