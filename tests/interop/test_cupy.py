"""CuPy's arrays in an arena."""

from __future__ import annotations

import pytest

from devalloc import Arena, InvalidArgument
from devalloc.interop import cupy as ours


def live(arena: Arena) -> int:
    return arena.stats()["allocation.all.current"]


def test_arenas_without_device_memory_are_refused() -> None:
    arena = Arena(source="host")
    with pytest.raises(InvalidArgument, match="on cpu"):
        ours.allocator(arena)
    arena.close()
    with pytest.raises(InvalidArgument, match="closed"):
        ours.allocator(arena)


@pytest.mark.proves("library/cupy-allocator")
@pytest.mark.gpu
def test_on_the_gpu_arrays_live_in_the_arena() -> None:
    cupy = pytest.importorskip("cupy")
    with Arena() as arena:
        with cupy.cuda.using_allocator(ours.allocator(arena)):
            array = cupy.arange(1 << 20, dtype=cupy.int32)
            assert live(arena) >= 1
            assert int((array * 2).sum()) == (1 << 20) * ((1 << 20) - 1)
            assert cupy.empty(0).size == 0
            view = array[10:20]
            del array
            assert int(view.sum()) == sum(range(10, 20))
            address = view.base.data.ptr
            assert live(arena) == 1
            del view
            assert live(arena) == 0
            assert cupy.empty(1 << 20, dtype=cupy.int32).data.ptr == address
            with cupy.cuda.Stream():
                elsewhere = cupy.empty(1 << 20, dtype=cupy.int32)
                assert elsewhere.data.ptr != address, "another stream's memory"
                del elsewhere
        cupy.cuda.Device().synchronize()
        assert live(arena) == 0
        arena.cache.audit()
