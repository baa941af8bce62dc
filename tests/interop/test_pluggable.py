"""An arena as PyTorch's allocator: the callbacks on any machine, the rest on a GPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from devalloc import Arena, InvalidArgument
from devalloc.cache import Cache
from devalloc.interop import pluggable, pytorch
from devalloc.interop.pluggable import AllocationWarning
from devalloc.sources import SimulatedSource
from tests.arena.support import MIB, FakeStreams

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    """An engine that serves device 3."""
    state = pluggable._Installed()
    monkeypatch.setattr(pluggable, "_INSTALLED", state)
    state.caches[3] = Cache(SimulatedSource(), limit=64 * MIB, streams=FakeStreams())
    yield state.caches[3]
    state.caches[3].audit()


def in_c(kind: type, function: object) -> object:
    """As C code calls it: through an address."""
    keep = kind(function)
    call = kind(ctypes.cast(keep, ctypes.c_void_p).value)
    call.keep = keep
    return call


def test_tensors_are_blocks(engine: Cache) -> None:
    allocate = in_c(pytorch.ALLOCATE, pluggable._allocate)
    free = in_c(pytorch.FREE, pluggable._free)
    address = allocate(30 * MIB, 3, 7)  # type: ignore[operator]
    (segment,) = engine.snapshot()["segments"]  # type: ignore[misc]
    assert (segment["address"], segment["stream"]) == (address, 7)
    assert allocate(0, 3, 7) is None  # type: ignore[operator]
    free(None, 0, 3, 7)  # type: ignore[operator]
    free(address, 30 * MIB, 3, 7)  # type: ignore[operator]
    assert engine.stats()["allocation.all.current"] == 0
    assert engine.reserved == 30 * MIB
    in_c(pluggable._RESET, pluggable._reset)()  # type: ignore[operator]
    assert engine.reserved == 0


def test_recorded_streams_defer_the_free(engine: Cache) -> None:
    address = pluggable._allocate(30 * MIB, 3, None)
    record = in_c(pluggable._RECORD, pluggable._record_stream)
    record(address, 9)  # type: ignore[operator]
    record(12345, 9)  # type: ignore[operator]
    pluggable._free(address, 30 * MIB, 3, None)
    assert engine.stats()["active.all.current"] == 1, "stream 9 still uses it"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pluggable._allocate(65 * MIB, 3, None), "OutOfMemory: .*limit of 64 MiB"),
        (lambda: pluggable._allocate(1, 4, None), r'install\(device="cuda:4"\)'),
        (lambda: pluggable._free(12345, 1, 3, None), "InvalidFree"),
        (lambda: pluggable._free(12345, 1, 4, None), "no arena was installed"),
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


def test_nothing_is_touched_when_the_process_ends(engine: Cache) -> None:
    address = pluggable._allocate(MIB, 3, None)
    pluggable._INSTALLED.exiting = True
    pluggable._free(address, MIB, 3, None)
    assert pluggable._allocate(MIB, 3, None) == 0
    assert engine.stats()["allocation.all.current"] == 1


def test_one_arena_for_each_device(engine: Cache) -> None:
    with pytest.raises(InvalidArgument, match="already"):
        pluggable.serve(_on(3), None)
    pluggable.serve(_on(4), None)
    assert pluggable._allocate(MIB, 4, None)
    assert engine.stats()["allocation.all.current"] == 0


def _on(index: int) -> Cache:
    source = SimulatedSource()
    source.device = torch.device("cuda", index)
    return Cache(source, streams=FakeStreams())


def test_too_late_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(InvalidArgument, match=r"before anything uses the GPU.*Arena.use\(\)"):
        pluggable.replace_allocator()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_replace() -> None:
    with pytest.raises(InvalidArgument, match="no CUDA device"):
        Arena.install()


# On a GPU -----------------------------------------------------------------------------------------


def run(program: str) -> tuple[str, str]:
    """What a process says that ends well: standard output and error."""
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", program],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    return done.stdout, done.stderr


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
assert torch.zeros(30 << 20, dtype=torch.uint8, device="cuda").sum() == 0
"""

TOUCHED = """
import os, torch, devalloc
arena = devalloc.Arena.install(limit="64MiB")
before = arena.stats()
try:
    torch.zeros(100 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
except RuntimeError as error:
    print("raised", error)
arena.cache.audit()
assert arena.stats()["allocation.all.current"] == before["allocation.all.current"]
print("counted", arena.stats()["num_ooms"], flush=True)
os._exit(0)  # if the context is lost, nothing of it can be given back in order
"""


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


@pytest.mark.gpu
def test_on_the_gpu_what_touches_missing_memory_fails() -> None:
    said, warned = run(TOUCHED)
    assert said.startswith("raised")
    assert said.endswith("counted 1\n")
    assert "AllocationWarning: OutOfMemory" in warned
