"""Heaps, as the host sees them: `Heap`, and what reads its tables. Device code is in kernels/.

From the bottom up: `interpreted` (what Triton's interpreter lacks), `devices` (which device a heap
is on), `compiled` (launches under torch.compile), `state` (the tables: statistics, snapshots,
audit), `leaks` and `debug_table` (the same of debug heaps), `jagged` (what gather and scatter are
given), `host_heap`.
"""

from devalloc.heap.host_heap import Heap
from devalloc.heap.state import Snapshot, Stats

__all__ = ["Heap", "Snapshot", "Stats"]
