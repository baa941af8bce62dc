"""The committed traces through every policy, as tables for docs/guide/replay.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.results import ROOT
from benchmarks.tables.tables import table
from devalloc.cache import FrugalPolicy
from devalloc.replay.engine import Allocator, Replay, recorded_replay, replay
from devalloc.replay.files import load_trace
from devalloc.replay.policies import ALLOCATORS, Cached
from devalloc.sources import Source

TRACES = ROOT / "benchmarks" / "traces"

BIG_SEGMENTS = "frugal, 256 MiB"
"""The policy "frugal" with ``medium_segment`` of so much: fewest calls of the source."""


def _big_segments(source: Source) -> Allocator:
    return Cached(source, FrugalPolicy(medium_segment=256 << 20))


REPLAYED: Mapping[str, Callable[[Source], Allocator]] = {
    **ALLOCATORS,
    BIG_SEGMENTS: _big_segments,
}


def replay_trace(path: Path, names: tuple[str, ...] = tuple(REPLAYED)) -> dict[str, Replay]:
    """A recorded trace through the named allocators, and what was recorded."""
    trace = load_trace(path)
    recorded = recorded_replay(trace)
    assert recorded is not None, f"{path} says nothing of the allocator it was recorded with"
    found = {name: replay(trace, REPLAYED[name], name) for name in names}
    return {"recorded": recorded, **found}


def tables_of(replays: dict[str, dict[str, Replay]]) -> str:
    """Peaks and calls of the source, by trace; ``replays`` by the trace's name."""
    names = ["recorded", *REPLAYED]
    peaks, calls = [], []
    shares: dict[str, list[float]] = {name: [] for name in names}
    for trace, found in replays.items():
        peaks.append((trace, *(f"{found[name].peak_reserved / (1 << 30):.4g}" for name in names)))
        counts = ((found[name].source_allocations, found[name].source_frees) for name in names)
        calls.append((trace, *(f"{taken}+{given}" for taken, given in counts)))
        for name in names:
            shares[name].append(found[name].peak_reserved / found["recorded"].peak_reserved)
    means = (f"{sum(share) / len(share):.3f}" for share in shares.values())
    peaks.append(("mean over recorded", *means))
    return "\n\n".join(
        (
            "Peak reserved, GiB:",
            table(("trace", *names), 1, peaks),
            "Calls of the source, segments taken + given back:",
            table(("trace", *names), 1, calls),
        )
    )


def replay_all(folder: Path = TRACES) -> dict[str, dict[str, Replay]]:
    """All committed traces; half a minute."""
    return {
        path.name.removesuffix(".csv.gz"): replay_trace(path)
        for path in sorted(folder.glob("*.csv.gz"))
    }
