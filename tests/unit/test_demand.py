"""What a request asks for is read before an engine knows it: never wrong by much, never by what a client invents."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.serving.request.demand import (
    MOST_ANSWERS,
    MOST_TOKENS,
    PRIORITY,
    Demand,
    demand_of,
    passed_demand,
    prioritized,
)
from pdproxy.wire.request import Route, parse


def demand(fields: dict[str, object], route: Route = Route.COMPLETIONS) -> Demand:
    return demand_of(parse(route, json.dumps({"model": "m", **fields}).encode()))


def without_longest(found: Demand) -> Demand:
    return msgspec.structs.replace(found, longest=MOST_TOKENS)


def test_the_most_that_prompts_may_have() -> None:
    """No prompt has more tokens than its body has bytes, and what engines may add to each."""
    assert 2 * MOST_TOKENS < demand({"prompt": ["a" * 40, "b" * 40]}).longest < 2 * MOST_TOKENS + 200
    assert passed_demand(400, None, generates=True).longest == 400 + MOST_TOKENS


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "word " * 80}, Demand(100, 1)),
        ({"prompt": [1, 2, 3]}, Demand(3, 1)),
        ({"prompt": ["a" * 40, "b" * 40]}, Demand(20, 2)),
        ({"prompt": "x", "max_tokens": 7, "priority": -3}, Demand(1, 1, 7, -3)),
        ({"prompt": "x", "n": 3}, Demand(1, 3)),
        ({"prompt": "x", "priority": None}, Demand(1, 1)),
        ({"prompt": "x", "priority": 2**63}, Demand(1, 1)),
        ({"prompt": "x", "priority": "1"}, Demand(1, 1)),
        ({"prompt": "x", "n": 10**18}, Demand(1, MOST_ANSWERS)),
    ],
)
def test_completions(fields: dict[str, object], expected: Demand) -> None:
    assert without_longest(demand(fields)) == expected


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "n": 3}, 21),
        ({"max_tokens": 7, "n": 3, "best_of": 5}, 42),
        ({"max_tokens": 7, "best_of": 5}, 35),
        ({"max_tokens": 7, "n": 3, "prompt": ["x", "y"]}, 42),
        ({"max_completion_tokens": 7}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": "7"}, None),
        ({}, None),
    ],
)
def test_the_most_that_may_be_generated(fields: dict[str, object], most: int | None) -> None:
    """A completion has one field for it; what an engine refuses or reads in its own way names no limit."""
    assert demand({"prompt": "x", **fields}).most == most


def test_the_most_of_other_requests() -> None:
    """A chat's newer field goes before the older one. One that is embedded generates nothing."""
    messages = {"messages": [{"role": "user", "content": "x"}]}
    assert demand({**messages, "max_tokens": 7, "max_completion_tokens": 9}, Route.CHAT).most == 9
    assert demand({**messages, "max_tokens": 7, "max_completion_tokens": None}, Route.CHAT).most == 7
    batch = {"messages": [messages["messages"]] * 3, "max_tokens": 7}
    assert demand(batch, Route.BATCH).most == 21
    assert demand({**batch, "tools": []}, Route.BATCH).most is None, "one engine gets it whole, and only that counts it"
    assert passed_demand(400, None, generates=False).most == 0


def test_chats() -> None:
    found = demand({"messages": [{"role": "user", "content": "word " * 80}], "max_completion_tokens": 9}, Route.CHAT)
    assert without_longest(found) == Demand(100, 1, 9)


@given(
    st.recursive(st.none() | st.integers() | st.text(max_size=5) | st.floats(), lambda one: st.lists(one, max_size=3))
)
def test_what_no_engine_would_accept_has_bounds_as_well(value: object) -> None:
    """Tokens and answers are numbers from 1 to a bound, whatever stands in the fields."""
    for name in ("prompt", "n", "max_tokens", "priority"):
        found = demand({"prompt": "x", name: value})
        assert 1 <= found.prompt <= MOST_TOKENS
        assert found.answers >= 1
        assert -(2**63) <= found.priority < 2**63


def test_bodies_for_one_engine() -> None:
    assert without_longest(passed_demand(400, None, generates=True)) == Demand(100, 1)
    assert without_longest(passed_demand(400, 7, generates=True)) == Demand(100, 1, 7)
    assert without_longest(passed_demand(0, None, generates=False)) == Demand(1, 0)
    assert passed_demand(2**40, None, generates=False).prompt == MOST_TOKENS


@pytest.mark.parametrize(
    ("header", "own", "is_known", "counts", "lines"),
    [
        (None, 3, True, 3, []),  # the engine reads it in the body, as it was read here
        (None, 9, True, 5, [b"5"]),
        (None, 0, False, 0, [b"0"]),  # it may read another one there
        (b"4", 9, True, 4, [b"4"]),
        (b"4", 9, False, 4, [b"4"]),
        (b"7", 3, True, 5, [b"5"]),
        (b"x", 3, True, 3, [b"x"]),  # read by nobody
    ],
)
def test_the_priority_that_counts_is_the_one_that_engines_get(
    header: bytes | None, own: int, is_known: bool, counts: int, lines: list[bytes]
) -> None:
    """Of a client with priorities from 0 to 5."""
    forward = ((b"traceparent", b"t"), *([(PRIORITY, header)] if header is not None else []))
    found, sent = prioritized(Demand(1, 1, None, own), forward, (0, 5), is_known=is_known)
    assert found.priority == counts
    assert [value for name, value in sent if name == PRIORITY] == lines
    assert (b"traceparent", b"t") in sent
