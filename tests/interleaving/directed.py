"""Schedules that say where programs lose their turn: for bugs that need many preemptions, each at
one place. Samples do not meet these, and a list of step counts would be wrong after any change.
"""

from __future__ import annotations

from dataclasses import dataclass

from devalloc.testing._execution import Execution
from devalloc.testing._program import Access
from devalloc.testing.schedules import Choice, one_after_another

# Functions that only carry out what their caller wants.
HELPERS = frozenset({"atomic_load", "atomic_cas", "swap"})


# How the message of a schedule begins that could not be carried out.
NOT_REACHED = "LookupError: not reached"


@dataclass(frozen=True)
class Turn:
    """``program`` runs until it is about to make its ``times``-th access, counted from now on, in
    the function ``before`` itself (what that calls does not count, except for ``HELPERS``).
    Without ``before``: to its end, or until it only waits for others."""

    program: int
    before: str = ""
    times: int = 1


@dataclass(frozen=True)
class Turns:
    """The one schedule in which programs take these turns; then they run one after another.

    The schedule fails (`NOT_REACHED`) if a program ends before it comes to the place that its turn
    names: then it is not the schedule that was meant. With ``loose``, such turns are left out.
    """

    turns: tuple[Turn, ...]
    loose: bool = False

    def __repr__(self) -> str:
        return f"{len(self.turns)} turns"

    def choices(self, index: int, steps: int) -> Choice:
        rest = list(reversed(self.turns))
        hits = -1  # where the program stands when its turn begins does not count

        def choose(execution: Execution) -> int:
            nonlocal hits
            while rest:
                turn = rest[-1]
                ended = turn.program not in execution.unfinished()
                if ended and turn.before and not self.loose:
                    raise LookupError(f"not reached: {turn}, only {max(hits, 0)} times")
                if not ended:
                    cursor = execution.cursors[turn.program]
                    here = turn.before != "" and function(cursor.access) == turn.before
                    hits = hits + here if hits >= 0 else 0
                    waits = not turn.before and execution.spinning(turn.program)
                    if not waits and (not turn.before or hits < turn.times):
                        return turn.program
                rest.pop()
                hits = -1
            return one_after_another(execution)

        return choose


def function(access: Access) -> str:
    """The function of the kernel that makes an access."""
    return next(name for _file, _line, name in access.stack if name not in HELPERS)


def directed(*turns: Turn, loose: bool = False) -> tuple[tuple[Turns, int], ...]:
    """A plan of one schedule."""
    return ((Turns(turns, loose), 1),)
