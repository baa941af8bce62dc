"""What `devalloc.Arena` reports about itself, under the names of ``torch.cuda``."""

from __future__ import annotations

from devalloc.arena.cache.allocator import Cache
from devalloc.arena.regions import Regions
from devalloc.sizes import format_size
from devalloc.sources import Source, VirtualSource


class StatisticsMethods:
    """The part of `devalloc.Arena` with its statistics."""

    _cache: Cache
    _source: Source
    _regions: Regions

    def stats(self) -> dict[str, int]:
        """Statistics under the names of ``torch.cuda.memory_stats``: bytes and counts.

        Segments that PyTorch took in `use` are counted as ``outside_segment.current``,
        ``.allocated``, ``.freed`` and ``outside_bytes.current``. With the source ``"virtual"``
        there are also ``virtual_bytes.address_space``, ``.mapped`` and ``.idle``: what the source
        has reserved and mapped, and what all sources of the device keep idle; and
        ``backup_bytes.pinned``, ``.pageable`` and ``.disk`` for the backups of regions.
        """
        stats = {**self._cache.stats(), **self._cache.external.stats()}
        if isinstance(self._source, VirtualSource):
            virtual = self._source.stats()
            for name in ("address_space", "mapped", "idle"):
                stats[f"virtual_bytes.{name}"] = getattr(virtual, name)
            stats.update(self._regions.stats())
        return stats

    def memory_allocated(self) -> int:
        """Bytes of live tensors, blocks and heaps, rounded as the policy does."""
        return self.stats()["allocated_bytes.all.current"]

    def max_memory_allocated(self) -> int:
        """The most that `memory_allocated` was since the start, or `reset_peak_memory_stats`."""
        return self.stats()["allocated_bytes.all.peak"]

    def memory_reserved(self) -> int:
        """Bytes taken from the source, without what PyTorch took in `use`."""
        return self.stats()["reserved_bytes.all.current"]

    def max_memory_reserved(self) -> int:
        """The most that `memory_reserved` was since the start, or `reset_peak_memory_stats`."""
        return self.stats()["reserved_bytes.all.peak"]

    def memory_stats(self) -> dict[str, int]:
        """`stats`, under the name that it has in ``torch.cuda``."""
        return self.stats()

    def reset_peak_memory_stats(self) -> None:
        """Start peaks again from the current values."""
        self._cache.reset_peaks()

    def memory_summary(self) -> str:
        """Text with the most useful statistics, and a picture of the memory."""
        stats = self.stats()
        lines = [f"{self!r}", f"{'':20}{'current':>12}{'peak':>12}{'allocated':>12}{'freed':>12}"]
        for name in ("allocated", "active", "reserved", "requested", "inactive_split"):
            kinds = ("current", "peak", "allocated", "freed")
            sums = (format_size(stats[f"{name}_bytes.all.{kind}"]) for kind in kinds)
            lines.append(f"{name:20}" + "".join(f"{value:>12}" for value in sums))
        for name in ("allocation", "segment"):
            counts = (stats[f"{name}.all.{kind}"] for kind in ("current", "peak"))
            lines.append(f"{name + 's':20}" + "".join(f"{value:>12}" for value in counts))
        lines.append(
            f"source calls: {stats['num_device_alloc']} taken, {stats['num_device_free']} given "
            f"back; retries: {stats['num_alloc_retries']}; out of memory: {stats['num_ooms']}"
        )
        return "\n".join([*lines, self._cache.report()])

    def snapshot(self) -> dict[str, object]:
        """All segments, blocks and the history, as ``torch.cuda.memory._snapshot`` gives them.

        Plain types only, ready to pickle.
        """
        return self._cache.snapshot()
