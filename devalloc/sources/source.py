"""The source protocol, and segments: memory that returns to its source by itself.

Every source and every adaptor may be called from several threads at once. A free may run inside a
garbage collection, and so in the middle of any other call, even one of the same thread. So locks
are reentrant, and what is done under a lock is one assignment, or may safely be seen half done.
"""

from __future__ import annotations

import dataclasses
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, cast

from devalloc.common.owner import Owner
from devalloc.errors import DevallocError, InvalidArgument, InvalidFree
from devalloc.sizes import format_size, quote, require_power_of_two

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What the memory of a source can do.

    Attributes
    ----------
    mappable : bool
        Addresses can be reserved first; memory can be mapped there later and taken away again.
    pausable : bool
        Memory can be given back while its address is kept.
    peer_accessible : bool
        Other CUDA devices can reach it once peer access is switched on.
    host_accessible : bool
        The CPU can read and write it.
    stream_ordered : bool
        Given a stream, `Source.allocate` and `Source.free` are steps of that stream and wait for
        nothing. In other sources a stream makes no difference to where the address may be used.
    """

    mappable: bool = False
    pausable: bool = False
    peer_accessible: bool = False
    host_accessible: bool = False
    stream_ordered: bool = False


class Source(Protocol):
    """Raw memory of one device.

    Attributes
    ----------
    device : torch.device
        The device of tensors over the memory.
    granularity : int
        Bytes, a power of two; every address is a multiple of it, and memory is taken in whole
        multiples of it: see `bytes_taken`.
    capabilities : Capabilities

    Notes
    -----
    A stream is given by its handle (``torch.cuda.Stream.cuda_stream``). Without one, memory can be
    used on every stream at once, and `free` waits until no work of the device can use it any more.

    A source may have a method ``has(address)``: whether the memory that it gave there is still out.
    A cache asks after an interruption (Ctrl-C) of `free`; without it, `free` has not happened then.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def granularity(self) -> int: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        """The address of ``nbytes`` bytes.

        Raises
        ------
        OutOfMemory
            If there is not enough memory; nothing has changed then.
        InvalidArgument
            If ``nbytes`` is not an int, less than 1, or beyond every address space.
        """
        ...

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        """Give back exactly what `allocate` gave.

        Raises
        ------
        InvalidFree
            Unless ``address`` is out, with ``nbytes`` bytes; nothing has changed then.
        InvalidArgument
            If ``address`` or ``nbytes`` is not an int of 64 bits; nothing has changed then.
        """
        ...

    def view(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over ``nbytes`` bytes of ``segment``, from ``offset`` on.

        The tensor keeps the segment alive.
        """
        ...


class Mappable(Source, Protocol):
    """A source with the capability ``mappable``: addresses first, memory later.

    Offsets and sizes are multiples of the granularity. `Source.free` gives a reservation back with
    all that is mapped there.
    """

    def reserve(self, nbytes: int) -> int:
        """Addresses without memory; raises OutOfMemory."""
        ...

    def map(self, address: int, offset: int, nbytes: int, largest: int) -> None:
        """Put memory behind a part of a reservation, in pieces of up to ``largest`` bytes.

        Raises OutOfMemory; nothing has changed then. Waits for nothing.
        """
        ...

    def unmap(self, address: int, offset: int, nbytes: int, *, keep: bool = True) -> None:
        """Take the memory of a part away, by whole pieces. Waits for nothing.

        Without ``keep`` none of it stays idle for the next use.
        """
        ...

    def parts(self, address: int, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the pieces that lie inside a part, ascending."""
        ...


_MEMBERS = ("device", "granularity", "allocate", "free")
"""What an object must have to be asked for memory."""


def require_source(source: object, names: str = "") -> None:
    """Refuse what is no source. ``names`` are those that are accepted too, for the message."""
    if isinstance(source, type) or not all(hasattr(source, name) for name in _MEMBERS):
        named = f"one of {names}, or " if names else ""
        raise InvalidArgument(
            f"a source is {named}an object with {', '.join(_MEMBERS)}, such as "
            f"devalloc.sources.HostSource(); not {quote(source)}"
        )


def granularity_of(source: Source) -> int:
    """The granularity of a source; InvalidArgument if it is not a power of two."""
    require_power_of_two(f"the granularity of {source!r}", source.granularity)
    return source.granularity


def bytes_taken(source: Source, nbytes: int) -> int:
    """The bytes that an allocation of ``nbytes`` takes: whole multiples of the granularity.

    Limits and statistics count these.
    """
    return (nbytes + source.granularity - 1) & -source.granularity


def require_request(name: str, nbytes: object) -> None:
    """Refuse requests that no source can serve; ``name`` is the source's in the message."""
    if not isinstance(nbytes, int) or nbytes < 1:
        raise InvalidArgument(f"{name}: a request of {quote(nbytes)} B; ask for at least one byte")
    if nbytes >= 1 << 62:
        raise InvalidArgument(
            f"{name}: a request of {format_size(nbytes)} is beyond every address space; ask for "
            "less"
        )


def require_free(name: str, address: object, nbytes: object) -> None:
    """Refuse to free what no source can have given; ``name`` is the source's in the message."""
    for value in (address, nbytes):
        if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 64:
            raise InvalidArgument(
                f"{name}: free takes the address and the size in bytes that allocate was about, "
                f"ints of 64 bits, not {quote(value)}"
            )


class Ledger(Owner):
    """Records what a source has given out, so that a wrong free is refused and not passed on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._sizes: dict[int, int] = {}

    def check(self, nbytes: int) -> None:
        """Refuse requests that no source can serve."""
        require_request(self._name, nbytes)

    def enter(self, address: int, nbytes: int) -> None:
        self._sizes[address] = nbytes

    def has(self, address: int) -> bool:
        """Whether the memory at an address is out."""
        return address in self._sizes

    def leaving(self, address: int, nbytes: int) -> Leaving:
        """Within it the memory is given back; its entry is removed before.

        Before, because afterwards the source may hand out the address again. If giving it back
        fails, the entry is restored; but not after an interruption if the list that it gives is not
        empty by then. So let the C code that gives the memory back fill that list.
        """
        require_free(self._name, address, nbytes)
        return Leaving(self._name, self._sizes, address, nbytes)


class Leaving:
    """See `Ledger.leaving`. (A generator would be ended late by an interruption around it.)"""

    __slots__ = ("_address", "_done", "_known", "_name", "_nbytes", "_sizes")

    def __init__(self, name: str, sizes: dict[int, int], address: int, nbytes: int) -> None:
        self._name = name
        self._sizes = sizes
        self._address = address
        self._nbytes = nbytes
        self._known: list[int | None] = []
        self._done: list[Any] = []

    def __enter__(self) -> list[Any]:
        known = self._known
        try:
            # One atomic step and no lock: a free may come while locks of other libraries are held.
            known.extend(map(self._sizes.pop, (self._address,), (None,)))
            if known[0] is None:
                raise InvalidFree(
                    f"{self._name}: free of {self._address:#x} ({format_size(self._nbytes)}), "
                    "which is not out; it was freed before or is not from this source"
                )
            if known[0] != self._nbytes:
                raise InvalidFree(
                    f"{self._name}: free of {self._address:#x} with {self._nbytes} B, but "
                    f"{known[0]} B were allocated there; free exactly what allocate gave"
                )
        except BaseException:
            self._restore()
            raise
        return self._done

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and (not self._done or isinstance(error, DevallocError)):
            self._restore()

    def _restore(self) -> None:
        if self._known and self._known[0] is not None:
            self._sizes[self._address] = self._known[0]


class Segment(Owner):
    """One piece of memory from a source, given back when nothing refers to it any more.

    Tensors made by :meth:`view` refer to the segment, so memory that a program can still reach is
    never given back.

    Parameters
    ----------
    source : Source
    nbytes : int
        Size in bytes, at least 1.
    alignment : int
        A power of two; the segment's address is a multiple of it. If the source's granularity is
        less, ``alignment`` bytes more are taken from the source.
    keeps : Segment, ...
        Other segments, or tensors, to which the contents of this one point. They live as long as
        this one, or until `keeps` is set to something else.
    mapped : bool
        False reserves addresses only, of a source that is `Mappable`; memory is mapped there with
        `Mappable.map`. The alignment may then not be above the granularity.

    Raises
    ------
    OutOfMemory
        If the source has not enough memory.
    InvalidArgument
        For what is no source, less than one byte, or an alignment or granularity that is not a
        power of two.
    """

    def __init__(
        self,
        source: Source,
        nbytes: int,
        alignment: int = 256,
        keeps: tuple[object, ...] = (),
        mapped: bool = True,
    ) -> None:
        require_source(source)
        require_request("a segment", nbytes)
        require_power_of_two("the alignment of a segment", alignment)
        extra = alignment if alignment > granularity_of(source) else 0
        if extra and not mapped:
            raise InvalidArgument(
                f"addresses of {source!r} are multiples of {format_size(source.granularity)}, not "
                f"of {format_size(alignment)}"
            )
        take = source.allocate if mapped else cast("Mappable", source).reserve
        raw = take(nbytes + extra)
        self.source = source
        self.nbytes = nbytes
        self.address = (raw + alignment - 1) // alignment * alignment
        self.keeps = keeps
        # (Not at exit: what is still running then may use the memory, and the end of the process
        # gives all of it back.)
        weakref.finalize(self, source.free, raw, nbytes + extra).atexit = False

    def view(self, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """A uint8 tensor over ``nbytes`` bytes from ``offset`` on, without a copy.

        The default is all bytes from ``offset`` on. The tensor keeps the segment alive. Raises
        IndexError if the bytes are not inside the segment.
        """
        if nbytes is None:
            nbytes = self.nbytes - offset
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise IndexError(f"[{offset}, {offset + nbytes}) is not inside {self.nbytes} bytes")
        return self.source.view(self, offset, nbytes)
