"""The policies by name, and the two that need no file of their own: TinyTorch's and Paddle's."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from devalloc.arena.policies.bfc_policy import BfcPolicy
from devalloc.arena.policies.frugal_policy import FrugalPolicy
from devalloc.arena.policies.policy import (
    MIN_BLOCK,
    SMALL_MAX,
    FrontRule,
    Policy,
    round_up,
    two_pool_segment,
)
from devalloc.arena.policies.torch_policy import TorchPolicy
from devalloc.arena.store.blocks import Block
from devalloc.errors import InvalidArgument
from devalloc.sizes import require_fraction, size_option

if TYPE_CHECKING:
    from devalloc.arena.store.store import Request, Store


@dataclasses.dataclass
class TinyPolicy(Policy):
    """TinyTorch's rules: two pools, best fit, a rule for splitting in each pool, and one retry
    after releasing idle segments."""

    name: ClassVar[str] = "tiny"
    zero_is_null: ClassVar[bool] = False

    def round(self, nbytes: int) -> int:
        return max(MIN_BLOCK, round_up(nbytes, MIN_BLOCK))

    @property
    def unit(self) -> int:
        return MIN_BLOCK

    def pool_of(self, size: int) -> int:
        return 0 if size <= SMALL_MAX else 1

    @property
    def front_rule(self) -> FrontRule:
        return FrontRule(MIN_BLOCK, MIN_BLOCK if self.expandable_segments else SMALL_MAX + 1)

    def splits(self, index: int, whole: int, size: int) -> bool:
        if index == 0 or self.expandable_segments:
            return whole - size >= MIN_BLOCK
        return whole - size > SMALL_MAX

    def miss(self, store: Store, request: Request) -> Block | None:
        nbytes = two_pool_segment(request.size)
        block = store.grow(request, nbytes)
        if block is None and store.may_release():
            store.release_cached()
            store.counts["num_alloc_retries"] += 1
            block = store.grow(request, nbytes)
        return block


@dataclasses.dataclass
class AutoGrowthPolicy(Policy):
    """Paddle's rules: best fit in one pool, any remainder is split off, the caller gets the tail.

    Parameters
    ----------
    alignment : int or str
        Sizes are rounded up to multiples of this many bytes; a multiple of 256.
    chunk_size : int or str
        The least bytes of a segment, rounded up to the alignment; 0 for segments of exactly the
        size that is requested.
    free_idle_chunks : str
        When idle segments go back to the source: ``"on_failure"`` (then the source is asked once
        more), ``"on_miss"`` (before the source is asked, and it is asked only once), or
        ``"at_once"`` (with the free that made them idle, and on failure).
    retry_wait_s : float
        Seconds that a failing request waits for a free by another thread. Paddle waits 10.
    """

    name: ClassVar[str] = "auto_growth"
    alignment: int = 256
    chunk_size: int = 0
    free_idle_chunks: str = "on_failure"
    retry_wait_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Memory is mapped behind what is there: so what is in use should lie in front.
        self.takes_tail = not self.expandable_segments
        self.alignment = size_option("alignment", self.alignment, 256)
        self.chunk_size = size_option("chunk_size", self.chunk_size, 0)
        require_fraction("retry_wait_s", self.retry_wait_s, 3600.0)
        if self.alignment % 256:
            raise InvalidArgument(f"alignment must be a multiple of 256, not {self.alignment}")
        if self.free_idle_chunks not in ("on_failure", "on_miss", "at_once"):
            raise InvalidArgument(
                "free_idle_chunks is 'on_failure', 'on_miss' or 'at_once', not "
                f"{self.free_idle_chunks!r}"
            )

    @property
    def careful(self) -> bool:
        return self.free_idle_chunks == "at_once"

    def round(self, nbytes: int) -> int:
        return max(self.alignment, round_up(nbytes, self.alignment))

    @property
    def unit(self) -> int:
        return self.alignment

    @property
    def front_rule(self) -> FrontRule | None:
        return None if self.careful else FrontRule(1, 1, takes_tail=self.takes_tail)

    def splits(self, index: int, whole: int, size: int) -> bool:
        return True

    def miss(self, store: Store, request: Request) -> Block | None:
        on_miss = self.free_idle_chunks == "on_miss"
        if on_miss:
            store.release_cached()
        nbytes = max(request.size, round_up(self.chunk_size, self.alignment))
        block = store.grow(request, nbytes)
        if block is None and not on_miss and store.may_release():
            store.release_cached()
            store.counts["num_alloc_retries"] += 1
            block = store.grow(request, nbytes)
        return block

    def freed(self, store: Store, block: Block) -> None:
        if block.segment.idle and store.may_release():
            store.release_cached()


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (TinyPolicy, TorchPolicy, BfcPolicy, AutoGrowthPolicy, FrugalPolicy)
}


def make_policy(policy: str | Policy, **options: object) -> Policy:
    """The policy of this name with these options; a policy object is returned as it is.

    A name with a colon in it is a settings string of PyTorch: see `TorchPolicy.from_settings`.

    Raises
    ------
    InvalidArgument
        For an unknown name or option, or an invalid value.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str) and ":" in policy and not options:
        return TorchPolicy.from_settings(policy)
    if not isinstance(policy, str) or policy not in POLICIES:
        raise InvalidArgument(
            f"a policy is one of {', '.join(POLICIES)}, a policy object, or PyTorch's settings "
            f"such as 'max_split_size_mb:64'; not {policy!r}"
        )
    try:
        return POLICIES[policy](**options)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidArgument(f"policy {policy!r}: {error}") from error
