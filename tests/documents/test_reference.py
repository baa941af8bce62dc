"""docs/reference.md is what the docstrings say, and help() says the same of device functions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import devalloc
from devalloc import kernels as da

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "reference.md").read_text()

HELP = """
from devalloc import kernels as da
for name in da.__all__:
    print("=====", name)
    help(getattr(da, name))
"""


def run(*command: str, interpret: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_INTERPRET": interpret, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_the_reference_is_current(interpret: str) -> None:
    """Twice the same: made for the compiler and for the interpreter."""
    done = run("docs/make_reference.py", "--check", interpret=interpret)
    assert done.returncode == 0, f"run python docs/make_reference.py\n{done.stderr}"


@pytest.mark.parametrize("module", [devalloc, da])
def test_everything_exported_is_in_the_reference(module: object) -> None:
    names = [name for name in module.__all__ if not name.startswith("__")]  # type: ignore[attr-defined]
    assert not [name for name in names if f"### `{name}`" not in TEXT]


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_help_shows_the_docstring_of_device_functions(interpret: str) -> None:
    done = run("-c", HELP, interpret=interpret)
    assert done.returncode == 0, done.stderr
    texts = dict(part.split("\n", 1) for part in done.stdout.split("===== ")[1:])
    assert set(texts) == set(da.__all__)
    for name, text in texts.items():
        assert f"{name}(heap, " in text
        assert "Method resolution order" not in text
    assert "malloc(heap, nbytes, mask=None, tag=0)" in texts["malloc"]
    assert "Bytes wanted: one allocation for the program" in texts["malloc"]
    assert "pointer(heap, addr, dtype: tl.constexpr, mask=None)" in texts["pointer"]
