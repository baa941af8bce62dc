"""A kernel with an off-by-one error, and what a debug heap says about it.

Every lane keeps a list of its own: a count, and then as many numbers. `keep` leaves no room for the
count. In an ordinary heap the last number of a list may end up in its neighbour's count,
and the kernel that fails later is not the wrong one. A debug heap names the block that was written
past, where, and whose it is.

Run it: ``python examples/debug_heap.py`` (without a GPU: with ``TRITON_INTERPRET=1``).
"""

import torch
import triton
import triton.language as tl

import devalloc
from devalloc import kernels as da


@triton.jit
def keep(heap, tag, addrs, LANES: tl.constexpr):
    """Give lane i a list of the numbers 1 to i + 1."""
    lane = tl.arange(0, LANES)
    length = lane + 1
    addr = da.malloc(heap, 4 * length, tag=tag)  # wrong: 4 * (length + 1)
    words = addr.to(tl.pointer_type(tl.int32))
    tl.store(words, length)
    for i in tl.static_range(1, LANES + 1):
        tl.store(words + i, lane * 0 + i, mask=i <= length)
    tl.store(addrs + lane, addr)


@triton.jit
def drop(heap, addrs, LANES: tl.constexpr):
    da.free(heap, tl.load(addrs + tl.arange(0, LANES)))


def main() -> None:
    try:
        with devalloc.Heap("1MiB", debug=True) as heap:
            addrs = torch.zeros(4, dtype=torch.int64, device=heap.device)
            keep[(1,)](heap.handle, heap.tag("neighbour lists"), addrs, LANES=4)
            print(heap.leaks())
            drop[(1,)](heap.handle, addrs, LANES=4)
    except devalloc.Overflow as error:  # raised by the end of the `with`
        print(f"devalloc.errors.Overflow: {error}")
    else:
        raise AssertionError("the overflow was not found")


if __name__ == "__main__":
    main()
