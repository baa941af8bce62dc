"""Idle handles of physical memory, kept per device to be mapped again, and their release.

To map an idle handle is cheaper than to make one and release it, above all for large ones, so a
limited number of bytes is kept. What exceeds the limit is
released by a thread in the background, the oldest first. When the device runs out of memory,
everything idle is released at once, and the device is asked again: handles cost only time, and
never memory that another user of this pool needs.

Concurrency: no locks around the state. Every step is one operation on a list or a deque, which is
atomic, so a free may come in a finalizer, in the middle of any call. What a step removes,
no other thread has until the next step adds it. The one lock only lets a caller wait for the
thread's release that is under way, for a bounded time.
"""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch

from devalloc.common.cleanup import call_for_finalizers
from devalloc.errors import OutOfMemory
from devalloc.sizes import parse_size
from devalloc.sources.virtual_calls import Pages

DEFAULT_IDLE_LIMIT = 1 << 30
_RELEASE_WAIT_S = 1.0
"""How long a caller who needs memory waits for one release that is under way."""


class Handle(NamedTuple):
    """``nbytes`` of physical memory; ``value`` is the driver's. ``number`` grows with time."""

    nbytes: int
    value: Any
    number: int


class HandlePool:
    """The idle handles of one device.

    Parameters
    ----------
    pages : Pages
        What makes and releases handles.
    limit : int or str
        Bytes of idle handles that are kept; `limit` may be changed later.
    """

    def __init__(self, pages: Pages, limit: int | str = DEFAULT_IDLE_LIMIT) -> None:
        self.pages = pages
        self._limit = parse_size(limit)
        self._numbers = itertools.count()
        # By size, the oldest first. Sizes stay: there are only as many as multiples of the
        # granularity up to the largest handle.
        self._idle: dict[int, list[Handle]] = {}
        self._leaving: deque[Handle] = deque()
        self._busy = threading.RLock()
        _ALL.add(self)
        self.created = 0
        """Handles made so far."""
        self.reused = 0
        """Handles mapped again so far."""

    @property
    def limit(self) -> int:
        """Bytes of idle handles that are kept."""
        return self._limit

    @limit.setter
    def limit(self, limit: int | str) -> None:
        self._limit = parse_size(limit)
        self._shrink(self._limit)

    @property
    def idle(self) -> int:
        """Bytes in handles that are not mapped, those about to be released included."""
        kept = sum(nbytes * len(handles) for nbytes, handles in tuple(self._idle.items()))
        return kept + sum(handle.nbytes for handle in tuple(self._leaving))

    def take(self, nbytes: int) -> tuple[Handle, bool]:
        """A handle of exactly ``nbytes`` bytes, and whether it is new; raises OutOfMemory.

        If the device is out of memory, all idle handles are released first.
        """
        _RELEASER.start()  # here, because `give` may run in a finalizer, which must start no thread
        try:
            handle = self._idle[nbytes].pop()
        except (KeyError, IndexError):
            return self._make(nbytes), True
        self.reused += 1
        return handle, False

    def _make(self, nbytes: int) -> Handle:
        try:
            value = self.pages.create(nbytes)
        except OutOfMemory:
            self.trim()
            value = self.pages.create(nbytes)
        self.created += 1
        return Handle(nbytes, value, next(self._numbers))

    def give(self, handle: Handle, keep: bool = True) -> None:
        """Take a handle that is not mapped. Without ``keep`` it is released before this ends.

        If the driver refuses to release it, it stays idle, and the error goes to
        `sys.unraisablehook`: the caller has unmapped it all the same.
        """
        if not keep:
            call_for_finalizers(self._release, (handle,))
            return
        # A number of its own each time: the age is that of being idle.
        idle = handle._replace(number=next(self._numbers))
        self._idle.setdefault(handle.nbytes, []).append(idle)
        if self._shrink(self._limit):
            _RELEASER.wake(self)

    def trim(self, keep: int | str = 0) -> int:
        """Release idle handles, the oldest first, down to ``keep`` bytes; returns the bytes.

        Waits for a release that is under way in the background, a second at most.
        """
        before = self.idle
        self._shrink(parse_size(keep))
        self.release_leaving()
        if self._busy.acquire(timeout=_RELEASE_WAIT_S):
            self._busy.release()
        return before - self.idle

    def _shrink(self, limit: int) -> bool:
        """Move idle handles to those about to be released; whether there are such."""
        while sum(nbytes * len(each) for nbytes, each in tuple(self._idle.items())) > limit:
            oldest = [each[0] for each in tuple(self._idle.values()) if each[:1]]
            if not oldest:
                break
            first = min(oldest, key=lambda handle: handle.number)
            try:
                self._idle[first.nbytes].remove(first)
            except ValueError:
                continue  # taken meanwhile
            self._leaving.append(first)
        return bool(self._leaving)

    def release_leaving(self) -> None:
        """Release what is over the limit."""
        # (Not longer than there were some: what cannot be released comes again.)
        for _ in range(len(self._leaving)):
            with self._busy:
                try:
                    handle = self._leaving.popleft()
                except IndexError:
                    return
                call_for_finalizers(self._release, (handle,))

    def begin_in_child(self) -> None:
        """After a fork: the thread that may have held the lock does not exist here."""
        self._busy = threading.RLock()

    def _release(self, handle: Handle) -> None:
        try:
            self.pages.release(handle.value, handle.nbytes)
        except BaseException:
            self._idle.setdefault(handle.nbytes, []).append(handle)
            raise


class _Releaser:
    """One thread for all pools, which releases what they keep no longer."""

    def __init__(self) -> None:
        self._pools: queue.SimpleQueue[HandlePool | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()
        self._ended = False

    def start(self) -> None:
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None and not self._ended:
                thread = threading.Thread(target=self._run, name="devalloc-release", daemon=True)
                self._thread = thread
                thread.start()

    def wake(self, pool: HandlePool) -> None:
        # (May be called in a finalizer, also of a thread that is inside.)
        self._pools.put(pool)

    def _run(self) -> None:
        while (pool := self._pools.get()) is not None:
            pool.release_leaving()
            del pool  # or this thread would keep it alive while it waits

    def end(self) -> None:
        """At exit: no call of the driver may be under way when the driver ends."""
        self._ended = True
        if self._thread is not None:
            self._pools.put(None)
            self._thread.join(_RELEASE_WAIT_S)


_RELEASER = _Releaser()
_POOLS: dict[torch.device, HandlePool] = {}
_ALL: weakref.WeakSet[HandlePool] = weakref.WeakSet()


def pool_of(pages: Pages) -> HandlePool:
    """The pool that all sources of a device share; the first caller's ``pages`` serve it."""
    return _POOLS.setdefault(pages.device, HandlePool(pages))


def _in_child() -> None:
    global _RELEASER
    _RELEASER = _Releaser()  # the thread does not exist in the child
    for pool in tuple(_ALL):
        pool.begin_in_child()


atexit.register(lambda: _RELEASER.end())
os.register_at_fork(after_in_child=_in_child)
