"""The best-fit-with-coalescing allocator of TensorFlow and XLA as a policy.

Its 21 bins, each ordered by (size, address) and searched from the request's bin upwards, choose the
same chunk as one list ordered by (size, address). So the cache's free list is used, and the bins
appear only in the report.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from devalloc.arena.policies.policy import FrontRule, Policy
from devalloc.arena.store.blocks import Block, FreeList
from devalloc.errors import InvalidArgument
from devalloc.sizes import MIB, require_fraction, round_up, size_option

if TYPE_CHECKING:
    from devalloc.arena.store.request import Request
    from devalloc.arena.store.store import Store

MIN_CHUNK = 256
BINS = 21
_DEFAULT_PADDING = 128 * MIB
_BACK_OFF = np.float32(0.9)
"""A float of 24 bits, as in the original: 16 GiB backs off to 15,461,881,856 B."""


def bin_of(nbytes: int) -> int:
    """The bin of a chunk: b holds [256 * 2**b, 256 * 2**(b + 1)), the last one all from 256 MiB."""
    return min(BINS - 1, max(nbytes // MIN_CHUNK, 1).bit_length() - 1)


@dataclasses.dataclass
class BfcPolicy(Policy):
    """TensorFlow's rules.

    Parameters
    ----------
    growth : bool
        Regions begin with ``first_region`` and double; otherwise the first is the whole limit.
    first_region : int or str
        Bytes.
    fragmentation_fraction : float
        A chunk is split if the rest is at least this fraction of the limit; 0 means 128 MiB. (A
        chunk of at least twice the request is always split.)
    garbage_collection : bool
        Before failing, give idle regions back and ask the source again.
    retry_wait_s : float
        Seconds that a failing request waits for a free by another thread. TensorFlow waits 10.
    timestamps : bool
        Freed chunks carry the time of their free (`Cache.clock` counts frees). Another stream may
        use such a chunk only when the safe frontier (`Cache.set_safe_frontier`) has passed that
        time; until then the chunk is not merged with its neighbours.
    """

    name: ClassVar[str] = "bfc"

    growth: bool = True
    first_region: int = 2 * MIB
    fragmentation_fraction: float = 0.0
    garbage_collection: bool = True
    retry_wait_s: float = 0.0
    timestamps: bool = False
    _region: int = dataclasses.field(default=0, init=False, repr=False)
    _clock: int = dataclasses.field(default=0, init=False, repr=False)
    _frontier: int = dataclasses.field(default=0, init=False, repr=False)
    _padding: int = dataclasses.field(default=_DEFAULT_PADDING, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.first_region = size_option("first_region", self.first_region, 1)
        require_fraction("fragmentation_fraction", self.fragmentation_fraction, 1.0)
        require_fraction("retry_wait_s", self.retry_wait_s, 3600.0)

    @property
    def careful(self) -> bool:
        return self.timestamps

    @property
    def best_fit(self) -> bool:
        return not self.timestamps

    def bind(self) -> BfcPolicy:
        bound = copy.copy(self)
        # Not in `attach`: the stamps of a store outlive a change of its limit.
        bound._clock = bound._frontier = 0
        return bound

    def attach(self, store: Store) -> None:
        if store.limit is None and (not self.growth or self.fragmentation_fraction):
            raise InvalidArgument(
                "growth=False and fragmentation_fraction refer to the limit, and there is none; "
                "give the arena a limit"
            )
        first = self.first_region if self.growth else store.limit
        assert first is not None
        if self.fragmentation_fraction and store.limit is not None:
            self._padding = int(self.fragmentation_fraction * store.limit)
        # At least one chunk: doubling from 0 would never reach a request.
        self._region = max(first // MIN_CHUNK * MIN_CHUNK, MIN_CHUNK)

    def round(self, nbytes: int) -> int:
        return max(MIN_CHUNK, round_up(nbytes, MIN_CHUNK))

    @property
    def front_rule(self) -> FrontRule | None:
        return None if self.careful else FrontRule(self._least, self._least, halves=True)

    @property
    def _least(self) -> int:
        return MIN_CHUNK if self.expandable_segments else self._padding

    def splits(self, index: int, whole: int, size: int) -> bool:
        return whole >= 2 * size or whole - size >= self._least

    # Searching ------------------------------------------------------------------------------------

    def find(self, store: Store, home: FreeList, size: int, freed_before: int | None) -> int | None:
        if store.stamps:
            self._merge_stamped(store, 0)
        return self._find_stamped(store, home, size, freed_before)

    def _find_stamped(
        self, store: Store, home: FreeList, size: int, freed_before: int | None
    ) -> int | None:
        for _, address in home.from_size(size):
            stamp = store.stamps.get(address, 0)
            if freed_before is None or stamp <= freed_before:
                return address
        best: tuple[int, int] | None = None
        safe = max(self._frontier - 1, freed_before or 0)
        for other in home.pool.lists.values():
            for found in other.from_size(size) if other is not home else ():
                if store.stamps.get(found[1], 0) <= safe:
                    best = min(best or found, found)
                    break
        return None if best is None else best[1]

    # Growing --------------------------------------------------------------------------------------

    def miss(self, store: Store, request: Request) -> Block | None:
        block = self._extend(store, request)
        ordered = request.freed_before is None
        if block is None and ordered and store.stamps and self._merge_stamped(store, request.size):
            block = store.find_for(request)
        if block is None and self.garbage_collection and self._release_idle(store, request):
            store.counts["num_alloc_retries"] += 1
            block = self._extend(store, request)
        return block

    def _extend(self, store: Store, request: Request) -> Block | None:
        """Ask for a new region: the current size, doubled until the request fits. On failure ask
        for nine tenths, repeatedly, down to the size of the request. An expandable segment grows by
        what the request needs."""
        if self.expandable_segments:
            return store.grow(request, request.size)
        room = store.room()
        available = None if room is None else room // MIN_CHUNK * MIN_CHUNK
        if available is not None and request.size > available:
            return None
        # Kept even if the source refuses: the next request begins with the larger region.
        before = self._region
        while self._region < request.size:
            self._region *= 2
        nbytes = self._region if available is None else min(self._region, available)
        block = store.grow(request, nbytes)
        while block is None:
            less = int(np.float32(nbytes) * _BACK_OFF)
            # At least one chunk less: a small size would be rounded up to itself, and the loop
            # would not end.
            nbytes = min(self.round(less), nbytes - MIN_CHUNK)
            if nbytes < request.size:
                break
            block = store.grow(request, nbytes)
        if block is not None and self._region == before:
            self._region *= 2
        return block

    def _release_idle(self, store: Store, request: Request) -> bool:
        """Give all idle regions back, if that can help."""
        if not store.may_release():
            return False
        store.wait_for_events()
        room = store.room()
        free = sum(place[0] for place in store.default.pools[1].idle())
        if not free or (room is not None and request.size > room + free):
            return False
        return store.release_cached() > 0

    # Time stamps ----------------------------------------------------------------------------------

    @property
    def stamps_frees(self) -> bool:
        return self.timestamps

    @property
    def clock(self) -> int:
        return self._clock if self.timestamps else super().clock

    def set_safe_frontier(self, time: int) -> None:
        if not self.timestamps:
            super().set_safe_frontier(time)
        self._frontier = max(self._frontier, time)

    def stamp(self, store: Store, block: Block) -> None:
        self._clock += 1
        store.stamps[block.address] = self._clock

    def _merge_stamped(self, store: Store, wanted: int) -> bool:
        """Merge stamped chunks that the frontier has passed. If ``wanted`` is not 0, merge younger
        ones too until one chunk has that many bytes. Returns whether one has."""
        candidates = store.stamps.take_before(self._frontier)
        if wanted:
            candidates += store.stamps
        satisfied = False
        for address in candidates:
            block = store.blocks.get(address)
            if block is None or (satisfied and address in store.stamps):
                continue
            merged = store.settle(block, ignore_stamps=wanted > 0 and not satisfied)
            satisfied = satisfied or 0 < wanted <= merged.size
        return satisfied
