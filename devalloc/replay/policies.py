"""Which allocators a trace is replayed through, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from devalloc.errors import InvalidArgument
from devalloc.replay.engine import Allocator, Replay, Uncached, recorded_replay, replay
from devalloc.replay.trace import Trace
from devalloc.sources import Source

POLICIES: dict[str, Callable[[Source], Allocator]] = {"none": Uncached}
"""Makers of allocators. "none" caches nothing."""


def chosen_policies(names: Iterable[str]) -> list[str]:
    """The names, each once; all if there are none. Raises InvalidArgument for unknown ones."""
    chosen = list(dict.fromkeys(names)) or list(POLICIES)
    unknown = [name for name in chosen if name not in POLICIES]
    if unknown:
        raise InvalidArgument(
            f"no such policy: {', '.join(unknown)}; there are {', '.join(POLICIES)}"
        )
    return chosen


def replay_policies(trace: Trace, names: Iterable[str], capacity: int | None) -> list[Replay]:
    """A trace through the named policies, after what was recorded with it, if that is known."""
    recorded = recorded_replay(trace)
    replays = [replay(trace, POLICIES[name], name, capacity) for name in names]
    return [recorded, *replays] if recorded else replays
