"""Whether an ordinary heap's code knows of debug heaps: ``python -m tests.compile.release``.

Prints, as JSON, per kernel of `undispatched`: "same" (is the PTX of the kernel of that name in
`user_kernels` the same?) and "functions" (names of the PTX functions of the latter); and the same
for a debug heap under "name+debug".
"""

import json
import re
from dataclasses import replace

from tests.compile.cases import COMPARED, DEBUG_HEAP, HOT, OTHER, Case, user_case
from tests.compile.targets import compile_case

# What depends on where in the source an instruction comes from.
SOURCE_LINES = re.compile(r"^\s*(\.loc|\.file|\$L__|//).*$\n?|//.*$", re.M)


def ptx_of(case: Case) -> str:
    ptx = compile_case(case, "cuda90").asm["ptx"]
    return SOURCE_LINES.sub("", ptx.split(".section\t.debug")[0])


def functions(ptx: str) -> list[str]:
    return sorted(set(re.findall(r"\.(?:func|entry)\s+(?:\([^)]*\)\s*)?([\w$.]+)", ptx)))


def compare(name: str, heap: str) -> dict[str, object]:
    types = (HOT | OTHER)[name] | {"heap": heap}
    case = user_case(name, types, 4)
    dispatched = ptx_of(case)
    if heap == DEBUG_HEAP:
        return {"functions": functions(dispatched)}
    plain = ptx_of(replace(case, module="tests.compile.undispatched"))
    return {"same": dispatched == plain, "functions": functions(dispatched)}


def main() -> None:
    found = {name: compare(name, "*i64") for name in COMPARED}
    found["realloc_scalar+debug"] = compare("realloc_scalar", DEBUG_HEAP)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
