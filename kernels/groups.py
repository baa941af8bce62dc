"""Lanes that want the same, found without comparing every lane with every other.

Owns no state. A warp of an NVIDIA device has an instruction that tells each of its 32 threads
which others hold the same value. So the lanes that a warp handles together form groups, and one
lane, the *leader*, can act for its group: one atomic in place of thirty. How Triton spreads a
block over threads is not for us to know, so lanes with one key may lie in several groups, and
nothing relies on how many there are. Copies of one lane in several threads (blocks smaller than a
warp, reductions of two-dimensional blocks) count once.
"""

import triton
import triton.language as tl

from .lanes import lane_index
from .target import assembly, has_ptx, is_interpreted

# How many lanes of a block are served together.
GROUP = tl.constexpr(32)


@triton.constexpr_function
def has_groups():
    """Whether lanes form groups. On AMD every lane is one of its own."""
    return has_ptx() or is_interpreted()


@triton.constexpr_function
def match(bits):
    """PTX: ``same`` becomes the set of the threads whose key ($4) is this thread's.

    ``match.any`` takes 12 cycles for each key among the threads of a warp, and keeps other warps
    from doing the same: with 32 keys, 380 to 1500. A ballot for each bit of the keys takes 35 if
    there are six, and more than ``match.any`` if there are 23.
    """
    if bits == 0:
        return "match.any.sync.b32 same, $4, 0xffffffff;"
    ballot = (
        "and.b32 chosen, $4, {}; setp.ne.u32 has, chosen, 0; "
        "vote.sync.ballot.b32 chosen, has, 0xffffffff; @!has not.b32 chosen, chosen; "
        "and.b32 same, same, chosen; "
    )
    # (Inactive lanes have key -1.)
    return "mov.b32 same, -1; " + "".join(ballot.format(1 << bit) for bit in (*range(bits), 31))


@triton.constexpr_function
def alike_instructions(bits):
    """The PTX of :func:`alike`. ``once`` has the threads that are the first to hold their lane:
    what others hold are copies. (Mostly there are none, and the threads hold 32 lanes in a row.)"""
    return f"""
    {{
        .reg .b32 copies, first, before, same, once, thread, chosen;
        .reg .pred is_first, has;
        mov.b32 copies, 1;
        shf.l.wrap.b32 chosen, 0, copies, $5;
        redux.sync.or.b32 once, chosen, 0xffffffff;
        setp.ne.u32 has, once, -1;
        mov.u32 copies, %lanemask_eq;
        @has match.any.sync.b32 copies, $5, 0xffffffff;
        neg.s32 first, copies;
        and.b32 first, first, copies;
        mov.u32 before, %lanemask_lt;
        and.b32 before, before, copies;
        setp.eq.u32 is_first, before, 0;
        vote.sync.ballot.b32 once, is_first, 0xffffffff;
        {match(bits)}
        and.b32 same, same, once;
        sub.u32 before, first, 1;
        and.b32 before, before, same;
        popc.b32 $1, before;
        popc.b32 $2, same;
        or.b32 $3, before, first;
        bfind.u32 thread, same;
        shfl.sync.idx.b32 $0, $5, thread, 31, 0xffffffff;
    }}
    """


@triton.jit
def alike(keys, active, bits: tl.constexpr = 0):
    """Groups of ``active`` lanes of a block whose int32 ``keys``, at least 0, are equal. If it is
    known that the keys are below 2 ** ``bits``, and these few, this takes a fraction of the time.

    Returns ``(leader, rank, count, upto)`` per active lane (int32): the lane that leads its group,
    the last of the group; how many of the group come before this lane; how many there are; and
    for :func:`last_start` which come up to this lane. What inactive lanes get means nothing. On AMD
    every lane is a group of its own.
    """
    lane = lane_index(keys)
    key = tl.where(active, keys, -1)
    if has_ptx():
        text: tl.constexpr = alike_instructions(bits)
        leader, rank, count, upto = tl.inline_asm_elementwise(
            text, "=&r,=&r,=&r,=&r,r,r", [key, lane], (tl.int32,) * 4, is_pure=False, pack=1
        )
    elif is_interpreted():
        # As on a device: 32 lanes at a time.
        rows: tl.constexpr = (keys.shape[0] // min(keys.shape[0], 32), min(keys.shape[0], 32))
        key = tl.reshape(key, rows)
        here = tl.reshape(lane, rows)[:, None, :]
        same = key[:, :, None] == key[:, None, :]
        sofar = same & (here <= tl.reshape(lane, rows)[:, :, None])
        leader = tl.ravel(tl.max(tl.where(same, here, -1), axis=2))
        rank = tl.ravel(tl.sum(sofar.to(tl.int32), axis=2)) - 1
        count = tl.ravel(tl.sum(same.to(tl.int32), axis=2))
        upto = tl.ravel(tl.sum(tl.where(sofar, 1 << (here & 31), 0), axis=2))
    else:
        leader = lane
        rank = lane * 0
        count = rank + 1
        upto = rank
    return leader, rank, count, upto


@triton.jit
def last_start(upto, starts):
    """In each lane, the last that ``starts``, of those of its group up to this lane, of which there
    must be one: a group in parts becomes groups. With ``upto`` from :func:`alike`."""
    lane = lane_index(upto)
    if has_ptx():
        text: tl.constexpr = """
            {
                .reg .b32 threads;
                .reg .pred starts;
                setp.ne.s32 starts, $2, 0;
                vote.sync.ballot.b32 threads, starts, 0xffffffff;
                and.b32 threads, threads, $1;
                bfind.u32 threads, threads;
                shfl.sync.idx.b32 $0, $3, threads, 31, 0xffffffff;
            }
            """
        lane = assembly(text, "=r,r,r,r", (upto, starts.to(tl.int32), lane), tl.int32)
    elif is_interpreted():
        there = (upto[:, None] >> lane[None, :]) & starts.to(tl.int32)[None, :] & 1
        lane = tl.max(tl.where(there != 0, lane[None, :], 0), axis=1)
    return lane


@triton.jit
def from_leader(values, leader):
    """In every lane, the value of the lane that leads its group."""
    return tl.gather(values, leader, 0) if has_groups() else values
