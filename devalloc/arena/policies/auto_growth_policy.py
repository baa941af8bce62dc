"""Paddle's policy."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from devalloc.arena.policies.policy import FrontRule, Policy
from devalloc.errors import InvalidArgument
from devalloc.sizes import require_fraction, round_up, size_option

if TYPE_CHECKING:
    from devalloc.arena.store.blocks import Block
    from devalloc.arena.store.request import Request
    from devalloc.arena.store.store import Store


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
