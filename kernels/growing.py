"""Heaps that grow: asking the host for more pages. (It takes free chunks back as a run is taken:
see ``upkeep.take_chunks_kernel``.)

Growing itself needs no kernel, so it also works while programs that wait for it fill the device.
The host maps memory, and then copies words that no kernel writes: EXTENT, the free row's words of
new chunks, which are 0 until then (kernels only clear bits of pages that they do not own), and
ANSWERS, in this order. Before ANSWERS it sets the hints to 0, since they may be beyond.

Shared words and their writers
    *EXTENT*: pages that have a record. The host; it only rises. A kernel that reads an old value
    has no page beyond it, and for an address beyond it reads again: the address came from a malloc
    that found the bit of its page, which was written later.
    *Bell*: in memory of the host. A program that found nothing writes how many pages it wants, and
    the answer that it has seen; the host ignores requests that it has answered since. Another
    program's word may replace it, so a program that waits writes it again from time to time.
    *ANSWERS*: twice the number of answers, plus 1 while the host may still grow the heap. A program
    reads it before it searches. If it has changed since, the heap may have grown, or given back
    what was free, so that it can grow again.

A program waits a bounded time for an answer, if one may come, and then searches once more. Then it
fails, or asks again if the answer was new: at most as often as the host answers.
"""

import triton
import triton.language as tl

from .atomics import load_one
from .layout import ANSWERS, BELL, PAGE_LOG2, load_chunks, load_immutable
from .target import assembly, has_ptx, is_interpreted, let_host_run

# How often to look at ANSWERS: for 0.3 s on an H200, and about two when interpreted. (The host
# answers within milliseconds, but its thread may be kept from running.) The bell is rung before
# every 128th look.
WAITS = tl.constexpr(1 << 20)
WAITS_INTERPRETED = tl.constexpr(1 << 11)
RINGS = tl.constexpr(128)


@triton.jit
def load_answers(heap):
    """What the host has answered so far (int32); 0 in a heap that does not grow by itself."""
    answers = tl.full((), 0, tl.int32)
    if load_immutable(heap, BELL) != 0:
        answers = load_one(heap + ANSWERS)
    return answers


@triton.jit
def ring(heap, word):
    """Write an int64 scalar where the host sees it."""
    bell = load_immutable(heap, BELL)
    if has_ptx():
        store: tl.constexpr = "st.relaxed.sys.global.b64 [$1], $2; mov.b32 $0, 0;"
        assembly(store, "=r,l,l", (bell, word), tl.int32)
    else:
        tl.store(bell.to(tl.pointer_type(tl.int64)), word)


@triton.jit(noinline=True)
def ask_for_pages(heap, nbytes, seen):
    """Ask for pages for a block of ``nbytes`` (int64 scalar), if the host may still grow the heap
    and this would help. ``seen`` was the last answer before the search. Waits a bounded time for
    another. Returns it, or 0 if there is none."""
    pages = ((nbytes - 1) >> PAGE_LOG2) + 1
    now = load_answers(heap)
    may_grow = ((now & 1) != 0) & (nbytes > 0) & ((pages - 1) >> 6 < load_chunks(heap))
    left = tl.where(may_grow, WAITS_INTERPRETED if is_interpreted() else WAITS, 0)
    while (now == seen) & (left > 0):
        if (left & (RINGS - 1)) == 0:
            ring(heap, (seen.to(tl.int64) << 32) + tl.minimum(pages, 0x7FFFFFFF))
        if is_interpreted():
            let_host_run()
        now = load_answers(heap)
        left -= 1
    return tl.where(now == seen, 0, now)
