"""Where raw memory comes from.

A source hands out segments and takes them back; it knows nothing of heaps or blocks. Adaptors,
which can be wrapped around any source, are in `devalloc.sources.adaptors`.
"""

from devalloc.sources.cuda import CudaSource
from devalloc.sources.host import HostSource, PinnedSource
from devalloc.sources.simulated import SimulatedSource
from devalloc.sources.source import Capabilities, Segment, Source
from devalloc.sources.stream_ordered import AsyncSource
from devalloc.sources.virtual import VirtualSource, VirtualStats

__all__ = [
    "AsyncSource",
    "Capabilities",
    "CudaSource",
    "HostSource",
    "PinnedSource",
    "Segment",
    "SimulatedSource",
    "Source",
    "VirtualSource",
    "VirtualStats",
]
