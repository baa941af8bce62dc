"""The CUDA calls that backups make, against a runtime that only takes notes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from devalloc import DevallocError, OutOfMemory
from devalloc.arena.regions import host_memory
from devalloc.arena.regions.copies import copies_on
from devalloc.arena.regions.host_memory import HostMemory
from tests.arena.support import MIB, FakeStreams
from tests.sources.doubles import FakeRuntime, fake_runtime

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    made = fake_runtime(monkeypatch)
    monkeypatch.setattr(host_memory, "PIECE", MIB)
    yield made
    gc.collect()


def test_pieces_are_locked_once_and_unlocked_before_they_go(fake: FakeRuntime) -> None:
    memory = HostMemory(2 * MIB + 5000, DEVICE)
    address = memory.address
    assert list(memory.pieces(2 * MIB, only_locked=True)) == [(0, MIB), (MIB, 2 * MIB)]
    assert (memory.pinned, memory.committed) == (2 * MIB, 2 * MIB)
    ends = [MIB, 2 * MIB, 2 * MIB + 5000]
    assert [end for _, end in memory.pieces(2 * MIB)] == ends
    assert (memory.pinned, memory.committed) == (2 * MIB, 2 * MIB + 5000)
    memory.drop_pageable()
    assert memory.committed == 2 * MIB
    assert [end for _, end in memory.pieces(3 * MIB)] == ends
    flags = fake.cudaHostRegisterPortable
    places = [(address, MIB), (address + MIB, MIB), (address + 2 * MIB, 5000)]
    assert fake.calls == [("cudaHostRegister", at, size, flags) for at, size in places]
    view = memory.segment.view()
    fake.calls.clear()
    del memory
    gc.collect()
    assert fake.calls == [("cudaHostUnregister", at) for at, _ in places]
    view.fill_(1)  # it is still there


def test_memory_that_cannot_be_locked(fake: FakeRuntime) -> None:
    memory = HostMemory(MIB, DEVICE)
    fake.fail["cudaHostRegister"] = fake.cudaError_t.cudaErrorMemoryAllocation
    with pytest.raises(OutOfMemory, match=r"cudaHostRegister of 1 MiB failed.*backup_budget"):
        list(memory.pieces(MIB))
    assert fake.names()[-1] == "cudaGetLastError"
    fake.fail["cudaHostRegister"] = fake.cudaError_t.cudaErrorNotSupported
    with pytest.raises(DevallocError, match="cudaHostRegister of 1 MiB failed: cudaErrorNotSup"):
        list(memory.pieces(MIB))
    assert memory.pinned == 0
    assert list(memory.pieces(0)) == [(0, MIB)]


def test_copies_are_queued_and_waited_for_at_the_end(fake: FakeRuntime) -> None:
    streams = FakeStreams()
    streams.now = 7
    with copies_on(DEVICE, streams) as copies:
        copies.copy(1000, 2000, 30)
        copies.zero(3000, 40)
        assert not streams.queued, "the call did not wait"
    assert fake.calls == [
        ("cudaMemcpyAsync", 1000, 2000, 30, 7),
        ("cudaMemsetAsync", 3000, 0, 40, 7),
    ]
    assert streams.done[7] == 1
    for name, call in (("cudaMemcpyAsync", "copy"), ("cudaMemsetAsync", "zero")):
        fake.fail[name] = fake.cudaError_t.cudaErrorInvalidValue
        with (
            pytest.raises(DevallocError, match="ing 10 B failed: cudaErrorInvalidValue"),
            copies_on(DEVICE, streams) as copies,
        ):
            getattr(copies, call)(*(5, 6, 10)[-2 if call == "zero" else -3 :])
    assert streams.done[7] == 3, "also after an error"
