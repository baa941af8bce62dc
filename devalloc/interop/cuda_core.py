"""An arena as a memory resource of cuda.core: `devalloc.Arena.memory_resource`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from devalloc.errors import DevallocError, InvalidArgument

try:
    from cuda.core import Buffer, MemoryResource
except ImportError as error:
    raise DevallocError(
        "memory_resource() needs cuda.core from 1.0 on, which cannot be imported: "
        f"{error}; pip install cuda-core"
    ) from error

if TYPE_CHECKING:
    from devalloc.arena import Arena

# CUDA's name for the default stream, which is 0 elsewhere.
_LEGACY_DEFAULT = 1


def _handle(stream: Any) -> int:
    try:
        handle = int(stream.handle)
    except (AttributeError, TypeError) as error:
        raise InvalidArgument(
            f"{stream!r} is no cuda.core.Stream; a graph's memory comes from Arena.capture"
        ) from error
    return 0 if handle == _LEGACY_DEFAULT else handle


class ArenaMemoryResource(MemoryResource):
    """Buffers from an arena; see `devalloc.Arena.memory_resource`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._on_device = arena.device.type == "cuda"
        self._owners: dict[int, int] = {}

    def allocate(self, size: int, *, stream: Any) -> Any:
        """A ``cuda.core.Buffer`` of ``size`` bytes, owned by ``stream``; waits for nothing.

        Raises
        ------
        OutOfMemory
            Also a ``torch.OutOfMemoryError``.
        InvalidArgument
            For a negative size, a closed arena, or what is no stream.
        """
        owner = _handle(stream) if self._on_device else 0
        # Of no bytes too a buffer has an address of its own.
        address = self._arena.alloc(size or 1, owner).address
        self._owners[address] = owner
        return Buffer.from_handle(address, size, self, stream=stream)

    def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
        """Give a buffer back, in the order of ``stream``; waits for nothing."""
        address = int(ptr)
        owner = self._owners.pop(address, None)
        if owner is None:
            raise InvalidArgument(f"{address:#x} is no buffer of this memory resource")
        cache = self._arena.cache
        if self._on_device:
            other = _handle(stream)
            if other != owner:
                # Whatever reuses the memory does so on the owner, behind what this stream does now.
                cache.streams.wait(owner, cache.streams.record(other))
        cache.free(address)

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
