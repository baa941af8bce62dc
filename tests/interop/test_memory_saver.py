"""The names of torch_memory_saver, and the scenarios of its examples.

On the CPU only what the arena allocates itself can sleep: `make` replaces PyTorch's allocations.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from devalloc import InvalidArgument, OutOfMemory
from devalloc.arena.regions import backups, methods
from devalloc.interop import memory_saver
from devalloc.interop.memory_saver import MemorySaver
from tests.arena.support import MIB

Make = Callable[[int, float], torch.Tensor]


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(MemorySaver, "enabled", False)
    made = MemorySaver()
    yield made
    for arena in made._arenas.values():
        arena.resume()
        arena.close()
    gc.collect()


@pytest.fixture
def make(saver: MemorySaver) -> Make:
    return lambda n, value: saver.arena().full((n,), value)


def mapped(saver: MemorySaver) -> int:
    return saver.arena().stats()["virtual_bytes.mapped"]


def test_simple(saver: MemorySaver, make: Make) -> None:
    outside = make(1000, 1.0)
    with saver.region():
        tensor = make(10 * MIB, 3.0)
    place, before = tensor.data_ptr(), mapped(saver)
    saver.pause()
    assert before - mapped(saver) == 40 * MIB
    saver.pause()  # theirs ends the process
    assert float(outside.sum()) == 1000
    saver.resume()
    saver.resume()
    assert tensor.data_ptr() == place
    assert float(tensor.fill_(2)[:10].sum()) == 20


def test_tags_and_backups_mix(saver: MemorySaver, make: Make) -> None:
    """One tag with and without backups is paused as one."""
    with saver.region("weights", enable_cpu_backup=True):
        kept = make(MIB, 3.0)
    with saver.region("weights"):
        lost = make(MIB, 4.0)
    with saver.region("kv"):
        cache = make(MIB, 5.0)
    saver.pause("weights")
    assert float(cache.sum()) == 5 * MIB
    saver.pause("kv")
    assert mapped(saver) == 0
    saver.pause("unknown")
    saver.resume("unknown")
    saver.resume("weights")
    assert bool((kept == 3).all())
    lost.fill_(4)
    saver.resume("kv")
    assert saver.arena().stats()["backup_bytes.pinned"] == 4 * MIB


@pytest.mark.parametrize("backend", ["pinned", "mmap"])
@pytest.mark.parametrize("retain", [True, False])
def test_cpu_backup(saver: MemorySaver, make: Make, backend: str, retain: bool) -> None:
    saver.retain_cpu_backup = retain
    with saver.region(enable_cpu_backup=True, cpu_backup_backend=backend):
        tensor, freed = make(MIB, 3.0), make(MIB, 4.0)
    assert saver.get_cpu_backup(tensor) is None
    for turn in range(3):
        tensor.fill_(turn)
        saver.pause()
        view = saver.get_cpu_backup(tensor, zero_copy=True)
        copy = saver.get_cpu_backup(tensor)
        assert torch.equal(view, copy)
        assert bool((copy == turn).all())
        assert view.data_ptr() != copy.data_ptr()
        freed = None  # while paused
        saver.resume()
        assert bool((tensor == turn).all())
        assert bool(saver.arena().stats()["backup_bytes.pinned"]) == retain
    assert freed is None


def test_disk_backup(
    saver: MemorySaver, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backups, "CHUNK", MIB)
    monkeypatch.setattr(methods, "is_in_ram", lambda _: False)
    with (
        pytest.raises(InvalidArgument, match="folder"),
        saver.region("w", enable_disk_backup=True),
    ):
        pass
    saver.set_disk_backup_dir(tmp_path)
    with saver.region("w", enable_disk_backup=True):
        tensor = make(3 * MIB + 77, 3.0)
    for turn in range(3):
        tensor.fill_(turn)
        saver.pause()
        assert saver.arena().stats()["backup_bytes.disk"] > 12 * MIB
        assert saver.get_cpu_backup(tensor) is None
        saver.resume()
        assert bool((tensor == turn).all())


def test_sizes_that_are_no_multiple_of_the_granularity(saver: MemorySaver, make: Make) -> None:
    with saver.region(enable_cpu_backup=True):
        tensors = [make(n, float(n)) for n in (1, 127, 100_001, 600_001, 3_000_003)]
    saver.pause()
    saver.resume()
    assert all(bool((each == len(each)).all()) for each in tensors)


def test_nested_regions_and_disable(saver: MemorySaver, make: Make) -> None:
    with saver.region("outer", enable_cpu_backup=True):
        first = make(MIB, 1.0)
        with saver.region("inner", enable_cpu_backup=True):
            second = make(MIB, 2.0)
            with saver.disable():
                awake = make(MIB, 3.0)
        third = make(MIB, 4.0)
    saver.pause("inner")
    assert float(first.sum() + third.sum()) == 5 * MIB
    saver.pause()
    assert float(awake.sum()) == 3 * MIB
    saver.resume()
    assert float(second.sum()) == 2 * MIB


def test_weights_and_cache_take_turns(saver: MemorySaver, make: Make) -> None:
    """Reinforcement learning: the cache sleeps while training, the weights keep their contents."""
    with saver.region("weights", enable_cpu_backup=True):
        weights = make(5 * MIB, 1.0)
    with saver.region("kv_cache"):
        cache = make(10 * MIB, 0.0)
    for step in range(3):
        saver.pause("kv_cache")
        weights.add_(1)
        saver.pause("weights")
        trained = make(10 * MIB, 5.0)
        del trained
        saver.arena().empty_cache()
        saver.resume("weights")
        assert bool((weights == step + 2).all())
        saver.resume("kv_cache")
        cache.fill_(step)


def test_all_devices_or_none(
    saver: MemorySaver, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two arenas in place of two devices."""
    other = MemorySaver()
    second = other.arena()
    saver._arenas[torch.device("cuda", 1)] = second
    with saver.region("w"):
        first = make(MIB, 3.0)
    with second.region("w"):
        theirs = second.full((MIB,), 4.0)
    saver._regions["w"][torch.device("cuda", 1), "w"] = None
    told: list[str] = []
    for arena in (saver.arena(), second):

        def fail(tag: str) -> None:
            told.append(tag)
            if len(told) == 2:
                raise RuntimeError("not today")

        arena.on_pause(fail)
    with pytest.raises(RuntimeError, match="not today"):
        saver.pause()
    assert told == ["w", "w"]
    assert bool((first == 3).all()), "without a backup, and nothing is lost"
    assert bool((theirs == 4).all())
    saver.pause()
    assert mapped(saver) == second.stats()["virtual_bytes.mapped"] == 0
    saver.resume()
    del theirs


def test_settings(saver: MemorySaver, make: Make, tmp_path: Path) -> None:
    assert not saver.enabled
    assert saver.memory_margin_bytes == 0
    with saver.region():
        tensor = make(1000, 1.0)
    saver.pause()
    saver.memory_margin_bytes = 1 << 60
    with pytest.raises(OutOfMemory, match="must stay"):
        saver.resume()
    saver.memory_margin_bytes = 0
    saver.resume()
    del tensor
    assert saver.hook_mode is None
    saver.hook_mode = "torch"
    with pytest.warns(UserWarning, match="LD_PRELOAD is not needed"):
        saver.hook_mode = "preload"
    assert saver.hook_mode == "preload"
    with pytest.raises(InvalidArgument, match="hook_mode"):
        saver.hook_mode = "other"
    for bad in (
        {"enable_cpu_backup": True, "enable_disk_backup": True},
        {"cpu_backup_backend": "other"},
        {"tag": 5},
        {"tag": ""},
    ):
        with pytest.raises(InvalidArgument), saver.region(**bad):
            pass
    with pytest.raises(InvalidArgument, match="give no pool"), saver.cuda_graph(None, pool=(0, 1)):
        pass
    assert isinstance(memory_saver.torch_memory_saver, MemorySaver)


# On a GPU -----------------------------------------------------------------------------------------


@pytest.fixture
def gpu_saver():
    made = MemorySaver()
    yield made
    made.resume()


@pytest.mark.gpu
@pytest.mark.alone
def test_on_the_gpu_pytorchs_tensors_sleep(gpu_saver: MemorySaver) -> None:
    saver = gpu_saver
    assert saver.enabled
    with saver.region("outer", enable_cpu_backup=True):
        first = torch.full((20 * MIB,), 1.0, device="cuda")
        with saver.region("inner"):
            second = torch.full((20 * MIB,), 2.0, device="cuda")
            with saver.disable():
                awake = torch.full((MIB,), 3.0, device="cuda")
    first.sum().item()  # PyTorch takes memory for its first small tensor
    free = torch.cuda.mem_get_info()[0]
    saver.pause("inner")
    assert torch.cuda.mem_get_info()[0] >= free + 80 * MIB
    assert float(first.sum()) == 20 * MIB
    saver.pause()
    assert torch.cuda.mem_get_info()[0] >= free + 160 * MIB
    assert float(awake.sum()) == 3 * MIB
    assert bool((saver.get_cpu_backup(first) == 1).all())
    saver.resume()
    assert float(first.sum()) == 20 * MIB
    assert float(second.fill_(5)[:10].sum()) == 50


@pytest.mark.gpu
def test_on_the_gpu_a_captured_graph_sleeps(gpu_saver: MemorySaver) -> None:
    saver = gpu_saver
    with saver.region("g", enable_cpu_backup=True):
        inputs = torch.rand(1000, 1000, device="cuda")
    torch.mm(inputs, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="g", enable_cpu_backup=True):
        result = torch.mm(torch.mm(inputs, inputs), inputs)
    graph.replay()
    torch.cuda.synchronize()
    expected = result.clone()
    for _ in range(3):
        saver.pause("g")
        saver.resume("g")
        result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_the_gpu_two_devices(gpu_saver: MemorySaver) -> None:
    saver = gpu_saver
    tensors = []
    for index in range(2):
        with torch.cuda.device(index), saver.region("w", enable_cpu_backup=True):
            tensors.append(torch.full((MIB,), float(index), device="cuda"))
    saver.pause()
    saver.resume()
    assert all(bool((each == index).all()) for index, each in enumerate(tensors))
