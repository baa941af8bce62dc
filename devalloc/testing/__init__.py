"""Test kernels whose programs share memory: see `devalloc.testing.interleaving`."""

from devalloc.testing._execution import Event
from devalloc.testing._interpreter import quick_interpreter
from devalloc.testing.interleaving import Interleaving, Launch
from devalloc.testing.reports import Report, Run, ScheduleError
from devalloc.testing.schedules import PCT, Exhaustive, Random, Strategy

__all__ = [
    "PCT",
    "Event",
    "Exhaustive",
    "Interleaving",
    "Launch",
    "Random",
    "Report",
    "Run",
    "ScheduleError",
    "Strategy",
    "quick_interpreter",
]
