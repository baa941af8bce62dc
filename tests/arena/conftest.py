"""Fixtures of the tests of arenas."""

import sys

import pytest


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Python was told of errors in finalizers."""
    told: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: told.append(str(args.exc_value)))
    return told
