"""Size codes on the host: what `kernels.code_bytes` and the heap make of them."""

from __future__ import annotations

import torch

from benchmarks.stress import kernels
from devalloc.sizes import CLASS_SIZES, MAX_SLOT, PAGE_BYTES

CODES = kernels.CODES.value


def codes_of(entries: torch.Tensor) -> torch.Tensor:
    """The size codes in entries."""
    return (entries >> kernels.OWNER_BITS.value) & kernels.CODE_MASK.value


def bytes_of_codes() -> list[int]:
    """Bytes that each size code requests."""
    return [(16 + code % 16) << code // 16 for code in range(CODES)]


def usable_of_codes() -> torch.Tensor:
    """Usable bytes that the heap guarantees, for each size code."""
    classes = class_of_codes().tolist()
    return torch.tensor([
        CLASS_SIZES[cls] if nbytes <= MAX_SLOT else -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        for nbytes, cls in zip(bytes_of_codes(), classes, strict=True)
    ])  # fmt: skip


def class_of_codes() -> torch.Tensor:
    """The size class of each size code; one past the last for runs of pages."""
    runs = len(CLASS_SIZES)
    return torch.tensor([
        next((cls for cls, size in enumerate(CLASS_SIZES) if size >= nbytes), runs)
        for nbytes in bytes_of_codes()
    ])  # fmt: skip
