"""What finalizers ask for in the middle of a call, done when it is over.

Nobody waits for the result by then, and whose call it is has nothing to do with it: so errors go
where Python puts those of finalizers, to `sys.unraisablehook`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


class _Unraisable:
    """Its end raises: the hook has no other entrance from Python."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


def for_finalizers(action: Callable[[T], object], items: Iterable[T]) -> None:
    """Call ``action`` with every item; tell `sys.unraisablehook` what it raises."""
    for item in items:
        try:
            action(item)
        except Exception as error:
            _Unraisable(error)
