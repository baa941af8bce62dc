"""Kernels that the host launches on a heap: allocate and free tensors of requests, and flush."""

import triton
import triton.language as tl

from .api import free, malloc, usable_size
from .layout import G_PLACES, load_geometry
from .shelf import clear_place
from .slabs import FLUSH_ALL, flush


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
def trim_kernel(heap, batches):
    """Dissolve 64 batches per program and clear as many places of the shelf. Then everybody can
    find whatever is free, and pages that are free as a whole are back at the page level."""
    first = tl.program_id(0) * 64
    flush(heap, first, tl.minimum(first + 64, batches), first * 0 + FLUSH_ALL)
    places = load_geometry(heap, G_PLACES).to(tl.int32)
    place = first
    while place < tl.minimum(first + 64, places):
        clear_place(heap, place)
        place += 1
