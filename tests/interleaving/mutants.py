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
        old="back = unissued_slots(batch, credits, slots, lane).to(tl.int64)",
        new="back = unissued_slots(batch, credits, slots, lane).to(tl.int64) * 0",
        breaks="slots of a dissolved batch that nobody was promised are never free again",
        scenario="one_word",
    ),
    Mutant(
        name="retired_without_winning",
        file="slabs.py",
        old="retired = retired | lane_bits(idle & won)",
        new="retired = retired | lane_bits(idle)",
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
        name="other_batch_lost",
        file="slabs.py",
        old="""\
        other = tl.atomic_xchg(ptr, installed, sem="relaxed")
        detach(heap, cls, other)
""",
        new="""\
        other = tl.atomic_xchg(ptr, installed, sem="relaxed")
""",
        breaks="of two batches that two refillers install one is lost",
        scenario="waiter_gives_up",
    ),
    Mutant(
        name="drawn_without_winning",
        file="slabs.py",
        old="""\
            if old == word:
                result = pack_stripe(page, at * 0 + 1, at * 0, most)
            else:
                leave_transit(heap, at * 0)
""",
        new="""\
            result = pack_stripe(page, at * 0 + 1, at * 0, most)
""",
        breaks="a page is drawn although its word changed: its slots have two accounts",
        scenario="in_hand_slots",
    ),
)
