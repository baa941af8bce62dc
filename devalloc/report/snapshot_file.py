"""Heap snapshots in files: NumPy's .npz, without pickles, so a file from anywhere may be opened."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from devalloc.common.foreign import refusing
from devalloc.errors import InvalidArgument
from devalloc.heap.state import ABSENT, FREE, SLAB, Snapshot

FORMAT = "devalloc heap snapshot 1"
PAGE_TABLES = ("page_kind", "page_class", "page_live", "page_slots", "run_pages")


def save_snapshot(snapshot: Snapshot, path: str | Path) -> None:
    """Write a snapshot to ``path``; nothing is appended to the name. Raises OSError."""
    fields = {field.name: getattr(snapshot, field.name) for field in dataclasses.fields(Snapshot)}
    with open(path, "wb") as file:
        np.savez_compressed(file, format=FORMAT, **fields)


def load_snapshot(path: str | Path) -> Snapshot:
    """Read a snapshot that `save_snapshot` wrote.

    Raises
    ------
    InvalidArgument
        If the file cannot be read, is something else, or contradicts itself.
    """
    path = Path(path)
    try:
        with refusing("not a heap snapshot", path):
            return checked_snapshot(_arrays(path))
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror or error}") from error


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            return {name: file[name] for name in file.files}
    except ValueError as error:
        if "pickle" in str(error):
            raise ValueError("it is no .npz file of plain arrays") from error
        raise


def checked_snapshot(fields: dict[str, np.ndarray]) -> Snapshot:
    """A `Snapshot` made of a file's arrays; ValueError or KeyError if they do not fit."""
    if "format" not in fields or str(fields["format"]) != FORMAT:
        raise ValueError(f'it is not marked "{FORMAT}"')
    capacity, page_bytes = int(fields["capacity"]), int(fields["page_bytes"])
    if page_bytes <= 0 or capacity <= 0 or capacity % page_bytes:
        raise ValueError(f"{capacity} bytes are no whole number of pages of {page_bytes}")
    tables = {name: fields[name] for name in PAGE_TABLES}
    for name, table in tables.items():
        if table.shape != (capacity // page_bytes,) or table.dtype.kind not in "iu":
            raise ValueError(f"{name} does not have one integer per page")
    class_sizes = tuple(int(size) for size in fields["class_sizes"])
    kinds, classes = tables["page_kind"], tables["page_class"]
    if kinds.min() < FREE or kinds.max() > ABSENT:
        raise ValueError("a page is of no known kind")
    if classes.min() < -1 or classes.max() >= len(class_sizes):
        raise ValueError("a page has an unknown size class")
    if classes[kinds == SLAB].min(initial=0) < 0:
        raise ValueError("a page in a slab has no size class")
    return Snapshot(
        capacity=capacity,
        page_bytes=page_bytes,
        class_sizes=class_sizes,
        device=str(fields["device"]),
        **tables,
    )
