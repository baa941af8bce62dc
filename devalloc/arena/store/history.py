"""What happened, and where in the program, in PyTorch's format.

Entries have the keys of ``torch.cuda.memory._snapshot()["device_traces"]``.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING

from devalloc.arena.store.blocks import Block, Segment
from devalloc.errors import InvalidArgument
from devalloc.sizes import require_count

if TYPE_CHECKING:
    from devalloc.arena.store.request import Request

Frames = list[dict[str, object]]

_ARENA = __file__.rsplit("/", 2)[0]
_HERE = tuple(f"{_ARENA}/{room}/" for room in ("cache", "policies", "store"))
_MAX_FRAMES = 64


def _python_stack() -> Frames:
    """Frames of the calling program, innermost first, without those of the cache."""
    frames: Frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < _MAX_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(_HERE):
            frames.append(
                {"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name}
            )
        frame = frame.f_back
    return frames


def _size(block: Block) -> int:
    """The bytes that the caller asked for, as in PyTorch's events.

    A block that was asked for with 0 bytes has those that it takes: a reader of traces would leave
    it out.
    """
    return block.requested or block.size


class History:
    """A ring of events, and the stacks of the blocks that are live now."""

    def __init__(self) -> None:
        self.recording = False
        self.frames: dict[int, Frames] = {}
        self._events = False
        self._stacks = False
        self._entries: deque[dict[str, object]] = deque()

    def configure(self, enabled: str | None, max_entries: int, stacks: bool) -> None:
        if enabled not in ("all", "state", None):
            raise InvalidArgument(f"history is 'all', 'state' or None, not {enabled!r}")
        require_count("max_entries", max_entries, 1)
        self.recording = enabled is not None
        self._events = enabled == "all"
        self._stacks = stacks
        if self.recording:
            self._entries = deque(self._entries, maxlen=max_entries)
        else:
            self.frames.clear()

    @property
    def entries(self) -> list[dict[str, object]]:
        return list(self._entries)

    def _add(
        self, action: str, address: int, size: int, stream: int, frames: Frames, **more: object
    ) -> None:
        self._entries.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": stream,
                "time_us": time.time_ns() // 1000,
                "frames": frames,
                **more,
            }
        )

    def _stack(self) -> Frames:
        return _python_stack() if self._stacks else []

    def allocated(self, block: Block) -> None:
        if self.recording:
            frames = self.frames[block.address] = self._stack()
            if self._events:
                self._add("alloc", block.address, _size(block), block.home.stream, frames)

    def free_requested(self, block: Block) -> None:
        if self._events:
            stream = block.home.stream
            self._add("free_requested", block.address, _size(block), stream, self._stack())

    def free_completed(self, block: Block) -> None:
        frames = self.frames.pop(block.address, None)
        if self._events:
            stream = block.home.stream
            self._add("free_completed", block.address, _size(block), stream, frames or [])

    def segment_changed(self, segment: Segment, action: str, address: int, size: int) -> None:
        """Memory came or went: all of a segment, or a part of one that grows."""
        if self.recording:
            frames = self._stack()
            if action in ("segment_alloc", "segment_map"):
                segment.frames = frames
            if self._events:
                self._add(action, address, size, segment.stream, frames)

    def out_of_memory(self, request: Request, room: int | None) -> None:
        if self._events:
            free = -1 if room is None else room
            # The viewer reads device_free, and shows an address if there is one.
            self._add("oom", 0, request.size, request.stream, self._stack(), device_free=free)

    def snapshot_taken(self) -> None:
        if self._events:
            self._add("snapshot", 0, 0, 0, self._stack())
