"""Blocks whose user has ended and that are not free yet, for the next user of the same kind.

Programs repeat equal requests. Code that hands out objects over blocks
(`devalloc.arena.tensors`) keeps a block for reuse when its object ends (`Reuse.park`), under a key
with everything that a request must match. The next request with that key takes the block unchanged,
if the cache was not called in between. To the cache the block has been live all the time. Every
call of the cache first frees what is kept for reuse, so the cache decides and reports as if each
free had come at once; only the choice of the block for an equal request is not the policy's.

Concurrency: there is no lock, because objects may end at any time, even in a garbage collection
inside the cache. Every step is one operation on a list, a set or a dict, which is
atomic in CPython. `Reuse.clear` retires the stacks that it empties. A thread that pushes on a
stack then checks whether the stack is retired or reuse is closed; if so, it has the cache free what
no other thread would find. If two threads take one entry, ``pop`` decides. A closed `Reuse` gives
nothing out, even if something is pushed after the closing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from devalloc.arena.store.store import Store

# Keeps stays alive, with the callbacks that report their end, and their caches.
_STAYS: set[Stay] = set()


class InUse(IndexError):
    """Something else refers to what was kept for reuse, so it cannot be taken."""


class Stay:
    """One block from its allocation to its free, with all its users, one after the other.

    Attributes
    ----------
    reuse : Reuse
        The reused blocks of the cache that the block is from.
    address : int
    key : tuple
        A request must have an equal key; the last entry is the stream that owns the block.
    turns : int
        Users after the first. Changed only by the thread that took the stay from its stack.
    told : int
        How many of the turns have been noted for the statistics.
    stack : Stack
        Where the stay was kept last, which saves looking it up by the key; or a retired stack.
    """

    __slots__ = ("address", "key", "reuse", "stack", "told", "turns")

    reuse: Reuse
    address: int
    key: tuple[Hashable, ...]
    turns: int
    told: int
    stack: Stack

    def take(self) -> Any:
        """The object for the next user. Called by the thread that took the stay from its stack.

        Raises
        ------
        InUse
            If something else still refers to the block. It is freed when the last reference ends.
        """
        raise NotImplementedError

    def vacate(self) -> bool:
        """Whether the block may be freed. Called by the thread that took the stay from its stack.

        If not, the block is freed when the last reference to it ends.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Drop the object, because the block is being freed."""
        raise NotImplementedError

    def exclude(self) -> None:
        """Never keep the block for reuse again."""
        raise NotImplementedError


class Stack(list[Stay]):
    """The stays that are kept under one key."""

    __slots__ = ("retired",)

    def __init__(self) -> None:
        self.retired = False


_NOWHERE = Stack()
_NOWHERE.retired = True


class Reuse:
    """The blocks of one cache that are kept for reuse.

    Parameters
    ----------
    store : Store
        The cache's store.
    settle : callable
        The cache's function that frees what is kept, immediately or with its next call.

    Attributes
    ----------
    closed : bool
        Set by the cache while frees must reach it at once.
    stacks : dict
        By key, the stays that were kept since the last call of the cache.
    """

    __slots__ = ("_settle", "_store", "_turned", "closed", "stacks")

    def __init__(self, store: Store, settle: Callable[[], None]) -> None:
        self._store = store
        self._settle = settle
        self.closed = True
        self.stacks: dict[tuple[Hashable, ...], Stack] = {}
        # (size, requested, pool, turns) of stays, not yet in the statistics's sums.
        self._turned: list[tuple[int, int, int, int]] = []

    # Without a lock -------------------------------------------------------------------------------

    def enter(self, stay: Stay) -> None:
        """Keep a new stay alive until it ends."""
        stay.stack = _NOWHERE
        _STAYS.add(stay)

    def park(self, stay: Stay) -> None:
        """Leave the block to the next user. Not to be called while `closed`."""
        while True:
            stack = stay.stack
            if stack.retired:
                stack = stay.stack = self.stacks.setdefault(stay.key, Stack())
            stack.append(stay)
            if not stack.retired:
                break
            # It was emptied in between, and no thread will look at it again: take one out.
            try:
                stay = stack.pop()
            except IndexError:
                return
        if self.closed:
            self._settle()

    def end(self, stay: Stay) -> None:
        """Forget a stay whose block is about to be freed."""
        _STAYS.discard(stay)
        self._note_turns(stay)
        stay.forget()

    def _note_turns(self, stay: Stay) -> None:
        turns = stay.turns - stay.told
        if turns:
            stay.told += turns
            block = self._store.blocks[stay.address]
            self._turned.append((block.size, block.requested, block.home.pool.index, turns))

    # For the cache, under its lock ---------------------------------------------------------------

    def clear(self) -> Iterator[tuple[int, int, None]]:
        """Take everything out and yield what the caller must free: (address, no claim, no pools).

        A block that something else still refers to is left to that reference.
        """
        while self.stacks:
            _, stack = self.stacks.popitem()
            stack.retired = True
            while stack:
                try:
                    stay = stack.pop()
                except IndexError:  # another thread has taken it
                    break
                if not stay.vacate():
                    continue
                _STAYS.discard(stay)
                if stay.turns != stay.told:
                    self._note_turns(stay)
                stay.forget()
                yield stay.address, 0, None
        if self._turned:
            self._enter_turns()

    def count(self) -> None:
        """Enter the turns of all stays, kept or in use, in the statistics."""
        for stay in self._stays():
            self._note_turns(stay)
        self._enter_turns()

    def _stays(self) -> list[Stay]:
        # (Copying a set is one atomic operation; iterating over it, as `tuple` does, is not.)
        return [stay for stay in _STAYS.copy() if stay.reuse is self]

    def _enter_turns(self) -> None:
        while self._turned:
            self._store.statistics.enter_turns(*self._turned.pop())

    def forget_stream(self, stream: int) -> None:
        """Never keep blocks of ``stream`` again: their owner changes, so their keys are wrong."""
        for stay in self._stays():
            if stay.key[-1] == stream:
                stay.exclude()
