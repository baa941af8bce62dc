"""Where raw memory comes from.

A source hands out segments and takes them back; it knows nothing of heaps or blocks.
"""

from devalloc.sources.base import Segment, Source
from devalloc.sources.cuda import CudaSource
from devalloc.sources.host import HostSource

__all__ = ["CudaSource", "HostSource", "Segment", "Source"]
