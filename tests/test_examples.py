"""The examples do what they say."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ON_GPU

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(ON_GPU, reason="the examples interleave interpreted kernels")


def test_lock_free_stack_shows_the_bug_and_the_repair() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.lock_free_stack"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "schedules (all)" in done.stdout
    assert "all nodes [1, 1, 0, 2, 3]" in done.stderr
    assert "1 preemptions" in done.stderr
    assert 'replay("0*2 1*9")' in done.stderr.splitlines()[-1]
    # docs/interleaving.md shows the same line.
    assert 'replay("0*2 1*9")' in (ROOT / "docs" / "interleaving.md").read_text()
