"""Steered programs: each runs to its next access to memory and waits there.

A program is deterministic: what it does next follows from what it has seen. So its behaviour is
remembered as a tree. A node is an access that the program makes, or a look at what an access
returned; a look has a branch for every value seen there. Running a program along a known path costs
nothing but its accesses. The interpreter runs only where the tree ends, in a coroutine that is
first fed with the results so far. Results that no program looks at make no branches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    from greenlet import getcurrent, greenlet
except ImportError as error:
    raise ImportError(
        "devalloc.testing needs the package greenlet: pip install 'devalloc[testing]'"
    ) from error

from devalloc.testing import _interpreter
from devalloc.testing._interpreter import Lanes, Result
from devalloc.testing._memory import Memory


class Access:
    """One access to memory: ``run()`` performs it and returns the values of its elements."""

    __slots__ = ("kind", "pointers", "run", "size", "stack", "words", "writes")

    def __init__(
        self,
        kind: str,
        pointers: list[int],
        size: int,
        words: tuple[int, ...],
        writes: bool,
        run: Callable[[], np.ndarray],
        stack: tuple[tuple[str, int, str], ...],
    ) -> None:
        self.kind = kind
        self.pointers = pointers
        self.size = size
        self.words = words
        self.writes = writes
        self.run = run
        self.stack = stack


class Node:
    """A point in a program's behaviour: an access, a look at result ``index``, or the end.

    ``waiting``, at an access, is the earlier results that the program has not looked at and still
    can. ``serial`` numbers the points of a program.
    """

    __slots__ = ("access", "branches", "error", "index", "serial", "waiting")

    def __init__(
        self,
        serial: int,
        access: Access | None = None,
        waiting: tuple[int, ...] = (),
        index: int = -1,
        error: BaseException | None = None,
    ) -> None:
        self.serial = serial
        self.access = access
        self.waiting = waiting
        self.index = index
        self.error = error
        self.branches: dict[bytes | None, Node] = {}


class Program:
    """One program of a launch, and the tree of what it has been seen to do."""

    def __init__(
        self,
        name: str,
        body: Callable[[], Callable[[], None]],
        grid: tuple[int, int, int],
        index: tuple[int, int, int],
        memory: Memory,
        split_blocks: bool,
    ) -> None:
        self.name = name
        self.body = body
        self.grid = grid
        self.index = index
        self.memory = memory
        self.split_blocks = split_blocks
        self.trunk = Node(-1)
        self.nodes = 0
        self.interpreted = 0

    def grow(self, parent: Node, key: bytes | None, **fields: Any) -> Node:
        self.nodes += 1
        node = parent.branches[key] = Node(self.nodes, **fields)
        return node


class Cursor:
    """Where a program is in one run: a node (the next access, or the end), and what its accesses so
    far returned."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.results: list[np.ndarray] = []
        self.node = program.trunk
        self._live: _Live | None = None
        self._follow(program.trunk, None)

    @property
    def finished(self) -> bool:
        return self.node.access is None

    @property
    def access(self) -> Access:
        access = self.node.access
        assert access is not None
        return access

    def accept(self, result: np.ndarray) -> None:
        """Note that the access was performed and returned ``result``; go on to the next."""
        self.results.append(result)
        self._follow(self.node, None)

    def _follow(self, parent: Node, key: bytes | None) -> None:
        while True:
            node = parent.branches.get(key)
            if node is None:
                if self._live is None:
                    self._live = _Live(self)
                self.node = self._live.resume()
                if self.finished:
                    self._live = None
                return
            if node.index < 0:
                self.node = node
                return
            parent, key = node, self.results[node.index].tobytes()

    def state(self) -> tuple[Any, ...]:
        """A key that is equal for equal futures, as far as the program itself decides them."""
        waiting = self.node.waiting
        if not waiting:
            return (self.node.serial,)
        return (self.node.serial, *(self.results[index].tobytes() for index in waiting))

    def mark(self) -> tuple[Node, int]:
        return self.node, len(self.results)

    def rewind(self, mark: tuple[Node, int]) -> None:
        self.node, count = mark
        del self.results[count:]
        if self._live is not None and self._live.accesses > count + 1:
            self._live.kill()
            self._live = None

    def kill(self) -> None:
        if self._live is not None:
            self._live.kill()
            self._live = None


class _Live(greenlet):
    """A program that is being interpreted, to grow the tree of its behaviour."""

    def __init__(self, cursor: Cursor) -> None:
        super().__init__()
        self.cursor = cursor
        self.program = cursor.program
        self.accesses = 0  # made or waiting to be made
        self._point: tuple[Node, bytes | None] = (self.program.trunk, None)
        self._pending: list[tuple[tuple[int, ...], weakref.ref[Result]]] = []

    def resume(self) -> Node:
        """Run to the next access whose result is not known, or to the end; returns that node."""
        self.parent = getcurrent()
        _interpreter.enter_program(self.program.grid, self.program.index)
        self.program.interpreted += 1
        node = self.switch()
        assert isinstance(node, Node)
        return node

    def kill(self) -> None:
        if self and not self.dead:
            self.parent = getcurrent()
            self.throw()

    def run(self) -> Node:
        error = None
        try:
            self.program.body()()
        except Exception as failure:
            error = failure
        return self._next(error=error)

    def _next(self, **fields: Any) -> Node:
        parent, key = self._point
        node = parent.branches.get(key)
        if node is None:
            node = self.program.grow(parent, key, **fields)
        return node

    # Called by the interpreter, inside the coroutine ------------------------------------------

    def access(
        self,
        kind: str,
        lanes: Lanes,
        pointers: np.ndarray,
        operands: tuple[np.ndarray, ...],
        run: Callable[..., np.ndarray],
        size: int,
        writes: bool,
        dtype: Any,
    ) -> Result | None:
        where = lanes.compress(pointers).astype(np.uint64)
        given = [lanes.compress(values) for values in operands]
        if self.program.split_blocks:
            pieces = [slice(i, i + 1) for i in range(where.size)]
        else:
            pieces = [slice(None)] if where.size else []
        indices = []
        for piece in pieces:
            part = where[piece], *(values[piece] for values in given)
            indices.append(self._make(kind, part, run, size, writes))
        if dtype is None:
            return None
        if not indices:
            empty = run(where, *given) if kind == "load" else given[0][:0]
            return Result(lambda: lanes.expand(empty), dtype)
        result = Result(lambda: lanes.expand(self._look(tuple(indices))), dtype)
        self._pending.append((tuple(indices), weakref.ref(result)))
        return result

    def _make(
        self,
        kind: str,
        part: tuple[np.ndarray, ...],
        run: Callable[..., np.ndarray],
        size: int,
        writes: bool,
    ) -> int:
        parent, key = self._point
        node = parent.branches.get(key)
        if node is None:
            pointers = part[0].tolist()
            access = Access(
                kind,
                pointers,
                size,
                self.program.memory.words(pointers, size),
                writes,
                lambda: run(*part),
                _interpreter.call_stack(),
            )
            self._pending = [pair for pair in self._pending if pair[1]() is not None]
            waiting = tuple(index for indices, _ in self._pending for index in indices)
            node = self.program.grow(parent, key, access=access, waiting=waiting)
        index = self.accesses
        self.accesses += 1
        self._point = (node, None)
        if index >= len(self.cursor.results):
            self.parent.switch(node)
        return index

    def _look(self, indices: tuple[int, ...]) -> np.ndarray:
        self._pending = [pair for pair in self._pending if pair[0] != indices]
        values = [self.cursor.results[index] for index in indices]
        for index, value in zip(indices, values, strict=True):
            parent, key = self._point
            node = parent.branches.get(key)
            if node is None:
                node = self.program.grow(parent, key, index=index)
            self._point = (node, value.tobytes())
        return values[0] if len(values) == 1 else np.concatenate(values)


def steered() -> _interpreter.AccessHook | None:
    """The hook of the running program; None outside of programs."""
    current = getcurrent()
    return current.access if isinstance(current, _Live) else None
