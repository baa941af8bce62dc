"""Regions over a process group: all ranks or none. Several processes, on the CPU's double."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from devalloc import Arena, InvalidArgument
from devalloc import distributed as together

RANKS = 3

COMMON = """
import os, sys, torch, torch.distributed as dist
from devalloc import Arena, DevallocError, InvalidArgument, OutOfMemory
from devalloc import distributed as together
from devalloc.sources import host
rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
arena = Arena("cpu", source="virtual")
with arena.region("saved", backup="cpu"):
    saved = arena.full((1000,), rank + 1.0)
with arena.region("plain"):
    plain = arena.full((1000,), rank + 5.0)
def states():
    return [each.state for each in arena.tags()]
def refused(kind, text, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError("it was not refused")
"""

ALL_OR_NONE = """
for _ in range(3):
    together.pause(arena)
    assert states() == ["asleep", "asleep"]
    together.pause(arena)
    together.resume(arena, "saved")
    assert states() == ["awake", "asleep"]
    together.resume(arena)
    together.resume(arena)
    assert bool((saved == rank + 1).all())
    plain.fill_(rank + 5)
"""

ONE_FAILS = """
available = host.available_bytes
if rank == 1:
    host.available_bytes = lambda: 0
kind, text = (OutOfMemory, "does not fit") if rank == 1 else (DevallocError, "rank 1: OutOfMemory")
told = []
arena.on_pause(lambda tag: told.append("pause"))
arena.on_resume(lambda tag: told.append("resume"))
refused(kind, text, together.pause, arena)
assert told == ["pause", "pause", "resume", "resume"], told
assert states() == ["awake", "awake"]
assert bool((saved == rank + 1).all()) and bool((plain == rank + 5).all()), "no byte is lost"
host.available_bytes = available
together.pause(arena)
arena.resume_margin = (1 << 60) if rank == 2 else 0
kind, text = (OutOfMemory, "must stay") if rank == 2 else (DevallocError, "rank 2: OutOfMemory")
refused(kind, text, together.resume, arena)
assert states() == ["asleep", "asleep"]
assert arena.stats()["virtual_bytes.mapped"] == 0
arena.resume_margin = 0
together.resume(arena)
assert bool((saved == rank + 1).all())
"""

DIFFERENT = """
without = Arena("cpu", source="host") if rank == 1 else arena
together.pause(without)
assert states() == (["awake", "awake"] if rank == 1 else ["asleep", "asleep"])
together.resume(without)
assert states() == ["awake", "awake"]
tag = "unknown" if rank == 0 else "saved"
kind, text = (InvalidArgument, "no region") if rank == 0 else (DevallocError, "rank 0: Invalid")
refused(kind, text, together.pause, arena, tag)
assert states() == ["awake", "awake"]
if rank == 0:
    arena.pause("saved")   # this rank has nothing to do any more, and the others wait for it
together.pause(arena, "saved")
assert states() == ["asleep", "awake"]
together.resume(arena, ["saved", "plain"])
pair = dist.new_group([0, 1])
if rank == 2:
    refused(InvalidArgument, "not in the group", together.pause, arena, group=pair)
    assert states() == ["awake", "awake"]
else:
    together.pause(arena, group=pair)
    assert states() == ["asleep", "asleep"]
    together.resume(arena, group=pair)
dist.barrier()
arena.close()
kind, text = (InvalidArgument, "closed") if rank == 0 else (InvalidArgument, "closed")
refused(kind, text, together.pause, arena)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("scenario", [ALL_OR_NONE, ONE_FAILS, DIFFERENT])
def test_ranks_sleep_and_wake_together(tmp_path: Path, scenario: str) -> None:
    code = COMMON + scenario + '\ndel saved, plain\ndist.barrier()\nprint("done", rank)\n'
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(RANKS), str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        outcomes = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (out, err) in enumerate(outcomes):
        assert out.strip() == f"done {rank}", err


def test_without_a_group() -> None:
    assert not dist.is_initialized()
    with Arena("cpu", source="virtual") as arena:
        for call in (together.pause, together.resume):
            with pytest.raises(InvalidArgument, match="there is no process group"):
                call(arena)
