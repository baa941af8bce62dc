"""Which litmus tests there are. Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from benchmarks.patches import Patch

KIB, MIB = 1 << 10, 1 << 20
ORDERS = ("plain", "relaxed", "returned", "fenced")
MUST_HOLD = frozenset({"returned", "fenced"})
"""The orders that the heap relies on; the others show that the test can fail."""


@dataclass(frozen=True)
class Handover:
    """Blocks of ``2**smallest_log2`` bytes and up to ``span - 1`` powers of two more change hands.

    Attributes
    ----------
    lanes, warps : int
        Requests per program (0: one, scalar), and warps.
    counters : int
        Of 16 bytes each, incremented in a block, at most.
    programs, rounds : int
        Of one launch.
    capacity : int
        Bytes of the heap: little more than what is held at once, so that blocks change hands soon.
    share : float
        Of the blocks asked for: less where one takes long.
    """

    name: str
    lanes: int
    warps: int
    counters: int
    smallest_log2: int
    span: int
    programs: int
    rounds: int
    capacity: int
    share: float = 1.0


@dataclass(frozen=True)
class Shape:
    """A classic litmus shape under one order of accesses; `groups` of programs at once."""

    name: str
    order: str
    groups: int = 261
    lanes: int = 128
    turns: int = 2048

    @property
    def roles(self) -> int:
        return 3 if self.name == "WRC" else 2


HANDOVERS = (
    Handover("lanes-16", 128, 1, 1, 4, 1, 528, 256, 4 * MIB),
    Handover("lanes-64", 128, 4, 4, 6, 1, 528, 256, 16 * MIB),
    Handover("lanes-1024", 32, 1, 64, 10, 1, 528, 128, 32 * MIB, 0.2),
    Handover("lanes-mixed", 64, 2, 32, 4, 6, 528, 128, 32 * MIB, 0.5),
    Handover("scalar-512", 0, 1, 32, 9, 1, 2112, 256, 4 * MIB, 0.1),
    Handover("scalar-4096", 0, 8, 256, 12, 1, 1056, 256, 16 * MIB, 0.1),
    Handover("runs", 0, 4, 1024, 16, 3, 528, 64, 256 * MIB, 0.01),
)
SHAPES = tuple(Shape(name, order) for name in ("MP", "WRC", "SB") for order in ORDERS)

_FENCE = Patch("atomics.py", 'f"fence.{sem}.gpu; mov.b32 $0, $1;"', '"mov.b32 $0, $1;"')
_BARRIERS = Patch("atomics.py", "    tl.debug_barrier()\n", "", times=2)
_MALLOC = Patch(
    "allocation.py", '    fence(layout.hint_ptr(heap), "acquire")\n', "    tl.debug_barrier()\n"
)
_FREE = Patch("freeing.py", '    fence(heap + ERRORS, "release")\n', "    tl.debug_barrier()\n")

WEAKENED: dict[str, tuple[Patch, ...]] = {
    "free-without-fence": (_FREE,),
    "malloc-without-fence": (_MALLOC,),
    "no-fences": (_FENCE,),
    "no-barriers": (_FENCE, _BARRIERS),
}
"""Versions of the device code that lack order: the hand-over should fail under them."""


@dataclass(frozen=True)
class Job:
    """What the worker is asked to do. `kernels`: a folder with device code to use instead of the
    checkout's, and `variant` its name; `compile_only`: launch everything once, without a turn."""

    handovers: tuple[Handover, ...]
    shapes: tuple[Shape, ...]
    blocks: int
    seed: int
    device: str
    variant: str = "heap"
    kernels: str | None = None
    compile_only: bool = False

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict) -> Job:
        handovers = tuple(Handover(**item) for item in values["handovers"])
        shapes = tuple(Shape(**item) for item in values["shapes"])
        return Job(**{**values, "handovers": handovers, "shapes": shapes})


def tiny(job: Job) -> Job:
    """So small that the interpreter is quick."""
    handovers = tuple(
        replace(case, lanes=min(case.lanes, 8), counters=min(64, case.counters), programs=3,
                rounds=3, capacity=min(case.capacity, MIB))
        for case in job.handovers
    )  # fmt: skip
    shapes = tuple(replace(shape, groups=1, lanes=4, turns=4) for shape in job.shapes)
    return replace(job, handovers=handovers, shapes=shapes, blocks=0)
