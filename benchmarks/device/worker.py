"""The child process that measures rows: a hang or a crash costs one row and a restart.

Reads one JSON job from standard input. Writes one JSON object per line to standard output:
``{"source": {...}}`` first, ``{"begin": key}`` before a row, and ``{"row": {...}}`` for each of its
operations. A row that comes out wrong becomes a row whose check says so. After an error of the
device nothing more can be measured in this process: it reports the row and exits with status 3.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from benchmarks.device.plan import Row

if TYPE_CHECKING:
    from benchmarks.device.bench import Bench

DEVICE_LOST = 3


@dataclass(frozen=True)
class Job:
    """What a worker is asked to do; `device` is "cuda" or "cpu" (the interpreter)."""

    rows: tuple[Row, ...]
    device: str
    heap_bytes: int
    rounds: int
    seed: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        values = json.loads(text)
        return Job(**{**values, "rows": tuple(Row(**row) for row in values["rows"])})


def say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def row_columns(row: Row) -> dict[str, object]:
    columns = {"row": row.name, **asdict(row)}
    return {**columns, "param": "" if row.param is None else row.param}


def failed_record(row: Row, check: str) -> dict[str, object]:
    """The columns of a row that gave no measurement: `check` says why."""
    numbers = dict.fromkeys(("median", "p20", "p80", "min", "max"), math.nan)
    return {
        **row_columns(row),
        "op": "-",
        "unit": "-",
        **numbers,
        "p99": "",
        "rounds": 0,
        "failures": -1,
        "check": " ".join(check.split())[:300],
        "peak_bytes": 0,
    }


def work(job: Job) -> None:
    """Measure the job's rows, family by family."""
    # Here, not above: Triton reads TRITON_INTERPRET when the kernels are imported.
    import torch

    from benchmarks.device.bench import Bench
    from benchmarks.device.cuda_malloc import CudaMalloc, NotAvailable
    from benchmarks.harness import provenance

    device = torch.device(job.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    source = provenance(device, job.seed, job.heap_bytes)
    say({"source": source})
    cuda = None
    if job.rows[0].allocator == "cuda":
        try:
            cuda = CudaMalloc(device, job.heap_bytes)
        except NotAvailable as error:
            for row in job.rows:
                say({"begin": row.key})
                say({"row": failed_record(row, str(error))})
            return
    debug = job.rows[0].allocator == "debug"
    with Bench(device, job.heap_bytes, job.rounds, job.seed, cuda, debug) as bench:
        for family, rows in groupby(job.rows, key=lambda row: row.family):
            for row in rows:
                say({"begin": row.key})
                for record in measure(bench, row):
                    say({"row": record})
            if bench.heap_in_use:
                rest = Row(f"at_rest_{family}", 0, 0, 0, 0)
                say({"begin": rest.pattern})
                say({"row": {**row_columns(rest), **bench.at_rest().record()}})


def measure(bench: Bench, row: Row) -> list[dict[str, object]]:
    """The records of one row. Ends the process after an error of the device."""
    from benchmarks.device.runners import run
    from benchmarks.harness import WrongResult
    from devalloc.errors import DevallocError

    try:
        return [{**row_columns(row), **samples.record()} for samples in run(bench, row)]
    except (WrongResult, DevallocError) as error:
        if bench.heap_in_use:
            bench.heap.reset()
        return [failed_record(row, f"{type(error).__name__}: {error}")]
    except Exception as error:  # the context may be unusable: the parent starts another
        say({"row": failed_record(row, f"error: {type(error).__name__}: {error}")})
        traceback.print_exc()
        os._exit(DEVICE_LOST)


def main() -> None:
    job = Job.from_json(sys.stdin.read())
    if job.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    work(job)


if __name__ == "__main__":
    main()
