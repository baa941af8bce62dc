"""Regions of an arena: memory that is given back to the device while its addresses stay.

docs/regions.md has the rules: the states, the order of the steps, and what could go wrong. A region
is a private pool of the cache, so its segments hold nothing else. `Regions.pause` and `resume` do
all or nothing: up to the last step everything can be undone, and the last step cannot fail.

Concurrency: one lock for `pause`, `resume` and new regions. The cache's lock is taken only while
its state is read or changed; meanwhile allocations in the region are refused, so nothing moves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from devalloc.cleanup import call_for_all
from devalloc.errors import InvalidArgument
from devalloc.sizes import quote
from devalloc.sources import HostSource, PinnedSource, Segment, VirtualSource

if TYPE_CHECKING:
    from devalloc.cache import Cache, PrivatePool
    from devalloc.cache.sleep import Content

AWAKE, ASLEEP = "awake", "asleep"
_BACKUPS = (None, "cpu")
_ON_RESUME = ("undefined", "zero")


class RegionInfo(NamedTuple):
    """One region: its tag, the bytes of its segments, and whether it is awake or asleep."""

    tag: str
    nbytes: int
    state: str


class _Place(Segment):
    """Memory of a segment of the cache, for `VirtualSource.view`. It owns nothing."""

    def __init__(self, address: int) -> None:
        self.address = address


class _Region:
    def __init__(self, tag: str, backup: str | None, on_resume: str, pool: PrivatePool) -> None:
        self.tag = tag
        self.options = backup, on_resume
        self.pool = pool
        self.state = AWAKE
        self.backups: list[tuple[int, torch.Tensor]] = []

    @property
    def refusal(self) -> str:
        if self.state == AWAKE:
            return ""
        return f"the region {self.tag!r} is asleep; call resume({self.tag!r}) first"


class Regions:
    """The regions of one arena, by tag."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._by_tag: dict[str, _Region] = {}
        self._lock = threading.RLock()
        self.heaps: set[int] = set()
        """Addresses of heaps' memory, which cannot sleep yet."""

    # Entering -------------------------------------------------------------------------------------

    @contextmanager
    def enter(self, tag: str, backup: str | None, on_resume: str) -> Iterator[None]:
        """See `devalloc.Arena.region`."""
        region = self._region(tag, backup, on_resume)
        with self._cache.route(region.pool):
            yield

    def _region(self, tag: str, backup: str | None, on_resume: str) -> _Region:
        if not isinstance(self._cache.source, VirtualSource):
            raise InvalidArgument(
                f"{self._cache.source!r} cannot keep addresses without memory; regions need "
                'Arena(source="virtual")'
            )
        if not isinstance(tag, str) or not tag:
            raise InvalidArgument(f"a tag is a text that is not empty, not {quote(tag)}")
        if backup not in _BACKUPS:
            raise InvalidArgument(f'backup is None or "cpu", not {quote(backup)}')
        if on_resume not in _ON_RESUME:
            raise InvalidArgument(f'on_resume is "undefined" or "zero", not {quote(on_resume)}')
        with self._lock:
            found = self._by_tag.get(tag)
            if found is None:
                pool = self._cache.private_pool()
                found = self._by_tag[tag] = _Region(tag, backup, on_resume, pool)
            if found.options != (backup, on_resume):
                raise InvalidArgument(
                    f"the region {tag!r} has backup={found.options[0]!r} and "
                    f"on_resume={found.options[1]!r}; enter it with these, or take another tag"
                )
            return found

    def tags(self) -> list[RegionInfo]:
        """See `devalloc.Arena.tags`."""
        with self._lock:
            return [
                RegionInfo(each.tag, self._cache.bytes_of(each.pool.pools), each.state)
                for each in self._by_tag.values()
            ]

    def abandon(self) -> None:
        """The arena is closed: memory goes back when nothing lives there."""
        with self._lock:
            for region in self._by_tag.values():
                self._cache.abandon(region.pool.pools)

    def _chosen(self, tag: str | None, state: str) -> list[_Region]:
        if tag is not None and not (isinstance(tag, str) and tag in self._by_tag):
            known = ", ".join(map(repr, self._by_tag)) or "none"
            raise InvalidArgument(f"this arena has no region {quote(tag)}; there are: {known}")
        return [
            each
            for each in self._by_tag.values()
            if each.state == state and tag in (None, each.tag)
        ]

    # Pausing --------------------------------------------------------------------------------------

    def pause(self, tag: str | None, streams: Sequence[int] | None) -> None:
        """See `devalloc.Arena.pause`."""
        with self._lock:
            regions = self._chosen(tag, AWAKE)
            if not regions:
                return
            source = self._source
            begun: list[_Region] = []
            detached: list[int] = []
            backups: dict[_Region, list[tuple[int, torch.Tensor]]] = {}
            try:
                contents: list[tuple[_Region, Content]] = []
                for region in regions:
                    text = f"the region {region.tag!r} is being paused; allocate after resume()"
                    begun.append(region)
                    found = self._cache.begin_change(region.pool.pools, text)
                    contents += [(region, each) for each in found]
                self._refuse_heaps(contents)
                self._wait(streams, contents)
                for region, content in contents:
                    if region.options[0] is not None:
                        kept = backups.setdefault(region, [])
                        kept += [self._copy_out(*run) for run in content.runs]
                self._wait_for_copies(bool(backups))
                for _, content in contents:
                    source.detach(content.segment.address)
                    detached.append(content.segment.address)
            except BaseException:
                call_for_all(source.attach, detached)
                self._end(begun)
                raise
            for region in regions:
                region.state, region.backups = ASLEEP, backups.get(region, [])
            for region in regions:
                self._cache.mark_asleep(region.pool.pools, True, region.refusal)
            call_for_all(source.discard, detached)

    @property
    def _source(self) -> VirtualSource:
        source = self._cache.source
        assert isinstance(source, VirtualSource)  # or there would be no region
        return source

    def _refuse_heaps(self, contents: list[tuple[_Region, Content]]) -> None:
        for region, content in contents:
            start = content.segment.address
            end = start + content.segment.size
            if any(start <= at < end for at in tuple(self.heaps)):
                raise InvalidArgument(
                    f"a heap lives in the region {region.tag!r}, and heaps cannot sleep yet; close "
                    "it, or make it outside of the region"
                )

    def _wait(self, streams: Sequence[int] | None, contents: list[tuple[_Region, Content]]) -> None:
        """Wait for the given streams and for all that the cache knows to use the segments."""
        known = {stream for _, content in contents for stream in content.streams}
        events = [self._cache.streams.record(each) for each in sorted(known | {*(streams or ())})]
        for event in events:
            event.synchronize()

    def _end(self, regions: list[_Region]) -> None:
        """Back to the state before, which nothing has changed."""
        for region in regions:
            asleep = region.state == ASLEEP
            self._cache.mark_asleep(region.pool.pools, asleep, region.refusal)

    # Resuming -------------------------------------------------------------------------------------

    def resume(self, tag: str | None) -> None:
        """See `devalloc.Arena.resume`."""
        with self._lock:
            regions = self._chosen(tag, ASLEEP)
            begun: list[_Region] = []
            mapped: list[int] = []
            try:
                contents: list[tuple[_Region, Content]] = []
                for region in regions:
                    text = f"the region {region.tag!r} is being resumed; allocate afterwards"
                    begun.append(region)
                    found = self._cache.begin_change(region.pool.pools, text)
                    self._cache.mark_asleep(region.pool.pools, False, text)
                    contents += [(region, each) for each in found]
                for region, content in contents:
                    self._source.map(content.segment.address)
                    mapped.append(content.segment.address)
                    self._fill(region, content)
                self._wait_for_copies(bool(contents))
            except BaseException:
                self._wait_for_copies(bool(mapped))  # which may be under way
                call_for_all(lambda at: self._source.unmap(at, keep=False), mapped)
                self._end(begun)
                raise
            for region in regions:
                region.state, region.backups = AWAKE, []
            self._end(regions)

    def _fill(self, region: _Region, content: Content) -> None:
        """Give a segment its contents: what was backed up, or zeros."""
        segment = content.segment
        if region.options[1] == "zero":
            self._view(segment.address, segment.size).zero_()
        for address, backup in region.backups:
            if segment.address <= address < segment.address + segment.size:
                self._view(address, backup.numel()).copy_(backup, non_blocking=True)

    # Copies ---------------------------------------------------------------------------------------

    def _view(self, address: int, nbytes: int) -> torch.Tensor:
        return self._source.view(_Place(address), 0, nbytes)

    def _copy_out(self, address: int, nbytes: int) -> tuple[int, torch.Tensor]:
        device = self._cache.source.device
        host = HostSource() if device.type == "cpu" else PinnedSource(device)
        backup = Segment(host, nbytes).view()
        backup.copy_(self._view(address, nbytes), non_blocking=True)
        return address, backup

    def _wait_for_copies(self, any_copies: bool) -> None:
        """Wait for the current stream, on which copies and zeros were queued."""
        if any_copies:
            streams = self._cache.streams
            streams.record(streams.current()).synchronize()
