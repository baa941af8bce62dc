"""Regions: memory that is taken away and given back at its place (docs/guide/pausing.md).

On the CPU's double, unless marked `gpu`.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import torch

from devalloc import Arena, DevallocError, InvalidArgument, OutOfMemory
from devalloc.sources import VirtualSource
from devalloc.sources.cuda_pages import CudaPages
from devalloc.sources.virtual_calls import HostPages
from tests.arena.support import audited_arena
from tests.conftest import ON_GPU

MIB = 1 << 20
CPU = torch.device("cpu")


class Fails:
    """Pages that raise at the call of number ``at``, counted from when it was set."""

    at: int | None = None
    calls: int = 0

    def arm(self, at: int | None) -> None:
        self.at, self.calls = at, 0

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise OutOfMemory("injected; ask for less")

    def create(self, nbytes: int) -> object:
        self._count()
        return super().create(nbytes)

    def map(self, address: int, handle: object, nbytes: int) -> None:
        self._count()
        super().map(address, handle, nbytes)

    def allow(self, address: int, nbytes: int) -> None:
        self._count()
        super().allow(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self._count()
        super().unmap(address, nbytes)


class Failing(Fails, HostPages):
    pass


class FailingOnCuda(Fails, CudaPages):
    pass


@pytest.fixture
def pages() -> Failing:
    return Failing()


@pytest.fixture
def source(pages: Failing) -> VirtualSource:
    return VirtualSource(CPU, pages)


@pytest.fixture
def arena(source: VirtualSource):
    with audited_arena(source) as made:
        yield made


def mapped(arena: Arena) -> int:
    return arena.stats()["virtual_bytes.mapped"]


@pytest.mark.proves("saver/regions-tags")
def test_memory_goes_and_comes_back_at_its_place(arena: Arena) -> None:
    with arena.region("weights", backup="cpu"):
        weights = arena.full((5_000_000,), 3.0)
    with arena.region("cache"):
        cache = arena.full((3_000_000,), 4.0)
    outside = arena.full((1000,), 5.0)
    place, before = weights.data_ptr(), mapped(arena)
    arena.pause("weights")
    assert [(each.tag, each.state) for each in arena.tags()] == [
        ("weights", "asleep"),
        ("cache", "awake"),
    ]
    assert before - mapped(arena) == 20 * MIB
    assert arena.stats()["virtual_bytes.idle"] == 0, "the device has it"
    assert float(cache.sum()) == 12e6
    assert float(outside.sum()) == 5000
    arena.pause("weights")
    arena.pause()
    assert mapped(arena) == 2 * MIB, "only what is in no region"
    arena.resume()
    arena.resume()
    assert {each.state for each in arena.tags()} == {"awake"}
    assert mapped(arena) == before
    assert weights.data_ptr() == place
    assert bool((weights == 3).all())


@pytest.mark.proves("saver/wide-segments")
def test_many_blocks_have_few_segments(arena: Arena) -> None:
    """Each segment costs as much to pause as tens of MiB do; a sixteenth more may be reserved."""
    size, blocks = 3_435_520, []
    with arena.region("many"):
        while len(blocks) < 5000:
            blocks.append(arena.alloc(size))
            taken = len(blocks) % 100 == 0 and arena.tags()[0].nbytes
            assert taken <= (len(blocks) / 6 + 1) * 20 * MIB * 17 / 16, "six to a segment without"
    arena.cache.audit()
    assert len(arena.snapshot()["segments"]) < 120, "834 without"
    with arena.region("few"):
        blocks.append(arena.alloc(1000))
    assert arena.tags()[1].nbytes == 2 * MIB, "a small region takes what any arena takes"
    blocks.append(arena.alloc(size))
    assert arena.memory_reserved() == sum(each.nbytes for each in arena.tags()) + 20 * MIB
    for block in blocks:
        arena.free(block)


@pytest.mark.proves("saver/wide-segments")
def test_a_wide_segment_that_does_not_fit_is_no_reason_to_fail(source: VirtualSource) -> None:
    with Arena(source=source) as arena, arena.region("a"):
        blocks = [arena.alloc("4MiB") for _ in range(160)]
        assert len(arena.snapshot()["segments"]) < 160 // 5, "some are wide"
        limit = arena.memory_reserved() + 20 * MIB
        arena.set_limit(limit)
        with suppress(OutOfMemory):
            while True:
                blocks.append(arena.alloc("4MiB"))
        assert arena.memory_reserved() == limit
        for block in blocks:
            arena.free(block)


def test_content_without_a_backup(arena: Arena) -> None:
    with arena.region("scratch", on_resume="zero"):
        zeroed = arena.full((1000,), 7.0)
    arena.pause()
    arena.resume()
    assert bool((zeroed == 0).all())


@pytest.mark.proves("saver/regions-tags")
def test_regions_nest_and_threads_do_not_see_each_other(arena: Arena) -> None:
    tensors = {}

    def other() -> None:
        tensors["other"] = arena.empty(10)

    with arena.region("outer"):
        tensors["outer"] = arena.empty(10)
        with arena.region("inner"):
            tensors["inner"] = arena.empty(10)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(60)
        tensors["outer again"] = arena.empty(10)
    tensors["none"] = arena.empty(10)
    segments = {name: tensor.data_ptr() // (2 * MIB) for name, tensor in tensors.items()}
    assert segments["outer"] == segments["outer again"]
    assert segments["other"] == segments["none"]
    assert len(set(segments.values())) == 3
    assert [(each.tag, each.nbytes) for each in arena.tags()] == [
        ("outer", 2 * MIB),
        ("inner", 2 * MIB),
    ]


def test_nothing_is_allocated_in_what_sleeps(arena: Arena) -> None:
    with arena.region("kv"):
        first = arena.alloc(1000)
        arena.pause("kv")
        with pytest.raises(InvalidArgument, match=r"'kv' is asleep; call resume\('kv'\) first"):
            arena.empty(10)
        with arena.region("other"):
            arena.empty(10)
        with pytest.raises(InvalidArgument, match="cannot record a stream: the region 'kv' is"):
            arena.record_stream(first, 5)
    arena.empty(10)
    arena.resume("kv")
    arena.record_stream(first, 5)
    arena.free(first)


REFUSED = {
    "alloc": lambda arena, tensor, block: arena.alloc("3MiB"),
    "a tensor of new shape": lambda arena, tensor, block: arena.empty(7),
    "a tensor like one that ended": lambda arena, tensor, block: arena.empty(123),
    "zeros": lambda arena, tensor, block: arena.zeros(5),
    "full": lambda arena, tensor, block: arena.full((5,), 3.0),
    "empty_like": lambda arena, tensor, block: arena.empty_like(tensor),
    "heap": lambda arena, tensor, block: arena.heap("64KiB"),
    "keep a tensor": lambda arena, tensor, block: arena.keep(tensor, "zero"),
    "keep a block": lambda arena, tensor, block: arena.keep(block, "discard"),
    "record_stream": lambda arena, tensor, block: arena.record_stream(tensor, 5),
}


@pytest.mark.proves("saver/regions-tags")
@pytest.mark.parametrize("name", REFUSED)
def test_calls_refuse_what_sleeps(arena: Arena, name: str) -> None:
    """By the tag, and nothing has changed."""
    if name == "heap" and ON_GPU:
        pytest.skip("compiled kernels cannot use host memory")
    with arena.region("kv", backup="cpu"):
        tensor, block = arena.full((1000,), 3.0), arena.alloc(1000)
        ended = arena.empty(123)
        arena.pause()
        del ended  # its block is not kept for the next tensor of its shape
        before = arena.stats()
        with pytest.raises(InvalidArgument, match="the region 'kv' is asleep"):
            REFUSED[name](arena, tensor, block)
        after = arena.stats()
    assert {name: after[name] for name in before if "current" in name} == {
        name: before[name] for name in before if "current" in name
    }
    arena.resume()
    assert bool((tensor == 3).all())
    arena.free(block)


@pytest.mark.proves("saver/regions-tags")
def test_what_is_freed_while_asleep(arena: Arena) -> None:
    with arena.region("a", backup="cpu"):
        kept, freed, alone = (arena.full((n,), float(n)) for n in (1000, 2000, 3_000_000))
    arena.pause()
    asleep = arena.tags()[0].nbytes
    del freed, alone
    arena.cache.audit()
    arena.resume()
    assert bool((kept == 1000).all())
    assert arena.tags()[0].nbytes < asleep, "a segment without live blocks is not resumed"
    with arena.region("a", backup="cpu"):
        assert bool((arena.full((2000,), 5.0) == 5).all())


def test_closing_while_asleep(source: VirtualSource) -> None:
    with Arena(source=source) as arena, arena.region("a", backup="cpu"):
        block, tensor = arena.alloc("3MiB"), arena.full((1000,), 3.0)
        arena.pause()
    with pytest.raises(InvalidArgument, match="closed"):
        arena.pause()
    arena.resume()
    assert bool((tensor == 3).all())
    arena.free(block)
    del tensor
    gc.collect()
    assert source.stats().address_space == 0


def test_an_arena_that_is_dropped_while_asleep(source: VirtualSource) -> None:
    arena = Arena(source=source)
    with arena.region("a"):
        tensor = arena.empty(1000)
    arena.pause()
    del arena
    gc.collect()
    assert source.stats().address_space == 2 * MIB
    del tensor
    gc.collect()
    assert source.stats().address_space == 0


def test_the_limit_counts_what_is_awake(source: VirtualSource) -> None:
    with Arena(source=source, limit="64MiB") as arena:
        with arena.region("a", backup="cpu"):
            first = arena.full((10 * MIB,), 3.0)
        arena.pause("a")
        second = arena.full((12 * MIB,), 4.0)
        arena.cache.audit()
        with pytest.raises(OutOfMemory, match="40 MiB cannot be resumed: 48 MiB of a limit of 64"):
            arena.resume("a")
        assert arena.tags()[0].state == "asleep"
        del second
        arena.empty_cache()
        arena.resume("a")
        assert bool((first == 3).all())
        del first


def test_bad_input(arena: Arena) -> None:
    for call in (arena.pause, arena.resume):
        with pytest.raises(InvalidArgument, match="no region 'x'; there are: none"):
            call("x")
        for bad in (5, [], ("a",)):
            with pytest.raises(InvalidArgument, match="no region"):
                call(bad)
        call()
    for bad in ({"tag": ""}, {"tag": 5}, {"backup": "gpu"}, {"on_resume": "ones"}):
        with pytest.raises(InvalidArgument), arena.region(**bad):
            pass
    with arena.region("a"):
        pass
    with (
        pytest.raises(InvalidArgument, match="'a' has backup=None"),
        arena.region("a", backup="cpu"),
    ):
        pass
    with pytest.raises(InvalidArgument, match="no region 'b'; there are: 'a'"):
        Arena.pause(arena, "b")
    with (
        Arena(source="host", device="cpu") as plain,
        pytest.raises(InvalidArgument, match='regions need Arena\\(source="virtual"\\)'),
        plain.region(),
    ):
        pass
    with pytest.raises(ZeroDivisionError), arena.region("a"):
        tensor = arena.full((1000,), 1 / 0)
    tensor = arena.full((1000,), 2.0)
    arena.pause("a")
    assert float(tensor.sum()) == 2000, "the region was left"


def test_where_there_are_no_regions_nothing_changes() -> None:
    with Arena("cpu", source="host") as plain:
        for call in (plain.pause, plain.resume, plain.prepare, plain.release_backups):
            call()
            with pytest.raises(InvalidArgument, match="no region 'x'; there are: none"):
                call("x")
        assert plain.tags() == []


def test_a_margin_does_not_matter_where_nothing_sleeps(arena: Arena) -> None:
    with arena.region("a"):
        tensor = arena.full((1000,), 3.0)
    arena.resume_margin = 1 << 60
    arena.resume()
    assert float(tensor.sum()) == 3000


def test_during_a_capture_that_the_arena_does_not_know(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    with arena.region("a", backup="cpu"):
        tensor = arena.full((1000,), 3.0)
    streams = arena.cache.streams
    for call in (arena.pause, arena.prepare, arena.resume):
        with monkeypatch.context() as patch:
            patch.setattr(streams, "capturing", lambda: True)
            with pytest.raises(InvalidArgument, match="during a capture"):
                call()
        if call == arena.prepare:
            arena.pause()
    arena.resume()
    assert float(tensor.sum()) == 3000


def test_during_a_capture(arena: Arena) -> None:
    with arena.region("a"):
        tensor = arena.full((1000,), 3.0)
    with arena.graph_pool() as pool:
        with (
            arena.capture(pool),
            pytest.raises(InvalidArgument, match="no region can be paused or resumed during"),
        ):
            arena.pause()
        assert float(tensor.sum()) == 3000
        arena.pause()
        with arena.capture(pool), pytest.raises(InvalidArgument, match="during a capture"):
            arena.resume()
        assert arena.tags()[0].state == "asleep"


def test_a_touch_while_asleep_is_caught() -> None:
    code = """
import torch
from devalloc import Arena
arena = Arena("cpu", source="virtual")
with arena.region("a"):
    tensor = arena.full((1000,), 3.0)
arena.pause()
print("asleep", flush=True)
tensor.sum()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (-11, "asleep"), done.stderr


@pytest.mark.proves("saver/regions-tags")
@pytest.mark.parametrize("step", ["pause", "resume"])
def test_all_or_nothing(source: VirtualSource, pages: Failing, step: str) -> None:
    """Whichever call of the device fails, contents and states are as before, also without a backup;
    and the next try succeeds."""
    at = failures = 0
    while True:
        at += 1
        with Arena(source=source) as arena:
            tensors = {}
            for tag, backup in (("a", "cpu"), ("b", None)):
                with arena.region(tag, backup=backup):
                    tensors[tag] = [arena.full((n,), float(n)) for n in (1000, MIB, 3 * MIB)]
            if step == "resume":
                arena.pause()
            before = arena.stats()["virtual_bytes.mapped"], arena.tags()
            pages.arm(at)
            try:
                getattr(arena, step)()
            except OutOfMemory:
                failures += 1
                pages.arm(None)
                assert (arena.stats()["virtual_bytes.mapped"], arena.tags()) == before
                arena.cache.audit()
                if step == "pause":
                    for tensor in tensors["a"] + tensors["b"]:
                        assert bool((tensor == len(tensor)).all())
                getattr(arena, step)()
                failed = True
            else:
                failed = False
            pages.arm(None)
            if step == "pause":
                arena.resume()
            for tensor in tensors["a"]:
                assert bool((tensor == len(tensor)).all())
            tensors.clear()
            del tensor
        gc.collect()
        assert source.stats().address_space == 0
        source.trim()
        assert source.stats().idle == 0
        if not failed and pages.calls < at:
            break
    assert failures >= 4


def random_rounds(source: VirtualSource, pages: Fails, rounds: int, largest: int) -> int:
    """Pause, resume, allocate, free, with injected failures: contents right, nothing lost.

    Returns how many calls failed. ``largest``: elements of the largest tensors.
    """
    draw = random.Random(7)
    backups = {"a": "cpu", "b": "cpu", "c": None}
    failures = 0
    with Arena(source=source, limit=256 * largest) as arena:
        live: list[tuple[str, torch.Tensor, int]] = []
        for turn in range(rounds):
            tag = draw.choice(tuple(backups))
            pages.arm(draw.randrange(1, 12) if draw.random() < 0.3 else None)
            try:
                action = draw.choice(("pause", "resume", "alloc", "alloc", "free"))
                if action == "alloc":
                    with arena.region(tag, backup=backups[tag]):
                        size = draw.choice((1000, largest // 4 + 77, largest))
                        tensor = arena.full((size,), turn)
                        if backups[tag] is None:
                            arena.keep(tensor, "backup")
                    live.append((tag, tensor, turn))
                elif action == "free":
                    if live:
                        live.pop(draw.randrange(len(live)))
                else:
                    getattr(arena, action)(draw.choice((tag, None)))
            except DevallocError:
                failures += 1
            pages.arm(None)
            arena.cache.audit()
            states = {each.tag: each.state for each in arena.tags()}
            for place, tensor, value in live:
                if states[place] == "awake":
                    assert bool((tensor == value).all())
        arena.resume()
        assert all(bool((tensor == value).all()) for _, tensor, value in live)
        live.clear()
        del tensor
    gc.collect()
    stats = source.stats()
    assert (stats.address_space, stats.mapped) == (0, 0)
    source.trim()
    assert source.stats().idle == 0
    return failures


@pytest.mark.proves("saver/regions-tags")
def test_random_rounds_with_failures(source: VirtualSource, pages: Failing) -> None:
    assert random_rounds(source, pages, 1000, MIB) > 100


@pytest.mark.proves("saver/regions-tags")
@pytest.mark.gpu
@pytest.mark.alone
def test_on_the_gpu_random_rounds_with_failures_lose_nothing() -> None:
    device = torch.device("cuda", 0)
    pages = FailingOnCuda(device)

    def free_after(rounds: int) -> int:
        assert random_rounds(VirtualSource(device, pages), pages, rounds, 4 * MIB) > rounds // 10
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]

    before = free_after(100)  # kernels are loaded now
    assert free_after(1000) >= before, "by the driver's count"


@pytest.mark.gpu
@pytest.mark.alone
def test_on_the_gpu_weights_sleep_and_wake() -> None:
    arena = Arena("cuda:0", source="virtual")
    arena.empty_cache()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    with arena.region("weights", backup="cpu"):
        weights = arena.full((64 * MIB,), 3.0)
    torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info()[0] >= 256 * MIB
    arena.pause("weights")
    assert free - torch.cuda.mem_get_info()[0] < 32 * MIB
    arena.resume("weights")
    assert bool((weights == 3).all())
