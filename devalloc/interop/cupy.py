"""CuPy's arrays in an arena: pass ``allocator(arena)`` to ``cupy.cuda.set_allocator``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from devalloc.errors import DevallocError, InvalidArgument
from devalloc.interop.holder import Holder

if TYPE_CHECKING:
    from devalloc.arena import Arena


def allocator(arena: Arena) -> Callable[[int], Any]:
    """A function for ``cupy.cuda.set_allocator`` or ``cupy.cuda.using_allocator``.

    An array's memory belongs to the stream that is CuPy's current one when the array is made. It
    returns to the arena with the last reference, in the order of that stream. As with CuPy's own
    pool, a program that uses an array on another stream must order the two streams.

    Parameters
    ----------
    arena : Arena
        Of a CUDA device, which must be CuPy's current device when the function is called.

    Raises
    ------
    InvalidArgument
        For an arena that is closed or has host memory.
    DevallocError
        If CuPy cannot be imported.
    """
    if arena.closed:
        raise InvalidArgument("the arena is closed")
    if arena.device.type != "cuda":
        raise InvalidArgument(f"CuPy's arrays need device memory; this arena is on {arena.device}")
    try:
        from cupy import cuda
    except ImportError as error:
        raise DevallocError(f"CuPy cannot be imported: {error}; pip install cupy") from error
    index = arena.device.index

    def allocate(nbytes: int) -> Any:
        if cuda.runtime.getDevice() != index:
            raise InvalidArgument(
                f"CuPy's current device is {cuda.runtime.getDevice()}, the arena is on {index}; "
                f"use cupy.cuda.Device({index})"
            )
        holder = Holder(arena, nbytes, cuda.get_current_stream().ptr)
        memory = cuda.UnownedMemory(holder.data_ptr(), nbytes, holder, index)
        return cuda.MemoryPointer(memory, 0)

    return allocate
