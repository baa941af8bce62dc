"""malloc and free for Triton kernels.

    from devalloc import kernels as da

    addr = da.malloc(heap, nbytes)
    da.free(heap, addr)

Layers, from the bottom: ``target`` (what is compiled for), ``bits`` (words of bits), ``lanes``
(lanes of a block), ``atomics`` (reading what changes; the fence), ``layout`` (where everything
lies), ``error_record``, ``growing`` (asking the host for pages), ``groups`` (lanes that want the
same), ``payload`` (zeroing and copying blocks), ``pages`` (free pages), ``live`` (live bits),
``lines`` (which pages a program takes slots from), ``addresses`` (what lies at an address),
``magazines`` (slots that a program freed), ``search`` (looking everywhere; runs of pages),
``allocation`` and ``freeing`` (malloc and free), ``debug`` (debug heaps; is there a block behind an
address), ``api`` (what a kernel calls), ``upkeep`` (what the host launches). Where to begin:
kernels/README.md. The protocol, and why it is correct: docs/design/heap.md.
"""

import inspect

from .api import free, malloc, pointer, realloc, usable_size, zeros

__all__ = ["free", "malloc", "pointer", "realloc", "usable_size", "zeros"]

# help() looks at Triton's wrappers. They do not show the parameters, and in the interpreter they
# have no docstring either.
for _wrapper in (free, malloc, pointer, realloc, usable_size, zeros):
    _signature = str(inspect.signature(_wrapper.fn)).replace("triton.language.core.", "tl.")
    _wrapper.__doc__ = f"{_wrapper.fn.__name__}{_signature}\n\n{inspect.getdoc(_wrapper.fn)}"
