"""What may be allocated in a region, and which errors there are while it sleeps: heaps, graphs,
autograd, other libraries, callbacks, margins.

On the CPU's double, unless marked `gpu`.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch

from devalloc import Arena, DevallocError, InvalidArgument, OutOfMemory
from devalloc.sources import VirtualSource
from devalloc.sources.virtual_calls import HostPages
from tests.arena.support import audited_arena

MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture
def arena():
    with audited_arena() as made:
        yield made


def states(arena: Arena) -> dict[str, str]:
    return {each.tag: each.state for each in arena.tags()}


# Entering -----------------------------------------------------------------------------------------


@pytest.mark.proves("saver/memory-outside")
def test_memory_outside_of_all_regions(arena: Arena) -> None:
    with arena.region("a"), arena.region("b"):
        with arena.no_region():
            outside = arena.full((1000,), 3.0)
            with arena.region("a"):
                inside = arena.full((1000,), 4.0)
        asleep = arena.full((1000,), 5.0)
    sizes = {each.tag: each.nbytes for each in arena.tags()}
    assert sizes == {"a": 2 * MIB, "b": 2 * MIB}
    arena.pause()
    assert float(outside.sum()) == 3000
    with arena.region("a"), arena.no_region():
        assert float(arena.full((1000,), 1.0).sum()) == 1000, "'a' is asleep, this is not"
    del inside, asleep
    with arena.no_region():
        pass  # without a region it changes nothing


def test_another_arena_has_other_tags(arena: Arena) -> None:
    with Arena(source=VirtualSource(CPU, HostPages())) as other:
        with other.region("theirs"):
            tensor = other.full((1000,), 3.0)
        for call in (arena.pause, arena.resume, arena.prepare, arena.release_backups):
            with pytest.raises(InvalidArgument, match="no region 'theirs'; there are: none"):
                call("theirs")
        arena.pause()
        assert float(tensor.sum()) == 3000
        with other.region("theirs"):
            block = other.alloc(10)
        with pytest.raises(InvalidArgument, match="call keep there"):
            arena.keep(block, "zero")
        other.free(block)
        with pytest.raises(InvalidArgument, match="no region of this arena allocated"):
            arena.keep(tensor, "zero")


_OPEN_AT_EXIT = """
from devalloc import Arena
arena = Arena("cpu", source="virtual")
with arena.region("a"):
    tensor = arena.empty(1000)
    pool = arena.graph_pool() if {user} else None
"""


@pytest.mark.parametrize("user", [False, True])
def test_only_pools_of_the_user_are_missed_at_exit(user: bool) -> None:
    code = _OPEN_AT_EXIT.format(user=user)
    options = ["-X", "dev", "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run([sys.executable, *options], capture_output=True, text=True, check=True)
    missed = [line for line in done.stderr.splitlines() if "private pool was dropped" in line]
    assert len(missed) == user, done.stderr


def test_an_installed_arena_has_no_regions(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_installed", True)
    with pytest.raises(InvalidArgument, match="serves all of PyTorch has no regions"):
        arena.region("a")
    monkeypatch.undo()


def test_entering_waits_for_no_pause(arena: Arena) -> None:
    """While one region is copied, other threads enter and use other regions."""
    with arena.region("a", backup="cpu"):
        tensor = arena.full((1000,), 3.0)
    inside, go_on = threading.Event(), threading.Event()

    def slow(tag: str) -> None:
        inside.set()
        assert go_on.wait(60)

    arena.on_pause(slow)
    thread = threading.Thread(target=arena.pause)
    thread.start()
    assert inside.wait(60)
    with arena.region("b"):
        assert float(arena.full((10,), 2.0).sum()) == 20
    assert states(arena) == {"a": "awake", "b": "awake"}
    go_on.set()
    thread.join(60)
    assert states(arena)["a"] == "asleep"
    arena.resume()
    assert float(tensor.sum()) == 3000


# Callbacks ----------------------------------------------------------------------------------------


def test_callbacks_come_before_the_first_change_and_after_the_last(arena: Arena) -> None:
    told: list[tuple[str, str, float]] = []
    tensors = {}
    for tag in ("a", "b"):
        with arena.region(tag, backup="cpu"):
            tensors[tag] = arena.full((1000,), 1.0)
    arena.on_pause(lambda tag: told.append(("pause", tag, float(tensors[tag].sum()))))
    arena.on_resume(lambda tag: told.append(("resume", tag, float(tensors[tag].sum()))))
    arena.pause("b")
    arena.pause("b")
    assert told == [("pause", "b", 1000)]
    arena.pause()
    assert told[1:] == [("pause", "a", 1000)]
    arena.resume()
    arena.resume()
    assert told[2:] == [("resume", "a", 1000), ("resume", "b", 1000)]
    for bad in (None, 5, "f"):
        for setter in (arena.on_pause, arena.on_resume):
            with pytest.raises(InvalidArgument, match="a callback is a function of a tag"):
                setter(bad)


@pytest.mark.parametrize("streams", [5, "5", b"5", [1.5], ["s"], [None], [True]])
def test_streams_that_are_none_are_refused_before_anything_happens(
    arena: Arena, streams: object
) -> None:
    told: list[str] = []
    with arena.region("a"):
        tensor = arena.full((1000,), 3.0)
    arena.on_pause(told.append)
    arena.on_resume(told.append)
    for tag in ("a", None):
        with pytest.raises(InvalidArgument, match=r"streams? is .*handle"):
            arena.pause(tag, streams=streams)  # type: ignore[arg-type]
    assert (told, states(arena)["a"], float(tensor.sum())) == ([], "awake", 3000)
    arena.pause("a", streams=())
    arena.resume()


def test_callbacks_that_raise(arena: Arena) -> None:
    told: list[str] = []
    with arena.region("a"):
        tensor = arena.full((1000,), 3.0)
    failing = {"pause": True, "resume": True}

    def on_pause(tag: str) -> None:
        if failing["pause"]:
            raise RuntimeError("not today")

    def on_resume(tag: str) -> None:
        if failing["resume"]:
            raise RuntimeError("not now")

    arena.on_pause(lambda tag: told.append("pause"))
    arena.on_pause(on_pause)
    arena.on_resume(lambda tag: told.append("first"))
    with pytest.raises(RuntimeError, match="not today"):
        arena.pause()
    assert told == ["pause", "first"], "what the first callback undid is done again"
    assert float(tensor.sum()) == 3000
    failing["pause"] = False
    arena.pause()
    arena.on_resume(on_resume)
    arena.on_resume(lambda tag: told.append("last"))
    told.clear()
    with pytest.raises(RuntimeError, match="not now"):
        arena.resume()
    assert told == ["first", "last"]
    assert states(arena) == {"a": "awake"}


def test_a_pause_that_fails_later_tells_that_all_is_as_before(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    from devalloc.sources import host

    told: list[str] = []
    with arena.region("a", backup="cpu"):
        tensor = arena.full((1000,), 3.0)
    arena.on_pause(lambda tag: told.append("pause"))
    arena.on_resume(lambda tag: told.append("resume"))
    monkeypatch.setattr(host, "available_bytes", lambda: 0)
    with pytest.raises(OutOfMemory, match="does not fit"):
        arena.pause()
    assert told == ["pause", "resume"]
    assert float(tensor.sum()) == 3000


def test_regions_change_one_at_a_time(arena: Arena) -> None:
    with arena.region("a"):
        tensor = arena.full((1000,), 3.0)
    arena.on_pause(lambda tag: arena.resume())
    with pytest.raises(DevallocError, match="in a callback or a finalizer"):
        arena.pause()
    assert states(arena) == {"a": "awake"}
    assert float(tensor.sum()) == 3000


# Room ---------------------------------------------------------------------------------------------


class _Small(HostPages):
    """A device with 64 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.source = VirtualSource(CPU, self)

    def free_bytes(self) -> int:
        stats = self.source.stats()
        return 64 * MIB - stats.mapped - stats.idle


@pytest.mark.proves("saver/limit-margin")
def test_what_must_stay_free() -> None:
    source = _Small().source
    with Arena(source=source) as arena:
        with arena.region("a", backup="cpu"):
            tensor = arena.full((5 * MIB,), 3.0)
        assert arena.resume_margin == 0
        arena.pause()
        arena.resume_margin = "45MiB"
        with pytest.raises(OutOfMemory, match=r"20 MiB cannot be resumed: 64 MiB .* and 45 MiB of"):
            arena.resume()
        assert states(arena) == {"a": "asleep"}
        assert source.stats().mapped == 0
        arena.resume_margin = 44 * MIB
        arena.resume()
        assert bool((tensor == 3).all())
        for bad in (-1, "much", None, 1.5):
            with pytest.raises(InvalidArgument):
                arena.resume_margin = bad
        del tensor


def test_idle_handles_count_as_free() -> None:
    source = _Small().source
    with Arena(source=source) as arena:
        with arena.region("a"):
            tensor = arena.empty(5 * MIB)
        arena.pause()
        other = arena.empty(10 * MIB)
        del other
        arena.cache.empty_cache()
        assert source.stats().idle == 40 * MIB
        arena.resume_margin = 44 * MIB
        arena.resume()
        del tensor


# Heaps --------------------------------------------------------------------------------------------


@pytest.fixture
def heap_arena(device: str):
    if device != "cpu":
        pytest.skip("the arena here is on the CPU")
    with Arena("cpu", source="virtual") as made:
        yield made
        made.cache.audit()


@pytest.mark.parametrize("backup", ["cpu", None])
def test_a_heap_sleeps_and_wakes(heap_arena: Arena, backup: str | None) -> None:
    arena = heap_arena
    with arena.region("a", backup=backup):
        heap = arena.heap("1MiB")
    with heap:
        addresses = heap.malloc([100, 5000, 70_000])
        tensor = heap.tensor(int(addresses[1]), 1000, torch.float32).fill_(3)
        before = heap.stats()
        handle = heap.handle
        arena.pause()
        message = r"the heap cannot be used: the region 'a' is asleep; call resume\('a'\) first"
        for call in (
            heap.stats,
            heap.check,
            heap.audit,
            heap.snapshot,
            heap.reset,
            heap.trim,
            heap.close,
            lambda: heap.handle,
            lambda: heap.malloc(10),
            lambda: heap.free(addresses),
        ):
            with pytest.raises(InvalidArgument, match=message):
                call()
        assert "1 MiB" in repr(heap)
        arena.resume()
        assert heap.handle is handle
        assert heap.stats() == before, "what was allocated stays allocated"
        heap.audit()
        if backup:
            assert bool((tensor == 3).all())
        heap.free(addresses)
        assert heap.stats().used == 0
        heap.free(heap.malloc([10] * 100))
        del tensor


def test_a_pause_waits_for_the_device_if_any_kernel_may_use_the_region(
    heap_arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = heap_arena
    waits: list[str] = []
    streams = arena.cache.streams
    record = streams.record
    monkeypatch.setattr(streams, "synchronize", lambda: waits.append("device"))
    monkeypatch.setattr(streams, "record", lambda at: waits.append(f"stream {at}") or record(at))
    with arena.region("plain"):
        block, other = arena.alloc(1000, stream=3), arena.alloc(1000)
    arena.record_stream(other, 4)
    with arena.region("heap"):
        heap = arena.heap("1MiB")
    with heap:
        waits.clear()
        arena.pause("plain")
        assert waits == ["stream 0", "stream 3", "stream 4"]
        arena.resume()
        waits.clear()
        arena.pause("heap")
        assert waits == ["device"]
        arena.resume()
        waits.clear()
        arena.pause("heap", streams=[7])
        assert waits == ["stream 0", "stream 7"]
        arena.resume()
    arena.free(block)
    arena.free(other)


def test_leaving_the_with_of_a_heap_that_sleeps(heap_arena: Arena) -> None:
    arena = heap_arena
    with arena.region("a"):
        heap = arena.heap("1MiB")
    with pytest.raises(InvalidArgument, match="'a' is asleep"), heap:
        arena.pause()
    assert not heap.closed
    with pytest.raises(ZeroDivisionError) as error, heap_or_note(heap):
        1 / 0  # noqa: B018
    assert error.type is ZeroDivisionError
    del heap, error
    gc.collect()
    arena.resume()
    assert [each.nbytes for each in arena.tags()] == [0], "a heap that is dropped gives it back"


class heap_or_note:
    """`with heap`, but entered while the heap sleeps."""

    def __init__(self, heap: object) -> None:
        self.heap = heap

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.heap.__exit__(*error)


def test_a_heap_outside_stays_awake(heap_arena: Arena) -> None:
    arena = heap_arena
    with arena.region("a"):
        asleep = arena.empty(1000)
        with arena.no_region():
            heap = arena.heap("1MiB")
    with heap:
        arena.pause()
        heap.free(heap.malloc([100] * 10))
        heap.audit()
    del asleep


# Graphs -------------------------------------------------------------------------------------------


@pytest.mark.proves("saver/memory-cuda")
def test_the_memory_of_graphs_sleeps_at_its_place(arena: Arena) -> None:
    """Blocks that were freed inside a capture are the graph's too: they are mapped again."""
    with arena.region("g", backup="cpu"):
        pool = arena.graph_pool()
    with arena.capture(pool):
        result, temporary = arena.full((1000,), 3.0), arena.full((5 * MIB,), 4.0)
        places = result.data_ptr(), temporary.data_ptr()
        del temporary
    nbytes = arena.tags()[0].nbytes
    assert nbytes == 22 * MIB
    arena.pause("g")
    assert arena.stats()["virtual_bytes.mapped"] == 0
    with pytest.raises(InvalidArgument, match="'g' is asleep"), arena.capture(pool):
        arena.empty(10)
    arena.resume("g")
    assert arena.tags()[0].nbytes == nbytes
    assert bool((result == 3).all())
    with arena.capture(pool):
        again = arena.full((5 * MIB,), 5.0)
        assert (result.data_ptr(), again.data_ptr()) == places
    del result, again
    pool.release()
    assert arena.tags()[0].nbytes == 0
    with arena.region("g", backup="cpu"):
        pool = arena.graph_pool()
        arena.pause("g")
        asleep = arena.graph_pool()
    for each in (pool, asleep):
        with pytest.raises(InvalidArgument, match="'g' is asleep"), arena.capture(each):
            arena.empty(10)
        each.release()


def test_a_capture_does_not_enter_regions(arena: Arena) -> None:
    with arena.region("g"), arena.graph_pool() as pool, arena.capture(pool):
        for enter in (lambda: arena.region("h"), arena.no_region):
            with (
                pytest.raises(InvalidArgument, match="what a capture allocates belongs to"),
                enter(),
            ):
                pass
        assert arena.tags()[0].nbytes == 0
        arena.empty(10)
        assert arena.tags()[0].nbytes == 2 * MIB


# Autograd and other libraries ---------------------------------------------------------------------


def test_what_autograd_saved_sleeps_too(arena: Arena) -> None:
    with arena.region("a", backup="cpu"):
        weights = arena.full((1000,), 3.0, requires_grad=True)
        inputs = arena.full((1000,), 2.0)
    loss = (weights * weights * inputs).sum()
    del inputs
    arena.pause()
    arena.resume()
    loss.backward()
    assert bool((weights.grad == 12).all())


def test_an_export_holds_the_memory_and_wakes_with_it(arena: Arena) -> None:
    """An export by DLPack hands out the address and touches nothing, also while asleep."""
    with arena.region("a", backup="cpu"):
        tensor = arena.full((1000,), 3.0)
    early = torch.from_dlpack(tensor)
    arena.pause()
    late = torch.from_dlpack(tensor)
    del tensor
    gc.collect()
    arena.resume()
    assert arena.tags()[0].nbytes == 2 * MIB, "the consumers hold it"
    assert early.data_ptr() == late.data_ptr()
    assert float(early.sum()) == float(late.sum()) == 3000


# GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_the_gpu_a_heap_sleeps_and_wakes() -> None:
    arena = Arena("cuda:0", source="virtual")
    with arena.region("a", backup="cpu"):
        heap = arena.heap("64MiB")
    with heap:
        addresses = heap.malloc([100, 5000, 70_000])
        tensor = heap.tensor(int(addresses[1]), 1000, torch.float32).fill_(3)
        before = heap.stats()
        arena.pause()
        with pytest.raises(InvalidArgument, match="'a' is asleep"):
            _ = heap.handle
        arena.resume()
        assert heap.stats() == before
        heap.audit()
        assert bool((tensor == 3).all())
        heap.free(addresses)
        del tensor


@pytest.mark.proves("saver/memory-cuda")
@pytest.mark.gpu
def test_on_the_gpu_a_graph_gives_the_same_bits_after_a_sleep() -> None:
    arena = Arena("cuda:0", source="virtual")
    with arena.region("g", backup="cpu"):
        pool = arena.graph_pool()
        weights = arena.empty(1000, 1000).copy_(torch.rand(1000, 1000))
        result = arena.empty(1000, 1000)
    graph = torch.cuda.CUDAGraph()
    torch.mm(weights, weights)  # libraries are initialised before the capture
    torch.cuda.synchronize()
    with arena.capture(pool), torch.cuda.graph(graph):
        temporary = arena.empty(1000, 1000)
        torch.mm(weights, weights, out=temporary)
        torch.mm(temporary, weights, out=result)
        del temporary
    graph.replay()
    torch.cuda.synchronize()
    expected = result.clone()
    for _ in range(3):
        result.zero_()
        torch.cuda.synchronize()
        arena.pause("g")
        arena.resume("g")
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)
    pool.release()


@pytest.mark.gpu
@pytest.mark.alone
def test_on_the_gpu_the_margin_is_the_devices() -> None:
    arena = Arena("cuda:0", source="virtual")
    with arena.region("a"):
        tensor = arena.empty(64 * MIB)
    arena.pause()
    arena.empty_cache()  # idle handles of other arenas count as free
    arena.resume_margin = torch.cuda.mem_get_info()[0] - 128 * MIB
    with pytest.raises(OutOfMemory, match="must stay"):
        arena.resume()
    arena.resume_margin = 0
    arena.resume()
    assert float(tensor.fill_(1)[:10].sum()) == 10


@pytest.mark.gpu
def test_on_the_gpu_sleeping_memory_has_no_ipc_handle() -> None:
    """CUDA exports only what cudaMalloc gave, so no other process can hold memory that sleeps."""
    arena = Arena("cuda:0", source="virtual")
    with arena.region("a"):
        tensor = arena.full((1000,), 3.0)
    with pytest.raises(RuntimeError):
        tensor.untyped_storage()._share_cuda_()
    arena.pause()
    with pytest.raises(RuntimeError):
        tensor.untyped_storage()._share_cuda_()
    arena.resume()
