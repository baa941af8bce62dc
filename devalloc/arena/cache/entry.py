"""How the parts of a cache use its lock: what `Cache` offers them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from devalloc.arena.store.blocks import Block

if TYPE_CHECKING:
    from devalloc.arena.policies.policy import Policy

P = ParamSpec("P")
T = TypeVar("T")


class Entry(Protocol):
    """A cache, as its parts see it; `devalloc.arena.cache.allocator.Cache` documents it."""

    policy: Policy

    @property
    def lock(self) -> threading.RLock: ...

    @property
    def inside(self) -> bool: ...

    def call(self, action: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T: ...

    def call_beside_front(
        self, action: Callable[P, T], *arguments: P.args, **options: P.kwargs
    ) -> T: ...

    def malloc(self, nbytes: int, stream: int = 0) -> int: ...

    def free(self, address: int) -> None: ...

    def free_later(self, addresses: Iterable[int]) -> None: ...

    def free_in_finalizer(self, address: int) -> None: ...

    def usual(self) -> bool: ...

    def plan(self, nbytes: int) -> tuple[int, int]: ...

    def require_live(self, address: int, claim: int | None = None) -> Block: ...
