"""Schedules as text, and the strategies that choose them.

A schedule is a list of ``program*steps``, such as ``0*12 1*3 0``: program 0 takes 12 steps,
program 1 takes 3, and program 0 goes on to its end (without a count a program runs as long as it
can). After the end of the list, programs run one after another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from devalloc.errors import InvalidArgument
from devalloc.testing._execution import Execution

Segment = tuple[int, int]
Choice = Callable[[Execution], int]
FOREVER = 1 << 60


def parse(text: str) -> list[Segment]:
    """The segments of a schedule; raises InvalidArgument."""
    try:
        parts = [part.partition("*") for part in text.split()]
        segments = [
            (int(program), int(steps) if star else FOREVER) for program, star, steps in parts
        ]
    except ValueError as error:
        raise InvalidArgument(f"not a schedule: {text!r}; write it as '0*12 1*3 0'") from error
    if any(program < 0 or steps < 1 for program, steps in segments):
        raise InvalidArgument(f"not a schedule: {text!r}; programs are >= 0 and steps >= 1")
    return segments


def text(segments: Sequence[Segment]) -> str:
    return " ".join(
        str(program) if steps >= FOREVER else f"{program}*{steps}" for program, steps in segments
    )


def segments(trace: Sequence[int]) -> list[Segment]:
    """The steps of a run as segments: each program with the steps that it took in a row."""
    return [(program, len(list(group))) for program, group in groupby(trace)]


def follow(wanted: Sequence[Segment]) -> Choice:
    """Choices that follow a schedule.

    It skips segments of programs that have ended; after the last segment, programs run one after
    another.
    """
    rest = [list(segment) for segment in reversed(wanted)]

    def choose(execution: Execution) -> int:
        unfinished = execution.unfinished()
        while rest:
            program, steps = rest[-1]
            # A segment without a count ends where its program would only wait.
            waits = steps >= FOREVER and program in unfinished and execution.spinning(program)
            if steps > 0 and program in unfinished and not waits:
                rest[-1][1] -= 1 if steps < FOREVER else 0
                return program
            rest.pop()
        return one_after_another(execution)

    return choose


def one_after_another(execution: Execution) -> int:
    ready = execution.ready()
    return execution.last if execution.last in ready else ready[0]


class Strategy(Protocol):
    """Chooses the schedules of an exploration.

    ``choices(i, steps)`` returns the choices of the i-th schedule; ``steps`` is the length of the
    longest run so far, 0 before the first.
    """

    def choices(self, index: int, steps: int) -> Choice: ...


@dataclass(frozen=True)
class Random:
    """A program chosen at random takes each step.

    Parameters
    ----------
    seed : int
    stay : float
        Probability that the program of the last step takes the next one too, without a choice.
    """

    seed: int = 0
    stay: float = 0.0

    def choices(self, index: int, steps: int) -> Choice:
        generator = random.Random(f"random {self.seed} {index}")
        draw, stay = generator.random, self.stay

        def choose(execution: Execution) -> int:
            ready = execution.ready()
            if stay and execution.last in ready and draw() < stay:
                return execution.last
            return ready[int(draw() * len(ready))]

        return choose


@dataclass(frozen=True)
class PCT:
    """Probabilistic concurrency testing: random priorities that change at a few random steps.

    The program of highest priority runs; at ``depth - 1`` random steps the running program falls
    below all others. A bug that needs d orderings shows in a schedule of n programs and k steps
    with probability at least 1 / (n k**(d - 1)). Programs that only wait are passed over.

    Source: Burckhardt et al., A randomized scheduler with probabilistic guarantees of finding
    bugs, ASPLOS 2010.

    Parameters
    ----------
    depth : int
        How many orderings the bug may need; at least 1.
    seed : int
    """

    depth: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise InvalidArgument(f"PCT needs a depth of at least 1, not {self.depth}")

    def choices(self, index: int, steps: int) -> Choice:
        generator = random.Random(f"pct {self.depth} {self.seed} {index}")
        changes = sorted(generator.randrange(max(1, steps)) for _ in range(self.depth - 1))
        order: list[int] = []

        def choose(execution: Execution) -> int:
            if not order:
                order.extend(range(len(execution.programs)))
                generator.shuffle(order)
            while changes and changes[0] <= len(execution.trace):
                changes.pop(0)
                if execution.last >= 0:
                    order.remove(execution.last)
                    order.append(execution.last)
            ready = execution.ready()
            return min(ready, key=order.index)

        return choose


@dataclass(frozen=True)
class Exhaustive:
    """Every schedule with at most ``preemptions`` preemptions; with None, every schedule.

    A preemption takes the turn from a program that could go on. States that were met before are
    not entered again, so schedules that differ only in the order of independent accesses count as
    one.

    Parameters
    ----------
    preemptions : int, optional
    """

    preemptions: int | None = 2

    def __post_init__(self) -> None:
        if self.preemptions is not None and self.preemptions < 0:
            raise InvalidArgument(f"preemptions cannot be negative: {self.preemptions}")
