"""Compiles a malloc and a free by blocks whose mask is the constant False; prints the name of the
kernel as JSON."""

import json

from tests.compile.cases import HEAP, user_case
from tests.compile.targets import compile_case


def main() -> None:
    compiled = compile_case(user_case("never_lanes", HEAP | {"out": "*i64"}, 4), "cuda90")
    print(json.dumps({"name": compiled.metadata.name}))


if __name__ == "__main__":
    main()
