"""Write budget.json from a measurement: ``python -m tests.compile.update [--merge]``.

Without an option the file becomes what this version of Triton makes of the kernels. With --merge
limits only rise and no line goes away: run it under the oldest supported Triton afterwards, so
that the budget holds for both.
"""

import sys

from tests.compile import budget
from tests.compile.measure import measure_all, print_table


def main(arguments: list[str]) -> None:
    if arguments not in ([], ["--merge"]):
        sys.exit("usage: python -m tests.compile.update [--merge]")
    measured = measure_all()
    print_table(measured)
    if any("error" in row for row in measured.values()):
        sys.exit("some kernels did not compile; budget.json is unchanged")
    limits = {key: budget.limits_of(row) for key, row in measured.items()}
    if arguments:
        old = budget.load()
        for key in old.keys() & limits.keys():
            limits[key] = {name: max(old[key][name], new) for name, new in limits[key].items()}
        limits = old | limits
    budget.save(limits)
    print(f"wrote {len(limits)} lines to {budget.BUDGET.name}; read the diff before committing it")


if __name__ == "__main__":
    main(sys.argv[1:])
