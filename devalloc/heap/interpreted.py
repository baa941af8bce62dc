"""Errors where Triton's interpreter has none: wrong addresses end the process there.

`install` makes every access below the first page that can hold memory an error with the kernel's
line, in all interpreted kernels of the process; and it says what the device code tells the host of
(`devalloc.kernels.target.tell_host`).
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import triton
from triton.runtime.interpreter import InterpreterBuilder, interpreter_builder

from devalloc.errors import InvalidArgument, InvalidPointer
from devalloc.kernels import target

# Linux maps nothing below.
_LEAST_ADDRESS = 1 << 16

# The interpreter's functions for memory: what each does, and which arguments are pointers and mask.
_ACCESSES = {
    "create_masked_load": ("load from", 0, 1),
    "create_masked_store": ("store to", 0, 2),
    "create_atomic_rmw": ("atomic on", 1, 3),
    "create_atomic_cas": ("atomic on", 0, None),
}

_PACKAGE = Path(__file__).parent.parent
_LIBRARIES = tuple(
    f"{folder}/"
    for folder in (Path(triton.__file__).parent, _PACKAGE, Path(target.__file__).parent)
)


def install() -> None:
    """Do all this from now on; called once."""
    for name, (what, pointers, mask) in _ACCESSES.items():
        plain = getattr(InterpreterBuilder, name)
        setattr(InterpreterBuilder, name, _guarded(plain, what, pointers, mask))
    target.HOST.update(pointer=_raise_for_pointer, handle=_raise_for_handle)


def _guarded(plain: Any, what: str, pointers: int, mask: int | None) -> Any:
    @functools.wraps(plain)
    def access(builder: Any, *args: Any) -> Any:
        low = args[pointers].data < _LEAST_ADDRESS
        if low.any():
            if mask is not None:
                low = low & args[mask].data
            if low.any():
                _raise_for_null(what, args[pointers].data, low)
        return plain(builder, *args)

    return access


def _raise_for_null(what: str, pointers: Any, low: Any) -> NoReturn:
    lane = int(low.ravel().argmax())
    address = int(pointers.ravel()[lane])
    raise InvalidPointer(
        f"{what} address {address:#x}{_lane(lane, pointers.size)} {_where()}: there is no memory; "
        "after a malloc that may fail, mask with addr != 0"
    )


def _raise_for_pointer(
    addr: Any, nbytes: int, block: Any, have: Any, base: Any, lane: Any, lanes: int
) -> NoReturn:
    addr, block, have, base, lane = (_number(x) for x in (addr, block, have, base, lane))
    at = f"{nbytes} bytes at {addr:#x}"
    if addr == 0:
        at = "address 0"
        found = "malloc gave no memory; mask with addr != 0"
    elif have and block <= addr < block + have:
        left = block + have - addr
        found = f"the block of {have} bytes at {block:#x} has only {left} bytes there"
    else:
        found = "there is no live block: it was freed, or never allocated"
    offset = f" (offset {addr - base:#x} of the heap)" if addr >= base else ""
    raise InvalidPointer(f"pointer to {at}{offset}{_lane(lane, lanes)} {_where()}: {found}")


def _raise_for_handle(word: Any) -> NoReturn:
    raise InvalidArgument(
        f"the heap argument of a kernel is not a heap's handle {_where()}: its first word is "
        f"{_number(word):#x}; pass Heap.handle as it is"
    )


def _number(value: Any) -> int:
    return int(value.handle.data.item())


def _lane(lane: int, lanes: int) -> str:
    return f" (lane {lane} of {lanes})" if lanes > 1 else ""


def _where() -> str:
    """Text: the program that runs, and the line of the user's kernel that it is at."""
    x, y, z = interpreter_builder.grid_idx
    width, height, _ = interpreter_builder.grid_dim
    program = f"in program {x + width * (y + height * z)}"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((*_LIBRARIES, "<")):
            return f"{program}, {code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return program
