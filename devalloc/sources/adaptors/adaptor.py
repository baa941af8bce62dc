"""The adaptor that changes nothing, the base of the others."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from devalloc.sources.source import Capabilities, Segment, Source, require_source

if TYPE_CHECKING:
    import torch


class Adaptor:
    """Passes everything on to ``inner``.

    It passes on allocations and nothing else, so the capabilities to map and to pause memory are
    lost; the other capabilities stay.

    Parameters
    ----------
    inner : Source
        Where the memory comes from.

    Raises
    ------
    InvalidArgument
        If ``inner`` is no source.
    """

    def __init__(self, inner: Source) -> None:
        require_source(inner)
        self.inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def granularity(self) -> int:
        return self.inner.granularity

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self.inner.capabilities, mappable=False, pausable=False)

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        return self.inner.allocate(nbytes, stream)

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        self.inner.free(address, nbytes, stream)

    def has(self, address: int) -> bool:
        """Whether the source within has memory out at an address; true if it cannot tell."""
        has = getattr(self.inner, "has", None)
        return has is None or bool(has(address))

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        return self.inner.view(segment, offset, nbytes)
