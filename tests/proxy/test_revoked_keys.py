"""Keys that are taken away while their requests run: what each request ends with, and that nothing
else ends.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pdproxy.app.revoking import Revoking
from pdproxy.serving.access.keys import digest
from pdproxy.web.admin.api import AdminApi
from pdproxy.workers.admin import AdminApiOfAll
from tests.fakes import scripts
from tests.fakes.admin import BASE, admin
from tests.fakes.client import Client, bearer, request
from tests.fakes.engine import Reply, prefill
from tests.fakes.passed import MESSAGES, RESPONSES, everyone, fine
from tests.fakes.world import COMPLETIONS, LONG, PROMPT, World, chat, completion, until, world

BATCH, EMBED = "/v1/chat/completions/batch", "/v1/embeddings"
STREAM = completion(stream=True)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with two keys."""
    path = tmp_path / "keys"
    path.write_text("one\ntwo\n")
    return path


def take_away(w: World, keys: Path, left: str = "two\n") -> None:
    """Take a key out of the file, and have the proxy notice."""
    keys.write_text(left)
    w.look_at_files()


def code(body: bytes) -> str | None:
    """The code of an error's body."""
    found: str | None = json.loads(body)["error"]["code"]
    return found


async def streams(w: World, key: str, path: str = COMPLETIONS, body: object = STREAM) -> Client:
    """A client whose stream has begun."""
    client = await w.client()
    client.post(path, body, bearer(key))
    head = await client.head()
    assert head.status == 200
    await client.piece()
    return client


async def ends_with(client: Client) -> bytes:
    """The last event of a stream, whose body must come to its proper end."""
    last = b""
    while piece := await client.piece():
        last = piece
    return last


async def test_a_running_stream_ends_and_its_engine_is_told(keys: Path) -> None:
    """An error event and the end; the decode leg is closed; a stream of another key, and the
    tenant's others, go on.
    """
    async with world(auth={"api_keys_file": str(keys)}) as w:
        go = asyncio.Event()
        w.decode[0].script(*[scripts.after_word(go, scripts.one_more_word)] * 2)
        client, other = await streams(w, "one"), await streams(w, "two")
        take_away(w, keys)
        event = await ends_with(client)
        assert code(event.removeprefix(b"data: ")) == "key_revoked"
        await asyncio.wait_for(w.decode[0].requests[0].left.wait(), LONG)
        ended = await w.ended()
        assert (ended.status, ended.outcome, ended.error) == (
            200,
            "client",
            "The key of this request was revoked.",
        )
        client.post(COMPLETIONS, completion(), bearer("one"))
        assert code((await client.answer()).body) == "invalid_api_key"
        go.set()
        assert (await ends_with(other)).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion()),
        (COMPLETIONS, completion(prompt=[PROMPT, PROMPT])),
        (BATCH, {**chat(), "messages": [chat()["messages"]] * 2}),
    ],
    ids=["whole", "list", "batch"],
)
async def test_a_whole_answer_is_not_given(keys: Path, path: str, body: dict[str, Any]) -> None:
    """While the prefill engine works: 401, no decode engine is asked, and the KV is given back."""
    go = asyncio.Event()
    async with world(auth={"api_keys_file": str(keys)}) as w:
        w.prefill[0].script(*[scripts.gate(go, prefill)] * 2)
        client = await w.client()
        client.post(path, body, bearer("one"))
        await w.prefill[0].asked()
        take_away(w, keys)
        answer = await client.answer()
        assert (answer.status, code(answer.body)) == (401, "key_revoked")
        assert answer.header("www-authenticate") == "Bearer"
        go.set()
        await w.quiet()
        assert not [r for r in w.decode[0].requests if not r.release]


async def test_a_request_that_waits_for_a_place_is_refused(keys: Path) -> None:
    """It leaves the queue at once, and the engines never see it."""
    async with world(auth={"api_keys_file": str(keys)}, limits={"max_inflight": 1}) as w:
        go = asyncio.Event()
        w.decode[0].script(scripts.after_word(go, scripts.one_more_word))
        first, second = await streams(w, "two"), await w.client()
        second.post(COMPLETIONS, completion(), bearer("one"))
        await until(lambda: w.waiting == 1)
        take_away(w, keys)
        answer = await second.answer()
        assert (answer.status, code(answer.body)) == (401, "key_revoked")
        await until(lambda: w.waiting == 0)
        go.set()
        await ends_with(first)
        assert len(w.prefill[0].requests) == 1


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES, EMBED])
async def test_a_request_whose_body_is_not_complete_is_refused(keys: Path, path: str) -> None:
    """Nothing more of the body is waited for."""
    async with world(auth={"api_keys_file": str(keys)}) as w:
        client = await w.client()
        whole = request("POST", path, completion(), bearer("one"))
        client.send(whole[:-5])
        await until(lambda: w.body_bytes > 0)
        take_away(w, keys)
        answer = await client.answer()
        assert (answer.status, answer.header("www-authenticate")) == (401, "Bearer")
        assert await client.closed()
        assert w.body_bytes == 0
        assert not w.prefill[0].requests


async def test_requests_behind_another_one_are_refused_too(keys: Path) -> None:
    """Those that were read on the connection, and wait for the stream in front of them."""
    async with world(auth={"api_keys_file": str(keys)}) as w:
        w.decode[0].script(scripts.after_word(asyncio.Event(), scripts.one_more_word))
        client = await w.client()
        one = request("POST", COMPLETIONS, completion(), bearer("one"))
        client.send(request("POST", COMPLETIONS, STREAM, bearer("one")) + one + one)
        await client.head()
        await client.piece()
        take_away(w, keys)
        await ends_with(client)
        assert (await client.answer()).status == 401
        assert len(w.prefill[0].requests) == 1


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES, EMBED])
async def test_requests_behind_another_one_whose_key_has_ended(keys: Path, path: str) -> None:
    """They were read before the key's end, and their turn comes after it: none is served."""
    keys.write_text("a:one until=2999-01-01T00:00:00Z\n")
    async with world(auth={"api_keys_file": str(keys)}) as w:
        go = asyncio.Event()
        w.decode[0].script(scripts.after_word(go, scripts.one_more_word))
        w.decode[0].admin |= {RESPONSES: fine, EMBED: fine}
        client = await w.client()
        behind = request("POST", path, completion(), bearer("one")) * 3
        client.send(request("POST", COMPLETIONS, STREAM, bearer("one")) + behind)
        await client.head()
        await client.piece()
        for one in w.workers:
            one.credentials.keys.wall = lambda: 1e12
        go.set()
        await ends_with(client)
        answer = await client.answer()
        assert (answer.status, code(answer.body)) == (401, "key_expired")
        assert sum(len(engine.requests) for engine in w.engines) == 2


def events(*types: str) -> bytes:
    """Events of a stream."""
    shown = [{"type": kind, "sequence_number": number} for number, kind in enumerate(types)]
    return b"".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in shown)


BEGINS = {
    RESPONSES: events("response.created", "response.in_progress", "response.output_text.delta"),
    MESSAGES: events("message_start", "content_block_delta"),
}
PASSED = {
    RESPONSES: ("code", "key_revoked"),
    MESSAGES: ("type", "authentication_error"),
}


@pytest.mark.parametrize("path", PASSED)
async def test_a_stream_of_a_passed_route_ends_in_its_own_shape(keys: Path, path: str) -> None:
    """The event `error` of the route's API; the engine's leg is closed."""
    name, value = PASSED[path]
    seen: list[Reply] = []

    async def begins(reply: Reply) -> None:
        seen.append(reply)
        await reply.start()
        await reply.piece(BEGINS[path])
        await reply.stall()

    async with world(auth={"api_keys_file": str(keys)}) as w:
        w.decode[0].admin[path] = begins
        client = await streams(w, "one", path, {"model": "tiny", "stream": True})
        take_away(w, keys)
        event = await ends_with(client)
        assert event.startswith(b"event: error\ndata: ")
        found = json.loads(event.split(b"data: ")[1])
        assert found.get("error", found)[name] == value
        await asyncio.wait_for(seen[0].request.left.wait(), LONG)
        await w.ended()


@pytest.mark.parametrize("path", [RESPONSES, EMBED])
async def test_a_whole_answer_of_a_passed_route_is_not_given(keys: Path, path: str) -> None:
    """401 at once; the engine's leg is closed. Another key's answer is given."""
    go = asyncio.Event()
    async with world(1, 1, auth={"api_keys_file": str(keys)}) as w:
        seen = everyone(w, path, scripts.gate(go, fine))
        client, other = await w.client(), await w.client()
        client.post(path, {"model": "tiny"}, bearer("one"))
        await until(lambda: seen)
        other.post(path, {"model": "tiny"}, bearer("two"))
        await until(lambda: len(seen) == 2)
        take_away(w, keys)
        answer = await client.answer()
        assert (answer.status, code(answer.body)) == (401, "key_revoked")
        await asyncio.wait_for(seen[0].left.wait(), LONG)
        go.set()
        assert (await other.answer()).status == 200


async def test_other_changes_of_the_file_end_nothing(keys: Path) -> None:
    """A key that gets a name, and smaller limits, is the same key; a file that can't be read takes
    no key away.
    """
    async with world(auth={"api_keys_file": str(keys)}) as w:
        go = asyncio.Event()
        w.decode[0].script(scripts.after_word(go, scripts.one_more_word))
        client = await streams(w, "one")
        for text in (
            "# a comment\none\n",
            "a:one inflight=3\n",
            "a:one inflight=1 rpm=1\n",
            "two words\n",
        ):
            take_away(w, keys, text)
        keys.unlink()
        w.look_at_files()
        go.set()
        assert (await ends_with(client)).endswith(b"data: [DONE]\n\n")


async def test_a_key_of_the_settings_ends_with_them(keys: Path) -> None:
    """What a reload of the settings takes away is out at once, too."""
    async with world(auth={"api_keys": ("one", "two")}) as w:
        w.decode[0].script(scripts.after_word(asyncio.Event(), scripts.one_more_word))
        client = await streams(w, "one")
        for proxy in w.workers:
            auth = type(proxy.settings.auth)(api_keys=("two",))
            proxy.credentials.prepare(auth)()
        assert code((await ends_with(client)).removeprefix(b"data: ")) == "key_revoked"


async def test_an_end_that_is_moved_to_before_now(keys: Path) -> None:
    """The key stays in the file, and is over; one whose end is moved to later goes on."""
    late, past = "until=2999-01-01T00:00:00Z", "until=2020-01-01T00:00:00Z"
    keys.write_text(f"a:one {late}\nb:two {late}\n")
    async with world(auth={"api_keys_file": str(keys)}) as w:
        go = asyncio.Event()
        w.decode[0].script(*[scripts.after_word(go, scripts.one_more_word)] * 2)
        client, other = await streams(w, "one"), await streams(w, "two")
        take_away(w, keys, f"a:one {past}\nb:two until=3000-01-01T00:00:00Z\n")
        assert code((await ends_with(client)).removeprefix(b"data: ")) == "key_expired"
        go.set()
        assert (await ends_with(other)).endswith(b"data: [DONE]\n\n")


async def test_a_key_ends_at_its_time(keys: Path) -> None:
    """A request that runs then is ended, one time; a key without an end, and one whose end has not
    come, are left alone.
    """
    async with world(auth={"api_keys_file": str(keys)}) as w:
        w.decode[0].script(*[scripts.after_word(asyncio.Event(), scripts.one_more_word)] * 2)
        client, other = await streams(w, "one"), await streams(w, "two")
        clock = [100.0]
        ends = {digest(b"one"): 200.0, digest(b"two"): 300.0}
        watching = [
            Revoking(one.credentials.keys, one.connections, lambda: ends, lambda: clock[0])
            for one in w.workers
        ]
        for clock[0], over in ((199.0, 0), (200.0, 1), (201.0, 1)):
            for one in watching:
                one.look()
            if over:
                await w.ended()
            await asyncio.sleep(0)
            assert len(w.tasks) == 2 - over
        assert code((await ends_with(client)).removeprefix(b"data: ")) == "key_expired"
        other.close()
        await w.ended(2)


# -- operators


def held_up(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Hold up questions for engines. Returns what lets them go on, and what is set once one has
    come.
    """
    go, waits = asyncio.Event(), asyncio.Event()
    engines = AdminApi.engines

    async def late(self: AdminApi, **how: Any) -> Any:
        waits.set()
        await go.wait()
        return await engines(self, **how)

    for kind in (AdminApi, AdminApiOfAll):
        monkeypatch.setattr(kind, "engines", late)
    return go, waits


CHANGES = [("two\n", 401, "key_revoked"), ("a:one read-only\n", 403, 403)]
"""Of a file that holds the key `one`: the file behind it, and the status and the code of the
answer.
"""


@pytest.mark.parametrize(("after", "status", "why"), CHANGES, ids=["taken away", "read-only"])
async def test_an_order_whose_key_changes_does_nothing(
    keys: Path, after: str, status: int, why: object
) -> None:
    """The body of the order comes later than the change of the file."""
    async with world(auth={"admin_keys_file": str(keys)}) as w, admin(w) as api:
        client = await Client.connect(api.port)
        url = w.decode[0].url.replace("/", "%2F")
        order = request("POST", f"{BASE}/engines/{url}/drain", {"seconds": 1}, bearer("one"))
        client.send(order[:-3])
        await asyncio.sleep(0.05)
        take_away(w, keys, after)
        client.send(order[-3:])
        answer = await client.answer()
        assert (answer.status, code(answer.body)) == (status, why)
        assert not any(engine.draining for one in w.workers for engine in one.ledger.engines)
        client.close()


@pytest.mark.parametrize(("after", "status", "why"), CHANGES, ids=["taken away", "read-only"])
async def test_an_order_behind_another_request_whose_key_changes(
    keys: Path, monkeypatch: pytest.MonkeyPatch, after: str, status: int, why: object
) -> None:
    """It was read before the change, and its turn comes after it."""
    go, waits = held_up(monkeypatch)
    async with world(decode=2, auth={"admin_keys_file": str(keys)}) as w, admin(w) as api:
        client = await Client.connect(api.port)
        engine = f"{BASE}/engines/{w.decode[0].url.replace('/', '%2F')}"
        assert (
            await api.ask("POST", f"{engine}/drain", {"seconds": 60}, bearer("one"))
        ).status == 202
        listed = request("GET", f"{BASE}/engines", b"", bearer("one"))
        client.send(listed + request("POST", f"{engine}/undrain", b"", bearer("one")))
        await waits.wait()
        take_away(w, keys, after)
        go.set()
        assert (await client.answer()).status == (401 if status == 401 else 200)
        answer = await client.answer()
        assert (answer.status, code(answer.body)) == (status, why)
        assert all(
            any(ledger_engine.draining for ledger_engine in one.ledger.engines) for one in w.workers
        )
        client.close()


async def test_an_answer_is_not_given_to_a_key_that_is_taken_away(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that wait for others, as those of several workers do."""
    go, waits = held_up(monkeypatch)
    async with world(auth={"admin_keys_file": str(keys)}) as w, admin(w) as api:
        asking = asyncio.create_task(api.ask("GET", f"{BASE}/engines", b"", bearer("one")))
        await waits.wait()
        take_away(w, keys)
        go.set()
        answer = await asking
        assert (answer.status, code(answer.body)) == (401, "key_revoked")
        assert w.decode[0].url.encode() not in answer.body
