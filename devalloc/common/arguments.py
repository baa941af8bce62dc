"""Shapes and devices as users write them, made definite."""

from __future__ import annotations

import operator
from typing import Any

import torch

from devalloc.errors import InvalidArgument
from devalloc.sizes import quote

_QUANTISED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def sizes_of(shape: object) -> tuple[int, ...]:
    """The sizes of a shape, which is an int or a sequence of ints (NumPy's included).

    Raises
    ------
    InvalidArgument
        For anything else, and for negative sizes.
    """
    dims: Any = (shape,) if _is_one(shape) else shape
    try:
        sizes = tuple(operator.index(size) for size in dims)
    except TypeError:
        raise InvalidArgument(
            f"a shape is an int or a sequence of ints, not {quote(shape)}"
        ) from None
    if any(size < 0 for size in sizes):
        raise InvalidArgument(f"a shape has no negative sizes: {quote(sizes)}")
    return sizes


def index_or_list(values: Any) -> int | list[int]:
    """One integer, or a list of integers of a sequence of them; TypeError for anything else."""
    if _is_one(values):
        return operator.index(values)
    return [operator.index(value) for value in values]


def _is_one(value: Any) -> bool:
    """Whether this is one integer, and not many. (Arrays of any length have ``__index__``.)"""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


def require_dtype(dtype: object) -> None:
    """Refuse what is not a torch.dtype, or a quantised one, whose tensors need more than memory."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"a dtype is one of torch's, such as torch.int8, not {quote(dtype)}")
    if dtype in _QUANTISED:
        raise InvalidArgument(
            f"PyTorch cannot lay a tensor of {dtype} over given memory; use the integer type that "
            "holds its values, such as torch.int8"
        )


def require_callable(rule: str, value: object) -> None:
    """Refuse what cannot be called; ``rule`` says in the message what it is to be."""
    if not callable(value):
        raise InvalidArgument(f"{rule}, not {quote(value)}")


def known_device(device: Any) -> torch.device:
    """The torch.device of any of PyTorch's notations; InvalidArgument if there is no such one."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:  # unknown device, wrong type, huge index
        raise InvalidArgument(f"no such device: {quote(device)}") from error


def require_device(owner: str, device: object, *kinds: str) -> None:
    """Refuse what is no torch.device of one of these kinds, or on CUDA has no index."""
    if not isinstance(device, torch.device):
        raise InvalidArgument(
            f"the device of {owner} is a torch.device, such as {_example(kinds[0])}, not "
            f"{quote(device)}"
        )
    if device.type not in kinds:
        raise InvalidArgument(
            f"{owner} is not for {device}; give a device such as {_example(kinds[0])}"
        )
    if device.type == "cuda" and device.index is None:
        raise InvalidArgument(
            f"the device of {owner} needs an index, such as {_example('cuda')}, and {device!r} has "
            "none"
        )


def _example(kind: str) -> str:
    return repr(torch.device(kind, 0) if kind == "cuda" else torch.device(kind))
