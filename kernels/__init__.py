"""malloc and free for Triton kernels.

    from devalloc import kernels as da

    addr = da.malloc(heap, nbytes)
    da.free(heap, addr)

Layers, from the bottom: ``bits`` (words of bits), ``atomics`` (reading what changes), ``layout``
(where everything lies), ``record`` (errors), ``pages`` (runs of pages), ``slabs`` (size classes),
``heap`` (what a kernel calls), ``upkeep`` (what the host launches). The protocol and why it is
correct: docs/design.md.
"""

from .heap import free, malloc, realloc, usable_size, zeros

__all__ = ["free", "malloc", "realloc", "usable_size", "zeros"]
