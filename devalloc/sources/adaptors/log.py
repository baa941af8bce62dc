"""An adaptor that logs every call to a file that RMM's tools and ``devalloc replay`` read."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType

from devalloc.sources.adaptors.base import Adaptor
from devalloc.sources.base import Source

LOG_COLUMNS = ("Thread", "Time", "Action", "Pointer", "Size", "Stream")
"""The columns, RMM's."""


class LogAdaptor(Adaptor):
    """Writes one CSV row for each call: ``Thread,Time,Action,Pointer,Size,Stream``.

    Time is in seconds since 1970, with microseconds; Size is in bytes; Pointer and Stream are
    hexadecimal, and no stream is ``0x0``, as is the default stream. The actions are

    - ``allocate``, and ``allocate failure`` with the pointer ``0x0``;
    - ``free``, which is written before the memory goes back, so that the file never shows an
      address given out twice;
    - ``free failure``, which takes back the ``free`` of the same thread before it.

    Use it in a ``with`` block, or close it: by then at the latest all rows are in the file.

    Parameters
    ----------
    inner : Source
    path : str or Path
        The file, which is created or emptied. Raises OSError if it cannot be.
    auto_flush : bool
        Flush each row to the file at once: slower, but a crash loses nothing except the rows of
        calls that came while another thread was writing, which it was about to write too.
    """

    def __init__(self, inner: Source, path: str | Path, auto_flush: bool = False) -> None:
        super().__init__(inner)
        self.path = Path(path)
        self.auto_flush = auto_flush
        # A free inside a garbage collection may interrupt a write, which a file does not survive.
        # So rows are queued, and a thread that finds no other one writing writes the queue.
        self._rows: deque[str] = deque()
        self._writing = threading.Lock()
        self._file = self.path.open("w", encoding="ascii")
        self._file.write(",".join(LOG_COLUMNS) + "\n")

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        try:
            address = super().allocate(nbytes, stream)
        except BaseException:
            self._row("allocate failure", 0, nbytes, stream)
            raise
        self._row("allocate", address, nbytes, stream)
        return address

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
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
                self._drain()
            finally:
                self._writing.release()

    def _drain(self) -> None:
        if self._file.closed:
            self._rows.clear()
            return
        while self._rows:
            self._file.write(self._rows.popleft())
        if self.auto_flush:
            self._file.flush()

    def flush(self) -> None:
        """Write the rows of all calls that have returned to the file."""
        with self._writing:
            self._drain()
            if not self._file.closed:
                self._file.flush()
        self._write()

    def close(self) -> None:
        """Flush and close the file. Later calls are served but not logged."""
        with self._writing:
            self._drain()
            self._file.close()

    def __enter__(self) -> LogAdaptor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
