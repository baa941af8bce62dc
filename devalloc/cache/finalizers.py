"""Do what finalizers asked for in the middle of a call, when that call is over.

By then nobody waits for the result, and the interrupted call has nothing to do with it. So errors
go where Python sends those of finalizers, to `sys.unraisablehook`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


class _Unraisable:
    """Raises an error in its finalizer, because Python code cannot call the hook otherwise."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


def for_finalizers(action: Callable[[T], object], items: Iterable[T]) -> None:
    """Call ``action`` with every item; what it raises goes to `sys.unraisablehook`."""
    for item in items:
        try:
            action(item)
        except Exception as error:
            _Unraisable(error)
