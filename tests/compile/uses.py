"""The kernels of the examples and of ``benchmarks/uses``, as they are launched on a GPU.

``python -m tests.compile.uses MODULE`` compiles those of a module for an H200 and prints what each
needs as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import triton

from tests.compile.cases import DEBUG_HEAP, HEAP, Case

ATOMS = {"places": "*fp32", "order": "*i32", "starts": "*i32", "atoms": "i32"}
CELLS = {"GRID": 37, "CUTOFF": 1024, "LANES": 128}
LISTS = {"addrs": "*i64", "rooms": "*i32", "counts": "*i32", "changed": "*i32", "total": "*i32"}
CACHE = {"table": "*i64", "lengths": "*i32", "qkv": "*fp16"}
TURNS = {"targets": "*i32", "turns": "*i32"}
PAGES = {"PAGES": 512, "PAGE": 16, "HEADS": 8, "DIM": 64}
MATRIX = {"starts": "*i32", "columns": "*i32", "values": "*fp32", "sizes": "*i32", "rows": "i32"}
TILE = {"KEPT": 1024, "ENTRIES": 8, "WIDE": 16, "LANES": 128}
INDEX = {"starts": "*i32", "chunks": "*i64", "lengths": "*i32"}
CHUNKS = {"CHUNKS": 24, "FIRST": 4, "LANES": 128}
LANES = {"LANES": 128}

Plan = list[tuple[str, dict[str, str], int, dict[str, int]]]

EXAMPLES: Plan = [
    ("ragged_rows.make_rows", {"addrs": "*i64", "lengths": "*i32", "rows": "i32"}, 4, LANES),
    ("neighbour_lists.lists_kernel", ATOMS | LISTS, 4, CELLS | {"AGAIN": False}),
    ("neighbour_lists.lists_kernel", ATOMS | LISTS, 4, CELLS | {"AGAIN": True}),
    ("paged_kv_cache.append_kernel", CACHE | TURNS, 4, PAGES | {"TURNS": 64}),
    ("paged_kv_cache.attend_kernel", CACHE | {"out": "*fp16"}, 4, PAGES | {"TILE": 64}),
    ("sparse_product.square_kernel", MATRIX | {"addrs": "*i64", "lengths": "*i32"}, 1, TILE),
    ("inverted_index.reserve_kernel", INDEX | {"words": "i32"}, 4, CHUNKS),
    ("inverted_index.append_kernel",
     INDEX | {"batch": "*i32", "order": "*i64", "tokens": "i32", "position": "i32"}, 4, CHUNKS),
]  # fmt: skip

# (The cache has more than 2**31 elements where room is reserved.)
BASELINES: Plan = [
    ("ragged.count_kernel", {"lengths": "*i32", "rows": "i32"}, 4, LANES),
    ("ragged.fill_kernel", {"values": "*i64", "offsets": "*i64", "rows": "i32"}, 4, LANES),
    ("ragged.pad_kernel",
     {"values": "*i64", "lengths": "*i32", "rows": "i32", "width": "i32"}, 4, LANES),
    ("neighbours.count_kernel", ATOMS | {"counts": "*i32"}, 4, CELLS),
    ("neighbours.fill_kernel", ATOMS | {"values": "*i32", "offsets": "*i64"}, 4, CELLS),
    ("neighbours.pad_kernel",
     ATOMS | {"values": "*i32", "counts": "*i32", "width": "i32"}, 4, CELLS),
    ("neighbours.log_kernel", ATOMS | {"log": "*i64", "total": "*i32", "limit": "i32"}, 4, CELLS),
    *((f"cache.{name}", CACHE | {"cache": "*fp16"} | more, 4, PAGES | layout | sizes)
      for layout in ({"PAGED": True}, {"PAGED": False, "PAGE": 8192})
      for name, more, sizes in (("write_kernel", {}, {}),
                                ("attend_kernel", {"out": "*fp16"}, {"TILE": 64}))),
    ("cache.turn_kernel", {"lengths": "*i32", **TURNS, "sequences": "i32"}, 4,
     LANES | {"TURNS": 64}),
    *(("sparse.pass_kernel",
       MATRIX | {"small": "i64", "large": "i64", "places": "*i64", "lengths": "*i32",
                 "offsets": "*i64", "out_columns": "*i32", "out_values": "*fp32"},
       1, TILE | {"FILL": fill}) for fill in (False, True)),
]  # fmt: skip


def cases() -> list[Case]:
    """The examples' kernels for an ordinary heap and for a debug heap, and the baselines'."""
    found = []
    for package, plan in (("examples", EXAMPLES), ("benchmarks.uses", BASELINES)):
        for path, types, warps, constexprs in plan:
            module, name = path.split(".")
            heaps: list[dict[str, str]] = [{}]
            if package == "examples":
                heaps = [HEAP, {"heap": DEBUG_HEAP}]
            if path == "paged_kv_cache.append_kernel" and triton.__version__ < "3.9":
                heaps = [HEAP]  # Triton 3.6 crashes over a constant request of 32 KiB there
            for heap in heaps:
                found.append(Case(f"{package}.{module}", name, heap | types, warps, constexprs))
    return found


def modules() -> list[str]:
    return sorted({case.module for case in cases()})


def main(module: str) -> None:
    from tests.compile.targets import usage

    found = {}
    for case in cases():
        if case.module != module:
            continue
        mode = ",".join(f"{name}={value}" for name, value in case.constexprs.items())
        found[f"{case.key} {mode}"] = asdict(usage(case, "cuda90"))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
