"""Checks invariants C1 to C3 of a whole cache, by looking at its structures."""

from __future__ import annotations

from collections.abc import Iterator

from devalloc.cache.blocks import FREE, LIVE, PENDING, Block, Segment
from devalloc.cache.streamed_store import StreamedStore
from devalloc.errors import CorruptionError


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CorruptionError(message)


def check(store: StreamedStore) -> None:
    """Raise CorruptionError naming the invariant that does not hold."""
    _check_lists(store)
    seen = 0
    for address, segment in store.segments.items():
        _require(segment.address == address, f"C1: segment {address:#x} is filed elsewhere")
        seen += sum(1 for _ in _check_segment(store, segment))
    _require(seen == len(store.blocks), f"C1: {len(store.blocks) - seen} blocks lie in no segment")
    _check_pending(store)
    _check_sums(store)


def _check_segment(store: StreamedStore, segment: Segment) -> Iterator[Block]:
    end = segment.address
    before: Block | None = None
    for block in segment.blocks():
        where = f"block {block.address:#x} of segment {segment.address:#x}"
        _require(block.address == end, f"C1: {where} should begin at {end:#x}")
        _require(block.size > 0 and block.size % 256 == 0, f"C1: {where} has {block.size} B")
        _require(block.prev is before, f"C1: {where} is not linked to the one before")
        _require(block.segment is segment, f"C1: {where} names another segment")
        _require(block.home.pool is segment.pool, f"C1: {where} is of another pool")
        _require(store.blocks.get(block.address) is block, f"C1: {where} is not in the map")
        if before is not None and before.state == FREE == block.state:
            apart = before.home is not block.home or {block.address, before.address} & set(
                store.stamps
            )
            _require(bool(apart), f"C1: {where} and the one before it are free and not merged")
        end += block.size
        before = block
        yield block
    _require(end == segment.address + segment.size, f"C1: segment {segment.address:#x} has gaps")


def _check_lists(store: StreamedStore) -> None:
    listed: set[int] = set()
    for pool in store.all_pools():
        for stream, home in pool.lists.items():
            _require(home.stream == stream, f"C1: a free list of stream {stream} is misfiled")
            _require(home.sizes == sorted(set(home.by_size)), "C1: a free list lost its order")
            for size, addresses in home.by_size.items():
                _require(addresses == sorted(addresses), "C1: a free list lost its order")
                for address in addresses:
                    block = store.blocks.get(address)
                    _require(
                        block is not None
                        and (block.size, block.state, block.home) == (size, FREE, home),
                        f"C1: {address:#x} is in a free list and is not free there",
                    )
                    _require(address not in listed, f"C1: {address:#x} is in two free lists")
                    listed.add(address)
    free = {address for address, block in store.blocks.items() if block.state == FREE}
    _require(free == listed, f"C1: {len(free - listed)} free blocks are in no free list")


def _check_pending(store: StreamedStore) -> None:
    pending = {address for address, block in store.blocks.items() if block.state == PENDING}
    held = set(store.waiting) | {block.address for block, _ in store.deferred}
    _require(pending == held, "C2: blocks wait for no event, or free ones for one")
    queued: dict[int, int] = {}
    for queue in store.queues.values():
        for _, block in queue:
            queued[block.address] = queued.get(block.address, 0) + 1
    _require(queued == store.waiting, "C2: events and the blocks that wait for them disagree")
    for address in store.uses:
        _require(store.blocks[address].state == LIVE, "C2: a use is recorded of no live block")


def _check_sums(store: StreamedStore) -> None:
    segments = sum(segment.size for segment in store.segments.values())
    _require(store.reserved == segments, f"C3: {store.reserved} B reserved, segments {segments} B")
    if store.limit is not None:
        held = segments + store.outside.held
        _require(held <= store.limit, f"C3: {held} B reserved over the limit")
    sums = {FREE: 0, LIVE: 0, PENDING: 0}
    for block in store.blocks.values():
        sums[block.state] += block.size
    _require(sum(sums.values()) == segments, "C3: allocated + cached is not reserved")
    ledger = store.ledger
    _require(ledger.current("allocated_bytes") == sums[LIVE], "C3: allocated bytes miscounted")
    active = sums[LIVE] + sums[PENDING]
    _require(ledger.current("active_bytes") == active, "C3: active bytes miscounted")
    _require(ledger.current("reserved_bytes") == segments, "C3: reserved bytes miscounted")
    divided = [at.size for at in store.free_blocks() if at.prev is not None or at.next is not None]
    _require(ledger.current("inactive_split") == len(divided), "C3: inactive splits miscounted")
    _require(ledger.current("inactive_split_bytes") == sum(divided), "C3: split bytes miscounted")
