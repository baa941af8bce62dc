"""Reading bytes that another program wrote: every failure becomes an `InvalidArgument`."""

from __future__ import annotations

import contextlib
import gzip
import json
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path

from devalloc.errors import InvalidArgument


@contextlib.contextmanager
def refusing(what: str, path: Path | None = None) -> Iterator[None]:
    """Turn any error from reading foreign bytes into an `InvalidArgument` that says why.

    Libraries raise nearly anything when the bytes they read are damaged, so no list of exceptions
    would be complete. Failures of the machine, OSErrors with a number, pass unchanged.

    Parameters
    ----------
    what : str
        What is wrong if anything is raised, such as "damaged, or no trace".
    path : Path, optional
        Put in front of every message, also of an `InvalidArgument` raised in the block, which
        passes unchanged without a path.

    Raises
    ------
    InvalidArgument
    """
    place = "" if path is None else f"{path}: "
    try:
        yield
    except InvalidArgument as error:
        if not place:
            raise
        raise InvalidArgument(f"{place}{error}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InvalidArgument(f"{place}{what}: {_reason(error)}") from error


OF_PYTHON = (
    "invalid literal",
    "could not convert",
    "cannot convert",
    "Exceeds the limit",
    "not enough values",
    "too many values",
)
"""How Python begins what it says of a value that is no number, or of a row that is too short."""


def _reason(error: Exception) -> str:
    """What is wrong with the bytes; not what Python says of its own objects."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, StopIteration | EOFError):
        return "it ends too early"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.object[error.start]:#04x} at {error.start} is no {error.encoding} text"
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON from column {error.colno} on"
    if isinstance(error, zlib.error | gzip.BadGzipFile):
        return "what is compressed in it is damaged"
    text = str(error).partition("\n")[0]
    if isinstance(error, pickle.UnpicklingError) and text.startswith("invalid load key"):
        return "no pickle, or a damaged one"
    if isinstance(error, TypeError | AttributeError | IndexError | OverflowError | RecursionError):
        return "a value in it is not of the kind that belongs there"
    if isinstance(error, ValueError) and text.startswith(OF_PYTHON):
        return "a value in it is not a number that belongs there"
    return text or type(error).__name__


def whole_number(text: str, what: str, base: int = 10) -> int:
    """The number that a field of a text file holds.

    Raises
    ------
    ValueError
        If it is none; the message says what the field is and what it holds.
    """
    try:
        return int(text, base)
    except ValueError:
        shown = repr(text if len(text) <= 20 else text[:20] + "...")
        kind = "a whole number" if base == 10 else f"a number to base {base}"
        raise ValueError(f"the {what} is {shown}, not {kind}") from None
