"""For torch.compile a kernel that calls a function of `da` writes to the heap."""

import pytest

from tests.compile.measure import finish_child, start_child

pytestmark = [pytest.mark.slow, pytest.mark.compile]


def test_every_function_writes_to_the_heap() -> None:
    """So no such kernel is dropped. A cast writes to nothing; and its instructions are those of
    `pointer` (`test_budget`)."""
    found = finish_child(start_child(module="tests.compile.written"))
    assert (found.pop("cast"), found.pop("pointer")) == ([], ["heap"])
    assert set(found) == {"malloc", "free", "usable_size", "zeros", "realloc"}
    assert all("heap" in written for written in found.values())
