"""One run of several programs, step by step: which may go on, what a step does, how to undo it.

A *step* is one access at which programs are switched, followed by all accesses of the same
program up to the next such one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from devalloc.testing._memory import Memory
from devalloc.testing._program import Access, Cursor, Program


class Event(NamedTuple):
    """A store to the journal: the program's number, the element, and the value."""

    program: int
    element: int
    value: int


@dataclass(frozen=True)
class Journal:
    """The tensor to which stores are events: where it lies, and the bytes of an element."""

    start: int
    end: int
    size: int

    def holds(self, access: Access) -> bool:
        return access.kind == "store" and self.start <= access.pointers[0] < self.end


@dataclass(frozen=True)
class Mark:
    """What one step changed, so that it can be undone."""

    program: int
    cursor: tuple[Any, int]
    changed: list[tuple[int, int]]
    events: int
    version: int
    spin: tuple[int, Counter[Any]]
    last: int


class ProgramError(Exception):
    """A program raised."""


class Execution:
    """The state of a run.

    ``patience`` is how often a program may look at the same words, while nothing changes, before it
    counts as spinning and others are preferred.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        memory: Memory,
        journal: Journal | None,
        switch_kinds: tuple[str, ...],
        patience: int,
        after_step: Callable[[Execution], None] | None = None,
    ) -> None:
        self.after_step = after_step
        self.programs = programs
        self.memory = memory
        self.journal = journal
        self.switch_kinds = switch_kinds
        self.patience = patience
        self.trace: list[int] = []
        self.events: list[Event] = []
        self.last = -1
        self._versions = count(1)
        self._version = 0  # grows with every change of memory
        self._spins: list[tuple[int, Counter[Any]]] = [(0, Counter()) for _ in programs]
        self.cursors: list[Cursor] = []

    def start(self) -> None:
        """Take every program to its first switch point. Raises ProgramError."""
        for index, program in enumerate(self.programs):
            self.cursors.append(Cursor(program))
            self._settle(index, [])

    # Looking ----------------------------------------------------------------------------------

    def unfinished(self) -> list[int]:
        return [index for index, cursor in enumerate(self.cursors) if not cursor.finished]

    def spinning(self, index: int) -> bool:
        """Whether the program reads the same words repeatedly while nothing changes."""
        return self.spins(index) >= self.patience

    def spins(self, index: int) -> int:
        version, seen = self._spins[index]
        if version != self._version:
            return 0
        access = self.cursors[index].access
        return seen[access.kind, access.words]

    def ready(self) -> list[int]:
        """The programs that may take the next step: those that do not spin.

        If all spin, the one that has spun least; it alone, because the order of spinning programs
        makes no difference.
        """
        unfinished = self.unfinished()
        ready = [index for index in unfinished if not self.spinning(index)]
        if not ready and unfinished:
            return [min(unfinished, key=self.spins)]
        return ready

    def key(self) -> tuple[Any, ...]:
        """Equal for states with equal futures."""
        states = tuple(cursor.state() for cursor in self.cursors)
        return self.memory.key, states, tuple(self.events)

    # Going ------------------------------------------------------------------------------------

    def step(self, index: int) -> Mark:
        """Let one program take a step. Raises ProgramError if it fails."""
        cursor = self.cursors[index]
        version, seen = self._spins[index]
        mark = Mark(
            index,
            cursor.mark(),
            [],
            len(self.events),
            self._version,
            (version, seen.copy()),
            self.last,
        )
        if version != self._version:
            seen = Counter()
        access = cursor.access
        seen[access.kind, access.words] += 1
        self._spins[index] = (self._version, seen)
        self.trace.append(index)
        self.last = index
        self._perform(index, mark.changed)
        self._settle(index, mark.changed)
        if self.after_step is not None:
            self.after_step(self)
        return mark

    def _perform(self, index: int, changed: list[tuple[int, int]]) -> None:
        cursor = self.cursors[index]
        access = cursor.access
        if access.writes:
            self.memory.before_write(access.words)
            result = access.run()
            now = self.memory.after_write(access.words)
            if now:
                changed.extend(now)
                self._version = next(self._versions)
            if self.journal is not None and self.journal.holds(access):
                self._record(index, access)
        else:
            result = access.run()
        cursor.accept(result)

    def _record(self, index: int, access: Access) -> None:
        assert self.journal is not None
        for pointer in access.pointers:
            word = self.memory.now[pointer & ~7] >> (pointer & 7) * 8
            value = word & ((1 << access.size * 8) - 1)
            if value >> (access.size * 8 - 1):
                value -= 1 << access.size * 8
            element = (pointer - self.journal.start) // self.journal.size
            self.events.append(Event(index, element, value))

    def _switches(self, access: Access) -> bool:
        if access.kind.startswith(self.switch_kinds):
            return True
        return self.journal is not None and self.journal.holds(access)

    def _settle(self, index: int, changed: list[tuple[int, int]]) -> None:
        """Take the program to its next switch point or its end."""
        cursor = self.cursors[index]
        while not cursor.finished:
            if self._switches(cursor.access):
                return
            self._perform(index, changed)
        if cursor.node.error is not None:
            raise ProgramError(
                f"{cursor.program.name} raised {cursor.node.error!r}"
            ) from cursor.node.error

    def undo(self, mark: Mark) -> None:
        """Undo the latest step."""
        self.memory.undo(list(reversed(mark.changed)))
        self.cursors[mark.program].rewind(mark.cursor)
        del self.events[mark.events :]
        self._version = mark.version
        self._spins[mark.program] = mark.spin
        self.last = mark.last
        self.trace.pop()

    def close(self) -> None:
        """End all programs and give memory its first values again."""
        for cursor in self.cursors:
            cursor.kill()
        self.memory.restore()
