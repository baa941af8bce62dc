"""Run one scenario: ``python -m tests.interleaving.trial NAME [--kernels FOLDER] [--replay S]``.

With ``--kernels`` the device code is imported from that folder; ``--shrink 0`` takes the first
schedule that fails as it is. Ends with 0 if no schedule failed, 1 if one did (it is printed), 2 for
wrong usage.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from argparse import ArgumentParser
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

FAILED = 1
RAISED = 3


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m tests.interleaving.trial", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--kernels", type=Path)
    parser.add_argument("--replay", metavar="SCHEDULE")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--shrink", type=float, default=8.0, metavar="SECONDS")
    options = parser.parse_args(arguments)
    os.environ["TRITON_INTERPRET"] = "1"
    if options.kernels:
        from devalloc._locate_kernels import SiblingFolder

        sys.meta_path.insert(0, SiblingFolder(options.kernels.resolve()))
    from devalloc.testing import ScheduleError
    from tests.interleaving.scenarios import BY_NAME

    if options.name not in BY_NAME:
        parser.error(f"no scenario {options.name!r}; there are: {', '.join(BY_NAME)}")
    scenario = BY_NAME[options.name]
    started = time.monotonic()
    try:
        if options.replay is not None:
            with scenario.laboratory() as laboratory:
                laboratory.interleaving.replay(options.replay)
        else:
            for report in scenario.explore(options.scale, options.shrink):
                print(f"{scenario.name}: {report}", flush=True)
    except ScheduleError as error:
        print(f"{scenario.name} failed after {time.monotonic() - started:.1f} s\n{error}")
        return FAILED
    return 0


def run(arguments: list[str], output: Path) -> None:
    """The same in a process that was forked: what it prints goes to a file."""
    with output.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            status = main(arguments)
        except Exception:
            traceback.print_exc()
            status = RAISED
    sys.exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
