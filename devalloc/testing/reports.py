"""Results of explorations: the end of one run, the sum of many, and a schedule that fails."""

from __future__ import annotations

from dataclasses import dataclass

from devalloc.testing._execution import Event


@dataclass(frozen=True)
class Run:
    """The end of one schedule, as a check sees it.

    ``events`` is what programs stored to the journal, in the order of the stores. ``schedule`` is
    the line that replays the run.
    """

    events: tuple[Event, ...]
    schedule: str


@dataclass(frozen=True)
class Report:
    """What an exploration did.

    ``schedules`` ran to their end, in ``steps`` steps and ``seconds`` seconds. ``outcomes`` is the
    number of different final states, each checked once. ``complete`` says that nothing is left to
    explore within the strategy's bound. ``interpreted`` counts the stretches of programs that had
    to be interpreted; the others were remembered.
    """

    strategy: str
    schedules: int
    steps: int
    outcomes: int
    complete: bool
    seconds: float
    interpreted: int

    @property
    def schedules_per_second(self) -> float:
        return self.schedules / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.strategy}: {self.schedules} schedules{' (all)' if self.complete else ''}, "
            f"{self.steps} steps, {self.outcomes} outcomes, "
            f"{self.schedules_per_second:.0f} schedules/s"
        )


class ScheduleError(AssertionError):
    """A schedule that fails. ``schedule`` replays it, ``__cause__`` is what went wrong."""

    def __init__(self, message: str, schedule: str) -> None:
        super().__init__(message)
        self.schedule = schedule
