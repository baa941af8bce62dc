"""An allocation and its end, by the host's clock: `devalloc.Arena.empty` beside `torch.empty`.

`PATTERNS` are ways in which programs allocate; `parts` are the pieces of which the fast path
consists, each timed alone, and what would be used instead of them.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import torch

import devalloc
from benchmarks.harness import Samples
from devalloc.arena import tensors
from devalloc.arena.tensors import TensorStay, _blank

Empty = Callable[[tuple[int, ...]], torch.Tensor]

SHAPES = ((64, 64), (512, 512), (4096, 4096))
"""16 KiB, 1 MiB, 64 MiB of float32."""


def one(empty: Empty, shape: tuple[int, ...], turns: int) -> int:
    """A tensor that ends before the next of its shape is asked for."""
    for _ in range(turns):
        empty(shape)
    return turns


def layers(empty: Empty, shape: tuple[int, ...], turns: int) -> int:
    """16 tensors of four shapes, all alive, then gone together: a step of a program."""
    rows, columns = shape
    shapes = [(rows, columns // part) for part in (1, 2, 4, 8)] * 4
    steps = max(1, turns // 16)
    for _ in range(steps):
        held = [empty(each) for each in shapes]
        del held
    return 16 * steps


def changing(empty: Empty, shape: tuple[int, ...], turns: int) -> int:
    """No shape twice within 64 tensors: each is served by the policy, split off and merged
    again."""
    rows, columns = shape
    shapes = [(rows, columns - index) for index in range(64)]
    for index in range(turns):
        empty(shapes[index % 64])
    return turns


PATTERNS: dict[str, Callable[[Empty, tuple[int, ...], int], int]] = {
    "one": one,
    "layers": layers,
    "changing": changing,
}


def microseconds(work: Callable[[], int]) -> float:
    """Of one operation; ``work`` returns how many it did. Garbage collection is off."""
    gc.disable()
    try:
        begin = time.perf_counter()
        count = work()
        return (time.perf_counter() - begin) * 1e6 / count
    finally:
        gc.enable()


def measure(
    pattern: str,
    shape: tuple[int, ...],
    arena: devalloc.Arena,
    rounds: int,
    turns: int,
) -> list[tuple[str, list[Samples]]]:
    """Both allocators in turns, after a round that is not timed; microseconds per tensor."""

    def by_torch(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=arena.device)

    def by_arena(shape: tuple[int, ...]) -> torch.Tensor:
        return arena.empty(shape, torch.float32)

    work = PATTERNS[pattern]
    sides = [("torch", by_torch), ("devalloc", by_arena)]
    times: dict[str, list[float]] = {name: [] for name, _ in sides}
    for turn in range(rounds + 1):
        for name, empty in sides if turn % 2 == 0 else reversed(sides):
            took = microseconds(lambda empty=empty: work(empty, shape, turns))  # type: ignore[misc]
            if turn:
                times[name].append(took)
    pairs = zip(times["devalloc"], times["torch"], strict=True)
    ratio = Samples("ratio", [ours / theirs for ours, theirs in pairs], unit="ratio")
    return [
        ("torch", [Samples("pair", times["torch"], unit="us")]),
        ("devalloc", [Samples("pair", times["devalloc"], unit="us"), ratio]),
    ]


def parts(arena: devalloc.Arena, shape: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """What an `Arena.empty` and its end consist of, and alternatives."""
    cache, device = arena.cache, arena.device
    stream = cache.streams.current()
    key = shape, torch.float32, stream
    nbytes = 4 * shape[0] * shape[1]
    block = cache.malloc(nbytes, stream)
    stay = TensorStay(cache, key, block, nbytes)
    template, storage = stay._template, stay._storage
    blank = _blank(torch.float32, device)
    foreign = torch._C._construct_storage_from_data_pointer
    stacks = cache.reuse.stacks

    def three_counts() -> bool:
        return (
            tensors._uses_in_c(stay._handle) == stay._idle_in_c
            and tensors._uses_in_python(stay._storage) == stay._idle_in_python
            and not tensors._weak_references(stay._storage)
        )

    def engine() -> None:
        cache.free(cache.malloc(nbytes, stream))

    return {
        "nothing": lambda: None,
        "current-stream": cache.streams.current,
        "look-up": lambda: stacks.get((shape, torch.float32, stream)),
        "template-data": lambda: template.data,
        "weak-reference": lambda: weakref.ref(template),
        "three-counts": three_counts,
        "engine-pair": engine,
        "storage-over-pointer": lambda: foreign(block, device, nbytes),
        "tensor-over-storage": lambda: blank.data.set_(storage, 0, shape),
        "empty-tensor": lambda: torch.empty(0, dtype=torch.float32, device=device),
        "as-strided": lambda: template.as_strided(shape, (shape[1], 1)),
    }


def measure_part(call: Callable[[], object], rounds: int, turns: int) -> Samples:
    """Microseconds of one call, the loop around it included."""

    def work() -> int:
        for _ in range(turns):
            call()
        return turns

    microseconds(work)
    return Samples("part", [microseconds(work) for _ in range(rounds)], unit="us")
