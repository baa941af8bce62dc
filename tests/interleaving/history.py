"""What happened in one schedule, and whether a heap could have done it.

A *history* is the calls of all programs with the moments at which they began and ended. Two
questions are asked of it:

- Did blocks that were live at the same time overlap? A block is surely live from the end of the
  call that returned it to the beginning of the call that frees it.
- Is it *linearisable*: is there an order of the calls, in which a call that ended before another
  began comes first, and in which a heap that serves one call at a time could have given the same
  answers? For a malloc that returned 0 that means that at some moment between its beginning and
  its end no memory of that shape was free. (Which slot of a page a malloc gets is settled later
  than that it gets one, see "Why it is right" in docs/design/heap.md. So if there is no such
  order, each call may take effect at two moments: a malloc has a slot of its page, then an
  address; a free gives the address up, then the slot.)

Source of the search: Wing and Gong, Testing and verifying concurrent objects, 1993, with Lowe's
memory of configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from devalloc.sizes import PAGE_BYTES
from devalloc.testing import Event
from tests.interleaving.scripts import ENTRIES, Op, Script
from tests.plain_heap import Block, fits, has_room, set_aside


@dataclass
class Call:
    """One lane of one operation: ``address`` returned or freed, ``old`` given to a realloc."""

    program: int
    op: Op
    begin: int
    end: int
    address: int
    old: int = 0

    def overlaps(self, other: Call) -> bool:
        """Whether both were under way at one time, in different programs."""
        apart = self.end < other.begin or other.end < self.begin
        return self.program != other.program and not apart

    def __str__(self) -> str:
        name = {0: "malloc", 1: "free", 2: "realloc", 3: "free_at", 4: "malloc_lanes",
                5: "free_lanes", 6: "malloc_two"}[self.op.kind.value]  # fmt: skip
        what = f"{self.op.amount} B -> {self.address:#x}" if self.op.allocates else (
            f"{self.address:#x}" + (f" + {self.op.amount}" if self.op.amount else ""))  # fmt: skip
        return f"[{self.begin:3} {self.end:3}] program {self.program}: {name} {what}"


class State(NamedTuple):
    """How far a search for an order has come.

    ``done``: a bit for each call; ``live``: blocks that have an address; ``wrong``: wrong frees.
    Where calls take effect at two moments, ``pending``: calls of which one half is done, with their
    blocks; ``taken``: blocks that have a slot, all at the beginnings of their pages.
    """

    done: int
    pending: frozenset[tuple[int, Block]]
    live: frozenset[Block]
    taken: tuple[Block, ...]
    wrong: int


@dataclass
class History:
    """The calls of one schedule, in the order of their ends, and the blocks that are left."""

    base: int
    pages: int
    before: frozenset[Block]
    calls: list[Call] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        calls = sorted(self.calls, key=lambda call: call.begin)
        return "\n".join(str(call) for call in calls)

    # Reading and H1 ---------------------------------------------------------------------------

    @staticmethod
    def read(
        script: Script,
        events: Iterable[Event],
        slots: Mapping[int, Block],
        base: int,
        pages: int,
    ) -> History:
        """Follow the events; raises AssertionError where live blocks overlap or lie outside.

        ``slots``: what the shared slots hold at the beginning.
        """
        history = History(base, pages, frozenset(slots.values()))
        history.live = dict(slots.values())
        held = {slot: block[0] for slot, block in slots.items()}
        most = max(len(ops) for ops in script)
        begun: dict[tuple[int, int], int] = {}
        for moment, event in enumerate(events):
            place, entry = divmod(event.element, ENTRIES.value)
            at = divmod(place, most)
            op = script[at[0]][at[1]]
            slot = op.slot + max(entry - 1, 0)
            if entry == 0:
                begun[at] = moment
                if op.frees:
                    for lane in range(op.lanes):
                        history.live.pop(held.get(op.slot + lane, 0), None)
                continue
            old = held.get(slot, 0)
            op = op.of_lane(entry - 1)
            history.calls.append(Call(at[0], op, begun[at], moment, event.value, old))
            if op.allocates:
                held[slot] = event.value
                history._place(event.value, op)
                if event.value == 0 and op.frees and op.amount and old:
                    # A realloc that failed leaves the old block alone.
                    history.live[old] = dict(slots.values()).get(old, 0)
        return history

    def _place(self, address: int, op: Op) -> None:
        if address == 0:
            return
        size = set_aside(op.amount)
        end = self.base + self.pages * PAGE_BYTES
        assert self.base <= address <= end - size, (
            f"H1: {size} B at {address:#x} lie outside of the heap\n{self}"
        )
        assert address % 16 == 0, f"H1: {address:#x} is not aligned\n{self}"
        for other, length in self.live.items():
            assert other + length <= address or address + size <= other, (
                f"H1: {size} B at {address:#x} overlap the live {length} B at {other:#x}\n{self}"
            )
        self.live[address] = size

    @property
    def nulls(self) -> int:
        return sum(call.op.allocates and call.address == 0 for call in self.calls)

    # Linearisability --------------------------------------------------------------------------

    def ends_first(self, program: int) -> bool:
        """Whether a program's last call ended before that of any other."""
        last = {call.program: call.end for call in sorted(self.calls, key=lambda call: call.end)}
        return last[program] == min(last.values())

    def without_nulls(self, alone: bool) -> History:
        """The history without calls that returned 0: all of them, or if ``alone``, only those
        during which a call of another program was under way."""
        return replace(
            self,
            calls=[
                call
                for call in self.calls
                if call.address != 0
                or not call.op.allocates
                or (alone and not any(call.overlaps(other) for other in self.calls))
            ],
        )

    def assert_linearisable(self, wrong_frees: int) -> None:
        """Some order of the calls is one that a sequential heap could have served, with so many
        frees of what was not live."""
        assert self._ordered(wrong_frees) or self._ordered_in_halves(wrong_frees), (
            f"no order of these calls fits a heap of {self.pages} pages with "
            f"{len(self.before)} blocks live before and {wrong_frees} wrong frees "
            f"recorded:\n{self}"
        )

    def _ordered(self, wrong_frees: int) -> bool:
        """Whether there is such an order of whole calls."""
        return self._search(self._whole, wrong_frees)

    def _ordered_in_halves(self, wrong_frees: int) -> bool:
        """The same, where each call may take effect at two moments."""
        return self._search(self._half, wrong_frees)

    def _search(self, step: Callable[[int, State], State | None], wrong_frees: int) -> bool:
        everything = (1 << len(self.calls)) - 1
        taken = tuple(sorted(self._unplaced(block) for block in self.before))
        stack = [State(0, frozenset(), self.before, taken, 0)]
        met: set[State] = set()
        while stack:
            state = stack.pop()
            if state in met:
                continue
            met.add(state)
            if state.done == everything:
                if state.wrong == wrong_frees:
                    return True
                continue
            left = [at for at in range(len(self.calls)) if not state.done >> at & 1]
            first_end = min(self.calls[at].end for at in left)
            for at in left:
                if self.calls[at].begin <= first_end:
                    after = step(at, state)
                    if after is not None:
                        stack.append(after)
        return False

    def _whole(self, at: int, state: State) -> State | None:
        """The state after a call; None if it cannot come now."""
        after = self._apply(self.calls[at], state.live)
        if after is None:
            return None
        live, bad = after
        return state._replace(done=state.done | 1 << at, live=live, wrong=state.wrong + bad)

    def _half(self, at: int, state: State) -> State | None:
        """The state after what comes next of a call; None if it cannot come now."""
        call = self.calls[at]
        done = state.done | 1 << at
        began = next((block for which, block in state.pending if which == at), None)
        if began is not None:
            rest = state.pending - {(at, began)}
            if call.op.allocates:
                address, size = began
                if any(a < address + size and address < a + n for a, n in state.live):
                    return None
                return state._replace(done=done, pending=rest, live=state.live | {began})
            left = list(state.taken)
            left.remove(self._unplaced(began))
            return state._replace(done=done, pending=rest, taken=tuple(left))
        if call.op.allocates:
            block = (call.address, set_aside(call.op.amount))
            if call.address == 0:
                full = not has_room(state.taken, block[1], self.base, self.pages)
                return state._replace(done=done) if full else None
            more = tuple(sorted((*state.taken, self._unplaced(block))))
            if not fits(more, self.base, self.pages):
                return None
            return state._replace(pending=state.pending | {(at, block)}, taken=more)
        freed = next((block for block in state.live if block[0] == call.address), None)
        if freed is None or call.op.amount:
            bad = int(call.address != 0 or call.op.amount != 0)
            return state._replace(done=done, wrong=state.wrong + bad)
        return state._replace(pending=state.pending | {(at, freed)}, live=state.live - {freed})

    def _unplaced(self, block: Block) -> Block:
        """A slot as some slot of its page."""
        address, size = block
        return (address - (address - self.base) % PAGE_BYTES, size)

    def _apply(self, call: Call, live: frozenset[Block]) -> tuple[frozenset[Block], int] | None:
        """The blocks after a call, and whether it is a wrong free; None if it cannot be."""
        if call.op.allocates:
            size = set_aside(call.op.amount)
            if call.address == 0:
                return None if has_room(live, size, self.base, self.pages) else (live, 0)
            if any(a < call.address + size and call.address < a + n for a, n in live):
                return None
            return live | {(call.address, size)}, 0
        if call.address == 0 or call.op.amount:
            # Nothing to free, or an address at which no block begins.
            return live, int(call.op.amount != 0)
        block = next((block for block in live if block[0] == call.address), None)
        if block is None:
            return live, 1
        return live - {block}, 0


def blocks_of(addresses: Sequence[int], sizes: Sequence[int]) -> dict[int, Block]:
    """Slots that hold blocks allocated before: slot number to block."""
    return {
        slot: (address, set_aside(size))
        for slot, (address, size) in enumerate(zip(addresses, sizes, strict=True))
        if address
    }
