"""Reports of a cache: statistics, history, snapshots, a text for people, and the audit."""

from __future__ import annotations

from devalloc.cache import audit, describe, snapshot
from devalloc.cache.blocks import LIVE
from devalloc.cache.core import Core


class Reports(Core):
    """The engine's part for looking at it."""

    def record_history(
        self, enabled: str | None = "all", *, max_entries: int = 100_000, stacks: bool = True
    ) -> None:
        """Switch history on or off.

        Parameters
        ----------
        enabled : {"all", "state", None}
            "all" records events, and where live blocks were allocated; "state" only the latter;
            None nothing.
        max_entries : int
            How many events are kept; the oldest are dropped first.
        stacks : bool
            Whether to record the Python stack of each event.
        """
        with self._entered() as store:
            store.history.configure(enabled, max_entries, stacks)

    def stats(self) -> dict[str, int]:
        """Statistics under the flat names of ``torch.cuda.memory_stats``; bytes and counts."""
        with self._entered() as store:
            self.parking.count()
            return store.stats()

    def reset_peaks(self) -> None:
        """Start peaks again from the current values."""
        with self._entered() as store:
            store.ledger.reset_peaks()

    def reset_accumulated(self) -> None:
        """Start the ``allocated`` and ``freed`` sums and the ``num_`` counts again from zero."""
        with self._entered() as store:
            self.parking.count()
            store.ledger.reset_accumulated()
            store.counts.clear()

    def snapshot(self) -> dict[str, object]:
        """All segments and blocks, and the history, in the format of ``torch.cuda.memory``."""
        with self._entered() as store:
            return snapshot.take(store)

    def report(self) -> str:
        """A text with bins, the largest free block, fragmentation, and a picture of occupancy."""
        with self._entered() as store:
            return describe.report(store)

    def audit(self) -> None:
        """Check invariants C1 to C3 (docs/host.md).

        Raises
        ------
        CorruptionError
            Its message names the invariant that does not hold.
        """
        with self._entered() as store:
            audit.check(store)

    @property
    def reserved(self) -> int:
        """Bytes held from the source."""
        return self._store.reserved

    def owns(self, address: int) -> bool:
        """Whether an allocation lives at ``address``."""
        with self._entered() as store:
            describe.require_address(address)
            block = store.blocks.get(address)
            return block is not None and block.state == LIVE

    def size_of(self, address: int) -> int:
        """Usable bytes of the allocation at ``address``; InvalidArgument if there is none."""
        with self._entered():
            return self._live(address).size
