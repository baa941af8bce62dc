"""Parsing and printing sizes, and the table of size classes.

The table is built here by a rule; the device computes the same numbers by arithmetic
(``kernels/layout.py``), and a test checks that the two agree.
"""

from __future__ import annotations

import re
from numbers import Integral
from typing import Any

from devalloc.errors import InvalidArgument

MIB = 1 << 20
PAGE_BYTES = 1 << 16
MAX_SLOT = 1 << 15

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def round_up(nbytes: int, unit: int) -> int:
    """``nbytes`` up to a multiple of ``unit``."""
    return (nbytes + unit - 1) // unit * unit


def parse_size(size: int | str) -> int:
    """Bytes of a size such as ``4096``, ``"64MiB"``, ``"1.5GiB"`` or ``"2 GB"``.

    Parameters
    ----------
    size : int or str
        Bytes (NumPy's integers too), or text: a number, with or without a unit: B, KiB, MiB, GiB,
        TiB (powers of 1024), KB, MB, GB, TB (powers of 1000). Case does not matter.

    Returns
    -------
    int
        The size in bytes, at least 0.

    Raises
    ------
    InvalidArgument
        For negative sizes, unknown units, fractions of a byte, and other types.
    """
    if not isinstance(size, str):
        if not is_integer(size):
            raise InvalidArgument(f"a size is an int or a string such as '64MiB', not {size!r}")
        nbytes = int(size)
        if nbytes < 0:
            raise InvalidArgument(f"a size cannot be negative: {format_size(nbytes)}")
        return nbytes
    match = _SIZE.fullmatch(size)
    unit = match and _UNITS.get(match[2].upper())
    if not match or not unit:
        raise InvalidArgument(
            f"cannot read the size {size!r}: give bytes, or a number with one of B, KiB, MiB, "
            "GiB, TiB, KB, MB, GB, TB, such as '64MiB'"
        )
    whole, _, fraction = match[1].partition(".")
    scale = 10 ** len(fraction)
    try:
        number = int(whole + fraction)
    except ValueError:  # Python reads only some thousands of digits
        raise InvalidArgument(
            f"cannot read a size of {len(whole + fraction)} digits, more than any memory has; "
            "give a number of a few digits and a unit, such as '64MiB'"
        ) from None
    nbytes, rest = divmod(number * unit, scale)
    if rest:
        raise InvalidArgument(f"{size!r} is not a whole number of bytes")
    return nbytes


def format_size(nbytes: int) -> str:
    """`nbytes` as text for people: ``"1.5 GiB"``, ``"640 B"``."""
    if abs(nbytes) >= 1 << 128:  # beyond what a float, or a line, can hold
        return f"about {'-' if nbytes < 0 else ''}2**{nbytes.bit_length()} B"
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"


def quote(value: object) -> str:
    """`repr` of a bad argument, also of numbers with more digits than Python prints."""
    try:
        return repr(value)
    except ValueError:
        return f"a value of type {type(value).__name__} that is too large to print"


def require_power_of_two(what: str, value: object) -> None:
    """Refuse a value that is not an int and a power of two; ``what`` names it in the message."""
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise InvalidArgument(f"{what} must be a power of two, not {quote(value)} B")


def size_option(name: str, value: Any, low: int) -> int:
    """The bytes of an option called ``name``, as an int or as text; refused below ``low``."""
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except InvalidArgument as error:
            raise InvalidArgument(f"{name}: {error}") from error
    require_count(name, value, low)
    return int(value)


def is_integer(value: object) -> bool:
    """Whether a value is an int, of Python or of NumPy, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def require_count(name: str, value: Any, low: int) -> None:
    """Refuse a value that is not an int of at least ``low`` (nor so large that sums overflow)."""
    if not is_integer(value) or not low <= value <= 1 << 62:
        raise InvalidArgument(f"{name} must be an int from {low} to 2**62, not {quote(value)}")


def require_fraction(name: str, value: object, high: float) -> None:
    """Refuse a value that is not a number from 0 to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
        raise InvalidArgument(f"{name} must be a number from 0 to {high}, not {quote(value)}")


def _class_sizes() -> tuple[int, ...]:
    small = [16 * k for k in range(1, 9)]
    middle = [2**e * step // 4 for e in range(7, 13) for step in (5, 6, 7, 8)]
    large = [PAGE_BYTES // pieces // 16 * 16 for pieces in range(7, 1, -1)]
    return tuple(small + middle + large)


CLASS_SIZES = _class_sizes()
"""Slot size of every class in bytes: 16-byte steps to 128 B, four steps per doubling to 8 KiB,
then a page cut in 7, 6, 5, 4, 3 and 2."""

CLASS_SLOTS = tuple(PAGE_BYTES // size for size in CLASS_SIZES)
"""Slots per page of every class."""
