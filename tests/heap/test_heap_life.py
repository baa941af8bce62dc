"""Who owns a heap's memory, and until when; and the errors for mistakes around it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from devalloc import Arena, DoubleFree, Heap, InvalidArgument, InvalidFree, OutOfMemory
from devalloc import kernels as da
from devalloc.kernels import layout
from devalloc.sizes import PAGE_BYTES
from devalloc.sources import CudaSource, HostSource, Segment, Source
from tests.conftest import ON_GPU
from tests.support import DEVICE, int64

ROOT = Path(__file__).resolve().parents[2]


def source() -> Source:
    return CudaSource(torch.device("cuda", 0)) if ON_GPU else HostSource()


# Copies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda duplicate: duplicate.__name__
)
def test_a_heap_is_not_copied(duplicate: Callable[[object], object], debug: bool) -> None:
    """Two would hand out the same memory."""
    with Heap("1MiB", debug=debug) as heap:
        with pytest.raises(InvalidArgument, match=r"a Heap .* cannot be copied or pickled"):
            duplicate(heap)
        module = torch.nn.Linear(1, 1)
        module.heap = heap
        with pytest.raises(InvalidArgument, match="a Heap"):
            copy.deepcopy(module)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_nor_is_anything_else_that_owns_memory(duplicate: Callable[[object], object]) -> None:
    arena = Arena(source="host")
    block = arena.alloc(1000)
    for owner in (arena, block, arena._cache, Segment(source(), 1000), source()):
        with pytest.raises(InvalidArgument, match="cannot be copied or pickled"):
            duplicate(owner)
    arena.free(block)
    arena.close()


# Handles that outlive the heap --------------------------------------------------------------------


@triton.jit
def use_kernel(heap, freed, found):
    """Free what ``freed`` names; allocate, small and large, and write there; all that is known."""
    da.free(heap, tl.load(freed))
    addr = da.malloc(heap, 64)
    if addr != 0:
        tl.store(addr.to(tl.pointer_type(tl.int64)), 7)
    tl.store(found, addr)
    tl.store(found + 1, da.malloc(heap, 200_000))
    tl.store(found + 2, da.usable_size(heap, tl.load(freed + 1)))
    lane = tl.arange(0, 32)
    tl.store(found + 3 + lane, da.malloc(heap, 5000 + lane * 0))


@pytest.mark.parametrize("debug", [False, True])
def test_a_closed_heap_is_empty_for_kernels_that_have_its_handle(debug: bool) -> None:
    heap = Heap("4MiB", debug=debug)
    live = heap.malloc([64, 64, 200_000])
    handle = heap.handle
    freed = live.clone()
    heap.free(live)
    heap.close()
    found = int64([-1] * 35)
    use_kernel[(1,)](handle, freed, found)
    assert found.tolist() == [0] * 35


def test_closing_gives_the_memory_back_in_spite_of_a_handle() -> None:
    mine = source()
    heap = Heap("4MiB", source=mine)
    handle = heap.handle
    assert sorted(mine._out._sizes.values())[-1] >= 4 << 20
    heap.close()
    assert max(mine._out._sizes.values(), default=0) < 4 << 20
    del handle
    gc.collect()
    assert not mine._out._sizes


@pytest.mark.parametrize("debug", [False, True])
def test_a_heap_that_is_dropped_lives_as_long_as_its_handle(debug: bool) -> None:
    mine = source()
    handle = Heap("4MiB", source=mine, debug=debug).handle
    gc.collect()
    found = int64([-1] * 35)
    use_kernel[(1,)](handle, int64([0, 0]), found)
    addrs = found.tolist()
    assert 0 not in addrs[:2] + addrs[3:]
    out = mine._out._sizes.items()
    assert any(start <= addrs[0] < start + nbytes for start, nbytes in out)
    del handle
    gc.collect()
    assert not mine._out._sizes


# Modes of PyTorch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [False, True])
def test_a_heap_made_in_inference_mode_works_outside(debug: bool) -> None:
    with torch.inference_mode():
        heap = Heap("1MiB", debug=debug)
        view = heap.tensor(heap.malloc([64])[0], 8, torch.int64)
    view.fill_(3)
    heap.free([1])
    with pytest.raises(InvalidFree):
        heap.check()
    heap.reset()
    heap.audit()
    heap.close()


@pytest.mark.parametrize("debug", [False, True])
def test_the_default_device_does_not_matter(debug: bool) -> None:
    with torch.device("meta"):
        heap = Heap("1MiB", debug=debug)
        addrs = heap.malloc([64, 100])
        assert (addrs != 0).all()
        assert heap.usable_size(addrs.tolist()).tolist() == ([64, 100] if debug else [64, 112])
        heap.free(addrs)
        heap.reset()
        heap.audit()
        assert heap.stats().used == 0
        heap.close()


# Processes ----------------------------------------------------------------------------------------


def run(script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_forked_child_has_memory_of_its_own() -> None:
    done = run("""
import os
from devalloc import Arena
tensor = Arena(source="host").empty(1000).fill_(1)
if os.fork() == 0:
    tensor.fill_(2)
    os._exit(0)
os.wait()
print(tensor.sum().item())
""")
    assert done.stdout.strip() == "1000.0", done.stderr


def test_memory_is_there_until_the_process_has_ended() -> None:
    """Handlers that were registered before anything was allocated run last."""
    done = run("""
import atexit
kept = {}
atexit.register(lambda: print(kept["view"].sum().item(), kept["heap"].stats().used))
import torch
from devalloc import Heap
heap = kept["heap"] = Heap("1MiB")
kept["view"] = heap.tensor(heap.malloc([4000])[0], 1000, torch.float32).fill_(1)
""")
    assert done.stdout.split() == ["1000.0", "4096"], done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_interpreter_is_chosen_before_triton_is_imported(value: str) -> None:
    done = run(f"""
import os
os.environ["TRITON_INTERPRET"] = str(1 - {value})
import triton
os.environ["TRITON_INTERPRET"] = "{value}"
from devalloc import Heap
Heap("1MiB")
""")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("devalloc.errors.InvalidArgument: TRITON_INTERPRET was changed after")


# Errors for mistakes ------------------------------------------------------------------------------


def test_the_first_errors_can_all_be_read() -> None:
    with Heap("1MiB") as heap:
        (addr,) = heap.malloc([64]).tolist()
        heap.free([addr])
        heap.free([addr])
        heap.free([111])
        heap.malloc([9 << 20])
        heap.malloc([-5])
        faults = heap.faults()
        assert [(at.kind, at.address, at.size, at.found_by) for at in faults] == [
            (DoubleFree, addr, 0, "free"),
            (InvalidFree, 111, 0, "free"),
            (OutOfMemory, 0, 9 << 20, "malloc"),
            (InvalidArgument, 0, -5, "malloc"),
        ]
        assert "9 MiB failed in program 0: the whole heap has 1 MiB" in faults[2].message
        heap.free([111] * 30)
        assert len(heap.faults()) == 16
        with pytest.raises(DoubleFree):
            heap.check()
        assert heap.faults() == []


def test_an_error_that_was_counted_and_not_recorded_is_raised() -> None:
    """As a program leaves it that is killed in the middle of `record_error`."""
    with Heap("1MiB") as heap:
        heap.handle[layout.ERRORS.value + layout.E_OUT_OF_MEMORY.value] = 3
        assert heap.faults() == []
        with pytest.raises(OutOfMemory, match="3 x out of memory"):
            heap.check()
        heap.check()


def test_a_debug_heap_tells_of_failures_behind_its_own() -> None:
    with Heap("1MiB", debug=True) as heap:
        heap.malloc([9 << 20])
        heap.free([111])
        assert [at.kind for at in heap.faults()] == [InvalidFree, OutOfMemory]
        heap.clear_errors()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes yet")
def test_what_was_recorded_is_added_to_an_error_that_came_first() -> None:
    def fail() -> None:
        with Heap("1MiB") as heap:
            heap.malloc([9 << 20])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    (note,) = caught.value.__notes__
    assert "had recorded: malloc of 9 MiB failed" in note


def test_a_tensor_of_no_memory_says_so() -> None:
    with Heap("1MiB") as heap:
        addrs = heap.malloc([9 << 20])
        with pytest.raises(InvalidArgument, match="malloc gave no memory"):
            heap.tensor(addrs, 100, torch.float32)
        heap.clear_errors()


@pytest.mark.parametrize(
    ("addr", "shape", "dtype"),
    [
        (1.5, 8, torch.int8),
        ("x", 8, torch.int8),
        (torch.tensor([1, 2]), 8, torch.int8),
        (torch.tensor(1.0), 8, torch.int8),
        (None, 8, torch.int8),
        (PAGE_BYTES, 1.5, torch.int8),
        (PAGE_BYTES, "8", torch.int8),
        (PAGE_BYTES, None, torch.int8),
        (PAGE_BYTES, (2, 1.5), torch.int8),
        (PAGE_BYTES, 8, "int8"),
        (PAGE_BYTES, 8, np.int8),
        (PAGE_BYTES, 8, torch.quint8),
    ],
)
def test_a_tensor_of_wrong_arguments(addr: object, shape: object, dtype: object) -> None:
    with Heap("1MiB") as heap, pytest.raises(InvalidArgument):
        heap.tensor(addr, shape, dtype)


def test_sizes_of_other_kinds_of_integers() -> None:
    with Heap("1MiB") as heap:
        addrs = heap.malloc([64])
        assert heap.tensor(addrs, np.int64(8), torch.int64).shape == (8,)
        assert heap.tensor(addrs, (np.int32(2), 4), torch.int64).shape == (2, 4)
        heap.free(addrs)


@pytest.mark.parametrize("wrong", ["hots", 1, HostSource])
def test_what_is_no_source(wrong: object) -> None:
    with pytest.raises(InvalidArgument, match=r"a source is one of cuda, .* or an object|unknown"):
        Heap("1MiB", source=wrong)


@pytest.mark.parametrize("wrong", [1.5, [], "nonsense", "meta"])
def test_what_is_no_device(wrong: object) -> None:
    with pytest.raises(InvalidArgument):
        Heap("1MiB", device=wrong)


@pytest.mark.skipif(ON_GPU, reason="there are several")
@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_there_is_one_cpu(device: str) -> None:
    with Heap("1MiB", device=device) as heap:
        heap.free(heap.malloc([16]))
        assert heap.device == torch.device(DEVICE)


# Kernels that are written wrongly -----------------------------------------------------------------


@triton.jit
def square_kernel(heap, out):
    da.malloc(heap, tl.full((4, 4), 16, tl.int64))


@triton.jit
def pointer_kernel(heap, out):
    da.free(heap, out)


@triton.jit
def fraction_kernel(heap, out):
    tl.store(out, da.malloc(heap, 16.5))


@triton.jit
def fractions_kernel(heap, out):
    tl.store(out + tl.arange(0, 4), da.malloc(heap, tl.full((4,), 16.5, tl.float32)))


@triton.jit
def wide_mask_kernel(heap, out):
    da.malloc(heap, 64, mask=tl.full((4, 4), 1, tl.int1))


@triton.jit
def short_mask_kernel(heap, out):
    da.malloc(heap, tl.full((8,), 64, tl.int64), mask=tl.full((1,), 1, tl.int1))


@triton.jit
def long_mask_kernel(heap, out):
    da.free(heap, tl.full((4,), 0, tl.int64), mask=tl.full((8,), 1, tl.int1))


@triton.jit
def rows_mask_kernel(heap, out):
    da.usable_size(heap, tl.full((8,), 0, tl.int64), mask=tl.full((1, 8), 1, tl.int1))


@triton.jit
def integers_mask_kernel(heap, out):
    da.zeros(heap, tl.full((8,), 64, tl.int64), mask=tl.full((8,), 1, tl.int32))


@triton.jit
def number_mask_kernel(heap, out):
    da.malloc(heap, 64, mask=1)


@triton.jit
def free_one_masked_kernel(heap, out):
    da.free(heap, tl.full((), 0, tl.int64), tl.arange(0, 4) < 2)


@triton.jit
def resize_one_kernel(heap, out):
    da.realloc(heap, tl.load(out), tl.full((4,), 64, tl.int64))


@triton.jit
def resize_one_masked_kernel(heap, out):
    da.realloc(heap, tl.load(out), 64, mask=tl.full((4,), 1, tl.int1))


@triton.jit
def resize_one_lane_kernel(heap, out):
    da.realloc(heap, tl.full((1,), 0, tl.int64), tl.full((4,), 64, tl.int64))


@triton.jit
def named_tag_kernel(heap, out):
    da.malloc(heap, 64, tag="weights")


@triton.jit
def long_tag_kernel(heap, out):
    da.zeros(heap, 64, tag=tl.arange(0, 4))


@triton.jit
def fraction_tag_kernel(heap, out):
    da.realloc(heap, 0, 64, tag=1.5)


@triton.jit
def constant_kernel(heap, out, N: tl.constexpr):
    tl.store(out, da.malloc(heap, N))
    da.free(heap, 0)


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (square_kernel, "a scalar or a 1-D block"),
        (pointer_kernel, "sizes and addresses are integers"),
        (fraction_kernel, "sizes and addresses are integers"),
        (fractions_kernel, "sizes and addresses are integers"),
        (wide_mask_kernel, "a mask is a scalar or a 1-D block"),
        (short_mask_kernel, "mask: scalar or as long as the request"),
        (long_mask_kernel, "free: a mask is as long as addresses"),
        (rows_mask_kernel, "a mask is a scalar or a 1-D block"),
        (integers_mask_kernel, "a mask is of bool"),
        (number_mask_kernel, "a mask is of bool"),
        (free_one_masked_kernel, "free: a mask is as long as addresses"),
        (resize_one_kernel, "realloc: sizes are as long as addresses"),
        (resize_one_masked_kernel, "realloc: a mask is as long as addresses"),
        (resize_one_lane_kernel, "realloc: sizes are as long as addresses"),
        (named_tag_kernel, "a tag is an integer"),
        (long_tag_kernel, "a tag is an integer, or one for each request"),
        (fraction_tag_kernel, "a tag is an integer"),
    ],
)
def test_a_kernel_is_told_what_is_wrong(kernel: triton.JITFunction, text: str) -> None:
    with Heap("1MiB") as heap:
        assert text in complaint(lambda: kernel[(1,)](heap.handle, int64([0] * 4)))
        heap.audit()


def complaint(launch: Callable[[], object]) -> str:
    """What Triton says of a launch, with all causes."""
    text = ""
    try:
        launch()
    except Exception as error:
        at: BaseException | None = error
        while at is not None:
            text += str(at)
            at = at.__cause__
    assert text, "nothing was said"
    return text


@pytest.mark.parametrize("argument", [lambda heap: heap, lambda heap: int64([0]).to(torch.int32)])
def test_a_kernel_wants_the_handle(argument: Callable[[Heap], object]) -> None:
    with Heap("1MiB") as heap:
        said = complaint(lambda: constant_kernel[(1,)](argument(heap), int64([0]), N=64))
        # (On a GPU Triton knows no such argument as a heap, and says so before.)
        assert ON_GPU or "the heap of a kernel is Heap.handle" in said


@triton.jit
def masks_kernel(heap, flags, out, KIND: tl.constexpr):
    """One kind of mask. (All kinds in one kernel would take minutes to compile.)"""
    lane = tl.arange(0, 4)
    size = tl.full((4,), 64, tl.int64)
    mask, flag = tl.load(flags + lane), tl.load(flags)
    if KIND == "block":
        tl.store(out + lane, da.malloc(heap, size, mask & (lane > 0)))
    elif KIND == "block, one size":
        tl.store(out + lane, da.malloc(heap, 64, ~mask | (lane == 3)))
    elif KIND == "scalar":
        tl.store(out + lane, da.malloc(heap, size, flag))
    elif KIND == "scalar that is false":
        tl.store(out + lane, da.malloc(heap, size, tl.program_id(0) > 0))
    elif KIND == "constant":
        tl.store(out + lane, da.malloc(heap, size, KIND == "constant"))
    elif KIND == "constant that is false":
        tl.store(out + lane, da.malloc(heap, size, False))
    elif KIND == "one request":
        tl.store(out, da.malloc(heap, 64, flag))
    else:
        tl.store(out, da.malloc(heap, 64, tl.program_id(0) > 0))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("block", [0, 1, 0, 1]),
        ("block, one size", [0, 0, 1, 1]),
        ("scalar", [1] * 4),
        ("scalar that is false", [0] * 4),
        ("constant", [1] * 4),
        ("constant that is false", [0] * 4),
        ("one request", [1, 0, 0, 0]),
        ("one request, none", [0] * 4),
    ],
)
def test_what_a_mask_may_be(kind: str, wanted: list[int]) -> None:
    with Heap("1MiB") as heap:
        out = int64([0] * 4)
        flags = torch.tensor([True, True, False, True], device=DEVICE)
        masks_kernel[(1,)](heap.handle, flags, out, KIND=kind)
        assert (out != 0).tolist() == [bool(one) for one in wanted]


@triton.jit
def resize_all_kernel(heap, addrs, nbytes, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(addrs + lane, da.realloc(heap, tl.load(addrs + lane), nbytes, mask=lane > 0))


def test_one_size_for_many_blocks() -> None:
    """A scalar size of `realloc` is that of each block."""
    with Heap("1MiB") as heap:
        addrs = heap.malloc([64] * 4)
        resize_all_kernel[(1,)](heap.handle, addrs, 1000, BLOCK=4)
        assert addrs.tolist()[0] == 0
        assert heap.usable_size(addrs).tolist() == [0] + [1024] * 3


def test_a_size_may_be_a_constant() -> None:
    with Heap("1MiB") as heap:
        out = int64([0])
        constant_kernel[(1,)](heap.handle, out, N=64)
        assert heap.usable_size(out).tolist() == [64]
        heap.free(out)
