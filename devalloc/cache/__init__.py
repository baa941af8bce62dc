"""The host caching allocator: one engine, and policies that drive it.

From the bottom up: blocks and free lists; the ledger of statistics; policies; the store (segments,
and the steps that policies are made of); the store with streams; the core, which adds the lock;
graphs and reports, side by side; the engine, which joins them.
"""

from devalloc.cache.auto_growth_policy import AutoGrowthPolicy
from devalloc.cache.bfc_policy import BfcPolicy
from devalloc.cache.engine import Cache
from devalloc.cache.frugal_policy import FrugalPolicy
from devalloc.cache.graph_pools import PrivatePool
from devalloc.cache.policies import POLICIES, make_policy
from devalloc.cache.policy import Policy, TinyPolicy
from devalloc.cache.streams import CudaStreams, Event, HostStreams, Streams
from devalloc.cache.torch_policy import TorchPolicy

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
