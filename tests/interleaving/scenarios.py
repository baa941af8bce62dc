"""The scenarios: which programs meet where.

Sizes used: 1024 B has 64 slots in a page, one word of live bits; 32752 B has two slots in a
page, so that slabs fill and empty with every call; 65536 B is one page.
"""

from __future__ import annotations

from devalloc.sizes import PAGE_BYTES
from devalloc.testing import PCT, Exhaustive, Random
from tests.interleaving.directed import Turn, directed
from tests.interleaving.lab import FOUR_STRIPES, SHELF, TWO_STRIPES, Plan, Scenario
from tests.interleaving.scripts import (
    free,
    free_at,
    free_lanes,
    malloc,
    malloc_lanes,
    malloc_two,
    realloc,
    zeros,
)

WORD = 1024
HALF = 32752
THIRD = 21840
PAGE = PAGE_BYTES


def mostly(schedules: int, preemptions: int = 1, bound: int | None = None) -> Plan:
    """The usual plan: samples, which meet most bugs soon; then everything with few preemptions."""
    return (
        (Random(), max(1, schedules // 10)),
        (Random(stay=0.9), max(1, schedules // 4)),
        (PCT(depth=6), schedules),
        (PCT(depth=3), schedules),
        (Exhaustive(preemptions), bound or 4 * schedules),
    )


ALL = (
    Scenario(
        "one_word",
        pages=1,
        script=((malloc(0, WORD), free(0)), (malloc(1, WORD), free(1))),
        plan=mostly(100, preemptions=3),
    ),
    Scenario(
        "one_word_of_many",
        pages=2,
        script=tuple((malloc(i, WORD), free(i), malloc(i, WORD)) for i in range(4)),
        plan=mostly(30),
    ),
    Scenario(
        "one_slab",
        pages=1,
        script=tuple((malloc(i, HALF), free(i)) for i in range(3)),
        plan=mostly(40),
    ),
    Scenario(
        "one_page",
        pages=1,
        script=tuple((malloc(i, PAGE), free(i)) for i in range(3)),
        plan=mostly(100, preemptions=2),
    ),
    Scenario(
        "opening",
        pages=4,
        script=tuple((malloc(i, HALF),) for i in range(8)),
        plan=((PCT(depth=3), 30), (PCT(depth=8), 30), (Random(), 2)),
    ),
    # Nobody goes first because another only waits: bounded waits end, and the waiter does the work.
    Scenario(
        "waiter_gives_up",
        pages=2,
        script=((malloc(0, HALF),), (malloc(1, HALF), free(1))),
        patience=1 << 20,
        plan=((PCT(depth=2), 40), (PCT(depth=3), 40)),
    ),
    Scenario(
        "opening_classes",
        pages=2,
        script=((malloc(0, WORD),), (malloc(1, HALF),), (malloc(2, THIRD),), (malloc(3, HALF),)),
        plan=mostly(18),
    ),
    Scenario(
        "retire_or_malloc",
        pages=1,
        before=(HALF,),
        script=((free(0),), (malloc(1, HALF),), (malloc(2, WORD),)),
        plan=((PCT(depth=6), 60), (Random(stay=0.9), 7), (PCT(depth=3), 20), (Exhaustive(1), 80)),
    ),
    Scenario(
        "retire_or_free",
        pages=1,
        before=(HALF, HALF),
        script=((free(0),), (free(1),), (malloc(2, PAGE),)),
        plan=mostly(120, preemptions=2),
    ),
    Scenario(
        "cut_anew",
        pages=2,
        before=(HALF, HALF, THIRD),
        script=((free(0), malloc(3, THIRD)), (free(1), malloc(4, WORD)), (free(2),)),
        plan=mostly(60),
    ),
    Scenario(
        "runs_cross",
        pages=6,
        before=(2 * PAGE, PAGE, 2 * PAGE, PAGE),
        script=(
            (free(0), malloc(4, 3 * PAGE)),
            (free(1), malloc(5, 2 * PAGE)),
            (free(2), malloc(6, PAGE)),
        ),
        plan=mostly(60),
    ),
    Scenario(
        "hint_dropped",
        pages=3,
        before=(2 * PAGE, PAGE),
        script=((free(0),), (malloc(2, 3 * PAGE),)),
        plan=mostly(60, preemptions=2),
    ),
    # A hint is dropped for a request that nothing can serve, while the memory for another comes
    # back. The other, program 2, looks into the wrong chunk first: the first of the heap.
    Scenario(
        "hint_missing",
        pages=128,
        filler=125,
        before=(2 * PAGE, PAGE),
        script=((free(0),), (malloc(2, 3 * PAGE),), (malloc(3, 2 * PAGE),)),
        plan=(
            *directed(Turn(1, "drop_hints"), Turn(0), Turn(1, "drop_hints"), Turn(2)),
            (PCT(depth=3), 60),
        ),
    ),
    # The hints were dropped; two frees together make a run that neither makes alone.
    Scenario(
        "hints_anew",
        pages=2,
        before=(PAGE, PAGE),
        script=((malloc(2, 2 * PAGE), free(0)), (free(1),)),
        plan=mostly(60, preemptions=2),
    ),
    Scenario(
        "class_hint_dropped",
        pages=1,
        before=(HALF, HALF),
        script=((malloc(2, HALF),), (free(0),)),
        plan=mostly(60, preemptions=2),
    ),
    Scenario(
        "tail_of_a_run",
        pages=128,
        before=(64 * PAGE, PAGE, PAGE),
        script=((free(0), free(1), malloc(3, 65 * PAGE)), (free(2),)),
        plan=mostly(40, preemptions=2),
    ),
    Scenario(
        "long_runs_cross",
        pages=192,
        before=(64 * PAGE, 64 * PAGE),
        script=(
            (free(0), malloc(4, 65 * PAGE)),
            (free(1), malloc(5, 128 * PAGE)),
            (malloc(6, PAGE), free(6)),
        ),
        plan=mostly(60),
    ),
    # Program 1 has looked at two chunks and is about to claim them; 4 takes a page of the second.
    Scenario(
        "front_of_a_run",
        pages=192,
        before=(64 * PAGE, 64 * PAGE),
        script=(
            (free(0), malloc(4, 65 * PAGE)),
            (free(1), malloc(5, 128 * PAGE)),
            (),
            (),
            (malloc(6, PAGE),),
        ),
        plan=(
            *directed(Turn(0, "run_script", 3), Turn(1, "claim_chunks"), Turn(4), Turn(1), Turn(0)),
            (PCT(depth=3), 20),
        ),
    ),
    Scenario(
        "in_hand_slots",
        pages=1,
        before=(HALF, HALF),
        script=((free(0), malloc(2, HALF)), (free(1), malloc(3, HALF))),
        plan=mostly(40, preemptions=2),
    ),
    Scenario(
        "in_hand_pages",
        pages=2,
        before=(HALF, HALF, HALF, HALF),
        script=((free(0), free(1), malloc(4, PAGE)), (free(2), free(3), malloc(5, PAGE))),
        plan=mostly(60),
    ),
    Scenario(
        "in_hand_stripes",
        pages=TWO_STRIPES,
        filler=TWO_STRIPES - 1,
        before=(HALF, HALF),
        script=((free(0), malloc(2, HALF)), (free(1), malloc(3, HALF))),
        plan=mostly(20),
    ),
    Scenario(
        "full_heap",
        pages=1,
        before=(HALF, HALF),
        script=((malloc(2, HALF), malloc(3, HALF)), (free(0), malloc(4, HALF)), (free(1),)),
        plan=mostly(12),
    ),
    # While program 0 searches, 1 leaves a free slot in a stripe that it has passed, and 3 frees a
    # slot that it has passed and takes that one: at every moment some slot is free or taken by a
    # call that has begun.
    Scenario(
        "slots_move",
        pages=TWO_STRIPES,
        filler=TWO_STRIPES - 2,
        before=(HALF, HALF, HALF, HALF),
        script=(
            (malloc(4, HALF),),
            (free(2), free(3), malloc(5, HALF)),
            (),
            (free(0), malloc(6, HALF)),
        ),
        plan=((PCT(depth=4), 15), (Random(stay=0.95), 25)),
    ),
    Scenario(
        "double_free",
        pages=1,
        before=(WORD, WORD),
        script=((free(0),), (free(0),), (malloc(2, WORD),)),
        plan=mostly(100),
    ),
    Scenario(
        "double_free_of_the_last",
        pages=1,
        before=(HALF,),
        script=((free(0),), (free(0),)),
        plan=mostly(150, preemptions=3),
    ),
    Scenario(
        "double_free_of_a_run",
        pages=2,
        before=(2 * PAGE,),
        script=((free(0),), (free(0),)),
        plan=mostly(200, preemptions=3),
    ),
    Scenario(
        "wild_frees",
        pages=2,
        before=(HALF, PAGE),
        script=(
            (free(0), malloc(2, HALF), free(2)),
            (free_at(0, 16), free_at(1, 4096)),
            (free_at(0, -(1 << 40)), free_at(1, 8)),
        ),
        plan=mostly(40),
    ),
    Scenario(
        "realloc",
        pages=3,
        before=(48, HALF),
        script=(
            (realloc(0, 256), free(0)),
            (realloc(1, PAGE), realloc(1, 16)),
            (malloc(2, HALF), free(2)),
        ),
        exact=False,
        plan=mostly(12),
    ),
    Scenario(
        "zeros",
        pages=1,
        script=((zeros(0, 64), free(0)), (zeros(1, 64), free(1))),
        plan=mostly(60),
    ),
    Scenario(
        "lanes",
        pages=2,
        script=(
            (malloc_lanes(0, HALF), free_lanes(0)),
            (malloc_lanes(4, HALF), free_lanes(4)),
        ),
        plan=mostly(20),
    ),
    Scenario(
        "lanes_one_by_one",
        pages=2,
        script=(
            (malloc_lanes(0, THIRD), free_lanes(0)),
            (malloc_lanes(4, THIRD), free_lanes(4)),
        ),
        split_blocks=True,
        plan=((PCT(depth=3), 30), (PCT(depth=8), 30), (Random(stay=0.8), 4)),
    ),
    # One lane speaks for all: slots of 1 KiB lie in one word of live bits.
    Scenario(
        "lanes_of_one_word",
        pages=1,
        script=(
            (malloc_lanes(0, WORD), free_lanes(0), malloc_lanes(0, WORD)),
            (malloc_lanes(4, WORD), free_lanes(4)),
        ),
        plan=mostly(20),
    ),
    # Lanes that want one class take their tickets together, and those that free into one page speak
    # together for it.
    Scenario(
        "lanes_of_two_classes",
        pages=2,
        script=(
            (malloc_two(0, 256), free_lanes(0), malloc_two(0, 256)),
            (malloc_two(4, 256), free_lanes(4)),
        ),
        plan=mostly(20),
    ),
    # Two slots are freed together that are all there is in a page, which is in a batch or can be
    # found.
    Scenario(
        "lanes_free_a_page",
        pages=2,
        before=(HALF, HALF),
        script=((free_lanes(0),), (malloc(4, HALF),)),
        plan=mostly(40, preemptions=2),
    ),
    # Four, in two pages of their own.
    Scenario(
        "lanes_free_their_pages",
        pages=2,
        script=(
            (malloc_lanes(0, HALF), free_lanes(0)),
            (malloc(4, 2 * PAGE), free(4)),
            (malloc(5, HALF), free(5)),
        ),
        plan=mostly(20),
    ),
    # The same and a run, where what is freed stays on the shelf, and is asked for again or not.
    Scenario(
        "shelf_changes_use",
        pages=SHELF,
        script=(
            (
                malloc_lanes(0, HALF),
                malloc(4, PAGE),
                free_lanes(0),
                free(4),
                malloc(5, PAGE),
                malloc(6, PAGE),
                malloc(7, 2 * PAGE),
                free(7),
                malloc_lanes(0, HALF),
            ),
            (malloc_lanes(8, HALF), free_lanes(8), malloc_lanes(8, HALF)),
        ),
        plan=mostly(6),
    ),
    # All that is free lies on the shelf, once program 3 has taken the rest. 1 takes it from there
    # and finds it too little; 2 needs it.
    Scenario(
        "shelf_or_search",
        pages=SHELF + 64,
        filler=SHELF - 64,
        script=(
            (malloc_lanes(0, HALF), free_lanes(0)),
            (malloc(4, 3 * PAGE),),
            (malloc(5, 2 * PAGE), free(5)),
            (malloc(6, 64 * PAGE), malloc(7, 62 * PAGE)),
        ),
        plan=(
            *directed(Turn(0), Turn(3), Turn(1, "clear_place", 2), Turn(2)),
            *mostly(8),
        ),
    ),
    # Pages of a program's own lie on the shelf; a page that others can find does not.
    Scenario(
        "shelf_or_batch",
        pages=SHELF,
        before=(HALF, HALF, HALF),
        script=((free_lanes(0),), (malloc(4, HALF), free(4))),
        plan=mostly(10),
    ),
    # Program 0 frees a slot of a page of its own; before it settles the page, 1 draws the slot, and
    # 2 frees all that is in the page, which goes on the shelf.
    Scenario(
        "shelf_settled_late",
        pages=SHELF,
        filler=320,
        before=(HALF, HALF),
        script=((malloc_lanes(4, HALF), free(4)), (malloc(4, HALF),), (free_lanes(4),)),
        plan=directed(Turn(0, "settle"), Turn(1), Turn(2), Turn(0)),
    ),
    Scenario(
        "double_free_of_one_lane",
        pages=1,
        before=(WORD, WORD, WORD, WORD),
        script=((free_lanes(0),), (free(2),), (malloc(5, WORD),)),
        plan=mostly(40, preemptions=2),
    ),
    Scenario(
        "ticket_outlives_its_batch",
        pages=1,
        script=(
            (malloc(0, HALF),),
            (malloc(1, HALF), free(1), malloc(2, HALF)),
            (malloc(3, HALF),),
        ),
        plan=(
            *directed(Turn(1, "run_script", 3), Turn(0, "claim_tickets"), Turn(1), Turn(0)),
            (PCT(depth=3), 20),
            (PCT(depth=6), 20),
        ),
    ),
    Scenario(
        "batch_runs_dry",
        pages=2,
        script=(
            (malloc(0, HALF), malloc(1, HALF), free(1), malloc(2, HALF)),
            (malloc(3, WORD), free(3)),
        ),
        plan=mostly(20),
    ),
    # The eleventh slot of its class comes from a spare. While program 0 has it in hand, 2 wants its
    # pages, and finds nothing: it must not fail. 1 waits for what 0 leaves.
    Scenario(
        "spare_in_hand",
        pages=16,
        script=(
            tuple(malloc(i, HALF) for i in range(11)),
            (malloc(11, HALF),),
            (malloc(12, 8 * PAGE),),
        ),
        plan=directed(Turn(0, "swap", 5), Turn(2), Turn(1), Turn(0), Turn(1)),
    ),
    # Blocks use up a batch, and its spare. Meanwhile another wants pages.
    Scenario(
        "blocks_swap",
        pages=16,
        script=(
            (malloc_lanes(0, THIRD), malloc_lanes(4, THIRD)),
            (malloc_lanes(8, THIRD), malloc_lanes(12, THIRD), free_lanes(12)),
            (malloc(16, 8 * PAGE), free(16)),
        ),
        plan=mostly(8),
    ),
    # Program 2 sees an idle batch; 0 refills the stripe and is about to install what it opened; 2
    # exchanges what it takes for the batch; so 1 finds the stripe without a refiller and installs
    # a batch as well.
    Scenario(
        "two_refillers",
        pages=3,
        script=(
            (malloc(0, HALF), malloc(1, HALF), free(0), free(1), malloc(2, HALF)),
            (malloc(3, HALF),),
            (malloc(4, 3 * PAGE),),
        ),
        plan=directed(
            Turn(0, "run_script", 10),
            Turn(2, "flush"),
            Turn(0, "install"),
            Turn(2, "end_transit"),
            Turn(1),
            Turn(0),
        ),
    ),
    # Two frees in one chunk. The first has set its page bit and not yet its hint; the second has
    # returned and set none, for nothing new is deserved. Who searches then, looking into the
    # first chunk first, must wait for the first.
    Scenario(
        "hint_of_another",
        pages=128,
        filler=126,
        before=(PAGE, PAGE),
        script=((free(0),), (), (malloc(2, PAGE), free(1), malloc(3, PAGE))),
        plan=directed(Turn(2, "run_script", 3), Turn(0, "give_pages", 2), Turn(2)),
    ),
    # A page that is in use is moved from chunk to chunk, always behind a search for a whole one, in
    # each of its three passes. Program 1 looks into the second chunk first, 2 into the first.
    Scenario(
        "run_behind_a_search",
        pages=128,
        before=(PAGE,),
        script=(
            (malloc(6, 64 * PAGE),),
            (free(0), malloc(1, PAGE), free(2), malloc(3, PAGE), free(4), malloc(5, PAGE)),
            (free(1), malloc(2, PAGE), free(3), malloc(4, PAGE)),
        ),
        plan=directed(
            Turn(0, "whole_chunks", 2),
            Turn(1, "run_script", 5),
            Turn(0, "take_chunks"),
            Turn(2, "run_script", 5),
            Turn(0, "whole_chunks", 2),
            Turn(1, "run_script", 5),
            Turn(0, "take_chunks"),
            Turn(2),
            Turn(0, "whole_chunks", 2),
            Turn(1),
            Turn(0),
        ),
    ),
    # The only free slot is moved behind a search twice, without transit: freed into a batch that
    # the search has passed, while the last credit of one ahead of it is taken. In between, before
    # the search reads the epochs, program 2 takes what was freed and 3 has its batch renewed.
    Scenario(
        "slots_move_unannounced",
        pages=FOUR_STRIPES,
        filler=FOUR_STRIPES - 3,
        script=(
            (malloc(0, HALF),),
            (malloc(1, HALF), malloc(2, HALF), free(1)),
            (malloc(3, HALF), malloc(4, HALF), free(3), malloc(6, HALF)),
            (
                malloc(5, HALF),
                malloc(7, HALF),
                free(5),
                free(7),
                malloc(8, HALF),
                malloc(9, HALF),
            ),
        ),
        plan=directed(
            Turn(1, "run_script", 6),
            Turn(2, "run_script", 6),
            Turn(3, "run_script", 3),
            Turn(0, "next_batch", 5),
            Turn(2, "run_script", 2),
            Turn(3, "run_script", 3),
            Turn(0, "collect"),
            Turn(3, "run_script", 7),
            Turn(2),
            Turn(0, "next_batch", 3),
            Turn(1),
            Turn(3),
            Turn(0),
        ),
    ),
)

BY_NAME = {scenario.name: scenario for scenario in ALL}
