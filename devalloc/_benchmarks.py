"""Find the folder ``benchmarks/``, which is not installed: it belongs to a checkout.

The benchmarks read targets and the rows of other allocators from files beside them, write result
files, and put their tables into the documents of the checkout; a wheel has none of these.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from devalloc.errors import DevallocError

CHECKOUT = Path(__file__).resolve().parent.parent
"""The checkout that this package is part of, unless it is installed from a wheel."""


def has_benchmarks(root: Path = CHECKOUT) -> bool:
    """Whether there is a checkout with benchmarks."""
    return (root / "pyproject.toml").is_file() and (root / "benchmarks" / "__init__.py").is_file()


def load_benchmark(name: str, root: Path | None = None) -> ModuleType:
    """Import a module of ``benchmarks/`` from the checkout that this package is part of.

    Parameters
    ----------
    name : str
        Such as ``"device.bench_device"``.
    root : Path, optional
        Folder of the checkout. Default: the one that contains this package.

    Raises
    ------
    DevallocError
        If there is no such checkout, or another package named benchmarks is imported instead.
    """
    root = root or CHECKOUT
    folder = root / "benchmarks"
    file = folder.joinpath(*name.split(".")).with_suffix(".py")
    if not file.is_file():
        raise DevallocError(
            f"the benchmarks are not installed with devalloc, and {folder} does not have them: "
            "clone the repository and install it with pip install -e ."
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    module = importlib.import_module(f"benchmarks.{name}")
    found = Path(str(module.__file__)).resolve()
    if found != file:
        raise DevallocError(f"another package is named benchmarks: {found}, not {file}")
    return module
