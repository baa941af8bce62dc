"""Checks invariants C1 to C3 of a whole cache, and restores them after an interruption."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from devalloc.arena.store.blocks import (
    FREE,
    LIVE,
    PENDING,
    TAKEN,
    Block,
    FreeList,
    Pool,
    Range,
    Segment,
)
from devalloc.arena.store.statistics import QUANTITIES
from devalloc.arena.store.store import Store
from devalloc.errors import CorruptionError

_BYTES_OF = {
    "allocation": "allocated_bytes",
    "segment": "reserved_bytes",
    "active": "active_bytes",
    "inactive_split": "inactive_split_bytes",
}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CorruptionError(message)


def check(store: Store) -> None:
    """Raise CorruptionError naming the invariant that does not hold."""
    _check_lists(store)
    seen = 0
    for address, segment in store.segments.items():
        _require(segment.address == address, f"C1: segment {address:#x} is filed elsewhere")
        seen += sum(1 for _ in _check_segment(store, segment))
    _require(seen == len(store.blocks), f"C1: {len(store.blocks) - seen} blocks lie in no segment")
    for pool in store.all_pools():
        for found in pool.ranges.values():
            _check_range(store, pool, found)
    _check_pending(store)
    _check_sums(store)


def _check_range(store: Store, pool: Pool, found: Range) -> None:
    inside = sorted(at.address for at in store.segments.values() if at.range is found)
    end = found.address - 1
    for segment in map(store.segments.__getitem__, inside):
        where = f"segment {segment.address:#x}"
        _require(segment.pool is pool, f"C1: {where} lies in a range of another pool")
        _require(segment.stream == found.stream, f"C1: {where} lies in another stream's range")
        _require(segment.address > end, f"C1: {where} touches the one before it in its range")
        end = segment.address + segment.size
    _require(end <= found.end, f"C1: a segment reaches out of its range at {found.address:#x}")


def _check_segment(store: Store, segment: Segment) -> Iterator[Block]:
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
    _require(segment.last is before, f"C1: segment {segment.address:#x} ends elsewhere")


def _check_lists(store: Store) -> None:
    listed: set[int] = set()
    owned = Counter(block.home for block in store.blocks.values())
    for pool in store.all_pools():
        for stream, home in pool.lists.items():
            _require(home.stream == stream, f"C1: a free list of stream {stream} is misfiled")
            _require(0 < owned[home] == home.blocks, "C1: a free list miscounts its blocks")
            _check_order(home)
            for size, addresses in home.by_size.items():
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


def _check_order(home: FreeList) -> None:
    _require(list(home.sizes) == sorted(home.by_size), "C1: a free list lost its order")
    _require(len(home.sizes) <= 2 * home.blocks + 16, "C1: a free list keeps too many empty sizes")
    for addresses in home.by_size.values():
        found = list(addresses)
        _require(found == sorted(set(found)), "C1: a free list lost its order")


def _check_pending(store: Store) -> None:
    pending = {address for address, block in store.blocks.items() if block.state == PENDING}
    queues = store.pending
    held = set(queues.waiting) | set(queues.deferred)
    _require(pending == held, "C2: blocks wait for no event, or free ones for one")
    queued: dict[int, int] = {}
    for queue in queues.queues.values():
        for _, block in queue:
            queued[block.address] = queued.get(block.address, 0) + 1
    _require(queued == queues.waiting, "C2: events and the blocks that wait for them disagree")
    for address in queues.uses:
        used = address in queues.deferred or store.blocks[address].state == LIVE
        _require(used, "C2: a use is recorded of no live block")


def _check_sums(store: Store) -> None:
    segments = sum(segment.size for segment in store.segments.values())
    _require(store.reserved == segments, f"C3: {store.reserved} B reserved, segments {segments} B")
    asleep = sum(segment.size for segment in store.segments.values() if segment.asleep)
    _require(store.asleep == asleep, f"C3: {store.asleep} B asleep, segments {asleep} B")
    if store.limit is not None:
        held = segments + store.external.held - store.external.asleep - asleep
        _require(held <= store.limit, f"C3: {held} B reserved over the limit")
    for pool in store.all_pools():
        mine = {at: each for at, each in store.segments.items() if each.pool is pool}
        nbytes = sum(each.size for each in mine.values())
        _require(pool.nbytes == nbytes, f"C3: {pool.nbytes} B in a pool, segments {nbytes} B")
        idle = {at for at, each in mine.items() if each.idle}
        _require(idle == {at for _, _, at in pool.idle()}, "C3: idle segments miscounted")
    sums = {FREE: 0, LIVE: 0, PENDING: 0, TAKEN: 0}
    for block in store.blocks.values():
        sums[block.state] += block.size
    _require(sum(sums.values()) == segments, "C3: allocated + cached is not reserved")
    counted = store.statistics
    _require(counted.current("allocated_bytes") == sums[LIVE], "C3: allocated bytes miscounted")
    active = sums[LIVE] + sums[PENDING]
    _require(counted.current("active_bytes") == active, "C3: active bytes miscounted")
    _require(counted.current("reserved_bytes") == segments, "C3: reserved bytes miscounted")
    divided = [at.size for at in store.free_blocks() if at.prev is not None or at.next is not None]
    _require(counted.current("inactive_split") == len(divided), "C3: inactive splits miscounted")
    _require(counted.current("inactive_split_bytes") == sum(divided), "C3: split bytes miscounted")


# Repair -------------------------------------------------------------------------------------------


def repair(store: Store) -> None:
    """Compute everything again that is derived from segments, chains of blocks, states and queues.

    For after an exception that came in the middle of a step: see docs/design/host.md. Blocks that
    were taken for a request become free.
    """
    pending = store.pending
    store.statistics.fold()
    for pool in store.all_pools():
        pool.clear()
    for segment in store.segments.values():
        _link(segment)
    _repair_pending(store)
    blocks = {}
    for segment in store.segments.values():
        pool = segment.pool
        pool.nbytes += segment.size
        pool.touched.add(segment)
        for block in segment.blocks():
            if block.state == TAKEN:
                block.state = FREE
                if store.policy.stamps_frees:
                    store.policy.stamp(store, block)
            home = pool.list_of(block.home.stream)
            home.gained_block()
            block.home = home
            blocks[block.address] = block
    store.blocks = blocks
    active = {at for at, block in blocks.items() if block.state != FREE}
    for address in [at for at in store.stamps if at not in blocks or at in active]:
        del store.stamps[address]
    for address in [at for at in store.history.frames if at not in active]:
        del store.history.frames[address]
    pending.uses = {at: users for at, users in pending.uses.items() if at in active}
    store.reserved = sum(segment.size for segment in store.segments.values())
    store.asleep = sum(each.size for each in store.segments.values() if each.asleep)
    store.asking = 0
    free = [block for block in blocks.values() if block.state == FREE]
    for block in free:
        block.home.add(block.size, block.address)
    for block in free:
        if block.address in store.blocks:
            store.settle(block, ignore_stamps=False)
    store.statistics.rows.clear()
    store.statistics.correct(_truth(store))


def _link(segment: Segment) -> None:
    """Make the chain of blocks tile the segment: a split or a merge may be half done."""
    block = segment.first
    block.prev = None
    while True:
        block.segment = segment
        end = block.address + block.size
        after = block.next
        while after is not None and after.address < end:
            after = after.next  # it is a part of `block` by now
        start = segment.address + segment.size if after is None else after.address
        if start > end:  # it was cut off `block`
            tail = Block(end, start - end, block.home, segment, block, after)
            block.next = tail
        else:
            block.next = after
        following = block.next
        if following is None:
            segment.last = block
            return
        following.prev = block
        block = following


def _repair_pending(store: Store) -> None:
    pending = store.pending
    waiting: dict[int, int] = {}
    blocks = [block for segment in store.segments.values() for block in segment.blocks()]
    unqueued = {
        block.address for block in blocks if block.state != PENDING or block.address in pending.uses
    }
    for stream in list(pending.queues):
        kept = [entry for entry in pending.queues[stream] if entry[1].address not in unqueued]
        for _, block in kept:
            waiting[block.address] = waiting.get(block.address, 0) + 1
        if kept:
            pending.queues[stream] = deque(kept)
        else:
            del pending.queues[stream]
    pending.waiting = waiting
    deferred = {}
    for block in blocks:
        if block.state != PENDING or block.address in waiting:
            continue
        if store.captures or block.address in pending.uses or block.address in pending.deferred:
            deferred[block.address] = block
        else:
            block.state = FREE  # all its events have happened
    pending.deferred = deferred


def _truth(store: Store) -> dict[str, tuple[int, int]]:
    """What the statistics should say, counted: (small pool, large pool) for each quantity."""
    sums = {name: [0, 0] for name in QUANTITIES}

    def count(kind: str, index: int, nbytes: int) -> None:
        sums[kind][index] += 1
        sums[_BYTES_OF[kind]][index] += nbytes

    for segment in store.segments.values():
        index = segment.pool.index
        count("segment", index, segment.size)
        for block in segment.blocks():
            if block.state == FREE:
                if block.prev is not None or block.next is not None:
                    count("inactive_split", index, block.size)
                continue
            count("active", index, block.size)
            sums["requested_bytes"][index] += block.requested
            if block.state == LIVE:
                count("allocation", index, block.size)
    return {name: (small, large) for name, (small, large) in sums.items()}
