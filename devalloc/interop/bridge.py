"""Python functions as the C functions that PyTorch's allocators are made of.

PyTorch may free a tensor while a Python exception is pending: when an operation on a temporary
fails, the interpreter drops the temporary before anything handles the error. Callbacks made by
ctypes do not work then. Python code that runs with an exception set fails at its first call into C,
so the block is lost, and the error that ctypes makes of that replaces the exception that was on its
way. So the functions are real C functions, in ``bridge.c``, which sets the exception aside and puts
it back.

The file is compiled at run time, when it is first needed, by the compiler that Triton uses for its
launchers, and kept in Triton's cache: a machine that launches kernels has all that it takes.
"""

from __future__ import annotations

import atexit
import sysconfig
import threading
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from devalloc.errors import DevallocError

if TYPE_CHECKING:
    from devalloc.cache.cache import FrontEntry

_FRONT_BLOCKS = 8192
_ALL = 1 << 62
_MODULES: dict[str, ModuleType] = {}


class Functions(NamedTuple):
    """Addresses of C functions, with the signatures by which PyTorch calls them."""

    malloc: int
    """``void *(size_t nbytes, int device, cudaStream_t stream)``"""
    free: int
    """``void (void *address, size_t nbytes, int device, cudaStream_t stream)``"""
    record_stream: int
    """``void (void *address, cudaStream_t stream)``"""
    reset: int
    """``void (void)``"""


def _compile(name: str) -> ModuleType:
    """Compile and load a separate copy of the C module, which holds one set of callables."""
    source = resources.files(__package__).joinpath("bridge.c").read_text()
    try:
        from triton.runtime.build import compile_module_from_src

        return compile_module_from_src(source.replace("devalloc_bridge", name), name)
    except Exception as error:  # anything from Triton, the user's compiler, or the loader
        folder = Path(sysconfig.get_config_var("INCLUDEPY"))
        missing = "" if (folder / "Python.h").exists() else f"; there is no Python.h in {folder}"
        raise DevallocError(
            f"the C functions for PyTorch could not be compiled: {error}{missing}. Triton compiles "
            "them, as it does its launchers: with CC, or else gcc or clang, and the headers of "
            "Python (python3-dev)"
        ) from error


def connect(
    purpose: str,
    malloc: Callable[[int, int, int], int],
    free: Callable[[int, int, int, int], None],
    record_stream: Callable[[int, int], None] | None = None,
    reset: Callable[[], None] | None = None,
) -> Functions:
    """C functions that call these callables. Call it once for each purpose in a process.

    The callables get the C functions' arguments as integers, NULL as 0. They run on the calling
    thread, with the GIL and with no exception pending. They should not raise: what they raise goes
    to ``sys.unraisablehook``, and the C `malloc` then returns NULL. A C function without a callable
    must not be called. A Ctrl-C waits until the outermost call is over.

    The functions may be called until the process is gone. From `atexit` on they do nothing and
    return NULL, without taking the GIL: the driver takes all memory back.

    Parameters
    ----------
    purpose
        Part of a C identifier, which names the copy of the C module.

    Raises
    ------
    DevallocError
        If the C module cannot be compiled or loaded.
    """
    module = _MODULES.get(purpose) or _compile(f"devalloc_bridge_{purpose}")
    main_thread = threading.main_thread().ident
    addresses = module.connect(main_thread, malloc, free, record_stream, reset)
    _MODULES[purpose] = module
    atexit.register(module.disconnect)
    return Functions(*addresses)


class Front:
    """The front cache of one device, in the C functions of one purpose: see `cache.Front`.

    Parameters
    ----------
    purpose : str
        That of `connect`, which was called before.
    device : int
        The index by which the C functions are called; less than 64.
    unit : int
        Bytes: requests that are equal when rounded up to this share blocks.
    zero_is_null : bool
        Whether a request for no bytes is answered with NULL at once, also while the front is off.
    max_bytes, max_blocks : int
        How much is held at most. When a free exceeds it, everything is given up.
    """

    def __init__(
        self,
        purpose: str,
        device: int,
        unit: int,
        zero_is_null: bool,
        max_bytes: int = _ALL,
        max_blocks: int = _FRONT_BLOCKS,
    ) -> None:
        self._module = _MODULES[purpose]
        self._device = device
        self._module.front_open(device, unit, zero_is_null, max_bytes, max_blocks)

    def switch(self, on: bool, into: list[FrontEntry], nbytes: int = _ALL, least: int = 0) -> None:
        self._module.front_switch(self._device, on, nbytes, least, into)

    def read_log(self, into: list[FrontEntry]) -> bool:
        return self._module.front_read_log(self._device, into)

    def lend(self, address: int, nbytes: int, stream: int, head: int, part: bool) -> None:
        self._module.front_lend(self._device, address, nbytes, stream, head, part)

    def forget(self, address: int) -> bool:
        return self._module.front_exclude(self._device, address, False)

    def forget_stream(self, stream: int) -> None:
        self._module.front_exclude(self._device, stream, True)

    def counts(self) -> dict[str, int]:
        """For tests: blocks that are known, held blocks, their bytes, and their classes."""
        names = ("known", "held", "held_bytes", "classes")
        return dict(zip(names, self._module.front_counts(self._device), strict=True))
