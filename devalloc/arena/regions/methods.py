"""What users of an arena call about regions."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from devalloc.arena.regions.disk import existing_directory, is_in_ram
from devalloc.arena.regions.regions import RULES, RegionInfo, Regions, Tags
from devalloc.common.arguments import require_callable
from devalloc.errors import InvalidArgument
from devalloc.sizes import quote, size_option

if TYPE_CHECKING:
    from devalloc.arena.cache.allocator import Cache

Callback = Callable[[str], object]


class RegionMethods:
    """The part of `devalloc.Arena` that lets memory sleep: see docs/guide/pausing.md."""

    _cache: Cache
    _regions: Regions
    _installed: bool

    def _require_open(self) -> None:
        raise NotImplementedError

    def _place_of(self, what: Any, purpose: str) -> tuple[int, int | None]:
        raise NotImplementedError

    # Entering -------------------------------------------------------------------------------------

    def region(
        self, tag: str = "default", *, backup: str | None = None, on_resume: str = "undefined"
    ) -> AbstractContextManager[None]:
        """Within it this thread's allocations belong to a region, which `pause` takes away.

        Regions nest, and the inner one wins. Threads do not see each other's. A tag may be entered
        again, with the same options. A `graph_pool` that is made here sleeps with the region, and
        so does what PyTorch allocates in a `use` that is entered here.

        Parameters
        ----------
        tag : str
            The region's name.
        backup : {None, "cpu", "disk"}
            Where `pause` saves the contents of live tensors, blocks and heaps: not at all, in host
            memory, or in a file in `backup_directory`.
        on_resume : {"undefined", "zero"}
            The contents of what has no backup after `resume`.

        Raises
        ------
        InvalidArgument
            For a closed arena or one made by `install`, a source other than ``"virtual"``, a tag
            that has other options, ``"disk"`` without a `backup_directory`, or in a capture.
        """
        self._require_open()
        if self._installed:
            raise InvalidArgument("an arena that serves all of PyTorch has no regions")
        return self._regions.enter(tag, backup, on_resume)

    def no_region(self) -> AbstractContextManager[None]:
        """Within it this thread's allocations belong to no region, and so never sleep."""
        self._require_open()
        return self._regions.leave()

    def tags(self) -> list[RegionInfo]:
        """The regions: tag, bytes of its segments, and ``"awake"`` or ``"asleep"``."""
        return self._regions.tags()

    # Sleeping -------------------------------------------------------------------------------------

    def pause(self, tag: Tags = None, streams: Sequence[int] | None = None) -> None:
        """Give the memory of a region back to the device, and keep its addresses.

        Everything allocated there keeps its address and must not be used until `resume`. It may be
        freed. ``tag`` is one, or a list of several; without one, all regions that are awake are
        paused. All or none. Pausing what sleeps changes nothing. If it raises, nothing has changed.

        Waits for the streams that own blocks of the region, for recorded ones, and for ``streams``
        (handles). Work on other streams must not use the region any more. If the region contains a
        heap or memory of PyTorch and no ``streams`` are given, it waits for the device.

        Raises
        ------
        InvalidArgument
            For an unknown tag, for ``streams`` that are no handles, during a capture, or while a
            thread is inside a `use` that takes from the region.
        OutOfMemory
            If there is no host memory, or no room on the disk, for the backup.
        """
        self._require_open()
        self._regions.pause(tag, streams)

    def resume(self, tag: Tags = None) -> None:
        """Put memory behind the addresses of a region again, with the contents of its backup.

        ``tag`` is one, or a list of several; without one, all regions that sleep are resumed. It is
        all or none. Resuming what is awake changes nothing. Later work of every stream sees the
        contents.

        Raises
        ------
        OutOfMemory
            If the device, the limit or `resume_margin` does not allow it; the region sleeps on,
            with its backup.
        InvalidArgument
            For an unknown tag, or during a capture.
        """
        self._regions.resume(tag)

    def on_pause(self, callback: Callback) -> None:
        """Have ``callback`` called with the tag, before a pause changes anything.

        Here a program deregisters memory from other libraries. If it raises, nothing is paused and
        its error is raised. If the pause fails later, the callbacks of `on_resume` are called.
        """
        require_callable("a callback is a function of a tag", callback)
        self._regions.on_pause.append(callback)

    def on_resume(self, callback: Callback) -> None:
        """Have ``callback`` called with the tag, after a resume is complete.

        If one raises, the others are still called, and the first error is raised; the region is
        awake.
        """
        require_callable("a callback is a function of a tag", callback)
        self._regions.on_resume.append(callback)

    @property
    def resume_margin(self) -> int:
        """Bytes of the device that must stay free after `resume`; text to set it too."""
        return self._regions.margin

    @resume_margin.setter
    def resume_margin(self, margin: int | str) -> None:
        self._regions.margin = size_option("resume_margin", margin, 0)

    # Contents -------------------------------------------------------------------------------------

    def keep(self, what: Any, rule: str) -> None:
        """Decide what a pause does with the contents of one tensor's memory or one block.

        Parameters
        ----------
        what : torch.Tensor or Block
            Of a region that is awake.
        rule : {"backup", "discard", "zero"}
            Save them (in host memory, unless the region's backups are on disk), give them up, or
            find zeros after the resume. Forgotten when the memory is freed.

        Raises
        ------
        InvalidArgument
            If it is not live memory of a region that is awake, or for another rule.
        """
        if rule not in RULES:
            raise InvalidArgument(f"a rule is one of {', '.join(RULES)}, not {quote(rule)}")
        address, claim = self._place_of(what, "keep")
        if not address:
            return
        if refusal := self._cache.private.refusal_at(address):
            raise InvalidArgument(f"cannot change what is kept: {refusal}")
        if (
            self._cache.private.pools_at(address) is None
            or self._regions.region_at(address) is None
        ):
            raise InvalidArgument(
                f"no region of this arena allocated {address:#x} itself; keep is for what its "
                "empty, alloc and so on gave inside region()"
            )
        self._cache.private.set_rule(address, rule, claim)

    def backup_of(self, what: Any) -> torch.Tensor | None:
        """What a tensor or block that sleeps contained, on the CPU, without a copy.

        Like the tensor in shape, type and strides; bytes for a block. None if it is awake or has no
        backup in host memory. Valid until the resume: clone what you want to keep.

        Raises
        ------
        InvalidArgument
            If the memory is not a live allocation of this arena.
        """
        address, claim = self._place_of(what, "backup_of")
        known = self._regions.region_at(address) is not None or self._cache.owns(address, claim)
        if address and not known:
            raise InvalidArgument(f"this arena has no live allocation at {address:#x}")
        found = self._regions.backup_at(address)
        if found is None or not isinstance(what, torch.Tensor):
            return found
        like: Any = torch.empty(0, dtype=what.dtype, device="cpu")
        like.set_(found.untyped_storage(), what.storage_offset(), what.size(), what.stride())
        result: torch.Tensor = like.conj() if what.is_conj() else like
        return torch._neg_view(result) if what.is_neg() else result

    def prepare(self, tag: Tags = None) -> None:
        """Allocate and lock the host memory that a pause would need now.

        The first pause then costs only the copy. Without a tag, for all regions that are awake.
        What `backup_budget` does not allow to be locked, or goes to disk, is not prepared. Raises
        OutOfMemory if the host has not so much.
        """
        self._require_open()
        self._regions.prepare(tag)

    def release_backups(self, tag: Tags = None) -> None:
        """Give back the host memory that regions which are awake keep for their next pause."""
        self._regions.release_backups(tag)

    @property
    def backup_budget(self) -> int | None:
        """The most bytes of locked host memory for backups, None for any; text to set it too.

        Beyond it backups are pageable, and slower. Memory that is locked for regions which are
        awake goes back if it is more than a new budget.
        """
        return self._regions.settings.budget

    @backup_budget.setter
    def backup_budget(self, budget: int | str | None) -> None:
        nbytes = None if budget is None else size_option("backup_budget", budget, 0)
        self._regions.set_budget(nbytes)

    @property
    def backup_directory(self) -> str | None:
        """The folder for backups on disk, and for those that the host's memory cannot hold.

        The files have no name: nothing is left when the process ends, however it ends. A folder
        that is itself in memory gives a warning.
        """
        return self._regions.settings.directory

    @backup_directory.setter
    def backup_directory(self, directory: str | os.PathLike[str] | None) -> None:
        name = None if directory is None else existing_directory(directory)
        if name is not None and is_in_ram(name):
            warnings.warn(
                f"{name!r} is a file system in memory: backups there free none; choose a folder "
                "on a disk",
                stacklevel=2,
            )
        self._regions.settings.directory = name
