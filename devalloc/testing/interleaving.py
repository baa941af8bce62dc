"""Run the programs of Triton kernels interleaved, on the CPU, and find the schedules that fail.

    from devalloc.testing import PCT, Interleaving, Launch

    def check(run):
        assert counter.item() == 4

    lab = Interleaving(Launch(count_kernel, (4,), counter), check=check)
    print(lab.explore(PCT(depth=3), schedules=1000))

A failing schedule is shrunk and raised as a `ScheduleError`, whose message holds one line that
replays it. This works with any kernel that Triton's interpreter runs
(TRITON_INTERPRET=1). See docs/guide/testing.md.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from devalloc.errors import InvalidArgument
from devalloc.sizes import is_integer
from devalloc.testing import _interpreter
from devalloc.testing._execution import Execution, Journal, ProgramError
from devalloc.testing._explore import Budget, Search, describe, preemptions, run, shrink
from devalloc.testing._memory import Memory
from devalloc.testing._program import Program, steered
from devalloc.testing.reports import Report, Run, ScheduleError
from devalloc.testing.schedules import (
    Choice,
    Exhaustive,
    Segment,
    Strategy,
    follow,
    parse,
    segments,
    text,
)

_MAX_NODES = 400_000  # nodes of remembered behaviour, about 1 KiB each
_STORY_ENDS = 12

# Programs are switched before accesses whose kind begins with one of these.
SWITCH_AT = {
    "atomics": ("atomic",),
    "writes": ("atomic", "store"),
    "all": ("atomic", "store", "load"),
}
_SHRINK_RUNS = 2000


class Launch:
    """One launch of a kernel: what ``kernel[grid](*args, **kwargs)`` would run.

    Parameters
    ----------
    kernel : function decorated with ``triton.jit``, interpreted
    grid : tuple of 1 to 3 ints
    *args, **kwargs
        The kernel's arguments; tensors must be on the CPU. Compiler options such as ``num_warps``
        are ignored.

    Raises
    ------
    InvalidArgument
        For a kernel that is not interpreted, a bad grid, wrong arguments, or tensors elsewhere.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        if not (
            isinstance(grid, tuple | list)
            and 1 <= len(grid) <= 3
            and all(is_integer(programs) and programs > 0 for programs in grid)
        ):
            raise InvalidArgument(f"a grid is a tuple of 1 to 3 positive ints, not {grid!r}")
        self.name = str(getattr(kernel, "__name__", kernel))
        self.grid: tuple[int, int, int] = (*grid, 1, 1)[:3]  # type: ignore[assignment]
        self.body, self.tensors = _interpreter.bind(kernel, grid, args, kwargs)


class Interleaving:
    """Launches whose programs run interleaved, all at the same time.

    Parameters
    ----------
    *launches : Launch
        Of one or several kernels. Programs are numbered through all launches, x fastest.
    check : callable, optional
        ``check(run)`` is called when all programs have ended. It must raise if the memory or
        ``run.events`` are wrong, and depend on nothing else, because of equal outcomes only the
        first is checked. It may write to the launches' tensors; the writes are undone.
    invariant : callable, optional
        ``invariant(run)`` is called after every step, under the same rules, to check what must
        always hold.
    switch_at : "atomics", "writes" or "all"
        Where programs take turns: before atomics; with "writes" before plain stores too; with
        "all" before plain loads too. The fewer such points, the faster.
    memory : sequence of (address, bytes)
        Memory that programs reach in other ways than through the launches' tensors.
    journal : torch.Tensor, optional
        One of the launches' tensors. A store to it is an event, and also a point where programs
        take turns, for every ``switch_at``.
    split_blocks : bool
        Access the elements of a block one after the other instead of all at once.
    step_limit : int
        Number of steps after which a schedule counts as stuck.
    patience : int
        How often a program may access the same words, while nothing changes, before it counts
        as waiting and other programs are preferred.
    shrink_seconds : float
        How long to look for a simpler schedule when one fails; 0 to raise it as it was found.

    Raises
    ------
    InvalidArgument
        For no launch, an unknown ``switch_at``, or a tensor that cannot be a journal.

    Notes
    -----
    Execution is sequentially consistent: weak memory orders are not explored. After every schedule
    memory has its first values again. Like Triton's interpreter, this is not thread-safe.
    """

    def __init__(
        self,
        *launches: Launch,
        check: Callable[[Run], None] | None = None,
        invariant: Callable[[Run], None] | None = None,
        switch_at: str = "atomics",
        memory: Sequence[tuple[int, int]] = (),
        journal: torch.Tensor | None = None,
        split_blocks: bool = False,
        step_limit: int = 20_000,
        patience: int = 8,
        shrink_seconds: float = 8.0,
    ) -> None:
        if not launches:
            raise InvalidArgument("nothing to run: give at least one Launch")
        if switch_at not in SWITCH_AT:
            raise InvalidArgument(f"switch_at is one of {', '.join(SWITCH_AT)}, not {switch_at!r}")
        self._launches = launches
        self._check = check
        self._invariant = invariant
        self._switch_kinds = SWITCH_AT[switch_at]
        self._split_blocks = split_blocks
        self._step_limit = step_limit
        self._patience = patience
        self._shrink_seconds = shrink_seconds
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for launch in launches
            for tensor in launch.tensors
        }
        self._storages = list(storages.values())
        own = [(start, storage.nbytes()) for start, storage in storages.items()]
        self._memory = Memory([*own, *memory])
        self._journal = None if journal is None else _journal(journal)
        self._passed: set[object] = set()
        self._held: set[object] = set()
        self._programs = self._make_programs()

    def _make_programs(self) -> list[Program]:
        return [
            Program(
                f"program {number} ({launch.name} {x, y, z})",
                launch.body,
                launch.grid,
                (x, y, z),
                self._memory,
                self._split_blocks,
            )
            for number, (launch, (z, y, x)) in enumerate(
                (launch, place)
                for launch in self._launches
                for place in itertools.product(*(range(size) for size in reversed(launch.grid)))
            )
        ]

    # Exploring --------------------------------------------------------------------------------

    def explore(
        self,
        strategy: Strategy | Exhaustive,
        schedules: int | None = None,
        seconds: float = math.inf,
    ) -> Report:
        """Run schedules until ``schedules`` are done, ``seconds`` are over, or none is left.

        Parameters
        ----------
        strategy : Random, PCT, Exhaustive, or another Strategy
        schedules : int, optional
            The most schedules to run. Default: no bound for `Exhaustive`, else 1000.
        seconds : float
            No schedule begins after this time.

        Raises
        ------
        ScheduleError
            For the first schedule that fails: a program, the check or the invariant raised, or the
            schedule did not end within ``step_limit`` steps.
        """
        exhaustive = isinstance(strategy, Exhaustive)
        default = 1 << 60 if exhaustive else 1000
        budget = Budget(default if schedules is None else schedules, seconds)
        before = sum(program.interpreted for program in self._programs)
        with self._session():
            if isinstance(strategy, Exhaustive):
                done, steps, complete = self._search(strategy, budget)
            else:
                done, steps = self._sample(strategy, budget)
                complete = False
        return Report(
            strategy=repr(strategy),
            schedules=done,
            steps=steps,
            outcomes=len(self._passed),
            complete=complete,
            seconds=time.monotonic() - budget.started,
            interpreted=sum(program.interpreted for program in self._programs) - before,
        )

    def replay(self, schedule: str) -> Run:
        """Run one schedule, as a `ScheduleError` printed it.

        Raises
        ------
        ScheduleError
            If the schedule fails.
        InvalidArgument
            If the text is not a schedule.
        """
        wanted = parse(schedule)
        with self._session():
            attempt = self._attempt(follow(wanted))
            if attempt.error is not None:
                raise self._failure(attempt, schedule) from attempt.error
        return attempt.run

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        self._passed = set()
        self._held = set()
        self._memory.forget()
        with _interpreter.session(steered):
            yield

    def _execution(self) -> Execution:
        return Execution(
            self._programs,
            self._memory,
            self._journal,
            self._switch_kinds,
            self._patience,
            None if self._invariant is None else self._hold,
        )

    def _sample(self, strategy: Strategy, budget: Budget) -> tuple[int, int]:
        done = steps = longest = 0
        while budget.left(done):
            if sum(program.nodes for program in self._programs) > _MAX_NODES:
                self._programs = self._make_programs()
            attempt = self._attempt(strategy.choices(done, longest))
            done += 1
            if attempt.error is not None:
                raise self._shrunk(attempt, f"schedule {done} of {strategy!r}")
            longest = max(longest, len(attempt.trace))
            steps += len(attempt.trace)
        return done, steps

    def _search(self, strategy: Exhaustive, budget: Budget) -> tuple[int, int, bool]:
        execution = self._execution()
        search = Search(execution, strategy.preemptions, self._step_limit)
        complete = False
        try:
            execution.start()
            for _ in search.ended():
                self._judge(execution)
                if not budget.left(search.ends):
                    break
            else:
                complete = True
        except Exception as error:
            attempt = _Attempt(list(execution.trace), self._run(execution), error)
            execution.close()
            failure = self._shrunk(attempt, f"schedule {search.ends + 1} of {strategy!r}")
            raise failure from failure.__cause__
        finally:
            execution.close()
        return search.ends, search.steps, complete

    def _attempt(self, choose: Choice) -> _Attempt:
        execution = self._execution()
        error = None
        try:
            execution.start()
            run(execution, choose, self._step_limit)
            self._judge(execution)
        except Exception as failure:
            error = failure
        finally:
            execution.close()
        return _Attempt(execution.trace, self._run(execution), error)

    def _run(self, execution: Execution) -> Run:
        return Run(tuple(execution.events), text(segments(execution.trace)))

    def _judge(self, execution: Execution) -> None:
        """Check the outcome of a schedule, unless an equal one has passed."""
        self._ask(self._check, execution, self._passed)

    def _hold(self, execution: Execution) -> None:
        """Check the invariant, unless it held in an equal state."""
        self._ask(self._invariant, execution, self._held)

    def _ask(
        self, question: Callable[[Run], None] | None, execution: Execution, answered: set[object]
    ) -> None:
        state = (self._memory.key, tuple(execution.events))
        if state in answered:
            return
        if question is not None:
            saved = [storage.clone() for storage in self._storages]
            try:
                question(self._run(execution))
            finally:
                for storage, values in zip(self._storages, saved, strict=True):
                    storage.copy_(values)
        answered.add(state)

    # Failing ----------------------------------------------------------------------------------

    def _shrunk(self, found: _Attempt, origin: str) -> ScheduleError:
        """The error for a failed attempt, after looking for a simpler one."""

        def fails(wanted: list[Segment]) -> list[int] | None:
            attempt = self._attempt(follow(wanted))
            if attempt.error is None:
                return None
            return attempt.trace

        budget = Budget(_SHRINK_RUNS, self._shrink_seconds)
        trace = shrink(found.trace, fails, budget)
        parts = segments(trace)
        # The shortest text for it: what comes after the end of the text follows by itself.
        for keep in range(len(parts)):
            if not budget.left(keep):
                break
            failed = fails(parts[:keep])
            if failed is not None and preemptions(segments(failed)) <= preemptions(parts):
                parts = parts[:keep]
                break
        schedule = text(parts)
        attempt = self._attempt(follow(parse(schedule)))
        if attempt.error is None:
            attempt, schedule = found, text(segments(found.trace))
        error = self._failure(attempt, schedule, origin)
        error.__cause__ = attempt.error
        return error

    def _failure(self, attempt: _Attempt, schedule: str, origin: str = "replay") -> ScheduleError:
        parts = segments(attempt.trace)
        lines = [
            f"{type(attempt.error).__name__}: {attempt.error}",
            f"found by {origin}; {preemptions(parts)} preemptions, {len(attempt.trace)} steps:",
            *self._story(parts),
            f'replay("{schedule}")',
        ]
        return ScheduleError("\n".join(lines), schedule)

    def _story(self, parts: list[Segment]) -> list[str]:
        """What each program was about to do when it lost its turn."""
        execution = self._execution()
        execution.after_step = None
        lines: list[str] = []
        try:
            execution.start()
            for program, steps in parts:
                for _ in range(steps):
                    execution.step(program)
                cursor = execution.cursors[program]
                end = "ends" if cursor.finished else f"stops before {describe(cursor.access)}"
                lines.append(f"  {self._programs[program].name}: {steps} steps, {end}")
        except ProgramError:
            lines.append(f"  {self._programs[execution.last].name} raises")
        finally:
            execution.close()
        if len(lines) > 2 * _STORY_ENDS:
            cut = f"  ... {len(lines) - 2 * _STORY_ENDS} turns ..."
            lines[_STORY_ENDS:-_STORY_ENDS] = [cut]
        return lines


@dataclass(frozen=True)
class _Attempt:
    """One run of a schedule: the steps taken, what a check sees, and the error if it failed."""

    trace: list[int]
    run: Run
    error: Exception | None


def _journal(tensor: torch.Tensor) -> Journal:
    if tensor.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
        raise InvalidArgument(f"a journal holds integers, not {tensor.dtype}")
    if not tensor.is_contiguous():
        raise InvalidArgument("a journal must be contiguous")
    size = tensor.element_size()
    return Journal(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * size, size)
