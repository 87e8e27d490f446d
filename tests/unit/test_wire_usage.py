"""What an answer's usage says of prefix caches, where two engines had a part in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.contract import Contract, Dispatch, Handle, Receiver
from pdproxy.transfer.kvstore_keys import KVSTORE_KEYS
from pdproxy.transfer.lmcache_pd import lmcache_pd
from pdproxy.transfer.shared import SHARED
from pdproxy.wire.engine import prefill_answer
from pdproxy.wire.passed_usage import with_cache_of_message
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from pdproxy.wire.usage import add_up, with_cache

TOLD = 'so "cached_tokens":7 and "created_cache_tokens":7 it is'
"""A text that speaks of counts."""


def answer(**details: int) -> dict[str, Any]:
    """A whole answer whose text and whose usage have counts."""
    choice = {"index": 0, "text": TOLD, "finish_reason": "length", "prompt_token_ids": [5, 6, 7]}
    usage = {
        "prompt_tokens": 3,
        "total_tokens": 4,
        "completion_tokens": 1,
        "prompt_tokens_details": details or None,
    }
    return {
        "id": "cmpl-1",
        "choices": [choice],
        "usage": usage,
        "kv_transfer_params": {"first_tok": 42},
    }


@pytest.mark.parametrize(
    ("cached", "created", "said"),
    [
        (0, 3, {"cached_tokens": 0, "created_cache_tokens": 3}),
        (None, 3, {"cached_tokens": 2, "created_cache_tokens": 3}),
        (0, None, {"cached_tokens": 0, "created_cache_tokens": 1}),
        (None, None, {"cached_tokens": 2, "created_cache_tokens": 1}),
    ],
)
def test_counts_are_put_in_place(
    cached: int | None, created: int | None, said: dict[str, int]
) -> None:
    """Those that are known, where the engine has a count, and never in a text."""
    body = json.dumps(
        answer(cached_tokens=2, created_cache_tokens=1), separators=(",", ":")
    ).encode()
    found = json.loads(with_cache(body, cached=cached, created=created))
    assert found == answer(**said)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"input_tokens": 10, "cache_read_input_tokens": 5}, (12, 3)),
        ({"input_tokens": 10, "cache_read_input_tokens": None}, (7, 3)),
        ({"input_tokens": 10}, (10, None)),
    ],
)
def test_a_message_leaves_what_is_cached_out_of_its_input(
    told: dict[str, int | None], said: tuple[int, int | None]
) -> None:
    """Both together stay what the engine has counted."""
    body = json.dumps({"usage": told}).encode()
    usage = json.loads(with_cache_of_message(body, cached=3, created=None))["usage"]
    assert (usage["input_tokens"], usage.get("cache_read_input_tokens")) == said


def test_an_answer_without_counts_gets_none() -> None:
    """An engine that wasn't told to say them doesn't."""
    body = json.dumps(answer(), separators=(",", ":")).encode()
    assert with_cache(body, cached=1, created=2) == body


@pytest.mark.parametrize(
    "contract", [SHARED, KVSTORE_KEYS, lmcache_pd()], ids=lambda contract: contract.name
)
def test_a_decode_engine_that_knows_nothing_of_the_prefills_cache_is_told(
    contract: Contract,
) -> None:
    """Both counts are the prefill engine's: to the decode engine all that it was given is
    cached.
    """
    request = parse(Route.COMPLETIONS, b'{"prompt":"abc","max_tokens":9}')
    read = prefill_answer(json.dumps(answer(cached_tokens=2, created_cache_tokens=1)).encode())
    assert read is not None
    dispatch = Dispatch("leg", TokenIds(b"[5,6,7]", 3), receiver=Receiver("h", (1,), (2,)))
    given = contract.handle(request, read, dispatch)
    assert isinstance(given, Handle), given
    assert (given.cached_tokens, given.created_cache_tokens) == (2, 1)


def test_counts_of_several_answers_are_added_and_what_is_null_in_all_stays_null() -> None:
    """An empty object would be a field that no engine has sent."""
    one, two = (
        b'{"prompt_tokens":3,"new":null,"more":{"a":1}}',
        b'{"prompt_tokens":4,"new":null,"more":null}',
    )
    assert json.loads(add_up([one, two], details_of=None)) == {
        "prompt_tokens": 7,
        "new": None,
        "more": {"a": 1},
    }
