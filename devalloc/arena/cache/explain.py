"""Texts about the cache: why a call failed, and the report with bins and occupancy."""

from __future__ import annotations

from devalloc.arena.policies.bfc_policy import BINS, MIN_CHUNK, bin_of
from devalloc.arena.store.blocks import FREE, LIVE, PENDING
from devalloc.arena.store.request import Request
from devalloc.arena.store.store import Store
from devalloc.errors import DevallocError, DoubleFree, InvalidArgument, InvalidFree
from devalloc.sizes import format_size, quote

_PICTURE = 100
_MARKS = {FREE: "_", LIVE: "x", PENDING: "p"}


def _sums(store: Store) -> dict[int, int]:
    sums = {FREE: 0, LIVE: 0, PENDING: 0}
    for block in store.blocks.values():
        sums[block.state] += block.size
    return sums


def fragmentation(free: int, largest: int) -> float:
    """(free - largest free) / free: 0 if all free memory is one block."""
    return (free - largest) / free if free else 0.0


def failure(store: Store, request: Request) -> str:
    """The message for a failed request: where the memory is, how fragmented, and what to do."""
    sums = _sums(store)
    free = list(store.free_blocks())
    pool = request.home.pool
    suited = [block.size for block in free if block.home is request.home]
    largest = max(suited, default=0)
    elsewhere = sum(at.size for at in free if at.home is not request.home and at.home.pool is pool)
    private = sum(at.size for at in store.segments.values() if at.pool.owner != (0, 0))
    cached = sums[FREE]
    limit = "no limit" if store.limit is None else f"a limit of {format_size(store.limit)}"
    wanted = f"a segment of {format_size(request.segment)} was wanted, " if request.segment else ""
    parts = [
        f"alloc of {format_size(request.nbytes)} on stream {request.stream} failed: {wanted}"
        f"{format_size(store.reserved)} are reserved in {len(store.segments)} segments "
        f"({limit}), {format_size(sums[LIVE])} of them allocated, {format_size(cached)} free, "
        f"{format_size(sums[PENDING])} freed but in use by other streams; the largest free block "
        f"that this request may take is {format_size(largest)}, fragmentation "
        f"{100 * fragmentation(cached, max((at.size for at in free), default=0)):.0f} %"
    ]
    if elsewhere:
        parts.append(f"{format_size(elsewhere)} are free for other streams only")
    if private:
        parts.append(f"{format_size(private)} belong to private pools")
    if store.external.reserved:
        parts.append(f"{format_size(store.external.reserved)} are with PyTorch's own allocator")
    if store.failure is not None:
        parts.append(f"the source said: {store.failure}")
    return "; ".join(parts) + ". " + _remedy(store, request, sums, elsewhere)


def _remedy(store: Store, request: Request, sums: dict[int, int], elsewhere: int) -> str:
    steps = []
    in_use = sums[LIVE] + sums[PENDING]
    if store.captures:
        steps.append("allocate before the capture, for nothing can be released during it")
    if store.limit is not None and request.size > store.limit:
        return "The request is larger than the limit: raise it"
    if in_use and sums[FREE] >= request.size:
        steps.append("free neighbouring blocks, or keep sizes apart by policy or arena")
    if elsewhere >= request.size:
        steps.append("set share_streams=True, or free on the stream that allocates")
    never_fits = store.limit is not None and request.segment > store.limit
    if store.limit is not None:
        least = f" to at least {format_size(request.segment)}" if never_fits else ""
        steps.append(f"raise the limit of {format_size(store.limit)}{least}")
    if never_fits:
        steps.append("choose a policy or options with smaller segments")
    if not never_fits or _could_serve(store, request):
        if in_use or store.external.reserved:
            steps.append("free something")
        elif store.reserved and store.privates:
            steps.append("release a private pool")
    # Without a limit the source failed, and other programs or caches hold its memory.
    text = ", or ".join(steps or ["ask for less, or free memory of the source elsewhere"])
    return text[0].upper() + text[1:]


def _could_serve(store: Store, request: Request) -> bool:
    """Whether one of the segments would be large enough if it were free."""
    pool = request.home.pool
    return any(at.pool is pool and at.size >= request.size for at in store.segments.values())


def require_address(address: object) -> None:
    """Refuse what is not an int; nothing else may be looked up as an address."""
    if isinstance(address, bool) or not isinstance(address, int):
        raise InvalidArgument(f"an address is an int, such as malloc returns, not {quote(address)}")


def wrong_free(store: Store, address: int, claim: int) -> DevallocError:
    """The error for freeing something that is not a live allocation, or not the caller's."""
    block = next(
        (
            block
            for segment in store.segments.values()
            if segment.address <= address < segment.address + segment.size
            for block in segment.blocks()
            if block.address <= address < block.address + block.size
        ),
        None,
    )
    if block is None:
        return InvalidFree(
            f"invalid free of {address:#x}: no segment of this cache contains it; free exactly "
            "what malloc of the same cache returned, once"
        )
    if block.state == LIVE and block.address == address:
        if claim:
            return DoubleFree(
                f"double free of {address:#x}: it was freed before, and is another allocation now"
            )
        return InvalidFree(
            f"invalid free of {address:#x}: the allocation belongs to an object, such as a "
            "devalloc.Block; free that"
        )
    if block.state == LIVE:
        return InvalidFree(
            f"invalid free of {address:#x}: it is {address - block.address} B inside the block "
            f"of {format_size(block.size)} at {block.address:#x}; free what malloc returned"
        )
    return DoubleFree(
        f"double free of {address:#x}: there is no live allocation there; it was freed before or "
        "never allocated"
    )


def report(store: Store) -> str:
    """Totals, bins with their chunks, and one character for each hundredth of the memory."""
    count, used, free = [0] * BINS, [0] * BINS, [0] * BINS
    largest = 0
    for block in store.blocks.values():
        at = bin_of(block.size)
        count[at] += 1
        if block.state == FREE:
            free[at] += block.size
            largest = max(largest, block.size)
        else:
            used[at] += block.size
    lines = [
        f"policy {store.policy.name}: {format_size(store.reserved)} in {len(store.segments)} "
        f"segments, {format_size(sum(used))} in use, {format_size(sum(free))} free, largest free "
        f"{format_size(largest)}, fragmentation {100 * fragmentation(sum(free), largest):.1f} %"
    ]
    for at in range(BINS):
        if count[at]:
            lines.append(
                f"bin {at:2} from {format_size(MIN_CHUNK << at)}: {count[at]} blocks, "
                f"{format_size(used[at])} in use, {format_size(free[at])} free"
            )
    lines.append("[" + _occupancy(store) + "]  x in use, p pending, _ free, . some of each")
    return "\n".join(lines)


def _occupancy(store: Store) -> str:
    cells: list[set[int]] = [set() for _ in range(_PICTURE)]
    offset = 0
    for address in sorted(store.segments):
        for block in store.segments[address].blocks():
            first = offset * _PICTURE // store.reserved
            offset += block.size
            last = (offset * _PICTURE - 1) // store.reserved
            for cell in cells[first : last + 1]:
                cell.add(block.state)
    return "".join(
        " " if not cell else _MARKS[next(iter(cell))] if len(cell) == 1 else "." for cell in cells
    )
