"""An ordinary heap's kernels are the same code as if there were no debug heaps."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.compile.measure import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KERNELS = [
    "malloc_scalar",
    "malloc_lanes",
    "free_scalar",
    "free_lanes",
    "usable_size_lanes",
    "zeros_scalar",
    "realloc_scalar",
]
DEBUG_MODULES = ("kernels_$_guards_$_", "kernels_$_table_$_", "kernels_$_debug_$_")


@pytest.fixture(scope="module")
def compared() -> dict[str, dict[str, Any]]:
    """In a process of its own, for the compiler must not run where kernels are interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile.release"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def debug_functions(names: list[str]) -> list[str]:
    return [name for name in names if any(module in name for module in DEBUG_MODULES)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_same_code_as_without_debug_heaps(
    compared: dict[str, dict[str, Any]], kernel: str
) -> None:
    assert compared[kernel]["same"]
    assert debug_functions(compared[kernel]["functions"]) == []


def test_a_debug_heap_has_other_code(compared: dict[str, dict[str, Any]]) -> None:
    """Else the test above would look for names that there are not."""
    assert debug_functions(compared["malloc_scalar+debug"]["functions"])
