"""One stress run on one heap: launches, and the comparison of all counts after every phase.

What the kernels counted, what the heap counted, what lies in the boxes and what the heap's tables
say must agree exactly, phase by phase; every live block is verified and the heap audited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter as clock

import torch

from benchmarks.stress import kernels
from benchmarks.stress.codes import class_of_codes, codes_of, usable_of_codes
from benchmarks.stress.plan import Phase, Shape, Stage
from benchmarks.stress.streams import Streams
from devalloc import Heap
from devalloc.errors import DevallocError
from devalloc.kernels import layout
from devalloc.sizes import CLASS_SIZES

MIB = 1 << 20
MAX_STEPS = 32
LOOK_SECONDS = 2.0
"""Steps between two looks take about that long at most: a full heap is slow."""
HOST_BLOCKS = 2048
MISALIGNED = 256
VERIFY_LANES = 64
KINDS = ("wrong tag", "not zero", "lost by realloc", "wrong address")
COUNTERS = ("mallocs", "nulls", "frees", "words", "moves", "stays")


class Violation(Exception):
    """The heap is wrong, or does not agree with what was done. The message says how."""


@dataclass
class Tally:
    """What one phase did: launches of its shapes, seconds until its last launch was done, double
    frees that were planted, and what the kernels counted. Words are of 8 bytes, compared with their
    tags."""

    launches: int = 0
    seconds: float = 0.0
    planted: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    @property
    def operations(self) -> int:
        """Successful mallocs and frees."""
        return self.counts["mallocs"] + self.counts["frees"]


class Run:
    """A heap, a table of boxes and the launches on them.

    Parameters
    ----------
    stage : Stage
    device : torch.device
        A CUDA device, or the CPU under the interpreter.
    seed : int
        Chooses sizes, boxes and owners; which program is first is the device's choice.

    Notes
    -----
    Use it in a ``with`` block. `phase` and `finish` raise Violation.
    """

    def __init__(self, stage: Stage, device: torch.device, seed: int) -> None:
        self.stage = stage
        self.device = device
        self.seed = seed
        self.heap = Heap(stage.capacity, device)
        self.boxes = self._zeros(1 << stage.boxes_log2)
        self.counters = self._zeros(len(COUNTERS))
        self.host_counters = self._zeros(len(COUNTERS))  # what torch adds to, without atomics
        self.report = self._zeros(
            (1 + kernels.MAX_REPORTS.value) * kernels.RECORD_WORDS.value,
        )
        self.tick = self._zeros(1)
        self._fill_with_junk()
        self.before = self.heap.stats()
        self.tally = Tally()
        """Of the phase that runs, or ran last."""
        self.misaligned = 0
        self.ballast = self._zeros(0)
        self._host_streams = Streams(device, 1)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_error: object) -> None:
        self.heap.close()

    def _zeros(self, n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int64, device=self.device)

    def _fill_with_junk(self) -> None:
        """Leave no word of the data zero, so that `zeros` has something to do."""
        whole = self.heap.malloc([self.heap.capacity])
        self.heap.tensor(whole, self.heap.capacity // 8, torch.int64).fill_(0x5A5A5A5A5A5A5A5A)
        self.heap.free(whole)
        self._synchronise()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    # Launching --------------------------------------------------------------------------------

    def launch(self, phase: Phase, shape: Shape, tick: torch.Tensor, salt: int) -> None:
        """One launch of a shape on the current stream; `tick` makes it differ from the others."""
        kernel = kernels.realloc_kernel if shape.kernel == "realloc" else kernels.churn_kernel
        extra = {} if shape.kernel == "realloc" else {"ZEROED": shape.zeroed}
        sizes = phase.sizes
        kernel[(phase.programs,)](
            self.heap.handle,
            self.heap.base + self.heap.capacity,
            self.boxes,
            tick,
            self.counters,
            self.report,
            self.boxes.numel() - 1,
            phase.rounds,
            sizes.first,
            sizes.last - sizes.first,
            sizes.flat,
            (self.seed * 0x9E3779B1 + salt * 0x85EBCA77) & 0x3FFFFFFF,
            LANES=shape.lanes,
            STEP=shape.step,
            num_warps=shape.warps,
            **extra,
        )
        tick += 1

    def phase(self, phase: Phase, operations: int) -> Tally:
        """Do a phase's steps until it has had its operations or its time; then compare all
        counts."""
        self.tally = tally = Tally()
        streams = Streams(self.device, phase.streams)
        ticks = [
            self._zeros(1) + index * (1 << 24) + int(self.tick)
            for index in range(len(phase.shapes))
        ]
        self._hold_ballast(phase.ballast)
        self._synchronise()

        def step() -> None:
            for index, shape in enumerate(phase.shapes):
                with streams.use(index):
                    self.launch(phase, shape, ticks[index], index)

        if phase.graph and self.on_gpu:
            advance = self._captured(step, streams)
        else:
            advance = step
        started = clock()
        deadline = started + phase.seconds
        done = 0
        steps = 1  # a few between looks, so that launches of all streams overlap
        while True:
            for _ in range(steps):
                advance()
                tally.launches += len(phase.shapes)
                if phase.host:
                    self._host_calls()
            self._synchronise()
            counts = self._counts()
            now = counts["mallocs"] + counts["frees"]
            if now >= operations or clock() >= deadline:
                break
            needed = (operations - now) * steps // max(1, now - done)
            rate = tally.launches / len(phase.shapes) / (clock() - started)
            steps = max(1, min(needed, int(LOOK_SECONDS * rate), MAX_STEPS))
            done = now
        tally.seconds = clock() - started
        self.tick += 1 << 12
        self._drop_ballast()
        if phase.double_frees:
            self._free_again(phase.double_frees, tally)
        self._settle(tally)
        return tally

    def _captured(self, step: Callable[[], None], streams: Streams) -> Callable[[], None]:
        """`step` as a CUDA graph whose branches are the streams."""
        step()  # compiles
        self._synchronise()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            streams.fork()
            step()
            streams.join()
        return graph.replay

    def _synchronise(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    # The host's part --------------------------------------------------------------------------

    def _host_calls(self) -> None:
        """While kernels run: allocate, tag, put into boxes, verify and free what was there, free
        addresses at which nothing can begin, trim. Nothing here waits for the device."""
        n = min(HOST_BLOCKS, self.boxes.numel() // 2)
        with self._host_streams.use(0):
            exponent = torch.randint(0, 8, (n,), device=self.device)
            codes = exponent * 16 + torch.randint(0, 16, (n,), device=self.device)
            addrs = self.heap.malloc((16 + codes % 16) << exponent)
            entries = torch.empty_like(addrs)
            grid = ((n + VERIFY_LANES - 1) // VERIFY_LANES,)
            kernels.tag_kernel[grid](
                self.heap.handle, addrs, codes, entries, self.tick, n, self.seed & 0xFFFF,
                LANES=VERIFY_LANES, STEP=8, num_warps=2,
            )  # fmt: skip
            kernels.exchange_kernel[grid](
                self.boxes, entries, self.tick, self.report, self.boxes.numel() - 1, n,
                self.seed & 0xFFFF, LANES=VERIFY_LANES, num_warps=2,
            )  # fmt: skip
            got = self._verify(entries)
            self.host_counters[0] += (addrs != 0).sum()
            self.host_counters[1] += (addrs == 0).sum()
            self.host_counters[2] += (entries != 0).sum()
            self.heap.free(got)
            self.heap.free(self.heap.base + 8 + torch.arange(MISALIGNED, device=self.device) * 16)
            self.misaligned += MISALIGNED
            self.heap.trim()
            self.tick += 1

    def _hold_ballast(self, share: float) -> None:
        blocks = int(self.heap.capacity * share) // MIB
        self.ballast = self.heap.malloc([MIB] * blocks)
        self._synchronise()
        held = int((self.ballast != 0).sum())
        self.host_counters[0] += held
        self.host_counters[1] += blocks - held

    def _drop_ballast(self) -> None:
        self.host_counters[2] += (self.ballast != 0).sum()
        self.heap.free(self.ballast)
        self.ballast = self.ballast[:0]

    def _free_again(self, times: int, tally: Tally) -> None:
        """Empty all boxes, every block freed by ``times + 1`` programs of one launch at once."""
        entries = self.boxes[self.boxes != 0]
        addrs = self._verify(entries)
        n = addrs.numel()
        blocks = (n + 127) // 128
        order = torch.randperm(n, device=self.device)
        if n:
            kernels.free_again_kernel[(blocks * (times + 1),)](
                self.heap.handle, addrs[order], n, blocks, LANES=128, num_warps=4
            )
        self.boxes.zero_()
        self.host_counters[2] += n
        tally.planted += times * n

    # Comparing --------------------------------------------------------------------------------

    def _verify(self, entries: torch.Tensor) -> torch.Tensor:
        """Verify the blocks of entries, in one launch; their addresses."""
        addrs = torch.zeros_like(entries)
        n = entries.numel()
        if n:
            kernels.verify_kernel[((n + VERIFY_LANES - 1) // VERIFY_LANES,)](
                self.heap.handle, entries, addrs, self.counters, self.report, n,
                LANES=VERIFY_LANES, STEP=8, num_warps=2,
            )  # fmt: skip
        return addrs

    def _settle(self, tally: Tally) -> None:
        """Compare all counts, at rest, and start new ones. Raises Violation."""
        self._synchronise()
        entries = self.boxes[self.boxes != 0]
        addrs = self._verify(entries)
        tally.counts = counts = self._counts()
        self._raise_reports()
        try:
            self.heap.audit()
        except DevallocError as error:
            raise Violation(f"audit: {error}") from error
        stats = self.heap.stats()
        errors = self._recorded_errors()
        wanted = {
            "allocations": (stats.allocations - self.before.allocations, counts["mallocs"]),
            "frees": (stats.frees - self.before.frees, counts["frees"]),
            "failures": (stats.failures - self.before.failures, counts["nulls"]),
            "double frees": (errors[layout.E_DOUBLE_FREE.value], tally.planted),
            "invalid frees": (errors[layout.E_INVALID_FREE.value], self.misaligned),
            "invalid arguments": (errors[layout.E_INVALID_ARGUMENT.value], 0),
            "live blocks": (stats.allocations - stats.frees, entries.numel()),
        }
        wrong = [
            f"{name}: the heap says {found}, it was {expected}"
            for name, (found, expected) in wanted.items()
            if found != expected
        ]
        if wrong:
            raise Violation("; ".join(wrong))
        self._compare_tables(entries, addrs)
        self.before = self.heap.stats()
        self.misaligned = 0
        self.counters.zero_()
        self.host_counters.zero_()
        self._synchronise()

    def _counts(self) -> dict[str, int]:
        total = self.counters + self.host_counters
        return dict(zip(COUNTERS, total.tolist(), strict=True))

    def _raise_reports(self) -> None:
        table = self.report.view(-1, kernels.RECORD_WORDS.value).tolist()
        total = table[0][0]
        if not total:
            return
        kind, addr, size, index, expected, found, owner, program = table[1]
        raise Violation(
            f"{total} violations; the first: {KINDS[kind]} at {addr:#x} (offset "
            f"{addr - self.heap.base:#x} of the heap), {size} B usable, owner {owner:#x}: word "
            f"{index} should be {expected & (1 << 64) - 1:#018x}, is "
            f"{found & (1 << 64) - 1:#018x}; seen by program {program}"
        )

    def _recorded_errors(self) -> list[int]:
        start = layout.ERRORS.value
        found: list[int] = self.heap.handle[start : start + 4].tolist()
        self.heap.clear_errors()
        return found

    def _compare_tables(self, entries: torch.Tensor, addrs: torch.Tensor) -> None:
        """The blocks in the boxes are live in the heap: disjoint, as large as guaranteed, by
        class."""
        codes = codes_of(entries)
        usable = usable_of_codes().to(self.device)[codes]
        start, order = addrs.sort()
        end = start + usable[order]
        overlaps = int((end[:-1] > start[1:]).sum())
        if overlaps:
            at = int((end[:-1] > start[1:]).nonzero()[0])
            raise Violation(
                f"{overlaps} live blocks overlap the next; the first ends at {int(end[at]):#x}, "
                f"and another begins at {int(start[at + 1]):#x}"
            )
        said = self.heap.usable_size(addrs)
        if int((said != usable).sum()):
            at = int((said != usable).nonzero()[0])
            raise Violation(
                f"usable_size of {int(addrs[at]):#x} is {int(said[at])}, not {int(usable[at])}"
            )
        classes = class_of_codes().to(self.device)[codes]
        expected = torch.bincount(classes, minlength=len(CLASS_SIZES) + 1)[:-1].tolist()
        live = [row.live for row in self.heap.stats().per_class]
        if live != expected:
            raise Violation(f"live slots by class: the heap says {live}, in boxes are {expected}")

    def plant(self, fault: str) -> None:
        """Commit a user's fault, for the run to report: ``overflow``, ``leak``, ``double-free``."""
        entries = self.boxes[self.boxes != 0]
        addrs = self._verify(entries)
        if fault == "overflow":
            codes = codes_of(entries)
            start, order = addrs.sort()
            end = start + usable_of_codes().to(self.device)[codes[order]]
            beyond = start[1:][end[:-1] == start[1:]]
            if not beyond.numel():
                raise Violation("nothing to plant: no block begins where another ends")
            kernels.poke_kernel[(1,)](beyond, 0x0BADF00D)
        elif fault == "leak":
            self.boxes[self.boxes.nonzero()[0]] = 0
        else:
            block = self.heap.malloc([64])
            self.heap.free(block)
            self.heap.free(block)
            self.host_counters[0] += 1
            self.host_counters[2] += 1

    def finish(self) -> Tally:
        """Verify and free everything; then the whole capacity must be one free block."""
        self.tally = tally = Tally()
        started = clock()
        entries = self.boxes[self.boxes != 0]
        self.heap.free(self._verify(entries))
        self.boxes.zero_()
        self.host_counters[2] += entries.numel()
        self._settle(tally)
        stats = self.heap.stats()
        if (stats.used, stats.largest_free) != (0, self.heap.capacity):
            raise Violation(
                f"everything was freed, but {stats.used} B are in use and the largest free block "
                f"has {stats.largest_free} of {self.heap.capacity} B"
            )
        whole = self.heap.malloc([self.heap.capacity])
        if whole.tolist() != [self.heap.base]:
            raise Violation(f"the whole capacity is not free in one piece: {whole.tolist()}")
        self.heap.free(whole)
        self.heap.audit()
        tally.seconds = clock() - started
        return tally
