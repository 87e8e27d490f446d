"""What a request asks for is read before an engine knows it: never wrong by much, never by what a
client invents.
"""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from pdproxy.scheduling.admission import MOST_TOKENS, RequestDemand
from pdproxy.serving.request.demand import (
    MOST_ANSWERS,
    PRIORITY,
    demand_of,
    passed_demand,
    prioritized,
)
from pdproxy.wire.body_bounds import DEFAULT
from pdproxy.wire.fields import lenient_integer
from pdproxy.wire.passthrough_body import Pairs
from pdproxy.wire.reader_process import BodyQuestion, answer, request_in
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route


def demand(fields: dict[str, object], route: Route = Route.COMPLETIONS) -> RequestDemand:
    return demand_of(parse(route, json.dumps({"model": "m", **fields}).encode()))


def without_longest(found: RequestDemand) -> RequestDemand:
    return msgspec.structs.replace(found, longest=MOST_TOKENS)


def test_the_most_that_prompts_may_have() -> None:
    """No prompt has more tokens than its body has bytes, and what engines may add to each."""
    assert (
        2 * MOST_TOKENS < demand({"prompt": ["a" * 40, "b" * 40]}).longest < 2 * MOST_TOKENS + 200
    )
    assert passed_demand(400, None, generates=True).longest == 400 + MOST_TOKENS


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "word " * 80}, RequestDemand(100, 1, 16)),
        ({"prompt": [1, 2, 3]}, RequestDemand(3, 1, 16)),
        ({"prompt": ["a" * 40, "b" * 40]}, RequestDemand(20, 2, 16)),
        ({"prompt": "x", "max_tokens": 7, "priority": -3}, RequestDemand(1, 1, 7, -3)),
        ({"prompt": "x", "n": 3}, RequestDemand(1, 3, 16)),
        ({"prompt": "x", "priority": None}, RequestDemand(1, 1, 16)),
        ({"prompt": "x", "priority": 2**63}, RequestDemand(1, 1, 16)),
        ({"prompt": "x", "priority": "1"}, RequestDemand(1, 1, 16)),
        ({"prompt": "x", "n": 10**18}, RequestDemand(1, MOST_ANSWERS, 16)),
    ],
)
def test_completions(fields: dict[str, object], expected: RequestDemand) -> None:
    assert without_longest(demand(fields)) == expected


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "n": 3}, 21),
        ({"max_tokens": 7, "n": 3, "best_of": 5}, 42),
        ({"max_tokens": 7, "best_of": 5}, 35),
        ({"max_tokens": 7, "n": 3, "prompt": ["x", "y"]}, 42),
        ({"max_completion_tokens": 7}, 16),
        ({"max_tokens": None}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": "many"}, None),
        ({}, 16),
        ({"prompt": ["x", "y"]}, 32),
    ],
)
def test_the_most_that_may_be_generated(fields: dict[str, object], most: int | None) -> None:
    """A completion has one field for it; what an engine refuses names no limit."""
    assert demand({"prompt": "x", **fields}).most == most


MESSAGES = [{"role": "user", "content": "x"}]
LIMIT = {"max_tokens": 4000}
UNREAD: list[tuple[Route, dict[str, object], int | None]] = [
    (Route.COMPLETIONS, {"prompt_embeds": ["AAAA"] * 100, **LIMIT}, 100 * 4000),
    (
        Route.COMPLETIONS,
        {"prompt_embeds": ["AAAA"] * 3, "prompt": ["a", "b"], "n": 2, **LIMIT},
        10 * 4000,
    ),
    (Route.COMPLETIONS, {"prompt_embeds": "AAAA", **LIMIT}, 4000),
    (Route.COMPLETIONS, {"prompt_embeds": ["AAAA"], "n": "100", **LIMIT}, 100 * 4000),
    (Route.COMPLETIONS, {"prompt": "x", "n": "100", **LIMIT}, 100 * 4000),
    (Route.COMPLETIONS, {"prompt": ["x", "y"], "n": 1e2, "max_tokens": " 40_00.0 "}, 200 * 4000),
    (Route.COMPLETIONS, {"prompt": "x", "n": "0__7", "best_of": "8", **LIMIT}, 14 * 4000),
    (Route.COMPLETIONS, {"prompt": "x", "n": "1" * 99, **LIMIT}, MOST_ANSWERS * 4000),
    (Route.COMPLETIONS, {"prompt": [["1"], ["2", "3"]], **LIMIT}, 2 * 4000),
    (Route.COMPLETIONS, {"prompt": ["a", [1, 2]] * 5, **LIMIT}, 10 * 4000),
    (Route.COMPLETIONS, {"prompt": [1, "2", 3], **LIMIT}, 4000),
    (
        Route.CHAT,
        {"messages": MESSAGES, "n": "100", "max_tokens": 9, "max_completion_tokens": "4000"},
        100 * 4000,
    ),
    (
        Route.CHAT,
        {"messages": [{"role": "user", "content": [{"type": "x"}]}], "n": "2", "max_tokens": "40"},
        2 * 40,
    ),
    (Route.BATCH, {"messages": [MESSAGES] * 100, "echo": True, **LIMIT}, 100 * 4000),
    (Route.BATCH, {"messages": [MESSAGES] * 100, "max_tokens": "4000"}, 100 * 4000),
    (Route.INVOCATIONS, {"messages": MESSAGES, "n": "100", **LIMIT}, 100 * 4000),
    (
        Route.INVOCATIONS,
        {"prompt": ["x"] * 50, "n": "2", "max_completion_tokens": 1, **LIMIT},
        100 * 4000,
    ),
    (Route.INVOCATIONS, {"prompt": "x", "n": "2", "max_completion_tokens": 1}, None),
]
"""What only an engine reads, and the most that it may generate for that."""


@pytest.mark.parametrize(("route", "fields", "most"), UNREAD, ids=str)
@pytest.mark.parametrize("by_process", [False, True])
def test_the_most_of_what_only_an_engine_reads(
    route: Route, fields: dict[str, object], most: int | None, by_process: bool
) -> None:
    """Embeddings, conversations, and numbers in each form count as the engine counts them, also if
    a process reads the body.
    """
    body = json.dumps({"model": "m", **fields}).encode()
    question = msgspec.msgpack.encode(BodyQuestion(DEFAULT, route))
    assert (
        demand_of(
            request_in(answer(question, body), body) if by_process else parse(route, body)
        ).most
        == most
    )


INTEGER = TypeAdapter(int)
"""As engines read integers."""


@given(
    st.text("0159+-._ e\t\u0661\u00a0", max_size=8)
    | st.integers()
    | st.floats()
    | st.booleans()
    | st.none(),
)
def test_numbers_in_each_form_that_engines_take(value: object) -> None:
    """None is left out: who writes a number in a form that only engines read has it counted all the
    same.
    """
    try:
        read = INTEGER.validate_python(value)
    except ValidationError:
        return
    assert lenient_integer(msgspec.Raw(json.dumps(value).encode())) == read


def test_the_most_of_other_requests() -> None:
    """A chat's newer field goes before the older one. One that is embedded generates nothing."""
    messages = {"messages": [{"role": "user", "content": "x"}]}
    assert demand({**messages, "max_tokens": 7, "max_completion_tokens": 9}, Route.CHAT).most == 9
    assert (
        demand({**messages, "max_tokens": 7, "max_completion_tokens": None}, Route.CHAT).most == 7
    )
    batch = {"messages": [messages["messages"]] * 3, "max_tokens": 7}
    assert demand(batch, Route.BATCH).most == 21
    assert demand({**batch, "tools": []}, Route.BATCH).most == 21, (
        "also if one engine gets it whole"
    )
    assert passed_demand(400, None, generates=False).most == 0


def test_chats() -> None:
    found = demand(
        {"messages": [{"role": "user", "content": "word " * 80}], "max_completion_tokens": 9},
        Route.CHAT,
    )
    assert without_longest(found) == RequestDemand(100, 1, 9)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5) | st.floats(),
        lambda one: st.lists(one, max_size=3),
    )
)
def test_what_no_engine_would_accept_has_bounds_as_well(value: object) -> None:
    """Tokens and answers are numbers from 1 to a bound, whatever stands in the fields."""
    for name in ("prompt", "n", "max_tokens", "priority"):
        found = demand({"prompt": "x", name: value})
        assert 1 <= found.prompt <= MOST_TOKENS
        assert found.answers >= 1
        assert -(2**63) <= found.priority < 2**63


def test_bodies_for_one_engine() -> None:
    assert without_longest(passed_demand(400, None, generates=True)) == RequestDemand(100, 1)
    assert without_longest(passed_demand(400, 7, generates=True)) == RequestDemand(100, 1, 7)
    assert without_longest(passed_demand(0, None, generates=False)) == RequestDemand(1, 0)
    assert passed_demand(2**40, None, generates=False).prompt == MOST_TOKENS
    ranked = passed_demand(40_000, None, Pairs(2000, 30_000), generates=False)
    assert (ranked.prompt, ranked.longest) == (
        10_000 + 1999 * 7_500,
        40_000 + 1999 * 30_000 + 2000 * MOST_TOKENS,
    )


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
    found, sent = prioritized(RequestDemand(1, 1, None, own), forward, (0, 5), is_known=is_known)
    assert found.priority == counts
    assert [value for name, value in sent if name == PRIORITY] == lines
    assert (b"traceparent", b"t") in sent
