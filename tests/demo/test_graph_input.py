"""Edge lists and library imports become graphs, and broken ones a clear error."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from devalloc.demo.graph import Graph, GraphError, library_graph, read_graph
from devalloc.errors import InvalidArgument


def edges_of(graph: Graph) -> list[tuple[int, int]]:
    return list(zip(graph.sources.tolist(), graph.targets.tolist(), strict=True))


def write(folder: Path, text: str) -> Path:
    path = folder / "graph.txt"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "0 1\n1 2\n0 2\n",
        "0\t1\r\n1\t2\r\n0\t2",
        "0,1\n1,2\n0,2\n",
        "# Nodes: 3 Edges: 3\n% from somewhere\n\n0 1\n  1 2 \n0 2\n\n",
        "3 3\n0 1\n1 2\n0 2\n",
        "# first\n3 3\n0 1\n1 2\n0 2\n",
        "0 1 0.5\n1 2 -1e3 1300000000\n0 2 7\n",
        "0 1\n1 2\n0 1\n0 2\n1 2\n",
    ],
    ids=["plain", "tabs", "commas", "comments", "header", "both", "weights", "duplicates"],
)
def test_every_dialect_gives_the_same_graph(tmp_path: Path, text: str) -> None:
    graph = read_graph(write(tmp_path, text))
    assert graph.vertices == 3
    assert edges_of(graph) == [(0, 1), (1, 2), (0, 2)]
    assert graph.sources.dtype == graph.targets.dtype == np.int32


def test_compression_is_seen_from_the_content(tmp_path: Path) -> None:
    for name in ("graph.txt.gz", "graph"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(b"2 1\n0 1\n"))
        assert edges_of(read_graph(path)) == [(0, 1)]


def test_duplicates_are_dropped_and_counted(tmp_path: Path) -> None:
    graph = read_graph(write(tmp_path, "5 1\n1 5\n5 1\n5 1\n5 5\n"))
    assert graph.duplicates == 2
    assert edges_of(graph) == [(1, 0), (0, 1), (1, 1)]


def test_ids_may_be_sparse_and_large(tmp_path: Path) -> None:
    graph = read_graph(write(tmp_path, f"{2**63 - 1} 7\n7 1000000000000\n"))
    assert graph.vertices == 3
    assert edges_of(graph) == [(2, 0), (0, 1)]


@pytest.mark.parametrize(
    "text", ["4 3\n0 1\n", "0 0\n", "1 1\n", "1 1\n0 1\n", "1 2\n0 1\n1 2\n", "0 1\n1 0\n"]
)
def test_a_first_edge_is_no_header(tmp_path: Path, text: str) -> None:
    graph = read_graph(write(tmp_path, text))
    assert graph.edges + graph.duplicates == text.count("\n")
    assert graph.header == ""


@pytest.mark.parametrize("header", ["2 1", "10 1"])
def test_a_header_counts_vertices_and_edges(tmp_path: Path, header: str) -> None:
    """Vertices that have an edge, or all up to the largest id."""
    graph = read_graph(write(tmp_path, f"# from somewhere\n{header}\n4 9\n"))
    assert graph.edges == 1
    assert graph.header == header


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        ("0 1\n1\n", 2, "'1'"),
        ("0 1\n# fine\n\none two\n", 4, "'one two'"),
        ("0 1.5\n", 1, "'0 1.5'"),
        ("0 1\n2 3 heavy\n", 2, "'2 3 heavy'"),
        ("0 1\n-1 2\n", 2, "'-1 2'"),
        (f"0 1\n0 {2**63}\n", 2, str(2**63)),
        ("0 1\n" + "x" * 500 + "\n", 2, "..."),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: str, line: int, shown: str) -> None:
    with pytest.raises(GraphError, match=rf"graph\.txt, line {line}: ") as caught:
        read_graph(write(tmp_path, text))
    assert shown in str(caught.value)
    assert len(str(caught.value)) < 200
    assert isinstance(caught.value, InvalidArgument)


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_a_file_without_edges(tmp_path: Path, text: str) -> None:
    with pytest.raises(GraphError, match="holds no edges"):
        read_graph(write(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="No such file"):
        read_graph(tmp_path / "missing")
    with pytest.raises(GraphError, match="cannot read"):
        read_graph(tmp_path)
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(b"0 1\n" * 1000)[:-9])
    with pytest.raises(GraphError, match="cannot read"):
        read_graph(cut)
    garbled = tmp_path / "garbled.gz"
    garbled.write_bytes(b"\x1f\x8b\x08\x00" + bytes(range(60)))
    with pytest.raises(GraphError, match="cannot read"):
        read_graph(garbled)
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(128, 256)))
    with pytest.raises(GraphError, match="line 1"):
        read_graph(binary)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small library: modules in sorted order are alpha, beta, pack, pack.inner, zeta."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "test").mkdir()
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "alpha.py").write_text("import beta, sys\ndef late():\n    import zeta\n")
    (tmp_path / "beta.py").write_text(
        "try:\n    from pack import inner, name\nexcept ImportError:\n    import alpha\n"
    )
    (tmp_path / "pack/__init__.py").write_text("from .inner import thing\nfrom . import inner\n")
    (tmp_path / "pack/inner.py").write_text("from .. import beta\nfrom . import missing\n")
    (tmp_path / "zeta.py").write_text("this does not parse\n")
    (tmp_path / "test/test_alpha.py").write_text("import alpha\n")
    (tmp_path / "site-packages/foreign.py").write_text("import alpha\n")
    return tmp_path


def test_imports_of_a_library(library: Path) -> None:
    names = ["alpha", "beta", "pack", "pack.inner", "zeta", "sys"]
    edges = [(names[s], names[t]) for s, t in edges_of(library_graph(library))]
    assert edges == [
        ("alpha", "beta"),
        ("alpha", "sys"),
        ("alpha", "zeta"),
        ("beta", "pack.inner"),
        ("beta", "pack"),
        ("beta", "alpha"),
        ("pack", "pack.inner"),
        ("pack.inner", "pack"),
    ]


def test_the_work_on_a_library_is_bounded(library: Path) -> None:
    assert set(library_graph(library, max_files=1).sources.tolist()) == {0}


def test_a_library_without_sources(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="--graph"):
        library_graph(tmp_path)


def test_the_running_library_is_a_real_graph() -> None:
    graph = library_graph(max_files=200)
    assert graph.vertices > 100
    assert graph.edges > 300
    assert graph.sources.max() < graph.vertices
    assert graph.targets.max() < graph.vertices
    assert edges_of(graph) == edges_of(library_graph(max_files=200))
