"""What depends on the inside of Triton's interpreter (3.6 to 3.9), together with `_hasten`.

A *session* patches the language once, lets nested ``@triton.jit`` functions be called directly
(the interpreter patches the language again for each of those calls), and passes every access to
memory to the code that steers the programs. Outside of steered programs launches work as usual,
only faster.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, TensorHandle

from devalloc.errors import InvalidArgument
from devalloc.testing._hasten import hasten

_BUILDER = interpreter.interpreter_builder
_LIBRARY = str(Path(triton.__file__).parent)
_OWN = str(Path(__file__).parent)

# The bytes that an atomic returns in masked-off lanes: undefined on a GPU, here always the same.
_POISON = 0xA5

# Hook of the running session: (kind, pointers, bytes per element, writes, run, lanes, dtype).
AccessHook = Callable[..., Any]


class Result(TensorHandle):
    """What an access returned, fetched when a program first looks at it.

    A value that a program never looks at cannot change what it does next, so code that remembers a
    program's behaviour need not distinguish such values.
    """

    def __init__(self, fetch: Callable[[], np.ndarray], dtype: tl.dtype) -> None:
        self.dtype = dtype
        self.attr: dict[str, Any] = {}
        self._fetch: Callable[[], np.ndarray] | None = fetch
        self._data: np.ndarray | None = None

    @property
    def data(self) -> np.ndarray:
        if self._fetch is not None:
            self._data, self._fetch = self._fetch(), None
        assert self._data is not None
        return self._data

    @data.setter
    def data(self, value: np.ndarray) -> None:
        self._data, self._fetch = value, None


class Lanes:
    """Which elements of a block take part in an access, and where their results go."""

    def __init__(self, mask: np.ndarray, shape: tuple[int, ...], fill: np.ndarray | None) -> None:
        self.shape = shape
        self.mask = np.broadcast_to(mask, shape).ravel().astype(bool)
        self.all = bool(self.mask.all())
        self.fill = fill

    def compress(self, values: np.ndarray) -> np.ndarray:
        flat = np.broadcast_to(values, self.shape).ravel()
        return flat if self.all else flat[self.mask]

    def expand(self, values: np.ndarray) -> np.ndarray:
        if self.all:
            return values.reshape(self.shape)
        if self.fill is None:
            full = np.frombuffer(bytes([_POISON]) * (self.mask.size * values.itemsize), np.uint8)
            full = full.view(values.dtype).copy()
        else:
            full = np.broadcast_to(self.fill, self.shape).astype(values.dtype).ravel()
        full[self.mask] = values
        return full.reshape(self.shape)


def _ones(count: int) -> TensorHandle:
    return TensorHandle(np.ones(count, dtype=bool), tl.int1)


# Operands that change no word, of any value: such an access only reads.
_NEUTRAL = {
    ir.ATOMIC_OP.ADD: 0,
    ir.ATOMIC_OP.OR: 0,
    ir.ATOMIC_OP.XOR: 0,
    ir.ATOMIC_OP.AND: -1,
}


def _only_looks(operation: Any, values: np.ndarray) -> bool:
    neutral = _NEUTRAL.get(operation)
    if neutral is None or values.dtype.kind not in "iu":
        return False
    return bool((values == np.array(neutral).astype(values.dtype)).all())


class _Hooks:
    """The builder's four entry points to memory, replaced while a session is open."""

    NAMES = (
        "create_masked_load",
        "create_masked_store",
        "create_atomic_rmw",
        "create_atomic_cas",
    )

    def __init__(self, steered: Callable[[], AccessHook | None]) -> None:
        self.steered = steered
        self.plain = {name: getattr(_BUILDER, name) for name in self.NAMES}

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        plain = self.plain["create_masked_load"]
        hook = self.steered()
        if hook is None:
            return plain(ptrs, mask, other, *rest)
        where = ptrs.data
        fill = np.zeros(1) if other is None else other.data
        lanes = Lanes(mask.data, where.shape, fill)
        dtype = ptrs.get_element_ty()

        def run(pointers: np.ndarray) -> np.ndarray:
            handle = TensorHandle(pointers, ptrs.dtype)
            return plain(handle, _ones(pointers.size), None, *rest).data

        size = max(1, dtype.primitive_bitwidth // 8)
        return hook("load", lanes, where, (), run, size=size, writes=False, dtype=dtype)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        plain = self.plain["create_masked_store"]
        hook = self.steered()
        if hook is None:
            return plain(ptrs, value, mask, *rest)
        where, values = ptrs.data, value.data
        lanes = Lanes(mask.data, where.shape, None)

        def run(pointers: np.ndarray, stored: np.ndarray) -> np.ndarray:
            plain(
                TensorHandle(pointers, ptrs.dtype),
                TensorHandle(stored, value.dtype),
                _ones(pointers.size),
                *rest,
            )
            return pointers[:0]

        size = values.itemsize
        return hook("store", lanes, where, (values,), run, size=size, writes=True, dtype=None)

    def create_atomic_rmw(
        self, operation: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        plain = self.plain["create_atomic_rmw"]
        hook = self.steered()
        if hook is None:
            return plain(operation, ptr, val, mask, sem, scope)
        where, values = ptr.data, val.data
        lanes = Lanes(mask.data, where.shape, None)

        def run(pointers: np.ndarray, operands: np.ndarray) -> np.ndarray:
            return plain(
                operation,
                TensorHandle(pointers, ptr.dtype),
                TensorHandle(operands, val.dtype),
                _ones(pointers.size),
                sem,
                scope,
            ).data

        return hook(
            f"atomic_{operation.name.lower()}",
            lanes,
            where,
            (values,),
            run,
            size=values.itemsize,
            writes=not _only_looks(operation, values),
            dtype=val.dtype.scalar,
        )

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        plain = self.plain["create_atomic_cas"]
        hook = self.steered()
        if hook is None:
            return plain(ptr, cmp, val, sem, scope)
        where, expected, desired = ptr.data, cmp.data, val.data
        lanes = Lanes(np.ones(1, dtype=bool), where.shape, None)

        def run(pointers: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
            return plain(
                TensorHandle(pointers, ptr.dtype),
                TensorHandle(old, cmp.dtype),
                TensorHandle(new, val.dtype),
                sem,
                scope,
            ).data

        return hook(
            "atomic_cas",
            lanes,
            where,
            (expected, desired),
            run,
            size=expected.itemsize,
            writes=True,
            dtype=cmp.dtype.scalar,
        )


def _call_directly(function: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """A nested call, without patching the language again."""
    rewritten = function.__dict__.get("_rewritten_once")
    if rewritten is None:
        rewritten = function.__dict__["_rewritten_once"] = function.rewrite()
    return rewritten(*args, **kwargs)


def _language() -> tuple[Any, Any]:
    """The modules that a session patches: Triton finds them in the globals of this function."""
    return tl, core


@contextmanager
def session(steered: Callable[[], AccessHook | None]) -> Iterator[None]:
    """Patch the language and the interpreter's accesses to memory until the end of the block.

    ``steered()`` returns the hook of the running program, or None outside of programs.
    """
    hooks = _Hooks(steered)
    nested = InterpretedFunction.__call__
    before = {name: vars(_BUILDER).get(name) for name in (*hooks.NAMES, "grid_idx", "grid_dim")}
    scope = interpreter._patch_lang(_language)
    try:
        hasten(scope)
        for name in hooks.NAMES:
            setattr(_BUILDER, name, getattr(hooks, name))
        InterpretedFunction.__call__ = _call_directly
        yield
    finally:
        InterpretedFunction.__call__ = nested
        for name, value in before.items():
            if value is None and name in hooks.NAMES:
                delattr(_BUILDER, name)
            else:
                setattr(_BUILDER, name, value)
        scope.restore()


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Let interpreted kernels run five to ten times as fast until the end of the block.

    The interpreter patches the language again in each call of a nested ``@triton.jit`` function,
    makes the same types repeatedly, and computes for each operation how its operands convert to one
    type; within the block that is done once. Integer overflow is not checked, which makes no
    difference unless the interpreter is in debug mode. Like the interpreter, this is not
    thread-safe. Blocks may be nested, and `Interleaving` may be used inside.
    """
    with session(lambda: None):
        yield


def bind(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[[], Callable[[], None]], list[Any]]:
    """A function that, inside a session, returns the body of one program of a launch; and the
    launch's tensor arguments.

    Raises InvalidArgument for a kernel that is not interpreted, wrong arguments, or tensors that
    are not on the CPU.
    """
    if not isinstance(kernel, InterpretedFunction):
        raise InvalidArgument(
            f"{getattr(kernel, '__name__', kernel)!r} is not an interpreted kernel: set "
            "TRITON_INTERPRET=1 before the module with the kernel is imported"
        )
    known = inspect.signature(kernel.fn).parameters
    # Options of the compiler, such as num_warps, mean nothing here.
    named = {name: value for name, value in kwargs.items() if name in known}
    try:
        values = inspect.getcallargs(kernel.fn, *args, **named)
    except TypeError as error:
        raise InvalidArgument(f"cannot launch {kernel.__name__}: {error}") from error
    tensors = [value for value in values.values() if hasattr(value, "data_ptr")]
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise InvalidArgument(f"tensors lie on the CPU here, not on {tensor.device}")
    constants = set(GridExecutor(kernel.fn, kernel.arg_names, grid).constexprs)

    def body() -> Callable[[], None]:
        given = {
            name: value if name in constants else interpreter._implicit_cvt(value)
            for name, value in values.items()
        }
        return functools.partial(kernel.rewrite(), **given)

    return body, tensors


def enter_program(grid: tuple[int, int, int], index: tuple[int, int, int]) -> None:
    """Make ``tl.program_id`` and ``tl.num_programs`` those of one program."""
    _BUILDER.set_grid_dim(*grid)
    _BUILDER.set_grid_idx(*index)


def call_stack() -> tuple[tuple[str, int, str], ...]:
    """Where the running program is: (file, line, function) in the kernel, innermost first."""
    frames = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_LIBRARY, _OWN)) and not file.startswith("<"):
            frames.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(frames)
