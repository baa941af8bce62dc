"""PyTorch's own allocations on an arena: the callbacks on any machine, the rest on a GPU."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from devalloc import Arena, DevallocError, InvalidArgument, OutOfMemory
from devalloc.cache import Cache
from devalloc.interop import pytorch
from devalloc.sources import CudaSource, SimulatedSource
from tests.arena.support import MIB
from tests.interop.support import called, on_a_device, require_compiler

ROOT = Path(__file__).resolve().parents[2]


def test_callbacks_serve_who_is_active_and_return_to_who_gave() -> None:
    allocate, free, *_ = called(pytorch.functions)
    apart = SimulatedSource()
    apart.allocate(100 * MIB)  # or both would give the same addresses
    first, second = Cache(SimulatedSource()), Cache(apart)
    addresses = []
    for engine in (first, second):
        with pytorch.claimed() as alone, pytorch.active(engine.external):
            assert alone
            addresses.append(allocate(20 * MIB, 0, None))
    assert all(addresses)
    assert allocate(MIB, 0, None) is None, "no arena is active"
    assert first.external.held == second.external.held == 20 * MIB
    free(addresses[0], 20 * MIB, 0, None)
    assert (first.external.held, second.external.held) == (0, 20 * MIB)
    free(addresses[1], 20 * MIB, 0, None)
    assert second.external.held == 0


@pytest.mark.proves("library/callbacks-never")
def test_callbacks_never_raise(capfd: pytest.CaptureFixture[str]) -> None:
    allocate, free, *_ = called(pytorch.functions)
    engine = Cache(SimulatedSource(), limit=2 * MIB)
    with pytorch.claimed(), pytorch.active(engine.external):
        assert allocate(4 * MIB, 0, None) is None
        free(12345, 1, 0, None)
        free(None, 0, 0, None)
    assert engine.external.reserved == 0
    assert capfd.readouterr().err == "", "an ignored exception would be printed"


def test_the_cause_of_pytorchs_error_is_ours() -> None:
    allocate, *_ = called(pytorch.functions)
    engine = Cache(SimulatedSource(), limit=2 * MIB)
    with (  # noqa: PT012
        pytest.raises(torch.OutOfMemoryError) as caught,
        pytorch.claimed(),
        pytorch.active(engine.external),
    ):
        allocate(4 * MIB, 0, None)
        raise torch.OutOfMemoryError("as PyTorch would")
    assert isinstance(caught.value.__cause__, OutOfMemory)
    assert "limit of 2 MiB" in str(caught.value.__cause__)


def test_ctrl_c_in_a_callback_arrives_afterwards() -> None:
    class Interrupted(SimulatedSource):
        def allocate(self, nbytes: int, stream: int | None = None) -> int:
            raise KeyboardInterrupt

    allocate, *_ = called(pytorch.functions)
    engine = Cache(Interrupted())
    with pytest.raises(KeyboardInterrupt), pytorch.claimed(), pytorch.active(engine.external):
        assert allocate(MIB, 0, None) is None
    assert engine.external.reserved == 0


@pytest.mark.proves("library/callbacks-never")
def test_callbacks_wait_for_no_lock_of_the_engine() -> None:
    allocate, free, *_ = called(pytorch.functions)
    engine = Cache(SimulatedSource())
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with engine._lock:
            inside.set()
            assert leave.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(20)
    done = threading.Event()

    def call() -> None:
        with pytorch.claimed(), pytorch.active(engine.external):
            free(allocate(MIB, 0, None), MIB, 0, None)
        done.set()

    caller = threading.Thread(target=call)
    caller.start()
    served = done.wait(10)
    leave.set()
    holder.join()
    caller.join()
    assert served
    assert engine.external.stats()["outside_segment.freed"] == 1


def test_one_thread_claims() -> None:
    seen: list[bool] = []

    def other() -> None:
        with pytorch.claimed() as alone:
            seen.append(alone)

    with pytorch.claimed():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    other()
    assert seen == [False, True]


@pytest.mark.skipif(hasattr(torch._C, "_cuda_customAllocator"), reason="this PyTorch can")
def test_a_pytorch_that_cannot_says_so() -> None:
    require_compiler()
    with pytest.raises(DevallocError, match="cannot take segments from others"):
        pytorch._torch_allocator()


@pytest.mark.parametrize("source", ["host", "virtual"])
def test_use_needs_device_memory_and_an_open_arena(source: str) -> None:
    arena = Arena("cpu", source=source)
    with pytest.raises(InvalidArgument, match="need device memory; use an arena on a CUDA dev"):
        arena.use()
    arena.close()
    with pytest.raises(InvalidArgument, match="closed"):
        arena.use()


def test_use_needs_a_source_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, _ = on_a_device(monkeypatch)
    with pytest.raises(InvalidArgument, match='use source="cuda", "async" or "virtual", without'):
        arena.use()


# On a GPU -----------------------------------------------------------------------------------------


class Watched(CudaSource):
    """cudaMalloc that knows which addresses are out."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self.out: dict[int, int] = {}

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        address = super().allocate(nbytes, stream)
        self.out[address] = nbytes
        return address

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        super().free(address, nbytes, stream)
        del self.out[address]

    def owns(self, tensor: torch.Tensor) -> bool:
        at = tensor.untyped_storage().data_ptr()
        return any(start <= at < start + size for start, size in self.out.items())


def held(arena: Arena) -> int:
    return arena.stats()["outside_bytes.current"]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


def train(steps: int, owned: list[torch.Tensor] | None = None) -> list[float]:
    torch.manual_seed(0)
    model = Tiny().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 256, (8, 16 + 8 * (step % 5)), device="cuda")
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if owned is not None:
        owned += [*model.parameters(), *(p.grad for p in model.parameters())]
        owned += [state["exp_avg"] for state in optimizer.state.values()]
    return losses


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> object:
    """Sums in a fixed order, so that losses can be equal and not only close."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.proves("library/pytorch-s")
@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("deterministic")
def test_on_the_gpu_training_is_the_same_inside() -> None:
    expected = train(30)
    assert train(30) == expected, "without which nothing could be compared"
    source = Watched()
    arena = Arena(source=source)
    owned: list[torch.Tensor] = []
    with arena.use():
        losses = train(30, owned)
    assert losses == expected
    assert all(source.owns(tensor) for tensor in owned), "parameters, gradients, optimizer state"
    assert held(arena) == sum(source.out.values()) > 0
    assert not source.owns(torch.ones(1, device="cuda"))
    owned.clear()
    gc.collect()
    # cuBLAS keeps its workspace, which it took inside.
    torch._C._cuda_clearCublasWorkspaces()
    arena.empty_cache()
    assert held(arena) == 0
    assert not source.out


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["cuda", "async"])
def test_on_the_gpu_the_pool_is_kept_between_uses(source: str) -> None:
    with Arena(source=source) as arena:
        for _ in range(5):
            with arena.use(), arena.use():
                torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        assert arena.stats()["outside_segment.allocated"] == 1
        assert arena.empty_cache() == 30 * MIB
        assert held(arena) == 0


@pytest.mark.proves("library/memory-returns")
@pytest.mark.gpu
@pytest.mark.parametrize("order", ["tensor, arena", "arena, tensor", "close, tensor, arena"])
def test_on_the_gpu_memory_returns_in_any_order(order: str) -> None:
    source = Watched()
    things: dict[str, object] = {"arena": Arena(source=source)}
    with things["arena"].use():  # type: ignore[attr-defined]
        things["tensor"] = torch.full((5 * MIB,), 7, dtype=torch.uint8, device="cuda")
    for step in order.split(", "):
        if step == "close":
            things["arena"].close()  # type: ignore[attr-defined]
        else:
            del things[step]
        gc.collect()
        if "tensor" in things:
            assert (things["tensor"] == 7).all()  # type: ignore[attr-defined]
            assert source.out
    torch.cuda.empty_cache()
    assert not source.out


@pytest.mark.proves("library/limit-holds")
@pytest.mark.gpu
def test_on_the_gpu_the_limit_holds_and_is_the_cause() -> None:
    with Arena(limit="64MiB") as arena:
        kept = arena.empty(30 * MIB, torch.uint8)
        with pytest.raises(torch.OutOfMemoryError) as caught, arena.use():
            torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        assert "limit of 64 MiB" in str(caught.value.__cause__)
        with arena.use():
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        assert held(arena) == 30 * MIB
        # PyTorch's idle segment goes back rather than that the arena fails.
        assert arena.empty(31 * MIB, torch.uint8).numel() == 31 * MIB
        assert held(arena) == 0
        del kept


@pytest.mark.gpu
def test_on_the_gpu_other_threads_stay_outside() -> None:
    with Arena() as arena, Arena() as second:
        refused: list[BaseException] = []
        places: list[torch.Tensor] = []

        def other() -> None:
            places.append(torch.ones(40 * MIB, dtype=torch.uint8, device="cuda"))
            try:
                with second.use():
                    pass
            except InvalidArgument as error:
                refused.append(error)

        with arena.use():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
            with pytest.raises(InvalidArgument, match="active already"), second.use():
                pass
        assert held(arena) == 0
        assert "active already" in str(refused[0])
        with second.use():
            torch.empty(1, device="cuda")
        assert held(second) > 0


@pytest.mark.gpu
@pytest.mark.timeout(60)
def test_on_the_gpu_churn_with_threads_that_free_does_not_hang() -> None:
    """One thread makes segments come and go, others are inside the engine and collect garbage."""
    with Arena(limit="2GiB") as arena:
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                cycle: list[object] = [torch.empty(3 * MIB, device="cuda"), arena.empty(MIB)]
                cycle.append(cycle)
                del cycle
                gc.collect(0)

        threads = [threading.Thread(target=churn) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for size in range(1, 60):
                with arena.use():
                    torch.empty(size * MIB, device="cuda")
                arena.empty_cache()
        finally:
            stop.set()
            for thread in threads:
                thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        arena.cache.audit()


EXIT = """
import torch, devalloc
arena = devalloc.Arena()
context = arena.use()
context.__enter__()
model = torch.nn.Linear(3000, 3000).cuda()
model(torch.ones(8, 3000, device="cuda")).sum().backward()
{last}
print("end", flush=True)
"""


@pytest.mark.proves("library/memory-returns")
@pytest.mark.gpu
@pytest.mark.parametrize(
    "last", ["", "context.__exit__(None, None, None)", "model.cycle = model; del arena, context"]
)
def test_on_the_gpu_the_process_ends_cleanly(last: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT.format(last=last)],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert "Exception" not in done.stderr
    assert "Error" not in done.stderr
