"""Launching kernels that use a heap from code under ``torch.compile``.

By default, torch.compile rewrites a launch: it looks for what the kernel writes, and removes a
kernel that seems to write nothing, such as one that stores through addresses that it loaded. Here a
launch becomes an operator of PyTorch's that torch.compile does not look into. Its schema says what
it writes, and a heap counts as written. So no launch is dropped, and launches on one heap keep
their order, those that only read its blocks too.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch

from devalloc.errors import InvalidArgument

__all__ = ["launcher"]

_Function = TypeVar("_Function", bound=Callable[..., None])

_NAMESPACE = "devalloc"
_names: set[str] = set()  # of operators, in this namespace
# An argument of a schema that is written: "Tensor(a0!) heap", "Tensor(a1!)[] rows".
_WRITTEN = re.compile(r"!\)\S* (\w+)")


@overload
def launcher(function: _Function) -> _Function: ...
@overload
def launcher(*, reads: Sequence[str] = ()) -> Callable[[_Function], _Function]: ...
def launcher(
    function: _Function | None = None, *, reads: Sequence[str] = ()
) -> _Function | Callable[[_Function], _Function]:
    """Decorate a function that launches kernels, so that compiled code may call it.

    Under ``torch.compile`` the function is one operator, which is neither dropped nor moved across
    others that use the same heap, and it runs as without. Elsewhere nothing changes: a call is a
    call of the function.

    ::

        @devalloc.launcher(reads=("values",))
        def keep(heap: torch.Tensor, values: torch.Tensor, addrs: torch.Tensor) -> None:
            keep_kernel[(1,)](heap, values, addrs, LANES=128)

        @torch.compile(fullgraph=True)
        def step(values):
            addrs = torch.empty(128, dtype=torch.int64, device=values.device)
            keep(heap.handle, values * 2, addrs)
            return addrs

    Parameters
    ----------
    function : callable
        Its parameters have annotations: `torch.Tensor`, `int`, `float`, `bool`, `str`, or what else
        `torch.library.infer_schema` knows. It returns nothing: the caller makes the tensors that
        it writes. Tensors are passed as arguments, above all `Heap.handle`, and never found in
        global variables or closures. Decorate functions of a module; a decorated function is kept
        until the process ends.
    reads : sequence of str, optional
        Names of parameters that the kernels only read. All other tensors count as written. That is
        always right, but a tensor that is written cannot be a parameter that requires gradients,
        and ``mode="reduce-overhead"`` makes no CUDA graph of code that writes its inputs (handles
        excepted). Never name a heap here, not even if the kernels only read its blocks: that would
        let torch.compile move the launch.

    Returns
    -------
    The function, to be called as before.

    Raises
    ------
    InvalidArgument
        When decorating: if an annotation is missing or not known, if the function returns
        something, if a name in ``reads`` is not that of a tensor, or if no tensor is left that is
        written.

    Notes
    -----
    No gradients flow through the tensors that are written. To define them, launch in the
    ``forward`` and ``backward`` of a `torch.autograd.Function`. No copies are made of the heap or
    of what the graph itself allocates; the calls and the launches are those without compile. In a
    CUDA graph they are replayed without Python.
    """
    if function is None:
        return functools.partial(_launcher, reads=reads)
    return _launcher(function, reads)


def _launcher(function: _Function, reads: Sequence[str]) -> _Function:
    if not inspect.isfunction(function):
        raise InvalidArgument(f"a launcher is a Python function, not {function!r}")
    operator = _define(function, _written(function, reads))

    @functools.wraps(function)
    def launch(*args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            operator(*args, **kwargs)
        else:
            function(*args, **kwargs)

    return launch  # type: ignore[return-value]


def _written(function: Callable[..., None], reads: Sequence[str]) -> list[str]:
    """The names of the tensors that a launcher counts as written."""
    if isinstance(reads, str) or not isinstance(reads, Sequence):
        raise InvalidArgument(f'reads is a sequence of names, such as ("values",), not {reads!r}')
    try:
        schema = torch.library.infer_schema(function, mutates_args="unknown")
    except ValueError as error:
        raise InvalidArgument(
            f"{function.__qualname__} cannot be a launcher: each parameter has an annotation such "
            f"as torch.Tensor or int, and the function returns None. {error}"
        ) from error
    if not schema.endswith("-> ()"):
        raise InvalidArgument(
            f"{function.__qualname__} cannot be a launcher: it returns something; pass it tensors "
            "to write to, and annotate it with -> None"
        )
    tensors = _WRITTEN.findall(schema)
    for name in reads:
        if name not in tensors:
            raise InvalidArgument(
                f"{function.__qualname__} has no tensor {name!r}; its tensors are {tensors}"
            )
    written = [name for name in tensors if name not in reads]
    if not written:
        raise InvalidArgument(
            f"{function.__qualname__} would write nothing, and torch.compile would drop it: a heap "
            "counts as written, so leave it out of reads"
        )
    return written


def _define(function: Callable[..., None], written: Sequence[str]) -> Callable[..., None]:
    """A new operator that calls the function."""
    name = f"launch_{function.__module__}_{function.__qualname__}"
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    while name in _names:  # of another local function
        name += "_"
    _names.add(name)
    try:
        torch.library.custom_op(f"{_NAMESPACE}::{name}", function, mutates_args=written)
    except NotImplementedError as error:
        raise InvalidArgument(f"{function.__qualname__} cannot be a launcher: {error}") from error
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def mark_static(handle: torch.Tensor) -> None:
    """Mark a tensor as static for torch.compile: CUDA graphs of compiled code may write
    it, and do not copy it. With another handle they are recorded again."""
    # `torch._dynamo.mark_static_address` does this and no more, but its import takes a second.
    handle._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


@torch.library.custom_op(f"{_NAMESPACE}::refuse", mutates_args=("handle",))
def refuse(handle: torch.Tensor, reason: str) -> None:
    """In compiled code: raise when it runs, not while it is compiled."""
    raise InvalidArgument(reason)
