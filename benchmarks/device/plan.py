"""What is measured: every row of the device benchmark, by name. Imports neither torch nor Triton.

A row is a pattern, a size in bytes and a number of requests; ``thread-64-1000000`` is its name.
Patterns of the sweeps have one parameter more, ``fill-64-100000-95``. The name with the block
width (lanes per program x warps), and with the limit of registers, the allocator and the state
where they are not the usual ones, is the row's key: ``thread-64-1000000@128x1``,
``cta-1024-4096@1x4r64``, ``thread-64-1024@32x1:cuda``, ``thread-64-1024@32x1:cold``. The same
names are used by the peers' rows and by ``targets.csv``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

WIDTHS = ((32, 1), (128, 1), (256, 2), (512, 4))
"""Lanes per program and warps at which some ``target`` rows are measured beside the usual one."""
NARROW, WIDE = WIDTHS[:2]
FEW = 16_384
"""Up to so many requests, all of them run at once in narrow programs too."""

LANE_PATTERNS = frozenset(
    {"empty", "store", "thread", "mixed", "churn", "write", "write_base", "oom", "frag"}
    | {"fill", "heap", "streams", "tail", "shape", "renewed", "alike"}
)
SCALAR_WARPS = {
    "cta": 4,
    "scalar": 1,
    "latency": 1,
    "create": 1,
    "live": 1,
    "runs": 1,
    "failing": 1,
}
WARP_WIDTH = (256, 8)
"""Of ``warp``: one lane in 32 asks."""
SPACE = frozenset({"shape", "renewed", "alike", "live", "runs", "failing"})
OWN_HEAP = frozenset({"create", "oom", "frag", "fill", "heap", "latency", "tail"}) | SPACE
"""Patterns that make a heap for each row; the others share one."""

BASELINES = frozenset({"bump", "cuda"})
"""Allocators that are measured beside ours; if one fails, the error is not in devalloc."""

CHURN_ROUNDS = 32
FRAG_ROUNDS = 20
TAIL_ROUNDS = 1000
OOM_HEAP_BYTES = 1 << 30
FILL_SLOTS = 1 << 24
"""Slots of the heap that ``fill`` and ``tail`` fill: 1 % of them are more than 100,000."""
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def usual_width(pattern: str, n: int) -> tuple[int, int]:
    """Lanes per program and warps of a row, unless others are asked for: what serves it best.

    Wide programs share more of the work, narrow ones are through it sooner. So few requests are
    narrow, and sizes that are mixed, where lanes have little to share.
    """
    if pattern in SCALAR_WARPS:
        return 1, SCALAR_WARPS[pattern]
    if pattern == "warp":
        return WARP_WIDTH
    return NARROW if n <= FEW or pattern in ("mixed", "frag", "shape", "renewed", "alike") else WIDE


def is_usual(row: Mapping[str, str]) -> bool:
    """Whether a record, as in a result file, was measured at its usual width, if it has any."""
    width = (int(row["lanes"]), int(row["warps"]))
    usual = width[0] == 0 or width == usual_width(row["pattern"], int(row["n"]))
    return usual and row["registers"] == "0"


@dataclass(frozen=True)
class Row:
    """One workload to measure.

    Attributes
    ----------
    pattern : str
        The name of the workload; README.md says what each does.
    size : int
        Bytes of a request; the upper bound where sizes are mixed; the heap's for ``create``.
    n : int
        Requests per launch; pairs for ``latency``.
    lanes, warps : int
        Lanes per program (1: a scalar request) and warps per program.
    param : int, optional
        Percent of the heap that is live (``fill``, ``tail``), bytes of the heap (``heap`` and the
        group ``space``), or launches at once (``streams``).
    allocator : str
        ``devalloc``; ``debug``, the same with a debug heap; ``bump``, the upper bound; ``cuda``,
        the built-in malloc of CUDA; ``none`` for patterns that allocate nothing.
    state : str
        ``warm``: after earlier rounds. ``cold``: the heap was just reset, and other data passed
        through the caches.
    registers : int
        Per thread at most (the launch option ``maxnreg``); 0: the compiler chooses.
    """

    pattern: str
    size: int
    n: int
    lanes: int
    warps: int
    param: int | None = None
    allocator: str = "devalloc"
    state: str = "warm"
    registers: int = 0

    @property
    def name(self) -> str:
        name = f"{self.pattern}-{self.size}-{self.n}"
        return name if self.param is None else f"{name}-{self.param}"

    @property
    def key(self) -> str:
        key = f"{self.name}@{self.lanes}x{self.warps}"
        if self.registers:
            key += f"r{self.registers}"
        if self.allocator not in ("devalloc", "none"):
            key += f":{self.allocator}"
        return key if self.state == "warm" else f"{key}:{self.state}"

    @property
    def launch_options(self) -> dict[str, int]:
        """What a launch of a kernel is given beside its arguments."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, **limit}

    @property
    def live_bytes(self) -> int:
        """Requested bytes that are live at a time in the shared heap; 0 where it is not used."""
        if self.allocator == "none" or self.pattern in OWN_HEAP:
            return 0
        if self.pattern == "mixed":
            return self.n * (16 + self.size) // 2
        return self.n * self.size * (self.param or 1)

    @property
    def family(self) -> str:
        """Rows of one family follow one another; the heap is checked after each family."""
        if self.allocator == "debug":
            return f"debug {self.pattern}"
        if self.allocator != "devalloc" or self.pattern == "create":
            return "write" if self.pattern == "write_base" else "floor"
        return self.pattern

    @property
    def child(self) -> str:
        """Rows of different children are not measured in one process: CUDA's malloc keeps its heap
        until the process ends, and the heap that rows share is a debug heap or is not."""
        return self.allocator if self.allocator in ("cuda", "debug") else "devalloc"


def make(
    pattern: str,
    size: int,
    n: int,
    width: tuple[int, int] | None = None,
    param: int | None = None,
    allocator: str = "devalloc",
    state: str = "warm",
) -> Row:
    """A row, of its usual width if none is given; scalar patterns ignore the width."""
    usual = usual_width(pattern, n)
    lanes, warps = width if width and pattern in LANE_PATTERNS else usual
    if pattern in ("empty", "store", "write_base"):
        allocator = "none"
    return Row(pattern, size, n, lanes, warps, param, allocator, state)


# The groups --------------------------------------------------------------------------------------

Plan = Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]]

COUNTS = tuple(4**power for power in range(13))
"""1 to 16,777,216 requests."""
SIZES = tuple(1 << power for power in range(4, 21))
"""16 B to 1 MiB."""
LEVELS = (0, 25, 50, 75, 90, 95, 99)
HEAPS = (64 * MIB, 256 * MIB, GIB, 8 * GIB, 32 * GIB, 100 * GIB)
FAST_FOR_CUDA = {16: 1_048_576, 32: 1_048_576, 64: 1_048_576, 128: 1_048_576, 256: 100_000,
                 512: 16_384, 1024: 16_384, 2048: 4096}  # fmt: skip
"""Requests of a size that CUDA's malloc serves in well under 2 s. Some larger rows take minutes,
some never end."""


def expand(plan: Plan, width: tuple[int, int] | None = None, **options: Any) -> list[Row]:
    return [
        make(p, size, n, width, **options)
        for p, sizes, counts in plan
        for n in counts
        for size in sizes
    ]


def baselines(rows: Iterable[Row]) -> list[Row]:
    """The upper bound and CUDA's own malloc on the ``thread`` rows among `rows`, where they can."""
    found = []
    for row in rows:
        if row.pattern != "thread" or row.state != "warm":
            continue
        found.append(replace(row, allocator="bump"))
        if row.n <= FAST_FOR_CUDA.get(row.size, 0):
            found.append(replace(row, allocator="cuda"))
    return found


def target_rows(width: tuple[int, int] | None = None) -> list[Row]:
    """What targets name, with the floors, the baselines, and what the block width costs."""
    plan: Plan = [
        ("empty", (0,), (1, 1_000_000)),
        ("store", (64,), (1_000_000,)),
        ("create", (8 * GIB,), (1,)),
        ("thread", (16, 64, 256, 1024, 4096), (1_000_000,)),
        ("thread", (16, 64, 256, 1024, 4096, 8192), (100_000,)),
        ("thread", (64,), (1, 32, 1024, 16_384)),
        ("mixed", (64, 256, 1024, 4096, 8192), (100_000,)),
        ("warp", (16, 64, 256, 1024, 4096, 8192), (100_000,)),
        ("scalar", (16, 64, 256, 1024, 4096, 8192), (100_000,)),
        ("cta", (1 << 10, 1 << 14, 1 << 16, 1 << 20), (4096,)),
        ("churn", (64, 1024), (65_536, 1024)),
        ("latency", (64, 1024), (1000,)),
        ("write", (64, 16), (1_000_000,)),
        ("write_base", (64, 16), (1_000_000,)),
        ("oom", (64, 1024, 4096), (10_000,)),
        ("frag", (4096,), (100_000,)),
    ]
    # (The first is the floor of the `scalar` rows: so many programs of one warp, nothing in them.)
    rows = [make("empty", 0, 100_000, (1, 1)), *expand(plan, width)]
    rows += baselines(rows)
    rows += expand([("latency", (64,), (1000,))], allocator="cuda")
    wide: Plan = [
        ("thread", (16, 64, 256, 1024, 4096), (1_000_000,)),
        ("thread", (64,), (1, 1024, 100_000)),
        ("mixed", (64, 4096), (100_000,)),
        ("churn", (64,), (65_536,)),
    ]
    for other in () if width else WIDTHS:
        rows += expand(wide, other)
    return list(dict.fromkeys(rows))


def n_rows(width: tuple[int, int] | None = None) -> list[Row]:
    """Time against the number of requests, warm and cold."""
    rows = expand([("thread", (64,), COUNTS), ("thread", (1024,), COUNTS[:-1])], width)
    return [*rows, *expand([("thread", (64,), COUNTS)], width, state="cold"), *baselines(rows)]


def size_rows(width: tuple[int, int] | None = None) -> list[Row]:
    """Time against the size of a request."""
    small = tuple(size for size in SIZES if size <= 64 * KIB)
    rows = expand([("thread", small, (100_000,)), ("thread", SIZES, (4096,))], width)
    return [*rows, *baselines(rows)]


def fill_rows(width: tuple[int, int] | None = None) -> list[Row]:
    """Time against the share of the heap that is live already."""
    return [make("fill", size, 100_000, width, level) for size in (64, 1024) for level in LEVELS]


def heap_rows(width: tuple[int, int] | None = None) -> list[Row]:
    """Time against the size of the heap, and of making it."""
    loads = ((64, 100_000), (1024, 16_384))
    return [
        *(make("create", heap, 1) for heap in HEAPS),
        *(make("heap", size, n, width, heap) for size, n in loads for heap in HEAPS),
    ]


def warps_rows(width: tuple[int, int] | None = None) -> list[Row]:
    """Time against the lanes and warps of a program, 1 to 16 warps; and of scalar requests."""
    widths = [(lanes, warps) for warps in (1, 2, 4, 8, 16) for lanes in (32 * warps, 128 * warps)]
    lanes = [make("thread", 64, 100_000, at) for at in ([width] if width else widths)]
    scalar = [replace(make("scalar", 64, 16_384), warps=warps) for warps in (1, 2, 4, 8, 16)]
    return [*lanes, *scalar]


def streams_rows(width: tuple[int, int] | None = None) -> list[Row]:
    """Time against the number of launches at once, each on its own stream."""
    counts = (1, 2, 4, 8)
    return [make("streams", size, 100_000, width, n) for size in (64, 1024) for n in counts]


def debug_rows(width: tuple[int, int] | None = None) -> list[Row]:
    """What a debug heap costs, beside an ordinary one."""
    plan: Plan = [
        ("thread", (64, 1024), (100_000, 1_000_000)),
        ("mixed", (1024,), (100_000,)),
        ("scalar", (64,), (100_000,)),
        ("cta", (1 << 16,), (4096,)),
        ("latency", (64,), (1000,)),
        ("churn", (64,), (65_536,)),
    ]
    return [*expand(plan, width), *expand(plan, width, allocator="debug")]


def tail_rows(width: tuple[int, int] | None = None) -> list[Row]:
    """The slowest of a thousand rounds, at three fill levels."""
    levels = (0, 50, 95)
    return [make("tail", size, 100_000, width, level) for size in (64, 1024) for level in levels]


def space_rows(width: tuple[int, int] | None = None) -> list[Row]:
    """What a heap takes after exchanges, what it can still give, and how long failing takes."""
    shapes = (
        ("shape", 4096, 100_000, 8 * GIB),  # A
        ("shape", 4096, 1_000_000, 8 * GIB),  # B
        ("shape", 65_536, 20_000, 8 * GIB),  # C
        ("shape", 4096, 100_000, GIB),  # D
        ("shape", 256, 100_000, 8 * GIB),  # E
        ("alike", 64, 100_000, 8 * GIB),  # F
        ("renewed", 4096, 100_000, 8 * GIB),
        ("renewed", 4096, 1_000_000, 8 * GIB),
        ("renewed", 256, 100_000, 8 * GIB),
    )
    heaps = (16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB, 8 * GIB)
    pages = (2, 5, 22, 33, 40, 65, 129, 200)
    return [
        *(make(pattern, size, n, width, heap) for pattern, size, n, heap in shapes),
        *(make("live", 64, n, param=heap) for n in (1, 16, 64) for heap in heaps),
        *(make("runs", n * 64 * KIB, 64, param=heap) for heap in (64 * MIB, GIB) for n in pages),
        *(
            make("failing", size, n, param=heap)
            for size in (64, 64 * KIB)
            for heap in (4 * MIB, GIB)
            for n in (1, 64)
        ),
    ]


GROUPS: dict[str, Callable[[tuple[int, int] | None], list[Row]]] = {
    "target": target_rows,
    "n": n_rows,
    "size": size_rows,
    "fill": fill_rows,
    "heap": heap_rows,
    "warps": warps_rows,
    "streams": streams_rows,
    "tail": tail_rows,
    "space": space_rows,
    "debug": debug_rows,
}


def rows_of(groups: Iterable[str], width: tuple[int, int] | None = None) -> list[Row]:
    """The rows of some groups, each once, in the order of measurement.

    Parameters
    ----------
    groups : iterable of str
        Keys of `GROUPS`.
    width : (int, int), optional
        Lanes per program and warps for all rows that allocate by lane.
    """
    rows = dict.fromkeys(row for group in groups for row in GROUPS[group](width))
    return sorted(rows, key=lambda row: ("devalloc", "debug", "cuda").index(row.child))


QUICK = frozenset(
    make(pattern, size, n).name
    for pattern, size, n in (
        ("empty", 0, 1),
        ("create", 8 * GIB, 1),
        ("thread", 64, 1_000_000),
        ("thread", 1024, 1_000_000),
        ("thread", 64, 1024),
        ("mixed", 4096, 100_000),
        ("warp", 64, 100_000),
        ("scalar", 64, 100_000),
        ("cta", 1 << 16, 4096),
        ("churn", 64, 65_536),
        ("latency", 64, 1000),
        ("write", 64, 1_000_000),
        ("write_base", 64, 1_000_000),
        ("oom", 4096, 10_000),
        ("frag", 4096, 100_000),
    )
)
"""Names of the target rows for a first result within a minute."""


# Other forms of a row ----------------------------------------------------------------------------


def shrink(row: Row) -> Row:
    """The row with so few requests and such narrow programs that the interpreter is quick."""
    if row.pattern == "create":
        return replace(row, size=min(row.size, MIB))
    if row.pattern == "oom":
        return replace(row, n=min(row.n, 1024), lanes=1024)
    if row.pattern in SPACE:
        heap = 2 * MIB
        if row.pattern == "live" or row.size > 4 * KIB:
            heap = 8 * MIB
        if row.pattern == "failing":
            # (A search that finds nothing takes the interpreter long, least so for whole pages.)
            return replace(row, n=min(row.n, 2), size=64 * KIB, param=128 * KIB)
        if row.pattern in ("shape", "renewed", "alike"):
            return replace(row, n=min(row.n, 40), lanes=min(row.lanes, 16), param=heap)
        return replace(row, n=min(row.n, 4), size=min(row.size, 5 * 64 * KIB), param=heap)
    if row.pattern == "warp":
        return replace(row, n=min(row.n, 5), lanes=64)
    if row.lanes == 1:
        most = {"empty": 5, "cta": 3, "scalar": 3, "latency": 4}[row.pattern]
        return replace(row, n=min(row.n, most), size=min(row.size, 1 << 17))
    param = row.param if row.pattern != "heap" or row.param is None else min(row.param, 2 * MIB)
    size = row.size if row.pattern != "thread" else min(row.size, 1 << 17)
    most = 10 if row.pattern in ("fill", "tail") else 40
    return replace(row, n=min(row.n, most), size=size, lanes=min(row.lanes, 16), param=param)


# Which pattern launches the kernels that another needs.
SAME_KERNELS = {"fill": "thread", "tail": "thread", "heap": "thread", "streams": "thread",
                "oom": "thread", "write": "thread", "frag": "mixed", "shape": "mixed",
                "renewed": "mixed", "alike": "mixed", "live": "scalar", "runs": "scalar",
                "failing": "scalar"}  # fmt: skip


def compile_only(rows: list[Row]) -> list[Row]:
    """Rows of few requests that together compile what `rows` will launch and is slow to compile."""
    slow = ("thread", "mixed", "warp", "cta", "scalar", "churn", "latency")
    shapes: dict[tuple[str, int, int, int], Row] = {}
    for row in rows:
        pattern = SAME_KERNELS.get(row.pattern, row.pattern)
        if pattern in slow and row.allocator == "devalloc":
            size, n = min(row.size, 64), min(row.n, 2)
            small = replace(row, pattern=pattern, size=size, n=n, param=None, state="warm")
            same = "scalar" if row.lanes == 1 and pattern != "latency" else pattern
            shapes.setdefault((same, row.lanes, row.warps, row.registers), small)
    return list(shapes.values())
