"""A picture of a heap: one cell per page, several moments side by side.

A free page is light grey, one that was given back to the device almost white, a large allocation
dark (its first page darker), and a page of slots has a colour for the size of its slots. Its live
share is the height of the coloured bar in the cell, or, where cells are too small for bars, the
depth of the colour. Pages at the end of the heap that no snapshot uses are left out, and counted in
a line of text.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import hsv_to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from devalloc.heap.state import ABSENT, FREE, RUN, SLAB, Snapshot
from devalloc.sizes import format_size

RGB = tuple[float, float, float]

FREE_COLOUR: RGB = (0.90, 0.91, 0.93)
RUN_COLOUR: RGB = (0.30, 0.35, 0.40)
RUN_HEAD_COLOUR: RGB = (0.10, 0.13, 0.16)
ABSENT_COLOUR: RGB = (0.97, 0.97, 0.98)
NO_PAGE_COLOUR: RGB = (1.0, 1.0, 1.0)

BARRED_PAGES = 1024  # cells are bars, with lines between them, up to this many pages
BAR_STEPS = 24  # of a bar's height
LABELLED_PAGES = 144  # a page of slots names their size up to this many pages
LEGEND_CLASSES = 12
PANEL_INCHES = 5.0


def slab_colours(page_class: np.ndarray, fill: np.ndarray, classes: int) -> np.ndarray:
    """RGB of slab pages, shape (pages, 3); ``fill`` in [0, 1]. Also an empty page has a colour."""
    hue = 0.85 * np.sqrt(page_class / max(classes - 1, 1))  # small sizes are the usual ones
    saturation = 0.35 + 0.55 * fill
    value = 0.95 - 0.15 * fill
    return hsv_to_rgb(np.stack([hue, saturation, value], axis=-1))


def page_colours(snapshot: Snapshot) -> np.ndarray:
    """RGB of every page, floats of shape (pages, 3)."""
    colours = np.tile(FREE_COLOUR, (len(snapshot.page_kind), 1))
    slab = snapshot.page_kind == SLAB
    fill = snapshot.page_live[slab] / np.maximum(snapshot.page_slots[slab], 1)
    colours[slab] = slab_colours(snapshot.page_class[slab], fill, len(snapshot.class_sizes))
    colours[snapshot.page_kind == RUN] = RUN_COLOUR
    colours[snapshot.run_pages > 0] = RUN_HEAD_COLOUR
    colours[snapshot.page_kind == ABSENT] = ABSENT_COLOUR
    return colours


def columns_for(pages: int) -> int:
    """Cells per row: the power of two that makes the map about square, wider than high."""
    return 1 << math.ceil(math.log2(max(pages, 1)) / 2)


def summary(snapshot: Snapshot) -> str:
    """The line of counts under a map's title."""
    kinds = np.bincount(snapshot.page_kind, minlength=4)
    live, slots = int(snapshot.page_live.sum()), int(snapshot.page_slots.sum())
    taken = int(kinds[SLAB] + kinds[RUN])
    there = len(snapshot.page_kind) - int(kinds[ABSENT])
    parts = [f"{taken:,} of {there:,} pages taken"]
    if kinds[ABSENT]:
        parts.append(f"{kinds[ABSENT]:,} given back")
    if slots:
        parts.append(f"{live:,} of {slots:,} slots live")
    runs = int(np.count_nonzero(snapshot.run_pages))
    if runs:
        parts.append(f"{runs:,} large")
    return ", ".join(parts)


def taken_pages(snapshot: Snapshot) -> np.ndarray:
    """Which pages are neither free nor given back."""
    return (snapshot.page_kind == SLAB) | (snapshot.page_kind == RUN)


def shown_pages(snapshots: Sequence[Snapshot]) -> int:
    """Pages to draw: up to the last one that any snapshot uses, and the rest of its row."""
    most = max(len(snapshot.page_kind) for snapshot in snapshots)
    used = max(
        (int(np.flatnonzero(taken_pages(each)).max(initial=-1)) + 1 for each in snapshots),
        default=0,
    )
    columns = columns_for(used or most)
    return min(most, math.ceil((used or most) / columns) * columns)


def bars(snapshot: Snapshot, pages: int) -> np.ndarray:
    """RGB of each page's cell as `BAR_STEPS` heights from the top, shape (pages, BAR_STEPS, 3)."""
    full = page_colours(dataclasses.replace(snapshot, page_live=snapshot.page_slots))[:pages]
    empty = page_colours(dataclasses.replace(snapshot, page_live=0 * snapshot.page_live))[:pages]
    slots = np.maximum(snapshot.page_slots, 1)
    share = np.where(snapshot.page_kind == SLAB, snapshot.page_live / slots, 1.0)[:pages]
    height = np.ceil(share * BAR_STEPS)
    filled = np.arange(BAR_STEPS)[None, :] >= BAR_STEPS - height[:, None]
    return np.where(filled[:, :, None], full[:, None, :], empty[:, None, :])


def draw_map(axes: Axes, snapshot: Snapshot, title: str, note: str = "", most: int = 0) -> None:
    """Draw the first pages of one snapshot, ``most`` of them, or all."""
    pages = min(most or len(snapshot.page_kind), len(snapshot.page_kind))
    columns = columns_for(most or pages)
    rows = math.ceil((most or pages) / columns)
    barred = rows * columns <= BARRED_PAGES
    steps = BAR_STEPS if barred else 1
    grid = np.tile(NO_PAGE_COLOUR, (rows * columns, steps, 1))
    grid[:pages] = bars(snapshot, pages) if barred else page_colours(snapshot)[:pages, None]
    image = grid.reshape(rows, columns, steps, 3).swapaxes(1, 2).reshape(rows * steps, columns, 3)
    extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    axes.imshow(image, interpolation="nearest", aspect="equal", extent=extent)
    lines = [summary(snapshot), *([note] if note else [])]
    axes.set_title(title, fontsize=14, fontweight="bold", pad=14 + 16 * len(lines))
    axes.annotate(
        "\n".join(lines), (0.5, 1), (0, 8), "axes fraction", "offset points",
        ha="center", va="bottom", fontsize=11, linespacing=1.4,
    )  # fmt: skip
    shown = np.unique(np.linspace(0, rows - 1, min(rows, 5)).astype(int))
    row_bytes = columns * snapshot.page_bytes
    axes.set_yticks(shown, [format_size(int(row) * row_bytes) for row in shown], fontsize=10)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if barred:
        axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=min(3, 40 / columns))
        axes.tick_params(which="minor", length=0)
    if rows * columns <= LABELLED_PAGES:
        label_pages(axes, snapshot, pages, columns)
    left_out = np.bincount(snapshot.page_kind[pages:], minlength=4)
    counts = ((left_out[FREE], "free"), (left_out[ABSENT], "given back"))
    if left_out.any():
        text = ", ".join(f"{count:,} {what}" for count, what in counts if count)
        axes.set_xlabel(f"pages not shown: {text}", fontsize=11)


def label_pages(axes: Axes, snapshot: Snapshot, pages: int, columns: int) -> None:
    """Write the size of the slots, and how many are live, into each page of slots."""
    size = min(12, 100 / columns)
    for page in np.flatnonzero(snapshot.page_kind[:pages] == SLAB).tolist():
        slot = format_size(snapshot.class_sizes[snapshot.page_class[page]])
        live = f"{snapshot.page_live[page]:,} of\n{snapshot.page_slots[page]:,}"
        axes.text(
            page % columns,
            page // columns,
            f"{slot}\n{live}" if columns <= 8 else slot.replace(" ", "\n"),
            ha="center",
            va="center",
            fontsize=size,
            linespacing=1.1,
        )


def legend_entries(snapshots: Sequence[Snapshot]) -> list[Patch]:
    """What the colours mean, for the kinds of page and the size classes that occur."""
    entries = [Patch(facecolor=FREE_COLOUR, label="free")]
    if any((snapshot.page_kind == ABSENT).any() for snapshot in snapshots):
        entries.append(Patch(facecolor=ABSENT_COLOUR, label="given back", edgecolor=FREE_COLOUR))
    if any((snapshot.page_kind == RUN).any() for snapshot in snapshots):
        entries.append(Patch(facecolor=RUN_COLOUR, label="large, first page darker"))
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


def memory_map(
    snapshots: Sequence[Snapshot],
    titles: Sequence[str],
    heading: str = "",
    notes: Sequence[str] = (),
    caption: str = "",
) -> Figure:
    """Draw snapshots side by side.

    Parameters
    ----------
    snapshots : sequence of Snapshot
        At least one; of one heap or of several.
    titles : sequence of str
        One per snapshot.
    heading : str
        Text above all of them.
    notes : sequence of str
        A line under each title; none or one per snapshot.
    caption : str
        Text below all of them.

    Returns
    -------
    matplotlib.figure.Figure
        Not tied to any window or global state.
    """
    count = len(snapshots)
    most = shown_pages(snapshots)
    columns = columns_for(most)
    share = max(0.35, math.ceil(most / columns) / columns)  # the height of a map over its width
    height = PANEL_INCHES * share + (2.5 if heading else 2.0) + 0.3 * bool(caption)
    figure = Figure(figsize=((PANEL_INCHES + 0.5) * count + 0.2, height), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for axes, snapshot, title, note in zip(
        panels, snapshots, titles, notes or [""] * count, strict=True
    ):
        draw_map(axes, snapshot, title, note, most)
    if heading:
        figure.suptitle(heading, fontsize=16)
    entries = legend_entries(snapshots)
    page = format_size(snapshots[0].page_bytes)
    barred = most <= BARRED_PAGES
    share_of = "as high as its live share" if barred else "paler where emptier"
    text = f"one cell: a page of {page}; colour: the size of its slots, {share_of}"
    figure.legend(
        handles=entries,
        loc="outside lower center",
        ncols=min(len(entries), 3 * count),
        fontsize=11,
        frameon=False,
        title="\n".join(textwrap.wrap(text, 50 * count) + textwrap.wrap(caption, 50 * count)),
        title_fontsize=11,
    )
    return figure


def save_memory_map(
    path: str | Path,
    snapshots: Sequence[Snapshot],
    titles: Sequence[str],
    heading: str = "",
    notes: Sequence[str] = (),
    caption: str = "",
) -> None:
    """Draw snapshots into a file, in the format that its name ends with; see `memory_map`.

    Raises OSError.
    """
    memory_map(snapshots, titles, heading, notes, caption).savefig(Path(path), dpi=130)
