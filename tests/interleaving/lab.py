"""A scenario of the heap: programs with scripts, what lives before, and what must hold after
every schedule.

Structure of the heap enters here alone: how to make one in which programs meet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from devalloc import Heap
from devalloc.heap.state import MIN_SHELF
from devalloc.sizes import PAGE_BYTES
from devalloc.testing import Exhaustive, Interleaving, Launch, Report, Run, Strategy
from tests.interleaving.history import History, blocks_of
from tests.interleaving.scripts import ENTRIES, Script, run_script, table
from tests.support import error_counts

SCALE = float(os.environ.get("DEVALLOC_SCHEDULES", "1"))
"""Times as many schedules as usual: 100 for a night."""

SHORT = 0.3
"""The part of each strategy's schedules that every change has to pass. It is enough for all
mutants; the rest is in the long suite."""

SHRINK = 8.0
"""Seconds to look for a simpler schedule when one fails."""

STEPS = 4000
"""Many times what the longest schedule takes: one that takes more is stuck. (Four times as many
where blocks are split: there an instruction is up to 64 steps, and the longest take 4600.)"""

SLOTS = 32

# Pages of a heap in which neighbouring programs use different stripes; in the small heaps of the
# other scenarios all programs meet in one, and nothing lies on the shelf.
TWO_STRIPES = 64
FOUR_STRIPES = 128
SHELF = MIN_SHELF

Plan = tuple[tuple[Strategy | Exhaustive, int], ...]


@dataclass(frozen=True)
class Scenario:
    """Programs that meet.

    ``before``: sizes of blocks that live in slots 0, 1, ... when they begin; ``filler``: pages
    that the host holds besides, so that a large heap is nearly full. ``plan``: strategies and how
    many schedules each. ``exact``: whether histories must be linearisable, wrong frees included;
    if not, there must be no wrong frees.
    """

    name: str
    pages: int
    script: Script
    plan: Plan
    before: tuple[int, ...] = ()
    filler: int = 0
    exact: bool = True
    split_blocks: bool = False
    patience: int = 8

    def laboratory(self, shrink_seconds: float = SHRINK) -> Laboratory:
        return Laboratory(self, shrink_seconds)

    def explore(self, scale: float = SCALE, shrink_seconds: float = SHRINK) -> Iterator[Report]:
        """Explore by every strategy of the plan, one after the other; raises ScheduleError."""
        with self.laboratory(shrink_seconds) as laboratory:
            for strategy, schedules in self.plan:
                yield laboratory.interleaving.explore(strategy, max(1, int(schedules * scale)))


class Laboratory:
    """A heap in the state in which a scenario begins, and its programs."""

    def __init__(self, scenario: Scenario, shrink_seconds: float = SHRINK) -> None:
        self.scenario = scenario
        self.heap = heap = Heap(scenario.pages * PAGE_BYTES)
        self.filler = heap.malloc([scenario.filler * PAGE_BYTES]).tolist()
        addresses = heap.malloc(list(scenario.before)).tolist()
        assert all(addresses), f"the heap of {scenario.name} is too small for what lives before"
        self.slots = torch.zeros(SLOTS, dtype=torch.int64)
        self.slots[: len(addresses)] = torch.tensor(addresses, dtype=torch.int64)
        self.before = blocks_of(addresses, scenario.before)
        if scenario.filler:
            self.before[-1] = (self.filler[0], scenario.filler * PAGE_BYTES)
        heap.audit()  # trims, too: nothing is cached when the programs begin
        self.script, ops = table(scenario.script)
        self.journal = torch.zeros(len(scenario.script) * ops * ENTRIES.value, dtype=torch.int64)
        self._sound: set[tuple[bytes, tuple[int, ...]]] = set()
        self.interleaving = Interleaving(
            Launch(
                run_script,
                (len(scenario.script),),
                heap.handle,
                self.script,
                self.slots,
                self.journal,
                OPS=ops,
            ),
            check=self.check,
            switch_at="writes",
            memory=[(heap.base, heap.capacity)],
            journal=self.journal,
            split_blocks=scenario.split_blocks,
            patience=scenario.patience,
            step_limit=STEPS * 4 if scenario.split_blocks else STEPS,
            shrink_seconds=shrink_seconds,
        )

    def __enter__(self) -> Laboratory:
        return self

    def __exit__(self, *_: object) -> None:
        self.heap.close()

    def check(self, run: Run) -> None:
        """What must hold at the end of every schedule."""
        scenario = self.scenario
        history = History.read(
            scenario.script, run.events, self.before, self.heap.base, scenario.pages
        )
        counts = error_counts(self.heap)
        assert counts.pop("out of memory", 0) == history.nulls, f"H5: failures\n{history}"
        wrong = counts.pop("double free", 0) + counts.pop("invalid free", 0)
        assert not counts, f"H5: recorded {counts}\n{history}"
        if scenario.exact:
            history.assert_linearisable(wrong)
        else:
            assert wrong == 0, f"H5: {wrong} wrong frees recorded\n{history}"
        self.check_heap(history)

    def check_heap(self, history: History) -> None:
        """H1 to H4 at rest, and again when everything was freed; once for each state."""
        live = tuple(sorted(history.live))
        state = (self.heap.handle.numpy().tobytes(), live)
        if state in self._sound:
            return
        heap = self.heap
        heap.audit()
        stats = heap.stats()
        assert stats.used + stats.free == heap.capacity
        assert stats.used >= sum(history.live.values()), f"H2: too little is in use\n{history}"
        heap.free(list(live))
        heap.audit()
        stats = heap.stats()
        assert stats.used == 0, f"H2: {stats.used} B are used after all was freed\n{history}"
        assert stats.largest_free == heap.capacity, (
            f"H3: only {stats.largest_free} B in one piece after all was freed\n{history}"
        )
        assert error_counts(heap) == {}, f"H5: a live block could not be freed\n{history}"
        whole = heap.malloc([heap.capacity]).tolist()
        assert whole == [heap.base], f"H3: the whole capacity is not to be had\n{history}"
        self._sound.add(state)
