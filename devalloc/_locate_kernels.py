"""Find the device code when Python runs from a source checkout.

The device code is in the top-level folder ``kernels/`` and is installed as the package
``devalloc.kernels``. A wheel therefore holds ``devalloc/kernels/``; a checkout holds ``devalloc/``
and ``kernels/`` side by side. Python started in the checkout imports the folder ``devalloc/`` of
the checkout even if another is installed, and would not find ``devalloc.kernels`` there.

``register`` closes that gap: it adds an import finder that answers only for the name
``devalloc.kernels`` and points it at the sibling folder. Nothing is imported until a program asks
for the device code, so it may still set ``TRITON_INTERPRET`` after ``import devalloc``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = "devalloc.kernels"


class SiblingFolder(MetaPathFinder):
    """Resolves the name ``devalloc.kernels`` to one folder, and no other name.

    Parameters
    ----------
    folder : Path
        The folder that holds the package's ``__init__.py``. Its submodules are found by Python's
        ordinary path finder, through the package's search locations.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != PACKAGE:
            return None
        return spec_from_file_location(
            fullname,
            self.folder / "__init__.py",
            submodule_search_locations=[str(self.folder)],
        )


def sibling_folder(package: Path) -> Path | None:
    """Return the checkout's ``kernels/`` beside `package`, or None if the package is installed.

    Parameters
    ----------
    package : Path
        The folder of the imported package ``devalloc``.

    Notes
    -----
    A ``kernels`` package of some other distribution may lie beside an installed ``devalloc``, so
    the folder counts only in a checkout: next to a ``pyproject.toml``.
    """
    folder = package.parent / "kernels"
    if (package / "kernels").is_dir() or not (package.parent / "pyproject.toml").is_file():
        return None
    return folder if (folder / "__init__.py").is_file() else None


def register() -> None:
    """Make ``devalloc.kernels`` importable in a checkout; do nothing in an installed package."""
    folder = sibling_folder(Path(__file__).resolve().parent)
    if folder is not None and not any(isinstance(f, SiblingFolder) for f in sys.meta_path):
        sys.meta_path.insert(0, SiblingFolder(folder))
