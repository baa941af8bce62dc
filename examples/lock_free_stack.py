"""A lock-free stack with a bug that tests on a GPU rarely meet, and the schedule that shows it.

The nodes of the stack are numbers; ``after[node]`` is the node below. `pop` reads the head and the
node below it, and swaps the one for the other by compare-and-swap: right, as long as the head did
not change. But the compare-and-swap only sees that the head is *equal*. If the node was taken and
put back meanwhile, with another one below it, the swap succeeds and the head becomes a node that
another program owns: the ABA problem.

`tagged_pop` and `tagged_push` keep a counter beside the head, so no value of the head comes back.

Run it: ``python examples/lock_free_stack.py`` (no GPU needed).
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from devalloc.testing import PCT, Exhaustive, Interleaving, Launch, Report, Run, ScheduleError

EMPTY = tl.constexpr(-1)


@triton.jit
def pop(head, after):
    """Take the top node off the stack; EMPTY if there is none. Wrong: see above."""
    node = tl.atomic_or(head, 0)
    taken = node * 0 + EMPTY
    while (node != EMPTY) & (taken == EMPTY):
        below = tl.atomic_or(after + node, 0)
        found = tl.atomic_cas(head, node, below)
        taken = tl.where(found == node, node, EMPTY)
        node = found
    return taken


@triton.jit
def push(head, after, node):
    """Put a node on top of the stack."""
    top = tl.atomic_or(head, 0)
    done = node != node
    while done == 0:
        tl.atomic_xchg(after + node, top)
        found = tl.atomic_cas(head, top, node)
        done = found == top
        top = found


@triton.jit
def stack_kernel(head, after, kept):
    """Take two nodes, put the first back, keep the second."""
    first = pop(head, after)
    second = pop(head, after)
    if first != EMPTY:
        push(head, after, first)
    tl.store(kept + tl.program_id(0), second)


@triton.jit
def with_node(word, node):
    """The head that follows ``word``: another node, and a counter one higher."""
    return ((word >> 32) + 1 << 32) | (node.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def tagged_pop(head, after):
    word = tl.atomic_or(head, tl.full((), 0, tl.int64))
    taken = (word & 0).to(tl.int32) + EMPTY
    while (word.to(tl.int32) != EMPTY) & (taken == EMPTY):
        node = word.to(tl.int32)
        below = tl.atomic_or(after + node, 0)
        found = tl.atomic_cas(head, word, with_node(word, below))
        taken = tl.where(found == word, node, EMPTY)
        word = found
    return taken


@triton.jit
def tagged_push(head, after, node):
    word = tl.atomic_or(head, tl.full((), 0, tl.int64))
    done = node != node
    while done == 0:
        tl.atomic_xchg(after + node, word.to(tl.int32))
        found = tl.atomic_cas(head, word, with_node(word, node))
        done = found == word
        word = found


@triton.jit
def tagged_stack_kernel(head, after, kept):
    first = tagged_pop(head, after)
    second = tagged_pop(head, after)
    if first != EMPTY:
        tagged_push(head, after, first)
    tl.store(kept + tl.program_id(0), second)


def laboratory(tagged: bool, nodes: int = 4, programs: int = 2) -> Interleaving:
    """A stack of nodes 0 (on top), 1, 2, ..., and programs that take nodes and put them back."""
    head = torch.zeros(1, dtype=torch.int64 if tagged else torch.int32)
    after = torch.arange(1, nodes + 1, dtype=torch.int32)
    after[-1] = EMPTY.value
    kept = torch.full((programs,), EMPTY.value, dtype=torch.int32)

    def check(run: Run) -> None:
        """Every node is in the stack or kept by one program."""
        found = [node for node in kept.tolist() if node != EMPTY.value]
        node = int(head.to(torch.int32))
        while node != EMPTY.value and len(found) <= nodes:
            found.append(node)
            node = int(after[node])
        assert sorted(found) == list(range(nodes)), f"kept {kept.tolist()}, all nodes {found}"

    kernel = tagged_stack_kernel if tagged else stack_kernel
    return Interleaving(Launch(kernel, (programs,), head, after, kept), check=check)


def find_the_bug() -> Report:
    """Raise ScheduleError with a schedule in which a node gets two owners."""
    return laboratory(tagged=False).explore(PCT(depth=3), schedules=1000)


def prove_the_repair() -> Report:
    """Explore every schedule of two programs."""
    return laboratory(tagged=True).explore(Exhaustive(preemptions=None))


if __name__ == "__main__":
    print(prove_the_repair())
    try:
        find_the_bug()
    except ScheduleError as error:
        print(f"ScheduleError: {error}")
    else:
        raise AssertionError("no schedule shows the bug")
