"""Heaps, as the host sees them: `Heap`, and what reads its tables. Device code is in kernels/.

From the bottom up: `interpreted` (what Triton's interpreter lacks), `devices` (which device a heap
is on), `compiled` (launches under torch.compile), `geometry` (how large each table is), `state`
(the tables: statistics, snapshots), `heap_audit` (what must hold of them), `recorded_errors`,
`leaks` and `debug_table` (of debug heaps), `growth` and `watcher` (heaps that grow, by themselves),
`jagged` (gather and scatter), `host_heap`.
"""

from devalloc.heap.host_heap import Heap
from devalloc.heap.state import Snapshot, Stats

__all__ = ["Heap", "Snapshot", "Stats"]
