"""A handle is given away once, whatever happens to the connection that its request was sent on."""

# An engine that has read KV has it freed, and its blocks hold another prompt's KV then. So no leg
# is sent twice: behind a kept connection that has closed, the next attempt begins anew, with
# another handle. Each test forces one moment: it holds up the next connect, or a notice, until what
# must not matter has happened.

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe.events import HandleEnded, LegFailed, RequestEnded, TurnReused
from pdproxy.serving.kv.custody import Custody
from pdproxy.upstream.client import EngineClient
from pdproxy.wire.notices import Notice, NoticeEvent
from pdproxy_lab.sim.faults.book import PlannedFault
from pdproxy_lab.sim.faults.moments import Moment
from pdproxy_lab.sim.journal import Request
from pdproxy_lab.sim.server import SimServer
from tests.fakes import scripts
from tests.fakes.client import exchange, request
from tests.fakes.pool import Pair, pool
from tests.fakes.tokenizer import SimTokenizer
from tests.fakes.world import until, world
from tests.proxy.test_both_legs import PUSH, known
from tests.proxy.test_connectors import CHAT, COMPLETIONS, CONNECTORS, TEXT, chat, completion, same
from tests.proxy.test_turns import heard, keeps, quiet, talking, user

ENDS = {"loaded", "released", "lost", "aborted", "stuck"}


class Connecting:
    """The next connects to an engine: they wait until the test lets them go on."""

    def __init__(self, pair: Pair, sim: SimServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._may_end = asyncio.Event(), asyncio.Event()
        for worker in pair.world.workers:
            client = worker.engines[sim.url].client
            monkeypatch.setattr(client, "_connect", self._slow(client._connect))

    def _slow(self, connect: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        async def slowly() -> object:
            self.begun.set()
            await self._may_end.wait()
            return await connect()

        return slowly

    async def has_begun(self) -> None:
        await asyncio.wait_for(self.begun.wait(), 20)

    def goes_on(self) -> None:
        self._may_end.set()


class HeldBack:
    """Notices that `owner` would receive: they are held back until the test lets them in."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: object, *, returned: object = None
    ) -> None:
        self.notices: list[Notice] = []
        self._monkeypatch, self._owner = monkeypatch, owner
        self._receive = getattr(owner, "receive")  # noqa: B009 - of any owner

        def hold(notice: Notice) -> object:
            self.notices.append(notice)
            return returned

        monkeypatch.setattr(owner, "receive", hold)

    def let_in(self) -> list[object]:
        """Hold nothing back any more. Return what the owner returned for each of those that
        were.
        """
        self._monkeypatch.setattr(self._owner, "receive", self._receive)
        return [self._receive(notice) for notice in self.notices]


async def asked_alone(sim: SimServer, body: dict[str, Any]) -> None:
    """Ask an engine itself."""
    assert (await exchange(sim.port, request("POST", COMPLETIONS, body))).status == 200


async def overwritten(sim: SimServer, prompts: int = 12) -> None:
    """Have other prompts take all blocks of an engine that are free."""
    for prompt in range(prompts):
        words = " ".join(str((prompt * 7919 + word * 31) % 9973) for word in range(60))
        await asked_alone(sim, {"model": "tiny", "prompt": words, "max_tokens": 1})


def id_of(asked: Request) -> str:
    return dict(asked.headers)["x-request-id"]


def ended(pair: Pair) -> list[str]:
    return [event.end for event in pair.world.events(HandleEnded)]


def pool_of(connector: str) -> AbstractAsyncContextManager[Pair]:
    deadlines = {"first_token": 4.0, "total": 8.0, "release": 2.0, "kv_ready": 3.0}
    tokenizer = SimTokenizer() if connector in ("lmcache-pd", "cpu") else None
    return pool(connector, deadlines=deadlines, tokenizer=tokenizer)


async def warm(pair: Pair, path: str = COMPLETIONS, body: dict[str, Any] | None = None) -> str:
    """Ask twice, so that connections are kept. Return the right text."""
    for _ in range(2):
        (choice,) = (await same(pair, path, body or completion()))["choices"]
    await pair.world.quiet()
    pair.world.forget_events()
    return str(choice["text"] if path == COMPLETIONS else choice["message"]["content"])


async def second_turn(pair: Pair) -> tuple[dict[str, Any], str]:
    """Have a conversation's first turn kept. Return the request of its second turn, and the right
    answer to that.
    """
    body = {"model": "tiny", "temperature": 0, "messages": user(TEXT), "max_tokens": 12}
    first = (await pair.ask(CHAT, body)).json["choices"][0]["message"]["content"]
    await keeps(pair, 1)
    body["messages"] = [
        *user(TEXT),
        {"role": "assistant", "content": first},
        *user("And then? " * 5),
    ]
    return body, (await pair.asked_plain(CHAT, body)).json["choices"][0]["message"]["content"]


UNSTREAMED: list[tuple[Moment, bool]] = [("queued", False), ("last_chunk", False)]
STREAMED: list[tuple[Moment, bool]] = [
    ("queued", True),
    ("head", True),
    ("before_first_token", True),
]


@pytest.mark.parametrize(("moment", "stream"), UNSTREAMED + STREAMED)
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_an_api_that_is_gone_behind_a_request(
    connector: str, moment: Moment, stream: bool
) -> None:
    """The decode engine may have read the KV: the prompt is prefilled again, and the answer is
    right at once.
    """
    async with pool_of(connector) as pair:
        text = await warm(pair)
        asked = len(pair.d.requests), len(pair.p.requests)
        pair.d.faults.add(PlannedFault(kind="reset", at=moment))
        answer = await pair.ask(COMPLETIONS, completion(stream=stream))
        assert answer.status == 200
        assert (answer.text if stream else answer.json["choices"][0]["text"]) == text
        (failed,) = pair.world.events(LegFailed)
        assert failed.node == pair.d.url
        assert pair.world.workers[0].ledger.engines[0].failures == 0
        ids = [id_of(one) for one in list(pair.d.requests)[asked[0] :]]
        if connector in (PUSH, "cpu"):  # whose engines find each other by it
            assert len({one for one in ids if not one.startswith("release")}) >= 2
        assert len(pair.p.requests) - asked[1] <= 2
        await pair.world.quiet()
        assert set(ended(pair)) <= ENDS


@pytest.mark.parametrize(("route", "body"), [(COMPLETIONS, completion()), (CHAT, chat())])
async def test_a_notice_while_it_connects(
    monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any]
) -> None:
    """The notice that the KV was read comes while the next attempt connects: that attempt has a
    handle of its own.
    """
    async with pool("nixl") as pair:
        await heard(pair)
        text = await warm(pair, route, body)
        held = HeldBack(monkeypatch, pair.world.proxy.custodian)
        connecting = Connecting(pair, pair.d, monkeypatch)
        pair.d.faults.add(PlannedFault(kind="restart", at="last_chunk"))
        asked = asyncio.ensure_future(pair.ask(route, body))
        await connecting.has_begun()
        await until(lambda: any(one.event is NoticeEvent.LOADED for one in held.notices))
        held.let_in()
        connecting.goes_on()
        (choice,) = (await asked).json["choices"]
        assert (choice["text"] if route == COMPLETIONS else choice["message"]["content"]) == text


@pytest.mark.parametrize("notifier", [False, True])
async def test_blocks_that_others_have_taken_are_not_read(
    monkeypatch: pytest.MonkeyPatch, notifier: bool
) -> None:
    """Between the read and the next attempt, the prefill engine's freed blocks become other
    prompts'.
    """
    small = {"num_gpu_blocks": 64, "max_model_len": 1000}
    async with pool("nixl", kv_ready={"notifier": notifier}, p=small) as pair:
        if notifier:
            await heard(pair)
        text = await warm(pair)
        held = HeldBack(monkeypatch, pair.world.proxy.custodian)
        connecting = Connecting(pair, pair.d, monkeypatch)
        pair.d.faults.add(PlannedFault(kind="restart", at="last_chunk"))
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion()))
        await connecting.has_begun()
        await until(lambda: len(pair.p.engine.handles) <= 1)
        await overwritten(pair.p)
        connecting.goes_on()
        answer = await asked
        held.let_in()
        assert answer.json["choices"][0]["text"] == text
        await pair.world.quiet()
        await until(lambda: not pair.p.engine.handles)


async def test_a_kept_turn_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill engine has pulled a turn's KV when its API is gone. The next attempt is without
    the turn.
    """
    small = {"num_gpu_blocks": 128, "max_model_len": 2000}
    async with talking(d=small) as pair:
        body, plain = await second_turn(pair)
        pair.p.engine._core.pool.forget_all()  # type: ignore[union-attr]
        pair.p.requests.clear()
        connecting = Connecting(pair, pair.p, monkeypatch)
        pair.p.faults.add(PlannedFault(kind="restart", at="last_chunk"))
        asked = asyncio.ensure_future(pair.ask(CHAT, body))
        await connecting.has_begun()
        await until(lambda: not pair.d.engine.handles)
        await overwritten(pair.d, 24)
        connecting.goes_on()
        answer = await asked
        assert answer.json["choices"][0]["message"]["content"] == plain
        given = [
            (one.json.get("kv_transfer_params") or {}).get("remote_block_ids")
            for one in pair.p.requests
        ]
        assert [bool(one) for one in given] == [True, False]
        assert not pair.world.events(TurnReused)


async def test_a_kept_turn_that_has_gone_while_the_engine_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The decode engine was started again meanwhile: the prompt is prefilled without the turn."""
    async with talking() as pair:
        body, plain = await second_turn(pair)
        pair.p.requests.clear()
        for worker in pair.world.workers:
            worker.engines[pair.p.url].client.close()
        connecting = Connecting(pair, pair.p, monkeypatch)
        asked = asyncio.ensure_future(pair.ask(CHAT, body))
        await connecting.has_begun()
        await pair.d.restart()
        await pair.world.probe()
        connecting.goes_on()
        answer = await asked
        assert answer.json["choices"][0]["message"]["content"] == plain
        assert not any(
            (one.json.get("kv_transfer_params") or {}).get("remote_block_ids")
            for one in pair.p.requests
        )
        await quiet(pair)


async def test_kv_that_is_being_released_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notice says that the decode engine could not read it. The KV is released, and the next
    attempt has other KV.
    """
    async with pool("nixl") as pair:
        await heard(pair)
        text = await warm(pair)
        custodian, made = pair.world.proxy.custodian, list[Custody]()
        take = custodian.take
        monkeypatch.setattr(custodian, "take", lambda *given: made.append(take(*given)) or made[-1])  # type: ignore[func-returns-value]
        connecting = Connecting(pair, pair.d, monkeypatch)
        pair.d.faults.add(PlannedFault(kind="restart", at="handed_over"))
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion()))
        await until(lambda: made and made[0].was_asked)
        made[0].not_read()  # as for a notice of the decode engine
        await connecting.has_begun()
        connecting.goes_on()
        assert (await asked).json["choices"][0]["text"] == text
        assert made[0] is not made[1]


@pytest.mark.parametrize(
    ("connector", "lease"), [("nixl", None), ("nixl", 5.0), (PUSH, None), ("mooncake", None)]
)
async def test_kv_whose_lease_ends_is_not_read(
    monkeypatch: pytest.MonkeyPatch, connector: str, lease: float | None
) -> None:
    """The decode engine is connected to for as long as the lease lasts: the next attempt has other
    KV.
    """
    facts = {} if lease is None else {"kv_lease_duration": lease}
    async with pool(connector, dispatch="sequential", prefill_facts=facts) as pair:
        text = await warm(pair)
        custodian = pair.world.proxy.custodian
        for worker in pair.world.workers:
            worker.engines[pair.d.url].client.close()
        connecting = Connecting(pair, pair.d, monkeypatch)
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion()))
        await connecting.has_begun()
        await until(lambda: any(count for count, _ in custodian.snapshot().values()))
        now, before = custodian.now, len(pair.p.requests)
        monkeypatch.setattr(
            custodian, "now", lambda: now() + 0.95 * custodian.leases_of(pair.p.url)[0]
        )
        connecting.goes_on()
        assert (await asked).json["choices"][0]["text"] == text
        assert len(pair.p.requests) == before + 1
        assert ended(pair).count("expired") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_kv_that_was_read_behind_its_lease_is_not_used(stream: bool) -> None:
    """The decode engine stands still until the prefill engine has given the blocks to others. Then
    it reads those.
    """
    lease = {"kv_lease_duration": 0.5}
    few, uncached = {"num_gpu_blocks": 64, "max_model_len": 1000}, {"enable_prefix_caching": False}
    silent = {"notifier": False}
    async with pool(
        "nixl", p=few | lease, d=uncached, prefill_facts=lease, kv_ready=silent
    ) as pair:
        text = await warm(pair)
        asked_before = len(pair.p.requests)
        await pair.d.freeze_core()
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion(stream=stream)))
        await until(
            lambda: any(
                "kv_transfer_params" in one.json for one in list(pair.d.requests)[asked_before:]
            )
        )
        await until(lambda: not pair.p.engine.handles)
        await overwritten(pair.p)
        await pair.d.thaw_core()
        answer = await asked
        assert answer.status == 200
        assert (answer.text if stream else answer.json["choices"][0]["text"]) == text
        assert "expired" in ended(pair)


async def test_a_late_answer_is_used_where_no_lease_has_ended() -> None:
    """A decode engine that works renews the lease, however long its answer takes."""
    async with pool("nixl", d={"hardware": Hardware()}, kv_ready={"notifier": False}) as pair:
        body = completion(max_tokens=30)  # 0.6 s
        text = await warm(pair, body=body)
        custodian = pair.world.proxy.custodian
        now, before = custodian.now, len(pair.p.requests)
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, body))
        await until(lambda: any(one.was_asked for one in custodian._live))
        (custody,) = custodian._live
        custody.sure_until = now()
        assert (await asked).json["choices"][0]["text"] == text
        assert len(pair.p.requests) == before + 1
        assert ended(pair)[-1] == "loaded"


@pytest.mark.parametrize("connector", [PUSH, "mooncake"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_beside_the_answer_is_not_sent_for_nothing(
    monkeypatch: pytest.MonkeyPatch, stream: bool, connector: str
) -> None:
    """Its API is gone, and the KV is at the decode engine: that engine's answer is whole and right
    before the next connect.
    """
    async with pool(connector, d={"hardware": Hardware()}) as pair:
        await known(pair)
        connecting = Connecting(pair, pair.p, monkeypatch)
        pair.p.faults.add(PlannedFault(kind="reset", at="last_chunk"))
        asked = asyncio.ensure_future(
            pair.ask(COMPLETIONS, completion(stream=stream, max_tokens=400))
        )
        if connector == PUSH:
            await connecting.has_begun()
            await until(lambda: all(one.over for one in pair.d.requests))
        connecting.goes_on()
        answer = await asked
        assert answer.status == 200
        assert b"error" not in answer.body[-300:]
        assert answer.body.endswith(b"[DONE]\n\n" if stream else b"}")
        await pair.world.quiet()
        assert [event.status for event in pair.world.events(RequestEnded)] == [200]
        assert len(pair.p.requests) <= 3


@pytest.mark.parametrize("kind", ["restart", "reset"])
async def test_a_notice_of_a_leg_that_has_failed_has_its_kv_released(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The prefill engine made KV twice, under two ids: the first notice is not taken for the second
    leg's.
    """
    async with pool("nixl", kv_ready={"early": True}) as pair:
        await heard(pair)
        text = await warm(pair)
        await pair.noticed()
        before = len(pair.p.requests)
        orphans = pair.world.proxy.custodian.orphans
        held = HeldBack(monkeypatch, orphans, returned=True)
        connecting = Connecting(pair, pair.p, monkeypatch)
        pair.p.faults.add(PlannedFault(kind=kind, at="last_chunk"))
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion()))
        await connecting.has_begun()
        await until(lambda: held.notices)
        assert all(held.let_in()), "nobody waits for it any more"
        connecting.goes_on()
        assert (await asked).json["choices"][0]["text"] == text
        await pair.world.quiet()
        ids = [id_of(one) for one in list(pair.p.requests)[before:]]
        assert len(set(ids)) == len(ids) == 2
        await until(lambda: not pair.p.engine.handles)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_behind_a_slow_connect(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Seconds of connecting are no sign that the decode engine has the request: its KV is released
    at once.
    """
    async with pool("nixl", kv_ready={"notifier": False}) as pair:
        await warm(pair)
        (worker,) = pair.world.workers
        client = worker.engines[pair.d.url].client
        client.close()
        connecting = Connecting(pair, pair.d, monkeypatch)
        asker = await pair.world.client()
        asker.send(request("POST", COMPLETIONS, completion(stream=stream)))
        await connecting.has_begun()
        # longer than it takes for a silent engine to count as one that has the request
        await asyncio.sleep(1.1)
        made = client.request

        def made_and_left(*given: Any) -> Any:
            asker.close()
            return made(*given)

        monkeypatch.setattr(client, "request", made_and_left)
        await pair.d.freeze()
        connecting.goes_on()
        await until(
            lambda: ended(pair) == ["lost"] or "released" in ended(pair) or _releasing(pair)
        )
        await pair.d.thaw()
        await until(lambda: not pair.p.engine.handles)


def _releasing(pair: Pair) -> int:
    return int(pair.world.proxy.custodian.snapshot()["releasing"][0])


async def test_a_lease_that_ends_while_the_engine_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handle is not sent any more, and nothing is held against the decode engine."""
    async with pool("nixl") as pair:
        await heard(pair)
        text = await warm(pair)
        (worker,) = pair.world.workers
        worker.engines[pair.d.url].client.close()
        connecting = Connecting(pair, pair.d, monkeypatch)
        before = len(pair.d.requests)
        asked = asyncio.ensure_future(pair.ask(COMPLETIONS, completion()))
        await connecting.has_begun()
        pair.p.engine.expire_leases()
        await until(lambda: "expired" in ended(pair))
        connecting.goes_on()
        assert (await asked).json["choices"][0]["text"] == text
        assert len(pair.d.requests) == before + 1
        assert worker.engines[pair.d.url].in_ledger.failures == 0
        assert len(pair.p.requests) >= 2


NO_JSON = {
    "message": (
        "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.1207', 'msg': 'JSON decode "
        "error'}"
    ),
    "type": "Bad Request",
    "param": "body.1207",
    "code": 400,
}
OUR_FIELD = {
    "message": "1 validation error:\n  {'type': 'dict_type', 'loc': 'body.kv_transfer_params'}",
    "type": "Bad Request",
    "param": "body.kv_transfer_params",
    "code": 400,
}


@pytest.mark.parametrize("error", [NO_JSON, OUR_FIELD], ids=["JSON", "field"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_what_the_client_has_not_sent_is_ours(
    error: dict[str, Any], stream: bool
) -> None:
    """The next attempt may do better. If none does, it is an error of ours: the client's request
    was valid.
    """
    refuses = scripts.whole(json.dumps({"error": error}).encode(), 400)
    async with world() as w:
        w.decode[0].script(refuses)
        answer = await w.ask(COMPLETIONS, completion(stream=stream))
        assert answer.status == 200
        assert [event.will_retry for event in w.events(LegFailed)] == [True]
        w.decode[0].script(*[refuses] * 3)
        answer = await w.ask(COMPLETIONS, completion(stream=stream))
        assert answer.status == 500
        assert answer.json["error"]["type"] == "InternalServerError"
        assert b"json_invalid" not in answer.body
        assert w.engines[1] is w.decode[0]
        assert all(worker.engines[w.decode[0].url].in_ledger.failures == 0 for worker in w.workers)
        await w.quiet()


async def test_a_kept_connection_of_one_engine_alone() -> None:
    """Without a handle nothing could be read twice, but all legs go the same way."""
    async with world() as w:
        body = completion(echo=True)
        for _ in range(2):
            assert (await w.ask(COMPLETIONS, body)).status == 200
        await w.quiet()
        w.decode[0].sim.faults.add("eof@queued")
        assert (await w.ask(COMPLETIONS, body)).status == 200
        assert len(w.events(LegFailed)) == 1


async def test_connections_that_idle_beside_one_that_was_closed_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that is gone has closed them, too: the next attempts would find one after the
    other.
    """
    async with world() as w:
        await asyncio.gather(*(w.ask(COMPLETIONS, completion()) for _ in range(8)))
        await w.quiet()
        clients: list[EngineClient] = [
            worker.engines[w.decode[0].url].client for worker in w.workers
        ]
        before = sum(len(client._idle) for client in clients)
        assert before > len(clients)
        w.decode[0].sim.faults.add("eof@queued")
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        await w.quiet()
        assert sum(len(client._idle) for client in clients) < before
