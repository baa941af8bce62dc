"""A scenario of the experiment in benchmarks/lines: programs with scripts, what lives before, what
must hold after every step, and what must hold in the end.

After every step (a step is one atomic of a program):

- L1: a page whose bit is set has no class, and none of its live bits is set.
- L2: no page has less than nothing out, a slab has the half that belongs to its class, and only a
  slab is SPANNED.
- L3: live bits lie where slots of the page's class begin, or at the beginning of a run. With the
  slots in magazines they are no more than what is out. No page of a run is free, or has a class.

At rest:

- L4: of every slab exactly the slots that are live or in magazines are out; a page that is no slab
  has word 0, and its bit is set unless it belongs to a run.
- L5: a slab with nothing out is kept: whoever took the last slot out has retired the others.
- L6: the live bits are those of the blocks that the programs hold, each in a page of its class.
- L7: when these were freed, magazines emptied and kept pages retired, all pages are free.

And what the programs saw (tests/interleaving/history.py): blocks that are live at the same time do
not overlap, and the calls that got memory are linearisable. When a malloc may fail is not checked:
the experiment does not promise that it fails only if there is no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from benchmarks.lines import heap as lines_heap
from benchmarks.lines import layout
from benchmarks.lines import pages as lines_pages
from benchmarks.lines.heap import free, malloc, release_span
from benchmarks.lines.host import Lines
from devalloc.sizes import CLASS_SIZES, CLASS_SLOTS, PAGE_BYTES
from devalloc.testing import Interleaving, Launch, Report, Run
from tests.interleaving.history import History, blocks_of
from tests.interleaving.lab import SCALE, SHRINK, SLOTS, STEPS, Plan
from tests.interleaving.scripts import (
    ENTRIES,
    FREE,
    FREE_LANES,
    LANES,
    MALLOC,
    MALLOC_LANES,
    MALLOC_TWO,
    ROW,
    Script,
    table,
)

BASE = 1 << 40  # no memory is behind the pages

# A program that finds no page, or no open place, tries again as often as this and not as on a
# device: the schedules are long enough.
ROUNDS = 3
TRIES = 2

WORD_OUT = layout.OUT_MASK.value
KEPT = layout.KEPT.value
SLAB = layout.SLAB.value
RUN = layout.RUN.value


@triton.jit
def run_lines(heap, script, slots, journal, OPS: tl.constexpr, POLLS: tl.constexpr):
    """Carry out ``OPS`` operations of (kind, bytes, slot); a kind below 0 ends."""
    lane = tl.arange(0, LANES)
    program = tl.program_id(0)
    i = program * 0
    while i < OPS:
        row = script + (program * OPS + i) * ROW
        kind = tl.load(row)
        amount = tl.load(row + 1)
        slot = slots + tl.load(row + 2)
        entry = journal + (program * OPS + i) * ENTRIES
        if kind >= 0:
            tl.store(entry, 1)
            if kind == MALLOC:
                tl.store(slot, malloc(heap, amount, amount > 0, POLLS))
            if kind == FREE:
                addr = tl.load(slot)
                free(heap, addr, addr != 0)
            if kind == MALLOC_LANES:
                tl.store(slot + lane, malloc(heap, amount + lane * 0, lane < LANES, POLLS))
            if kind == MALLOC_TWO:
                tl.store(slot + lane, malloc(heap, amount << (lane & 1), lane < LANES, POLLS))
            if kind == FREE_LANES:
                free(heap, tl.load(slot + lane), lane < LANES)
            many = (kind == MALLOC_LANES) | (kind == MALLOC_TWO) | (kind == FREE_LANES)
            inside = (lane == 0) | many
            tl.store(entry + 1 + lane, tl.load(slot + lane, mask=inside), mask=inside)
        i += 1


@triton.jit
def drain_kernel(heap, addrs, n, spans, count):
    """Free ``n`` addresses one after the other, and empty ``count`` magazines."""
    i = n * 0
    while i < n:
        addr = tl.load(addrs + i)
        free(heap, addr, addr != 0)
        i += 1
    i = n * 0
    while i < count:
        release_span(heap, tl.atomic_xchg(spans + i, tl.full((), 0, tl.int64)))
        i += 1


@triton.jit
def take_nothing(heap, cls, count):
    """``take_span`` without magazines."""
    return tl.full((), 0, tl.int64)


@triton.jit
def put_nothing(heap, cls, span, word):
    """``put_span`` without magazines."""
    return span < 0


@triton.jit
def find_nothing(heap, nbytes, count):
    """``malloc_last`` without searches."""
    return nbytes * 0


@contextmanager
def without(scenario: LinesScenario) -> Iterator[None]:
    """Let programs give up sooner, and do without what the scenario does without."""
    changes = [
        (lines_heap, "ROUNDS", tl.constexpr(ROUNDS)),
        (lines_pages, "TRIES", tl.constexpr(TRIES)),
    ]
    if not scenario.magazines:
        changes += [(lines_heap, "take_span", take_nothing), (lines_heap, "put_span", put_nothing)]
    if not scenario.searches:
        changes += [(lines_heap, "malloc_last", find_nothing)]
    with ExitStack() as stack:
        for module, name, value in changes:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


@dataclass(frozen=True)
class LinesScenario:
    """Programs that meet in a heap of the experiment.

    ``before``: sizes of blocks that live in slots 0, 1, ... when they begin. ``magazines``: how
    many there are; 0: nothing is put into magazines. ``searches``: whether a malloc searches that
    finds nothing by its line. ``polls``: how often a program looks whether a place is open.
    ``wrong``: frees of what is not live any more. ``nulls``: whether a malloc may fail; ``served``:
    slots that hold an address in the end. ``opened``: how many places may have been opened, and
    ``in_use``: how many pages be in use in the end, if that is limited.
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
    polls: int = 2
    wrong: int = 0
    nulls: bool = True
    served: tuple[int, ...] = ()
    opened: int | None = None
    in_use: int | None = None
    split_blocks: bool = False

    def laboratory(self, shrink_seconds: float = SHRINK) -> LinesLaboratory:
        return LinesLaboratory(self, shrink_seconds)

    def explore(self, scale: float = SCALE, shrink_seconds: float = SHRINK) -> Iterator[Report]:
        """Explore by every strategy of the plan, one after the other; raises ScheduleError."""
        with self.laboratory(shrink_seconds) as laboratory:
            for strategy, schedules in self.plan:
                yield laboratory.interleaving.explore(strategy, max(1, int(schedules * scale)))


class LinesLaboratory:
    """A heap in the state in which a scenario begins, and its programs."""

    def __init__(self, scenario: LinesScenario, shrink_seconds: float) -> None:
        self.scenario = scenario
        self.without = without(scenario)
        self.heap = heap = Lines(
            scenario.pages * PAGE_BYTES,
            "cpu",
            stripes=scenario.stripes,
            ring=scenario.ring,
            magazines=scenario.magazines or 1,
        )
        self.view = View(heap)
        self.slots = torch.zeros(SLOTS, dtype=torch.int64)
        for slot, nbytes in enumerate(scenario.before):
            heap.malloc_scalars(self.slots[slot : slot + 1], nbytes, 1)
        addresses = self.slots[: len(scenario.before)].tolist()
        assert all(addresses), f"the heap of {scenario.name} is too small for what lives before"
        self.before = blocks_of(addresses, scenario.before)
        self.script, ops = table(scenario.script)
        self.journal = torch.zeros(len(scenario.script) * ops * ENTRIES.value, dtype=torch.int64)
        self._sound: set[bytes] = set()
        self.interleaving = Interleaving(
            Launch(
                run_lines,
                (len(scenario.script),),
                heap.handle,
                self.script,
                self.slots,
                self.journal,
                OPS=ops,
                POLLS=scenario.polls,
            ),
            check=self.check,
            invariant=self.hold,
            journal=self.journal,
            split_blocks=scenario.split_blocks,
            step_limit=STEPS * 4 if scenario.split_blocks else STEPS,
            shrink_seconds=shrink_seconds,
        )

    def __enter__(self) -> LinesLaboratory:
        self.without.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.without.__exit__(None, None, None)

    def hold(self, run: Run) -> None:
        """L1 to L3, after every step."""
        self.view.check()

    def check(self, run: Run) -> None:
        """What must hold at the end of every schedule."""
        scenario = self.scenario
        history = History.read(scenario.script, run.events, self.before, BASE, scenario.pages)
        assert scenario.nulls or not history.nulls, f"a malloc failed\n{history}"
        addresses = self.slots.tolist()
        for slot in scenario.served:
            assert addresses[slot], f"the malloc into slot {slot} failed\n{history}"
        opened = self.view.opened()
        assert scenario.opened is None or opened <= scenario.opened, (
            f"{opened} places were opened\n{history}"
        )
        in_use = sum(self.view.word(page) & WORD_OUT != 0 for page in range(scenario.pages))
        assert scenario.in_use is None or in_use <= scenario.in_use, (
            f"{in_use} pages are in use\n{history}"
        )
        history.calls = [
            call for call in history.calls if call.address != 0 or not call.op.allocates
        ]
        history.assert_linearisable(scenario.wrong)
        state = self.heap.handle.numpy().tobytes()
        if state not in self._sound:
            self.view.check()
            self.view.check_rest(history.live)
            self.check_drained(history)
            self._sound.add(state)

    def check_drained(self, history: History) -> None:
        """L7."""
        handle = self.heap.handle
        live = torch.tensor([*history.live, 0], dtype=torch.int64)
        spans = handle[-len(self.view.spans) :]
        drain_kernel[(1,)](handle, live, len(history.live), spans, len(spans))
        self.view.check()
        self.view.check_rest({})
        self.view.retire_kept()
        left = [page for page in range(self.scenario.pages) if not self.view.free(page)]
        assert not left, f"L7: pages {left} are not free after all was freed\n{history}"


class View:
    """The state of a heap, read and changed by the host."""

    def __init__(self, heap: Lines) -> None:
        words = heap.handle.numpy()
        records = int(words[layout.RECORDS.value])
        stride = layout.RECORD_WORDS.value
        self.pages = heap.pages
        self.records = words[records : records + heap.pages * stride].reshape(heap.pages, stride)
        self.rows = words[heap.geometry.rows : heap.geometry.rows + heap.geometry.chunks]
        self.spans = words[int(words[layout.MAGAZINES.value]) :]
        self.lines = words[layout.LINES.value : records : layout.LINE_STRIDE.value]
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
            assert 0 <= word < 1 << 46, f"L2: the word of page {page} is {word:#x}"
            assert out < WORD_OUT >> 1, f"L2: less than nothing is out of page {page}: {word:#x}"
            if word & RUN:
                assert word == out + RUN, f"L2: the word of page {page}, a run, is {word:#x}"
                length = int(self.records[page, layout.PAGE_WORD.value + layout.LENGTH.value])
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
                length = int(self.records[page, layout.PAGE_WORD.value + layout.LENGTH.value])
                seen[BASE + page * PAGE_BYTES] = length * PAGE_BYTES
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
                    seen[BASE + page * PAGE_BYTES + granule * 16] = CLASS_SIZES[class_of(word)]
        assert seen == blocks, f"L6: slots {listed(seen)} are live, blocks {listed(blocks)}"

    def retire_kept(self) -> None:
        """Make the slabs free that have nothing out: nothing runs."""
        for page in range(self.pages):
            word = self.word(page)
            if is_slab(word) and not word & WORD_OUT:
                self.records[page, layout.PAGE_WORD.value] = 0
                self.rows[page >> 6 : (page >> 6) + 1].view(np.uint64)[0] |= np.uint64(
                    1 << (page & 63)
                )


def listed(blocks: Mapping[int, int]) -> str:
    return ", ".join(f"{size} B at {address:#x}" for address, size in sorted(blocks.items()))


def is_slab(word: int) -> bool:
    return bool(word & SLAB)


def class_of(word: int) -> int:
    return word >> layout.CLASS_SHIFT.value & 63


def count_bits(words: np.ndarray) -> int:
    return int.from_bytes(words.tobytes(), "little").bit_count()
