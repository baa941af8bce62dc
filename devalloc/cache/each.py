"""Do something for all items, even if it fails for some."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def for_each(action: Callable[[T], object], items: Iterable[T]) -> None:
    """Call ``action`` with every item, even if it raises; then raise the first error."""
    first: BaseException | None = None
    try:
        for item in items:
            try:
                action(item)
            except BaseException as error:
                first = first if first is not None else error
        if first is not None:
            raise first
    finally:
        first = None  # its traceback refers to this frame, and so to all callers
