"""What an operator asks the proxy: is it ready, what does it serve, how is it doing."""

from __future__ import annotations

import json
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdproxy import __version__
from pdproxy.kit.errors import Wait
from pdproxy.observe.events import DeadlinePassed, NodeChanged
from tests.fakes import answers, scripts
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, world


async def test_health_and_version() -> None:
    """The process is alive whatever its engines do, and says its version."""
    async with world(probed=False) as w:
        assert ((await w.get("/health")).status, (await w.get("/health")).body) == (200, b"")
        assert (await w.get("/version")).json == {"version": __version__}


async def test_ready_while_starting_and_after() -> None:
    """Not ready before every engine was probed once; then ready, without complaints; then by what is up."""
    async with world(probed=False) as w:
        starting = await w.get("/ready")
        assert starting.status == 503
        assert starting.json["ready"] is False
        assert "not probed yet" in starting.json["reason"]
        assert w.decode[0].url in starting.json["reason"]
        assert (await w.ask(COMPLETIONS, completion())).status == 503
        await w.probe()
        ready = await w.get("/ready")
        assert (ready.status, ready.json) == (200, {"ready": True, "reason": None, "details": []})


async def test_ready_says_what_is_down() -> None:
    """Without a prefill engine it is ready, and says what is missing; without a decode engine it is not."""
    async with world() as w:
        w.prefill[0].stop()
        await w.probe()
        ready = await w.get("/ready")
        assert ready.status == 200
        assert any(w.prefill[0].url in line for line in ready.json["details"])
        w.decode[0].stop()
        await w.probe()
        ready = await w.get("/ready")
        assert ready.status == 503
        assert "no decode or aggregated engine is up" in ready.json["reason"]
        assert w.decode[0].url in ready.json["reason"]
        await w.decode[0].listen()
        await w.probe()
        assert (await w.get("/ready")).status == 200
        changes = [(event.node, event.up) for event in w.events(NodeChanged)]
        decode = w.decode[0].url
        assert [up for node, up in changes if node == decode] == [True, False, True]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models"])
async def test_an_engine_whose_own_routes_fail_is_down(path: str) -> None:
    """An engine that answers 500, nonsense or nothing to a probe is not used."""
    async with world(decode=2) as w:
        w.decode[0].admin[path] = scripts.whole(b"{nonsense", 500)
        w.decode[1].admin[path] = scripts.reset
        await w.probe()
        assert (await w.get("/ready")).status == 503
        w.decode[0].admin.clear()
        await w.probe()
        assert (await w.get("/ready")).status == 200
        assert (await w.ask(COMPLETIONS, completion())).status == 200


async def test_an_engine_without_version_or_tokenizer_routes_is_used() -> None:
    """What an engine does not say is left open; it can still serve."""

    def mute(w: World) -> None:
        for engine in w.engines:
            engine.admin |= {"/version": scripts.whole(b"", 404), "/tokenize": scripts.whole(b"", 404)}

    async with world(before=mute) as w:
        assert (await w.get("/ready")).json["details"] == []
        assert (await w.ask(COMPLETIONS, completion())).status == 200


async def test_models_are_merged() -> None:
    """Each model of any engine that serves by itself is listed once, in the engine's own words."""

    def models(w: World) -> None:
        w.prefill[0].models = ["only-prefill", "tiny"]
        w.decode[1].models = ["tiny", "other"]

    async with world(decode=2, before=models) as w:
        answer = await w.get("/v1/models")
        assert answer.status == 200
        assert answer.json["object"] == "list"
        assert [card["id"] for card in answer.json["data"]] == ["tiny", "other"]
        assert answer.json["data"][0] == {"id": "tiny", "object": "model", "root": "./model", "parent": None}
        for engine in w.decode:
            engine.stop()
        await w.probe()
        answer = await w.get("/v1/models")
        assert answer.status == 503
        assert answer.json["error"]["type"] == "ServiceUnavailableError"


async def test_the_metrics_page() -> None:
    """All metrics of the documentation are there after some traffic, and the page is in Prometheus' format."""
    async with world() as w:
        for _ in range(2):
            await w.ask(COMPLETIONS, completion(stream=True))
            await w.ask(CHAT, chat(n=2))
        w.proxy.observers.notify(DeadlinePassed(Wait.QUEUE.value))
        await w.probe()
        await w.probe()
        await w.quiet()
        answer = await w.get("/metrics")
        assert answer.header("content-type") == "text/plain; version=0.0.4; charset=utf-8"
        families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
        labels = {
            "pdproxy_requests": {"model", "endpoint", "outcome"},
            "pdproxy_ttft_seconds": {"path", "le"},
            "pdproxy_itl_seconds": {"le"},
            "pdproxy_phase_seconds": {"phase", "le"},
            "pdproxy_node_inflight": {"node", "role"},
            "pdproxy_node_up": {"node", "role"},
            "pdproxy_kv_handles": {"state"},
            "pdproxy_kv_moved": {"result"},
            "pdproxy_alone": {"reason"},
            "pdproxy_deadline": {"wait"},
        }
        for name, expected in labels.items():
            assert name in families, name
            assert any(set(sample.labels) == expected for sample in families[name].samples), name
        assert w.metric("pdproxy_requests_total", model="tiny", endpoint=COMPLETIONS, outcome="ok") == 2
        assert w.metric("pdproxy_ttft_seconds_count", path="split") == 2
        assert w.metric("pdproxy_ttft_seconds_count", path="alone") == 2
        assert w.metric("pdproxy_node_up", node=w.decode[0].url, role="decode") == 1
        assert w.metric("pdproxy_itl_seconds_count") > 0


async def test_a_models_name_from_a_client_makes_no_time_series() -> None:
    """Names that no engine serves are counted as one."""
    async with world() as w:
        for number in range(3):
            await w.ask(COMPLETIONS, completion(model=f"nope-{number}"))
        page = w.proxy.metrics.page().decode()
        assert "nope" not in page
        assert w.metric("pdproxy_requests_total", model="other", outcome="client") == 3


async def test_the_documentation_lists_the_generating_routes() -> None:
    """/docs and the OpenAPI document show the data path although it never reaches FastAPI."""
    async with world() as w:
        assert (await w.get("/docs")).status == 200
        document = (await w.get("/openapi.json")).json
        assert set(document["paths"]) == {
            "/health", "/ready", "/version", "/metrics", "/v1/models", COMPLETIONS, CHAT
        }  # fmt: skip
        for path in (COMPLETIONS, CHAT):
            operation = document["paths"][path]["post"]
            assert operation["requestBody"]["required"] is True
            assert {"200", "400", "401", "413", "502", "503", "504"} <= set(operation["responses"])


async def test_no_prompt_and_no_key_in_any_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """At the finest level, through good and bad ends, no line holds a prompt, an answer or a key."""
    secret_prompt, secret_key, secret_answer = "PROMPTSECRET" * 4, "KEYSECRET", "ANSWERSECRET"
    caplog.set_level(logging.DEBUG, "pdproxy")
    async with world(decode=2, auth={"api_keys": (secret_key,), "engine_api_key": "ENGINE" + secret_key}) as w:
        for engine in w.decode:
            engine.words = (secret_answer,)
            engine.script(scripts.whole(answers.INTERNAL_500, 500), scripts.streams(then="eof"))
        key = [("authorization", f"Bearer {secret_key}")]
        for body in (
            completion(prompt=secret_prompt),
            completion(prompt=secret_prompt, stream=True),
            completion(prompt=secret_prompt, n=2),
            completion(prompt=[secret_prompt, secret_prompt]),
            completion(prompt={"x": secret_prompt}),
        ):
            await w.ask(COMPLETIONS, body, key)
        await w.ask(COMPLETIONS, json.dumps(completion(prompt=secret_prompt))[:-1].encode(), key)
        await w.ask(COMPLETIONS, completion(), [("authorization", "Bearer WRONG" + secret_key)])
        await w.quiet()
    assert any(record.name == "pdproxy.access" for record in caplog.records)
    for record in caplog.records:
        line = record.getMessage() + str(getattr(record, "fields", "")) + str(record.exc_info or "")
        assert "SECRET" not in line, line
