"""Beginnings that places are expected to hold because of what was routed to them."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.scheduling.prefix.matches import Matches
from pdproxy.scheduling.prefix.routed import RoutedIndex
from pdproxy.scheduling.prefix.speculative import SpeculativeIndex

TTL = 2.0


def prompt(*names):
    """Return the keys of a prompt as one list in a list: equal beginnings have equal keys."""
    return [[hash(names[: at + 1]) & 0xFFFF_FFFF for at in range(len(names))]]


def test_what_was_routed_is_expected_for_its_time_to_live():
    index = SpeculativeIndex(TTL, 100)
    index.routed(5, prompt("a", "b", "c"), 10.0)
    assert index.lookup(prompt("a", "b", "x"), 10.0) == Matches({5: 2}, {5: 2})
    assert index.lookup(prompt("a"), 10.0 + TTL - 0.01).gpu == {5: 1}
    assert index.lookup(prompt("a"), 10.0 + 2 * TTL).gpu == {}


def test_a_prompt_is_found_across_generations():
    index = SpeculativeIndex(TTL, 100)
    index.routed(1, prompt("a", "b"), 0.0)
    index.routed(2, prompt("a", "b", "c"), TTL)
    assert index.lookup(prompt("a", "b", "c"), TTL).gpu == {1: 2, 2: 3}
    index.routed(1, prompt("a"), TTL)
    assert index.lookup(prompt("a", "b", "c"), TTL).gpu == {1: 2, 2: 3}
    assert index.lookup(prompt("a", "b", "c"), 2 * TTL).gpu == {1: 1, 2: 3}


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1.7 * TTL),
            st.integers(0, 2),
            st.text("ab", min_size=1, max_size=3),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_ages_are_between_one_and_two_times_to_live(happened):
    index, now = SpeculativeIndex(TTL, 10_000), 100.0
    routed: list[tuple[float, int, str]] = []
    for wait, place, names, gone in happened:
        now += wait
        if gone:
            index.remove_place(place)
            routed = [one for one in routed if one[1] != place]
        else:
            index.routed(place, prompt(*names), now)
            routed.append((now, place, names))
        for asked in ("aaa", "abb", "baa", "bbb"):
            runs = index.lookup(prompt(*asked), now).gpu
            for place_asked in range(3):
                lengths = {
                    limit: max(
                        (
                            next(
                                (at for at in range(min(3, len(one))) if one[at] != asked[at]),
                                len(one),
                            )
                            for when, where, one in routed
                            if where == place_asked and now - when < limit
                        ),
                        default=0,
                    )
                    for limit in (TTL, 2 * TTL + 1e-9)
                }
                assert lengths[TTL] <= runs.get(place_asked, 0) <= lengths[2 * TTL + 1e-9]


def test_keys_beyond_the_bound_are_left_out():
    index = SpeculativeIndex(TTL, 5)
    index.routed(1, prompt(*"abcd"), 0.0)
    index.routed(2, prompt(*"abcd"), 0.0)
    assert index.lookup(prompt(*"abcd"), 0.0).gpu == {1: 4}
    assert index.no_space == 1
    index.routed(2, [*prompt(*"abcd"), *prompt(*"efgh"), *prompt("i")], TTL)
    assert index.lookup(prompt(*"abcd"), TTL).gpu == {1: 4, 2: 4}
    assert (index.no_space, len(index)) == (2, 8)


def test_a_place_that_is_gone_gives_its_bit_back_after_both_generations():
    index = SpeculativeIndex(TTL, 10_000)
    for number in range(500):
        index.routed(number, prompt("a", str(number)), number * TTL / 4)
        index.remove_place(number)
        assert index.lookup(prompt("a", str(number)), number * TTL / 4).gpu == {}
    index.routed(9, prompt("a"), 1000.0)
    assert index._bits.live.bit_length() < 20


def test_the_longer_of_two_matches():
    one = Matches({1: 3, 2: 1}, {1: 4, 2: 1})
    other = Matches({2: 2, 3: 9}, {2: 2, 3: 9})
    assert one.joined(other) == other.joined(one) == Matches({1: 3, 2: 2, 3: 9}, {1: 4, 2: 2, 3: 9})
    assert one.joined(Matches({}, {})) == one


def test_the_first_block_of_a_prompt_is_the_last_to_go():
    index = RoutedIndex(4)
    index.routed(1, prompt("a", "b", "c"))
    index.routed(1, prompt("d", "e", "f"))
    assert index.lookup(prompt("a", "b", "c")) == Matches({1: 1}, {1: 1})
    assert index.lookup(prompt("d", "e", "f")).gpu == {1: 3}
    index.routed(1, prompt("a"))
    index.routed(1, prompt("g"))
    assert index.lookup(prompt("a")).gpu == {1: 1}
    assert index.lookup(prompt("d", "e", "f")).gpu == {1: 2}


def test_a_prompt_longer_than_the_capacity():
    index = RoutedIndex(3)
    index.routed(1, prompt(*"abcdefgh"))
    assert len(index) == 3
    assert index.lookup(prompt(*"abcdefgh")).gpu == {1: 3}


def test_a_place_has_a_capacity_of_its_own():
    index = RoutedIndex(3)
    index.set_capacity(1, 5)
    for place in (1, 2):
        index.routed(place, prompt(*"abcdefgh"))
    assert index.lookup(prompt(*"abcdefgh")).gpu == {1: 5, 2: 3}
    index.set_capacity(1, 1)
    index.routed(1, prompt("a"))
    assert index.lookup(prompt(*"abcdefgh")).gpu == {1: 1, 2: 3}
    index.remove_place(1)
    assert index.lookup(prompt(*"abcdefgh")).gpu == {2: 3}
    index.routed(1, prompt(*"abcdefgh"))
    assert index.lookup(prompt(*"abcdefgh")).gpu == {1: 3, 2: 3}


def test_all_places_together_are_bounded_whatever_they_claim_to_hold():
    index = RoutedIndex(3, 10)
    for place in (1, 2):
        index.set_capacity(place, 10**18)
    for number in range(8):
        index.routed(1, prompt("a", str(number)))
    assert len(index) == 9
    index.routed(2, prompt(*"xyz"))
    assert len(index) == 10
    assert index.lookup(prompt(*"xyz")).gpu == {2: 3}
    assert index.lookup(prompt("a", "0")).gpu == {1: 1}
    assert index.lookup(prompt("a", "7")).gpu == {1: 2}
    index.routed(3, prompt(*"abcdefghijklmnop"))
    assert len(index) == 10
    index.routed(2, prompt(*"abcdefghijklmnop"))
    assert len(index) == 10
    assert index.lookup(prompt(*"abcdefghijklmnop")).gpu[2] == 3


def test_what_is_forgotten_leaves_the_capacity():
    index = RoutedIndex(3)
    index.set_capacity(1, 5)
    for _ in range(2):
        index.routed(1, prompt(*"abcdefgh"))
        assert index.lookup(prompt(*"abcdefgh")).gpu == {1: 5}
        index.forget(1)
        assert (len(index), index.lookup(prompt(*"abcdefgh")).gpu) == (0, {})
    index.gone(1, prompt("a")[0])
    assert len(index) == 0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.text("ab", min_size=1, max_size=8), st.sampled_from("rrrrrg")
        ),
        max_size=60,
    ),
    st.integers(1, 9),
)
def test_each_place_keeps_what_was_used_last(happened, capacity):
    index = RoutedIndex(capacity)
    model: dict[int, OrderedDict] = {}
    for place, names, what in happened:
        if what == "g":
            index.remove_place(place)
            index.tidy(len(names))
            model.pop(place, None)
            continue
        (keys,) = prompt(*names)
        index.routed(place, [keys])
        one = model.setdefault(place, OrderedDict())
        for key in reversed(keys[:capacity]):
            one[key] = None
            one.move_to_end(key)
        while len(one) > capacity:
            one.popitem(last=False)
    assert len(index) == sum(len(one) for one in model.values())
    for asked in ("aaaaaaaa", "abababab", "bbbbbbbb", "ba"):
        (keys,) = prompt(*asked)
        runs = {
            place: next((at for at, key in enumerate(keys) if key not in one), len(keys))
            for place, one in model.items()
        }
        assert index.lookup([keys]).gpu == {
            place: length for place, length in runs.items() if length
        }
    for place in range(3):
        index.remove_place(place)
    while index.tidy(3):
        pass
    assert len(index._held) == 0
