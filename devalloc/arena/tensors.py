"""Tensors over blocks of a cache: what `devalloc.Arena.empty` gives.

To make a storage over foreign memory and a tensor over it costs as much as the cache's allocation.
So both are kept for the length of a `Stay`, as a *template*: ``template.data`` is a new tensor of
the same memory, shape and type, without history. The end of a tensor calls back. If nothing but the
stay refers to the storage then (no view, nothing that autograd saved), the block is kept for reuse
with its template, and the next equal request takes both. Otherwise the template is dropped, and the
end of the storage, whatever holds it last, frees the block.

Three counts show whether anything else refers to the storage: references from C++, references from
Python, and weak references from Python. Their values when nothing else does are measured for each
new template and not assumed from a version of PyTorch. A tensor that is ending is still counted,
unless it was moved to another storage (``set_``, ``tensor.data = ...``); then another holder of
this storage would be mistaken for the ending tensor. So the counts are read again before a kept
block is reused or freed, when the tensor is really gone.

The storage may also no longer lie over the block: ``share_memory_`` replaces its contents.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from devalloc.arena.cache.reuse import InUse, Stay
from devalloc.errors import InvalidArgument

if TYPE_CHECKING:
    from devalloc.arena.cache.allocator import Cache

_uses_in_c: Callable[[int], int] = torch._C._storage_Use_Count
_uses_in_python = sys.getrefcount
_weak_references = weakref.getweakrefcount

Key = tuple[tuple[int, ...], torch.dtype, int]
"""Shape, type, and the stream that owns the memory."""


@cache
def _blank(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without elements. Not an inference tensor: outside of that mode it is unusable.

    Raises InvalidArgument for types whose tensors cannot be laid over a storage: quantised ones.
    """
    with torch.inference_mode(False):
        try:
            blank = torch.empty(0, dtype=dtype, device=device)
            if type(blank) is not torch.Tensor:  # must not be cached for later callers
                raise InvalidArgument(
                    f"a mode is active in which torch.empty gives a {type(blank).__name__}, and "
                    "such a tensor cannot lie in an arena's memory; call Arena.empty outside of "
                    "that mode"
                )
            blank.data.set_(blank.untyped_storage(), 0, (0,))  # type: ignore[call-overload]
        except RuntimeError as error:
            raise InvalidArgument(
                f"PyTorch cannot lay a tensor of {dtype} over given memory; allocate the integer "
                "type that holds its values, such as torch.int8"
            ) from error
        return blank


def without_elements(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor with a size of 0 in its shape, and without memory.

    Raises InvalidArgument for the types that `_blank` refuses, and if the other sizes are too
    large: PyTorch multiplies them to a count of bytes in 64 bits before it comes to the 0.
    """
    _blank(dtype, device)
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, TypeError) as error:
        if math.prod(size for size in shape if size) * dtype.itemsize < 1 << 63:
            raise
        raise InvalidArgument(
            f"a size of about 2**{max(shape).bit_length()} is too large for the shape of a "
            "tensor, also of one without elements"
        ) from error


class TensorStay(Stay):
    """A block that is used by tensors of one shape and type, one after the other.

    The block has ``nbytes`` bytes at ``address``. It was allocated from ``cache`` and belongs to
    this object from now on.
    """

    __slots__ = (
        "_cache",
        "_ending_in_c",
        "_handle",
        "_idle_in_c",
        "_idle_in_python",
        "_on_end",
        "_storage",
        "_template",
        "_watch",
    )

    def __init__(self, cache: Cache, key: Key, address: int, nbytes: int) -> None:
        self._cache = cache
        self.key = key
        self.address = address
        self.turns = -1  # `take` by the first user makes it 0
        self.told = 0
        shape, dtype, _ = key
        device = cache.source.device
        make = torch._C._construct_storage_from_data_pointer
        self._storage: Any = make(address, device, nbytes)
        blank: Any = _blank(dtype, device).data
        self._template = blank.set_(self._storage, 0, shape)
        self._handle: int = self._storage._cdata
        self._idle_in_c = _uses_in_c(self._handle)
        self._ending_in_c = self._idle_in_c + 1
        self._idle_in_python = _uses_in_python(self._storage)
        self._on_end = self._ended
        self._watch: weakref.ref[object] | None = None
        self.reuse = cache.reuse
        self.reuse.enter(self)

    def take(self) -> torch.Tensor:
        # The test is written out here and below: a call would take a noticeable part of the time.
        if (
            _uses_in_c(self._handle) != self._idle_in_c
            or _uses_in_python(self._storage) != self._idle_in_python
            or _weak_references(self._storage)
            or self._storage.data_ptr() != self.address
        ):
            self._await_others()
            raise InUse
        self.turns += 1
        tensor: torch.Tensor = self._template.data
        self._watch = weakref.ref(tensor, self._on_end)
        return tensor

    def _ended(self, _: object) -> None:
        reuse = self.reuse
        if (
            _uses_in_c(self._handle) == self._ending_in_c
            and _uses_in_python(self._storage) == self._idle_in_python
            and not _weak_references(self._storage)
            and not reuse.closed
        ):
            reuse.park(self)
        else:
            self._await_others()

    def _await_others(self) -> None:
        """Leave the block to the end of the storage."""
        self._watch = weakref.ref(self._storage, self._gone)
        # If nothing else refers to the storage, this line calls `_gone`.
        self._template = self._storage = None

    def vacate(self) -> bool:
        if (
            _uses_in_c(self._handle) == self._idle_in_c
            and _uses_in_python(self._storage) == self._idle_in_python
        ):
            return True  # a weak reference, if there is one, sees the end of the storage
        self._await_others()
        return False

    def _gone(self, _: object) -> None:
        self.reuse.end(self)
        self._cache.free_in_finalizer(self.address)

    def forget(self) -> None:
        self._template = self._storage = self._watch = None
        del self._on_end  # a bound method: it refers to this object

    def exclude(self) -> None:
        self._idle_in_c = self._ending_in_c = 0  # a count that never occurs
