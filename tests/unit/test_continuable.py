"""Which streams other engines may go on with, and what is kept of their requests."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdproxy.serving.dispatch import following
from pdproxy.wire.continuable import Continuable, NotContinued, plan
from pdproxy.wire.request import Parsed, parse
from pdproxy.wire.route import Route

TEXT = {"model": "tiny", "prompt": "to be", "max_tokens": 9, "temperature": 0, "stream": True}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "to be"}],
    "temperature": 0,
    "stream": True,
}


def parsed(route: Route, fields: dict[str, Any]) -> Parsed:
    """A request with these fields beside the usual ones; those that are `...` are left out."""
    usual = CHAT if route is Route.CHAT else TEXT
    body = {name: value for name, value in (usual | fields).items() if value is not ...}
    return parse(route, json.dumps(body, separators=(",", ":")).encode())


def planned(route: Route, **fields: Any) -> Continuable | NotContinued:
    """The plan of such a request."""
    return plan(parsed(route, fields), sampled=True)


@pytest.mark.parametrize("route", [Route.COMPLETIONS, Route.CHAT])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
        {"temperature": ...},
        {"seed": 7},
        {"temperature": 1, "seed": None},
        {"stop": ["a", "bc"], "include_stop_str_in_output": True},
        {"min_tokens": 3},
        {"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0},
        {"truncate_prompt_tokens": 5, "truncation_side": "left"},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"response_format": {"type": "text"}},
        {"bad_words": [], "tool_choice": "none"},
        {"return_token_ids": True},
        {"cache_salt": "x", "priority": 3, "logit_bias": {"5": 1.0}, "ignore_eos": True},
    ],
)
def test_streams_that_go_on(route: Route, fields: dict[str, Any]) -> None:
    """Nothing of these depends on the answer so far but through its ids."""
    assert isinstance(planned(route, **fields), Continuable)


@pytest.mark.parametrize("route", [Route.COMPLETIONS, Route.CHAT])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stream": False}, NotContinued.NO_IDS),
        ({"n": 2, "temperature": 1}, NotContinued.N),
        ({"use_beam_search": True}, NotContinued.BEAM),
        ({"echo": True}, NotContinued.ECHO),
        ({"prompt_logprobs": 1}, NotContinued.PROMPT_LOGPROBS),
        ({"logprobs": 1}, NotContinued.LOGPROBS),
        ({"response_format": {"type": "json_object"}}, NotContinued.GRAMMAR),
        ({"structured_outputs": {"regex": "a+"}}, NotContinued.GRAMMAR),
        ({"presence_penalty": 0.1}, NotContinued.PENALTY),
        ({"frequency_penalty": -1}, NotContinued.PENALTY),
        ({"repetition_penalty": 1.1}, NotContinued.PENALTY),
        ({"bad_words": ["x"]}, NotContinued.BAD_WORDS),
        ({"thinking_token_budget": 5}, NotContinued.THINKING_BUDGET),
        ({"repetition_detection": {}}, NotContinued.REPETITION_DETECTION),
        ({"temperature": 0.5, "seed": 7}, NotContinued.SEED),
        ({"temperature": 1e-9, "seed": 7}, NotContinued.SEED),
        ({"temperature": ..., "seed": 7}, NotContinued.SEED),
        ({"tools": []}, NotContinued.TOOLS),
        ({"tool_choice": "auto"}, NotContinued.TOOLS),
        ({"vllm_xargs": {"a": 1}}, NotContinued.UNKNOWN_FIELD),
        ({"something": 1}, NotContinued.UNKNOWN_FIELD),
        ({"stop": ["x"] * 65}, NotContinued.UNKNOWN_FIELD),
        ({"stop": ["a", "x" * 1025]}, NotContinued.UNKNOWN_FIELD),
        ({"stop": 5}, NotContinued.UNKNOWN_FIELD),
        ({"temperature": "hot"}, NotContinued.UNKNOWN_FIELD),
    ],
)
def test_streams_that_end(route: Route, fields: dict[str, Any], reason: NotContinued) -> None:
    """Each of these has its reason."""
    if route is Route.CHAT and "logprobs" in fields:
        fields = {"logprobs": True}
    assert planned(route, **fields) is reason


def test_reasons_of_one_route_alone() -> None:
    """Hidden reasoning, media, and a completion of which only an engine knows the limit."""
    assert planned(Route.CHAT, include_reasoning=False) is NotContinued.HIDDEN_REASONING
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    assert (
        planned(Route.CHAT, messages=[{"role": "user", "content": [image]}]) is NotContinued.MEDIA
    )
    assert planned(Route.COMPLETIONS, max_tokens=None) is NotContinued.NO_LIMIT


def test_chance_can_be_left_out() -> None:
    """With `continuations.sampled` off, only greedy answers go on."""
    for fields, wanted in (({}, True), ({"temperature": 1}, False), ({"temperature": ...}, False)):
        found = plan(parsed(Route.COMPLETIONS, fields), sampled=False)
        assert isinstance(found, Continuable) is wanted
        assert wanted or found is NotContinued.SAMPLED


def test_what_is_kept() -> None:
    """The sampling fields as they came; not the prompt, not what another prompt must not get twice,
    and no view of the body.
    """
    kept = planned(
        Route.COMPLETIONS,
        temperature=0.50,
        stop=["END", "x"],
        truncate_prompt_tokens=5,
        seed=None,
        min_tokens=2,
        user="u",
    )
    assert isinstance(kept, Continuable)
    assert json.loads(kept.sampling) == {"temperature": 0.5, "stop": ["END", "x"], "user": "u"}
    assert (kept.model, kept.limit, kept.min_tokens, kept.stops) == ("tiny", 9, 2, ("END", "x"))
    assert (kept.held_back, kept.wants_usage, kept.shows_stop) == (2, False, False)
    assert isinstance(kept.sampling, bytes)


def test_neutral_penalties_are_sent_again() -> None:
    """An engine's generation config may have other ones, which hold for requests that send none."""
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    kept = planned(Route.CHAT, **neutral)
    assert isinstance(kept, Continuable)
    assert json.loads(kept.sampling) == {"temperature": 0} | neutral


@pytest.mark.parametrize(
    ("route", "fields", "limit"),
    [
        (Route.COMPLETIONS, {"max_tokens": ...}, 16),
        (Route.COMPLETIONS, {"max_tokens": 5}, 5),
        (Route.CHAT, {}, None),
        (Route.CHAT, {"max_tokens": 5}, 5),
        (Route.CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, 6),
        (Route.CHAT, {"max_completion_tokens": None}, None),
    ],
)
def test_limits(route: Route, fields: dict[str, Any], limit: int | None) -> None:
    """As vLLM reads them."""
    kept = planned(route, **fields)
    assert isinstance(kept, Continuable)
    assert kept.limit == limit


def test_the_metric_knows_every_reason() -> None:
    """The table of metrics lists the reasons in the same words."""
    assert {name for name, _ in following.REASONS} == {reason.value for reason in NotContinued}


def test_raw_values_are_copied() -> None:
    """A record keeps nothing of the body alive: `msgspec.Raw` would."""
    assert not any(
        isinstance(value, msgspec.Raw)
        for value in msgspec.structs.astuple(planned(Route.CHAT))  # type: ignore[arg-type]
    )
