"""A debug heap from the host: its table of blocks, the recorded faults, and the leaks.

The layout is that of ``kernels/debug/block_table.py``. Everything here expects the heap to be at
rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from devalloc.errors import (
    CorruptionError,
    DevallocError,
    DoubleFree,
    InvalidArgument,
    InvalidFree,
    InvalidPointer,
    Overflow,
    UseAfterFree,
)
from devalloc.heap.devices import INTERPRETED
from devalloc.heap.leaks import LeakReport
from devalloc.heap.recorded_errors import Fault
from devalloc.kernels import layout
from devalloc.kernels.debug import block_table, debug_upkeep
from devalloc.sizes import MAX_SLOT, PAGE_BYTES
from devalloc.sources import Segment, Source

OWN_TAGS = 256
"""Smaller tags are the user's own numbers; names get numbers from here on."""

GUARD_BYTES = 32
"""What a block takes, at least, beside what was asked for: see ``block_table.padded_size``."""

_ENTRY = block_table.ENTRY_WORDS.value
_CELLS = block_table.PAGE_CELLS.value
_NEIGHBOUR_BYTES = 64
# Blocks are wide in the interpreter, where a program costs the same at any width.
_AUDIT_CELLS = 1024 if INTERPRETED else 128
_FINDERS = ("free", "malloc", "realloc", "audit", "pointer", "gather", "scatter")
_KINDS: dict[int, type[DevallocError]] = {
    layout.E_DOUBLE_FREE.value: DoubleFree,
    layout.E_INVALID_FREE.value: InvalidFree,
    block_table.E_OVERFLOW.value: Overflow,
    block_table.E_USE_AFTER_FREE.value: UseAfterFree,
    layout.E_INVALID_POINTER.value: InvalidPointer,
}


@dataclass(frozen=True)
class _Blocks:
    """Entries of the table, decoded; arrays of one length."""

    address: np.ndarray
    size: np.ndarray
    tag: np.ndarray
    ticks: np.ndarray
    live: np.ndarray


def largest_request(nbytes: int) -> int:
    """The largest request for which a debug heap needs no more than ``nbytes`` in one piece."""
    request = max(nbytes - GUARD_BYTES, 0)
    # (A power of two takes a slot of twice its size, the number below it only the guards.)
    doubled = request & (request - 1) == 0 and request <= MAX_SLOT and 2 * request > nbytes
    return request - 1 if doubled else request


class Tags:
    """Names of owners and their numbers; the same name always has the same number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def number(self, tag: str | int) -> int:
        """The number of a name, made when the name is new; a number is returned as it is."""
        if isinstance(tag, str):
            if tag not in self._numbers:
                if not tag or tag.isdigit():  # what `name` gives for tags without a name
                    raise InvalidArgument(
                        f"the name of a tag needs a character that is not a digit, not {tag!r}; "
                        "pass a number as an int, and 0 for no tag"
                    )
                number = OWN_TAGS + len(self._numbers)
                if number > block_table.MAX_TAG.value:
                    raise InvalidArgument(f"no number is left for the tag {tag!r}: reuse names")
                self._numbers[tag] = number
                self._names[number] = tag
            return self._numbers[tag]
        if not isinstance(tag, int) or not (0 <= tag < OWN_TAGS or tag in self._names):
            raise InvalidArgument(
                f"a tag is a name, a number from 1 to {OWN_TAGS - 1}, what Heap.tag gave, or 0 for "
                f"none, not {tag!r}"
            )
        return tag

    def name(self, number: int) -> str:
        """The text for a tag in messages; empty for 0."""
        return self._names.get(number, str(number) if number else "")


class DebugTable:
    """The table of one debug heap.

    Parameters
    ----------
    source : Source
        Where its memory comes from: a quarter of the heap and a little more.
    pages : int
        Pages that the heap may have.
    base : int
        Address of page 0; the page before it must be writable.
    everything : bool
        Whether all of a freed block is poisoned and checked, whatever its size.
    grows : bool
        Whether the heap grows. Then there is only address space at first, and no page: who
        maps memory for more, `words_of` them, sets `pages`.
    """

    def __init__(
        self, source: Source, pages: int, base: int, everything: bool, grows: bool = False
    ) -> None:
        self.pages = 0 if grows else pages
        self.base = base
        self._everything = everything
        self._entries = (block_table.MARKS.value + pages + 1) // 2 * 2
        self.segment = Segment(source, self.words_of(pages) * 8, mapped=not grows)

    @cached_property
    def _words(self) -> torch.Tensor:
        # (Not before there is memory, in a heap that grows.)
        return self.segment.view().view(torch.int64)

    def words_of(self, pages: int) -> int:
        """Length of the table up to the entries of the first ``pages`` pages."""
        return self._entries + pages * _CELLS * _ENTRY

    def attach(self, control: torch.Tensor) -> None:
        """Empty the table and write its address into a control block, on the current stream."""
        self._words[: self.words_of(self.pages)].zero_()
        first = block_table.TABLE_WORD.value
        words = [self.segment.address, self._entries, int(self._everything)]
        control[first : first + 3].copy_(torch.tensor(words, dtype=torch.int64, device="cpu"))

    def now(self) -> int:
        ticks = torch.zeros(1, dtype=torch.int64, device=self._words.device)
        debug_upkeep.clock_kernel[(1,)](ticks, num_warps=1)
        return int(ticks)

    # Faults -----------------------------------------------------------------------------------

    def faults(self, tags: Tags) -> list[Fault]:
        """The recorded faults, at most MAX_FAULTS, in the order in which they were found."""
        head = self._words[: block_table.MARKS.value].tolist()
        count = min(head[0], block_table.MAX_FAULTS.value)
        if count == 0:
            return []
        now = self.now()
        start, step = block_table.FAULTS.value, block_table.FAULT_WORDS.value
        rows = (head[start + i * step : start + (i + 1) * step] for i in range(count))
        return [self._fault(row, now, tags) for row in rows]

    def clear_faults(self) -> None:
        self._words[: block_table.MARKS.value].zero_()

    def _fault(self, row: list[int], now: int, tags: Tags) -> Fault:
        kind, at, block, word, birth, finder, program, _ = row
        error = _KINDS[kind]
        size = word & block_table.MAX_BYTES.value
        tag = tags.name((word >> block_table.TAG_SHIFT.value) & block_table.MAX_TAG.value)
        found_by = _FINDERS[finder]
        owner = f"block of {size} bytes at {block:#x} ({_owner(tag)}"
        age = _seconds(now, birth & block_table.MAX_TICKS.value)
        place = _place(at, self.base, self.pages * PAGE_BYTES)
        found = f"found by {found_by} in program {program}"
        if error is DoubleFree:
            text = (
                f"double free of {at:#x} ({place}) in program {program}: the {owner}) was freed "
                "before"
            )
        elif error is InvalidFree:
            text = (
                f"invalid free of {at:#x} ({place}) in program {program}: no block begins "
                f"there{self._inside(at, tags)}; free exactly what malloc returned"
            )
        elif error is InvalidPointer:
            text = f"invalid pointer to {at:#x} ({place}); {found}: "
            left = block + size - at
            if at == 0:
                text += "malloc gave no memory; mask with addr != 0"
            elif not block:
                text += "there is no live block"
            elif not word >> block_table.LIVE_SHIFT.value & 15:
                text += f"the {owner}, allocated {age:.3g} s ago) was freed"
            elif at == block:
                text += f"the {owner}) is too small"
            elif left > 0:
                text += f"of the {owner}) only {_count(left)} are left there"
            else:
                text += f"it is {_behind(-left)} the end of the {owner})"
        elif error is UseAfterFree:
            text = (
                f"use after free: the byte at {at:#x} ({place}) was written after it was freed, "
                f"{_behind(at - block)} the start of what was the {owner}, allocated "
                f"{age:.3g} s ago); {found}"
            )
        else:
            end = block + size
            distance = (
                f"{_count(block - at)} before the start"
                if at < block
                else f"{_behind(at - end)} the end"
            )
            text = (
                f"overflow: the byte at {at:#x} ({place}) was written, {distance} of the {owner}, "
                f"allocated {age:.3g} s ago){self._neighbour(at, block, tags)}; {found}"
            )
        return Fault(error, at, block, size, tag, found_by, program, text)

    def _neighbour(self, at: int, block: int, tags: Tags) -> str:
        """Text: the block whose owner may have written to ``at``, just outside ``block``."""
        near = self._page_blocks(at)
        if at < block:
            ends = near.address + near.size
            found = np.flatnonzero((near.address < block) & (ends <= at))[-1:]
            where = "behind the end"
            distance = at - ends[found]
        else:
            found = np.flatnonzero(near.address > at)[:1]
            where = "before the start"
            distance = near.address[found] - at
        if not len(found) or distance[0] > _NEIGHBOUR_BYTES:
            return ""
        i = int(found[0])
        tag = tags.name(int(near.tag[i]))
        return (
            f", and {_count(int(distance[0]))} {where} of the block of {near.size[i]} bytes at "
            f"{near.address[i]:#x} ({_owner(tag)})"
        )

    def _inside(self, at: int, tags: Tags) -> str:
        """Text: the live block that ``at`` is inside of."""
        if not 0 <= at - self.base < self.pages * PAGE_BYTES:
            return ""
        near = self._page_blocks(at)
        inside = near.live & (near.address < at) & (at < near.address + near.size)
        if not inside.any():
            return ""
        i = int(np.flatnonzero(inside)[0])
        return (
            f"; it lies {_count(at - int(near.address[i]))} inside the block of {near.size[i]} "
            f"bytes at {near.address[i]:#x} ({_owner(tags.name(int(near.tag[i])))})"
        )

    # Blocks -----------------------------------------------------------------------------------

    def _page_blocks(self, address: int) -> _Blocks:
        """The blocks, live and freed, of the page or the run that contains an address."""
        page = (address - self.base) // PAGE_BYTES
        if not 0 <= page < self.pages:
            page = 0
        use = int(self._words[block_table.MARKS.value + page]) & 0xFFFFFFFF
        page -= max(use - block_table.RUN_USE.value, 0)
        cells = torch.arange(page * _CELLS, (page + 1) * _CELLS, device=self._words.device)
        return self._decode(cells, live_only=False)

    def live_blocks(self) -> _Blocks:
        """All live blocks, by address; there may be very many."""
        found = []
        step = 1 << 24  # 256 MiB of entries at a time
        flags = self._words[self._entries : self.words_of(self.pages) : _ENTRY]
        for first in range(0, self.pages * _CELLS, step):
            live = (flags[first : first + step] >> block_table.LIVE_SHIFT.value) & 15
            found.append(torch.nonzero(live).flatten() + first)
        return self._decode(torch.cat(found), live_only=True)

    def _decode(self, cells: torch.Tensor, live_only: bool) -> _Blocks:
        """The entries in some cells, without those of an earlier epoch than their page's."""
        known = self._words[self._entries : self.words_of(self.pages)]
        entries = known.view(-1, _ENTRY)[cells].cpu().numpy()
        marks = self._words[block_table.MARKS.value + cells // _CELLS].cpu().numpy()
        index = cells.cpu().numpy()
        word, birth = entries[:, 0], entries[:, 1]
        epoch = (birth >> block_table.EPOCH_SHIFT.value) & block_table.MAX_EPOCH.value
        live = ((word >> block_table.LIVE_SHIFT.value) & 15) != 0
        keep = (word != 0) & (epoch == ((marks >> 32) & block_table.MAX_EPOCH.value))
        keep &= live | (not live_only)
        word, birth, index, live = word[keep], birth[keep], index[keep], live[keep]
        granule = index * 4 + ((word >> block_table.GRANULE_SHIFT.value) & 3)
        return _Blocks(
            address=self.base + granule * 16,
            size=word & block_table.MAX_BYTES.value,
            tag=(word >> block_table.TAG_SHIFT.value) & block_table.MAX_TAG.value,
            ticks=birth & block_table.MAX_TICKS.value,
            live=live,
        )

    def leaks(self, tags: Tags) -> LeakReport:
        blocks = self.live_blocks()
        ages = _seconds(self.now(), blocks.ticks)
        return LeakReport(blocks.address, blocks.size, blocks.tag, ages, tags.name)

    # The audit --------------------------------------------------------------------------------

    def audit(self, control: torch.Tensor, live: int, tags: Tags) -> None:
        """Look at every guard and raise an error if one was overwritten.

        Changes nothing, not even the recorded faults. `live` is how many blocks are live according
        to the heap.

        Raises
        ------
        Overflow, UseAfterFree
            For the first that was found; the message says how many of each there are.
        CorruptionError
            If table and heap disagree on how many blocks are live (D1).
        """
        counters = control[layout.ERRORS.value : layout.RECORD_COUNT.value]
        head = self._words[: block_table.MARKS.value]
        saved = counters.clone(), head.clone()
        counters.zero_()
        head.zero_()
        live_count = torch.zeros(1, dtype=torch.int64, device=control.device)
        debug_upkeep.audit_kernel[(self.pages * _CELLS // _AUDIT_CELLS,)](
            control.view(torch.uint64), live_count, BLOCK=_AUDIT_CELLS, num_warps=1
        )
        faults = self.faults(tags)
        counts = counters.tolist()
        counters.copy_(saved[0])
        head.copy_(saved[1])
        if faults:
            found = ", ".join(
                f"{counts[kind]} x {name}"
                for kind, name in ((block_table.E_OVERFLOW.value, "overflow"),
                                   (block_table.E_USE_AFTER_FREE.value, "use after free"))
                if counts[kind]
            )  # fmt: skip
            raise faults[0].kind(f"{faults[0].message}. Found by this audit: {found}")
        if int(live_count) != live:
            raise CorruptionError(
                f"D1: the table has {int(live_count)} live blocks, the heap {live}: the table was "
                "overwritten, or the heap used through a handle that is not its own"
            )


def _owner(tag: str) -> str:
    if not tag:
        return "no tag"
    return f"tag {tag}" if tag.isdigit() else f"tag {tag!r}"


def _place(address: int, base: int, capacity: int) -> str:
    offset = address - base
    if 0 <= offset < capacity:
        return f"offset {offset:#x} of the heap"
    return "before the heap" if -PAGE_BYTES <= offset < 0 else "not an address of this heap"


def _count(nbytes: int) -> str:
    return f"{nbytes} byte{'s' * (nbytes != 1)}"


def _behind(nbytes: int) -> str:
    return f"{_count(nbytes)} behind" if nbytes else "right at"


def _seconds(now: int, ticks: Any) -> Any:
    """How long ago ``ticks``, an int or an array of them, was."""
    elapsed = (now - ticks) & block_table.MAX_TICKS.value
    return elapsed * (1 << block_table.TICK_LOG2.value) / 1e9
