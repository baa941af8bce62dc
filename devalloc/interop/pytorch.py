"""PyTorch's own allocations on an arena's source: what `devalloc.Arena.use` does.

PyTorch's caching allocator keeps its blocks and asks two callbacks for segments only. It calls
them with its own lock held, and they need the GIL, so they must wait for nobody who may want
either. They use `devalloc.cache.outside.Outside`, which takes no lock, and nothing else of the
engine.

One pair of callbacks serves the whole process and is never given up: a segment may come back long
after its pool, and its arena, are gone. Who gave it is looked up by its address.

PyTorch's functions for pools take the allocator's lock and keep the GIL. Meeting a callback of
another thread, which has the lock and wants the GIL, they would wait for ever. So only one thread
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
    from devalloc.cache.outside import Outside

# For a callback of another thread, which is short, to end; use() itself is not waited for.
_CLAIM_WAIT_S = 0.1


class _Process:
    """Who is inside `Pool.use`, and whose segments are out."""

    def __init__(self) -> None:
        self.claim = threading.Lock()
        self.owner: int | None = None
        self.active: Outside | None = None
        self.failure: BaseException | None = None
        self.givers: dict[int, Outside] = {}
        self.forsaken: list[Any] = []


_PROCESS = _Process()


def _allocate(nbytes: int, device: int, stream: int) -> int:
    """For PyTorch: a segment from whoever is active, or 0. Never raises."""
    try:
        outside = _PROCESS.active
        if outside is None:
            return 0
        address = outside.allocate(nbytes)
        _PROCESS.givers[address] = outside
        return address
    except BaseException as error:
        # Also Ctrl-C: an exception cannot pass through C++. `Pool.use` shows it as the cause.
        _PROCESS.failure = error
        return 0


def _free(address: int, nbytes: int, device: int, stream: int) -> None:
    """For PyTorch: give a segment back. Never raises."""
    try:
        if address == 0:
            return
        # With the claim a finalizer that interrupts cannot drop a pool in the midst of PyTorch's.
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
    """PyTorch's object over C functions for malloc and free."""
    make = getattr(torch._C, "_cuda_customAllocator", None)
    if make is None or not hasattr(torch.cuda, "MemPool"):
        raise DevallocError(
            f"PyTorch {torch.__version__} cannot take segments from others: it has no "
            "torch._C._cuda_customAllocator or torch.cuda.MemPool; use a CUDA build from 2.11 on"
        )
    return make(functions.malloc, functions.free)


@cache
def _torch_allocator() -> Any:
    """PyTorch's object over the callbacks, which lives as long as they do."""
    return custom_allocator(functions())


@contextmanager
def claimed(wait_s: float = 0.0) -> Iterator[bool]:
    """Whether this thread alone deals with PyTorch's pools now."""
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
def active(outside: Outside) -> Iterator[None]:
    """Within it, segments that PyTorch asks for come from ``outside``; needs the claim."""
    _PROCESS.active, _PROCESS.failure = outside, None
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

    Kept from one `use` to the next, with its idle memory, until `drop`.
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
            cudart.runtime()  # imported here, for a callback must not wait for an import
            if self._pool is None:
                with torch.cuda.device(device):
                    self._pool = torch.cuda.MemPool(_torch_allocator())
            self._inside = True
            try:
                with (
                    active(self._cache.outside),
                    torch.autograd.set_multithreading_enabled(False),
                    torch.cuda.use_mem_pool(self._pool, device=device),
                ):
                    yield
            finally:
                self._inside = False

    def drop(self) -> None:
        """Give idle segments back to the source. Those with living tensors follow when PyTorch's
        cache is emptied after these are gone. Does nothing while somebody is inside `use`."""
        with claimed() as alone:
            if alone:
                self._pool = None

    def forsake(self) -> None:
        """`drop`, now or when whoever is inside `use` leaves it: the arena is gone."""
        if self._pool is not None:
            _PROCESS.forsaken.append(self._pool)
            self._pool = None
            with claimed():
                pass  # which drops what is forsaken

    def empty(self) -> int:
        """Give back all segments without living tensors, PyTorch's own idle ones included; bytes.

        Does nothing while somebody is inside `use`, or the current stream is captured.
        """
        before = self._cache.outside.held
        if before and _PROCESS.owner is None and not self._cache.streams.capturing():
            self.drop()
            if self._cache.outside.held:
                torch.cuda.empty_cache()
        return before - self._cache.outside.held
