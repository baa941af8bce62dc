"""TinyTorch's policy."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from devalloc.arena.policies.policy import (
    MIN_BLOCK,
    SMALL_MAX,
    FrontRule,
    TwoPoolPolicy,
    two_pool_segment,
)

if TYPE_CHECKING:
    from devalloc.arena.store.blocks import Block
    from devalloc.arena.store.request import Request
    from devalloc.arena.store.store import Store


@dataclasses.dataclass
class TinyPolicy(TwoPoolPolicy):
    """TinyTorch's rules: two pools, best fit, a rule for splitting in each pool, and one retry
    after releasing idle segments."""

    name: ClassVar[str] = "tiny"
    zero_is_null: ClassVar[bool] = False

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
