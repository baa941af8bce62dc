"""PyTorch's own allocations in regions: the callbacks on any machine, the rest on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from devalloc import Arena, InvalidArgument, OutOfMemory
from devalloc.arena.regions import Outside
from devalloc.interop import pytorch
from devalloc.sources import VirtualSource
from devalloc.sources.virtual_calls import HostPages
from tests.arena.support import MIB, audited_arena
from tests.interop.support import called

CPU = torch.device("cpu")


class Torch:
    """What PyTorch does in `use`: it asks for segments, and knows which blocks are live."""

    def __init__(self, arena: Arena, tag: str, backup: str | None = None) -> None:
        self.allocate, self.free, *_ = called(pytorch.functions)
        with arena.region(tag, backup=backup):
            region = arena._regions.here()
        assert region is not None
        self.outside: Outside = arena._regions.add_outside(region, self.live)
        self.blocks: dict[int, list[tuple[int, int]]] = {}
        self.dies: list[int] = []

    def segment(self, nbytes: int, *blocks: tuple[int, int]) -> int:
        with pytorch.claimed(), pytorch.active(self.outside):
            address = self.allocate(nbytes, 0, None)
        assert address
        self.blocks[address] = [(address + offset, size) for offset, size in blocks]
        return address

    def live(self, segments: dict[int, int]) -> dict[int, list[tuple[int, int]]]:
        for address in self.dies:
            self.free(address, 0, 0, None)
        return self.blocks


@pytest.fixture
def arena():
    with audited_arena() as made:
        yield made


def mapped(arena: Arena) -> int:
    return arena.stats()["virtual_bytes.mapped"]


def test_pytorchs_segments_sleep_with_their_region(arena: Arena) -> None:
    torch_ = Torch(arena, "a", backup="cpu")
    first = torch_.segment(4 * MIB, (0, 1000), (2 * MIB, 5000))
    idle = torch_.segment(2 * MIB)
    ctypes.memset(first, 3, 1000)
    ctypes.memset(first + 2 * MIB, 4, 5000)
    with arena.region("a", backup="cpu"):
        own = arena.full((1000,), 5.0)
    assert arena.tags()[0].nbytes == 8 * MIB
    for _ in range(2):
        arena.pause("a")
        assert mapped(arena) == 0
        assert arena.stats()["backup_bytes.pinned"] == 6000 + 4096, "only live blocks"
        arena.cache.audit()
        arena.resume()
        assert mapped(arena) == 8 * MIB
        assert ctypes.string_at(first, 1000) == b"\3" * 1000
        assert ctypes.string_at(first + 2 * MIB, 5000) == b"\4" * 5000
        assert bool((own == 5).all())
    for address in (first, idle):
        torch_.free(address, 0, 0, None)
    assert arena.tags()[0].nbytes == 2 * MIB


def test_pytorch_gives_segments_back_at_any_time(arena: Arena) -> None:
    torch_ = Torch(arena, "a", backup="cpu")
    kept, early, late = (torch_.segment(2 * MIB, (0, 1000)) for _ in range(3))
    ctypes.memset(kept, 3, 1000)
    torch_.dies = [early]  # while the pause is under way
    arena.pause()
    torch_.dies = []
    assert arena.stats()["outside_segment.current"] == 2
    torch_.free(late, 0, 0, None)
    assert arena.stats()["outside_segment.current"] == 1
    arena.resume()
    assert mapped(arena) == 2 * MIB
    assert ctypes.string_at(kept, 1000) == b"\3" * 1000
    torch_.free(kept, 0, 0, None)
    assert mapped(arena) == 0


def test_what_is_refused(arena: Arena) -> None:
    torch_ = Torch(arena, "a")
    address = torch_.segment(2 * MIB, (0, 1000))
    torch_.outside.enter()
    with pytest.raises(InvalidArgument, match=r"inside use\(\) in a region"):
        arena.pause()
    assert arena.tags()[0].state == "awake"
    torch_.outside.leave()
    arena.pause()
    with pytest.raises(InvalidArgument, match="'a' is asleep"):
        torch_.outside.enter()
    assert torch_.outside.inside == 0
    with pytest.raises(OutOfMemory, match="'a' is asleep"):
        torch_.outside.allocate(MIB)
    arena.resume()
    torch_.outside.enter()
    torch_.outside.leave()
    tensor = torch.frombuffer((ctypes.c_byte * 1000).from_address(address), dtype=torch.uint8)
    with pytest.raises(InvalidArgument, match="keep is for what its empty"):
        arena.keep(tensor, "zero")
    torch_.free(address, 0, 0, None)


def test_the_limit_counts_what_is_awake() -> None:
    with Arena(source=VirtualSource(CPU, HostPages()), limit="32MiB") as arena:
        torch_ = Torch(arena, "a", backup="cpu")
        address = torch_.segment(20 * MIB, (0, 1000))
        with pytest.raises(OutOfMemory, match="limit of 32 MiB"):
            torch_.outside.allocate(14 * MIB)
        arena.pause()
        with arena.region("b"):
            other = arena.empty(4 * MIB, dtype=torch.uint8)
        arena.cache.audit()
        with pytest.raises(OutOfMemory, match="20 MiB cannot be resumed: 20 MiB of a limit of 32"):
            arena.resume("a")
        assert {each.tag: each.state for each in arena.tags()} == {"a": "asleep", "b": "awake"}
        del other
        arena.pause("b")
        arena.resume("a")
        arena.cache.audit()
        torch_.free(address, 0, 0, None)


def test_reading_the_backup_of_pytorchs_memory(arena: Arena) -> None:
    torch_ = Torch(arena, "a", backup="cpu")
    address = torch_.segment(2 * MIB, (0, 1024))
    tensor = torch.frombuffer((ctypes.c_byte * 1000).from_address(address), dtype=torch.float32)
    tensor.fill_(7)
    arena.pause()
    assert bool((arena.backup_of(tensor) == 7).all())
    arena.resume()
    torch_.free(address, 0, 0, None)


def test_use_in_a_region_of_the_cpu(arena: Arena) -> None:
    with arena.region("a"), pytest.raises(InvalidArgument, match="need device memory"):
        arena.use()
    arena.pause()


def test_the_blocks_that_pytorch_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[bool] = []
    listed = [
        {
            "address": 4096,
            "blocks": [
                {"address": 4096, "size": 512, "state": "active_allocated"},
                {"address": 4608, "size": 512, "state": "inactive"},
                {"address": 5120, "size": 512, "state": "active_pending_free"},
            ],
        },
        {"address": 9999, "blocks": [{"address": 9999, "size": 1, "state": "active_allocated"}]},
    ]
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: cleared.append(True), raising=False)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: listed)
    found = pytorch.live_blocks({4096: 2048, 8192: 100})
    assert found == {4096: [(4096, 512), (5120, 512)], 8192: [(8192, 100)]}
    assert cleared == [True]
    with pytorch.claimed(), pytest.raises(InvalidArgument, match=r"inside use\(\)"):
        pytorch.live_blocks({4096: 2048})


def test_one_use_inside_another_switches_and_switches_back(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that PyTorch gets: at most one pool is entered, and all ends are paired."""
    calls: list[tuple[str, str]] = []

    class MemPool:
        names = iter("abcdef")

        def __init__(self, allocator: object) -> None:
            self.id = next(self.names)

    begin, end, release = (
        lambda _, at, what=what: calls.append((what, at)) for what in ("begin", "end", "release")
    )

    @contextmanager
    def use_mem_pool(pool: MemPool, device: torch.device) -> Iterator[None]:
        begin(0, pool.id)
        try:
            yield
        finally:
            end(0, pool.id)
            release(0, pool.id)

    for name, call in (
        ("_cuda_beginAllocateCurrentThreadToPool", begin),
        ("_cuda_endAllocateToPool", end),
        ("_cuda_releasePool", release),
    ):
        monkeypatch.setattr(torch._C, name, call, raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", MemPool, raising=False)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(pytorch, "_torch_allocator", lambda: None)
    torch_ = Torch(arena, "r")
    plain = pytorch.Pool(arena.cache)
    region = pytorch.Pool(arena.cache, torch_.outside)

    def entered(name: str) -> list[tuple[str, str]]:
        return [("begin", name)]

    def left(name: str) -> list[tuple[str, str]]:
        return [("end", name), ("release", name)]

    with plain.use():
        assert calls == entered("a")
        with plain.use():
            assert calls == entered("a")
        with pytest.raises(ZeroDivisionError), region.use():  # noqa: PT012
            assert calls == entered("a") + left("a") + entered("b")
            assert pytorch._PROCESS.active is torch_.outside
            assert torch_.outside.inside == 1
            1 / 0  # noqa: B018
        assert calls[4:] == left("b") + entered("a")
        assert pytorch._PROCESS.active is arena.cache.external
        assert torch_.outside.inside == 0
        calls.clear()
        with pytorch.outside_of_use():
            assert calls == left("a")
        assert calls == left("a") + entered("a")
        arena.pause()
        calls.clear()
        with pytest.raises(InvalidArgument, match="'r' is asleep"), region.use():
            pass
        assert calls == left("a") + entered("a")
    assert calls[-2:] == left("a")
    assert (pytorch._PROCESS.active, pytorch._PROCESS.current) == (None, None)
    calls.clear()
    with pytorch.outside_of_use():
        assert calls == []
    arena.resume()
    with region.captured() as number:
        assert number == "b"
        assert calls == [], "the capture routes its allocations itself"
        assert pytorch._PROCESS.active is torch_.outside
        with pytest.raises(InvalidArgument, match="active already"), plain.use():
            pass
    with pytorch.claimed(), pytest.raises(InvalidArgument, match="is active"), region.captured():
        pass


# On a GPU -----------------------------------------------------------------------------------------


@pytest.fixture
def gpu_arena():
    arena = Arena("cuda:0", source="virtual")
    yield arena
    arena.close()


@pytest.mark.gpu
@pytest.mark.alone
def test_on_the_gpu_a_model_sleeps_and_gives_the_same(gpu_arena: Arena) -> None:
    arena = gpu_arena
    inputs = torch.rand(8, 2000, device="cuda")
    with arena.region("weights", backup="cpu"), arena.use():
        model = nn.Sequential(nn.Linear(2000, 3000), nn.ReLU(), nn.Linear(3000, 10)).cuda()
        model(inputs)  # cuBLAS takes a workspace here
    expected = model(inputs)
    places = [p.data_ptr() for p in model.parameters()]
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        arena.pause("weights")
        assert torch.cuda.mem_get_info()[0] >= free + 20 * MIB
        torch.mm(inputs, inputs.T)
        first = next(model.parameters())
        assert arena.backup_of(first).shape == first.shape
        arena.resume("weights")
        assert [p.data_ptr() for p in model.parameters()] == places
        assert torch.equal(model(inputs), expected)
        with arena.region("weights", backup="cpu"), arena.use():
            model.append(nn.Linear(10, 10).cuda())
            del model[-1]


@pytest.mark.gpu
def test_on_the_gpu_regions_nest_in_use(gpu_arena: Arena) -> None:
    arena = gpu_arena
    tensors = {}

    def make(name: str) -> None:
        tensors[name] = torch.full((3 * MIB,), 3.0, device="cuda")

    with arena.region("a", backup="cpu"), arena.use():
        make("a")
        with pytest.raises(RuntimeError):  # CUDA has no IPC handles for mapped memory
            tensors["a"].untyped_storage()._share_cuda_()
        with arena.region("b", backup="cpu"), arena.use():
            make("b")
        make("a again")
        with pytest.raises(InvalidArgument, match=r"inside use\(\)"):
            arena.pause("a")
    make("none")
    with arena.use():
        make("use")
    assert {each.tag: each.nbytes // (12 * MIB) for each in arena.tags()} == {"a": 2, "b": 1}
    arena.pause("b")
    assert all(float(tensors[name].sum()) == 9 * MIB for name in ("a", "a again", "none", "use"))
    with (
        pytest.raises(InvalidArgument, match="asleep"),
        arena.region("b", backup="cpu"),
        arena.use(),
    ):
        pass
    arena.resume()
    assert all(float(each.sum()) == 9 * MIB for each in tensors.values())
