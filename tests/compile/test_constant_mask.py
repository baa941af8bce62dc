"""A mask that is False while a kernel is compiled."""

import pytest

from tests.compile.measure import finish_child, start_child


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.oldest
def test_a_block_of_which_no_lane_asks_compiles() -> None:
    """Triton 3.6 fails where it knows that no lane takes part: a mask of False has to hide it."""
    found = finish_child(start_child(module="tests.compile.constant_mask"))
    assert found == {"name": "never_lanes"}
