"""Kernels that the host launches on a heap: allocate and free tensors of requests, and trim."""

import triton
import triton.language as tl

from .api import free, malloc, usable_size
from .layout import PAGE_MAGAZINES, program_index
from .search import empty_magazines, retire_idle, take_run


@triton.jit
def malloc_kernel(heap, sizes, addrs, n, BLOCK: tl.constexpr):
    """``addrs[i] = malloc(sizes[i])`` for i < n; one lane per request."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    size = tl.load(sizes + index, mask=inside, other=0)
    addr = malloc(heap, size, inside)
    tl.store(addrs + index, addr, mask=inside)


@triton.jit
def free_kernel(heap, addrs, n, BLOCK: tl.constexpr):
    """``free(addrs[i])`` for i < n; one lane per address."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    addr = tl.load(addrs + index, mask=inside, other=0)
    free(heap, addr, inside)


@triton.jit
def usable_size_kernel(heap, addrs, sizes, n, BLOCK: tl.constexpr):
    """``sizes[i] = usable_size(addrs[i])`` for i < n."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    addr = tl.load(addrs + index, mask=inside, other=0)
    tl.store(sizes + index, usable_size(heap, addr, inside), mask=inside)


@triton.jit
def rest_kernel(heap):
    """Empty all magazines and retire all pages without blocks, those of 64 pages by each program.
    After a second launch all that is not live is free, and serves any size."""
    first = program_index() * 64
    for step in range(2):
        retire_idle(heap, first + 32 * step)
    for step in range(2 * PAGE_MAGAZINES):
        empty_magazines(heap, first * PAGE_MAGAZINES + 32 * step)


@triton.jit
def take_chunks_kernel(heap, firsts, counts, taken):
    """``taken[i]`` = 1 if all pages of the ``counts[i]`` chunks from chunk ``firsts[i]`` on were
    free, and now are the host's; 0 if not, and nothing has changed. A program for each i."""
    index = tl.program_id(0)
    page = (tl.load(firsts + index) * 64).to(tl.int32)
    pages = (tl.load(counts + index) * 64).to(tl.int32)
    tl.store(taken + index, take_run(heap, page, pages).to(tl.int64))
