"""Caches across a fork: no lock that nobody in the child would release.

The forking thread holds the locks of all caches meanwhile, so that the child finds each as it is
between two calls. Whoever has one of them may be waiting for another, in a finalizer for instance:
so one that cannot be had soon lets all go, and it begins again. A call that lasts longer waits for
its source or its streams, which is not in the middle of any change: after some seconds the fork
goes on, and the child has a new lock.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devalloc.cache.core import Core

_SLICE_S = 0.05
_PATIENCE_S = 5.0

# References, and not a set of the caches: a copy of it is one operation, which no thread divides.
_CACHES: set[weakref.ref[Core]] = set()
# What each thread that is about to fork holds.
_HELD: dict[int, list[Core]] = {}


def watch(cache: Core) -> None:
    """Hold the lock of ``cache`` across forks, as long as it lives."""
    _CACHES.add(weakref.ref(cache, _CACHES.discard))


def _living() -> list[Core]:
    return [cache for ref in tuple(_CACHES) if (cache := ref()) is not None]


def _before() -> None:
    caches = _living()
    deadline = time.monotonic() + _PATIENCE_S
    # Known at once: Ctrl-C ends this function and not the fork, and what is held must be let go.
    held = _HELD[threading.get_ident()] = []
    while True:
        late = time.monotonic() > deadline
        for cache in caches:
            if cache.hold(0 if late else _SLICE_S):
                held.append(cache)
        if late or len(held) == len(caches):
            break
        while held:
            held.pop().let_go()


def _after_in_parent() -> None:
    for cache in _HELD.pop(threading.get_ident(), ()):
        cache.let_go()


def _after_in_child() -> None:
    held = _HELD.pop(threading.get_ident(), [])
    _HELD.clear()  # of threads that are not here
    for cache in _living():
        cache.begin_in_child(cache in held)
    for cache in held:
        cache.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before,
        after_in_parent=_after_in_parent,
        after_in_child=_after_in_child,
    )
