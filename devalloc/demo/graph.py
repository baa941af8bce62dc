"""Where the demo's edges come from: an edge list in a file, or the imports in Python's own library.

Owns nothing on a device and needs neither torch nor Triton. A `Graph` has vertices 0..n-1 without
gaps, whatever ids or names its source uses, and no edge twice. Of equal edges the first stays, so
the edges are in the order of the source.
"""

from __future__ import annotations

import ast
import gzip
import platform
import sysconfig
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from devalloc.errors import InvalidArgument

MAX_VERTEX_ID = 2**63 - 1
MAX_VERTICES = 2**31 - 1
GZIP_MAGIC = b"\x1f\x8b"
COMMENTS = ("#", "%")
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


class GraphError(InvalidArgument):
    """A graph could not be read; the message names the file and, where there is one, the line."""


@dataclass(frozen=True)
class Graph:
    """A directed graph as an edge list.

    Attributes
    ----------
    name : str
        Where it came from, for people.
    vertices : int
        Number of vertices.
    sources, targets : numpy.ndarray
        int32, shape (edges,): edge i goes from ``sources[i]`` to ``targets[i]``.
    duplicates : int
        How many edges of the source were dropped because they had occurred before.
    header : str
        The first line of a file, if it was read as a header and not as an edge; else empty.
    """

    name: str
    vertices: int
    sources: np.ndarray
    targets: np.ndarray
    duplicates: int
    header: str = ""

    @property
    def edges(self) -> int:
        return len(self.sources)


def read_graph(path: str | Path) -> Graph:
    """Read an edge list: two vertex ids on each line, plain text or gzip.

    Ids are integers from 0 to 2**63 - 1 and need not be contiguous; further numeric columns (a
    weight, a time) are ignored. Empty lines and lines that begin with ``#`` or ``%`` are skipped.
    A first line "vertices edges" is a header if both counts are those of the lines that follow;
    otherwise it is an edge.

    Parameters
    ----------
    path : str or Path
        The file. Its first bytes, not its name, tell whether it is compressed.

    Raises
    ------
    GraphError
        If the file cannot be read, holds no edge, or has a broken line.
    """
    path = Path(path)
    try:
        with open_text(path) as lines:
            ids = parse_edges(lines, path.name)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise GraphError(f"cannot read the graph {path}: {reason}") from error
    header = ""
    if is_header(ids):
        header, ids = f"{ids[0, 0]} {ids[0, 1]}", ids[1:]
    if len(ids) == 0:
        raise GraphError(f"{path.name} holds no edges; expected lines of two vertex ids")
    labels, numbers = np.unique(ids, return_inverse=True)
    numbers = numbers.reshape(ids.shape)
    return make_graph(path.name, len(labels), numbers[:, 0], numbers[:, 1], header)


def is_header(ids: np.ndarray) -> bool:
    """Whether the first line counts the vertices and the edges of all others.

    Vertices without an edge are in no line, so a header may count up to the largest id, from 0.
    """
    if len(ids) < 2 or ids[0, 1] != len(ids) - 1:
        return False
    rest = ids[1:]
    return int(ids[0, 0]) in (len(np.unique(rest)), int(rest.max()) + 1)


def open_text(path: Path) -> IO[str]:
    """Open a text file that may be gzip-compressed; broken UTF-8 becomes broken lines."""
    with open(path, "rb") as raw:
        compressed = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    if compressed:
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return open(path, encoding="utf-8", errors="replace")


def parse_edges(lines: IO[str], name: str) -> np.ndarray:
    """Return the two ids of every edge line as int64 of shape (edges, 2)."""
    ids = array("q")
    for number, line in enumerate(lines, start=1):
        fields = line.replace(",", " ").split()
        if not fields or fields[0].startswith(COMMENTS):
            continue
        try:
            source, target = int(fields[0]), int(fields[1])
            for extra in fields[2:]:
                float(extra)
        except (ValueError, IndexError):
            raise GraphError(
                f"{name}, line {number}: expected two vertex ids, got {shortened(line)}"
            ) from None
        if not (0 <= source <= MAX_VERTEX_ID and 0 <= target <= MAX_VERTEX_ID):
            raise GraphError(
                f"{name}, line {number}: vertex ids must lie between 0 and 2**63 - 1, "
                f"got {shortened(line)}"
            )
        ids.append(source)
        ids.append(target)
    return np.frombuffer(ids, dtype=np.int64).reshape(-1, 2)


def shortened(line: str, limit: int = 40) -> str:
    text = line.rstrip("\r\n")
    return repr(text if len(text) <= limit else text[:limit] + "...")


def make_graph(
    name: str, vertices: int, sources: np.ndarray, targets: np.ndarray, header: str = ""
) -> Graph:
    """A `Graph` of edges between vertices 0..vertices-1, without repeated edges."""
    if vertices > MAX_VERTICES:
        raise GraphError(f"{name} has {vertices:,} vertices; at most {MAX_VERTICES:,} are possible")
    keys = sources.astype(np.int64) * vertices + targets
    first = np.sort(np.unique(keys, return_index=True)[1])
    return Graph(
        name=name,
        vertices=vertices,
        sources=sources[first].astype(np.int32),
        targets=targets[first].astype(np.int32),
        duplicates=len(keys) - len(first),
        header=header,
    )


def library_graph(folder: str | Path | None = None, max_files: int = 1000) -> Graph:
    """The import graph of the running Python's standard library, parsed from its sources.

    An edge leads from a module to each module that it imports, anywhere in its code. Tests and
    installed packages are left out. The order is that of the sorted paths and of the statements.

    Parameters
    ----------
    folder : str or Path, optional
        Root of the library; by default the running Python's.
    max_files : int
        The most files that are parsed: a bound on the work.

    Raises
    ------
    GraphError
        If there are no sources, as in a Python that ships its library compiled.
    """
    root = Path(folder or sysconfig.get_path("stdlib"))
    files = library_files(root)
    modules = {module_name(path, root): path for path in files[:max_files]}
    numbers: dict[str, int] = {name: index for index, name in enumerate(modules)}
    edges: list[tuple[int, int]] = []
    for name, path in modules.items():
        for imported in imports_of(name, path, modules):
            edges.append((numbers[name], numbers.setdefault(imported, len(numbers))))
    if not edges:
        raise GraphError(f"no library sources with imports under {root}; name a file with --graph")
    ids = np.array(edges, dtype=np.int64)
    title = f"imports of Python {platform.python_version()}'s library"
    return make_graph(title, len(numbers), ids[:, 0], ids[:, 1])


def library_files(root: Path) -> list[Path]:
    """The library's source files, sorted, without tests and installed packages."""
    return sorted(
        path
        for path in root.rglob("*.py")
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts[:-1])
    )


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Names of the modules that the module ``name`` imports; none if it does not parse."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError):
        return
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_name(node.module or "", node.level, package)
            for alias in node.names if base else ():
                inner = f"{base}.{alias.name}"
                yield inner if inner in modules else base


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Every statement of a module. Expressions are not searched: they hold no imports."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.stmt):
            yield node
        for field in ("finalbody", "orelse", "handlers", "cases", "body"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):
                pending.extend(reversed(inner))


def absolute_name(module: str, level: int, package: str) -> str:
    """What ``from <level dots><module> import ...`` refers to inside ``package``; empty if the
    dots lead out of it."""
    if level == 0:
        return module
    parts = package.split(".") if package else []
    if level > len(parts):
        return ""
    kept = parts[: len(parts) - (level - 1)]
    return ".".join([*kept, *([module] if module else [])])
