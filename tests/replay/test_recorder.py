"""The recorder of traces: its programs run, and it notices when PyTorch counted otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks.arena import record_traces
from benchmarks.arena.record_traces import Mismatch, cross_check
from benchmarks.arena.trace_workloads import WORKLOADS
from devalloc.replay.files import load_trace
from devalloc.replay.torch_snapshots import snapshot_trace
from tests.replay.torch_like import TorchLike


@pytest.mark.parametrize("name", WORKLOADS)
def test_programs_run(name: str) -> None:
    WORKLOADS[name](torch.device("cpu"), tiny=True)


def a_program(recorder: TorchLike) -> None:
    addresses = [recorder.alloc(size) for size in (1000, 3_000_000, 600)]
    recorder.free(addresses[1])
    recorder.empty_cache()
    recorder.request_free(addresses[2])
    recorder.alloc(5_000_000)


def counters_of(recorder: TorchLike) -> dict[str, Any]:
    """What PyTorch would have counted, worked out from the history in another way."""
    entries = recorder.entries

    def count(action: str) -> int:
        return sum(entry["action"] == action for entry in entries)

    sign = {"alloc": 1, "free_completed": -1}
    grows = {"segment_alloc": 1, "segment_free": -1}
    requested = [
        sum(sign.get(e["action"], 0) * e["size"] for e in entries[:end])
        for end in range(len(entries) + 1)
    ]
    reserved = [
        sum(grows.get(e["action"], 0) * e["size"] for e in entries[:end])
        for end in range(len(entries) + 1)
    ]
    return {
        "reserved_bytes.all.peak": max(reserved),
        "segment.all.allocated": count("segment_alloc"),
        "segment.all.freed": count("segment_free"),
        "allocation.all.allocated": count("alloc"),
        "requested_bytes.all.peak": max(requested),
        "requested_bytes.all.current": requested[-1],
    }


def test_a_trace_that_agrees() -> None:
    recorder = TorchLike()
    a_program(recorder)
    trace = snapshot_trace(recorder.snapshot())
    counters = counters_of(recorder)
    cross_check(trace, counters, len(recorder.entries))
    for name, value in counters.items():
        with pytest.raises(Mismatch, match=rf"^{name}: {value} in the trace, {value + 1} counted$"):
            cross_check(trace, {**counters, name: value + 1}, len(recorder.entries))


def test_a_recording_that_lost_its_beginning() -> None:
    recorder = TorchLike()
    a_program(recorder)
    trace = snapshot_trace(recorder.snapshot())
    with pytest.raises(Mismatch, match="the first ones are lost"):
        cross_check(trace, counters_of(recorder), record_traces.MAX_ENTRIES)
    late = snapshot_trace(recorder.snapshot(3))
    with pytest.raises(Mismatch, match="did not begin with an empty allocator"):
        cross_check(late, counters_of(recorder), 3)


def test_recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole command, over an allocator in place of PyTorch's."""
    recorder = TorchLike()
    switched: list[Any] = []

    def program(device: torch.device) -> None:
        assert switched == ["all"]
        a_program(recorder)

    def switch(enabled: str | None, **options: Any) -> None:
        switched.append(enabled)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: counters_of(recorder))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", switch)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", recorder.snapshot)
    monkeypatch.setitem(WORKLOADS, "mnist", program)
    command = ["--only", "mnist", "--out", str(tmp_path), "--in-this-process"]
    result = CliRunner().invoke(record_traces.main, command)
    assert result.exit_code == 0, result.output
    assert switched == ["all", None]
    assert "mnist: 5 events" in result.output
    trace = load_trace(tmp_path / "mnist.csv.gz")
    assert trace.events == snapshot_trace(recorder.snapshot()).events
    assert trace.origin["gpu"] == "Some GPU"
    assert trace.recorded is not None


def test_recording_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(record_traces.main, ["--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "no CUDA device" in result.output


@pytest.mark.gpu
def test_recording_on_a_gpu(tmp_path: Path) -> None:
    """The shortest program, with PyTorch's own counters."""
    command = ["--only", "generation", "--out", str(tmp_path), "--seconds", "100"]
    result = CliRunner().invoke(record_traces.main, command)
    assert result.exit_code == 0, result.output
    assert load_trace(tmp_path / "generation.csv.gz").allocations > 10_000
