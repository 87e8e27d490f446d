"""`GET /drained`: an engine that is to end may do so once nothing of it is needed here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import quote

import pytest

from pdproxy.fleet import membership
from pdproxy.fleet.entries import engine_id
from tests.fakes import answers, scripts
from tests.fakes.client import Answer, Client, request
from tests.fakes.process import PATIENCE
from tests.fakes.scripts import WORD
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, until, world
from tests.proxy.test_operator_routes import BOTH, OPERATOR
from tests.proxy.test_workers_admin import running

NOTHING = {"drained": True, "requests": 0, "handles": 0, "reason": None}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK", 0.01)


def path_of(url: str) -> str:
    return f"/drained?engine={quote(url.removeprefix('http://'))}"


async def _drained(w: World, url: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await w.get(path_of(url))).status != 200:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("removes", [False, True])
async def test_a_prefill_engine_is_drained_once_its_kv_was_read(removes: bool) -> None:
    """Not before the proxy was told that it is to end, although it has no request of its own any
    more; nor while the decode engine may read its KV.
    """
    async with world() as w:
        url, go = w.prefill[0].url, asyncio.Event()
        w.decode[0].script(scripts.gate(go, w.decode[0].default))
        client = await w.client()
        client.post(COMPLETIONS, completion())
        await w.decode[0].asked()
        answer = await w.get(path_of(url))
        assert (answer.status, answer.json["drained"]) == (409, False)
        assert "was not told" in answer.json["reason"]
        w.proxy.membership.drain(url, "admin", removes=removes)
        assert (await w.get(path_of(url))).json == {
            "drained": False,
            "requests": 0,
            "handles": 1,
            "reason": "the engine is being drained",
        }
        assert (await w.get(path_of(w.decode[0].url))).json["requests"] == 1
        go.set()
        assert (await client.answer()).text == TEXT
        await _drained(w, url)
        assert (await w.get(path_of(url))).json == NOTHING
        assert w.books.endings == {"loaded": 1}
        assert (url in w.proxy.membership.members) == (not removes)


async def test_an_engine_that_serves_is_not_drained_without_requests() -> None:
    """A request may come in the next moment."""
    async with world() as w:
        for engine in w.engines:
            answer = await w.get(path_of(engine.url))
            assert (answer.status, answer.json["requests"], answer.json["handles"]) == (409, 0, 0)


async def test_legs_to_an_engine_that_was_removed_at_once_count() -> None:
    async with world() as w:
        url, go = w.decode[0].url, asyncio.Event()
        w.decode[0].script(scripts.after_word(go, scripts.one_more_word))
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        w.proxy.membership.remove(url, "settings", at_once=True)
        answer = await w.get(path_of(url))
        assert (answer.status, answer.json["requests"]) == (409, 1)
        go.set()
        assert (await client.rest(head)).body == WORD + WORD + answers.end()
        await _drained(w, url)


async def test_a_proxy_that_is_ending_says_what_it_has() -> None:
    """Engines and proxies may be replaced together."""
    async with world() as w:
        url, go = w.decode[0].url, asyncio.Event()
        w.decode[0].script(scripts.after_word(go, scripts.one_more_word))
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        ending = asyncio.create_task(w.drain())
        w.proxy.membership.drain(url, "admin")
        await until(lambda: all(one.admission.closed for one in w.workers))
        answer = await w.get(path_of(url))
        assert (answer.status, answer.json["requests"]) == (409, 1)
        go.set()
        assert (await client.rest(head)).ended
        await ending
        await _drained(w, url)


@pytest.mark.parametrize("engine", ["10.1.2.3:8000", "[fd00::1]:8000", "nobody:1"])
async def test_an_engine_that_nobody_knows_may_end(engine: str) -> None:
    """It has nothing here: the proxy began after it was to end, or had not taken it yet."""
    async with world() as w:
        answer = await w.get(f"/drained?engine={engine}")
        assert (answer.status, answer.json) == (200, NOTHING)


@pytest.mark.parametrize(
    "query",
    [
        "",
        "?engine=",
        "?engine=10.0.0.1",
        "?engine=10.0.0.1:99999",
        "?engine=[::1:8000",
        "?engine=[::1]",
        "?engine=http://10.0.0.1:8000",
        "?engine=10.0.0.1:8000/v1",
        "?engine=%00:1",
        "?engine=a:1&engine=b:1",
        f"?engine={'a' * 60_000}:1",
        "?engine=%ff%fe:8000",
        "?engine=a%20b:8000",
    ],
)
async def test_what_names_no_engine_is_refused(query: str) -> None:
    async with world() as w:
        answer = await w.get(f"/drained{query}")
        error = answer.json["error"]
        assert (answer.status, error["param"]) == (400, "engine")
        assert "HOST:PORT" in error["message"]


async def test_everybody_may_ask_and_only_operators_get_numbers() -> None:
    """No key lies in the pods of engines."""
    async with world(auth=BOTH, operator_routes="auto") as w:
        url = w.decode[0].url
        for headers in ([], [("authorization", "Bearer wrong")]):
            answer = await w.get(path_of(url), headers)
            assert (answer.status, answer.json) == (409, {"drained": False})
        assert (await w.get(path_of(url), OPERATOR)).json["requests"] == 0
        w.proxy.membership.drain(url, "admin")
        await until(lambda: not [one for one in w.proxy.ledger.engines if one.requests])
        await _drained(w, url)
        assert (await w.get(path_of(url))).json == {"drained": True}


async def test_each_worker_knows_what_the_others_have(tmp_path: Path) -> None:
    """While one worker has a stream there, no worker says that the engine may end."""
    go = asyncio.Event()

    async def asked(port: int, url: str) -> Answer:
        client = await Client.connect(port)
        client.send(request("GET", path_of(url), b""))
        answer = await client.answer()
        client.close()
        return answer

    async with running(tmp_path) as run:
        proxy = run.proxy
        prefill, decode = proxy.prefill.url, proxy.decode.url
        proxy.decode.script(scripts.gate(go, proxy.decode.default))
        client = await Client.connect(proxy.port)
        client.post(COMPLETIONS, completion())
        await proxy.decode.asked()
        for url in (prefill, decode):
            assert (await run.ask("POST", f"/engines/{engine_id(url)}/drain")).status == 202
        for _ in range(8):  # connections come to both workers
            found = [(await asked(proxy.port, url)) for url in (prefill, decode)]
            assert [one.status for one in found] == [409, 409]
            assert [one.json["handles"] for one in found] == [1, 1]
            assert [one.json["requests"] for one in found] == [0, 1]
        go.set()
        assert (await client.answer()).text == TEXT
        async with asyncio.timeout(PATIENCE):
            for url in (prefill, decode):
                good = 0
                while good < 8:
                    good = good + 1 if (await asked(proxy.port, url)).status == 200 else 0
                    await asyncio.sleep(0.02)
        client.close()
