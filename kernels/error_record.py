"""The error record: a kernel cannot raise, so it counts, and writes down the first few."""

import triton
import triton.language as tl

from .layout import ERROR_RECORDS, ERRORS, MAX_RECORDS, RECORD_COUNT, program_index


@triton.jit(noinline=True)
def record_error(heap, kind, addr, size, count):
    """Count ``count`` errors of ``kind`` and record one of them if there is room.

    Scalars: ``kind`` int32, ``addr`` and ``size`` int64 (0: not known), ``count`` int32. A record
    is (kind, address, size, program). Only the host reads records, after synchronising.
    """
    tl.atomic_add(heap + ERRORS + kind, count.to(tl.int64), sem="relaxed")
    index = tl.atomic_add(heap + RECORD_COUNT, (size & 0) + 1, sem="relaxed")
    if index < MAX_RECORDS:
        record = heap + ERROR_RECORDS + index * 4
        tl.atomic_xchg(record, kind.to(tl.int64), sem="relaxed")
        tl.atomic_xchg(record + 1, addr.to(tl.int64), sem="relaxed")
        tl.atomic_xchg(record + 2, size.to(tl.int64), sem="relaxed")
        tl.atomic_xchg(record + 3, program_index().to(tl.int64), sem="relaxed")
    return index
