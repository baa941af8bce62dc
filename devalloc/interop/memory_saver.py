"""The names of torch_memory_saver: change ``from torch_memory_saver`` to this module's name.

A region is one of an arena of the current CUDA device, in which PyTorch's allocations go to that
arena (`Arena.use`). docs/guide/pausing.md says what differs.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from devalloc.arena import Arena
from devalloc.common.arguments import known_device
from devalloc.errors import InvalidArgument
from devalloc.interop import pytorch
from devalloc.sizes import quote, size_option

__all__ = ["MemorySaver", "torch_memory_saver"]

_BACKENDS = ("pinned", "mmap")
_MODES = (None, "torch", "preload")


class MemorySaver:
    """Memory that pauses and resumes by tag, on every device that was current in a `region`."""

    def __init__(self) -> None:
        self._arenas: dict[torch.device, Arena] = {}
        # A tag may be used with several kinds of backups; each is a region of its own.
        self._regions: dict[str, dict[tuple[torch.device, str], None]] = {}
        self._margin = 0
        self._directory: str | os.PathLike[str] | None = None
        self._mode: str | None = None
        self.retain_cpu_backup = True
        """Whether host memory of backups is kept for the next pause."""

    # Settings -------------------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether `region` has an effect on PyTorch's tensors: whether there is a CUDA device."""
        return torch.cuda.is_available()

    @property
    def hook_mode(self) -> str | None:
        """Accepted and without an effect: PyTorch's memory pools do what hooks did."""
        return self._mode

    @hook_mode.setter
    def hook_mode(self, mode: str | None) -> None:
        if mode not in _MODES:
            raise InvalidArgument(f'hook_mode is "torch" or "preload", not {quote(mode)}')
        if mode == "preload":
            warnings.warn(
                "LD_PRELOAD is not needed: memory of captured graphs sleeps without it",
                stacklevel=2,
            )
        self._mode = mode

    @property
    def memory_margin_bytes(self) -> int:
        """Bytes of each device that must stay free after `resume`."""
        return self._margin

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, margin: int) -> None:
        self._margin = size_option("memory_margin_bytes", margin, 0)
        for arena in self._arenas.values():
            arena.resume_margin = self._margin

    def set_disk_backup_dir(self, directory: str | os.PathLike[str]) -> None:
        """The folder for regions with ``enable_disk_backup``."""
        for arena in self._arenas.values() or (self.arena(),):
            arena.backup_directory = directory
        self._directory = directory

    def arena(self, device: torch.device | str | int | None = None) -> Arena:
        """The arena of a device, for all that torch_memory_saver has no name for.

        Default: the current CUDA device, or the CPU where there is none. There `region` works for
        what the arena allocates itself.
        """
        if device is None:
            device = torch.cuda.current_device() if self.enabled else "cpu"
        place = known_device(device)
        if place == torch.device("cuda"):
            place = torch.device("cuda", torch.cuda.current_device())
        if place not in self._arenas:
            arena = Arena(place, source="virtual")
            arena.resume_margin = self._margin
            if self._directory is not None:
                arena.backup_directory = self._directory
            self._arenas[place] = arena
        return self._arenas[place]

    # Regions --------------------------------------------------------------------------------------

    @contextmanager
    def region(
        self,
        tag: str = "default",
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str = "pinned",
    ) -> Iterator[None]:
        """Within it PyTorch's allocations of this thread on the current device can be paused."""
        arena = self.arena()
        with self._entered(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend):
            if arena.device.type == "cuda":
                with arena.use():
                    yield
            else:
                yield

    @contextmanager
    def _entered(self, tag: str, cpu: bool, disk: bool, backend: str = "pinned") -> Iterator[None]:
        if cpu and disk:
            raise InvalidArgument("a backup is on the CPU or on disk; enable one of them")
        if backend not in _BACKENDS:
            raise InvalidArgument(f'cpu_backup_backend is "pinned" or "mmap", not {quote(backend)}')
        backup = "cpu" if cpu else "disk" if disk else None
        name = f"{tag} ({backup})" if backup and isinstance(tag, str) else tag
        arena = self.arena()
        with arena.region(name, backup=backup):
            self._regions.setdefault(tag, {})[arena.device, name] = None
            yield

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = False,
    ) -> Iterator[None]:
        """``torch.cuda.graph``, with a graph whose memory can be paused by its tag.

        Raises InvalidArgument for a ``pool``: graphs of a region do not share memory with graphs
        outside.
        """
        if pool is not None:
            raise InvalidArgument("a graph that can be paused has a pool of its own; give no pool")
        with self._entered(tag, enable_cpu_backup, False):
            own = self.arena()._pytorch_pool()
            weakref.finalize(cuda_graph, own.forsake).atexit = False
            with (
                own.captured() as number,
                torch.cuda.graph(
                    cuda_graph,
                    pool=number,
                    stream=stream,
                    capture_error_mode=capture_error_mode,
                ),
            ):
                yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Within it allocations of this thread belong to no region."""
        with ExitStack() as stack:
            for arena in self._arenas.values():
                stack.enter_context(arena.no_region())
            stack.enter_context(pytorch.outside_of_use())
            yield

    # Sleeping -------------------------------------------------------------------------------------

    def pause(self, tag: str | None = None) -> None:
        """Give the memory of a tag back, or of all; on all devices or none. Unknown tags: nothing.

        Raises as `Arena.pause`. Pausing what is paused changes nothing.
        """

        def step(arena: Arena, names: list[str], go_on: Callable[[], None]) -> None:
            arena._regions.pause(names, None, go_on)

        self._on_all_devices(tag, step)

    def resume(self, tag: str | None = None) -> None:
        """Put memory behind a tag again, or behind all; on all devices or none."""

        def step(arena: Arena, names: list[str], go_on: Callable[[], None]) -> None:
            arena._regions.resume(names, go_on)

        self._on_all_devices(tag, step)
        if not self.retain_cpu_backup:
            for arena in self._arenas.values():
                arena.release_backups()

    def _on_all_devices(
        self, tag: str | None, step: Callable[[Arena, list[str], Callable[[], None]], None]
    ) -> None:
        """Take a step on each device; each waits with its last part for those that follow."""
        tags = tuple(self._regions) if tag is None else (tag,)
        names: dict[torch.device, list[str]] = {}
        for each in tags:
            for device, name in self._regions.get(each, ()):
                names.setdefault(device, []).append(name)
        left = list(names.items())

        def go_on() -> None:
            if left:
                device, found = left.pop()
                step(self._arenas[device], found, go_on)

        go_on()

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """What a tensor that is paused contained, on the CPU; None without a CPU backup."""
        found = self.arena(x.device).backup_of(x)
        return found if found is None or zero_copy else found.clone()


torch_memory_saver = MemorySaver()
"""The saver of this process."""
