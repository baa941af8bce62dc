"""A training run with PyTorch's allocator and the same run inside `devalloc.Arena.use`.

A decoder in mixed precision, deterministic, whose batches change their length with every step. One
run makes the model and trains it; the two kinds take turns, and each begins with nothing cached.
A step is timed by the host, from its batch to its loss, which waits for the device: what an
allocator costs is seen only if it makes the device wait.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.arena.trace_workloads import Transformer
from benchmarks.harness import Samples, WrongResult


@dataclass(frozen=True)
class Program:
    """What is trained; steps before ``warm`` are not timed."""

    layers: int = 4
    width: int = 256
    batch: int = 16
    longest: int = 256
    steps: int = 200
    warm: int = 20
    seed: int = 0


TINY = Program(layers=1, width=16, batch=2, longest=16, steps=4, warm=1)


@dataclass
class Run:
    """What one run did.

    Attributes
    ----------
    losses : list of float
        Of every step.
    milliseconds : list of float
        Of the steps after the warm ones.
    warm_calls, calls : int
        Segments taken from the device until the warm steps were done, and in all.
    peak_bytes : int
        Most bytes taken from the device.
    """

    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    warm_calls: int = 0
    calls: int = 0
    peak_bytes: int = 0


class Place(Protocol):
    """Where a run takes its memory from."""

    name: str

    def inside(self) -> AbstractContextManager[object]:
        """Around a run."""
        ...

    def calls(self) -> int:
        """Segments taken from the device so far."""
        ...

    def peak_bytes(self) -> int:
        """Most bytes taken from the device."""
        ...

    def require_all_inside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise WrongResult unless the memory of a run, ``tensors`` too, came from here."""
        ...

    def end(self) -> None:
        """Give everything back; raises WrongResult if something is left."""
        ...


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Sums in a fixed order, so that losses can be equal and not only close.

    On a GPU cuBLAS needs ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` in the environment beforehand.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def train(program: Program, device: torch.device, place: Place) -> Run:
    """One run, from making the model to its end."""
    torch.manual_seed(program.seed)
    draw = random.Random(program.seed)
    batches = [
        torch.randint(
            Transformer.VOCABULARY,
            (program.batch, draw.randint(program.longest // 4, program.longest) + 1),
        )
        for _ in range(program.steps)
    ]
    run = Run()
    with deterministic(), place.inside():
        model = Transformer(program.layers, program.width, heads=8).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for index, batch in enumerate(batches):
            begin = time.perf_counter()
            run.losses.append(_step(model, optimizer, batch.to(device)))
            if index >= program.warm:
                run.milliseconds.append((time.perf_counter() - begin) * 1e3)
            else:
                run.warm_calls = place.calls()
    run.calls = place.calls()
    run.peak_bytes = place.peak_bytes()
    place.require_all_inside(_tensors(model, optimizer))
    return run


def _step(model: Transformer, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    optimizer.zero_grad()
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits, _ = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def _tensors(model: Transformer, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
        state: dict[str, Any] = optimizer.state[parameter]
        # Adam counts its steps in a tensor on the CPU.
        yield from (value for value in state.values() if value.device == parameter.device)


# Places -------------------------------------------------------------------------------------------


class PytorchPlace:
    """PyTorch's own allocator; on the CPU, which has no segments, nothing is counted."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._before = 0
        if self._cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_stats()["num_device_alloc"]

    def inside(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def calls(self) -> int:
        return torch.cuda.memory_stats()["num_device_alloc"] - self._before if self._cuda else 0

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved() if self._cuda else 0

    def require_all_inside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Where else."""

    def end(self) -> None:
        if self._cuda:
            torch.cuda.empty_cache()


class ArenaPlace:
    """An arena's source, by `devalloc.Arena.use`."""

    name = "devalloc"

    def __init__(self, device: torch.device) -> None:
        import devalloc

        torch.cuda.empty_cache()
        self._arena = devalloc.Arena(device, source="cuda")
        self._plain_before = self._plain_segments()

    def inside(self) -> AbstractContextManager[object]:
        return self._arena.use()

    def calls(self) -> int:
        return self._arena.stats()["outside_segment.allocated"]

    def peak_bytes(self) -> int:
        # PyTorch gives nothing back in a run, so what it has at the end is the most.
        return self._arena.stats()["outside_bytes.current"]

    @staticmethod
    def _plain_segments() -> dict[int, int]:
        """Address and bytes of what PyTorch has of the device itself."""
        return {
            segment["address"]: segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == (0, 0)
        }

    def require_all_inside(self, tensors: Iterable[torch.Tensor]) -> None:
        new = self._plain_segments().keys() - self._plain_before.keys()
        if new:
            raise WrongResult(f"{len(new)} segments were taken past the arena")
        for tensor in tensors:
            at = tensor.untyped_storage().data_ptr()
            for start, nbytes in self._plain_before.items():
                if start <= at < start + nbytes:
                    raise WrongResult(f"a tensor of {tuple(tensor.shape)} lies outside the arena")

    def end(self) -> None:
        self._arena.empty_cache()
        stats = self._arena.stats()
        taken, given = stats["outside_segment.allocated"], stats["outside_segment.freed"]
        left = stats["outside_bytes.current"] + stats["reserved_bytes.all.current"]
        self._arena.close()
        if left or taken != given:
            raise WrongResult(f"{left} B are left: {taken} segments taken, {given} given back")


# Rounds -------------------------------------------------------------------------------------------


def compare(
    program: Program,
    device: torch.device,
    places: list[Callable[[torch.device], Place]],
    rounds: int,
) -> list[tuple[str, list[Samples]]]:
    """Rounds in which the places take turns, in alternating order, after one that is not timed.

    Returns
    -------
    list of (str, list of Samples)
        For each place: steps (the median of each run), the segments it took until it was warm, and
        after that; for places but the first also its time over the first's, round by round.

    Raises
    ------
    WrongResult
        If losses differ by a bit, memory came from elsewhere, or something is left.
    """
    runs: dict[str, list[Run]] = {}
    names: list[str] = []
    expected: list[float] | None = None
    for turn in range(rounds + 1):
        for make in places if turn % 2 == 0 else reversed(places):
            place = make(device)
            run = train(program, device, place)
            gc.collect()
            place.end()
            expected = expected or run.losses
            if run.losses != expected:
                at = next(i for i, pair in enumerate(zip(run.losses, expected)) if len({*pair}) > 1)  # noqa: B905
                raise WrongResult(
                    f"step {at} of {place.name}: the loss is {run.losses[at]!r}, and "
                    f"{expected[at]!r} in the first run"
                )
            if turn == 0:
                names.append(place.name)
            else:
                runs.setdefault(place.name, []).append(run)
    times = {name: [statistics.median(r.milliseconds) for r in runs[name]] for name in names}
    results = []
    for name in names:
        peak = max(run.peak_bytes for run in runs[name])
        found = [Samples("step", times[name], peak_bytes=peak)]
        warm = [float(run.warm_calls) for run in runs[name]]
        later = [float(run.calls - run.warm_calls) for run in runs[name]]
        found += [Samples("segments", warm, unit="calls"), Samples("later", later, unit="calls")]
        if name != names[0]:
            pairs = zip(times[name], times[names[0]], strict=True)
            found.append(Samples("ratio", [ours / theirs for ours, theirs in pairs], unit="ratio"))
        results.append((name, found))
    return results
