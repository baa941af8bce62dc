"""Sources around a source: each adds one thing, and they stack in any order.

An adaptor is a `Source` like any other. It is safe to use from several threads, changes nothing
when a call fails, and refuses a wrong free just as the source inside does.
"""

from devalloc.sources.adaptors.adaptor import Adaptor
from devalloc.sources.adaptors.bounds import AlignedAdaptor, LimitAdaptor
from devalloc.sources.adaptors.failures import (
    FailureCallbackAdaptor,
    FaultAdaptor,
    RetryAdaptor,
)
from devalloc.sources.adaptors.log import LogAdaptor
from devalloc.sources.adaptors.observe import (
    Counter,
    Counters,
    Outstanding,
    StatisticsAdaptor,
    TrackingAdaptor,
)

__all__ = [
    "Adaptor",
    "AlignedAdaptor",
    "Counter",
    "Counters",
    "FailureCallbackAdaptor",
    "FaultAdaptor",
    "LimitAdaptor",
    "LogAdaptor",
    "Outstanding",
    "RetryAdaptor",
    "StatisticsAdaptor",
    "TrackingAdaptor",
]
