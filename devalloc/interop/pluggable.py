"""An arena as PyTorch's CUDA allocator for the whole process: what `devalloc.Arena.install` does.

PyTorch then calls for every tensor and does not cache: the arena does. In the usual state
a front (`bridge.Front`) serves from C; other calls enter Python.
PyTorch holds no lock of its own while it calls, so a callback may wait for the cache's lock, and
the cache notes a free that interrupts it. The allocator cannot be changed back, and the callbacks
live as long as the process.

PyTorch does not check whether such an allocator failed, and no exception can pass through it. A
tensor that got no memory has the address 0. Some operations notice that and raise RuntimeError;
most launch their kernel, which CUDA ends with an illegal memory access, and with it everything that
the process has on the GPU. So the arena's own error, which says why, is shown as a warning at once.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from devalloc.errors import DevallocError, InvalidArgument
from devalloc.interop import bridge, pytorch

if TYPE_CHECKING:
    from devalloc.arena.cache.allocator import Cache


class AllocationWarning(RuntimeWarning):
    """PyTorch asked for memory and got none; the text is that of the arena's error."""


class _Installed:
    """The caches that PyTorch gets memory from, by the index of the device."""

    def __init__(self) -> None:
        self.caches: dict[int, Cache] = {}
        self.allocator: Any = None
        self.owners: list[object] = []


_INSTALLED = _Installed()


def _warn(error: BaseException) -> None:
    """Show an error that cannot pass through C++. Never raises, even if warnings are errors."""
    try:
        warnings.warn(f"{type(error).__name__}: {error}", AllocationWarning, stacklevel=3)
    except Warning as shown:
        print(f"{AllocationWarning.__name__}: {shown}", file=sys.stderr)


def _cache_of(device: int) -> Cache:
    cache = _INSTALLED.caches.get(device)
    if cache is None:
        raise InvalidArgument(
            f"PyTorch asked for memory on cuda:{device}, and no arena was installed for it; "
            f'call Arena.install(device="cuda:{device}") too'
        )
    return cache


def _allocate(nbytes: int, device: int, stream: int) -> int:
    """For PyTorch: an address, or 0. Never raises."""
    try:
        return _cache_of(device).loan.serve(nbytes, stream)
    except BaseException as error:
        _warn(error)
        return 0


def _free(address: int, nbytes: int, device: int, stream: int) -> None:
    """For PyTorch: give memory back. Never raises."""
    try:
        if address != 0:
            _cache_of(device).loan.take_back(address)
    except BaseException as error:
        _warn(error)


def _record_stream(address: int, stream: int) -> None:
    """For ``Tensor.record_stream``. Never raises."""
    try:
        caches = _INSTALLED.caches.values()
        if address == 0 or any(cache.loan.share(address, stream) for cache in caches):
            return
        for cache in caches:
            if cache.owns(address):
                cache.record_stream(address, stream)
    except BaseException as error:
        _warn(error)


def _reset() -> None:
    """For ``torch.cuda.empty_cache``. Never raises."""
    try:
        for cache in _INSTALLED.caches.values():
            cache.empty_cache()
    except BaseException as error:
        _warn(error)


@cache
def functions() -> bridge.Functions:
    """The callbacks as C functions. Cached: they live as long as the process."""
    return bridge.connect("install", _allocate, _free, _record_stream, _reset)


def _hook(allocator: Any, name: str, function: int) -> None:
    set_hook = getattr(allocator, name, None)
    if set_hook is None:
        raise DevallocError(
            f"PyTorch {torch.__version__} does not pass an allocator what it needs: {name} "
            "is missing; use a CUDA build from 2.11 on"
        )
    set_hook(function)


def replace_allocator() -> None:
    """Have PyTorch call the callbacks from now on; does nothing if it does so already.

    Raises
    ------
    InvalidArgument
        If PyTorch has initialised CUDA: then its own allocator is in use.
    DevallocError
        If this PyTorch has no pluggable allocators, or the C functions cannot be compiled.
    """
    if _INSTALLED.allocator is not None:
        return
    if torch.cuda.is_initialized():
        raise InvalidArgument(
            "PyTorch has initialised CUDA, and its allocator cannot be changed any more; call "
            "Arena.install() before anything uses the GPU, or route allocations with Arena.use()"
        )
    allocator = pytorch.custom_allocator(functions())
    _hook(allocator, "set_record_stream_fn", functions().record_stream)
    _hook(allocator, "set_reset_fn", functions().reset)
    torch._C._cuda_changeCurrentAllocator(allocator)
    _INSTALLED.allocator = allocator


def installed() -> bool:
    """Whether PyTorch's allocator was replaced."""
    return _INSTALLED.allocator is not None


def require_unserved(place: torch.device) -> None:
    """Raise InvalidArgument if an arena serves PyTorch on this device already."""
    if place.index in _INSTALLED.caches:
        raise InvalidArgument(f"an arena is installed for {place} already")


def serve(cache: Cache, owner: object, front: bool = True) -> None:
    """Serve PyTorch's requests on the cache's device from the cache until the process ends.

    ``owner`` is kept alive as long. ``front``: whether a front serves what it can.
    """
    require_unserved(cache.source.device)
    index = cache.source.device.index
    policy = cache.policy
    if front and policy.front_rule is not None:
        functions()  # or no arena would own the front
        cache.loan.attach(bridge.Front("install", index, policy.unit, policy.zero_is_null))
    _INSTALLED.owners.append(owner)
    _INSTALLED.caches[index] = cache
