"""Testing kernels that share memory: see `devalloc.testing.interleaving`."""

from devalloc.testing.interleaving import Interleaving, Launch, Report, Run, ScheduleError
from devalloc.testing.schedules import PCT, Exhaustive, Random, Strategy

__all__ = [
    "PCT",
    "Exhaustive",
    "Interleaving",
    "Launch",
    "Random",
    "Report",
    "Run",
    "ScheduleError",
    "Strategy",
]
