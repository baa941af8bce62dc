"""Arena tensors through DLPack: the memory returns when the last consumer lets go."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from devalloc import Arena


def live(arena: Arena) -> int:
    return arena.stats()["allocation.all.current"]


@pytest.mark.proves("library/dlpack-memory")
def test_numpy_keeps_the_memory() -> None:
    arena = Arena(source="host")
    tensor = arena.empty((3, 4)).fill_(2)
    address = tensor.data_ptr()
    array = np.from_dlpack(tensor)
    del tensor
    gc.collect()
    assert live(arena) == 1
    assert array.ctypes.data == address
    assert (array == 2).all()
    part = array[1:, 2:]
    del array
    assert live(arena) == 1
    del part
    gc.collect()
    assert live(arena) == 0


def test_a_capsule_that_nobody_takes_returns_the_memory() -> None:
    arena = Arena(source="host")
    capsule = arena.empty(100).__dlpack__()
    gc.collect()
    assert live(arena) == 1
    del capsule
    gc.collect()
    assert live(arena) == 0


def test_torch_keeps_the_memory() -> None:
    arena = Arena(source="host")
    taken = torch.from_dlpack(arena.empty(100).fill_(4))
    gc.collect()
    assert live(arena) == 1
    assert (taken == 4).all()
    del taken
    gc.collect()
    assert live(arena) == 0


@pytest.mark.proves("library/dlpack-memory")
@pytest.mark.gpu
def test_on_the_gpu_cupy_keeps_the_memory() -> None:
    cupy = pytest.importorskip("cupy")
    with Arena() as arena:
        array = cupy.from_dlpack(arena.empty(1 << 16).fill_(3))
        gc.collect()
        assert live(arena) == 1
        assert bool((array == 3).all())
        del array
        gc.collect()
        assert live(arena) == 0
