"""The state machine of regions: memory that is given back while its addresses stay.

docs/design/host.md has the rules: the states, the order of the steps, and what could go wrong. A
region is a private pool of the cache, and one more for each of its graphs' pools, so its segments
hold nothing else. `Regions.pause` and `resume` do all or nothing: up to the last step everything
can be undone, and the last step cannot fail.

Concurrency: one lock for calls that change states or backups. The cache's lock is taken only while
its state is read or changed; meanwhile allocations in the region are refused, so nothing moves.
Entering a region waits for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from devalloc.arena.regions.backup_layout import lay_out
from devalloc.arena.regions.backups import Backup, BackupSettings
from devalloc.arena.regions.copies import Copies, copies_on
from devalloc.arena.regions.outside import Live, Outside
from devalloc.common.cleanup import call_for_all, call_for_finalizers
from devalloc.errors import DevallocError, InvalidArgument, OutOfMemory
from devalloc.sizes import format_size, quote
from devalloc.sources import VirtualSource

if TYPE_CHECKING:
    from devalloc.arena.cache.allocator import Cache
    from devalloc.arena.cache.private_pools import Content, LiveBlock, PrivatePool
    from devalloc.arena.store.blocks import PoolSet

AWAKE, ASLEEP = "awake", "asleep"
RULES = ("backup", "discard", "zero")
_BACKUPS = (None, "cpu", "disk")
_ON_RESUME = ("undefined", "zero")


class RegionInfo(NamedTuple):
    """One region: its tag, the bytes of its segments, and whether it is awake or asleep."""

    tag: str
    nbytes: int
    state: str


class _Region:
    def __init__(
        self, tag: str, backup: str | None, on_resume: str, pool: PrivatePool, kept: Backup
    ) -> None:
        self.tag = tag
        self.options = backup, on_resume
        self.pool = pool
        self.graphs: list[PoolSet] = []
        self.outside: list[Outside] = []
        self.state = AWAKE
        self.backup = kept

    @property
    def pools(self) -> list[PoolSet]:
        return [self.pool.pools, *self.graphs]

    @property
    def refusal(self) -> str:
        if self.state == AWAKE:
            return ""
        return f"the region {self.tag!r} is asleep; call resume({self.tag!r}) first"

    def rule_of(self, block: LiveBlock) -> str:
        if block.rule:
            return block.rule
        backup, on_resume = self.options
        if backup is not None:
            return "backup"
        return "zero" if on_resume == "zero" else "discard"


Tags = str | Sequence[str] | None
"""One region, several, or all of them."""

Agree = Callable[[], object]
"""Called when all that can fail has succeeded, before what cannot be undone; may raise."""


def _agreed() -> None:
    pass


def _handles(streams: Sequence[int]) -> tuple[int, ...]:
    """The handles of streams; InvalidArgument for anything else."""
    if not isinstance(streams, Iterable) or isinstance(streams, str | bytes):
        raise InvalidArgument(f"streams is a list of handles, ints, not {quote(streams)}")
    handles = tuple(streams)
    for each in handles:
        if type(each) is not int:
            raise InvalidArgument(f"a stream is given by its handle, an int, not {quote(each)}")
    return handles


Contents = list[tuple[_Region, "list[Content]"]]


class Regions:
    """The regions of one arena, by tag."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._by_tag: dict[str, _Region] = {}
        self._lock = threading.RLock()
        self._making = threading.Lock()
        self._changing = False
        self.settings = BackupSettings()
        self.margin = 0
        """Bytes of the device that must stay free after `resume`."""
        self.on_pause: list[Callable[[str], object]] = []
        self.on_resume: list[Callable[[str], object]] = []
        self.heaps: set[int] = set()
        """Addresses of heaps' memory, which any kernel may use."""

    # Entering -------------------------------------------------------------------------------------

    @contextmanager
    def enter(self, tag: str, backup: str | None, on_resume: str) -> Iterator[None]:
        """See `devalloc.Arena.region`."""
        self._refuse_in_capture()
        region = self._region(tag, backup, on_resume)
        with self._cache.route(region.pool):
            yield

    @contextmanager
    def leave(self) -> Iterator[None]:
        """See `devalloc.Arena.no_region`."""
        self._refuse_in_capture()
        with self._cache.route(None):
            yield

    def _refuse_in_capture(self) -> None:
        if self._cache.private.capturing_here():
            raise InvalidArgument(
                "what a capture allocates belongs to its graph; enter the region first, and make "
                "the pool with graph_pool() inside it"
            )

    def _region(self, tag: str, backup: str | None, on_resume: str) -> _Region:
        if not isinstance(self._cache.source, VirtualSource):
            raise InvalidArgument(
                f"{self._cache.source!r} cannot keep addresses without memory; regions need "
                'Arena(source="virtual")'
            )
        if not isinstance(tag, str) or not tag:
            raise InvalidArgument(f"a tag is a text that is not empty, not {quote(tag)}")
        if backup not in _BACKUPS:
            raise InvalidArgument(f'backup is None, "cpu" or "disk", not {quote(backup)}')
        if on_resume not in _ON_RESUME:
            raise InvalidArgument(f'on_resume is "undefined" or "zero", not {quote(on_resume)}')
        if backup == "disk":
            self.settings.require_directory()
        with self._making:
            found = self._by_tag.get(tag)
            if found is None:
                pool = self._cache.private_pool()
                pool.pools.widens = pool.pools.of_region = True
                kept = Backup(self._cache.source.device, self.settings)
                found = self._by_tag[tag] = _Region(tag, backup, on_resume, pool, kept)
        if found.options != (backup, on_resume):
            raise InvalidArgument(
                f"the region {tag!r} has backup={found.options[0]!r} and "
                f"on_resume={found.options[1]!r}; enter it with these, or take another tag"
            )
        return found

    def graph_pool(self) -> PrivatePool:
        """A pool for graphs; it sleeps with the region that this thread is in, if any."""
        pool = self._cache.private_pool()
        region = self.here()
        if region is not None:
            # (Pools whose graphs and memory are gone are left out.)
            region.graphs = [at for at in region.graphs if at.uses or at.nbytes]
            region.graphs.append(pool.pools)
            pool.pools.widens = True
            pool.pools.refusal = region.refusal
        return pool

    def here(self) -> _Region | None:
        """The region that this thread is in."""
        here = self._cache.private.pools_here()
        return next((each for each in self._all() if each.pool.pools is here), None)

    def add_outside(self, region: _Region, live: Live) -> Outside:
        """Let PyTorch take segments for a region."""
        # (Those that PyTorch no longer uses and has given back are left out.)
        region.outside = [at for at in region.outside if at.segments or not at.forsaken]
        outside = Outside(self._cache.external, live)
        region.outside.append(outside)
        outside.refusal = region.refusal
        return outside

    def _all(self) -> list[_Region]:
        return list(self._by_tag.values())

    def tags(self) -> list[RegionInfo]:
        """See `devalloc.Arena.tags`."""
        return [RegionInfo(each.tag, self._bytes_of(each), each.state) for each in self._all()]

    def _bytes_of(self, region: _Region) -> int:
        outside = sum(each.held for each in region.outside)
        return outside + sum(map(self._cache.private.bytes_of, region.pools))

    def stats(self) -> dict[str, int]:
        """The bytes of backups, kept memory included."""
        backups = [each.backup for each in self._all()]
        return {
            "backup_bytes.pinned": sum(each.pinned for each in backups),
            "backup_bytes.pageable": sum(each.pageable for each in backups),
            "backup_bytes.disk": sum(each.on_disk for each in backups),
        }

    def abandon(self) -> None:
        """The arena is closed: memory goes back when nothing is allocated there."""
        for region in self._all():
            self._cache.private.abandon(region.pool.pools)
            if region.state == AWAKE:
                region.backup.release()

    def _chosen(self, tag: Tags, state: str) -> list[_Region]:
        tags = tag if isinstance(tag, (list, tuple)) and tag else (tag,)
        for each in tags:
            if each is not None and not (isinstance(each, str) and each in self._by_tag):
                known = ", ".join(map(repr, self._by_tag)) or "none"
                raise InvalidArgument(f"this arena has no region {quote(each)}; there are: {known}")
        return [
            each
            for each in self._all()
            if each.state == state and (None in tags or each.tag in tags)
        ]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:
            if self._changing:
                raise DevallocError(
                    "regions were used in a callback or a finalizer that interrupted a change of "
                    "theirs; do it after that call"
                )
            self._changing = True
            try:
                yield
            finally:
                self._changing = False

    # Pausing --------------------------------------------------------------------------------------

    def pause(self, tag: Tags, streams: Sequence[int] | None, agree: Agree = _agreed) -> None:
        """See `devalloc.Arena.pause`. If ``agree`` raises, nothing has changed."""
        streams = None if streams is None else _handles(streams)
        with self._alone():
            regions = self._chosen(tag, AWAKE)
            self._refuse_while_capturing(regions)
            if not regions:
                agree()
                return
            told: list[str] = []
            try:
                for region in regions:
                    told.append(region.tag)
                    for callback in tuple(self.on_pause):
                        callback(region.tag)
                self._put_to_sleep(regions, streams, agree)
            except BaseException:
                # What the callbacks have undone is done again. The first error is the caller's.
                call_for_finalizers(self._tell_resumed, told)
                raise

    def _refuse_while_capturing(self, regions: list[_Region]) -> None:
        """Also captures that the arena does not know of."""
        if regions and (self._cache.private.capturing or self._cache.streams.capturing()):
            raise InvalidArgument("no region can be paused or resumed during a capture")

    def _put_to_sleep(
        self, regions: list[_Region], streams: Sequence[int] | None, agree: Agree
    ) -> None:
        source = self._source
        begun: list[_Region] = []
        detached: list[int] = []
        saved: list[_Region] = []
        try:
            contents = self._begin(regions, begun, "paused")
            self._wait(streams, contents)
            with copies_on(source.device, self._cache.streams) as copies:
                for region, parts in contents:
                    saved.append(region)
                    self._save(region, parts, copies)
            for _, parts in contents:
                for part in parts:
                    source.detach(part.address)
                    detached.append(part.address)
            agree()
        except BaseException:
            call_for_all(source.attach, detached)
            for region in saved:
                region.backup.forget()
            self._end(begun)
            raise
        for region in regions:
            region.state = ASLEEP
        # Before frees are possible again, which give addresses back.
        call_for_finalizers(source.discard, detached)
        self._end(regions)

    @property
    def _source(self) -> VirtualSource:
        """The source, where there is a region to change: no other source has regions."""
        source = self._cache.source
        assert isinstance(source, VirtualSource)
        return source

    def _begin(self, regions: list[_Region], begun: list[_Region], what: str) -> Contents:
        """Refuse allocations in the regions, which are entered in ``begun``; returns the live
        blocks there."""
        contents: Contents = []
        for region in regions:
            begun.append(region)
            text = f"the region {region.tag!r} is being {what}; allocate afterwards"
            parts: list[Content] = []
            for pools in region.pools:
                keep_idle = pools is not region.pool.pools and pools.uses > 0
                parts += self._cache.private.begin_change(pools, text, keep_idle=keep_idle)
                if what == "resumed":
                    self._cache.private.mark_asleep(pools, False, text)
            for outside in region.outside:
                begin = outside.begin_pause if what == "paused" else outside.begin_resume
                parts += begin(text)
            contents.append((region, parts))
        return contents

    def _end(self, regions: list[_Region]) -> None:
        """Let the cache know the states of the regions."""
        for region in regions:
            for pools in region.pools:
                self._cache.private.mark_asleep(pools, region.state == ASLEEP, region.refusal)
            for outside in region.outside:
                outside.end(region.state == ASLEEP, region.refusal)

    def _wait(self, streams: Sequence[int] | None, contents: Contents) -> None:
        """Wait for all work that may use the regions."""
        known = {stream for _, parts in contents for part in parts for stream in part.streams}
        # PyTorch's memory is like that of heaps: it does not record which streams use what.
        unknown = any(each.segments for region, _ in contents for each in region.outside) or any(
            part.address <= heap < part.address + part.nbytes
            for heap in tuple(self.heaps)
            for _, parts in contents
            for part in parts
        )
        if streams is None and unknown:
            self._cache.streams.synchronize()
            return
        events = [self._cache.streams.record(each) for each in sorted(known | {*(streams or ())})]
        for event in events:
            event.synchronize()

    # Backups --------------------------------------------------------------------------------------

    def _backed_up(self, region: _Region, parts: list[Content]) -> list[tuple[int, int]]:
        return [
            (block.address, block.nbytes)
            for part in parts
            for block in part.blocks
            if region.rule_of(block) == "backup"
        ]

    def _pinned_by_others(self, region: _Region) -> int:
        return sum(each.backup.pinned for each in self._all() if each is not region)

    def _save(self, region: _Region, parts: list[Content], copies: Copies) -> None:
        runs = lay_out(self._backed_up(region, parts))
        disk = region.options[0] == "disk"
        region.backup.save(runs, copies, disk, self._pinned_by_others(region))

    def prepare(self, tag: Tags) -> None:
        """See `devalloc.Arena.prepare`."""
        with self._alone():
            regions = self._chosen(tag, AWAKE)
            self._refuse_while_capturing(regions)  # CUDA locks no memory then
            for region in regions:
                if region.options[0] == "disk":
                    continue
                parts = [
                    part
                    for pools in region.pools
                    for part in self._cache.private.contents_of(pools)
                ]
                nbytes = sum(nbytes for _, nbytes in self._backed_up(region, parts))
                if nbytes:
                    region.backup.prepare(nbytes, self._pinned_by_others(region))

    def release_backups(self, tag: Tags) -> None:
        """See `devalloc.Arena.release_backups`."""
        with self._alone():
            for region in self._chosen(tag, AWAKE):
                region.backup.release()

    def set_budget(self, nbytes: int | None) -> None:
        """See `devalloc.Arena.backup_budget`."""
        with self._alone():
            self.settings.budget = nbytes
            if nbytes is not None and self.stats()["backup_bytes.pinned"] > nbytes:
                for region in self._chosen(None, AWAKE):
                    region.backup.release()

    def backup_at(self, address: int) -> torch.Tensor | None:
        """The bytes of a block's backup on the CPU; None if it has none there."""
        with self._alone():
            region = self.region_at(address)
            return None if region is None else region.backup.view(address)

    def region_at(self, address: int) -> _Region | None:
        """The region of the block at an address, also if PyTorch has it."""
        pools = self._cache.private.pools_at(address)
        for each in self._all():
            if pools in each.pools or any(at.owner_of(address) for at in each.outside):
                return each
        return None

    # Resuming -------------------------------------------------------------------------------------

    def resume(self, tag: Tags, agree: Agree = _agreed) -> None:
        """See `devalloc.Arena.resume`. If ``agree`` raises, nothing has changed."""
        with self._alone():
            regions = self._chosen(tag, ASLEEP)
            self._refuse_while_capturing(regions)
            if not regions:
                agree()
                return
            begun: list[_Region] = []
            mapped: list[int] = []
            try:
                contents = self._begin(regions, begun, "resumed")
                self._require_margin(contents)
                with copies_on(self._source.device, self._cache.streams) as copies:
                    for region, parts in contents:
                        for part in parts:
                            self._source.map(part.address)
                            mapped.append(part.address)
                        self._restore(region, parts, copies)
                agree()
            except BaseException:
                call_for_all(lambda at: self._source.unmap(at, keep=False), mapped)
                self._end(begun)
                raise
            for region in regions:
                region.state = AWAKE
                region.backup.forget()
            self._end(regions)
            call_for_all(self._tell_resumed, [region.tag for region in regions])

    def _tell_resumed(self, tag: str) -> None:
        call_for_all(lambda callback: callback(tag), tuple(self.on_resume))

    def _require_margin(self, contents: Contents) -> None:
        if not self.margin:
            return
        needed = sum(part.nbytes for _, parts in contents for part in parts)
        free = self._source.free_bytes()
        if needed + self.margin > free:
            raise OutOfMemory(
                f"{format_size(needed)} cannot be resumed: {format_size(free)} of "
                f"{self._source.device} are free, and {format_size(self.margin)} of them must stay "
                "so; free memory, or lower resume_margin"
            )

    def _restore(self, region: _Region, parts: list[Content], copies: Copies) -> None:
        blocks = [block for part in parts for block in part.blocks]
        saved = [block.address for block in blocks if region.rule_of(block) == "backup"]
        region.backup.load(saved, copies)
        for block in blocks:
            if region.rule_of(block) == "zero":
                copies.zero(block.address, block.nbytes)
