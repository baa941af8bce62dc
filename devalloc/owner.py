"""What owns memory stays one object."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from devalloc.errors import InvalidArgument


class Owner:
    """Base of whatever owns memory or keeps its books: a copy would own the same memory again."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InvalidArgument(
            f"a {type(self).__name__} stands for memory of its own: it cannot be copied or "
            "pickled; share the object, or make another"
        )
