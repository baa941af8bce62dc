"""Reading bytes that somebody else wrote: every failure becomes an `InvalidArgument`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from devalloc.errors import InvalidArgument


@contextlib.contextmanager
def refusing(what: str, path: Path | None = None) -> Iterator[None]:
    """Turn whatever reading foreign bytes raises into an `InvalidArgument` that says why.

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


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no {error}"
    return str(error).partition("\n")[0] or type(error).__name__
