"""What is compiled: user kernels in every shape, and the entry points of ``kernels/``.

A case is a kernel, the types of its arguments, its constexprs and a number of warps. Its key, such
as ``pair_lanes/w4``, or ``malloc_lanes+debug/w4`` with a debug heap, followed by a target's, such
as ``@cuda90``, names a line of budget.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LANES = 128
DEBUG_HEAP = "*u64"  # the type of a debug heap's handle


@dataclass(frozen=True)
class Case:
    """One kernel to compile.

    Attributes
    ----------
    module, name : str
        Where the kernel is.
    types : mapping of str to str
        Argument name to Triton type ("*i64", "i32"), for all but the constexprs.
    warps : int
        Warps per program.
    constexprs : mapping of str to int
    """

    module: str
    name: str
    types: Mapping[str, str]
    warps: int
    constexprs: Mapping[str, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        name = self.name
        if not self.module.startswith("tests."):
            name = f"{self.module.split('.')[-1]}.{name}"
        if self.debug:
            name += "+debug"
        return f"{name}/w{self.warps}"

    @property
    def debug(self) -> bool:
        return self.types.get("heap") == DEBUG_HEAP


def user_case(name: str, types: Mapping[str, str], warps: int) -> Case:
    constexprs = {"LANES": LANES} if name.endswith("_lanes") else {}
    return Case("tests.compile.user_kernels", name, types, warps, constexprs)


HEAP = {"heap": "*i64"}
ONE = HEAP | {"out": "*i64", "nbytes": "i32"}
MANY = HEAP | {"out": "*i64", "sizes": "*i64", "count": "i32"}
ADDRS = HEAP | {"addrs": "*i64"}

# The hot functions: measured at both ends of the range of common warp counts.
HOT = {
    "malloc_scalar": ONE,
    "malloc_lanes": MANY,
    "free_scalar": ADDRS,
    "free_lanes": ADDRS | {"count": "i32"},
    "pair_scalar": ONE,
    "pair_lanes": MANY,
}
# The others: at one warp count, to know that they compile everywhere and do not spill.
OTHER = {
    "usable_size_scalar": ADDRS | {"out": "*i64"},
    "usable_size_lanes": ADDRS | {"out": "*i64"},
    "zeros_scalar": ONE,
    "zeros_lanes": MANY,
    "realloc_scalar": ADDRS | {"nbytes": "i32"},
    "realloc_lanes": ADDRS | {"sizes": "*i64", "count": "i32"},
    "pointer_lanes": ADDRS,
    "pointer_scalar": ADDRS,
}

# The same with a debug heap.
DEBUG = ("malloc_scalar", "malloc_lanes", "free_scalar", "free_lanes", *OTHER)

# Checks the counting itself, not the product.
PROBE = user_case("probe_kernel", HEAP | {"out": "*i64"}, 4)

# What compile times are measured against; not measured itself.
REFERENCE = Case(
    "tests.compile.reference",
    "reference_kernel",
    {"counts": "*i64", "values": "*i64", "limit": "i32"},
    4,
    {"LANES": LANES, "ROUNDS": 40},
)

# The kernels that the host launches, as it launches them: "module.name" -> list of
# (types, warps, constexprs). A test demands an entry for every `*_kernel` of the project.
REQUESTS = HEAP | {"sizes": "*i64", "addrs": "*i64", "n": "i32"}
LISTS = {"address_ptr": "*i64", "length_ptr": "*i32", "capacity_ptr": "*i32"}
BATCH = {"source_ptr": "*i32", "target_ptr": "*i32", "begin_ptr": "*i64", "end_ptr": "*i64"}
SIZES = {"edges": "i32", "vertices": "i32"}
BLOCK = {"BLOCK": LANES}
ROWS = HEAP | {"addrs": "*i64", "offsets": "*i64", "values": "*i32", "n": "i32", "total": "i32"}
MOVED = {"UNIT": 1, "SPAN": 4096, "LANES": LANES, "ITEMS": 1024}
WIDE = {"LANES": 256}
ENTRY_POINTS: dict[str, list[tuple[dict[str, str], int, dict[str, int]]]] = {
    "devalloc.kernels.upkeep.malloc_kernel": [(REQUESTS, 1, BLOCK)],
    "devalloc.kernels.upkeep.free_kernel": [(REQUESTS, 1, BLOCK)],
    "devalloc.kernels.upkeep.usable_size_kernel": [(REQUESTS, 1, BLOCK)],
    "devalloc.kernels.upkeep.rest_kernel": [(HEAP, 1, {})],
    "devalloc.kernels.upkeep.take_chunks_kernel": [
        (HEAP | {"firsts": "*i64", "counts": "*i64", "taken": "*i64"}, 1, {})
    ],
    "devalloc.heap.gather_scatter.gather_kernel": [
        (ROWS, 4, MOVED),
        (ROWS | {"heap": DEBUG_HEAP}, 4, MOVED),
    ],
    "devalloc.heap.gather_scatter.scatter_kernel": [(ROWS, 4, MOVED)],
    "devalloc.kernels.debug.debug_upkeep.malloc_tagged_kernel": [
        (REQUESTS | {"heap": DEBUG_HEAP, "tag": "i32"}, 1, BLOCK)
    ],
    "devalloc.kernels.debug.debug_upkeep.clock_kernel": [({"ticks": "*i64"}, 1, {})],
    "devalloc.kernels.debug.debug_upkeep.audit_kernel": [
        ({"heap": DEBUG_HEAP, "live_count": "*i64"}, 1, BLOCK)
    ],
    "devalloc.demo.lists.insert_kernel": [
        (HEAP | LISTS | BATCH | SIZES | {"accepted_ptr": "*i8"}, 4, WIDE)
    ],
    "devalloc.demo.lists.delete_kernel": [(HEAP | LISTS | BATCH | SIZES, 4, WIDE)],
    "devalloc.demo.lists.release_kernel": [(HEAP | LISTS | SIZES, 4, WIDE)],
}

# The kernels of the benchmark's rows, at their usual widths: name, types, lanes, warps.
SIZED = HEAP | {"n": "i32", "size": "i32"}
CHURN = SIZED | {"wrong": "*i32", "nulls": "*i32", "rounds": "i32"}
MIXED = HEAP | {"sizes": "*i64", "out": "*i64", "n": "i32"}
SCALAR = HEAP | {"out": "*i64", "size": "i32"}
LATENCY = HEAP | {"nulls": "*i32", "pairs": "i32", "size": "i32"}
ROW_KERNELS: list[tuple[str, dict[str, str], int, int]] = [
    ("malloc_lanes_kernel", SIZED | {"out": "*i64"}, 32, 1),
    ("malloc_lanes_kernel", SIZED | {"out": "*i64"}, 128, 1),
    ("malloc_mixed_kernel", MIXED, 32, 1),
    ("free_lanes_kernel", ADDRS | {"n": "i32"}, 32, 1),
    ("free_lanes_kernel", ADDRS | {"n": "i32"}, 128, 1),
    ("churn_kernel", CHURN, 32, 1),
    ("churn_kernel", CHURN, 128, 1),
    ("malloc_warps_kernel", SIZED | {"out": "*i64"}, 256, 8),
    ("free_warps_kernel", ADDRS | {"n": "i32"}, 256, 8),
    ("malloc_scalar_kernel", SCALAR, 1, 1),
    ("malloc_scalar_kernel", SCALAR, 1, 4),
    ("free_scalar_kernel", ADDRS, 1, 1),
    ("free_scalar_kernel", ADDRS, 1, 4),
    ("latency_kernel", LATENCY, 1, 1),
]


def all_cases() -> list[Case]:
    cases = [user_case(name, types, warps) for name, types in HOT.items() for warps in (1, 4)]
    cases += [user_case(name, types, 4) for name, types in OTHER.items()] + [PROBE]
    every = HOT | OTHER
    cases += [user_case(name, every[name] | {"heap": DEBUG_HEAP}, 4) for name in DEBUG]
    for path, variants in ENTRY_POINTS.items():
        module, name = path.rsplit(".", 1)
        for types, warps, constexprs in variants:
            cases.append(Case(module, name, types, warps, constexprs))
    return cases


# These kernels are compiled for every target with every change: together they hold every device
# function, in both shapes of call.
EVERYWHERE = frozenset({
    "pair_scalar/w4",
    "realloc_lanes/w4",
    "usable_size_lanes/w4",
    "realloc_scalar+debug/w4",
    "zeros_lanes+debug/w4",
    "pointer_lanes+debug/w4",
    "gather_scatter.gather_kernel/w4",
    "upkeep.rest_kernel/w1",
    "debug_upkeep.audit_kernel+debug/w1",
    "debug_upkeep.clock_kernel/w1",
    PROBE.key,
})  # fmt: skip


# For this target also all others, but for users' kernels on debug heaps. The rest is in the long
# suite.
FULL_TARGET = "cuda90"


def is_long(case: Case, target: str) -> bool:
    """Whether a kernel is compiled for a target in the long suite only."""
    if case.key in EVERYWHERE:
        return False
    return target != FULL_TARGET or (case.name in DEBUG and case.debug)


def row_cases() -> list[Case]:
    """What is launched for the benchmark's rows. Not in the budget: to look at while working."""
    return [
        Case(
            "benchmarks.device.workloads", name, types, warps, {"LANES": lanes} if lanes > 1 else {}
        )
        for name, types, lanes, warps in ROW_KERNELS
    ]


COMPARED = ("malloc_scalar", "malloc_lanes", "free_scalar", "free_lanes", "usable_size_lanes",
            "zeros_scalar", "realloc_scalar", "pointer_lanes")  # fmt: skip
"""User kernels whose code for an ordinary heap is compared with what it would be without debug
heaps."""
