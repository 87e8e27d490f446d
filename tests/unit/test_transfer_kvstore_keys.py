"""The contract of a KV store under the proxy's keys: what P and D are told, and when D is better
told nothing.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.tokens.ids import from_numbers
from pdproxy.transfer.contract import NOT_HELD, Dispatch, Handle
from pdproxy.transfer.kvstore_keys import KVSTORE_KEYS, why_not_stored
from pdproxy.wire.kvparams import read, store_keys
from pdproxy.wire.route import Route
from tests.fakes import prompts
from tests.fakes.prompts import parsed

IDS = [1, 5, 6, 7]
DISPATCH = Dispatch(ids=from_numbers(IDS))
HANDLE = Handle(b"", None, 4, "")


@pytest.mark.parametrize("route", [Route.COMPLETIONS, Route.CHAT])
def test_p_stores_and_d_loads_under_one_key(route: Route) -> None:
    """Both are told the prompt's ids and the key that is made from them and the model."""
    request = parsed(route, max_tokens=9, stream=True)
    prompt = request.prompts[0]
    p = json.loads(KVSTORE_KEYS.prefill(request, prompt, DISPATCH).body)
    d = json.loads(KVSTORE_KEYS.decode(request, prompt, HANDLE, DISPATCH).body)
    keys = store_keys(IDS, "tiny")
    assert p["kv_transfer_params"] == {
        "prefix_prompt_ids": IDS,
        "kvcache_store_keys": keys,
        "kvcache_load_keys": None,
    }
    assert d["kv_transfer_params"] == {
        "prefix_prompt_ids": IDS,
        "kvcache_store_keys": None,
        "kvcache_load_keys": keys,
    }
    assert read(p["kv_transfer_params"]) is not None
    assert (p["max_tokens"], p["stream"], d["max_tokens"], d["stream"]) == (1, False, 9, True)


def test_another_model_has_another_key() -> None:
    """One store may serve several; a request without a model has a key all the same."""
    keys = set()
    for model in ("a", "b", None):
        request = parsed(model=model)
        body = json.loads(KVSTORE_KEYS.prefill(request, request.prompts[0], DISPATCH).body)
        keys.add(body["kv_transfer_params"]["kvcache_store_keys"][0])
    assert len(keys) == 3


def test_a_client_s_own_keys_are_nobody_s() -> None:
    """They would be another client's KV."""
    request = parsed(kv_transfer_params={"kvcache_load_keys": ["stolen"]})
    assert b"stolen" not in KVSTORE_KEYS.prefill(request, request.prompts[0], DISPATCH).body
    assert b"stolen" not in KVSTORE_KEYS.decode(request, request.prompts[0], HANDLE, DISPATCH).body


def test_a_request_is_not_changed() -> None:
    request = parsed(max_tokens=5)
    before = {name: bytes(value) for name, value in request.fields.items()}
    KVSTORE_KEYS.prefill(request, request.prompts[0], DISPATCH)
    KVSTORE_KEYS.decode(request, request.prompts[0], HANDLE, DISPATCH)
    assert {name: bytes(value) for name, value in request.fields.items()} == before


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        ({}, True),
        ({"usage": {"prompt_tokens": 4}}, True),
        ({"usage": {"prompt_tokens": 3}}, False),
        ({"prompt_token_ids": IDS, "usage": {"prompt_tokens": 4}}, True),
        ({"choices": [{"prompt_token_ids": IDS}]}, True),
        ({"prompt_token_ids": [1, 5, 6, 8]}, False),
        ({"choices": [{"prompt_token_ids": IDS[1:]}]}, False),
        ({"prompt_token_ids": "?"}, False),
    ],
)
def test_ids_that_p_says_otherwise(body: dict[str, Any], stored: bool) -> None:
    """D would load KV of another prompt: it is better told nothing. An engine that says nothing is
    believed.
    """
    assert (why_not_stored(prompts.read(body), IDS) is None) is stored
    assert isinstance(KVSTORE_KEYS.handle(parsed(), prompts.read(body), DISPATCH), Handle) is stored


def test_nothing_is_to_be_given_back() -> None:
    """P keeps nothing for us."""
    assert KVSTORE_KEYS.holder is NOT_HELD
    assert KVSTORE_KEYS.holder.pushed_to("http://d") is None
    assert not KVSTORE_KEYS.holder.refusal_released("BadRequestError", "temperature")
