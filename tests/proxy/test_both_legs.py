"""Both engines are asked at once, and the prefill engine pushes: what clients see, and what is left
at the engines.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe.events import HandleEnded, LegFailed, RequestEnded, ServedAlone
from pdproxy.serving.dispatch.decode_leg import ACCEPT_GRACE, COUNTS_GRACE
from pdproxy.serving.dispatch.orders import REFUSAL_GRACE
from pdproxy.settings.keys import Auth
from pdproxy.wire.route import Route
from pdproxy_lab.sim.faults.book import PlannedFault
from pdproxy_lab.sim.reply import ScriptedReply
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import request
from tests.fakes.clock import ManualClock
from tests.fakes.pool import Pair, pool
from tests.fakes.tokenizer import SimTokenizer
from tests.fakes.world import until
from tests.proxy import leaving
from tests.proxy.faults import usage
from tests.proxy.test_connectors import CHAT, COMPLETIONS, TEXT, bare, chat, completion, events
from tests.proxy.test_quotas import A, keys, left

PUSH = "nixl-push"
BOTH = pytest.mark.parametrize("connector", [PUSH, "mooncake"])
SLOW = {
    "hardware": Hardware(prefill_tokens_per_s=2000.0, decode_step_s=0.0, transfer_latency_s=0.0)
}
"""An engine that prefills `TEXT` in some 0.1 s."""


class Gate:
    """Scripts of an engine that answers when the test says so."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self, reply: ScriptedReply) -> None:
        await self.opened.wait()
        await reply.serve()

    def then(
        self, script: Callable[[ScriptedReply], Awaitable[None]]
    ) -> Callable[[ScriptedReply], Awaitable[None]]:
        """A script that runs another one when the test says so."""

        async def waits(reply: ScriptedReply) -> None:
            await self.opened.wait()
            await script(reply)

        return waits


def fails(
    status: int = 500, param: str | None = None
) -> Callable[[ScriptedReply], Awaitable[None]]:
    """A script that refuses. `param`: what is wrong."""

    async def script(reply: ScriptedReply) -> None:
        error = {"message": "no", "type": "InternalServerError", "param": param, "code": status}
        await reply.whole(json.dumps({"error": error}).encode(), status)

    return script


async def known(pair: Pair) -> None:
    """Have the proxy learn where the prefill engines are reached."""
    for _ in range(1 + len(pair.more)):
        assert (
            await pair.ask(COMPLETIONS, completion(prompt="some other text " * 9))
        ).status == 200
    pair.world.forget_events()


async def text_of(pair: Pair) -> str:
    """What one engine alone says to `completion()`."""
    return str(
        json.loads((await pair.asked_plain(COMPLETIONS, completion())).body)["choices"][0]["text"]
    )


def ids(engine: SimServer) -> list[str]:
    """The request ids that an engine got."""
    return [one.ident for one in engine.requests]


def nothing_waits(*engines: SimServer) -> bool:
    """No engine keeps blocks for another one."""
    return not any(engine.engine.awaited or engine.engine.handles for engine in engines)


def nothing_left(pair: Pair) -> bool:
    """No engine has blocks in use, or keeps any for another one."""
    engines = (pair.p, pair.d, *pair.more)
    return nothing_waits(*engines) and not any(usage(engine) for engine in engines)


async def test_the_first_prompt_of_a_run_goes_to_the_prefill_engine_alone_at_first() -> None:
    """Only its answer shows where it is reached; after a restart it is somebody else."""
    async with pool(PUSH) as pair:
        gate = Gate()
        for _ in range(2):
            pair.p.faults.script(gate)
            gate.opened.clear()
            before = pair.d.journal.requests.__len__()
            first = asyncio.ensure_future(pair.ask(COMPLETIONS, completion()))
            await until(lambda: len(pair.p.requests) and not pair.p.requests[-1].over)
            await asyncio.sleep(0.05)
            assert len(pair.d.requests) == before, "it can't know yet whom to wait for"
            gate.opened.set()
            assert (await first).status == 200
            await pair.p.restart()
            await pair.world.probe()


async def test_the_first_prompt_of_a_run_is_one_prefill_leg(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether its engine is sent ids is asked once."""
    async with pool(PUSH, tokenizer=SimTokenizer()) as pair:
        tokens = pair.world.proxy.tokens
        assert tokens is not None
        await until(lambda: tokens.canaries.trusted("tiny", Route.COMPLETIONS))
        check, asked = tokens.tokenizing.check, list[str]()
        sent = check.sent

        def counted(url: str, *about: Any) -> Any:
            asked.append(url)
            return sent(url, *about)

        monkeypatch.setattr(check, "sent", counted)
        for count in (1, 2):
            assert (await pair.ask(COMPLETIONS, completion())).status == 200
            assert asked == [pair.p.url] * count
        assert [
            legs.overlap_s is None
            for event in pair.world.events(RequestEnded)
            for legs in event.legs
        ] == [
            True,
            False,
        ]


async def test_the_decode_engine_is_asked_while_the_prefill_engine_works() -> None:
    """With the same id, and the client sees its own. Both phases begin with the prefill engine's
    answer.
    """
    async with pool(PUSH) as pair:
        await known(pair)
        gate = Gate()
        pair.p.faults.script(gate)
        asked = asyncio.ensure_future(
            pair.world.ask(COMPLETIONS, completion(stream=True), headers=[("x-request-id", "mine")])
        )
        await until(lambda: len(pair.d.requests) == 2)
        assert len(pair.p.requests) == 2
        assert ids(pair.p)[-1] == ids(pair.d)[-1] != "mine"
        snapshot = pair.world.proxy.custodian.snapshot()
        assert snapshot["promised"][0] == 1
        await until(lambda: pair.d.engine.awaited)
        gate.opened.set()
        answer = await asked
        assert answer.text == await text_of(pair)
        assert b'"id":"cmpl-mine"' in answer.body
        assert ids(pair.p)[-1].encode() not in answer.body
        (legs,) = (await pair.world.ended()).legs
        assert legs.prefill_s is not None
        assert legs.overlap_s == legs.prefill_s
        assert legs.first_s is not None
        assert pair.world.metric("pdproxy_legs_overlap_seconds_count") == 1
        assert [event.end for event in pair.world.events(HandleEnded)] == ["loaded"]
        assert nothing_waits(pair.p, pair.d)
        assert pair.loaded > 0


@pytest.mark.parametrize("name", ["", "short", "x" * 32, "y" * 100])
async def test_clients_that_share_an_id_get_their_own_answers(name: str) -> None:
    """Engines find each other's request by the id alone: each dispatch has its own, of any
    length.
    """
    async with pool(PUSH, p=SLOW) as pair:
        await known(pair)
        headers = [("x-request-id", name)] if name else []
        bodies = [
            completion(prompt=TEXT + extra, stream=stream)
            for extra in "ab"
            for stream in (True, False)
        ]
        answers = await asyncio.gather(
            *(pair.world.ask(COMPLETIONS, body, headers=headers) for body in bodies)
        )
        for body, answer in zip(bodies, answers, strict=True):
            plain = await pair.asked_plain(COMPLETIONS, {**body, "stream": False})
            assert answer.text == json.loads(plain.body)["choices"][0]["text"]
            assert not name or f'"id":"cmpl-{name}"'.encode() in answer.body
        legs = ids(pair.p)
        assert len(set(legs)) == len(legs)
        assert all(leg.encode() not in answer.body for leg in legs for answer in answers)


async def test_usage_shows_what_the_prefill_engine_had_in_its_cache() -> None:
    """A decode engine that was asked before can't know it: to it, all that was pushed is cached."""
    async with pool(PUSH, everybody={"enable_prompt_tokens_details": True}) as pair:
        await known(pair)
        for _ in range(2):
            ours = json.loads((await pair.ask(COMPLETIONS, completion())).body)["usage"]
            theirs = json.loads((await pair.asked_plain(COMPLETIONS, completion())).body)["usage"]
            assert ours == theirs


@pytest.mark.parametrize(
    "fields", [{}, {"stream": True, "stream_options": {"include_usage": True}}]
)
async def test_counts_of_an_answer_that_comes_behind_its_push(fields: dict[str, Any]) -> None:
    """The decode engine's data waits for it."""
    async with pool(PUSH, everybody={"enable_prompt_tokens_details": True}) as pair:
        await known(pair)
        pair.p.faults.add(PlannedFault(kind="slow", at="head", args={"delay": 0.3}))
        ours, theirs = (
            await pair.ask(COMPLETIONS, completion(**fields)),
            await pair.asked_plain(COMPLETIONS, completion(**fields)),
        )
        assert events(ours.body) == events(theirs.body)
        assert bare(ours.json if not fields else {}) == bare(theirs.json if not fields else {})
        (legs,) = (await pair.world.ended()).legs
        assert legs.prefill_s is not None
        assert legs.prefill_s >= 0.3
        assert [event.end for event in pair.world.events(HandleEnded)] == ["loaded"]


async def test_an_answer_that_never_comes_behind_its_push() -> None:
    """The client has waited for its counts for a second, and gets the answer without them."""
    clock = ManualClock()
    async with pool(PUSH, clock=clock) as pair:
        await known(pair)
        pair.p.faults.add(PlannedFault(kind="stall", at="head"))
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion(stream=True)))
        await clock.reach(COUNTS_GRACE)
        answer = await asked
        assert answer.text == await text_of(pair)
        assert [event.end for event in pair.world.events(HandleEnded)] == ["loaded"]
        await pair.world.ended()
        assert sum(one.custodian.orphans.count for one in pair.world.workers) == 1, (
            "the prefill engine may go on"
        )
        await clock.through(pair.world.quiet())
        assert pair.world.metric("pdproxy_kv_stuck") == 0


async def test_a_prefill_that_fails_once_is_asked_again_under_the_same_id() -> None:
    """Nothing else frees the decode engine that waits."""
    async with pool(PUSH) as pair:
        await known(pair)
        pair.p.faults.script(fails())
        answer = await pair.ask(COMPLETIONS, completion())
        assert answer.text == await text_of(pair)
        assert len(set(ids(pair.p)[-2:])) == 1, "the same id"
        assert len(pair.d.requests) == 2, "the decode engine was asked once"
        assert [event.will_retry for event in pair.world.events(LegFailed)] == [True]
        assert [event.end for event in pair.world.events(HandleEnded)] == ["loaded"]
        assert nothing_waits(pair.p, pair.d)


async def test_a_prefill_that_fails_for_good_ends_both_legs_and_another_pair_is_tried() -> None:
    """What the decode engine keeps is counted, with its age, until that engine restarts."""
    async with pool(PUSH, prefills=2, limits={"breaker_failures": 100}) as pair:
        await known(pair)
        other = pair.more[0]
        for engine in (pair.p, other):
            engine.faults.script(fails(), fails())
        proxy, decodes = pair.world.proxy, len(pair.d.requests)
        answer = await pair.ask(COMPLETIONS, completion(stream=True))
        assert answer.text == await text_of(pair), "one engine alone, in the end"
        await until(lambda: len(pair.world.events(HandleEnded)) == 2)
        assert [event.end for event in pair.world.events(HandleEnded)] == ["stuck", "stuck"]
        tried = [one for one in list(pair.d.requests)[decodes:] if one.kv]
        assert len({one.ident for one in tried}) == 2, "each try has an id of its own"
        assert all(one.left.is_set() for one in tried)
        assert (
            pair.world.metric("pdproxy_kv_stuck", node=pair.d.url)
            == 2
            == len(pair.d.engine.awaited)
        )
        assert pair.world.metric("pdproxy_kv_stuck_age_seconds", node=pair.d.url) >= 0
        (detail,) = [one for one in proxy.readiness().details if "KV that will not come" in one]
        assert detail.startswith(f"decode {pair.d.url}: 2 requests may wait")
        await pair.d.restart()
        await pair.world.probe()
        assert pair.world.metric("pdproxy_kv_stuck", node=pair.d.url) == 0
        assert not [one for one in proxy.readiness().details if "KV that will not come" in one]


async def test_a_prefill_engine_that_is_gone_leaves_no_decode_engine_waiting() -> None:
    """It takes no connection: the decode engine is not asked."""
    async with pool(PUSH, prefills=2) as pair:
        await known(pair)
        await pair.p.kill()
        await pair.more[0].kill()
        decodes = len(pair.d.requests)
        answer = await pair.ask(COMPLETIONS, completion())
        assert answer.text == await text_of(pair)
        assert [one.kv for one in list(pair.d.requests)[decodes:]] == [None], "alone"
        assert {event.end for event in pair.world.events(HandleEnded)} == {"not_made"}
        assert not pair.d.engine.awaited


async def test_what_both_engines_refuse_is_refused_once() -> None:
    """The decode engine's answer is the client's. It waits for nothing."""
    async with pool(PUSH) as pair:
        await known(pair)
        before = len(pair.d.requests)
        body = completion(max_tokens=10**6)
        for stream in (False, True):
            ours = await pair.ask(COMPLETIONS, {**body, "stream": stream})
            theirs = await pair.asked_plain(COMPLETIONS, {**body, "stream": False})
            assert (ours.status, ours.json["error"]) == (400, theirs.json["error"])
        long = completion(prompt="word " * 9000)
        ours, theirs = await pair.ask(COMPLETIONS, long), await pair.asked_plain(COMPLETIONS, long)
        assert (ours.status, ours.json) == (theirs.status, theirs.json)
        assert len(pair.d.requests) == before + 3, "the decode engine was asked once each"
        await pair.world.quiet()
        assert pair.world.metric("pdproxy_kv_stuck") == 0
        assert {event.end for event in pair.world.events(HandleEnded)} == {"not_made"}
        assert nothing_waits(pair.d)


async def test_what_the_prefill_engine_alone_refuses() -> None:
    """One engine serves it. The decode engine's request was closed, and may have been waiting."""
    clock = ManualClock()
    async with pool(PUSH, clock=clock) as pair:
        await known(pair)
        pair.p.faults.script(fails(400))
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion()))
        await clock.reach(REFUSAL_GRACE)
        assert (await asked).text == await text_of(pair)
        await pair.world.quiet()
        assert pair.world.metric("pdproxy_kv_stuck") == 1 == len(pair.d.engine.awaited)


@pytest.mark.parametrize("prompt", [[5] * 1024, "word " * 1500])
async def test_a_prompt_that_is_too_long_for_the_prefill_engine_alone(prompt: Any) -> None:
    """It is asked first, and the decode engine waits for nothing. Shorter prompts go to both at
    once.
    """
    async with pool(PUSH, p={"max_model_len": 1024}) as pair:
        await known(pair)
        for long in ({"prompt": prompt}, {"prompt": prompt, "stream": True}):
            answer = await pair.ask(COMPLETIONS, completion(**long))
            plain = await pair.asked_plain(COMPLETIONS, completion(prompt=prompt))
            assert answer.text == plain.json["choices"][0]["text"]
        await pair.world.quiet()
        assert [event.reason for event in pair.world.events(ServedAlone)] == ["prefill_refused"] * 2
        assert pair.world.events(HandleEnded) == []
        assert pair.world.metric("pdproxy_kv_stuck") == 0
        assert not pair.d.engine.awaited
        assert (
            await pair.ask(COMPLETIONS, completion(prompt=[5] * 1023, max_tokens=2))
        ).status == 200
        await pair.world.quiet()
        assert (await pair.world.ended(3)).legs[0].overlap_s is not None


async def test_a_decode_engine_that_refuses_ends_the_prefill() -> None:
    """Nobody waits for its KV: the prefill leg is closed, and the engine keeps nothing."""
    async with pool(PUSH) as pair:
        await known(pair)
        gate = Gate()
        pair.p.faults.script(gate)
        pair.d.faults.script(fails(400))
        answer = await pair.ask(COMPLETIONS, completion())
        assert answer.status == 400
        await until(lambda: pair.p.requests[-1].left.is_set())
        await until(lambda: len(pair.world.events(HandleEnded)) == 1)
        assert pair.world.events(HandleEnded)[0].end == "not_made"
        await pair.world.quiet()
        assert nothing_waits(pair.p, pair.d)


async def test_a_decode_engine_that_fails_is_replaced_while_the_prefill_engine_works() -> None:
    """The first prefill leg is closed. The next pair has an id of its own, and begins with the
    prefill: see below.
    """
    async with pool(PUSH, decodes=2) as pair:
        await known(pair)
        other = pair.more[0]
        gate = Gate()
        pair.p.faults.scripts.default = gate
        failed: list[str] = []

        async def first_fails(reply: ScriptedReply) -> None:
            failed.append(reply.request.ident)
            await (fails(503)(reply) if len(failed) == 1 else reply.serve())

        for engine in (pair.d, other):
            engine.faults.script(first_fails)
        before = len(pair.p.requests)
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion()))
        await until(lambda: len(pair.p.requests) == before + 2)
        gate.opened.set()
        answer = await asked
        assert answer.text == await text_of(pair)
        legs = list(pair.p.requests)[before:]
        assert [leg.left.is_set() for leg in legs[:-1]] == [True] * (len(legs) - 1)
        assert len({leg.ident for leg in legs}) == len(legs) == 2
        await pair.world.quiet()
        assert nothing_waits(pair.p, pair.d, other)


@BOTH
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("registered", [True, False])
async def test_a_client_that_leaves_while_the_prefill_engine_works(
    connector: str, stream: bool, registered: bool
) -> None:
    """The prefill goes on, since its KV alone frees the decode engine. `registered`: that has begun
    to wait for it.
    """
    async with pool(connector) as pair:
        await known(pair)
        gate, before = Gate(), len(pair.d.requests)
        pair.p.faults.script(gate)
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, completion(stream=stream)))
        await until(lambda: len(pair.d.requests) > before)
        if registered:
            await until(lambda: pair.d.engine.awaited or pair.d.engine.stats.waiting)
        client.close()
        await pair.world.ended()
        await until(lambda: pair.d.requests[-1].left.is_set())
        assert not pair.p.requests[-1].left.is_set()
        assert pair.world.proxy.custodian.orphans.count == 1
        gate.opened.set()
        await pair.world.quiet()
        assert [event.end for event in pair.world.events(HandleEnded)] == ["aborted"]
        assert pair.world.events(RequestEnded)[-1].outcome == "client_left"
        if registered or connector == "mooncake":
            await until(lambda: nothing_left(pair))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begins", [True, False])
async def test_a_client_that_leaves_before_the_decode_engine_has_begun(
    stream: bool, begins: bool
) -> None:
    """Its leg stays open until the engine has asked for the KV, as else nothing would free it; not
    for ever.
    """
    clock = ManualClock()
    async with pool(PUSH, clock=clock) as pair:
        await known(pair)
        gate = Gate()
        pair.p.faults.script(gate)
        await pair.d.freeze_core()
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, completion(stream=stream)))
        await until(lambda: len(pair.d.requests) == 2)
        client.close()
        if begins:
            await until(lambda: ACCEPT_GRACE in clock.pending())
            await pair.d.thaw_core()
            await until(lambda: pair.d.engine.awaited)
        assert not pair.d.requests[-1].left.is_set()
        await clock.reach(ACCEPT_GRACE)
        await until(lambda: pair.d.requests[-1].left.is_set())
        gate.opened.set()
        await pair.d.thaw_core()
        await pair.world.quiet()
        assert [event.end for event in pair.world.events(HandleEnded)] == ["aborted"]
        if begins:
            await until(lambda: nothing_waits(pair.p, pair.d))
            assert pair.p.engine.rank_stats[0].kv_expired == 0


async def test_a_prefill_that_fails_behind_a_client_that_left_is_counted() -> None:
    """Nobody can free the decode engine then."""
    async with pool(PUSH) as pair:
        await known(pair)
        opened = asyncio.Event()

        async def late_failure(reply: ScriptedReply) -> None:
            await opened.wait()
            await fails()(reply)

        pair.p.faults.script(late_failure)
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, completion()))
        await until(lambda: pair.d.engine.awaited)
        client.close()
        await pair.world.ended()
        opened.set()
        await pair.world.quiet()
        assert [event.end for event in pair.world.events(HandleEnded)] == ["stuck"]
        assert (
            pair.world.metric("pdproxy_kv_stuck", node=pair.d.url)
            == 1
            == len(pair.d.engine.awaited)
        )


async def test_a_prefill_that_misses_its_deadline() -> None:
    """The decode leg ends with it. The answer may still come, and then its push frees both
    sides.
    """
    clock = ManualClock()
    async with pool(
        PUSH, deadlines={"prefill": 7.0, "abandoned_prefill": 9.0}, clock=clock
    ) as pair:
        await known(pair)
        gate = Gate()
        pair.p.faults.script(gate)
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion(stream=True)))
        await until(lambda: pair.d.engine.awaited)
        await clock.reach(7.0)
        answer = await asked
        assert answer.text == await text_of(pair)
        assert pair.world.metric("pdproxy_deadline_total", wait="prefill") == 1
        gate.opened.set()
        await pair.world.quiet()
        await until(lambda: nothing_waits(pair.p, pair.d))
        assert pair.world.metric("pdproxy_kv_stuck", node=pair.d.url) == 0


@BOTH
async def test_a_decode_engine_that_never_begins_is_late_from_the_prefill_engine_s_answer_on(
    connector: str,
) -> None:
    """Its deadline begins when it could begin."""
    clock = ManualClock()
    async with pool(
        connector, deadlines={"first_token": 3.0}, clock=clock, limits={"attempts": 1}
    ) as pair:
        await known(pair)
        before = len(pair.d.requests)

        async def silent(reply: ScriptedReply) -> None:
            await reply.stall()

        pair.d.faults.script(silent)
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion(stream=True)))
        await until(lambda: pair.p.requests[-1].over and len(pair.d.requests) > before)
        await clock.reach(3.0)
        assert (await asked).status == 504
        assert pair.world.metric("pdproxy_deadline_total", wait="first_token") == 1
        await pair.world.quiet()


async def test_a_prefill_engine_that_restarted_unseen_is_learnt_anew() -> None:
    """The decode engine fails, since nobody is at the old place: the next prompt goes to the
    prefill engine alone at first.
    """
    async with pool(PUSH, limits={"attempts": 1}) as pair:
        await known(pair)
        peers = pair.world.proxy.engines[pair.p.url].run.peers
        assert not peers.missing
        gate = Gate()
        pair.p.faults.script(gate)
        pair.d.faults.script(fails(500))
        assert (await pair.ask(COMPLETIONS, completion())).status == 500
        assert peers.missing == (0,)
        assert (await pair.ask(COMPLETIONS, completion())).text == await text_of(pair)
        assert not peers.missing


async def test_a_full_decode_engine_serves_alone() -> None:
    """It must not queue while it waits for pushed KV."""
    async with pool(PUSH, decode_facts={"max_num_seqs": 1}) as pair:
        await known(pair)
        gate = Gate()
        pair.p.faults.script(gate)
        first = asyncio.ensure_future(pair.ask(COMPLETIONS, completion()))
        await until(lambda: len(pair.d.requests) == 2)
        assert (await pair.ask(COMPLETIONS, completion())).text == await text_of(pair)
        assert [event.reason for event in pair.world.events(ServedAlone)] == ["no_pair"]
        gate.opened.set()
        assert (await first).text == await text_of(pair)


@BOTH
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, completion()), (CHAT, chat())])
async def test_one_after_the_other_if_the_pool_says_so(
    connector: str, path: str, body: dict[str, Any]
) -> None:
    """The same transfer in both orders."""
    async with pool(connector, dispatch="sequential") as pair:
        await known(pair)
        gate, prefills, decodes = Gate(), len(pair.p.requests), len(pair.d.requests)
        pair.p.faults.script(gate)
        loaded = pair.loaded
        asked = asyncio.ensure_future(pair.ask(path, body))
        await until(lambda: len(pair.p.requests) > prefills)
        await asyncio.sleep(0.05)
        assert len(pair.d.requests) == decodes
        gate.opened.set()
        answer = await asked
        assert bare(answer.json) == bare((await pair.asked_plain(path, body)).json)
        assert pair.loaded > loaded
        # the prefill engine's own ids: no template can differ
        if (connector, path) == ("mooncake", CHAT):
            assert (
                len(pair.d.requests[-1].json["kv_transfer_params"]["prompt_token_ids"])
                == pair.loaded - loaded
            )
        assert (await pair.world.ended()).legs[0].overlap_s is None
        await pair.world.quiet()
        await until(lambda: nothing_left(pair))


@BOTH
async def test_two_hundred_clients_of_which_many_leave(connector: str) -> None:
    """Whenever they leave: in the end nothing waits anywhere, and nothing is counted as stuck."""
    async with pool(connector, prefills=2, decodes=2, p=SLOW, d={"num_gpu_blocks": 2048}) as pair:
        await known(pair)
        engines = (pair.p, pair.d, *pair.more)
        await leaving.every_third(pair, 200)
        await pair.world.quiet()
        await until(lambda: not any(engine.engine.awaited for engine in engines))
        await until(lambda: not any(usage(engine) for engine in (pair.d, pair.more[1])))
        assert pair.world.metric("pdproxy_kv_stuck") == 0
        left_to_leases = sum(len(engine.engine.handles) for engine in engines)
        assert left_to_leases <= 10, (
            "only legs that were closed before the decode engine had begun with them"
        )


@pytest.mark.parametrize("prefill", ["answers", "refuses"])
@pytest.mark.parametrize(
    ("connector", "tokenizer", "goes_on"),
    [("mooncake", None, True), (PUSH, None, False), (PUSH, SimTokenizer(), False)],
)
async def test_a_prompt_that_the_decode_engine_refuses_first_is_paid_once_it_is_computed(
    tmp_path: Path, connector: str, tokenizer: SimTokenizer | None, goes_on: bool, prefill: str
) -> None:
    """A client can choose what only the decode engine refuses. Where that frees the KV, the prefill
    engine goes on to its end.
    """
    clock = ManualClock()
    auth = Auth(**keys(tmp_path, "a:sk-a tpm=6000"))  # type: ignore[arg-type]
    async with pool(connector, tokenizer=tokenizer, auth=auth, clock=clock) as pair:
        if (tokens := pair.world.proxy.tokens) is not None:
            await until(lambda: tokens.canaries.trusted("tiny", Route.COMPLETIONS))
        assert (await pair.ask(COMPLETIONS, completion(prompt="other text " * 9), A)).status == 200
        before, gate = await left(pair.world), Gate()
        pair.p.faults.script(gate.then(fails(400)) if prefill == "refuses" else gate)
        pair.d.faults.script(fails(400, "temperature"))
        assert (await pair.ask(COMPLETIONS, completion(), A)).status == 400
        assert await left(pair.world) == before
        gate.opened.set()
        await clock.through(pair.world.quiet())
        usage = json.loads((await pair.asked_plain(COMPLETIONS, completion())).body)["usage"]
        assert before - await left(pair.world) == (
            usage["prompt_tokens"] if goes_on and prefill == "answers" else 0
        )
