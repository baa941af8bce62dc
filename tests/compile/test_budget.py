"""Every kernel compiles for every target, within the committed budget of resources; and those of
an ordinary heap are the same code as if there were no debug heaps.

When a change is worth its cost, regenerate the budget (see `tests.compile.update`) and say in the
commit what was gained.
"""

import ast
from typing import Any

import pytest

from tests.compile import budget
from tests.compile.cases import (
    COMPARED,
    ENTRY_POINTS,
    EVERYWHERE,
    FULL_TARGET,
    PROBE,
    is_long,
)
from tests.compile.measure import (
    ALL,
    REFERENCE_SECONDS,
    ROOT,
    TARGETS,
    TIMED,
    Measured,
    compile_seconds,
    finish_child,
    in_reference_seconds,
    measure_all,
    start_child,
)
from tests.compile.targets import work_of

# Of a malloc with a free, of a number and of a block: see `Usage.work`, which is the same on every
# machine. (Before the compact heap they were 7,000 and 21,000, and took less than 3 s.)
MAX_WORK = {"pair_scalar/w4@cuda90": 65_000, "pair_lanes/w4@cuda90": 415_000}
# The time of the same: see `compile_seconds` for whose seconds. (A block's was 7.7 and 8.3 on an
# idle machine, and 5.3 to 7.1 beside other processes, which slow the reference more: so the long
# suite has it, and the short one the work.)
MAX_COMPILE_SECONDS = 8.0
# Kernels that do not spill, with the functions that they call. Those that allocate spill a little
# around calls of cold functions; how much, the budget says.
SPILL_NOTHING = {"free_scalar", "usable_size_scalar", "usable_size_lanes", PROBE.name}

pytestmark = [pytest.mark.slow, pytest.mark.compile, pytest.mark.timeout(1800)]


def marked(key: str, *marks: pytest.MarkDecorator) -> Any:
    """A "case@target" with the marks that say in which runs it is compiled."""
    case, target = ALL[key]
    chosen = [*marks]
    if is_long(case, target):
        chosen.append(pytest.mark.long)
    # (For AMD what an ordinary heap calls: debug heaps bring nothing that is compiled otherwise.)
    if case.key in EVERYWHERE and (target == "cuda90" or (target == "gfx942" and not case.debug)):
        chosen.append(pytest.mark.oldest)
    return pytest.param(key, marks=chosen)


KEYS = [marked(key) for key in ALL]


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> Measured:
    """What the selected tests ask for, as all takes long."""
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    keys = {params["key"] for params in asked if "key" in params}
    keys |= {f"{PROBE.key}@{params['target']}" for params in asked if "target" in params}
    full = {params["full_target"] for params in asked if "full_target" in params}
    keys |= {key for key, at in ALL.items() if at[1] in full and not is_long(*at)}
    return measure_all(key for key in ALL if key in keys)


@pytest.mark.parametrize("key", KEYS)
def test_within_budget(measured: Measured, key: str) -> None:
    row = measured[key]
    assert "error" not in row, f"{key} does not compile: {row['error']}"
    over = budget.excess(row, budget.load()[key])
    assert not over, f"{key} exceeds its budget: {'; '.join(over)}"


SPILLS = pytest.mark.xfail(reason="values that are live across calls of cold functions spill")


@pytest.mark.parametrize(
    "key",
    [
        marked(key) if key.split("/")[0] in SPILL_NOTHING else marked(key, SPILLS)
        for key in ALL
        if key.endswith("/w4@cuda90")
    ],
)
def test_no_spills_at_four_warps(measured: Measured, key: str) -> None:
    row = measured[key]
    assert (row.get("spill_bytes"), row.get("cold_spill_bytes")) == (0, 0)


@pytest.mark.parametrize("key", [marked(key) for key in ALL if not key.startswith(PROBE.key)])
def test_warps_do_not_race(measured: Measured, key: str) -> None:
    """For shared memory at calls; on AMD, with the release of what they have stored."""
    assert measured[key].get("races") == []


@pytest.mark.oldest
@pytest.mark.parametrize("target", ["gfx942"])
def test_a_release_of_one_wave_is_found(measured: Measured, target: str) -> None:
    """The probe's atomics release, as Triton's do when nothing is said, and no fence is before."""
    assert measured[f"{PROBE.key}@{target}"]["races"] != []


@pytest.mark.parametrize("full_target", [FULL_TARGET])
def test_every_function_is_compiled_for_every_target(measured: Measured, full_target: str) -> None:
    """The kernels of `EVERYWHERE` call whatever any of those kernels calls that are measured."""
    rows = {ALL[key][0].key: row for key, row in measured.items() if ALL[key][1] == full_target}
    called = {name: set(row["functions"]) for name, row in rows.items()}
    assert set.union(*(called[name] for name in EVERYWHERE)) == set.union(*called.values())


def test_budget_has_no_stale_lines() -> None:
    assert sorted(budget.load()) == sorted(ALL)


@pytest.mark.parametrize("target", TARGETS)
def test_hot_and_cold_atomics_are_told_apart(measured: Measured, target: str) -> None:
    row = measured[f"{PROBE.key}@{target}"]
    assert row["atomics"] == {"add": 1, "or": 1}
    assert row["cold_atomics"] == 1


@pytest.mark.parametrize("target", ["cuda90"])
def test_a_planted_excess_is_found(measured: Measured, target: str) -> None:
    row = measured[f"{PROBE.key}@{target}"]
    limits = budget.limits_of(row)
    assert budget.excess(row, limits) == []
    one_more = {**row, "atomics": {**row["atomics"], "planted": 1}}
    assert budget.excess(one_more, limits) == [
        f"atomics: {limits['atomics'] + 1}, budget {limits['atomics']}"
    ]


@pytest.mark.parametrize("key", MAX_WORK)
def test_work_of_compiling_malloc_and_free(measured: Measured, key: str) -> None:
    assert measured[key]["work"] <= MAX_WORK[key]


def test_work_grows_faster_than_a_function() -> None:
    accesses = (
        "    %1 = tt.load %0 : tensor<32x!tt.ptr<i64>> loc(#loc1)",
        "    %2 = tt.atomic_rmw add, relaxed, gpu, %0, %1 :"
        " (tensor<32x!tt.ptr<i64>>, tensor<32xi64>) -> tensor<32xi64> loc(#loc2)",
        "    %3 = tt.load %p : !tt.ptr<i64> loc(#loc3)",  # not of a block
    )
    head, end = "  tt.func private @f(%p: !tt.ptr<i64>) attributes {noinline = true} {", "  }"
    apart = "\n".join(2 * [head, *accesses, end])
    together = "\n".join([head, *accesses, *accesses, end])
    assert (work_of(apart), work_of(together)) == (2 * 3 * 2, 6 * 4)


@pytest.fixture(scope="module")
def seconds() -> dict[str, float]:
    return compile_seconds(MAX_COMPILE_SECONDS)


@pytest.mark.long
@pytest.mark.parametrize("kernel", TIMED)
def test_compile_time_of_malloc_and_free(seconds: dict[str, float], kernel: str) -> None:
    assert seconds[kernel] <= MAX_COMPILE_SECONDS


def test_compile_time_does_not_depend_on_the_machine() -> None:
    found = {
        "empty_kernel": [0.1],
        "pair_scalar": [4.3, 0.7, 0.9],
        "pair_lanes": [5.0, 0.8, 0.8],
    }
    seconds = in_reference_seconds(found)
    assert seconds["pair_scalar"] == pytest.approx(6 * REFERENCE_SECONDS)
    slower = {name: [3 * second for second in taken] for name, taken in found.items()}
    assert in_reference_seconds(slower) == pytest.approx(seconds)
    # Of what runs at the same time as one kernel and its references, the other's times say nothing.
    busy = {**found, "pair_lanes": [9.9, 1.5, 1.5]}
    assert in_reference_seconds(busy) == pytest.approx({**seconds, "pair_lanes": 2.38})
    twice = {**found, "pair_lanes": [9.9, 0.8, 0.8]}
    assert in_reference_seconds(twice)["pair_lanes"] == pytest.approx(2 * seconds["pair_lanes"])


def entry_points() -> set[str]:
    """Return "module.name" of every function called `*_kernel` in the project's sources."""
    found = set()
    for folder, package in (("devalloc", "devalloc"), ("kernels", "devalloc.kernels")):
        for path in (ROOT / folder).glob("**/*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            module = ".".join((package, *parts)).removesuffix(".__init__")
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                    found.add(f"{module}.{node.name}")
    return found


def test_every_entry_point_is_compiled() -> None:
    assert entry_points() == set(ENTRY_POINTS)


# An ordinary heap's code ------------------------------------------------------------------------

DEBUG_FOLDER = "kernels_$_debug_$_"


@pytest.fixture(scope="module")
def compared(measured: Measured) -> dict[str, dict[str, Any]]:
    """After the measurement: then half of what it compiles is in Triton's cache."""
    return finish_child(start_child(module="tests.compile.release"))


def debug_functions(names: list[str]) -> list[str]:
    return [name for name in names if DEBUG_FOLDER in name]


@pytest.mark.parametrize("kernel", COMPARED)
def test_the_same_code_as_without_debug_heaps(
    compared: dict[str, dict[str, Any]], kernel: str
) -> None:
    assert compared[kernel]["same"]
    assert debug_functions(compared[kernel]["functions"]) == []


def test_a_debug_heap_has_other_code(compared: dict[str, dict[str, Any]]) -> None:
    """Else the test above would look for names that there are not."""
    assert debug_functions(compared["realloc_scalar+debug"]["functions"])
