"""Backups on disk: files without a name, which end with the process.

A file that has no name needs no cleaning up: when the process ends, even by SIGKILL, its blocks
return to the file system. No other process can open it by a name.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from pathlib import Path

from devalloc.errors import DevallocError, InvalidArgument, OutOfMemory
from devalloc.sizes import format_size, quote

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
"""What the system answers where files must have names."""
_IN_RAM = ("tmpfs", "ramfs")


def existing_directory(path: object) -> str:
    """The path of a folder for backups; InvalidArgument if it cannot be one."""
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidArgument(f"a folder for backups is given by its path, not {quote(path)}")
    name = os.path.realpath(os.fsdecode(path))
    if not os.path.isdir(name):
        raise InvalidArgument(f"there is no folder {name!r} for backups; make it first")
    if not os.access(name, os.W_OK | os.X_OK):
        raise InvalidArgument(f"the folder {name!r} for backups cannot be written; choose another")
    return name


def is_in_ram(directory: str) -> bool:
    """Whether what is written to a folder stays in memory."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number and kind.split()[0] in _IN_RAM:
            return True
    return False


class BackupFile:
    """``nbytes`` on disk, allocated at once: a full disk is found before anything is written.

    Raises
    ------
    OutOfMemory
        If the disk has not so much room.
    DevallocError
        If the file cannot be made for another reason.
    """

    def __init__(self, directory: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self._directory = directory
        try:
            self._file = _open_unnamed(directory)
            self._close = weakref.finalize(self, os.close, self._file)
            os.posix_fallocate(self._file, 0, nbytes)
        except OSError as error:
            self.close()
            raise self._failed(error) from error

    def close(self) -> None:
        """Give the disk's room back."""
        close = getattr(self, "_close", None)  # there is none if the file could not be opened
        if close is not None:
            close()

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of ``data``; raises as making the file does."""
        try:
            while data:
                done = os.pwrite(self._file, data, offset)
                offset, data = offset + done, data[done:]
        except OSError as error:
            raise self._failed(error) from error

    def sync(self) -> None:
        """Wait for the disk, which may report only now that it failed."""
        try:
            os.fsync(self._file)
            # The pages that are cached are memory that the host may need.
            os.posix_fadvise(self._file, 0, self.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._failed(error) from error

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into``; DevallocError if the disk does not give the bytes."""
        try:
            while into:
                done = os.preadv(self._file, [into], offset)
                if done == 0:
                    raise OSError(errno.EIO, "the file has become shorter")
                offset, into = offset + done, into[done:]
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> DevallocError:
        text = f"a backup of {format_size(self.nbytes)} in {self._directory!r}: {error.strerror}"
        if error.errno not in _FULL:
            return DevallocError(text)
        return OutOfMemory(f"{text}; make room there, or set backup_directory to a larger disk")


def _open_unnamed(directory: str) -> int:
    """A new file of mode 0600 that no folder lists."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_UNNAMED:
            raise
    file, path = tempfile.mkstemp(prefix="devalloc-", dir=directory)
    os.unlink(path)
    return file
