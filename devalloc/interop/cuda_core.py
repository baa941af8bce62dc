"""An arena as a memory resource of cuda.core: `devalloc.Arena.memory_resource`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from devalloc.arena.options import LEGACY_DEFAULT
from devalloc.errors import DevallocError, InvalidArgument

try:
    from cuda.core import Buffer, MemoryResource
except ImportError as error:
    raise DevallocError(
        "memory_resource() needs cuda.core from 1.0 on, which cannot be imported: "
        f"{error}; pip install cuda-core"
    ) from error

if TYPE_CHECKING:
    from devalloc.arena.block import Block, BlockSource


def _handle(stream: Any) -> int:
    try:
        return int(stream.handle)
    except (AttributeError, TypeError) as error:
        raise InvalidArgument(
            f"a stream is a cuda.core.Stream here, not {stream!r}; to capture a graph, which has "
            "no such stream, use Arena.capture"
        ) from error


class ArenaMemoryResource(MemoryResource):
    """Buffers from an arena; see `devalloc.Arena.memory_resource`."""

    def __init__(self, arena: BlockSource) -> None:
        self._arena = arena
        self._on_device = arena.device.type == "cuda"
        self._blocks: dict[int, Block] = {}

    def allocate(self, size: int, *, stream: Any) -> Any:
        """A ``cuda.core.Buffer`` of ``size`` bytes, owned by ``stream``; waits for nothing.

        Raises
        ------
        OutOfMemory
            It is a ``torch.OutOfMemoryError`` too.
        InvalidArgument
            For a negative size, a closed arena, an object that is not a stream, or CUDA's
            per-thread default stream.
        """
        owner = _handle(stream) if self._on_device else 0
        # Even a buffer of no bytes has an address of its own.
        block = self._arena.alloc(size or 1, owner)
        try:
            self._blocks[block.address] = block
            return Buffer.from_handle(block.address, size, self, stream=stream)
        except BaseException:
            # Unless the unfinished buffer has given the block back already.
            if self._blocks.get(block.address) is block:
                self._free(block)
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
        """Give a buffer back, in the order of ``stream``; waits for nothing.

        Raises
        ------
        InvalidArgument
            If there is no buffer of this memory resource at ``ptr``.
        """
        address = int(ptr)
        block = self._blocks.get(address)
        if block is None:
            raise InvalidArgument(
                f"no buffer of this memory resource is at {address:#x}; close each buffer once, "
                "where it came from"
            )
        if self._on_device:
            # The memory is reused on the stream that owns it, behind what this stream does now.
            # (That may be the per-thread default stream: here it means the one of this thread.)
            other = _handle(stream)
            self._arena.cache.order_behind(address, 0 if other == LEGACY_DEFAULT else other)
        self._free(block)

    def _free(self, block: Block) -> None:
        # Removed first: once the block is free, the address may be another buffer's.
        del self._blocks[block.address]
        try:
            self._arena.free(block)
        except BaseException:
            if self._arena.cache.owns(block.address, block.claim):
                self._blocks.setdefault(block.address, block)
            raise

    @property
    def is_device_accessible(self) -> bool:
        return self._on_device

    @property
    def is_host_accessible(self) -> bool:
        return bool(self._arena.cache.source.capabilities.host_accessible)

    @property
    def is_managed(self) -> bool:
        return False

    @property
    def device_id(self) -> int:
        """The index of the CUDA device; -1 for host memory."""
        return int(self._arena.device.index) if self._on_device else -1
