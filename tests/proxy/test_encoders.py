"""Encoder engines encode media before the engine is asked that computes the prompt; what they can't
do it does itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.fleet.membership import SETTINGS
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import DeadlinePassed, LegFailed, RequestEnded, ServedAlone
from pdproxy.settings.engines import Facts
from pdproxy.settings.schema import Settings
from pdproxy_lab.sim.facts import ECExtraConfig, ECTransferConfig
from tests.fakes import answers, scripts
from tests.fakes.client import request
from tests.fakes.clock import ManualClock
from tests.fakes.engine import Reply, Script, serve
from tests.fakes.passed import MESSAGES, RESPONSES
from tests.fakes.pictures import asking, png, url
from tests.fakes.ports import free_port
from tests.fakes.world import CHAT, PROMPT, World, until, world
from tests.proxy.test_media import data_of, still

A, B, C = png("a"), png("b"), png("c", 84, 84)
SAID = {"model": "tiny", "max_tokens": 4, "temperature": 0}
CONNECTORS = {
    "example": "ECExampleConnector",
    "cpu": "ECCPUConnector",
    "mooncake": "ECMooncakeConnector",
}
HOSTILE = "169.254.169.254"


@asynccontextmanager
async def seeing(
    folder: Path,
    encode: int = 1,
    prefill: int = 1,
    decode: int = 1,
    aggregated: int = 0,
    *,
    connector: str = "example",
    clock: Clock | None = None,
    deadlines: dict[str, float] | None = None,
    limits: dict[str, Any] | None = None,
    is_plain: bool = False,
) -> AsyncIterator[World]:
    """A world with encoder engines. All engines see; all but decode engines take part in the
    transfer of encoder outputs. `is_plain`: aggregated engines do not, either.
    """
    extra = ECExtraConfig(
        shared_storage_path=str(folder), ec_enable_nixl=True, ec_cpu_bytes=1 << 20
    )
    ports: dict[str, list[int]] = {}

    def facts_of(role: str) -> Mapping[str, Any]:
        if role == "decode" or (is_plain and role == "aggregated"):
            return {}
        config = ECTransferConfig(
            ec_connector=CONNECTORS[connector],  # type: ignore[arg-type]
            ec_role="ec_producer" if role == "encode" else "ec_consumer",
            ec_port=free_port(),
            ec_connector_extra_config=extra,
        )
        ports.setdefault(role, []).append(config.ec_port)
        more = {"connector": "none"} if role == "encode" else {}
        return {"ec_transfer_config": config, "ec_side_channel_port": 0, **more}

    def adjust(settings: Settings) -> Settings:
        (pool,) = settings.pools
        nodes = [
            msgspec.structs.replace(
                node, facts=Facts(ec_address=f"127.0.0.1:{ports[node.role].pop(0)}")
            )
            if connector == "mooncake" and ports.get(node.role)
            else node
            for node in pool.nodes
        ]
        pool = msgspec.structs.replace(pool, ec_connector=connector, nodes=tuple(nodes))
        return msgspec.structs.replace(settings, pools=(pool,))

    async with world(
        prefill,
        decode,
        aggregated,
        encode=encode,
        facts={"vision": True},
        facts_of=facts_of,
        adjust=adjust,
        clock=clock,
        deadlines={"encode": 30.0, **(deadlines or {})},
        limits=limits or {},
    ) as w:
        yield w


def broken(status: int) -> Script:
    """An error of an engine."""
    return scripts.whole(answers.error("broken", "InternalServerError", status), status)


def encoded(w: World) -> tuple[int, int, int, int]:
    """How many pictures the engines of each role have encoded: encode, prefill, decode,
    aggregated.
    """
    every = (w.encode, w.prefill, w.decode, w.aggregated)
    a, b, c, d = [sum(one.sim.engine.stats.encoder_inputs for one in some) for some in every]
    return a, b, c, d


def results(w: World) -> dict[str, float]:
    """What became of media, by the metric."""
    names = ("encoded", "refused", "failed", "late", "no_engine")
    found = {name: w.metric("pdproxy_encoded_media_total", result=name) for name in names}
    return {name: count for name, count in found.items() if count}


def chat(*pictures: bytes, **more: Any) -> dict[str, Any]:
    """A body with pictures."""
    return {**SAID, "messages": [asking(PROMPT, *pictures, "What?")], **more}


def body(path: str, picture: bytes, stream: bool) -> dict[str, Any]:
    """A body with a picture, for a route."""
    content: list[dict[str, Any]] = [{"type": "text", "text": PROMPT}]
    if path == MESSAGES:
        source = {"type": "base64", "media_type": "image/png", "data": data_of(picture)}
        content.append({"type": "image", "source": source})
    elif path == RESPONSES:
        content[0]["type"] = "input_text"
        content.append({"type": "input_image", "image_url": url(picture)})
        said = [{"role": "user", "content": content}]
        return {
            "model": "tiny",
            "max_output_tokens": 4,
            "temperature": 0,
            "input": said,
            "stream": stream,
        }
    else:
        content.append({"type": "image_url", "image_url": {"url": url(picture)}})
    return {**SAID, "messages": [{"role": "user", "content": content}], "stream": stream}


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_picture_is_encoded_once(
    tmp_path: Path, connector: str, path: str, stream: bool
) -> None:
    """By the encoder engine, which is sent the picture alone. The answer is one engine's."""
    sent, identity = body(path, A, stream), [("x-request-id", "r")]
    async with seeing(tmp_path, aggregated=1, connector=connector, is_plain=True) as w:
        answer = await w.ask(path, sent, identity)
        assert encoded(w) == (1, 0, 0, 0)
        (asked,) = w.encode[0].requests
        (message,) = asked.json["messages"]
        assert message["content"] == [{"type": "image_url", "image_url": {"url": url(A)}}]
        assert (asked.json["max_tokens"], asked.json["stream"]) == (1, False)
        assert asked.header("x-request-id") != "r"
        told = w.prefill[0].requests[0].json.get("ec_transfer_params")
        assert (told is not None) == (connector != "example")
        assert "ec_transfer_params" not in w.decode[0].requests[0].json
        assert results(w) == {"encoded": 1}
        w.port, port = w.aggregated[0].port, w.port
        alone = await w.ask(path, sent, identity)
        w.port = port
        assert still(answer) == still(alone)
        (end,) = w.events(RequestEnded)
        assert [node for node, _ in end.legs[0].encoders] == [w.encode[0].url]


async def test_an_aggregated_engine_uses_outputs(tmp_path: Path) -> None:
    async with seeing(tmp_path, 1, 0, 0, 1) as w:
        assert (await w.ask(CHAT, chat(A, B))).status == 200
        assert encoded(w) == (2, 0, 0, 0)


async def test_where_nobody_else_encodes(tmp_path: Path) -> None:
    """A decode engine serves the request alone; an aggregated one, which would wait for outputs
    that do not come, is not asked.
    """
    async with seeing(tmp_path, connector="mooncake") as w:
        w.encode[0].default = broken(500)
        assert (await w.ask(CHAT, chat(A))).status == 200
        assert encoded(w) == (0, 0, 1, 0)
        assert not w.prefill[0].requests
        assert [event.reason for event in w.events(ServedAlone)] == ["not_encoded"]
    async with seeing(tmp_path, 1, 0, 0, 1, connector="mooncake") as w:
        w.encode[0].default = broken(500)
        answer = await w.ask(CHAT, chat(A))
        assert answer.status == 503
        assert "no encoder engine" in answer.json["error"]["message"]
        assert not w.aggregated[0].requests


async def test_more_outputs_than_media_are_not_pushed(tmp_path: Path) -> None:
    """A video with sound has two: a decode engine serves the request alone. That is no failure of
    the encoder engine.
    """

    async def answer(reply: Reply) -> None:
        items = {name: {"item_indices": [at]} for at, name in enumerate("ab")}
        await reply.whole(json.dumps({"ec_transfer_params": items}).encode())

    async with seeing(tmp_path, connector="mooncake") as w:
        w.encode[0].default = answer
        assert (await w.ask(CHAT, chat(A))).status == 200
        assert [event.reason for event in w.events(ServedAlone)] == ["not_encoded"]
        assert not w.prefill[0].requests
        assert not w.events(LegFailed)


async def test_a_retry_at_another_engine_pushes_there(tmp_path: Path) -> None:
    """Outputs that are pushed are of use to one engine alone."""
    async with seeing(tmp_path, prefill=2, connector="mooncake") as w:
        w.prefill[0].script(broken(500))
        w.prefill[1].script(broken(500))
        await w.ask(CHAT, chat(A))
        addresses = [one.json["ec_transfer_params"]["consumer_zmq"] for one in w.encode[0].requests]
        assert len(addresses) == len(set(addresses)) == 2


async def test_media_go_to_several_engines(tmp_path: Path) -> None:
    """Each to the one that had it before; a text asks none of them."""
    pictures = [png(at) for at in range(8)]
    async with seeing(tmp_path, encode=2) as w:
        assert (await w.ask(CHAT, chat(*pictures))).status == 200
        first = [len(one.requests[0].json["messages"][0]["content"]) for one in w.encode]
        assert sum(first) == 8
        assert min(first) > 1
        for picture in pictures:
            assert (await w.ask(CHAT, chat(picture, C))).status == 200
        assert encoded(w)[0] == 9
        count = sum(len(one.requests) for one in w.encode)
        assert (await w.ask(CHAT, {**SAID, "messages": [asking(PROMPT)]})).status == 200
        assert sum(len(one.requests) for one in w.encode) == count


async def test_only_encoder_engines_of_the_same_revision_encode(tmp_path: Path) -> None:
    """And any, once these are down: the other encoder is better than none."""
    pictures = [png(f"revision {number}") for number in range(6)]
    async with seeing(tmp_path, encode=2) as w:
        for engine in w.engines:
            for one in w.workers:
                known = one.ledger.get(engine.url)
                assert known is not None
                known.revision = "v1" if engine is w.encode[0] else "v2"
        for picture in pictures:
            assert (await w.ask(CHAT, chat(picture))).status == 200
        assert [len(one.requests) for one in w.encode] == [0, 6]
        w.mark_down(w.encode[1], "gone")
        assert (await w.ask(CHAT, chat(A))).status == 200
        assert [len(one.requests) for one in w.encode] == [1, 6]


@pytest.mark.parametrize(
    "failure", [broken(500), broken(503), scripts.eof, scripts.reset, scripts.half, scripts.garbage]
)
async def test_an_engine_that_fails_is_replaced(tmp_path: Path, failure: Any) -> None:
    """By another one; if that fails, too, the prefill engine encodes. The client sees nothing."""
    async with seeing(tmp_path, encode=2) as w:
        for one in w.encode:
            one.script(failure)
        first = await w.ask(CHAT, chat(A))
        assert (first.status, results(w), encoded(w)[:3]) == (200, {"failed": 1}, (0, 1, 0))
        assert [event.phase for event in w.events(LegFailed)] == ["encode", "encode"]
        assert (await w.ask(CHAT, chat(A))).json["choices"] == first.json["choices"]
        w.encode[0].script(failure)
        w.encode[1].script(failure)
        assert (await w.ask(CHAT, chat(B))).status == 200


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_second_engine_is_asked_within_the_retry_budget(
    tmp_path: Path, in_time: bool
) -> None:
    """While others are tried again, it is not; if no place comes free in time, the prefill engine
    encodes. The place is free again before that engine is asked.
    """
    clock, limits = ManualClock(), {"min_retries": 1, "retry_share": 0.0}
    deadlines = {"encode": 30.0, "retry": 3.0}
    async with seeing(tmp_path, 2, clock=clock, deadlines=deadlines, limits=limits) as w:
        for one in w.encode:
            one.script(broken(500))
        running: list[float | None] = []

        async def noting(reply: Reply) -> None:
            running.append(w.metric("pdproxy_retries", state="running"))
            await reply.serve()

        w.prefill[0].script(noting)
        other = await w.proxy.retries.enter()
        assert other is not None
        client = await w.client()
        client.send(request("POST", CHAT, chat(A)))
        await until(lambda: w.metric("pdproxy_retries", state="waiting") == 1)
        if in_time:
            other.leave()
        else:
            await clock.reach(3.0)
        assert (await clock.through(client.answer())).status == 200
        assert sum(len(one.requests) for one in w.encode) == 1 + in_time
        assert running == [0 if in_time else 1]
        assert (results(w), encoded(w)) == ({"failed": 1}, (0, 1, 0, 0))
        other.leave()


async def test_a_dead_engine_is_asked_no_more(tmp_path: Path) -> None:
    """While another one is there, that encodes all. Without any, the prefill engine does, and
    `/ready` says so.
    """
    async with seeing(tmp_path, encode=2) as w:
        first, second = w.encode
        first.stop()
        for picture in (A, B, C):
            assert (await w.ask(CHAT, chat(picture))).status == 200
        assert encoded(w) == (3, 0, 0, 0)
        second.stop()
        assert (await w.ask(CHAT, chat(png("d")))).status == 200
        assert (await w.ask(CHAT, chat(png("e")))).status == 200
        assert encoded(w) == (3, 2, 0, 0)
        assert results(w) == {"encoded": 3, "failed": 1, "no_engine": 1}
        assert b"no encoder engine can be used" in (await w.get("/ready")).body


async def test_a_refused_medium_goes_to_the_prefill_engine(tmp_path: Path) -> None:
    """No other encoder engine is asked: the prefill engine judges the client's own request."""
    async with seeing(tmp_path, encode=2) as w:
        for one in w.encode:
            one.script(broken(400))
        assert (await w.ask(CHAT, chat(A))).status == 200
        assert (results(w), encoded(w)) == ({"refused": 1}, (0, 1, 0, 0))
        w.encode[0].default = w.encode[1].default = broken(400)
        w.prefill[0].default = w.decode[0].default = broken(400)
        answer = await w.ask(CHAT, chat(B))
        assert (answer.status, answer.json["error"]["message"]) == (400, "broken")
        assert not w.events(LegFailed)


async def test_a_silent_engine_costs_the_deadline(tmp_path: Path) -> None:
    clock = ManualClock()
    async with seeing(tmp_path, clock=clock, deadlines={"encode": 7.0}) as w:
        w.encode[0].script(scripts.stall)
        asking_now = await w.client()
        asking_now.send(request("POST", CHAT, chat(A)))
        await until(lambda: w.encode[0].requests)
        assert not w.prefill[0].requests
        await clock.reach(7.0)
        assert (await clock.through(asking_now.answer())).status == 200
        assert encoded(w) == (0, 1, 0, 0)
        assert results(w) == {"late": 1}
        assert [event.wait for event in w.events(DeadlinePassed)] == ["encode"]
        await until(lambda: w.encode[0].requests[0].left.is_set())


async def test_a_client_that_leaves_ends_its_legs(tmp_path: Path) -> None:
    async with seeing(tmp_path, encode=2) as w:
        for one in w.encode:
            one.default = scripts.stall
        client = await w.client()
        client.send(request("POST", CHAT, chat(*[png(at) for at in range(6)])))
        await until(lambda: all(one.requests for one in w.encode))
        client.close()
        await until(lambda: all(one.requests[0].left.is_set() for one in w.encode))
        await w.quiet()
        assert not w.prefill[0].requests


@pytest.mark.parametrize("host", [HOSTILE, "x" * 300])
async def test_an_engine_that_names_another_host_has_failed(tmp_path: Path, host: str) -> None:
    """An engine that has been taken over can't send the prefill engine anywhere."""

    async def answer(reply: Reply) -> None:
        item = {"item_indices": [0], "peer_host": host, "peer_port": 1}
        await reply.whole(json.dumps({"ec_transfer_params": {"a": item}}).encode())

    async with seeing(tmp_path, connector="cpu") as w:
        w.encode[0].script(answer)
        assert (await w.ask(CHAT, chat(A))).status == 200
        assert results(w) == {"failed": 1}
        assert "ec_transfer_params" not in w.prefill[0].requests[0].json
        (failed,) = w.events(LegFailed)
        assert "names the host" in failed.error


async def test_a_client_can_name_no_outputs(tmp_path: Path) -> None:
    """Engines are told what encoder engines said, and nothing of a client's."""
    mine = {"a": {"peer_host": HOSTILE, "peer_port": 1}}
    async with seeing(tmp_path, connector="cpu") as w:
        assert (await w.ask(CHAT, chat(A, ec_transfer_params=mine))).status == 200
        for engine in w.engines:
            assert HOSTILE not in json.dumps([one.json for one in engine.requests])


@pytest.mark.parametrize("prefill", [1, 2])
async def test_a_retry_does_not_encode_again(tmp_path: Path, prefill: int) -> None:
    """Another prefill engine finds the outputs of the first try; without one, a decode engine
    encodes. The report has the encoder stage all the same.
    """
    first = iter([broken(500)])

    async def failing_once(reply: Reply) -> None:
        script = next(first, None)
        await (reply.serve() if script is None else script(reply))

    async with seeing(tmp_path, prefill=prefill) as w:
        for one in w.prefill:
            one.default = failing_once
        assert (await w.ask(CHAT, chat(A))).status == 200
        assert encoded(w) == (1, 0, int(prefill == 1), 0)
        (end,) = w.events(RequestEnded)
        assert [node for node, _ in end.legs[0].encoders] == [w.encode[0].url]
        assert end.legs[0].encode_s is not None


async def test_pushed_outputs_are_made_for_each_attempt(tmp_path: Path) -> None:
    """Also for the same engine: its own outputs of before may be used up, or lost with its run."""
    async with seeing(tmp_path, connector="mooncake") as w:
        client = await w.client()  # of one worker, which keeps its connections
        client.send(request("POST", CHAT, chat(A)))
        assert (await client.answer()).status == 200
        w.prefill[0].script(scripts.eof)  # the engine may just have closed it: it is asked again
        client.send(request("POST", CHAT, chat(B)))
        assert (await client.answer()).status == 200
        asked = [one.json["ec_transfer_params"]["ec_items"] for one in w.encode[0].requests]
        assert len({item["transfer_id"] for items in asked for item in items}) == 3
        assert not w.events(ServedAlone)


async def test_a_leg_counts_once(tmp_path: Path) -> None:
    """However many media it has: one failure of an engine is no reason to leave it out."""
    async with seeing(tmp_path) as w:
        w.encode[0].script(scripts.eof)
        assert (await w.ask(CHAT, chat(*[png(at) for at in range(6)]))).status == 200
        assert (await w.ask(CHAT, chat(A))).status == 200
        assert results(w) == {"failed": 6, "encoded": 1}


async def test_an_encoder_engine_is_no_prefill_engine_that_has_failed(tmp_path: Path) -> None:
    """Behind its 5xx and that of one prefill engine, another prefill engine is asked."""
    async with seeing(tmp_path, prefill=2) as w:
        w.encode[0].default = w.prefill[0].default = broken(500)
        for picture in (A, B):
            assert (await w.ask(CHAT, chat(picture))).status == 200
        assert w.prefill[0].requests
        assert not w.events(ServedAlone)


async def test_engines_that_hang_cost_some_requests_the_deadline(tmp_path: Path) -> None:
    """Those that are there when it is over. Then the engines are left out, and one medium at a time
    shows whether they work again.
    """
    clock, count = ManualClock(), 200
    async with seeing(tmp_path, 2, clock=clock, deadlines={"encode": 7.0}) as w:
        for one in w.encode:
            one.default = scripts.stall
        clients = [await w.client() for _ in range(count)]
        for client in clients:
            client.send(request("POST", CHAT, chat(A)))
        await until(lambda: sum(len(one.requests) for one in w.encode) == count)
        await clock.reach(7.0)
        for client in clients:
            assert (await client.answer()).status == 200
        assert results(w) == {"late": count}
        assert (await w.ask(CHAT, chat(B))).status == 200
        assert results(w) == {"late": count, "no_engine": 1}
        for one in w.encode:
            one.default = serve
        await clock.advance(w.proxy.settings.limits.breaker_cooldown + 1)
        assert (await w.ask(CHAT, chat(png("c"), png("d"), png("e")))).status == 200
        assert results(w) == {"late": count, "no_engine": 2, "encoded": 2}


async def test_a_removed_engine_ends_what_it_has_begun(tmp_path: Path) -> None:
    """Its legs go on; the next medium goes to another engine."""
    removed = asyncio.Event()
    async with seeing(tmp_path, 2) as w:
        for one in w.encode:
            one.default = scripts.gate(removed, serve)
        client = await w.client()
        client.send(request("POST", CHAT, chat(A)))
        await until(lambda: any(one.requests for one in w.encode))
        (asked,) = [one for one in w.encode if one.requests]
        for worker in w.workers:
            worker.membership.remove(asked.url, SETTINGS, at_once=True)
        removed.set()
        assert (await client.answer()).status == 200
        assert (await w.ask(CHAT, chat(B))).status == 200
        assert [one.sim.engine.stats.encoder_inputs for one in w.encode] == [1, 1]
        assert results(w) == {"encoded": 2}
        assert len(asked.requests) == 1


async def test_many_media_are_few_requests(tmp_path: Path) -> None:
    """One for each engine, each with a share that is bounded by load."""
    pictures = [png(at, 28, 28) for at in range(128)]
    async with seeing(tmp_path, 2) as w:
        assert (await w.ask(CHAT, chat(*pictures))).status == 200
        asked = [len(one.json["messages"][0]["content"]) for e in w.encode for one in e.requests]
        assert (len(asked), sum(asked), results(w)) == (2, 128, {"encoded": 128})
        assert max(asked) <= 1.25 * 64 + 1


def answering(content: bytes) -> Script:
    """An answer of this content."""

    async def script(reply: Reply) -> None:
        await reply.whole(content)

    return script


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[" * (64 << 20), "more than 262144 bytes"),
        (
            json.dumps(
                {"ec_transfer_params": {str(at): {"item_indices": [at]} for at in range(100_000)}}
            ).encode(),
            "more than 262144 bytes",
        ),
        (
            json.dumps(
                {"ec_transfer_params": {str(at): {"item_indices": [at]} for at in range(5_000)}}
            ).encode(),
            "5000 outputs for 1 media",
        ),
    ],
    ids=["64 MiB", "100,000 outputs", "5,000 outputs"],
)
async def test_an_answer_that_is_too_large_is_none(
    tmp_path: Path, content: bytes, why: str
) -> None:
    async with seeing(tmp_path) as w:
        w.encode[0].script(answering(content))
        assert (await w.ask(CHAT, chat(A))).status == 200
        assert (results(w), encoded(w)) == ({"failed": 1}, (0, 1, 0, 0))
        (failed,) = w.events(LegFailed)
        assert why in failed.error
