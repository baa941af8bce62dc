"""Do something for all items although it fails for some, and do what finalizers asked for.

A finalizer may ask for something in the middle of another call; it is done when that call is over.
By then no caller waits for the result, and the interrupted call is unrelated to it. So errors
go where Python sends those of finalizers, to `sys.unraisablehook`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def call_for_all(action: Callable[[T], object], items: Iterable[T]) -> None:
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


class _Unraisable:
    """Raises an error in its finalizer, because Python code cannot call the hook otherwise."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


def call_for_finalizers(action: Callable[[T], object], items: Iterable[T]) -> None:
    """Call ``action`` with every item; what it raises goes to `sys.unraisablehook`."""
    for item in items:
        try:
            action(item)
        except Exception as error:
            _Unraisable(error)
