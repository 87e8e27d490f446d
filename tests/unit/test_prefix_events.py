"""What the index of engines' blocks makes of events: each kind that engines send, and events that
no engine should send.
"""

import pytest

from pdproxy.scheduling.prefix import keys
from pdproxy.scheduling.prefix.block_index import BlockIndex
from tests.unit.test_prefix_blocks import check

UNIT = 16
BIG = 2**64 - 1


class Engine:
    """Sends an index the events of one place."""

    def __init__(self, index):
        self.index, self.place = index, index.add_place()

    def stored(
        self,
        hashes,
        tokens,
        parent=None,
        *,
        size=UNIT,
        medium="GPU",
        group=0,
        lora=None,
        extras=None,
        counts=True,
    ):
        self.index.stored(
            self.place, hashes, parent, tokens, size, medium, group, lora, extras, counts=counts
        )

    def removed(self, hashes, medium="GPU", group=0):
        self.index.removed(self.place, hashes, medium, group)


def tokens(blocks, first=0):
    return list(range(first, first + blocks * UNIT))


def first_key():
    """The first key of what `tokens` returns."""
    (first, *_), *_ = keys.of_ids(tokens(1), UNIT, keys.root())
    return first


def found(index, ids, lora=None, salt=None):
    matches = index.lookup(keys.of_ids(ids, UNIT, keys.root(lora, salt)))
    return dict(matches.gpu), dict(matches.anywhere)


@pytest.fixture
def index():
    return BlockIndex(UNIT, 1000)


@pytest.fixture
def engine(index):
    return Engine(index)


def test_a_prompt_and_what_follows_it(index, engine):
    other = Engine(index)
    engine.stored([1, 2, 3], tokens(3))
    engine.stored([4], tokens(1, 48), parent=3)
    other.stored([BIG, BIG - 1], tokens(2))
    assert found(index, tokens(9))[0] == {engine.place: 4, other.place: 2}
    assert found(index, tokens(3)[:-1])[0] == {engine.place: 2, other.place: 2}
    assert found(index, tokens(3, 1)) == ({}, {})
    assert found(index, [])[0] == {}
    assert index.blocks(engine.place) == 4
    assert index.distinct() == 4
    engine.removed([4])
    assert found(index, tokens(9))[0] == {engine.place: 3, other.place: 2}


def test_a_run_ends_at_the_first_block_that_is_missing(index, engine):
    engine.stored([1, 2, 3], tokens(3))
    engine.removed([2])
    assert found(index, tokens(3))[0] == {engine.place: 1}
    engine.removed([1])
    assert found(index, tokens(3))[0] == {}


def test_both_forms_of_a_hash_are_one(index, engine):
    digest = bytes(range(32))
    engine.stored([digest], tokens(1))
    engine.stored([7], tokens(1, 16), parent=int.from_bytes(digest[-8:], "big"))
    assert found(index, tokens(2))[0] == {engine.place: 2}


def test_a_block_behind_an_unknown_one_is_not_entered(index, engine):
    engine.stored([1, 2], tokens(2), parent=9)
    assert len(index) == 0
    assert index.counters.unknown_parent == 2


def test_an_unknown_block_is_not_removed(index, engine):
    engine.removed([1])
    assert index.counters.not_counted == 1  # which group counts isn't known yet
    engine.stored([1], tokens(1))
    engine.removed([2])
    engine.removed([1], "CPU")
    assert index.counters.unknown_block == 2
    assert found(index, tokens(1))[0] == {engine.place: 1}


def test_blocks_in_other_memory(index, engine):
    engine.stored([1, 2, 3], tokens(3))
    engine.stored([1, 2], tokens(2), medium="CPU")
    engine.stored([2, 3], tokens(2, 16), parent=1, medium="cpu")
    engine.stored([3], tokens(1, 32), parent=2, medium="STORAGE")
    engine.removed([3, 2])
    assert found(index, tokens(3)) == ({engine.place: 1}, {engine.place: 3})
    engine.removed([3], "CPU")
    assert found(index, tokens(3))[1] == {engine.place: 3}
    engine.removed([3], "STORAGE")
    assert found(index, tokens(3))[1] == {engine.place: 2}
    assert index.blocks(engine.place) == 3
    index.cleared(engine.place)
    assert found(index, tokens(3)) == ({}, {})


def test_events_of_other_memory_need_no_tokens(index, engine):
    """vLLM's offloading leaves out tokens, adapter and salt where it does not know them."""
    engine.stored([1, 2], tokens(2), lora="a", extras=[("a", "salt"), ("a",)])
    engine.stored([1, 2, 3], [], size=0, medium="CPU")
    engine.stored([1, 2], tokens(2), medium="OBJ")
    assert index.counters.unknown_block == 1
    assert index.blocks(engine.place) == 6
    engine.removed([1, 2])
    assert found(index, tokens(2), "a", "salt") == ({}, {engine.place: 2})
    assert found(index, tokens(2)) == ({}, {})
    engine.removed([1, 2], "CPU")
    engine.removed([1, 2], "ANOTHER")
    assert len(index) == 0


def test_what_was_offloaded_and_loaded_again(index, engine):
    engine.stored([1, 2], tokens(2))
    engine.stored([1, 2], tokens(2), medium="CPU")
    engine.removed([1, 2])
    engine.stored([3], tokens(1, 32), parent=2)
    assert found(index, tokens(3)) == ({}, {engine.place: 3})
    engine.stored([1, 2], tokens(2))
    assert found(index, tokens(3)) == ({engine.place: 3}, {engine.place: 3})


def test_adapters_and_salts_are_apart(index, engine):
    engine.stored([1, 2], tokens(2))
    engine.stored([3, 4], tokens(2), lora="a", extras=[("a",), ("a",)])
    engine.stored([5], tokens(1), lora="a", extras=[["a", "salt"]])
    engine.stored([6], tokens(1), extras=[("salt",)])
    engine.stored([7], tokens(1, 16), parent=6, extras=[None])
    assert found(index, tokens(2))[0] == {engine.place: 2}
    assert found(index, tokens(2), "a")[0] == {engine.place: 2}
    assert found(index, tokens(2), "a", "salt")[0] == {engine.place: 1}
    assert found(index, tokens(2), None, "salt")[0] == {engine.place: 2}
    assert found(index, tokens(2), "b")[0] == {}
    engine.removed([1, 4])
    assert found(index, tokens(2))[0] == {}
    assert found(index, tokens(2), "a")[0] == {engine.place: 1}


@pytest.mark.parametrize("extras", [None, [("a",)], [["a"]]])
def test_a_second_prompt_of_an_adapter(index, engine, extras):
    engine.stored([1], tokens(1), lora="a", extras=extras)
    engine.stored([2], tokens(1, 500), lora="a", extras=extras)
    assert found(index, tokens(1, 500))[0] == {}
    assert found(index, tokens(1, 500), "a")[0] == {engine.place: 1}


@pytest.mark.parametrize(
    "image",
    [("id", 3), ["id", -5], "id", b"digest of embeddings"],
    ids=["pair", "list", "older versions", "embeddings"],
)
def test_media_are_no_text(index, engine, image):
    """Placeholders of two images have the same tokens."""
    engine.stored([1, 2, 3], tokens(3), extras=[None, (image,), None])
    engine.stored([4], tokens(1, 16), parent=1, extras=[None])
    assert found(index, tokens(3))[0] == {engine.place: 2}
    engine.removed([4])
    assert found(index, tokens(3))[0] == {engine.place: 1}
    engine.stored([5], tokens(1, 500), extras=[(image,)])
    assert found(index, tokens(1, 500))[0] == {}


def test_media_in_a_first_block_with_a_salt(index, engine):
    engine.stored([1], tokens(1), lora="a", extras=[("a", ("id", 3), "salt")])
    engine.stored([2], tokens(1), lora="a", extras=[("a", "salt")])
    assert found(index, tokens(1), "a", "salt")[0] == {engine.place: 1}
    engine.removed([2])
    assert found(index, tokens(1), "a", "salt")[0] == {}


def test_one_group_is_entered(index, engine):
    """Of a model with several groups: a window's blocks say nothing, and a second full group holds
    the same tokens.
    """
    engine.stored([8, 9], tokens(2), group=0, counts=False)
    engine.stored([1, 2], tokens(2), group=1)
    engine.stored([3, 4], tokens(2), group=2)
    engine.removed([1, 2, 3, 4], group=2)
    engine.removed([1, 2], group=0)
    assert index.counters.not_counted == 10
    assert found(index, tokens(2))[0] == {engine.place: 2}
    engine.removed([2], group=1)
    assert found(index, tokens(2))[0] == {engine.place: 1}


def test_which_group_is_entered_is_not_taken_from_other_memory(index, engine):
    """vLLM's offloading sends events of all groups as if they counted, without tokens."""
    engine.stored([7], [], size=0, medium="CPU", group=0)
    engine.stored([1, 2], tokens(2), group=1)
    engine.stored([1, 2], [], size=0, medium="CPU", group=1)
    engine.removed([1, 2], group=1)
    assert index.counters.not_counted == 1
    assert found(index, tokens(2)) == ({}, {engine.place: 2})


def test_a_restarted_engine_may_count_another_group(index, engine):
    engine.stored([1], tokens(1), group=1)
    index.restart(engine.place)
    assert found(index, tokens(1))[0] == {}
    engine.stored([1], tokens(1), group=0)
    assert found(index, tokens(1))[0] == {engine.place: 1}


def test_equal_blocks_of_one_engine(index, engine):
    """A prompt of whole blocks, once more: its last block is computed again, and both are there
    until they are evicted.
    """
    engine.stored([1, 2], tokens(2))
    engine.stored([2], tokens(1, 16), parent=1)
    engine.removed([2])
    assert found(index, tokens(2))[0] == {engine.place: 2}
    engine.removed([2])
    assert found(index, tokens(2))[0] == {engine.place: 1}


def test_equal_beginnings_of_one_engine():
    """Loaded from other engines at the same time: each is known, and what follows the one that is
    left.
    """
    index = BlockIndex(UNIT, 1000)
    engine = Engine(index)
    engine.stored([1, 2], tokens(2))
    engine.stored([1, 2, 3], tokens(3))
    engine.removed([1, 2])
    assert found(index, tokens(3))[0] == {engine.place: 3}
    engine.stored([4], tokens(1, 48), parent=3)
    engine.stored([5], [*range(500, 516)], parent=2)
    assert index.counters.unknown_parent == 0
    assert found(index, tokens(4))[0] == {engine.place: 4}
    engine.removed([1])
    assert found(index, tokens(3))[0] == {}


@pytest.mark.parametrize("others_ask", [False, True])
def test_blocks_that_are_reported_once_more_are_no_copies(others_ask):
    """`kv_cache_report_mode: full` tells of the blocks that a request reuses, also of those that
    weren't known. Who has asked is known, unless other proxies ask, too.
    """
    index = BlockIndex(UNIT, 1000, others_ask=others_ask)
    engine = Engine(index)
    engine.stored([1, 2, 3], tokens(3))
    for blocks in (2, 4):
        if not others_ask:
            index.asked(engine.place, first_key())
        engine.stored([*range(1, blocks + 1)], tokens(blocks))
    engine.removed([2])
    assert found(index, tokens(3))[0] == {engine.place: 1}
    assert index.counters.repeated == 5


def test_only_the_report_that_was_asked_for_is_one(index, engine):
    """Of that prompt, of that engine, and once; also where it comes in parts, or tells only what
    nobody knew.
    """
    other = Engine(index)
    for one in (engine, other):
        one.stored([9], tokens(1, 5000))
    index.asked(engine.place, first_key())
    for place in (engine.place, other.place, 12345):
        index.asked(place, None)
    index.asked(12345, first_key())
    for one in (engine, other):
        one.stored([1, 2], tokens(2))  # what nobody knew
        one.stored([1, 2], tokens(2))
        one.removed([1])
        assert found(index, tokens(2))[0][one.place] == 2
    index.asked(engine.place, first_key())
    engine.stored([3, 4], tokens(2, 1000))
    engine.stored([3, 4], tokens(2, 1000))  # another prompt's
    engine.removed([3])
    assert found(index, tokens(2, 1000))[0] == {engine.place: 2}
    for at, parent in ((0, None), (1, 1)):
        index.stored(
            engine.place,
            [at + 1],
            parent,
            tokens(1, at * UNIT),
            UNIT,
            "GPU",
            0,
            None,
            None,
            counts=True,
            from_start=True,
        )
    engine.removed([1, 2])
    engine.removed([2])
    assert found(index, tokens(2))[0] == {other.place: 2}
    for number in range(100):
        index.asked(engine.place, number)
    assert len(index._places[engine.place].asked) == 16


def test_what_an_engine_disproves(index, engine):
    other = Engine(index)
    for one in (engine, other):
        one.stored([*range(200)], tokens(200))
        one.stored([*range(150)], tokens(150), medium="CPU")
    prompt = keys.of_ids(tokens(180), UNIT, keys.root())
    index.disproved(engine.place, prompt, 70)
    check(index)
    assert found(index, tokens(200)) == (
        {engine.place: 70, other.place: 200},
        {engine.place: 70, other.place: 200},
    )
    index.disproved(engine.place, prompt, 180)
    index.disproved(12345, prompt, 0)
    assert found(index, tokens(200))[0] == {engine.place: 70, other.place: 200}
    index.asked(engine.place, first_key())
    engine.stored([*range(100)], tokens(100))  # the report
    assert found(index, tokens(200))[0] == {engine.place: 100, other.place: 200}
    index.disproved(engine.place, prompt, 0)
    assert found(index, tokens(200)) == ({other.place: 200}, {other.place: 200})
    engine.removed([*range(200)])
    engine.removed([*range(150)], "CPU")
    check(index)
    assert index.blocks(engine.place) == 0


def test_a_report_shows_what_was_missed(index, engine):
    engine.stored([2], tokens(1, 16), parent=1)  # the message before it was lost
    assert found(index, tokens(2))[0] == {}
    engine.stored([1, 2], tokens(2))
    assert found(index, tokens(2))[0] == {engine.place: 2}


@pytest.mark.parametrize(("size", "blocks"), [(64, 3), (8, 24), (2, 96)])
def test_engines_with_other_blocks(index, engine, size, blocks):
    names = list(range(100, 100 + blocks))
    engine.stored(names[:-1], tokens(12)[:-size], size=size)
    assert found(index, tokens(12))[0] == {engine.place: (192 - size) // UNIT}
    engine.stored(names[-1:], tokens(12)[-size:], parent=names[-2], size=size)
    assert found(index, tokens(12))[0] == {engine.place: 12}
    engine.removed(names[-1:])
    assert found(index, tokens(12))[0] == {engine.place: (192 - size) // UNIT}
    engine.removed(names[:-1])
    assert (len(index), index.distinct()) == (0, 0)


def test_prompts_that_part_inside_a_unit(index, engine):
    engine.stored([1, 2, 3, 4], tokens(2)[:32], size=8)
    engine.stored([5], [*range(500, 508)], parent=3, size=8)
    branch = [*tokens(2)[:24], *range(500, 508)]
    assert found(index, tokens(2))[0] == found(index, branch)[0] == {engine.place: 2}
    engine.removed([4])
    assert found(index, tokens(2))[0] == {engine.place: 1}
    assert found(index, branch)[0] == {engine.place: 2}


def test_a_smaller_block_among_whole_ones(index, engine):
    """Engines report the part of a block that a prompt filled; the whole block later."""
    engine.stored([1], tokens(4), size=64)
    engine.stored([2], tokens(1, 64), parent=1, size=16)
    assert found(index, tokens(9))[0] == {engine.place: 5}
    engine.removed([2])
    engine.stored([3], tokens(4, 64), parent=1, size=64)
    assert found(index, tokens(9))[0] == {engine.place: 8}


# -- places


def test_places_come_and_go(index, engine):
    other = Engine(index)
    engine.stored([1], tokens(1))
    other.stored([1], tokens(1))
    index.remove_place(engine.place)
    third = Engine(index)
    assert len({engine.place, other.place, third.place}) == 3
    assert found(index, tokens(1))[0] == {other.place: 1}
    third.stored([1], tokens(1))
    assert found(index, tokens(1))[0] == {other.place: 1, third.place: 1}


def test_places_that_held_nothing_leave_nothing(index, engine):
    for _ in range(200):
        index.remove_place(index.add_place())
        index.restart(engine.place)
    assert index._bits.live == 1
    assert len(index._bits._owners) == 2


def test_events_of_a_place_that_is_gone_are_ignored(index, engine):
    index.remove_place(engine.place)
    engine.stored([1], tokens(1))
    engine.removed([1])
    index.cleared(engine.place)
    index.restart(engine.place)
    index.remove_place(engine.place)
    assert (len(index), index.blocks(engine.place), found(index, tokens(1))[0]) == (0, 0, {})


def test_no_place_holds_anything_in_an_empty_index(index):
    assert found(index, tokens(5)) == ({}, {})


def test_a_large_place_is_emptied_in_steps():
    index = BlockIndex(UNIT, 100_000)
    engine, other = Engine(index), Engine(index)
    engine.stored(list(range(10_000)), tokens(10_000))
    index.restart(engine.place)
    assert found(index, tokens(5))[0] == {}
    assert 9_000 < len(index) < 10_000  # most of it still waits, and matches nothing
    before = len(index)
    other.stored([1], tokens(1))
    assert before - 100 < len(index) < before
    engine.stored([1], tokens(1))
    assert found(index, tokens(5))[0] == {engine.place: 1, other.place: 1}
    steps = 0
    while index.tidy(1000):
        steps += 1
    assert 8 <= steps <= 10
    assert (len(index), index.distinct()) == (2, 1)


def test_restarts_in_a_row_wait_for_nothing():
    index = BlockIndex(UNIT, 1_000_000)
    engine = Engine(index)
    for run in range(200):
        engine.stored(list(range(300)), tokens(300, run * 10_000))
        index.restart(engine.place)
    assert len(index) < 200 * 300
    assert index._bits.live.bit_length() < 80
    while index.tidy(10_000):
        pass
    assert (len(index), index.distinct()) == (0, 0)


def test_many_contents_that_are_over_do_not_have_the_largest_removed_at_once():
    """An engine can empty its cache a hundred times in one message."""
    index = BlockIndex(UNIT, 100_000)
    engine = Engine(index)
    engine.stored([*range(20_000)], tokens(20_000))
    for _ in range(80):
        index.cleared(engine.place)
        engine.stored([1], tokens(1))
    assert len(index) > 5_000
    assert len(index._leaving) <= 65
    assert found(index, tokens(9))[0] == {engine.place: 1}
    while index.tidy(1000):
        pass
    assert (len(index), index.distinct()) == (1, 1)


# -- space


def test_without_space_the_largest_place_loses():
    index = BlockIndex(UNIT, 100)
    large, small = Engine(index), Engine(index)
    large.stored(list(range(150)), tokens(150))
    assert (len(index), index.counters.no_space) == (100, 50)
    small.stored(list(range(30)), tokens(30, 9000))
    assert len(index) <= 100
    assert index.blocks(small.place) == 30
    assert found(index, tokens(30, 9000))[0] == {small.place: 30}
    left = index.blocks(large.place)
    assert 50 <= left <= 70
    assert found(index, tokens(150))[0] == {large.place: left}  # the ends of prompts went
    small.stored(list(range(100, 200)), tokens(100, 18_000))
    assert index.blocks(small.place) == 50
    assert index.blocks(large.place) == 50
    assert len(index) == 100
    small.stored([999], tokens(1, 30_000))
    assert index.blocks(small.place) == 50


def test_blocks_that_are_known_already_lack_no_space():
    index = BlockIndex(UNIT, 4)
    engine, other = Engine(index), Engine(index)
    engine.stored([1, 2, 3, 4], tokens(4))
    engine.removed([1])
    other.stored([5], tokens(1, 9000))
    engine.stored([1, 2, 3, 4], tokens(4))
    assert index.counters.no_space == 1


def test_a_block_that_lost_its_space_is_a_new_one_later():
    index = BlockIndex(UNIT, 100)
    large, small = Engine(index), Engine(index)
    large.stored([*range(99)], tokens(99))
    large.stored([99], tokens(1, 99 * UNIT), parent=98)
    large.stored([99], tokens(1, 99 * UNIT), parent=98)  # a copy
    small.stored([1], tokens(1, 9000))
    check(index)
    assert found(index, tokens(100))[0][large.place] < 99
    large.removed([*range(98, 20, -1)])
    large.stored([*range(100)], tokens(100))
    # the other place has the rest of the space
    assert found(index, tokens(100))[0] == {large.place: 99}
    large.removed([99])
    check(index)


def test_parts_of_units_lose_their_space_as_well():
    index = BlockIndex(UNIT, 100)
    large, small = Engine(index), Engine(index)
    large.stored([*range(99)], tokens(50)[: 99 * 8], size=8)
    small.stored([*range(10)], tokens(10, 9000))
    check(index)
    assert index.blocks(small.place) == 10
    assert 50 <= index.blocks(large.place) < 90


def test_blocks_of_several_units_take_the_space_of_several():
    """One event can bring a block of 60,000 units."""
    index = BlockIndex(UNIT, 100)
    large, small = Engine(index), Engine(index)
    large.stored([1], tokens(60_000), size=60_000 * UNIT)
    assert (len(index), index.counters.no_space) == (0, 1)
    large.stored([*range(20)], tokens(160), size=8 * UNIT)
    check(index)
    assert (index.blocks(large.place), len(index), index.counters.no_space) == (12, 96, 9)
    small.stored([*range(10)], tokens(40, 50_000), size=4 * UNIT)
    check(index)
    assert index.blocks(small.place) == 10
    assert found(index, tokens(40, 50_000))[0] == {small.place: 40}
    assert found(index, tokens(160))[0] == {large.place: 8 * index.blocks(large.place)}
    assert index.counters.no_space == 9 + 12 - index.blocks(large.place)
    large.removed([*range(20)])
    small.removed([*range(10)])
    check(index)
    assert (len(index), index.distinct()) == (0, 0)


def test_of_equal_hashes_in_one_event_the_first_one_counts():
    index = BlockIndex(UNIT, 100)
    engine = Engine(index)
    engine.stored([1, 2, 1], tokens(3)[: 3 * 8], size=8)
    check(index)
    assert found(index, tokens(3))[0] == {engine.place: 1}
    index.remove_place(engine.place)
    assert (index.tidy(1000), len(index)) == (False, 0)


def test_what_waits_to_be_removed_gives_its_space_first():
    index = BlockIndex(UNIT, 1000)
    engine, other = Engine(index), Engine(index)
    other.stored(list(range(500)), tokens(500))
    engine.stored(list(range(500)), tokens(500))
    index.restart(engine.place)
    engine.stored(list(range(500)), tokens(500, 50_000))
    assert index.counters.no_space == 0
    assert (index.blocks(engine.place), index.blocks(other.place), len(index)) == (500, 500, 1000)


# -- events that no engine should send


@pytest.mark.parametrize(
    "event",
    [
        {"hashes": [1, 2], "tokens": tokens(1)},
        {"hashes": [1], "tokens": tokens(2)},
        {"hashes": [1], "tokens": [-1] * UNIT},
        {"hashes": [1], "tokens": [2**32] * UNIT},
        {"hashes": [1], "tokens": [None] * UNIT},
        {"hashes": [1], "tokens": ["1"] * UNIT},
        {"hashes": [1], "tokens": list(range(5)), "size": 5},
        {"hashes": [1], "tokens": list(range(24)), "size": 24},
        {"hashes": [1], "tokens": tokens(1), "extras": [None, ("a",)]},
    ],
)
def test_odd_blocks_are_counted_and_not_entered(index, engine, event):
    engine.stored(**event)
    assert (len(index), index.distinct()) == (0, 0)
    assert index.counters.odd == len(event["hashes"])
    engine.stored([5], tokens(1))
    assert found(index, tokens(1))[0] == {engine.place: 1}


@pytest.mark.parametrize("size", [0, -1, -(2**70)])
def test_blocks_without_a_size_have_no_tokens(index, engine, size):
    engine.stored([1], tokens(1), size=size)
    assert (len(index), index.counters.unknown_parent) == (0, 1)


@pytest.mark.parametrize("odd", [0, -1, 2**5000, -(2**64), b"", b"x", bytes(10_000)])
def test_odd_hashes_are_hashes(index, engine, odd):
    engine.stored([odd], tokens(1))
    engine.stored([1], tokens(1, 16), parent=odd)
    assert found(index, tokens(2))[0] == {engine.place: 2}
    engine.removed([odd, odd])
    assert found(index, tokens(2))[0] == {}


def test_sizes_that_overlap_units_are_odd(index):
    wide = BlockIndex(64, 1000)
    engine = Engine(wide)
    engine.stored([1], tokens(1), size=16)
    engine.stored([2], tokens(4), parent=1, size=64)
    assert wide.counters.odd == 1
    assert len(wide) == 1


def test_a_block_that_is_its_own_parent(index, engine):
    engine.stored([1], tokens(1), parent=1)
    engine.stored([1, 2], tokens(2))
    engine.stored([1], tokens(1), parent=2)
    engine.stored([2], tokens(1, 16), parent=2)
    assert found(index, tokens(99))[0] == {engine.place: 2}
    assert len(index) == 2


def test_one_hash_many_times(index, engine):
    engine.stored([1] * 50, tokens(50))
    assert (len(index), index.distinct()) == (1, 1)
    assert found(index, tokens(50))[0] == {engine.place: 1}
    for _ in range(50):
        engine.removed([1])
    assert (len(index), index.distinct()) == (0, 0)


def test_one_hash_twice_in_a_later_event(index, engine):
    engine.stored([1], tokens(1))
    engine.stored([2, 2], tokens(2, 500))
    check(index)
    assert (len(index), index.distinct()) == (2, 2)
    assert found(index, tokens(2, 500))[0] == {engine.place: 1}


def test_a_hash_keeps_its_first_tokens_until_it_is_removed(index, engine):
    engine.stored([1], tokens(1))
    engine.stored([1], tokens(1, 500))
    assert found(index, tokens(1, 500))[0] == {}
    engine.removed([1])
    engine.removed([1])
    engine.stored([1], tokens(1, 500))
    assert found(index, tokens(1, 500))[0] == {engine.place: 1}
    assert found(index, tokens(1))[0] == {}


def test_two_hashes_of_the_same_tokens(index, engine):
    """An adapter that was loaded again from another path. The first one that goes counts for
    both.
    """
    engine.stored([1], tokens(1))
    engine.stored([2], tokens(1))
    engine.removed([2])
    assert found(index, tokens(1))[0] == {}
    engine.removed([1])
    assert (len(index), index.distinct()) == (0, 0)


def test_many_kinds_of_memory_are_one(index, engine):
    engine.stored([99], tokens(1, 9000))
    for number in range(50):
        engine.stored([number], tokens(1, number * UNIT), medium=f"kind {number}")
    assert len(index._media) == 2
    assert index.blocks(engine.place) == 51
    assert found(index, tokens(1)) == ({}, {engine.place: 1})
    index.remove_place(engine.place)
    assert not index.tidy(1000)
    assert len(index) == 0


def test_extra_keys_that_never_end(index, engine):
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    engine.stored([1], tokens(1), extras=[("a", nested, 3)])
    assert index.counters.odd == 1
    while nested:
        nested = nested[0]


def test_a_salt_is_no_adapter(index, engine):
    """Both are strings among the extra keys."""
    engine.stored([1], tokens(1), lora="a", extras=[("a",)])
    engine.stored([2], tokens(1), lora="a", extras=[("a", "a")])
    engine.stored([3], tokens(1), extras=[("a",)])
    for block, of in ((1, ("a", None)), (2, ("a", "a")), (3, (None, "a"))):
        assert found(index, tokens(1), *of)[0] == {engine.place: 1}
        engine.removed([block])
        assert found(index, tokens(1), *of)[0] == {}


def test_two_stores_of_one_kind_hold_the_same_blocks(index, engine):
    """vLLM sends an event for each tier of its offloading; reports are about the GPU only."""
    engine.stored([1, 2], tokens(2))
    for _ in range(2):
        engine.stored([1, 2], tokens(2), medium="STORAGE")
    engine.removed([1, 2])
    engine.removed([1, 2], "STORAGE")
    assert found(index, tokens(2)) == ({}, {engine.place: 2})
    engine.removed([2], "STORAGE")
    assert found(index, tokens(2)) == ({}, {engine.place: 1})


def test_blocks_that_begin_alike_keep_what_they_share():
    """Engines' blocks of several units: one of two siblings goes, and the units that it shares with
    the other one stay.
    """
    index = BlockIndex(2, 100)
    place = index.add_place()
    index.stored(place, [1], None, [1, 2, 3, 4, 5, 6], 6, "GPU", 0, None, None, counts=True)
    index.stored(place, [2], None, [1, 2, 3, 4, 7, 8], 6, "GPU", 0, None, None, counts=True)
    index.stored(place, [3], None, [1, 2, 9, 9, 9, 9], 6, "GPU", 0, None, None, counts=True)

    def found(*ids):
        return index.lookup(keys.of_ids(ids, 2, keys.root())).gpu.get(place, 0)

    index.removed(place, [1], "GPU", 0)
    assert [found(1, 2, 3, 4, 5, 6), found(1, 2, 3, 4, 7, 8), found(1, 2, 9, 9, 9, 9)] == [2, 3, 3]
    index.removed(place, [2], "GPU", 0)
    assert [found(1, 2, 3, 4, 7, 8), found(1, 2, 9, 9, 9, 9)] == [1, 3]
    index.removed(place, [3], "GPU", 0)
    assert found(1, 2) == 0
    assert index.distinct() == 0
