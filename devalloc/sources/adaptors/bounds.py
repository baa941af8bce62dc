"""Adaptors that bound what a source gives: how much, and at which addresses."""

from __future__ import annotations

import threading

from devalloc.errors import InvalidFree, OutOfMemory
from devalloc.sizes import format_size, parse_size, require_power_of_two
from devalloc.sources.adaptors.adaptor import Adaptor
from devalloc.sources.source import (
    Source,
    bytes_taken,
    granularity_of,
    require_free,
    require_request,
)


class LimitAdaptor(Adaptor):
    """Allows at most ``limit`` bytes to be allocated at a time (modelled on RMM's limiting
    resource).

    The limit is checked before the source is asked. It counts what allocations take: whole
    multiples of the source's granularity.

    Parameters
    ----------
    inner : Source
    limit : int or str
        Bytes, or text such as ``"1GiB"``. The attribute, in bytes, may be changed later. If it is
        set to less than is out, requests fail until enough has come back.

    Raises
    ------
    OutOfMemory
        From `allocate`, for a request that would exceed the limit.
    """

    def __init__(self, inner: Source, limit: int | str) -> None:
        super().__init__(inner)
        self.limit = parse_size(limit)
        self.used = 0
        """Bytes that are taken."""
        self._lock = threading.RLock()

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        require_request("LimitAdaptor", nbytes)
        taken = bytes_taken(self.inner, nbytes)
        with self._lock:
            if taken > self.limit - self.used:
                raise OutOfMemory(
                    f"allocate of {format_size(nbytes)} failed: it takes {format_size(taken)}, and "
                    f"{format_size(self.used)} of a limit of {format_size(self.limit)} are in "
                    "use; free memory or raise the limit"
                )
            self.used += taken
        try:
            return super().allocate(nbytes, stream)
        except BaseException:
            self._give_back(taken)
            raise

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        super().free(address, nbytes, stream)
        self._give_back(bytes_taken(self.inner, nbytes))

    def _give_back(self, taken: int) -> None:
        with self._lock:
            self.used -= taken


class AlignedAdaptor(Adaptor):
    """Gives addresses that are multiples of ``alignment`` (modelled on RMM's aligned resource).

    Takes ``alignment`` bytes more from a source whose granularity is less than that.

    Parameters
    ----------
    inner : Source
    alignment : int or str
        Bytes, a power of two.
    threshold : int or str
        Requests of fewer bytes are passed on as they are.

    Raises
    ------
    InvalidArgument
        If ``alignment`` or the granularity of ``inner`` is not a power of two.
    """

    def __init__(self, inner: Source, alignment: int | str, threshold: int | str = 0) -> None:
        super().__init__(inner)
        self.alignment = parse_size(alignment)
        self.threshold = parse_size(threshold)
        require_power_of_two("an alignment", self.alignment)
        granularity_of(inner)
        self._moved: dict[int, int] = {}  # address given out -> the source's
        self._lock = threading.RLock()

    @property
    def granularity(self) -> int:
        inner = self.inner.granularity
        return inner if self.threshold > 1 else max(inner, self.alignment)

    def _extra(self, nbytes: int) -> int:
        padded = nbytes >= max(self.threshold, 1) and self.alignment > self.inner.granularity
        return self.alignment if padded else 0

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        require_request("AlignedAdaptor", nbytes)
        extra = self._extra(nbytes)
        raw = super().allocate(nbytes + extra, stream)
        if not extra:
            return raw
        address = (raw + self.alignment - 1) & -self.alignment
        self._moved[address] = raw
        return address

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        require_free("AlignedAdaptor", address, nbytes)
        extra = self._extra(nbytes)
        if not extra:
            super().free(address, nbytes, stream)
            return
        raw: list[int | None] = []
        try:
            with self._lock:
                raw.extend(map(self._moved.pop, (address,), (None,)))
            if raw[0] is None:
                raise InvalidFree(
                    f"free of {address:#x} ({format_size(nbytes)}), which is not out with an "
                    f"alignment of {format_size(self.alignment)}; free exactly what allocate gave"
                )
            super().free(raw[0], nbytes + extra, stream)
        except BaseException:
            if raw and raw[0] is not None and super().has(raw[0]):
                self._moved[address] = raw[0]
            raise

    def has(self, address: int) -> bool:
        return super().has(self._moved.get(address, address))
