"""Bodies that mean harm by what is in them: refused by a bound that is named, or read in another
process; never read at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import weakref
from collections.abc import Hashable
from typing import Any, ClassVar

import pytest

from pdproxy.kit.process_pool import ProcessPool
from pdproxy.observe.events import ServedAlone
from pdproxy.serving.dispatch.exchange import Exchange
from pdproxy.serving.request import body_reader, prompt_list
from pdproxy.wire import body_bounds
from pdproxy.wire.body_bounds import is_quick
from tests.fakes import answers, scripts
from tests.fakes.engine import Reply, prefill
from tests.fakes.world import CHAT, COMPLETIONS, PROMPT, TEXT, World, chat, completion, until, world

MIB = 1 << 20
MANY = 700_000


def many(field: str, item: str, count: int = MANY, *, closed: str = "[]") -> bytes:
    made = ",".join([item] * count)
    body: dict[str, Any] = completion(**{field: "@"})
    return json.dumps(body).replace('"@"', closed[0] + made + closed[1]).encode()


REFUSED = {
    "short prompts": (COMPLETIONS, lambda: many("prompt", '"a"'), "500000 strings"),
    "more prompts than are allowed": (
        COMPLETIONS,
        lambda: many("prompt", '"a"', 5000),
        "2048 prompts",
    ),
    "more of them in a large body": (
        COMPLETIONS,
        lambda: many("prompt", f'"{"a" * 300}"', 5000),
        "2048 prompts",
    ),
    "prompts of ids": (COMPLETIONS, lambda: many("prompt", "[1,2]", 5000), "2048 prompts"),
    "empty arrays": (COMPLETIONS, lambda: many("response_format", "[]"), "500000 strings"),
    "empty arrays that nobody reads": (COMPLETIONS, lambda: many("z", "[]"), "500000 strings"),
    "empty messages": (CHAT, lambda: many("messages", "{}"), "500000 strings"),
    "empty parts": (
        CHAT,
        lambda: b'{"messages":[{"content":[' + b"{}," * MANY + b"{}]}]}",
        "500000 strings",
    ),
    "many fields": (
        CHAT,
        lambda: b"{" + b",".join(b'"%d":1' % n for n in range(MANY)) + b"}",
        "500000 strings",
    ),
    "some fields": (
        CHAT,
        lambda: b"{" + b",".join(b'"%d":1' % n for n in range(90_000)) + b"}",
        "1024 fields",
    ),
    "many arguments": (
        COMPLETIONS,
        lambda: b'{"vllm_xargs":{' + b",".join(b'"%d":1' % n for n in range(MANY)) + b"}}",
        "500000 strings",
    ),
    "NaN": (COMPLETIONS, lambda: many("z", "NaN"), "500000 values"),
    "UTF-16": (COMPLETIONS, lambda: many("z", "[]").decode().encode("utf-16"), "500000 strings"),
    "embeddings": ("/v1/embeddings", lambda: many("input", '"a"', 5000), "2048 prompts"),
    "many fields of a passed body": (
        "/v1/responses",
        lambda: b"{" + b",".join(b'"%d":1' % n for n in range(MANY)) + b"}",
        "500000 strings",
    ),
}


@pytest.fixture(autouse=True)
def parsed_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of bodies that the event loop has parsed, and nothing that might take long among
    them.
    """
    seen: list[int] = []
    for name in ("parse_if_quick", "read_if_quick"):
        read = getattr(body_reader, name)

        def reading(kind: Any, body: bytes, *rest: Any, read: Any = read) -> Any:
            found = read(kind, body, *rest)
            if found is not None:
                seen.append(len(body))
                assert is_quick(body)
            return found

        monkeypatch.setattr(body_reader, name, reading)
    return seen


@pytest.mark.parametrize("name", REFUSED)
async def test_is_refused_by_its_number(name: str, parsed_here: list[int]) -> None:
    """With 400 and the bound, before an engine is asked or an exchange made; the next request is
    served.
    """
    path, body, words = REFUSED[name]
    async with world() as w:
        answer = await w.ask(path, body())
        assert answer.status == 400
        assert f"more than {words}" in answer.json["error"]["message"]
        assert not any(engine.requests for engine in w.engines)
        assert (await w.ended()).legs == []
        assert w.proxy.bodies.workers.idle <= 1
        assert (await w.ask(COMPLETIONS, completion())).json["choices"][0]["text"] == TEXT
        assert max(parsed_here) < body_bounds.SMALL


@pytest.mark.parametrize("size", [MIB, 16 * MIB])
async def test_an_honest_large_body_is_served_byte_for_byte(size: int) -> None:
    """Images of megabytes reach the engine as they came, read by one process, one after the
    other.
    """
    image = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + "iVBOR/w0" * (size // 8)},
        "uuid": "of the client",  # one engine gets it whole
    }
    content = [image, {"type": "text", "text": "\u0416\\?"}]
    body = json.dumps(
        chat(messages=[{"role": "user", "content": content}], seed=7), separators=(",", ":")
    ).encode()
    async with world() as w:
        w.decode[0].default = scripts.whole(answers.whole(True, [1, 2], TEXT, 2))
        for _ in range(3):
            answer = await w.ask(CHAT, body)
            assert answer.status == 200
        assert [event.reason for event in w.events(ServedAlone)] == ["non_text"] * 3
        assert [request.body for request in w.decode[0].requests] == [body] * 3
        assert (w.proxy.bodies.workers.busy, w.proxy.bodies.workers.idle) == (0, 1)
        assert w.metric("pdproxy_body_readers", state="idle") == 1


async def test_a_large_prompt_is_split_as_a_small_one() -> None:
    """Both engines get the whole of it."""
    prompt = PROMPT * (body_bounds.LARGE // len(PROMPT) + 1)
    async with world() as w:
        await w.ask(COMPLETIONS, completion(prompt=prompt))
        assert w.prefill[0].requests[0].json["prompt"] == prompt


async def test_a_list_of_long_prompts_of_ids_is_served() -> None:
    """Numbers don't count as items: what is large but honest is one exchange per prompt."""
    ids = [[*range(300, 300 + 16), *([7] * 8_000)] for _ in range(40)]
    body = completion(prompt=ids)
    assert not is_quick(json.dumps(body).encode()) or len(json.dumps(body)) < body_bounds.LARGE
    async with world() as w:
        answer = await w.ask(COMPLETIONS, body)
        assert answer.status == 200
        assert [choice["index"] for choice in answer.json["choices"]] == list(range(40))
        assert [request.json["prompt"] for request in w.prefill[0].requests] == ids
        assert all(request.json["prompt"] in ids for request in w.decode[0].requests)


class _Counted(Exchange):
    """An exchange that can be counted."""

    __slots__ = ("__weakref__",)
    alive: ClassVar[weakref.WeakSet[Exchange]] = weakref.WeakSet()
    most = 0
    made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _Counted.alive.add(self)
        _Counted.made += 1
        _Counted.most = max(_Counted.most, len(_Counted.alive))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lists_exchanges_are_made_as_they_are_run(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it is, a few exist at once; choices are in order and each prompt is counted."""
    monkeypatch.setattr("pdproxy.serving.request.prompt_list.Exchange", _Counted)
    _Counted.alive, _Counted.most, _Counted.made = weakref.WeakSet(), 0, 0
    prompts = [f"{PROMPT}{n}" for n in range(100)]
    async with world() as w:
        answer = await w.ask(COMPLETIONS, completion(prompt=prompts, max_tokens=1, stream=stream))
        assert answer.status == 200
        if stream:
            assert answer.events[-1] == answers.DONE
            assert {
                json.loads(event[6:])["choices"][0]["index"] for event in answer.events[:-1]
            } == set(range(100))
        else:
            assert [choice["index"] for choice in answer.json["choices"]] == list(range(100))
        assert _Counted.made == 100
        assert _Counted.most <= prompt_list.PROMPTS_AT_ONCE
        report = await w.ended()
        assert len(report.legs) == 100
        assert report.completion_tokens == 100


async def test_a_list_that_fails_makes_no_more_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were not begun never are."""
    monkeypatch.setattr("pdproxy.serving.request.prompt_list.Exchange", _Counted)
    _Counted.alive, _Counted.most, _Counted.made = weakref.WeakSet(), 0, 0

    async def refuse_third(reply: Reply) -> None:
        if reply.request.json["prompt"].endswith("#2"):
            await reply.whole(
                b'{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}', 400
            )
        else:
            await prefill(reply)

    async with world() as w:
        w.prefill[0].default = w.decode[0].default = refuse_third
        answer = await w.ask(COMPLETIONS, completion(prompt=[f"{PROMPT}#{n}" for n in range(500)]))
        assert answer.status == 400
        assert _Counted.made < 100
        assert len((await w.ended()).legs) == _Counted.made


class _Asleep(ProcessPool):
    """Readers whose work never ends."""

    async def ask(
        self, asker: Hashable, question: bytes, data: bytes | bytearray, end: float
    ) -> bytes | memoryview:
        return await super().ask(asker, b"sleep", data, end)


def asleep(monkeypatch: pytest.MonkeyPatch, w: World, waiting: int) -> ProcessPool:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    return _Asleep(
        "tests.fakes.slow_worker",
        max_processes=1,
        waiting=waiting,
        memory=512 * MIB,
        idle=60,
        clock=w.proxy.clock,
    )


LARGE = {"prompt": "x" * body_bounds.LARGE}


async def test_bodies_that_wait_to_be_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many gets a 503 and when to come again; small ones are served meanwhile; who leaves
    frees the place in time.
    """
    async with world(deadlines={"read_body": 5}) as w:
        readers = w.proxy.bodies.workers = asleep(monkeypatch, w, waiting=2)
        clients = [await w.client() for _ in range(3)]
        for client in clients:
            client.post(COMPLETIONS, completion(**LARGE))
        await until(lambda: (readers.busy, readers.waiting) == (1, 2))
        answer = await w.ask(COMPLETIONS, completion(**LARGE))
        assert (answer.status, answer.header("retry-after")) == (503, "1")
        assert (await w.ask(COMPLETIONS, completion())).json["choices"][0]["text"] == TEXT
        for client in clients:
            client.close()
        await until(lambda: (readers.busy, readers.waiting) == (0, 0))
        await until(lambda: w.body_bytes == 0)


async def test_a_body_is_read_in_time_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the deadline the process is killed, the client gets a 503, the wait is counted."""
    async with world(deadlines={"read_body": 0.3}) as w:
        readers = w.proxy.bodies.workers = asleep(monkeypatch, w, waiting=2)
        found = await asyncio.gather(*(w.ask(COMPLETIONS, completion(**LARGE)) for _ in range(2)))
        assert [(answer.status, answer.header("retry-after")) for answer in found] == [
            (503, "1")
        ] * 2
        assert w.metric("pdproxy_deadline_total", wait="read_body") == 2
        assert readers.waiting == 0
        await until(lambda: readers.busy == 0)
        await readers.close()
