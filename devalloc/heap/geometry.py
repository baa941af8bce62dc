"""How large each array of a heap's state is, where it begins, and what it holds in a new heap.

The state has about 79 words (630 bytes) per page from 512 MiB on, 68 of them the page's record. The
fixed words and those of 38 classes weigh most in small heaps, so these get short rings and few idle
words: see `Geometry.of`, and tests/heap/test_state.py for what each capacity takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from devalloc.kernels import layout
from devalloc.sizes import CLASS_SIZES

CLASSES = len(CLASS_SIZES)
MAX_PAGES = 1 << 23
MAX_STRIPES = 8
MAX_RING = 1024
MAX_IDLE = 4096

STRIPE_PAGES = 1024
"""Pages for each stripe: what a line leaves open is at most two pages."""

PLACE_PAGES = 4
"""Pages for each place of a class: so many may be opened at one time before a ring is lapped."""

_ALIGNMENT = 16  # words: no two arrays share a cache line


def power_below(n: int) -> int:
    """The largest power of two that is not above ``n``; 1 for less."""
    return 1 << max(n, 1).bit_length() - 1


def _aligned(word: int) -> int:
    return -(-word // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Geometry:
    """The sizes of a heap of ``pages`` pages: lines per class (``stripes``), places per line
    (``ring``), ``magazines`` and ``idle`` words, all powers of two. The properties say at which
    word an array begins."""

    pages: int
    stripes: int
    ring: int
    magazines: int
    idle: int

    @staticmethod
    def of(
        pages: int,
        stripes: int | None = None,
        ring: int | None = None,
        magazines: int | None = None,
    ) -> Geometry:
        """What suits a heap of ``pages`` pages; each of the others may be given."""
        if not 1 <= pages <= MAX_PAGES:
            raise ValueError(f"a heap has 1 to {MAX_PAGES} pages, not {pages}")
        stripes = stripes or min(MAX_STRIPES, power_below(pages // STRIPE_PAGES))
        least = min(16, max(2, power_below(pages)))
        ring = ring or min(MAX_RING, max(least, power_below(pages // PLACE_PAGES // stripes)))
        magazines = magazines or power_below(pages)
        given = (stripes, ring, magazines)
        if given != tuple(power_below(count) for count in given):
            raise ValueError(f"stripes, places and magazines are powers of two, not {given}")
        return Geometry(
            pages=pages,
            stripes=stripes,
            ring=ring,
            magazines=magazines,
            idle=min(MAX_IDLE, max(16, power_below(2 * pages))),
        )

    @property
    def chunks(self) -> int:
        return -(-self.pages // 64)

    @property
    def lines(self) -> int:
        """How many lines there are."""
        return CLASSES * self.stripes

    @property
    def records(self) -> int:
        return _aligned(layout.LINES.value + self.lines * layout.LINE_STRIDE.value)

    @property
    def rows(self) -> int:
        return _aligned(self.records + self.pages * layout.RECORD_WORDS.value)

    @property
    def idle_words(self) -> int:
        return _aligned(self.rows + (CLASSES + 1) * self.chunks)

    @property
    def places(self) -> int:
        return _aligned(self.idle_words + self.idle)

    @property
    def magazine_words(self) -> int:
        return _aligned(self.places + self.lines * self.ring)

    @property
    def words(self) -> int:
        """Length of the state."""
        return self.magazine_words + self.magazines

    def header(self, base: int) -> list[int]:
        """The words that never change, from 0 on; ``base`` is the address of page 0."""
        fields = {
            layout.MAGIC_WORD: layout.MAGIC.value,
            layout.BASE: base,
            layout.STRIPES_AND_RING: self.stripes + (self.ring.bit_length() - 1 << 16),
            layout.PAGE_RECORDS: self.records,
            layout.ROWS: self.rows,
            layout.PLACES: self.places,
            layout.CHUNKS: self.chunks,
            layout.MAGAZINES: self.magazine_words,
            layout.MAGAZINE_MASK: self.magazines - 1,
            layout.PAGES: self.pages,
            layout.IDLE: (self.idle_words << layout.IDLE_SHIFT.value) + self.idle - 1,
        }
        words = [0] * (max(field.value for field in fields) + 1)
        for field, number in fields.items():
            words[field.value] = number
        return words

    def last_chunk(self) -> int:
        """The word of the last chunk if all of its pages are free, as an int64."""
        rest = self.pages % 64
        return (1 << rest) - 1 if rest else -1


def initialise(handle: torch.Tensor, geometry: Geometry, base: int) -> None:
    """Write the state of an empty heap, on the current stream, without synchronising."""
    handle.zero_()
    header = torch.tensor(geometry.header(base), dtype=torch.int64, device="cpu")
    handle[: len(header)].copy_(header)
    _start_lines(handle, geometry)
    free = handle[geometry.rows : geometry.rows + geometry.chunks]
    free.fill_(-1)
    free[-1:].fill_(geometry.last_chunk())


def retire(handle: torch.Tensor, geometry: Geometry) -> None:
    """Make a state that of a heap without blocks and nothing is free.

    Done on the current stream. In kernels that still have the handle, malloc then returns 0 and
    every free is a wrong free.
    """
    handle[layout.ERRORS.value :].zero_()
    _start_lines(handle, geometry)


def _start_lines(handle: torch.Tensor, geometry: Geometry) -> None:
    # Places begin with number 1, so that a ring of zeros has none that is open.
    lines = handle[layout.LINES.value : geometry.records : layout.LINE_STRIDE.value]
    lines.fill_(layout.OPENED.value)
