"""A heap in plain Python: what is set aside for a request, and when there is no room for it."""

from __future__ import annotations

from collections.abc import Iterable

from devalloc.sizes import CLASS_SIZES, CLASS_SLOTS, MAX_SLOT, PAGE_BYTES

Block = tuple[int, int]  # address, bytes set aside for it


def set_aside(nbytes: int) -> int:
    """Bytes that a request takes: its slot, or its pages."""
    if nbytes > MAX_SLOT:
        return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    return next(size for size in CLASS_SIZES if size >= nbytes)


def held_in(live: Iterable[Block], base: int, pages: int) -> list[list[int]]:
    """For each page the sizes of the live blocks in it."""
    held: list[list[int]] = [[] for _ in range(pages)]
    for address, length in live:
        first = (address - base) // PAGE_BYTES
        for page in range(first, first + -(-length // PAGE_BYTES)):
            held[page].append(length)
    return held


def fits(live: Iterable[Block], base: int, pages: int) -> bool:
    """Whether each page of a heap holds slots of one class, not more than there are, or one run.
    (Where in its page a slot lies is of no matter.)"""
    for blocks in held_in(live, base, pages):
        size = blocks[0] if blocks else 0
        slots = CLASS_SLOTS[CLASS_SIZES.index(size)] if 0 < size <= MAX_SLOT else 1
        if len(set(blocks)) > 1 or len(blocks) > slots:
            return False
    return True


def has_room(live: Iterable[Block], size: int, base: int, pages: int) -> bool:
    """Whether a heap with these live blocks has memory for a request that takes ``size`` bytes:
    a slot of its class, or a run of adjacent free pages."""
    held = held_in(live, base, pages)
    if size <= MAX_SLOT:
        slots = CLASS_SLOTS[CLASS_SIZES.index(size)]
        return any(not blocks or (set(blocks) == {size} and len(blocks) < slots) for blocks in held)
    wanted = size // PAGE_BYTES
    starts = range(pages - wanted + 1)
    return any(not any(held[start : start + wanted]) for start in starts)
