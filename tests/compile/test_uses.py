"""The examples' kernels, and those that they are measured against, compile for a GPU."""

from __future__ import annotations

import re

import pytest

from tests.compile.measure import ROOT, finish_child, start_child
from tests.compile.uses import BASELINES, EXAMPLES, cases, group_of

KERNEL = re.compile(r"^@triton\.jit\ndef (\w+_kernel|make_rows)\(", re.M)


GROUPS = [
    pytest.param(group, marks=[pytest.mark.long] if group.endswith("+debug") else [])
    for group in sorted({group_of(case) for case in cases()})
]


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_they_compile(group: str) -> None:
    """Without races at calls; ordinary heaps' kernels leave few registers to memory. (Those for
    debug heaps take as long again.)"""
    found = finish_child(start_child(group, module="tests.compile.uses"))
    assert len(found) == sum(group_of(case) == group for case in cases())
    for name, usage in found.items():
        assert usage["races"] == [], name
        if not group.endswith("+debug"):
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
