"""What a policy decides.

A policy is a small object. It decides how sizes are rounded, which pool they go to, which free
block serves, whether that block is split, and which steps are tried in which order when no block
serves. The cache does everything else. Each cache works with its own copy, so a policy may keep
state.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from devalloc.errors import InvalidArgument
from devalloc.sizes import MIB, quote, round_up

if TYPE_CHECKING:
    from devalloc.arena.store.blocks import Block, FreeList
    from devalloc.arena.store.request import Request
    from devalloc.arena.store.store import Store

SMALL_MAX = 1 * MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE = 10 * MIB
ROUND_LARGE = 2 * MIB
MIN_BLOCK = 512


class FrontRule(NamedTuple):
    """A best-fit policy's choices as numbers, for a front that is not written in Python.

    A block is split if the rest has at least ``least_small`` bytes (``least_large`` in the large
    pool); if ``halves``, also if the rest is as large as the request. With ``oversize`` bytes and
    more a block is never split, does not serve smaller requests, and serves others only if it has
    less than ``slack`` bytes more than they need; 0 is off.
    """

    least_small: int
    least_large: int
    halves: bool = False
    oversize: int = 0
    slack: int = 0
    takes_tail: bool = False


@dataclasses.dataclass
class Policy:
    """Base of all policies.

    Attributes
    ----------
    name : str
    takes_tail : bool
        The caller gets the end of a block that is split, not its front.
    zero_is_null : bool
        A request of 0 bytes gives address 0 and no block.
    expandable_segments : bool
        An option of every policy: segments grow instead of being taken one by one, and give back
        what is free in their middle (`devalloc.arena.store.expandable`). Every remainder is split
        off. Needs a source that can map memory, such as ``"virtual"``.
    """

    name: ClassVar[str]
    zero_is_null: ClassVar[bool] = True

    expandable_segments: bool = dataclasses.field(default=False, kw_only=True)
    takes_tail = False  # (not a field)

    def __post_init__(self) -> None:
        if not isinstance(self.expandable_segments, bool):
            raise InvalidArgument(
                f"expandable_segments is True or False, not {quote(self.expandable_segments)}"
            )

    def attach(self, store: Store) -> None:
        """Begin to serve a cache, or continue under a new limit.

        Check the options against the limit and forget what was learnt under the previous one.
        """

    def bind(self) -> Policy:
        """A copy for one cache."""
        return copy.copy(self)

    @property
    def careful(self) -> bool:
        """Whether every call must go through `find` and `freed`.

        Otherwise the cache has a shorter way for exact fits.
        """
        return False

    @property
    def unit(self) -> int:
        """Bytes: requests that are equal when rounded up to this have blocks of the same size.

        The front (docs/design/host.md) remembers sizes by it. 256 is right for every policy; a
        larger one lets more requests share.
        """
        return 256

    @property
    def front_rule(self) -> FrontRule | None:
        """The rule that `best_fit`, `find` and `splits` follow; None if it cannot be expressed so.

        Then there is no front, and PyTorch calls Python each time.
        """
        return None

    @property
    def best_fit(self) -> bool:
        """Whether the smallest block that is large enough serves, at the lowest address.

        The store then searches the free list itself and does not call `find`.
        """
        return type(self).find is Policy.find

    @property
    def retry_wait_s(self) -> float:
        """Seconds that a failing request waits for a free by another thread."""
        return 0.0

    def round(self, nbytes: int) -> int:
        """Bytes of the block for a request, a multiple of 256."""
        raise NotImplementedError

    def pool_of(self, size: int) -> int:
        """0 for the small pool, 1 for the large one."""
        return 1

    def find(self, store: Store, home: FreeList, size: int, freed_before: int | None) -> int | None:
        """The address of the free block to use for ``size`` bytes, or None.

        Not called if `best_fit`.
        """
        raise NotImplementedError

    def splits(self, index: int, whole: int, size: int) -> bool:
        """Whether ``size`` bytes are cut from a block of ``whole`` bytes in pool ``index``."""
        raise NotImplementedError

    def miss(self, store: Store, request: Request) -> Block | None:
        """The steps to take, in order, when neither a free block nor what callbacks freed served.

        None if all of them failed.
        """
        raise NotImplementedError

    def freed(self, store: Store, block: Block) -> None:
        """Called for each block that became free, if `careful`."""

    # Time stamps ----------------------------------------------------------------------------------

    @property
    def stamps_frees(self) -> bool:
        """Whether freed blocks carry the time of their free."""
        return False

    def stamp(self, store: Store, block: Block) -> None:
        """Stamp a block that is about to become free, if `stamps_frees`."""

    @property
    def clock(self) -> int:
        """The time of the last free; InvalidArgument unless `stamps_frees`."""
        raise InvalidArgument("time stamps need the policy BfcPolicy(timestamps=True)")

    def set_safe_frontier(self, time: int) -> None:
        """Record that the work of every free up to ``time - 1`` is done."""
        raise InvalidArgument("time stamps need the policy BfcPolicy(timestamps=True)")

    # Reports --------------------------------------------------------------------------------------

    def options(self) -> dict[str, object]:
        """All options by name, for reports."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if not field.name.startswith("_")
        }


class TwoPoolPolicy(Policy):
    """Base of the policies with PyTorch's rounding and its two pools."""

    def round(self, nbytes: int) -> int:
        return max(MIN_BLOCK, round_up(nbytes, MIN_BLOCK))

    @property
    def unit(self) -> int:
        return MIN_BLOCK

    def pool_of(self, size: int) -> int:
        return 0 if size <= SMALL_MAX else 1


def two_pool_segment(size: int) -> int:
    """Bytes of the segment for a block, as TinyTorch and PyTorch choose them."""
    if size <= SMALL_MAX:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return LARGE_SEGMENT
    return round_up(size, ROUND_LARGE)
