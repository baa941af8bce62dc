"""PyTorch's own tensors in an arena: `devalloc.Arena.use`."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from devalloc.arena.cache.allocator import Cache
from devalloc.arena.regions import Regions
from devalloc.errors import InvalidArgument
from devalloc.sources import Source

if TYPE_CHECKING:
    from devalloc.interop.pytorch import Pool


class PytorchMethods:
    """The part of `devalloc.Arena` from which PyTorch's own allocator takes segments."""

    _cache: Cache
    _source: Source
    _regions: Regions
    _pytorch: dict[str | None, Pool]

    def _require_open(self) -> None:
        raise NotImplementedError

    def use(self) -> AbstractContextManager[None]:
        """Within it PyTorch's own CUDA allocations of this thread come from this arena.

        PyTorch's caching allocator keeps the blocks, with its speed and its ``record_stream``. It
        takes its segments from the arena's source, under the arena's limit; `stats` counts them as
        ``outside_*``. The segments stay with PyTorch from one `use` to the next; idle ones return
        with `empty_cache`, with `close`, with the arena's end, or when the arena itself runs out.
        Tensors may outlive all of these: their segments then return with the next `empty_cache` or
        ``torch.cuda.empty_cache`` after the tensors are gone.

        A backward pass runs on this thread too, and its gradients are allocated in the arena:
        meanwhile PyTorch does not use its worker threads for this thread, because their allocations
        would not come from the arena. So in a backward pass over several devices the devices take
        turns. Other threads, those of data loaders for instance, still allocate from PyTorch.

        One thread at a time may be inside, for one arena; it may enter again for the same arena.
        Inside a `region`, PyTorch's memory belongs to that one and sleeps with it; one `use` inside
        another of the same arena switches. (A region that is entered inside `use` changes nothing
        for PyTorch before the next `use`.) The region cannot be paused while a thread is inside.

        While it is inside, other threads must not ask PyTorch for memory statistics or snapshots:
        these wait for a lock of PyTorch and keep the GIL, which the callbacks need. Capture graphs
        outside of `use`, with `capture`.

        Raises
        ------
        InvalidArgument
            For a closed arena, if `use` is active on another thread or for another arena, after
            `install`, in a region that sleeps, or for a source other than ``"cuda"``, ``"async"``
            and ``"virtual"``: adaptors could wait for locks.
        DevallocError
            If this PyTorch has no memory pools, or the callbacks cannot be compiled, as for
            `install`.
        torch.OutOfMemoryError
            From PyTorch, when the limit or the source refuses a segment; its cause is the arena's
            error.
        """
        from devalloc.interop import pluggable

        self._require_open()
        if pluggable.installed():
            raise InvalidArgument("an arena serves all of PyTorch already; use() would do nothing")
        region = self._regions.here()
        tag = None if region is None else region.tag
        if tag not in self._pytorch:
            self._pytorch[tag] = self._pytorch_pool()
        return self._pytorch[tag].use()

    def _pytorch_pool(self) -> Pool:
        """A new pool for PyTorch, in the region that this thread is in."""
        from devalloc.interop.pytorch import Pool, live_blocks, require_fit

        require_fit(self._source)
        region = self._regions.here()
        outside = None if region is None else self._regions.add_outside(region, live_blocks)
        pool = Pool(self._cache, outside)
        weakref.finalize(self, pool.forsake).atexit = False
        return pool

    def _empty_pytorch(self) -> int:
        """Take back what PyTorch has and does not use; returns its bytes."""
        return sum(pool.empty() for pool in tuple(self._pytorch.values()))
