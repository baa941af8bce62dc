"""Segments that another allocator takes from the cache's source, under the cache's limit.

PyTorch asks for segments while it holds the lock of its own allocator. A thread that is inside the
cache may be interrupted by a garbage collection that frees PyTorch's tensors and so waits for that
lock. Waiting for the cache's lock here could therefore deadlock, so nothing here takes a lock or
waits for a thread.

Instead of locking, both sides announce what they are about to take before they compare the sum with
the limit. If two race for the last free bytes, both may fail, but never do both succeed. Single
operations on a dict are atomic in CPython, and ``sum`` over its ints is one of them.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

from devalloc.errors import InvalidFree, OutOfMemory
from devalloc.sizes import format_size
from devalloc.sources.source import bytes_taken

if TYPE_CHECKING:
    from devalloc.sources import Source


class Account(Protocol):
    """The account that these segments count in."""

    source: Source
    limit: int | None

    @property
    def taken(self) -> int:
        """Bytes that count against the limit, those of the account's `External` included."""


class External:
    """The segments that others hold from a store's source. Waits for nothing but the source."""

    __slots__ = ("_account", "_asleep", "_held", "_moving", "_tickets", "allocations", "frees")

    def __init__(self, account: Account) -> None:
        self._account = account
        self._tickets = itertools.count()
        self._held: dict[int, int] = {}
        # Those that have no memory now.
        self._asleep: dict[int, int] = {}
        # Bytes being taken or given back, by ticket. Briefly counted twice rather than not at all.
        self._moving: dict[int, int] = {}
        self.allocations = 0
        self.frees = 0

    @property
    def held(self) -> int:
        """Bytes that are out."""
        return sum(self._held.values())

    @property
    def reserved(self) -> int:
        """Bytes that are out and awake, just being asked for, or just being given back."""
        return sum(self._held.values()) + sum(self._moving.values()) - self.asleep

    @property
    def asleep(self) -> int:
        """Bytes that are out and have no memory now."""
        return sum(self._asleep.values())

    def size_of(self, address: int) -> int:
        """Bytes of the segment at an address."""
        return self._held[address]

    def sleep(self, addresses: tuple[int, ...]) -> None:
        """Count segments no more: they have no memory."""
        self._asleep.update((at, self._held[at]) for at in addresses if at in self._held)

    def wake(self, addresses: tuple[int, ...]) -> None:
        """Count segments again; OutOfMemory if the limit forbids it, and nothing has changed."""
        account = self._account
        nbytes = sum(self._asleep.get(at, 0) for at in addresses)
        if account.limit is not None and account.taken + nbytes > account.limit:
            raise OutOfMemory(
                f"{format_size(nbytes)} cannot be resumed: {format_size(account.taken)} of a limit "
                f"of {format_size(account.limit)} are taken; free memory and call empty_cache(), "
                "or raise the limit"
            )
        for at in addresses:
            self._asleep.pop(at, None)

    def allocate(self, nbytes: int) -> int:
        """The address of a segment straight from the source; it counts with what the source takes.

        Raises
        ------
        OutOfMemory
            If the limit or the source does not allow it; nothing has changed then.
        """
        account = self._account
        ticket = next(self._tickets)
        # (All of what the source takes is asked for, so that `free` names what was allocated.)
        nbytes = bytes_taken(account.source, nbytes)
        self._moving[ticket] = nbytes
        try:
            if account.limit is not None and account.taken > account.limit:
                others = account.taken - nbytes
                remedy = ", or free something and call empty_cache()" if others else ""
                raise OutOfMemory(
                    f"a segment of {format_size(nbytes)} does not fit into the limit of "
                    f"{format_size(account.limit)}: {format_size(others)} are taken; raise the "
                    f"limit{remedy}"
                )
            address = account.source.allocate(nbytes)
            self._held[address] = nbytes
        finally:
            del self._moving[ticket]
        self.allocations += 1
        return address

    def free(self, address: int) -> None:
        """Give a segment back; waits for the device if the source does.

        Raises
        ------
        InvalidFree
            If no segment is out at ``address``.
        """
        ticket = next(self._tickets)
        self._moving[ticket] = self._held.get(address, 0)
        try:
            nbytes = self._held.pop(address, None)
            if nbytes is None:
                raise InvalidFree(f"free of {address:#x}: no segment is out there; free it once")
            slept = self._asleep.pop(address, None)
            try:
                self._account.source.free(address, nbytes)
            except BaseException:
                self._held[address] = nbytes
                if slept is not None:
                    self._asleep[address] = slept
                raise
        finally:
            del self._moving[ticket]
        self.frees += 1

    def stats(self) -> dict[str, int]:
        """Counts of these segments; PyTorch's names count only the cache's own."""
        return {
            "outside_segment.current": len(self._held),
            "outside_segment.allocated": self.allocations,
            "outside_segment.freed": self.frees,
            "outside_bytes.current": self.held,
        }
