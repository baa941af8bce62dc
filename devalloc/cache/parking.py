"""Blocks whose user has ended and that are not free yet: the next of the same kind takes them.

Programs ask for the same things again and again. Whoever hands out objects over blocks
(`devalloc.tensors`) *parks* a block when its object ends, under a key that says all about it: the
next request with that key and no call of the engine between takes it as it is. To the engine the
block has lived on. Whatever the engine is asked first frees what is parked, so it decides, and
reports, as if every free had come at once; only the choice of the block for an equal request is
not the policy's.

Concurrency: no lock, for objects end in the midst of anything, of a collection inside the engine
too. Every step is one operation on a list, a set or a dict, atomic in CPython. `Parking.clear`
retires the stacks that it empties; who pushes on one looks afterwards whether it is retired, or
parking closed, and then has the engine free what nobody else would find. Which of two threads takes
an entry is decided by ``pop``. A closed parking gives nothing out, whatever is pushed late.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from devalloc.cache.core import Core
    from devalloc.cache.store import Store

# What a stay's end is told by, and its cache, live on although nobody else refers to them.
_STAYS: set[Stay] = set()


class InUse(IndexError):
    """Others refer to what was parked: there is nothing to take, as in an empty stack."""


class Stay:
    """One block from its allocation to its free, with all its users in turn.

    Attributes
    ----------
    cache : Core
        The engine.
    address : int
    key : tuple
        What a request must be equal to; the last entry is the stream that owns the block.
    turns : int
        Users after the first. Changed only by who took the stay from its stack.
    stack : Stack
        Where it was parked last, which spares looking it up by the key; or one that is retired.
    """

    __slots__ = ("address", "cache", "key", "stack", "told", "turns")

    cache: Core
    address: int
    key: tuple[Hashable, ...]
    turns: int
    told: int
    stack: Stack

    def take(self) -> Any:
        """For who took the stay from its stack: the object for the next user.

        Raises
        ------
        InUse
            If others refer to the block for all that. It is freed when the last of them ends.
        """
        raise NotImplementedError

    def vacate(self) -> bool:
        """For who took the stay from its stack: whether the block may be freed. If not, it is
        freed when the last who refers to it ends."""
        raise NotImplementedError

    def forget(self) -> None:
        """Let go of the object: the block is being freed."""
        raise NotImplementedError

    def exclude(self) -> None:
        """Never park again."""
        raise NotImplementedError


class Stack(list[Stay]):
    """What is parked under one key."""

    __slots__ = ("retired",)

    def __init__(self) -> None:
        self.retired = False


_NOWHERE = Stack()
_NOWHERE.retired = True


class Parking:
    """What is parked of one engine.

    Parameters
    ----------
    store : Store
        The engine's.
    settle : callable
        The engine's: frees what is parked, at once or with its next call.

    Attributes
    ----------
    closed : bool
        Set by the engine while frees must reach it at once.
    stacks : dict
        By key, what was parked since the engine looked last.
    """

    __slots__ = ("_settle", "_store", "_turned", "closed", "stacks")

    def __init__(self, store: Store, settle: Callable[[], None]) -> None:
        self._store = store
        self._settle = settle
        self.closed = True
        self.stacks: dict[tuple[Hashable, ...], Stack] = {}
        # Of stays that have ended: (size, requested, pool, turns), not yet in the sums.
        self._turned: list[tuple[int, int, int, int]] = []

    # Without a lock -------------------------------------------------------------------------------

    def enter(self, stay: Stay) -> None:
        """Keep a new stay until it ends."""
        stay.stack = _NOWHERE
        _STAYS.add(stay)

    def park(self, stay: Stay) -> None:
        """Leave the block to the next user. Not while `closed`."""
        while True:
            stack = stay.stack
            if stack.retired:
                stack = stay.stack = self.stacks.setdefault(stay.key, Stack())
            stack.append(stay)
            if not stack.retired:
                break
            # Emptied after it was looked at, and nobody will look again: take one out.
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

    # For the engine, under its lock ---------------------------------------------------------------

    def clear(self) -> Iterator[int]:
        """Take everything out; yields the addresses, which are to be freed. What others refer to
        for all that is left to them."""
        while self.stacks:
            _, stack = self.stacks.popitem()
            stack.retired = True
            while stack:
                try:
                    stay = stack.pop()
                except IndexError:  # another thread's now
                    break
                if not stay.vacate():
                    continue
                _STAYS.discard(stay)
                if stay.turns != stay.told:
                    self._note_turns(stay)
                stay.forget()
                yield stay.address
        if self._turned:
            self._enter_turns()

    def count(self) -> None:
        """Enter the turns of all stays, parked or not, into the ledger."""
        for stay in self._stays():
            self._note_turns(stay)
        self._enter_turns()

    def _stays(self) -> list[Stay]:
        # (A copy of a set is one operation; to go through one, as `tuple` does, is not.)
        return [stay for stay in _STAYS.copy() if stay.cache.parking is self]

    def _enter_turns(self) -> None:
        while self._turned:
            self._store.ledger.enter_turns(*self._turned.pop())

    def forget_stream(self, stream: int) -> None:
        """Blocks that ``stream`` owns are about to have another owner: their keys will be wrong."""
        for stay in self._stays():
            if stay.key[-1] == stream:
                stay.exclude()
