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


RELEASE_RUN = """\
    enter_transit(heap)
    used = count_given(heap, n)
    give_run(heap, page, n)
    follow_peak(heap, used)
    leave_transit(heap, n * 0 + 1)
"""

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
        old="taken = (old & run) != 0",
        new="taken = run != 0",
        breaks="two programs take one page: whether its bit was set is not looked at",
        scenario="one_page",
    ),
    Mutant(
        name="run_taken_by_a_store",
        file="pages.py",
        old="""\
                old = tl.atomic_cas(ptr, word, word & (run ^ -1), sem="acquire")
""",
        new="""\
                old = atomic_load(ptr)
                tl.store(ptr, tl.where(old == word, word & (run ^ -1), old))
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
        scenario="front_of_a_run",
    ),
    Mutant(
        name="credits_lost_in_detach",
        file="batches.py",
        old="change = (PUBLISHED - ATTACHED) - unused.to(tl.int64)",
        new="change = (PUBLISHED - ATTACHED) - unused.to(tl.int64) * 0",
        breaks="slots of a dissolved batch that nobody was promised are never free again",
        scenario="one_word",
    ),
    Mutant(
        name="retired_without_winning",
        file="detached.py",
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
        file="detached.py",
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
        file="detached.py",
        old="lost = mine & (seen != expected)",
        new="lost = mine & (mine == 0)",
        breaks="a page is drawn although its word changed: its slots have two accounts",
        scenario="in_hand_slots",
    ),
    Mutant(
        name="freed_without_looking",
        file="live.py",
        old="wrong = tl.where(speaks, (old & bits) ^ bits, 0)",
        new="wrong = tl.where(speaks, (old & bits) ^ bits, 0) & 0",
        breaks="a second free of an address takes another slot out of the account",
        scenario="double_free",
    ),
    Mutant(
        name="claimed_without_looking",
        file="live.py",
        old="return old | bit, active & ((old & bit) != 0)",
        new="return old | bit, active & (active == 0)",
        breaks="a slot that was drawn by two programs, or is live, is handed out",
        scenario="slots_move",
    ),
    Mutant(
        name="drawn_but_not_accounted",
        file="detached.py",
        old="seen = atomic_cas(ptr, expected, tl.where(mine, words + more, 0))",
        new="seen = atomic_cas(ptr, expected, tl.where(mine, words + more * 0, 0))",
        breaks="slots that were drawn are still free in the account of their page",
        scenario="class_hint_dropped",
    ),
    Mutant(
        name="hidden_page_stays_hidden",
        file="detached.py",
        old="published = published | (hidden & won)",
        new="published = published | (hidden & won & (won == 0))",
        breaks="a page that says it is published has no hint",
        scenario="class_hint_dropped",
    ),
    Mutant(
        name="a_page_of_a_run_is_kept",
        file="heap.py",
        old="free_run(heap, pick(page, at), pick(page_out(now), at) + 1)",
        new="free_run(heap, pick(page, at), pick(page_out(now), at))",
        breaks="the last page of a freed run is nobody's",
        scenario="runs_cross",
    ),
    Mutant(
        name="idle_page_is_kept",
        file="heap.py",
        old="return is_idle(word) | is_hidden(word) | is_run(word)",
        new="return is_hidden(word) | is_run(word)",
        breaks="a page whose last slot was freed stays a slab",
        scenario="retire_or_free",
    ),
    Mutant(
        name="speaks_for_one_too_many",
        file="live.py",
        old="others = tl.maximum(further, 0) >> period_log2",
        new="others = tl.maximum(further + 1, 0) >> period_log2",
        breaks="a lane sets and clears the live bit of a slot that is nobody's, or another's",
        scenario="lanes_of_one_word",
    ),
    Mutant(
        name="speaks_for_one_too_few",
        file="live.py",
        old="others = tl.maximum(further, 0) >> period_log2",
        new="others = tl.maximum(further - 1, 0) >> period_log2",
        breaks="the last lane of a word has no live bit: its slot can be claimed again",
        scenario="lanes_of_one_word",
    ),
    Mutant(
        name="not_heard_in_free",
        file="live.py",
        old="hit = (tl.gather(wrong, speaker, 0) & bit) != 0",
        new="hit = wrong != wrong",
        breaks="of lanes that free together, those are believed whose slot was free already",
        scenario="double_free_of_one_lane",
    ),
    Mutant(
        name="speaker_hears_for_all",
        file="live.py",
        old="hit = (tl.gather(wrong, speaker, 0) & bit) != 0",
        new="hit = tl.gather(wrong, speaker, 0) != 0",
        breaks="lanes share the fault of one: their slots are never accounted free",
        scenario="double_free_of_one_lane",
    ),
    Mutant(
        name="ticket_claimed_without_looking",
        file="live.py",
        old="return page, granule, tl.where(speaks, old & bits, 0)",
        new="return page, granule, tl.where(speaks, old & bits, 0) & 0",
        breaks="a ticket that outlived its batch takes a slot that others drew meanwhile",
        scenario="ticket_outlives_its_batch",
    ),
    Mutant(
        name="run_returns_unannounced",
        file="pages.py",
        old=RELEASE_RUN,
        new="""\
    used = count_given(heap, n)
    give_run(heap, page, n)
    follow_peak(heap, used)
""",
        breaks="a search does not hear of a run that came back behind it",
        scenario="run_behind_a_search",
    ),
    Mutant(
        name="run_returns_without_an_epoch",
        file="pages.py",
        old="leave_transit(heap, n * 0 + 1)\n    return n * 0",
        new="leave_transit(heap, n * 0)\n    return n * 0",
        breaks="the same, once the give is over",
        scenario="run_behind_a_search",
    ),
    Mutant(
        name="hints_of_another_give",
        file="pages.py",
        old=RELEASE_RUN,
        new="""\
    used = count_given(heap, n)
    give_run(heap, page, n)
    follow_peak(heap, used)
    enter_transit(heap)
    leave_transit(heap, n * 0 + 1)
""",
        breaks="a give relies on hints that another, not in transit, has yet to set",
        scenario="hint_of_another",
    ),
    Mutant(
        name="one_quiet_pass",
        file="slabs.py",
        old="while (place == 0) & (quiet < 2):",
        new="while (place == 0) & (quiet < 1):",
        breaks="a slot that moved behind the search, without transit, is overlooked",
        scenario="slots_move_unannounced",
    ),
    Mutant(
        name="other_batch_lost",
        file="batches.py",
        old='return detach(heap, cls, tl.atomic_xchg(ptr, word, sem="relaxed"))',
        new='return (tl.atomic_xchg(ptr, word, sem="relaxed") & 0).to(tl.int32)',
        breaks="of the batches that two refillers install, one is in no stripe and attached",
        scenario="two_refillers",
    ),
    Mutant(
        name="resting_batch_lost",
        file="batches.py",
        old="word = tl.where(atomic_cas(stripe + SPARE, word & 0, rests) == 0, 0, word)",
        new="word = word & 0",
        breaks="a batch that is used up is in no stripe and attached",
        scenario="batch_runs_dry",
    ),
    Mutant(
        name="credit_rests",
        file="batches.py",
        old="rests = word - tl.minimum(stripe_credits(word), 0).to(tl.int64)",
        new="rests = word - tl.minimum(stripe_credits(word), 0).to(tl.int64) + 1",
        breaks="a batch that is used up has a credit: its last slot is handed out twice",
        scenario="batch_runs_dry",
    ),
    Mutant(
        name="kept_and_handed_out",
        file="batches.py",
        old="rest = place - tl.minimum(stripe_credits(place), need).to(tl.int64)",
        new="rest = place",
        breaks="slots that a program keeps of a spare are handed out again",
        scenario="spare_in_hand",
    ),
    Mutant(
        name="spare_moves_unannounced",
        file="batches.py",
        old="""\
    announced = begin_transit(heap)
    place = atomic_load(stripe + SPARE)
    # (Announced before anything is taken: by what the announcement returned.)
    begun = count_lanes(has_begun(announced)) == 64
    if begun & (stripe_credits(place) > 0):
        if atomic_cas(stripe + SPARE, place, place & 0) == place:
            # What the slots' former owners did, before whoever takes a ticket.
            fence(stripe)
            rest = place - tl.minimum(stripe_credits(place), need).to(tl.int64)
            used = tl.atomic_xchg(stripe, rest, sem="acquire")
            put_aside(heap, cls, stripe, used, place != 0)
        else:
            place = place & 0
    else:
        place = place & 0
    end_transit(heap, (place != 0).to(tl.int32))
""",
        new="""\
    place = atomic_load(stripe + SPARE)
    if stripe_credits(place) > 0:
        if atomic_cas(stripe + SPARE, place, place & 0) == place:
            fence(stripe)
            rest = place - tl.minimum(stripe_credits(place), need).to(tl.int64)
            used = tl.atomic_xchg(stripe, rest, sem="acquire")
            put_aside(heap, cls, stripe, used, place != 0)
        else:
            place = place & 0
    else:
        place = place & 0
""",
        breaks="a search does not hear that a batch is between two places, and fails",
        scenario="spare_in_hand",
    ),
    Mutant(
        name="renewed_while_in_use",
        file="batches.py",
        old="front = lowest_bit(lane_bits((lane < batch) & (page_out(words) == 0)) ^ -1)",
        new="front = lowest_bit(lane_bits((lane < batch) & (page_out(words) >= 0)) ^ -1)",
        breaks="a batch is renewed while slots of it live: it has more tickets than slots",
        scenario="batch_runs_dry",
    ),
    Mutant(
        name="group_pays_for_one",
        file="heap.py",
        old="word = tl.atomic_add(stripes, -count.to(tl.int64), mask=leads",
        new="word = tl.atomic_add(stripes, -(count > 0).to(tl.int64), mask=leads",
        breaks="lanes of one class get tickets that the next program gets as well",
        scenario="lanes_of_two_classes",
    ),
    Mutant(
        name="group_pays_back_one",
        file="live.py",
        old="speaks = active & (leader == lane)",
        new="speaks, counts = active & (leader == lane), counts * 0 + 1",
        breaks="of slots that lanes freed into one page, one is free in its account",
        scenario="lanes_of_two_classes",
    ),
    Mutant(
        name="filled_pages_without_looking",
        file="detached.py",
        old="if any_lane(mine & (words != filled)) == 0:",
        new="if length > 0:",
        breaks="pages of a batch, or that others can find, lie on the shelf as if they were not",
        scenario="shelf_or_batch",
    ),
    Mutant(
        name="settled_on_the_shelf",
        file="detached.py",
        old="hidden = asks & is_hidden(words) & (idle == 0) & (page_out(words) < class_slots(cls))",
        new="hidden = asks & is_hidden(words) & (idle == 0)",
        breaks="a free that comes late changes the word of a page on the shelf",
        scenario="shelf_settled_late",
    ),
    Mutant(
        name="shelved_and_not_counted",
        file="shelf.py",
        old="change = (lane * 0).to(tl.int64) + length.to(tl.int64)",
        new="change = (lane * 0).to(tl.int64)",
        breaks="a search does not look at the shelf, as nothing is said to lie there",
        scenario="shelf_or_search",
    ),
    Mutant(
        name="shelved_for_another_use",
        file="shelf.py",
        old="if (pages == length) & (stripe_credits(word) == use):",
        new="if pages == length:",
        breaks="pages are taken from the shelf that are cut for something else",
        scenario="shelf_changes_use",
    ),
    Mutant(
        name="taken_and_left_on_the_shelf",
        file="shelf.py",
        old='if tl.atomic_cas(ptr, word, word & 0, sem="acquire") == word:',
        new="if atomic_load(ptr) == word:",
        breaks="pages are handed out and stay on the shelf, for the next",
        scenario="shelf_changes_use",
    ),
    Mutant(
        name="put_over_another",
        file="shelf.py",
        old="old = atomic_cas(place_ptr(heap, own_place(heap)), word & 0, word)",
        new="old = tl.atomic_xchg(place_ptr(heap, own_place(heap)), word) & 0",
        breaks="what lay at a place of the shelf is nobody's",
        scenario="shelf_changes_use",
    ),
    Mutant(
        name="shelf_cleared_unannounced",
        file="shelf.py",
        old="""\
        enter_transit(heap)
        page, length""",
        new="""\
        page, length""",
        breaks="a search calls memory exhausted that another takes off the shelf to give it back",
        scenario="shelf_or_search",
    ),
    Mutant(
        name="slabs_on_the_shelf_stay_slabs",
        file="shelf.py",
        old='tl.atomic_xchg(state_ptr, lane.to(tl.int64) * 0, mask=lane < length, sem="relaxed")',
        new="tl.atomic_add(state_ptr, lane.to(tl.int64) * 0, mask=lane < length)",
        breaks="pages are free by their bits and slabs by their words",
        scenario="shelf_or_search",
    ),
    Mutant(
        name="run_without_a_live_bit",
        file="heap.py",
        old='tl.atomic_or(ptr, bit | lsr(old, KIND_SHIFT + 2), sem="relaxed")',
        new='tl.atomic_or(ptr, lsr(old, KIND_SHIFT + 2), sem="relaxed")',
        breaks="no run can be freed",
        scenario="one_page",
    ),
)
