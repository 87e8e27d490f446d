"""What an operator learns from metrics, log lines and /ready: times of each phase, who was refused
and why, what is degraded.
"""

import asyncio
import logging
from pathlib import Path

import pytest

from pdproxy.observe.events import RequestEnded
from pdproxy.observe.few_lines import PER_MINUTE, PER_SECOND, FewLines
from pdproxy.observe.logs import access_fields
from pdproxy.observe.requests import PHASES
from pdproxy.settings.listen import Cors
from pdproxy.web.wrong_keys import AT_ONCE
from tests.fakes import answers, scripts
from tests.fakes.client import bearer
from tests.fakes.clock import ManualClock
from tests.fakes.engine import Reply, prefill
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, until, world
from tests.proxy.test_keys import head

MESSAGES = "/v1/messages"


def phases(w: World) -> dict[str, int]:
    """How often each phase was measured, without queue and total."""
    counts = {
        phase: int(w.metric("pdproxy_phase_seconds_count", phase=phase)) for phase, _ in PHASES
    }
    return {
        phase: count for phase, count in counts.items() if count and phase not in ("queue", "total")
    }


def lines(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, object]]:
    return [record.fields for record in caplog.records if record.getMessage() == message]  # type: ignore[attr-defined]


# -- phases


@pytest.mark.parametrize(
    ("fields", "path", "measured"),
    [
        ({"stream": True}, "split", {"prefill": 1, "kv": 1, "decode": 1}),
        ({}, None, {"prefill": 1, "decode_whole": 1}),
        (
            {"stream": True, "n": 2, "temperature": 1},
            "split",
            {"prefill": 1, "kv": 1, "decode": 1},
        ),
        ({"n": 2, "temperature": 1}, None, {"prefill": 1, "decode_whole": 1}),
        ({"stream": True, "return_prompt_text": True}, "alone", {"alone": 1, "decode": 1}),
        ({"return_prompt_text": True}, None, {"alone_whole": 1}),
    ],
)
async def test_phases_and_first_tokens_of_streams_and_whole_answers(
    fields: dict[str, object], path: str | None, measured: dict[str, int]
) -> None:
    """A whole answer has no first token, and its transfer is not known apart; phases never add up
    to more than the total.
    """
    async with world() as w:
        assert (await w.ask(CHAT, chat(**fields))).status == 200
        ended = await w.ended()
        assert phases(w) == measured
        counts = {
            one: w.metric("pdproxy_ttft_seconds_count", path=one) for one in ("split", "alone")
        }
        assert counts == {one: float(one == path) for one in counts}
        (leg,) = ended.legs
        parts = [leg.prefill_s, leg.first_s, leg.decode_s, leg.whole_s]
        assert 0 < sum(part for part in parts if part is not None) <= ended.total_s - ended.queue_s
        for phase in measured:
            engine = leg.prefill if phase == "prefill" else leg.decode
            assert engine is not None
            assert w.metric("pdproxy_node_legs_total", node=engine, phase=phase) == 1
            assert w.metric("pdproxy_node_leg_seconds_total", node=engine, phase=phase) > 0


async def test_a_streams_phases_are_divided_at_its_first_data() -> None:
    """The wait for the first data is `kv`, the wait for the rest is `decode`."""
    clock, go = ManualClock(), asyncio.Event()
    async with world(clock=clock) as w:
        w.decode[0].script(scripts.after_word(go, _rest))
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True))
        answer = await client.head()
        await clock.advance(3)
        go.set()
        await client.rest(answer)
        (leg,) = (await w.ended()).legs
        assert (leg.first_s, leg.whole_s) == (0, None)
        assert leg.decode_s == pytest.approx(3)


async def _rest(reply: Reply) -> None:
    await reply.pieces(answers.end())
    await reply.finish()


@pytest.mark.parametrize("stream", [False, True])
async def test_phases_of_a_passed_route(stream: bool) -> None:
    """A route that one engine serves whole is measured as other requests that one engine serves."""
    async with world() as w:
        body = {
            "model": "tiny",
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "x"}],
            "stream": stream,
        }
        assert (await w.ask(MESSAGES, body)).status == 200
        await w.ended()
        assert phases(w) == ({"alone": 1, "decode": 1} if stream else {"alone_whole": 1})
        assert w.metric("pdproxy_ttft_seconds_count") == stream


# -- access lines


async def test_the_access_line_of_a_stream_and_of_a_whole_answer() -> None:
    """Engines apart, client, key, method and stream; times by phase; fields without a value are
    left out.
    """
    async with world(auth={"api_keys": ("mine", "other")}) as w:
        await w.ask(COMPLETIONS, completion(stream=True), bearer("other"))
        await w.ask(COMPLETIONS, completion(), bearer("mine"))
        await w.ended(2)
        stream, whole = (dict(access_fields(one)) for one in w.events(RequestEnded))
        for fields, key, is_stream in ((stream, "settings:2", True), (whole, "settings:1", False)):
            expected = {
                "client": "127.0.0.1",
                "key": key,
                "method": "POST",
                "path": COMPLETIONS,
                "stream": is_stream,
            }
            assert {name: fields[name] for name in expected} == expected
            assert (fields["prefill"], fields["decode"]) == (w.prefill[0].url, w.decode[0].url)
            assert fields["attempts"] == 1
            assert {"queue_ms", "prefill_ms", "decode_ms", "total_ms"} <= set(fields)
        assert {"kv_ms", "first_ms"} <= set(stream)
        assert not {"kv_ms", "first_ms", "alone_ms", "why_alone"} & set(whole)


async def test_attempts_count_engines_that_were_asked() -> None:
    """One engine was asked: one attempt, although no pair was found before. None was asked:
    none.
    """
    async with world() as w:
        w.prefill[0].stop()
        await w.probe()
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        (leg,) = (await w.ended()).legs
        assert (leg.prefill, leg.attempts, leg.why_alone) == (None, 1, "no_pair")
        w.decode[0].stop()
        await w.probe()
        assert (await w.ask(COMPLETIONS, completion())).status == 503
        assert access_fields(await w.ended(2))["attempts"] == 0


async def test_an_address_that_a_trusted_proxy_names_is_the_clients() -> None:
    """The line shows the client, not the proxy before us."""
    from msgspec.structs import replace

    async with world(
        adjust=lambda one: replace(
            one, listen=replace(one.listen, trusted_proxies=("127.0.0.0/8",))
        )
    ) as w:
        await w.ask(COMPLETIONS, completion(), [("x-forwarded-for", "192.0.2.7")])
        assert (await w.ended()).client == "192.0.2.7"


# -- refusals


@pytest.mark.parametrize(("given", "reason"), [(None, "no_key"), ("Bearer WRONGKEY", "wrong_key")])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", COMPLETIONS), ("POST", MESSAGES), ("GET", "/v1/models")]
)
async def test_a_refused_key_is_counted_and_logged(
    caplog: pytest.LogCaptureFixture, method: str, path: str, given: str | None, reason: str
) -> None:
    """Once, on routes of all kinds: a count by its reason, and a line with the client's address and
    without the key.
    """
    async with world(auth={"api_keys": ("mine",)}) as w:
        headers = [("authorization", given)] if given else []
        assert (
            await w.ask(path, completion() if method == "POST" else b"", headers, method=method)
        ).status == 401
        await until(lambda: lines(caplog, "refused"))
        assert lines(caplog, "refused") == [{"reason": reason, "client": "127.0.0.1"}]
        assert w.metric("pdproxy_early_refusals_total", reason=reason) == 1
        assert w.metric("pdproxy_early_refusals_total") == 1
        assert "WRONGKEY" not in caplog.text


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_a_flood_of_refusals_does_not_fill_the_log(
    key: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some lines of a client per minute; the others are counted, and the next line states their
    number.
    """
    now = 600.0
    monkeypatch.setattr("pdproxy.observe.logs.time.monotonic", lambda: now)
    caplog.set_level(logging.INFO)
    count = 2 * AT_ONCE  # the answer is 401, then 429
    async with world(auth={"api_keys": ("mine",)}) as w:

        async def refused() -> None:
            assert (await w.ask(COMPLETIONS, completion(), bearer(key) if key else [])).status in (
                401,
                429,
            )

        for _ in range(count):
            await refused()
            now += 59 / count
        await until(lambda: w.metric("pdproxy_requests_total") == count)
        assert len(lines(caplog, "refused")) + len(lines(caplog, "request")) == PER_MINUTE
        left_out = 2 * count - PER_MINUTE
        assert w.metric("pdproxy_early_refusals_total") == count
        assert w.metric("pdproxy_refused_not_logged_total") == left_out
        assert (await w.ask(COMPLETIONS, completion(), bearer("mine"))).status == 200
        await until(lambda: lines(caplog, "request")[-1]["status"] == 200)
        now += 1
        await refused()
        assert lines(caplog, "refused")[-1]["not_logged_before"] == left_out


def test_lines_of_many_clients_are_few_per_second() -> None:
    now = 0.0
    few = FewLines(lambda: now)
    assert [few.takes(str(number)) for number in range(PER_SECOND + 1)] == [True] * PER_SECOND + [
        False
    ]
    now += 1
    assert few.takes(str(PER_SECOND))
    assert (few.left_out, few.unreported(), few.unreported()) == (1, 1, 0)


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES])
async def test_a_body_that_is_refused_is_counted(path: str) -> None:
    """A large one, a slow one and one without space were in no metric."""
    clock = ManualClock()
    async with world(limits={"max_body_bytes": 4000, "max_buffered_bytes": 4100}, clock=clock) as w:
        assert (await w.ask(path, b"x" * 4001)).status == 413
        assert w.metric("pdproxy_early_refusals_total", reason="body_too_large") == 1
        first = await w.client()
        first.send(head(path, 3500) + b"x" * 3000)
        await until(lambda: w.body_bytes == 3000)
        assert (await w.ask(path, b"x" * 3900)).status == 503
        assert w.metric("pdproxy_early_refusals_total", reason="no_space") == 1
        await clock.reach(w.proxy.settings.deadlines.client_body)
        assert (await first.answer()).status == 408
        assert w.metric("pdproxy_early_refusals_total", reason="body_slow") == 1
        assert w.metric("pdproxy_early_refusals_total") == 3


async def test_a_connection_that_is_refused_is_counted() -> None:
    """Too many connections, a head too large, a path too long, no HTTP."""
    go = asyncio.Event()
    async with world(limits={"max_connections": 1, "max_header_bytes": 2000}) as w:
        for sent, status, reason in (
            (b"GET / HTTP/1.1\r\nx: " + b"x" * 3000 + b"\r\n\r\n", 431, "head_too_large"),
            (b"GET /" + b"x" * 900 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414, "path_too_long"),
            (b"nothing\r\n\r\n", 400, "bad_http"),
        ):
            assert (await w.exchange(sent)).status == status
            assert w.metric("pdproxy_early_refusals_total", reason=reason) == 1
            await until(lambda: w.open_connections == 0)
        w.prefill[0].script(scripts.gate(go, prefill))
        busy = await w.client()
        busy.post(COMPLETIONS, completion())
        await w.prefill[0].asked()
        assert (await (await w.client()).answer()).status == 503
        assert w.metric("pdproxy_early_refusals_total", reason="connections") == 1
        go.set()
        assert (await busy.answer()).status == 200
        assert w.metric("pdproxy_early_refusals_total") == 4


# -- readiness


async def test_ready_is_degraded_without_prefill_engines() -> None:
    """It serves, and no prompt is split: 200, `degraded`, and why; `ok` again once one is up."""
    async with world() as w:
        assert (await w.get("/ready")).json["state"] == "ok"
        w.prefill[0].stop()
        await w.probe()
        ready = await w.get("/ready")
        assert (ready.status, ready.json["ready"], ready.json["state"]) == (200, True, "degraded")
        assert ready.json["reason"] is None
        assert (
            ready.json["details"][0]
            == "no prefill engine can be used: every prompt is served by one engine alone"
        )
        assert w.prefill[0].url in ready.json["details"][1]
        assert [
            w.metric("pdproxy_state", state=one) for one in ("ok", "degraded", "not_ready")
        ] == [0, 1, 0]
        assert w.metric("pdproxy_pool_splits", pool=w.proxy.pools[0].name) == 0
        w.decode[0].stop()
        await w.probe()
        ready = await w.get("/ready")
        assert (ready.status, ready.json["ready"], ready.json["state"]) == (503, False, "not_ready")
        assert w.metric("pdproxy_state", state="not_ready") == 1
        await w.decode[0].listen()
        await w.prefill[0].listen()
        await w.probe()
        assert (await w.get("/ready")).json["state"] == "ok"
        assert w.metric("pdproxy_pool_splits", pool=w.proxy.pools[0].name) == 1


async def test_ready_is_degraded_if_no_pair_fits() -> None:
    """Prefill and decode engines are up, and none of them go together."""
    async with world(probed=False) as w:
        w.prefill[0].admin["/version"] = scripts.whole(b'{"version":"0.9.9"}')
        w.proxy.start()
        await until(lambda: all(engine.probed for engine in w.proxy.ledger.engines))
        ready = (await w.get("/ready")).json
        assert (ready["ready"], ready["state"]) == (True, "degraded")
        assert "can be paired" in ready["details"][0]


async def test_a_pool_without_prefill_engines_is_not_degraded() -> None:
    """Nothing is to be split there."""
    async with world(prefill=0, decode=0, aggregated=1) as w:
        assert (await w.get("/ready")).json == {
            "ready": True,
            "state": "ok",
            "reason": None,
            "details": [],
        }


# -- browsers


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES, "/health"])
async def test_a_page_on_another_site_may_read_our_headers(path: str) -> None:
    """The request's id, and when to try again."""
    async with world(cors=Cors(allowed_origins=("https://a.example",))) as w:
        method = "GET" if path == "/health" else "POST"
        answer = await w.ask(path, completion(), [("origin", "https://a.example")], method=method)
        shown = answer.header("access-control-expose-headers") or ""
        assert {name.strip().lower() for name in shown.split(",")} == {
            "x-request-id",
            "retry-after",
        }


# -- keys


@pytest.mark.parametrize("content", ["", "\n\n", "# none\n  \n#\n"])
async def test_an_emptied_key_file_means_that_no_key_is_valid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    """Every request is refused; /ready and one log line say so; a key in the file is valid
    again.
    """
    path = tmp_path / "keys"
    path.write_text("one\n")
    async with world(auth={"api_keys_file": str(path)}) as w:
        assert (await w.ask(COMPLETIONS, completion(), bearer("one"))).status == 200
        path.write_text(content)
        for _ in range(3):
            w.look_at_files()
        for headers in ([], bearer("one")):
            for route in (COMPLETIONS, MESSAGES):
                assert (await w.ask(route, completion(), headers)).status == 401
            assert (await w.get("/v1/models", headers)).status == 401
        ready = await w.get("/ready")
        assert (ready.status, ready.json["state"]) == (503, "not_ready")
        assert (
            ready.json["reason"]
            == f"auth.api_keys_file: {path}: holds no key: every request is refused"
        )
        told = [
            one
            for one in caplog.records
            if one.name == "pdproxy.files" and one.levelno == logging.ERROR
        ]
        assert [one.getMessage() for one in told] == [ready.json["reason"]]
        path.write_text("# back\ntwo\n")
        w.look_at_files()
        assert (await w.ask(COMPLETIONS, completion(), bearer("two"))).status == 200
        assert (await w.ended(len(w.events(RequestEnded)))).key == "file:2"
        assert (await w.get("/ready")).json["details"] == []


async def test_an_emptied_key_file_leaves_the_keys_of_the_settings(tmp_path: Path) -> None:
    """Those are still valid, and so the proxy is ready."""
    path = tmp_path / "keys"
    path.write_text("one\n")
    async with world(auth={"api_keys": ("fixed",), "api_keys_file": str(path)}) as w:
        path.write_text("")
        w.look_at_files()
        found = [
            (await w.ask(COMPLETIONS, completion(), bearer(key))).status for key in ("fixed", "one")
        ]
        assert found == [200, 401]
        assert (await w.get("/ready")).status == 200
