"""Objects that own memory cannot be copied."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from devalloc.errors import InvalidArgument


class Owner:
    """Base of objects that own memory or keep account of it; a copy would own the memory twice."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InvalidArgument(
            f"a {type(self).__name__} owns memory: it cannot be copied or "
            "pickled; share the object, or make another"
        )
