"""PyTorch's own allocations on an arena's source: what `devalloc.Arena.use` does.

PyTorch's caching allocator keeps its blocks and asks two callbacks for segments only. It calls them
while it holds its own lock, and they need the GIL, so they must not wait for a thread that may need
either. They use `devalloc.arena.store.external.External`, which takes no lock, and nothing else of
the cache.

One pair of callbacks serves the whole process and is never released: a segment may come back long
after its pool and its arena are gone. The address tells which arena gave it.

PyTorch's functions for pools take the allocator's lock and keep the GIL. If a callback of another
thread has the lock and waits for the GIL at that time, that is a deadlock. So only one thread
at a time may be inside `Pool.use`, and pools are made and dropped under the same claim.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from devalloc.errors import DevallocError, InvalidArgument, OutOfMemory
from devalloc.interop import bridge
from devalloc.sources import AsyncSource, CudaSource, VirtualSource, cudart

if TYPE_CHECKING:
    from devalloc.arena.cache.allocator import Cache
    from devalloc.arena.regions.outside import Outside
    from devalloc.sources import Source

# Long enough for a callback of another thread to end; no thread waits for another use() to end.
_CLAIM_WAIT_S = 0.1


class Giver(Protocol):
    """Where segments come from: `External` of the cache's store, or `Outside` for a region."""

    @property
    def held(self) -> int:
        """Bytes that are out."""
        ...

    def allocate(self, nbytes: int) -> int: ...

    def free(self, address: int) -> None: ...


class _Process:
    """The thread inside `Pool.use`, and the arenas whose segments are out."""

    def __init__(self) -> None:
        self.claim = threading.Lock()
        self.owner: int | None = None
        self.active: Giver | None = None
        self.current: Pool | None = None
        self.failure: BaseException | None = None
        self.givers: dict[int, Giver] = {}
        self.forsaken: list[Any] = []


_PROCESS = _Process()


def _allocate(nbytes: int, device: int, stream: int) -> int:
    """For PyTorch: a segment from the active arena, or 0. Never raises."""
    try:
        giver = _PROCESS.active
        if giver is None:
            return 0
        address = giver.allocate(nbytes)
        _PROCESS.givers[address] = giver
        return address
    except BaseException as error:
        # Ctrl-C too: an exception cannot pass through C++. `Pool.use` shows it as the cause.
        _PROCESS.failure = error
        return 0


def _free(address: int, nbytes: int, device: int, stream: int) -> None:
    """For PyTorch: give a segment back. Never raises."""
    try:
        if address == 0:
            return
        # Under the claim, a finalizer that interrupts this cannot drop a pool while PyTorch changes
        # it.
        alone = _PROCESS.claim.acquire(blocking=False)
        try:
            _PROCESS.givers.pop(address).free(address)
        finally:
            if alone:
                _PROCESS.claim.release()
    except BaseException as error:
        _PROCESS.failure = error


@cache
def functions() -> bridge.Functions:
    """The callbacks as C functions. Cached: they live as long as the process."""
    return bridge.connect("use", _allocate, _free)


def custom_allocator(functions: bridge.Functions) -> Any:
    """PyTorch's allocator object over C functions for malloc and free."""
    make = getattr(torch._C, "_cuda_customAllocator", None)
    if make is None or not hasattr(torch.cuda, "MemPool"):
        raise DevallocError(
            f"PyTorch {torch.__version__} cannot take segments from others: it has no "
            "torch._C._cuda_customAllocator or torch.cuda.MemPool; use a CUDA build from 2.11 on"
        )
    return make(functions.malloc, functions.free)


@cache
def _torch_allocator() -> Any:
    """PyTorch's allocator object over the callbacks; it exists as long as they do."""
    return custom_allocator(functions())


@contextmanager
def claimed(wait_s: float = 0.0) -> Iterator[bool]:
    """Gives whether this thread alone works with PyTorch's pools within the block."""
    if not _PROCESS.claim.acquire(timeout=wait_s):
        yield False
        return
    _PROCESS.owner = threading.get_ident()
    try:
        yield True
    finally:
        _PROCESS.forsaken.clear()
        _PROCESS.owner = None
        _PROCESS.claim.release()


@contextmanager
def active(giver: Giver) -> Iterator[None]:
    """Within it, PyTorch gets its segments from ``giver``. The caller has the claim."""
    before = _PROCESS.active
    _PROCESS.active, _PROCESS.failure = giver, None
    try:
        yield
    except torch.OutOfMemoryError as error:
        if error.__cause__ is None and isinstance(_PROCESS.failure, OutOfMemory):
            raise error from _PROCESS.failure
        raise
    finally:
        failure, _PROCESS.active, _PROCESS.failure = _PROCESS.failure, before, None
        if isinstance(failure, KeyboardInterrupt):
            raise failure


def require_fit(source: Source) -> None:
    """Refuse a source from which PyTorch cannot allocate."""
    # (The locks of the virtual source are for one reservation each, or held for the length of one
    # call of the driver.)
    if source.device.type != "cuda":
        raise InvalidArgument(
            f"PyTorch's allocations cannot come from {source!r}: they need device memory; use an "
            "arena on a CUDA device"
        )
    if not isinstance(source, (CudaSource, AsyncSource, VirtualSource)):
        raise InvalidArgument(
            f"PyTorch's allocations cannot come from {source!r}: they need device memory from a "
            'source without locks; use source="cuda", "async" or "virtual", without adaptors'
        )


class Pool:
    """PyTorch's pool of segments from one arena.

    It is kept from one `use` to the next, with its idle memory, until `drop`. Segments come from
    ``outside`` if there is one, that of a region, and else from the cache's `external`.
    """

    def __init__(self, cache: Cache, outside: Outside | None = None) -> None:
        self._cache = cache
        self._outside = outside
        self._giver: Giver = cache.external if outside is None else outside
        self._pool: Any = None

    @contextmanager
    def use(self) -> Iterator[None]:
        """See `devalloc.Arena.use`."""
        outer = _PROCESS.current if _PROCESS.owner == threading.get_ident() else None
        if outer is self:
            yield
        elif outer is not None and outer._cache is self._cache:
            with outer.suspended(), self._entered():
                yield
        else:
            with claimed(_CLAIM_WAIT_S) as alone:
                if not alone:
                    raise InvalidArgument(
                        "use() is active already, on another thread or for another arena, and "
                        "PyTorch cannot do two at a time; leave that one first"
                    )
                with self._entered():
                    yield

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Send this thread's allocations to the pool. The caller has the claim."""
        device = self._cache.source.device
        self._make()
        if self._outside is not None:
            self._outside.enter()
        before, _PROCESS.current = _PROCESS.current, self
        try:
            with (
                active(self._giver),
                torch.autograd.set_multithreading_enabled(False),
                torch.cuda.use_mem_pool(self._pool, device=device),
            ):
                yield
        finally:
            _PROCESS.current = before
            if self._outside is not None:
                self._outside.leave()

    @contextmanager
    def captured(self) -> Iterator[Any]:
        """Within it a graph can be captured whose memory comes from the pool; gives its number."""
        with claimed(_CLAIM_WAIT_S) as alone:
            if not alone:
                raise InvalidArgument("use() is active; leave it, and capture the graph outside")
            self._make()
            if self._outside is not None:
                self._outside.enter()
            try:
                with active(self._giver):
                    yield self._pool.id
            finally:
                if self._outside is not None:
                    self._outside.leave()

    def _make(self) -> None:
        cudart.runtime()  # imported here, because a callback must not wait for an import
        if self._pool is None:
            with torch.cuda.device(self._cache.source.device):
                self._pool = torch.cuda.MemPool(_torch_allocator())

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within it this thread, which is inside `use`, allocates from PyTorch as if it were not.

        What `torch.cuda.use_mem_pool` does at its end, and at its beginning again.
        """
        index, number = self._cache.source.device.index, self._pool.id
        torch._C._cuda_endAllocateToPool(index, number)
        torch._C._cuda_releasePool(index, number)
        try:
            yield
        finally:
            torch._C._cuda_beginAllocateCurrentThreadToPool(index, number)

    def drop(self) -> None:
        """Give idle segments back to the source; do nothing while a thread is inside `use`.

        Segments with live tensors follow when PyTorch's cache is emptied after those are gone.
        """
        with claimed() as alone:
            if alone:
                self._pool = None

    def forsake(self) -> None:
        """`drop`, now or when the thread inside `use` leaves it. Called when the arena is gone."""
        if self._outside is not None:
            self._outside.forsaken = True
        if self._pool is not None:
            _PROCESS.forsaken.append(self._pool)
            self._pool = None
            with claimed():
                pass  # which drops what is no longer used

    def empty(self) -> int:
        """Give back all segments without live tensors; returns their bytes.

        PyTorch's own idle segments may go too. Does nothing while a thread is inside `use` or the
        current stream is being captured.
        """
        before = self._giver.held
        if before and _PROCESS.owner is None and not self._cache.streams.capturing():
            self.drop()
            if self._giver.held:
                torch.cuda.empty_cache()
        return before - self._giver.held


@contextmanager
def outside_of_use() -> Iterator[None]:
    """Within it this thread allocates from PyTorch itself, also if it is inside `Pool.use`."""
    pool = _PROCESS.current if _PROCESS.owner == threading.get_ident() else None
    if pool is None:
        yield
        return
    with pool.suspended():
        yield


def live_blocks(segments: dict[int, int]) -> dict[int, list[tuple[int, int]]]:
    """The blocks (address, bytes) of PyTorch's segments that are in use, by segment.

    A segment that PyTorch does not list counts as one block. Raises InvalidArgument while a thread
    is inside `use`.
    """
    with claimed(_CLAIM_WAIT_S) as alone:
        if not alone:
            raise InvalidArgument(
                "a region with PyTorch's memory cannot be paused while a thread is inside use(); "
                "leave it first"
            )
        # What cuBLAS took inside a region must not sleep: it would be used outside.
        torch._C._cuda_clearCublasWorkspaces()
        listed = torch.cuda.memory_snapshot()
    found = {address: [(address, nbytes)] for address, nbytes in segments.items()}
    for segment in listed:
        if segment["address"] in found:
            found[segment["address"]] = [
                (block["address"], block["size"])
                for block in segment["blocks"]
                if block["state"] != "inactive"
            ]
    return found
