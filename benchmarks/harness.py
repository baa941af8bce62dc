"""Timing, verification and provenance of measurements.

How a launch is timed. Two CUDA events stand directly around it. A spinning kernel runs before
them, long enough for the host to queue events and launch behind it, so what the host needs for a
launch is not measured; a sample for which the host was too slow is dropped. Between samples caches
are left as they are: address arrays and the heap's state are as warm as the row before left them.

In the interpreter (`HostClock`) times are the host's and only show that the code ran.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from benchmarks.results import ROOT
from devalloc.sizes import PAGE_BYTES

# Verification ------------------------------------------------------------------------------------


class WrongResult(Exception):
    """A measured launch did not do what it should. The message says what was found."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a set of allocations, as counts; all zero is right."""

    nulls: int
    overlaps: int
    outside: int
    misaligned: int

    @property
    def ok(self) -> bool:
        return not (self.nulls or self.overlaps or self.outside or self.misaligned)

    def __str__(self) -> str:
        wrong = [f"{count} {what}" for what, count in vars(self).items() if count]
        return ", ".join(wrong) or "ok"


def promised_alignment(sizes: torch.Tensor) -> torch.Tensor:
    """Bytes: powers of two to themselves up to a page; others to 16, over a page to the page."""
    power = (sizes & (sizes - 1)) == 0
    natural = torch.where(power, sizes, torch.full_like(sizes, 16)).clamp(16, PAGE_BYTES)
    return torch.where(sizes > PAGE_BYTES, torch.full_like(sizes, PAGE_BYTES), natural)


def verify(
    addrs: torch.Tensor,
    sizes: torch.Tensor | int,
    base: int,
    capacity: int,
    alignment: int | None = None,
) -> Verdict:
    """Check live allocations: none null, disjoint, inside the heap, aligned as guaranteed.

    Parameters
    ----------
    addrs : int64 tensor, 1-D
        One address per request; 0 is a null.
    sizes : int64 tensor of the same shape, or int
        Requested bytes.
    base, capacity : int
        First byte and bytes of the heap.
    alignment : int, optional
        Bytes, for all sizes. Default: what devalloc guarantees for each.

    Notes
    -----
    Sorts the addresses on their device; synchronises.
    """
    if isinstance(sizes, int):
        sizes = torch.full_like(addrs, sizes)
    live = addrs != 0
    start, order = addrs[live].sort()
    size = sizes[live][order]
    end = start + size
    unit = promised_alignment(size) if alignment is None else alignment
    outside = (start < base) | (end > base + capacity)
    return Verdict(
        nulls=int((~live).sum()),
        overlaps=int((end[:-1] > start[1:]).sum()),
        outside=int(outside.sum()),
        misaligned=int((start % unit != 0).sum()),
    )


def require(verdict: Verdict) -> None:
    """Raise WrongResult unless the verdict is clean."""
    if not verdict.ok:
        raise WrongResult(str(verdict))


# Timing ------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Times launches: `start` queues one; `milliseconds` waits and reads, None for a bad sample.

    `patience` is how many times longer than one launch the host may need to queue this one.
    """

    def start(self, launch: Callable[[], object], patience: int = 1) -> object: ...

    def milliseconds(self, mark: object) -> float | None: ...


class HostClock:
    """Wall time of the interpreter."""

    def start(self, launch: Callable[[], object], patience: int = 1) -> object:
        begin = time.perf_counter()
        launch()
        return (time.perf_counter() - begin) * 1e3

    def milliseconds(self, mark: object) -> float | None:
        assert isinstance(mark, float)
        return mark


class EventClock:
    """CUDA events around launches that are queued behind a spinning kernel."""

    SPIN_MS = 0.4

    def __init__(self) -> None:
        cycles = 4_000_000
        for _ in range(40):  # an idle GPU needs some time to reach its clock
            torch.cuda._sleep(cycles)
        begin, end = self._events()
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        self._spin_cycles = int(cycles * self.SPIN_MS / begin.elapsed_time(end))

    @staticmethod
    def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def start(self, launch: Callable[[], object], patience: int = 1) -> object:
        begin, end = self._events()
        host = time.perf_counter()
        torch.cuda._sleep(self._spin_cycles * patience)
        begin.record()
        launch()
        end.record()
        late = (time.perf_counter() - host) * 1e3 >= self.SPIN_MS * patience * 0.6
        return begin, end, late

    def milliseconds(self, mark: object) -> float | None:
        assert isinstance(mark, tuple)
        begin, end, late = mark
        end.synchronize()
        return None if late else begin.elapsed_time(end)


def clock_for(device: torch.device) -> Clock:
    return EventClock() if device.type == "cuda" else HostClock()


TAIL_SAMPLES = 100
"""Fewer samples than this have no 99th percentile."""


@dataclass
class Samples:
    """What was measured of one operation of a row; the heap's bytes if it was not shared."""

    op: str
    values: list[float] = field(default_factory=list)
    unit: str = "ms"
    failures: int = 0
    check: str = "ok"
    peak_bytes: int = 0
    heap_bytes: int | None = None

    def record(self) -> dict[str, object]:
        """The columns of a result row that the samples determine."""
        ordered: Sequence[float] = self.values or [float("nan")]
        quantile = {
            name: f"{float(np.quantile(ordered, share)):.6f}"
            for name, share in (("median", 0.5), ("p20", 0.2), ("p80", 0.8), ("min", 0), ("max", 1))
        }
        tail = f"{float(np.quantile(ordered, 0.99)):.6f}" if len(ordered) >= TAIL_SAMPLES else ""
        record = {
            "op": self.op,
            "unit": self.unit,
            **quantile,
            "p99": tail,
            "rounds": len(self.values),
            "failures": self.failures,
            "check": self.check,
            "peak_bytes": self.peak_bytes,
        }
        return record if self.heap_bytes is None else {**record, "heap_bytes": self.heap_bytes}


# Provenance --------------------------------------------------------------------------------------


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """The checkout's commit, with ``-dirty`` if tracked files differ; else ``DEVALLOC_COMMIT``."""
    head = _output("git", "rev-parse", "--short=10", "HEAD")
    if not head:
        return os.environ.get("DEVALLOC_COMMIT", "unknown")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if changed else head


def provenance(device: torch.device, seed: int, heap_bytes: int) -> dict[str, object]:
    """The columns that say where, with what and when a row was measured."""
    import triton

    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    else:
        gpu, driver = "interpreter", "none"
    return {
        "gpu": gpu,
        "driver": driver.splitlines()[0] if driver else "unknown",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "seed": seed,
        "heap_bytes": heap_bytes,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
