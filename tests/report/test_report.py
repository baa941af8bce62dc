"""Snapshots survive a file, and pictures show what is in them."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

import devalloc
from devalloc.errors import InvalidArgument
from devalloc.heap.state import ABSENT, FREE, RUN, SLAB, Snapshot
from devalloc.report.environment import inspect_environment
from devalloc.report.memory_map import (
    BAR_STEPS,
    FREE_COLOUR,
    RUN_COLOUR,
    RUN_HEAD_COLOUR,
    bars,
    columns_for,
    legend_entries,
    memory_map,
    page_colours,
    save_memory_map,
    shown_pages,
    summary,
)
from devalloc.report.snapshot_file import load_snapshot, save_snapshot
from devalloc.sizes import CLASS_SIZES, CLASS_SLOTS, PAGE_BYTES


def made(kinds: list[int], classes: list[int], live: list[int], runs: list[int]) -> Snapshot:
    return Snapshot(
        capacity=len(kinds) * PAGE_BYTES,
        page_bytes=PAGE_BYTES,
        class_sizes=tuple(CLASS_SIZES),
        page_kind=np.array(kinds, dtype=np.uint8),
        page_class=np.array(classes, dtype=np.int16),
        page_live=np.array(live, dtype=np.int32),
        page_slots=np.array([CLASS_SLOTS[c] if c >= 0 else 0 for c in classes], dtype=np.int32),
        run_pages=np.array(runs, dtype=np.int32),
        device="cpu",
    )


@pytest.fixture
def mixed() -> Snapshot:
    """Free, a slab of 16 B half full, the same full, a slab of 256 B full, a run of two pages."""
    half, full = CLASS_SLOTS[0] // 2, CLASS_SLOTS[0]
    wide = CLASS_SIZES.index(256)
    return made(
        [FREE, SLAB, SLAB, SLAB, RUN, RUN],
        [-1, 0, 0, wide, -1, -1],
        [0, half, full, CLASS_SLOTS[wide], 0, 0],
        [0, 0, 0, 0, 2, 0],
    )


def same(one: Snapshot, other: Snapshot) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in Snapshot.__dataclass_fields__
    )


def test_a_snapshot_survives_a_file(tmp_path: Path, mixed: Snapshot) -> None:
    path = tmp_path / "heap.snapshot"
    save_snapshot(mixed, path)
    assert same(load_snapshot(path), mixed)


def test_a_real_snapshot_survives_and_is_drawn(tmp_path: Path) -> None:
    with devalloc.Heap("1MiB") as heap:
        addrs = heap.malloc([16, 1000, 1000, 300_000])
        before = heap.snapshot()
        heap.free(addrs)
        after = heap.snapshot()
    save_snapshot(before, tmp_path / "before.npz")
    assert same(load_snapshot(tmp_path / "before.npz"), before)
    assert sorted(before.run_pages[before.run_pages > 0]) == [5]
    assert before.page_live.sum() == 3
    assert (after.page_kind == FREE).all()
    save_memory_map(tmp_path / "map.png", [before, after], ["before", "after"], heading="a heap")
    height, width, _ = matplotlib.image.imread(tmp_path / "map.png").shape
    assert width > height > 300


def test_colours_tell_kinds_classes_and_fill_apart(mixed: Snapshot) -> None:
    free, half, full, wide, head, tail = page_colours(mixed)
    assert tuple(free) == FREE_COLOUR
    assert tuple(head) == RUN_HEAD_COLOUR
    assert tuple(tail) == RUN_COLOUR
    assert np.ptp(half) < np.ptp(full)  # paler
    assert np.abs(full - wide).max() > 0.3
    assert page_colours(mixed).shape == (6, 3)


def test_text_of_a_picture(mixed: Snapshot) -> None:
    assert summary(mixed) == "5 of 6 pages taken, 6,400 of 8,448 slots live, 1 large"
    labels = [entry.get_label() for entry in legend_entries([mixed])]
    assert labels == ["free", "large, first page darker", "16 B", "256 B"]
    axes = memory_map([mixed], ["now"]).axes[0]
    assert [text.get_text() for text in axes.texts][1:] == [
        "16 B\n2,048 of\n4,096",
        "16 B\n4,096 of\n4,096",
        "256 B\n256 of\n256",
    ]


def test_a_bar_is_as_high_as_the_live_share(mixed: Snapshot) -> None:
    free, half, full, _wide, head, _tail = bars(mixed, 6)
    assert (free == FREE_COLOUR).all()
    assert (head == RUN_HEAD_COLOUR).all()
    assert (full == full[-1]).all()
    assert (half[BAR_STEPS // 2 :] == full[-1]).all()
    assert not (half[: BAR_STEPS // 2] == full[-1]).all(axis=1).any()


def test_pages_that_are_always_free_are_left_out_and_counted(mixed: Snapshot) -> None:
    """A picture of a large heap that is nearly empty shows what is in it."""
    large = made(
        [*mixed.page_kind, *[FREE] * 930, *[ABSENT] * 64],
        [*mixed.page_class, *[-1] * 994],
        [*mixed.page_live, *[0] * 994],
        [*mixed.run_pages, *[0] * 994],
    )
    assert shown_pages([large, mixed]) == 8
    figure = memory_map([large, mixed], ["large", "small"], notes=["one", "two"], caption="why")
    assert figure.axes[0].get_xlabel() == "pages not shown: 928 free, 64 given back"
    assert figure.axes[1].get_xlabel() == ""
    assert [axes.texts[0].get_text().splitlines()[1] for axes in figure.axes] == ["one", "two"]
    assert figure.legends[0].get_title().get_text().endswith("\nwhy")


def test_most_of_a_picture_is_maps(tmp_path: Path, mixed: Snapshot) -> None:
    """Not margins: even flat maps take two fifths of the picture's height."""
    figure = memory_map([mixed] * 3, ["a", "b", "c"], "heading")
    figure.draw_without_rendering()
    assert all(axes.get_position().height > 0.4 for axes in figure.axes)


@pytest.mark.parametrize(
    ("name", "start"), [("m.png", b"\x89PNG"), ("m.svg", b"<?xml"), ("m.pdf", b"%PDF")]
)
def test_the_name_chooses_the_format(
    tmp_path: Path, mixed: Snapshot, name: str, start: bytes
) -> None:
    save_memory_map(tmp_path / name, [mixed], ["now"])
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize("pages", [1, 2, 3, 16, 17, 4097, 100_000])
def test_any_number_of_pages_can_be_drawn(tmp_path: Path, pages: int) -> None:
    snapshot = made([FREE] * pages, [-1] * pages, [0] * pages, [0] * pages)
    assert columns_for(pages) ** 2 >= pages
    save_memory_map(tmp_path / "map.png", [snapshot], ["empty"])


def test_a_legend_stays_short() -> None:
    classes = len(CLASS_SIZES)
    every = made([SLAB] * classes, list(range(classes)), [1] * classes, [0] * classes)
    assert len(legend_entries([every])) == 13


@pytest.mark.parametrize("count", [1, 2, 3])
def test_nothing_is_cut_off(count: int) -> None:
    """Every kind of page, most size classes, and long texts: all within the picture."""
    classes = len(CLASS_SIZES)
    kinds = [*[SLAB] * classes, RUN, RUN, *[FREE] * 2000, SLAB]
    every = made(
        kinds,
        [*range(classes), *[-1] * 2002, 0],
        [1] * len(kinds),
        [*[0] * classes, 2] + [0] * 2002,
    )
    figure = memory_map([every] * count, ["now"] * count, notes=["1 KiB in blocks"] * count)
    figure.draw_without_rendering()
    picture = figure.bbox
    for part in (*figure.legends, *(text for axes in figure.axes for text in axes.texts)):
        box = part.get_window_extent()
        assert picture.x0 <= box.x0
        assert box.x1 <= picture.x1
        assert picture.y0 <= box.y0
        assert box.y1 <= picture.y1


def test_files_that_are_no_snapshot(tmp_path: Path, mixed: Snapshot) -> None:
    path = tmp_path / "file"
    with pytest.raises(InvalidArgument, match="No such file"):
        load_snapshot(path)
    for content in (b"", b"hello", b"PK\x03\x04 not really"):
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match="not a heap snapshot"):
            load_snapshot(path)
    for arrays in ({"x": np.zeros(3)}, {"format": np.array([None], dtype=object)}):
        np.savez(path.open("wb"), **arrays)
        with pytest.raises(InvalidArgument, match="not a heap snapshot"):
            load_snapshot(path)
    np.save(path.open("wb"), np.zeros(3))
    with pytest.raises(InvalidArgument, match="not a heap snapshot"):
        load_snapshot(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", 1000),
        ("capacity", 0),
        ("page_live", np.zeros(5, dtype=np.int32)),
        ("page_slots", np.zeros(6)),
        ("page_kind", np.full(6, 4, dtype=np.uint8)),
        ("page_class", np.full(6, len(CLASS_SIZES), dtype=np.int16)),
        ("page_class", np.full(6, -1, dtype=np.int16)),
        ("capacity", np.inf),
    ],
)
def test_a_snapshot_that_contradicts_itself(
    tmp_path: Path, mixed: Snapshot, name: str, value: object
) -> None:
    path = tmp_path / "file.npz"
    save_snapshot(mixed, path)
    with np.load(path) as file:
        fields = dict(file)
    fields[name] = np.asarray(value)
    np.savez(path, **fields)
    with pytest.raises(InvalidArgument, match="not a heap snapshot"):
        load_snapshot(path)


@pytest.mark.parametrize(
    ("part", "at", "value", "reason"),
    [
        (b"PK\x03\x04", 60, b"\xff" * 40, "what is compressed in it is damaged"),
        (b"PK\x01\x02", 8, b"\x01", "is encrypted"),
        (b"PK\x01\x02", 8, b"\x40", "strong encryption"),
        (b"PK\x01\x02", 10, b"\x63", "compression method"),
    ],
    ids=["data", "password", "strong", "method"],
)
def test_a_damaged_snapshot(
    tmp_path: Path, mixed: Snapshot, part: bytes, at: int, value: bytes, reason: str
) -> None:
    """In the packed data, or in what the archive says of its first member."""
    path = tmp_path / "file.npz"
    save_snapshot(mixed, path)
    data = path.read_bytes()
    start = data.index(part) + at
    path.write_bytes(data[:start] + value + data[start + len(value) :])
    with pytest.raises(InvalidArgument, match=f"file.npz: not a heap snapshot: .*{reason}"):
        load_snapshot(path)


def test_an_environment_has_a_reason_for_everything() -> None:
    found = inspect_environment()
    assert dict(found.packages)["torch"]
    assert len(found.abilities) == 5
    assert all(ability.detail for ability in found.abilities)
    assert found.abilities[1].works
