"""`Block`: what `Arena.alloc` gives; and what other libraries ask of an arena."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Protocol

import torch

from devalloc.common.owner import Owner
from devalloc.errors import OutOfMemory
from devalloc.sizes import format_size

if TYPE_CHECKING:
    from devalloc.arena.cache.allocator import Cache


class TorchOutOfMemory(OutOfMemory, torch.OutOfMemoryError):
    """`OutOfMemory` that is also PyTorch's error, for code that expects that one."""


_CLAIMS = itertools.count(1)


class BlockSource(Protocol):
    """An arena, as its blocks and other libraries see it; `devalloc.Arena` documents it."""

    device: torch.device

    @property
    def cache(self) -> Cache: ...

    def alloc(self, nbytes: int | str, stream: int | None = None) -> Block: ...

    def free(self, block: Block) -> None: ...


class Block(Owner):
    """A piece of an arena's memory: ``nbytes`` usable bytes at ``address``.

    Made by `Arena.alloc`, given back by `Arena.free`. A block that is dropped without that gives a
    ResourceWarning, and its memory goes back.
    """

    __slots__ = ("__weakref__", "address", "arena", "claim", "freed", "nbytes")

    def __init__(self, arena: BlockSource) -> None:
        self.arena = arena
        self.address = 0
        self.nbytes = 0
        # Only a call that passes it to the cache can free the memory.
        self.claim = next(_CLAIMS)
        # Whether it needs no free (any more). The cache decides; this is for blocks of no bytes,
        # and for the warning.
        self.freed = True

    def __repr__(self) -> str:
        return f"<devalloc.Block {format_size(self.nbytes)} at {self.address:#x}>"

    def __del__(self) -> None:
        if not getattr(self, "freed", True) and self.address:
            warnings.warn(
                f"{self!r} was dropped without Arena.free", ResourceWarning, source=self,
                stacklevel=2,
            )  # fmt: skip
            self.arena.cache.free_in_finalizer(self.address, self.claim)
