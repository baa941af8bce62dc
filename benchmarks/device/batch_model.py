"""A model of batches: what happens at the stripes of a heap, launch by launch, without a device.

It repeats the decisions of ``kernels/batches.py`` (how long batches are, what rests, what is made
ready, renewed, opened or dissolved) for programs that run one after another, and nothing else of
the heap. So it says how many programs of a launch have something rare to do, which is what launches
of mixed sizes wait for; it does not say how long that takes, nor what programs do to one another
that run at once. ``tests/benchmarks/test_batch_model.py`` compares it with the heap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from devalloc.heap.state import Geometry
from devalloc.kernels import batches as policy
from devalloc.kernels import slabs
from devalloc.sizes import CLASS_SIZES, PAGE_BYTES

SLOTS = [PAGE_BYTES // size for size in CLASS_SIZES]
_SPARED = policy.SPARED.value
_PLENTY = policy.PLENTY.value


class NotModelled(Exception):
    """The workload does something that the model leaves out."""


@dataclass
class Batch:
    """Pages of a stripe. Of its tickets, those from `first_live` to `issued` lead to live slots."""

    pages: int
    slots: int
    issued: int = 0
    first_live: int = 0

    @property
    def tickets(self) -> int:
        return self.pages * self.slots

    @property
    def credits(self) -> int:
        return self.tickets - self.issued

    @property
    def free_front(self) -> int:
        """How many pages at its front are free, if it is used up."""
        return self.pages if self.issued == self.first_live else self.first_live // self.slots

    @property
    def live_pages(self) -> int:
        """How many pages have live blocks."""
        if self.issued == self.first_live:
            return 0
        return (self.issued - 1) // self.slots + 1 - self.first_live // self.slots


@dataclass
class Events:
    """What happened in one launch. Each is done by one program; others may wait for a refill.

    Attributes
    ----------
    swapped : int
        Refills by a spare that was ready.
    renewed, opened : int
        Refills by the batch that rested, and by a new one.
    readied, ahead, left : int
        Prefetches that renewed what rested, that opened a new batch, and that did neither.
    dissolved : int
        Batches, for another.
    held : int
        Pages in batches, in the end.
    """

    swapped: int = 0
    renewed: int = 0
    opened: int = 0
    readied: int = 0
    ahead: int = 0
    left: int = 0
    dissolved: int = 0
    held: int = 0


EVENTS = tuple(field.name for field in fields(Events))


@dataclass
class Stripe:
    """Its batch and its spare."""

    batch: Batch | None = None
    spare: Batch | None = None


class BatchModel:
    """The stripes of a heap of `pages` pages.

    Parameters
    ----------
    pages : int
        Of 64 KiB, in the heap.
    """

    def __init__(self, pages: int) -> None:
        self.geometry = Geometry.of(pages)
        self.stripes: dict[tuple[int, int], Stripe] = {}
        self.held = 0
        self.loose = 0
        """Pages of dissolved batches that have live blocks."""
        self.events = Events()

    def launch(self, sizes: Sequence[int] | np.ndarray, lanes: int) -> Events:
        """Allocate blocks of `sizes` (bytes), a program for every `lanes` of them.

        Raises
        ------
        NotModelled
            If a block would take whole pages, or the heap fills.
        """
        self.events = Events()
        classes = np.searchsorted(CLASS_SIZES, np.asarray(sizes))
        if classes.max(initial=0) >= len(CLASS_SIZES):
            raise NotModelled(f"{max(sizes)} B are a run of pages, which no stripe serves")
        for program, first in enumerate(range(0, len(classes), lanes)):
            self._run(program % self.geometry.stripes, classes[first : first + lanes])
        self.events.held = self.held
        return self.events

    def free_all(self) -> None:
        """Free all live blocks."""
        self.loose = 0
        for stripe in self.stripes.values():
            for batch in (stripe.batch, stripe.spare):
                if batch is not None:
                    batch.first_live = batch.issued

    def _run(self, place: int, classes: np.ndarray) -> None:
        found, first, counts = np.unique(classes, return_index=True, return_counts=True)
        if len(found) == 1 and counts[0] >= SLOTS[found[0]] * slabs.WHOLE_PAGES.value:
            raise NotModelled("blocks that fill pages take pages of their own, from no stripe")
        left: dict[int, int] = {}
        halves: set[int] = set()
        for cls, count in zip(found.tolist(), counts.tolist(), strict=True):
            stripe = self.stripes.setdefault((cls, place), Stripe())
            left[cls] = count - self._tickets(stripe, count, halves, cls)
        # (Lane by lane, as the kernel serves them.)
        for cls in found[np.argsort(first)].tolist():
            stripe = self.stripes[cls, place]
            while left[cls] > 0:
                left[cls] -= self._refill(stripe, cls, left[cls])
        for cls in sorted(halves):
            self._prefetch(self.stripes[cls, place], cls)

    @staticmethod
    def _tickets(stripe: Stripe, count: int, halves: set[int], cls: int) -> int:
        batch = stripe.batch
        if batch is None:
            return 0
        half = batch.tickets >> 1
        if batch.pages >= _SPARED and batch.credits >= half > batch.credits - count:
            halves.add(cls)
        got = min(count, batch.credits)
        batch.issued += got
        return got

    def _refill(self, stripe: Stripe, cls: int, need: int) -> int:
        """Give the stripe a batch, and `need` slots of it to the caller, or as many as it has."""
        old, spare = stripe.batch, stripe.spare
        if spare is not None and spare.credits > 0:
            place, stripe.spare = spare, old
            self.events.swapped += 1
        else:
            limit, share = self._announce()
            least_renewed = _SPARED if spare is None else min(limit, _SPARED)
            rested = old if spare is None else spare
            place = None
            if rested is not None and rested.pages >= least_renewed:
                wanted = rested.pages if limit >= rested.pages else (rested.pages + 1) >> 1
                place = self._renew(rested, wanted)
            aside = None if place is not None and spare is None else old
            if place is not None:
                self.events.renewed += 1
            else:
                if spare is not None:
                    self._dissolve(spare)
                place = self._open(cls, max(self._next_length(cls, old, limit, share), 1))
                self.events.opened += 1
            stripe.spare = aside
        got = min(need, place.credits)
        place.issued += got
        stripe.batch = place
        return got

    def _prefetch(self, stripe: Stripe, cls: int) -> None:
        limit, share = self._announce()
        batch, rests = stripe.batch, stripe.spare
        assert batch is not None
        if rests is not None and rests.credits > 0:
            return
        serves = rests is not None and rests.free_front > 0
        free = rests is not None and rests.free_front == rests.pages
        if limit > 0 and (not serves or (free and share < _PLENTY)):
            length = self._next_length(cls, batch, limit, share)
            if rests is None or not free or length > rests.pages:
                stripe.spare = self._open(cls, length)
                self.events.ahead += 1
                if rests is not None:
                    self._dissolve(rests)
                return
        if rests is not None and free:
            stripe.spare = self._renew(rests, rests.pages)
            self.events.readied += 1
        else:
            self.events.left += 1

    def _announce(self) -> tuple[int, int]:
        """How many pages a batch may have, and how many sixteenths of the heap stripes hold."""
        pages, longest = self.geometry.pages, self.geometry.max_batch
        used = self.held + self.loose
        short = min(longest, _SPARED)
        share = self.held * 16 // pages
        limit = max(longest >> max(share - 7, 0), short)
        if used * 8 > pages * 5:
            limit = short
        if self.loose * 2 > pages - self.held or used + short > pages:
            raise NotModelled("the heap fills, so slots are drawn")
        return limit, share

    @staticmethod
    def _next_length(cls: int, old: Batch | None, limit: int, share: int) -> int:
        if old is not None:
            log2 = old.pages.bit_length() - 1 + (2 if share < _PLENTY else 1)
            return min(limit, 1 << log2)
        size_log2 = CLASS_SIZES[cls].bit_length() - 1
        some = max(1 << size_log2 >> policy.FIRST_SIZE_LOG2.value, _SPARED)
        quarter = limit >> policy.FIRST_LOG2.value
        return max(min(max(quarter >> max(share - 1, 0), some), quarter), min(limit, 1))

    def _open(self, cls: int, pages: int) -> Batch:
        self.held += pages
        return Batch(pages, SLOTS[cls])

    def _renew(self, rested: Batch, least: int) -> Batch | None:
        front = rested.free_front
        if front < least:
            return None
        self.held -= rested.pages - front
        if front < rested.pages:
            self.loose += rested.live_pages
        return Batch(front, rested.slots)

    def _dissolve(self, batch: Batch) -> None:
        self.held -= batch.pages
        self.loose += batch.live_pages
        self.events.dissolved += 1
