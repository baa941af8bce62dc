"""Planted bugs: what is changed in which file of kernels/, and the scenario that must fail then.

``old`` stands in the file exactly once. ``breaks`` says what is lost.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    breaks: str
    scenario: str


ALL = (
    Mutant(
        name="dropped_hint_stays_dropped",
        file="pages.py",
        old="""\
    if again != 0:
        tl.atomic_or(row_ptr, again, sem="relaxed")
""",
        new="",
        breaks="a hint that became true while it was dropped is not set again",
        scenario="hint_dropped",
    ),
    Mutant(
        name="in_hand_is_not_counted",
        file="pages.py",
        old="return tl.where(in_hand == 0, epochs, epochs * 0 - 1)",
        new="return epochs",
        breaks="a search calls memory exhausted that somebody holds only to put it back",
        scenario="in_hand_slots",
    ),
    Mutant(
        name="page_taken_without_looking",
        file="pages.py",
        old="if (old & bit) != 0:",
        new="if bit != 0:",
        breaks="two programs take one page: whether its bit was set is not looked at",
        scenario="one_page",
    ),
    Mutant(
        name="run_taken_by_a_store",
        file="pages.py",
        old="""\
                    old = atomic_cas(ptr, word, word & (run ^ -1))
""",
        new="""\
                    tl.store(ptr, word & (run ^ -1))
                    old = word
""",
        breaks="pages given or taken between the look and the store are lost or owned twice",
        scenario="runs_cross",
    ),
    Mutant(
        name="front_of_a_run_is_kept",
        file="pages.py",
        old="""\
                    elif got > 0:
                        give_run(heap, start * CHUNK_PAGES, got * CHUNK_PAGES)
""",
        new="",
        breaks="chunks taken for a run that could not be completed are never given back",
        scenario="long_runs_cross",
    ),
    Mutant(
        name="credits_lost_in_detach",
        file="slabs.py",
        old="change = (PUBLISHED - ATTACHED) - unused.to(tl.int64)",
        new="change = (PUBLISHED - ATTACHED) - unused.to(tl.int64) * 0",
        breaks="slots of a dissolved batch that nobody was promised are never free again",
        scenario="one_word",
    ),
    Mutant(
        name="retired_without_winning",
        file="slabs.py",
        old="retired = retired | (idle & won)",
        new="retired = retired | idle",
        breaks="a page is given back although its word changed before it could be retired",
        scenario="retire_or_malloc",
    ),
    Mutant(
        name="hint_dropped_unannounced",
        file="pages.py",
        old="""\
    enter_transit(heap)
    tl.atomic_and(row_ptr, stale ^ -1, sem="relaxed")
    fence(row_ptr)
    suspect = (lsr(stale, lane.to(tl.int64)) & 1) != 0
    now = atomic_load(page_bits_ptr(heap, index * 64 + lane), suspect)
    again = lane_bits(run_starts(now, (order * 0 + 1) << order) != 0)
    if again != 0:
        tl.atomic_or(row_ptr, again, sem="relaxed")
    leave_transit(heap, (again != 0).to(tl.int32))
""",
        new="""\
    tl.atomic_and(row_ptr, stale ^ -1, sem="relaxed")
    fence(row_ptr)
    suspect = (lsr(stale, lane.to(tl.int64)) & 1) != 0
    now = atomic_load(page_bits_ptr(heap, index * 64 + lane), suspect)
    again = lane_bits(run_starts(now, (order * 0 + 1) << order) != 0)
    if again != 0:
        tl.atomic_or(row_ptr, again, sem="relaxed")
""",
        breaks="a search between the clearing and the setting again of a hint fails",
        scenario="hint_missing",
    ),
    Mutant(
        name="only_new_hints",
        file="pages.py",
        old="run = tl.where(active, old | bits, 0)",
        new="run = tl.where(active, bits, 0)",
        breaks="a run that grows together from two gives has no hint of its order",
        scenario="hints_anew",
    ),
    Mutant(
        name="tail_taken_by_a_store",
        file="pages.py",
        old="""\
        old = atomic_cas(ptr, word, word & (bits ^ -1))
        claimed = (old == word).to(tl.int32)
""",
        new="""\
        old = word
        tl.store(ptr, word & (bits ^ -1))
        claimed = (old == word).to(tl.int32)
""",
        breaks="pages given between the look at the last chunk of a run and the store are lost",
        scenario="tail_of_a_run",
    ),
    Mutant(
        name="chunks_beyond_a_gap_are_kept",
        file="pages.py",
        old="""\
        if tl.sum(beyond.to(tl.int32), axis=0) > 0:
            give_pages(heap, target, wanted, beyond)
""",
        new="",
        breaks="chunks taken behind one that was not to be had are never given back",
        scenario="long_runs_cross",
    ),
    Mutant(
        name="class_hint_stays_dropped",
        file="slabs.py",
        old="""\
    if again != 0:
        tl.atomic_or(hint, bit, sem="relaxed")
""",
        new="",
        breaks="a page published while the hint of its class was dropped is found by nobody",
        scenario="class_hint_dropped",
    ),
    Mutant(
        name="drawn_without_winning",
        file="slabs.py",
        old="won = lane_bits(mine & (seen == expected))",
        new="won = lane_bits(mine)",
        breaks="a page is drawn although its word changed: its slots have two accounts",
        scenario="in_hand_slots",
    ),
    Mutant(
        name="freed_without_looking",
        file="heap.py",
        old="freed = inside & ((old & bit) != 0)",
        new="freed = inside",
        breaks="a second free of an address takes another slot out of the account",
        scenario="double_free",
    ),
    Mutant(
        name="claimed_without_looking",
        file="heap.py",
        old="return old, active & ((old & bit) != 0)",
        new="return old, active & (active == 0)",
        breaks="a slot that was drawn by two programs, or is live, is handed out",
        scenario="slots_move",
    ),
    Mutant(
        name="drawn_but_not_accounted",
        file="slabs.py",
        old="seen = atomic_cas(ptr, expected, tl.where(mine, words + more, 0))",
        new="seen = atomic_cas(ptr, expected, tl.where(mine, words + more * 0, 0))",
        breaks="slots that were drawn are still free in the account of their page",
        scenario="slots_move",
    ),
    Mutant(
        name="hidden_page_stays_hidden",
        file="slabs.py",
        old="published = published | (hidden & won)",
        new="published = published | (hidden & won & (won == 0))",
        breaks="a page that says it is published has no hint",
        scenario="class_hint_dropped",
    ),
    Mutant(
        name="a_page_of_a_run_is_kept",
        file="heap.py",
        old="free_run(heap, pick(at, first), pick(page_out(now), first) + 1)",
        new="free_run(heap, pick(at, first), pick(page_out(now), first))",
        breaks="the last page of a freed run is nobody's",
        scenario="runs_cross",
    ),
    Mutant(
        name="idle_page_is_kept",
        file="heap.py",
        old="return (page_kind(word) == KIND_RUN) | is_idle(word) | is_hidden(word)",
        new="return (page_kind(word) == KIND_RUN) | is_hidden(word)",
        breaks="a page whose last slot was freed stays a slab",
        scenario="retire_or_free",
    ),
)
