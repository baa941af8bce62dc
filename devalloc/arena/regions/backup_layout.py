"""Where blocks lie in a backup: one after another, without gaps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """``nbytes`` of device memory at ``address``, kept at ``offset`` of a backup."""

    address: int
    nbytes: int
    offset: int


def lay_out(blocks: Iterable[tuple[int, int]]) -> list[Run]:
    """A place for each block, given by (address, bytes)."""
    runs, offset = [], 0
    for address, nbytes in blocks:
        runs.append(Run(address, nbytes, offset))
        offset += nbytes
    return runs


def gathered(runs: Iterable[Run]) -> list[Run]:
    """The same bytes in as few runs as can be: neighbours are copied as one."""
    result: list[Run] = []
    for run in runs:
        last = result[-1] if result else None
        if last and last.address + last.nbytes == run.address and sum(last[1:]) == run.offset:
            result[-1] = last._replace(nbytes=last.nbytes + run.nbytes)
        else:
            result.append(run)
    return result


def within(runs: Sequence[Run], start: int, end: int) -> Iterator[Run]:
    """The parts of runs, ascending by offset, that lie in [start, end) of the backup."""
    first = max(bisect_right(runs, start, key=lambda run: run.offset) - 1, 0)
    for at in range(first, len(runs)):
        run = runs[at]
        if run.offset >= end:
            break
        low, high = max(run.offset, start), min(run.offset + run.nbytes, end)
        if low < high:
            yield Run(run.address + low - run.offset, high - low, low)
