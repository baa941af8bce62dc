"""Our rows beside the best peer's, the targets and the ceilings.

devalloc bench compare                   # the newest results, on the terminal
devalloc bench compare FILE...           # other files; later ones replace rows of earlier ones
devalloc bench compare --write-docs      # also into the documents, with the plots
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import click
from rich.console import Console

from benchmarks.arena import bench_arena, bench_regions
from benchmarks.device import bench_growing
from benchmarks.results import RESULTS, ROOT, newest, read_rows
from benchmarks.tables import (
    arena_tables,
    checks,
    plots,
    readme_table,
    replay_tables,
    tables,
    uses_tables,
)
from benchmarks.tables.comparison import PEERS, TARGETS, Results, compare, peer_floor, show
from benchmarks.uses import bench_uses

DOCUMENT = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "guide"
ARENAS = GUIDE / "arenas.md"
DEBUG = GUIDE / "debugging.md"
PAUSING = GUIDE / "pausing.md"
GROWING = GUIDE / "growing.md"
REPLAY = GUIDE / "replay.md"
USES = GUIDE / "uses.md"
HOST = ROOT / "docs" / "design" / "host.md"
ARENA_BLOCKS = {"pairs": ARENAS, "training": ARENAS, "parts": HOST}
"""Which document shows which table of ``bench_arena``."""
ALL_ROWS = RESULTS / "README.md"
DEVICE_TABLE, README_TABLE = "device", "readme"


def merged(files: tuple[Path, ...]) -> list[dict[str, str]]:
    """The rows of all files; of those measured twice, the last, and the provenance of each."""
    columns = ("row", "lanes", "warps", "registers", "allocator", "state", "op")
    found = {
        tuple(row[column] for column in columns): row for path in files for row in read_rows(path)
    }
    return list(found.values())


def write_documents(
    rows: list[dict[str, str]],
    table: str,
    short: str,
    found: list[checks.Check],
    about: list[str],
    root: Path = ROOT,
) -> list[Path]:
    """The tables and plots into the documents below `root`; returns what was written."""
    paths = [root / path.relative_to(ROOT) for path in (DOCUMENT, README, ALL_ROWS)]
    document, readme, every = paths
    drawn = plots.draw_all(rows, root / plots.PLOTS.relative_to(ROOT))
    pictures = [f"![{p.stem}]({os.path.relpath(p, document.parent)})" for p in drawn]
    link = os.path.relpath(every, document.parent)
    text = [
        table,
        "Flatness (time per request over lanes, heap sizes, fill) and tails (p99 / median), from "
        "the same rows:",
        checks.markdown(found),
        f"[All rows as measured, group by group]({link}).",
        *pictures,
    ]
    tables.write_block(document, DEVICE_TABLE, "\n\n".join(text))
    tables.write_block(readme, README_TABLE, short)
    others = {}
    for name in tables.APART:
        with suppress(FileNotFoundError):  # they are measured seldom
            others[name] = read_rows(newest(every.parent / name))
    every.write_text(tables.all_tables(rows, read_rows(PEERS), others, about))
    return [*paths, *drawn]


def write_arena_documents() -> None:
    """The newest rows of ``bench_arena`` into the documents that show them."""
    blocks = arena_tables.blocks(read_rows(newest(bench_arena.FOLDER)))
    for name, document in ARENA_BLOCKS.items():
        tables.write_block(document, name, blocks[name])


def write_replay_document(document: Path = REPLAY) -> None:
    """The committed traces through every policy into ``document``."""
    tables.write_block(document, "replay", replay_tables.tables_of(replay_tables.replay_all()))


def write_scale_document(document: Path = HOST) -> None:
    """The newest rows of ``bench_arena --only scale`` into ``document``."""
    rows = read_rows(newest(bench_arena.SCALE_FOLDER))
    text = arena_tables.scale_table(rows)
    tables.write_block(document, "scale", text)


def write_debug_document(document: Path = DEBUG) -> None:
    """The newest rows of a debug heap beside an ordinary one into ``document``."""
    rows = read_rows(newest(RESULTS / "debug"))
    tables.write_block(document, "debug", tables.debug_table(rows))


def write_regions_document(document: Path = PAUSING) -> None:
    """The newest rows of ``bench_regions`` into ``document``."""
    rows = read_rows(newest(bench_regions.FOLDER))
    tables.write_block(document, "regions", bench_regions.markdown(rows))


def write_growing_document(document: Path = GROWING) -> None:
    """The newest rows of ``bench_growing`` into ``document``."""
    rows = read_rows(newest(bench_growing.FOLDER))
    tables.write_block(document, "growing", bench_growing.markdown(rows))


def write_uses_document(document: Path = USES) -> None:
    """The newest rows of ``bench_uses`` into ``document``, and the picture beside it."""
    rows = read_rows(newest(bench_uses.FOLDER))
    uses_tables.draw(rows, document.parent.parent / "plots")
    for name, text in uses_tables.blocks(rows).items():
        tables.write_block(document, name, text)


@click.command("compare")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--write-docs", is_flag=True, help="Put tables and plots into the documents.")
@click.option("--width", nargs=2, type=int, help="Lanes per program and warps of all rows.")
def main(files: tuple[Path, ...], write_docs: bool, width: tuple[int, int] | None) -> None:
    """Show our rows beside the best peer's, the targets and the ceilings."""
    try:
        rows = merged(files or (newest(),))
    except FileNotFoundError as error:
        raise click.ClickException(str(error)) from error
    peers = read_rows(PEERS)
    results = Results(rows, peer_floor(peers), width)
    lines = compare(results, peers, read_rows(TARGETS))
    about = tables.describe(rows, results, lines)
    tables.print_table(lines, about)
    found = checks.all_checks(rows)
    console = Console()
    for check in found:
        text = f"{check.what}: {show(check.value)}, limit {check.limit}: {check.verdict}"
        style = {"yes": "green", "no": "red"}.get(check.verdict)
        console.print(text, style=style, highlight=False, soft_wrap=True)
    if write_docs:
        short = readme_table.markdown(lines)
        readme_table.draw(lines, peers, plots.PLOTS)
        for path in write_documents(rows, tables.markdown(lines, about), short, found, about):
            click.echo(f"wrote {path}")
        for write in (
            write_arena_documents,
            write_replay_document,
            write_scale_document,
            write_debug_document,
            write_uses_document,
            write_regions_document,
            write_growing_document,
        ):
            write()
        click.echo(f"wrote the documents below {GUIDE} and {HOST}")


if __name__ == "__main__":
    main()
