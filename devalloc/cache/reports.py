"""What a cache says of itself: statistics, history, snapshots, the report, and its audit."""

from __future__ import annotations

from devalloc.cache import audit, describe, snapshot
from devalloc.cache.blocks import LIVE
from devalloc.cache.core import Core


class Reports(Core):
    """The engine's part for those who look at it."""

    def record_history(
        self, enabled: str | None = "all", *, max_entries: int = 100_000, stacks: bool = True
    ) -> None:
        """Switch history on or off.

        Parameters
        ----------
        enabled : {"all", "state", None}
            Events and where live blocks were allocated; the latter only; nothing.
        max_entries : int
            Events kept; the oldest go first.
        stacks : bool
            With the Python stack of each event.
        """
        with self._entered() as store:
            store.history.configure(enabled, max_entries, stacks)

    def stats(self) -> dict[str, int]:
        """Statistics under the flat names of ``torch.cuda.memory_stats``; bytes and counts."""
        with self._entered() as store:
            self.parking.count()
            return store.stats()

    def reset_peaks(self) -> None:
        """Peaks start again from what is there now."""
        with self._entered() as store:
            store.ledger.reset_peaks()

    def reset_accumulated(self) -> None:
        """The ``allocated`` and ``freed`` sums and the counts start again from zero."""
        with self._entered() as store:
            self.parking.count()
            store.ledger.reset_accumulated()
            store.counts.clear()

    def snapshot(self) -> dict[str, object]:
        """All segments and blocks, and the history, in the format of ``torch.cuda.memory``."""
        with self._entered() as store:
            return snapshot.take(store)

    def report(self) -> str:
        """Bins, the largest free block, fragmentation, and a picture of the occupancy."""
        with self._entered() as store:
            return describe.report(store)

    def audit(self) -> None:
        """Check C1 to C3; raises CorruptionError naming the one that does not hold."""
        with self._entered() as store:
            audit.check(store)

    @property
    def reserved(self) -> int:
        """Bytes held from the source."""
        return self._store.reserved

    def owns(self, address: int) -> bool:
        """Whether an allocation lives at ``address``."""
        with self._entered() as store:
            block = store.blocks.get(address)
            return block is not None and block.state == LIVE

    def size_of(self, address: int) -> int:
        """Usable bytes of the allocation at ``address``."""
        with self._entered():
            return self._live(address).size
