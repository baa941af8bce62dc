"""A picture of a heap: one cell per page, several moments side by side.

A free page is grey, a large allocation is dark (its first page darker), and a slab has a colour:
the hue tells its size class, the depth how many of its slots are live.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import hsv_to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from devalloc.heap_state import FREE, RUN, SLAB, Snapshot
from devalloc.sizes import format_size

RGB = tuple[float, float, float]

FREE_COLOUR: RGB = (0.92, 0.93, 0.94)
RUN_COLOUR: RGB = (0.30, 0.35, 0.40)
RUN_HEAD_COLOUR: RGB = (0.10, 0.13, 0.16)
NO_PAGE_COLOUR: RGB = (1.0, 1.0, 1.0)

LINED_PAGES = 4096  # lines separate the cells up to this many pages
LABELLED_PAGES = 256  # a slab's cell names its slot size up to this many pages
LEGEND_CLASSES = 12
PANEL_INCHES = 4.6


def slab_colours(page_class: np.ndarray, fill: np.ndarray, classes: int) -> np.ndarray:
    """RGB of slab pages, shape (pages, 3); ``fill`` in [0, 1]."""
    hue = 0.85 * page_class / max(classes - 1, 1)
    saturation = 0.22 + 0.68 * fill
    value = 0.97 - 0.17 * fill
    return hsv_to_rgb(np.stack([hue, saturation, value], axis=-1))


def page_colours(snapshot: Snapshot) -> np.ndarray:
    """RGB of every page, floats of shape (pages, 3)."""
    colours = np.tile(FREE_COLOUR, (len(snapshot.page_kind), 1))
    slab = snapshot.page_kind == SLAB
    fill = snapshot.page_live[slab] / np.maximum(snapshot.page_slots[slab], 1)
    colours[slab] = slab_colours(snapshot.page_class[slab], fill, len(snapshot.class_sizes))
    colours[snapshot.page_kind == RUN] = RUN_COLOUR
    colours[snapshot.run_pages > 0] = RUN_HEAD_COLOUR
    return colours


def columns_for(pages: int) -> int:
    """Cells per row: the power of two that makes the map about square, wider than high."""
    return 1 << math.ceil(math.log2(max(pages, 1)) / 2)


def summary(snapshot: Snapshot) -> str:
    """The line of counts under a map's title."""
    kinds = np.bincount(snapshot.page_kind, minlength=3)
    live, slots = int(snapshot.page_live.sum()), int(snapshot.page_slots.sum())
    parts = [f"{kinds[FREE]:,} of {len(snapshot.page_kind):,} pages free"]
    if slots:
        parts.append(f"{live:,} slots live ({live / slots:.0%})")
    runs = int(np.count_nonzero(snapshot.run_pages))
    if runs:
        parts.append(f"{runs:,} large")
    return ", ".join(parts)


def draw_map(axes: Axes, snapshot: Snapshot, title: str) -> None:
    """Draw one snapshot."""
    pages = len(snapshot.page_kind)
    columns = columns_for(pages)
    rows = math.ceil(pages / columns)
    grid = np.tile(NO_PAGE_COLOUR, (rows * columns, 1))
    grid[:pages] = page_colours(snapshot)
    axes.imshow(grid.reshape(rows, columns, 3), interpolation="nearest", aspect="equal")
    axes.set_title(f"{title}\n", fontsize=11, fontweight="bold")
    axes.text(0.5, 1.02, summary(snapshot), transform=axes.transAxes, ha="center", fontsize=8)
    shown = np.unique(np.linspace(0, rows - 1, min(rows, 5)).astype(int))
    row_bytes = columns * snapshot.page_bytes
    axes.set_yticks(shown, [format_size(int(row) * row_bytes) for row in shown], fontsize=7)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if pages <= LINED_PAGES:
        axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=min(1.5, 24 / columns))
        axes.tick_params(which="minor", length=0)
    if pages <= LABELLED_PAGES:
        for page in np.flatnonzero(snapshot.page_kind == SLAB).tolist():
            axes.text(
                page % columns,
                page // columns,
                format_size(snapshot.class_sizes[snapshot.page_class[page]]).replace(" ", "\n"),
                ha="center",
                va="center",
                fontsize=min(8, 70 / columns),
                linespacing=0.9,
            )


def legend_entries(snapshots: Sequence[Snapshot]) -> list[Patch]:
    """What the colours mean, for the kinds of page and the size classes that occur."""
    entries = [Patch(facecolor=FREE_COLOUR, label="free")]
    if any((snapshot.page_kind == RUN).any() for snapshot in snapshots):
        entries.append(Patch(facecolor=RUN_COLOUR, label="large allocation (first page darker)"))
    sizes: dict[int, RGB] = {}
    for snapshot in snapshots:
        present = np.unique(snapshot.page_class[snapshot.page_kind == SLAB])
        full = np.ones(len(present))
        colours = slab_colours(present, full, len(snapshot.class_sizes))
        for index, (red, green, blue) in zip(present, colours.tolist(), strict=True):
            sizes[snapshot.class_sizes[index]] = (red, green, blue)
    ordered = sorted(sizes)
    if len(ordered) > LEGEND_CLASSES:
        steps = np.linspace(0, len(ordered) - 1, LEGEND_CLASSES).astype(int)
        ordered = [ordered[step] for step in steps]
    entries += [Patch(facecolor=sizes[size], label=format_size(size)) for size in ordered]
    return entries


def memory_map(snapshots: Sequence[Snapshot], titles: Sequence[str], heading: str = "") -> Figure:
    """Draw snapshots side by side.

    Parameters
    ----------
    snapshots : sequence of Snapshot
        At least one; of one heap or of several.
    titles : sequence of str
        One per snapshot.
    heading : str
        Text above all of them.

    Returns
    -------
    matplotlib.figure.Figure
        Not tied to any window or global state.
    """
    figure = Figure(figsize=(PANEL_INCHES * len(snapshots) + 0.4, PANEL_INCHES + 1.6))
    panels = figure.subplots(1, len(snapshots), squeeze=False)[0]
    for axes, snapshot, title in zip(panels, snapshots, titles, strict=True):
        draw_map(axes, snapshot, title)
    page = format_size(snapshots[0].page_bytes)
    if heading:
        figure.suptitle(heading, fontsize=12)
    entries = legend_entries(snapshots)
    figure.legend(
        handles=entries,
        loc="lower center",
        ncols=min(len(entries), 4 * len(snapshots)),
        fontsize=8,
        frameon=False,
        title=f"one cell: a page of {page}; colours: slabs by slot size, paler where emptier",
        title_fontsize=8,
    )
    figure.subplots_adjust(left=0.09 / len(snapshots) ** 0.5, right=0.98, bottom=0.16, top=0.82)
    return figure


def save_memory_map(
    path: str | Path, snapshots: Sequence[Snapshot], titles: Sequence[str], heading: str = ""
) -> None:
    """Draw snapshots side by side into a PNG file; see `memory_map`. Raises OSError."""
    memory_map(snapshots, titles, heading).savefig(Path(path), format="png", dpi=130)
