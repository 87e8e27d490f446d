"""Real engines with the notifier: which notices they send about each request's KV, when, and under
which id.
"""

# Starts two engines: P with a short lease and with worker and scheduler in separate processes, so
# that the worker's data has to be transferred; D in one process.

import asyncio
import contextlib
import json
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from pdproxy.cli.main import main
from pdproxy.wire.notices import Notice, NoticeEvent, decode
from tests.fakes.ports import free_port

from .client import Answer, ask
from .engine import MODEL, Engine
from .fleet import exchange
from .launcher import Launcher
from .shapes import CHAT, COMPLETIONS, question, story

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

LEASE = 6
"""Seconds. D pulls within one second, also on a busy machine."""
PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)


@dataclass(frozen=True)
class Pair:
    """The two engines, and where they send their notices."""

    prefill: Engine
    decode: Engine
    address: str


@pytest.fixture(scope="module")
def pair(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """P and D with the file that `pdproxy notifier` writes; warm, and already connected to each
    other.
    """
    folder = tmp_path_factory.mktemp("notifier")
    assert main(["notifier", "--out", str(folder)]) == 0
    address, env = f"tcp://127.0.0.1:{free_port()}", {"PYTHONPATH": str(folder)}
    ours = {"kv_connector_module_path": "pdproxy_nixl"}
    notify = {"pdproxy_notify": address}
    engines = []
    try:
        short = ours | {"kv_connector_extra_config": notify | {"kv_lease_duration": LEASE}}
        apart = "--distributed-executor-backend mp"
        engines.append(
            Engine.start(launcher, "notify-p", "prefill", flags=apart, kv=short, env=env)
        )
        engines.append(
            Engine.start(
                launcher,
                "notify-d",
                "decode",
                kv=ours | {"kv_connector_extra_config": notify},
                env=env,
            )
        )
        for engine in engines:
            engine.wait()
        exchange(*engines)
        yield Pair(engines[0], engines[1], address)
    finally:
        for engine in engines:
            engine.stop()


@dataclass
class Inbox:
    """All notices that arrived, with the time of each."""

    seen: list[tuple[float, Notice]] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            notice = decode(await socket.recv())
            assert notice is not None
            self.seen.append((time.monotonic(), notice))
            self.more.set()

    async def when(
        self, event: NoticeEvent, request_id: str, seconds: float = 20
    ) -> tuple[float, Notice]:
        """Wait for a notice; return its time and the notice."""
        async with asyncio.timeout(seconds):
            while True:
                for moment, notice in self.seen:
                    if notice.event is event and notice.request_id == request_id:
                        return moment, notice
                self.more.clear()
                await self.more.wait()

    def about(self, request_id: str) -> list[NoticeEvent]:
        """Return the events of a request, in order."""
        return [notice.event for _, notice in self.seen if notice.request_id == request_id]


@contextlib.asynccontextmanager
async def listening(pair: Pair) -> AsyncIterator[Inbox]:
    """Bind a proxy's socket; yield when both engines have connected, which they retry
    repeatedly.
    """
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PULL)
    socket.bind(pair.address)
    inbox = Inbox()
    task = asyncio.create_task(inbox.listen(socket))
    try:
        deadline = time.monotonic() + 30
        while not {"P", "D"} <= {notice.role for _, notice in inbox.seen}:
            assert time.monotonic() < deadline, f"only {inbox.seen} came"
            await both(pair, await prefilled(pair, _id()))
            await asyncio.sleep(0.2)
        yield inbox
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        socket.close(0)
        context.term()


@pytest.fixture
async def inbox(pair: Pair) -> AsyncIterator[Inbox]:
    """A proxy's socket for the duration of the test."""
    async with listening(pair) as inbox:
        yield inbox


async def prefilled(pair: Pair, request_id: str, chat: bool = False, prompt: str = "") -> Answer:
    """Send P's leg without a proxy."""
    text = prompt or story(request_id)
    body = {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": 1,
        "kv_transfer_params": PREFILL_PARAMS,
        "return_token_ids": True,
    }
    body |= {"messages": question(request_id)} if chat else {"prompt": text}
    path = CHAT if chat else COMPLETIONS
    answer = await ask(pair.prefill.url, path, body, {"X-Request-Id": request_id})
    assert answer.status == 200, answer.body
    return answer


async def both(pair: Pair, first: Answer, chat: bool = False, **changed: Any) -> Answer:
    """Send D's leg without a proxy, with its own id."""
    given = first.json["kv_transfer_params"] | changed
    ids = first.json["prompt_token_ids"] if chat else first.json["choices"][0]["prompt_token_ids"]
    body = {"model": MODEL, "temperature": 0, "max_tokens": 4, "kv_transfer_params": given}
    if chat:
        given["prompt_token_ids"] = ids
        body["messages"] = question("the ids count")
    else:
        body["prompt"] = ids
    return await ask(
        pair.decode.url,
        CHAT if chat else COMPLETIONS,
        body,
        {"X-Request-Id": f"client-{secrets.token_hex(4)}"},
    )


def _id() -> str:
    return f"pd-{secrets.token_hex(12)}"


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
async def test_a_request(pair: Pair, inbox: Inbox, chat: bool) -> None:
    """Ready, loaded and released arrive under the id of P's leg; ready contains everything of P's
    answer that D needs.
    """
    request_id, before = _id(), pair.decode.counters().sum("vllm:nixl_bytes_transferred_sum")
    first = await prefilled(pair, request_id, chat)
    _, ready = await inbox.when(NoticeEvent.READY, request_id)
    answer = await both(pair, first, chat)
    assert answer.status == 200, answer.body
    _, loaded = await inbox.when(NoticeEvent.LOADED, request_id)
    _, released = await inbox.when(NoticeEvent.RELEASED, request_id)
    assert sorted(event.value for event in inbox.about(request_id)) == [
        "loaded",
        "ready",
        "released",
    ]
    assert inbox.about(request_id)[0] is NoticeEvent.READY

    given = first.json["kv_transfer_params"]
    ids = first.json["prompt_token_ids"] if chat else first.json["choices"][0]["prompt_token_ids"]
    usage = first.json["usage"]
    assert ready.params is not None
    assert json.loads(ready.params) == given
    assert ready.token_ids is not None
    assert json.loads(ready.token_ids) == ids
    assert ready.tokens == usage["prompt_tokens"] == loaded.tokens
    assert ready.cached_tokens == usage["prompt_tokens_details"]["cached_tokens"]
    if chat:  # completions don't report it
        assert ready.created_cache_tokens == usage["prompt_tokens_details"]["created_cache_tokens"]
    assert ready.blocks == loaded.blocks == len(given["remote_block_ids"][0])
    assert {notice.remote_request_id for notice in (ready, loaded, released)} == {
        given["remote_request_id"]
    }
    assert (ready.role, loaded.role, released.role) == ("P", "D", "P")
    assert ready.engine_id == released.engine_id == given["remote_engine_id"] != loaded.engine_id
    assert loaded.seconds is not None
    assert 0 < loaded.seconds < 20
    assert released.seconds is not None
    assert 0 < released.seconds < LEASE
    await asyncio.sleep(0.5)  # the engine updates its own counters in a later step
    assert (
        loaded.moved_bytes
        == pair.decode.counters().sum("vllm:nixl_bytes_transferred_sum") - before
        > 0
    )


async def test_ready_comes_before_the_answer(
    pair: Pair, inbox: Inbox, record_property: Callable[[str, object], None]
) -> None:
    """The notice arrives before P's answer, which the API server still has to write."""
    ahead = []
    for _ in range(50):
        request_id = _id()
        sent = time.monotonic()
        first = await prefilled(pair, request_id)
        moment, _ = await inbox.when(NoticeEvent.READY, request_id)
        ahead.append((sent + first.first_byte - moment) * 1000)
        await both(pair, first)
    quartiles = statistics.quantiles(ahead, n=4)
    record_property("ready_ahead_of_answer_ms", quartiles)
    print(
        f"ready is ahead of P's answer by {quartiles} ms (quartiles), {min(ahead)} to {max(ahead)}"
    )
    assert quartiles[1] > 0


async def test_found_in_decodes_own_cache(pair: Pair, inbox: Inbox) -> None:
    """The same prompt again: D pulls almost nothing, and still reports that it has the KV."""
    text, notices = story(secrets.token_hex(6)), []
    for _ in range(2):
        request_id = _id()
        await both(pair, await prefilled(pair, request_id, prompt=text))
        notices.append((await inbox.when(NoticeEvent.LOADED, request_id))[1])
        await inbox.when(NoticeEvent.RELEASED, request_id)
    cached = [one.cached_tokens or 0 for one in notices]
    assert cached == [0, (notices[0].tokens or 0) - (notices[1].tokens or 0)]
    assert cached[1] > 0


async def test_release(pair: Pair, inbox: Inbox) -> None:
    """D refuses a request with `max_tokens` 0: P's blocks are released without being loaded."""
    request_id = _id()
    first = await prefilled(pair, request_id)
    body = {
        "model": MODEL,
        "prompt": "x",
        "max_tokens": 0,
        "kv_transfer_params": first.json["kv_transfer_params"],
    }
    assert (await ask(pair.decode.url, COMPLETIONS, body)).status == 400
    await inbox.when(NoticeEvent.RELEASED, request_id)
    assert inbox.about(request_id) == [NoticeEvent.READY, NoticeEvent.RELEASED]


async def test_an_expired_lease(pair: Pair, inbox: Inbox) -> None:
    """The lease ends, and P reports it at once: D would pull other KV now."""
    request_id = _id()
    await prefilled(pair, request_id)
    began, _ = await inbox.when(NoticeEvent.READY, request_id)
    ended, expired = await inbox.when(NoticeEvent.EXPIRED, request_id, LEASE + 15)
    assert inbox.about(request_id) == [NoticeEvent.READY, NoticeEvent.EXPIRED]
    assert LEASE - 0.5 < ended - began < LEASE + 5
    assert expired.seconds is not None
    assert abs(expired.seconds - (ended - began)) < 2
    assert expired.reason == "1 worker(s)"


async def test_a_pull_that_fails(pair: Pair, inbox: Inbox) -> None:
    """D can't reach P: a failed notice, a 500, and later P's lease ends."""
    request_id = _id()
    first = await prefilled(pair, request_id)
    answer = await both(pair, first, remote_engine_id="nobody", remote_port=free_port())
    assert answer.status == 500, answer.body
    _, failed = await inbox.when(NoticeEvent.FAILED, request_id)
    assert (failed.role, failed.remote_request_id) == (
        "D",
        first.json["kv_transfer_params"]["remote_request_id"],
    )
    await inbox.when(NoticeEvent.EXPIRED, request_id, LEASE + 15)
    assert inbox.about(request_id) == [NoticeEvent.READY, NoticeEvent.FAILED, NoticeEvent.EXPIRED]


async def test_an_abandoned_prefill(pair: Pair, inbox: Inbox) -> None:
    """After a client has left during the prefill, a notice shows that P holds nothing, or contains
    the unread handle.
    """
    seen = set()
    for delay in (0.005, 0.01, 0.02, 0.03, 0.05, 0.08):
        request_id = _id()
        asked = asyncio.create_task(
            prefilled(pair, request_id, prompt=story(secrets.token_hex(6)) * 6)
        )
        await asyncio.sleep(delay)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        deadline = time.monotonic() + 3
        while not inbox.about(request_id) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for event in inbox.about(request_id):
            assert event in {NoticeEvent.FAILED, NoticeEvent.READY}
            seen.add(event)
            if event is NoticeEvent.READY:
                _, ready = await inbox.when(NoticeEvent.READY, request_id)
                assert ready.params is not None
                body = {
                    "model": MODEL,
                    "prompt": "x",
                    "max_tokens": 0,
                    "kv_transfer_params": json.loads(ready.params),
                }
                assert (await ask(pair.decode.url, COMPLETIONS, body)).status == 400
                await inbox.when(NoticeEvent.RELEASED, request_id)
    assert seen


async def test_without_a_listener(pair: Pair) -> None:
    """Engines serve as usual; a later listener gets all further notices, and the number of dropped
    ones.
    """
    for _ in range(5):
        assert (await both(pair, await prefilled(pair, _id()))).status == 200
    async with listening(pair) as inbox:
        for role in ("P", "D"):
            first = next(notice for _, notice in inbox.seen if notice.role == role)
            # a notice that was in transit when its reader left is lost, and not counted
            assert first.dropped >= 3
        assert [notice.dropped for _, notice in inbox.seen].count(0) == len(inbox.seen) - 2
    assert "pdproxy: " in (
        logs := Path(pair.prefill.log).read_text() + Path(pair.decode.log).read_text()
    )
    assert "failed; if it does again" not in logs  # vLLM itself logs what failed in vLLM
