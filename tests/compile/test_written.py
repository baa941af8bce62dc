"""For torch.compile a kernel that stores through `da.pointer` writes to the heap."""

import pytest

from tests.compile.measure import finish_child, start_child

pytestmark = [pytest.mark.slow, pytest.mark.compile]


def test_a_pointer_writes_to_the_heap() -> None:
    """A cast does not; and no instruction tells the two apart (`test_budget`)."""
    found = finish_child(start_child(module="tests.compile.written"))
    assert found == {"pointer": ["heap"], "cast": []}
