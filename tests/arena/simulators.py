"""The allocators that policies follow, written once more from their descriptions.

Nothing of `devalloc.cache` is used. Blocks are kept in plain sorted lists, and each class reads as
the rules do: how sizes are rounded, what is searched in which order, what is split, when memory
goes back. A simulator answers a request with an address, or None if it has failed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

import numpy as np

from devalloc import OutOfMemory

KIB, MIB = 1 << 10, 1 << 20
UNLIMITED = 1 << 62


class Memory(Protocol):
    """Where segments come from."""

    def allocate(self, nbytes: int) -> int: ...

    def free(self, address: int, nbytes: int) -> None: ...


class Piece:
    """A part of a segment, in use or free."""

    def __init__(self, address: int, size: int, pool: object, whole: int) -> None:
        self.address, self.size, self.pool, self.whole = address, size, pool, whole
        self.used = False
        self.left: Piece | None = None
        self.right: Piece | None = None
        self.age_base = 0


class Simulator:
    """Segments, splitting and merging. What is in different pools never mixes."""

    tail = False

    def __init__(self, memory: Memory, limit: int | None = None) -> None:
        self.memory = memory
        self.limit = limit
        self.reserved = 0
        self.free_pieces: dict[object, list[tuple[int, int]]] = {}
        self.pieces: dict[int, Piece] = {}

    def ask(self, nbytes: int, pool: object) -> Piece | None:
        """A new segment, unless the limit or the source refuses."""
        if self.limit is not None and self.reserved + nbytes > self.limit:
            return None
        try:
            address = self.memory.allocate(nbytes)
        except OutOfMemory:
            return None
        self.reserved += nbytes
        piece = self.pieces[address] = Piece(address, nbytes, pool, nbytes)
        return piece

    def give_back(self, piece: Piece) -> None:
        self.take_out(piece)
        del self.pieces[piece.address]
        self.reserved -= piece.size
        self.memory.free(piece.address, piece.size)

    def take_out(self, piece: Piece) -> None:
        entries = self.free_pieces[piece.pool]
        del entries[bisect_left(entries, (piece.size, piece.address))]

    def put_in(self, piece: Piece) -> None:
        insort(self.free_pieces.setdefault(piece.pool, []), (piece.size, piece.address))

    def smallest(self, pool: object, size: int) -> Piece | None:
        """The smallest free piece that is large enough, at the lowest address."""
        entries = self.free_pieces.get(pool, [])
        at = bisect_left(entries, (size, 0))
        return self.pieces[entries[at][1]] if at < len(entries) else None

    def use(self, piece: Piece, size: int, split: bool) -> int:
        """Use a piece that is in no list; the rest, if it is split, stays free."""
        if split and piece.size > size:
            cut = piece.size - size if self.tail else size
            rest = Piece(piece.address + cut, piece.size - cut, piece.pool, piece.whole)
            rest.left, rest.right = piece, piece.right
            if piece.right is not None:
                piece.right.left = rest
            piece.right, piece.size = rest, cut
            self.pieces[rest.address] = rest
            if self.tail:
                piece, rest = rest, piece
            rest.used = False
            self.put_in(rest)
        piece.used = True
        return piece.address

    def merge(self, piece: Piece) -> Piece:
        """Join a piece, which is in no list, with its free neighbours, and enter it."""
        for other in (piece.right, piece.left):
            if other is not None and not other.used:
                self.take_out(other)
                first, second = (piece, other) if other is piece.right else (other, piece)
                first.size += second.size
                first.right = second.right
                if second.right is not None:
                    second.right.left = first
                del self.pieces[second.address]
                piece = first
        self.put_in(piece)
        return piece

    def free(self, address: int) -> None:
        piece = self.pieces[address]
        piece.used = False
        self.merge(piece)

    def idle(self, pool: object) -> list[Piece]:
        """Free pieces that are whole segments."""
        pieces = (self.pieces[address] for _, address in self.free_pieces.get(pool, []))
        return [piece for piece in pieces if piece.size == piece.whole]


def up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def segment_for(size: int) -> int:
    """TinyTorch and PyTorch: 2 MiB for small blocks, 20 MiB below 10 MiB, else multiples of 2."""
    if size <= MIB:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else up(size, 2 * MIB)


class TinyTorch(Simulator):
    def malloc(self, nbytes: int, stream: int) -> int | None:
        size = 512 if nbytes < 512 else up(nbytes, 512)
        pool = "small" if size <= MIB else "large"
        piece = self.smallest(pool, size)
        if piece is not None:
            self.take_out(piece)
        else:
            piece = self.ask(segment_for(size), pool)
            if piece is None:
                for kind in ("large", "small"):
                    for idle in self.idle(kind):
                        self.give_back(idle)
                piece = self.ask(segment_for(size), pool)
            if piece is None:
                return None
        rest = piece.size - size
        return self.use(piece, size, rest >= 512 if pool == "small" else rest > MIB)


class PyTorch(Simulator):
    def __init__(
        self,
        memory: Memory,
        limit: int | None = None,
        max_split_size: int = UNLIMITED,
        threshold: float = 0.0,
        divisions: int = 0,
        rounding: int = 20 * MIB,
    ) -> None:
        super().__init__(memory, limit)
        self.max_split_size = max_split_size
        self.threshold = threshold
        self.divisions = divisions
        self.rounding = rounding
        self.lookups = {"small": 0, "large": 0}

    def round(self, nbytes: int) -> int:
        if nbytes < 512:
            return 512
        if self.divisions > 1 and nbytes > 512 * self.divisions:
            power = 1 << nbytes.bit_length() - 1
            return nbytes if nbytes == power else up(nbytes, power // self.divisions)
        return up(nbytes, 512)

    def pools(self, kind: str) -> list[object]:
        return sorted(
            (pool for pool in self.free_pieces if pool[0] == kind),  # type: ignore[index]
            key=lambda pool: pool[1],  # type: ignore[index]
        )

    def find(self, pool: tuple[str, int], size: int) -> Piece | None:
        self.lookups[pool[0]] += 1
        piece = self.smallest(pool, size)
        if piece is None:
            return None
        if size < self.max_split_size <= piece.size:
            return None
        if size >= self.max_split_size and piece.size >= size + self.rounding:
            return None
        self.take_out(piece)
        return piece

    def malloc(self, nbytes: int, stream: int) -> int | None:
        if nbytes == 0:
            return 0
        size = self.round(nbytes)
        pool = ("small" if size <= MIB else "large", stream)
        piece = self.find(pool, size)
        if piece is None:
            if self.threshold:
                self.collect()
            wanted = segment_for(size)
            piece = self.ask(wanted, pool)
            if piece is None and self.release_oversize(pool, size):
                piece = self.ask(wanted, pool)
            if piece is None:
                for kind in ("large", "small"):
                    for each in self.pools(kind):
                        for idle in self.idle(each):
                            self.give_back(idle)
                piece = self.ask(wanted, pool)
            if piece is None:
                return None
        rest = piece.size - size
        split = rest >= 512 if pool[0] == "small" else size < self.max_split_size and rest > MIB
        return self.use(piece, size, split)

    def free(self, address: int) -> None:
        piece = self.pieces[address]
        piece.used = False
        self.merge(piece).age_base = self.lookups[piece.pool[0]]  # type: ignore[index]

    def collect(self) -> None:
        """Free the idle large blocks of at least average age until the threshold is met."""
        assert self.limit is not None
        target = self.reserved - int(self.threshold * self.limit)
        if target <= 0:
            return
        idle = [piece for pool in self.pools("large") for piece in self.idle(pool)]
        ages = {piece: self.lookups["large"] - piece.age_base for piece in idle}
        while target > 0 and ages:
            average = sum(ages.values()) / len(ages)
            for piece in [piece for piece, age in ages.items() if age >= average]:
                del ages[piece]
                target -= piece.size
                self.give_back(piece)

    def release_oversize(self, pool: tuple[str, int], size: int) -> bool:
        if self.max_split_size == UNLIMITED:
            return False
        wanted = max(size, self.max_split_size)
        piece = self.smallest(pool, wanted)
        if piece is not None:
            self.give_back(piece)
            return True
        released = 0
        for piece in reversed(self.idle(pool)):
            if piece.size < self.max_split_size or released >= wanted:
                break
            released += piece.size
            self.give_back(piece)
        return released >= wanted


class TensorFlow(Simulator):
    """The BFC allocator: 21 bins, each ordered by (size, address)."""

    def __init__(self, memory: Memory, limit: int, region: int = 2 * MIB) -> None:
        super().__init__(memory, limit)
        self.region = region

    @staticmethod
    def bin_of(size: int) -> int:
        return min(20, (size // 256).bit_length() - 1)

    def put_in(self, piece: Piece) -> None:
        piece.pool = self.bin_of(piece.size)
        super().put_in(piece)

    def find(self, size: int) -> Piece | None:
        for each in range(self.bin_of(size), 21):
            piece = self.smallest(each, size)
            if piece is not None:
                self.take_out(piece)
                return piece
        return None

    def extend(self, size: int) -> Piece | None:
        assert self.limit is not None
        available = (self.limit - self.reserved) // 256 * 256
        if size > available:
            return None
        doubled = False
        while self.region < size:
            self.region *= 2
            doubled = True
        nbytes = min(self.region, available)
        piece = self.ask(nbytes, None)
        while piece is None:
            less = up(int(np.float32(nbytes) * np.float32(0.9)), 256)
            nbytes = min(less, nbytes - 256)
            if nbytes < size:
                return None
            piece = self.ask(nbytes, None)
        if not doubled:
            self.region *= 2
        return piece

    def collect(self, size: int) -> bool:
        assert self.limit is not None
        idle = [piece for each in range(21) for piece in self.idle(each)]
        free = sum(piece.size for piece in idle)
        if not idle or size > self.limit - self.reserved + free:
            return False
        for piece in idle:
            self.give_back(piece)
        return True

    def malloc(self, nbytes: int, stream: int) -> int | None:
        if nbytes == 0:
            return 0
        size = up(nbytes, 256)
        piece = self.find(size) or self.extend(size)
        if piece is None and self.collect(size):
            piece = self.extend(size)
        if piece is None:
            return None
        return self.use(piece, size, piece.size >= 2 * size or piece.size - size >= 128 * MIB)


class Paddle(Simulator):
    """AutoGrowth: any remainder is split off, the caller gets the tail."""

    tail = True

    def __init__(
        self,
        memory: Memory,
        limit: int | None = None,
        alignment: int = 256,
        chunk_size: int = 0,
        free_idle: str = "on_failure",
    ) -> None:
        super().__init__(memory, limit)
        self.alignment, self.chunk_size, self.free_idle = alignment, chunk_size, free_idle

    def release(self) -> None:
        for piece in self.idle(0):
            self.give_back(piece)

    def malloc(self, nbytes: int, stream: int) -> int | None:
        if nbytes == 0:
            return 0
        size = up(nbytes, self.alignment)
        piece = self.smallest(0, size)
        if piece is not None:
            self.take_out(piece)
        else:
            if self.free_idle == "on_miss":
                self.release()
            chunk = max(size, up(self.chunk_size, self.alignment))
            piece = self.ask(chunk, 0)
            if piece is None and self.free_idle != "on_miss":
                self.release()
                piece = self.ask(chunk, 0)
            if piece is None:
                return None
        return self.use(piece, size, True)

    def free(self, address: int) -> None:
        super().free(address)
        if self.free_idle == "at_once":
            self.release()
