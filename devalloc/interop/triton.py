"""Scratch memory of Triton's launches from an arena."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from devalloc.interop.holder import Holder

if TYPE_CHECKING:
    from devalloc.arena.block import BlockSource


def allocator(arena: BlockSource) -> Callable[[int, int, int | None], Holder]:
    """A function for ``triton.set_allocator``; see `devalloc.Arena.triton_allocator`."""

    def allocate(size: int, alignment: int, stream: int | None) -> Holder:
        return Holder(arena, size, stream, alignment)

    return allocate
