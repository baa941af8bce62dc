"""PyTorch's own allocations on an arena's source: what `devalloc.Arena.use` does.

PyTorch's caching allocator keeps its blocks and asks two callbacks for segments only. It calls them
while it holds its own lock, and they need the GIL, so they must not wait for a thread that may want
either. They use `devalloc.cache.external.External`, which takes no lock, and nothing else of the
cache.

One pair of callbacks serves the whole process and is never given up: a segment may come back long
after its pool and its arena are gone. The address tells which arena gave it.

PyTorch's functions for pools take the allocator's lock and keep the GIL. If one met a callback of
another thread, which has the lock and wants the GIL, both would wait for ever. So only one thread
at a time may be inside `Pool.use`, and pools are made and dropped under the same claim.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from devalloc.errors import DevallocError, InvalidArgument, OutOfMemory
from devalloc.interop import bridge
from devalloc.sources import AsyncSource, CudaSource, cudart

if TYPE_CHECKING:
    from devalloc.cache import Cache
    from devalloc.cache.external import External

# Long enough for a callback of another thread to end; nobody waits for another use() to end.
_CLAIM_WAIT_S = 0.1


class _Process:
    """The thread inside `Pool.use`, and the arenas whose segments are out."""

    def __init__(self) -> None:
        self.claim = threading.Lock()
        self.owner: int | None = None
        self.active: External | None = None
        self.failure: BaseException | None = None
        self.givers: dict[int, External] = {}
        self.forsaken: list[Any] = []


_PROCESS = _Process()


def _allocate(nbytes: int, device: int, stream: int) -> int:
    """For PyTorch: a segment from the active arena, or 0. Never raises."""
    try:
        external = _PROCESS.active
        if external is None:
            return 0
        address = external.allocate(nbytes)
        _PROCESS.givers[address] = external
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
        # Under the claim, a finalizer that interrupts this cannot drop a pool in PyTorch's midst.
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
    """PyTorch's allocator object over the callbacks; it lives as long as they do."""
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
def active(external: External) -> Iterator[None]:
    """Within it, PyTorch gets its segments from ``external``. The caller has the claim."""
    _PROCESS.active, _PROCESS.failure = external, None
    try:
        yield
    except torch.OutOfMemoryError as error:
        if error.__cause__ is None and isinstance(_PROCESS.failure, OutOfMemory):
            raise error from _PROCESS.failure
        raise
    finally:
        failure, _PROCESS.active, _PROCESS.failure = _PROCESS.failure, None, None
        if isinstance(failure, KeyboardInterrupt):
            raise failure


class Pool:
    """PyTorch's pool of segments from one arena.

    It is kept from one `use` to the next, with its idle memory, until `drop`.
    """

    def __init__(self, cache: Cache) -> None:
        if not isinstance(cache.source, (CudaSource, AsyncSource)):
            raise InvalidArgument(
                f"PyTorch's allocations cannot come from {cache.source!r}: they need device memory "
                'from a source without locks; use source="cuda" or "async", without adaptors'
            )
        self._cache = cache
        self._pool: Any = None
        self._inside = False

    @contextmanager
    def use(self) -> Iterator[None]:
        """See `devalloc.Arena.use`."""
        if self._inside and _PROCESS.owner == threading.get_ident():
            yield
            return
        with claimed(_CLAIM_WAIT_S) as alone:
            if not alone:
                raise InvalidArgument(
                    "use() is active already, on another thread or for another arena, and PyTorch "
                    "cannot do two at a time; leave that one first"
                )
            device = self._cache.source.device
            cudart.runtime()  # imported here, because a callback must not wait for an import
            if self._pool is None:
                with torch.cuda.device(device):
                    self._pool = torch.cuda.MemPool(_torch_allocator())
            self._inside = True
            try:
                with (
                    active(self._cache.external),
                    torch.autograd.set_multithreading_enabled(False),
                    torch.cuda.use_mem_pool(self._pool, device=device),
                ):
                    yield
            finally:
                self._inside = False

    def drop(self) -> None:
        """Give idle segments back to the source; do nothing while a thread is inside `use`.

        Segments with live tensors follow when PyTorch's cache is emptied after those are gone.
        """
        with claimed() as alone:
            if alone:
                self._pool = None

    def forsake(self) -> None:
        """`drop`, now or when the thread inside `use` leaves it. Called when the arena is gone."""
        if self._pool is not None:
            _PROCESS.forsaken.append(self._pool)
            self._pool = None
            with claimed():
                pass  # which drops what is forsaken

    def empty(self) -> int:
        """Give back all segments without live tensors; returns their bytes.

        PyTorch's own idle segments may go too. Does nothing while a thread is inside `use` or the
        current stream is being captured.
        """
        before = self._cache.external.held
        if before and _PROCESS.owner is None and not self._cache.streams.capturing():
            self.drop()
            if self._cache.external.held:
                torch.cuda.empty_cache()
        return before - self._cache.external.held
