"""Blocks kept for reuse: which requests get them, which do not, and that no other call shows it."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from devalloc import Arena, InvalidArgument
from devalloc.arena.cache import reuse as module
from tests.arena.support import MIB, FakeStreams, run_watched

SHAPE = (1000,)


@pytest.fixture
def arena() -> Arena:
    return Arena(source="host")


def parked(arena: Arena) -> int:
    return sum(len(stack) for stack in arena.cache.reuse.stacks.values())


@pytest.mark.proves("tiny/tests-same", "library/tensor-same")
def test_the_next_equal_tensor_takes_the_block_and_nothing_else_does(arena: Arena) -> None:
    tensor = arena.empty(SHAPE).fill_(7)
    address = tensor.data_ptr()
    del tensor
    assert parked(arena) == 1
    again = arena.empty(SHAPE)
    assert (again.data_ptr(), parked(arena)) == (address, 0)
    assert arena.empty(SHAPE).data_ptr() != address
    del again
    assert parked(arena) == 2
    other = arena.empty(SHAPE, torch.int32)
    assert parked(arena) == 0, "the engine was asked, and so has freed them"
    assert other.data_ptr() == address, "lowest address, as the policy says"


def test_a_tensor_has_nothing_of_the_one_before(arena: Arena) -> None:
    first = arena.empty(SHAPE).fill_(1).requires_grad_()
    first.note = "mine"  # type: ignore[attr-defined]
    (first * 2).sum().backward()
    first.grad = None
    first.requires_grad_(False).resize_(10)
    with torch.no_grad():
        first.add_(1)
    del first
    assert parked(arena) == 1
    second = arena.empty(SHAPE)
    assert second.shape == SHAPE
    assert not second.requires_grad
    assert second.grad_fn is None
    assert second._version == 0
    assert not second._is_view()
    assert not hasattr(second, "note")


def _graph(tensor: torch.Tensor) -> object:
    return (torch.ones(SHAPE, requires_grad=True) * tensor).sum()


KEEPERS: dict[str, Callable[[torch.Tensor], object]] = {
    "view": lambda tensor: tensor[3:],
    "detached": lambda tensor: tensor.detach(),
    "saved for the backward pass": _graph,
    "storage": lambda tensor: tensor.untyped_storage(),
    "typed storage": lambda tensor: tensor.storage(),
    "numpy": lambda tensor: tensor.numpy(),
    "dlpack": lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
    "parameter": torch.nn.Parameter,
    "data": lambda tensor: tensor.data,
}


@pytest.mark.proves("library/tensor-whose")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
@pytest.mark.parametrize("turns", [0, 3])
def test_what_refers_to_the_memory_keeps_it(
    arena: Arena, keep: Callable[[torch.Tensor], object], turns: int
) -> None:
    for _ in range(turns):
        arena.empty(SHAPE)
    tensor = arena.empty(SHAPE).fill_(5)
    address = tensor.data_ptr()
    kept = keep(tensor)
    del tensor
    assert parked(arena) == 0
    others = [arena.empty(SHAPE).fill_(9) for _ in range(5)]
    assert address not in [other.data_ptr() for other in others]
    assert arena.stats()["allocation.all.current"] == 6
    del kept
    assert arena.stats()["allocation.all.current"] == 5
    arena.cache.audit()


MOVES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda tensor: setattr(tensor, "data", torch.zeros(SHAPE)),
    "set_": lambda tensor: tensor.set_(),
    "another of the arena": lambda tensor: tensor.set_(OTHER.empty(SHAPE)),
}

OTHER = Arena(source="host")

ENGINE: dict[str, Callable[[Arena], object]] = {
    "nothing": lambda arena: None,
    "stats": lambda arena: arena.stats(),
    "empty_cache": lambda arena: arena.empty_cache(),
    "close": lambda arena: arena.close(),
}


@pytest.mark.proves("library/tensor-whose")
@pytest.mark.parametrize("ask", ENGINE.values(), ids=ENGINE)
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("keeper", ["detached", "parameter", "numpy", "dlpack", "view"])
def test_who_has_the_memory_of_a_tensor_that_was_moved_keeps_it(
    arena: Arena,
    ask: Callable[[Arena], object],
    move: Callable[[torch.Tensor], object],
    keeper: str,
) -> None:
    """Its place in the counts is filled by another, who looks like the tensor that ends."""
    tensor = arena.empty(SHAPE).fill_(5)
    address = tensor.data_ptr()
    kept = KEEPERS[keeper](tensor)
    move(tensor)
    del tensor
    ask(arena)
    if not arena.closed:
        others = [arena.empty(SHAPE).fill_(9) for _ in range(3)]
        assert address not in [other.data_ptr() for other in others]
        del others
    assert (ctypes.c_float * SHAPE[0]).from_address(address)[:] == [5] * SHAPE[0]
    assert arena.stats()["allocation.all.current"] == 1
    del kept
    stats = arena.stats()
    assert stats["allocation.all.current"] == 0
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"]
    arena.cache.audit()


def test_who_looks_later_is_not_there_any_more(arena: Arena) -> None:
    """A weak reference is left of who had the memory; the storage is not another's under it."""
    tensor = arena.empty(SHAPE)
    kept = tensor.detach()
    tensor.set_()
    del tensor
    storage = weakref.ref(kept.untyped_storage())
    del kept
    arena.empty(SHAPE)
    assert storage() is None
    assert arena.stats()["allocation.all.current"] == 0


@pytest.mark.parametrize("held", [False, True])
def test_a_storage_in_shared_memory_is_not_parked(arena: Arena, held: bool) -> None:
    """What was the block's storage lies elsewhere then, where another process may write."""
    tensor = arena.empty(SHAPE)
    address = tensor.data_ptr()
    if held:  # shared by another, when the tensor has gone
        kept = tensor.detach()
        tensor.set_()
        del tensor
        tensor = kept
        del kept
    tensor.share_memory_()
    assert tensor.data_ptr() != address
    del tensor
    after = arena.empty(SHAPE)
    assert not after.is_shared()
    assert after.data_ptr() == address
    assert arena.stats()["allocation.all.current"] == 1


def test_a_weak_reference_to_the_storage_sees_it_end(arena: Arena) -> None:
    tensor = arena.empty(SHAPE)
    ended: list[bool] = []
    storage = weakref.ref(tensor.untyped_storage(), lambda _: ended.append(True))
    del tensor
    assert ended == [True]
    assert storage() is None
    assert parked(arena) == 0


@pytest.mark.proves("library/tensor-same")
def test_statistics_are_those_of_an_engine_that_is_always_asked() -> None:
    def program(arena: Arena, told: bool) -> dict[str, int]:
        held = []
        for step in range(200):
            tensor = arena.empty((100 + 300 * (step % 3),))
            if step % 7 == 0:
                held.append(tensor)
            if step % 50 == 49:
                held.clear()
            del tensor
            if told:
                arena.cache.process_events()  # does nothing but free what is kept for reuse
        return {name: value for name, value in arena.stats().items() if "inactive" not in name}

    found = [program(Arena(source="host"), told) for told in (False, True)]
    assert found[0] == found[1]
    assert found[0]["allocation.all.allocated"] == 200


def test_turns_are_counted_once(arena: Arena) -> None:
    kept = [arena.empty(SHAPE)]
    for _ in range(10):
        kept.append(arena.empty((5,)))
        kept.pop()
    for _ in range(3):
        stats = arena.stats()
        assert stats["allocation.all.allocated"] == 11
        assert stats["allocation.all.freed"] == 10
    arena.cache.reset_accumulated()
    for _ in range(5):
        arena.empty((5,))
    stats = arena.stats()
    assert (stats["allocation.all.allocated"], stats["allocation.all.freed"]) == (5, 5)
    assert stats["requested_bytes.all.allocated"] == 5 * 20


def test_a_collection_amid_the_statistics_may_end_tensors(arena: Arena) -> None:
    """After so many allocations: of all the places where it may happen, each in its turn."""
    kept = [arena.empty((7 + index,)) for index in range(40)]
    before = gc.get_threshold()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for allocations in range(60):
            gc.collect()
            tensor = arena.empty((5,))
            cycle: list[object] = [tensor, tensor.detach()]
            cycle.append(cycle)
            del tensor, cycle
            gc.set_threshold(gc.get_count()[0] + allocations)
            gc.enable()
            arena.stats()
            gc.disable()
    finally:
        gc.set_threshold(*before)
        if was_enabled:
            gc.enable()
    gc.collect()
    assert arena.stats()["allocation.all.current"] == len(kept)
    arena.cache.audit()


@pytest.mark.proves("torch/reuse-owner")
def test_streams_do_not_share(arena: Arena) -> None:
    address = arena.empty(SHAPE, stream=5).data_ptr()
    assert parked(arena) == 1
    assert arena.empty(SHAPE, stream=6).data_ptr() != address
    assert arena.empty(SHAPE, stream=5).data_ptr() == address


def test_a_forgotten_streams_tensors_are_not_parked_under_its_name(arena: Arena) -> None:
    """Its handle may be that of a new stream, which is not behind the one that owns them now."""
    tensor = arena.empty(SHAPE, stream=5)
    address = tensor.data_ptr()
    arena.cache.forget_stream(5)
    del tensor
    assert parked(arena) == 0
    assert arena.empty(SHAPE, stream=5).data_ptr() != address
    assert arena.empty(SHAPE, stream=0).data_ptr() == address


def test_what_ends_while_its_stream_is_forgotten_is_not_parked_under_its_name() -> None:
    arena = Arena(source="host")
    held = [arena.empty(SHAPE, stream=5)]
    address = held[0].data_ptr()

    class Slow(FakeStreams):
        def synchronize(self) -> None:
            held.clear()  # as another thread would, meanwhile
            assert parked(arena) == 0

    arena.cache._store.streams = Slow()
    arena.cache.forget_stream(5)
    assert arena.empty(SHAPE, stream=5).data_ptr() != address
    assert arena.empty(SHAPE, stream=0).data_ptr() == address
    arena.cache.audit()


def test_uses_by_other_streams_are_waited_for() -> None:
    arena = Arena(source="host")
    streams = FakeStreams()
    arena.cache._store.streams = streams
    tensor = arena.empty(SHAPE)
    address = tensor.data_ptr()
    arena.record_stream(tensor, 3)
    del tensor
    assert parked(arena) == 0
    assert streams.queued == {3: 1}
    assert arena.empty(SHAPE).data_ptr() != address
    streams.advance(3)
    assert arena.empty(SHAPE).data_ptr() == address


def test_a_capture_takes_nothing_from_outside(arena: Arena) -> None:
    address = arena.empty(SHAPE).data_ptr()
    with arena.graph_pool() as pool, arena.capture(pool):
        inner = arena.empty(SHAPE)
        assert inner.data_ptr() != address
        del inner
        assert parked(arena) == 0


def test_history_has_every_event(arena: Arena) -> None:
    arena.empty(SHAPE)
    arena.cache.record_history()
    for _ in range(4):
        arena.empty(SHAPE)
    (trace,) = arena.snapshot()["device_traces"]  # type: ignore[misc]
    assert [entry["action"] for entry in trace].count("alloc") == 4


def test_bad_shapes_are_refused_although_something_equal_is_parked(arena: Arena) -> None:
    arena.empty((2, 3))
    with pytest.raises(InvalidArgument):
        arena.empty((2.0, 3.0))  # type: ignore[arg-type]
    arena.empty((2, 3))
    with pytest.raises(InvalidArgument):
        arena.empty((-2, -3))
    assert arena.empty([2, 3]).shape == (2, 3)


@pytest.mark.parametrize("inside", [False, True])
def test_inference_mode_leaves_no_trace(inside: bool) -> None:
    arena = Arena(source="host")
    with torch.inference_mode(inside):
        arena.empty((17,), torch.complex64)
    outside = arena.empty((17,), torch.complex64)
    assert not outside.is_inference()
    (torch.ones(17, requires_grad=True) * outside).sum()


def test_closing_and_dropping_free_what_is_parked(arena: Arena) -> None:
    arena.empty(SHAPE)
    cache = arena.cache
    arena.close()
    assert cache.reserved == 0
    dropped = Arena(source="host")
    cache = dropped.cache
    late, early = dropped.empty(SHAPE), dropped.empty(SHAPE)
    del early, dropped
    gc.collect()
    assert cache.reserved == 2 * MIB
    del late
    assert cache.reserved == 0
    assert not [stay for stay in module._STAYS if stay.reuse is cache.reuse]


def test_a_late_push_is_found(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine looks, and closes, between a tensor's look at the stack and its push."""
    engine = arena.cache
    tensors = [arena.empty(SHAPE), arena.empty(SHAPE), arena.empty(SHAPE)]
    events = [lambda: engine.process_events(), lambda: engine.close()]

    class Late(module.Stack):
        def append(self, stay: module.Stay) -> None:
            if events:
                events.pop(0)()
            super().append(stay)

    monkeypatch.setattr(module, "Stack", Late)
    while tensors:
        tensors.pop()
        engine.audit()
    assert not events
    assert engine.reserved == 0
    assert not [stay for stay in module._STAYS if stay.reuse is engine.reuse]


@pytest.mark.parametrize("policy", ["torch", "bfc"])
def test_threads(policy: str) -> None:
    """Each writes what it was given and reads it back; a collection and the engine interfere."""
    arena = Arena(source="host", policy=policy, limit="64MiB")
    errors: list[BaseException] = []
    stop = threading.Event()

    def work(seed: int) -> None:
        try:
            held: list[tuple[torch.Tensor, int]] = []
            for step in range(2500):
                value = seed * 100_000 + step
                tensor = arena.empty((64 * (1 + step % 3),), torch.int64).fill_(value)
                if step % 5 == 0:
                    cycle: list[object] = [tensor]
                    cycle.append(cycle)
                held.append((tensor, value))
                del tensor
                if len(held) > step % 9:
                    kept, expected = held.pop(0)
                    assert bool((kept == expected).all()), "another thread has this memory"
        except BaseException as error:
            errors.append(error)

    def look() -> None:
        while not stop.wait(0.001):
            arena.cache.audit()
            arena.stats()

    run_watched([partial(work, seed) for seed in range(4)], look, stop)
    assert not errors, errors[0]
    gc.collect()
    stats = arena.stats()
    assert stats["allocation.all.current"] == 0
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] == 10_000
    arena.empty_cache()
    assert arena.cache.reserved == 0


def test_the_process_ends_cleanly() -> None:
    program = (
        "import devalloc; arena = devalloc.Arena(source='host'); live = arena.empty(5); "
        "arena.empty(7); cycle = [live]; cycle.append(cycle)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
