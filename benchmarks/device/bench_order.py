"""Measure what order costs: atomics of each order, fences, round trips, elements per thread.

    devalloc bench order                 # rows go to benchmarks/results/order/

One program alone shows latency: microseconds per turn of a loop in which each atomic waits for the
one before. Names of rows: ``vector-relaxed-512-1`` is kernel, order, turns and programs; ``lanes``
and ``warps`` are columns (128 lanes of one warp are four elements per thread); ``-fenced`` has the
heap's fence after each atomic. Every row checks first that no addition was lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import rich

from benchmarks.options import require_device
from benchmarks.results import RESULTS, RowFile

if TYPE_CHECKING:
    import torch

ORDERS = ("relaxed", "acquire", "release", "acq_rel")
FOLDER = RESULTS / "order"
"""Apart from the rows of the heap: the newest of those is what the tables show."""


@dataclass(frozen=True)
class Case:
    """One loop: `kernel` is vector, scalar or bare; `programs` run it at once."""

    kernel: str
    order: str
    fenced: bool
    lanes: int
    warps: int
    programs: int = 1

    @property
    def pattern(self) -> str:
        """Such as ``vector-acquire`` or ``bare-fenced``."""
        parts = (self.kernel, self.order, "fenced" if self.fenced else "")
        return "-".join(part for part in parts if part)


def all_cases() -> list[Case]:
    """Every case: orders, fences, elements per thread, warps, and many programs at once."""
    cases = [Case("bare", "", fenced, 1, 1) for fenced in (False, True)]
    cases += [Case("bare", "", True, 1, warps) for warps in (4, 8)]
    for order in ORDERS:
        cases += [Case("scalar", order, False, 1, warps) for warps in (1, 4)]
        cases += [Case("vector", order, False, lanes, 1) for lanes in (32, 64, 128, 256, 512)]
        cases.append(Case("vector", order, False, 512, 4))
        cases.append(Case("vector", order, False, 128, 1, programs=1056))
    cases += [Case("scalar", "relaxed", True, 1, warps) for warps in (1, 4)]
    cases += [Case("vector", "relaxed", True, 128, 1), Case("vector", "relaxed", True, 512, 4)]
    return cases


def launcher(
    case: Case, words: torch.Tensor, seen: torch.Tensor, turns: int
) -> Callable[[], object]:
    """A launch of the case's kernel."""
    from benchmarks.device import order_kernels as kernels

    grid = (case.programs,)
    options: dict[str, object] = {"FENCED": case.fenced, "num_warps": case.warps}
    if case.kernel == "bare":
        return lambda: kernels.bare_kernel[grid](words, seen, turns, **options)
    options["SEM"] = case.order
    if case.kernel == "scalar":
        return lambda: kernels.scalar_kernel[grid](words, seen, turns, **options)
    return lambda: kernels.vector_kernel[grid](words, seen, turns, LANES=case.lanes, **options)


def measure(case: Case, device: torch.device, turns: int, rounds: int) -> dict[str, object]:
    """The columns of one row, in microseconds per turn.

    Raises
    ------
    WrongResult
        If an addition was lost, or a wrong value returned.
    """
    import torch

    from benchmarks.harness import Samples, WrongResult, clock_for

    count = case.programs * case.lanes
    words = torch.zeros(count, dtype=torch.int64, device=device)
    seen = torch.zeros_like(words)
    launch = launcher(case, words, seen, turns)
    launch()
    added = 0 if case.kernel == "bare" else turns
    expected = turns * (turns - 1) // 2
    if not bool((words == added).all()) or not bool((seen[: _stored(case)] == expected).all()):
        raise WrongResult(f"{case}: additions were lost")
    samples = Samples("turn", unit="us")
    clock = clock_for(device)
    for _ in range(rounds):
        value = clock.milliseconds(clock.start(launch))
        if value is not None:
            samples.values.append(value * 1e3 / turns)
    if not samples.values:
        raise WrongResult(f"{case}: the host was too slow for every sample")
    return {
        "row": f"{case.pattern}-{turns}-{case.programs}",
        "pattern": case.pattern,
        "size": 8,
        "n": turns,
        "param": case.programs,
        "lanes": case.lanes,
        "warps": case.warps,
        "allocator": "none",
        "state": "warm",
        **samples.record(),
    }


def _stored(case: Case) -> int:
    return case.programs * (case.lanes if case.kernel == "vector" else 1)


@click.command("order")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder of results.")
@click.option("--turns", type=click.IntRange(1), default=512, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(out: Path, turns: int, rounds: int, device: str) -> None:
    """Measure what order between memory accesses costs: atomics, fences, round trips."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    require_device(device)
    import torch

    from benchmarks.harness import WrongResult, provenance

    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    source = provenance(place, seed=0, heap_bytes=0)
    file = RowFile(out)
    for case in all_cases():
        try:
            row = measure(case, place, turns, rounds)
        except WrongResult as error:
            raise click.ClickException(str(error)) from error
        file.write({**source, **row})
        shape = f"{case.programs} x {case.lanes} x {case.warps}"
        rich.print(f"{row['row']:<28} {shape:>14} {float(str(row['median'])):10.4f} us a turn")
    rich.print(f"rows: {file.path}")


if __name__ == "__main__":
    main()
