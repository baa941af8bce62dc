"""PyTorch's CUDACachingAllocator as a policy, with its settings string."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from devalloc.arena.policies.policy import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    SMALL_MAX,
    FrontRule,
    TwoPoolPolicy,
    two_pool_segment,
)
from devalloc.arena.store.blocks import Block, FreeList, Segment
from devalloc.errors import InvalidArgument
from devalloc.sizes import MIB, quote, require_count, require_fraction, round_up, size_option

if TYPE_CHECKING:
    from devalloc.arena.store.request import Request
    from devalloc.arena.store.store import Store

INTERVALS = 16
"""Intervals of ``roundup_power2_divisions``: [1 MiB, 2 MiB) and below, ... [32 GiB, ...)."""


def next_division(nbytes: int, divisions: int) -> int:
    """``nbytes`` rounded up to the next of ``divisions`` equal steps between two powers of two.

    With 4 divisions 1200 gives 1280: the steps are 1024, 1280, 1536, 1792, 2048.
    """
    if nbytes <= 4 or divisions <= 1 or nbytes & (nbytes - 1) == 0:
        return nbytes
    floor = 1 << nbytes.bit_length() - 1
    step = floor // divisions
    return floor * 2 if step == 0 else round_up(nbytes, step)


@dataclasses.dataclass
class TorchPolicy(TwoPoolPolicy):
    """PyTorch's rules.

    Parameters
    ----------
    roundup_power2_divisions : int or sequence of 16 ints
        Number of steps between two powers of two to which sizes are rounded up: a power of two, or
        0 or 1 for no such rounding. One value for all sizes, or one for each interval from 1 MiB
        to 64 GiB.
    max_split_size : int or str, optional
        Bytes, over 20 MiB. Blocks of this size and more are never split. Smaller requests never
        take such a block; others take one that is less than ``max_non_split_rounding`` larger than
        the request. Default: no limit.
    max_non_split_rounding : int or str
        Bytes, over 20 MiB or equal to it: see ``max_split_size``.
    garbage_collection_threshold : float
        Fraction of the limit; 0 is off. If more than this is reserved when the source is about to
        be asked, idle large segments of at least average age go back first.
    """

    name: ClassVar[str] = "torch"

    roundup_power2_divisions: int | tuple[int, ...] = 0
    max_split_size: Any = None
    garbage_collection_threshold: float = 0.0
    max_non_split_rounding: int = LARGE_SEGMENT
    _ages: dict[Segment, int] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.roundup_power2_divisions
        if isinstance(given, int):
            given = (given,) * INTERVALS
        if not isinstance(given, Sequence) or len(given) != INTERVALS:
            raise InvalidArgument(
                "roundup_power2_divisions must be an int or a sequence of one int for each of the "
                f"{INTERVALS} intervals, not {quote(given)}"
            )
        divisions = tuple(given)
        for value in divisions:
            require_count("roundup_power2_divisions", value, 0)
            if value & (value - 1):
                raise InvalidArgument(
                    f"roundup_power2_divisions must be powers of two or 0, not {value}"
                )
        self._divisions = divisions
        if self.max_split_size is not None and self.expandable_segments:
            raise InvalidArgument(
                "max_split_size keeps large segments whole, and expandable segments are divided "
                "and joined again; give only one of the two"
            )
        if self.max_split_size is not None:
            self.max_split_size = size_option(
                "max_split_size", self.max_split_size, LARGE_SEGMENT + 1
            )
        self.max_non_split_rounding = size_option(
            "max_non_split_rounding", self.max_non_split_rounding, LARGE_SEGMENT
        )
        require_fraction("garbage_collection_threshold", self.garbage_collection_threshold, 1.0)

    @classmethod
    def from_settings(cls, settings: str) -> TorchPolicy:
        """A policy from a string like that in ``PYTORCH_CUDA_ALLOC_CONF``.

        Known settings are ``max_split_size_mb``, ``max_non_split_rounding_mb``,
        ``garbage_collection_threshold``, ``roundup_power2_divisions`` (a value, or
        ``[256:1,512:2,>:4]`` with MiB as keys), ``expandable_segments:True`` and
        ``backend:native``. Anything else raises InvalidArgument.
        """
        return cls(**_parse_settings(settings))  # type: ignore[arg-type]

    @property
    def careful(self) -> bool:
        return self.garbage_collection_threshold > 0

    @property
    def best_fit(self) -> bool:
        return self.max_split_size is None

    def attach(self, store: Store) -> None:
        self._ages = {}
        if self.garbage_collection_threshold > 0 and store.limit is None:
            raise InvalidArgument(
                "garbage_collection_threshold is a fraction of the limit, and there is none; give "
                "the arena a limit"
            )

    def round(self, nbytes: int) -> int:
        interval = min(max(nbytes.bit_length() - 21, 0), INTERVALS - 1)
        divisions = self._divisions[interval]
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            return next_division(nbytes, divisions)
        return super().round(nbytes)

    def find(self, store: Store, home: FreeList, size: int, freed_before: int | None) -> int | None:
        found = home.find(size)
        if found is None:
            return None
        if self.max_split_size is not None:
            if size < self.max_split_size <= found[0]:
                return None
            if size >= self.max_split_size and found[0] >= (size + self.max_non_split_rounding):
                return None
        return found[1]

    @property
    def front_rule(self) -> FrontRule | None:
        if self.careful:
            return None
        least = MIN_BLOCK if self.expandable_segments else SMALL_MAX + 1
        slack = self.max_non_split_rounding
        return FrontRule(MIN_BLOCK, least, oversize=self.max_split_size or 0, slack=slack)

    def splits(self, index: int, whole: int, size: int) -> bool:
        if index == 0 or self.expandable_segments:
            return whole - size >= MIN_BLOCK
        return (self.max_split_size is None or size < self.max_split_size) and (
            whole - size > SMALL_MAX
        )

    def miss(self, store: Store, request: Request) -> Block | None:
        if self.garbage_collection_threshold > 0 and store.may_release():
            self._collect(store)
        nbytes = two_pool_segment(request.size)
        block = store.grow(request, nbytes)
        if block is not None or not store.may_release():
            return block
        if self._release_oversize(store, request):
            block = store.grow(request, nbytes)
        if block is None:
            store.wait_for_events()
            store.release_cached()
            store.counts["num_alloc_retries"] += 1
            block = store.grow(request, nbytes)
        return block

    def freed(self, store: Store, block: Block) -> None:
        self._ages[block.segment] = block.home.pool.lookups

    def _collect(self, store: Store) -> None:
        """Release idle large segments of at least average age until the threshold is met."""
        assert store.limit is not None
        ages = self._ages
        # Only those of segments that still exist: the others would never be looked at again.
        self._ages = {at: ages[at] for at in store.segments.values() if at in ages}
        target = store.taken - int(self.garbage_collection_threshold * store.limit)
        if target <= 0:
            return
        pool = store.default.pools[1]
        idle = {
            segment: pool.lookups - self._ages.get(segment, pool.lookups)
            for segment in pool.all_idle()
        }
        reclaimed = 0
        while reclaimed < target and idle:
            # All of at least this age go: if it stopped at the target, it would soon be back here.
            average = sum(idle.values()) / len(idle)
            for segment in [at for at, age in idle.items() if age >= average]:
                del idle[segment]
                reclaimed += store.release(segment)

    def _release_oversize(self, store: Store, request: Request) -> bool:
        """Release one cached oversize block that is large enough, or else the largest ones until
        together they are. Only blocks of the request's stream. False if they are not enough."""
        if self.max_split_size is None:
            return False
        wanted = max(request.size, self.max_split_size)
        home = request.home
        blocks = [store.blocks[at] for _, at in home.from_size(self.max_split_size)]
        idle = [at.segment for at in blocks if at.segment.idle]
        enough = next((at for at in idle if at.size >= wanted), None)
        if enough is not None:
            store.release(enough)
            return True
        released = 0
        while idle and released < wanted:
            released += store.release(idle.pop())
        return released >= wanted


_SETTING = re.compile(r"\s*(\w+)\s*:\s*(\[[^\]]*\]|[^,\[\]]*?)\s*(?:,|$)")


def _parse_settings(settings: str) -> dict[str, object]:
    options: dict[str, object] = {}
    at = 0
    while at < len(settings.rstrip()):
        match = _SETTING.match(settings, at)
        if not match:
            raise InvalidArgument(
                f"cannot read the allocator settings {settings!r} from {settings[at:]!r} on: give "
                "name:value pairs with commas between"
            )
        name, value = match.groups()
        at = match.end()
        try:
            options.update(_setting(name, value))
        except ValueError as error:
            raise InvalidArgument(f"allocator setting {name}:{value}: {error}") from error
    return options


def _setting(name: str, value: str) -> dict[str, object]:
    if name == "backend" and value == "native":
        return {}
    if name in ("max_split_size_mb", "max_non_split_rounding_mb"):
        return {name.removesuffix("_mb"): int(value) * MIB}
    if name == "backend" and value == "cudaMallocAsync":
        raise InvalidArgument('that backend is a source here: Arena(source="async")')
    if name == "garbage_collection_threshold":
        return {name: float(value)}
    if name == "expandable_segments":
        return {name: _truth(value)}
    if name == "roundup_power2_divisions":
        return {name: _intervals(value[1:-1]) if value.startswith("[") else int(value)}
    raise InvalidArgument(
        f"unknown allocator setting {name}:{value}; known are max_split_size_mb, "
        "max_non_split_rounding_mb, garbage_collection_threshold, roundup_power2_divisions, "
        "expandable_segments and backend:native"
    )


def _truth(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError("it is True or False")
    return value == "True"


def _intervals(text: str) -> tuple[int, ...]:
    """``256:1,512:2,>:4``: the first value also holds below its interval, ``>`` above the last."""
    divisions = [0] * INTERVALS
    last: int | None = None
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition(":"))
        number = int(value)
        if key == ">":
            first = 0 if last is None else last + 1
            divisions[first:] = [number] * (INTERVALS - first)
            continue
        mebibytes = int(key)
        if mebibytes < 1 or mebibytes & (mebibytes - 1):
            raise ValueError(f"intervals begin at powers of two MiB, not at {key}")
        at = min(mebibytes.bit_length() - 1, INTERVALS - 1)
        first = 0 if last is None else at
        divisions[first : at + 1] = [number] * (at + 1 - first)
        last = at
    return tuple(divisions)
