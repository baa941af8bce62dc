"""Schedules that say where programs lose their turn."""

import pytest
import torch
import triton
import triton.language as tl

from devalloc.testing import Interleaving, Launch, Run, ScheduleError
from tests.conftest import ON_GPU
from tests.interleaving.directed import NOT_REACHED, Turn, Turns

pytestmark = [
    pytest.mark.oldest,
    pytest.mark.skipif(ON_GPU, reason="interleaves interpreted kernels"),
]


@triton.jit
def look(counter):
    return tl.atomic_or(counter, tl.full((), 0, tl.int64))


@triton.jit
def twice_kernel(counter):
    """Two updates, each of which is lost if another comes between."""
    for _step in range(2):
        tl.atomic_xchg(counter, look(counter) + 1)


def counted(*turns: Turn) -> int:
    counter = torch.zeros(1, dtype=torch.int64)
    seen: list[int] = []

    def check(run: Run) -> None:
        seen.append(int(counter))

    lab = Interleaving(Launch(twice_kernel, (2,), counter), check=check)
    lab.explore(Turns(turns), 1)
    return seen[0]


@pytest.mark.parametrize(
    ("turns", "value"),
    [
        ((), 4),
        # Program 0 stops before its first or second exchange; what 1 counts meanwhile is lost.
        ((Turn(0, "twice_kernel"), Turn(1)), 2),
        ((Turn(0, "twice_kernel", 2), Turn(1)), 2),
        # ... and before its second look, of which none is lost.
        ((Turn(0, "look"), Turn(1)), 4),
        # Turns count from where the program stands.
        ((Turn(0, "twice_kernel"), Turn(0, "twice_kernel"), Turn(1, "look"), Turn(0)), 3),
    ],
)
def test_turns_end_where_they_say(turns: tuple[Turn, ...], value: int) -> None:
    assert counted(*turns) == value


@pytest.mark.parametrize("turn", [Turn(0, "twice_kernel", 3), Turn(1, "no_such_function")])
def test_a_place_that_is_not_reached_is_an_error(turn: Turn) -> None:
    with pytest.raises(ScheduleError, match=NOT_REACHED):
        counted(turn)


def test_a_loose_schedule_leaves_out_turns_that_are_not_reached() -> None:
    counter = torch.zeros(1, dtype=torch.int64)
    lab = Interleaving(Launch(twice_kernel, (2,), counter))
    turns = (Turn(0, "twice_kernel", 3), Turn(1))
    assert lab.explore(Turns(turns, loose=True), 1).schedules == 1


def test_a_failure_can_be_replayed() -> None:
    counter = torch.zeros(1, dtype=torch.int64)

    def check(run: Run) -> None:
        assert counter.item() == 4

    lab = Interleaving(Launch(twice_kernel, (2,), counter), check=check)
    with pytest.raises(ScheduleError, match="found by schedule 1 of 2 turns"):
        lab.explore(Turns((Turn(0, "twice_kernel"), Turn(1))), 1)
