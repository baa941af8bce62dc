"""Copies of the device code with a change in them: bugs to be found, orders weakened."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.results import ROOT


@dataclass(frozen=True)
class Patch:
    """``old``, which occurs in ``file`` of kernels/ ``times`` times, becomes ``new``."""

    file: str
    old: str
    new: str
    times: int = 1


def prepare_worker(device: str, kernels: str | None) -> None:
    """Make this process interpret kernels (`device` "cpu") and import the device code from the
    folder `kernels`, if one is given; before devalloc is imported."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    if kernels:
        from devalloc._locate_kernels import SiblingFolder

        sys.meta_path.insert(0, SiblingFolder(Path(kernels).resolve()))


@contextmanager
def interpreting(device: str) -> Iterator[None]:
    """Interpret kernels quickly until the end of the block (`device` "cpu"), where greenlet is
    installed; after `prepare_worker`."""
    if device != "cpu" or find_spec("greenlet") is None:
        yield
        return
    from devalloc.testing import quick_interpreter

    with quick_interpreter():
        yield


def patched_kernels(patches: Iterable[Patch], folder: Path) -> Path:
    """Copy kernels/ into a new folder ``kernels`` of `folder` and change it.

    Raises
    ------
    ValueError
        If the text of a patch does not occur in its file as often as it says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / "kernels"
    shutil.copytree(ROOT / "kernels", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for patch in patches:
        file = copy / patch.file
        source = file.read_text()
        found = source.count(patch.old)
        if found != patch.times:
            raise ValueError(f"{patch.file} has {patch.old!r} {found} times, not {patch.times}")
        changed = source.replace(patch.old, patch.new)
        compile(changed, str(file), "exec")
        file.write_text(changed)
    return copy
