"""An arena block that exists as long as a Python object, for other libraries to hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from devalloc.sizes import require_power_of_two

if TYPE_CHECKING:
    from devalloc.arena.block import Block, BlockSource


class Holder:
    """A block of ``nbytes`` bytes, owned by ``stream``, freed with the last reference to this.

    The free waits for nothing and takes effect in the order of the stream: the memory next goes to
    work that is queued on that stream afterwards.

    Parameters
    ----------
    arena : devalloc.Arena
    nbytes : int
    stream : int, optional
        Handle of the stream; default: the current stream.
    alignment : int
        Bytes, a power of two. Every block is aligned to 256; for more, the block is larger by
        ``alignment`` bytes.

    Raises
    ------
    OutOfMemory
        It is a ``torch.OutOfMemoryError`` too.
    InvalidArgument
        For an alignment that is not a power of two, a negative size, or a closed arena.
    """

    __slots__ = ("_address", "_arena", "_block")

    def __init__(
        self, arena: BlockSource, nbytes: int, stream: int | None = None, alignment: int = 1
    ) -> None:
        require_power_of_two("an alignment", alignment)
        extra = alignment if alignment > 256 and nbytes > 0 else 0
        self._arena = arena
        self._block: Block | None = arena.alloc(nbytes + extra, stream)
        self._address = (self._block.address + alignment - 1) & -alignment

    def data_ptr(self) -> int:
        """The address, aligned as requested; 0 for a block of no bytes (but see `Arena.alloc`)."""
        return self._address

    def __del__(self) -> None:
        # If there is no block, the constructor has failed.
        block = getattr(self, "_block", None)
        if block is not None:
            block.freed = True
            self._arena.cache.free_in_finalizer(block.address, block.claim)
