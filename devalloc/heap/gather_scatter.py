"""Between many blocks and one tensor: rows of any lengths, laid end to end (the jagged layout).

The elements, not the rows, are shared out among the programs, so it does not matter how unequal
the rows are. A program finds the row of its first element by bisection of the offsets, and then
looks at as many rows at a time as it has lanes.

A row whose address is not that of a live block with room for it is neither read nor written; it is
recorded by the program that has its first element. Offsets may be wrong too: whatever they are,
nothing outside of the tensor and of live blocks is touched.
"""

import triton
import triton.language as tl

from devalloc.kernels import usable_size
from devalloc.kernels.debug.block_table import control_block
from devalloc.kernels.debug.pointers import BY_GATHER, BY_SCATTER, report_pointers
from devalloc.kernels.error_record import record_error
from devalloc.kernels.lanes import any_lane, count_lanes, first_lane, pick
from devalloc.kernels.layout import E_INVALID_ARGUMENT, IN_ROWS


@triton.jit
def owner_of(ends, item, LANES: tl.constexpr):
    """Lane whose row holds ``item``, if rows that end at ``ends`` are laid end to end.

    ``ends`` is an inclusive prefix sum over the lanes. Items past the last end give some lane.
    """
    lane = (item * 0).to(tl.int32)
    for level in tl.static_range(1, 13):  # 4096 lanes at most
        if (LANES >> level) > 0:
            beyond = tl.gather(ends, lane + ((LANES >> level) - 1), 0) <= item
            lane = tl.where(beyond, lane + (LANES >> level), lane)
    return lane


@triton.jit
def record_rows(heap, size, count):
    """Record ``count`` wrong lengths, one of them ``size``; or a sum that is too large."""
    record_error(heap, count * 0 + E_INVALID_ARGUMENT, size * 0 + IN_ROWS, size, count)


@triton.jit
def check_offsets(heap, offsets, n, total, LANES: tl.constexpr):
    """Record rows of negative length, each once, and offsets that begin before 0 or end behind
    ``total``."""
    block = tl.program_id(0).to(tl.int64)
    if block == 0:
        first = tl.load(offsets)
        if first < 0:
            record_rows(heap, first, (first & 0).to(tl.int32) + 1)
        last = tl.load(offsets + n)
        if last > total:
            record_rows(heap, last, (last & 0).to(tl.int32) + 1)
    while block * LANES < n:
        row = block * LANES + tl.arange(0, LANES)
        inside = row < n
        length = tl.load(offsets + row + 1, mask=inside, other=0)
        length -= tl.load(offsets + row, mask=inside, other=0)
        negative = length < 0
        if any_lane(negative):
            record_rows(heap, pick(length, first_lane(negative)), count_lanes(negative))
        block += tl.num_programs(0)


@triton.jit
def first_row(offsets, n, position, UNIT: tl.constexpr):
    """The first row that ends behind ``position`` (int64 scalar); ``n`` if there is none."""
    low = position * 0
    high = low + n
    while low < high:
        middle = (low + high) >> 1
        ends = tl.load(offsets + middle + 1) * UNIT
        behind = ends > position
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, middle + 1)
    return low


@triton.jit
def move_rows(heap, addrs, offsets, values, n, total, GATHER: tl.constexpr, UNIT: tl.constexpr,
              SPAN: tl.constexpr, LANES: tl.constexpr, ITEMS: tl.constexpr):  # fmt: skip
    """Move this program's SPAN units between blocks and ``values``, ITEMS at a time, of LANES rows.
    An element has UNIT units."""
    check_offsets(control_block(heap), offsets, n, total, LANES)
    unit_bytes: tl.constexpr = values.dtype.element_ty.primitive_bitwidth // 8
    begin = tl.program_id(0).to(tl.int64) * SPAN
    end = tl.minimum(begin + SPAN, total.to(tl.int64) * UNIT)
    row = first_row(offsets, n, begin, UNIT)
    more = (row < n) & (begin < end)
    while more:
        rows = row + tl.arange(0, LANES)
        inside = rows < n
        start = tl.load(offsets + rows, mask=inside, other=0) * UNIT
        stop = tl.load(offsets + rows + 1, mask=inside, other=0) * UNIT
        # What of each row is this program's.
        low = tl.maximum(start, begin)
        count = tl.maximum(tl.minimum(stop, end) - low, 0)
        used = count > 0
        addr = tl.load(addrs + rows, mask=used, other=0)
        nbytes = (stop - start) * unit_bytes
        # (A row that begins before the values is recorded with the offsets.)
        fits = (usable_size(heap, addr, used) >= nbytes) & (start >= 0)
        wrong = used & (fits == 0) & (start >= 0)
        if any_lane(wrong):
            report_pointers(heap, addr, nbytes, wrong & (start >= begin),
                            BY_GATHER if GATHER else BY_SCATTER)  # fmt: skip
        ends = tl.cumsum(count, axis=0)
        begins = ends - count
        # Item i of all these parts, end to end, is so many units behind these.
        position = low - begins
        place = addr + (low - start - begins) * unit_bytes
        moved = tl.max(ends, axis=0)
        base = moved * 0
        while base < moved:
            item = base + tl.arange(0, ITEMS)
            owner = owner_of(ends, item, LANES)
            mine = item < moved
            sound = mine & (tl.gather(fits.to(tl.int32), owner, 0) != 0)
            block_ptr = (tl.gather(place, owner, 0) + item * unit_bytes).to(values.dtype)
            value_ptr = values + tl.gather(position, owner, 0) + item
            if GATHER:
                # (A row that is nowhere becomes zeros.)
                tl.store(value_ptr, tl.load(block_ptr, mask=sound, other=0), mask=mine)
            else:
                tl.store(block_ptr, tl.load(value_ptr, mask=sound), mask=sound)
            base += ITEMS
        row += LANES
        more = (row < n) & (tl.load(offsets + row, mask=row < n, other=0) * UNIT < end)


@triton.jit(do_not_specialize=["n", "total"])
def gather_kernel(heap, addrs, offsets, values, n, total, UNIT: tl.constexpr,
                  SPAN: tl.constexpr, LANES: tl.constexpr, ITEMS: tl.constexpr):  # fmt: skip
    """``values[offsets[i] : offsets[i + 1]]`` = the block at ``addrs[i]``, for i < n."""
    move_rows(heap, addrs, offsets, values, n, total, True, UNIT, SPAN, LANES, ITEMS)


@triton.jit(do_not_specialize=["n", "total"])
def scatter_kernel(heap, addrs, offsets, values, n, total, UNIT: tl.constexpr,
                   SPAN: tl.constexpr, LANES: tl.constexpr, ITEMS: tl.constexpr):  # fmt: skip
    """The block at ``addrs[i]`` = ``values[offsets[i] : offsets[i + 1]]``, for i < n."""
    move_rows(heap, addrs, offsets, values, n, total, False, UNIT, SPAN, LANES, ITEMS)
