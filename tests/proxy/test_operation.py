"""What an operator asks the proxy: is it ready, what does it serve, how is it doing."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdproxy import __version__
from pdproxy.fleet import prober
from pdproxy.kit.errors import Wait
from pdproxy.observe.events import DeadlinePassed, NodeChanged
from pdproxy.serving.access.routes import TABLE
from pdproxy.settings.limits import Deadlines
from pdproxy_lab.sim.journal import Request
from tests.fakes import answers, scripts
from tests.fakes.clock import let_loop_time_pass
from tests.fakes.engine import Reply, Script
from tests.fakes.world import CHAT, COMPLETIONS, LONG, World, chat, completion, until, world


async def test_health_and_version() -> None:
    """The process is alive whatever its engines do, and says its version."""
    async with world(probed=False) as w:
        assert ((await w.get("/health")).status, (await w.get("/health")).body) == (200, b"")
        assert (await w.get("/version")).json == {"version": __version__}


async def test_ready_while_starting_and_after() -> None:
    """Not ready before every engine was probed once; then ready, without complaints; then by what
    is up.
    """
    async with world(probed=False) as w:
        starting = await w.get("/ready")
        assert starting.status == 503
        assert starting.json["ready"] is False
        assert "not probed yet" in starting.json["reason"]
        assert w.decode[0].url in starting.json["reason"]
        assert (await w.ask(COMPLETIONS, completion())).status == 503
        await w.probe()
        ready = await w.get("/ready")
        assert (ready.status, ready.json) == (
            200,
            {"ready": True, "state": "ok", "reason": None, "details": []},
        )


async def test_a_balancer_keeps_a_proxy_whose_engines_load() -> None:
    """`/ready/proxy` asks for no engine: a Service would be empty, and an upgrade stop, whenever
    engines load.
    """
    async with world() as w:
        w.decode[0].stop()
        await w.probe()
        assert (await w.get("/ready")).status == 503
        for route, wanted in (
            ("/ready/proxy", {"ready": True, "reason": None}),
            ("/healthcheck", {"status": "ok", "prefill_instances": 1, "decode_instances": 1}),
        ):
            answer = await w.get(route)
            assert (answer.status, answer.json) == (200, wanted)
        w.proxy.leave()
        answer = await w.get("/ready/proxy")
        assert (answer.status, answer.json) == (503, {"ready": False, "reason": "shutting down"})
        assert (await w.get("/healthcheck")).status == 200


async def test_a_proxy_without_keys_takes_no_requests(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    async with world(auth={"api_keys_file": str(keys)}) as w:
        assert (await w.get("/ready/proxy")).status == 200
        keys.write_text("\n")
        async with asyncio.timeout(60):
            while (answer := await w.get("/ready/proxy")).status == 200:
                await asyncio.sleep(0.05)
        assert answer.json["reason"]


async def test_an_engine_that_was_never_up_is_logged_once() -> None:
    """An engine that is down from the beginning has one line in the log, with the reason."""
    async with world(probed=False) as w:
        w.prefill[0].stop()
        await w.probe()
        await w.probe()
        changes = [
            (event.up, event.reason)
            for event in w.events(NodeChanged)
            if event.node == w.prefill[0].url
        ]
        assert changes == [(False, "no connection: Connection refused")]


async def test_ready_says_what_is_down() -> None:
    """Without a prefill engine it is ready, and says what is missing; without a decode engine it is
    not.
    """
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
        assert [up for engine, up in changes if engine == decode] == [True, False, True]


def unanswered(w: World) -> int:
    """How many questions to engines, besides clients' requests, have no answer yet."""
    connectors = [
        one.admin._session.connector for one in w.workers if one.admin._session is not None
    ]
    return sum(len(one._acquired) for one in connectors if one is not None)


ABOUT = ["/metrics", "/v1/models", "/version", "/tokenize"]


async def test_an_engine_that_is_not_healthy_is_down_at_once() -> None:
    """An engine that answers 500 or nothing to the question for its health is not used, until it is
    well again.
    """
    async with world(decode=2) as w:
        w.decode[0].admin["/health"] = scripts.whole(b"", 500)
        w.decode[1].admin["/health"] = scripts.reset
        await w.probe()
        assert (await w.get("/ready")).status == 503
        w.decode[0].admin.clear()
        await w.probe()
        assert (await w.get("/ready")).status == 200
        assert (await w.ask(COMPLETIONS, completion())).status == 200


@pytest.mark.asyncio_loop
@pytest.mark.parametrize("path", ABOUT)
@pytest.mark.parametrize("bad", [scripts.whole(b"{invalid", 500), scripts.reset, scripts.stall])
async def test_a_healthy_engine_stays_up_whatever_else_fails(path: str, bad: Script) -> None:
    """A busy engine may have no time to answer: what is known of it stays, even if it has just
    restarted.
    """
    async with world() as w:
        engine = w.decode[0]
        engine.started += 1
        engine.admin[path] = bad
        probe = asyncio.create_task(w.probe())
        stalled: list[Request] = []
        while bad is scripts.stall and not probe.done():
            waiting = [
                one for one in engine.sim.journal.others if one.path == path and not one.over
            ]
            if waiting and waiting[-1] not in stalled and unanswered(w) == 1:
                stalled.append(waiting[-1])
                let_loop_time_pass(LONG)
            await asyncio.sleep(0.002)
        await probe
        assert (await w.get("/ready")).json == {
            "ready": True,
            "state": "ok",
            "reason": None,
            "details": [],
        }
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert len(w.prefill[0].requests) == 1


@pytest.mark.parametrize("path", ABOUT)
async def test_an_engine_that_was_down_is_asked_again(path: str) -> None:
    """It is used again only once it has answered everything; a failure that may pass is not taken
    for an answer.
    """
    async with world(decode=2) as w:
        engine, other = w.decode
        engine.admin["/health"] = scripts.whole(b"", 500)
        await w.probe()
        engine.be(template="plain")  # another engine on the same port, with the same start time
        engine.admin = {path: scripts.whole(b"", 503)}
        await w.probe()
        details = (await w.get("/ready")).json["details"]
        assert any(engine.url in line and f"{path} answered 503" in line for line in details), (
            details
        )
        engine.admin.clear()
        await w.probe()
        details = (await w.get("/ready")).json["details"]
        assert len(details) == 1
        assert f"{w.prefill[0].url} and {engine.url} are not paired" in details[0]
        for _ in range(2):
            await w.ask(CHAT, chat())
        assert (len(engine.requests), len(other.requests)) == (0, 2)


async def test_late_answers_count_only_in_a_row() -> None:
    """Two late answers and a good one, over and over, leave an engine up."""
    async with world() as w:
        for _ in range(3):
            w.decode[0].admin["/health"] = scripts.stall
            w.proxy.admin.deadlines = Deadlines(probe=0.25)
            for _ in range(2):
                await w.proxy.prober.probe(w.proxy.engines[w.decode[0].url], scrape=False)
            w.decode[0].admin.clear()
            w.proxy.admin.deadlines = Deadlines(probe=LONG)
            await w.probe()
        assert [event.up for event in w.events(NodeChanged) if event.node == w.decode[0].url] == [
            True
        ]


async def test_an_early_probe_waits_for_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many reasons to look at an engine make one probe, and the next one comes no sooner than the
    gap.
    """
    monkeypatch.setattr(prober, "MIN_GAP", 0.2)
    async with world() as w:
        asked: list[float] = []

        async def health(reply: Reply) -> None:
            asked.append(time.monotonic())
            w.proxy.prober.soon(w.proxy.engines[w.decode[0].url])
            await reply.whole(b"")

        w.decode[0].admin["/health"] = health
        for _ in range(50):
            w.proxy.prober.soon(w.proxy.engines[w.decode[0].url])
        await until(lambda: len(asked) >= 3)
        assert min(b - a for a, b in pairwise(asked)) > 0.15


async def test_an_engine_without_metrics_is_used() -> None:
    """An engine that shows no metrics can serve; /ready says that its KV can't be audited."""

    def without_routes(w: World) -> None:
        for engine in w.engines:
            engine.admin["/metrics"] = scripts.whole(b"", 404)

    async with world(before=without_routes) as w:
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert len(w.prefill[0].requests) == 1
        ready = (await w.get("/ready")).json
        assert ready["ready"]
        assert [line.split(": ")[1] for line in ready["details"]] == [
            "its /metrics do not say where prompt tokens come from"
        ]


async def test_an_engine_that_wants_a_key_is_reported() -> None:
    """A probe that is answered 401 names the setting that is missing."""

    def locked(w: World) -> None:
        w.decode[0].admin["/v1/models"] = scripts.whole(b'{"error":"Unauthorized"}', 401)

    async with world(before=locked) as w:
        assert "set auth.engine_api_key" in (await w.get("/ready")).json["reason"]


async def test_an_engine_without_version_or_tokenizer_routes_is_used() -> None:
    """What an engine does not say is left open; it can still serve."""

    def without_routes(w: World) -> None:
        for engine in w.engines:
            engine.admin |= {
                "/version": scripts.whole(b"", 404),
                "/tokenize": scripts.whole(b"", 404),
            }

    async with world(before=without_routes) as w:
        assert (await w.get("/ready")).json["details"] == []
        assert (await w.ask(COMPLETIONS, completion())).status == 200


@pytest.mark.parametrize(
    ("reported", "known"),
    [
        ("4096", 4096),
        ("null", None),
        ("0", None),
        ("-1", None),
        ("4096.0", None),
        ('"4096"', None),
        ("9" * 99, None),
    ],
)
async def test_an_engine_that_reports_its_longest_prompt_in_another_way_is_used(
    reported: str, known: int | None
) -> None:
    """Only what is a length is taken for one."""

    def reports(w: World) -> None:
        w.prefill[0].admin["/v1/models"] = scripts.whole(
            b'{"data":[{"id":"tiny","max_model_len":%b}]}' % reported.encode()
        )

    async with world(before=reports) as w:
        evidence = w.proxy.engines[w.prefill[0].url].in_ledger.evidence
        assert evidence is not None
        assert evidence.max_model_len == known
        assert (await w.ask(COMPLETIONS, completion())).status == 200


@pytest.mark.parametrize(
    "body",
    [b'{"data":[{"no":"id"}]}', b'{"data":[{"id":"\xff"}]}', b"[", b'{"data":' + b"[" * 5000],
)
async def test_an_engines_invalid_list_leaves_the_models_of_others(body: bytes) -> None:
    """A list that can't be read is left out; where there is no other, the error says so."""
    async with world(decode=2) as w:
        w.decode[0].admin["/v1/models"] = scripts.whole(body)
        answer = await w.get("/v1/models")
        assert (answer.status, [card["id"] for card in answer.json["data"]]) == (200, ["tiny"])
        w.decode[1].admin["/v1/models"] = scripts.whole(body)
        assert (await w.get("/v1/models")).status == 502


async def test_models_are_asked_for_with_the_clients_key() -> None:
    """Where clients bring no key of ours, ours does not open the engines to them."""
    async with world(auth={"engine_api_key": "ours"}, facts={"api_key": "ours"}) as w:
        assert (await w.get("/v1/models")).status == 401
        assert (await w.get("/v1/models", [("authorization", "Bearer ours")])).status == 200


async def test_models_are_merged() -> None:
    """Each model of any engine that serves by itself is listed once, as the engine describes it."""

    def models(w: World) -> None:
        w.prefill[0].models = ["only-prefill", "tiny"]
        w.decode[1].models = ["tiny", "other"]

    async with world(decode=2, before=models) as w:
        answer = await w.get("/v1/models")
        assert answer.status == 200
        assert answer.json["object"] == "list"
        assert list(answer.json) == list(await w.decode[0].get("/v1/models")) == ["object", "data"]
        assert [card["id"] for card in answer.json["data"]] == ["tiny", "other"]
        own = (await w.decode[0].get("/v1/models"))["data"][0]
        same = ("id", "object", "root", "parent", "max_model_len")
        assert [answer.json["data"][0][key] for key in same] == [own[key] for key in same]
        for engine in w.decode:
            engine.stop()
        await w.probe()
        answer = await w.get("/v1/models")
        assert answer.status == 503
        assert answer.json["error"]["type"] == "ServiceUnavailableError"


async def test_the_metrics_page() -> None:
    """All metrics of the documentation are there after some traffic, and the page is in Prometheus'
    format.
    """
    async with world() as w:
        for _ in range(2):
            await w.ask(COMPLETIONS, completion(stream=True))
            await w.ask(CHAT, chat(return_prompt_text=True, stream=True))
        w.proxy.observers.notify(DeadlinePassed(Wait.QUEUE.value))
        await w.quiet()
        for _ in range(3):
            await w.probe()
        answer = await w.get("/metrics")
        assert answer.header("content-type") == "text/plain; version=0.0.4; charset=utf-8"
        families = {
            family.name: family for family in text_string_to_metric_families(answer.body.decode())
        }
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
        assert (
            w.metric("pdproxy_requests_total", model="tiny", endpoint=COMPLETIONS, outcome="ok")
            == 2
        )
        assert w.metric("pdproxy_ttft_seconds_count", path="split") == 2
        assert w.metric("pdproxy_ttft_seconds_count", path="alone") == 2
        assert w.metric("pdproxy_node_up", node=w.decode[0].url, role="decode") == 1
        assert w.metric("pdproxy_itl_seconds_count") > 0


async def test_a_models_name_from_a_client_makes_no_time_series() -> None:
    """Names that no engine serves are counted as one."""
    async with world() as w:
        for number in range(3):
            await w.ask(COMPLETIONS, completion(model=f"nope-{number}"))
        page = w.page().decode()
        assert "nope" not in page
        assert w.metric("pdproxy_requests_total", model="other", outcome="client") == 3


async def test_the_documentation_lists_the_generating_routes() -> None:
    """/docs and the OpenAPI document show the data path although it never reaches FastAPI."""
    async with world() as w:
        assert (await w.get("/docs")).status == 200
        document = (await w.get("/openapi.json")).json
        operation = {"/health", "/ready", "/version", "/metrics", "/ping"}
        of_it = {"/docs", "/openapi.json"}
        assert (
            set(document["paths"])
            == {*operation, COMPLETIONS, CHAT, *(entry.path for entry in TABLE)} - of_it
        )
        for path in (COMPLETIONS, CHAT):
            operation = document["paths"][path]["post"]
            assert operation["requestBody"]["required"] is True
            assert {"200", "400", "401", "413", "502", "503", "504"} <= set(operation["responses"])


def _saying(text: str) -> Script:
    async def script(reply: Reply) -> None:
        reply.engine.loaded(reply.request)
        await reply.whole(answers.whole(False, [1], text, 1))

    return script


async def test_no_prompt_and_no_key_in_any_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """At the finest level, through good and bad ends, no line holds a prompt, an answer or a
    key.
    """
    secret_prompt, secret_key, secret_answer = "PROMPTSECRET" * 4, "KEYSECRET", "ANSWERSECRET"
    caplog.set_level(logging.DEBUG, "pdproxy")
    async with world(
        decode=2, auth={"api_keys": (secret_key,), "engine_api_key": "ENGINE" + secret_key}
    ) as w:
        for engine in w.decode:
            engine.default = _saying(secret_answer)
            engine.script(scripts.whole(answers.INTERNAL_500, 500), scripts.streams(then="eof"))
        key = [("authorization", f"Bearer {secret_key}")]
        for body in (
            completion(prompt=secret_prompt),
            completion(prompt=secret_prompt, stream=True),
            completion(prompt=secret_prompt, n=2, temperature=1),
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
