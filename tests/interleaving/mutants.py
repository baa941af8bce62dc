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


PROMISE = """\
    granted = promise(heap, page, cls, tickets, slots, asks)
"""

PUT = """\
    new = puts & ((word & SPANNED) == 0)
    if any_lane(new):
        # Once in the life of a page, and while the slots are still ours: later, the page may be
        # another's. (So the swap waits for what this returns, in which bit 63 is clear.)
        ptr = layout.page_word_ptr(heap, tl.where(new, span & PAGE_MASK, 0).to(tl.int32))
        seen = tl.atomic_or(ptr, (span & 0) + SPANNED, mask=new, sem="relaxed")
        span += lsr(tl.where(new, seen, 0), 63)
    old = swap(layout.magazine_ptr(heap, last, cls), span, puts)
    release(heap, old, old != 0)
"""
PUT_EARLY = """\
    old = swap(layout.magazine_ptr(heap, last, cls), span, puts)
    new = puts & ((word & SPANNED) == 0)
    if any_lane(new):
        ptr = layout.page_word_ptr(heap, tl.where(new, span & PAGE_MASK, 0).to(tl.int32))
        tl.atomic_or(ptr, (span & 0) + SPANNED, mask=new, sem="relaxed")
    release(heap, old, old != 0)
"""

LEFT = """\
    page = tl.where(slots, (old & PAGE_MASK).to(tl.int32), page)
    return page, tl.where(slots, layout.span_count(old), active.to(tl.int32))
"""

ALL = (
    Mutant(
        name="retired_by_a_store",
        file="lines.py",
        old="old = atomic_cas(ptr, tl.where(idle, word, -1), tl.where(idle, word & 0, -1))",
        new="old = tl.where(tl.atomic_xchg(ptr, word & 0, mask=idle) >= 0, word, -1)",
        breaks="a slot that was reserved after its page was emptied lies in a free page",
        scenario="retire_or_reserve",
    ),
    Mutant(
        name="retired_without_winning",
        file="lines.py",
        old="won = idle & (old == word)",
        new="won = idle",
        breaks="a page is given back although its word changed before it could be retired",
        scenario="retire_or_reserve",
    ),
    Mutant(
        name="retired_without_being_a_slab",
        file="lines.py",
        old="idle = empty & ((now & (KEPT + SLAB)) == SLAB)",
        new="idle = empty & ((now & KEPT) == 0)",
        breaks="who takes back what it added to a free page gives the page back once more",
        scenario="late_undo",
    ),
    Mutant(
        name="kept_pages_are_retired",
        file="lines.py",
        old="idle = empty & ((now & (KEPT + SLAB)) == SLAB)",
        new="idle = empty & ((now & SLAB) == SLAB)",
        breaks="a page does not outlast its first slot, though its line's tickets lead there",
        scenario="kept",
    ),
    Mutant(
        name="kept_for_good",
        file="allocation.py",
        old="    stop_keeping(heap, page, asks & (slot + tickets == slots))\n",
        new="",
        breaks="pages stay kept when their place is used up: each place needs a new one",
        scenario="used_up",
    ),
    Mutant(
        name="left_before_it_is_not_kept",
        file="lines.py",
        old="""\
        stop_keeping(heap, page, there)
        leave_account(heap, tl.where(there, page, 0), tl.where(there, counts, 0))
""",
        new="""\
        leave_account(heap, tl.where(there, page, 0), tl.where(there, counts, 0))
        stop_keeping(heap, page, there)
""",
        breaks="a page stops being kept after its last slot was freed: no program retires it",
        scenario="late_ticket",
    ),
    Mutant(
        name="groups_of_any_class",
        file="allocation.py",
        old="leader, rank, count, upto = alike(cls, active, 6)",
        new="leader, rank, count, upto = alike(cls & 0, active, 6)",
        breaks="lanes get slots of another class: they share its tickets",
        scenario="late_lanes",
    ),
    Mutant(
        name="opened_by_a_store",
        file="lines.py",
        old='tl.atomic_add(ptr, layout.slab_word(cls, slots) + KEPT, mask=fresh, sem="relaxed")',
        new='tl.atomic_xchg(ptr, layout.slab_word(cls, slots) + KEPT, mask=fresh, sem="relaxed")',
        breaks="what a late holder added is lost, and then it takes that back",
        scenario="late_undo",
    ),
    Mutant(
        name="filled_by_a_store",
        file="allocation.py",
        old="tl.atomic_add(ptr, state + (lane & 0).to(tl.int64), mask=here",
        new="tl.atomic_xchg(ptr, state + (lane & 0).to(tl.int64), mask=here",
        breaks="the same in a page that a block fills",
        scenario="whole_pages_or_late_ticket",
    ),
    Mutant(
        name="promise_is_not_undone",
        file="lines.py",
        old="leave_account(heap, tl.where(there, page, 0), tl.where(there, counts, 0))",
        new="leave_account(heap, page & 0, counts * 0)",
        breaks="slots that no program has are out for good",
        scenario="last_slot",
    ),
    Mutant(
        name="reserved_without_looking",
        file="lines.py",
        old="room = tl.where(layout.is_slab_of(old, cls), slots - layout.page_out(old), 0)",
        new="room = slots - layout.page_out(old)",
        breaks="a late holder gets a slot of a page that is free, or another class's",
        scenario="late_ticket",
    ),
    Mutant(
        name="claimed_without_a_promise",
        file="allocation.py",
        old="tl.where(active & (index < granted), span, 0)",
        new="tl.where(active & (page >= 0), span, 0)",
        breaks="lanes take slots of pages that have no room for them",
        scenario="late_lanes",
    ),
    Mutant(
        name="claimed_before_the_promise",
        file="allocation.py",
        old=PROMISE,
        new="""\
    records = layout.load_records(heap)
    ptr, bit = live_bit(records, tl.where(asks, page, 0), slot * (size >> 4))
    early = tl.atomic_or(ptr, bit, mask=asks, sem="relaxed")
    early = asks & ((early & bit) == 0)
    granted = promise(heap, page, cls, tickets, slots, asks)
    tl.atomic_and(ptr, bit ^ -1, mask=early, sem="relaxed")
""",
        breaks="live bits are set in a page that has no room, is free or another class's",
        scenario="late_lanes",
    ),
    Mutant(
        name="claimed_without_looking",
        file="allocation.py",
        old="wrong = tl.where(speaks, old & bits, 0)\n    if lanes.any_lane",
        new="wrong = tl.where(speaks, old & 0, 0)\n    if lanes.any_lane",
        breaks="a slot that lives is handed out again",
        scenario="slots_named_twice",
    ),
    Mutant(
        name="scalar_claimed_without_looking",
        file="allocation.py",
        old="    if lanes.any_lane(one & ((old & bit) != 0)):\n",
        new="    if lanes.any_lane(one & (old != old)):\n",
        breaks="the same in a scalar's claim",
        scenario="slots_named_twice",
    ),
    Mutant(
        name="freed_without_looking",
        file="freeing.py",
        old="if inside & any_lane((lane == 0) & ((old & bit) != 0)):",
        new="if inside:",
        breaks="a second free of an address takes another slot out of the account",
        scenario="two_frees_of_one",
    ),
    Mutant(
        name="page_taken_without_looking",
        file="pages.py",
        old="won = want & ((old & mask) == mask)",
        new="won = want",
        breaks="two programs open one page: whether its bit was set is not looked at",
        scenario="one_page_for_two",
    ),
    Mutant(
        name="spare_page_is_kept",
        file="lines.py",
        old="    give_pages(heap, page, got & both)\n",
        new="",
        breaks="a page that was taken and not needed is lost",
        scenario="half_pages_suffice",
    ),
    Mutant(
        name="put_over_another",
        file="magazines.py",
        old="span, puts)\n    release(heap, old, old != 0)\n",
        new="span, puts)\n",
        breaks="the slots that were in the magazine are out for good",
        scenario="one_magazine",
    ),
    Mutant(
        name="lanes_put_over_another",
        file="magazines.py",
        old="tl.where(slots, layout.span_count(old), active.to(tl.int32))",
        new="(active & (slots == 0)).to(tl.int32)",
        breaks="the slots that were in the magazines of lanes are out for good",
        scenario="magazine_of_two_classes",
    ),
    Mutant(
        name="taken_for_another_class",
        file="magazines.py",
        old="fits = (span >> SPAN_COUNT) == (wanted >> SPAN_COUNT)",
        new="fits = layout.span_count(span) == layout.span_count(wanted)",
        breaks="slots of one class are handed out for another",
        scenario="magazine_of_another_class",
    ),
    Mutant(
        name="taken_for_another_count",
        file="magazines.py",
        old="fits = (span >> SPAN_COUNT) == (wanted >> SPAN_COUNT)",
        new="fits = (span >> layout.SPAN_CLASS) == (wanted >> layout.SPAN_CLASS)",
        breaks="a span gives more slots than it has, or fewer",
        scenario="magazine_of_another_count",
    ),
    Mutant(
        name="spans_taken_for_others",
        file="magazines.py",
        old="    fits = (span >> SPAN_COUNT) == (wanted >> SPAN_COUNT)\n",
        new="    fits = span != 0\n",
        breaks="slots of one class are handed out for another, in a block of several",
        scenario="magazine_of_two_classes",
    ),
    Mutant(
        name="spans_of_others_lost",
        file="magazines.py",
        old="    release(heap, span, (span != 0) & (fits == 0))\n",
        new="",
        breaks="what a block finds in magazines and cannot use is out for good",
        scenario="magazine_of_two_classes",
    ),
    Mutant(
        name="runs_in_magazines",
        file="magazines.py",
        old="slots = active & ((word & SLAB) != 0)",
        new="slots = active",
        breaks="a lane that frees a run puts it into a magazine, as a slot",
        scenario="slots_and_runs",
    ),
    Mutant(
        name="lanes_pay_twice",
        file="magazines.py",
        old=LEFT,
        new="    return page, active.to(tl.int32)\n",
        breaks="a slot in the magazine of a lane is counted as free in its page as well",
        scenario="magazine_of_two_classes",
    ),
    Mutant(
        name="block_pays_for_one",
        file="freeing.py",
        old="counts = tl.where(active & (before == 0), further + 1, 0)",
        new="counts = tl.where(active & (before == 0), 1, 0)",
        breaks="of slots that lanes freed into one page, one is free in its account",
        scenario="block_across_pages",
    ),
    Mutant(
        name="whole_without_looking",
        file="freeing.py",
        old="whole = looks & (lead < count) & (layout.page_out(word) == left)",
        new="whole = looks & (lead < count)",
        breaks="a page is free in which others have slots, if a block frees several of it",
        scenario="block_across_pages",
    ),
    Mutant(
        name="whole_without_winning",
        file="freeing.py",
        old="gone = tl.gather(gone.to(tl.int32), tl.minimum(nth, width(near) - 1), 0)",
        new="gone = tl.gather(whole.to(tl.int32), tl.minimum(nth, width(near) - 1), 0)",
        breaks="slots stay in the account of a page to which another program came",
        scenario="whole_or_reserve",
    ),
    Mutant(
        name="whole_though_kept",
        file="freeing.py",
        old="whole = whole & ((word & (KEPT + SLAB)) == SLAB)",
        new="whole = whole & ((word & SLAB) == SLAB)",
        breaks="a page to which its line's tickets lead does not outlast a block that frees all",
        scenario="kept_by_a_block",
    ),
    Mutant(
        name="wrong_lanes_pay",
        file="freeing.py",
        old="lost = any_lane(hit | ((lane == at) & (active == 0)))",
        new="lost = any_lane((lane == at) & (active == 0))",
        breaks="lanes whose slots were free already take others out of the account",
        scenario="two_frees_of_two_lanes",
    ),
    Mutant(
        name="void_places_stay",
        file="allocation.py",
        old="over = heads & (granted < tickets + skip)",
        new="over = asks & (granted < tickets + skip)",
        breaks="all tickets of a place that leads to no page fail, though there are pages by now",
        scenario="page_comes_back",
    ),
    Mutant(
        name="void_places_stay_for_lanes",
        file="allocation.py",
        old="over = heads & (granted < tickets + skip)",
        new="over = asks & (granted < tickets + skip)",
        breaks="the same for blocks of several classes",
        scenario="page_comes_back_to_lanes",
    ),
    Mutant(
        name="waits_for_what_is_gone",
        file="layout.py",
        old="return ((number - place) & NUMBER_MASK) > (NUMBER_MASK >> 1)",
        new="return ((number - place) & NUMBER_MASK) != 0",
        breaks="who comes too late to a place waits as long as it can",
        scenario="ring_came_round",
    ),
    Mutant(
        name="marked_when_it_may_be_gone",
        file="magazines.py",
        old=PUT,
        new=PUT_EARLY,
        breaks="a page is marked for its slots in a magazine when it is free, or another's",
        scenario="marked_or_gone",
    ),
    Mutant(
        name="asked_without_an_answer",
        file="search.py",
        old="    return granted\n",
        new="    return asks\n",
        breaks="a search takes a slot of a page that had one when it looked",
        scenario="search_or_free",
    ),
    Mutant(
        name="asked_and_not_left",
        file="search.py",
        old="    if any_lane(lost):\n        leave_slots(heap, page, lost)\n",
        new="",
        breaks="what a search adds to a page without room is out for good",
        scenario="search_or_free",
    ),
    Mutant(
        name="run_left_to_the_others",
        file="lines.py",
        old="(((now & SLAB) == 0) | (layout.page_out(now) <= layout.page_half(now)))",
        new="((now & SLAB) != 0) & (layout.page_out(now) <= layout.page_half(now))",
        breaks="a run is not given back by who left its first page as the last",
        scenario="run_left_by_the_last",
    ),
    Mutant(
        name="free_or_nothing",
        file="freeing.py",
        old="double = ((before & RUN) == 0) | (page - head >= layout.run_pages(before))",
        new="double = taken == 0",
        breaks="a double free counts as an address that no block had, if its page is on its way",
        scenario="page_on_its_way",
    ),
    Mutant(
        name="searched_without_looking",
        file="search.py",
        old='sem="relaxed") & bit\n',
        new='sem="relaxed") & 0 | bit\n',
        breaks="a search takes a page that another took first",
        scenario="search_or_line",
    ),
    Mutant(
        name="search_passes_by_full_halves",
        file="search.py",
        old="some = here & (word != 0) & (layout.page_out(word) < slots)",
        new="some = here & (word != 0) & (layout.page_out(word) <= slots >> 1)",
        breaks="a search does not find the last slot of a page",
        scenario="search_finds_the_last",
    ),
    Mutant(
        name="run_taken_in_part",
        file="search.py",
        old="if any_lane(got != bits):",
        new="if any_lane((got == 0) & (bits != 0)):",
        breaks="a run has pages that another program has",
        scenario="two_runs",
    ),
    Mutant(
        name="part_of_a_run_is_kept",
        file="search.py",
        old="got, mask=got != 0, sem=",
        new="got & 0, mask=got != 0, sem=",
        breaks="pages taken for a run that cannot be whole are lost",
        scenario="two_runs",
    ),
    Mutant(
        name="whole_run_given_back",
        file="search.py",
        old="got, mask=got != 0, sem=",
        new="bits, mask=bits != 0, sem=",
        breaks="pages of a run that another program has are free",
        scenario="two_runs",
    ),
    Mutant(
        name="run_retired_without_winning",
        file="lines.py",
        old="won = (atomic_cas(ptr, word, word & 0) == word).to(tl.int32)",
        new="won = (atomic_cas(ptr, word, word & 0) >= 0).to(tl.int32)",
        breaks="the pages of a run are given back twice, although another program has them by now",
        scenario="run_retired_twice",
    ),
    Mutant(
        name="run_without_a_live_bit",
        file="search.py",
        old="tl.atomic_or(ptr - PAGE_WORD, touched.to(tl.int64) + 1, sem=",
        new="tl.atomic_or(ptr - PAGE_WORD, touched.to(tl.int64), sem=",
        breaks="no run can be freed",
        scenario="double_free_of_a_run",
    ),
    Mutant(
        name="runs_do_not_cross",
        file="search.py",
        old="fits = tl.where(across, earlier, fits)",
        new="fits = tl.where(across, tl.minimum(fits, FAR), fits)",
        breaks="a run that reaches into the next word of the row is not found",
        scenario="runs_cross",
    ),
    Mutant(
        name="speaks_for_one_too_many",
        file="live.py",
        old="others = tl.maximum(further, 0) >> period_log2",
        new="others = (tl.maximum(further, 0) >> period_log2) + 1",
        breaks="a lane sets and clears the live bit of a slot that is free, or another program's",
        scenario="lanes_of_one_word",
    ),
    Mutant(
        name="speaks_for_one_too_few",
        file="live.py",
        old="low_mask(others * apart + 1)",
        new="low_mask(tl.maximum(others * apart, 1))",
        breaks="the last lane of a word has no live bit: its slot can be claimed again",
        scenario="lanes_of_one_word",
    ),
    Mutant(
        name="magazines_do_not_rest",
        file="search.py",
        old="    full = here & (atomic_load(ptr, here) != 0)\n    if",
        new="    full = here & (first < 0)\n    if",
        breaks="a malloc fails although what it wants is in a magazine",
        scenario="magazine_rests",
    ),
    Mutant(
        name="kept_pages_do_not_rest",
        file="search.py",
        old="idle = here & ((word & SLAB) != 0) & (layout.page_out(word) == 0)",
        new="idle = here & (first < 0)",
        breaks="a malloc fails although a page is free but kept for another class",
        scenario="kept_page_rests",
    ),
    Mutant(
        name="search_never_gives_up",
        file="search.py",
        old="PASSES = tl.constexpr(16)",
        new="PASSES = tl.constexpr(1 << 30)",
        breaks="a malloc that must fail returns only when others have come to rest",
        scenario="churn",
    ),
)
