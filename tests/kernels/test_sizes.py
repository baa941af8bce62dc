"""Sizes: texts, the class table and its law, and the device's arithmetic equal to the table."""

from bisect import bisect_left
from itertools import pairwise

import pytest
import torch

from devalloc.errors import InvalidArgument
from devalloc.kernels import layout
from devalloc.sizes import (
    CLASS_SIZES,
    CLASS_SLOTS,
    MAX_SLOT,
    PAGE_BYTES,
    format_size,
    parse_size,
)
from tests import user_kernels as uk
from tests.support import DEVICE


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        (1 << 62, 1 << 62),
        ("0", 0),
        ("4096", 4096),
        ("17B", 17),
        ("64MiB", 64 << 20),
        ("64mib", 64 << 20),
        (" 64 MiB ", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("0.5 KiB", 512),
        ("1.25KB", 1250),
        ("2 GB", 2 * 10**9),
        ("3TB", 3 * 10**12),
        ("1TiB", 1 << 40),
        ("0.1MB", 100_000),
    ],
)
def test_parse_size(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "MiB", "64 MiBs", "64 M", "-1", "-1MiB", "1,5GiB", "1.5.2GiB", ".5MiB"),
        *("1.MiB", "1e6", "0x10", "1.5", "0.3KiB", "nan", "inf", "64MiB 2", "1 000", "1_000"),
    ],
)
def test_nonsense_texts(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_size(text)


@pytest.mark.parametrize("value", [-1, -(1 << 62), 1.5, 1.0, None, True, b"64MiB", [64], (1,)])
def test_nonsense_values(value: object) -> None:
    with pytest.raises(InvalidArgument):
        parse_size(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["9" * 5000, "0." + "9" * 5000 + "MiB"])
def test_more_digits_than_python_reads(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"a size of 500[01] digits.*give a number of a few"):
        parse_size(text)


def test_sizes_that_cannot_be_printed() -> None:
    assert format_size(10**5000) == "about 2**16610 B"
    with pytest.raises(InvalidArgument, match=r"negative: about -2\*\*16610 B"):
        parse_size(-(10**5000))


def test_a_nonsense_size_is_quoted_with_a_remedy() -> None:
    with pytest.raises(InvalidArgument, match=r"'64 quux'.*MiB"):
        parse_size("64 quux")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (PAGE_BYTES, "64 KiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 40, "1 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_format_size(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_classes_grow_in_sixteens() -> None:
    assert list(CLASS_SIZES) == sorted(set(CLASS_SIZES))
    assert all(size % 16 == 0 for size in CLASS_SIZES)
    assert CLASS_SIZES[0] == 16
    assert CLASS_SIZES[-1] == MAX_SLOT == PAGE_BYTES // 2
    assert len(CLASS_SIZES) == layout.NUM_CLASSES.value


def test_waste_of_a_slot_is_a_fifth_at_most() -> None:
    """The worst request of each class is one byte more than the class below holds."""
    for below, size in pairwise(CLASS_SIZES):
        wasted = size - (below + 1)
        if size <= 128:
            assert wasted < 16
        elif size <= 8192:
            assert wasted / size <= 0.2
        else:
            # A page cut in pieces: cut in n - 1 instead of n, up to 1/n of a slot is unused.
            pieces = PAGE_BYTES // size
            assert wasted / size <= 1 / (pieces + 1) + 16 / size


def test_a_slab_page_is_cut_with_little_left_over() -> None:
    for size, slots in zip(CLASS_SIZES, CLASS_SLOTS, strict=True):
        assert slots * size <= PAGE_BYTES < (slots + 1) * size
        assert (PAGE_BYTES - slots * size) / PAGE_BYTES < 0.125
        assert slots <= 64 * layout.LIVE_WORDS.value


def test_powers_of_two_align_themselves() -> None:
    """Slots begin at multiples of their size in a page, so the size must be a class exactly."""
    for log2 in range(4, 16):
        assert 1 << log2 in CLASS_SIZES


def test_the_device_computes_the_same_table() -> None:
    cls, nbytes, slots = (torch.zeros(MAX_SLOT, dtype=torch.int32, device=DEVICE) for _ in range(3))
    uk.size_class_kernel[(1,)](cls, nbytes, slots, BLOCK=MAX_SLOT, num_warps=8)
    wanted = [bisect_left(CLASS_SIZES, size) for size in range(1, MAX_SLOT + 1)]
    assert cls.tolist() == wanted
    assert nbytes.tolist() == [CLASS_SIZES[index] for index in wanted]
    assert slots.tolist() == [CLASS_SLOTS[index] for index in wanted]


def test_constants_agree() -> None:
    assert layout.PAGE_BYTES.value == PAGE_BYTES == 1 << layout.PAGE_LOG2.value
    assert layout.MAX_SLOT.value == MAX_SLOT
