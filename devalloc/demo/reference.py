"""The lists as they should be, computed by NumPy on the CPU, and where two versions differ."""

from __future__ import annotations

import numpy as np

from devalloc.demo.graph import Graph


def expected_lists(graph: Graph, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lists of some of a graph's edges, inserted in the order of ``edges``.

    Parameters
    ----------
    graph : Graph
    edges : numpy.ndarray
        Integers, shape (edges,): indices into the graph's edges.

    Returns
    -------
    offsets, entries : numpy.ndarray
        int64 of shape (vertices + 1,) and int32: list v is ``entries[offsets[v]:offsets[v + 1]]``.
    """
    sources = graph.sources[edges]
    offsets = np.zeros(graph.vertices + 1, dtype=np.int64)
    np.cumsum(np.bincount(sources, minlength=graph.vertices), out=offsets[1:])
    return offsets, graph.targets[edges][np.argsort(sources, kind="stable")]


def first_difference(
    found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]
) -> str | None:
    """Say where the lists differ first, or None if they are equal edge for edge, order included."""
    lengths, wanted = np.diff(found[0]), np.diff(expected[0])
    unequal = np.flatnonzero(lengths != wanted)
    if len(unequal):
        vertex = unequal[0]
        return f"list {vertex} has {lengths[vertex]} entries, expected {wanted[vertex]}"
    unequal = np.flatnonzero(found[1] != expected[1])
    if len(unequal):
        at = unequal[0]
        vertex = np.searchsorted(expected[0], at, side="right") - 1
        return (
            f"list {vertex}, entry {at - expected[0][vertex]}: "
            f"{found[1][at]}, expected {expected[1][at]}"
        )
    return None
