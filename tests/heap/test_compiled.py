"""Heaps in code under torch.compile: what it does without, and nothing is dropped."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import devalloc
from devalloc import Heap, InvalidArgument
from devalloc import kernels as da
from tests.support import DEVICE

LANES = 128


@triton.jit
def keep_kernel(heap, values, addrs, n, LANES: tl.constexpr):
    """Each value into a block of its own, of 4 to 128 bytes."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    addr = da.malloc(heap, 4 * (lane % 32 + 1), mask=lane < n)
    value = tl.load(values + lane, mask=lane < n)
    tl.store(addr.to(tl.pointer_type(tl.float32)), value, mask=addr != 0)
    tl.store(addrs + lane, addr, mask=lane < n)


@triton.jit
def double_kernel(addrs, n, LANES: tl.constexpr):
    """Writes through addresses only: torch.compile sees nothing that it writes."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    addr = tl.load(addrs + lane, mask=lane < n, other=0)
    ptr = addr.to(tl.pointer_type(tl.float32))
    tl.store(ptr, 2 * tl.load(ptr, mask=addr != 0), mask=addr != 0)


@triton.jit
def read_kernel(addrs, out, n, LANES: tl.constexpr):
    """Reads through addresses only."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    addr = tl.load(addrs + lane, mask=lane < n, other=0)
    value = tl.load(addr.to(tl.pointer_type(tl.float32)), mask=addr != 0, other=-1.0)
    tl.store(out + lane, value, mask=lane < n)


@triton.jit
def free_kernel(heap, addrs, n, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    da.free(heap, tl.load(addrs + lane, mask=lane < n, other=0))


def grid(n: int) -> tuple[int]:
    return (triton.cdiv(n, LANES),)


@devalloc.launcher(reads=("values",))
def keep(heap: torch.Tensor, values: torch.Tensor, addrs: torch.Tensor) -> None:
    n = addrs.numel()
    keep_kernel[grid(n)](heap, values, addrs, n, LANES=LANES)


@devalloc.launcher(reads=("addrs",))
def double(heap: torch.Tensor, addrs: torch.Tensor) -> None:
    double_kernel[grid(addrs.numel())](addrs, addrs.numel(), LANES=LANES)


@devalloc.launcher(reads=("addrs",))
def read(heap: torch.Tensor, addrs: torch.Tensor, out: torch.Tensor) -> None:
    read_kernel[grid(addrs.numel())](addrs, out, addrs.numel(), LANES=LANES)


@devalloc.launcher
def free(heap: torch.Tensor, addrs: torch.Tensor) -> None:
    free_kernel[grid(addrs.numel())](heap, addrs, addrs.numel(), LANES=LANES)


def store(handle: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    addrs = torch.empty(values.shape, dtype=torch.int64, device=values.device)
    keep(handle, values, addrs)
    return addrs


def fetch(handle: torch.Tensor, addrs: torch.Tensor) -> torch.Tensor:
    out = torch.empty(addrs.shape, device=addrs.device)
    read(handle, addrs, out)
    return out


def there_and_back(handle: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """4 x + 1 by way of the heap: reads between two writes, and then frees."""
    addrs = store(handle, x * 2)
    before = fetch(handle, addrs)
    double(handle, addrs)
    after = fetch(handle, addrs)
    free(handle, addrs)
    return before + after / 2 + 1


BACKENDS = {
    "eager": {"backend": "eager"},
    "aot_eager": {"backend": "aot_eager"},
    "inductor": {"backend": "inductor"},
    "reduce-overhead": {"mode": "reduce-overhead"},
}
MARKS = {"inductor": [pytest.mark.slow], "reduce-overhead": [pytest.mark.gpu]}

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in BACKENDS])
def compiled(request: pytest.FixtureRequest) -> Iterator[Compile]:
    """Compile a function as one graph; nothing may warn, and no CUDA graph may be skipped."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # (What torch has to say of itself.)
        warnings.filterwarnings("ignore", message=".*TensorFloat32 tensor cores.*")
        # (It begins each process's CUDA graphs with an empty one.)
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty.*")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        yield lambda function: torch.compile(function, fullgraph=True, **BACKENDS[request.param])
    assert not torch._dynamo.utils.counters["graph_break"]
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    torch._dynamo.reset()


def numbers(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("debug", [False, True])
def test_nothing_is_dropped(compiled: Compile, debug: bool) -> None:
    """Kernels that allocate, write and read through addresses only, and free; of any length."""
    with Heap("1MiB", debug=debug) as heap:
        step = compiled(there_and_back)
        rounds = [20, 20, 20, 70, 90, 90, 200]
        for n in rounds:
            assert torch.equal(step(heap.handle, numbers(n)), 4 * numbers(n) + 1)
        stats = heap.stats()
        assert stats.allocations == stats.frees == sum(rounds)
        heap.audit()


def test_a_heap_that_the_code_finds_itself(compiled: Compile) -> None:
    heaps = [Heap("1MiB")]
    step = compiled(lambda x: store(heaps[0].handle, x))
    for _ in range(3):
        addrs = step(numbers(40)).clone()
        assert torch.equal(fetch(heaps[0].handle, addrs), numbers(40))
    other = Heap("2MiB")
    first, heaps[0] = heaps[0], other
    for _ in range(3):
        step(numbers(40))
    assert (first.stats().allocations, other.stats().allocations) == (120, 120)
    other.close()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"^the heap is closed$"):
            step(numbers(40))
    heaps[0] = first
    step(numbers(40))
    assert first.stats().allocations == 160
    first.close()


def test_handles_of_other_heaps_and_of_closed_ones(compiled: Compile) -> None:
    step = compiled(store)
    heaps = [Heap(f"{n}MiB") for n in (1, 1, 2, 3)]
    handles = [heap.handle for heap in heaps]
    for _ in range(3):
        for heap, handle in zip(heaps, handles, strict=True):
            addrs = step(handle, numbers(10)).clone()
            assert torch.equal(fetch(handle, addrs), numbers(10))
            assert heap.base <= int(addrs.min()) <= int(addrs.max()) < heap.base + heap.capacity
    assert [heap.stats().allocations for heap in heaps] == [30] * 4
    for heap in heaps:
        heap.close()
    assert step(handles[1], numbers(10)).tolist() == [0] * 10


def move(source: torch.Tensor, target: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    addrs = store(source, x)
    moved = store(target, fetch(source, addrs) + 1)
    free(source, addrs)
    return moved


def test_two_heaps_and_one_twice(compiled: Compile) -> None:
    step = compiled(move)
    with Heap("1MiB") as source, Heap("1MiB") as target:
        for pair in [(source, target)] * 3 + [(target, target)] * 3:
            addrs = step(pair[0].handle, pair[1].handle, numbers(50)).clone()
            assert torch.equal(fetch(pair[1].handle, addrs), numbers(50) + 1)
        assert (source.stats().allocations, source.stats().frees) == (150, 150)
        assert (target.stats().allocations, target.stats().frees) == (450, 150)


def test_values_that_require_gradients(compiled: Compile) -> None:
    """May be read; what was written has no gradient."""
    with Heap("1MiB") as heap:
        step = compiled(there_and_back)
        for _ in range(3):
            out = step(heap.handle, numbers(30).requires_grad_())
            assert torch.equal(out, 4 * numbers(30) + 1)
            assert not out.requires_grad
        with torch.inference_mode():
            assert torch.equal(step(heap.handle, numbers(30)), 4 * numbers(30) + 1)


class ThroughHeap(torch.autograd.Function):
    """2 x by way of blocks, and back the same way."""

    @staticmethod
    def forward(ctx: Any, heap: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.heap = heap
        return ThroughHeap.twice(heap, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ThroughHeap.twice(ctx.heap, grad)

    @staticmethod
    def twice(heap: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        addrs = store(heap, x)
        double(heap, addrs)
        out = fetch(heap, addrs)
        free(heap, addrs)
        return out


class Layer(torch.nn.Module):
    def __init__(self, heap: Heap) -> None:
        super().__init__()
        self.heap = heap
        self.weight = torch.nn.Parameter(numbers(60) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ThroughHeap.apply(self.heap.handle, x * self.weight).sin()


def test_gradients_in_a_module(compiled: Compile) -> None:
    with Heap("1MiB") as heap:
        plain, layer = Layer(heap), Layer(heap)
        step = compiled(layer)
        for _ in range(3):
            for forward, module in ((plain, plain), (step, layer)):
                module.zero_grad()
                forward(numbers(60)).sum().backward()
            torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
        with torch.no_grad():
            torch.testing.assert_close(step(numbers(60)), plain(numbers(60)))
        stats = heap.stats()
        assert stats.allocations == stats.frees == 60 * (3 * 2 * 2 + 2)


# How CUDA graphs and copies come out, without a GPU ----------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("debug", [False, True])
def test_handles_are_static_and_not_copied(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs are skipped if a graph writes inputs that are not static. (Checked with what
    inductor finds for the CPU; on a GPU the tests above see skipped graphs.)"""
    from torch._inductor import compile_fx
    from torch._inductor.utils import fresh_cache, run_and_get_code

    found = []
    generate = compile_fx.fx_codegen_and_compile

    def spy(*args: Any, **kwargs: Any) -> Any:
        graph = generate(*args, **kwargs)
        found.append((set(graph.mutated_input_idxs), set(kwargs["static_input_idxs"])))
        return graph

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", spy)
    torch._dynamo.reset()
    with fresh_cache(), Heap("1MiB", debug=debug) as source, Heap("1MiB", debug=debug) as target:
        step = torch.compile(move, fullgraph=True)
        addrs, (code,) = run_and_get_code(step, source.handle, target.handle, numbers(30))
        assert torch.equal(fetch(target.handle, addrs), numbers(30) + 1)
        target.free(addrs)
    ((mutated, static),) = found
    assert len(mutated) == 2
    assert mutated <= static
    assert "copy" not in code.split("def call(")[1]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_no_bytes_are_copied(mode: str) -> None:
    """Torch allocates nothing of the size of a heap's state, which is 0.8 % of the heap."""
    torch._dynamo.reset()
    with Heap("4GiB") as heap:
        assert heap.handle.nbytes > 30 << 20
        step = torch.compile(there_and_back, fullgraph=True, mode=mode)
        step(heap.handle, numbers(1000))  # (The compiler allocates to time what it makes.)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(4):
            assert torch.equal(step(heap.handle, numbers(1000)), 4 * numbers(1000) + 1)
        assert torch.cuda.max_memory_allocated() - before < 4 << 20
        assert heap.stats().allocations == heap.stats().frees == 5000
    torch._dynamo.reset()


def test_the_mark_is_that_of_torch() -> None:
    tensor = torch.zeros(1)
    torch._dynamo.mark_static_address(tensor, guard=False)
    with Heap("1MiB") as heap, Heap("1MiB", debug=True) as other:
        for handle in (heap.handle, other.handle):
            assert handle._dynamo_static_input_type == tensor._dynamo_static_input_type


# The decorator -----------------------------------------------------------------------------------


def test_a_call_that_is_not_compiled_is_a_call_of_the_function() -> None:
    seen = []

    def function(x: torch.Tensor, n: int = 3, *, name: str = "a") -> None:
        """What it does."""
        seen.append((x, n, name))

    launch = devalloc.launcher(function)
    x = numbers(3)
    launch(x)
    launch(x, n=4, name="b")
    assert [(n, name) for _, n, name in seen] == [(3, "a"), (4, "b")]
    assert all(given is x for given, _, _ in seen)
    assert (launch.__name__, launch.__doc__) == ("function", "What it does.")


def test_local_functions_of_one_name(compiled: Compile) -> None:
    def adder(step: float) -> Callable[[torch.Tensor], None]:
        @devalloc.launcher
        def add(x: torch.Tensor, times: int = 1) -> None:
            x += step * times

        return add

    one, ten = adder(1.0), adder(10.0)

    def both(x: torch.Tensor, n: int) -> torch.Tensor:
        y = x + 0
        one(y)
        ten(y, times=n)
        return y

    step = compiled(both)
    for n in (2, 3, 4):
        assert torch.equal(step(numbers(5), n), numbers(5) + 1 + 10 * n)


def no_annotation(heap: torch.Tensor, n) -> None: ...  # type: ignore[no-untyped-def]


def returns(heap: torch.Tensor) -> torch.Tensor:
    return heap


def unknown(heap: torch.Tensor, x: dict) -> None: ...  # type: ignore[type-arg]


def by_name_only(*, heap: torch.Tensor) -> None: ...


def good(heap: torch.Tensor, x: torch.Tensor, n: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "reads", "message"),
    [
        (no_annotation, (), "Parameter n must have a type annotation"),
        (returns, (), "returns something"),
        (unknown, (), "unsupported type"),
        (by_name_only, (), "kwarg-only"),
        (good, ("y",), "has no tensor 'y'; its tensors are"),
        (good, ("n",), "has no tensor 'n'"),
        (good, "x", "reads is a sequence of names"),
        (good, ("heap", "x"), "would write nothing"),
        (3, (), "a launcher is a Python function, not 3"),
        (good, 3, "reads is a sequence of names"),
    ],
)
def test_what_is_no_launcher(function: Any, reads: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        devalloc.launcher(reads=reads)(function)


class Exported(torch.nn.Module):
    def forward(self, handle: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return there_and_back(handle, x)


def test_an_exported_program_takes_the_handle() -> None:
    with Heap("1MiB") as first, Heap("1MiB") as second:
        program = torch.export.export(Exported(), (first.handle, numbers(20)))
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        step = torch.export.load(file).module()
        assert torch.equal(step(second.handle, numbers(20)), 4 * numbers(20) + 1)
        assert (first.stats().allocations, second.stats().allocations) == (0, 20)
