"""How large each array of a heap's state is, where it begins, and what it holds in a new heap.

The state has 70 to 81 words (560 to 650 bytes) per page from 64 MiB on, 68 of them the record. The
fixed words and those of 38 classes weigh most in small heaps, so these get short rings: see
`Geometry.of`, and tests/heap/test_state.py for what each capacity takes.

The records lie last. In a heap that grows, ``pages`` is how many it may have, and memory is mapped
up to the record of the last page that there is: `Geometry.words_of`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from devalloc.kernels import layout
from devalloc.sizes import CLASS_SIZES

CLASSES = len(CLASS_SIZES)
MAX_PAGES = 1 << 23
MAX_STRIPES = 4
MAX_RING = 1024

STRIPE_PAGES = 1024
"""Pages for each stripe: what a line leaves open is at most two pages."""

PLACE_PAGES = 4
"""Pages for each place of a class: so many may be opened at one time before a ring is lapped."""

CHUNK_PAGES = 64

FEW_MAGAZINES = 2
"""For each page of a heap of less than one chunk, so that its state stays small."""

MAX_MAGAZINES = 1 << 20
"""As many at most: a search that fails looks at all of them."""

GROWING_MAGAZINES = 4096
"""As many at most in a heap that grows, however few pages there are."""

_ALIGNMENT = 16  # words: no two arrays share a cache line


def power_below(n: int) -> int:
    """The largest power of two that is not above ``n``; 1 for less."""
    return 1 << max(n, 1).bit_length() - 1


def _aligned(word: int) -> int:
    return -(-word // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Geometry:
    """The sizes of a heap of ``pages`` pages: lines per class (``stripes``), places per line
    (``ring``) and ``magazines``, all powers of two. The properties say at which word an array
    begins."""

    pages: int
    stripes: int
    ring: int
    magazines: int
    grows: bool = False

    @staticmethod
    def of(
        pages: int,
        stripes: int | None = None,
        ring: int | None = None,
        magazines: int | None = None,
        grows: bool = False,
    ) -> Geometry:
        """What suits a heap of ``pages`` pages; each of the others may be given."""
        if not 1 <= pages <= MAX_PAGES:
            raise ValueError(f"a heap has 1 to {MAX_PAGES} pages, not {pages}")
        stripes = stripes or min(MAX_STRIPES, power_below(pages // STRIPE_PAGES))
        least = min(16, max(2, power_below(pages)))
        ring = ring or min(MAX_RING, max(least, power_below(pages // PLACE_PAGES // stripes)))
        most = GROWING_MAGAZINES if grows else MAX_MAGAZINES
        each = layout.PAGE_MAGAZINES.value if pages >= CHUNK_PAGES else FEW_MAGAZINES
        magazines = magazines or min(each * power_below(pages), most)
        given = (stripes, ring, magazines)
        if given != tuple(power_below(count) for count in given):
            raise ValueError(f"stripes, places and magazines are powers of two, not {given}")
        return Geometry(
            pages=pages,
            stripes=stripes,
            ring=ring,
            magazines=magazines,
            grows=grows,
        )

    @property
    def chunks(self) -> int:
        return -(-self.pages // CHUNK_PAGES)

    @property
    def lines(self) -> int:
        """How many lines there are."""
        return CLASSES * self.stripes

    @property
    def magazine_words(self) -> slice:
        """Where the magazines lie in the state."""
        return slice(layout.MAGAZINES.value, layout.MAGAZINES.value + self.magazines)

    @property
    def lines_at(self) -> int:
        return _aligned(self.magazine_words.stop)

    @property
    def line_words(self) -> slice:
        """Where their words lie in the state."""
        first, step = self.lines_at, layout.LINE_STRIDE.value * self.stripes
        return slice(first, first + self.lines * step, step)

    @property
    def rows(self) -> int:
        return _aligned(self.line_words.stop)

    @property
    def places(self) -> int:
        return _aligned(self.rows + (CLASSES + 1) * self.chunks)

    @property
    def records(self) -> int:
        return _aligned(self.places + self.lines * self.ring)

    def rest_programs(self, pages: int) -> int:
        """How many programs of ``rest_kernel`` see the first ``pages`` pages and all magazines."""
        each = layout.PAGE_MAGAZINES.value
        return -(-max(pages, -(-self.magazines // each)) // CHUNK_PAGES)

    def words_of(self, pages: int) -> int:
        """Length of the state up to the records of the first ``pages`` pages."""
        return self.records + pages * layout.RECORD_WORDS.value

    @property
    def words(self) -> int:
        """Length of the state."""
        return self.words_of(self.pages)

    def header(self, base: int, bell: int = 0) -> list[int]:
        """The words that never change, from 0 on; ``base`` is the address of page 0, ``bell`` that
        of the word by which kernels ask for more pages."""
        pages = 0 if self.grows else self.pages
        fields = {
            layout.MAGIC_WORD: layout.MAGIC.value,
            layout.BASE: base,
            layout.STRIPES_AND_RING: self.stripes + (self.ring.bit_length() - 1 << 16),
            layout.PAGE_RECORDS: self.records,
            layout.PLACES: self.places,
            layout.MAGAZINES_AND_PAGES: self.magazines - 1 + (pages << 32),
            layout.LINES: self.lines_at,
            layout.CHUNKS_AND_ROWS: self.chunks + (self.rows << 32),
            layout.BELL: bell,
        }
        words = [0] * (max(field.value for field in fields) + 1)
        for field, number in fields.items():
            words[field.value] = number
        return words

    def last_chunk(self) -> int:
        """The word of the last chunk if all of its pages are free, as an int64."""
        rest = self.pages % CHUNK_PAGES
        return (1 << rest) - 1 if rest else -1


@dataclass(frozen=True)
class Present:
    """What a heap that grows has so far: ``pages`` with records; the first and the number of the
    chunks that have memory, ascending; the bell's address, or 0; the last of ANSWERS."""

    pages: int
    chunks: list[tuple[int, int]]
    bell: int = 0
    answers: int = 0


def initialise(
    handle: torch.Tensor, geometry: Geometry, base: int, present: Present | None = None
) -> None:
    """Write the state of an empty heap, on the current stream, without synchronising."""
    if present is None:
        present = Present(geometry.pages, [(0, geometry.chunks)])
    handle[: geometry.words_of(present.pages)].zero_()
    header = torch.tensor(geometry.header(base, present.bell), dtype=torch.int64, device="cpu")
    handle[: len(header)].copy_(header)
    _start_lines(handle, geometry)
    for first, count in present.chunks:
        handle[geometry.rows + first : geometry.rows + first + count].fill_(-1)
    if geometry.grows:
        _write_extent(handle, present.pages)
        handle[layout.ANSWERS.value].fill_(present.answers)
    else:
        handle[geometry.rows + geometry.chunks - 1].fill_(geometry.last_chunk())


def retire(handle: torch.Tensor, geometry: Geometry, pages: int) -> None:
    """Make a state, which has the records of ``pages`` pages, that of a heap without blocks and
    nothing is free.

    Done on the current stream. In kernels that still have the handle, malloc then returns 0 and
    every free is a wrong free.
    """
    handle[layout.ERRORS.value : geometry.words_of(pages)].zero_()
    _start_lines(handle, geometry)
    _write_extent(handle, pages if geometry.grows else 0)


def _start_lines(handle: torch.Tensor, geometry: Geometry) -> None:
    # Places begin with number 1, so that a ring of zeros has none that is open.
    handle[geometry.line_words].fill_(layout.OPENED.value)


def _write_extent(handle: torch.Tensor, pages: int) -> None:
    first = layout.EXTENT.value
    handle[first : first + layout.EXTENT_COPIES.value].fill_(pages)
