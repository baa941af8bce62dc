"""An allocator that records itself in the format of PyTorch's memory snapshots."""

from __future__ import annotations

from typing import Any

SEGMENT = 1 << 21


class TorchLike:
    """First fit in segments of 2 MiB, blocks in multiples of 512 bytes, one device.

    Frees may be requested and completed apart. ``entries`` is the whole history; `snapshot` shows
    the last ``max_entries`` of it, as the ring buffer of the real one does.
    """

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.segments: list[dict[str, Any]] = []
        self._next = 0x7F0000000000

    def _note(self, action: str, addr: int, size: int, stream: int) -> None:
        self.entries.append(
            {
                "action": action,
                "addr": addr,
                "size": size,
                "stream": stream,
                "pool_id": (0, 0),
                "time_us": len(self.entries),
                "compile_context": "N/A",
                "frames": [],
            }
        )

    def alloc(self, size: int, stream: int = 0) -> int:
        rounded = (size + 511) // 512 * 512
        found = next(
            (
                (segment, index)
                for segment in self.segments
                if segment["stream"] == stream
                for index, block in enumerate(segment["blocks"])
                if block["state"] == "inactive" and block["size"] >= rounded
            ),
            None,
        )
        segment, index = found or (self._grow(rounded, stream), 0)
        block = segment["blocks"][index]
        address, rest = block["address"], block["size"] - rounded
        pieces = [self._block(address, rounded, size, "active_allocated")]
        if rest:
            pieces.append(self._block(address + rounded, rest, 0, "inactive"))
        segment["blocks"][index : index + 1] = pieces
        self._note("alloc", address, size, stream)
        return address

    @staticmethod
    def _block(address: int, size: int, requested: int, state: str) -> dict[str, Any]:
        return {
            "address": address,
            "size": size,
            "requested_size": requested,
            "state": state,
            "frames": [],
        }

    def _grow(self, rounded: int, stream: int) -> dict[str, Any]:
        total = (rounded + SEGMENT - 1) // SEGMENT * SEGMENT
        segment = {
            "device": 0,
            "address": self._next,
            "total_size": total,
            "stream": stream,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "blocks": [self._block(self._next, total, 0, "inactive")],
        }
        self._next += 2 * total
        self.segments.append(segment)
        self._note("segment_alloc", segment["address"], total, stream)
        return segment

    def _find(self, address: int) -> tuple[dict[str, Any], int]:
        return next(
            (segment, index)
            for segment in self.segments
            for index, block in enumerate(segment["blocks"])
            if block["address"] == address
        )

    def request_free(self, address: int) -> None:
        segment, index = self._find(address)
        block = segment["blocks"][index]
        block["state"] = "active_pending_free"
        self._note("free_requested", address, block["requested_size"], segment["stream"])

    def complete_free(self, address: int) -> None:
        segment, index = self._find(address)
        blocks = segment["blocks"]
        self._note("free_completed", address, blocks[index]["requested_size"], segment["stream"])
        blocks[index] |= {"state": "inactive", "requested_size": 0}
        for at in (index, index - 1):
            pair = blocks[max(at, 0) : at + 2]
            if len(pair) == 2 and all(block["state"] == "inactive" for block in pair):
                pair[0]["size"] += pair[1]["size"]
                del blocks[at + 1]

    def free(self, address: int) -> None:
        self.request_free(address)
        self.complete_free(address)

    def empty_cache(self) -> None:
        for segment in list(self.segments):
            if [block["state"] for block in segment["blocks"]] == ["inactive"]:
                self.segments.remove(segment)
                self._note(
                    "segment_free", segment["address"], segment["total_size"], segment["stream"]
                )

    def live(self) -> list[dict[str, Any]]:
        return [b for s in self.segments for b in s["blocks"] if b["state"] != "inactive"]

    def reserved(self) -> int:
        return sum(segment["total_size"] for segment in self.segments)

    def snapshot(self, max_entries: int | None = None) -> dict[str, Any]:
        entries = self.entries if max_entries is None else self.entries[-max_entries:]
        return {
            "segments": self.segments,
            "device_traces": [entries, []],
            "allocator_settings": {},
            "external_annotations": [],
        }


def a_snapshot() -> dict[str, Any]:
    """The snapshot of a small program."""
    recorder = TorchLike()
    addresses = [recorder.alloc(size) for size in (1000, 3_000_000, 600)]
    recorder.free(addresses[1])
    recorder.free(recorder.alloc(2_000_000))
    return recorder.snapshot()
