"""Arenas: cached memory of one device, for tensors, blocks and heaps. See docs/design/host.md.

From the bottom up: `store` (segments, blocks and free lists), `policies` (which block serves),
`cache` (the lock and the entry points), `block` (what `Arena.alloc` gives), `tensors` (tensors over
blocks), `regions` (memory that is paused and resumed), `options` (what users pass), `arena` with
its parts `pytorch_methods` and `statistics_methods`.
"""

import sys

from devalloc.arena.arena import Arena
from devalloc.arena.block import Block, TorchOutOfMemory
from devalloc.errors import DevallocError

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise DevallocError(
        "arenas need the global interpreter lock, which this Python runs without: their guarantees "
        "to threads and interrupted calls depend on it; run with PYTHON_GIL=1, or use heaps only"
    )

__all__ = ["Arena", "Block", "TorchOutOfMemory"]
