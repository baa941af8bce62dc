"""Make Triton's interpreter (3.6 to 3.9) faster: compute once what it computes repeatedly.

Every replacement gives the same results as the function that it replaces, and calls that function
for everything it does not know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_BUILDER = interpreter.interpreter_builder
_SEMANTIC = TritonSemantic(_BUILDER)

# Kernels use few types and constants; a table that grows beyond this is emptied.
_MOST_REMEMBERED = 1 << 16

# The code of the wrapper by `tl.core.builtin`, which only checks that there is a semantic.
_BUILTIN_CODE = core.builtin(lambda: None).__code__


def _remembering_tensor(
    plain: Callable[[Any, Any, Any], None],
) -> Callable[[Any, Any, Any], None]:
    """``tl.tensor.__init__``: it derives everything but the handle from the type, here once."""

    def init(self: Any, handle: Any, type: Any) -> None:
        fields = type.__dict__.get("_tensor_fields")
        if fields is None:
            plain(self, handle, type)
            fields = {name: value for name, value in vars(self).items() if name != "handle"}
            type._tensor_fields = fields
        else:
            vars(self).update(fields)
            self.handle = handle

    return init


def _remembering_element(
    plain: Callable[[Any, Any], Any],
) -> Callable[[Any, Any], Any]:
    """``tl.block_type.with_element_ty``, with one object for each shape and element type."""

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        known = self.__dict__.setdefault("_with_element_ty", {})
        pair = known.get(id(scalar_ty))
        if pair is None:
            pair = known[id(scalar_ty)] = (scalar_ty, plain(self, scalar_ty))
        return pair[1]

    return with_element_ty


def _remembering_dtype(plain: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    """``_get_np_dtype``, which otherwise makes a table of all types in each call."""
    known: dict[str, np.dtype] = {}

    def get(dtype: Any) -> np.dtype:
        if dtype.name not in known:
            known[dtype.name] = plain(dtype)
        return known[dtype.name]

    return get


def _remembering_common_type(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``TritonSemantic.computation_type_impl``: the type in which an operation is computed."""
    known: dict[tuple[Any, ...], Any] = {}

    def common(self: Any, a: Any, *rest: Any) -> Any:
        key = (a.name, *(value.name if isinstance(value, tl.dtype) else value for value in rest))
        if key not in known:
            known[key] = plain(self, a, *rest)
        return known[key]

    return common


def _remembering_operands(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``TritonSemantic.binary_op_type_checking_impl`` and similar functions, which bring two
    operands to a common type and shape.

    The results depend on the types of tensors and on the values of numbers. Tensors that came out
    unchanged do so again, and an integer becomes the same constant again.
    """
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def operands(self: Any, lhs: Any, rhs: Any, *flags: Any) -> Any:
        left = lhs.type.name if type(lhs) is tl.tensor else lhs
        right = rhs.type.name if type(rhs) is tl.tensor else rhs
        # (Only int itself: True and 1.0 equal 1 but become other constants.)
        if type(left) not in (str, int) or type(right) not in (str, int):
            return plain(self, lhs, rhs, *flags)
        key = (left, right, flags)
        found = known.get(key)
        if found:
            left, right = found
            return lhs if left is None else left, rhs if right is None else right
        results = plain(self, lhs, rhs, *flags)
        if found is None:
            if len(known) >= _MOST_REMEMBERED:
                known.clear()
            known[key] = _reusable((lhs, rhs), results)
        return results

    return operands


def _reusable(given: tuple[Any, Any], results: tuple[Any, Any]) -> tuple[Any, ...]:
    """For each operand, the constant that it became, or None if it is a tensor that stayed as it
    was. Empty if a tensor was changed, which must be done each time."""
    found = []
    for operand, result in zip(given, results, strict=True):
        if type(operand) is int:
            found.append(result)
        elif result is operand:
            found.append(None)
        else:
            return ()
    return tuple(found)


def _call_builtins_directly(scope: Any) -> None:
    """Call the function behind each builtin directly.

    The interpreter wraps it in a function that passes the semantic, and the library in one that
    checks that this was done.
    """
    # (In all of these: nested calls of earlier launches have left their wrappers behind.)
    for target in (tl, core, tl.math, tl.tensor):
        for name, patched in list(vars(target).items()):
            member = (getattr(patched, "__kwdefaults__", None) or {}).get("member")
            if member is not None and getattr(member, "__code__", None) is _BUILTIN_CODE:
                scope.set_attr(target, name, _with_semantic(member.__wrapped__))


def _with_semantic(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return function(*args, _semantic=_SEMANTIC, **kwargs)

    return call


def _quick_equality(plain: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or plain(self, other)


def hasten(scope: Any) -> None:
    """Replace functions that compute the same things repeatedly, until the scope is restored.

    Overflow checks are left out: they are asserts, which are off unless the interpreter is in debug
    mode.
    """
    scope.set_attr(tl.tensor, "__init__", _remembering_tensor(tl.tensor.__init__))
    element = _remembering_element(tl.block_type.with_element_ty)
    scope.set_attr(tl.block_type, "with_element_ty", element)
    scope.set_attr(tl.dtype, "__eq__", _quick_equality(tl.dtype.__eq__))
    common = _remembering_common_type(TritonSemantic.computation_type_impl)
    scope.set_attr(TritonSemantic, "computation_type_impl", common)
    for check in ("binary_op_type_checking_impl", "bitwise_op_type_checking_impl"):
        operands = _remembering_operands(getattr(TritonSemantic, check))
        scope.set_attr(TritonSemantic, check, operands)
    # In the interpreter a type is its own IR type.
    scope.set_attr(tl.block_type, "to_ir", lambda self, builder: self)
    dtypes = _remembering_dtype(interpreter._get_np_dtype)
    scope.set_attr(interpreter, "_get_np_dtype", dtypes)
    options = _BUILDER.options
    if not options.debug:
        unchecked = dataclasses.replace(options, sanitize_overflow=False)
        scope.set_attr(_BUILDER, "options", unchecked)
    _call_builtins_directly(scope)
