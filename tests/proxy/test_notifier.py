"""NIXL with the notifier: a notice brings the handle, custody is known, and a lease that ends is
seen at once.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
import zmq

from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe.events import DeadlinePassed, HandleEnded, KvNoticed, LegFailed
from pdproxy.serving.kv.orphans import REMEMBERED
from pdproxy.wire.route import Route
from tests.fakes.client import request
from tests.fakes.clock import ManualClock
from tests.fakes.pool import Pair, pool
from tests.fakes.tokenizer import SimTokenizer
from tests.fakes.world import until
from tests.proxy import leaving
from tests.proxy.test_connectors import CHAT, COMPLETIONS, chat, completion, same


def endings(pair: Pair) -> list[str]:
    """How handles ended, in order."""
    return [event.end for event in pair.world.events(HandleEnded)]


async def heard(pair: Pair) -> None:
    """Wait until both engines' sockets are connected: the notifier drops what it has to say before.
    Then forget all of that.
    """
    events = {"loaded", "released"}
    async with asyncio.timeout(60):
        while not events <= {event.event for event in pair.world.events(KvNoticed)}:
            await pair.ask(COMPLETIONS, completion())
            await asyncio.sleep(0.1)
    await until(lambda: not pair.world.busy())
    await nothing_held(pair)
    await pair.noticed()
    pair.world._recorder.events.clear()


async def nothing_held(pair: Pair) -> None:
    """Wait until P keeps nothing for anybody."""
    await until(lambda: not pair.p.engine.handles)


@pytest.mark.parametrize("early", [False, True])
async def test_a_handle_ends_when_the_engines_say_so(early: bool) -> None:
    """Loaded by the decode engine's word; the prefill engine's word comes behind it."""
    async with pool("nixl", kv_ready={"early": early}) as pair:
        await heard(pair)
        await same(pair, CHAT, chat(stream=True))
        await until(lambda: len(pair.world.events(KvNoticed)) >= 3)
        assert endings(pair) == ["loaded"]
        told = {(event.event, event.result) for event in pair.world.events(KvNoticed)}
        # Asked early, the answer may be quicker still: then the notice is late.
        assert told & ({("ready", "awaited"), ("ready", "late")} if early else {("ready", "known")})
        assert {event for event, _ in told} == {"ready", "loaded", "released"}
        assert pair.world.metric("pdproxy_kv_transfer_seconds_count") >= 1
        await nothing_held(pair)


async def test_a_notice_proves_ids_as_an_answer_does() -> None:
    """It says which ones were served: the next prompt of its kind is sent as ids."""
    clock, early = ManualClock(), {"early": True}
    async with pool(
        "nixl", deadlines={"prefill": 7}, kv_ready=early, tokenizer=SimTokenizer(), clock=clock
    ) as pair:
        await heard(pair)
        canaries = pair.world.proxy.tokens.canaries  # type: ignore[union-attr]
        await until(lambda: canaries.trusted("tiny", Route.CHAT))
        pair.p.faults.add("stall@handed_over")
        for _ in range(2):
            assert (await pair.ask(CHAT, chat())).status == 200
        asked = [one.json["kv_transfer_params"] for one in pair.p.journal.requests if one.chat]
        assert ["prompt_token_ids" in one for one in asked] == [False, True]
        await clock.reach(7)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_decode_engine_is_asked_before_the_prefills_answer(stream: bool) -> None:
    """Its notice is enough: an answer that never comes delays nobody, and its engine is let go at
    the deadline.
    """
    clock = ManualClock()
    async with pool(
        "nixl", deadlines={"prefill": 7}, kv_ready={"early": True}, clock=clock
    ) as pair:
        await heard(pair)
        pair.p.faults.add("stall@handed_over")
        await same(pair, COMPLETIONS, completion(stream=stream))
        (prefill,) = (
            engine for engine in pair.world.proxy.ledger.engines if engine.url == pair.p.url
        )
        assert prefill.requests == 1, "its answer is still out"
        await clock.reach(7)
        await until(lambda: not prefill.requests)
        assert endings(pair) == ["loaded"]
        assert pair.world.events(LegFailed) == []


async def test_kv_of_a_prefill_that_was_given_up_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answer never came, and with it no handle; the notice has it."""
    clock = ManualClock()
    async with pool("nixl", deadlines={"prefill": 7, "abandoned_prefill": 3}, clock=clock) as pair:
        await heard(pair)
        sender, late = pair.p.engine.notice_sender, list[tuple[bytes, int]]()

        def later(delay: float, payload: bytes, rank: int) -> None:
            if delay:
                late.append((payload, rank))  # it is sent below
            else:
                sender._send(payload, rank)

        monkeypatch.setattr(sender, "_later", later)
        pair.p.faults.add("late_notice:delay=1")
        pair.p.faults.add("stall@handed_over")
        asked = asyncio.create_task(pair.ask(COMPLETIONS, completion()))
        await clock.reach(7)
        await clock.reach(3)
        answer = await asked
        assert answer.status == 200
        await until(lambda: late)
        sender._send(*late[0])
        await until(lambda: "released" in endings(pair))
        await nothing_held(pair)
        assert ("ready", "given_up") in {
            (event.event, event.result) for event in pair.world.events(KvNoticed)
        }


async def test_a_prefill_that_was_given_up_is_remembered_for_a_while() -> None:
    """Neither its answer nor its notice comes: its engine stays known for a minute, should a notice
    name KV there.
    """
    clock = ManualClock()
    async with pool("nixl", deadlines={"prefill": 7, "abandoned_prefill": 3}, clock=clock) as pair:
        await heard(pair)
        pair.p.faults.add("lost_notice")
        pair.p.faults.add("stall@handed_over")
        asked = asyncio.create_task(pair.ask(COMPLETIONS, completion()))
        await clock.reach(7)
        await clock.reach(3)
        assert (await asked).status == 200
        custodians = [one.custodian for one in pair.world.workers]
        await until(lambda: not any(one.orphans.count for one in custodians))
        await clock.advance(REMEMBERED - 1)
        assert any(pair.p.url in one.named() for one in custodians)
        await clock.advance(1)
        assert not any(pair.p.url in one.named() for one in custodians)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "fault", ["lost_notice:rate=1", "garbage_notice:rate=1", "late_notice:delay=0.3,rate=1"]
)
async def test_without_its_notices_the_answer_counts(fault: str, early: bool) -> None:
    """As if there were no notifier."""
    async with pool("nixl", kv_ready={"early": early}) as pair:
        pair.p.faults.add(fault)
        pair.d.faults.add(fault)
        await same(pair, COMPLETIONS, completion())
        await same(pair, CHAT, chat(stream=True))
        assert endings(pair) == ["loaded", "loaded"]
        assert pair.loaded > 0


async def test_a_lease_that_ends_before_the_kv_was_loaded_fails_the_leg_at_once() -> None:
    """The decode engine might read another prompt's KV: the request is decoded elsewhere, well
    before its own deadline.
    """
    async with pool("nixl", deadlines={"first_token": 60}, p={"kv_lease_duration": 0.4}) as pair:
        pair.d.faults.add("stall@queued")
        answer = await asyncio.wait_for(pair.ask(COMPLETIONS, completion()), 20)
        assert answer.status == 200
        assert "expired" in endings(pair)
        assert [event.phase for event in pair.world.events(LegFailed)] == ["decode"]
        assert "lease" in pair.world.events(LegFailed)[0].error
        assert pair.world.events(DeadlinePassed) == []


@pytest.mark.parametrize("early", [False, True])
async def test_clients_that_leave_at_random_leave_nothing_behind(early: bool) -> None:
    """Every handle ends loaded, released or aborted; none expires; the prefill engine keeps
    nothing.
    """
    async with pool("nixl", kv_ready={"early": early}) as pair:
        await leaving.at_random(pair, 100, 20, seed=7)  # .ci/full has 200, of real engines
        await until(lambda: not pair.world.busy())
        await nothing_held(pair)
        found = endings(pair)
        assert set(found) <= {"loaded", "released", "aborted", "refused"}
        assert len(found) > 30


def speak(address: str, *messages: dict[str, Any]) -> None:
    """Send notices as engines do."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.setsockopt(zmq.LINGER, 5000)
        sender.connect(address)
        for message in messages:
            sender.send(msgspec.msgpack.encode(message))


def ours(event: str, name: str, **more: Any) -> dict[str, Any]:
    """A notice of the notifier."""
    return {
        "type": "PdproxyKV",
        "v": 1,
        "event": event,
        "req_id": name,
        "remote_req_id": f"cmpl-{name}-0-01234567",
    } | more


async def test_notices_for_a_proxy_that_is_gone() -> None:
    """A restarted proxy hears of its forerunner's requests: nothing is confused, nothing is kept
    for ever.
    """
    async with pool("nixl", kv_ready={"early": True}) as pair:
        address = pair.world.proxy.notices.socket.address
        assert address is not None
        events = ("ready", "loaded", "failed", "released", "expired")
        strangers = [ours(event, f"old-{number}") for number in range(100) for event in events]
        task = asyncio.create_task(asyncio.to_thread(speak, address, *strangers))
        for _ in range(5):
            await same(pair, COMPLETIONS, completion())
        await task
        await until(
            lambda: (
                len([e for e in pair.world.events(KvNoticed) if e.result in ("early", "over")])
                >= 500
            )
        )
        assert endings(pair) == ["loaded"] * 5
        assert pair.world.metric("pdproxy_kv_notices_kept") == 100


async def test_a_strangers_word_ends_no_handle() -> None:
    """An id that is not a live handle's changes nothing; a live one's needs the engine's own id of
    it.
    """
    async with pool("nixl") as pair:
        address = pair.world.proxy.notices.socket.address
        assert address is not None
        pair.d.faults.add("slow@queued:delay=0.5")
        asked = asyncio.create_task(pair.ask(COMPLETIONS, completion()))
        await asyncio.to_thread(speak, address, ours("expired", "guess"), ours("loaded", "guess"))
        answer = await asked
        assert answer.status == 200
        assert json.loads(answer.body)["choices"][0]["text"]
        assert endings(pair) == ["loaded"]


async def test_a_notice_is_enough_once_nobody_waits_for_the_answer() -> None:
    """It comes while the leg of a client that left is still awaited; the answer never does."""
    clock = ManualClock()
    async with pool("nixl", deadlines={"abandoned_prefill": 7}, clock=clock) as pair:
        await heard(pair)
        pair.p.faults.add("late_notice:delay=1")
        pair.p.faults.add("stall@handed_over")
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, completion()))
        await until(lambda: pair.p.engine.handles)
        client.close()
        await until(lambda: "released" in endings(pair))
        await nothing_held(pair)
        assert pair.world.proxy.custodian.orphans.count == 1, "its answer is still out"
        await clock.reach(7)


async def test_kv_that_could_not_be_read_is_given_back_though_the_request_goes_on() -> None:
    """A decode engine that computes what it couldn't load tells the prefill engine nothing; that
    takes longer than a notice.
    """
    async with pool(
        "nixl", d={"kv_load_failure_policy": "recompute", "hardware": Hardware(speed=0.1)}
    ) as pair:
        await heard(pair)
        pair.d.faults.add("load_failure")
        await same(pair, COMPLETIONS, completion())
        await until(lambda: endings(pair) == ["released"])
        await nothing_held(pair)


async def test_a_handle_that_was_read_is_not_sent_again() -> None:
    """A kept connection closes right after the request, as one that was closed before; but D has
    reported that it has loaded.
    """
    async with pool("nixl", d={"hardware": Hardware()}) as pair:
        await heard(pair)
        pair.d.faults.add("reset@last_chunk")
        # 0.15 s: enough for the notice to come before
        await same(pair, COMPLETIONS, completion(max_tokens=30))
        assert pair.d.faults.happened
        assert [event.phase for event in pair.world.events(LegFailed)] == ["decode"]
