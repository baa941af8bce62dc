"""Shapes and devices as users write them, made definite."""

from __future__ import annotations

import operator
from typing import Any

import torch

from devalloc.errors import InvalidArgument
from devalloc.sizes import quote


def sizes_of(shape: object) -> tuple[int, ...]:
    """The sizes of a shape, which is an int or a sequence of ints (NumPy's included).

    Raises
    ------
    InvalidArgument
        For anything else, and for negative sizes.
    """
    dims: Any = (shape,) if hasattr(shape, "__index__") else shape
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
    if hasattr(values, "__index__"):
        return operator.index(values)
    return [operator.index(value) for value in values]


def require_dtype(dtype: object) -> None:
    """Refuse what is not a torch.dtype."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"a dtype is one of torch's, such as torch.int8, not {quote(dtype)}")


def known_device(device: Any) -> torch.device:
    """The torch.device of any of PyTorch's notations; InvalidArgument if there is no such one."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:  # unknown device, wrong type, huge index
        raise InvalidArgument(f"no such device: {quote(device)}") from error
