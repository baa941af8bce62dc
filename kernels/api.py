"""What a kernel calls: malloc, free, usable_size, zeros, realloc, pointer.

Each function is compiled either for an ordinary heap or for a debug heap, never for both: the
handle of a debug heap is a pointer of another type (``debug.block_table.is_debug``), so the
choice is made while the kernel is compiled, and an ordinary heap pays nothing for it.
"""

import triton
import triton.language as tl

from .addresses import usable_any
from .allocation import malloc_any
from .debug.block_table import control_block, is_debug
from .debug.guarded_calls import free_guarded, malloc_guarded, realloc_guarded, usable_guarded
from .debug.pointers import checked_addresses, is_checked, of_heap
from .freeing import free_any
from .lanes import axes
from .payload import fill


@triton.constexpr_function
def is_handle(x):
    """Whether an argument can be ``Heap.handle``."""
    pointed = getattr(getattr(x, "dtype", None), "element_ty", None)
    return pointed == tl.int64 or pointed == tl.uint64


@triton.constexpr_function
def is_integer(x):
    """Whether an argument is a scalar or a block of integers, or a number."""
    x = getattr(x, "value", x)  # of a constexpr
    return isinstance(x, int) or (hasattr(x, "dtype") and x.dtype.is_int())


@triton.constexpr_function
def is_flag(x):
    """Whether an argument is a bool, a scalar or a block of them, or None."""
    x = getattr(x, "value", x)  # of a constexpr
    return x is None or isinstance(x, bool) or getattr(x, "dtype", None) == tl.int1


@triton.constexpr_function
def as_long_as(x, model):
    """Whether an argument is a scalar, None, or a block of the shape of ``model``."""
    shape, wanted = ([int(lanes) for lanes in getattr(y, "shape", ())] for y in (x, model))
    return len(shape) == 0 or shape == wanted


@triton.constexpr_function
def is_tag(tag, sizes):
    """Whether an argument can be the tag of a request."""
    return is_integer(tag) and as_long_as(tag, sizes)


@triton.constexpr_function
def is_element(dtype):
    """Whether an argument is a type that a pointer can point to."""
    dtype = getattr(dtype, "value", dtype)  # of a constexpr
    if not isinstance(dtype, tl.dtype) or dtype.is_block():
        return False
    return dtype.is_ptr() or dtype.primitive_bitwidth > 0


@triton.jit
def with_mask(x, mask):
    """``(values, active)``: integers as int64, and a mask, which broadcasts to them."""
    values = (tl.full((), 0, tl.int64) + x).to(tl.int64)
    active = values == values
    if mask is not None:
        # (Not `active & mask`: the interpreter would keep that as integers.)
        active = tl.where(mask, values * 0 + 1, 0) != 0
        if mask is False:
            # (Triton 3.6 fails to compile a block's request if it knows that no lane takes part.)
            active = values * 0 + tl.program_id(0) < 0
    return values, active


@triton.jit
def as_request(heap, x, mask):
    """``(values, active)``: int64 values in the shape of the request, scalar or 1-D block, and
    which lanes take part. What is no request is refused while the kernel is compiled."""
    tl.static_assert(is_handle(heap), "the heap of a kernel is Heap.handle, passed as an argument")
    tl.static_assert(is_integer(x), "sizes and addresses are integers: cast with .to(tl.int64)")
    tl.static_assert(axes(x) < 2, "requests are a scalar or a 1-D block: flatten it (tl.ravel)")
    tl.static_assert(is_flag(mask), "a mask is of bool: compare integers with != 0")
    tl.static_assert(axes(mask) < 2, "a mask is a scalar or a 1-D block: flatten it (tl.ravel)")
    tl.static_assert(axes(x) == 0 or as_long_as(mask, x), "mask: scalar or as long as the request")
    values, active = with_mask(x, mask)
    return values + active.to(tl.int64) * 0, of_heap(heap, active)


@triton.jit
def malloc(heap, nbytes, mask=None, tag=0):
    """Allocate device memory from a heap, inside a kernel.

    Parameters
    ----------
    heap : pointer
        ``Heap.handle``, passed to the kernel as an argument.
    nbytes : int or int64 scalar, or 1-D block
        Bytes wanted: one allocation for the program, or one per lane.
    mask : bool, scalar or of the same shape, optional
        Lanes that take part. Others give 0. With a scalar size it may be any 1-D block: then there
        is one allocation per lane.
    tag : int scalar, or block of the same shape, optional
        Whose memory this is, for the messages and the leak report of a debug heap: a number of
        your own in 1..255, or what ``Heap.tag`` gave for a name; 0 is no tag. Other heaps do not
        look at it.

    Returns
    -------
    int64 address(es), 0 where there is no memory. At least 16-byte aligned; a size that is a power
    of two up to the page (64 KiB) is aligned to that, larger requests to the page. 0 bytes gives 0
    and is no failure. A negative size gives 0 and is recorded as InvalidArgument; exhaustion gives
    0 and is recorded as OutOfMemory.

    Notes
    -----
    May be called by any program of any kernel on any stream of the heap's device. One request, or a
    block of equal ones, mostly takes two atomics in a row. Programs fail and may retry
    independently of one another. 0 means that no memory of that shape was free at some time during
    the call, or that what was free came and went, or was with other calls that had not returned.
    Launch a block with a warp for each 512 lanes: with Triton 3.6, NVIDIA's assembler cannot
    place 32 lanes in a thread.
    """
    return allocate(heap, nbytes, mask, tag, False)


@triton.jit
def free(heap, addr, mask=None):
    """Give memory back. ``addr``: what malloc returned, scalar or 1-D block; 0 is ignored.

    Everything the program did with the memory is ordered before anything its next owner does.
    An address that is not a live allocation changes nothing and is recorded: as DoubleFree if it
    could have been one, as InvalidFree if it could not. Two atomics in a row.
    """
    tl.static_assert(as_long_as(mask, addr), "free: a mask is as long as addresses, or scalar")
    addrs, active = as_request(heap, addr, mask)
    if is_debug(heap):
        free_guarded(control_block(heap), addrs, active)
    else:
        free_any(heap, addrs, active)


@triton.jit
def usable_size(heap, addr, mask=None):
    """Bytes (int64) that may be used at ``addr``, at least what was asked for; 0 if no block
    is there. In a debug heap exactly what was asked for. Two atomics side by side; changes
    nothing."""
    addrs, active = as_request(heap, addr, mask)
    if is_debug(heap):
        size = usable_guarded(control_block(heap), addrs, active & (addrs != 0))
    else:
        size = usable_any(heap, addrs, active & (addrs != 0))
    return size


@triton.jit
def zeros(heap, nbytes, mask=None, tag=0):
    """:func:`malloc` of memory that is zero."""
    return allocate(heap, nbytes, mask, tag, True)


@triton.jit
def allocate(heap, nbytes, mask, tag, zero: tl.constexpr):
    sizes, active = as_request(heap, nbytes, mask)
    tl.static_assert(is_tag(tag, sizes), "a tag is an integer, or one for each request")
    if is_debug(heap):
        addr = malloc_guarded(control_block(heap), sizes, active, tag, zero)
    else:
        addr = malloc_any(heap, sizes, active)
        if zero:
            fill(addr, tl.where(addr != 0, sizes, 0))
    return addr


@triton.jit
def realloc(heap, addr, nbytes, mask=None, tag=None):
    """Resize allocations, as C's realloc: the content is kept up to the smaller size.

    ``addr`` 0 allocates; ``nbytes`` 0 frees and gives 0; if the new size fits the block, the
    address stays. 0 for any other request means that nothing happened: the old block is still
    the caller's. A wrong ``addr`` is recorded as by :func:`free`, and gives 0. A block keeps its
    ``tag`` unless another is given.

    A scalar ``nbytes`` is the size for each block of a 1-D block ``addr``. A scalar ``addr`` is one
    block, so its ``nbytes`` and ``mask`` are scalars too.
    """
    tl.static_assert(as_long_as(nbytes, addr), "realloc: sizes are as long as addresses, or scalar")
    tl.static_assert(as_long_as(mask, addr), "realloc: a mask is as long as addresses, or scalar")
    old, _all = as_request(heap, addr, mask)
    sizes, active = as_request(heap, nbytes + old * 0, mask)
    tl.static_assert(tag is None or is_tag(tag, sizes), "a tag is an integer, or one per request")
    if is_debug(heap):
        new = realloc_guarded(control_block(heap), old + sizes * 0, sizes, active, tag)
    else:
        new = realloc_any(heap, old + sizes * 0, sizes, active)
    return new


@triton.jit
def realloc_any(heap, addr, nbytes, active):
    have = usable_any(heap, addr, active & (addr != 0))
    known = active & ((addr == 0) | (have > 0))
    stays = known & (nbytes > 0) & (nbytes <= have)
    moves = known & (stays == 0) & (nbytes != 0)
    new = malloc_any(heap, nbytes, moves)
    fill(new, tl.where(new != 0, tl.minimum(have, nbytes), 0), addr)
    free_any(heap, addr, active & ((new != 0) | (nbytes == 0) | (known == 0)))
    return tl.where(stays, addr, new)


@triton.jit
def pointer(heap, addr, dtype: tl.constexpr, mask=None):
    """Make pointers of addresses, and check them where that may cost something.

    Parameters
    ----------
    heap : pointer
        ``Heap.handle``.
    addr : int64 scalar, or block of any shape
        Addresses in blocks of the heap: what malloc returned, or further inside.
    dtype : tl.dtype
        What is there, such as ``tl.float32``.
    mask : bool, optional
        Lanes that will access their element; broadcasts to ``addr``. Others are not checked.

    Returns
    -------
    Pointers to ``dtype`` of the shape of ``addr``. Only the element at each address is checked:
    nothing is known of those at ``ptr + i``, while ``pointer(heap, addr + 4 * i, ...)`` checks
    each.

    Notes
    -----
    An ordinary heap on a device: the cast ``addr.to(tl.pointer_type(dtype))`` and no instruction
    more. (For torch.compile the call writes to the heap, so a kernel that stores through the
    pointers is not taken for one without effect.)

    A debug heap: an element that does not lie in a live block, in the bytes that were asked for, is
    recorded as InvalidPointer, with what became of the block; the lane's pointer then leads to
    memory that no block has. So the kernel goes on, and `Heap.check` raises. Four reads of the
    table's words.

    In Triton's interpreter, on an ordinary heap: the first such element raises at once, with the
    line of the kernel.
    """
    tl.static_assert(is_handle(heap), "the heap of a kernel is Heap.handle, passed as an argument")
    tl.static_assert(is_integer(addr), "addresses are integers: cast with .to(tl.int64)")
    tl.static_assert(is_element(dtype), "pointer: a type is one such as tl.float32")
    tl.static_assert(is_flag(mask), "a mask is of bool: compare integers with != 0")
    values, active = with_mask(addr, mask)
    tl.static_assert(as_long_as(active, values), "pointer: a mask broadcasts to the addresses")
    if is_checked(heap):
        values = checked_addresses(heap, values, dtype, active)
    else:
        # A store by no lane, which compilers take away, but not before torch.compile has seen it.
        ptr = heap + tl.zeros((1,), tl.int32)
        tl.store(ptr, tl.zeros((1,), heap.dtype.element_ty), mask=tl.zeros((1,), tl.int1))
    return values.to(tl.pointer_type(dtype))
