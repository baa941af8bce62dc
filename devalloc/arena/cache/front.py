"""The default pools while a front has them, which serves PyTorch without Python.

A `Loan` gives the pools to a `Front` and takes them back. Meanwhile the store's default pools are
out of date, and nothing may look at them: `Cache` takes them back first. The front works by the
policy's own rule (`FrontRule`), so it places every block where the store would have placed it.
PyTorch asks the front itself; the front passes what it cannot do to `Loan.serve` and
`Loan.take_back`.

Interrupting `Loan.take` is harmless: the front keeps what it had until it is given something new,
so the next call takes it again. See docs/design/host.md.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Protocol

from devalloc.arena.store.blocks import FREE, LIVE, Block, Segment

if TYPE_CHECKING:
    from devalloc.arena.cache.entry import Entry
    from devalloc.arena.policies.policy import FrontRule
    from devalloc.arena.store.store import Store

# What the front may do with a block: hand it out; free it; nothing, for it is Python's; free it no
# longer, because another stream uses it. As in bridge.c, with where they are in a word.
_FREE, _LENT, _KEPT, _SHARED = range(4)
_STATES = 3
_FIRST = 4
_HOME_SHIFT = 3
_SHARE_OF_CALLS = 4
_SPARED_CALLS = 16
_END = 1 << 64


class Front(Protocol):
    """Serves the blocks of some homes, a (stream, pool) each, on any thread.

    Homes are given as pairs of words in ascending order; blocks as four words each, by address
    within their segments: address, size, requested bytes, and home, first of a segment and state.
    """

    def start(self, rule: FrontRule, homes: bytes, blocks: bytes) -> bool:
        """Serve these blocks from now on. Returns whether it does."""

    def stop(self) -> None:
        """Serve nothing from now on."""

    def blocks(self) -> bytes:
        """The blocks as they are since it stopped, in the segments' order of `start`."""

    def read_log(self, everything: bool) -> bytes:
        """Take the rows for the statistics, if there are many or ``everything`` is wanted."""

    def malloc(self, nbytes: int, size: int, index: int, stream: int) -> int:
        """An address, or 0. The size and the pool are remembered for requests like this one."""

    def free(self, address: int) -> bool:
        """Whether a block was freed there."""

    def share(self, address: int, stream: int) -> int | None:
        """Leave a block's free to Python if ``stream`` is not its owner.

        Returns the owner, or None if the front knows no block there that it may free.
        """


class Loan:
    """The default pools of a cache, and whether the front has them.

    Attributes
    ----------
    front : Front, optional
        None until PyTorch is served by one.
    out : bool
        Whether the front has the pools. Changed under the cache's lock.
    """

    def __init__(self, cache: Entry, store: Store) -> None:
        self.front: Front | None = None
        self.out = False
        self._cache = cache
        self._store = store
        self._homes: list[tuple[int, int]] = []
        self._calls = 0

    # For PyTorch ----------------------------------------------------------------------------------

    def attach(self, front: Front) -> None:
        """Let a front serve PyTorch from now on: one front, until the process ends."""
        self._cache.call(self._attach, front)

    def _attach(self, front: Front) -> None:
        self.front = front

    def serve(self, nbytes: int, stream: int) -> int:
        """`Cache.malloc` for PyTorch, for what the front does not serve."""
        cache, given = self._cache, list[int]()
        try:
            with cache.lock:
                if self.out and not cache.inside:
                    cache.call_beside_front(self._serve, nbytes, stream, given)
            if not any(given):
                # (Without the lock: the filters of routes may run.)
                given.append(cache.malloc(nbytes, stream))
                with cache.lock:
                    if self.front is not None and self._is_due() and cache.usual():
                        cache.call_beside_front(self.give)
            return given[-1]
        except BaseException:
            cache.free_later(given)  # PyTorch will not receive it
            raise

    def _serve(self, nbytes: int, stream: int, given: list[int]) -> None:
        front = self.read_log()
        if nbytes or not self._cache.policy.zero_is_null:
            size, index = self._cache.plan(nbytes)
            # The list gets the address in the C code that takes the block.
            given.extend(map(front.malloc, (nbytes,), (size,), (index,), (stream,)))

    def take_back(self, address: int) -> None:
        """`Cache.free` for PyTorch, for what the front does not free."""
        cache = self._cache
        with cache.lock:
            out = self.out and not cache.inside
            if out and cache.call_beside_front(self._take_back, address):
                return
        cache.free(address)

    def _take_back(self, address: int) -> bool:
        return self.read_log().free(address)

    def share(self, address: int, stream: int) -> bool:
        """`Cache.record_stream` of a block that the front knows; whether it does."""
        with self._cache.lock:
            if self.front is None or not self.out or self._cache.inside:
                return False
            owner = self.front.share(address, stream)
            if owner is not None and owner != stream:
                self._store.pending.uses.setdefault(address, set()).add(stream)
            return owner is not None

    # Under the lock -------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        """Count a call. Whether calls since the pools came back have cost as much as handing them
        over and taking them back will: so these never cost more than half."""
        self._calls += 1
        return self._calls * _SHARE_OF_CALLS > len(self._store.blocks) + _SPARED_CALLS

    def give(self) -> None:
        """Let the front serve the default pools, unless it has them."""
        if self.front is None or self.out:
            return
        self._calls = 0
        store = self._store
        rule = self._cache.policy.front_rule
        pools = store.default.pools
        self._homes = sorted((stream, pool.index) for pool in pools for stream in pool.lists)
        if rule is None or any(not 0 <= stream < _END for stream, _ in self._homes):
            return
        places = {pools[index].lists[stream]: at for at, (stream, index) in enumerate(self._homes)}
        uses = store.pending.uses
        words = array("Q")
        for _, segment in sorted(store.segments.items()):
            if segment.pool not in pools:
                continue
            first = _FIRST
            for block in segment.blocks():
                address, state = block.address, _KEPT
                if block.state == FREE:
                    state = _FREE
                elif block.state == LIVE and not block.claim:
                    state = _SHARED if address in uses else _LENT
                word = places[block.home] << _HOME_SHIFT | first | state
                words.extend((address, block.size, block.requested, word))
                first = 0
        homes = array("Q", [word for home in self._homes for word in home])
        started: list[bool] = []
        try:
            # The list gets the answer in the C code that starts it.
            started.extend(map(self.front.start, (rule,), (homes.tobytes(),), (words.tobytes(),)))
        finally:
            self.out = started == [True]

    def read_log(self, everything: bool = False) -> Front:
        """Enter the rows of the front, which has the pools, in the statistics; returns it."""
        assert self.front is not None
        log = self.front.read_log(everything)
        if log:
            self._store.statistics.enter(log)
        return self.front

    def take(self) -> None:
        """Take the pools back, as the front leaves them."""
        store, pools = self._store, self._store.default.pools
        assert self.front is not None
        self.front.stop()
        words = array("Q", self.read_log(everything=True).blocks())
        homes = [pools[index].list_of(stream) for stream, index in self._homes]
        free: list[dict[int, list[int]]] = [{} for _ in homes]
        counts = [0] * len(homes)
        known = store.blocks
        blocks = {
            address: block
            for address, block in (known.items() if store.privates else ())
            if block.segment.pool not in pools
        }
        segment: Segment
        before: Block | None = None
        entries = iter(words)
        for address, size, requested, word in zip(entries, entries, entries, entries, strict=True):
            place, state = word >> _HOME_SHIFT, word & _STATES
            if word & _FIRST:
                segment = store.segments[address]
                segment.pool.touched.add(segment)
                before = None
            block = known.get(address)
            if block is None:
                block = Block(address, size, homes[place], segment)
            block.size, block.prev, block.next = size, before, None
            if before is not None:
                before.next = block
            if state == _FREE:
                block.state = FREE
                free[place].setdefault(size, []).append(address)
            elif state != _KEPT:
                block.state, block.claim, block.requested = LIVE, 0, requested
            counts[place] += 1
            blocks[address] = segment.last = before = block
        store.blocks = blocks
        for home, found, count in zip(homes, free, counts, strict=True):
            home.refill(found, count)
        self._calls = 0
        self.out = False
