"""Caches across a fork: the child must not have locks that nothing there would release.

The forking thread holds the locks of all caches during the fork, so that the child finds each cache
as it is between two calls. A thread that holds one of these locks may be waiting for another, in a
finalizer for instance. So if it cannot acquire one lock soon, the forking thread releases all of
them and starts again. A call that lasts longer is waiting for its source or its streams, and so is
not in the middle of any change: after some seconds the fork goes on, and the child gets a new lock.
"""

from __future__ import annotations

import operator
import os
import threading
import time
import weakref
from typing import Protocol

_SLICE_S = 0.05
_PATIENCE_S = 5.0


class Forkable(Protocol):
    """A cache, as a fork sees it."""

    @property
    def lock(self) -> threading.RLock:
        """What the forking thread holds."""

    def begin_in_child(self, held: bool) -> None:
        """Start again in the child; ``held`` says whether the forking thread had the lock."""


# References to the caches, so that copying the set is one operation that no thread interrupts.
_CACHES: set[weakref.ref[Forkable]] = set()
# The caches whose locks each thread that is about to fork holds.
_HELD: dict[int, list[Forkable]] = {}


def watch(cache: Forkable) -> None:
    """Hold the lock of ``cache`` during forks, as long as the cache exists."""
    _CACHES.add(weakref.ref(cache, _CACHES.discard))


def _living() -> list[Forkable]:
    # (Not `tuple`: a garbage collection may come in between and take a cache out of the set.)
    return [cache for ref in _CACHES.copy() if (cache := ref()) is not None]


def _before() -> None:
    caches = _living()
    deadline = time.monotonic() + _PATIENCE_S
    # Entered at once: Ctrl-C ends this function but not the fork, and locks must be released.
    held = _HELD[threading.get_ident()] = []
    while True:
        late = time.monotonic() > deadline
        for cache in caches:
            _hold(cache, 0 if late else _SLICE_S, held)
        if late or len(held) == len(caches):
            break
        while held:
            held.pop().lock.release()


def _hold(cache: Forkable, seconds: float, held: list[Forkable]) -> None:
    """Enter a cache in ``held`` if its lock can be acquired within ``seconds``."""
    acquire = operator.methodcaller("acquire", True, seconds)
    got: list[bool] = []
    try:
        # The list gets the answer in the C code that takes the lock: Ctrl-C cannot come in between.
        got.extend(map(acquire, (cache.lock,)))
    finally:
        if got == [True]:
            held.append(cache)


def _after_in_parent() -> None:
    for cache in _HELD.pop(threading.get_ident(), ()):
        cache.lock.release()


def _after_in_child() -> None:
    held = _HELD.pop(threading.get_ident(), [])
    _HELD.clear()  # of threads that do not exist in the child
    for cache in _living():
        cache.begin_in_child(cache in held)
    for cache in held:
        cache.lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before,
        after_in_parent=_after_in_parent,
        after_in_child=_after_in_child,
    )
