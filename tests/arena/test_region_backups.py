"""What a region's contents become while it sleeps: host memory, disk, zeros, or nothing.

On the CPU's double, unless marked `gpu`.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from devalloc import Arena, DevallocError, InvalidArgument, OutOfMemory
from devalloc.arena.regions import backups, disk, host_memory
from devalloc.arena.regions.backup_layout import Run, gathered, lay_out, within
from devalloc.sources import VirtualSource, host, libc
from devalloc.sources.virtual_calls import HostPages
from tests.arena.support import audited_arena

MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture
def arena():
    with audited_arena() as made:
        yield made


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is committed, and files are written, by 1 MiB."""
    monkeypatch.setattr(host_memory, "PIECE", MIB)
    monkeypatch.setattr(backups, "CHUNK", MIB)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that counts as one on a disk, wherever the tests run."""
    from devalloc.arena.regions import methods

    monkeypatch.setattr(methods, "is_in_ram", lambda _: False)
    return tmp_path


def backup_bytes(arena: Arena) -> tuple[int, int, int]:
    stats = arena.stats()
    return tuple(stats[f"backup_bytes.{kind}"] for kind in ("pinned", "pageable", "disk"))


def count(arena: Arena, nbytes: int) -> torch.Tensor:
    """A tensor in which every byte depends on its place."""
    tensor = arena.empty(nbytes, dtype=torch.uint8)
    tensor.copy_(torch.arange(nbytes, dtype=torch.int64).remainder_(251))
    return tensor


def counted(tensor: torch.Tensor) -> bool:
    return bool((tensor == torch.arange(tensor.numel()).remainder_(251)).all())


# Layout -------------------------------------------------------------------------------------------


def test_blocks_lie_one_after_another_and_neighbours_are_gathered() -> None:
    runs = lay_out([(1000, 10), (1010, 5), (2000, 7)])
    assert runs == [Run(1000, 10, 0), Run(1010, 5, 10), Run(2000, 7, 15)]
    assert gathered(runs) == [Run(1000, 15, 0), Run(2000, 7, 15)]
    assert gathered([runs[0], runs[2]]) == [runs[0], runs[2]], "no neighbours in the backup"
    assert gathered([]) == []


def test_windows_of_a_layout_cover_every_byte_once() -> None:
    draw = random.Random(3)
    for _ in range(50):
        sizes = [draw.randrange(1, 40) for _ in range(draw.randrange(1, 20))]
        runs = lay_out((1000 * at, size) for at, size in enumerate(sizes))
        total, step = sum(sizes), draw.randrange(1, 60)
        seen = []
        for start in range(0, total, step):
            for part in within(runs, start, min(start + step, total)):
                assert start <= part.offset < part.offset + part.nbytes <= start + step
                seen += [(part.address + i, part.offset + i) for i in range(part.nbytes)]
        expected = [(run.address + i, run.offset + i) for run in runs for i in range(run.nbytes)]
        assert seen == expected


# Host memory --------------------------------------------------------------------------------------


@pytest.mark.proves("saver/backups-locked")
@pytest.mark.usefixtures("small_pieces")
def test_locked_memory_is_kept_and_of_exact_size(arena: Arena) -> None:
    with arena.region("a", backup="cpu"):
        tensor, odd = count(arena, 5 * MIB), count(arena, 300_001)
    assert backup_bytes(arena) == (0, 0, 0)
    nbytes = 5 * MIB + (300_001 + 511) // 512 * 512
    for _ in range(3):
        arena.pause()
        assert backup_bytes(arena) == (nbytes, 0, 0)
        arena.release_backups()  # what sleeps needs it
        arena.resume()
        assert backup_bytes(arena) == (nbytes, 0, 0)
        assert counted(tensor)
        assert counted(odd)
    arena.release_backups("a")
    assert backup_bytes(arena) == (0, 0, 0)
    arena.prepare()
    assert backup_bytes(arena) == (nbytes, 0, 0)
    arena.close()
    assert backup_bytes(arena) == (0, 0, 0)


@pytest.mark.proves("saver/backups-locked")
def test_what_was_not_asked_for_is_not_backed_up(arena: Arena) -> None:
    """The last tensor of a segment gets what is too little to be cut off."""
    with arena.region("a", backup="cpu"):
        tensors = [count(arena, 3_435_520 - 100) for _ in range(6)]
        assert arena.memory_allocated() == 20 * MIB
        arena.pause()
        assert backup_bytes(arena) == (6 * 3_435_520, 0, 0)
        arena.resume()
        assert all(counted(tensor) for tensor in tensors)
        del tensors
        # The holder of a block may use all that it has.
        blocks = [arena.alloc(3_435_420) for _ in range(6)]
        last = max(blocks, key=lambda block: block.nbytes)
        assert last.nbytes > 3_435_520
        ctypes.memset(last.address, 7, last.nbytes)
        arena.pause()
        assert backup_bytes(arena) == (20 * MIB, 0, 0)
        arena.resume()
        assert ctypes.string_at(last.address, last.nbytes) == b"\x07" * last.nbytes
        for block in blocks:
            arena.free(block)


@pytest.mark.proves("saver/backups-locked")
@pytest.mark.usefixtures("small_pieces")
def test_prepared_memory_is_what_the_pause_uses(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    with arena.region("a", backup="cpu"):
        tensor = count(arena, 3 * MIB + 512)
    with arena.region("b"):
        other = arena.full((MIB,), 2.0)
        arena.keep(other, "discard")
    arena.prepare()
    assert backup_bytes(arena) == (3 * MIB + 512, 0, 0)

    def commit(address: int, nbytes: int) -> None:
        raise AssertionError("nothing is left to commit")

    monkeypatch.setattr(host_memory, "populate", commit)
    arena.pause()
    arena.prepare()  # for what is awake: nothing
    arena.resume()
    assert counted(tensor)


@pytest.mark.proves("saver/backups-locked")
@pytest.mark.usefixtures("small_pieces")
def test_beyond_the_budget_memory_is_pageable(arena: Arena) -> None:
    arena.backup_budget = "2MiB"
    assert arena.backup_budget == 2 * MIB
    with arena.region("a", backup="cpu"):
        first = count(arena, 3 * MIB + 1024)
    with arena.region("b", backup="cpu"):
        second = count(arena, 2 * MIB)
    arena.pause("a")
    assert backup_bytes(arena) == (2 * MIB, MIB + 1024, 0)
    arena.pause("b")
    assert backup_bytes(arena) == (2 * MIB, 3 * MIB + 1024, 0)
    arena.resume()
    assert backup_bytes(arena) == (2 * MIB, 0, 0), "pageable memory is not kept"
    assert counted(first)
    assert counted(second)
    arena.pause()
    assert backup_bytes(arena) == (2 * MIB, 3 * MIB + 1024, 0)
    arena.backup_budget = MIB
    assert backup_bytes(arena)[0] == 2 * MIB, "what sleeps needs it"
    arena.resume()
    arena.backup_budget = 0
    assert backup_bytes(arena) == (0, 0, 0)
    arena.pause()
    assert backup_bytes(arena)[0] == 0
    arena.resume()
    arena.backup_budget = None
    assert counted(first)
    assert counted(second)
    for bad in (-1, "much", 1.5, True):
        with pytest.raises(InvalidArgument):
            arena.backup_budget = bad


def test_a_backup_that_the_host_cannot_hold(
    arena: Arena, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with arena.region("a", backup="cpu"):
        tensor = count(arena, 3 * MIB)
    before = arena.stats()
    monkeypatch.setattr(host, "available_bytes", lambda: 2 * MIB)
    for step in (arena.pause, arena.prepare):
        with pytest.raises(OutOfMemory, match=r"3 MiB does not fit into the 2 MiB .* backup_dir"):
            step()
    assert arena.tags()[0].state == "awake"
    assert arena.stats() == before
    assert counted(tensor)
    arena.backup_directory = folder
    arena.prepare()
    assert backup_bytes(arena) == (0, 0, 0)
    arena.pause()
    assert backup_bytes(arena) == (0, 0, 3 * MIB)
    arena.resume()
    assert backup_bytes(arena) == (0, 0, 0)
    assert counted(tensor)


@pytest.mark.usefixtures("small_pieces")
def test_host_memory_that_cannot_be_committed(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    with arena.region("a", backup="cpu"):
        tensor = count(arena, 4 * MIB)

    def commit(address: int, nbytes: int) -> None:
        raise OutOfMemory("host memory: none; ask for less")

    monkeypatch.setattr(host_memory, "populate", commit)
    for step in (arena.pause, arena.prepare):
        with pytest.raises(OutOfMemory, match="host memory: none"):
            step()
        assert arena.tags()[0].state == "awake"
        assert counted(tensor)
        with arena.region("a", backup="cpu"):
            arena.empty(10)  # allowed again
    assert backup_bytes(arena) == (0, 0, 0)


def test_committing_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = host_memory.HostMemory(3 * MIB, CPU)
    for advice in (22, 12, 22):  # EINVAL: an old kernel; ENOMEM

        class Refusing:
            def madvise(self, *_: object, reason: int = advice) -> int:
                libc.ctypes.set_errno(reason)
                return -1

        monkeypatch.setattr(libc, "libc", Refusing)
        if advice == 12:
            with pytest.raises(OutOfMemory, match="3 MiB could not be committed"):
                libc.populate(memory.address, 3 * MIB)
        else:
            libc.populate(memory.address, 3 * MIB)
    assert not memory.segment.view().any()


def test_available_memory_counts_the_limit_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    whole = host.available_bytes()
    assert whole > 64 * MIB
    (tmp_path / "memory.current").write_text(f"{10 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {3 * MIB}\nactive_file 9\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert host.available_bytes() > 64 * MIB
    (tmp_path / "memory.max").write_text(f"{20 * MIB}\n")
    assert host.available_bytes() == 13 * MIB


# Disk ---------------------------------------------------------------------------------------------


@pytest.mark.proves("saver/backups-disk")
@pytest.mark.usefixtures("small_pieces")
def test_backups_on_disk(arena: Arena, folder: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"set arena\.backup_directory first"):
        arena.region("a", backup="disk").__enter__()
    arena.backup_directory = folder
    assert arena.backup_directory == str(folder)
    with arena.region("a", backup="disk"):
        whole, odd = count(arena, 4 * MIB), count(arena, 700_001)
    nbytes = 4 * MIB + (700_001 + 511) // 512 * 512
    for _ in range(3):
        arena.pause()
        assert backup_bytes(arena) == (0, 0, nbytes)
        assert os.listdir(folder) == [], "the file has no name"
        assert arena.backup_of(whole) is None
        arena.resume()
        assert backup_bytes(arena) == (0, 0, 0)
        assert counted(whole)
        assert counted(odd)
        whole.add_(1).sub_(1)
    arena.pause()
    del odd
    arena.resume()
    assert counted(whole)


@pytest.mark.proves("saver/backups-disk")
@pytest.mark.parametrize("step", ["allocate", "write", "sync"])
def test_a_full_disk(
    arena: Arena, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    arena.backup_directory = folder
    with arena.region("a", backup="disk"):
        tensor = count(arena, 3 * MIB)
    with arena.region("b", backup="cpu"):
        other = count(arena, 3 * MIB)
    before = arena.stats()
    name = {"allocate": "posix_fallocate", "write": "pwrite", "sync": "fsync"}[step]

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, full)
        with pytest.raises(OutOfMemory, match=r"backup of 3 MiB in .*No space left.*make room"):
            arena.pause()
    assert {each.state for each in arena.tags()} == {"awake"}
    assert arena.stats()["virtual_bytes.mapped"] == before["virtual_bytes.mapped"]
    assert backup_bytes(arena)[2] == 0
    assert counted(tensor)
    assert counted(other)
    arena.pause()
    arena.resume()
    assert counted(tensor)
    assert counted(other)


def test_more_than_any_disk_has(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="make room there, or set backup_directory"):
        disk.BackupFile(str(tmp_path), 1 << 60)
    file = disk.BackupFile(str(tmp_path), MIB)
    file.close()
    file.close()


def test_a_disk_that_does_not_give_the_bytes(
    arena: Arena, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena.backup_directory = folder
    with arena.region("a", backup="disk"):
        tensor = count(arena, 3 * MIB)
    arena.pause()
    mapped = arena.stats()["virtual_bytes.mapped"]
    for broken in (lambda *_: 0, lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error"))):
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", broken)
            with pytest.raises(DevallocError, match=r"3 MiB in .*(shorter|I/O error)"):
                arena.resume()
        assert arena.tags()[0].state == "asleep"
        assert arena.stats()["virtual_bytes.mapped"] == mapped
    arena.resume()
    assert counted(tensor)


def test_file_systems_on_which_every_file_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def named_only(path: str, flags: int, *mode: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opened(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", named_only)
    file = disk.BackupFile(str(tmp_path), 5000)
    assert os.listdir(tmp_path) == []
    file.write(1000, memoryview(bytes(range(100))))
    into = bytearray(100)
    file.read(1000, memoryview(into))
    assert into == bytes(range(100))
    assert os.fstat(file._file).st_mode & 0o777 == 0o600


def test_a_folder_for_backups(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bad in (5, None, tmp_path / "none"):
        if bad is not None:
            with pytest.raises(InvalidArgument, match="folder"):
                arena.backup_directory = bad
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="there is no folder"):
        arena.backup_directory = tmp_path / "file"
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(InvalidArgument, match="cannot be written"):
            arena.backup_directory = tmp_path
    assert arena.backup_directory is None
    shared = Path("/dev/shm")
    if not disk.is_in_ram(str(shared)):
        pytest.skip("/dev/shm is not in memory here")
    with pytest.warns(UserWarning, match="is a file system in memory") as seen:
        arena.backup_directory = shared
    assert seen[0].filename == __file__
    assert arena.backup_directory == str(shared)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arena.backup_directory = None
    assert not disk.is_in_ram("/proc")


@pytest.mark.proves("saver/backups-disk")
def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
import os, signal, warnings
warnings.simplefilter("ignore")
from devalloc import Arena
arena = Arena("cpu", source="virtual")
arena.backup_directory = {str(tmp_path)!r}
with arena.region("a", backup="disk"):
    tensor = arena.full((1 << 22,), 3.0)
arena.pause()
print(arena.stats()["backup_bytes.disk"], os.listdir({str(tmp_path)!r}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (-9, f"{16 * MIB} []"), done.stderr
    assert os.listdir(tmp_path) == []


# One block ----------------------------------------------------------------------------------------


def test_what_is_kept_of_single_blocks(arena: Arena) -> None:
    tensors = {}
    for tag, backup in (("with", "cpu"), ("without", None)):
        with arena.region(tag, backup=backup):
            for rule in ("backup", "discard", "zero"):
                tensors[tag, rule] = arena.full((MIB,), 3.0)
                arena.keep(tensors[tag, rule], rule)
    with arena.region("with", backup="cpu"):
        block = arena.alloc(MIB)
    arena.keep(block, "discard")
    arena.pause()
    assert backup_bytes(arena) == (2 * 4 * MIB, 0, 0)
    assert arena.backup_of(block) is None
    arena.resume()
    for tag in ("with", "without"):
        assert bool((tensors[tag, "backup"] == 3).all())
        assert bool((tensors[tag, "zero"] == 0).all())
    arena.free(block)


def test_a_rule_is_forgotten_with_its_block(arena: Arena) -> None:
    with arena.region("a", backup="cpu"):
        first = arena.full((MIB,), 3.0)
        arena.keep(first, "zero")
        place = first.data_ptr()
        del first
        second = arena.full((MIB,), 4.0)
        assert second.data_ptr() == place
    arena.pause()
    arena.resume()
    assert bool((second == 4).all())
    with arena.region("a", backup="cpu"):
        block = arena.alloc(4 * MIB)
        arena.keep(block, "discard")
        arena.free(block)
        third = arena.full((MIB,), 5.0)
        assert third.data_ptr() == block.address
    arena.pause()
    arena.resume()
    assert bool((third == 5).all())


def test_bad_rules(arena: Arena) -> None:
    outside = arena.empty(10)
    with arena.region("a"):
        inside, block = arena.empty(10), arena.alloc(10)
    with pytest.raises(InvalidArgument, match="a rule is one of backup, discard, zero"):
        arena.keep(inside, "save")
    with pytest.raises(InvalidArgument, match="no region of this arena allocated"):
        arena.keep(outside, "zero")
    with pytest.raises(InvalidArgument, match="no region of this arena allocated"):
        arena.keep(torch.empty(10), "zero")
    for bad in (5, None, "a"):
        with pytest.raises(InvalidArgument, match="keep takes a block or a tensor"):
            arena.keep(bad, "zero")
    arena.keep(arena.empty(0), "zero")
    arena.pause()
    with pytest.raises(InvalidArgument, match=r"'a' is asleep; call resume\('a'\) first"):
        arena.keep(inside, "zero")
    arena.resume()
    arena.free(block)
    with pytest.raises(InvalidArgument, match="was freed before"):
        arena.keep(block, "zero")
    with Arena("cpu") as other:
        foreign = other.alloc(10)
        with pytest.raises(InvalidArgument, match="call keep there"):
            arena.keep(foreign, "zero")
        other.free(foreign)


@pytest.mark.proves("saver/reading-backup")
def test_reading_a_backup_while_asleep(arena: Arena) -> None:
    with arena.region("a", backup="cpu"):
        tensor = count(arena, 3 * MIB).view(3, MIB)
        numbers = arena.full((4, 5), 1 + 2j, dtype=torch.complex64)
        block = arena.alloc(1000)
    part = tensor[1:, ::2]
    assert arena.backup_of(tensor) is None, "awake"
    expected = tensor.clone(), part.clone(), numbers.conj().clone()
    arena.pause()
    found = arena.backup_of(tensor)
    assert found.device == CPU
    assert torch.equal(found, expected[0])
    assert found.stride() == tensor.stride()
    assert found.data_ptr() == arena.backup_of(tensor).data_ptr(), "no copy"
    assert torch.equal(arena.backup_of(part), expected[1])
    assert torch.equal(arena.backup_of(numbers.conj()), expected[2])
    assert torch.equal(arena.backup_of(numbers.conj().imag), expected[2].imag)
    assert arena.backup_of(block).numel() == block.nbytes
    found[0, 0] = 9  # it may be changed as well
    arena.resume()
    assert int(tensor[0, 0]) == 9
    assert arena.backup_of(tensor) is None
    arena.release_backups()
    assert int(found[0, 0]) == 9, "the view keeps its memory"
    arena.free(block)
    for bad in (block, 5, torch.empty(10)):
        with pytest.raises(InvalidArgument):
            arena.backup_of(bad)


def test_random_rounds_with_rules_and_failing_disks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor has its contents whenever it is awake, whatever was asked for and failed."""
    monkeypatch.setattr(backups, "CHUNK", MIB)
    monkeypatch.setattr(host_memory, "PIECE", MIB)
    draw = random.Random(11)
    source = VirtualSource(CPU, HostPages())
    failing = {"now": False}
    write = os.pwrite

    def sometimes(*arguments: object) -> int:
        if failing["now"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", sometimes)
    kinds = {"a": "cpu", "b": "disk", "c": None}
    failures = 0
    with Arena(source=source) as arena:
        arena.backup_directory = folder
        arena.backup_budget = "3MiB"
        live: list[tuple[str, torch.Tensor, int]] = []
        for turn in range(300):
            tag = draw.choice(tuple(kinds))
            failing["now"] = draw.random() < 0.2
            try:
                action = draw.choice(("pause", "resume", "prepare", "alloc", "alloc", "free"))
                if action == "alloc":
                    with arena.region(tag, backup=kinds[tag]):
                        tensor = arena.full((draw.choice((1000, 300_000, MIB)),), turn)
                        rule = draw.choice(("zero", "backup"))
                        arena.keep(tensor, rule)
                    live.append((tag, tensor, turn if rule == "backup" else -1))
                elif action == "free":
                    if live:
                        live.pop(draw.randrange(len(live)))
                else:
                    getattr(arena, action)(draw.choice((tag, None)))
            except DevallocError:
                failures += 1
            arena.cache.audit()
            states = {each.tag: each.state for each in arena.tags()}
            for place, tensor, value in live:
                if states[place] == "awake" and value >= 0:
                    assert bool((tensor == value).all())
        failing["now"] = False
        arena.resume()
        assert backup_bytes(arena)[1:] == (0, 0)
        live.clear()
        del tensor
    assert failures > 10
    gc.collect()
    assert source.stats().address_space == 0


# GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_the_gpu_backups_are_locked_kept_and_exact(tmp_path: Path) -> None:
    arena = Arena("cuda:0", source="virtual")
    with arena.region("a", backup="cpu"):
        tensors = [arena.full((n,), float(i)) for i, n in enumerate((100, 3 * MIB, 64 * MIB))]
    arena.prepare()
    pinned = backup_bytes(arena)[0]
    assert pinned == sum((4 * n + 511) // 512 * 512 for n in (100, 3 * MIB, 64 * MIB))
    for _ in range(3):
        arena.pause()
        assert bool((arena.backup_of(tensors[1]) == 1).all())
        assert backup_bytes(arena) == (pinned, 0, 0)
        arena.resume()
        assert all(bool((each == i).all()) for i, each in enumerate(tensors))
    arena.release_backups()
    arena.backup_budget = "64MiB"
    arena.pause()
    assert backup_bytes(arena)[0] <= 64 * MIB
    assert backup_bytes(arena)[1] >= 128 * MIB
    arena.resume()
    assert all(bool((each == i).all()) for i, each in enumerate(tensors))


@pytest.mark.gpu
def test_on_the_gpu_backups_on_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backups, "CHUNK", MIB)
    arena = Arena("cuda:0", source="virtual")
    arena.backup_directory = folder
    with arena.region("a", backup="disk"):
        tensor = torch.arange(3 * MIB + 77, device="cuda:0")
        kept = arena.empty_like(tensor).copy_(tensor)
        zeroed = arena.full((MIB,), 3.0)
        arena.keep(zeroed, "zero")
    for _ in range(3):
        arena.pause()
        arena.resume()
        assert torch.equal(kept, tensor)
        assert not zeroed.any()
