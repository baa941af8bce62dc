"""Python functions as the C functions that PyTorch's allocators are made of.

PyTorch may free a tensor while a Python exception is pending: when an operation on a temporary
fails, the interpreter drops the temporary before anything handles the error. Callbacks made by
ctypes do not work then. Python code that runs with an exception set fails at its first call into C,
so the block is lost, and the error that ctypes makes of that replaces the pending
exception. So the functions are real C functions, in ``bridge.c``, which sets the exception aside
and puts it back.

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
    from devalloc.arena.policies.policy import FrontRule

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
    """The front of one device, in the C functions of one purpose: see `devalloc.arena.cache.front`.

    Parameters
    ----------
    purpose : str
        That of `connect`, which was called before.
    device : int
        The index by which the C functions are called; less than 64.
    unit : int
        Bytes: requests that are equal when rounded up to this have blocks of the same size.
    zero_is_null : bool
        Whether a request for no bytes is answered with NULL at once, also while the front is off.
    """

    def __init__(self, purpose: str, device: int, unit: int, zero_is_null: bool) -> None:
        self._module = _MODULES[purpose]
        self._device = device
        self._module.front_open(device, unit, zero_is_null)

    def start(self, rule: FrontRule, homes: bytes, blocks: bytes) -> bool:
        return self._module.front_start(self._device, tuple(rule), homes, blocks)

    def stop(self) -> None:
        self._module.front_stop(self._device)

    def blocks(self) -> bytes:
        return self._module.front_blocks(self._device)

    def read_log(self, everything: bool) -> bytes:
        return self._module.front_read_log(self._device, everything)

    def malloc(self, nbytes: int, size: int, index: int, stream: int) -> int:
        return self._module.front_malloc(self._device, nbytes, size, index, stream)

    def free(self, address: int) -> bool:
        return self._module.front_free(self._device, address)

    def share(self, address: int, stream: int) -> int | None:
        return self._module.front_share(self._device, address, stream)

    def counts(self) -> dict[str, int]:
        """For tests: whether it serves, the blocks in use, and the plans that it knows."""
        names = ("on", "used", "plans")
        return dict(zip(names, self._module.front_counts(self._device), strict=True))
