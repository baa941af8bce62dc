"""The judge of histories must find what is wrong with them, and accept what is right."""

import pytest

from devalloc.sizes import PAGE_BYTES
from devalloc.testing import Event
from tests.interleaving.history import History, blocks_of
from tests.interleaving.scripts import (
    ENTRIES,
    Script,
    free,
    free_at,
    free_lanes,
    malloc,
    malloc_lanes,
    realloc,
)
from tests.plain_heap import has_room, set_aside

BASE = 1 << 32
HALF = 32752
SLOT = PAGE_BYTES // 2


def began(program: int, op: int, most: int = 1) -> Event:
    return Event(program, (program * most + op) * ENTRIES.value, 1)


def ended(program: int, op: int, address: int, most: int = 1, lane: int = 0) -> Event:
    return Event(program, (program * most + op) * ENTRIES.value + 1 + lane, address)


def read(script: Script, *events: Event, before: tuple[int, ...] = (), pages: int = 1) -> History:
    addresses = [BASE + slot * SLOT for slot in range(len(before))]
    return History.read(script, events, blocks_of(addresses, before), BASE, pages)


TWO = ((malloc(0, HALF),), (malloc(1, HALF),))


def test_one_address_given_twice_is_an_overlap() -> None:
    events = [began(0, 0), began(1, 0), ended(0, 0, BASE), ended(1, 0, BASE)]
    with pytest.raises(AssertionError, match=r"H1: .*overlap"):
        read(TWO, *events)
    events[-1] = ended(1, 0, BASE + SLOT)
    history = read(TWO, *events)
    assert history.live == {BASE: 32768, BASE + SLOT: 32768}
    history.assert_linearisable(0)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (BASE - SLOT, "outside"),
        (BASE + PAGE_BYTES, "outside"),
        (BASE + PAGE_BYTES - SLOT + 16, "outside"),
        (BASE + 8, "not aligned"),
    ],
)
def test_blocks_lie_inside_and_are_aligned(address: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        read(TWO, began(0, 0), ended(0, 0, address))


def test_an_address_may_come_back_once_its_free_has_begun() -> None:
    script = ((free(0),), (malloc(1, HALF),))
    events = [began(0, 0), began(1, 0), ended(1, 0, BASE), ended(0, 0, BASE)]
    history = read(script, *events, before=(HALF,))
    history.assert_linearisable(0)
    assert list(history.live) == [BASE]
    with pytest.raises(AssertionError, match="overlap"):
        read(script, began(1, 0), ended(1, 0, BASE), before=(HALF,))


def test_null_is_right_only_if_nothing_was_free_at_some_moment() -> None:
    script = ((free(0),), (malloc(2, HALF),))
    both = (HALF, HALF)
    # The malloc began before the free had ended.
    overlapping = [began(1, 0), began(0, 0), ended(0, 0, BASE), ended(1, 0, 0)]
    history = read(script, *overlapping, before=both)
    assert history.nulls == 1
    history.assert_linearisable(0)
    later = [began(0, 0), ended(0, 0, BASE), began(1, 0), ended(1, 0, 0)]
    with pytest.raises(AssertionError, match="no order of these calls"):
        read(script, *later, before=both).assert_linearisable(0)
    with pytest.raises(AssertionError, match="no order of these calls"):
        read(script, *overlapping, before=(HALF,)).assert_linearisable(0)


def test_null_while_memory_only_moves_is_wrong() -> None:
    """One slot is free or in a call that has begun to take it, throughout."""
    script = ((malloc(2, HALF),), (malloc(3, HALF), free(3)))
    most = 2
    events = [
        began(0, 0, most),
        began(1, 0, most),
        ended(1, 0, BASE + SLOT, most),
        began(1, 1, most),
        ended(1, 1, BASE + SLOT, most),
        ended(0, 0, 0, most),
    ]
    read(script, *events, before=(HALF,)).assert_linearisable(0)
    with pytest.raises(AssertionError, match="no order"):
        read(script, *events).assert_linearisable(0)


def test_double_frees_are_counted() -> None:
    script = ((free(0),), (free(0),))
    events = [began(0, 0), began(1, 0), ended(0, 0, BASE), ended(1, 0, BASE)]
    history = read(script, *events, before=(HALF,))
    history.assert_linearisable(1)
    for recorded in (0, 2):
        with pytest.raises(AssertionError, match="no order"):
            history.assert_linearisable(recorded)


def test_a_free_of_a_wrong_address_is_always_wrong_and_changes_nothing() -> None:
    history = read(((free_at(0, 16),),), began(0, 0), ended(0, 0, BASE), before=(HALF,))
    history.assert_linearisable(1)
    assert list(history.live) == [BASE]
    with pytest.raises(AssertionError, match="no order"):
        history.assert_linearisable(0)


def test_a_free_of_nothing_is_no_error() -> None:
    script = ((malloc(0, HALF), free(0)),)
    events = [began(0, 0, 2), ended(0, 0, 0, 2), began(0, 1, 2), ended(0, 1, 0, 2)]
    full = History.read(script, events, {5: (BASE, PAGE_BYTES)}, BASE, 1)
    full.assert_linearisable(0)


def test_lanes_are_calls_of_their_own() -> None:
    script = ((malloc_lanes(0, HALF), free_lanes(0)),)
    addresses = [BASE, 0, BASE + SLOT, 0]
    events = [
        began(0, 0, 2),
        *(ended(0, 0, address, 2, lane) for lane, address in enumerate(addresses)),
        began(0, 1, 2),
        *(ended(0, 1, address, 2, lane) for lane, address in enumerate(addresses)),
    ]
    history = read(script, *events)
    assert history.nulls == 2
    assert not history.live
    history.assert_linearisable(0)
    with pytest.raises(AssertionError, match="no order"):
        read(script, *events, pages=2).assert_linearisable(0)


def test_realloc_moves_a_block_and_keeps_it_when_it_fails() -> None:
    script = ((realloc(0, PAGE_BYTES),),)
    moved = read(script, began(0, 0), ended(0, 0, BASE + PAGE_BYTES), before=(HALF,), pages=2)
    assert moved.live == {BASE + PAGE_BYTES: PAGE_BYTES}
    failed = read(script, began(0, 0), ended(0, 0, 0), before=(HALF,))
    assert failed.live == {BASE: 32768}


def test_room_is_a_slot_of_the_class_or_a_run_of_free_pages() -> None:
    slot, page = set_aside(HALF), PAGE_BYTES
    assert set_aside(1) == 16
    assert set_aside(HALF + 100) == page
    assert set_aside(page + 1) == 2 * page
    assert has_room([(BASE, slot)], slot, BASE, 1)
    assert not has_room([(BASE, slot), (BASE + SLOT, slot)], slot, BASE, 1)
    assert not has_room([(BASE, slot)], set_aside(1024), BASE, 1)
    assert not has_room([(BASE, slot)], page, BASE, 1)
    assert has_room([(BASE, slot)], page, BASE, 2)
    assert not has_room([(BASE + page, page)], 2 * page, BASE, 3)
    assert has_room([(BASE, page)], 2 * page, BASE, 3)
    # Runs begin anywhere.
    edge = [(BASE, 63 * page), (BASE + 65 * page, 63 * page)]
    assert has_room(edge, 2 * page, BASE, 128)
    assert not has_room(edge, 3 * page, BASE, 128)


def test_which_slot_of_its_page_a_malloc_gets_is_settled_late() -> None:
    """Program 0 has one of the two slots from the beginning, so there are none for 1. Then the
    other is freed, and that is the one which it claims."""
    script = ((malloc(2, HALF),), (malloc(3, HALF),), (free(1),))
    events = [began(0, 0), began(1, 0), ended(1, 0, 0), began(2, 0), ended(2, 0, BASE + SLOT)]
    late = [*events, ended(0, 0, BASE + SLOT)]
    addresses = {1: (BASE + SLOT, set_aside(HALF))}
    History.read(script, late, addresses, BASE, 1).assert_linearisable(0)
    # In a heap of two pages the other page was free.
    with pytest.raises(AssertionError, match="no order of these calls"):
        History.read(script, late, addresses, BASE, 2).assert_linearisable(0)
    # And no call had the slot yet if it was asked for later.
    later = [began(1, 0), ended(1, 0, 0), began(0, 0), *late[3:]]
    with pytest.raises(AssertionError, match="no order of these calls"):
        History.read(script, later, addresses, BASE, 1).assert_linearisable(0)


def test_a_free_gives_up_the_address_before_the_slot() -> None:
    """1 frees a slot, and 0 gets its address, by way of the other one: so that is gone, too, as
    long as 1 has not returned."""
    script = ((malloc(2, HALF), malloc(3, HALF)), (free(0),))
    most = 2
    events = [
        began(1, 0, most),
        began(0, 0, most),
        ended(0, 0, BASE, most),
        began(0, 1, most),
        ended(0, 1, 0, most),
        ended(1, 0, BASE, most),
    ]
    held = {0: (BASE, set_aside(HALF))}
    History.read(script, events, held, BASE, 1).assert_linearisable(0)
    early = [events[0], events[5], *events[1:5]]
    with pytest.raises(AssertionError, match="no order of these calls"):
        History.read(script, early, held, BASE, 1).assert_linearisable(0)
