"""Several pools behind one proxy: models, aliases, weights, adapters, and what operators see of
them.
"""

from __future__ import annotations

import asyncio
import io
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdproxy.app.reloading import SettingsSource
from pdproxy.observe.formats import make_formatter
from pdproxy.observe.lines import LineWriter
from pdproxy.observe.logs import Log
from pdproxy.settings.schema import Settings
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import exchange, request
from tests.fakes.followed import followed
from tests.fakes.pools import PoolOf, Pools, body, pools
from tests.fakes.ports import free_port
from tests.fakes.world import until, world

if TYPE_CHECKING:
    import openai

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WRONG = {
    "error": {
        "message": "The model `nope` does not exist. Valid aliases: a, b, fast.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
}


def client(w: Pools) -> openai.AsyncOpenAI:
    import openai  # a second, which each process that collects tests would take

    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{w.world.port}/v1", api_key="x", max_retries=0
    )


async def post(engine: SimServer, path: str, fields: dict[str, Any]) -> int:
    """Ask an engine itself."""
    return (await exchange(engine.port, request("POST", path, fields))).status


async def test_two_pools_two_models_one_alias() -> None:
    """openai-python sees all of them, and gets a wrong name's 404 as from vLLM."""
    import openai  # as above

    async with (
        pools(PoolOf("a", "nixl", {"aliases": {"fast": "a"}}), PoolOf("b")) as w,
        client(w) as asking,
    ):
        cards = [card async for card in asking.models.list()]
        assert [card.id for card in cards] == ["a", "b", "fast"]
        assert cards[2].model_extra is not None
        assert (cards[2].model_extra["root"], cards[2].model_extra["parent"]) == ("a", None)
        assert cards[2].model_extra["max_model_len"] == cards[0].model_extra["max_model_len"]  # type: ignore[index]
        for name, shown in (("a", "a"), ("b", "b"), ("fast", "a")):
            whole = await asking.completions.create(model=name, prompt="word " * 20, max_tokens=4)
            assert whole.model == shown
            messages: Any = [{"role": "user", "content": "word " * 20}]
            stream = await asking.chat.completions.create(
                model=name, messages=messages, max_tokens=4, stream=True
            )
            assert {chunk.model async for chunk in stream} == {shown}
        for create in (
            asking.completions.create(model="nope", prompt="x"),
            asking.chat.completions.create(
                model="nope", messages=[{"role": "user", "content": "x"}]
            ),
            asking.embeddings.create(model="nope", input="x"),
            asking.responses.create(model="nope", input="x"),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                await create
            assert caught.value.response.json() == WRONG
        assert w.world.metric("pdproxy_requests_total", model="fast") == 2, (
            "a request counts under the name it asked for"
        )


@pytest.mark.parametrize(
    "path",
    ["/v1/responses", "/v1/messages", "/tokenize", "/v1/messages/count_tokens", "/invocations"],
)
async def test_routes_that_one_engine_serves(path: str) -> None:
    """They go to the pool of their model, by its own name there; so does one in a large body, read
    by another process.
    """
    async with pools(PoolOf("a", "nixl"), PoolOf("b", settings={"aliases": {"other": "b"}})) as w:
        text = "word " * 10
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
        bodies: dict[str, dict[str, Any]] = {
            "/v1/responses": {"input": text, "max_output_tokens": 4},
            "/tokenize": {"prompt": text},
            "/invocations": {"prompt": text, "max_tokens": 4},
        }
        fields = bodies.get(path, chat)
        seen: list[str] = []
        for name in ("b", "other"):
            headers = (
                [("x-amzn-sagemaker-adapter-identifier", name)] if path == "/invocations" else []
            )
            padding = (
                {"metadata": {"x": "y" * 600_000}}
                if path == "/v1/responses" and name == "other"
                else {}
            )
            answer = await w.world.ask(path, {"model": name, **fields, **padding}, headers)
            assert answer.status == 200, answer.body
            seen.append(answer.json.get("model", "b"))
        assert seen == ["b", "b"]
        missing = (
            [("x-amzn-sagemaker-adapter-identifier", "nope")] if path == "/invocations" else []
        )
        answer = await w.world.ask(path, {"model": "nope", **fields}, missing)
        assert answer.status == 404
        assert (
            "The model `nope` does not exist. Valid aliases: a, b, other."
            in answer.json["error"]["message"]
        )


async def test_an_invocation_without_an_adapter() -> None:
    """vLLM does not read the model of its body. Here it chooses the pool where it can, and is
    refused by none.
    """
    async with pools(PoolOf("a"), PoolOf("b", settings={"aliases": {"other": "b"}})) as w:
        shown = []
        for name in ("b", "other", "nope", None):
            answer = await w.world.ask(
                "/invocations", {"model": name, "prompt": "word " * 10, "max_tokens": 4}
            )
            shown.append((answer.status, answer.json["model"]))
        assert shown == [(200, "b"), (200, "b"), (200, "a"), (200, "a")]


async def test_connectors_beside_each_other() -> None:
    """Mooncake beside nixl beside plain engines: each prompt is split in its pool, and no pool
    knows of the others'.
    """
    async with pools(PoolOf("a", "nixl"), PoolOf("b", "mooncake"), PoolOf("c")) as w:
        for name in ("a", "b", "c"):
            assert await w.model_of(name) == name
            assert await w.model_of(name, prompt="other " * 40, stream=False) == name
        for p, d in w.engines[:2]:
            assert p.engine.stats.prompt_tokens_by_source["local_compute"]
            assert d.engine.stats.prompt_tokens_by_source["external_kv_transfer"]
        assert w.world.metric("pdproxy_kv_handles") == 0
        ready = await w.world.get("/ready")
        assert (ready.status, ready.json["state"]) == (200, "ok")


async def test_weights_hold() -> None:
    """Two pools with one name share its requests, by a seeded chance; a conversation stays where it
    began.
    """
    heavy, light = {"weight": 4}, {"aliases": {"m": "new"}, "weight": 1}
    async with pools(
        PoolOf("m", settings=heavy), PoolOf("new", settings=light), chance=random.Random(3).random
    ) as w:
        found = Counter([await w.model_of("m") for _ in range(250)])
        assert found["m"] / 250 == pytest.approx(0.8, abs=0.07)
        for user in ("x", "y", "z", "u", "v"):
            assert len({await w.model_of("m", user=user) for _ in range(6)}) == 1
        shown = set()
        for _ in range(6):
            answer = await w.world.ask(COMPLETIONS, body("m"), [("x-session-id", "one")])
            shown.add(answer.json["model"])
        assert len(shown) == 1


@pytest.mark.parametrize(
    ("path", "prompt", "limit"),
    [(COMPLETIONS, "prompt", "max_tokens"), ("/v1/responses", "input", "max_output_tokens")],
)
async def test_a_body_names_its_conversation(path: str, prompt: str, limit: str) -> None:
    """By `user`, on each route. One that names nobody is no conversation: it would send all
    clients' requests to one pool.
    """
    light = {"aliases": {"m": "new"}}
    async with pools(
        PoolOf("m"), PoolOf("new", settings=light), chance=random.Random(3).random
    ) as w:

        async def models_of(user: object) -> set[str]:
            fields = {"model": "m", prompt: "word " * 10, limit: 4, "user": user}
            return {(await w.world.ask(path, fields)).json["model"] for _ in range(8)}

        assert [len(await models_of(user)) for user in ("x", "y", "z" * 100_000)] == [1, 1, 1]
        assert [await models_of(user) for user in (None, "")] == [{"m", "new"}] * 2


async def test_adapters_that_are_loaded_and_unloaded() -> None:
    """They are noticed by the next probe, and requests go to the engines that have them."""
    lora = {"lora_name": "poet", "lora_path": "/adapters/poet"}
    async with pools(PoolOf("a"), PoolOf("b"), probes=0.05) as w, client(w) as asking:
        assert (await w.world.ask(COMPLETIONS, body("poet"))).status == 404
        (engine,) = w.engines[1]
        assert await post(engine, "/v1/load_lora_adapter", lora) == 200
        async with asyncio.timeout(20):
            while (await w.world.ask(COMPLETIONS, body("poet"))).status == 404:
                await asyncio.sleep(0.02)
        assert await w.model_of("poet") == "poet"
        cards = {card.id: card async for card in asking.models.list()}
        assert list(cards) == ["a", "b", "poet"]
        assert cards["poet"].model_extra is not None
        assert cards["poet"].model_extra["parent"] == "b"
        assert (
            await asking.completions.create(model="poet", prompt="word", max_tokens=4)
        ).model == "poet"
        assert await post(engine, "/v1/unload_lora_adapter", lora) == 200
        gone = "The model `poet` does not exist. Valid aliases: a, b."
        # until the next probe, the engine itself says that it is gone
        async with asyncio.timeout(20):
            while (answer := await w.world.ask(COMPLETIONS, body("poet"))).json["error"][
                "message"
            ] != gone:
                await asyncio.sleep(0.02)
        assert answer.status == 404
        assert await w.listed() == ["a", "b"]
        assert await post(engine, "/v1/unload_lora_adapter", lora) == 404


@pytest.mark.parametrize("others", [0, 1])
async def test_an_adapter_of_one_engine_of_a_pool(others: int) -> None:
    """Its requests go to that engine alone, in one pool as in several; the model's go to both."""
    lora = {"lora_name": "poet", "lora_path": "/adapters/poet"}
    async with pools(PoolOf("a", alone=2), *[PoolOf("b")] * others, probes=0.05) as w:
        first, second = w.engines[0]
        assert await post(second, "/v1/load_lora_adapter", lora) == 200
        ledger_engine = w.world.proxy.engines[second.url].in_ledger
        await until(lambda: ledger_engine.serves("poet"))
        before = [len(engine.requests) for engine in (first, second)]
        for _ in range(6):
            assert await w.model_of("poet") == "poet"
        assert [len(engine.requests) for engine in (first, second)] == [before[0], before[1] + 6]
        for _ in range(6):
            assert await w.model_of("a") == "a"
        assert len(first.requests) > before[0]
        assert (w.world.proxy.service.routes is None) is (others == 0)


async def test_a_pool_that_is_down() -> None:
    """`/ready` names it. Its models get 503, others' are served, and a model of both is served by
    the other one.
    """
    async with pools(
        PoolOf("a", settings={"weight": 100}),
        PoolOf("b", settings={"aliases": {"a": "b"}}),
        probes=0.05,
    ) as w:
        await w.engines[0][0].stop()
        await until(lambda: not w.world.proxy.pools[0].ledger.engines[0].available)
        ready = await w.world.get("/ready")
        assert (ready.status, ready.json["state"]) == (200, "degraded")
        assert ready.json["details"][0].startswith(
            "pool pool 0: no decode or aggregated engine is up"
        )
        assert {await w.model_of("a") for _ in range(5)} == {"b"}
        assert await w.listed() == ["b", "a"]
        assert w.world.metric("pdproxy_state", state="degraded") == 1
        await w.engines[1][0].stop()
        await until(lambda: not w.world.proxy.pools[1].ledger.engines[0].available)
        ready = await w.world.get("/ready")
        assert (ready.status, ready.json["state"]) == (503, "not_ready")
        assert all(name in ready.json["reason"] for name in ("pool pool 0: ", "pool pool 1: "))
        answer = await w.world.ask(COMPLETIONS, body("a"))
        assert (answer.status, answer.json["error"]["reason"]) == (503, "no_engine")
        assert (await w.world.get("/v1/models")).status == 503


async def test_metrics_of_pools() -> None:
    """Engines are joined to their pools; what each pool counts is added up."""
    async with pools(PoolOf("a", "nixl"), PoolOf("b")) as w:
        (p, d), (plain,) = w.engines
        for name in ("a", "b", "b"):
            await w.model_of(name)
        of = [
            (p.url, "prefill", "pool 0"),
            (d.url, "decode", "pool 0"),
            (plain.url, "aggregated", "pool 1"),
        ]
        for url, role, pool in of:
            assert w.world.metric("pdproxy_node_info", node=url, role=role, pool=pool) == 1
            assert w.world.metric("pdproxy_node_up", node=url) == 1
        assert w.world.metric("pdproxy_node_info") == 3
        assert w.world.metric("pdproxy_requests_total", outcome="ok") == 3
        assert w.world.metric("pdproxy_node_legs_total", node=plain.url) == 2
        assert w.world.metric("pdproxy_build_info") == 1, "both have one connector"


async def test_one_pool_leaves_names_to_its_engine() -> None:
    """Byte for byte as before. With an alias, only that name is replaced."""
    async with world() as w:
        assert w.proxy.service.routes is None
        plain = await w.ask(COMPLETIONS, body("nope"))
        assert (
            plain.json["error"]["message"]
            == "The model `nope` does not exist. Valid aliases: tiny."
        )
    async with pools(PoolOf("a", settings={"aliases": {"fast": "a"}})) as one:
        assert await one.model_of("fast") == "a"
        assert await one.listed() == ["a", "fast"]
        answer = await one.world.ask(COMPLETIONS, body("nope"))
        assert (
            answer.json["error"]["message"] == "The model `nope` does not exist. Valid aliases: a."
        )


async def test_models_and_weights_follow_the_file(tmp_path: Path) -> None:
    """Aliases, patterns and weights are used at once; another pool needs a restart."""
    path = tmp_path / "pdproxy.yaml"
    path.write_text("listen: {port: 1}\n")
    async with pools(PoolOf("a"), PoolOf("b")) as w:
        first: Settings = w.world.proxy.settings

        def with_pools(*changed: dict[str, Any]) -> Settings:
            own = [
                msgspec.structs.replace(pool, **new)
                for pool, new in zip(first.pools, changed, strict=False)
            ]
            return msgspec.structs.replace(first, pools=tuple(own))

        wanted = [first]
        log = Log(LineWriter(io.StringIO(), str), make_formatter("text"), shows_requests=True)
        reloading = followed(w.world, SettingsSource(first, lambda: wanted[0], [path]), log)
        assert (await w.world.ask(COMPLETIONS, body("fast"))).status == 404
        wanted[0] = with_pools({"aliases": {"fast": "a"}}, {"models": ("b-*",)})
        await reloading.look(asked=True)
        assert await w.model_of("fast") == "a"
        assert "fast" in await w.listed()
        assert (
            (await w.world.ask(COMPLETIONS, body("b-1")))
            .json["error"]["message"]
            .endswith("Valid aliases: b.")
        )
        wanted[0] = with_pools({})
        await reloading.look(asked=True)
        assert (await w.world.get("/ready")).json["details"] == [
            "these settings have changed, and need a restart: pools"
        ]
        assert await w.model_of("fast") == "a", "what is in force stays"
        log.close()


async def test_each_pool_has_its_own_socket_for_notices() -> None:
    """Engines of both send theirs, and each is awaited where it comes in."""
    ports = free_port(), free_port()
    async with pools(
        PoolOf("a", "nixl", notifies=ports[0]), PoolOf("b", "nixl", notifies=ports[1])
    ) as w:
        bound = [pool.notices.socket.address or "" for pool in w.world.proxy.pools]
        assert [address.rpartition(":")[2] for address in bound] == [str(port) for port in ports]

        def sent() -> list[int]:
            return [
                sum(one.engine.notice_sender.counts["sent"] for one in engines)
                for engines in w.engines
            ]

        async with asyncio.timeout(20):
            while not all(sent()):  # engines drop what they send before they have found the socket
                assert [await w.model_of(name) for name in ("a", "b")] == ["a", "b"]
                await asyncio.sleep(0.05)
        await until(lambda: w.world.metric("pdproxy_kv_notices_total") >= sum(sent()))
        assert w.world.metric("pdproxy_kv_notices_total", result="undecodable") == 0
        await until(lambda: not w.world.metric("pdproxy_kv_handles"))


@pytest.mark.parametrize(
    ("model", "status"),
    [
        (5, 400),
        (None, 200),
        ("", 200),
        ("x" * 300, 404),
        ("y" * 1_000_000, 404),
        ("\u202e\n<b>", 404),
        ({"a": 1}, 400),
    ],
    ids=["number", "null", "empty", "long", "huge", "unprintable", "mapping"],
)
async def test_names_that_are_none(model: Any, status: int) -> None:
    """What is no text is refused by an engine of the first pool. An unknown name comes back at a
    bounded length.
    """
    async with pools(PoolOf("a"), PoolOf("b")) as w:
        answer = await w.world.ask(COMPLETIONS, {**body("a"), "model": model})
        assert answer.status == status
        assert len(answer.body) < 2000
        if status == 404:
            assert answer.json["error"]["param"] == "model"
