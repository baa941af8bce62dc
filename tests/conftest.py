"""Chooses where the kernels run: on the GPU if there is one, else in Triton's interpreter.

Triton reads ``TRITON_INTERPRET`` when a kernel is decorated, that is when a test module imports
one, so the choice is made here, before any test module is loaded.
"""

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

ON_GPU = os.environ.get("TRITON_INTERPRET", "0") != "1"

# The same examples in every run: a failure seen once is seen again.
settings.register_profile("devalloc", deadline=None, derandomize=True, database=None)
settings.load_profile("devalloc")


def pytest_report_header() -> str:
    return f"kernels run on: {torch.cuda.get_device_name() if ON_GPU else 'Triton interpreter'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_GPU:
        return
    reason = "no CUDA device" if not torch.cuda.is_available() else "TRITON_INTERPRET=1 is set"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors of the tests live: "cuda", or "cpu" under the interpreter."""
    return "cuda" if ON_GPU else "cpu"
