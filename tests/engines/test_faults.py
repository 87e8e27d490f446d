"""Engines that die or freeze at the worst moments, and what a client sees of it: the right answer, or an honest error soon.

Each test restarts what an earlier one killed (a few seconds an engine) and runs a proxy of its own with short deadlines.
A prompt that was tried twice may be cached on P, so cached tokens aren't compared here.
"""

import asyncio
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .client import Answer, Progress, ask
from .compare import differs
from .engine import MODEL, Engine
from .fleet import Fleet
from .proxy import Proxy
from .shapes import COMPLETIONS, USAGE, story

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

BETWEEN_TOKENS, FIRST_TOKEN, PREFILL = 3.0, 15.0, 15.0
SETTINGS = {
    "deadlines": {
        "connect": 2,
        "prefill": PREFILL,
        "first_token": FIRST_TOKEN,
        "between_tokens": BETWEEN_TOKENS,
        "drain": 5,
    }
}
START = Callable[[list[Engine], list[Engine]], Proxy]


@pytest.fixture
def serve(fleet: Fleet, tmp_path: Path) -> Iterator[START]:
    """Start proxies in front of engines that are all well; the proxies end with the test."""
    fleet.heal()
    started: list[Proxy] = []

    def start(prefills: list[Engine], decodes: list[Engine]) -> Proxy:
        started.append(Proxy.start(prefills, decodes, tmp_path, settings=SETTINGS))
        return started[-1]

    yield start
    for proxy in started:
        assert proxy.stop() == 0, proxy.tail()


def _body(**fields: Any) -> dict[str, Any]:
    base = {"model": MODEL, "prompt": story(secrets.token_hex(6)), "temperature": 0, "max_tokens": 12}
    return base | fields


async def _prefilled(engines: list[Engine], before: list[float]) -> Engine:
    """The engine that has just computed a prompt and finished with it."""
    deadline = time.monotonic() + PREFILL
    while time.monotonic() < deadline:
        for engine, old in zip(engines, before, strict=True):
            if engine.counters().sum("vllm:request_success_total") > old:
                return engine
        await asyncio.sleep(0.02)
    raise AssertionError("no prefill engine finished the prompt")


def _successes(engines: list[Engine]) -> list[float]:
    return [engine.counters().sum("vllm:request_success_total") for engine in engines]


def _broke_honestly(plain: Answer, seen: Answer) -> None:
    """A stream that ended in an error event: what came before is right, nothing claims success after it."""
    assert (seen.status, seen.streamed) == (200, True)
    assert "error" in seen.chunks[-1], seen.events[-3:]
    error = seen.chunks[-1]["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["code"] in {500, 502, 503, 504}
    assert "[DONE]" not in seen.events
    words = [chunk for chunk in seen.chunks[:-1] if chunk["choices"]]
    assert words
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in words)
    assert plain.text.startswith("".join(chunk["choices"][0]["text"] for chunk in words))


@pytest.mark.parametrize("fields", [{}, USAGE], ids=["whole", "streamed"])
async def test_prefill_killed_between_the_legs(fleet: Fleet, serve: START, fields: dict[str, Any]) -> None:
    """P dies with the KV before D has fetched it: the client gets the whole right answer by way of the other P."""
    proxy = serve(fleet.prefills, fleet.decodes[:1])
    body, decode = _body(**fields), fleet.decodes[0]
    plain = await ask(fleet.plain.url, COMPLETIONS, body)
    await ask(proxy.url, COMPLETIONS, _body())
    before = _successes(fleet.prefills)
    decode.signal(signal.SIGSTOP)  # D's leg is accepted by the kernel and not answered
    try:
        asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, body))
        victim = await _prefilled(fleet.prefills, before)
        await asyncio.sleep(0.1)  # the proxy has sent D's leg
        victim.kill()
    finally:
        decode.signal(signal.SIGCONT)
    seen = await asked
    assert not differs(plain, seen, strict=False, warm=True)
    assert seen.seconds < FIRST_TOKEN + 5


async def test_prefill_killed_before(fleet: Fleet, serve: START) -> None:
    """P is gone and the proxy doesn't know yet: every client is served by the other P. Once P is back it works again."""
    proxy = serve(fleet.prefills, fleet.decodes)
    bodies = [_body(max_tokens=5) for _ in range(6)]
    plain = [await ask(fleet.plain.url, COMPLETIONS, body) for body in bodies]
    fleet.prefills[0].kill()
    seen = await asyncio.gather(*(ask(proxy.url, COMPLETIONS, body) for body in bodies))
    assert [differs(one, two, warm=True) for one, two in zip(plain, seen, strict=True)] == [""] * len(bodies)
    assert max(answer.seconds for answer in seen) < 10

    await asyncio.to_thread(fleet.heal)
    before = _successes(fleet.prefills[:1])
    deadline = time.monotonic() + 30
    while _successes(fleet.prefills[:1]) == before:
        assert time.monotonic() < deadline, "a restarted P gets no work"
        body = _body(max_tokens=3)
        assert not differs(await ask(fleet.plain.url, COMPLETIONS, body), await ask(proxy.url, COMPLETIONS, body))


async def test_decode_killed_before_its_first_token(fleet: Fleet, serve: START) -> None:
    """D freezes with a request and dies: the other D answers it, and nobody sees more than a delay."""
    proxy = serve(fleet.prefills, fleet.decodes)
    bodies = [_body(**USAGE) for _ in range(2)]  # least load gives one to each D
    plain = [await ask(fleet.plain.url, COMPLETIONS, body) for body in bodies]
    victim = fleet.decodes[0]
    victim.signal(signal.SIGSTOP)
    asked = [asyncio.create_task(ask(proxy.url, COMPLETIONS, body)) for body in bodies]
    done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == len(waiting) == 1, "both were answered: none of them went to the frozen D"
    victim.kill()
    killed = time.monotonic()
    seen = await asyncio.gather(*asked)
    assert time.monotonic() - killed < 10
    assert [differs(one, two, warm=True) for one, two in zip(plain, seen, strict=True)] == ["", ""]


async def test_decode_killed_mid_stream(fleet: Fleet, serve: START) -> None:
    """The only D dies while it streams: at once an error event in OpenAI's form, then the end, and no [DONE]."""
    proxy = serve(fleet.prefills[:1], fleet.decodes[1:])
    body = _body(stream=True, ignore_eos=True, max_tokens=400)
    plain = await ask(fleet.plain.url, COMPLETIONS, body)
    progress = Progress(events=5)
    asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, body, progress=progress))
    await progress.wait()
    fleet.decodes[1].kill()
    killed = time.monotonic()
    _broke_honestly(plain, await asked)
    assert time.monotonic() - killed < 2


@pytest.mark.parametrize("end", [Engine.kill, Engine.terminate], ids=["killed", "terminated"])
async def test_decode_ends_before_the_whole_answer(fleet: Fleet, serve: START, end: Callable[[Engine], None]) -> None:
    """Nothing of an answer that isn't streamed has been sent when D dies: the other D gives all of it.

    A terminated engine may answer 200 with the half it has and `finish_reason: "abort"`, or never: it has closed its port
    and leaves the connection open.
    """
    proxy = serve(fleet.prefills, fleet.decodes)
    bodies = [_body(ignore_eos=True, max_tokens=150) for _ in range(2)]
    plain = [await ask(fleet.plain.url, COMPLETIONS, body) for body in bodies]
    asked = [asyncio.create_task(ask(proxy.url, COMPLETIONS, body)) for body in bodies]
    deadline = time.monotonic() + PREFILL
    while not fleet.decodes[0].counters().sum("vllm:num_requests_running"):
        assert time.monotonic() < deadline, "the first D got no work"
        await asyncio.sleep(0.02)
    end(fleet.decodes[0])
    async with asyncio.timeout(60):
        seen = await asyncio.gather(*asked)
    assert [differs(one, two, warm=True) for one, two in zip(plain, seen, strict=True)] == ["", ""]


async def test_decode_terminated_mid_stream(fleet: Fleet, serve: START) -> None:
    """However vLLM leaves an open stream behind at SIGTERM, the client sees an error event.

    It is a race with three ends, all seen: `finish_reason: "abort"` and [DONE] as if it were a success; an error event;
    or nothing more at all, and the deadline between tokens has to end it.
    """
    proxy = serve(fleet.prefills[:1], fleet.decodes[:1])
    body = _body(stream=True, ignore_eos=True, max_tokens=400)
    plain = await ask(fleet.plain.url, COMPLETIONS, body)
    progress = Progress(events=5)
    asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, body, progress=progress))
    await progress.wait()
    fleet.decodes[0].terminate()
    terminated = time.monotonic()
    _broke_honestly(plain, await asked)
    assert time.monotonic() - terminated < BETWEEN_TOKENS + 2


async def test_decode_frozen_mid_stream(fleet: Fleet, serve: START) -> None:
    """The only D freezes while it streams: the deadline between tokens turns silence into an error event, not sooner."""
    proxy = serve(fleet.prefills[:1], fleet.decodes[1:])
    body = _body(stream=True, ignore_eos=True, max_tokens=400)
    plain = await ask(fleet.plain.url, COMPLETIONS, body)
    progress = Progress(events=5)
    asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, body, progress=progress))
    await progress.wait()
    fleet.decodes[1].signal(signal.SIGSTOP)
    frozen = time.monotonic()
    try:
        _broke_honestly(plain, await asked)
    finally:
        fleet.decodes[1].signal(signal.SIGCONT)
    assert BETWEEN_TOKENS - 0.5 < time.monotonic() - frozen < BETWEEN_TOKENS + 2


async def test_refusal_at_first_contact(fleet: Fleet, serve: START) -> None:
    """The first thing a fresh D gets is a request that it refuses: P's blocks are free soon all the same.

    Before D has pulled from a P once, what it has to tell P of a refused request waits for a later step of D.
    """
    await asyncio.to_thread(fleet.restart, "d1", meet=False)
    prefill = fleet.prefills[0]
    proxy = serve([prefill], fleet.decodes[1:])
    answer = await ask(proxy.url, COMPLETIONS, _body(structured_outputs={"regex": "[unclosed"}))
    assert answer.status == 400
    deadline = time.monotonic() + 5
    while held := prefill.counters().sum("vllm:kv_cache_usage_perc"):
        assert time.monotonic() < deadline, f"P still holds {held:.1%} of its KV"
        await asyncio.sleep(0.1)


async def test_prefill_frozen(fleet: Fleet, serve: START) -> None:
    """P freezes with the prompt: after the prefill deadline the other P takes it, and the frozen one is well when it wakes."""
    proxy = serve(fleet.prefills, fleet.decodes)
    bodies = [_body() for _ in range(2)]
    plain = [await ask(fleet.plain.url, COMPLETIONS, body) for body in bodies]
    victim = fleet.prefills[0]
    victim.signal(signal.SIGSTOP)
    try:
        seen = await asyncio.gather(*(ask(proxy.url, COMPLETIONS, body) for body in bodies))
    finally:
        victim.signal(signal.SIGCONT)
    assert [differs(one, two, warm=True) for one, two in zip(plain, seen, strict=True)] == ["", ""]
    assert max(answer.seconds for answer in seen) < PREFILL + 10
