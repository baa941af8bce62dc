"""The command line: ``devalloc info``, ``demo``, ``view``, ``replay``; in a checkout ``bench``.

Anything that imports Triton is imported inside the commands, after `choose_device`: Triton reads
TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from devalloc import __version__
from devalloc._benchmarks import has_benchmarks, load_benchmark
from devalloc.errors import DevallocError, InvalidArgument
from devalloc.report.environment import inspect_environment, interpreting
from devalloc.sizes import parse_size

INPUT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OUTPUT_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
PICTURES = (".png", ".svg", ".pdf")
"""The formats of pictures, by the end of the file's name."""


class SizeType(click.ParamType):
    """Bytes, or text such as ``64MiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except InvalidArgument as error:
            self.fail(str(error), param, ctx)


def clean_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the errors that a user can cause into one line and exit status 1."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (DevallocError, OSError, ModuleNotFoundError) as error:
            raise click.ClickException(" ".join(str(error).split())) from error

    return wrapped


def choose_device(wanted: str | None) -> tuple[str | None, str]:
    """Decide between GPU and interpreter, and set TRITON_INTERPRET to match. Call it before
    importing Triton.

    Parameters
    ----------
    wanted : str or None
        What the user asked for; None: a GPU if there is one.

    Returns
    -------
    device, description : str or None, str
        The device for `devalloc.Heap`, and text for people.

    Raises
    ------
    InvalidArgument
        If the device that is wanted is not there.
    """
    import torch

    if interpreting():
        return wanted, "Triton's interpreter on the CPU (TRITON_INTERPRET is set)"
    try:
        kind = None if wanted is None else torch.device(wanted).type
    except RuntimeError as error:
        raise InvalidArgument(f"no such device: {wanted!r}") from error
    if kind == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        return wanted, "Triton's interpreter on the CPU (asked for)"
    if not torch.cuda.is_available():
        if wanted is not None:
            raise InvalidArgument(
                f"there is no CUDA device, and so no {wanted}; --device cpu runs the demo in "
                "Triton's interpreter"
            )
        os.environ["TRITON_INTERPRET"] = "1"
        return wanted, "Triton's interpreter on the CPU (there is no CUDA device)"
    try:
        return wanted, torch.cuda.get_device_name(wanted)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise InvalidArgument(f"no such CUDA device: {wanted}") from error


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="devalloc")
def main() -> None:
    """Memory for Triton kernels: malloc and free on the device."""


@main.command()
@clean_errors
def info() -> None:
    """Say what this machine has, what works here, and why the rest does not."""
    console = Console()
    found = inspect_environment()
    facts = Table(show_header=False, box=None)
    for name, text in [("devalloc", __version__), *found.packages, *found.machine]:
        facts.add_row(f"[bold]{name}[/bold]", text)
    console.print(facts, highlight=False)
    abilities = Table(title="what works here", title_justify="left")
    abilities.add_column("what")
    abilities.add_column("works")
    abilities.add_column("how, or why not")
    for ability in found.abilities:
        word = "[green]yes[/green]" if ability.works else "[red]no[/red]"
        abilities.add_row(ability.name, word, ability.detail)
    console.print(abilities, highlight=False)


@main.command()
@click.option(
    "--graph",
    "graph_file",
    type=INPUT_FILE,
    help="Edge list, plain or .gz: two vertex ids a line; # and % begin comments. Further columns "
    '(a weight, a time) are numbers and are ignored. A first line "vertices edges" is a header if '
    "both counts are right. Default: the imports of Python's standard library.",
)
@click.option(
    "--heap",
    "heap_bytes",
    type=SizeType(),
    help="Capacity, such as 64MiB. Default: the heap begins with 4 MiB and grows by itself.",
)
@click.option(
    "--output",
    type=OUTPUT_FILE,
    default=Path("devalloc-demo.png"),
    show_default=True,
    help="Picture of the heap's pages after each step: .png, .svg or .pdf.",
)
@click.option(
    "--device",
    help="cuda, cuda:1, ... or cpu (Triton's interpreter). Default: a GPU if there is one.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help="Edges per launch. Default: a sixteenth of all.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Chooses the order of the edges and which half is deleted.",
)
@clean_errors
def demo(
    graph_file: Path | None,
    heap_bytes: int | None,
    output: Path,
    device: str | None,
    batch: int | None,
    seed: int,
) -> None:
    """Build adjacency lists that grow inside the kernel, then delete and free them.

    Edges arrive in batches, in random order; no list's length is known beforehand. Then a random
    half of the edges is deleted, and then everything is freed. Every step is checked against the
    CPU.
    """
    require_picture(output)
    device, where = choose_device(device)
    console = Console()
    console.print(f"runs on: {where}", highlight=False)

    from devalloc.demo.graph import library_graph, read_graph
    from devalloc.demo.run import run_demo

    graph = read_graph(graph_file) if graph_file else library_graph()
    run_demo(graph, output, heap_bytes, batch, seed, device, console)


@main.command()
@click.argument("snapshots", nargs=-1, required=True, type=INPUT_FILE, metavar="SNAPSHOT...")
@click.option(
    "-o", "--output", type=OUTPUT_FILE, required=True, help="Picture to write: .png, .svg or .pdf."
)
@clean_errors
def view(snapshots: tuple[Path, ...], output: Path) -> None:
    """Draw saved snapshots of a heap, side by side.

    A program saves them with devalloc.report.save_snapshot(heap.snapshot(), "before.npz").
    """
    require_picture(output)
    choose_device(None)

    from devalloc.report.memory_map import save_memory_map
    from devalloc.report.snapshot_file import load_snapshot

    save_memory_map(
        output, [load_snapshot(path) for path in snapshots], [p.name for p in snapshots]
    )
    click.echo(f"map: {output}")


@main.command()
@click.argument("trace_file", type=INPUT_FILE, metavar="TRACE")
@click.option(
    "--policy", "policies", multiple=True, help="Replay only this policy; may be repeated."
)
@click.option("--capacity", type=SizeType(), help="Size of the simulated device, such as 80GiB.")
@click.option(
    "--device",
    type=click.IntRange(min=0),
    help="Which device of PyTorch's snapshot. Default: the one with the most events.",
)
@click.option(
    "-o",
    "--output",
    type=OUTPUT_FILE,
    default=Path("devalloc-replay.png"),
    show_default=True,
    help="Picture of reserved and unused bytes over time: .png, .svg or .pdf.",
)
@clean_errors
def replay(
    trace_file: Path,
    policies: tuple[str, ...],
    capacity: int | None,
    device: int | None,
    output: Path,
) -> None:
    """Replay recorded allocations through every policy, on the CPU.

    No memory is allocated. TRACE is a pickle of torch.cuda.memory._snapshot(), a CSV log with RMM's
    columns, or a compact trace; gzip'ed or not. Pickles of anything but plain data are refused.
    """
    require_picture(output)

    from devalloc.replay.files import load_trace
    from devalloc.replay.policies import chosen_policies, replay_policies
    from devalloc.replay.summary import describe_trace, replay_table, require_room, save_plot

    chosen = chosen_policies(policies)
    trace = load_trace(trace_file, device)
    console = Console()
    for line in describe_trace(trace):
        console.print(line, highlight=False, markup=False)
    replays = replay_policies(trace, chosen, capacity)
    console.print(replay_table(replays))
    if note := require_room(trace, replays, capacity):
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    save_plot(output, replays, trace_file.name)
    console.print(f"plot: {output}", highlight=False, markup=False)


class Benchmarks(click.Group):
    """The commands of ``benchmarks/``, each imported when it is used."""

    MODULES = {  # noqa: RUF012
        "arena": "arena.bench_arena",
        "compare": "tables.compare",
        "device": "device.bench_device",
        "growing": "device.bench_growing",
        "litmus": "stress.bench_litmus",
        "order": "device.bench_order",
        "plot": "tables.plots",
        "process": "arena.bench_process",
        "regions": "arena.bench_regions",
        "sanitize": "stress.bench_sanitize",
        "stress": "stress.bench_stress",
        "uses": "uses.bench_uses",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.MODULES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.MODULES:
            return None
        try:
            command = load_benchmark(self.MODULES[name]).main
        except (DevallocError, ModuleNotFoundError) as error:
            raise click.ClickException(" ".join(str(error).split())) from error
        assert isinstance(command, click.Command)
        return command


@main.command(cls=Benchmarks, hidden=not has_benchmarks())
def bench() -> None:
    """Measure and stress heaps and arenas. Only in a checkout, for those who change devalloc."""


def require_picture(output: Path) -> None:
    """Refuse, before any work is done, a picture that cannot be written there or in that format."""
    if output.suffix.lower() not in PICTURES:
        raise InvalidArgument(
            f"cannot write {output}: pictures are {', '.join(PICTURES)}; the name's end chooses"
        )
    if not output.absolute().parent.is_dir():
        raise InvalidArgument(f"cannot write {output}: its folder does not exist")


if __name__ == "__main__":
    main()
