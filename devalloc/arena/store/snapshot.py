"""What there is now, in PyTorch's format.

``torch.cuda._memory_viz`` and the viewer at https://pytorch.org/memory_viz read a pickle
(protocol 4) of what `snapshot` returns: plain types only.
"""

from __future__ import annotations

from typing import Any

from devalloc.arena.store.blocks import FREE, LIVE, PENDING, Segment
from devalloc.arena.store.store import Store

_STATES = {FREE: "inactive", LIVE: "active_allocated", PENDING: "active_pending_free"}


def snapshot(store: Store) -> dict[str, object]:
    """The state of the whole cache, segments by address."""
    store.history.snapshot_taken()
    device = store.source.device.index or 0
    traces: list[list[dict[str, object]]] = [[] for _ in range(device)]
    return {
        "segments": [_segment(store, store.segments[at], device) for at in sorted(store.segments)],
        "device_traces": [*traces, store.history.entries],
        "allocator_settings": {"policy": store.policy.name, **_plain(store.policy.options())},
        "external_annotations": [],
    }


def _plain(options: dict[str, object]) -> dict[str, object]:
    return {
        name: str(value) if isinstance(value, tuple) else value for name, value in options.items()
    }


def _segment(store: Store, segment: Segment, device: int) -> dict[str, Any]:
    blocks = []
    sums = {FREE: 0, LIVE: 0, PENDING: 0}
    requested = 0
    for block in segment.blocks():
        sums[block.state] += block.size
        held = 0 if block.state == FREE else block.requested
        requested += held
        blocks.append(
            {
                "address": block.address,
                "size": block.size,
                "requested_size": held,
                "state": _STATES[block.state],
                "frames": store.history.frames.get(block.address, []),
            }
        )
    return {
        "device": device,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": sums[LIVE],
        "active_size": sums[LIVE] + sums[PENDING],
        "requested_size": requested,
        "stream": segment.stream,
        "segment_type": ("small", "large")[segment.pool.index],
        "segment_pool_id": segment.pool.owner,
        "is_expandable": segment.range is not None,
        "frames": segment.frames or [],
        "blocks": blocks,
    }
