"""The examples' kernels, and those that they are measured against, compile for a GPU."""

from __future__ import annotations

import re

import pytest

from tests.compile.measure import ROOT, finish_child, start_child
from tests.compile.uses import BASELINES, EXAMPLES, cases, modules

KERNEL = re.compile(r"^@triton\.jit\ndef (\w+_kernel|make_rows)\(", re.M)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("module", modules())
def test_they_compile(module: str) -> None:
    """Without races at calls; ordinary heaps' kernels leave few registers to memory."""
    found = finish_child(start_child(module, module="tests.compile.uses"))
    assert len(found) == sum(case.module == module for case in cases())
    for name, usage in found.items():
        assert usage["races"] == [], name
        if "+debug" not in name:
            assert usage["spill_bytes"] <= 520, name


def test_none_is_forgotten() -> None:
    """But for the examples of debug heaps, mailboxes and schedules, which are not about speed."""
    others = {"debug_heap", "lock_free_stack", "mailboxes"}
    for folder, plan in (("examples", EXAMPLES), ("benchmarks/uses", BASELINES)):
        launched = {
            f"{path.stem}.{name}"
            for path in (ROOT / folder).glob("*.py")
            if path.stem not in others
            for name in KERNEL.findall(path.read_text())
        }
        assert launched == {path for path, *_ in plan}
