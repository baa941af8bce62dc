"""Run litmus kernels and count what memory order forbids."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter as clock

import torch

from benchmarks.stress.litmus import kernels
from benchmarks.stress.litmus.plan import MUST_HOLD, Handover, Shape
from devalloc import Heap
from devalloc.errors import DevallocError

TOTALS = ("handed", "crossed", "owned", "torn", "nulls")
LAUNCH_SECONDS = 30.0


@dataclass
class Outcome:
    """Columns of a row: what was tried (`instances`), how often it could have failed (`relevant`:
    with another multiprocessor involved, or seen in the middle), and how often it did."""

    instances: int
    relevant: int
    forbidden: int
    seconds: float
    detail: str
    check: str

    def columns(self) -> dict[str, object]:
        return {**vars(self), "seconds": f"{self.seconds:.3f}"}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def hand_over(case: Handover, blocks: int, device: torch.device, seed: int) -> Outcome:
    """Let blocks change hands until `blocks` went to another multiprocessor; compare the counters
    in the heap with what the kernels counted."""
    totals = torch.zeros(len(TOTALS), dtype=torch.int64, device=device)
    with Heap(case.capacity, device) as heap:
        _counters(heap).zero_()
        _release(heap)
        started = clock()
        launches = 0
        while True:
            kernels.handover_kernel[(case.programs,)](
                heap.handle, totals, case.rounds, case.smallest_log2, case.span,
                seed + launches, LANES=case.lanes, COUNTERS=case.counters, num_warps=case.warps,
            )  # fmt: skip
            launches += 1
            if int(totals[1]) >= blocks or clock() - started >= LAUNCH_SECONDS:
                break
        seconds = clock() - started
        found = dict(zip(TOTALS, totals.tolist(), strict=True))
        heap.clear_errors()
        problems = []
        try:
            heap.audit()
            table = _counters(heap)
            lost = found["owned"] - int(table[:, 0].sum())
            seals = (table[:, 1] >> kernels.SM_BITS.value) & 0x7FFFFFFFFFFF
            expected = (table[:, 0] * 0x5DEECE66D) & 0x7FFFFFFFFFFF
            broken = int((seals != expected).sum())
            _release(heap)
        except DevallocError as error:
            problems.append(str(error))
            lost = broken = 0
        heap.clear_errors()
    if found["torn"] or lost or broken:
        problems.append(
            f"{found['torn']} torn, {lost} increments lost, {broken} seals broken in the end"
        )
    return Outcome(
        instances=found["handed"],
        relevant=found["crossed"],
        forbidden=found["torn"] + abs(lost) + broken,
        seconds=seconds,
        detail=f"{found['owned']} increments of 16 B, {found['nulls']} nulls",
        check="; ".join(problems) or "ok",
    )


def _counters(heap: Heap) -> torch.Tensor:
    """All of an empty heap as rows of (count, seal); the caller gives it back by `_release`."""
    whole = heap.malloc([heap.capacity])
    return heap.tensor(whole, (heap.capacity // 16, 2), torch.int64)


def _release(heap: Heap) -> None:
    heap.free([heap.base])
    synchronise(heap.device)


def run_shape(shape: Shape, instances: int, device: torch.device) -> Outcome:
    """Run one shape until it had `instances` turns in all lanes."""
    words = shape.groups * shape.lanes
    places = torch.zeros(shape.groups * shape.roles, dtype=torch.int64, device=device)
    log_words = 2 * words * shape.turns if shape.name == "SB" else 0
    log = torch.zeros(log_words, dtype=torch.int32, device=device)
    done = relevant = forbidden = 0
    seconds = 0.0
    apart = 1.0
    while True:
        x = torch.zeros(words, dtype=torch.int64, device=device)
        y = torch.zeros_like(x)
        totals = torch.zeros(2, dtype=torch.int64, device=device)
        synchronise(device)
        started = clock()
        grid = (places.numel(),)
        if shape.name == "SB":
            kernels.store_buffering_kernel[grid](
                x, y, places, log, totals, shape.turns, shape.groups,
                ORDER=shape.order, LANES=shape.lanes, num_warps=1,
            )  # fmt: skip
            synchronise(device)
            seconds += clock() - started
            news, weak = buffered(log.view(2, shape.groups, shape.turns, shape.lanes))
        else:
            kernels.message_kernel[grid](
                x, y, places, totals, shape.turns, shape.groups,
                RELAYED=shape.name == "WRC", ORDER=shape.order, LANES=shape.lanes, num_warps=1,
            )  # fmt: skip
            synchronise(device)
            seconds += clock() - started
            news, weak = totals.tolist()
        relevant += news
        forbidden += weak
        done += words * shape.turns
        roles = places.view(shape.roles, shape.groups)
        apart = min(apart, float((roles[0] != roles[-1]).float().mean()))
        if done >= instances or shape.turns == 0:
            break
    wrong = forbidden and shape.order in MUST_HOLD
    return Outcome(
        instances=done,
        relevant=relevant,
        forbidden=forbidden,
        seconds=seconds,
        detail=f"{apart:.0%} of the groups on different multiprocessors",
        check=f"{forbidden} forbidden outcomes" if wrong else "ok",
    )


def buffered(log: torch.Tensor) -> tuple[int, int]:
    """Of store buffering: how many reads fell into the other's run, and how many are forbidden.

    `log`[role, group, turn, lane] is what a program read of the other's word after writing turn + 1
    to its own. If program 0 read r in turn t, it did not see the other's write of r + 1; the
    program that wrote that must then have seen the write of t.
    """
    first, second = log[0], log[1]
    turns = log.shape[2]
    relevant = forbidden = 0
    for group in range(log.shape[1]):
        read = first[group].to(torch.int64)
        inside = (read > 0) & (read < turns)
        relevant += int(inside.sum())
        # Write r + 1 is turn r of the other.
        answer = second[group].gather(0, read.clamp(max=turns - 1))
        turn = torch.arange(1, turns + 1, dtype=torch.int32, device=log.device)[:, None]
        forbidden += int(((answer < turn) & (read < turns)).sum())
    return relevant, forbidden
