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
)
