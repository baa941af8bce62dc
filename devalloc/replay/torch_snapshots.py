"""Traces in PyTorch's format: what ``torch.cuda.memory._snapshot`` returns, or its pickle."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import IO, Any

from devalloc.common.foreign import refusing
from devalloc.errors import InvalidArgument
from devalloc.replay.trace import Trace, TraceBuilder

GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
# Events in which nothing happens to memory.
SILENT = {"oom", "snapshot", "workspace_snapshot", "user_defined"}


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, text, lists, tuples, dicts and sets, and refuses everything else.

    A pickle can name any function and have it called. This class looks no name up, so nothing can
    be called: the result is data, or an error.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; only plain data is read")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside; only plain data is read")


def load_plain_pickle(file: IO[bytes]) -> Any:
    """The plain data of a pickle; raises InvalidArgument for anything else."""
    with refusing("not a pickle of plain data"):
        return PlainUnpickler(file).load()


def snapshot_trace(
    snapshot: Any, device: int | None = None, origin: dict[str, str] | None = None
) -> Trace:
    """The trace of one device in a snapshot.

    A block counts as live until ``free_completed``: until then no allocator may use its memory
    again. What was live before the first event follows from the events and from the segments, which
    show what is live after the last event. Memory of private pools (CUDA graphs) is treated like
    all other memory.

    Parameters
    ----------
    snapshot : dict
        With ``segments`` and ``device_traces``. It is not trusted: anything may be in it.
    device : int, optional
        Index of the device. Default: the one with the most events.
    origin : dict, optional
        Passed on to the trace.

    Raises
    ------
    InvalidArgument
        If it is not such a snapshot, has no events for the device, or lacks a field.
    """
    with refusing("not a memory snapshot of PyTorch"):
        traces, segments = snapshot["device_traces"], snapshot["segments"]
        if device is None:
            device = max(range(len(traces)), key=lambda index: len(traces[index]), default=0)
        if not 0 <= device < len(traces) or not traces[device]:
            counts = [len(trace) for trace in traces]
            raise InvalidArgument(
                f"no events for device {device} (events per device: {counts}); switch recording "
                "on with torch.cuda.memory._record_memory_history() before the program runs"
            )
        builder = TraceBuilder()
        _add_entries(builder, traces[device])
        mine = [segment for segment in segments if segment.get("device", device) == device]
        for address, size, stream in _live_blocks(mine):
            builder.lives_at_end(address, size, stream)
        return builder.finish(sum(int(segment["total_size"]) for segment in mine), origin)


def _add_entries(builder: TraceBuilder, entries: list[dict[str, Any]]) -> None:
    # Either kind of free may have been left out of the recording (skip_actions).
    actions = {entry["action"] for entry in entries}
    freed = "free_completed" if "free_completed" in actions else "free_requested"
    pending: set[int] = set()
    for entry in entries:
        action = entry["action"]
        if action in SILENT:
            continue
        if tuple(entry.get("pool_id", (0, 0))) != (0, 0):
            builder.note("events in private pools, treated like all others")
        size, stream = int(entry["size"]), int(entry["stream"])
        if action in GROWS:
            builder.reserved_changes(GROWS[action] * size)
            continue
        address = int(entry["addr"])
        if action == "alloc":
            if address in pending and builder.is_live(address):
                builder.note("requested frees without completion, completed at the next use")
                builder.free(address, size, stream)
            pending.discard(address)
            builder.allocate(address, size, stream)
        elif action == freed:
            pending.discard(address)
            builder.free(address, size, stream)
        elif action == "free_requested":
            pending.add(address)
        else:
            builder.note(f"events of the unknown kind {action!r}, left out")


def _live_blocks(segments: list[dict[str, Any]]) -> Iterator[tuple[int, int, int]]:
    """Address, requested size and stream of live blocks, those with a requested free included."""
    for segment in segments:
        address = int(segment["address"])
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                size = int(block.get("requested_size") or block["size"])
                yield int(block.get("address", address)), size, int(segment["stream"])
            address += int(block["size"])
