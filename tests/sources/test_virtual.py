"""Virtual memory: the calls of the driver and their order, against a driver that keeps its rules
strictly and fails on request; and the double on the CPU.

What CUDA does with the calls is for the tests marked `gpu`, and for `test_conformance` there.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from devalloc import Arena, DevallocError, Heap, InvalidArgument, InvalidFree, OutOfMemory
from devalloc.report.environment import virtual_memory_on
from devalloc.sources import Segment, VirtualSource, cuda_pages, handles, virtual_calls
from devalloc.sources.cuda_pages import CudaPages
from devalloc.sources.handles import HandlePool
from devalloc.sources.virtual_calls import HostPages
from tests.sources.doubles import FakeDriver, fake_driver
from tests.support import until

CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 0)
MIB, GIB = 1 << 20, 1 << 30
ACCESS = ("CU_MEM_LOCATION_TYPE_DEVICE", 0, "CU_MEM_ACCESS_FLAGS_PROT_READWRITE")


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    with fake_driver() as made:
        yield made


@pytest.fixture
def source(fake: FakeDriver) -> VirtualSource:
    """A source over the fake driver, with a pool of its own and no call noted yet."""
    made = VirtualSource(DEVICE, CudaPages(DEVICE))
    fake.calls.clear()
    return made


# The driver's calls -------------------------------------------------------------------------------


def test_what_is_asked_of_the_device(fake: FakeDriver) -> None:
    pages = CudaPages(DEVICE)
    assert fake.names() == [
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuMemGetAllocationGranularity",
    ]
    assert pages.granularity == 2 * MIB
    VirtualSource(DEVICE, pages).allocate(1)
    (properties,) = fake.properties
    assert properties.type == fake.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    assert properties.location.type == fake.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    assert properties.location.id == 0
    assert properties.allocFlags.gpuDirectRDMACapable == 1
    fake.attributes["CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"] = 0
    VirtualSource(DEVICE, CudaPages(DEVICE)).allocate(1)
    assert fake.properties[-1].allocFlags.gpuDirectRDMACapable == 0


def test_calls_and_their_order(source: VirtualSource, fake: FakeDriver) -> None:
    address = source.allocate(5000, stream=7)
    (handle,) = fake.handles
    assert fake.calls == [
        ("cuMemAddressReserve", 2 * MIB, 2 * MIB, 0, 0),
        ("cuMemCreate", 2 * MIB, 0),
        ("cuMemMap", address, 2 * MIB, 0, handle, 0),
        ("cuMemSetAccess", address, 2 * MIB, ACCESS, 1),
    ]
    fake.calls.clear()
    source.free(address, 5000, stream=7)
    assert fake.calls == [
        ("cuStreamSynchronize", 7),
        ("cuMemUnmap", address, 2 * MIB),
        ("cuMemAddressFree", address, 2 * MIB),
    ]
    fake.calls.clear()
    address = source.allocate(2 * MIB)
    source.free(address, 2 * MIB)
    assert fake.names() == [
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuCtxSynchronize",
        "cuMemUnmap",
        "cuMemAddressFree",
    ], "the idle handle is mapped again, and without a stream the call waits for the device"
    assert source.trim() == 2 * MIB
    assert fake.calls[-1] == ("cuMemRelease", handle)
    assert not any(fake.state)


@pytest.mark.parametrize(
    ("nbytes", "largest", "expected"),
    [
        (1, GIB, [2]),
        (20 * MIB, GIB, [20]),
        (GIB, GIB, [1024]),
        (GIB + 1, GIB, [1024, 2]),
        (3 * GIB + 6 * MIB, GIB, [1024, 1024, 1024, 6]),
        (3 * GIB, 8 * GIB, [1024, 1024, 1024]),
        (10 * MIB, "4MiB", [4, 4, 2]),
        (6 * MIB, 1, [2, 2, 2]),
    ],
)
def test_handles_are_few_or_as_small_as_asked_for(
    source: VirtualSource, fake: FakeDriver, nbytes: int, largest: int | str, expected: list[int]
) -> None:
    address = source.reserve(nbytes)
    source.map(address, largest=largest)
    sizes = [fake.mapped[at][0] // MIB for at in sorted(fake.mapped)]
    assert sizes == expected
    assert fake.names().count("cuMemSetAccess") == 1, "one call for all handles"
    fake.calls.clear()
    source.unmap(address)
    assert fake.names() == ["cuMemUnmap"], "one call, and no waiting"
    source.free(address, nbytes)


@pytest.mark.proves("saver/reserve-map")
def test_parts_come_and_go_at_their_place(source: VirtualSource, fake: FakeDriver) -> None:
    address = source.reserve(64 * MIB)
    assert source.stats().address_space == 64 * MIB
    assert source.stats().mapped == 0
    source.map(address, 8 * MIB, 16 * MIB, largest="4MiB")
    source.map(address, 40 * MIB, 8 * MIB)
    source.map(address, 24 * MIB, 4 * MIB)
    assert source.stats().mapped == 28 * MIB
    source.unmap(address, 12 * MIB, 4 * MIB)
    source.unmap(address, 20 * MIB, 8 * MIB)  # handles of two calls, in one
    assert sorted(at - address for at in fake.mapped) == [8 * MIB, 16 * MIB, 40 * MIB]
    source.map(address, 0, 8 * MIB)
    fake.calls.clear()
    source.free(address, 64 * MIB)
    assert fake.calls == [
        ("cuCtxSynchronize",),
        ("cuMemUnmap", address, 12 * MIB),
        ("cuMemUnmap", address + 16 * MIB, 4 * MIB),
        ("cuMemUnmap", address + 40 * MIB, 8 * MIB),
        ("cuMemAddressFree", address, 64 * MIB),
    ]
    assert source.stats().mapped == source.stats().address_space == 0


def test_a_reservation_without_memory_waits_for_nothing(
    source: VirtualSource, fake: FakeDriver
) -> None:
    source.free(source.reserve(5000), 5000)
    assert fake.names() == ["cuMemAddressReserve", "cuMemAddressFree"]


PARTS = {
    "not a multiple": (1, 2 * MIB),
    "size not a multiple": (0, 100),
    "behind the end": (8 * MIB, 2 * MIB),
    "across the end": (6 * MIB, 4 * MIB),
    "nothing": (0, 0),
    "negative": (-2 * MIB, 2 * MIB),
    "all from the end on": (8 * MIB, None),
    "no int": (0.0, 2 * MIB),
    "text": (0, "2MiB"),
    "a bool": (False, 2 * MIB),
    "huge": (0, 10**5000),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_parts_that_are_none(
    source: VirtualSource, fake: FakeDriver, part: tuple[int, int]
) -> None:
    address = source.reserve(8 * MIB)
    fake.calls.clear()
    for call in (source.map, source.unmap):
        with pytest.raises(InvalidArgument, match="no part of the reservation of 8388608 B"):
            call(address, *part)
    assert not fake.calls
    source.free(address, 8 * MIB)


def test_what_is_mapped_cannot_be_mapped_nor_half_unmapped(
    source: VirtualSource, fake: FakeDriver
) -> None:
    address = source.reserve(16 * MIB)
    source.map(address, 4 * MIB, 8 * MIB)
    before = [dict(each) if isinstance(each, dict) else set(each) for each in fake.state]
    for part in ((0, 16 * MIB), (4 * MIB, 2 * MIB), (10 * MIB, 4 * MIB), (2 * MIB, 4 * MIB)):
        with pytest.raises(InvalidArgument, match="8 MiB are mapped at offset 4194304"):
            source.map(address, *part)
        with pytest.raises(InvalidArgument, match="not all of it is mapped, or a handle reaches"):
            source.unmap(address, *part)
    with pytest.raises(InvalidArgument, match="not all of it is mapped"):
        source.unmap(address, 0, 2 * MIB)
    assert [*fake.state] == before
    for bad in (0, address + 2 * MIB, "x", None, True):
        for call in (source.map, source.unmap):
            with pytest.raises(InvalidArgument, match=r"no reservation .* begins at"):
                call(bad)
    for bad in (0, 3 * MIB, "3MiB", "x", -1, 1.5):
        with pytest.raises(InvalidArgument):
            source.map(address, 0, 2 * MIB, largest=bad)
    source.unmap(address, 4 * MIB, 8 * MIB)
    source.free(address, 16 * MIB)
    with pytest.raises(InvalidArgument, match="no reservation"):
        source.map(address)


def test_access_is_set_again_while_the_driver_is_not_ready(
    source: VirtualSource, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = fake.CUresult.CUDA_ERROR_NOT_READY
    fake.fail["cuMemSetAccess"] = [busy] * 5
    address = source.allocate(1)
    assert fake.names().count("cuMemSetAccess") == 6
    source.free(address, 1)
    source.trim()
    monkeypatch.setattr(cuda_pages, "ACCESS_PATIENCE_S", 0.01)
    fake.fail["cuMemSetAccess"] = [busy] * 100_000
    with pytest.raises(DevallocError, match="cuMemSetAccess of 2 MiB failed: CUDA_ERROR_NOT_READY"):
        source.allocate(1)
    assert not any(fake.state)


def test_detached_memory_is_held(source: VirtualSource, fake: FakeDriver) -> None:
    address = source.reserve(16 * MIB)
    source.map(address, 0, 4 * MIB, largest="2MiB")
    source.map(address, 8 * MIB, 8 * MIB)
    before = dict(fake.mapped)
    fake.calls.clear()
    source.detach(address)
    assert fake.names() == ["cuMemUnmap"] * 2
    assert not fake.mapped
    assert (source.stats().mapped, source.stats().idle) == (0, 12 * MIB)
    assert source.trim() == 0, "no other call gets it"
    for call in (source.map, source.detach):
        with pytest.raises(InvalidArgument, match="is detached; attach or discard it first"):
            call(address)
    source.attach(address)
    source.attach(address)
    assert fake.mapped == before, "the same handles, at their places"
    consistent(source, fake)
    source.detach(address)
    source.discard(address)
    source.discard(address)
    assert not fake.handles, "the device has it back"
    source.map(address)
    source.detach(address)
    source.free(address, 16 * MIB)
    assert source.stats().idle == 16 * MIB


def test_on_the_cpu_detached_memory_keeps_its_contents() -> None:
    source = VirtualSource(CPU, HostPages())
    address = source.allocate(4 * MIB)
    ctypes.memset(address, 5, 4 * MIB)
    source.detach(address)
    source.attach(address)
    assert ctypes.string_at(address, 4 * MIB) == b"\x05" * (4 * MIB)
    source.detach(address)
    source.discard(address)
    source.map(address)
    assert ctypes.string_at(address, 4 * MIB) == bytes(4 * MIB)
    source.free(address, 4 * MIB)


# Failures -----------------------------------------------------------------------------------------


def scenario(source: VirtualSource, record: list[tuple[int, int]]) -> None:
    """A call of every kind, with several handles; ``record`` has what is out."""

    def allocate(call: Callable[[int], int], nbytes: int) -> int:
        address = call(nbytes)
        record.append((address, nbytes))
        return address

    first = allocate(source.allocate, 3 * GIB)
    second = allocate(source.reserve, 64 * MIB)
    source.map(second, 0, 32 * MIB, largest="8MiB")
    source.unmap(second, 8 * MIB, 8 * MIB)
    source.map(second, 8 * MIB, 8 * MIB)
    source.unmap(second, 16 * MIB, 16 * MIB, keep=False)
    source.map(second, 48 * MIB, 16 * MIB, largest="8MiB")
    source.detach(second)
    source.attach(second)
    source.detach(second)
    source.discard(second)
    source.map(second)
    source.detach(second)
    source.free(first, 3 * GIB)
    record.remove((first, 3 * GIB))
    source.free(second, 64 * MIB)
    record.remove((second, 64 * MIB))


def consistent(source: VirtualSource, fake: FakeDriver) -> None:
    """The counts of the source are those of the driver."""
    stats = source.stats()
    assert stats.address_space == sum(fake.reserved.values())
    assert stats.mapped == sum(nbytes for nbytes, _ in fake.mapped.values())
    assert stats.mapped + stats.idle == sum(fake.handles.values())
    assert fake.accessible == set(fake.mapped)


def calls_of_the_scenario() -> int:
    """How many calls of the driver it makes."""
    with fake_driver() as fake:
        source = VirtualSource(DEVICE, CudaPages(DEVICE))
        source.idle_limit = "8GiB"  # nothing in the background
        fake.calls.clear()
        scenario(source, [])
        return len(fake.calls)


@pytest.mark.proves("saver/reserve-map")
@pytest.mark.parametrize("call", range(1, calls_of_the_scenario() + 1))
def test_every_call_may_fail(
    source: VirtualSource, fake: FakeDriver, call: int, unraisable: list[str]
) -> None:
    """The error arrives, everything is undone, and the next correct call works."""
    source.idle_limit = "8GiB"
    fake.fail_at = call
    record: list[tuple[int, int]] = []
    failed = None
    try:
        scenario(source, record)
    except DevallocError as error:
        failed = error
    name = fake.calls[call - 1][0]
    if name in ("cuMemRelease", "cuMemAddressFree"):
        # What its caller wanted has happened: the addresses or the handle wait for the next time.
        assert failed is None
        assert len(unraisable) == 1
        assert f"{name} of" in unraisable[0]
    else:
        assert "CUDA_ERROR_UNKNOWN" in str(failed)
        assert not unraisable
    consistent(source, fake)
    ended = {each.address for each in source._ended}
    assert {address for address, _ in record} == set(fake.reserved) - ended
    for address, nbytes in record:
        source.free(address, nbytes)
    scenario(source, [])
    source.trim()
    assert not any(fake.state), "nothing is left behind"


def test_a_map_that_can_neither_be_done_nor_undone_stays_on_record(
    source: VirtualSource, fake: FakeDriver
) -> None:
    unknown = fake.CUresult.CUDA_ERROR_UNKNOWN
    address = source.reserve(8 * MIB)
    fake.fail["cuMemMap"] = [fake.CUresult.CUDA_SUCCESS] * 3 + [unknown]
    fake.fail["cuMemUnmap"] = [unknown]
    with pytest.raises(DevallocError, match="cuMemMap of 2 MiB failed: CUDA_ERROR_UNKNOWN"):
        source.map(address, largest="2MiB")
    assert source.stats().mapped == 6 * MIB == sum(size for size, _ in fake.mapped.values())
    assert len(fake.handles) == 3, "the fourth was released"
    source.unmap(address, 0, 6 * MIB)
    source.map(address)
    source.free(address, 8 * MIB)
    source.trim()
    assert not any(fake.state)


def test_a_failed_free_may_be_repeated(source: VirtualSource, fake: FakeDriver) -> None:
    unknown = fake.CUresult.CUDA_ERROR_UNKNOWN
    address = source.allocate(5000)
    for name in ("cuCtxSynchronize", "cuMemUnmap"):
        fake.fail[name] = [unknown]
        with pytest.raises(DevallocError, match="CUDA_ERROR_UNKNOWN"):
            source.free(address, 5000)
        consistent(source, fake)
        assert source.stats().mapped == 2 * MIB, "it is as it was"
    # At the end of the process everything is gone already.
    gone = fake.CUresult.CUDA_ERROR_DEINITIALIZED
    fake.fail = {name: [gone] for name in ("cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree")}
    source.free(address, 5000)
    with pytest.raises(InvalidFree):
        source.free(address, 5000)


@pytest.mark.parametrize(
    ("call", "status", "error", "text"),
    [
        ("cuMemAddressReserve", "OUT_OF_MEMORY", OutOfMemory, r"cuMemAddressReserve of .*ask for"),
        ("cuMemAddressReserve", "NOT_PERMITTED", DevallocError, r'PERMITTED; .*use source="cuda"'),
        ("cuMemCreate", "OUT_OF_MEMORY", OutOfMemory, r"cuMemCreate .*3 GiB of 8 GiB are free"),
        ("cuMemCreate", "NOT_SUPPORTED", DevallocError, r'cannot map memory .*use source="cuda"'),
        ("cuMemMap", "OUT_OF_MEMORY", OutOfMemory, r"cuMemMap of 2 MiB on cuda:0 failed"),
        ("cuMemSetAccess", "OUT_OF_MEMORY", OutOfMemory, r"cuMemSetAccess of 2 MiB on cuda:0"),
    ],
)
def test_what_errors_say(
    source: VirtualSource,
    fake: FakeDriver,
    call: str,
    status: str,
    error: type[DevallocError],
    text: str,
) -> None:
    fake.fail[call] = [getattr(fake.CUresult, f"CUDA_ERROR_{status}")] * 2
    with pytest.raises(DevallocError, match=text) as caught:
        source.allocate(5)
    assert type(caught.value) is error
    assert not any(fake.state)


def test_devices_without_virtual_memory(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.fail["cuMemGetAllocationGranularity"] = [fake.CUresult.CUDA_ERROR_INVALID_VALUE]
    with pytest.raises(DevallocError, match="granularity failed: CUDA_ERROR_INVALID_VALUE"):
        VirtualSource(DEVICE)
    fake.fail["cuDeviceGet"] = [fake.CUresult.CUDA_ERROR_INVALID_DEVICE]
    with pytest.raises(DevallocError, match=r"VIRTUAL_MEMORY.*failed: CUDA_ERROR_INVALID_DEVICE"):
        VirtualSource(DEVICE)
    fake.attributes["CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"] = 0
    with pytest.raises(InvalidArgument, match=r'cuda:0 has no virtual memory .*use source="cuda"'):
        VirtualSource(DEVICE)
    fake.calls.clear()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(InvalidArgument, match='built for ROCm; use source="cuda"'):
        VirtualSource(DEVICE)
    assert not fake.calls


def test_info_says_whether_memory_can_be_mapped(fake: FakeDriver) -> None:
    devices = [DEVICE, torch.device("cuda", 1)]
    works = virtual_memory_on(devices)
    assert works.works
    assert "multiples of 2 MiB" in works.detail
    assert not any(fake.state), "nothing stays"
    fake.fail["cuMemCreate"] = [
        fake.CUresult.CUDA_SUCCESS,
        fake.CUresult.CUDA_ERROR_NOT_SUPPORTED,
    ]
    refused = virtual_memory_on(devices)
    assert not refused.works
    assert refused.detail.startswith(
        "cuda:1: cuMemCreate of 2 MiB failed: CUDA_ERROR_NOT_SUPPORTED"
    )
    fake.attributes["CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"] = 0
    old = virtual_memory_on(devices)
    assert not old.works
    assert old.detail == 'cuda:0: cuda:0 has no virtual memory management; use source="cuda"'


# Idle handles -------------------------------------------------------------------------------------


def test_idle_handles_have_a_limit(source: VirtualSource, fake: FakeDriver) -> None:
    """The oldest go first, in the background; the total is counted all the time."""
    source.idle_limit = "8MiB"
    at = [source.allocate(nbytes * MIB) for nbytes in (2, 4, 2, 4)]
    order = list(fake.handles)
    for address, nbytes in zip(at, (2, 4, 2, 4), strict=True):
        source.free(address, nbytes * MIB)
    until(lambda: len(fake.handles) == 2)
    assert list(fake.handles) == order[2:]
    until(lambda: source.stats().idle == 6 * MIB)
    source.idle_limit = 2 * MIB
    source.trim(keep="2MiB")
    assert sum(fake.handles.values()) == source.stats().idle == 0, "4 MiB do not fit, 2 are older"
    assert source.idle_limit == source.stats().idle_limit == 2 * MIB
    for bad in (-1, "x", None, 1.5):
        with pytest.raises(InvalidArgument):
            source.idle_limit = bad
        with pytest.raises(InvalidArgument):
            source.trim(bad)


def test_idle_handles_go_when_memory_runs_out(fake: FakeDriver) -> None:
    fake.capacity = 16 * MIB
    source = VirtualSource(DEVICE, CudaPages(DEVICE))
    for address in [source.allocate(4 * MIB) for _ in range(4)]:
        source.free(address, 4 * MIB)
    assert source.stats().idle == 16 * MIB
    address = source.allocate(6 * MIB)
    assert fake.handles == {5: 6 * MIB}
    with pytest.raises(OutOfMemory, match="cuMemCreate of 12 MiB on cuda:0 failed"):
        source.allocate(12 * MIB)
    consistent(source, fake)
    source.free(address, 6 * MIB)


def test_memory_that_is_not_kept_is_back_at_once(source: VirtualSource, fake: FakeDriver) -> None:
    address = source.allocate(4 * MIB)
    source.unmap(address, keep=False)
    assert fake.names()[-2:] == ["cuMemUnmap", "cuMemRelease"]
    assert not fake.handles
    source.map(address)
    source.free(address, 4 * MIB)


def test_a_release_in_the_background_is_waited_for(
    source: VirtualSource, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that finds no memory gets what is just being released."""
    fake.capacity = 4 * MIB
    source.idle_limit = 0
    started, go_on = threading.Event(), threading.Event()
    real = fake.cuMemRelease

    def slow(handle: int) -> tuple[object]:
        started.set()
        assert go_on.wait(10)
        return real(handle)

    monkeypatch.setattr(fake, "cuMemRelease", slow)
    source.free(source.allocate(4 * MIB), 4 * MIB)
    assert started.wait(10), "no call waits for it: a thread does it"
    threading.Timer(0.05, go_on.set).start()
    address = source.allocate(4 * MIB)
    source.free(address, 4 * MIB)


def test_sources_of_a_device_share_their_idle_handles(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles, "_POOLS", {})
    first, second = VirtualSource(DEVICE), VirtualSource(DEVICE)
    other = VirtualSource(torch.device("cuda", 1))
    first.free(first.allocate(4 * MIB), 4 * MIB)
    assert second.stats().idle == 4 * MIB
    assert other.stats().idle == 0
    address = second.allocate(4 * MIB)
    assert second.stats().handles_reused == 1
    assert first.stats().idle == 0
    assert first.stats().mapped == 0, "that is the other's"
    second.free(address, 4 * MIB)


def test_statistics_change_nothing(source: VirtualSource, fake: FakeDriver) -> None:
    source.free(source.allocate(4 * MIB), 4 * MIB)
    address = source.allocate(2 * MIB)
    fake.calls.clear()
    assert source.stats() == source.stats()
    assert not fake.calls
    source.free(address, 2 * MIB)


def test_threads_share_a_pool(fake: FakeDriver) -> None:
    """Random calls of four threads; the driver's rules are never broken, nothing is lost."""
    source = VirtualSource(DEVICE, CudaPages(DEVICE))
    source.idle_limit = "16MiB"
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(60):
                size = draw.choice((2, 4, 6, 8)) * MIB
                address = source.reserve(size)
                source.map(address, largest=draw.choice((2 * MIB, 4 * MIB, GIB)))
                if draw.random() < 0.5:
                    source.unmap(address, keep=draw.random() < 0.7)
                if draw.random() < 0.1:
                    source.trim("8MiB")
                source.free(address, size)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    source.trim()
    until(lambda: not any(fake.state))
    assert source.stats().idle == 0


def test_of_threads_that_map_one_place_one_succeeds(source: VirtualSource) -> None:
    address = source.reserve(2 * MIB)
    start = threading.Barrier(4)
    outcomes: list[object] = []

    def work() -> None:
        start.wait()
        try:
            source.map(address)
            outcomes.append("mapped")
        except InvalidArgument as error:
            outcomes.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes.count("mapped") == 1
    assert len(outcomes) == 4
    source.free(address, 2 * MIB)


def test_a_pool_refuses_no_handle(source: VirtualSource, fake: FakeDriver) -> None:
    """Handles of sizes that are not asked for again are released in the end."""
    source.idle_limit = "64MiB"
    for nbytes in range(2, 40, 2):
        source.free(source.allocate(nbytes * MIB), nbytes * MIB)
    until(lambda: source.stats().idle <= 64 * MIB)
    assert max(fake.handles.values()) == 38 * MIB, "the newest"
    assert isinstance(source._pool, HandlePool)


# The double on the CPU ----------------------------------------------------------------------------


def test_on_the_cpu_memory_keeps_its_place() -> None:
    source = VirtualSource(CPU)
    segment = Segment(source, 8 * MIB)
    view = segment.view()
    view.fill_(7)
    source.unmap(segment.address, keep=False)
    source.map(segment.address)
    assert view.data_ptr() == segment.address
    assert int(view.sum()) == 0, "nothing stays of what was released"
    view.fill_(8)
    assert int(view[-1]) == 8


def test_on_the_cpu_contents_stay_with_the_place() -> None:
    """Until the handle is mapped elsewhere, or another there."""
    source = VirtualSource(CPU, HostPages())
    first, second = source.allocate(2 * MIB), source.reserve(4 * MIB)
    ctypes.memset(first, 1, 2 * MIB)
    source.unmap(first)
    source.map(first)
    assert ctypes.string_at(first, 8) == b"\x01" * 8
    source.unmap(first)
    source.map(second, 2 * MIB, 2 * MIB)
    assert ctypes.string_at(second + 2 * MIB, 8) == bytes(8), "moved: dropped there"
    ctypes.memset(second + 2 * MIB, 2, 2 * MIB)
    source.unmap(second, 2 * MIB, 2 * MIB)
    source.map(second)
    assert ctypes.string_at(second + 2 * MIB, 8) == bytes(8), "another handle"
    ctypes.memset(second, 3, 4 * MIB)
    source.map(first)
    assert ctypes.string_at(second, 4 * MIB) == b"\x03" * (4 * MIB), "what rested there is gone"
    source.free(first, 2 * MIB)
    source.free(second, 4 * MIB)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_on_the_cpu_unmapped_memory_is_back() -> None:
    source = VirtualSource(CPU)
    address = source.reserve(1 << 40)  # addresses cost nothing
    source.map(address, 0, 128 * MIB)
    before = resident()
    ctypes.memset(address, 1, 128 * MIB)
    assert resident() - before > 100 * MIB
    source.unmap(address, 0, 128 * MIB, keep=False)
    assert resident() - before < 28 * MIB
    source.free(address, 1 << 40)


@pytest.mark.parametrize("where", ["before", "after", "never"])
def test_on_the_cpu_a_touch_of_what_is_not_mapped_is_caught(where: str) -> None:
    code = f"""
import ctypes, torch
from devalloc.sources import VirtualSource
source = VirtualSource(torch.device("cpu"))
address = source.reserve(4 << 20)
if {where!r} == "before":
    ctypes.memset(address, 1, 1)
source.map(address, 0, 2 << 20)
ctypes.memset(address, 1, 2 << 20)
if {where!r} == "after":
    ctypes.memset(address + (2 << 20), 1, 1)
source.unmap(address, 0, 2 << 20)
print("alive", flush=True)
ctypes.memset(address, 1, 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -11, done.stderr
    assert done.stdout.strip() == ("alive" if where == "never" else "")


@pytest.mark.parametrize("call", ["mmap", "mprotect", "munmap", "madvise"])
def test_on_the_cpu_every_call_may_fail(
    call: str, monkeypatch: pytest.MonkeyPatch, unraisable: list[str]
) -> None:
    """The error says which call and why, and the next correct call works."""
    source = VirtualSource(CPU, HostPages())
    address = source.allocate(5000)
    ctypes.memset(address, 5, 5000)

    from devalloc.sources import libc as libc_calls
    from devalloc.sources import virtual_calls as pages

    class Failing:
        def __getattr__(self, name: str) -> object:
            if name != call:
                return getattr(libc, name)
            failure = ctypes.c_void_p(-1).value if name == "mmap" else -1

            def fail(*_: object) -> object:
                ctypes.set_errno(12)
                return failure

            return fail

    libc = pages.libc()
    for module in (pages, libc_calls):
        monkeypatch.setattr(module, "libc", Failing)
    if call in ("mmap", "mprotect"):
        with pytest.raises(OutOfMemory, match=r"Cannot allocate memory.*ask for less"):
            source.allocate(5000)
    if call == "madvise":
        with pytest.raises(DevallocError, match=r"madvise of 2 MiB failed: Cannot allocate"):
            source.allocate(5000)
    if call == "mprotect":
        with pytest.raises(DevallocError, match=r"mprotect of 2 MiB failed: Cannot allocate"):
            source.free(address, 5000)
    if call != "munmap":
        assert ctypes.string_at(address, 5000) == b"\x05" * 5000
    assert bool(unraisable) == (call == "mprotect"), "a map that could not be undone"
    for module in (pages, libc_calls):
        monkeypatch.setattr(module, "libc", lambda: libc)
    source.free(address, 5000)
    assert source.stats().mapped == source.stats().address_space == 0


def test_on_the_cpu_addresses_that_stay_are_tried_again(
    monkeypatch: pytest.MonkeyPatch, unraisable: list[str]
) -> None:
    pages = HostPages()
    source = VirtualSource(CPU, pages)
    address = source.allocate(1)

    def refuse(address: int, nbytes: int) -> None:
        raise DevallocError("not now")

    monkeypatch.setattr(pages, "unreserve", refuse)
    source.free(address, 1)
    assert unraisable == ["not now"]
    assert source.stats().address_space == 2 * MIB
    assert source.stats().mapped == 0
    with pytest.raises(InvalidFree):
        source.free(address, 1)
    monkeypatch.undo()
    source.free(source.allocate(1), 1)
    assert source.stats().address_space == 0


@pytest.mark.parametrize("where", ["in another thread", "in a finalizer"])
def test_on_the_cpu_addresses_are_released_while_their_handle_leaves(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = VirtualSource(CPU, HostPages())
    first, second = source.allocate(2 * MIB), source.reserve(2 * MIB)
    source.unmap(first)
    other = threading.Thread(target=source.free, args=(first, 2 * MIB))
    real = virtual_calls.drop
    released_early = []

    def drop(address: int, nbytes: int) -> None:
        if address == first and where == "in a finalizer":
            source.free(first, 2 * MIB)
        elif address == first:
            other.start()
            other.join(0.2)
            released_early.append(not other.is_alive())
        real(address, nbytes)

    monkeypatch.setattr(virtual_calls, "drop", drop)
    source.map(second)  # takes the handle whose contents rest at the first
    monkeypatch.undo()
    if where == "in another thread":
        other.join(10)
        assert released_early == [False], "the addresses could be someone else's by then"
    ctypes.memset(second, 1, 2 * MIB)
    source.free(second, 2 * MIB)
    stats = source.stats()
    assert (stats.mapped, stats.address_space, stats.idle) == (0, 0, 2 * MIB)


def test_on_the_cpu_a_process_is_forked_while_a_thread_maps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = VirtualSource(CPU, HostPages())
    first, second = source.allocate(2 * MIB), source.reserve(2 * MIB)
    source.unmap(first)
    real = virtual_calls.drop
    entered = threading.Event()

    def drop(address: int, nbytes: int) -> None:
        entered.set()
        time.sleep(0.2)
        real(address, nbytes)

    monkeypatch.setattr(virtual_calls, "drop", drop)
    mapping = threading.Thread(target=source.map, args=(second,))
    mapping.start()
    assert entered.wait(10)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        monkeypatch.undo()
        source.free(source.allocate(2 * MIB), 2 * MIB)
        os._exit(0)
    mapping.join()
    assert os.waitpid(child, 0)[1] == 0
    source.free(first, 2 * MIB)
    source.free(second, 2 * MIB)


def test_a_forked_childs_memory_is_its_own() -> None:
    source = VirtualSource(CPU)
    address = source.allocate(5000)
    ctypes.memset(address, 1, 5000)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ctypes.memset(address, 2, 5000)
            other = source.allocate(5000)
            ctypes.memset(other, 3, 5000)
            source.free(other, 5000)
            source.free(address, 5000)
            status = int(source.trim() == 0)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert ctypes.string_at(address, 5000) == b"\x01" * 5000
    source.free(address, 5000)


# Above --------------------------------------------------------------------------------------------


def test_the_granularity_counts_in_an_arena() -> None:
    """200 blocks of 300 KiB under a limit of 64 MiB take no more than that from the device."""
    source = VirtualSource(CPU, HostPages())
    with Arena(source=source, policy="auto_growth", limit="64MiB") as arena:
        blocks = [arena.alloc("300KiB") for _ in range(32 * 6)]  # six in each 2 MiB
        with pytest.raises(OutOfMemory, match="a segment of 2 MiB was wanted, 64 MiB are reserved"):
            arena.alloc("300KiB")
        assert source.stats().mapped == arena.memory_reserved() == 64 * MIB
        arena.cache.audit()
        for block in blocks:
            arena.free(block)
    assert source.stats().mapped == 0


@pytest.mark.parametrize("limit", ["63MiB", "64MiB"])
@pytest.mark.parametrize("policy", ["torch", "tiny", "bfc", "auto_growth", "frugal"])
def test_no_policy_takes_more_than_its_limit(policy: str, limit: str) -> None:
    source = VirtualSource(CPU, HostPages(granularity=8 * MIB))
    draw = random.Random(5)
    with Arena(source=source, policy=policy, limit=limit) as arena:
        live = []
        for _ in range(300):
            if live and draw.random() < 0.45:
                arena.free(live.pop(draw.randrange(len(live))))
                continue
            try:
                live.append(arena.alloc(draw.choice((1000, 300_000, 3 * MIB, 11 * MIB))))
            except OutOfMemory:
                for block in live:
                    arena.free(block)
                live.clear()
            assert source.stats().mapped == arena.memory_reserved() <= arena.cache.limit
        arena.cache.audit()
        for block in live:
            arena.free(block)


def test_arenas_and_heaps_by_name() -> None:
    with Arena("cpu", source="virtual") as arena:
        tensor = arena.full((1000,), 3.0)
        assert float(tensor.sum()) == 3000
        stats = arena.stats()
        assert stats["virtual_bytes.mapped"] == stats["virtual_bytes.address_space"] == 2 * MIB
        del tensor
        arena.empty_cache()
        assert arena.stats()["virtual_bytes.mapped"] == 0
        assert arena.stats()["virtual_bytes.idle"] == 0, "the device has it back"
        assert "virtual_bytes.idle" not in Arena(source="host").stats()
    with pytest.raises(InvalidArgument, match="unknown source 'vitrual'; there are cuda, virtual,"):
        Arena(source="vitrual")
    for kind, name in (("cpu", "cuda"), ("cpu", "async"), ("cuda", "host")):
        with pytest.raises(InvalidArgument, match=f"the source '{name}' has no memory on {kind}"):
            Arena(kind, source=name)


def test_a_heap_by_name(device: str) -> None:
    with Heap("1MiB", source="virtual") as heap:
        addresses = heap.malloc([100, 5000])
        assert (addresses != 0).all()
        heap.free(addresses)
        heap.audit()
    wrong = "cuda" if device == "cpu" else "host"
    with pytest.raises(InvalidArgument, match=f"the source '{wrong}' has no memory on {device}"):
        Heap("1MiB", source=wrong)
    with pytest.raises(InvalidArgument, match="unknown source 'x'"):
        Heap("1MiB", source="x")


# On a GPU -----------------------------------------------------------------------------------------


@pytest.mark.proves("saver/reserve-map")
@pytest.mark.gpu
@pytest.mark.alone
def test_on_the_gpu_memory_comes_and_goes_at_one_address() -> None:
    source = VirtualSource(DEVICE)
    # The kernels are loaded now, which takes memory.
    warm = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    assert int(warm.fill_(7)[-1]) == int(warm[:1].sum(dtype=torch.int64)) == 7
    source.trim()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    segment = Segment(source, 256 * MIB)
    segment.view().fill_(7)
    assert int(segment.view()[-1]) == 7
    torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info()[0] >= 256 * MIB
    source.unmap(segment.address, keep=False)
    assert free - torch.cuda.mem_get_info()[0] < 32 * MIB
    source.map(segment.address)
    segment.view().fill_(9)
    assert int(segment.view(255 * MIB).sum(dtype=torch.int64)) == 9 * MIB


@pytest.mark.gpu
def test_on_the_gpu_mapping_does_not_wait_for_a_kernel() -> None:
    source = VirtualSource(DEVICE)
    address = source.reserve(64 * MIB)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)
    source.map(address, 0, 32 * MIB)
    source.unmap(address, 0, 32 * MIB)
    assert not stream.query(), "neither call waited"
    stream.synchronize()
    source.free(address, 64 * MIB)


@pytest.mark.gpu
@pytest.mark.alone
def test_on_the_gpu_nothing_is_lost_in_a_thousand_rounds() -> None:
    source = VirtualSource(DEVICE)
    source.trim()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    draw = random.Random(1)
    for _ in range(1000):
        address = source.reserve(64 * MIB)
        source.map(
            address, 0, draw.choice((2, 4, 20, 64)) * MIB, largest=draw.choice((2, 64)) * MIB
        )
        source.free(address, 64 * MIB)
    source.trim()
    # (A handle lost in each round would be 2 GB.)
    assert abs(torch.cuda.mem_get_info()[0] - free) < 1000 * MIB
