"""The admin API: engines are listed, added, drained and removed by it, and others see what
happened.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from pdproxy.app.admin import AdminServer, AdminSocket, admin_socket
from pdproxy.app.reloading import SettingsSource
from pdproxy.fleet import entries, membership, prober
from pdproxy.fleet.entries import engine_id
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.listen import AdminPlace, Listen
from pdproxy.settings.load import load
from pdproxy.settings.schema import Settings
from pdproxy.upstream.metrics_page import NO_METRICS
from tests.fakes import answers, scripts
from tests.fakes.admin import BASE, Admin, admin
from tests.fakes.client import Client
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.followed import followed
from tests.fakes.scripts import WORD
from tests.fakes.world import COMPLETIONS, TEXT, completion, until, world
from tests.proxy.test_membership import gone, started, up


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK", 0.01)
    monkeypatch.setattr(prober, "MIN_GAP", 0.01)


def fields(engine: FakeEngine, **more: Any) -> dict[str, Any]:
    """The body that adds an engine."""
    return {"url": engine.url, "role": engine.role, **more}


async def entry(api: Admin, engine: FakeEngine) -> dict[str, Any]:
    """An engine as the API shows it."""
    found: dict[str, Any] = await api.get(f"/engines/{engine_id(engine.url)}")
    return found


async def _rest(reply: Reply) -> None:
    await reply.pieces(WORD, answers.end())
    await reply.finish()


# -- engines


async def test_an_engine_comes_serves_and_goes() -> None:
    """Its stream ends well, and the answers say at each step what is the case."""
    async with world(decode=1) as w, admin(w) as api:
        new = await started(w, "decode")
        added = await api.post("/engines", fields(new, labels={"rack": "7"}))
        assert (added.status, added.json["result"]) == (201, "added")
        assert "until this process ends" in added.json["note"]
        shown = added.json["engine"]
        assert (shown["source"], shown["state"], shown["labels"]) == (
            "admin",
            "joining",
            {"rack": "7"},
        )
        await up(w, new)
        shown = await entry(api, new)
        assert shown["health"] == {"state": "slow_start", "reason": None}
        assert (shown["state"], shown["breaker"]["places"]) == ("warming", 2)
        assert shown["pairs"] == {"paired": 1, "not_paired": [], "not_paired_count": 0}
        assert shown["models"] == ["tiny"]

        go = asyncio.Event()
        new.script(scripts.after_word(go, _rest))
        client = await w.client()
        for other in w.decode[:1]:
            w.proxy.membership.drain(other.url, "test")
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        assert await client.piece() == WORD
        w.proxy.membership.undrain(w.decode[0].url, "test")
        removed = await api.delete(f"/engines/{shown['id']}?seconds=60")
        assert (removed.status, removed.json["result"]) == (202, "removing")
        drain = (await entry(api, new))["drain"]
        assert (drain["by"], drain["removes"], drain["waits_for"]) == ("admin", True, "requests")
        assert 0 < drain["left_s"] <= 60
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        again = await api.post("/engines", fields(new, labels={"rack": "7"}))
        assert (again.status, again.json["result"]) == (200, "serving_again")
        assert (await api.delete(f"/engines/{shown['id']}")).status == 202
        go.set()
        assert (await client.rest(head)).body == WORD + answers.end()
        await gone(w, new.url)
        assert (await api.ask("GET", f"{BASE}/engines/{shown['id']}")).status == 404
        assert w.metric("pdproxy_admin_requests_total", result="done") >= 6


async def test_maintenance() -> None:
    """Drained and kept, an engine of the settings waits until it is undrained, and another reload
    does not change that.
    """
    async with world(decode=2) as w, admin(w) as api:
        name = engine_id(w.decode[0].url)
        drained = await api.post(f"/engines/{name}/drain", {"seconds": 5})
        assert (drained.status, drained.json["result"]) == (202, "draining")
        await until(lambda: w.proxy.membership.members[w.decode[0].url].drain.over)  # type: ignore[union-attr]
        shown = await entry(api, w.decode[0])
        assert (shown["state"], shown["source"]) == ("drained", "settings")
        assert (shown["drain"]["removes"], shown["drain"]["waits_for"]) == (False, None)
        assert (await api.post(f"/engines/{name}/undrain")).json["result"] == "undrained"
        twice = await api.post(f"/engines/{name}/undrain")
        assert (twice.status, twice.json["error"]["type"]) == (409, "ConflictError")
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT


async def test_what_another_source_owns() -> None:
    """It can be drained, and not removed; the answer names the owner. What both want stays until
    neither does.
    """
    async with world() as w, admin(w) as api:
        url, name = w.decode[0].url, engine_id(w.decode[0].url)
        for refused in (
            await api.delete(f"/engines/{name}"),
            await api.delete(f"/engines/{name}?at_once=true"),
            await api.post(f"/engines/{name}/drain", {"keep": False}),
            await api.post("/engines", fields(w.decode[0], labels={"a": "b"})),
        ):
            assert refused.status == 409
            assert refused.json["error"]["owner"] == "settings"
            assert "was added by settings" in refused.json["error"]["message"]
        wanted = await api.post("/engines", fields(w.decode[0]))
        assert (wanted.status, wanted.json["result"]) == (200, "wanted")
        assert (await entry(api, w.decode[0]))["also_wanted_by"] == ["admin"]
        for worker in w.workers:
            assert not worker.membership.remove(url, "settings")
        assert (await entry(api, w.decode[0]))["source"] == "admin"
        for worker in w.workers:
            worker.membership.add(worker.membership.members[url].settings, "dns://engines:8000")
        given_up = await api.delete(f"/engines/{name}")
        assert (given_up.status, given_up.json["result"]) == (200, "not_wanted")
        assert (await entry(api, w.decode[0]))["source"] == "dns://engines:8000"
        held = {url}
        for worker in w.workers:
            worker.engines.keep_known(lambda: held)  # or it would be gone before the next question
            worker.membership.drain(url, "dns://engines:8000", removes=True)
        drained = await api.post(f"/engines/{name}/drain")
        assert (drained.status, drained.json["result"]) == (202, "removing"), (
            "it can't be undrained"
        )
        leaving = await api.post(f"/engines/{name}/undrain")
        assert leaving.json["error"]["owner"] == "dns://engines:8000"
        held.clear()


async def test_an_engine_added_here_survives_a_reload(tmp_path: Path) -> None:
    """The file of the settings gives up only what it has named."""
    path = tmp_path / "pdproxy.yaml"
    async with world(decode=2) as w, admin(w) as api:
        rows = [f"  - {{url: {one.url}, role: {one.role}}}\n" for one in w.engines]
        path.write_text("pools:\n- nodes:\n" + "".join(rows))
        source = SettingsSource(load(path, {}), lambda: load(path, {}), [path])
        every = [followed(w, source, api.log)]
        new = await started(w, "decode")
        assert (await api.post("/engines", fields(new))).status == 201
        path.write_text("pools:\n- nodes:\n" + "".join(rows[:-1]))
        for reloading in every:
            await reloading.look(asked=True)
        await gone(w, w.decode[1].url)
        assert (await entry(api, new))["source"] == "admin"
        assert not [text for reloading in every for text in reloading.shortcomings()]


async def test_why_engines_are_not_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry says with how many it is paired, and with which ones not, and why."""
    async with world(prefill=2, decode=1) as w, admin(w) as api:
        other = await started(w, "decode", version="9.9")
        await api.post("/engines", fields(other))
        await up(w, other)
        shown = {one["url"]: one["pairs"] for one in (await api.get("/engines"))["engines"]}
        assert shown[w.decode[0].url] == {"paired": 2, "not_paired": [], "not_paired_count": 0}
        wrong = shown[other.url]
        assert (wrong["paired"], wrong["not_paired_count"]) == (0, 2)
        assert "different versions" in wrong["not_paired"][0]["why"]
        monkeypatch.setattr(entries, "MAX_NOT_PAIRED", 1)
        listed = {one["url"]: one["pairs"] for one in (await api.get("/engines"))["engines"]}
        assert (len(listed[other.url]["not_paired"]), listed[other.url]["not_paired_count"]) == (
            1,
            2,
        )
        assert len((await entry(api, other))["pairs"]["not_paired"]) == 2
        assert {one["pairs"] for one in (await api.get("/engines?pairs=false"))["engines"]} == {
            None
        }
        monkeypatch.setattr(entries, "MAX_WITH_PAIRS", 3)
        monkeypatch.setattr(entries, "AT_ONCE", 1)
        assert {one["pairs"] for one in (await api.get("/engines"))["engines"]} == {None}


# -- what is refused


WRONG: list[tuple[str, str, object, int, str]] = [
    ("POST", "/engines", {"role": "decode"}, 400, "url: missing"),
    ("POST", "/engines", {"url": "http://127.0.0.1:9"}, 400, "role: missing"),
    ("POST", "/engines", {"url": 3, "role": "decode"}, 400, "url: expected text"),
    (
        "POST",
        "/engines",
        {"url": "127.0.0.1:9", "role": "decode"},
        400,
        "expected http://host:port",
    ),
    ("POST", "/engines", {"url": "http://127.0.0.1:9/v1", "role": "decode"}, 400, "not even /v1"),
    (
        "POST",
        "/engines",
        {"url": "http://127.0.0.1:9", "role": "router"},
        400,
        "role: expected prefill or decode",
    ),
    (
        "POST",
        "/engines",
        {"url": "http://127.0.0.1:9", "role": "decode", "rols": 1},
        400,
        "unknown key",
    ),
    (
        "POST",
        "/engines",
        {"url": "http://127.0.0.1:9", "role": "decode", "api_key_file": "/etc/passwd"},
        400,
        "files of",
    ),
    (
        "POST",
        "/engines",
        {"url": "https://127.0.0.1:9", "role": "decode", "tls": {"ca": "/x"}},
        400,
        "tls.ca: files",
    ),
    (
        "POST",
        "/engines",
        {"url": "http://127.0.0.1:9", "role": "decode", "facts": {"profile": "x"}},
        400,
        "facts.profile",
    ),
    (
        "POST",
        "/engines",
        {"url": "http://127.0.0.1:9", "role": "decode", "sources": ["http://x:1"]},
        400,
        "no prefill",
    ),
    (
        "POST",
        "/engines",
        {"url": "http://127.0.0.1:9", "role": "decode", "labels": {"a": "x" * 4096}},
        400,
        "labels: more",
    ),
    ("POST", "/engines", [1], 400, "expected a JSON object"),
    ("POST", "/engines", b"{", 400, "no JSON"),
    ("POST", "/engines", b"[" * 60_000, 400, "no JSON"),
    ("POST", "/engines", b'{"url": NaN}', 400, "no JSON"),
    ("POST", "/engines", b'{"url": "a", "url": "b"}', 400, "given twice"),
    ("POST", "/engines", b'{"url": "\xff"}', 400, "no JSON"),
    ("POST", "/engines", b'{"url": "\\ud800", "role": "decode"}', 400, "letters beyond ASCII"),
    ("POST", "/engines", b'{"url": {"a": "b"}, "role": "decode"}', 400, "url: expected text"),
    ("POST", "/engines", b'{"url": "http://a:1", "role": "\\ud800"}', 400, "role: expected"),
    (
        "POST",
        "/engines",
        b'{"url": "http://a:1", "role": "decode", "x": 1' + b"0" * 400 + b"}",
        400,
        "unknown key",
    ),
    ("POST", "/engines", b" " * 70_000, 413, "larger than"),
    ("POST", "/engines?x=1", {}, 400, "unknown parameter"),
    (
        "POST",
        "/engines/ID/drain",
        {"seconds": -1},
        400,
        "seconds: expected a number from 0 to 604800",
    ),
    ("POST", "/engines/ID/drain", {"seconds": "1"}, 400, "seconds: expected"),
    ("POST", "/engines/ID/drain", {"keep": 1}, 400, "keep: expected true"),
    ("POST", "/engines/ID/drain", {"keeps": True}, 400, "did you mean keep"),
    ("DELETE", "/engines/ID?at_once=maybe", b"", 400, "expected true or false"),
    ("DELETE", "/engines/ID?seconds=inf", b"", 400, "expected a number"),
    ("DELETE", "/engines/ID?seconds=nan", b"", 400, "expected a number"),
    ("PUT", "/log_level", {"level": "loud"}, 400, "level: expected debug"),
    ("PUT", "/log_level", {}, 400, "level: missing"),
    ("GET", "/requests?limit=257", b"", 400, "limit: expected a number from 0 to 256"),
    ("GET", "/requests?limit=1&limit=2", b"", 400, "given twice"),
    ("GET", "/engines/000000000000", b"", 404, "no engine of this pool"),
    ("GET", "/engines/" + "x" * 400, b"", 404, "no engine of this pool"),
    ("POST", "/engines/http:%2F%2F127.0.0.1:9/drain", b"", 404, "no engine of this pool"),
    ("GET", "/engines/" + "x" * 600, b"", 414, "longer than"),
    ("GET", "/nothing", b"", 404, "Not Found"),
    ("DELETE", "/engines", b"", 405, "Method Not Allowed"),
]


async def test_wrong_requests_are_refused_in_one_line() -> None:
    """Each with what is wrong; nothing has changed, and no answer has a traceback."""
    async with world() as w, admin(w) as api:
        before = dict(w.proxy.membership.members)
        for method, path, body, status, text in WRONG:
            answer = await api.ask(
                method, BASE + path.replace("ID", engine_id(w.decode[0].url)), body
            )
            assert answer.status == status, (path, body, answer.body)
            error = answer.json["error"]
            assert text in error["message"], (path, error)
            assert (error["type"] == "NotFoundError") is (status == 404), error
            assert "\n" not in error["message"]
            assert "Traceback" not in error["message"]
        assert dict(w.proxy.membership.members) == before
        assert all(member.drain is None for member in before.values())
        plain = await api.ask(
            "POST", f"{BASE}/engines", b'{"url": "http://a:1"}', [("content-type", "text/plain")]
        )
        assert "content-type application/json" in plain.json["error"]["message"]
        assert w.metric("pdproxy_admin_requests_total", result="refused") >= len(WRONG) - 1


async def test_a_failure_of_its_own_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 500 that shows nothing of the cause, and the next request is served."""
    async with world() as w, admin(w) as api:

        def breaks(self: object, name: str) -> str:
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(entries.EngineEntries, "find", breaks)
        answer = await api.ask("GET", f"{BASE}/engines/x")
        assert (answer.status, answer.json["error"]["message"]) == (
            500,
            "Internal error in pdproxy",
        )
        assert w.metric("pdproxy_admin_requests_total", result="failed") == 1
        assert (await api.ask("GET", f"{BASE}/engines")).status == 200


async def test_a_body_that_never_ends_is_no_failure() -> None:
    """Its sender leaves half-way, or was told that it is too slow."""
    async with world() as w, admin(w) as api:
        client = await Client.connect(api.port)
        head = (
            f"POST {BASE}/engines HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
            f"application/json\r\ncontent-length: 9\r\n\r\n{{"
        )
        client.send(head.encode())
        await asyncio.sleep(0.1)
        client.close()
        await until(lambda: w.metric("pdproxy_admin_requests_total", result="refused") == 1)
        assert w.metric("pdproxy_admin_requests_total", result="failed") == 0


async def test_keys() -> None:
    """With keys of its own, nobody comes in without one, and a client's key is none of them."""
    auth = {"api_keys": ("client",), "admin_keys": ("operator",)}
    async with world(auth=auth) as w, admin(w) as api:
        path = f"{BASE}/engines"
        for headers in ([], [("Authorization", "Bearer client")], [("Authorization", "Bearer")]):
            answer = await api.ask("GET", path, b"", headers)
            assert answer.status == 401
            assert answer.header("www-authenticate") == "Bearer"
        key = ("Authorization", "Bearer operator")
        assert (await api.ask("GET", path, b"", [key])).status == 200
        assert (await api.ask("GET", path, b"", [key, ("host", "proxy.example")])).status == 200
        assert (await w.get("/v1/models", [key])).status == 401
        assert (await api.ask("GET", "/openapi.json")).status == 200


async def test_pages_of_other_sites_are_kept_out() -> None:
    """Without keys: a page may send what its browser takes for harmless, and a name of its own may
    lead to the loopback.
    """
    async with world() as w, admin(w) as api:
        here = f"127.0.0.1:{api.port}"
        for headers, status in (
            ([("host", "evil.example")], 403),
            ([("host", "evil.example:80")], 403),
            ([("host", "[::1].evil.example")], 403),
            ([("host", "[::1]evil:80")], 403),
            ([("host", "127.0.0.1.evil.example")], 403),
            ([("origin", "https://evil.example")], 403),
            ([("origin", "null")], 403),
            ([("origin", f"http://{here}")], 200),
            ([("host", "localhost:1")], 200),
            ([("host", "LOCALHOST:1"), ("origin", "http://localhost:1")], 200),
            ([("host", "[::ffff:127.0.0.1]:1")], 200),
            ([("host", "[::1]:1")], 200),
        ):
            assert (await api.ask("GET", f"{BASE}/engines", b"", headers)).status == status, headers
        evil = [("origin", "https://evil.example")]
        assert (
            await api.ask("POST", f"/add_worker?url={w.decode[0].url}", b"", evil)
        ).status == 403


async def test_a_client_that_sends_nothing_or_half_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It loses its connection in time, and others are served meanwhile."""
    monkeypatch.setattr("pdproxy.app.own_listener.HEAD_SECONDS", 0.2)
    monkeypatch.setattr("pdproxy.app.own_listener.BODY_SECONDS", 0.2)
    async with world() as w, admin(w) as api:
        opened = [await asyncio.open_connection("127.0.0.1", api.port) for _ in range(3)]
        opened[1][1].write(b"GET /admin/v1/engines HTTP/1.1\r\nhost: ")
        opened[2][1].write(
            b"POST /admin/v1/engines HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"
        )
        assert (await api.ask("GET", f"{BASE}/engines")).status == 200
        async with asyncio.timeout(30):
            ends = [await reader.read() for reader, _ in opened]
        assert ends[0] == b""
        assert ends[1].startswith(b"HTTP/1.1 408")
        assert ends[2].startswith(b"HTTP/1.1 408")
        for _, writer in opened:
            writer.close()


# -- what else it shows


async def test_the_log_level() -> None:
    """It is used at once, and shows who has set it."""
    async with world() as w, admin(w) as api:
        assert await api.get("/log_level") == {"level": "info", "set_by": "settings"}
        answer = await api.ask("PUT", f"{BASE}/log_level", {"level": "error"})
        assert answer.json == {"level": "error", "set_by": "admin"}
        assert not api.log.shows_requests
        await api.ask("PUT", f"{BASE}/log_level", {"level": "info"})
        assert api.log.shows_requests
        assert w.busy() == []


async def test_recent_requests() -> None:
    """The newest first, with engines and times, and what failed on the way."""
    async with world(decode=2) as w, admin(w) as api:
        for engine in w.decode:
            engine.script(scripts.whole(b"{}", 500))
        body = completion(stream=True)
        await w.ask(COMPLETIONS, body, [("X-Request-Id", "first")])
        await w.ask(COMPLETIONS, {"model": "none", "prompt": "x"}, [("X-Request-Id", "second")])
        await w.ask(COMPLETIONS, completion(), [("X-Request-Id", "third")])
        found = (await api.get("/requests"))["requests"]
        assert [one["id"] for one in found] == ["third", "second", "first"]
        assert found[1]["status"] == 404
        (prompt,) = found[0]["prompts"]
        assert prompt["prefill"] == w.prefill[0].url
        assert 0 <= prompt["prefill_s"] <= found[0]["total_s"]
        one = found[2]
        assert (one["path"], one["model"], one["outcome"], one["stream"]) == (
            COMPLETIONS,
            "tiny",
            "ok",
            True,
        )
        (prompt,) = one["prompts"]
        assert prompt["attempts"] > 1
        assert prompt["decode"] in {engine.url for engine in w.engines}
        (failed, *_) = one["failures"]
        assert (failed["phase"], failed["retried"]) == ("decode", True)
        assert 0 <= failed["at_s"] <= one["total_s"]
        assert (await api.get("/requests?id=first"))["requests"] == [
            {**one, "ended_s": pytest.approx(one["ended_s"], abs=9)}
        ]
        assert (await api.get("/requests?outcome=none"))["requests"] == []
        assert len((await api.get("/requests?limit=1"))["requests"]) == 1


async def test_answers_are_as_the_document_says() -> None:
    """Each answer and each body fits the schema that /openapi.json gives for it."""
    async with world() as w, admin(w) as api:
        document = (await api.ask("GET", "/openapi.json")).json
        schemas = {"components": document["components"]}

        def fits(value: object, path: str, method: str, status: int) -> None:
            content = document["paths"][BASE + path][method]["responses"][str(status)]["content"]
            jsonschema.validate(value, {**schemas, **content["application/json"]["schema"]})

        new = await started(w, "decode")
        added = await api.post("/engines", fields(new))
        fits(added.json, "/engines", "post", 201)
        await w.ask(COMPLETIONS, completion())
        fits(await api.get("/engines"), "/engines", "get", 200)
        fits(await entry(api, new), "/engines/{name}", "get", 200)
        drained = await api.post(f"/engines/{engine_id(new.url)}/drain", {"seconds": 3})
        fits(drained.json, "/engines/{name}/drain", "post", 202)
        removed = await api.delete(f"/engines/{engine_id(new.url)}?at_once=true")
        fits(removed.json, "/engines/{name}", "delete", 200)
        fits(await api.get("/requests"), "/requests", "get", 200)
        fits(await api.get("/log_level"), "/log_level", "get", 200)
        refused = await api.delete(f"/engines/{engine_id(w.decode[0].url)}")
        fits(refused.json, "/engines/{name}", "delete", 409)
        body = document["paths"][f"{BASE}/engines"]["post"]["requestBody"]["content"][
            "application/json"
        ]["schema"]
        jsonschema.validate(fields(new), {**schemas, **body})
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"url": new.url, "role": "router"}, {**schemas, **body})
        page = await api.ask("GET", "/docs")
        assert (page.status, b"/openapi.json" in page.body) == (200, True)


# -- the address


async def asked(path: Path, host: str) -> bytes:
    """The answer to a request for the engines through a Unix socket."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    head = f"GET {BASE}/engines HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


async def test_a_socket_that_only_its_user_can_open(tmp_path: Path) -> None:
    """What a killed process has left is replaced, one in use is not, and it is gone at the end."""
    path = tmp_path / "admin.sock"
    place = AdminPlace(str(path))
    first = AdminSocket(place)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(SettingsError, match=r"listen\.admin: can't listen on unix:.*in use"):
        AdminSocket(place)
    first.socket.close()  # it was killed
    at = AdminSocket(place)
    async with world() as w, admin(w) as api:
        server = AdminServer(w.proxy, at, api.log)
        w.proxy.tasks.keep(server.run, "admin API")
        await until(lambda: server.serving)
        answer = await asked(path, "localhost")
        assert answer.startswith(b"HTTP/1.1 200")
        assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["engines"]) == 2
        for evil in ("evil.example", "localhost:1\r\norigin: https://evil.example"):
            assert (await asked(path, evil)).startswith(b"HTTP/1.1 403"), "ssh -L leads there, too"
    at.close()
    assert not path.exists()
    path.write_text("a file of somebody")
    with pytest.raises(SettingsError, match="can't listen on unix:"):
        AdminSocket(place)
    assert path.read_text() == "a file of somebody"


def test_addresses() -> None:
    assert admin_socket(Settings()) is None
    with pytest.raises(SettingsError, match=r"listen\.admin: can't listen on 192\.0\.2\.1:9"):
        admin_socket(Settings(listen=Listen(admin="192.0.2.1:9")))
    long = msgspec.structs.replace(Listen(), admin=f"unix:/tmp/{'x' * 200}")
    with pytest.raises(SettingsError, match="too long"):
        admin_socket(Settings(listen=long))


async def test_world_without_it_keeps_no_decisions() -> None:
    """Nobody could read them."""
    async with world() as w:
        assert w.proxy.pools[0].decisions is None
        assert (await w.get("/decisions")).status == 404


async def test_the_kv_that_an_engine_has_in_use() -> None:
    """As it has reported last; nothing of one that reports none, or is down."""
    async with world() as w, admin(w) as api:
        decode = w.proxy.engines[w.decode[0].url]
        probing = w.proxy.pools[0].watching.probing
        assert probing is not None
        for metrics, shown in (
            (dataclasses.replace(NO_METRICS, kv_usage=0.25), 0.25),
            (NO_METRICS, None),
        ):
            probing.scraped.scraped(decode, metrics)
            assert (await entry(api, w.decode[0]))["load"]["kv_usage"] == shown
        decode.kv_usage = 0.5
        w.proxy.ledger.mark_down(decode.url, "test", w.proxy.now())
        assert (await entry(api, w.decode[0]))["load"]["kv_usage"] is None
