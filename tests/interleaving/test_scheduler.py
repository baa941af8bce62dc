"""The scheduler itself, on kernels that have nothing to do with the heap."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from devalloc import InvalidArgument
from devalloc.testing import (
    PCT,
    Exhaustive,
    Interleaving,
    Launch,
    Random,
    Run,
    ScheduleError,
    Strategy,
    quick_interpreter,
    schedules,
)
from tests.conftest import ON_GPU

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.oldest,
    pytest.mark.skipif(ON_GPU, reason="interleaves interpreted kernels"),
]

STRATEGIES = [Random(), Random(stay=0.5), PCT(depth=2), Exhaustive(1), Exhaustive(None)]


@pytest.fixture(autouse=True, scope="module")
def quick() -> None:
    """Not here: tests compare with Triton's interpreter as it comes."""


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@triton.jit
def racy_kernel(counter):
    tl.store(counter, tl.load(counter) + 1)


@triton.jit
def atomic_kernel(counter):
    tl.atomic_add(counter, 1)


@triton.jit
def read_then_write_kernel(counter):
    """Lost updates between two atomics."""
    value = tl.atomic_or(counter, tl.full((), 0, tl.int64))
    tl.atomic_xchg(counter, value + 1)


@triton.jit
def spin_lock_kernel(lock, counter):
    one = tl.full((), 1, tl.int64)
    while tl.atomic_cas(lock, one - 1, one) != 0:
        pass
    tl.store(counter, tl.load(counter) + 1)
    tl.atomic_xchg(lock, one - 1)


@triton.jit
def two_locks_kernel(first, second):
    one = tl.full((), 1, tl.int64)
    while tl.atomic_cas(first, one - 1, one) != 0:
        pass
    while tl.atomic_cas(second, one - 1, one) != 0:
        pass
    tl.atomic_xchg(second, one - 1)
    tl.atomic_xchg(first, one - 1)


@triton.jit
def mix_kernel(word, factor, STEPS: tl.constexpr):
    """Changes that do not commute, so that every order leaves another value."""
    for step in range(STEPS):
        value = tl.atomic_or(word, tl.full((), 0, tl.int64))
        tl.atomic_xchg(word, value * 10 + factor + step + tl.program_id(0))


def must_be(counter: torch.Tensor, value: int) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        assert counter.item() == value, f"counted {counter.item()}"

    return check


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_lost_updates_are_found_and_shrunk(strategy: Strategy) -> None:
    counter = words(0)
    lab = Interleaving(Launch(read_then_write_kernel, (4,), counter), check=must_be(counter, 4))
    with pytest.raises(ScheduleError, match="counted") as failure:
        lab.explore(strategy, schedules=200)
    message = str(failure.value)
    assert "1 preemptions, 8 steps" in message
    assert f'replay("{failure.value.schedule}")' == message.splitlines()[-1]
    assert "before atomic_xchg of" in message
    assert "read_then_write_kernel" in message
    assert isinstance(failure.value.__cause__, AssertionError)
    with pytest.raises(ScheduleError, match="counted"):
        lab.replay(failure.value.schedule)
    assert counter.item() == 0


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_correct_kernels_pass(strategy: Strategy) -> None:
    counter, lock = words(0), words(0)
    atomic = Interleaving(Launch(atomic_kernel, (3,), counter), check=must_be(counter, 3))
    assert atomic.explore(strategy, schedules=50).outcomes == 1
    locked = Interleaving(
        Launch(spin_lock_kernel, (3,), lock, counter),
        check=must_be(counter, 3),
        switch_at="all",
    )
    report = locked.explore(strategy, schedules=50)
    assert report.outcomes == 1
    assert report.schedules > 10
    assert (counter.item(), lock.item()) == (0, 0)


def test_plain_accesses_are_switch_points_only_if_asked_for() -> None:
    counter = words(0)
    launch = Launch(racy_kernel, (2,), counter)
    Interleaving(launch, check=must_be(counter, 2)).explore(Exhaustive(None))
    for switch_at in ("writes", "all"):
        lab = Interleaving(launch, check=must_be(counter, 2), switch_at=switch_at)
        with pytest.raises(ScheduleError, match="counted 1"):
            lab.explore(Exhaustive(None))
    steps = {
        switch_at: Interleaving(launch, switch_at=switch_at).explore(Random(), 1).steps
        for switch_at in ("atomics", "writes", "all")
    }
    assert steps == {"atomics": 0, "writes": 2, "all": 4}


def test_exhaustive_meets_every_outcome() -> None:
    """Against an enumeration of all orders of the accesses."""

    def expected() -> set[int]:
        found = set()
        for order in set(itertools.permutations([0] * 4 + [1] * 4)):
            word, value, at = 7, [0, 0], [0, 0]
            for program in order:
                step, store = divmod(at[program], 2)
                if store:
                    word = value[program] * 10 + step + (1, 4)[program]
                else:
                    value[program] = word
                at[program] += 1
            found.add(word)
        return found

    word = words(7)
    met: set[int] = set()
    lab = Interleaving(
        Launch(mix_kernel, (1,), word, 1, STEPS=2),
        Launch(mix_kernel, (1,), word, 4, STEPS=2),
        check=lambda run: met.add(word.item()),
    )
    assert lab.explore(Exhaustive(None)).complete
    assert met == expected()
    found = set(met)
    met.clear()
    lab.explore(Exhaustive(1))
    assert met < found
    met.clear()
    lab.explore(Random(), schedules=3000)
    assert met == found


def test_a_deadlock_names_who_waits_where() -> None:
    first, second = words(0), words(0)
    lab = Interleaving(
        Launch(two_locks_kernel, (1,), first, second),
        Launch(two_locks_kernel, (1,), second, first),
        step_limit=300,
    )
    with pytest.raises(ScheduleError) as failure:
        lab.explore(PCT(depth=2), schedules=500)
    message = str(failure.value)
    assert "no end after 300 steps" in message
    for program in (0, 1):
        assert f"program {program} (two_locks_kernel (0, 0, 0)) spins at atomic_cas" in message
    assert "test_scheduler.py" in message
    with pytest.raises(ScheduleError, match="no end"):
        lab.replay(failure.value.schedule)


@pytest.mark.parametrize("strategy", [Random(seed=3), PCT(depth=4, seed=3)], ids=repr)
def test_the_same_seed_chooses_the_same_schedules(strategy: Strategy) -> None:
    def chosen() -> list[str]:
        word = words(0)
        seen: list[str] = []
        lab = Interleaving(
            Launch(mix_kernel, (3,), word, 3, STEPS=1),
            check=lambda run: seen.append(run.schedule),
        )
        lab.explore(strategy, schedules=20)
        return seen

    first = chosen()
    assert len(first) > 3
    assert chosen() == first


def test_replay_runs_exactly_what_the_line_says() -> None:
    word = words(0)
    results: dict[str, int] = {}

    def check(run: Run) -> None:
        results[run.schedule] = word.item()

    lab = Interleaving(
        Launch(mix_kernel, (1,), word, 1, STEPS=1),
        Launch(mix_kernel, (1,), word, 2, STEPS=1),
        check=check,
    )
    assert lab.replay("0*1 1*1 0 1").schedule == "0*1 1*1 0*1 1*1"
    assert lab.replay("1").schedule == "1*2 0*2"
    assert lab.replay("").schedule == "0*2 1*2"
    # A segment of a program that has ended is passed over.
    assert lab.replay("0*9 1*1").schedule == "0*2 1*2"
    assert results == {"0*1 1*1 0*1 1*1": 2, "1*2 0*2": 21, "0*2 1*2": 12}


@pytest.mark.parametrize("line", ["zero", "0*x", "0*0", "-1*3", "0 *"])
def test_a_line_that_is_no_schedule_is_refused(line: str) -> None:
    with pytest.raises(InvalidArgument, match="not a schedule"):
        Interleaving(Launch(atomic_kernel, (1,), words(0))).replay(line)


def test_schedules_print_as_they_are_read() -> None:
    parts = [(0, 3), (12, schedules.FOREVER), (1, 1)]
    assert schedules.text(parts) == "0*3 12 1*1"
    assert schedules.parse("0*3 12 1*1") == parts


@triton.jit
def journal_kernel(word, journal):
    program = tl.program_id(0)
    tl.store(journal + program, -1)
    found = tl.atomic_add(word, 1)
    tl.store(journal + program, found)


def test_journal_tells_events_in_their_order() -> None:
    word, journal = words(0), torch.zeros(2, dtype=torch.int32)
    lab = Interleaving(Launch(journal_kernel, (2,), word, journal), journal=journal)
    run = lab.replay("1*2 0*3")
    assert run.events == ((1, 1, -1), (0, 0, -1), (0, 0, 1), (1, 1, 0))


def test_invariants_hold_after_every_step() -> None:
    counter, lock = words(0), words(0)
    launch = Launch(spin_lock_kernel, (2,), lock, counter)
    seen: set[tuple[int, int]] = set()

    def look(run: Run) -> None:
        seen.add((lock.item(), counter.item()))
        lock.fill_(5)  # undone

    Interleaving(launch, invariant=look).explore(Exhaustive(None))
    assert seen == {(1, 1), (0, 1), (1, 2), (0, 2)}

    def never_two(run: Run) -> None:
        assert counter.item() < 2, "two"

    with pytest.raises(ScheduleError, match="two"):
        Interleaving(launch, invariant=never_two).explore(Random(), schedules=1)
    assert (lock.item(), counter.item()) == (0, 0)


def test_checks_may_write_and_are_asked_once_for_each_outcome() -> None:
    counter = words(0)
    calls: list[int] = []

    def check(run: Run) -> None:
        calls.append(counter.item())
        counter.fill_(100)

    lab = Interleaving(Launch(atomic_kernel, (2,), counter), check=check)
    lab.explore(Random(), schedules=5)
    lab.explore(Exhaustive(None))
    assert calls == [2, 2]
    assert counter.item() == 0


@triton.jit
def wild_kernel(counter, far):
    if tl.atomic_add(counter, 1) == 1:
        tl.atomic_add(counter + far, 1)


def test_wild_accesses_are_refused_before_they_happen() -> None:
    counter = words(0)
    lab = Interleaving(Launch(wild_kernel, (2,), counter, 1 << 40))
    with pytest.raises(ScheduleError, match=r"WildAccess.*outside of the launches' tensors"):
        lab.explore(Random(), schedules=10)
    whole = torch.zeros(1 << 10, dtype=torch.int64)
    part = whole[:1]
    assert part.untyped_storage().nbytes() == whole.numel() * 8
    Interleaving(Launch(wild_kernel, (2,), part, 1023)).explore(Random(), schedules=2)
    other = words(0, 0)
    near = (other.data_ptr() - counter.data_ptr()) // 8
    launch = Launch(wild_kernel, (2,), counter, near)
    Interleaving(launch, memory=[(other.data_ptr(), 16)]).explore(Random(), schedules=2)
    assert other.tolist() == [0, 0]


@triton.jit
def failing_kernel(counter):
    if tl.atomic_add(counter, 1) == 2:
        tl.static_assert(False, "third")


def test_a_program_that_raises_fails_the_schedule() -> None:
    counter = words(0)
    with pytest.raises(ScheduleError, match=r"raised AssertionError.*third") as failure:
        Interleaving(Launch(failing_kernel, (3,), counter)).explore(Random(), schedules=1)
    assert "program 2 (failing_kernel (2, 0, 0)) raises" in str(failure.value)


@triton.jit
def pair_kernel(pair, torn, writes):
    """One program adds to both words at once; the other looks at both at once."""
    lane = tl.arange(0, 2)
    if tl.program_id(0) < writes:
        tl.atomic_add(pair + lane, tl.full((2,), 1, tl.int64))
    else:
        seen = tl.atomic_or(pair + lane, tl.zeros((2,), tl.int64))
        tl.store(torn, tl.max(seen, axis=0) - tl.min(seen, axis=0))


@pytest.mark.parametrize("split", [False, True])
def test_blocks_can_be_torn_when_split(split: bool) -> None:
    pair, torn = words(0, 0), words(0)
    met: set[int] = set()
    lab = Interleaving(
        Launch(pair_kernel, (2,), pair, torn, 1),
        check=lambda run: met.add(torn.item()),
        split_blocks=split,
    )
    lab.explore(Exhaustive(None))
    assert met == ({0, 1} if split else {0})


@triton.jit
def masked_kernel(source, target, undefined):
    lane = tl.arange(0, 4)
    inside = lane < 2
    loaded = tl.load(source + lane, mask=inside, other=9)
    old = tl.atomic_add(source + lane, loaded, mask=inside)
    none = tl.atomic_add(source + lane, loaded, mask=lane < 0)
    tl.store(target + lane, loaded)
    tl.store(target + 4 + lane, old, mask=inside)
    tl.store(undefined + lane, none)


def test_masks_mean_what_they_mean_in_a_launch() -> None:
    source, target, undefined = (
        words(1, 2, 3, 4),
        torch.zeros(8, dtype=torch.int64),
        words(*range(4)),
    )
    masked_kernel[(1,)](source, target, undefined)
    expected = (source.tolist(), target.tolist())
    source.copy_(words(1, 2, 3, 4))
    target.zero_()
    seen = []
    for split in (False, True):
        lab = Interleaving(
            Launch(masked_kernel, (1,), source, target, undefined),
            check=lambda run: seen.append((source.tolist(), target.tolist())),
            split_blocks=split,
        )
        lab.explore(Random(), schedules=1)
    assert seen == [expected, expected]


@triton.jit
def place_kernel(out, SIZE: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = x + tl.num_programs(0) * (y + tl.num_programs(1) * z)
    tl.atomic_add(out + at, x + 10 * y + 100 * z + SIZE)


def test_programs_know_their_place_in_the_grid() -> None:
    out = torch.zeros(12, dtype=torch.int32)

    def check(run: Run) -> None:
        assert out.tolist() == [x + 10 * y + 100 * z + 7 for z in range(2) for y in range(2)
                                for x in range(3)]  # fmt: skip

    lab = Interleaving(Launch(place_kernel, (3, 2, 2), out, SIZE=7, num_warps=4), check=check)
    lab.explore(Random(), schedules=20)


def test_behaviour_is_remembered() -> None:
    word = words(0)
    lab = Interleaving(Launch(mix_kernel, (2,), word, 3, STEPS=3))
    first = lab.explore(Random(), schedules=200)
    again = lab.explore(Random(), schedules=200)
    assert 0 < first.interpreted < 1200
    assert (again.interpreted, again.steps) == (0, first.steps)


def test_values_that_nobody_looks_at_make_no_new_behaviour() -> None:
    counter = words(0)
    lab = Interleaving(Launch(atomic_kernel, (4,), counter))
    report = lab.explore(Random(), schedules=100)
    # Each program is interpreted to its access and from there to its end.
    assert report.interpreted == 8


def test_the_interpreter_is_as_before_afterwards() -> None:
    counter = words(0)
    call = InterpretedFunction.__call__
    init, add = tl.tensor.__init__, tl.add
    with pytest.raises(ScheduleError):
        Interleaving(
            Launch(read_then_write_kernel, (2,), counter), check=must_be(counter, 2)
        ).explore(Random(), schedules=50)
    assert InterpretedFunction.__call__ is call
    assert tl.tensor.__init__ is init
    assert tl.add is add
    atomic_kernel[(5,)](counter)
    assert counter.item() == 5


@triton.jit
def double(x):
    return x + x


@triton.jit
def arithmetic_kernel(out):
    """Integers that overflow, mixed types, a nested call, a reduction; numbers that are equal and
    become different constants."""
    lane = tl.arange(0, 8)
    big = lane * 0x7FFFFFF
    mixed = (lane.to(tl.uint8) * 100).to(tl.int64) + double(big) * 3
    scaled = (lane * 1.5).to(tl.float16).to(tl.int32)
    tl.store(out + lane, mixed + tl.sum(lane, axis=0) + scaled)
    wrapped, exact = lane + 0x7FFFFFFF, (lane + 2147483647.0) / 2
    tl.store(out + 8 + lane, exact.to(tl.int64) - wrapped)
    even, odd = lane % 2 == 0, lane % 2 == 1
    tl.store(out + 32 + lane, ((odd & True) + True) + ((even & 1) + 1) * 10)
    halves = (lane // 2).to(tl.int8) - 1 + (lane.to(tl.int64) - 1) * (1 << 40)
    tl.store(out + (16 + lane), halves ^ -1)
    zeros = tl.where(lane < 4, 0.0 * lane, -0.0 * lane) + tl.program_id(0)
    tl.store(out + 24 + lane, (1 / (zeros + 0.5) + (lane >> 1) + (lane - 8 >> 1)).to(tl.int64))


def test_the_quick_interpreter_computes_the_same() -> None:
    out, counter = torch.zeros(40, dtype=torch.int64), words(0)
    arithmetic_kernel[(1,)](out)
    expected = out.clone()
    call, init = InterpretedFunction.__call__, tl.tensor.__init__
    with quick_interpreter():
        for _again in range(2):  # and with what was remembered
            out.zero_()
            arithmetic_kernel[(1,)](out)
            assert out.equal(expected)
        with quick_interpreter():
            Interleaving(Launch(atomic_kernel, (2,), counter)).explore(Random(), schedules=2)
            atomic_kernel[(3,)](counter)
        atomic_kernel[(4,)](counter)
        assert InterpretedFunction.__call__ is not call
    assert counter.item() == 7
    assert (InterpretedFunction.__call__, tl.tensor.__init__) == (call, init)


def test_time_and_number_of_schedules_are_bounds() -> None:
    word = words(0)
    lab = Interleaving(Launch(mix_kernel, (3,), word, 3, STEPS=3))
    assert lab.explore(Exhaustive(None), schedules=7).schedules == 7
    report = lab.explore(Exhaustive(None), seconds=0.2)
    assert not report.complete
    assert 0.2 <= report.seconds < 5
    assert lab.explore(PCT(), schedules=9).schedules == 9


def test_without_greenlet_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['greenlet'] = None; import devalloc.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0
    assert "pip install 'devalloc[testing]'" in done.stderr


def test_wrong_arguments_are_refused() -> None:
    counter = words(0)
    launch = Launch(atomic_kernel, (1,), counter)
    with pytest.raises(InvalidArgument, match="at least one Launch"):
        Interleaving()
    with pytest.raises(InvalidArgument, match="switch_at"):
        Interleaving(launch, switch_at="loads")
    for grid in ((0,), 2, (), (1, 1, 1, 1), (1.5,), lambda options: (2,)):
        with pytest.raises(InvalidArgument, match="a grid is a tuple"):
            Launch(atomic_kernel, grid, counter)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="not an interpreted kernel"):
        Launch(must_be, (1,), counter)
    with pytest.raises(InvalidArgument, match="cannot launch atomic_kernel"):
        Launch(atomic_kernel, (1,))
    with pytest.raises(InvalidArgument, match="integers"):
        Interleaving(launch, journal=torch.zeros(2))
    with pytest.raises(InvalidArgument, match="contiguous"):
        Interleaving(launch, journal=torch.zeros(2, 2, dtype=torch.int32).T)
    with pytest.raises(InvalidArgument, match="depth"):
        PCT(depth=0)
    with pytest.raises(InvalidArgument, match="preemptions"):
        Exhaustive(-1)
