"""That the reading of PTX finds a race for shared memory where there is one."""

import pytest

from tests.compile.shared_memory import functions_of, races

READ = "ld.shared.b64 %rd1, [global_smem];"
WRITE = "@%p1 st.shared.b64 [ %r1 + 0 ], %rd1;"
BARRIER = "bar.sync \t0;"
CALL = "{ // callseq 1, 0\n\t.param .b64 param0;\n\tcall.uni (retval0), inner, (param0);\n\t}"


def module(outer: list[str], inner: list[str]) -> str:
    bodies = ["\n\t".join(lines) for lines in (inner, outer)]
    return (
        ".func  (.param .b32 func_retval0) inner\n(\n\t.param .b64 inner_param_0\n)\n;\n"
        ".func  (.param .b32 func_retval0) inner(\n\t.param .b64 inner_param_0\n)\n"
        f"{{\n\t{bodies[0]}\n\tret;\n}}\n"
        f".visible .entry outer(\n\t.param .u64 outer_param_0\n)\n{{\n\t{bodies[1]}\n\tret;\n}}\n"
    )


def test_functions_are_read() -> None:
    assert functions_of(module([READ, BARRIER, CALL], [WRITE])) == {
        "inner": [("write", "")],
        "outer": [("read", ""), ("barrier", ""), ("call", "inner")],
    }


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ([WRITE, BARRIER, READ, CALL], [WRITE, BARRIER, READ], ["outer -> inner"]),
        ([WRITE, BARRIER, READ, CALL], [READ, WRITE, BARRIER], ["outer -> inner"]),
        ([WRITE, BARRIER, READ, CALL], [BARRIER, WRITE], []),
        ([WRITE, BARRIER, READ, BARRIER, CALL], [WRITE], []),
        ([CALL, WRITE], [WRITE, BARRIER, READ], ["outer <- inner"]),
        ([CALL, CALL], [WRITE, BARRIER, READ], ["outer <- inner", "outer -> inner"]),
        ([CALL, BARRIER, WRITE], [WRITE, BARRIER, READ], []),
        ([CALL, WRITE], [READ, BARRIER], []),
    ],
)
def test_races_are_found(outer: list[str], inner: list[str], expected: list[str]) -> None:
    assert sorted(races(module(outer, inner))) == sorted(expected)
