"""The process of litmus tests: a hang or a crash ends it and not its parent.

Reads one JSON job from standard input. Writes one JSON object per line to standard output:
``{"source": {...}}`` first, ``{"begin": name}`` before a test and ``{"row": {...}}`` after it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from benchmarks.patches import interpreting, prepare_worker
from benchmarks.stress.litmus.plan import Job


def say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def work(job: Job) -> None:
    # Here, not above: Triton reads TRITON_INTERPRET when the kernels are imported.
    import torch

    from benchmarks.harness import provenance
    from benchmarks.stress.litmus.run import hand_over, run_shape

    device = torch.device(job.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if job.compile_only:
        for case in job.handovers:
            hand_over(replace(case, programs=1, rounds=0), 0, device, job.seed)
        for shape in job.shapes:
            run_shape(replace(shape, groups=1, turns=0), 1, device)
        return
    say({"source": provenance(device, job.seed, 0)})
    for case in job.handovers:
        say({"begin": case.name})
        outcome = hand_over(case, int(job.blocks * case.share), device, job.seed)
        columns = {"test": "hand-over", "name": case.name, "variant": job.variant,
                   "lanes": case.lanes, "warps": case.warps, "programs": case.programs}  # fmt: skip
        say({"row": {**columns, **outcome.columns()}})
    for shape in job.shapes:
        say({"begin": f"{shape.name}-{shape.order}"})
        shaped = run_shape(shape, job.blocks, device)
        columns = {"test": "shape", "name": shape.name, "variant": shape.order,
                   "lanes": shape.lanes, "warps": 1,
                   "programs": shape.groups * shape.roles}  # fmt: skip
        say({"row": {**columns, **shaped.columns()}})


def main() -> None:
    job = Job.from_dict(json.loads(sys.stdin.read()))
    prepare_worker(job.device, job.kernels)
    with interpreting(job.device):
        work(job)


if __name__ == "__main__":
    main()
