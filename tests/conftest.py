"""Chooses where the kernels run: on the GPU if there is one, else in Triton's interpreter.

Triton reads ``TRITON_INTERPRET`` when a kernel is decorated, that is when a test module imports
one, so the choice is made here, before any test module is loaded.
"""

import fcntl
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Test processes share the cores: threads of torch would only wait for one another. (The variable
# is for the processes that tests start.)
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a shell starts in the background ignores Ctrl-C, and tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ON_GPU = os.environ.get("TRITON_INTERPRET", "0") != "1"

# The same examples in every run: a failure seen once is seen again.
settings.register_profile("devalloc", deadline=None, derandomize=True, database=None)
settings.load_profile("devalloc")


# What interleaves programs needs greenlet, which users of the heap need not have.
HAS_GREENLET = find_spec("greenlet") is not None
collect_ignore = [] if HAS_GREENLET else ["interleaving", "documents/test_examples.py"]


def pytest_report_header() -> list[str]:
    lines = [f"kernels run on: {torch.cuda.get_device_name() if ON_GPU else 'Triton interpreter'}"]
    if not HAS_GREENLET:
        lines.append(f"not collected, because greenlet is missing: {', '.join(collect_ignore)}")
    return lines


# What takes longest, in this order, before all other files: so that the processes that share the
# tests end together. (A name of a folder means what is in it.)
LONGEST = (
    "compile/test_budget.py",
    "interleaving",
    "arena/test_threads.py",
    "heap/debug",
    "benchmarks/test_stress.py",
    "heap/test_traces.py",
    "heap/test_state.py",
    "heap/test_space.py",
)


def rank(item: pytest.Item) -> int:
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    return next((i for i, name in enumerate(LONGEST) if path.startswith(name)), len(LONGEST))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=rank)
    if "long" not in config.option.markexpr:  # unless asked for, whatever else -m says
        left_out = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
    if ON_GPU:
        return
    reason = "no CUDA device" if not torch.cuda.is_available() else "TRITON_INTERPRET=1 is set"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


@contextmanager
def locked(name: str, how: int) -> Iterator[None]:
    """Hold a lock that this user's test processes share, as ``fcntl`` says how."""
    path = Path(tempfile.gettempdir(), f"devalloc-tests-{os.getuid()}-{name}")
    with path.open("a") as file:
        fcntl.flock(file, how)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """On a GPU, keep other tests away from those that are ``alone``. (Who waits to be alone holds
    the gate: other processes could go on in turn without end.)"""
    if not ON_GPU:
        return (yield)
    how = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with ExitStack() as held:
        with locked("gate", fcntl.LOCK_EX):
            held.enter_context(locked("device", how))
        return (yield)


def pytest_collection_finish() -> None:
    """Keep what was imported out of later searches for garbage, of which many tests make one."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors of the tests are: "cuda", or "cpu" under the interpreter."""
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Interpreted kernels run several times as fast. `tests/heap/test_plain_interpreter.py`, which
    goes without, shows that they do the same."""
    if ON_GPU or not HAS_GREENLET:
        yield
        return
    from devalloc.testing import quick_interpreter

    with quick_interpreter():
        yield


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Python was given of errors in finalizers."""
    told: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: told.append(str(args.exc_value)))
    return told
