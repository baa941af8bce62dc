"""Reading a heap from the host: its tables, what they say, and whether they agree.

Works on copies of the control block's tables in NumPy. The live bits, a hundredth of the heap, are
counted on the heap's device. Everything here expects the heap to be at rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from devalloc.errors import CorruptionError
from devalloc.kernels import layout
from devalloc.kernels.pages import EPOCH
from devalloc.sizes import CLASS_SIZES, CLASS_SLOTS, PAGE_BYTES, format_size

FREE, SLAB, RUN = 0, 1, 2

_SIZES = np.array(CLASS_SIZES, dtype=np.int64)
_SLOTS = np.array(CLASS_SLOTS, dtype=np.int64)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)

MAX_PLACES = 1 << 15
"""Of the shelf: for the programs of four million requests in blocks of 128 lanes."""

MIN_SHELF = 512
"""Pages of the smallest heap that puts any on its shelf: smaller ones had better stay together."""


@dataclass(frozen=True)
class ClassStats:
    """One size class: slot size in bytes, live slots, slab pages, and allocations so far."""

    size: int
    live: int
    pages: int
    allocations: int

    @property
    def bytes(self) -> int:
        """Of the live slots."""
        return self.size * self.live


_PRINTED_CLASSES = 6


@dataclass(frozen=True)
class Stats:
    """What a heap holds. In bytes, unless stated otherwise.

    ``used`` + ``free`` = ``capacity``. ``used`` counts live slots and runs with their whole
    (rounded up) size, and the rest of each slab page that is too small for a slot. ``free`` is free
    pages and free slots; ``largest_free`` is the largest request that would succeed now. ``peak``
    is the most bytes that were ever in pages taken from the page level, partly used pages included.
    ``allocations``, ``frees`` and ``failures`` count calls, and like ``peak`` they begin when the
    heap is made or reset. ``print`` shows all this in a few lines.
    """

    capacity: int
    used: int
    free: int
    largest_free: int
    peak: int
    allocations: int
    frees: int
    failures: int
    per_class: tuple[ClassStats, ...]

    def __str__(self) -> str:
        live = self.allocations - self.frees
        lines = [
            f"{format_size(self.used)} of {format_size(self.capacity)} used "
            f"({self.used / self.capacity:.1%}), peak {format_size(self.peak)}; largest request "
            f"that would succeed: {format_size(self.largest_free)}",
            f"{live:,} blocks live ({self.allocations:,} allocated, {self.frees:,} freed); "
            f"{self.failures:,} requests failed",
        ]
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

    One entry per page: ``page_kind`` (0 free, 1 slab, 2 run), ``page_class`` (size class of a slab
    page, else -1), ``page_live`` and ``page_slots`` (live slots and all slots of a slab page, else
    0), ``run_pages`` (length in pages of a run, at its first page, else 0).
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
class Geometry:
    """Where the tables of the control block of a heap of `pages` pages lie (in words), and how many
    stripes and how long batches the heap has.

    Small heaps have few stripes and short batches, so that the batches of one class and their
    spares leave half of the heap free.
    """

    pages: int
    stripes: int
    max_batch: int

    @staticmethod
    def of(pages: int) -> Geometry:
        stripes = min(64, max(1, 1 << (pages // 32).bit_length() >> 1))
        # (A power of two, because hints describe runs of such lengths.)
        share = max(1, pages // (stripes * 4))
        max_batch = min(layout.MAX_BATCH.value, 1 << share.bit_length() - 1)
        return Geometry(pages, stripes, max_batch)

    @property
    def chunks(self) -> int:
        return (self.pages + 63) // 64

    @property
    def row_words(self) -> int:
        return (self.chunks + 63) // 64

    @property
    def batches(self) -> int:
        """How many batches there may be: one for each class and stripe, and its spare."""
        return layout.NUM_CLASSES.value * self.stripes * 2

    @property
    def places(self) -> int:
        """Number of places on the shelf: about one for every 4 pages, and a power of two."""
        return min(MAX_PLACES, max(1, 1 << (self.pages // 4).bit_length() >> 1))

    @property
    def shelvable(self) -> int:
        """How many pages each word of SHELVED may count; together half of the heap."""
        words = min(self.places, layout.TRANSIT_STRIPES.value)
        return self.pages // (2 * words) if self.pages >= MIN_SHELF else 0

    @property
    def shelf(self) -> int:
        return (
            layout.STRIPES.value
            + layout.NUM_CLASSES.value * self.stripes * layout.STRIPE_STRIDE.value
        )

    @property
    def hints(self) -> int:
        return self.shelf + self.places

    @property
    def rows(self) -> int:
        return layout.ORDERS.value + layout.NUM_CLASSES.value

    @property
    def page_bits(self) -> int:
        return self.hints + self.rows * self.row_words

    @property
    def page_words(self) -> int:
        return self.page_bits + self.chunks

    @property
    def live_bits(self) -> int:
        return self.page_words + self.chunks * 64

    @property
    def words(self) -> int:
        return self.live_bits + self.pages * layout.LIVE_WORDS.value

    def header(self, base: int) -> list[int]:
        """The words that never change, as in ``kernels/layout.py``."""
        numbers = {
            layout.G_PAGES: self.pages,
            layout.G_STRIPES: self.stripes,
            layout.G_LIVE_BITS: self.live_bits,
            layout.G_PAGE_WORDS: self.page_words,
            layout.G_PAGE_BITS: self.page_bits,
            layout.G_HINTS: self.hints,
            layout.G_ROW_WORDS: self.row_words,
            layout.G_MAX_BATCH: self.max_batch,
            layout.G_SHELF: self.shelf,
            layout.G_PLACES: self.places,
            layout.G_SHELVABLE: self.shelvable,
            layout.G_WORDS: self.words,
        }
        fields = [0] * 12
        for field, number in numbers.items():
            fields[field.value] = number
        return [layout.MAGIC.value, base] + [
            low + (high << 32) for low, high in zip(fields[::2], fields[1::2], strict=True)
        ]


def initialise(control: torch.Tensor, geometry: Geometry, base: int) -> None:
    """Write the control block of an empty heap, on the current stream, without synchronising."""
    control.zero_()
    header = torch.tensor(geometry.header(base), dtype=torch.int64, device="cpu")
    control[: len(header)].copy_(header)
    bits = control[geometry.page_bits : geometry.page_bits + geometry.chunks]
    bits.fill_(-1)
    # Every chunk has a free run of 2**order pages, except perhaps the last one.
    orders = layout.ORDERS.value
    rows = control[geometry.hints :][: orders * geometry.row_words].view(orders, -1)
    rows.fill_(-1)
    end = (geometry.chunks - 1) % 64  # the bit of the last chunk
    rest = geometry.pages % 64
    if end != 63:
        rows[:, -1] = (2 << end) - 1
    if rest:
        bits[-1] = (1 << rest) - 1
        rows[rest.bit_length() :, -1] = (1 << end) - 1


def retire(control: torch.Tensor) -> None:
    """Write a control block without live blocks and without free memory.

    Done on the current stream. In kernels that still have the handle, malloc then returns 0 and
    every free is a wrong free.
    """
    control[layout.ERRORS.value :].zero_()


class State:
    """The tables of one heap, decoded."""

    def __init__(self, control: torch.Tensor, geometry: Geometry) -> None:
        table = control[: geometry.live_bits].cpu().numpy()
        self.control = control
        self.geometry = geometry
        self.table = table
        g = geometry
        self.page_bits = table[g.page_bits : g.page_words].view(np.uint64)
        self.hints = table[g.hints : g.page_bits].view(np.uint64).reshape(g.rows, g.row_words)
        words = table[g.page_words : g.page_words + g.pages].copy()
        self._read_shelf(words)
        self.out = words & layout.OUT_MASK.value
        self.cls = (words >> layout.CLASS_SHIFT.value) & 63
        self.attached = (words & layout.ATTACHED.value) != 0
        self.published = (words & layout.PUBLISHED.value) != 0
        self.kind = (words >> layout.KIND_SHIFT.value) & 3
        bits = np.unpackbits(self.page_bits.view(np.uint8), bitorder="little")
        self.page_taken = bits[: g.pages] == 0
        # Pages on the shelf are free: a search that finds nothing else gives them back.
        self.page_free = ~self.page_taken | (self.shelved > 0)
        self._read_stripes()
        slab = self.kind == SLAB
        self.slots = np.where(slab, _SLOTS[np.minimum(self.cls, len(_SLOTS) - 1)], 0)
        self.live = np.where(slab, self.out - self.unissued, 0)
        self.free_slots = self.slots - self.live
        self.run_pages = np.where(self.kind == RUN, self.out, 0)

    def _read_shelf(self, page_words: np.ndarray) -> None:
        """Find how often each page lies on the shelf, and how many pages there do not have the page
        word that they should have. In `page_words` the pages on the shelf become free."""
        g = self.geometry
        places = self.table[g.shelf : g.hints]
        self.shelved = np.zeros(g.pages, dtype=np.int64)
        self.misfits = 0
        for place in places[places != 0]:
            use, high = int(place) & 0xFFFFFFFF, int(place) >> 32
            page, length = high & ((1 << 23) - 1), (high >> 23) & 127
            if not 1 <= length <= g.pages - page:
                self.misfits += 1
                continue
            self.shelved[page : page + length] += 1
            expected = np.zeros(length, dtype=np.int64)
            if use == layout.FOR_RUN.value:
                expected[0] = layout.RUN.value + length - 1
            elif use < len(_SLOTS):
                filled = layout.SLAB.value + (use << layout.CLASS_SHIFT.value)
                expected[:] = filled + _SLOTS[use]
            self.misfits += int((page_words[page : page + length] != expected).sum())
        page_words[self.shelved > 0] = 0

    def _read_stripes(self) -> None:
        g = self.geometry
        classes = layout.NUM_CLASSES.value
        words = self.table[layout.STRIPES.value : g.shelf]
        # The batches of a class: those of its stripes, and their spares.
        words = words.reshape(classes, -1, layout.SPARE.value)[:, :, 0]
        credits = words << 32 >> 32
        high = (words - credits) >> 32
        self.credits = np.maximum(credits, 0)
        self.batch_page = high & ((1 << 23) - 1)
        self.batch_length = (high >> 23) & 127
        self.unissued = np.zeros(g.pages, dtype=np.int64)
        self.in_batches = np.zeros(g.pages, dtype=np.int64)
        for cls, stripe in np.argwhere(self.batch_length > 0):
            page, length = self.batch_page[cls, stripe], self.batch_length[cls, stripe]
            behind = (length - 1 - np.arange(length)) * _SLOTS[cls]
            left = np.clip(self.credits[cls, stripe] - behind, 0, _SLOTS[cls])
            self.unissued[page : page + length] += left
            self.in_batches[page : page + length] += 1

    def _word(self, at: int) -> int:
        return int(self.table[at])

    def in_hand(self) -> int:
        """How many programs are in the middle of a call; 0 at rest."""
        step = layout.TRANSIT_STRIDE.value
        end = layout.TRANSIT.value + layout.TRANSIT_STRIPES.value * step
        return int((self.table[layout.TRANSIT.value : end : step] & (EPOCH.value - 1)).sum())

    def _shelved_counted(self) -> int:
        start, step = layout.TRANSIT.value + layout.SHELVED.value, layout.TRANSIT_STRIDE.value
        end = layout.TRANSIT.value + layout.TRANSIT_STRIPES.value * step
        return int((self.table[start:end:step] & 0xFFFFFFFF).sum())

    def largest_free(self) -> int:
        """Bytes of the largest request that would succeed now; in a debug heap, with its guards."""
        free = np.zeros(len(self.page_bits) * 64, dtype=bool)
        free[: len(self.page_free)] = self.page_free
        page_bits = np.packbits(free, bitorder="little").view(np.uint64)
        words = page_bits.copy()
        length = np.zeros(len(words), dtype=np.int64)
        while words.any():
            length += words != 0
            words &= words >> np.uint64(1)
        longest = int(length.max(initial=0))
        full = np.concatenate([[False], page_bits == _ALL, [False]])
        edges = np.flatnonzero(full[1:] != full[:-1])
        for start, end in edges.reshape(-1, 2):
            tail = 0
            if end < len(page_bits):
                inverted = ~int(page_bits[end])
                tail = (inverted & -inverted).bit_length() - 1
            longest = max(longest, int(end - start) * 64 + tail)
        if longest:
            return longest * PAGE_BYTES
        return int(_SIZES[self.cls[self.free_slots > 0]].max(initial=0))

    def live_blocks(self) -> int:
        """How many allocations are live."""
        return int(self.live.sum()) + int((self.kind == RUN).sum())

    def stats(self, failures_before: int) -> Stats:
        g = self.geometry
        classes = layout.NUM_CLASSES.value
        start = layout.GRANTED.value
        issued = self.table[start : start + classes] - self.credits.sum(axis=1)
        slab = self.kind == SLAB
        live = np.bincount(self.cls[slab], self.live[slab], classes).astype(np.int64)
        pages = np.bincount(self.cls[slab], minlength=classes)
        runs = self._word(layout.RUNS.value)
        capacity = g.pages * PAGE_BYTES
        slot_bytes = _SIZES[np.minimum(self.cls, classes - 1)] * self.free_slots
        free = int(self.page_free.sum()) * PAGE_BYTES + int(slot_bytes.sum())
        allocations = int(issued.sum()) + runs
        live_now = self.live_blocks()
        failures = self._word(layout.ERRORS.value + layout.E_OUT_OF_MEMORY.value)
        return Stats(
            capacity=capacity,
            used=capacity - free,
            free=free,
            largest_free=self.largest_free(),
            # Kernels update PEAK only when they give pages back.
            peak=max(self._word(layout.PEAK.value), self._word(layout.USED.value)) * PAGE_BYTES,
            allocations=allocations,
            frees=allocations - live_now,
            failures=failures + failures_before,
            per_class=tuple(
                ClassStats(*map(int, row))
                for row in zip(CLASS_SIZES, live, pages, issued, strict=True)
            ),
        )

    def snapshot(self, device: str) -> Snapshot:
        kind = self.kind.astype(np.uint8)
        for page in np.flatnonzero(self.kind == RUN):
            kind[page : page + self.run_pages[page]] = RUN
        return Snapshot(
            capacity=self.geometry.pages * PAGE_BYTES,
            page_bytes=PAGE_BYTES,
            class_sizes=CLASS_SIZES,
            page_kind=kind,
            page_class=np.where(self.kind == SLAB, self.cls, -1).astype(np.int16),
            page_live=self.live.astype(np.int32),
            page_slots=self.slots.astype(np.int32),
            run_pages=self.run_pages.astype(np.int32),
            device=device,
        )

    # The audit -------------------------------------------------------------------------------

    def audit(self) -> None:
        """Check H1 to H4; raise CorruptionError naming the invariant and a page."""
        if self.in_hand():
            raise CorruptionError(
                f"H2: {self.in_hand()} programs are moving memory: the heap is not at rest. "
                "Wait for the kernels that use it; if none runs, one was killed inside malloc or "
                "free, and only Heap.reset helps"
            )
        self._audit_pages()
        self._audit_slots()
        self._audit_hints()

    def _fail_at(self, wrong: np.ndarray, message: str) -> None:
        if wrong.any():
            page = int(np.flatnonzero(wrong)[0])
            word = int(self.table[self.geometry.page_words + page])
            raise CorruptionError(
                f"{message}: {int(wrong.sum())} pages, the first is page {page} (word {word:#x})"
            )

    def _audit_pages(self) -> None:
        """H1, H2: free pages, slabs and runs tile the heap."""
        covered = np.zeros(self.geometry.pages + 1, dtype=np.int64)
        heads = np.flatnonzero(self.kind == RUN)
        ends = heads + self.run_pages[heads]
        if (ends > self.geometry.pages).any() or (self.run_pages[heads] < 1).any():
            raise CorruptionError("H1: a run reaches beyond the heap")
        np.add.at(covered, heads, 1)
        np.add.at(covered, ends, -1)
        owners = np.cumsum(covered[:-1]) + (self.kind == SLAB) + self.page_free
        self._fail_at(owners > 1, "H1: pages with more than one owner")
        self._fail_at(owners < 1, "H2: pages without an owner that are not free")
        self._fail_at((self.kind > RUN), "H4: page words of no kind")
        used = self._word(layout.USED.value)
        if used != int(self.page_taken.sum()):
            raise CorruptionError(
                f"H2: {used} pages are counted as used, {int(self.page_taken.sum())} are"
            )
        self._fail_at(self.shelved > self.page_taken, "H1: pages on the shelf with another owner")
        if self.misfits:
            raise CorruptionError(
                f"H4: {self.misfits} pages on the shelf are not of the recorded kind"
            )
        shelved = self._shelved_counted()
        if shelved != int(self.shelved.sum()):
            raise CorruptionError(
                f"H2: {shelved} pages are said to lie on the shelf, {int(self.shelved.sum())} do"
            )
        beyond = np.unpackbits(self.page_bits.view(np.uint8), bitorder="little")
        if beyond[self.geometry.pages :].any():
            raise CorruptionError("H2: a page beyond the heap's end is marked free")

    def _audit_slots(self) -> None:
        """H4: live bits, accounts, credits and page states agree."""
        slab = self.kind == SLAB
        self._fail_at(slab & (self.cls >= len(_SLOTS)), "H4: slabs of no class")
        self._fail_at(self.in_batches != self.attached, "H4: attached pages and batches disagree")
        held, in_batches = self._word(layout.HELD.value), int(self.batch_length.sum())
        if held != in_batches:
            raise CorruptionError(
                f"H4: batches are said to hold {held} pages, and hold {in_batches}"
            )
        batch_slots = self.batch_length * _SLOTS[:, None]
        if (self.credits > batch_slots).any():
            cls, stripe = np.argwhere(self.credits > batch_slots)[0]
            raise CorruptionError(
                f"H4: batch {stripe} of class {cls} has {self.credits[cls, stripe]} credits, "
                f"but its batch has {batch_slots[cls, stripe]} slots"
            )
        run = self.kind == RUN
        use = np.where(slab, self.cls, np.where(run, _LIVE_RUN, _LIVE_NONE))
        bits, misplaced = live_bits(self.control, self.geometry, use)
        self._fail_at(run & (bits != 1), "H4: runs without exactly one live bit")
        self._fail_at(misplaced, "H4: live bits where no allocation can begin")
        self._fail_at(slab & (bits != self.live), "H4: live bits and the account disagree")
        self._fail_at(slab & (self.out > self.slots), "H4: more slots out than there are")
        idle = slab & ~self.attached & (self.out == 0)
        self._fail_at(idle, "H3: empty slabs that were not retired")

    def _audit_hints(self) -> None:
        """H3: everything that is free can be found."""
        g = self.geometry
        bits = np.unpackbits(self.hints.view(np.uint8).reshape(g.rows, -1), 1, bitorder="little")
        run = self.page_bits.copy()
        for order in range(layout.ORDERS.value):
            missing = (run != 0) & (bits[order, : g.chunks] == 0)
            if missing.any():
                raise CorruptionError(
                    f"H3: chunk {int(np.flatnonzero(missing)[0])} has {1 << order} adjacent free "
                    "pages that no search would find"
                )
            run &= run >> np.uint64(1 << order) if order < 6 else run
        hidden = (self.kind == SLAB) & ~self.attached & (self.out < self.slots) & ~self.published
        self._fail_at(hidden, "H3: slabs with free slots, not published")
        pages = np.flatnonzero((self.kind == SLAB) & self.published)
        hinted = bits[layout.ORDERS.value + self.cls[pages], pages // 64]
        if not hinted.all():
            page = int(pages[np.flatnonzero(hinted == 0)[0]])
            raise CorruptionError(f"H3: slab page {page} is published, but no search would find it")


# The use of a page, as a row of `_live_masks`: a slab's class, or one of these two.
_LIVE_RUN = len(CLASS_SIZES)
_LIVE_NONE = len(CLASS_SIZES) + 1


def live_bits(
    control: torch.Tensor, geometry: Geometry, use: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For every page, how many live bits it has, and whether any is where none can be.

    Counted on the heap's device. `use` says what each page is used for: see `_LIVE_RUN`.
    """
    counts = np.zeros(geometry.pages, dtype=np.int64)
    misplaced = np.zeros(geometry.pages, dtype=bool)
    words = layout.LIVE_WORDS.value
    per_byte = torch.tensor([value.bit_count() for value in range(256)], device=control.device)
    masks = torch.from_numpy(_live_masks()).to(control.device)
    rows = torch.from_numpy(use).to(control.device)
    step = 1 << 14  # 8 MiB of bits at a time
    for first in range(0, geometry.pages, step):
        last = min(first + step, geometry.pages)
        bits = control[geometry.live_bits + first * words : geometry.live_bits + last * words]
        by_page = per_byte[bits.view(torch.uint8).to(torch.int64)].view(last - first, -1)
        counts[first:last] = by_page.sum(1).cpu().numpy()
        wrong = bits.view(-1, words) & ~masks[rows[first:last]]
        misplaced[first:last] = (wrong != 0).any(1).cpu().numpy()
    return counts, misplaced


def _live_masks() -> np.ndarray:
    """For each use of a page, its words of live bits if everything in it is live."""
    words = layout.LIVE_WORDS.value
    masks = np.zeros((_LIVE_NONE + 1, words), dtype=np.uint64)
    for cls, size in enumerate(CLASS_SIZES):
        granules = np.arange(PAGE_BYTES // size) * (size // 16)
        bits = np.uint64(1) << (granules // words).astype(np.uint64)
        np.bitwise_or.at(masks[cls], granules % words, bits)
    masks[_LIVE_RUN, 0] = 1
    return masks.view(np.int64)


def describe(stats: Stats) -> str:
    """How full and how fragmented a heap is, in one line for messages."""
    return (
        f"{format_size(stats.free)} of {format_size(stats.capacity)} are free, the largest "
        f"request that would succeed now is {format_size(stats.largest_free)}"
    )
