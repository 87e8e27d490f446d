"""Mooncake through the proxy: what each engine is sent, which engines are paired, and what is left
at them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.fleet.bootstrap import Bootstraps
from pdproxy.observe.events import HandleEnded, LegFailed, ServedAlone
from pdproxy_lab.sim.facts import MooncakeFacts
from pdproxy_lab.sim.reply import ScriptedReply
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import request
from tests.fakes.pool import Pair, pool
from tests.fakes.tokenizer import SimTokenizer
from tests.fakes.world import until
from tests.proxy.faults import usage
from tests.proxy.test_both_legs import Gate, fails, text_of
from tests.proxy.test_connectors import CHAT, COMPLETIONS, TEXT, chat, completion, same

MOONCAKE = "mooncake"


def params(engine: SimServer) -> dict[str, Any]:
    """The params of the last request that an engine got."""
    found: dict[str, Any] = engine.requests[-1].json["kv_transfer_params"]
    return found


def nothing_left(*engines: SimServer) -> bool:
    """No blocks are taken."""
    return all(usage(engine) == 0 for engine in engines)


def bootstrap(engine: SimServer) -> Any:
    """An engine's bootstrap server."""
    assert engine.engine.bootstrap is not None
    return engine.engine.bootstrap


async def asked_again(pair: Pair, *engines: SimServer) -> None:
    """Have the bootstrap servers asked, now."""
    proxy = pair.world.proxy
    (bootstraps,) = [one for one in proxy.observers._observers if isinstance(one, Bootstraps)]
    for engine in engines or (pair.p,):
        await bootstraps.ask(proxy.engines[engine.url])


# -- the legs


async def test_what_each_engine_is_sent() -> None:
    async with pool(MOONCAKE) as pair:
        answer = await pair.ask(COMPLETIONS, completion())
        assert answer.text == await text_of(pair)
        name = params(pair.p)["transfer_id"]
        assert params(pair.p) == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": name,
        }
        assert params(pair.d) == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": bootstrap(pair.p).url,
            "remote_engine_id": pair.p.engine.engine_id,
            "transfer_id": name,
        }
        assert name.startswith("xfer-")
        assert name.removeprefix("xfer-") == pair.p.requests[-1].ident
        await pair.ask(COMPLETIONS, completion())
        assert params(pair.p)["transfer_id"] != name, "each dispatch has its own"
        await pair.world.quiet()
        assert {event.end for event in pair.world.events(HandleEnded)} == {"loaded"}
        assert nothing_left(pair.p, pair.d)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["e", "o", " "]},
        {"stop": "a", "include_stop_str_in_output": True},
        {"stop_token_ids": list(range(700, 900))},
        {"min_tokens": 3, "stop": ["e"]},
        {"stop": [" "], "stream": True},
    ],
)
async def test_the_prefill_ends_by_length_whatever_the_client_stops_at(
    fields: dict[str, Any],
) -> None:
    """Otherwise no KV would be sent, and the decode engine would wait for minutes."""
    async with pool(MOONCAKE) as pair:
        for make, path in ((completion, COMPLETIONS), (chat, CHAT)):
            await same(pair, path, make(**fields))
            sent = pair.p.requests[-1].json
            found = {
                name: sent[name]
                for name in ("stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens")
            }
            assert found == {
                "stop": [],
                "stop_token_ids": [],
                "include_stop_str_in_output": False,
                "min_tokens": 1,
            }
        assert not pair.world.events(ServedAlone)
        await pair.world.quiet()
        assert nothing_left(pair.p, pair.d)


async def test_a_prompt_whose_first_token_is_the_end_is_split() -> None:
    """The end token is masked for the one token of the prefill; the decode engine ends where one
    engine would.
    """
    async with pool(MOONCAKE, everybody={"eos_every": 1}) as pair:
        for prompt in (TEXT, TEXT[1:], TEXT[2:]):
            await same(pair, COMPLETIONS, completion(prompt=prompt))
        assert not pair.world.events(ServedAlone)


async def test_a_prefill_that_did_not_end_by_length_is_served_otherwise() -> None:
    """No KV is sent then. The decode leg is ended, and what its engine keeps is counted."""
    async with pool(MOONCAKE, limits={"attempts": 1}) as pair:

        async def stops(reply: ScriptedReply) -> None:
            choice = {
                "index": 0,
                "text": "x",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
            usage_of = {"prompt_tokens": 9, "total_tokens": 10, "completion_tokens": 1}
            body = {
                "id": "c",
                "object": "text_completion",
                "created": 1,
                "model": "tiny",
                "choices": [choice],
            }
            await until(lambda: pair.d.engine.stats.waiting)
            await reply.whole(json.dumps({**body, "usage": usage_of}).encode(), 200)

        pair.p.faults.script(stops)
        answer = await pair.ask(COMPLETIONS, completion())
        assert answer.text == await text_of(pair)
        (failed,) = pair.world.events(LegFailed)
        assert "the prefill ended by stop, not by length" in failed.error
        assert [event.reason for event in pair.world.events(ServedAlone)] == ["no_handle"]
        await pair.world.quiet()
        assert [event.end for event in pair.world.events(HandleEnded)] == ["stuck"]
        assert pair.world.metric("pdproxy_kv_stuck", node=pair.d.url) == 1
        (detail,) = [
            one for one in pair.world.proxy.readiness().details if "KV that will not come" in one
        ]
        assert detail.endswith("it frees each after 480 s")
        pair.p.engine.expire_leases()
        await until(lambda: nothing_left(pair.p, pair.d))


async def test_both_legs_have_the_ids_that_the_proxy_made() -> None:
    async with pool(MOONCAKE, tokenizer=SimTokenizer()) as pair:
        await until(lambda: pair.world.proxy.tokens is not None)
        await same(pair, CHAT, chat())
        await same(pair, COMPLETIONS, completion())
        await until(lambda: not pair.world.busy())
        assert pair.loaded > 0


# -- failures


async def test_a_prefill_engine_that_is_busy_is_asked_again_under_the_same_id() -> None:
    """It has certainly not begun: its KV frees the decode engine that waits."""
    async with pool(MOONCAKE) as pair:
        pair.p.faults.script(fails(503))
        answer = await pair.ask(COMPLETIONS, completion())
        assert answer.text == await text_of(pair)
        first, second = [one.json["kv_transfer_params"]["transfer_id"] for one in pair.p.requests]
        assert first == second
        assert len(pair.d.requests) == 1
        await pair.world.quiet()
        assert nothing_left(pair.p, pair.d)


async def test_a_prefill_that_fails_otherwise_is_tried_under_another_id() -> None:
    """It may have begun: then the same id would help nobody, and could lose blocks at the prefill
    engine.
    """
    async with pool(MOONCAKE) as pair:
        pair.p.faults.script(fails(500))
        answer = await pair.ask(COMPLETIONS, completion())
        assert answer.text == await text_of(pair)
        names = {one.json["kv_transfer_params"]["transfer_id"] for one in pair.p.requests}
        assert len(names) == len(pair.p.requests)


async def test_a_request_that_the_decode_engine_refuses_leaves_nothing_at_the_prefill_engine() -> (
    None
):
    """It asks for no blocks, which frees the prefill engine's, whichever comes first."""
    async with pool(MOONCAKE, d={"max_model_len": 100}) as pair:
        answer = await pair.ask(COMPLETIONS, completion())
        assert answer.status == 400
        await pair.world.quiet()
        await until(lambda: nothing_left(pair.p, pair.d))
        assert not pair.p.engine.handles


async def test_kv_that_no_decode_engine_has_asked_for_is_released_once() -> None:
    """By a request with `max_tokens` 0, to an engine that has never had contact with the prefill
    engine, too.
    """
    async with pool(MOONCAKE, decodes=2, dispatch="sequential") as pair:
        other = pair.more[0]
        gate = Gate()
        pair.p.faults.script(gate)
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, completion()))
        await until(lambda: len(pair.p.requests))
        client.close()
        await pair.world.ended()
        gate.opened.set()
        await pair.world.quiet()
        assert [event.end for event in pair.world.events(HandleEnded)] == ["released"]
        await until(lambda: nothing_left(pair.p, pair.d, other))
        assert len([*pair.d.releases, *other.releases]) == 1


# -- which engines are paired


async def test_before_its_bootstrap_server_has_named_it_an_engine_gets_no_prefill() -> None:
    """Prompts are served alone, and `/ready` says why."""
    small = MooncakeFacts(bootstrap_port=0)
    async with pool(MOONCAKE, p={"mooncake": small}) as pair:
        workers = dict(bootstrap(pair.p).workers)
        for partial in ({}, {0: {**workers[0], "worker_addr": {}}}):
            bootstrap(pair.p).workers = partial
            await asked_again(pair)
            answer = await pair.ask(COMPLETIONS, completion())
            assert answer.text == await text_of(pair)
            assert pair.world.events(ServedAlone)[-1].reason == "no_pair"
            assert not pair.p.requests
            details = pair.world.proxy.readiness().details
            assert any(
                pair.p.url in one and "bootstrap server that does not know" in one
                for one in details
            ), details
        bootstrap(pair.p).workers = workers
        await asked_again(pair)
        await same(pair, COMPLETIONS, completion())
        assert pair.loaded > 0
        assert (
            pair.world.metric(
                "pdproxy_bootstrap_queries_total", result="incomplete", node=pair.p.url
            )
            >= 2
        )


async def test_each_prefill_names_the_rank_that_makes_its_kv() -> None:
    """A decode engine that waits at another rank would wait for minutes."""
    ranks = {"data_parallel_size": 3}
    async with pool(MOONCAKE, p=ranks, d={"data_parallel_size": 2}) as pair:
        for number in range(6):
            await same(pair, COMPLETIONS, completion(prompt=f"{number} {TEXT}"))
            asked = dict(pair.p.requests[-1].headers)["x-data-parallel-rank"]
            assert params(pair.d)["remote_engine_id"] == f"{pair.p.engine.engine_id}_dp{asked}"
        assert {dict(one.headers)["x-data-parallel-rank"] for one in pair.p.requests} == {
            "0",
            "1",
            "2",
        }
        assert {dict(one.headers)["x-data-parallel-rank"] for one in pair.d.requests} == {"0", "1"}
        assert not pair.world.events(ServedAlone)
        await pair.world.quiet()
        assert nothing_left(pair.p, pair.d)


async def test_an_engine_with_more_ranks_than_the_settings_say_gets_no_prefill() -> None:
    async with pool(MOONCAKE, p={"data_parallel_size": 2}, kv_ready_at_first=False) as pair:
        engine = pair.world.proxy.engines[pair.p.url]
        engine.ranks = engine.run.peers.ranks = 1
        await asked_again(pair)
        assert (await pair.ask(COMPLETIONS, completion())).status == 200
        assert not pair.p.requests
        details = pair.world.proxy.readiness().details
        assert any("facts.data_parallel_size is 1" in one for one in details), details


async def test_after_a_restart_the_new_engine_id_is_used() -> None:
    async with pool(MOONCAKE) as pair:
        await same(pair, COMPLETIONS, completion())
        before = params(pair.d)["remote_engine_id"]
        await pair.p.restart()
        await pair.world.probe()
        await until(
            lambda: all(engine.kv_not_ready is None for engine in pair.world.proxy.ledger.engines)
        )
        await same(pair, COMPLETIONS, completion(prompt=TEXT[1:]))
        assert params(pair.d)["remote_engine_id"] == pair.p.engine.engine_id != before


async def test_a_fixed_engine_id_is_not_used_after_a_restart() -> None:
    """The decode engine would ask the old worker, for nine minutes."""
    async with pool(MOONCAKE, p={"engine_id": "fixed"}) as pair:
        await same(pair, COMPLETIONS, completion())
        await pair.p.restart()
        await pair.world.probe()
        await asked_again(pair)
        answer = await pair.ask(COMPLETIONS, completion())
        assert answer.text == await text_of(pair)
        assert pair.world.events(ServedAlone)[-1].reason == "no_pair"
        details = pair.world.proxy.readiness().details
        assert any("with the engine_id that it had before" in one for one in details), details
        await pair.d.restart()
        await pair.world.probe()
        await asked_again(pair)
        await same(pair, COMPLETIONS, completion(prompt=TEXT[1:]))
        assert pair.loaded > 0


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[" * 50_000,
        b'{"0":{"engine_id":"x"}}',
        b'{"a":1}',
        b"\xff\x00",
        b"x" * (300 << 10),
        b'{"0":null}',
    ],
    ids=lambda said: repr(said[:20]),
)
async def test_a_hostile_bootstrap_server_is_a_reason_and_no_crash(said: bytes) -> None:
    async with pool(MOONCAKE, kv_ready_at_first=False) as pair:
        bootstrap(pair.p).answer = said
        await pair.p.restart()
        await pair.world.probe()
        await asked_again(pair)
        answer = await pair.ask(COMPLETIONS, completion())
        assert answer.text == await text_of(pair)
        assert not pair.p.requests
        why = pair.world.proxy.engines[pair.p.url].in_ledger.kv_not_ready or ""
        assert "can't be used: /query answered" in why
        assert len(why) < 2000
        assert ("more than 262144 bytes" in why) is (len(said) > 262144)


async def test_a_bootstrap_server_that_never_answers_is_late() -> None:
    async with pool(MOONCAKE, deadlines={"probe": 1.0}) as pair:
        bootstrap(pair.p).freeze()
        await asked_again(pair)
        assert pair.world.metric("pdproxy_deadline_total", wait="probe") >= 1
        assert (
            pair.world.metric("pdproxy_bootstrap_queries_total", result="failed", node=pair.p.url)
            >= 1
        )
        details = pair.world.proxy.readiness().details
        assert any(
            "the bootstrap server of" in one and "did not answer in 1 s" in one for one in details
        ), details
        bootstrap(pair.p).thaw()
        await same(pair, COMPLETIONS, completion())
        assert pair.loaded > 0, "its ids are known"
