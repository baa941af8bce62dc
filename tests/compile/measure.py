"""Measure every case for every target, in processes of their own.

``python -m tests.compile.measure`` prints one line per case and target, with ``rows`` one for each
kernel of the benchmark's rows: a change to its registers changes times. The compiler must not run
in a process that interprets kernels, as the tests' own does on a machine without a GPU, so
`measure_all` and `compile_seconds` start children. Triton caches what they compile.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.compile.cases import MANY, ONE, REFERENCE, Case, all_cases, row_cases, user_case

ROOT = Path(__file__).resolve().parents[2]
Measured = dict[str, dict[str, Any]]

TARGETS = ("cuda80", "cuda90", "cuda100", "gfx942")
ALL: dict[str, tuple[Case, str]] = {
    f"{case.key}@{target}": (case, target) for case in all_cases() for target in TARGETS
}

# Kernels whose compile time is measured; how often the reference is compiled before and after each;
# how long it took on the machine whose seconds the bounds are given in.
TIMED = {"pair_scalar": ONE, "pair_lanes": MANY}
REFERENCES = 3
REFERENCE_SECONDS = 0.34


def measure_all(keys: Iterable[str] = ALL) -> Measured:
    """Return the usage of every "case@target" of these, as dictionaries.

    A kernel that did not compile has the single entry "error", with the compiler's message.
    """
    return dict(sorted(finish_child(start_child("usage", *keys)).items()))


def compile_seconds(bound: float = math.inf) -> dict[str, float]:
    """Return what it takes to compile a malloc with a free, of a number and of a block.

    In CPU seconds of a core that compiles `tests.compile.reference` in `REFERENCE_SECONDS`. What
    else runs on the machine adds to the times of all kernels, the reference too. So while one is
    over `bound` all are measured again, up to three times, and each counts by its least.
    """
    least: dict[str, float] = {}
    for _ in range(4):
        with tempfile.TemporaryDirectory() as cache:
            child = start_child("seconds", TRITON_CACHE_DIR=cache, TRITON_ALWAYS_COMPILE="1")
            found = in_reference_seconds(finish_child(child))
        least = {name: min(taken, least.get(name, taken)) for name, taken in found.items()}
        if max(least.values()) <= bound:
            break
    return least


def in_reference_seconds(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Convert seconds of this machine: what compiling a kernel takes more than compiling an empty
    one, against what the reference takes more on the average, before and after it.

    So they depend on the kernels, and not on how fast or how busy the machine is.
    """
    (empty,) = seconds["empty_kernel"]
    found = {}
    for name in TIMED:
        taken, *references = seconds[name]
        reference = sum(references) / len(references) - empty
        found[name] = REFERENCE_SECONDS * (taken - empty) / reference
    return found


def start_child(
    *arguments: str, module: str = "tests.compile.measure", **variables: str
) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=env | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish_child(child: subprocess.Popen[str]) -> dict[str, Any]:
    stdout, stderr = child.communicate()
    if child.returncode != 0:
        raise RuntimeError(f"the compiling process failed:\n{stderr}")
    return json.loads(stdout.splitlines()[-1])


# In the children


def usage_of(key: str) -> tuple[str, dict[str, Any]]:
    from tests.compile.targets import usage

    try:
        return key, asdict(usage(*ALL[key]))
    except Exception as error:  # whatever the compiler or its tools raise
        return key, {"error": innermost(error)}


def usage_of_all(keys: Iterable[str]) -> Measured:
    """Compile on every core: whichever is idle takes the next kernel."""
    import tests.compile.targets  # noqa: F401, once for all that are forked

    with multiprocessing.get_context("fork").Pool() as pool:
        return dict(pool.imap_unordered(usage_of, keys))


def usage_of_rows() -> Measured:
    """Return what the kernels of the benchmark's rows need: "name@lanes x warps", for cuda90."""
    from tests.compile.targets import usage

    return {
        f"{case.name}@{case.constexprs.get('LANES', 1)}x{case.warps}": asdict(usage(case, "cuda90"))
        for case in row_cases()
    }


def innermost(error: BaseException) -> str:
    """Return the message of the first cause: Triton wraps it once for every call on the way."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def seconds_of_compilation() -> dict[str, list[float]]:
    """Return the CPU seconds of compiling each kernel, and then those of the references around it.

    Of this process and of the assembler that it starts.
    """
    from tests.compile.targets import compile_case

    def cpu_seconds() -> float:
        whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        used = [resource.getrusage(who) for who in whose]
        return sum(usage.ru_utime + usage.ru_stime for usage in used)

    def compiling(case: Case, times: int = 1) -> list[float]:
        moments = [cpu_seconds()]
        for _ in range(times):
            compile_case(case, "cuda90")
            moments.append(cpu_seconds())
        return [end - start for start, end in itertools.pairwise(moments)]

    empty = user_case("empty_kernel", ONE, 4)
    compiling(empty)  # loads the compiler
    seconds = {empty.name: compiling(empty)}
    for name, types in TIMED.items():
        before = compiling(REFERENCE, REFERENCES)
        taken = compiling(user_case(name, types, 4))
        seconds[name] = taken + before + compiling(REFERENCE, REFERENCES)
    return seconds


def print_table(measured: Measured) -> None:
    print(f"{'case@target':<40} {'regs':>5} {'spill':>8} {'stack':>6} {'shared':>7}  atomics")
    errors: dict[str, list[str]] = {}
    for key, row in measured.items():
        if "error" in row:
            errors.setdefault(row["error"], []).append(key)
            continue
        kinds = " ".join(f"{kind}:{count}" for kind, count in row["atomics"].items())
        spills = f"{row['spill_bytes']}+{row['cold_spill_bytes']}"
        print(
            f"{key:<40} {row['registers']:>5} {spills:>8} {row['stack_bytes']:>6} "
            f"{row['shared_bytes']:>7}  {kinds or 'none'}, cold {row['cold_atomics']}"
        )
    for error, keys in errors.items():
        print(f"\nDID NOT COMPILE: {' '.join(keys)}\n{error}")


def main(arguments: list[str]) -> None:
    match arguments:
        case []:
            start = time.perf_counter()
            measured = measure_all()
            print_table(measured)
            failed = sum("error" in row for row in measured.values())
            seconds = time.perf_counter() - start
            print(f"{len(measured)} compilations in {seconds:.0f} s, {failed} failed")
            if failed:
                sys.exit(1)
            for kernel, seconds in compile_seconds().items():
                print(f"{kernel:<40} {seconds:.2f} s of the reference machine to compile")
        case ["rows"]:
            print_table(finish_child(start_child("usage-of-rows")))
        case ["usage-of-rows"]:
            print(json.dumps(usage_of_rows()))
        case ["usage", *keys]:
            print(json.dumps(usage_of_all(keys)))
        case ["seconds"]:
            print(json.dumps(seconds_of_compilation()))
        case _:
            sys.exit("usage: python -m tests.compile.measure [rows]")


if __name__ == "__main__":
    main(sys.argv[1:])
