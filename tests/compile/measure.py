"""Measure every case for every target, in processes of their own.

``python -m tests.compile.measure`` prints one line per case and target. The compiler must not run
in a process that interprets kernels, as the tests' own does on a machine without a GPU, so
`measure_all` and `compile_seconds` start children. Triton caches what they compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Measured = dict[str, dict[str, Any]]


def measure_all(workers: int | None = None) -> Measured:
    """Return the usage of every "case@target", as dictionaries.

    A kernel that did not compile has the single entry "error", with the compiler's message.
    """
    workers = workers or os.cpu_count() or 1
    children = [start_child("usage", f"{part}/{workers}") for part in range(workers)]
    merged: Measured = {}
    for child in children:
        merged |= finish_child(child)
    return dict(sorted(merged.items()))


def compile_seconds() -> dict[str, float]:
    """Return CPU seconds to compile an empty kernel, and one with a malloc and a free."""
    with tempfile.TemporaryDirectory() as cache:
        return finish_child(start_child("seconds", TRITON_CACHE_DIR=cache))


def start_child(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compile.measure", *arguments]
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


def usage_of_part(part: int, parts: int) -> Measured:
    from tests.compile.cases import all_cases
    from tests.compile.targets import TARGETS, usage

    measured = {}
    for case in all_cases()[part::parts]:
        for target in TARGETS:
            try:
                row = asdict(usage(case, target))
            except Exception as error:  # whatever the compiler or its tools raise
                row = {"error": innermost(error)}
            measured[f"{case.key}@{target}"] = row
    return measured


def innermost(error: BaseException) -> str:
    """Return the message of the first cause: Triton wraps it once for every call on the way."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def seconds_of_compilation() -> dict[str, float]:
    """Time each kernel after a first one has loaded the compiler; needs an empty cache.

    CPU time of this process and of the assembler that it starts, so that a busy machine does not
    count against the kernels.
    """
    from tests.compile.cases import MANY, ONE, user_case
    from tests.compile.targets import compile_case

    def cpu_seconds() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    seconds = {}
    for name, types, warps in [
        ("warm-up", ONE, 1),
        ("empty_kernel", ONE, 4),
        ("pair_scalar", ONE, 4),
        ("pair_lanes", MANY, 4),
    ]:
        case = user_case("empty_kernel" if name == "warm-up" else name, types, warps)
        before = cpu_seconds()
        compile_case(case, "cuda90")
        seconds[name] = cpu_seconds() - before
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
            for kernel, cpu in compile_seconds().items():
                print(f"{kernel:<40} {cpu:.2f} CPU s to compile")
        case ["usage", share]:
            part, parts = map(int, share.split("/"))
            print(json.dumps(usage_of_part(part, parts)))
        case ["seconds"]:
            print(json.dumps(seconds_of_compilation()))
        case _:
            sys.exit("usage: python -m tests.compile.measure")


if __name__ == "__main__":
    main(sys.argv[1:])
