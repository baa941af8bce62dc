"""malloc and free for Triton kernels.

    from devalloc import kernels as da

    addr = da.malloc(heap, nbytes)
    da.free(heap, addr)

Layers, from the bottom: ``bits`` (words of bits), ``atomics`` (reading what changes), ``layout``
(where everything lies), ``record`` (errors), ``pages`` (runs of pages), ``live`` (live bits),
``shelf`` (pages kept as they are), ``detached`` (slabs that are drawn from), ``batches`` (of pages,
for the stripes of size classes), ``slabs`` (how slots are found when there are no tickets),
``heap`` (malloc and free); for debug heaps ``table`` (what is known of every block), ``guards``
(red zones and poison), ``debug`` (malloc and free with both); ``api`` (what a kernel calls),
``upkeep`` and ``debug_upkeep`` (what the host launches). The protocol and why it is correct:
docs/design.md.
"""

from .api import free, malloc, realloc, usable_size, zeros

__all__ = ["free", "malloc", "realloc", "usable_size", "zeros"]
