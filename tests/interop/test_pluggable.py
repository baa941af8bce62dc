"""An arena as PyTorch's allocator: the callbacks on any machine, the rest on a GPU."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from devalloc import Arena, InvalidArgument
from devalloc.cache import Cache
from devalloc.interop import pluggable
from devalloc.interop.pluggable import AllocationWarning
from devalloc.sources import HostSource, SimulatedSource
from tests.arena.support import MIB, FakeStreams
from tests.interop.support import called

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    """An engine that serves device 3."""
    state = pluggable._Installed()
    monkeypatch.setattr(pluggable, "_INSTALLED", state)
    state.caches[3] = Cache(SimulatedSource(), limit=64 * MIB, streams=FakeStreams())
    yield state.caches[3]
    state.caches[3].audit()


def test_tensors_are_blocks(engine: Cache) -> None:
    allocate, free, _, reset = called(pluggable.functions)
    address = allocate(30 * MIB, 3, 7)
    (segment,) = engine.snapshot()["segments"]  # type: ignore[misc]
    assert (segment["address"], segment["stream"]) == (address, 7)
    assert allocate(0, 3, 7) is None
    free(None, 0, 3, 7)
    free(address, 30 * MIB, 3, 7)
    assert engine.stats()["allocation.all.current"] == 0
    assert engine.reserved == 30 * MIB
    reset()
    assert engine.reserved == 0


def test_recorded_streams_defer_the_free(engine: Cache) -> None:
    allocate, free, record, _ = called(pluggable.functions)
    address = allocate(30 * MIB, 3, None)
    record(address, 9)
    record(12345, 9)
    record(None, 9)
    free(address, 30 * MIB, 3, None)
    assert engine.stats()["active.all.current"] == 1, "stream 9 still uses it"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pluggable._allocate(65 * MIB, 3, 0), "OutOfMemory: .*limit of 64 MiB"),
        (lambda: pluggable._allocate(1, 4, 0), r'install\(device="cuda:4"\)'),
        (lambda: pluggable._free(12345, 1, 3, 0), "InvalidFree"),
        (lambda: pluggable._free(12345, 1, 4, 0), "no arena was installed"),
    ],
)
def test_what_goes_wrong_is_shown_and_never_raised(
    engine: Cache, call: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = engine.snapshot()
    with pytest.warns(AllocationWarning, match=words):
        assert not call()  # type: ignore[operator]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not call()  # type: ignore[operator]
    assert "AllocationWarning" in capsys.readouterr().err
    assert engine.snapshot() == before


def test_one_arena_for_each_device(engine: Cache) -> None:
    with pytest.raises(InvalidArgument, match="already"):
        pluggable.serve(_on(3), None)
    pluggable.serve(_on(4), None)
    assert pluggable._allocate(MIB, 4, 0)
    assert engine.stats()["allocation.all.current"] == 0


def _on(index: int | None) -> Cache:
    source = SimulatedSource()
    source.device = torch.device("cuda") if index is None else torch.device("cuda", index)
    return Cache(source, streams=FakeStreams())


def _crooked() -> SimulatedSource:
    source = SimulatedSource(granularity=64)
    source.device = torch.device("cuda", 0)
    return source


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cuda:9"},
        {"device": "nonsense"},
        {"device": "cpu"},
        {"device": "cuda:3"},
        {"source": "host"},
        {"source": "none"},
        {"source": HostSource()},
        {"source": HostSource(), "device": "cuda:0"},
        {"source": _on(9).source},
        {"source": _on(None).source},
        {"source": _on(0).source, "device": "cuda:1"},
        {"source": _crooked()},
        {"source": 7},
        {"policy": "none"},
        {"limit": 2.0},
        {"front": -1},
        {"front": "4 monkeys"},
        {"policy": "expandable_segments:True"},
        {"policy": "expandable_segments:True", "source": "async"},
    ],
    ids=str,
)
def test_bad_options_change_nothing(
    engine: Cache, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    """On a machine with four devices; the last has an arena."""
    changed: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("initialises CUDA"))
    monkeypatch.setattr(pluggable, "replace_allocator", lambda: changed.append(True))
    with pytest.raises(InvalidArgument):
        Arena.install(**options)  # type: ignore[arg-type]
    assert not changed


def test_too_late_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(InvalidArgument, match=r"before anything uses the GPU.*Arena.use\(\)"):
        pluggable.replace_allocator()


def run(program: str) -> tuple[str, str]:
    """What a process says that ends well: standard output and error."""
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", program],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    return done.stdout, done.stderr


UNCOMPILED = """
import os, tempfile
os.environ.update(CC="/nowhere/cc", TRITON_CACHE_DIR=tempfile.mkdtemp())
import torch, devalloc
from devalloc.interop import pluggable, pytorch
for needs_functions in (pluggable.replace_allocator, pytorch._torch_allocator):
    try:
        needs_functions()
    except devalloc.DevallocError as error:
        print("/nowhere/cc" in str(error))
assert not pluggable.installed()
if torch.cuda.is_available():
    arena = devalloc.Arena()
    for change in (arena.use().__enter__, devalloc.Arena.install):
        try:
            change()
        except devalloc.DevallocError:
            pass
        else:
            raise AssertionError
    kept = torch.ones(5, device="cuda")
    assert kept.sum() + arena.empty(5).fill_(1).sum() == 10
    assert torch.cuda.memory_allocated() > 0, "another allocator could not say"
"""


def test_without_a_compiler_nothing_changes() -> None:
    assert run(UNCOMPILED)[0] == "True\nTrue\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_replace() -> None:
    with pytest.raises(InvalidArgument, match="no CUDA device"):
        Arena.install()


# On a GPU -----------------------------------------------------------------------------------------


TRAIN = """
import os
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import gc, threading, torch, devalloc
arena = devalloc.Arena.install(policy="{policy}") if {install} else None
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(30):
    x = torch.randn(8, 16 + 8 * (step % 5), 128).to("cuda")
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()  # on PyTorch's own thread
    optimizer.step()
    print(loss.item().hex())
if arena:
    stats = arena.stats()
    assert stats["allocation.all.allocated"] > 1000, stats
    assert stats["num_device_alloc"] < 300, stats
    owned = [p.grad for p in model.parameters()] + list(model.parameters())
    assert all(arena.cache.owns(t.untyped_storage().data_ptr()) for t in owned)
    thread = threading.Thread(target=lambda: torch.ones(1000, device="cuda").sum().item())
    thread.start(); thread.join()
    side = torch.cuda.Stream()
    used = torch.empty(5_000_000, device="cuda")
    used.record_stream(side)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
    del used
    assert arena.stats()["active.all.current"] == arena.stats()["allocation.all.current"] + 1
    torch.cuda.synchronize()
    arena.cache.audit()
    del model, optimizer, loss, x, owned, layer
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    stats = arena.stats()
    assert stats["allocation.all.current"] == stats["reserved_bytes.all.current"] == 0, stats
    for call in (arena.close, arena.use, lambda: devalloc.Arena.install()):
        try:
            call()
        except devalloc.InvalidArgument:
            pass
        else:
            raise AssertionError(call)
"""


@pytest.mark.proves("library/pluggable-allocator")
@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_on_the_gpu_training_is_the_same_with_an_arena_as_allocator() -> None:
    expected, _ = run(TRAIN.format(install=False, policy=""))
    assert len(expected.split()) == 30
    for policy in ("torch", "frugal", "bfc"):
        losses, _ = run(TRAIN.format(install=True, policy=policy))
        assert losses == expected, policy


LATE = """
import torch, devalloc
torch.ones(1, device="cuda")
try:
    devalloc.Arena.install()
except devalloc.InvalidArgument as error:
    print(error)
assert torch.ones(5, device="cuda").sum() == 5
"""

BAD = """
import torch, devalloc
for options in ({"policy": "none"}, {"source": "none"}, {"limit": 2.0}, {"limit": -1}):
    try:
        devalloc.Arena.install(**options)
    except devalloc.InvalidArgument:
        pass
    else:
        raise AssertionError(options)
kept = torch.ones(5, device="cuda")
# PyTorch's own allocator counts; another one's statistics would raise.
print(torch.cuda.memory_allocated() > 0)
"""

EMPTY = """
import torch, devalloc
arena = devalloc.Arena.install(limit="64MiB")
kept = torch.ones(1000, device="cuda")
before = arena.stats()["allocation.all.current"]
missing = [torch.empty(100 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
for tensor in missing:
    try:
        print("at", tensor.untyped_storage().data_ptr())
    except RuntimeError:
        print("at", 0)
assert arena.stats()["allocation.all.current"] == before
assert arena.stats()["num_ooms"] == 2
del missing, tensor
arena.cache.audit()
assert kept.sum() == 1000, "no kernel has touched what is missing"
assert torch.zeros(7 << 20, device="cuda").sum() == 0, "28 MiB are still to be had"
"""

FAILING = """
import torch, devalloc
arena = devalloc.Arena.install(limit="64MiB")
a = torch.ones(1000, device="cuda")
(a + 1).sum().item()
before = arena.stats()["allocation.all.current"]
for fail in (
    lambda: (a + 1).reshape(3, 7),
    lambda: (a + 1) + torch.ones(3, device="cuda"),
    lambda: (a + 1)[2000],
):
    for _ in range(3):
        try:
            fail()
        except (RuntimeError, IndexError) as error:
            print(type(error).__name__, error)
        else:
            raise AssertionError
    assert arena.stats()["allocation.all.current"] == before
arena.cache.audit()
assert (a + 1).sum().item() == 2000
"""

SPENT = """
import os, torch, devalloc
arena = devalloc.Arena.install(limit="64MiB")
before = arena.stats()["allocation.all.current"]
try:
    {operation}
    torch.cuda.synchronize()
except RuntimeError as error:
    print("raised", error)
arena.cache.audit()
assert arena.stats()["allocation.all.current"] == before
print("counted", arena.stats()["num_ooms"], flush=True)
os._exit(0)  # if the context is lost, nothing of it can be given back in order
"""


@pytest.mark.proves("library/pluggable-allocator")
@pytest.mark.gpu
def test_on_the_gpu_too_late_changes_nothing() -> None:
    assert "before anything uses the GPU" in run(LATE)[0]


@pytest.mark.gpu
def test_on_the_gpu_bad_options_change_nothing() -> None:
    assert run(BAD)[0] == "True\n"


@pytest.mark.gpu
def test_on_the_gpu_running_out_is_shown_and_gives_no_memory() -> None:
    said, warned = run(EMPTY)
    assert said == "at 0\nat 0\n"
    assert "AllocationWarning: OutOfMemory" in warned
    assert "limit of 64 MiB" in warned


@pytest.mark.proves("library/tensor-dies")
@pytest.mark.gpu
def test_on_the_gpu_operations_that_fail_on_temporaries_say_why_and_leak_nothing() -> None:
    """Their blocks come back while the error is on its way."""
    said, warned = run(FAILING)
    assert said.count("RuntimeError shape '[3, 7]' is invalid for input of size 1000\n") == 3
    assert said.count("RuntimeError The size of tensor a (1000) must match") == 3
    assert said.count("IndexError index 2000 is out of bounds") == 3
    assert "AllocationWarning" not in warned


@pytest.mark.gpu
@pytest.mark.parametrize(
    "operation",
    [
        pytest.param('torch.zeros(100 << 20, dtype=torch.uint8, device="cuda")', id="missing"),
        # The sum needs a copy as int64, another 240 MiB, and then drops the temporary.
        pytest.param(
            'torch.zeros(30 << 20, dtype=torch.uint8, device="cuda").sum()', id="temporary"
        ),
    ],
)
def test_on_the_gpu_an_operation_without_memory_fails_and_leaks_nothing(operation: str) -> None:
    said, warned = run(SPENT.format(operation=operation))
    assert said.startswith("raised")
    assert said.endswith("counted 1\n")
    assert "AllocationWarning: OutOfMemory" in warned
