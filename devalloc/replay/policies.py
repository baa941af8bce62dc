"""The allocators that a trace can be replayed through, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from devalloc.cache import POLICIES as CACHE_POLICIES
from devalloc.cache import Cache, Policy, make_policy
from devalloc.errors import InvalidArgument
from devalloc.replay.engine import Allocator, Replay, Uncached, recorded_replay, replay
from devalloc.replay.trace import Trace
from devalloc.sources import Source


class Cached:
    """The caching allocator under one policy."""

    def __init__(self, source: Source, policy: str | Policy) -> None:
        self._cache = Cache(source, policy)
        # The bound methods themselves, so that the clock measures no detour.
        self.alloc = self._cache.malloc
        self.free = self._cache.free

    @property
    def peak_allocated(self) -> int:
        return self._cache.stats()["allocated_bytes.all.peak"]


ALLOCATORS: dict[str, Callable[[Source], Allocator]] = {
    "none": Uncached,
    **{name: partial(Cached, policy=name) for name in CACHE_POLICIES},
    **{
        f"{name}-expandable": partial(Cached, policy=make_policy(name, expandable_segments=True))
        for name in ("torch", "frugal")
    },
}
"""Makers of allocators: "none" caches nothing, the others are the policies of the cache, two of
them also with expandable segments."""


def chosen_policies(names: Iterable[str]) -> list[str]:
    """The given names, each once, or else all. Raises InvalidArgument for unknown ones."""
    chosen = list(dict.fromkeys(names)) or list(ALLOCATORS)
    unknown = [name for name in chosen if name not in ALLOCATORS]
    if unknown:
        raise InvalidArgument(
            f"no such policy: {', '.join(unknown)}; there are {', '.join(ALLOCATORS)}"
        )
    return chosen


def replay_policies(trace: Trace, names: Iterable[str], capacity: int | None) -> list[Replay]:
    """Replays of a trace through the named policies, after the recorded result if there is one."""
    recorded = recorded_replay(trace)
    replays = [replay(trace, ALLOCATORS[name], name, capacity) for name in names]
    return [recorded, *replays] if recorded else replays
