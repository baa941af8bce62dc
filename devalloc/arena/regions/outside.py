"""PyTorch's segments in a region: memory that `Arena.use` took while the region was entered.

PyTorch's allocator divides these segments itself; a pause asks it which blocks are live (`live`).
It takes and gives back segments under a lock of its own, so `allocate` and `free` take no lock: see
`devalloc.arena.store.external`. Both sides announce what they are about to do before they look at
what the other does. While the region changes, a free is only noted, and done when that is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from devalloc.arena.cache.private_pools import Content, LiveBlock
from devalloc.common.cleanup import call_for_finalizers
from devalloc.errors import InvalidArgument, OutOfMemory

if TYPE_CHECKING:
    from devalloc.arena.store.external import External

Live = Callable[[dict[int, int]], dict[int, list[tuple[int, int]]]]
"""From segments (address: bytes) to their live blocks (address, bytes), by segment."""


class Outside:
    """The segments of one region that PyTorch has, given out and taken back."""

    def __init__(self, external: External, live: Live) -> None:
        self.segments: dict[int, int] = {}
        self.refusal = ""
        self.inside = 0
        """How many blocks of `use` are entered."""
        self.forsaken = False
        """Whether PyTorch takes no more segments."""
        self._external = external
        self._live = live
        self._frozen = False
        self._noted: list[int] = []
        self._slept: dict[int, list[LiveBlock]] = {}

    @property
    def held(self) -> int:
        """Bytes that PyTorch has."""
        return sum(self.segments.values())

    def owner_of(self, address: int) -> bool:
        """Whether an address lies in one of the segments."""
        return any(start <= address < start + n for start, n in tuple(self.segments.items()))

    # For PyTorch ----------------------------------------------------------------------------------

    def enter(self) -> None:
        """A thread begins to allocate; InvalidArgument if the region sleeps."""
        self.inside += 1
        if self.refusal:
            self.inside -= 1
            raise InvalidArgument(self.refusal)

    def leave(self) -> None:
        self.inside -= 1

    def allocate(self, nbytes: int) -> int:
        """A segment; raises OutOfMemory, also while the region sleeps."""
        if self.refusal:
            raise OutOfMemory(self.refusal)
        address = self._external.allocate(nbytes)
        self.segments[address] = self._external.size_of(address)
        return address

    def free(self, address: int) -> None:
        """Give a segment back, now or when the change of the region that is under way is over."""
        self.segments.pop(address, None)
        if self._frozen:
            self._noted.append(address)
        else:
            self._external.free(address)

    # For the region -------------------------------------------------------------------------------

    def begin_pause(self, refusal: str) -> list[Content]:
        """Refuse allocations; return the live blocks. InvalidArgument while a thread is
        inside."""
        self.refusal, self._frozen = refusal, True
        if self.inside:
            raise InvalidArgument(
                "a thread is inside use() in a region that is to be paused; leave it first"
            )
        segments = dict(self.segments)
        blocks = self._live(segments) if segments else {}
        self._slept = {
            address: [LiveBlock(at, size, "") for at, size in blocks.get(address, ())]
            for address in segments
        }
        return self._contents()

    def begin_resume(self, refusal: str) -> list[Content]:
        """Return what slept and was not freed; OutOfMemory if the limit forbids that it wakes."""
        self.refusal, self._frozen = refusal, True
        self._external.wake(tuple(self.segments))
        return self._contents()

    def _contents(self) -> list[Content]:
        return [
            Content(address, nbytes, self._slept.get(address, []), set())
            for address, nbytes in sorted(self.segments.items())
        ]

    def end(self, asleep: bool, refusal: str) -> None:
        """The change is over, or undone."""
        if asleep:
            self._external.sleep(tuple(self.segments))
        self.refusal, self._frozen = refusal, False
        while self._noted:
            call_for_finalizers(self._external.free, (self._noted.pop(),))
