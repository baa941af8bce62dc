"""What is measured: every row of the device benchmark, by name. Imports neither torch nor Triton.

A row is a pattern, a size in bytes and a number of requests; ``thread-64-1000000`` is its name,
and the name with the block width, ``thread-64-1000000@128x1`` (lanes per program x warps), its key.
The same names are used by the peers' rows and by ``targets.csv``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

WIDTHS = ((128, 1), (256, 2), (512, 4))
"""Lanes per program and warps of the patterns that allocate by lane; the first is the default."""

LANE_PATTERNS = frozenset(
    {"empty", "store", "bump", "thread", "mixed", "churn", "write", "write_base", "oom", "frag"}
)
SCALAR_WARPS = {"warp": 1, "cta": 4, "latency": 1, "create": 1}

CHURN_ROUNDS = 32
FRAG_ROUNDS = 20
OOM_HEAP_BYTES = 1 << 30
GIB = 1 << 30


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
        Requests per program (1: scalar) and warps per program.
    """

    pattern: str
    size: int
    n: int
    lanes: int
    warps: int

    @property
    def name(self) -> str:
        return f"{self.pattern}-{self.size}-{self.n}"

    @property
    def key(self) -> str:
        return f"{self.name}@{self.lanes}x{self.warps}"

    @property
    def live_bytes(self) -> int:
        """Requested bytes that live at once in the shared heap; 0 where it is not used."""
        if self.pattern in ("empty", "create", "oom", "write_base"):
            return 0
        if self.pattern in ("mixed", "frag"):
            return self.n * (16 + self.size) // 2
        return self.size if self.pattern == "latency" else self.n * self.size

    @property
    def family(self) -> str:
        """Rows of one family follow one another; the heap is checked after each family."""
        if self.pattern in ("empty", "store", "bump", "create"):
            return "floor"
        return "write" if self.pattern == "write_base" else self.pattern


def make(pattern: str, size: int, n: int, width: tuple[int, int] = WIDTHS[0]) -> Row:
    """A row; scalar patterns ignore the width."""
    lanes, warps = width if pattern in LANE_PATTERNS else (1, SCALAR_WARPS[pattern])
    return Row(pattern, size, n, lanes, warps)


def _main(width: tuple[int, int]) -> list[Row]:
    plan: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
        ("empty", (0,), (1, 1_000_000)),
        ("store", (64,), (1_000_000,)),
        ("bump", (64,), (100_000, 1_000_000)),
        ("create", (8 * GIB,), (1,)),
        ("thread", (16, 64, 256, 1024, 4096), (1_000_000,)),
        ("thread", (16, 64, 256, 1024, 4096, 8192), (100_000,)),
        ("thread", (64, 1024), (1, 32, 1024, 16_384, 65_536, 262_144, 1_048_576)),
        ("mixed", (64, 256, 1024, 4096, 8192), (100_000,)),
        ("warp", (16, 64, 256, 1024, 4096, 8192), (100_000,)),
        ("cta", (1 << 10, 1 << 14, 1 << 16, 1 << 20), (4096,)),
        ("churn", (64, 1024), (65_536, 1024)),
        ("latency", (64, 1024), (1000,)),
        ("write", (64, 16), (1_000_000,)),
        ("write_base", (64, 16), (1_000_000,)),
        ("oom", (64, 1024, 4096), (10_000,)),
        ("frag", (4096,), (100_000,)),
        ("thread", (64,), (4_194_304, 16_777_216)),
    ]
    return [make(p, size, n, width) for p, sizes, counts in plan for n in counts for size in sizes]


def _at_width(width: tuple[int, int]) -> list[Row]:
    thread = [make("thread", size, 1_000_000, width) for size in (16, 64, 256, 1024, 4096)]
    few = [make("thread", 64, n, width) for n in (1, 1024, 100_000)]
    mixed = [make("mixed", size, 100_000, width) for size in (64, 4096)]
    churn = [make("churn", 64, 65_536, width)]
    return [*thread, *few, *mixed, *churn]


def all_rows(width: tuple[int, int] | None = None) -> list[Row]:
    """Every row, in the order of measurement; what targets name comes first.

    Parameters
    ----------
    width : (int, int), optional
        Lanes per program and warps for all rows. Default: everything at the first of `WIDTHS`,
        then the rows that show what the width costs at the others.
    """
    if width is not None:
        return _main(width)
    rows = _main(WIDTHS[0])
    for other in WIDTHS[1:]:
        rows += _at_width(other)
    return rows


QUICK = frozenset(
    make(pattern, size, n).name
    for pattern, size, n in (
        ("empty", 0, 1),
        ("bump", 64, 1_000_000),
        ("create", 8 * GIB, 1),
        ("thread", 64, 1_000_000),
        ("thread", 1024, 1_000_000),
        ("thread", 64, 1024),
        ("mixed", 4096, 100_000),
        ("warp", 64, 100_000),
        ("cta", 1 << 16, 4096),
        ("churn", 64, 65_536),
        ("latency", 64, 1000),
        ("write", 64, 1_000_000),
        ("write_base", 64, 1_000_000),
        ("oom", 4096, 10_000),
        ("frag", 4096, 100_000),
    )
)
"""Names of the rows that show in a minute where one stands."""


def shrink(row: Row) -> Row:
    """The row with so few requests and such narrow programs that the interpreter is quick."""
    if row.pattern == "create":
        return replace(row, size=min(row.size, 1 << 20))
    if row.pattern == "oom":
        return replace(row, n=min(row.n, 1024), lanes=1024)
    if row.lanes == 1:
        most = {"warp": 5, "cta": 3, "latency": 4}[row.pattern]
        return replace(row, n=min(row.n, most), size=min(row.size, 1 << 17))
    return replace(row, n=min(row.n, 40), lanes=min(row.lanes, 16))


def compile_only(rows: list[Row]) -> list[Row]:
    """Rows of few requests that together compile what `rows` will launch and is slow to compile."""
    slow = ("thread", "mixed", "warp", "cta", "churn", "latency")
    shapes: dict[tuple[str, int, int], Row] = {}
    for row in rows:
        if row.pattern in slow:
            small = replace(row, n=min(row.n, 2), size=min(row.size, 64))
            shapes.setdefault((row.pattern, row.lanes, row.warps), small)
    return list(shapes.values())
