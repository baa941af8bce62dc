"""What a stress run does: heaps, phases, shapes of requests. Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

PLANTS = ("overflow", "leak", "double-free")
"""Faults of a user that a run can be told to commit, to see that it is reported."""


@dataclass(frozen=True)
class Shape:
    """How a kernel asks: `lanes` requests per program (0: one, scalar), and its warps.

    Attributes
    ----------
    step : int
        Words that a lane tags or verifies at once; a tile is ``max(lanes, 1) * step`` words.
    """

    lanes: int
    warps: int
    kernel: str = "churn"
    zeroed: bool = False

    @property
    def step(self) -> int:
        return 8 if self.lanes else 128 * self.warps

    @property
    def name(self) -> str:
        base = "zeros" if self.zeroed else self.kernel
        return f"{base}-{self.lanes or 'scalar'}x{self.warps}"


@dataclass(frozen=True)
class Sizes:
    """Random sizes of (16 + m) * 2**e bytes, m in 0..15, e in `first`..`last`. Each `flat` values
    of e are half as likely as the `flat` before; what would exceed `last` is `last`."""

    first: int
    last: int
    flat: int = 1


@dataclass(frozen=True)
class Phase:
    """A part of a run between two audits.

    Attributes
    ----------
    shapes : tuple of Shape
        One launch of each is a step; steps follow until the phase has had its operations.
    sizes : Sizes
    share : float
        Of the run's operations.
    programs : int
        Per launch.
    rounds : int
        Turns of each request in a launch.
    streams : int
        Launches of a step go round these.
    graph : bool
        Steps are captured once, with their streams as branches, and replayed.
    host : bool
        Between steps the host allocates, tags, exchanges, frees, trims and asks sizes, on a stream
        of its own, and frees addresses where no block can start.
    ballast : float
        Of the capacity: held by the host in blocks of 1 MiB during the phase.
    double_frees : int
        After the phase, all blocks are freed that many times too often, at once.
    seconds : float
        The phase ends then, even without its operations: a full heap is slow.
    """

    name: str
    shapes: tuple[Shape, ...]
    sizes: Sizes
    share: float
    programs: int = 2112
    rounds: int = 64
    streams: int = 1
    graph: bool = False
    host: bool = False
    ballast: float = 0.0
    double_frees: int = 0
    seconds: float = 20.0


@dataclass(frozen=True)
class Stage:
    """Phases on one heap with one table of boxes, of ``2**boxes_log2``."""

    capacity: int
    boxes_log2: int
    phases: tuple[Phase, ...]


@dataclass(frozen=True)
class Job:
    """What the worker is asked to do. `device` is "cuda" or "cpu" (the interpreter); `kernels` a
    folder with device code to use instead of the checkout's; `compile_only`: launch every shape
    without a round, so that it is compiled."""

    stages: tuple[Stage, ...]
    operations: int
    seed: int
    device: str
    plant: str | None = None
    kernels: str | None = None
    compile_only: bool = False

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict) -> Job:
        stages = tuple(
            Stage(**{**stage, "phases": tuple(_phase(phase) for phase in stage["phases"])})
            for stage in values["stages"]
        )
        return Job(**{**values, "stages": stages})

    def shapes(self) -> list[Shape]:
        """Every shape of the job once."""
        found = (shape for stage in self.stages for p in stage.phases for shape in p.shapes)
        return list(dict.fromkeys(found))


def _phase(values: dict) -> Phase:
    shapes = tuple(Shape(**shape) for shape in values["shapes"])
    return Phase(**{**values, "shapes": shapes, "sizes": Sizes(**values["sizes"])})


# The run -----------------------------------------------------------------------------------------

LANES = tuple(Shape(lanes, warps) for lanes, warps in ((128, 1), (64, 2), (128, 4), (256, 8)))
WIDE = Shape(512, 16)
SCALARS = tuple(Shape(0, warps) for warps in (1, 2, 4, 8, 16))
ZEROS = (Shape(128, 4, zeroed=True), Shape(0, 2, zeroed=True))
REALLOC = (Shape(64, 2, "realloc"), Shape(0, 4, "realloc"))
SMALL, MIXED, FLAT, HUGE = Sizes(0, 5), Sizes(0, 16), Sizes(0, 16, 2), Sizes(8, 22, 2)
GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
BOXES_LOG2 = 18


def by_warps(sizes: Sizes, share: float) -> list[Phase]:
    return [
        Phase(f"mixed-{shape.name}", (shape,), sizes, share, programs=270_336 // shape.lanes)
        for shape in (*LANES, WIDE)
    ]


PLENTY = (
    Phase("small", LANES[:1], SMALL, 0.35, rounds=128),
    *by_warps(MIXED, 0.07),
    Phase("double-frees", LANES[2:3], SMALL, 0.01, rounds=8, double_frees=7),
    Phase("flat", (*LANES, WIDE), FLAT, 0.03, programs=528, rounds=16),
    Phase("scalars", SCALARS, FLAT, 0.02, rounds=32),
    Phase("zeros", ZEROS, MIXED, 0.03, rounds=16),
    Phase("realloc", REALLOC, MIXED, 0.03, rounds=16),
    Phase("streams", (*LANES, WIDE, *SCALARS, *ZEROS, *REALLOC), MIXED, 0.12, programs=264,
          rounds=16, streams=8, host=True),
    Phase("graph", (LANES[0], LANES[2], SCALARS[0], REALLOC[1]), MIXED, 0.08, programs=528,
          rounds=16, streams=4, graph=True),
    Phase("huge", SCALARS[2:3], HUGE, 0.0001, programs=64, rounds=4, host=True),
)  # fmt: skip

FULL = (
    Phase("full-lanes", (LANES[0], LANES[2], WIDE), Sizes(0, 9, 2), 0.002, programs=64, rounds=4),
    Phase("full-scalars", SCALARS, Sizes(0, 13, 2), 0.002, programs=264, rounds=8),
    Phase("full-streams", (*LANES, *SCALARS, *REALLOC), Sizes(0, 14, 2), 0.002, programs=64,
          rounds=4, streams=6, host=True),
    Phase("full-graph", (LANES[0], SCALARS[1]), Sizes(0, 9, 2), 0.001, programs=64, rounds=4,
          streams=2, graph=True),
)  # fmt: skip

NEARLY_FULL = (
    Phase("ballast-lanes", (LANES[0], LANES[3]), Sizes(0, 9, 2), 0.002, programs=64, rounds=4,
          ballast=0.97),
    Phase("ballast-scalars", SCALARS[:3], Sizes(0, 14, 2), 0.002, programs=264, rounds=8,
          ballast=0.9, host=True),
)  # fmt: skip

STAGES = (
    Stage(8 * GIB, BOXES_LOG2, PLENTY),
    Stage(128 * MIB, BOXES_LOG2, FULL),
    Stage(4 * GIB, BOXES_LOG2, NEARLY_FULL),
    Stage(1 * MIB, 12, FULL[:2]),
)
"""10**9 operations, all but a hundredth with memory to spare, most of the time without."""


def scaled(stages: tuple[Stage, ...], seconds: float) -> tuple[Stage, ...]:
    """The same with another limit of time per phase."""
    return tuple(
        replace(stage, phases=tuple(replace(p, seconds=seconds) for p in stage.phases))
        for stage in stages
    )


def tiny(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Every phase so small that the interpreter is quick: heaps of 1 MiB and less, narrow
    programs, few rounds."""
    return tuple(
        Stage(
            min(stage.capacity, 4 * MIB if stage.capacity > GIB else 512 * KIB),
            6 if stage.capacity > GIB else 7,
            tuple(_tiny(phase) for phase in stage.phases),
        )
        for stage in stages
    )


def _tiny(phase: Phase) -> Phase:
    few = {(bool(s.lanes), s.kernel, s.zeroed): s for s in phase.shapes}
    shapes = tuple(replace(s, lanes=min(s.lanes, 16)) for s in few.values())
    last = min(phase.sizes.last, phase.sizes.first + 12)
    return replace(
        phase, shapes=shapes, sizes=replace(phase.sizes, last=last), programs=2, rounds=2,
        share=0.0, double_frees=min(phase.double_frees, 2), seconds=60.0,
    )  # fmt: skip


def matching(stages: tuple[Stage, ...], pattern: str) -> tuple[Stage, ...]:
    """The phases whose name contains a text, and the stages that have any."""
    kept = (
        replace(stage, phases=tuple(p for p in stage.phases if pattern in p.name))
        for stage in stages
    )
    return tuple(stage for stage in kept if stage.phases)
