"""Reading bytes that somebody else wrote: whatever that raises becomes an `InvalidArgument`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from devalloc.errors import InvalidArgument


@contextlib.contextmanager
def refusing(what: str, path: Path | None = None) -> Iterator[None]:
    """Raise what the reading of foreign bytes raises as an `InvalidArgument`, with the reason.

    Damaged bytes make the libraries that read them raise nearly anything, so no list of exceptions
    is complete. What the machine cannot do, an OSError with a number, passes as it is.

    Parameters
    ----------
    what : str
        What is wrong if something is raised: "damaged, or no trace".
    path : Path, optional
        Said first, also before an `InvalidArgument` from within, which otherwise passes as it is.

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
