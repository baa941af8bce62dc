"""The blocks of a store in its segments and free lists, and the account of what is taken.

Invariants
----------
C1  The blocks of a segment tile it; no two free neighbours could be merged (same home, no time
    stamp); every free block is in exactly one free list, that of its home.
C3  ``reserved`` is the sum of the segments.

Nothing here calls the source. For interruptions see `devalloc.arena.store.store`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from devalloc.arena.store import statistics as rows
from devalloc.arena.store.blocks import (
    FREE,
    LIVE,
    SPARE_SIZES,
    TAKEN,
    Block,
    FreeList,
    Pool,
    PoolSet,
    Segment,
    Stamps,
)
from devalloc.arena.store.external import External
from devalloc.arena.store.history import History
from devalloc.errors import OutOfMemory

if TYPE_CHECKING:
    from devalloc.arena.store.streams import Streams
    from devalloc.sources import Source


class SplitRule(Protocol):
    """What a policy decides about blocks that are larger than needed."""

    @property
    def takes_tail(self) -> bool:
        """Whether the caller gets the end of a block that is split, not its front."""

    def splits(self, index: int, whole: int, size: int) -> bool:
        """Whether ``size`` bytes are cut from a block of ``whole`` bytes in pool ``index``."""


class Bookkeeping:
    """Segments, blocks and free lists, and the bytes that count against the limit."""

    def __init__(
        self,
        source: Source,
        split_rule: SplitRule,
        limit: int | None,
        streams: Streams,
        shared: bool,
        statistics: rows.Statistics,
    ) -> None:
        self.source = source
        self.limit = limit
        self.streams = streams
        self.shared = shared
        """Whether free blocks of one segment may belong to several streams."""
        self.reserved = 0
        self.asking = 0
        """Bytes that the source is being asked for: announced before the limit is looked at."""
        self.asleep = 0
        """Bytes of segments that have no memory now: reserved, and not taken."""
        self.blocks: dict[int, Block] = {}
        self.segments: dict[int, Segment] = {}
        self.default = PoolSet((0, 0))
        self.privates: dict[tuple[int, int], PoolSet] = {}
        self.stamps = Stamps()
        self.statistics = statistics
        self.counts: Counter[str] = Counter()
        self.history = History()
        self.external = External(self)
        self.captures = 0
        self.closed = False
        self.failure: OutOfMemory | None = None
        self.refused = False
        """Whether the source failed to take memory back in the call that was torn by that."""
        self._split_rule = split_rule

    # Streams and the source -----------------------------------------------------------------------

    def may_release(self) -> bool:
        """Whether memory may go back to the source now: never during a capture."""
        return not self.captures

    def order(self, stream: int, behind: int) -> None:
        """Order what is queued on ``stream`` from now on behind all that is on ``behind``."""
        self.streams.wait(stream, self.streams.record(behind))

    def around_source(self) -> AbstractContextManager[None]:
        """What goes around a call of the source."""
        return self.streams.relaxed_capture() if self.captures else nullcontext()

    @property
    def taken(self) -> int:
        """Bytes that count against the limit: own segments, `external`, those asked for.

        Segments that sleep do not.
        """
        return self.reserved + self.asking + self.external.reserved - self.asleep

    # Taking and cutting ---------------------------------------------------------------------------

    def carve(self, block: Block, home: FreeList, size: int, nbytes: int) -> Block:
        """Take a free block, or the part that the policy cuts off, for the stream of ``home``.

        ``nbytes`` is what the caller asked for. The block is in state TAKEN until `Cache.malloc`
        ends.
        """
        owner, whole = block.home, block.size
        index = owner.pool.index
        owner.remove(whole, block.address)
        divided = block.next is not None or block.prev is not None
        log = self.statistics.rows
        if not divided:
            owner.pool.touched.add(block.segment)
        if whole != size and self._split_rule.splits(index, whole, size):
            rest = whole - size
            if divided:
                log.extend((whole | rows.SPLIT_OUT | index, 0))
            block = self._cut(block, rest if self._split_rule.takes_tail else size)
            log.extend((rest | rows.SPLIT_IN | index, 0, size | rows.MALLOC | index, nbytes))
        else:
            code = rows.MALLOC_PART if divided else rows.MALLOC
            log.extend((whole | code | index, nbytes))
        block.requested = nbytes
        block.state = TAKEN
        if self.stamps:
            self.stamps.pop(block.address, None)
        if home is not block.home:
            self._change_home(block, home)
        if len(log) > rows.FULL:
            self.statistics.fold()
        return block

    def _cut(self, block: Block, at: int) -> Block:
        """Cut a free block, which is in no list, ``at`` bytes from its start.

        Enters the part that stays free in its list and returns the other.
        """
        after, owner = block.next, block.home
        address = block.address + at
        tail = Block(address, block.size - at, owner, block.segment, block, after)
        block.size = at
        block.next = tail
        if after is not None:
            after.prev = tail
        else:
            block.segment.last = tail
        self.blocks[address] = tail
        owner.blocks += 1
        if self.stamps and block.address in self.stamps:
            self.stamps[address] = self.stamps[block.address]
        if self._split_rule.takes_tail:
            owner.add(at, block.address)
            return tail
        owner.add(tail.size, address)
        return block

    # Freeing and merging --------------------------------------------------------------------------

    def put_back(self, block: Block, code: int = rows.FREE) -> Block:
        """Make a block free and merge it with its free neighbours; return the result.

        ``code`` is the code of what happens in the statistics.
        """
        block.state = FREE
        index = block.home.pool.index
        log = self.statistics.rows
        log.extend((block.size | code | index, block.requested))
        before, after = block.prev, block.next
        if (before is not None and before.state == FREE) or (
            after is not None and after.state == FREE
        ):
            block = self._merge(block)
        if block.next is not None or block.prev is not None:
            log.extend((block.size | rows.SPLIT_IN | index, 0))
        else:
            block.home.pool.touched.add(block.segment)
        block.home.add(block.size, block.address)
        if len(log) > rows.FULL:
            self.statistics.fold()
        return block

    def settle(self, block: Block, ignore_stamps: bool) -> Block:
        """Take a free block out of its list, merge it, and enter the result."""
        index = block.home.pool.index
        log = self.statistics.rows
        if block.next is not None or block.prev is not None:
            log.extend((block.size | rows.SPLIT_OUT | index, 0))
        block.home.remove(block.size, block.address)
        block = self._merge(block, ignore_stamps)
        if block.next is not None or block.prev is not None:
            log.extend((block.size | rows.SPLIT_IN | index, 0))
        else:
            block.home.pool.touched.add(block.segment)
        block.home.add(block.size, block.address)
        return block

    def _merge(self, block: Block, ignore_stamps: bool = False) -> Block:
        """Join a free block, which is in no list, with the free neighbours of its home."""
        home = block.home
        stamps = self.stamps
        if stamps and block.address in stamps and not ignore_stamps:
            return block
        strict = stamps if not ignore_stamps else ()
        # There may be several on a side that a stamp or another owner kept from being merged.
        before = block.prev
        while (
            before is not None
            and before.state == FREE
            and before.home is home
            and before.address not in strict
        ):
            block = self._join(before, block, before)
            before = block.prev
        after = block.next
        while (
            after is not None
            and after.state == FREE
            and after.home is home
            and after.address not in strict
        ):
            self._join(block, after, after)
            after = block.next
        return block

    def _join(self, first: Block, second: Block, listed: Block) -> Block:
        """Join two neighbours; ``listed`` is the one that was in a free list."""
        home = listed.home
        home.remove(listed.size, listed.address)
        self.statistics.rows.extend((listed.size | rows.SPLIT_OUT | home.pool.index, 0))
        if self.stamps:
            stamp = max(self.stamps.pop(at.address, 0) for at in (first, second))
            if stamp:
                self.stamps[first.address] = stamp
        after = second.next
        first.size += second.size
        first.next = after
        if after is not None:
            after.prev = first
        else:
            first.segment.last = first
        del self.blocks[second.address]
        home.blocks -= 1
        if len(home.by_size) > 2 * home.blocks + SPARE_SIZES:
            home.sweep()
        return first

    # Owners ---------------------------------------------------------------------------------------

    def unite(self, segment: Segment) -> bool:
        """Make one block of a segment if all of it is free, whichever streams own its blocks.

        The stream of its first block is ordered behind the others. Returns whether all is free.
        """
        if segment.idle:
            return True
        if not self.shared or any(block.state != FREE for block in segment.blocks()):
            return False
        home = segment.first.home
        others = {block.home.stream for block in segment.blocks()} - {home.stream}
        for stream in sorted(others):
            self.order(home.stream, stream)
        for block in segment.blocks():
            self.move(block, home.stream)
        self.settle(segment.first, ignore_stamps=True)
        return True

    def give_away(self, stream: int) -> None:
        """Give everything that ``stream`` owns to the default stream, and merge what is free."""
        moved = []
        for segment in self.segments.values():
            if segment.stream == stream:
                segment.stream = 0
                if segment.range is not None:
                    segment.range.stream = 0
            for block in segment.blocks():
                if block.home.stream != stream:
                    continue
                if block.state == FREE:
                    self.move(block, 0)
                    moved.append(block.address)
                else:
                    self._change_home(block, block.home.pool.list_of(0))
        for address in moved:
            if address in self.blocks:
                self.settle(self.blocks[address], ignore_stamps=False)

    def move(self, block: Block, stream: int) -> None:
        """Give a free block to a stream."""
        block.home.remove(block.size, block.address)
        self._change_home(block, block.home.pool.list_of(stream))
        block.home.add(block.size, block.address)
        if block.prev is None and block.next is None:
            block.home.pool.touched.add(block.segment)

    def _change_home(self, block: Block, home: FreeList) -> None:
        before, block.home = block.home, home
        home.gained_block()
        before.lost_block()

    # Looking --------------------------------------------------------------------------------------

    def all_pools(self) -> Iterator[Pool]:
        for pools in (self.default, *self.privates.values()):
            yield from pools.pools

    def free_blocks(self) -> Iterator[Block]:
        for pool in self.all_pools():
            for home in pool.lists.values():
                for _, address in home:
                    yield self.blocks[address]

    def live(self, address: int, claim: int | None = None) -> Block | None:
        """The live block at an address, under this claim if one is given."""
        block = self.blocks.get(address)
        if block is None or block.state != LIVE or (claim is not None and block.claim != claim):
            return None
        return block
