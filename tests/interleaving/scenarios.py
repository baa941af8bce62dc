"""The scenarios: which programs meet where.

Sizes used: 1024 B has 64 slots in a page; 8192 B has 8, so that four of them are half; 21840 B has
three; 32752 B has two, so that places and pages are used up with every call. Without magazines
every malloc takes a ticket, and every free leaves the account of its page.
"""

from __future__ import annotations

import random

from devalloc.sizes import PAGE_BYTES
from devalloc.testing import PCT, Exhaustive, Random
from tests.interleaving.directed import Turn, directed
from tests.interleaving.lab import SLOTS, Plan, Scenario
from tests.interleaving.scripts import (
    Op,
    Script,
    free,
    free_at,
    free_lanes,
    malloc,
    malloc_lanes,
    malloc_two,
    realloc,
)

WORD = 1024
EIGHTH = 8192
THIRD = 21840
HALF = 32752
CHURN = 40  # pairs of malloc and free


ONCE: Plan = ((Random(), 1),)  # of one program

# The first fills a page and frees all of it, the second asks that page, the third wants it whole.
EMPTIED: Script = (
    (malloc_lanes(5, EIGHTH), free(0), free_lanes(1), free(5), free(6), free(7)),
    (malloc(9, EIGHTH), free(9)),
    (malloc(10, PAGE_BYTES), free(10)),
)


def samples(schedules: int) -> Plan:
    """Fair schedules, and such as change programs rarely."""
    return (
        (Random(), max(1, schedules // 4)),
        (Random(stay=0.9), max(1, schedules // 2)),
        (PCT(depth=6), schedules),
        (PCT(depth=3), schedules),
    )


def mostly(schedules: int, preemptions: int | None = 1, bound: int = 0) -> Plan:
    """Samples; then everything with few preemptions."""
    return (*samples(schedules), (Exhaustive(preemptions), bound or 4 * schedules))


def late(first: Turn, second: Turn) -> Plan:
    """Program 0 has a ticket of a page, and comes to it when program 1 has taken its first turn. It
    takes back what it added to the page after the second."""
    return directed(Turn(0, "promise"), first, Turn(0, "leave_account"), second, Turn(0), Turn(1))


ALL = (
    # Five want the four slots that are left: one of a line that found the page half empty, and a
    # block of another line that found it so as well.
    Scenario(
        "last_slot",
        pages=1,
        magazines=0,
        stripes=2,
        before=(EIGHTH,) * 8,
        script=(
            (free(0), free(1), free(2), free(3), malloc(8, EIGHTH), malloc(9, EIGHTH)),
            (free(4), malloc_lanes(10, EIGHTH)),
        ),
        plan=(
            *directed(Turn(0, "run_script", 9), Turn(1, "promise"), Turn(0), Turn(1)),
            *mostly(12),
        ),
    ),
    # A place is used up while its last ticket's holder keeps its page, or has freed it.
    Scenario(
        "last_ticket",
        pages=2,
        magazines=0,
        script=((malloc(0, HALF), free(0)), (malloc(1, HALF), free(1))),
        plan=mostly(40, preemptions=2, bound=400),
    ),
    # A page is emptied when another program has found it half empty, and comes for a slot.
    Scenario(
        "retire_or_reserve",
        pages=1,
        magazines=0,
        before=(HALF, HALF),
        script=((free(0), free(1)), (malloc(2, HALF), free(2))),
        plan=(
            *directed(
                Turn(0, "run_script", 2),
                Turn(1, "promise"),
                Turn(0, "retire"),
                Turn(1, "claim_span"),
                Turn(0),
                Turn(1),
            ),
            *mostly(40, preemptions=2, bound=300),
        ),
    ),
    # ... and while another class wants the page.
    Scenario(
        "retire_or_open",
        pages=1,
        magazines=0,
        before=(HALF, HALF),
        script=((free(0), free(1)), (malloc(2, THIRD), free(2)), (malloc(3, HALF), free(3))),
        plan=mostly(40, bound=150),
    ),
    # Program 0 has a ticket of a page that is retired and opened for another class, before it asks
    # the page.
    Scenario(
        "late_ticket",
        pages=1,
        magazines=0,
        searches=False,
        script=(
            (malloc(0, HALF), free(0)),
            (malloc(1, HALF), free(1), malloc(2, THIRD), free(2)),
        ),
        plan=(
            *directed(Turn(0, "promise"), Turn(1, "run_script", 5), Turn(0)),
            *late(Turn(1, "run_script", 5), Turn(1)),
            *mostly(30),
        ),
    ),
    # ... and takes back what it added when that class is gone; when it has come meanwhile; when its
    # opener has taken the page's bit and not yet written the page's word.
    Scenario(
        "late_undo",
        pages=1,
        magazines=0,
        script=(
            (malloc(0, HALF), free(0)),
            (malloc(1, HALF), free(1), malloc(2, THIRD), free(2), malloc(3, THIRD)),
        ),
        plan=(
            *late(Turn(1, "run_script", 5), Turn(1, "run_script", 2)),
            *late(Turn(1, "run_script", 4), Turn(1, "run_script")),
            *late(Turn(1, "run_script", 4), Turn(1, "open_places", 2)),
            *mostly(20),
        ),
    ),
    # The same with blocks of two classes.
    Scenario(
        "late_lanes",
        pages=3,
        magazines=0,
        script=(
            (malloc_two(0, THIRD // 2), free_lanes(0)),
            (malloc_two(4, THIRD // 2), free_lanes(4), malloc(8, HALF), malloc(9, EIGHTH)),
        ),
        plan=(
            *directed(Turn(0, "promise"), Turn(1), Turn(0)),
            *samples(20),
        ),
    ),
    # Both programs find the same page with room for half of its slots, by different lines.
    Scenario(
        "one_half_for_two",
        pages=2,
        magazines=0,
        stripes=2,
        before=(EIGHTH,) * 6,
        script=(
            (free(0), free(1), malloc(6, EIGHTH)),
            (free(2), malloc(7, EIGHTH), free(3), malloc(8, EIGHTH)),
        ),
        plan=mostly(30),
    ),
    # A page is left half empty again and again, and its line's places lead there.
    Scenario(
        "halves_come_and_go",
        pages=2,
        magazines=0,
        before=(HALF, HALF),
        script=(
            (free(0), malloc(0, HALF), free(0)),
            (free(1), malloc(1, HALF), free(1), malloc(1, HALF)),
        ),
        plan=mostly(30),
    ),
    # A slot that a ticket names is live: the page was found half empty.
    Scenario(
        "slots_named_twice",
        pages=1,
        magazines=0,
        before=(EIGHTH,) * 8,
        script=(
            (free(1), free(3), free(5), free(7), malloc_lanes(8, EIGHTH)),
            (free(2), malloc(12, EIGHTH)),
        ),
        plan=samples(20),
    ),
    # One word for all magazines: what one program frees, another takes or puts aside.
    Scenario(
        "one_magazine",
        pages=2,
        script=((malloc(0, WORD), free(0), malloc(0, WORD)), (malloc(1, WORD), free(1))),
        plan=mostly(40, preemptions=2, bound=400),
    ),
    Scenario(
        "magazine_of_another_class",
        pages=3,
        before=(WORD, WORD, EIGHTH),
        script=(
            (free(0), malloc(3, EIGHTH), free(3)),
            (free(2), malloc(4, WORD)),
            (free(1), malloc(5, EIGHTH)),
        ),
        plan=mostly(30),
    ),
    Scenario(
        "magazine_of_another_count",
        pages=2,
        script=(
            (malloc_lanes(0, WORD), free_lanes(0), malloc_lanes(0, WORD)),
            (malloc(4, WORD), free(4), malloc(4, WORD)),
        ),
        plan=mostly(20),
    ),
    # A block of two classes: a magazine for each lane; they all have one.
    Scenario(
        "magazine_of_two_classes",
        pages=4,
        script=(
            (malloc_two(0, WORD), free_lanes(0), malloc_two(0, WORD)),
            (malloc(4, WORD), free(4), malloc(4, 2 * WORD)),
        ),
        plan=mostly(20),
    ),
    # ... and another block takes what it put aside, of other classes.
    Scenario(
        "magazines_of_other_classes",
        pages=6,
        magazines=64,
        script=(
            (malloc_two(0, WORD), free_lanes(0), malloc_two(0, 2 * WORD), free_lanes(0)),
            (malloc_two(4, WORD), free_lanes(4), malloc_two(4, WORD)),
        ),
        plan=mostly(10),
    ),
    # A block frees slots and runs.
    Scenario(
        "slots_and_runs",
        pages=4,
        magazines=4,
        script=(
            (malloc_two(0, THIRD), free_lanes(0), malloc_two(0, THIRD)),
            (malloc(4, THIRD), free(4)),
        ),
        plan=mostly(10),
    ),
    # The slots in a magazine are the last of their page, whose other slots another program claims.
    Scenario(
        "magazine_or_claim",
        pages=1,
        before=(HALF, HALF),
        script=((free(0), malloc(2, HALF)), (free(1), malloc(3, HALF))),
        plan=mostly(40, preemptions=2, bound=400),
    ),
    # The opener of a place stands still, and others give up waiting for it.
    Scenario(
        "opener_stands_still",
        pages=8,
        magazines=0,
        ring=8,
        nulls=False,
        script=((malloc(0, HALF), free(0)), (malloc(1, HALF),), (malloc(2, HALF), free(2))),
        plan=(
            *directed(Turn(0, "try_pages"), Turn(1), Turn(2), Turn(0)),
            *directed(Turn(0, "open_places", 2), Turn(1), Turn(2), Turn(0)),
            *directed(Turn(0, "open_places", 3), Turn(1), Turn(2), Turn(0)),
            *samples(20),
        ),
    ),
    # ... for so long that the ring comes round to its place.
    Scenario(
        "ring_comes_round",
        pages=4,
        magazines=0,
        ring=1,
        script=(
            (malloc(0, HALF), free(0)),
            (malloc(1, HALF), malloc(2, HALF), malloc(3, HALF), free(2)),
        ),
        plan=(
            *directed(Turn(0, "open_places", 2), Turn(1), Turn(0)),
            *directed(Turn(0, "promise"), Turn(1), Turn(0)),
            *mostly(20),
        ),
    ),
    # A ticket's place is gone when its holder looks: it does not wait.
    Scenario(
        "ring_came_round",
        pages=4,
        magazines=0,
        ring=1,
        polls=1 << 20,
        nulls=False,
        script=((malloc(0, HALF), malloc(1, HALF)), (malloc(2, HALF),)),
        plan=directed(Turn(0, "run_script"), Turn(1, "await_places"), Turn(0), Turn(1)),
    ),
    # A holder of a ticket comes to a page that a block fills as a whole.
    Scenario(
        "whole_pages_or_late_ticket",
        pages=2,
        magazines=0,
        script=(
            (malloc(1, HALF), free(1), malloc_lanes(2, HALF), free_lanes(2)),
            (malloc(0, HALF), free(0)),
        ),
        plan=(
            *directed(
                Turn(1, "promise"),
                Turn(0, "run_script", 5),
                Turn(1, "pass_over"),
                Turn(0),
                Turn(1),
            ),
            *directed(
                Turn(1, "promise"),
                Turn(0, "run_script", 4),
                Turn(1, "leave_account"),
                Turn(0, "run_script"),
                Turn(1),
                Turn(0),
            ),
            *directed(Turn(1, "promise"), Turn(0, "malloc_whole"), Turn(1), Turn(0)),
            *mostly(20),
        ),
    ),
    Scenario(
        "whole_pages",
        pages=5,
        script=(
            (malloc_lanes(0, HALF), free_lanes(0)),
            (malloc_lanes(4, HALF), free(4), free(7), malloc(8, HALF)),
        ),
        plan=mostly(20),
    ),
    # A block frees all that is out of a page that another program has found with room.
    Scenario(
        "whole_or_reserve",
        pages=1,
        magazines=0,
        before=(2 * EIGHTH,) * 4,
        script=(
            (free(0), free_lanes(1)),
            (malloc(5, 2 * EIGHTH), free(5)),
            (malloc(6, THIRD), free(6)),
        ),
        plan=(
            *directed(Turn(0, "retire"), Turn(1, "claim_others"), Turn(0), Turn(1)),
            *mostly(20),
        ),
    ),
    # A block and a scalar leave one page.
    Scenario(
        "block_and_scalar",
        pages=1,
        before=(EIGHTH,) * 6,
        script=((free_lanes(0),), (free(4), free(5)), (malloc(6, EIGHTH), free(6))),
        plan=mostly(20),
    ),
    Scenario(
        "block_and_scalar_alone",
        pages=1,
        magazines=0,
        before=(EIGHTH,) * 5,
        script=((free_lanes(0),), (free(4), malloc(5, THIRD))),
        plan=mostly(30, preemptions=2, bound=400),
    ),
    # Lanes free consecutive slots of two pages.
    Scenario(
        "block_across_pages",
        pages=2,
        magazines=0,
        before=(EIGHTH,) * 6,
        script=((malloc_lanes(6, EIGHTH), free_lanes(6)), (free(0), malloc(10, THIRD))),
        plan=mostly(10),
    ),
    Scenario(
        "lanes_by_turns",
        pages=2,
        script=(
            (malloc_lanes(0, THIRD), free_lanes(0)),
            (malloc_two(4, THIRD // 2), free_lanes(4)),
        ),
        split_blocks=True,
        plan=((PCT(depth=3), 15), (Random(stay=0.8), 5)),
    ),
    # A lane's class leads to a page that is the class of another lane's by now.
    Scenario(
        "two_classes_one_page",
        pages=2,
        magazines=0,
        before=(2 * EIGHTH,) * 4,
        script=(
            (
                free(0),
                free(1),
                malloc(0, 2 * EIGHTH),
                free(0),
                free(2),
                free(3),
                malloc(4, EIGHTH),
                malloc_two(5, EIGHTH),
            ),
        ),
        plan=ONCE,
    ),
    # A page that is kept serves one program again and again.
    Scenario(
        "kept",
        pages=2,
        magazines=0,
        opened=1,
        nulls=False,
        script=((malloc(0, WORD), free(0), malloc(1, WORD), free(1), malloc(2, WORD)),),
        plan=ONCE,
    ),
    # ... if a block frees all that is out of it, too.
    Scenario(
        "kept_by_a_block",
        pages=2,
        magazines=0,
        opened=1,
        nulls=False,
        script=((malloc(0, THIRD), malloc(1, THIRD), free_lanes(0), malloc(4, THIRD)),),
        plan=ONCE,
    ),
    # One whose place is used up does not outlast its slots.
    Scenario(
        "used_up",
        pages=1,
        magazines=0,
        searches=False,
        nulls=False,
        script=((malloc(0, HALF), malloc(1, HALF), free(0), free(1), malloc(2, THIRD)),),
        plan=ONCE,
    ),
    # A place was opened when there was no page, and then there is one.
    Scenario(
        "page_comes_back",
        pages=1,
        magazines=0,
        searches=False,
        before=(HALF, HALF),
        served=(3,),
        script=((malloc(2, WORD), free(0), free(1), malloc(3, WORD)),),
        plan=ONCE,
    ),
    Scenario(
        "page_comes_back_to_lanes",
        pages=1,
        magazines=0,
        searches=False,
        before=(HALF, HALF),
        served=(4, 6),
        script=((malloc_two(2, WORD), free(0), free(1), malloc_two(4, WORD)),),
        plan=ONCE,
    ),
    # Two openers look for the last free page, each for its class.
    Scenario(
        "one_page_for_two",
        pages=3,
        magazines=0,
        before=(HALF,) * 4,
        script=((malloc(4, HALF),), (malloc(5, THIRD),)),
        plan=mostly(20),
    ),
    # An opener takes a page in advance, finds two that are half empty, and gives it back.
    Scenario(
        "half_pages_suffice",
        pages=3,
        magazines=0,
        before=(HALF,) * 6,
        script=(
            (free(0), free(1), free(2), free(4), malloc(6, HALF), malloc(7, HALF)),
            (malloc(8, HALF),),
        ),
        plan=mostly(10),
    ),
    Scenario(
        "two_frees_of_one",
        pages=1,
        magazines=0,
        before=(HALF, HALF),
        script=((free(0),), (free(0),)),
        plan=mostly(30, preemptions=2, bound=400),
    ),
    # One lane of a block speaks for all, and two of them are wrong.
    Scenario(
        "two_frees_of_two_lanes",
        pages=1,
        magazines=0,
        before=(WORD,) * 6,
        script=((free_lanes(0),), (free(1), free(2))),
        plan=mostly(30, preemptions=2, bound=400),
    ),
    # ... and the block frees pages.
    Scenario(
        "two_frees_of_two_pages",
        pages=3,
        magazines=0,
        script=((malloc_lanes(0, HALF), free(0), free(3), free_lanes(0)),),
        plan=ONCE,
    ),
    # A page is marked before one of its slots is in a magazine: then it may be another's soon.
    Scenario(
        "marked_or_gone",
        pages=1,
        before=(THIRD,),
        script=((free(0),), (malloc(1, PAGE_BYTES), free(1))),
        plan=(
            *directed(Turn(0, "put_span", 2), Turn(1), Turn(0)),
            *mostly(10),
        ),
    ),
    # No line leads to the slot that is free, and a search finds it.
    Scenario(
        "search_finds_the_last",
        pages=1,
        magazines=0,
        guesses=0,
        nulls=False,
        before=(EIGHTH,) * 8,
        script=((free(3), malloc(8, EIGHTH)),),
        plan=ONCE,
    ),
    # A search asks a page that is emptied, and is another's, since it looked.
    Scenario(
        "search_or_free",
        pages=1,
        magazines=0,
        guesses=0,
        before=(EIGHTH,) * 5,
        script=EMPTIED,
        plan=(
            *directed(Turn(0, "run_script", 4), Turn(1, "promise"), Turn(0), Turn(2), Turn(1)),
            *samples(16),
        ),
    ),
    # ... and so does a guess, which leaves a page that another class opens meanwhile.
    Scenario(
        "guess_or_free",
        pages=1,
        magazines=0,
        before=(EIGHTH,) * 5,
        script=EMPTIED,
        plan=(
            *directed(Turn(0, "run_script", 2), Turn(1, "guess_slots"), Turn(0), Turn(2), Turn(1)),
            *samples(16),
        ),
    ),
    # A guess is refused by a page that is full meanwhile, and leaves it when all others have.
    Scenario(
        "guess_leaves_the_last",
        pages=1,
        magazines=0,
        before=(EIGHTH,) * 7,
        script=(
            (malloc(7, EIGHTH), *(free(slot) for slot in range(8))),
            (malloc(9, EIGHTH), free(9)),
        ),
        plan=(
            *directed(
                Turn(0, "promise"),
                Turn(1, "promise"),
                Turn(0, "free_scalar"),
                Turn(1, "leave_slots"),
                Turn(0),
                Turn(1),
            ),
            *samples(8),
        ),
    ),
    # A search and a line want the page that is free.
    Scenario(
        "search_or_line",
        pages=1,
        magazines=0,
        guesses=0,
        before=(HALF, HALF),
        script=((free(0), free(1), malloc(4, THIRD)), (malloc(5, EIGHTH),)),
        plan=(
            *directed(
                Turn(1, "search_slots"),
                Turn(0, "run_script", 4),
                Turn(1, "search_slots", 2),
                Turn(0),
                Turn(1),
            ),
            *samples(8),
        ),
    ),
    # Runs of adjacent pages, of which each is whole or is not.
    Scenario(
        "two_runs",
        pages=4,
        magazines=0,
        script=(
            (malloc(0, HALF), free(0)),
            (malloc(1, 2 * PAGE_BYTES), free(1)),
            (malloc(2, 2 * PAGE_BYTES), free(2)),
        ),
        plan=mostly(16, bound=60),
    ),
    # A program that reserved slots of a page claims one that is in another's magazine.
    Scenario(
        "slot_of_a_magazine",
        pages=1,
        magazines=2,
        before=(EIGHTH,) * 8,
        script=(
            (free(0), free(1), free(2), free(3), free(4)),
            (malloc_lanes(8, EIGHTH),),
        ),
        plan=(*directed(Turn(0), Turn(1)), *samples(8)),
    ),
    # One lane speaks for all: slots of 1 KiB lie in one word of live bits.
    Scenario(
        "lanes_of_one_word",
        pages=1,
        script=(
            (malloc_lanes(0, WORD), free_lanes(0), malloc_lanes(0, WORD)),
            (malloc_lanes(4, WORD), free_lanes(4)),
        ),
        plan=mostly(12),
    ),
    # Two retire one run: the program that freed it, while one that came too late to its page was
    # there, and another that came too late.
    Scenario(
        "run_retired_twice",
        pages=1,
        magazines=0,
        script=(
            (malloc(0, EIGHTH),),
            (malloc(1, EIGHTH), free(1), malloc(2, PAGE_BYTES), free(2)),
            (malloc(3, EIGHTH),),
        ),
        plan=(
            *directed(
                Turn(0, "promise"),
                Turn(2, "promise"),
                Turn(1, "retire_run"),
                Turn(0, "pass_over"),
                Turn(1, "leave_slots"),
                Turn(0),
                Turn(1, "retire_run"),
                Turn(2),
                Turn(1),
            ),
            *samples(8),
        ),
    ),
    # The last of these who leaves has to retire it.
    Scenario(
        "run_left_by_the_last",
        pages=1,
        magazines=0,
        script=(
            (malloc(0, EIGHTH),),
            (malloc(1, EIGHTH), free(1), malloc(2, PAGE_BYTES), free(2)),
        ),
        plan=(
            *directed(
                Turn(0, "promise"),
                Turn(1, "retire_run"),
                Turn(0, "leave_account"),
                Turn(1, "leave_slots"),
                Turn(0),
                Turn(1),
            ),
            *samples(8),
        ),
    ),
    Scenario(
        "double_free_of_a_run",
        pages=2,
        before=(2 * PAGE_BYTES,),
        script=((free(0),), (free(0),)),
        plan=mostly(30, preemptions=2, bound=200),
    ),
    # A second free comes when the page of its block is no slab any more, and not free yet.
    Scenario(
        "page_on_its_way",
        pages=1,
        magazines=0,
        before=(HALF, HALF),
        script=((free(0), free(1)), (free(0),)),
        doubles=True,
        plan=(*directed(Turn(0, "give_pages"), Turn(1), Turn(0)), *mostly(16)),
    ),
    Scenario(
        "wild_frees",
        pages=2,
        before=(HALF, PAGE_BYTES),
        script=(
            (free(0), malloc(2, HALF), free(2)),
            (free_at(0, 16), free_at(1, 4096)),
            (free_at(0, -(1 << 40)), free_at(1, 8)),
        ),
        plan=mostly(12, bound=30),
    ),
    # Runs that reach into the next word of the row.
    Scenario(
        "runs_cross",
        pages=66,
        before=(63 * PAGE_BYTES, PAGE_BYTES),
        script=(
            (free(1), malloc(2, 3 * PAGE_BYTES), free(2)),
            (malloc(3, 2 * PAGE_BYTES), free(3)),
        ),
        plan=mostly(8, bound=20),
    ),
    # (A realloc is a malloc and a free, so not one moment.)
    Scenario(
        "realloc",
        pages=3,
        before=(48, HALF),
        script=(
            (realloc(0, 256), realloc(0, 250), free(0)),
            (realloc(1, PAGE_BYTES), free(1)),
            (malloc(2, HALF), free(2)),
        ),
        exact=False,
        plan=samples(10),
    ),
    # All that is free is in a magazine; or in a page that is kept for another class.
    Scenario(
        "magazine_rests",
        pages=1,
        nulls=False,
        script=((malloc(0, WORD), free(0), malloc(1, PAGE_BYTES)),),
        plan=ONCE,
    ),
    Scenario(
        "kept_page_rests",
        pages=1,
        magazines=0,
        nulls=False,
        script=((malloc(0, WORD), free(0), malloc(1, HALF)),),
        plan=ONCE,
    ),
    # While others take and give without end, a malloc that finds nothing gives up: even if there is
    # a change in every pass of its search.
    Scenario(
        "churn",
        pages=2,
        magazines=0,
        before=(WORD,),
        first=0,
        script=(
            (malloc(1, 2 * PAGE_BYTES),),
            (malloc(2, PAGE_BYTES), free(2)) * CHURN,
            (malloc(3, WORD), free(3)) * CHURN,
        ),
        plan=(
            *directed(*(Turn(0, "find_run"), Turn(1, "run_script", 2)) * 3 * CHURN, loose=True),
            (Random(), 8),
        ),
    ),
    # Much at a time.
    Scenario(
        "everything",
        pages=4,
        magazines=2,
        stripes=2,
        script=(
            (malloc(0, HALF), free(0), malloc(0, EIGHTH), free(0)),
            (malloc_lanes(1, HALF), free_lanes(1), malloc(1, HALF)),
            (malloc(5, EIGHTH), malloc(6, EIGHTH), free(5), free(6)),
            (malloc_two(7, WORD), free_lanes(7), malloc_lanes(7, WORD)),
        ),
        plan=samples(20),
    ),
)


def drawn(seed: int) -> Scenario:
    """Programs with scripts drawn at random: each frees what it allocated, and some of the
    blocks before."""
    chance = random.Random(seed)
    sizes = chance.sample((WORD, EIGHTH, 2 * EIGHTH, THIRD, HALF), 2)
    programs = chance.choice((2, 3))
    before = tuple(chance.choice(sizes) for _ in range(chance.randrange(5)))
    mine: list[list[Op]] = [[] for _ in range(programs)]
    for slot in range(len(before)):
        mine[chance.randrange(programs)].append(free(slot))
    after = len(before)
    script = []
    for frees in mine:
        ops: list[Op] = []
        for _ in range(chance.randrange(2, 5)):
            if frees and (chance.random() < 0.5 or after + 4 > SLOTS):
                ops.append(frees.pop(chance.randrange(len(frees))))
                continue
            if after + 4 > SLOTS:
                break
            kind = chance.choice((malloc, malloc, malloc_lanes, malloc_two))
            size = min(min(sizes), HALF // 2) if kind is malloc_two else chance.choice(sizes)
            ops.append(kind(after, size))
            frees.append(free(after) if kind is malloc else free_lanes(after))
            after += ops[-1].lanes
        script.append(tuple(ops))
    return Scenario(
        f"drawn_{seed}",
        pages=chance.choice((3, 5, 8)),
        magazines=chance.choice((0, 0, 1, 2)),
        stripes=chance.choice((1, 2)),
        ring=chance.choice((1, 2, 4)),
        before=before,
        script=tuple(script),
        plan=((Random(seed, stay=0.8), 8), (PCT(depth=4, seed=seed), 12)),
    )


BY_NAME = {scenario.name: scenario for scenario in ALL}
