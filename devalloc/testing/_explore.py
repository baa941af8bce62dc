"""Sample schedules, search all of them, and shrink one that fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from devalloc.testing._execution import Execution, Mark
from devalloc.testing._program import Access
from devalloc.testing.schedules import Choice, Segment, segments


class Stuck(Exception):
    """A run did not end within its bound of steps."""


@dataclass
class Budget:
    """When to stop: after a number of schedules, or of seconds."""

    schedules: int
    seconds: float
    started: float = field(default_factory=time.monotonic)

    def left(self, done: int) -> bool:
        return done < self.schedules and time.monotonic() - self.started < self.seconds


def run(execution: Execution, choose: Choice, limit: int) -> None:
    """Run to the end as ``choose`` decides; raises Stuck after ``limit`` steps."""
    while execution.unfinished():
        if len(execution.trace) >= limit:
            raise Stuck(describe_stuck(execution))
        execution.step(choose(execution))


def describe_stuck(execution: Execution) -> str:
    lines = [f"no end after {len(execution.trace)} steps; still running:"]
    for index in execution.unfinished():
        state = "spins at" if execution.spinning(index) else "is before"
        access = execution.cursors[index].access
        lines.append(f"  {execution.programs[index].name} {state} {describe(access)}")
    return "\n".join(lines)


def describe(access: Access) -> str:
    """What an access does, and where in the kernel's code: innermost function first."""
    more = ", ..." if len(access.pointers) > 2 else ""
    places = ", ".join(hex(pointer) for pointer in access.pointers[:2]) + more
    code = " < ".join(f"{Path(file).name}:{line} {name}" for file, line, name in access.stack)
    return f"{access.kind} of {places} ({code})"


@dataclass
class _Frame:
    """A state of the search, the choices left in it, and the step that led to it."""

    choices: Iterator[tuple[int, int]]
    mark: Mark | None


class Search:
    """Depth-first search through all schedules with a bound on preemptions.

    A state that was met before with no more preemptions is not entered again. Which program ran
    last belongs to the state only if preemptions are bounded.
    """

    def __init__(self, execution: Execution, bound: int | None, limit: int) -> None:
        self.execution = execution
        self.bound = bound
        self.limit = limit
        self.steps = 0
        self.ends = 0
        self._met: dict[object, int] = {}

    @property
    def states(self) -> int:
        return len(self._met)

    def _enter(self, used: int, mark: Mark | None) -> _Frame | None:
        """The state the execution is in, or None if it was met before."""
        execution = self.execution
        key: object = execution.key()
        if self.bound is not None:
            key = key, execution.last
        if self._met.get(key, FEW) <= used:
            return None
        self._met[key] = used
        return _Frame(self._choices(used), mark)

    def _choices(self, used: int) -> Iterator[tuple[int, int]]:
        ready = self.execution.ready()
        last = self.execution.last
        if last in ready:
            yield last, used
        if last not in ready or self.bound is None or used < self.bound:
            cost = used + (last in ready)
            yield from ((index, cost) for index in ready if index != last)

    def ended(self) -> Iterator[None]:
        """Go through the schedules, and yield at the end of each."""
        execution = self.execution
        stack = [self._enter(0, None)]
        while stack:
            frame = stack[-1]
            choice = next(frame.choices, None) if frame is not None else None
            if frame is None or choice is None:
                stack.pop()
                if frame is not None and frame.mark is not None:
                    execution.undo(frame.mark)
                continue
            if len(execution.trace) >= self.limit:
                raise Stuck(describe_stuck(execution))
            index, used = choice
            mark = execution.step(index)
            self.steps += 1
            if not execution.unfinished():
                self.ends += 1
                yield
                execution.undo(mark)
                continue
            entered = self._enter(used, mark)
            if entered is None:
                execution.undo(mark)
            else:
                stack.append(entered)


FEW = 1 << 30


def preemptions(wanted: list[Segment]) -> int:
    """How often a program loses its turn and gets it back later."""
    return sum(
        any(program == later for later, _ in wanted[at + 1 :])
        for at, (program, _) in enumerate(wanted)
    )


def shrink(
    trace: list[int], fails: Callable[[list[Segment]], list[int] | None], budget: Budget
) -> list[int]:
    """A simpler schedule that fails: with fewer preemptions, then fewer segments, then fewer steps
    before the last segment.

    ``fails`` runs a schedule and returns the steps taken if it failed, else None.
    """
    best = trace

    def cost(steps: list[int]) -> tuple[int, int, int]:
        parts = segments(steps)
        return preemptions(parts), len(parts), sum(n for _, n in parts[:-1])

    tried = 0
    improved = True
    while improved:
        improved = False
        for candidate in _simpler(segments(best)):
            if not budget.left(tried):
                return best
            tried += 1
            failed = fails(candidate)
            if failed is not None and cost(failed) < cost(best):
                best = failed
                improved = True
                break
    return best


def _simpler(parts: list[Segment]) -> Iterator[list[Segment]]:
    # Drop the end: after it, programs run one after another.
    for keep in _halvings(len(parts)):
        yield parts[:keep]
    for at in range(len(parts)):
        yield parts[:at] + parts[at + 1 :]
    # Make one of two segments of a program, at either place.
    for at, (program, steps) in enumerate(parts):
        for other in range(at + 2, len(parts)):
            if parts[other][0] == program:
                rest = parts[at + 1 : other] + parts[other + 1 :]
                more = (program, steps + parts[other][1])
                yield [*parts[:at], more, *rest]
                yield [*parts[:at], *parts[at + 1 : other], more, *parts[other + 1 :]]
                break
    for at, (program, steps) in enumerate(parts):
        for fewer in _halvings(steps):
            if fewer:
                yield [*parts[:at], (program, fewer), *parts[at + 1 :]]


def _halvings(count: int) -> Iterator[int]:
    """0, count / 2, ... count - 1."""
    gap = count
    while gap > 0:
        yield count - gap
        gap //= 2
