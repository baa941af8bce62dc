"""A scenario of the heap: programs with scripts, the blocks before, and what must hold after every
step and in the end.

After every step (a step is one atomic of a program):

- L1: a page whose bit is set has no class, and none of its live bits is set.
- L2: no page has less than nothing out, a slab has the half that belongs to its class, and only a
  slab is SPANNED.
- L3: live bits lie where slots of the page's class begin, or at the beginning of a run. With the
  slots in magazines they are no more than what is out. No page of a run is free, or has a class.

At rest:

- L4: of every slab exactly the slots that are live or in magazines are out; a page that is no slab
  has word 0, and its bit is set unless it belongs to a run.
- L5: a slab with nothing out is kept: the program that took the last slot out retired the others.
- L6: the live bits are those of the blocks that the programs hold, each in a page of its class.
- L7: `Heap.audit` agrees, and does so again when all blocks were freed; then nothing is in use, and
  the whole capacity can be allocated in one piece.

And what the programs saw (``history``): blocks that are live at the same time do not overlap; the
calls are linearisable, where those that returned 0 count if no call of another program was under
way meanwhile; and as many failures and wrong frees were recorded as there were.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl

from devalloc import Heap
from devalloc.heap.geometry import Geometry
from devalloc.kernels import allocation, freeing, layout, search
from devalloc.kernels import pages as page_kernels
from devalloc.kernels.magazines import release
from devalloc.sizes import CLASS_SIZES, CLASS_SLOTS, PAGE_BYTES
from devalloc.testing import Exhaustive, Interleaving, Launch, Report, Run, Strategy
from tests.interleaving.history import History, blocks_of
from tests.interleaving.scripts import ENTRIES, Script, run_script, table
from tests.support import malloc_scalars

SCALE = float(os.environ.get("DEVALLOC_SCHEDULES", "1"))
"""Times as many schedules as usual: 100 for a night."""

SHORT = 0.3
"""The part of each strategy's schedules that every change has to pass. It is enough for all
mutants; the rest is in the long suite."""

SHRINK = 8.0
"""Seconds to look for a simpler schedule when one fails."""

STEPS = 4000
"""Many times what the longest schedule takes: one that takes more is stuck. (Four times as many
where blocks are split: there an instruction is up to 64 steps.)"""

SLOTS = 32

# A program that finds no page, or no open place, tries again as often as this and not as on a
# device: the schedules are long enough.
ROUNDS = 3
TRIES = 2

WORD_OUT = layout.OUT_MASK.value
KEPT = layout.KEPT.value
SLAB = layout.SLAB.value
RUN = layout.RUN.value


def run_pages(word: int) -> int:
    """The pages of a run, by the word of its first."""
    return word >> layout.HALF_SHIFT.value & layout.HALF_MASK.value


Plan = tuple[tuple[Strategy | Exhaustive, int], ...]


@triton.jit
def take_nothing(heap, ptr, cls, counts, wants):
    """``take_spans`` without magazines."""
    return (cls * 0).to(tl.int64)


@triton.jit
def put_nothing(heap, last, cls, span, word, puts):
    """``put_span`` without magazines."""
    release(heap, span, puts)


@triton.jit
def put_no_lanes(heap, last, page, granule, word, active):
    """``put_lanes`` without magazines."""
    return page, active.to(tl.int32)


@triton.jit
def find_nothing(heap, nbytes, count):
    """``malloc_last`` without searches."""
    return nbytes * 0


@contextmanager
def without(scenario: Scenario) -> Iterator[None]:
    """Let programs give up sooner, and do without what the scenario does without."""
    changes = [
        (allocation, "ROUNDS", tl.constexpr(ROUNDS)),
        (page_kernels, "TRIES", tl.constexpr(TRIES)),
        (search, "GUESSES", tl.constexpr(scenario.guesses)),
    ]
    if not scenario.magazines:
        changes += [
            (allocation, "take_spans", take_nothing),
            (freeing, "put_span", put_nothing),
            (freeing, "put_lanes", put_no_lanes),
        ]
    if not scenario.searches:
        changes.append((allocation, "malloc_last", find_nothing))
    with ExitStack() as stack:
        for module, name, value in changes:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


@dataclass(frozen=True)
class Scenario:
    """Programs that meet.

    ``before``: sizes of the blocks in slots 0, 1, ... when they begin. ``magazines``: how many
    there are; 0: nothing is put into magazines. ``searches``: whether a malloc searches that finds
    nothing by its line, and ``guesses``: how many pages it tries before. ``polls``: how often a
    program looks whether a place is open. ``exact``: whether histories must be linearisable, wrong
    frees included; if not, there must be no wrong frees. ``doubles``: whether all wrong frees must
    be told as double ones. ``nulls``: whether a malloc may fail; ``served``: slots that hold an
    address in the end. ``opened``: how many places may have been opened, if that is limited.
    ``first``: the program whose calls must end before any other program ends.
    """

    name: str
    pages: int
    script: Script
    plan: Plan
    before: tuple[int, ...] = ()
    stripes: int = 1
    ring: int = 2
    magazines: int = 1
    searches: bool = True
    guesses: int = 1
    polls: int = 2
    exact: bool = True
    doubles: bool = False
    nulls: bool = True
    served: tuple[int, ...] = ()
    opened: int | None = None
    first: int | None = None
    split_blocks: bool = False

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
        self.without = without(scenario)
        self.heap = heap = small_heap(scenario)
        self.view = View(heap)
        addresses = [int(malloc_scalars(heap, [nbytes])) for nbytes in scenario.before]
        assert all(addresses), f"the heap of {scenario.name} is too small for the blocks before"
        self.slots = torch.zeros(SLOTS, dtype=torch.int64)
        self.slots[: len(addresses)] = torch.tensor(addresses, dtype=torch.int64)
        self.before = blocks_of(addresses, scenario.before)
        self.script, ops = table(scenario.script)
        self.journal = torch.zeros(len(scenario.script) * ops * ENTRIES.value, dtype=torch.int64)
        self._sound: set[bytes] = set()
        self.launch = Launch(
            run_script,
            (len(scenario.script),),
            heap.handle,
            self.script,
            self.slots,
            self.journal,
            OPS=ops,
            POLLS=scenario.polls,
        )
        self.interleaving = Interleaving(
            self.launch,
            check=self.check,
            invariant=self.hold,
            memory=[(heap.base, heap.capacity)],
            journal=self.journal,
            split_blocks=scenario.split_blocks,
            step_limit=STEPS * 4 if scenario.split_blocks else STEPS,
            shrink_seconds=shrink_seconds,
        )

    def __enter__(self) -> Laboratory:
        self.without.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.without.__exit__(None, None, None)
        self.heap.close()

    def hold(self, run: Run) -> None:
        """L1 to L3, after every step."""
        self.view.check()

    def check(self, run: Run) -> None:
        """What must hold at the end of every schedule."""
        scenario = self.scenario
        history = History.read(
            scenario.script, run.events, self.before, self.heap.base, scenario.pages
        )
        failures, wrong = self.view.failures(), self.view.wrong_frees()
        invalid = int(self.view.errors[layout.E_INVALID_FREE.value])
        assert not (scenario.doubles and invalid), f"{invalid} double frees have another name"
        # (A search records them.)
        nulls = history.nulls if scenario.searches else 0
        assert failures == nulls, f"{failures} failures were recorded\n{history}"
        assert scenario.nulls or not history.nulls, f"a malloc failed\n{history}"
        addresses = self.slots.tolist()
        for slot in scenario.served:
            assert addresses[slot], f"the malloc into slot {slot} failed\n{history}"
        opened = self.view.opened()
        assert scenario.opened is None or opened <= scenario.opened, (
            f"{opened} places were opened\n{history}"
        )
        assert scenario.first is None or history.ends_first(scenario.first), (
            f"program {scenario.first} ended after another one\n{history}"
        )
        if scenario.exact:
            history.without_nulls(alone=scenario.searches).assert_linearisable(wrong)
        else:
            assert wrong == 0, f"{wrong} wrong frees were recorded\n{history}"
        state = self.heap.handle.numpy().tobytes()
        if state not in self._sound:
            self.view.check()
            self.view.check_rest(history.live)
            self.check_heap(history)
            self._sound.add(state)

    def check_heap(self, history: History) -> None:
        """L7."""
        heap = self.heap
        heap.audit()
        heap.free(list(history.live))
        heap.audit()
        stats = heap.stats()
        assert stats.used == 0, f"L7: {stats.used} B are used after all was freed\n{history}"
        assert stats.largest_free == heap.capacity, (
            f"L7: only {stats.largest_free} B in one piece after all was freed\n{history}"
        )
        self.view.check()
        self.view.check_rest({})
        if self.scenario.searches:
            whole = heap.malloc([heap.capacity]).tolist()
            assert whole == [heap.base], f"L7: the whole capacity is not free\n{history}"


def small_heap(scenario: Scenario) -> Heap:
    """A heap with as few lines, places and magazines as a scenario wants."""
    geometry = Geometry.of(scenario.pages, scenario.stripes, scenario.ring, scenario.magazines or 1)
    with mock.patch.object(Geometry, "of", return_value=geometry):
        return Heap(scenario.pages * PAGE_BYTES)


class View:
    """The state of a heap, read and changed by the host."""

    def __init__(self, heap: Heap) -> None:
        words = heap.handle.numpy()
        geometry = heap._geometry
        first, stride = geometry.records, layout.RECORD_WORDS.value
        self.base = heap.base
        self.pages = geometry.pages
        self.records = words[first : first + self.pages * stride].reshape(self.pages, stride)
        self.rows = words[geometry.rows : geometry.rows + geometry.chunks]
        self.spans = words[geometry.magazine_words]
        self.lines = words[geometry.line_words]
        self.errors = words[layout.ERRORS.value : layout.RECORD_COUNT.value]
        # For each class, where in the words of a page the live bits of its slots lie.
        places = np.zeros((len(CLASS_SIZES), 64), dtype=np.uint64)
        for cls, (size, slots) in enumerate(zip(CLASS_SIZES, CLASS_SLOTS, strict=True)):
            for granule in range(0, slots * (size >> 4), size >> 4):
                places[cls, granule & 63] |= np.uint64(1 << (granule >> 6))
        self.outside = ~places

    def word(self, page: int) -> int:
        return int(self.records[page, layout.PAGE_WORD.value])

    def live(self, page: int) -> np.ndarray:
        return self.records[page, :64].view(np.uint64)

    def free(self, page: int) -> bool:
        return bool(int(self.rows[page >> 6]) >> (page & 63) & 1)

    def failures(self) -> int:
        """How many failures were recorded."""
        return int(self.errors[layout.E_OUT_OF_MEMORY.value])

    def wrong_frees(self) -> int:
        """How many wrong frees were recorded; nothing else may have been."""
        double, invalid = layout.E_DOUBLE_FREE.value, layout.E_INVALID_FREE.value
        others = np.delete(self.errors, [double, invalid, layout.E_OUT_OF_MEMORY.value])
        assert not others.any(), f"errors that no program makes are recorded: {self.errors}"
        return int(self.errors[double] + self.errors[invalid])

    def opened(self) -> int:
        """Places opened by all lines."""
        # (Credits below zero have borrowed one from the upper half.)
        return sum((int(word) + (1 << 31) >> 32) - 1 for word in self.lines)

    def in_magazines(self) -> list[int]:
        """For each page, how many of its slots are in magazines."""
        counts = [0] * self.pages
        for span in self.spans.tolist():
            count = span >> layout.SPAN_COUNT.value & 0x3FFF
            if count:
                page = span & layout.PAGE_MASK.value
                word = self.word(page)
                cls = (span >> layout.SPAN_CLASS.value) - 1
                assert is_slab(word), f"L3: a magazine leads to page {page}, which is no slab"
                assert class_of(word) == cls, f"L3: a magazine has page {page} for class {cls}"
                counts[page] += count
        return counts

    def check(self) -> None:
        """L1 to L3."""
        held = self.in_magazines()
        for page in range(self.pages):
            word, live = self.word(page), self.live(page)
            out = word & WORD_OUT
            if is_slab(word):
                word &= ~layout.SPANNED.value  # advice
            assert 0 <= word < 1 << 57, f"L2: the word of page {page} is {word:#x}"
            assert out < WORD_OUT >> 1, f"L2: less than nothing is out of page {page}: {word:#x}"
            if word & RUN:
                length = run_pages(word)
                assert word == out + RUN + (length << layout.HALF_SHIFT.value), (
                    f"L2: the word of page {page}, a run, is {word:#x}"
                )
                for other in range(page, page + length):
                    inner = self.word(other) & ~WORD_OUT
                    assert not self.free(other), f"L3: page {other} is free, and of a run"
                    assert other == page or not inner, f"L3: page {other} of a run is {inner:#x}"
                assert not live[1:].any(), f"L3: live bits in the run at page {page}"
                assert int(live[0]) <= min(out, 1), f"L3: {live[0]:#x} is live in a run, {out} out"
                continue
            if not is_slab(word):
                assert word == out, f"L2: the word of page {page}, no slab, is {word:#x}"
                assert not live.any(), f"L1: live bits are set in page {page}, which is no slab"
                continue
            cls = class_of(word)
            assert not self.free(page), f"L1: page {page} is free, and a slab of class {cls}"
            half = word >> layout.HALF_SHIFT.value
            assert half == CLASS_SLOTS[cls] >> 1, f"L2: half of the slots of page {page} is {half}"
            assert not (live & self.outside[cls]).any(), (
                f"L3: live bits where no slots of page {page} begin"
            )
            used = count_bits(live) + held[page]
            assert used <= out, f"L3: {used} slots of page {page} are used, and {out} out"

    def check_rest(self, blocks: Mapping[int, int]) -> None:
        """L4 to L6, if blocks of these sizes live at these addresses."""
        held = self.in_magazines()
        seen = {}
        behind = 0  # the end of the run before
        for page in range(self.pages):
            word, live = self.word(page), self.live(page)
            out = word & WORD_OUT
            if word & RUN:
                assert page >= behind, f"L4: page {page} begins a run in another"
                assert out == live[0] == 1, f"L4: {out} out of the run at {page}, live {live[0]}"
                length = run_pages(word)
                seen[self.base + page * PAGE_BYTES] = length * PAGE_BYTES
                behind = page + length
                continue
            if not is_slab(word):
                assert word == 0, f"L4: the word of page {page} is {word:#x} at rest"
                taken = page < behind
                assert self.free(page) != taken, f"L4: page {page} has word 0 and is not free"
                continue
            used = count_bits(live) + held[page]
            assert used == out, f"L4: {used} slots of page {page} are used, and {out} out"
            assert out or word & KEPT, f"L5: page {page} has nothing out, and was not retired"
            for at, bits in enumerate(live.tolist()):
                granules = [(bit << 6) + at for bit in range(64) if bits >> bit & 1]
                for granule in granules:
                    seen[self.base + page * PAGE_BYTES + granule * 16] = CLASS_SIZES[class_of(word)]
        assert seen == blocks, f"L6: slots {listed(seen)} are live, blocks {listed(blocks)}"


def listed(blocks: Mapping[int, int]) -> str:
    return ", ".join(f"{size} B at {address:#x}" for address, size in sorted(blocks.items()))


def is_slab(word: int) -> bool:
    return bool(word & SLAB)


def class_of(word: int) -> int:
    return word >> layout.CLASS_SHIFT.value & 63


def count_bits(words: np.ndarray) -> int:
    return int.from_bytes(words.tobytes(), "little").bit_count()
