"""Engines with a KV store under keys that requests bring: what is stored, what is found, and what
nobody compares.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.engine_model.hardware import Hardware
from pdproxy.tokens.ids import from_numbers
from pdproxy.transfer.bodies import alone_body
from pdproxy.transfer.contract import Dispatch, Handle
from pdproxy.transfer.kvstore_keys import KVSTORE_KEYS
from pdproxy.wire.engine import prefill_answer
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from pdproxy.wire.sent_body import joined
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.kvstore_keys import refusal
from pdproxy_lab.sim.request import EngineDeadError
from pdproxy_lab.sim.server import SimServer
from tests.sim.engines import OTHER, PROMPT, Engines, external, plain
from tests.sim.raw import ask, post


def storing(prompt, key="k"):
    return {
        "prefix_prompt_ids": list(prompt),
        "kvcache_store_keys": [key],
        "kvcache_load_keys": None,
    }


def loading(prompt, key="k"):
    return {
        "prefix_prompt_ids": list(prompt),
        "kvcache_store_keys": None,
        "kvcache_load_keys": [key],
    }


def facts(role, **more):
    return SimFacts(**{"role": role, "connector": "kvstore-keys", "max_model_len": 500, **more})


@given(st.integers(1, 70), st.sampled_from([1, 5, 16, 32]), st.sampled_from([8, 8192]))
@settings(max_examples=60, deadline=None)
def test_split_says_what_one_engine_says(length, block_size, budget):
    prompt = tuple(range(300, 300 + length))
    engines = Engines()
    p, d = (
        engines.add(facts(r, block_size=block_size, max_num_batched_tokens=budget))
        for r in ("prefill", "decode")
    )
    first = engines.answer(p, prompt, 1, storing(prompt))
    assert first.outputs[-1].kv_transfer_params is None
    run = engines.answer(d, prompt, 8, loading(prompt))
    assert run.tokens == plain(prompt)
    assert run.tokens[0] == first.tokens[0]
    assert external(d) == length - 1
    assert p.core.pool.usage == d.core.pool.usage == 0


@pytest.mark.parametrize(
    "kv",
    [
        None,
        {},
        loading(PROMPT, "other"),
        loading(PROMPT[:-1]),
        loading((*PROMPT, 7)),
        storing(PROMPT, "k"),
        {"kvcache_load_keys": None, "prefix_prompt_ids": None},
    ],
    ids=str,
)
def test_what_is_not_found_is_computed(engines, p, d, kv):
    """No key, another one, ids of another length, or keys that are not this engine's business."""
    engines.answer(p, PROMPT, 1, storing(PROMPT))
    assert engines.answer(d, PROMPT, 8, kv).tokens == plain()
    assert external(d) == 0


def test_what_prefill_was_not_told_to_store_is_not_there(engines, p, d):
    nothing: dict[str, Any] = {}
    for kv in (None, nothing, loading(PROMPT)):
        engines.answer(p, PROMPT, 1, kv)
    assert engines.answer(d, PROMPT, 8, loading(PROMPT)).tokens == plain()
    assert external(d) == 0


def test_only_producers_store_and_only_consumers_load(engines, p, d):
    engines.answer(d, PROMPT, 1, storing(PROMPT))
    engines.answer(d, PROMPT, 1, loading(PROMPT))
    assert external(d) == 0
    engines.answer(p, PROMPT, 1, storing(PROMPT))
    engines.answer(p, OTHER, 1, loading(OTHER))
    assert external(p) == 0


@pytest.mark.parametrize(
    "more", [{"role": "aggregated"}, {"role": "prefill", "kv_role": "kv_both"}], ids=str
)
def test_one_that_is_both_does_both(engines, more):
    both = engines.add(facts(**more, enable_prefix_caching=False))
    engines.answer(both, PROMPT, 1, storing(PROMPT))
    assert engines.answer(both, PROMPT, 8, loading(PROMPT)).tokens == plain()
    assert external(both) == 99


def test_the_first_key_counts(engines, p, d):
    engines.answer(p, PROMPT, 1, {**storing(PROMPT), "kvcache_store_keys": ["a", "b"]})
    engines.answer(d, PROMPT, 1, loading(PROMPT, "b"))
    assert external(d) == 0
    engines.answer(d, OTHER, 1, {**loading(PROMPT), "kvcache_load_keys": ["a", "b"]})
    assert external(d) == 99


def test_what_decode_has_cached_is_not_loaded_again(engines, p, d):
    engines.answer(p, PROMPT, 1, storing(PROMPT))
    engines.answer(d)
    run = engines.answer(d, PROMPT, 8, loading(PROMPT))
    assert run.tokens == plain()
    assert external(d) == 3


def test_a_later_store_takes_the_place_of_the_first(engines, p, d):
    engines.answer(p, OTHER, 1, storing(OTHER))
    engines.answer(p, PROMPT, 1, storing(PROMPT))
    assert engines.answer(d, PROMPT, 8, loading(PROMPT)).tokens == plain()


# -- answers that are wrong without an error


def test_kv_of_another_prompt_is_not_noticed(engines, p, d):
    """Nobody compares: a proxy whose keys collide makes wrong answers."""
    engines.answer(p, OTHER, 1, storing(OTHER))
    run = engines.answer(d, PROMPT, 8, loading(PROMPT))
    assert external(d) == 99
    assert run.tokens != plain()


@pytest.mark.parametrize("length", [1, 16, 50, 90])
def test_kv_that_is_too_short_is_not_noticed(engines, p, d, length):
    short = PROMPT[:length]
    engines.answer(p, short, 1, storing(short))
    assert engines.answer(d, PROMPT, 8, loading(PROMPT)).tokens != plain()
    assert external(d) == 99


def test_what_decode_had_cached_is_not_written_over(engines, p, d):
    """KV of another prompt spoils the request that asked for it, and no other."""
    engines.answer(p, OTHER, 1, storing(OTHER))
    engines.answer(d)
    engines.answer(d, PROMPT, 8, loading(PROMPT))
    assert external(d) == 3
    assert engines.answer(d).tokens == plain()


def test_half_a_prompt_is_not_stored(engines, d):
    """One whose client leaves before all of it is computed."""
    p = engines.add(facts("prefill", max_num_batched_tokens=16))
    engines.ask(p, PROMPT, 1, storing(PROMPT), id="left")
    engines.run(until=engines.now + p.facts.hardware.step_s(16, 0) * 2.5)
    engines.abort(p, "left")
    engines.run()
    engines.answer(d, PROMPT, 8, loading(PROMPT))
    assert external(d) == 0


def test_kv_that_is_too_long_says_the_prompt_s_own(engines, p, d):
    """What lies behind the prompt is not read."""
    long = PROMPT + OTHER
    engines.answer(p, long, 1, storing(long))
    assert engines.answer(d, PROMPT, 8, loading(PROMPT)).tokens == plain()


# -- what kills a worker


@pytest.mark.parametrize(
    ("role", "kv"),
    [
        ("prefill", {"prefix_prompt_ids": [1], "kvcache_store_keys": []}),
        ("prefill", {"kvcache_store_keys": ["k"]}),
        ("decode", {"prefix_prompt_ids": [1], "kvcache_load_keys": []}),
        ("decode", {"kvcache_load_keys": ["k"]}),
        ("decode", {"kvcache_load_keys": ["nothing there"]}),
    ],
)
def test_what_kills_a_worker(engines, p, d, role, kv):
    engines.answer(p, PROMPT, 1, storing(PROMPT))
    engine = p if role == "prefill" else d
    assert engines.answer(engine, OTHER, 1, kv).over == "error"
    assert engine.dead
    with pytest.raises(EngineDeadError):
        engines.ask(engine)


# -- what the API server refuses


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (
            {"prefix_prompt_ids": ["a"]},
            "prefix_prompt_ids: ['a'] should be a list of integers or None.",
        ),
        (
            {"prefix_prompt_ids": [[1]]},
            "prefix_prompt_ids: [[1]] should be a list of integers or None.",
        ),
        ({"kvcache_load_keys": [1]}, "kvcache_load_keys: [1] should be a list of strings or None."),
        (
            {"kvcache_load_keys": "abc"},
            "kvcache_load_keys: abc should be a list of strings or None.",
        ),
        (
            {"kvcache_store_keys": [None]},
            "kvcache_store_keys: [None] should be a list of strings or None.",
        ),
        ({"do_remote_decode": True}, "Unexpected keyword argument 'do_remote_decode'"),
    ],
)
def test_params_that_are_refused(params, words):
    assert refusal(params) == words


@pytest.mark.parametrize(
    "params", [None, {}, storing(PROMPT), loading(PROMPT), {"kvcache_load_keys": []}]
)
def test_params_that_are_taken(params):
    assert refusal(params) is None


# -- behind HTTP, asked by the proxy's own contract


async def told(port, path, body):
    """Post a body that may be one of the proxy's; return the answer."""
    return await ask(port, post(path, **body))


async def test_engines_that_share_a_folder(tmp_path):
    """The contract's bodies move a prompt's KV from one server to the other; a chat's as well as a
    completion's.
    """
    more = {"hardware": Hardware(speed=0), "eos_every": 0, "shared_storage_path": str(tmp_path)}
    async with SimServer(facts("prefill", **more)) as p, SimServer(facts("decode", **more)) as d:
        for path, body in (
            ("/v1/completions", {"prompt": "one two three four", "max_tokens": 5}),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 5},
            ),
        ):
            request = parse(
                Route(path), json.dumps({"model": p.facts.model, "temperature": 0, **body}).encode()
            )
            asked = {name: body[name] for name in ("prompt", "messages") if name in body}
            ids = json.loads(
                (await told(d.port, "/tokenize", {"model": p.facts.model, **asked})).answer.body
            )["tokens"]
            prompt, dispatch = request.prompts[0], Dispatch(ids=from_numbers(ids))
            before = external(d.engine)
            stored = await told(
                p.port, path, json.loads(KVSTORE_KEYS.prefill(request, prompt, dispatch).body)
            )
            assert stored.answer.status == 200
            answer = prefill_answer(stored.answer.body)
            assert answer is not None
            handle = KVSTORE_KEYS.handle(request, answer, dispatch)
            assert isinstance(handle, Handle)
            split = await told(
                d.port,
                path,
                json.loads(KVSTORE_KEYS.decode(request, prompt, handle, dispatch).body),
            )
            assert external(d.engine) - before == len(ids) - 1
            alone = await told(p.port, path, json.loads(joined(alone_body(request, prompt))))
            texts = [json.loads(one.answer.body)["choices"][0] for one in (split, alone)]
            assert texts[0] == texts[1]


async def test_a_refusal_names_the_field():
    async with SimServer(facts("decode", hardware=Hardware(speed=0))) as d:
        body = {
            "model": d.facts.model,
            "prompt": "x",
            "kv_transfer_params": {"kvcache_load_keys": [5]},
        }
        refused = await told(d.port, "/v1/completions", body)
        assert refused.answer.status == 400
        assert b"kvcache_load_keys: [5] should be a list of strings or None." in refused.answer.body
        assert (
            await told(d.port, "/v1/completions", {"model": d.facts.model, "prompt": "x"})
        ).answer.status == 200
