"""`Arena` on host memory: tensors whose memory returns by itself, blocks, heaps, bad input."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable

import numpy
import pytest
import torch

import devalloc
from devalloc import Arena, DoubleFree, InvalidArgument, OutOfMemory
from devalloc.arena import Block
from devalloc.cache import POLICIES, BfcPolicy, Cache, PrivatePool, TorchPolicy
from devalloc.interop.holder import Holder
from devalloc.sources import CudaSource, HostSource
from devalloc.sources.adaptors import LimitAdaptor
from tests.arena.support import MIB, NumberSource
from tests.conftest import ON_GPU
from tests.interop.support import on_a_device

DTYPES = sorted({at for at in vars(torch).values() if isinstance(at, torch.dtype)}, key=str)


@pytest.fixture
def arena() -> Arena:
    return Arena(source="host")


def live(arena: Arena) -> int:
    return arena.stats()["allocation.all.current"]


@pytest.mark.proves("tiny/cpu-pinned")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [7, (3, 5), (2, 3, 4), ()])
def test_tensors(arena: Arena, dtype: torch.dtype, shape: int | tuple[int, ...]) -> None:
    tensor = arena.empty(shape, dtype)
    assert tensor.dtype == dtype
    assert tensor.shape == torch.empty(shape).shape
    assert tensor.is_contiguous()
    tensor.fill_(1)
    assert (tensor == 1).all()
    address = tensor.untyped_storage().data_ptr()
    assert address % 256 == 0
    del tensor
    assert live(arena) == 0
    assert arena.empty(shape, dtype).data_ptr() == address


def test_tensors_without_elements(arena: Arena) -> None:
    assert arena.empty((0, 3)).shape == (0, 3)
    assert live(arena) == 0


def test_the_default_dtype(arena: Arena) -> None:
    assert arena.empty(2).dtype == torch.get_default_dtype()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_by_name(policy: str) -> None:
    with Arena(source="host", policy=policy) as arena:
        for step in range(1, 4):
            sizes = [step * size for size in (100, 50_000, MIB, 3 * MIB)]
            tensors = [arena.empty(size, torch.uint8).fill_(at) for at, size in enumerate(sizes)]
            assert all((tensor == at).all() for at, tensor in enumerate(tensors))
            assert live(arena) == len(tensors)
            del tensors
            assert live(arena) == 0
        arena.empty_cache()
        assert arena.stats()["reserved_bytes.all.current"] == 0


@pytest.mark.proves("library/tensor-whose")
def test_views_keep_the_memory(arena: Arena) -> None:
    tensor = arena.empty((4, 4))
    view = tensor.view(-1)[3:5]
    del tensor
    assert live(arena) == 1
    del view
    assert live(arena) == 0


@pytest.mark.proves("library/tensor-whose")
def test_autograd_keeps_the_memory(arena: Arena) -> None:
    inner = arena.empty(1000).fill_(3.0)
    weight = torch.ones(1000, requires_grad=True)
    result = (weight * inner).sum()
    del inner
    assert live(arena) == 1, "saved for the backward pass"
    result.backward()
    assert (weight.grad == 3).all()
    del result
    assert live(arena) == 0


def test_memory_returns_from_another_thread(arena: Arena) -> None:
    held = [arena.empty(1000)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert live(arena) == 0


def test_a_dropped_arena_lives_until_its_last_tensor() -> None:
    source = CountingHost()
    arena = Arena(source=source)
    tensor = arena.empty(1000).fill_(5)
    del arena
    gc.collect()
    assert source.out == 1
    assert tensor.sum() == 5000
    del tensor
    assert source.out == 0


class CountingHost(HostSource):
    out = 0
    refuses = False

    def allocate(self, nbytes: int) -> int:
        self.out += 1
        return super().allocate(nbytes)

    def free(self, address: int, nbytes: int) -> None:
        if self.refuses:
            raise RuntimeError("refused")
        self.out -= 1
        super().free(address, nbytes)


@pytest.mark.proves("torch/cached-memory", "rmm/pool-never")
def test_closing_gives_back_what_nobody_uses() -> None:
    source = CountingHost()
    with Arena(source=source) as arena:
        tensor = arena.empty(5 * MIB, torch.int8)
        arena.empty(100)
        assert source.out == 2
    assert arena.closed
    assert source.out == 1
    assert tensor.fill_(2).sum(dtype=torch.int64) == 10 * MIB
    del tensor
    assert source.out == 0
    arena.close()


def test_blocks(arena: Arena) -> None:
    block = arena.alloc("1KiB")
    assert block.nbytes == 1024
    assert block.address % 256 == 0
    arena.free(block)
    with pytest.raises(DoubleFree):
        arena.free(block)
    empty = arena.alloc(0)
    assert (empty.address, empty.nbytes) == (0, 0)
    arena.free(empty)
    with pytest.raises(DoubleFree, match="was freed before"):
        arena.free(empty)


@pytest.mark.proves("library/block-freed")
def test_a_stale_block_frees_nobody_elses_memory(arena: Arena) -> None:
    stale = arena.alloc("3MiB")
    arena.free(stale)
    block = arena.alloc("3MiB")
    assert block.address == stale.address
    with pytest.raises(DoubleFree, match="was freed before"):
        arena.free(stale)
    with pytest.raises(InvalidArgument, match="was freed before"):
        arena.record_stream(stale, 7)
    assert live(arena) == 1
    assert not arena.cache._store.pending.uses
    arena.free(block)
    assert live(arena) == 0


@pytest.mark.proves("library/block-freed")
def test_of_threads_that_free_one_block_one_succeeds(arena: Arena) -> None:
    """Others allocate meanwhile, so that a second free would find a live block at the address."""
    for _ in range(100):
        block = arena.alloc(5000)
        start = threading.Barrier(4)
        outcomes: list[str] = []
        taken: list[Block] = []

        def free(
            block: Block = block,
            start: threading.Barrier = start,
            outcomes: list[str] = outcomes,
            taken: list[Block] = taken,
        ) -> None:
            start.wait()
            try:
                arena.free(block)
            except DoubleFree:
                outcomes.append("refused")
            else:
                outcomes.append("freed")
            taken.append(arena.alloc(5000))

        threads = [threading.Thread(target=free) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(outcomes) == ["freed"] + ["refused"] * 3
        assert len({block.address for block in taken}) == live(arena) == 4
        for block in taken:
            arena.free(block)
        assert live(arena) == 0


def test_a_free_that_fails_leaves_the_block_to_be_freed(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(stream: int) -> None:
        raise RuntimeError("no event can be recorded")

    block = arena.alloc(1000)
    arena.record_stream(block, 7)
    with monkeypatch.context() as patch:
        patch.setattr(arena.cache.streams, "record", fails)
        with pytest.raises(RuntimeError, match="no event"):
            arena.free(block)
    assert live(arena) == 1
    arena.free(block)
    assert live(arena) == 0


def test_a_block_that_is_free_though_its_free_failed() -> None:
    """The source refuses what a closed arena gives back."""
    source = CountingHost()
    arena = Arena(source=source)
    block = arena.alloc(1000)
    arena.close()
    source.refuses = True
    with pytest.raises(RuntimeError, match="refused"):
        arena.free(block)
    source.refuses = False
    with pytest.raises(DoubleFree):
        arena.free(block)
    arena.close()
    assert source.out == 0


@pytest.mark.proves("library/heap-arena")
@pytest.mark.skipif(ON_GPU, reason="compiled kernels cannot use host memory")
def test_a_heap_in_an_arena(arena: Arena) -> None:
    with arena.heap("1MiB") as heap:
        assert live(arena) == 2, "data and control block"
        addresses = heap.malloc([1000, 70_000])
        assert (addresses != 0).all()
        heap.tensor(int(addresses[0]), 1000, torch.uint8).fill_(7)
        heap.free(addresses)
        heap.audit()
    gc.collect()
    assert live(arena) == 0


@pytest.mark.skipif(ON_GPU, reason="compiled kernels cannot use host memory")
def test_a_heap_that_does_not_fit(arena: Arena) -> None:
    arena.set_limit("4MiB")
    with pytest.raises(OutOfMemory):
        arena.heap("64MiB")
    gc.collect()
    assert live(arena) == 0


@pytest.mark.proves("torch/out-memory")
def test_running_out_is_torchs_error_too(arena: Arena) -> None:
    arena.set_limit(30 * MIB)
    for call in (lambda: arena.empty(40 * MIB), lambda: arena.alloc(40 * MIB)):
        with pytest.raises(torch.OutOfMemoryError, match=r"aise (it|the limit)") as caught:
            call()
        assert isinstance(caught.value, OutOfMemory)
        assert isinstance(caught.value, MemoryError)


def test_an_error_of_the_source_keeps_nothing_of_its_callers() -> None:
    arena = Arena(source=LimitAdaptor(HostSource(), 64 * MIB))

    def step() -> torch.Tensor:
        activations = arena.empty(40 * MIB, torch.uint8)
        return arena.empty(30 * MIB, torch.uint8).add_(activations[0])

    with contextlib.suppress(torch.OutOfMemoryError):
        step()
    assert live(arena) == 0
    arena.empty_cache()
    assert arena.cache.reserved == 0


@pytest.mark.proves("torch/limit-also", "saver/limit-margin")
def test_limits() -> None:
    arena = Arena(source="host", limit="30MiB")
    tensor = arena.empty(20 * MIB, torch.int8)
    before = arena.snapshot()
    with pytest.raises(InvalidArgument, match="below the 20 MiB"):
        arena.set_limit(10 * MIB)
    assert arena.snapshot() == before
    assert arena.cache.limit == 30 * MIB
    del tensor
    arena.set_limit(10 * MIB)
    assert arena.cache.reserved == 0, "what was cached above it went back"
    share = Arena(source="host", limit=0.5).cache.limit
    assert share is not None
    assert share > 100 * MIB


@pytest.mark.proves("auto_growth/stream-safe", "library/our-record_stream")
def test_record_stream_finds_the_tensors_block() -> None:
    arena = Arena(source="host")
    tensor = arena.empty(1000)
    arena.record_stream(tensor[5:], 7)
    assert arena.cache._store.pending.uses == {tensor.data_ptr(): {7}}
    block = arena.alloc(10)
    arena.record_stream(block, 7)
    del tensor
    arena.free(block)
    assert arena.empty_cache() == 2 * MIB
    with pytest.raises(InvalidArgument, match="no live allocation"):
        arena.record_stream(torch.empty(5), 7)


def test_the_per_thread_default_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads' are two streams with one handle: memory would pass between them unordered."""
    arena, streams = on_a_device(monkeypatch)
    block = arena.alloc(10)
    for call in (
        lambda: arena.empty(10, stream=2),
        lambda: arena.empty(0, stream=2),
        lambda: arena.alloc(10, stream=2),
        lambda: arena.record_stream(block, 2),
        lambda: arena.triton_allocator()(10, 128, 2),
        lambda: Holder(arena, 10, 2),
    ):
        with pytest.raises(InvalidArgument, match="per-thread default stream"):
            call()
    streams.now = 2
    with pytest.raises(InvalidArgument, match="per-thread default stream"):
        arena.alloc(10)
    streams.now = 0
    assert live(arena) == 1
    assert not arena.cache._store.pending.uses


def test_the_default_stream_has_two_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, _ = on_a_device(monkeypatch)
    block = arena.alloc(10, stream=1)
    arena.record_stream(block, 1)
    assert not arena.cache._store.pending.uses, "its own stream"
    arena.free(block)
    assert arena.alloc(10, stream=0).address == block.address


def test_tensors_park_under_the_stream_that_owns_them(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way the stream was named."""
    monkeypatch.setattr("devalloc.arena.arena.resolve_stream", lambda stream, device: stream % 10)
    for stream in (10, 0, None):
        tensor = arena.empty(100, stream=stream)
        address = tensor.data_ptr()
        del tensor
        assert [key[-1] for key in arena._reuse.stacks] == [0]
    (stack,) = arena._reuse.stacks.values()
    assert [(stay.address, stay.turns) for stay in stack] == [(address, 2)]


@pytest.mark.parametrize("stream", [True, 1.0])
def test_a_parked_tensor_is_not_for_what_equals_its_stream(arena: Arena, stream: int) -> None:
    tensor = arena.empty(10, stream=1)
    del tensor
    with pytest.raises(InvalidArgument, match="stream"):
        arena.empty(10, stream=stream)


def test_on_the_host_every_handle_is_a_stream(arena: Arena) -> None:
    address = arena.empty(10, stream=1).data_ptr()
    assert arena.empty(10, stream=2).data_ptr() != address


def test_captures_use_the_graphs_pool(arena: Arena) -> None:
    with arena.graph_pool() as pool:
        with arena.capture(pool):
            tensor = arena.empty(100)
        (segment,) = arena.snapshot()["segments"]  # type: ignore[misc]
        assert segment["segment_pool_id"] == pool.id
        del tensor
        assert arena.empty_cache() == 0
    assert arena.cache.reserved == 0


OTHER = Arena(source="host")
ELSEWHERE = torch.empty(5, device="meta")


def freed(arena: Arena) -> Block:
    block = arena.alloc(5)
    arena.free(block)
    return block


def living(arena: Arena) -> int:
    (segment,) = arena.cache._store.segments.values()
    return segment.first.address


def released(arena: Arena) -> PrivatePool:
    with arena.graph_pool() as pool:
        return pool


BAD: list[tuple[str, Callable[[Arena], object]]] = [
    ("negative shape", lambda arena: arena.empty((2, -1))),
    ("negative size", lambda arena: arena.alloc(-1)),
    ("size of another type", lambda arena: arena.alloc(1.5)),  # type: ignore[arg-type]
    ("negative size for the engine", lambda arena: arena.cache.malloc(-1)),
    ("bool for the engine", lambda arena: arena.cache.malloc(True)),
    ("text for the engine", lambda arena: arena.cache.malloc("1")),  # type: ignore[arg-type]
    ("foreign block", lambda arena: arena.free(Arena(source="host").alloc(1))),
    ("no block", lambda arena: arena.free(17)),  # type: ignore[arg-type]
    ("address of another type", lambda arena: arena.cache.free("x")),  # type: ignore[arg-type]
    ("address that cannot be looked up", lambda arena: arena.cache.free([])),  # type: ignore[arg-type]
    ("tensor for an address", lambda arena: arena.cache.free(torch.empty(5))),  # type: ignore[arg-type]
    ("address beyond printing", lambda arena: arena.cache.free((10**5000,))),  # type: ignore[arg-type]
    ("no address to record", lambda arena: arena.cache.record_stream([], 3)),  # type: ignore[arg-type]
    ("text to record", lambda arena: arena.cache.record_stream("x", 3)),  # type: ignore[arg-type]
    ("no address to order", lambda arena: arena.cache.order_behind([], 3)),  # type: ignore[arg-type]
    ("no address to measure", lambda arena: arena.cache.size_of([])),  # type: ignore[arg-type]
    (
        "no stream for the engine to record",
        lambda arena: arena.cache.record_stream(living(arena), []),
    ),  # type: ignore[arg-type]
    ("limit beyond addresses", lambda arena: arena.set_limit(10**400)),
    ("limit beyond printing", lambda arena: arena.set_limit(10**5000)),
    ("limit of text beyond addresses", lambda arena: arena.set_limit("9" * 30 + "GiB")),
    ("negative limit", lambda arena: arena.set_limit(-1)),
    ("fraction over one", lambda arena: arena.set_limit(1.5)),
    ("limit below what is used", lambda arena: arena.set_limit(1)),
    ("heap without a page", lambda arena: arena.heap(10)),
    ("shape of floats", lambda arena: arena.empty((1.5, 2))),  # type: ignore[arg-type]
    ("shape of text", lambda arena: arena.empty("ab")),  # type: ignore[arg-type]
    ("shape of a float", lambda arena: arena.empty(1.5)),  # type: ignore[arg-type]
    ("no shape", lambda arena: arena.empty(None)),  # type: ignore[arg-type]
    ("shape of a bool of NumPy's", lambda arena: arena.empty(numpy.bool_(True))),  # type: ignore[arg-type]
    ("shape of shapes", lambda arena: arena.empty([[1]])),  # type: ignore[list-item]
    ("negative size beyond printing", lambda arena: arena.empty(-(10**5000))),
    ("shape of a size beyond printing", lambda arena: arena.empty((10**5000, 1.5))),  # type: ignore[arg-type]
    ("dtype beyond printing", lambda arena: arena.empty(3, dtype=10**5000)),  # type: ignore[arg-type]
    ("tensor beyond printing", lambda arena: arena.record_stream(10**5000, 7)),  # type: ignore[arg-type]
    ("size beyond PyTorch's, of nothing", lambda arena: arena.empty((2**70, 0))),
    ("nothing before a size beyond PyTorch's", lambda arena: arena.empty((0, 2**63))),
    ("sizes beyond PyTorch's together", lambda arena: arena.empty((2**40, 2**40, 0))),
    ("quantised", lambda arena: arena.empty(3, torch.quint8)),
    ("quantised nothing", lambda arena: arena.empty(0, torch.quint4x2)),
    ("dtype that cannot be looked up", lambda arena: arena.empty(3, dtype=[])),  # type: ignore[arg-type]
    ("no dtype", lambda arena: arena.empty(3, dtype=float)),  # type: ignore[arg-type]
    ("no stream", lambda arena: arena.empty(3, stream="s")),  # type: ignore[arg-type]
    ("no stream for nothing", lambda arena: arena.empty(0, stream="s")),  # type: ignore[arg-type]
    ("no stream for a block", lambda arena: arena.alloc(3, stream=1.5)),  # type: ignore[arg-type]
    ("foreign tensor", lambda arena: arena.record_stream(torch.empty(5), 7)),
    ("another arena's tensor", lambda arena: arena.record_stream(OTHER.empty(5), 7)),
    ("another arena's block", lambda arena: arena.record_stream(OTHER.alloc(5), 7)),
    ("another device's tensor", lambda arena: arena.record_stream(ELSEWHERE, 7)),
    ("no tensor", lambda arena: arena.record_stream(None, 7)),  # type: ignore[arg-type]
    ("no stream to record", lambda arena: arena.record_stream(freed(arena), "s")),  # type: ignore[arg-type]
    ("freed block", lambda arena: arena.record_stream(freed(arena), 7)),
    ("no pool", lambda arena: arena.capture(None).__enter__()),  # type: ignore[arg-type]
    ("something else than a pool", lambda arena: arena.capture(5).__enter__()),  # type: ignore[arg-type]
    ("no callback", lambda arena: arena.cache.on_low_memory(None)),  # type: ignore[arg-type]
    ("text for a callback", lambda arena: arena.cache.on_low_memory("f")),  # type: ignore[arg-type]
    ("a filter that is none", lambda arena: arena.cache.route(None, 5).__enter__()),  # type: ignore[arg-type]
    ("another arena's pool", lambda arena: arena.capture(OTHER.graph_pool()).__enter__()),
    ("released pool", lambda arena: arena.capture(released(arena)).__enter__()),
]


@pytest.mark.proves("library/bad-input")
@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in BAD])
def test_bad_input_changes_nothing(arena: Arena, call: Callable[[Arena], object]) -> None:
    tensor = arena.empty(1000)
    before = arena.snapshot()
    with pytest.raises(InvalidArgument):
        call(arena)
    assert arena.snapshot() == before
    assert not arena.cache._store.pending.uses
    arena.cache.audit()
    del tensor


@pytest.mark.proves("torch/huge-sizes")
@pytest.mark.parametrize(
    "nbytes", [2**60, 2**62, 2**63, 2**70, 10**5000], ids=lambda n: n.bit_length()
)
def test_huge_sizes_are_more_than_there_is(arena: Arena, nbytes: int) -> None:
    before = arena.snapshot()
    arena.set_limit("1GiB")
    for call in (arena.alloc, arena.cache.malloc, lambda size: arena.empty(size, torch.int8)):
        with pytest.raises(OutOfMemory, match="alloc of"):
            call(nbytes)  # type: ignore[operator]
    assert arena.snapshot() == before
    assert arena.stats()["num_ooms"] == 3


def test_what_fails_after_the_allocation_gives_it_back(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch._C, "_construct_storage_from_data_pointer", fails)
    with pytest.raises(KeyboardInterrupt):
        arena.empty(1000)
    assert live(arena) == 0


def test_a_block_is_not_lost_for_anothers_free(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a finalizer gave back during `malloc` is freed with the next call, which asks the
    size."""

    def fails(address: int) -> int:
        raise RuntimeError("the source did not take it")

    monkeypatch.setattr(arena.cache, "size_of", fails)
    with pytest.raises(RuntimeError, match="did not take it"):
        arena.alloc(1000)
    assert live(arena) == 0


def test_sizes_of_numpy_are_sizes(arena: Arena) -> None:
    first = arena.empty((numpy.int64(3), True), torch.int8)
    assert first.shape == (3, 1)
    del first
    assert arena.empty((3, 1), torch.int8).shape == (3, 1)
    assert arena.empty(numpy.int64(4), torch.int8).shape == (4,)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_is_served_or_refused(arena: Arena, dtype: torch.dtype) -> None:
    for size in (3, 0):
        if str(dtype).startswith("torch.q"):
            with pytest.raises(InvalidArgument, match=str(dtype)):
                arena.empty(size, dtype)
        else:
            assert arena.empty(size, dtype).dtype == dtype
    assert live(arena) == 0


@pytest.mark.gpu
def test_on_the_gpu_streams_and_tensors_of_another_device_are_refused() -> None:
    here, there = Arena(source="host"), Arena(source="cuda")
    with pytest.raises(InvalidArgument, match=r"a torch\.cuda\.Stream on cpu"):
        here.record_stream(here.empty(5), torch.cuda.Stream())
    with pytest.raises(InvalidArgument, match="not a tensor on cuda:0"):
        here.record_stream(there.empty(5), 7)
    with pytest.raises(InvalidArgument, match="not a tensor on cpu"):
        there.record_stream(torch.empty(5), 7)
    there.record_stream(there.empty(5), torch.cuda.Stream())


@pytest.mark.proves("library/bad-input")
@pytest.mark.parametrize(
    "options",
    [
        {"source": "none"},
        {"source": "host", "policy": "none"},
        {"source": "host", "policy": ["torch"]},
        {"source": "host", "device": "cuda"},
        {"source": "cuda", "device": "cpu"},
        {"source": HostSource(), "device": "cuda:0"},
        {"source": 3},
        {"source": HostSource},
        {"source": HostSource(), "device": "nonsense"},
        {"source": HostSource(), "device": 10**30},
        {"device": "nonsense"},
        {"device": 1.5},
        {"device": []},
        {"device": True},
        {"source": "host", "limit": 0.0},
        {"source": "host", "limit": 10**400},
        {
            "source": "host",
            "limit": 10**400,
            "policy": TorchPolicy(garbage_collection_threshold=0.5),
        },
        {"source": "host", "limit": 10**400, "policy": BfcPolicy(fragmentation_fraction=0.5)},
        {"source": "host", "policy": BfcPolicy(growth=False)},
    ],
    ids=str,
)
def test_bad_arenas(options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Arena(**options)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device_says_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match='source="host"'):
        Arena(source="cuda")
    for make in (lambda source: Arena(source=source), Cache):
        with pytest.raises(InvalidArgument, match=r'no CUDA device.* source="host"'):
            make(CudaSource(torch.device("cuda", 0)))


@pytest.mark.proves("library/bad-input")
@pytest.mark.parametrize(
    "call",
    [
        lambda arena: arena.empty(1),
        lambda arena: arena.alloc(1),
        lambda arena: arena.heap("1MiB"),
        lambda arena: arena.graph_pool(),
        lambda arena: arena.__enter__(),
    ],
)
def test_closed_arenas_refuse(arena: Arena, call: Callable[[Arena], object]) -> None:
    arena.close()
    with pytest.raises(InvalidArgument, match="closed"):
        call(arena)


@pytest.mark.parametrize("granularity", [64, 384, 768, 0, None])
def test_crooked_sources_are_refused(granularity: int) -> None:
    source = NumberSource()
    source.granularity = granularity
    with pytest.raises(InvalidArgument, match=rf"granularity .* {granularity}"):
        devalloc.Arena(source=source)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["tiny", "torch", "bfc", "auto_growth", "frugal"])
def test_on_the_gpu_a_stolen_block_is_never_overwritten_early(policy: str) -> None:
    """A long kernel on one stream writes; the memory is freed and taken on another stream."""
    for share in (False, True):
        with Arena(policy=policy, share_streams=share) as arena:
            side = torch.cuda.Stream()
            for step in range(20):
                with torch.cuda.stream(side):
                    tensor = arena.empty(1 << 20, torch.int32)
                    torch.cuda._sleep(2_000_000)
                    tensor.fill_(-1)
                    del tensor
                taken = arena.empty(1 << 20, torch.int32).fill_(step)
                torch.cuda.synchronize()
                assert (taken == step).all()
                recorded = taken
                arena.record_stream(recorded, side)
                with torch.cuda.stream(side):
                    torch.cuda._sleep(2_000_000)
                    copy = recorded.clone()
                del recorded, taken
                again = arena.empty(1 << 20, torch.int32).fill_(-2)
                torch.cuda.synchronize()
                assert (copy == step).all()
                del again
            arena.cache.audit()


@pytest.mark.gpu
def test_on_the_gpu_a_graph_with_arena_memory_replays() -> None:
    with Arena() as arena:
        pool = arena.graph_pool()
        data = torch.zeros(1 << 16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), arena.capture(pool):
            inner = arena.empty(1 << 16)
            inner.copy_(data)
            inner.add_(1)
            data.copy_(inner)
            del inner
        others = [arena.empty(1 << 16).fill_(9) for _ in range(50)]
        for _ in range(1000):
            graph.replay()
        torch.cuda.synchronize()
        assert (data == 1000).all()
        assert all((other == 9).all() for other in others)
        del others, graph
        pool.release()
        arena.cache.audit()
