"""That the reading of PTX finds a race for shared memory where there is one, and only there; and
that of AMD's assembly a release that is too early."""

import pytest

from tests.compile.shared_memory import Effect, Reading, races
from tests.compile.targets import releases_early

READ = "ld.shared.b64 %rd1, [global_smem];"
WRITE = "@%p1 st.shared.b64 [ %r1 + 0 ], %rd1;"
BARRIER = "bar.sync \t0;"
CALL = "{ // callseq 1, 0\n\t.param .b64 param0;\n\tcall.uni (retval0), inner, (param0);\n\t}"
RETURN = "ret;"
# Reads, or calls and returns: never both.
EITHER = ["@%p1 bra \t$L__BB0_1;", "bra.uni \t$L__BB0_2;", "\n$L__BB0_1:", CALL, RETURN]
EITHER += ["\n$L__BB0_2:", READ]
# Reads at the end of each turn of a loop, and calls at its beginning.
LOOP = ["\n$L__BB0_3:", CALL, READ, "@%p2 bra \t$L__BB0_3;"]


def module(outer: list[str], inner: list[str]) -> str:
    bodies = ["\n\t".join([*lines, RETURN]) for lines in (inner, outer)]
    return (
        ".func  (.param .b32 func_retval0) inner\n(\n\t.param .b64 inner_param_0\n)\n;\n"
        ".func  (.param .b32 func_retval0) inner(\n\t.param .b64 inner_param_0\n)\n"
        f"{{\n\t{bodies[0]}\n}}\n"
        f".visible .entry outer(\n\t.param .u64 outer_param_0\n)\n{{\n\t{bodies[1]}\n}}\n"
    )


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ([], Effect(writes=False, passes=True, reads=False)),
        ([READ, WRITE, BARRIER], Effect(writes=True, passes=False, reads=False)),
        ([BARRIER, WRITE, BARRIER, READ], Effect(writes=False, passes=False, reads=True)),
        (["@%p1 bra $L__BB0_1;", BARRIER, "\n$L__BB0_1:", WRITE], Effect(True, True, False)),
        (["bra.uni $L__BB0_1;", WRITE, "\n$L__BB0_1:"], Effect(False, True, False)),
    ],
)
def test_effects_of_calls(inner: list[str], expected: Effect) -> None:
    assert Reading(module([CALL], inner)).effect("inner") == expected


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ([WRITE, BARRIER, READ, CALL], [WRITE, BARRIER, READ], ["outer -> inner"]),
        ([WRITE, BARRIER, READ, CALL], [READ, WRITE, BARRIER], ["outer -> inner"]),
        ([WRITE, BARRIER, READ, CALL], [BARRIER, WRITE], []),
        ([WRITE, BARRIER, READ, BARRIER, CALL], [WRITE], []),
        ([CALL, WRITE], [WRITE, BARRIER, READ], ["outer <- inner"]),
        ([CALL, CALL], [WRITE, BARRIER, READ], ["outer <- inner"]),
        ([CALL, BARRIER, WRITE], [WRITE, BARRIER, READ], []),
        ([CALL, WRITE], [READ, BARRIER], []),
        ([READ, *EITHER], [WRITE], ["outer -> inner"]),
        ([*EITHER, WRITE], [WRITE, BARRIER, READ], []),
        (LOOP, [WRITE, BARRIER], ["outer -> inner"]),
        ([*LOOP[:-1], BARRIER, LOOP[-1]], [WRITE, BARRIER], []),
    ],
)
def test_races_are_found(outer: list[str], inner: list[str], expected: list[str]) -> None:
    assert races(module(outer, inner)) == expected


WAIT, MEET, RELEASE = "\ts_waitcnt vmcnt(0) lgkmcnt(0)", "\ts_barrier", "\tbuffer_wbl2 sc1"
ATOMIC, SWAP = "\tglobal_atomic_or_x2 v[0:1], v[2:3], off", "\tglobal_atomic_cmpswap_x2 v[0:1]"
STORE, SCALAR_WAIT = "\tglobal_store_dwordx2 v[0:1], v[2:3], off", "\ts_waitcnt lgkmcnt(0)"


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        ([STORE, WAIT, MEET, RELEASE, ATOMIC], False),
        ([STORE, WAIT, MEET, SCALAR_WAIT, MEET, "\tv_mov_b32 v0, 0", RELEASE, ATOMIC], False),
        ([STORE, MEET, RELEASE, ATOMIC], True),
        ([STORE, SCALAR_WAIT, MEET, RELEASE, ATOMIC], True),
        ([STORE, WAIT, RELEASE, WAIT, ATOMIC], True),
        ([STORE, WAIT, MEET, STORE, RELEASE, ATOMIC], True),
        ([STORE, WAIT, MEET, RELEASE, ATOMIC, WAIT, STORE, MEET, RELEASE, ATOMIC], True),
        ([STORE, MEET, RELEASE, SWAP, ATOMIC], False),
        ([STORE, MEET], False),
    ],
)
def test_releases_for_which_not_all_waves_have_waited(lines: list[str], early: bool) -> None:
    assert releases_early("\n".join(lines)) == early
