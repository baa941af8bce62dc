"""The host caching allocator: one cache, and policies that drive it. See docs/design/host.md.

From the bottom up: blocks and free lists; statistics; policies; the store (segments, and the steps
that policies are made of) with its history, pending blocks and external segments; audits and
reports; the cache, which adds the lock and the entry points.
"""

import sys

from devalloc.cache.bfc_policy import BfcPolicy
from devalloc.cache.cache import Cache
from devalloc.cache.frugal_policy import FrugalPolicy
from devalloc.cache.policies import POLICIES, AutoGrowthPolicy, TinyPolicy, make_policy
from devalloc.cache.policy import Policy
from devalloc.cache.private_pools import PrivatePool
from devalloc.cache.streams import CudaStreams, Event, HostStreams, Streams
from devalloc.cache.torch_policy import TorchPolicy
from devalloc.errors import DevallocError

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise DevallocError(
        "arenas need the global interpreter lock, which this Python runs without: their promises "
        "to threads and interrupted calls rest on it; run with PYTHON_GIL=1, or use heaps only"
    )

__all__ = [
    "POLICIES",
    "AutoGrowthPolicy",
    "BfcPolicy",
    "Cache",
    "CudaStreams",
    "Event",
    "FrugalPolicy",
    "HostStreams",
    "Policy",
    "PrivatePool",
    "Streams",
    "TinyPolicy",
    "TorchPolicy",
    "make_policy",
]
