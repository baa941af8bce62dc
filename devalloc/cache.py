"""The cache of an arena and its policies, by the names that users import: see `devalloc.arena`."""

from devalloc.arena.cache.allocator import Cache
from devalloc.arena.cache.private_pools import PrivatePool
from devalloc.arena.policies.auto_growth_policy import AutoGrowthPolicy
from devalloc.arena.policies.bfc_policy import BfcPolicy
from devalloc.arena.policies.frugal_policy import FrugalPolicy
from devalloc.arena.policies.policy import Policy
from devalloc.arena.policies.policy_names import POLICIES, make_policy
from devalloc.arena.policies.tiny_policy import TinyPolicy
from devalloc.arena.policies.torch_policy import TorchPolicy
from devalloc.arena.store.streams import CudaStreams, Event, HostStreams, Streams

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
