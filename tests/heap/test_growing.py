"""Heaps that grow and give memory back while they are used, by hand and by themselves."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from devalloc import DoubleFree, Heap, InvalidArgument, OutOfMemory
from devalloc import kernels as da
from devalloc.heap import host_heap, watcher
from devalloc.kernels.target import is_interpreted, let_host_run
from devalloc.sources import HostSource, VirtualSource
from devalloc.sources.virtual_calls import HostPages
from tests.conftest import ON_GPU
from tests.support import DEVICE, int64

MIB = 1 << 20
CHUNK = 4 * MIB
CPU = torch.device("cpu")


class ScarcePages(HostPages):
    """Host memory of which only ``left`` bytes are there; it notes what is in use."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left
        self.fail_at = -1
        self.calls = 0

    def _step(self) -> None:
        self.calls += 1
        if self.calls >= self.fail_at > 0:
            raise OutOfMemory("injected")

    def create(self, nbytes: int):  # type: ignore[no-untyped-def]
        self._step()
        if nbytes > self.left:
            raise OutOfMemory(f"{nbytes} B asked for, {self.left} are left")
        self.left -= nbytes
        return super().create(nbytes)

    def release(self, handle, nbytes: int) -> None:  # type: ignore[no-untyped-def]
        super().release(handle, nbytes)
        self.left += nbytes

    def map(self, address: int, handle, nbytes: int) -> None:  # type: ignore[no-untyped-def]
        self._step()
        super().map(address, handle, nbytes)

    def allow(self, address: int, nbytes: int) -> None:
        self._step()
        super().allow(address, nbytes)


def scarce(left: int) -> tuple[ScarcePages, VirtualSource]:
    pages = ScarcePages(left)
    return pages, VirtualSource(CPU, pages)


def synchronise() -> None:
    """Wait for the device: while a kernel waits for the host, PyTorch's first launch of another
    kernel, or a copy to the host, would hold up the thread that grows the heap."""
    if ON_GPU:
        torch.cuda.synchronize()


@pytest.fixture
def heap() -> Iterator[Heap]:
    with Heap("4MiB", limit="64MiB") as made:
        yield made


# By hand ------------------------------------------------------------------------------------------


def test_a_heap_grows(heap: Heap) -> None:
    assert (heap.capacity, heap.limit) == (CHUNK, 64 * MIB)
    assert heap.malloc([5 * MIB]).item() == 0
    with pytest.raises(OutOfMemory, match="grow the heap, whose limit is 64 MiB"):
        heap.check()
    small = heap.malloc([MIB] * 4)
    assert (small != 0).all()
    assert heap.grow(5 * MIB) == 8 * MIB
    assert heap.capacity == 12 * MIB
    large = heap.malloc([8 * MIB])
    assert large.item() != 0
    assert heap.tensor(large, 8 * MIB, torch.uint8).fill_(7).sum() == 7 * 8 * MIB
    heap.audit()
    stats = heap.stats()
    assert (stats.capacity, stats.used, stats.limit) == (12 * MIB, 12 * MIB, 64 * MIB)
    assert 12 * MIB < stats.mapped <= 18 * MIB
    assert "may grow to 64 MiB" in str(stats)
    heap.free(torch.cat([small, large]))
    heap.check()


def test_capacity_and_limit_are_whole_chunks() -> None:
    with Heap("1MiB", limit="9MiB") as heap:
        assert (heap.capacity, heap.limit) == (4 * MIB, 12 * MIB)
        assert heap.grow(1) == CHUNK
        assert heap.grow("4MiB") == CHUNK
        with pytest.raises(InvalidArgument, match=r"limit of 12 MiB: it cannot grow by 1 B"):
            heap.grow(1)
    with Heap("1MiB") as fixed:
        assert fixed.limit == fixed.capacity == MIB
        assert fixed.stats().limit == MIB
        assert fixed.trim() == 0


def test_trim_gives_free_chunks_back_and_growing_fills_them_first(heap: Heap) -> None:
    heap.grow(12 * MIB)
    first, second, third, fourth = heap.malloc([CHUNK] * 4).tolist()
    assert sorted([first, second, third, fourth]) == [heap.base + i * CHUNK for i in range(4)]
    ends = heap.malloc([64]).item()
    assert ends == 0
    heap.clear_errors()
    kept = heap.tensor(heap.base + 2 * CHUNK, CHUNK // 8, torch.int64).copy_(
        torch.arange(CHUNK // 8, device=DEVICE)
    )
    heap.free([heap.base + CHUNK, heap.base + 3 * CHUNK])
    before = heap.stats().mapped
    assert heap.trim() == 2 * CHUNK
    assert heap.stats().mapped == before - 2 * CHUNK
    assert heap.capacity == 2 * CHUNK
    heap.audit()
    assert set(heap.snapshot().page_kind[64:128]) == {3}
    assert heap.malloc([64]).item() == 0, "what was given back cannot be allocated"
    heap.clear_errors()
    assert torch.equal(kept, torch.arange(CHUNK // 8, device=DEVICE))
    # What was freed, and is not there any more, is a double free like any other.
    heap.free([heap.base + CHUNK, heap.base + CHUNK + 16])
    with pytest.raises(DoubleFree, match="2 x double free"):
        heap.check()
    assert heap.grow(CHUNK) == CHUNK
    assert heap.malloc([CHUNK]).item() == heap.base + CHUNK
    assert heap.grow(3 * CHUNK) == 3 * CHUNK
    assert heap.malloc([3 * CHUNK]).item() == heap.base + 3 * CHUNK
    heap.audit()
    heap.reset()
    heap.audit()
    assert heap.stats().free == heap.capacity == 6 * CHUNK


@pytest.mark.parametrize("size", [64, 1024, 5000])
def test_searches_empty_all_magazines(size: int) -> None:
    """There are as many as for all pages that the heap may have."""
    with Heap("4MiB", limit="64MiB") as heap:
        heap.free(heap.malloc([size, size]))
        assert heap.malloc([4 << 20]).item() != 0


def test_a_reset_leaves_what_was_given_back(heap: Heap) -> None:
    heap.grow(8 * MIB)
    heap.malloc([CHUNK])
    assert heap.trim() == 8 * MIB
    heap.reset()
    heap.audit()
    assert heap.stats().free == CHUNK
    addrs = heap.malloc([MIB] * 5)
    assert (addrs != 0).sum() == 4
    heap.clear_errors()


def test_pieces_of_a_large_step_are_a_quarter_of_it(heap: Heap) -> None:
    assert heap.grow(32 * MIB) == 32 * MIB
    block = heap.malloc([64]).item()
    assert block == heap.base
    assert heap.trim() == 32 * MIB
    heap.grow(32 * MIB)
    run = heap.malloc([5 * MIB])
    assert run.item() != 0
    given = heap.trim()
    assert given % (8 * MIB) == 0
    assert 16 * MIB <= given <= 24 * MIB
    heap.audit()


def test_random_growing_and_trimming() -> None:
    """Blocks keep their contents whatever comes and goes around them."""
    choice = random.Random(5)
    live: dict[int, int] = {}
    with Heap("4MiB", limit="48MiB") as heap:
        for step in range(60):
            kind = choice.choice(["malloc", "malloc", "free", "grow", "trim"])
            if kind == "malloc":
                size = choice.choice([40, 3000, 70_000, 900_000, 3 * MIB])
                address = int(heap.malloc([size]))
                if address:
                    heap.tensor(address, size // 8, torch.int64).fill_(address ^ step)
                    live[address] = size, address ^ step  # type: ignore[assignment]
            elif kind == "free" and live:
                address = choice.choice(list(live))
                size, value = live.pop(address)  # type: ignore[misc]
                assert (heap.tensor(address, size // 8, torch.int64) == value).all()
                heap.free([address])
            elif kind == "grow" and heap.capacity < heap.limit:
                heap.grow(
                    choice.choice([1, 5 * MIB]) if heap.limit - heap.capacity > 8 * MIB else 1
                )
            elif kind == "trim":
                heap.trim()
            heap.audit()
            assert heap.stats().capacity == heap.capacity
        heap.clear_errors()
        for address, (size, value) in live.items():  # type: ignore[misc]
            assert (heap.tensor(address, size // 8, torch.int64) == value).all()
        heap.free(int64(list(live)))
        heap.trim()
        heap.audit()


@triton.jit
def insist_kernel(heap, out, nbytes, tries):
    """Ask until there is memory; ``out``: the address, and how often the answer was no."""
    addr = da.malloc(heap, nbytes)
    asked = tries * 0
    while (addr == 0) & (asked < tries):
        if is_interpreted():
            let_host_run()
        addr = da.malloc(heap, nbytes)
        asked += 1
    tl.store(out, addr)
    tl.store(out + 1, asked.to(tl.int64))


def test_a_kernel_gets_memory_that_is_mapped_while_it_runs(heap: Heap) -> None:
    out = int64([0, 0])
    grown = threading.Timer(0.3, heap.grow, [8 * MIB])
    # (What a kernel runs for the first time is compiled or imported before it begins. With 1 try it
    # would be compiled once more for other numbers.)
    insist_kernel[(1,)](heap.handle, out, 64, 16)
    assert out[0] != 0
    grown.start()
    # (On a GPU half a minute, far more than it takes: other tests run beside this one.)
    insist_kernel[(1,)](heap.handle, out, 6 * MIB, 20_000_000 if ON_GPU else 2000)
    synchronise()
    grown.join()
    address, asked = out.tolist()
    assert address != 0
    assert asked > 0
    heap.tensor(address, 6 * MIB, torch.uint8).fill_(1)
    heap.clear_errors()
    heap.audit()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("wait", ["synchronize", "item", "pinned", "event"])
def test_the_host_waits_for_a_kernel_that_waits_for_it(wait: str) -> None:
    """In calls that do not keep another thread of the host from growing the heap."""
    pinned = torch.zeros(2, dtype=torch.int64).pin_memory()
    event = torch.cuda.Event()

    def finish() -> None:
        if wait == "item":
            out[0].item()
        elif wait == "pinned":
            pinned.copy_(out, non_blocking=True)
        elif wait == "event":
            event.record()
            event.synchronize()
        synchronise()

    with Heap("4MiB", limit="64MiB", grow="auto") as heap:
        out = int64([0, 0])
        for nbytes in (64, 6 * MIB):  # (The first time loads what is needed.)
            insist_kernel[(1,)](heap.handle, out, nbytes, 0)
            finish()
            assert out[0] != 0
        assert heap.capacity > CHUNK
        heap.check()
        heap.audit()


@pytest.mark.gpu
def test_a_graph_that_is_replayed_sees_the_heap_grow() -> None:
    with Heap("4MiB", limit="1GiB") as heap:
        out = int64([0, 0])
        insist_kernel[(1,)](heap.handle, out, 2 * MIB, 0)
        heap.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            insist_kernel[(1,)](heap.handle, out, 2 * MIB, 0)
            with pytest.raises(InvalidArgument, match="in the capture of a graph"):
                heap.grow(1)
            with pytest.raises(InvalidArgument, match="in the capture of a graph"):
                heap.trim()
        got = set()
        for turn in range(100):
            if turn % 2 == 0:
                heap.grow(4 * MIB)
            graph.replay()
            got.add(int(out[0]))
        assert 0 not in got
        assert len(got) == 100
        heap.check()
        heap.audit()


@pytest.mark.gpu
@pytest.mark.alone
def test_the_device_has_its_memory_back() -> None:
    # (Other tests may have left idle handles, which would be mapped first.)
    VirtualSource(torch.device("cuda", 0)).trim()
    with Heap("4MiB", limit="8GiB") as heap:
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        heap.grow("2GiB")
        assert torch.cuda.mem_get_info()[0] < before - (2 << 30) + CHUNK
        block = heap.malloc([1 << 30])
        assert heap.trim() >= 512 * MIB
        heap.free(block)
        heap.trim()
        assert heap.capacity == CHUNK
        # (The records stay, half as much again as there were: 1.25 % of the heap.)
        assert torch.cuda.mem_get_info()[0] >= before - 32 * MIB


def test_a_debug_heap_grows_and_keeps_what_it_watches() -> None:
    with Heap("4MiB", limit="16MiB", debug=True) as heap:
        assert heap.grow(CHUNK) == CHUNK
        blocks = heap.malloc([3 * MIB, 3 * MIB], tag="mine")
        assert (blocks != 0).all()
        assert "6 MiB" in str(heap.leaks())
        heap.audit()
        heap.free(blocks)
        assert heap.trim() == 0
        assert heap.capacity == 8 * MIB
        heap.free(blocks[:1])
        with pytest.raises(Exception, match="was freed before"):
            heap.check()


@pytest.mark.skipif(ON_GPU, reason="the double of the driver is on the CPU")
def test_growing_that_fails_changes_nothing() -> None:
    """At each call of the driver in turn."""
    fails = 0
    for at in range(1, 40):
        pages, source = scarce(64 * MIB)
        with Heap("4MiB", limit="32MiB", source=source) as heap:
            heap.grow(8 * MIB)
            blocks = heap.malloc([CHUNK] * 3)
            heap.free(blocks[1:2])
            heap.trim()
            capacity, mapped = heap.capacity, source.stats().mapped
            pages.calls, pages.fail_at = 0, at
            try:
                heap.grow(16 * MIB)
            except OutOfMemory:
                fails += 1
                assert heap.capacity == capacity
                assert source.stats().mapped - mapped <= 2 * MIB, "state may stay mapped"
                heap.audit()
                pages.fail_at = -1
                heap.grow(16 * MIB)
            else:
                assert fails >= 6
                return
            finally:
                pages.fail_at = -1
            assert heap.capacity == capacity + 16 * MIB
            heap.audit()
    pytest.fail("it never succeeded")


# By itself ----------------------------------------------------------------------------------------


def test_a_heap_grows_by_itself() -> None:
    with Heap("1MiB", limit="128MiB", grow="auto") as heap:
        first = heap.malloc([MIB] * 7)
        synchronise()
        assert (first != 0).all()
        assert heap.capacity == CHUNK + watcher.LEAST_BYTES
        large = heap.malloc([40 * MIB])
        assert large.item() != 0
        assert heap.capacity == CHUNK + watcher.LEAST_BYTES + 40 * MIB
        heap.check()
        heap.audit()
        heap.free(torch.cat([first, large]))
        assert heap.trim() == watcher.LEAST_BYTES + 40 * MIB
        # Survives a reset, and goes on from what is left.
        heap.reset()
        again = heap.malloc([30 * MIB])
        assert again.item() != 0
        heap.check()
        # What is more than the limit fails at once, and does not make the heap larger.
        capacity = heap.capacity
        assert heap.malloc([129 * MIB]).item() == 0
        assert heap.capacity == capacity
        with pytest.raises(OutOfMemory, match="the whole heap has 128 MiB"):
            heap.check()
        # At the limit no program waits.
        assert heap.malloc([99 * MIB]).item() == 0
        assert heap.capacity == heap.limit
        assert heap.malloc([99 * MIB]).item() == 0
        heap.clear_errors()
        heap.audit()


def test_small_blocks_let_a_heap_grow() -> None:
    with Heap("1MiB", limit="64MiB", grow="auto") as heap:
        parts = [heap.malloc([30_000] * 48) for _ in range(4)]
        synchronise()
        addrs = torch.cat(parts)
        assert (addrs != 0).all()
        assert len(set(addrs.tolist())) == len(addrs)
        assert heap.capacity == CHUNK + watcher.LEAST_BYTES
        heap.check()
        heap.audit()


@pytest.mark.skipif(ON_GPU, reason="the double of the driver is on the CPU")
def test_a_device_without_memory_is_asked_again_later() -> None:
    pages, source = scarce(20 * MIB)
    with Heap("1MiB", limit="64MiB", grow="auto", source=source) as heap:
        assert heap.malloc([30 * MIB]).item() == 0
        assert heap.capacity == CHUNK, "what there is would not be enough"
        with pytest.raises(
            OutOfMemory, match=r"had no more memory .* or the host could not answer"
        ):
            heap.check()
        assert heap.malloc([5 * MIB]).item() == 0 or heap.capacity > CHUNK
        heap.clear_errors()
        pages.left += 64 * MIB
        time.sleep(3 * watcher.RETRY_S)
        assert heap.malloc([30 * MIB]).item() != 0
        heap.check()
        heap.audit()


@pytest.mark.skipif(ON_GPU, reason="CUDA is not used after a fork")
def test_a_forked_process_can_neither_grow_nor_trim() -> None:
    with Heap("1MiB", limit="32MiB", grow="auto") as heap:
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (lambda: heap.grow(1), heap.trim):
                try:
                    call()
                except InvalidArgument:
                    refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert heap.malloc([9 * MIB]).item() != 0


@pytest.mark.alone
def test_a_process_ends_while_a_heap_grows_by_itself() -> None:
    code = (
        "from devalloc import Heap\n"
        "heap = Heap('1MiB', limit='32MiB', grow='auto')\n"
        "print(int(heap.malloc([9 << 20])[0]) != 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "True\n"
    assert done.stderr == ""


@pytest.mark.skipif(ON_GPU, reason="the double of the driver is on the CPU")
@pytest.mark.parametrize("options", [{}, {"grow": "auto"}, {"debug": True}], ids=str)
def test_closing_gives_all_memory_back(options: dict[str, Any]) -> None:
    _pages, source = scarce(64 * MIB)
    heap = Heap("4MiB", limit="64MiB", source=source, **options)
    heap.grow(8 * MIB)
    assert source.stats().mapped > 12 * MIB
    heap.close()
    stats = source.stats()
    assert (stats.mapped, stats.address_space) == (0, 0)
    assert (heap.capacity, heap.limit) == (12 * MIB, 64 * MIB)


def test_after_the_end_no_host_is_asked() -> None:
    heap = Heap("1MiB", limit="32MiB", grow="auto")
    handle = heap.handle
    heap.close()
    out = int64([1, 1])
    insist_kernel[(1,)](handle, out, 9 * MIB, 1)
    assert out.tolist() == [0, 1]


@pytest.mark.skipif(ON_GPU, reason="the double of the driver is on the CPU")
def test_the_memory_of_a_large_device_is_more_than_a_heap_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_heap, "memory_of", lambda _: 2 << 40)
    with Heap("1MiB", grow="auto") as heap:
        assert heap.limit == 512 << 30


# Bad input ----------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="a limit of 2 MiB is below the capacity, 4 MiB"):
        Heap("4MiB", limit="2MiB")
    with pytest.raises(InvalidArgument, match='grow is "auto" or None'):
        Heap("4MiB", limit="8MiB", grow="yes")
    with pytest.raises(InvalidArgument, match="at most 512 GiB"):
        Heap("4MiB", limit="513GiB")
    with pytest.raises(InvalidArgument, match=r'needs a source that maps memory later: source="v'):
        Heap("4MiB", limit="8MiB", source="cuda" if ON_GPU else HostSource())
    with Heap("4MiB") as fixed, pytest.raises(InvalidArgument, match="made without a limit"):
        fixed.grow(CHUNK)
    with Heap("4MiB", limit="8MiB") as heap:
        for wrong in (-1, "much", None, 1.5):
            with pytest.raises(InvalidArgument):
                heap.grow(wrong)  # type: ignore[arg-type]
        assert heap.grow(0) == 0
    with pytest.raises(InvalidArgument, match="closed"):
        heap.grow(1)
    with pytest.raises(InvalidArgument, match="closed"):
        heap.trim()
