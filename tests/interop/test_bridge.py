"""The C functions that call Python: on any thread, while errors are pending, to the very end."""

from __future__ import annotations

import ctypes
import operator
import os
import re
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from devalloc.interop import bridge
from tests.interop.support import called, require_compiler

ROOT = Path(__file__).resolve().parents[2]

TARGET = SimpleNamespace()
"""What the functions call in the end; each test sets what it needs."""


@cache
def functions() -> bridge.Functions:
    return bridge.connect(
        "test",
        lambda *integers: TARGET.malloc(*integers),
        lambda *integers: TARGET.free(*integers),
        lambda *integers: TARGET.record_stream(*integers),
        lambda: TARGET.reset(),
    )


@pytest.fixture
def target() -> SimpleNamespace:
    require_compiler()
    TARGET.__dict__.clear()
    return TARGET


def capsule(destructor: int) -> object:
    """An object whose end calls a C function, with its own address and whatever else."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
    return make(1, None, destructor)


@pytest.mark.proves("library/tensor-dies")
@pytest.mark.parametrize("name", bridge.Functions._fields)
def test_a_pending_exception_passes_by(target: SimpleNamespace, name: str) -> None:
    """The interpreter drops the arguments of a call that failed before it handles the error.

    A callback of ctypes fails this test: its Python code stops at the lock with SystemError, and
    so does the division.
    """
    lock = threading.RLock()
    ran: list[tuple[int, ...]] = []

    def called_back(*integers: int) -> int:
        with lock:
            ran.append(integers)
        try:
            raise KeyError("an exception of its own")
        except KeyError:
            return len(str(integers))

    setattr(target, name, called_back)
    for turn in range(3):
        with pytest.raises(TypeError, match=r"unsupported.*'PyCapsule' and 'int'") as caught:
            operator.truediv(capsule(getattr(functions(), name)), 1)
        assert caught.value.__context__ is None
        assert len(ran) == turn + 1


def test_integers_arrive_as_they_are(target: SimpleNamespace) -> None:
    seen: list[tuple[int, ...]] = []
    largest = 2**64 - 1

    def keep(*integers: int) -> int:
        seen.append(integers)
        return largest

    target.malloc = target.free = target.record_stream = target.reset = keep
    calls = called(functions)
    assert calls.malloc(largest, -1, largest) == largest
    calls.free(largest, largest, 7, None)
    calls.free(None, 0, 0, largest)
    calls.record_stream(None, largest)
    calls.reset()
    assert seen == [
        (largest, -1, largest),
        (largest, largest, 7, 0),
        (0, 0, 0, largest),
        (0, largest),
        (),
    ]


@pytest.mark.parametrize(
    ("answer", "error"),
    [(lambda *_: 1 // 0, ZeroDivisionError), (lambda *_: "1", TypeError), (None, TypeError)],
)
def test_what_a_callable_raises_is_shown(
    target: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, answer: object, error: type
) -> None:
    shown: list[type] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: shown.append(event.exc_type))
    target.malloc = answer
    calls = called(functions)
    assert calls.malloc(1, 0, None) is None
    with pytest.raises(TypeError, match="unsupported operand"):
        operator.truediv(capsule(functions().malloc), 1)
    assert shown == [error, error]


def test_nothing_and_none_are_null(target: SimpleNamespace) -> None:
    for answer in (0, None):
        target.malloc = lambda *_, answer=answer: answer
        assert called(functions).malloc(1, 0, None) is None


def test_threads_that_python_does_not_know_may_call(target: SimpleNamespace) -> None:
    seen: list[int] = []
    target.reset = lambda: seen.append(threading.get_ident())
    process = ctypes.CDLL(None)
    threads = (ctypes.c_ulong * 4)()
    for index in range(4):
        at = ctypes.byref(threads, index * ctypes.sizeof(ctypes.c_ulong))
        assert process.pthread_create(at, None, ctypes.c_void_p(functions().reset), None) == 0
    for thread in threads:
        assert process.pthread_join(ctypes.c_ulong(thread), None) == 0
    assert len(seen) == 4
    assert threading.get_ident() not in seen


@pytest.mark.proves("library/ctrl-c")
def test_ctrl_c_waits_for_the_end_of_the_call(target: SimpleNamespace) -> None:
    ended: list[str] = []
    calls = called(functions)

    def give(*_: int) -> int:
        calls.free(16, 1, 0, None)
        signal.raise_signal(signal.SIGINT)
        ended.append("malloc")
        return 16

    def take(*_: int) -> None:
        signal.raise_signal(signal.SIGINT)
        ended.append("free")

    target.malloc, target.free = give, take
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            calls.malloc(1, 0, None)
    assert ended == ["free", "malloc"] * 3
    target.free = lambda *_: None
    calls.free(16, 1, 0, None)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.proves("library/ctrl-c")
def test_a_ctrl_c_that_is_due_waits_too(target: SimpleNamespace) -> None:
    """It would be raised at the first step of the callable, before any `try` of its own."""
    ended: list[int] = []
    target.free = lambda *_: ended.append(1)
    interrupt = ctypes.cast(ctypes.pythonapi.PyErr_SetInterrupt, ctypes.c_void_p).value
    assert interrupt is not None
    for turn in range(3):
        things = [capsule(functions().free), capsule(interrupt)]
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            things.clear()  # the last one first, and nothing of Python between the two
            raise AssertionError("the interrupt is lost")
        assert len(ended) == turn + 1


def test_the_handler_of_the_program_is_asked_once(target: SimpleNamespace) -> None:
    seen: list[str] = []

    def inside(*_: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        seen.append("free")

    target.free = inside
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("handler"))
    try:
        called(functions).free(16, 1, 0, None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["free", "handler"]


def test_calls_of_other_threads_hold_nothing(target: SimpleNamespace) -> None:
    inside, leave = threading.Event(), threading.Event()

    def wait(*_: int) -> None:
        inside.set()
        leave.wait(20)

    target.free = wait
    thread = threading.Thread(target=called(functions).free, args=(16, 1, 0, None))
    thread.start()
    try:
        assert inside.wait(20)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        leave.set()
        thread.join()


def test_each_purpose_has_its_own_callables(target: SimpleNamespace) -> None:
    target.malloc = lambda *_: 16
    other = called(lambda: bridge.connect("other", lambda *_: 32, lambda *_: None))
    assert (called(functions).malloc(1, 0, None), other.malloc(1, 0, None)) == (16, 32)
    with pytest.raises(RuntimeError, match="connected already"):
        bridge.connect("other", lambda *_: 48, lambda *_: None)
    assert other.malloc(1, 0, None) == 32


# In processes of their own ------------------------------------------------------------------------


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    return done.stdout


EXIT = """
import atexit, ctypes, sys
from devalloc.interop import bridge
from tests.interop.test_bridge import capsule
def say(*integers):
    print("called")
    return 16
malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
atexit.register(lambda: print("late", malloc(functions.malloc)(1, 0, None)))
functions = bridge.connect("exit", say, say)
print("early", malloc(functions.malloc)(1, 0, None))
kept = sys.kept = capsule(functions.free)
"""


def test_at_the_end_of_the_process_nothing_is_called(target: SimpleNamespace) -> None:
    assert run(EXIT) == "called\nearly 16\nlate None\n"


FAIL = """
import sysconfig
from devalloc import DevallocError
from devalloc.interop import bridge
{before}
try:
    bridge.connect("test", lambda *_: 0, lambda *_: None)
except DevallocError as error:
    print(error)
"""

NO_HEADERS = """
sysconfig.get_config_vars()["INCLUDEPY"] = "/nowhere"  # for the message
found = sysconfig.get_paths  # for the compiler
sysconfig.get_paths = lambda *a, **k: {**found(*a, **k), "include": "/nowhere"}
"""


@pytest.mark.parametrize(
    ("before", "environment", "words"),
    [
        ("import os; os.environ.pop('CC', None)", {"PATH": ""}, "Failed to find C compiler.*CC"),
        ("", {"CC": "/nowhere/cc"}, "No such file.*/nowhere/cc.*gcc or clang"),
        (NO_HEADERS, {}, r"returned non-zero.*no Python\.h in /nowhere.*python3-dev"),
    ],
)
def test_what_is_missing_is_said(
    tmp_path: Path, before: str, environment: dict[str, str], words: str
) -> None:
    require_compiler()  # for the last case
    said = run(FAIL.format(before=before), TRITON_CACHE_DIR=str(tmp_path), **environment)
    assert said.startswith("the C functions for PyTorch could not be compiled")
    assert re.search(words, said), said
