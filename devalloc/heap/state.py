"""Reading a heap from the host: its arrays, decoded, and what they say.

Works on copies in NumPy of what is small. The live bits, a hundredth of the heap, are counted where
the handle lies, which may be a copy of the heap's. Everything here expects the heap to be at rest.
`audit` says whether what is read agrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from devalloc.heap.geometry import CLASSES, Geometry
from devalloc.kernels import layout
from devalloc.sizes import CLASS_SIZES, CLASS_SLOTS, PAGE_BYTES, format_size

SIZES = np.array(CLASS_SIZES, dtype=np.int64)
SLOTS = np.array(CLASS_SLOTS, dtype=np.int64)
LIVE_WORDS = layout.LIVE_WORDS.value

FREE, SLAB, RUN, ABSENT = range(4)
"""Kinds of pages, as in a `Snapshot`."""

_STEP = 1 << 14  # pages whose live bits are looked at at a time: 8 MiB
_PRINTED_CLASSES = 6


@dataclass(frozen=True)
class ClassStats:
    """One size class: slot size in bytes, live slots, and slab pages."""

    size: int
    live: int
    pages: int

    @property
    def bytes(self) -> int:
        """Of the live slots."""
        return self.size * self.live


@dataclass(frozen=True)
class Stats:
    """What a heap holds. In bytes, unless stated otherwise.

    ``used`` + ``free`` = ``capacity``. ``used`` counts live slots and runs with their whole
    (rounded up) size, and the rest of each slab page that is too small for a slot. ``free`` is free
    pages and free slots; ``largest_free`` is the largest request that would succeed now.
    ``occupied`` is pages that hold live blocks. ``peak`` is pages that were ever taken: they are
    taken at the front of the heap, so it is close to what was taken at one time. ``allocations``,
    ``frees`` and ``failures`` count calls, and like ``peak`` they begin when the heap is made or
    reset. ``limit`` is how large the heap may grow, ``mapped`` the memory behind all of it: data,
    state, and the table of a debug heap. ``print`` shows all this in a few lines.
    """

    capacity: int
    used: int
    free: int
    largest_free: int
    occupied: int
    peak: int
    allocations: int
    frees: int
    failures: int
    per_class: tuple[ClassStats, ...]
    limit: int = 0
    mapped: int = 0

    def __str__(self) -> str:
        live = self.allocations - self.frees
        lines = [
            f"{format_size(self.used)} of {format_size(self.capacity)} used "
            f"({self.used / self.capacity:.1%}), peak {format_size(self.peak)}; largest request "
            f"that would succeed: {format_size(self.largest_free)}",
            f"{live:,} blocks live ({self.allocations:,} allocated, {self.frees:,} freed); "
            f"{self.failures:,} requests failed",
        ]
        if self.limit > self.capacity:
            lines[0] += f"; may grow to {format_size(self.limit)}"
        rows = sorted((row for row in self.per_class if row.live), key=lambda row: -row.bytes)
        for row in rows[:_PRINTED_CLASSES]:
            lines.append(f"  {row.live:>11,} x {format_size(row.size)}")
        if rest := sum(row.live for row in rows[_PRINTED_CLASSES:]):
            lines.append(f"  {rest:>11,} of {len(rows) - _PRINTED_CLASSES} other sizes")
        if large := live - sum(row.live for row in rows):
            lines.append(f"  {large:>11,} larger than {format_size(CLASS_SIZES[-1])}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Snapshot:
    """The pages of a heap at one moment: everything needed to draw or compare it.

    ``capacity`` is the bytes of all pages, also of those that were given back. One entry per
    page: ``page_kind`` (0 free, 1 slab, 2 run, 3 given back to the device),
    ``page_class`` (size class of a slab page, else -1), ``page_live`` and ``page_slots`` (live
    slots and all slots of a slab page, else 0), ``run_pages`` (length in pages of a run, at its
    first page, else 0).
    """

    capacity: int
    page_bytes: int
    class_sizes: tuple[int, ...]
    page_kind: np.ndarray
    page_class: np.ndarray
    page_live: np.ndarray
    page_slots: np.ndarray
    run_pages: np.ndarray
    device: str


@dataclass(frozen=True)
class Spans:
    """The spans in magazines; arrays of one length. ``cls`` is -1 where a word has no class."""

    magazine: np.ndarray
    word: np.ndarray
    page: np.ndarray
    granule: np.ndarray
    count: np.ndarray
    cls: np.ndarray

    @staticmethod
    def of(words: np.ndarray) -> Spans:
        magazine = np.flatnonzero(words)
        word = words[magazine]
        cls = (word >> layout.SPAN_CLASS.value) - 1
        return Spans(
            magazine=magazine,
            word=word,
            page=word & layout.PAGE_MASK.value,
            granule=(word >> layout.SPAN_FIRST.value) & 0xFFF,
            count=(word >> layout.SPAN_COUNT.value) & 0x3FFF,
            cls=np.where((cls >= 0) & (cls < CLASSES), cls, -1),
        )


class State:
    """The arrays of one heap, decoded.

    Per page: ``words``, and by these ``kind`` (FREE, also inside a run; SLAB; RUN at its first
    page), ``cls``, ``out`` and ``kept`` (a place leads there); ``held`` (slots in magazines),
    ``slots`` and ``live`` (of slabs, or else 0), ``run_pages`` (of a run, at its first page),
    ``inside`` (in how many runs it lies), ``page_free`` (its bit) and ``absent`` (given back).

    ``pages``: how many pages a heap that grows has records of; ``absent``: which of them were given
    back to the device.
    """

    def __init__(
        self,
        handle: torch.Tensor,
        geometry: Geometry,
        pages: int | None = None,
        absent: Sequence[slice] = (),
    ) -> None:
        g = geometry
        self.geometry = g
        self.handle = handle
        self.pages = g.pages if pages is None else pages
        self.absent = np.zeros(self.pages, dtype=bool)
        for part in absent:
            self.absent[part] = True
        self.fixed = _copy(handle[: layout.MAGAZINES.value])
        first, step = g.records, layout.RECORD_WORDS.value
        self.records = handle[first : first + self.pages * step].view(self.pages, step)
        self.words = _copy(self.records[:, layout.PAGE_WORD.value])
        rows = handle[g.rows : g.rows + (CLASSES + 1) * g.chunks]
        self.rows = _copy(rows).reshape(CLASSES + 1, g.chunks)
        self.spans = Spans.of(_copy(handle[g.magazine_words]))
        self.out = self.words & layout.OUT_MASK.value
        self.cls = (self.words >> layout.CLASS_SHIFT.value) & 63
        self.kept = (self.words & layout.KEPT.value) != 0
        slab = (self.words & layout.SLAB.value) != 0
        run = (self.words & layout.RUN.value) != 0
        self.kind = np.where(slab, SLAB, np.where(run, RUN, FREE))
        lengths = (self.words >> layout.HALF_SHIFT.value) & layout.HALF_MASK.value
        self.run_pages = np.where(self.kind == RUN, lengths, 0)
        self.inside = self._inside()
        self.page_free = self.row_bits(0)[: self.pages] != 0
        slab = self.kind == SLAB
        self.slots = np.where(slab, SLOTS[np.minimum(self.cls, CLASSES - 1)], 0)
        # (A span may lead anywhere, until it is audited.)
        there = self.spans.page < self.pages
        counts = self.spans.count[there]
        self.held = np.bincount(self.spans.page[there], counts, self.pages).astype(np.int64)
        self.live = np.where(slab, self.out - self.held, 0)

    def _inside(self) -> np.ndarray:
        pages = self.pages
        heads = np.flatnonzero(self.kind == RUN)
        change = np.zeros(pages + 1, dtype=np.int64)
        np.add.at(change, heads, 1)
        np.add.at(change, np.clip(heads + self.run_pages[heads], heads, pages), -1)
        return np.cumsum(change[:-1])

    def row_bits(self, row: int) -> np.ndarray:
        """The bits of a row, 0: free pages, and then those of each class; 64 for each chunk."""
        return np.unpackbits(np.ascontiguousarray(self.rows[row]).view(np.uint8), bitorder="little")

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """The rings, a row for each line, in the order of their places; and how many places each
        line has opened."""
        g = self.geometry
        spread = min(g.ring, 16)
        words = _copy(self.handle[g.places : g.places + g.lines * g.ring])
        # (See `place_ptr`: neighbours lie a cache line apart.)
        words = words.reshape(g.lines, spread, g.ring // spread)
        opened = ((_copy(self.handle[g.line_words]) + (1 << 31)) >> 32) & layout.PLACE_MASK.value
        return words.swapaxes(1, 2).reshape(g.lines, g.ring), opened

    @property
    def capacity(self) -> int:
        """Bytes of the pages that there are."""
        return int((~self.absent).sum()) * PAGE_BYTES

    @cached_property
    def idle(self) -> np.ndarray:
        """Slab pages without live blocks: a malloc that needs them gives them back."""
        return (self.kind == SLAB) & (self.live == 0)

    def stale_hints(self) -> int:
        """How many bits of the rows of classes are set for pages that have no room for half of
        their slots, or are none of the class. They do no harm but to cost a look."""
        room = (self.kind == SLAB) & (self.out <= self.slots // 2)
        stale = 0
        for cls in range(CLASSES):
            bits = self.row_bits(cls + 1)[: self.pages] != 0
            stale += int((bits & ~(room & (self.cls == cls))).sum())
        return stale

    def largest_free(self) -> int:
        """Bytes of the largest request that would succeed now."""
        free = np.concatenate([[False], self.page_free | self.idle, [False]])
        edges = np.flatnonzero(free[1:] != free[:-1])
        if len(edges):
            return int((edges[1::2] - edges[::2]).max()) * PAGE_BYTES
        return int(SIZES[self.cls[self.live < self.slots]].max(initial=0))

    def live_blocks(self) -> int:
        """How many blocks live."""
        return int(self.live.sum()) + int((self.kind == RUN).sum())

    def frees(self) -> int:
        """How many blocks were freed."""
        first, step = layout.HINTS.value + layout.FREES.value, layout.HINT_STRIDE.value
        end = layout.HINTS.value + layout.HINT_COPIES.value * step
        return int(self.fixed[first:end:step].sum())

    def pages_ever_taken(self) -> int:
        """How many pages were ever taken."""
        reached = _copy(self.records[:, layout.PAGE_WORD.value + layout.REACHED.value])
        ends = np.arange(len(reached)) + reached
        return int((np.maximum.accumulate(ends) > np.arange(len(reached))).sum())

    def occupied_pages(self) -> int:
        """How many pages hold live blocks."""
        return int((self.live > 0).sum()) + int((self.inside > 0).sum())

    def stats(self, failures_before: int = 0) -> Stats:
        """``failures_before``: those that `clear_errors` has forgotten."""
        capacity = self.capacity
        failures = int(self.fixed[layout.ERRORS.value + layout.E_OUT_OF_MEMORY.value])
        slab = self.kind == SLAB
        live = np.bincount(self.cls[slab], self.live[slab], CLASSES).astype(np.int64)
        pages = np.bincount(self.cls[slab], minlength=CLASSES)
        partly = slab & ~self.idle
        slot_bytes = SIZES[self.cls[partly]] * (self.slots - self.live)[partly]
        free = int((self.page_free | self.idle).sum()) * PAGE_BYTES + int(slot_bytes.sum())
        return Stats(
            capacity=capacity,
            used=capacity - free,
            free=free,
            largest_free=self.largest_free(),
            occupied=self.occupied_pages() * PAGE_BYTES,
            peak=self.pages_ever_taken() * PAGE_BYTES,
            allocations=self.live_blocks() + self.frees(),
            frees=self.frees(),
            failures=failures + failures_before,
            per_class=tuple(
                ClassStats(*map(int, row)) for row in zip(CLASS_SIZES, live, pages, strict=True)
            ),
            limit=self.geometry.pages * PAGE_BYTES,
        )

    def snapshot(self, device: str) -> Snapshot:
        return Snapshot(
            capacity=self.pages * PAGE_BYTES,
            page_bytes=PAGE_BYTES,
            class_sizes=CLASS_SIZES,
            page_kind=np.where(
                self.absent, ABSENT, np.where(self.inside > 0, RUN, self.kind)
            ).astype(np.uint8),
            page_class=np.where(self.kind == SLAB, self.cls, -1).astype(np.int16),
            page_live=self.live.astype(np.int32),
            page_slots=self.slots.astype(np.int32),
            run_pages=self.run_pages.astype(np.int32),
            device=device,
        )

    # Live bits ---------------------------------------------------------------------------------

    def live_bits(self) -> tuple[np.ndarray, np.ndarray]:
        """For every page, how many live bits it has, and whether any is where no block of the
        page's kind and class can begin."""
        pages = self.pages
        use = np.where(self.kind == RUN, _USE_RUN, _USE_NONE)
        use = np.where((self.kind == SLAB) & (self.cls < CLASSES), self.cls, use)
        masks = torch.from_numpy(_live_masks()).to(self.handle.device)
        rows = torch.from_numpy(use).to(self.handle.device)
        counts = np.zeros(pages, dtype=np.int64)
        misplaced = np.zeros(pages, dtype=bool)
        for first in range(0, pages, _STEP):
            part = slice(first, first + _STEP)
            bits = self.records[part, :LIVE_WORDS]
            counts[part] = _popcount(bits).sum(1).cpu().numpy()
            misplaced[part] = ((bits & ~masks[rows[part]]) != 0).any(1).cpu().numpy()
        return counts, misplaced


def _copy(words: torch.Tensor) -> np.ndarray:
    return words.contiguous().cpu().numpy().copy()


def _popcount(x: torch.Tensor) -> torch.Tensor:
    # (Shifts copy the sign, which the masks remove.)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56) & 0xFF


# What a page is used for, as a row of `_live_masks`: a slab's class, or one of these two.
_USE_RUN = CLASSES
_USE_NONE = CLASSES + 1


def _live_masks() -> np.ndarray:
    """For each use of a page, its words of live bits if everything in it is live."""
    masks = np.zeros((_USE_NONE + 1, LIVE_WORDS), dtype=np.uint64)
    for cls, size in enumerate(CLASS_SIZES):
        granules = np.arange(PAGE_BYTES // size) * (size // 16)
        bits = np.uint64(1) << (granules // LIVE_WORDS).astype(np.uint64)
        np.bitwise_or.at(masks[cls], granules % LIVE_WORDS, bits)
    masks[_USE_RUN, 0] = 1
    return masks.view(np.int64)


def describe(stats: Stats) -> str:
    """How full and how fragmented a heap is, in one line for messages."""
    return (
        f"{format_size(stats.free)} of {format_size(stats.capacity)} are free, the largest "
        f"request that would succeed now is {format_size(stats.largest_free)}"
    )
