"""Is there a block behind an address, and a heap behind a handle? What ``api`` asks in a debug heap
and in the interpreter, and what is recorded if there is none.

An address is *sound* for so many bytes if they all lie in one live block; it may be an inner
address. In a debug heap the table tells, and the bytes are those that were asked for. A lane whose
address is not sound is recorded, and gets a pointer to unused memory instead: the page in
front of the heap, of which only the last bytes are a guard. So the kernel goes on and the record is
read; an access through a null pointer would end the process's use of the device.

In the interpreter an ordinary heap is asked too, and the first unsound lane raises at once.

Concurrency: a block is live as long as its owner lets others have its address, so what is read of
it here does not change. Entries and marks are read through atomics all the same, because those of
unsound addresses may belong to others.
"""

import triton
import triton.language as tl

from ..addresses import locate, run_head, usable_any
from ..atomics import atomic_load
from ..bits import divide
from ..error_record import record_error
from ..lanes import any_lane, axes, count_lanes, first_lane, lane_index, pick, width
from ..layout import (
    E_INVALID_POINTER,
    MAGIC,
    MAGIC_WORD,
    NUM_CLASSES,
    PAGE_BYTES,
    RUN,
    SLAB,
    address_of,
    class_bytes,
    load_base,
    load_immutable,
    page_class,
    page_word_ptr,
)
from ..target import is_interpreted, tell_host
from . import block_table
from .block_table import RUN_USE

# Who found it, after those of `block_table`.
BY_POINTER = tl.constexpr(4)
BY_GATHER = tl.constexpr(5)
BY_SCATTER = tl.constexpr(6)


@triton.constexpr_function
def is_checked(heap):
    """Whether the functions look at what they are given more closely than an ordinary heap's may
    on a device: in a debug heap, and in the interpreter."""
    return heap.dtype.element_ty == tl.uint64 or triton.knobs.runtime.interpret


@triton.jit
def of_heap(heap, active):
    """The active lanes; in a debug heap and in the interpreter none if the handle does not point to
    the state of a heap. Then the interpreter raises; on a device no heap is there to record it."""
    if is_checked(heap):
        word = load_immutable(block_table.control_block(heap), MAGIC_WORD)
        if is_interpreted():
            if word != MAGIC:
                tell_host("handle", word)
        # (Not `active & ...`: the interpreter would keep that as integers.)
        active = tl.where(word == MAGIC, active.to(tl.int32), 0) != 0
    return active


@triton.jit
def look_up(heap, addr, active):
    """``(block, word, birth)``: what the table of a debug heap knows at int64 addresses. The start
    of the block, live or freed, in whose slot or run the address lies, and its entry; or 0s."""
    inside, page, granule = locate(heap, addr & -16, active)
    mark = atomic_load(block_table.mark_ptr(heap, page), inside)
    use = block_table.mark_use(mark)
    run = use >= RUN_USE
    head = tl.where(run, tl.maximum(page - (use - RUN_USE), 0), page)
    slot = class_bytes(tl.minimum(use, NUM_CLASSES - 1))
    first = tl.where(run, 0, divide(granule << 4, slot) * slot >> 4)
    base = load_base(heap)
    block = tl.where(inside, address_of(heap, head, first), base)
    entry = block_table.entry_ptr(heap, block)
    word = atomic_load(entry, inside)
    birth = atomic_load(entry + 1, inside)
    known = (word != 0) & (block_table.entry_granule(word) == (first & 3))
    # (Pages of a run have epochs of their own; the entry has that of the first.)
    mark = atomic_load(block_table.mark_ptr(heap, head), inside)
    known = known & (block_table.entry_epoch(birth) == block_table.mark_epoch(mark))
    return tl.where(known, block, 0), tl.where(known, word, 0), tl.where(known, birth, 0)


@triton.jit
def record_unsound(heap, addr, block, word, birth, wrong, finder):
    """Record the ``wrong`` lanes in the table of a debug heap, with what :func:`look_up` found."""
    while any_lane(wrong):
        lane = first_lane(wrong)
        kind = lane * 0 + E_INVALID_POINTER
        block_table.record_fault(heap, kind, pick(addr, lane), pick(block, lane), pick(word, lane),
                     pick(birth, lane), lane * 0 + finder)  # fmt: skip
        wrong = wrong & (lane_index(wrong) != lane)


@triton.jit
def report_pointers(heap, addr, nbytes, wrong, finder):
    """Record for ``wrong`` lanes that ``nbytes`` bytes at ``addr`` are not those of a live block.
    A debug heap records each with what it knows of the block, others the first with the count."""
    if block_table.is_debug(heap):
        heap = block_table.control_block(heap)
        block, word, birth = look_up(heap, addr, wrong)
        record_unsound(heap, addr, block, word, birth, wrong, finder)
    elif any_lane(wrong):
        lane = first_lane(wrong)
        kind = lane * 0 + E_INVALID_POINTER
        record_error(heap, kind, pick(addr, lane), pick(nbytes, lane), count_lanes(wrong))


@triton.jit
def sound_or_aside(heap, addr, nbytes: tl.constexpr, active):
    """In a debug heap: int64 addresses, and where those of active lanes are not sound for
    ``nbytes``, which is recorded, the address of unused memory."""
    heap = block_table.control_block(heap)
    block, word, birth = look_up(heap, addr, active)
    sound = block_table.is_live(word) & (addr - block + nbytes <= block_table.entry_size(word))
    wrong = active & (sound == 0)
    record_unsound(heap, addr, block, word, birth, wrong, BY_POINTER)
    return tl.where(wrong, load_base(heap) - PAGE_BYTES, addr)


@triton.jit
def block_start(heap, addr, active):
    """The start of the slot or run that contains the address; the base of the heap for addresses
    outside of it and in inactive lanes. (For the interpreter: see :func:`run_head`.)"""
    inside, page, granule = locate(heap, addr & -16, active)
    word = atomic_load(page_word_ptr(heap, page), inside)
    size = class_bytes(page_class(word))
    slab = (word & SLAB) != 0
    first = tl.where(slab, divide(granule << 4, size) * (size >> 4), 0)
    # Behind the first page of a run the page words are of no kind.
    head = run_head(heap, page, inside & ((word & (SLAB + RUN)) == 0))
    return address_of(heap, head, first)


@triton.jit
def raise_unsound(heap, addr, nbytes: tl.constexpr, active):
    """In the interpreter: raise if an address of an active lane is not sound for ``nbytes``."""
    block = block_start(heap, addr, active)
    have = usable_any(heap, block, active)
    wrong = active & ((have == 0) | (addr < block) | (addr - block + nbytes > have))
    if any_lane(wrong):
        lane = first_lane(wrong)
        at = pick(addr, lane)
        start, size = pick(block, lane), pick(have, lane)
        tell_host("pointer", at, nbytes, start, size, load_base(heap), lane, width(addr))


@triton.constexpr_function
def element_bytes(dtype):
    """What an element of a type takes in memory."""
    return 8 if dtype.is_ptr() else max(1, dtype.primitive_bitwidth // 8)


@triton.jit
def checked_addresses(heap, addr, dtype: tl.constexpr, active):
    """For ``api.pointer``, if :func:`is_checked`: int64 addresses of any shape. Those in active
    lanes should be of elements of ``dtype`` in live blocks: others are recorded and replaced in a
    debug heap, and raise in the interpreter."""
    active = of_heap(heap, active)
    flat = addr
    if axes(addr) > 1:
        flat = tl.ravel(addr)
        active = tl.ravel(active)
    if block_table.is_debug(heap):
        flat = sound_or_aside(heap, flat, element_bytes(dtype), active)
    else:
        raise_unsound(heap, flat, element_bytes(dtype), active)
    return tl.reshape(flat, addr.shape) if axes(addr) > 1 else flat
