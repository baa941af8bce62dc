"""An adaptor that logs every call to a file that RMM's tools and ``devalloc replay`` read."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path

from devalloc.errors import DevallocError, InvalidArgument
from devalloc.sizes import quote
from devalloc.sources.adaptors.adaptor import Adaptor
from devalloc.sources.source import Source, require_free, require_request

LOG_COLUMNS = ("Thread", "Time", "Action", "Pointer", "Size", "Stream")
"""The columns, RMM's."""


class LogAdaptor(Adaptor):
    """Writes one CSV row for each call: ``Thread,Time,Action,Pointer,Size,Stream``.

    Time is in seconds since 1970, with microseconds; Size is in bytes; Pointer and Stream are
    hexadecimal, and no stream is ``0x0``, as is the default stream. The actions are

    - ``allocate``, and ``allocate failure`` with the pointer ``0x0`` (but impossible requests are
      not logged);
    - ``free``, which is written before the memory goes back, so that the file never shows an
      address given out twice;
    - ``free failure``, which takes back the ``free`` of the same thread before it.

    Use it in a ``with`` block, or close it: by then at the latest all rows are in the file.

    If the file cannot be written (a full disk, for instance), calls are served as before. The log
    ends there, because a log with a hole would show addresses given out twice, and `flush` and
    `close` raise DevallocError from then on.

    Parameters
    ----------
    inner : Source
    path : str or Path
        The file, which is created or emptied. Raises OSError if it cannot be.
    auto_flush : bool
        Flush each row to the file at once: slower, but a crash loses nothing except the rows that
        another thread was about to write.
    """

    def __init__(self, inner: Source, path: str | Path, auto_flush: bool = False) -> None:
        super().__init__(inner)
        self.path = Path(path)
        self.auto_flush = auto_flush
        # A free inside a garbage collection may interrupt a write, which a file does not survive.
        # So rows are queued, and a thread that finds no other one writing writes the queue.
        self._rows: deque[str] = deque()
        self._writing = threading.Lock()
        self._failure: str | None = None
        """Why the log ends early. (An exception would keep alive what its callers have.)"""
        self._file = self.path.open("w", encoding="ascii")
        self._file.write(",".join(LOG_COLUMNS) + "\n")

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        require_request("LogAdaptor", nbytes)
        _require_stream(stream)
        try:
            address = super().allocate(nbytes, stream)
        except BaseException:
            self._row("allocate failure", 0, nbytes, stream)
            raise
        try:
            self._row("allocate", address, nbytes, stream)
        except BaseException:
            # (Ctrl-C, for instance: no caller would know the address.)
            self.free(address, nbytes, stream)
            raise
        return address

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        require_free("LogAdaptor", address, nbytes)
        _require_stream(stream)
        self._row("free", address, nbytes, stream)
        try:
            super().free(address, nbytes, stream)
        except BaseException:
            self._row("free failure", address, nbytes, stream)
            raise

    def _row(self, action: str, address: int, nbytes: int, stream: int | None) -> None:
        thread = threading.get_ident()
        self._rows.append(
            f"{thread},{time.time():.6f},{action},{address:#x},{nbytes},{stream or 0:#x}\n"
        )
        self._write()

    def _write(self) -> None:
        """Write the queue, unless another call is at it, which then writes all of it."""
        # Looked at again after each release: a row may have come after the writer's last look.
        while self._rows and self._writing.acquire(blocking=False):
            try:
                self._drain(self.auto_flush)
            finally:
                self._writing.release()

    def _drain(self, flush: bool) -> None:
        """Write the queue as its only writer. What fails is for `flush` and `close` to report:
        memory has moved already, or a finalizer is running."""
        if self._file.closed or self._failure:
            self._rows.clear()
            return
        try:
            while self._rows:
                self._file.write(self._rows.popleft())
            if flush:
                self._file.flush()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or f"{type(error).__name__}: {error}"

    def _report(self) -> None:
        if self._failure:
            raise DevallocError(
                f"the log {self.path} could not be written and ends early ({self._failure}); the "
                "calls after that were served; log again to another file"
            )

    def flush(self) -> None:
        """Write the rows of all calls that have returned to the file.

        Raises DevallocError if a row, of this or an earlier call, could not be written.
        """
        with self._writing:
            self._drain(flush=True)
        self._write()
        self._report()

    def close(self) -> None:
        """Flush and close the file. Later calls are served but not logged.

        Raises DevallocError if a row could not be written; the file is closed then, too.
        """
        with self._writing:
            self._drain(flush=True)
            try:
                self._file.close()
            except Exception as error:
                self._fail(error)
        self._report()

    def __enter__(self) -> LogAdaptor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _require_stream(stream: object) -> None:
    if stream is not None and type(stream) is not int:
        raise InvalidArgument(
            f"LogAdaptor: a stream is given by its handle, an int, not {quote(stream)}"
        )
