"""The process of a stress run: a hang or a crash ends it and not its parent.

Reads one JSON job from standard input. Writes one JSON object per line to standard output:
``{"source": {...}}`` first, ``{"begin": phase}`` before a phase and ``{"row": {...}}`` after it.
After a violation there is one row more, whose check says what was found, and the exit status is 1.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.patches import interpreting, prepare_worker
from benchmarks.stress.plan import Job, Stage

if TYPE_CHECKING:
    import torch

    from benchmarks.stress.run import Run, Tally

FAILED = 1


def say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def columns(stage: Stage, phase: str, tally: Tally, check: str) -> dict[str, object]:
    """One row: what a phase did, and `check`, what was found."""
    seconds = tally.seconds
    done = tally.operations
    return {
        "phase": phase,
        "capacity": stage.capacity,
        "boxes": 1 << stage.boxes_log2,
        "launches": tally.launches,
        "operations": done,
        **{name: tally.counts[name] for name in ("mallocs", "frees", "nulls", "moves", "stays")},
        "double_frees": tally.planted,
        "bytes_verified": tally.counts["words"] * 8,
        "seconds": f"{seconds:.3f}",
        "operations_per_second": f"{done / seconds:.4g}" if seconds else "",
        "violations": 0 if check == "ok" else 1,
        "check": check,
    }


def work(job: Job) -> int:
    """Run the job's stages; the exit status."""
    # Here, not above: Triton reads TRITON_INTERPRET when the kernels are imported.
    import torch

    from benchmarks.harness import provenance
    from benchmarks.stress import kernels
    from benchmarks.stress.run import Run

    # A kernel's key in Triton's cache depends on which others the process looked up before. Always
    # in one order, then, or what was compiled ahead is compiled again.
    for kernel in (kernels.churn_kernel, kernels.realloc_kernel):
        getattr(kernel, "cache_key", None)

    device = torch.device(job.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if job.compile_only:
        compile_shapes(job, device)
        return 0
    say({"source": provenance(device, job.seed, job.stages[0].capacity)})
    torch.manual_seed(job.seed)
    for stage in job.stages:
        with Run(stage, device, job.seed) as run:
            if not run_stage(job, stage, run):
                return FAILED
    return 0


def run_stage(job: Job, stage: Stage, run: Run) -> bool:
    """All phases of a stage and its end; False after a violation, which has its row."""
    from benchmarks.stress.run import Violation

    name = ""
    try:
        for index, phase in enumerate(stage.phases):
            name = phase.name
            say({"begin": name})
            if job.plant and index == 1:
                run.plant(job.plant)
            tally = run.phase(phase, int(job.operations * phase.share))
            say({"row": columns(stage, name, tally, "ok")})
        name = "finish"
        say({"begin": name})
        say({"row": columns(stage, name, run.finish(), "ok")})
    except Violation as violation:
        say({"row": columns(stage, name, run.tally, f"{violation} (seed {job.seed})")})
        return False
    return True


def compile_shapes(job: Job, device: torch.device) -> None:
    from benchmarks.stress.run import Run

    small = replace(job.stages[0], capacity=1 << 20, phases=())
    with Run(small, device, job.seed) as run:
        for stage in job.stages:
            for phase in stage.phases:
                for index, shape in enumerate(phase.shapes):
                    run.launch(replace(phase, programs=1, rounds=0), shape, run.tick, index)
        run.finish()


def main() -> None:
    job = Job.from_dict(json.loads(sys.stdin.read()))
    prepare_worker(job.device, job.kernels)
    with interpreting(job.device):
        status = work(job)
    sys.exit(status)


if __name__ == "__main__":
    main()
