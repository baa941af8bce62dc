"""Reports for people: pictures of a heap, snapshots in files, and what a machine can do.

`save_snapshot` and `load_snapshot` are imported at their first use and nothing else is, so that
`environment` works where Triton or matplotlib is missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from devalloc.report.snapshot_file import load_snapshot, save_snapshot

__all__ = ["load_snapshot", "save_snapshot"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("devalloc.report.snapshot_file"), name)
    globals()[name] = value
    return value
