"""Every mechanism of the known allocators has a test or a reason; the document lists them."""

from __future__ import annotations

import pytest

from tests.mechanisms import (
    DOCUMENT,
    Mechanism,
    markdown,
    marks,
    mechanisms,
    problems,
    proofs,
)


def test_every_mechanism_has_a_test_or_a_reason() -> None:
    assert len(mechanisms()) > 100, "the test does not pass on an empty table"
    assert problems(mechanisms(), proofs()) == []


def test_the_document_is_current() -> None:
    assert DOCUMENT.read_text() == markdown(mechanisms(), proofs()), (
        "run python -m tests.mechanisms"
    )


def test_marks_are_read_from_the_source() -> None:
    source = "@pytest.mark.slow\n@pytest.mark.proves('torch/a', 'rmm/b')\ndef test_it(): pass\n"
    assert list(marks(source)) == [("torch/a", "test_it"), ("rmm/b", "test_it")]


@pytest.mark.parametrize(
    ("listed", "proved", "message"),
    [
        (Mechanism("torch/a", "a", "`option`"), {}, "torch/a: no test proves it"),
        (Mechanism("torch/a", "a", ""), {"torch/b": ["t"]}, "torch/b: not in mechanisms.csv"),
        (Mechanism("other/a", "a", "left out: b"), {}, "other/a: no title for it"),
    ],
)
def test_a_planted_gap_is_found(
    listed: Mechanism, proved: dict[str, list[str]], message: str
) -> None:
    assert any(each.startswith(message) for each in problems([listed], proved))


def test_a_reason_is_enough() -> None:
    assert problems([Mechanism("torch/a", "a", "left out: no program needs it")], {}) == []
