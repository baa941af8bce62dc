"""How fast host memory for a backup is made ready: committed by threads, locked, given back.

The first touch of memory that the machine has not used yet may be far slower than a later one, so
each number of threads gets memory of its own, and one is measured again at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from devalloc.arena.regions.host_memory import PIECE, HostMemory
from devalloc.sources import HostSource, Segment
from devalloc.sources.libc import populate

if TYPE_CHECKING:
    import torch

THREADS = (8, 1, 4, 16, 32)
GIB = 1 << 30


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _commit(memory: Segment, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        starts = range(0, memory.nbytes, PIECE)
        ends = [min(start + PIECE, memory.nbytes) for start in starts]
        for done in [
            pool.submit(populate, memory.address + start, end - start)
            for start, end in zip(starts, ends, strict=True)
        ]:
            done.result()


def host_parts(device: torch.device, nbytes: int) -> Iterator[tuple[str, str, list[float]]]:
    """Operations, "GiB/s", and one value each."""

    def speed(seconds: float) -> list[float]:
        return [nbytes / GIB / seconds]

    fresh = []  # kept until the end, or the next would get its pages
    for threads in THREADS:
        memory = Segment(HostSource(), nbytes)
        name = f"commit, {threads} thread{'s' * (threads > 1)}"
        yield name, "GiB/s", speed(_seconds(lambda: _commit(memory, threads)))  # noqa: B023
        fresh.append(memory)
    memory = None  # type: ignore[assignment]
    yield "give back", "GiB/s", [len(THREADS) * speed(_seconds(fresh.clear))[0]]
    again = Segment(HostSource(), nbytes)
    yield "commit again, 8 threads", "GiB/s", speed(_seconds(lambda: _commit(again, 8)))
    again = None  # type: ignore[assignment]
    backup = HostMemory(nbytes, device)
    list(backup.pieces(0))
    yield "lock", "GiB/s", speed(_seconds(lambda: list(backup.pieces(nbytes))))
