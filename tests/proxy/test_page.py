"""The page of the admin listener: its files, what it is sent, and what its viewers cost."""

# tests/browser/long_page.py opens it in a browser.

from __future__ import annotations

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from pdproxy.app.admin import WRITE_SECONDS
from pdproxy.kit.errors import PdproxyError
from pdproxy.observe.requests import REQUESTS, TTFT
from pdproxy.settings.pools import PoolSlo
from pdproxy.settings.schema import Settings
from pdproxy.web.admin import live, page
from tests.fakes.admin import Admin, admin
from tests.fakes.client import Client, bearer, request
from tests.fakes.clock import ManualClock
from tests.fakes.world import COMPLETIONS, completion, until, world
from tests.proxy.test_revoked_keys import take_away

FILES = Path(page.__file__).parent / "page_files"
LIVE = "/admin/v1/live"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL", 0.01)
    monkeypatch.setattr(live, "MOST_OF_TIME", 1.0)


async def viewer(api: Admin, key: str | None = None, **more: Any) -> Client:
    """A connection that asks for what the page shows."""
    client = await Client.connect(api.port, **more)
    headers = [] if key is None else bearer(key)
    sent = request("GET", LIVE, b"", headers)
    client.send(sent.replace(b"host: proxy", b"host: 127.0.0.1"))
    return client


async def watching(api: Admin, key: str | None = None) -> Client:
    """A viewer that has its answer's head."""
    client = await viewer(api, key)
    head = await client.head()
    assert (head.status, head.header("content-type")) == (200, "text/event-stream; charset=utf-8")
    return client


async def event(client: Client) -> tuple[str, Any]:
    """The next event: its name and its data."""
    text = b""
    while not text.endswith(b"\n\n"):
        piece = await client.piece()
        assert piece, "the stream has ended"
        text += piece
    name, data = text.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def snapshot(client: Client) -> Any:
    """The next event, a snapshot."""
    name, found = await event(client)
    assert name == "snapshot"
    return found


# -- the page


async def test_the_page_and_its_files_need_no_key_and_nothing_of_another_host() -> None:
    """What they name is there; no script, style or event handler stands in the page."""
    async with world(auth={"admin_keys": ("operator",)}) as w, admin(w) as api:
        answer = await api.ask("GET", "/")
        assert (answer.status, answer.header("content-type")) == (200, "text/html; charset=utf-8")
        html = answer.body.decode()
        named = set(re.findall(r"(?:src|href)=\"(page/[^\"]*)\"", html))
        for file in FILES.glob("*.js"):
            imported = re.findall(r"from \"\./([\w.]+)\"", file.read_text())
            named |= {f"page/{one}" for one in imported}
        assert named == {f"page/{file.name}" for file in FILES.iterdir()} - {"page/index.html"}
        kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
        for name in named:
            found = await api.ask("GET", f"/{name}")
            kind = (found.header("content-type") or "").partition(";")[0]
            assert (found.status, kind) == (200, kinds[name.rpartition(".")[2]])
            assert found.body == (FILES / name.removeprefix("page/")).read_bytes()
            assert found.header("content-security-policy") == page._POLICY
        assert not re.search(r"<style|<script(?! type=\"module\" src=)|\son\w+=|\sstyle=", html)
        for file in FILES.iterdir():
            text = file.read_text().replace('"http://www.w3.org/2000/svg"', "")
            assert not re.search(r"https?://\w|innerHTML|outerHTML|insertAdjacent|\beval\b", text)
        assert (await api.ask("GET", LIVE)).status == 401
        for path in ("/page/", "/page/../gate.py", "/page/%2e%2e/gate.py", "/page/index.html"):
            assert (await api.ask("GET", path)).status == 404
        assert (await w.get("/")).status == 404, "clients have no page"


async def test_a_browser_lets_the_page_do_little() -> None:
    async with world() as w, admin(w) as api:
        header = (await api.ask("GET", "/")).header("content-security-policy") or ""
        policy = dict([*part.split(maxsplit=1), ""][:2] for part in header.split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert (policy["require-trusted-types-for"], policy["trusted-types"]) == (
            "'script'",
            "'none'",
        )


# -- what it is sent


async def test_a_snapshot_says_what_the_other_routes_say() -> None:
    """The words of /ready, the entries of engines, the requests, and the counts of /metrics by
    their names.
    """

    def adjust(settings: Settings) -> Settings:
        (pool,) = settings.pools
        wanted = PoolSlo(ttft=0.5, tpot=0.04)
        return structs.replace(settings, pools=(structs.replace(pool, slo=wanted),))

    async with world(decode=2, adjust=adjust) as w, admin(w) as api:
        w.proxy.ledger.mark_down(w.decode[1].url, "test", w.proxy.now())
        await w.ask(COMPLETIONS, completion(stream=True), [("X-Request-Id", "one")])
        await w.ask(COMPLETIONS, {"model": "none", "prompt": "x"})
        await w.settled()
        client = await watching(api)
        found = await snapshot(client)
        ready = (await api.ask("GET", "/ready")).json
        assert found["ready"] == {name: ready[name] for name in ("state", "reason", "details")}
        assert any("test" in one for one in found["ready"]["details"])
        engines = (await api.get("/engines"))["engines"]
        same = ("id", "url", "role", "state", "health", "load", "pairs", "drain")
        assert [[one[name] for name in same] for one in found["listed"]["engines"]] == [
            [one[name] for name in same] for one in engines
        ]
        assert [one["id"] for one in found["ended"]][1:] == ["one"]
        assert (found["running"], found["ended_count"], found["running_count"]) == ([], 2, 0)
        assert found["counts"]["pdproxy_requests_total"]["ok"] == w.metric(
            REQUESTS.name, outcome="ok"
        )
        assert sum(found["times"][TTFT.name]["counts"]) == 1
        (judged,) = found["judged"]
        assert (judged[1], judged[2]) == (True, found["ended"][1]["first_s"])
        assert judged[3] > 0
        assert found["goals"] == {"ttft": 0.5, "tpot": 0.04}
        assert found["legs"][w.prefill[0].url]["prefill"][0] == 1
        assert found["decisions"] == await api.get("/decisions")
        client.close()


async def test_what_can_not_be_asked_for_is_said() -> None:
    """The stream goes on, and so do snapshots once it can."""
    async with world() as w, admin(w) as api:
        client = await watching(api)
        await snapshot(client)
        source, works = api.feed._source, api.feed._source.readiness

        async def fails() -> Any:
            raise PdproxyError("the supervisor does not answer")

        object.__setattr__(source, "readiness", fails)
        while (found := await event(client))[0] == "snapshot":
            pass
        assert found == ("problem", {"message": "the supervisor does not answer"})
        object.__setattr__(source, "readiness", works)
        while (await event(client))[0] == "problem":
            pass
        client.close()


# -- its viewers


async def test_nothing_is_done_without_a_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task, no timer and no snapshot is there before the first one and behind the last one. Two
    viewers get the same snapshot; who comes once nobody is there gets a new one at once.
    """
    monkeypatch.setattr(live, "INTERVAL", 3600.0)
    async with world() as w, admin(w) as api:
        before = len(asyncio.all_tasks())
        assert (api.feed._number, api.feed._last) == (0, b"")
        one, other = await watching(api), await watching(api)
        first = await snapshot(one)
        assert await snapshot(other) == first
        assert w.metric("pdproxy_admin_viewers") == api.feed.viewers == 2
        one.close()
        other.close()
        await until(lambda: not api.feed.viewers and len(asyncio.all_tasks()) == before)
        assert (api.feed._number, api.feed._last) == (1, b"")
        again = await watching(api)
        assert (await snapshot(again))["now"] > first["now"]
        again.close()


async def test_snapshots_take_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many engines they come more rarely, and say so."""
    monkeypatch.setattr(live, "MOST_OF_TIME", 0.05)
    clock = ManualClock()
    async with world(clock=clock) as w, admin(w) as api:
        source, works = api.feed._source, api.feed._source.readiness

        async def slow() -> Any:
            await clock.advance(2.0)
            return await works()

        object.__setattr__(source, "readiness", slow)
        client = await watching(api)
        assert (await snapshot(client))["next_s"] == pytest.approx(40)
        assert api.feed._due == pytest.approx(w.proxy.now() + 38)
        client.close()


async def test_viewers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is told so, and can come once another has left."""
    monkeypatch.setattr(live, "MAX_VIEWERS", 2)
    async with world() as w, admin(w) as api:
        one, other = await watching(api), await watching(api)
        refused = await api.ask("GET", LIVE)
        assert (refused.status, refused.json["error"]["message"]) == (
            429,
            "2 pages are open: close one of them",
        )
        assert w.metric("pdproxy_admin_requests_total", result="refused") == 1
        one.close()
        await until(lambda: api.feed.viewers == 1)
        third = await watching(api)
        await snapshot(third)
        for client in (other, third):
            client.close()


async def test_a_viewer_that_does_not_read_is_closed() -> None:
    """In time, with few bytes kept for it; others go on meanwhile."""
    clock = ManualClock()
    async with world(clock=clock) as w, admin(w) as api:
        silent = await viewer(api, receive_buffer=4096)
        await until(lambda: api.feed.viewers == 1)
        open_now: list[Any] = [*api.server._listener._state.connections]
        (connection,) = [one for one in open_now if one.cycle is not None]
        connection.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
        )
        await until(lambda: connection.flow.write_paused)
        reads = await watching(api)
        for _ in range(20):
            await snapshot(reads)
        assert connection.transport.get_write_buffer_size() < 20_000, "no more than one waits"
        await clock.advance(WRITE_SECONDS + 5)
        await until(lambda: api.feed.viewers == 1)
        assert w.metric("pdproxy_deadline_total", wait="client_write") == 1
        await snapshot(reads)
        for client in (silent, reads):
            client.close()


async def test_a_key_that_is_taken_away_ends_the_stream(tmp_path: Path) -> None:
    """With the end of its body; one that may only read may watch, and drains nothing."""
    path = tmp_path / "keys"
    path.write_text("one\nb:two read-only\n")
    async with world(auth={"admin_keys_file": str(path)}) as w, admin(w) as api:
        one, reader = await watching(api, "one"), await watching(api, "two")
        found = await snapshot(reader)
        (name, *_) = [engine["id"] for engine in found["listed"]["engines"]]
        drain = f"/admin/v1/engines/{name}/drain"
        assert (await api.ask("POST", drain, b"", bearer("two"))).status == 403
        take_away(w, path, "b:two read-only\n")
        while await one.piece():
            pass
        assert (await api.ask("GET", LIVE, b"", bearer("one"))).status == 401
        await snapshot(reader)
        reader.close()
